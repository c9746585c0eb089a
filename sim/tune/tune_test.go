package tune

import (
	"bytes"
	"encoding/json"
	"errors"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"xagg/lab/scenario"
	"xagg/policy/adapt"
	"xagg/policy/telemetry"
	"xagg/policy/trace"
	"xagg/sim/timing"
)

func load(t *testing.T, name string, rounds int) Case {
	t.Helper()
	s, err := scenario.Load("../../scenarios/" + name + ".yaml")
	if err != nil {
		t.Fatal(err)
	}
	s.Rounds = rounds
	return Case{Scenario: s}
}

func open(t *testing.T, rule string) adapt.Config {
	t.Helper()
	c := adapt.DefaultConfig()
	c.Rule = rule
	return c
}

// TestTune: a search finds that a rank that is slow has to be steered within the rounds there are, says so of every combination that is one, and the same
// whatever the number of cores.
func TestTune(t *testing.T) {
	opts := Options{
		Space: []Dimension{{"define.enter.above", []string{"4", "1000"}}, {"define.leave.below", []string{"2", "5"}}},
		Runs:  64, Seeds: 1, Seed: 1, Timing: timing.Options{Costs: timing.Lab()},
	}
	cases := []Case{load(t, "slow-4", 12)}
	cases[0].Jobs[0].Quorum = nil
	r, err := Tune(open(t, "outlier"), cases, opts)
	if err != nil {
		t.Fatal(err)
	}
	// 4 and 5 contradict each other.
	if r.Possible != 4 || r.Invalid != 1 || r.Tried != 2 || r.Failed != 0 || len(r.Front) == 0 {
		t.Fatalf("%+v", r)
	}
	if r.Chosen.Fields["define.enter.above"] != "1000" || r.Chosen.Memory != 0 || r.Default.Memory == 0 || r.Default.Moves == 0 || r.Chosen.Moves != 0 {
		t.Errorf("a sync job gains nothing by a server's memory: %+v beside %+v", r.Chosen, r.Default)
	}
	if c, err := adapt.Parse("chosen", []byte(r.Policy)); err != nil || c.Define == nil || c.Define.Enter.Above != 1000 {
		t.Errorf("%+v, %v", c, err)
	}
	if r.Judged.Relative < 0.99 || r.Judged.Relative > 1.05 || r.Judged.Fields["define.enter.above"] != "1000" {
		t.Errorf("judged %+v", r.Judged)
	}
	before := runtime.GOMAXPROCS(1)
	again, err := Tune(open(t, "outlier"), cases, opts)
	runtime.GOMAXPROCS(before)
	if err != nil {
		t.Fatal(err)
	}
	a, aerr := json.Marshal(r)
	b, berr := json.Marshal(again)
	if !bytes.Equal(a, b) || aerr != nil || berr != nil {
		t.Errorf("on one core\n%s\n%s", a, b)
	}
	var text strings.Builder
	if err := r.WriteText(&text); err != nil || !strings.Contains(text.String(), "chosen, other seeds") || !strings.Contains(text.String(), "define:") {
		t.Errorf("%s %v", &text, err)
	}
}

// TestRefuses: what cannot be searched is told from what brings nothing.
func TestRefuses(t *testing.T) {
	opts := Options{Runs: 8, Seeds: 1, Timing: timing.Options{Costs: timing.Lab()}}
	cases := []Case{load(t, "slow-2", 3)}
	for path, want := range map[string]string{
		"moon":         `unknown field "moon"`,
		"define.moon":  `the policy has no "define"`,
		"cost.price":   "want 0 to 10",
		"pin.0.switch": "pin",
	} {
		opts.Space = []Dimension{{path, []string{"11"}}}
		if _, err := Tune(open(t, "cost-model"), cases, opts); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", path, err, want)
		}
	}
	opts.Timing.Slots, opts.Space = 2, nil
	if _, err := Tune(open(t, "cost-model"), cases, opts); !errors.Is(err, ErrNothing) {
		t.Errorf("a switch that is too small: %v", err)
	}
	for _, s := range []string{"", "a", "a=", "=1", "a=1,,2"} {
		if d, err := ParseDimension(s); err == nil {
			t.Errorf("%q is %+v", s, d)
		}
	}
}

