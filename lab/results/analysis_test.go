package results

import (
	"math"
	"reflect"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

func near(t testing.TB, what string, got, want float64) {
	t.Helper()
	if math.Abs(got-want) > 1e-9*max(1, math.Abs(want)) {
		t.Errorf("%s: %g, want %g", what, got, want)
	}
}

func analyze(t *testing.T, files ...*File) *Analysis {
	t.Helper()
	a, err := Analyze(DefaultLimit, files...)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// Every figure of a cell, from runs whose answers are known.
func TestAnalyze(t *testing.T) {
	var runs []Run
	for rep, comm := range []float64{0.2, 0.22, 0.21} {
		runs = append(runs, steady("even", "switch", rep, comm, 0.1), steady("even", "tcp", rep, 2*comm, 0.1))
	}
	runs = append(runs, Run{Scenario: "slow", Mode: "gloo", Skipped: "no torch"}, Run{Scenario: "slow", Mode: "gloo", Repetition: 1, Skipped: "no torch"},
		Run{Scenario: "even", Mode: "ring", Failed: "rank 1 died"})
	a := analyze(t, &File{Name: "a", Sessions: []Session{{header("tcp", "ring", "gloo", "switch", "server"), runs}}})
	if want := []string{"tcp", "ring", "gloo", "switch"}; !reflect.DeepEqual(a.Modes, want) { // nobody tried server
		t.Fatalf("modes %v, want %v", a.Modes, want)
	}
	if want := []Gap{{"slow", "gloo", 2, true, "no torch"}, {"even", "ring", 1, false, "rank 1 died"}}; !reflect.DeepEqual(a.Gaps, want) {
		t.Errorf("gaps %v", a.Gaps)
	}
	if a.Finished != 6 || a.Limited != 0 || a.Repetitions != 3 || len(a.Scenarios) != 1 {
		t.Fatalf("%+v", a)
	}
	sc := a.Scenarios[0]
	if sc.Lab != "netns, engine, native XDP" || !reflect.DeepEqual(sc.Seeds, []uint64{1, 2, 3}) {
		t.Errorf("lab %q, seeds %v", sc.Lab, sc.Seeds)
	}
	job := sc.Jobs[0]
	if job.Name != "train" || job.Ranks != 4 || job.Rounds != 5 || job.Buckets != 2 || job.Values != 1000 {
		t.Errorf("job %+v", job)
	}
	if job.Cells[1].Runs != 0 || job.Cells[2].Runs != 0 {
		t.Error("modes without a run have figures")
	}
	tcp, base := job.Cells[0], job.Cells[3]
	near(t, "mean", tcp.Comm.Mean, 0.42)
	near(t, "smallest", tcp.Comm.Smallest, 0.4)
	near(t, "greatest", tcp.Comm.Greatest, 0.44)
	near(t, "samples", float64(tcp.Comm.N), 3*4*5)
	near(t, "floor", tcp.Floor.Mean, 0.1)
	near(t, "round", tcp.Round.Mean, 0.52)
	near(t, "exposed", tcp.Exposed, 0.42)
	near(t, "ratio", tcp.OfBase.Ratio, 2)
	near(t, "low", tcp.OfBase.Low, 2) // what differs between repetitions is in both runs of a pair
	near(t, "high", tcp.OfBase.High, 2)
	near(t, "base", base.OfBase.Ratio, 1)
	near(t, "of the floor", base.OfFloor.Ratio, math.Cbrt(2*2.2*2.1))
	near(t, "span", tcp.Span.Ratio, math.Cbrt(0.5*0.54*0.52)/0.2)
	near(t, "goodput", tcp.Goodput, 32*1000/0.42)
	near(t, "rate", tcp.Rate, 1/0.52)
	near(t, "packets", tcp.Packets, 100)
	near(t, "resends", tcp.Resends, 0.01)
	near(t, "late", tcp.Late, 0.1)
	near(t, "error", tcp.Error, 1e-8)
	if tcp.Slots != 64 || tcp.Memory != 4096 || len(tcp.Open) != 1 || !reflect.DeepEqual(job.Best, []int{3}) {
		t.Errorf("slots %d, memory %d, open %v, best %v", tcp.Slots, tcp.Memory, tcp.Open, job.Best)
	}
	cost := sc.Costs[0]
	near(t, "switch", cost.PerGB["switch"], 0.002/80e3*1e9)
	near(t, "total", cost.Total(), 0.003/80e3*1e9)
	near(t, "BPF", cost.BPF, 0.0005/80e3*1e9)
	near(t, "partials", cost.Partials, 10)
	near(t, "busiest", cost.Busiest, 0.4)
	if cost.Runs != 3 || cost.Limited != 0 {
		t.Errorf("%+v", cost)
	}
}

// Exposed communication is beside the slowest rank, and negative where nobody waits for it.
func TestExposed(t *testing.T) {
	r := steady("even", "server/async", 0, 0.05, 0.01)
	r.Jobs[0].Compute[2] = []float64{0.4, 0.4, 0.4, 0.4, 0.4}
	a := analyze(t, &File{Sessions: []Session{{header("server/async"), []Run{r}}}})
	near(t, "exposed", a.Scenarios[0].Jobs[0].Cells[0].Exposed, 0.1+0.05-0.4)
}

// Rounds that a rank skipped are in no times, neither its own nor those that others are compared with.
func TestSkipped(t *testing.T) {
	var runs []Run
	for rep := range 2 {
		r := steady("even", "hybrid/quorum", rep, 0.05, 0.01)
		j := &r.Jobs[0]
		j.Skipped = [][]int{nil, nil, {1, 4}}
		for n := range 5 {
			j.Compute[2][n] = 0.4
		}
		for _, n := range j.Skipped[2] {
			j.Comm[2][n], j.Round[2][n], j.Compute[2][n], j.Floor[2][n] = 7, 7, 9, 7
		}
		runs = append(runs, steady("even", "switch", rep, 0.1, 0.01), r)
	}
	a := analyze(t, &File{Sessions: []Session{{header("switch", "hybrid/quorum"), runs}}})
	c := a.Scenarios[0].Jobs[0].Cells[1]
	near(t, "samples", float64(c.Comm.N), 2*18)
	near(t, "communication", c.Comm.Mean, 0.05)
	near(t, "greatest round", c.Round.Greatest, 0.15)
	near(t, "ratio", c.OfBase.Ratio, 0.5)
	near(t, "of the floor", c.OfFloor.Ratio, 5)
	near(t, "skipped", c.Skipped, 0.1)
	near(t, "exposed", c.Exposed, 0.15-(3*4*0.4+2*3*0.1)/18) // the slowest is the third rank in three rounds of five
}

// Runs that were limited are left out as long as two others are there, and carry no claim when they are not.
func TestLimited(t *testing.T) {
	for limited := range 5 {
		var runs []Run
		for rep := range 4 {
			slow := steady("even", "tcp", rep, 0.4, 0.1)
			if rep < limited {
				slow = steady("even", "tcp", rep, 40, 0.1)
				slow.Usage.Busiest = 0.95
			}
			runs = append(runs, slow, steady("even", "switch", rep, 0.2+0.001*float64(rep), 0.1))
		}
		a := analyze(t, &File{Sessions: []Session{{header("switch", "tcp"), runs}}})
		cell, cost := a.Scenarios[0].Jobs[0].Cells[1], a.Scenarios[0].Costs[1]
		if a.Limited != limited || cost.Limited != limited || cost.Runs != 4 {
			t.Errorf("%d limited: %d of all, %d of tcp's %d", limited, a.Limited, cost.Limited, cost.Runs)
		}
		want := limited > 2
		if cell.Limited != want || cell.OfBase.Limited != want || cell.OfFloor.Limited != want {
			t.Errorf("%d limited: %v", limited, cell.Limited)
		}
		if !want && (cell.Runs != 4-limited || cell.OfBase.Pairs != 4-limited || cell.Comm.Greatest > 1) {
			t.Errorf("%d limited: %d runs, %d pairs, %g", limited, cell.Runs, cell.OfBase.Pairs, cell.Comm.Greatest)
		}
		if want && cell.OfBase.AtMost(1) != NotResolved {
			t.Errorf("%d limited: a claim", limited)
		}
	}
}

// Only runs of the same session and repetition are pairs, and other labs' runs are of another row.
func TestPairs(t *testing.T) {
	one := []Run{steady("even", "switch", 0, 0.2, 0.1), steady("even", "tcp", 0, 0.3, 0.1), steady("even", "switch", 1, 0.2, 0.1)}
	two := []Run{steady("even", "tcp", 1, 9, 0.1), steady("even", "switch", 0, 0.4, 0.1), steady("even", "tcp", 0, 0.7, 0.1)}
	h := header("switch", "tcp")
	a := analyze(t, &File{Sessions: []Session{{h, one}}}, &File{Sessions: []Session{{h, two}}})
	e := a.Scenarios[0].Jobs[0].Cells[1].OfBase
	near(t, "pairs", float64(e.Pairs), 2)
	near(t, "ratio", e.Ratio, math.Sqrt(1.5*1.75))

	other := h
	other.Switch = "simple_switch_grpc"
	a = analyze(t, &File{Sessions: []Session{{h, one}, {other, two}}})
	if len(a.Scenarios) != 2 || a.Scenarios[0].Jobs[0].Cells[1].OfBase.Pairs != 1 || a.Scenarios[1].Lab != "netns, simple_switch_grpc, native XDP" {
		t.Errorf("%+v", a.Scenarios)
	}

	other = header("switch", "tcp")
	other.Scenarios[0].YAML = "name: even\nseed: 2\n"
	if _, err := Analyze(DefaultLimit, &File{Sessions: []Session{{h, one}}}, &File{Name: "b", Sessions: []Session{{other, two}}}); err == nil || !strings.HasPrefix(err.Error(), "b: scenario even") {
		t.Errorf("another scenario of the same name: %v", err)
	}
	two[0].Jobs = append(two[0].Jobs, two[0].Jobs[0])
	if _, err := Analyze(DefaultLimit, &File{Sessions: []Session{{h, two}}}); err == nil {
		t.Error("another number of jobs is no error")
	}
}

// Modes whose difference from the fastest is within the noise are as good; a ratio that is not resolved is not best.
func TestBest(t *testing.T) {
	var runs []Run
	for rep := range 4 {
		noise := []float64{-0.01, 0.02, 0.01, -0.02}[rep]
		wild := []float64{0.1, 4, 0.3, 2}[rep]
		runs = append(runs, steady("even", "switch", rep, 0.2, 0.1), steady("even", "tcp", rep, 0.4, 0.1), steady("even", "server", rep, 0.15, 0.1),
			steady("even", "hybrid", rep, 0.151*(1+noise), 0.1), steady("even", "ring", rep, 0.05*wild, 0.1))
	}
	h := header("tcp", "ring", "switch", "server", "hybrid")
	a := analyze(t, &File{Sessions: []Session{{h, runs}}})
	if got := a.Scenarios[0].Jobs[0].Best; !reflect.DeepEqual(got, []int{3, 4}) {
		t.Errorf("best %v", got)
	}
}

// Modes that are close to the base are not therefore close to each other: in multiples of the base's long time both are resolved here, but not
// in multiples of each other's short one.
func TestBestIsNotAsGoodAsWhatIsNotResolved(t *testing.T) {
	var runs []Run
	for rep := range 4 {
		runs = append(runs, steady("even", "switch", rep, 1, 0.01), steady("even", "server", rep, 0.03, 0.01),
			steady("even", "hybrid", rep, []float64{0.02, 0.06, 0.03, 0.04}[rep], 0.01))
	}
	job := analyze(t, &File{Sessions: []Session{{header("switch", "server", "hybrid"), runs}}}).Scenarios[0].Jobs[0]
	for m := 1; m < 3; m++ {
		if !job.Cells[m].OfBase.Resolved(DefaultLimit) {
			t.Errorf("mode %d of the base: %+v, want it resolved", m, job.Cells[m].OfBase)
		}
	}
	if !reflect.DeepEqual(job.Best, []int{1}) {
		t.Errorf("best %v, want server alone", job.Best)
	}
}

// Which mode is best is said of pairs only: a ratio to the base of another session does not make a mode the first, and modes of which there are
// no pairs are not compared.
func TestBestOfSessions(t *testing.T) {
	h := header("switch", "server", "hybrid")
	session := func(reps int, times map[string]float64) Session {
		s := Session{Header: h}
		for rep := range reps {
			for _, mode := range h.Modes {
				if took, ok := times[mode]; ok {
					s.Runs = append(s.Runs, steady("even", mode, rep, took, 0.01))
				}
			}
		}
		return s
	}
	for name, tt := range map[string]struct {
		sessions []Session
		want     []int
	}{
		"another session's ratio is lower": {[]Session{session(4, map[string]float64{"switch": 0.2, "server": 0.1, "hybrid": 0.11}),
			session(4, map[string]float64{"switch": 0.2, "hybrid": 0.08})}, []int{1}},
		"no pair": {[]Session{session(4, map[string]float64{"switch": 0.2, "server": 0.1}), session(4, map[string]float64{"switch": 0.2, "hybrid": 0.11})}, nil},
		"one pair": {[]Session{session(4, map[string]float64{"switch": 0.2, "server": 0.1}), session(4, map[string]float64{"switch": 0.2, "hybrid": 0.11}),
			session(1, map[string]float64{"switch": 0.2, "server": 0.1, "hybrid": 0.11})}, nil},
		"the same": {[]Session{session(4, map[string]float64{"switch": 0.2, "server": 0.1, "hybrid": 0.1})}, []int{1, 2}},
	} {
		job := analyze(t, &File{Sessions: tt.sessions}).Scenarios[0].Jobs[0]
		for m := range job.Cells {
			if !job.Cells[m].OfBase.Resolved(DefaultLimit) {
				t.Errorf("%s: mode %d of the base: %+v, want it resolved", name, m, job.Cells[m].OfBase)
			}
		}
		if !reflect.DeepEqual(job.Best, tt.want) {
			t.Errorf("%s: best %v, want %v", name, job.Best, tt.want)
		}
	}
}

// The true ratio is found, whatever the noise that pairs share.
func TestPairingCancels(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		truth := rapid.Float64Range(0.05, 5).Draw(t, "ratio")
		var runs []Run
		for rep := range rapid.IntRange(2, 6).Draw(t, "repetitions") {
			comm := 0.1 * rapid.Float64Range(0.2, 5).Draw(t, "noise")
			runs = append(runs, steady("even", "switch", rep, comm, 0.01), steady("even", "hybrid", rep, truth*comm, 0.01))
		}
		a, err := Analyze(DefaultLimit, &File{Sessions: []Session{{header("switch", "hybrid"), runs}}})
		if err != nil {
			t.Fatal(err)
		}
		e := a.Scenarios[0].Jobs[0].Cells[1].OfBase
		if math.Abs(e.Ratio/truth-1) > 1e-6 || math.Abs(e.Low/e.High-1) > 1e-6 || !e.Resolved(DefaultLimit) {
			t.Errorf("%+v, want %g", e, truth)
		}
	})
}
