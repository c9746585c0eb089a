package timing

import (
	"bytes"
	"encoding/json"
	"fmt"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"xagg/controller"
	"xagg/lab/scenario"
	"xagg/wire"
)

// steady is a scenario of four ranks that are alike, with so many rounds.
func steady(rounds int) *scenario.Scenario {
	return &scenario.Scenario{
		Name: "steady", Servers: 1, Links: scenario.Links{Worker: 50e6}, Rounds: rounds, Seed: 1,
		Jobs: []scenario.Job{{
			Name: "train", Ranks: 4, Depth: 1, Tensors: scenario.Tensors{Sizes: []int{4096}}, Compute: scenario.Compute{Mean: 200 * time.Millisecond},
		}},
	}
}

func load(t *testing.T, name string) *scenario.Scenario {
	t.Helper()
	s, err := scenario.Load(filepath.Join("../../scenarios", name+".yaml"))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func predict(t *testing.T, s *scenario.Scenario, m scenario.Mode) []Prediction {
	t.Helper()
	ps, err := Run(s, Options{Mode: m, Seed: s.Seed, Costs: Lab()})
	if err != nil {
		t.Fatal(err)
	}
	return ps
}

// TestScenarios runs scenarios of the suite in all modes. In sync no rank has results before the ideal schedule lets it, but for what
// the links' buckets let through at once, and every rank sends every chunk, again only where there is a reason.
func TestScenarios(t *testing.T) {
	const buckets = 4 * time.Millisecond // what a bucket of a millisecond, on the ways up and down, hides of two rounds that meet
	for _, name := range []string{"homogeneous", "slow-4", "link-25", "small-pool", "loss-1", "two-jobs"} {
		s := load(t, name)
		s.Rounds = 4
		for _, m := range Modes() {
			if s.Skip(m) != "" {
				continue
			}
			t.Run(fmt.Sprint(name, " ", m), func(t *testing.T) {
				for job, p := range predict(t, s, m) {
					j := &s.Jobs[job]
					chunks := 0
					for _, n := range j.Tensors.Buckets() {
						chunks += (n + wire.MaxLanes - 1) / wire.MaxLanes
					}
					sent := p.Packets - p.Resends
					switch want := uint64(chunks * j.Ranks * s.Rounds); {
					case m.Consistency() == controller.ModeSync && sent != want:
						t.Errorf("%d contributions were sent, want %d", sent, want)
					case sent > want:
						t.Errorf("%d contributions were sent, want at most %d", sent, want)
					}
					if name == "homogeneous" && m.Consistency() == controller.ModeSync && p.Resends != 0 {
						t.Errorf("%d resends though nothing is lost and nobody is waited for", p.Resends)
					}
					if name == "loss-1" && m.Consistency() == controller.ModeSync && p.Resends == 0 {
						t.Error("no resends though links lose frames")
					}
					for rank := range p.Comm {
						if len(p.Comm[rank]) != s.Rounds {
							t.Fatalf("rank %d has %d rounds, want %d", rank, len(p.Comm[rank]), s.Rounds)
						}
						for round, comm := range p.Comm[rank] {
							if comm > p.Round[rank][round] {
								t.Errorf("rank %d, round %d: communicates for %v of %v", rank, round, comm, p.Round[rank][round])
							}
							if floor := p.Floor[rank][round]; m.Consistency() == controller.ModeSync && comm < floor-buckets {
								t.Errorf("rank %d, round %d: communicates for %v, the floor is %v", rank, round, comm, floor)
							}
						}
					}
				}
			})
		}
	}
}

// TestRoundTrip: a chunk alone takes what it costs on its way, packet by packet.
func TestRoundTrip(t *testing.T) {
	c := Costs{Call: 13e3, WorkerSend: 1e3, WorkerReceive: 2e3, SwitchPacket: 5e3, SwitchCopy: 7e3, ServerPacket: 11e3, Hop: 100e3, Step: 1}
	s := steady(3)
	s.Jobs[0].Tensors.Sizes = []int{wire.MaxLanes}
	// Ranks begin as they had their last results: a copy after each other. The last one's packet is in the pipeline when it comes, or
	// when those before it are through.
	pipeline := func(each time.Duration) time.Duration {
		after := 3 * c.SwitchCopy
		return max(after+each, 4*each) - after
	}
	around := c.Call + c.WorkerSend + c.Hop + 4*c.SwitchCopy + c.Hop + c.WorkerReceive
	for m, want := range map[scenario.Mode]time.Duration{
		"switch": around + pipeline(c.SwitchPacket),
		"server": around + pipeline(c.SwitchPacket+c.SwitchCopy) + c.Hop + c.ServerPacket + c.Hop + c.SwitchPacket,
	} {
		ps, err := Run(s, Options{Mode: m, Seed: 1, Costs: c})
		if err != nil {
			t.Fatal(err)
		}
		last := time.Duration(0)
		for rank := range ps[0].Comm {
			last = max(last, ps[0].Comm[rank][1])
		}
		if last != want {
			t.Errorf("mode %s: %v, want %v", m, last, want)
		}
	}
}

// TestLeases: what a job holds is what the controller of the lab has leased to it, as its results say.
func TestLeases(t *testing.T) {
	for _, tt := range []struct {
		scenario string
		mode     scenario.Mode
		slots    int
		memory   uint64
	}{
		{"slow-4", "switch", 128, 0},
		{"slow-4", "server", 64, 139264},
		{"slow-4", "hybrid", 128, 139264},
		{"slow-4", "server/async", 64, 278528},
		{"transformer", "hybrid", 128, 1427456},
	} {
		s := load(t, tt.scenario)
		s.Rounds = 1
		p := predict(t, s, tt.mode)[0]
		if p.Slots != tt.slots || p.Memory != tt.memory {
			t.Errorf("%s, mode %s: %d slots and %d bytes, want %d and %d", tt.scenario, tt.mode, p.Slots, p.Memory, tt.slots, tt.memory)
		}
	}
}

// TestDeterministic: the seed decides everything.
func TestDeterministic(t *testing.T) {
	s := load(t, "loss-1")
	s.Rounds = 5
	for _, m := range []scenario.Mode{"hybrid", "hybrid/quorum", "auto"} {
		if a, b := predict(t, s, m), predict(t, s, m); !reflect.DeepEqual(a, b) {
			t.Errorf("mode %s: two runs with one seed differ", m)
		}
	}
	a := predict(t, s, "switch")
	b, err := Run(s, Options{Mode: "switch", Seed: s.Seed + 1, Costs: Lab()})
	if err != nil {
		t.Fatal(err)
	}
	if reflect.DeepEqual(a, b) {
		t.Error("runs with two seeds lose the same frames")
	}
}

// TestLarge: three jobs of 64 ranks.
func TestLarge(t *testing.T) {
	s := load(t, "slow-4")
	s.Warmup, s.Rounds = 1, 2
	s, err := Resize(s, 64)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"second", "third"} {
		j := s.Jobs[0]
		j.Name = name
		s.Jobs = append(s.Jobs, j)
	}
	one, err := Resize(load(t, "slow-4"), 64)
	if err != nil {
		t.Fatal(err)
	}
	one.Warmup, one.Rounds = 1, 2
	alone, ps := predict(t, one, "hybrid")[0], predict(t, s, "hybrid")
	if len(ps) != 3 {
		t.Fatalf("%d jobs", len(ps))
	}
	for _, p := range ps {
		if p.spread(p.Comm).Mean <= alone.spread(alone.Comm).Mean {
			t.Errorf("job %s communicates for %v among three, one alone for %v", p.Job, p.spread(p.Comm).Mean, alone.spread(alone.Comm).Mean)
		}
	}
}