// TestDefaultSpaces: of every rule that comes with the program, all that is searched by default is a field of its policy.
func TestDefaultSpaces(t *testing.T) {
	for _, rule := range adapt.Names() {
		base, err := Open(open(t, rule))
		if err != nil {
			t.Fatal(err)
		}
		list, r, err := candidates(base, Options{Space: DefaultSpace(base), Runs: 1000})
		if err != nil || len(list) < 3 || r.Tried != len(list)-1 || r.Tried+r.Invalid > r.Possible {
			t.Errorf("%s: %d policies, %+v, %v", rule, len(list), r, err)
		}
	}
}

// TestFront: nobody of the front is dominated, everybody else is, and the chosen one is within 1 % of the shortest rounds.
func TestFront(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var all []Candidate
		for range rapid.IntRange(1, 12).Draw(t, "n") {
			all = append(all, Candidate{
				Relative: rapid.SampledFrom([]float64{1, 1.005, 1.01, 1.02, 2}).Draw(t, "round"),
				Slots:    rapid.SampledFrom([]float64{64, 128}).Draw(t, "slots"), Memory: rapid.SampledFrom([]float64{0, 1}).Draw(t, "memory"),
			})
		}
		dominates := func(a, b *Candidate) bool {
			return a.Relative <= b.Relative && a.Slots <= b.Slots && a.Memory <= b.Memory && !a.same(b)
		}
		list := front(all)
		for i := range all {
			dominated := slices.ContainsFunc(all, func(c Candidate) bool { return dominates(&c, &all[i]) })
			there := slices.ContainsFunc(list, func(c Candidate) bool { return c.same(&all[i]) })
			if dominated == there {
				t.Fatalf("%+v: dominated %v, in the front %v", all[i], dominated, there)
			}
		}
		c := choose(all)
		for _, d := range all {
			if c.Relative > 1.01*d.Relative || d.Relative <= 1 && d.Slots < c.Slots {
				t.Fatalf("chosen %+v, not %+v", c, d)
			}
		}
	})
}

// TestDerive: a scenario that is made of the trace of a simulated job takes about as long as that job.
func TestDerive(t *testing.T) {
	for name, mode := range map[string]scenario.Mode{"slow-2": "auto", "jitter": "auto", "slow-1-5": "auto/quorum"} {
		c := load(t, name, 60)
		tr := &trace.Trace{Job: trace.Job{Job: "train", Ranks: 4, Policy: "rule: cost-model\n"}}
		ps, err := timing.Run(c.Scenario, timing.Options{Mode: mode, Seed: 1, Costs: timing.Lab(), Watch: func(_ int, s *telemetry.Snapshot, d *adapt.Decision) {
			step := trace.Step{Snapshot: *s, Decision: d}
			step.Snapshot.Ranks, step.Snapshot.Servers = slices.Clone(s.Ranks), slices.Clone(s.Servers)
			tr.Steps = append(tr.Steps, step)
		}})
		if err != nil {
			t.Fatal(err)
		}
		if err := tr.Verify(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		d, err := Derive(tr, timing.Lab())
		if err != nil {
			t.Fatal(err)
		}
		sum, n := time.Duration(0), 0
		for rank := range ps[0].Round {
			for round, took := range ps[0].Round[rank] {
				if !ps[0].Skipped[rank][round] {
					sum += took
					n++
				}
			}
		}
		real := (sum / time.Duration(n)).Seconds()
		if off := d.Simulated/real - 1; off < -0.15 || off > 0.15 {
			t.Errorf("%s: rounds of the derived scenario take %.4f s, of the real one %.4f s", name, d.Simulated, real)
		}
		t.Logf("%s: %.4f s, derived %.4f s, recorded %.4f s", name, real, d.Simulated, d.Recorded)
	}
	for _, n := range []int{0, 3, 5} {
		tr := &trace.Trace{Job: trace.Job{Job: "x", Ranks: 4}, Steps: []trace.Step{{Snapshot: telemetry.Snapshot{Ranks: make([]telemetry.Rank, n)}}}}
		if _, err := Derive(tr, timing.Lab()); err == nil || !strings.Contains(err.Error(), "the job 4") {
			t.Errorf("a snapshot of %d ranks: %v", n, err)
		}
	}
	if _, err := Derive(&trace.Trace{Job: trace.Job{Job: "x", Ranks: 4}}, timing.Lab()); err == nil || !strings.Contains(err.Error(), "want 10 at least") {
		t.Errorf("of nothing: %v", err)
	}
}
