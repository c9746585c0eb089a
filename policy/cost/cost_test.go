package cost

import (
	"math"
	"math/bits"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"xagg/policy/telemetry"
)

// snapshot is of ranks that were ready at these times, by rank and round, of a sync job where quorum is 0.
func snapshot(quorum int, steered uint64, ready [][]float64) *telemetry.Snapshot {
	s := &telemetry.Snapshot{Job: telemetry.Job{Size: float64(len(ready)), Quorum: float64(quorum), Least: float64(quorum)}}
	for i, r := range ready {
		s.Ranks = append(s.Ranks, telemetry.Rank{Rank: float64(i), Steered: steered>>i&1 != 0, Ready: r, OwnP50: 0.01})
	}
	return s
}

// steady are ranks that need the same time in every round.
func steady(rounds int, times ...float64) (ready [][]float64) {
	for _, t := range times {
		ready = append(ready, slices.Repeat([]float64{t}, rounds))
	}
	return ready
}

func find(t *testing.T, j Judgement, steered uint64) Alternative {
	t.Helper()
	for _, a := range j.Alternatives {
		if a.Steered == steered {
			return a
		}
	}
	t.Fatalf("steering %b is not among %+v", steered, j.Alternatives)
	return Alternative{}
}

func near(a, b float64) bool { return math.Abs(a-b) < 1e-12 }

// TestPredict: numbers that were worked out by hand.
func TestPredict(t *testing.T) {
	p := DefaultParams() // a hop adds 0.001 s here: 0.1 of 0.01 s
	for _, tt := range []struct {
		name           string
		quorum         int
		wait           float64
		present        uint64
		ready          [][]float64
		steered        uint64
		round, blocked float64
	}{
		{"sync, the switch alone", 0, 0, 0, steady(8, 1, 2, 3, 9), 0, 9, 8},
		{"sync, the slow one on a server", 0, 0, 0, steady(8, 1, 2, 3, 9), 0b1000, 9 + 0.001*1.25, 2},
		{"sync, servers alone", 0, 0, 0, steady(8, 1, 2, 3, 9), 0b1111, 9 + 0.001*2, 0},
		{"quorum, the slow one in the cohort", 3, 0, 0b0001, steady(8, 1, 2, 3, 9), 0b0001, 9, 7},
		{"quorum, the slow one on a server", 3, 0, 0b1111, steady(8, 1, 2, 3, 9), 0b1000, 3 - 0.001*0.75/1.2, 2},
		{"quorum, servers alone", 3, 0, 0b1111, steady(8, 1, 2, 3, 9), 0b1111, 3, 0},
		{"quorum, and a wait that is worth it", 2, 2.5, 0b1111, steady(8, 1, 2, 3, 9), 0b1111, 3.5, 0},
		{"quorum, and a wait for nobody more", 2, 100, 0b1111, steady(8, 1, 2, 3, 9), 0b1111, 9, 0},
		// The mean of maxima: ranks take turns, and one of each rank's rounds, the worst, counts as the next one.
		{"turns", 0, 0, 0, [][]float64{{1, 5, 1, 5}, {5, 1, 5, 1}}, 0, 5, 4},
		{"a hiccup", 0, 0, 0, [][]float64{{1, 1, 1, 1}, {1, 9, 1, 1}}, 0, 1, 0},
	} {
		s := snapshot(tt.quorum, tt.present, tt.ready)
		s.Job.Wait = tt.wait
		j := p.Judge(s, Bounds{Cohort: 2})
		a := find(t, j, tt.steered)
		if !near(a.Round, tt.round) || !near(a.Blocked, tt.blocked) || !near(a.Cost, a.Round+0.1*a.Blocked) {
			t.Errorf("%s: %+v, want round %v, blocked %v", tt.name, a, tt.round, tt.blocked)
		}
	}
}

// TestCapacity: servers that take longer for the packets than ranks take to send them make rounds longer, by what they take longer; two of them half as
// much.
func TestCapacity(t *testing.T) {
	p := DefaultParams()
	for servers, want := range map[int][2]float64{1: {1.01125, 1.032}, 2: {1.00125, 1.012}} { // with one rank steered, and with all
		s := snapshot(0, 0, steady(8, 1, 1, 1, 1))
		s.Job.Chunks = 100
		for range servers {
			s.Servers = append(s.Servers, telemetry.Server{Ready: true, Timed: true, NsPerPacket: 1e5}) // 0.01 s for a rank's packets
		}
		j := p.Judge(s, Bounds{Cohort: 2})
		if one, all := find(t, j, 0b0001), find(t, j, 0b1111); !near(one.Round, want[0]) || !near(all.Round, want[1]) {
			t.Errorf("%d servers: %+v and %+v, want %v", servers, one, all, want)
		}
	}
}

