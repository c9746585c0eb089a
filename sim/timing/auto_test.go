package timing

import (
	"testing"
	"time"

	"xagg/lab/scenario"
	"xagg/policy/adapt"
)

// TestSteersQuorum: a plan's quorum and wait are what its chunks close by, and all ranks are on servers where that was decided. Rank 3
// computes four times as long as the others, who wait for it only as long as all are wanted.
func TestSteersQuorum(t *testing.T) {
	s := steady(60)
	s.Jobs[0].Compute.Mean, s.Jobs[0].Quorum = 20*time.Millisecond, &scenario.Quorum{Ranks: 3, Wait: 100 * time.Microsecond}
	cfg := adapt.DefaultConfig()
	cfg.Freeze, cfg.MinSteered = true, 1
	w, err := newWorld(s, Options{Mode: "auto/quorum", Seed: 1, Costs: Lab(), Adapt: &cfg, Compute: func(_, rank, _ int) time.Duration {
		if rank == 3 {
			return 80 * time.Millisecond
		}
		return 20 * time.Millisecond
	}})
	if err != nil {
		t.Fatal(err)
	}
	j := w.jobs[0]
	to := func(d adapt.Decision) {
		if j.auto.change != nil {
			t.Fatal("the change before is under way")
		}
		j.auto.steer(d.Apply(j.plan))
	}
	var during, since [2]int // rounds of rank 0 at the time of the decisions, and after the change
	w.agenda.at(400*time.Millisecond, func() { to(adapt.Decision{Steered: 0b1000}) })
	w.agenda.at(600*time.Millisecond, func() { during[0] = j.ranks[0].round; to(adapt.Decision{Steered: 0b1111, Quorum: 4, Wait: 0.002}) })
	w.agenda.at(1500*time.Millisecond, func() {
		if p := j.plan; p.Quorum != 4 || p.Wait != 2*time.Millisecond || p.Cohort != 0 {
			t.Errorf("the plan is %+v", p)
		}
		since[0], during[1] = j.ranks[0].round-8, j.ranks[0].round
		to(adapt.Decision{Steered: 0b1000, Quorum: 3, Wait: 0.0001})
	})
	w.agenda.at(2*time.Second, func() { since[1] = j.ranks[0].round })
	if err := w.run(); err != nil {
		t.Fatal(err)
	}
	if p := j.plan; p.Quorum != 3 || p.Wait != 100*time.Microsecond || p.Steered != 0b1000 || len(j.installed) != 1 {
		t.Errorf("the plan is %+v at the end, %d are installed", p, len(j.installed))
	}
	comm := func(from, to int) (sum time.Duration) {
		for _, turn := range j.ranks[0].turns[from:to] {
			sum += turn.comm()
		}
		return sum / time.Duration(max(to-from, 1))
	}
	before, all, after := comm(during[0]-3, during[0]), comm(since[0], during[1]), comm(since[1]-3, since[1])
	t.Logf("rank 0 communicates for %v, where all are wanted for %v, and then for %v", before, all, after)
	if all < 50*time.Millisecond || before > 20*time.Millisecond || after > 20*time.Millisecond {
		t.Error("want it to wait where all are wanted, and nowhere else")
	}
}
