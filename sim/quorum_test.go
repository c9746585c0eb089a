package sim

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"xagg/agg"
)

// rising is a quorum job of four ranks, of which one is late to every all-reduce, that goes through plans with these quorums.
func rising(quorums ...Quorum) *Schedule {
	s := &Schedule{
		Seed: 1, Workers: 4, Servers: 2, Pool: 4, MaxChunks: 4, Epoch: 1, Jobs: 1, Depth: 2, Ahead: 2, Timeout: time.Minute,
		Quorum: &Quorum{Ranks: 2, Wait: 300 * time.Microsecond}, Compute: make([]time.Duration, 4), Late: []time.Duration{0, 0, 0, 4 * time.Millisecond},
		Control: 10 * time.Microsecond,
	}
	for range 40 {
		s.Vectors = append(s.Vectors, Work{Lanes: 700})
	}
	for i, q := range quorums {
		s.Plans = append(s.Plans, Plan{Cohort: []uint64{0b0111, 0}[i%2], Servers: []int{0, 1}, Pool: 4, Quorum: &q})
	}
	for range 6 {
		s.Links = append(s.Links, Link{Delay: 50 * time.Microsecond, Gap: time.Microsecond, Queue: 64})
	}
	return s
}

// TestQuorumChanges: quorum and wait change while a job runs, exactly; the late rank is missed where three are enough, and in
// every result where all are wanted.
func TestQuorumChanges(t *testing.T) {
	const us = time.Microsecond
	r, err := Run(rising(Quorum{2, 300 * us}, Quorum{4, 0}, Quorum{3, 100 * us}), Options{})
	if err != nil {
		t.Fatal(err)
	}
	if len(r.Epochs) != 3 || r.Raises != 1 || r.Lowers != 1 || r.Partial == 0 {
		t.Errorf("epochs %v, %d raises, %d lowers, %d chunks without all", r.Epochs, r.Raises, r.Lowers, r.Partial)
	}
	if r, err := Run(rising(Quorum{4, 0}, Quorum{4, time.Millisecond}), Options{}); err != nil || r.Partial != 0 || len(r.Epochs) != 2 {
		t.Errorf("%v: of all %d chunks lack some", err, r.Partial)
	}
}

// TestQuorumOfDead: a job goes on whose plan wants more ranks than are left, and wants them again when they are back.
func TestQuorumOfDead(t *testing.T) {
	s := rising(Quorum{4, 0})
	s.Deaths = []Death{{Rank: 1, At: 2 * time.Millisecond, Back: 30 * time.Millisecond}, {Rank: 3, At: 9 * time.Millisecond, Back: 20 * time.Millisecond}}
	r, err := Run(s, Options{})
	if err != nil {
		t.Fatal(err)
	}
	if r.Deaths != 2 || r.Returns != 2 || r.Recoveries < 4 || r.Lowered < 2 || r.Partial == 0 {
		t.Errorf("%+v", r)
	}
}

// TestWrongQuorum: a controller that is wrong about quorum or wait is found out, even where every sum is right.
func TestWrongQuorum(t *testing.T) {
	reinstall := func(change func(old *agg.ServerPlan, next agg.ServerPlan)) func(*world, int, *agg.ServerPlan) {
		olds := map[string]agg.ServerPlan{}
		return func(w *world, server int, p *agg.ServerPlan) {
			if old, ok := olds[fmt.Sprint(server, p.Epoch-1)]; ok {
				change(&old, *p)
				if err := w.servers[server].Install(old); err != nil {
					w.failf("%v", err)
				}
			}
			olds[fmt.Sprint(server, p.Epoch)] = *p
		}
	}
	const us = time.Microsecond
	up := []Quorum{{2, 300 * us}, {4, 300 * us}}
	down := []Quorum{{4, 300 * us}, {2, 300 * us}}
	wait := []Quorum{{3, 3000 * us}, {3, 300 * us}}
	for name, tt := range map[string]struct {
		plans   []Quorum
		mistake func(*world, int, *agg.ServerPlan)
	}{
		"a larger quorum under the old epoch":  {up, reinstall(func(old *agg.ServerPlan, next agg.ServerPlan) { old.Quorum = next.Quorum })},
		"a smaller quorum under the old epoch": {down, reinstall(func(old *agg.ServerPlan, next agg.ServerPlan) { old.Quorum = next.Quorum })},
		"another wait under the old epoch":     {wait, reinstall(func(old *agg.ServerPlan, next agg.ServerPlan) { old.WaitUs = next.WaitUs })},
		"the job's own under the new epoch": {up, func(w *world, _ int, p *agg.ServerPlan) {
			p.Quorum, p.WaitUs = uint32(w.s.Quorum.Ranks), uint32(w.s.Quorum.Wait.Microseconds())
		}},
		"one more":          {wait[1:], func(_ *world, _ int, p *agg.ServerPlan) { p.Quorum++ }},
		"one less":          {down[:1], func(_ *world, _ int, p *agg.ServerPlan) { p.Quorum-- }},
		"no wait":           {wait[:1], func(_ *world, _ int, p *agg.ServerPlan) { p.WaitUs = 0 }},
		"a longer wait":     {wait[1:], func(_ *world, _ int, p *agg.ServerPlan) { p.WaitUs *= 4 }},
		"one server of two": {up, func(_ *world, server int, p *agg.ServerPlan) { p.Quorum -= p.Quorum / 4 * uint32(server) }},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := Run(rising(tt.plans...), Options{}); err != nil {
				t.Fatalf("without the mistake: %v", err)
			}
			_, err := Run(rising(tt.plans...), Options{mistake: tt.mistake})
			if err == nil || !strings.Contains(err.Error(), "ranks are enough, after") {
				t.Errorf("got %v", err)
			} else {
				t.Log(err)
			}
		})
	}
}