// TestKnowsTooLittle: nothing is said before everybody has told of enough rounds.
func TestKnowsTooLittle(t *testing.T) {
	p := DefaultParams()
	for name, s := range map[string]*telemetry.Snapshot{
		"few rounds":                snapshot(0, 0, steady(Least-1, 1, 1, 1)),
		"nobody":                    snapshot(0, 0, steady(0, 1, 1, 1)),
		"a rank of a sync job":      snapshot(0, 0, append(steady(8, 1, 1), nil)),
		"fewer than are enough":     snapshot(3, 1, append(steady(8, 1, 1), nil)),
		"one of many has few of it": snapshot(0, 0, append(steady(8, 1, 1), []float64{1})),
	} {
		if j := p.Judge(s, Bounds{Cohort: 2}); j.Scores != nil || j.Alternatives != nil {
			t.Errorf("%s: %+v", name, j)
		}
	}
	// Who is gone is as late as can be.
	j := p.Judge(snapshot(2, 0b0001, append(steady(8, 1, 1, 1), nil)), Bounds{Cohort: 2, Serving: 1})
	if best := j.Alternatives[0].Steered; best>>3 != 1 {
		t.Errorf("the rank that is gone is not on a server: %+v", j)
	}
}

// TestScores: what is asked for is the cheapest division.
func TestScores(t *testing.T) {
	p := DefaultParams()
	score := func(s *telemetry.Snapshot, b Bounds) []float64 { return p.Judge(s, b).Scores }
	if s := score(snapshot(0, 0, steady(8, 1, 1, 1, 4)), Bounds{Cohort: 2}); !(s[3] > p.Enter.Above) || !(s[0] < p.Leave.Below) {
		t.Errorf("a slow rank: %v", s)
	}
	if s := score(snapshot(0, 0b1000, steady(8, 1, 1, 1, 1)), Bounds{Cohort: 2}); !(s[3] < p.Leave.Below) {
		t.Errorf("a rank that has recovered: %v", s)
	}
	// With a quorum of 3 and one rank that has to be on a server, a rank that is not later than that is left where it is.
	for steered := range 4 {
		s := score(snapshot(3, 1<<steered, steady(8, 1, 1, 1, 1)), Bounds{Cohort: 2, Serving: 1})
		for i := range s {
			if i == steered && !(s[i] > p.Leave.Below) || i != steered && !(s[i] < p.Enter.Above) {
				t.Errorf("all alike, %d on the server: %v", steered, s)
			}
		}
	}
	// Where all are late now and then, the cohort waits for the latest of its ranks, and servers for the third of four.
	turns := [][]float64{{1, 1, 1, 9, 1, 1, 1, 9}, {1, 1, 9, 1, 1, 1, 9, 1}, {1, 9, 1, 1, 1, 9, 1, 1}, {9, 1, 1, 1, 9, 1, 1, 1}}
	if j := p.Judge(snapshot(3, 0b1111, turns), Bounds{Cohort: 2, Serving: 1}); j.Alternatives[0].Steered != 0b1111 || slices.Min(j.Scores) < p.Enter.Above {
		t.Errorf("ranks that take turns: %+v", j)
	}
	// What may not be is not asked for.
	b := Bounds{Cohort: 3, Switch: 1 << 3, Steered: 1}
	for _, a := range p.Judge(snapshot(0, 0, steady(8, 1, 2, 3, 9)), b).Alternatives {
		if a.Steered>>3&1 != 0 || bits.OnesCount64(a.Steered) > 1 {
			t.Errorf("%b is out of bounds", a.Steered)
		}
	}
}

