package timing

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"xagg/lab/scenario"
	"xagg/policy/adapt"
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

// jitter is a factor near 1, by rank and round, and the same in every run.
func jitter(rank, round int) float64 {
	rng := rand.New(rand.NewPCG(uint64(rank), uint64(round)))
	return 1 + 0.02*rng.NormFloat64()
}

// TestReacts: a rank that becomes 4 times slower is steered within 10 rounds, and is back within 20 after it has recovered. The medians
// that the rule looks at are of 8 rounds here; with the 32 of the default policy they take 21 and 25.
func TestReacts(t *testing.T) {
	cfg := adapt.DefaultConfig()
	cfg.Window = 8
	const slow, fast, rounds = 30, 70, 110
	for _, mean := range []time.Duration{50 * time.Millisecond, 200 * time.Millisecond, 500 * time.Millisecond} {
		t.Run(mean.String(), func(t *testing.T) {
			ps, err := Run(steady(rounds), Options{Mode: "auto", Seed: 1, Costs: Lab(), Adapt: &cfg, Compute: func(_, rank, round int) time.Duration {
				d := time.Duration(float64(mean) * jitter(rank, round))
				if rank == 2 && round >= slow && round < fast {
					d *= 4
				}
				return d
			}})
			if err != nil {
				t.Fatal(err)
			}
			moves := ps[0].Moves
			if len(moves) != 2 || moves[0].Rank != 2 || moves[0].To != adapt.Server || moves[1].Rank != 2 || moves[1].To != adapt.Switch {
				t.Fatalf("moves %+v, want rank 2 to the server and back", moves)
			}
			t.Logf("steered in round %d, back in round %d", moves[0].Round, moves[1].Round)
			if at := moves[0].Round - slow; at < 0 || at > 10 {
				t.Errorf("steered in round %d, want within 10 from %d on", moves[0].Round, slow)
			}
			if at := moves[1].Round - fast; at < 0 || at > 20 {
				t.Errorf("back in round %d, want within 20 from %d on", moves[1].Round, fast)
			}
			if ps[0].Steered != 0 {
				t.Errorf("%d ranks are steered at the end", ps[0].Steered)
			}
		})
	}
}

// TestFlaps: whatever ranks do in order to be moved, in no minute are there more moves than the policy allows.
func TestFlaps(t *testing.T) {
	cfg := adapt.DefaultConfig()
	cfg.Moves, cfg.Dwell = 3, 0
	noises := map[string]func(rank, round int) float64{
		// Just as long slow as it takes to be steered, and then as long fast as it takes to come back.
		"square": func(rank, round int) float64 {
			if rank == 3 && round/13%2 == 1 {
				return 4
			}
			return 1
		},
		"turns": func(rank, round int) float64 {
			if round/7%4 == rank {
				return 4
			}
			return 1
		},
		"heavy tails": func(rank, round int) float64 {
			rng := rand.New(rand.NewPCG(uint64(rank)+7, uint64(round/6)))
			return 1 + min(9, 0.2/(1e-9+rng.Float64()))
		},
	}
	for name, noise := range noises {
		t.Run(name, func(t *testing.T) {
			ps, err := Run(steady(300), Options{Mode: "auto", Seed: 1, Costs: Lab(), Adapt: &cfg, Compute: func(_, rank, round int) time.Duration {
				return time.Duration(noise(rank, round) * float64(200*time.Millisecond))
			}})
			if err != nil {
				t.Fatal(err)
			}
			var at []time.Duration
			for _, m := range ps[0].Moves {
				at = append(at, m.At)
			}
			if !slices.IsSorted(at) {
				t.Fatalf("moves are not in the order of time: %v", at)
			}
			for i := cfg.Moves; i < len(at); i++ {
				if in := at[i] - at[i-cfg.Moves]; in < time.Minute {
					t.Errorf("%d moves within %v, want at most %d in a minute", cfg.Moves+1, in, cfg.Moves)
				}
			}
			if name != "heavy tails" && len(at) < cfg.Moves {
				t.Errorf("%d moves: the noise is not adversarial enough to reach the limit of %d", len(at), cfg.Moves)
			}
			t.Logf("%d moves", len(at))
		})
	}
}

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