func TestResize(t *testing.T) {
	s := load(t, "slow-4")
	for _, tt := range []struct{ ranks, slow, quorum int }{{2, 1, 1}, {4, 3, 3}, {64, 63, 63}} {
		got, err := Resize(s, tt.ranks)
		if err != nil {
			t.Fatal(err)
		}
		j := got.Jobs[0]
		if j.Ranks != tt.ranks || len(j.Compute.Slow) != 1 || j.Compute.Slow[tt.slow] != 4 || j.Quorum.Ranks != tt.quorum {
			t.Errorf("%d ranks: %+v, quorum %+v", tt.ranks, j, j.Quorum)
		}
	}
	if s.Jobs[0].Ranks != 4 || s.Jobs[0].Compute.Slow[3] != 4 || s.Jobs[0].Quorum.Ranks != 3 {
		t.Errorf("the scenario has changed: %+v", s.Jobs[0])
	}
	if got, err := Resize(load(t, "episode"), 8); err != nil || got.Jobs[0].Compute.Episodes[0].Rank != 7 {
		t.Errorf("episode with 8 ranks: %+v, %v", got, err)
	}
	half, err := Resize(load(t, "slow-half"), 2)
	if err != nil || len(half.Jobs[0].Compute.Slow) != 2 {
		t.Errorf("slow-half with 2 ranks: %+v, %v", half, err)
	}
	for _, n := range []int{0, 1, 65} {
		if _, err := Resize(s, n); err == nil {
			t.Errorf("%d ranks are no error", n)
		}
	}
}