// TestChoose: as many ranks are waited for, and for as long, as costs next to nothing.
func TestChoose(t *testing.T) {
	p := DefaultParams()
	for _, tt := range []struct {
		name   string
		least  int
		ready  [][]float64
		quorum int
		wait   float64
	}{
		{"all alike", 2, steady(8, 1, 1, 1, 1), 4, 0},
		{"hardly apart", 2, steady(8, 1, 1.001, 1.002, 1.01), 4, 0.01},
		{"one is late", 2, steady(8, 1, 1, 1, 4), 3, 0},
		{"two are late, and one of them has to be waited for", 3, steady(8, 1, 1, 3, 4), 3, 0},
		// The third comes 0.4 after the first in half of the rounds: neither it nor so long a wait is free.
		{"one is late now and then", 2, [][]float64{{1, 1, 1, 1, 1, 1, 1, 1}, {1, 1, 1, 1, 1, 1, 1, 1}, {1, 1.4, 1, 1.4, 1, 1.4, 1, 1.4}}, 2, 0},
	} {
		s := snapshot(tt.least, 1<<len(tt.ready)-1, tt.ready)
		j := p.Judge(s, Bounds{Cohort: 2, Serving: 1, Quorum: true})
		if j.Quorum != tt.quorum || !near(math.Round(j.Wait*1e9)/1e9, tt.wait) {
			t.Errorf("%s: %d within %v, want %d within %v", tt.name, j.Quorum, j.Wait, tt.quorum, tt.wait)
		}
		// What is chosen stands when it is the plan's.
		s.Job.Quorum, s.Job.Wait = float64(j.Quorum), j.Wait
		if again := p.Judge(s, Bounds{Cohort: 2, Serving: 1, Quorum: true}); again.Quorum != tt.quorum || again.Wait != j.Wait {
			t.Errorf("%s: %d within %v, then %d within %v", tt.name, j.Quorum, j.Wait, again.Quorum, again.Wait)
		}
	}
	if j := p.Judge(snapshot(2, 0b1111, steady(8, 1, 1, 1, 1)), Bounds{Cohort: 2, Serving: 1}); j.Quorum != 0 || j.Wait != 0 {
		t.Errorf("it may not be chosen: %+v", j)
	}
	if j := p.Judge(snapshot(0, 0, steady(8, 1, 1, 1)), Bounds{Cohort: 2, Quorum: true}); j.Quorum != 0 || j.Wait != 0 {
		t.Errorf("a sync job: %+v", j)
	}
}

// TestCuts: of ranks that need the same time in every round, no division whatever makes rounds shorter than the best cut.
func TestCuts(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(2, 7).Draw(t, "ranks")
		quorum := rapid.IntRange(0, n).Draw(t, "quorum")
		p := DefaultParams()
		p.Price = 0
		b := Bounds{Cohort: rapid.IntRange(2, 3).Draw(t, "cohort")}
		if quorum > 0 {
			b.Serving = 1
		}
		times := rapid.SliceOfN(rapid.Float64Range(0.001, 1), n, n).Draw(t, "ready")
		present := rapid.Uint64Range(0, 1<<n-1).Draw(t, "present")
		j := p.Judge(snapshot(quorum, present, steady(5, times...)), b)
		m, ok := newModel(&p, snapshot(quorum, present, steady(5, times...)))
		if !ok {
			t.Fatal("nothing is known")
		}
		least := math.Inf(1)
		for steered := range uint64(1) << n {
			k := bits.OnesCount64(steered)
			if k >= b.Serving && (n-k >= b.Cohort || k == n) || steered == present {
				least = min(least, m.predict(steered).Cost)
			}
		}
		// A rank on a server stays there when another one is hardly later.
		if slack := p.Enter.Above * m.mean; j.Alternatives[0].Cost > least+slack+1e-12 {
			t.Errorf("best of %+v, while %v is possible", j.Alternatives, least)
		}
	})
}

// TestFinite: whatever is measured, every number that is said is one, and equal snapshots say equal things.
func TestFinite(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(1, 16).Draw(t, "ranks")
		var ready [][]float64
		for range n {
			ready = append(ready, rapid.SliceOfN(rapid.Float64Range(0, 1e5), 0, 9).Draw(t, "ready"))
		}
		p := DefaultParams()
		s := snapshot(rapid.IntRange(0, n).Draw(t, "quorum"), rapid.Uint64().Draw(t, "steered")&(1<<n-1), ready)
		s.Job.Wait = rapid.Float64Range(0, 10).Draw(t, "wait")
		b := Bounds{Cohort: 2, Switch: rapid.Uint64().Draw(t, "switch") & 3, Server: 4, Serving: rapid.IntRange(0, 2).Draw(t, "serving")}
		a, again := p.Judge(s, b), p.Judge(s, b)
		if !slices.Equal(a.Scores, again.Scores) || !slices.Equal(a.Alternatives, again.Alternatives) {
			t.Fatalf("%+v, then %+v", a, again)
		}
		for _, x := range a.Scores {
			if math.IsNaN(x) || math.IsInf(x, 0) {
				t.Fatalf("scores %v", a.Scores)
			}
		}
		for _, x := range a.Alternatives {
			if sum := x.Round + x.Blocked + x.Cost; math.IsNaN(sum) || math.IsInf(sum, 0) || x.Blocked < 0 {
				t.Fatalf("%+v", x)
			}
		}
	})
}