func TestErrors(t *testing.T) {
	s := steady(3)
	for want, opts := range map[string]Options{
		"job train has no quorum":     {Mode: "hybrid/quorum"},
		"and 3 are free":              {Mode: "switch", Slots: 3},
		"simulate scenario steady in": {Mode: "switch", Slots: 3},
	} {
		opts.Costs = Lab()
		if _, err := Run(s, opts); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %q", err, want)
		}
	}
	for _, name := range []string{"tcp", "gloo", "nothing"} {
		if m, err := ParseMode(name); err == nil {
			t.Errorf("mode %q is taken as %q", name, m)
		}
	}
}

// TestTwoJobs: two jobs share a switch that is too small for what each of them could use, whichever is named first, and a slow rank
// of one of them costs the other nothing.
func TestTwoJobs(t *testing.T) {
	s := load(t, "two-jobs")
	s.Rounds = 10
	swapped := *s
	swapped.Jobs = []scenario.Job{s.Jobs[1], s.Jobs[0]}
	for _, m := range []scenario.Mode{"switch", "hybrid", "auto"} {
		var got [2][]Prediction
		for i, s := range []*scenario.Scenario{s, &swapped} {
			var err error
			if got[i], err = Run(s, Options{Mode: m, Seed: 1, Costs: Lab(), Slots: 64}); err != nil {
				t.Fatal(err)
			}
		}
		even, uneven := got[0][0], got[0][1]
		if even.Slots != 32 || uneven.Slots != 16 { // a pool of 8 and one of 4: 12 of the 16 that there are, and a quarter is kept
			t.Errorf("mode %s: %d and %d slots", m, even.Slots, uneven.Slots)
		}
		if got[1][0].Slots != uneven.Slots || got[1][1].Slots != even.Slots {
			t.Errorf("mode %s, in another order: %d and %d slots, were %d and %d", m, got[1][1].Slots, got[1][0].Slots, even.Slots, uneven.Slots)
		}
		if fast, slow := slowest(even.Round), slowest(uneven.Round); slow < 2*fast {
			t.Errorf("mode %s: rounds take up to %v, and up to %v where a rank computes four times as long", m, fast, slow)
		}
	}
}

// slowest returns the longest of times by rank and round.
func slowest(times [][]time.Duration) (most time.Duration) {
	for _, of := range times {
		most = max(most, slices.Max(of))
	}
	return most
}

// TestReport: what is written as JSON is what was predicted, and the text has a line for each row.
func TestReport(t *testing.T) {
	s := load(t, "slow-4")
	s.Rounds = 8
	s.Jobs[0].Quorum = nil
	r := Report{SchemaVersion: SchemaVersion, Seed: 1}
	for _, m := range []scenario.Mode{"switch", "hybrid/quorum", "auto"} {
		if err := r.Add(s, Options{Mode: m, Seed: 1, Costs: Lab()}); err != nil {
			t.Fatal(err)
		}
	}
	var out, text bytes.Buffer
	if err := r.WriteJSON(&out); err != nil {
		t.Fatal(err)
	}
	var back Report
	if err := json.Unmarshal(out.Bytes(), &back); err != nil || !reflect.DeepEqual(back, r) {
		t.Errorf("%v: read %+v, wrote %+v", err, back, r)
	}
	if err := r.WriteText(&text); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"101.4 ms", "skipped: train of slow-4, 4 workers, in mode hybrid/quorum: job train has no quorum", "rank 3 to the server"} {
		if !strings.Contains(text.String(), want) {
			t.Errorf("the text lacks %q:\n%s", want, &text)
		}
	}
}
