package adapt

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"pgregory.net/rapid"

	"xagg/lab/scenario"
	"xagg/policy/adapt"
	"xagg/sim/timing"
)

// jitter is a factor near 1, by rank and round, and the same in every run.
func jitter(rank, round int) float64 {
	rng := rand.New(rand.NewPCG(uint64(rank), uint64(round)))
	return 1 + 0.02*rng.NormFloat64()
}

// TestReactsInSimulator: a rank that becomes 4 times slower is steered in time, and comes back in time when it has recovered, be rounds
// shorter or longer than the time between reports.
func TestReactsInSimulator(t *testing.T) {
	for _, c := range policies() {
		for _, mean := range []time.Duration{40 * time.Millisecond, 100 * time.Millisecond, 200 * time.Millisecond, 500 * time.Millisecond} {
			t.Run(fmt.Sprint(c.Rule, " ", mean), func(t *testing.T) {
				s, e := episode(t)
				s.Jobs[0].Tensors.Sizes = []int{4096}
				// However short rounds are, it stays where it has come to for the policy's dwell.
				e.To = e.From + max(e.To-e.From, steeredWithin+int(c.Dwell/(4*mean))+1)
				s.Rounds = e.To + 2*backWithin
				slow, fast := s.Warmup+e.From, s.Warmup+e.To
				ps, err := timing.Run(s, timing.Options{Mode: "auto", Seed: 1, Costs: timing.Lab(), Adapt: &c, Compute: func(_, rank, round int) time.Duration {
					d := time.Duration(float64(mean) * jitter(rank, round))
					if rank == e.Rank && slow <= round && round < fast {
						d *= 4
					}
					return d
				}})
				if err != nil {
					t.Fatal(err)
				}
				moves := ps[0].Moves
				if len(moves) != 2 || moves[0].Rank != e.Rank || moves[0].To != adapt.Server || moves[1].Rank != e.Rank || moves[1].To != adapt.Switch {
					t.Fatalf("moves %+v, want rank %d to the server and back", moves, e.Rank)
				}
				// The round is the one that is under way.
				there, back := moves[0].Round-slow, moves[1].Round-fast
				t.Logf("moved after %d slow rounds, and after %d rounds as fast as the others", there, back)
				if there < 0 || there > steeredWithin {
					t.Errorf("moved after %d slow rounds, want at most %d", there, steeredWithin)
				}
				if back < 0 || back > backWithin {
					t.Errorf("back after %d rounds as fast as the others, want at most %d", back, backWithin)
				}
			})
		}
	}
}

// TestReactsQuorum: in a quorum job, which begins with servers that sum all ranks, the switch gets some to sum, and loses one that becomes 4 times
// slower in time: results, which wait for its whole cohort, do not wait for that one.
func TestReactsQuorum(t *testing.T) {
	s, e := episode(t)
	c := adapt.DefaultConfig()
	for seed := range uint64(5) {
		ps, err := timing.Run(s, timing.Options{Mode: "auto/quorum", Seed: seed, Costs: timing.Lab(), Adapt: &c, Compute: func(job, rank, round int) time.Duration {
			return time.Duration(float64(s.Compute(seed, job, rank, round)) * jitter(rank+4*int(seed), round))
		}})
		if err != nil {
			t.Fatal(err)
		}
		cohort, there, before := map[int]bool{}, 0, 0
		for _, m := range ps[0].Moves {
			if cohort[m.Rank] = true; m.To == adapt.Server {
				delete(cohort, m.Rank)
			}
			if m.Rank == e.Rank && m.Round < s.Warmup+e.To {
				there = m.Round
			}
			if m.Round < s.Warmup+e.From {
				before = len(cohort)
			}
		}
		// Of the rounds since it is slow, it was so in those that it computed in: it skips some, to catch up.
		slow := 0
		for round := s.Warmup + e.From; round < there; round++ {
			if !ps[0].Skipped[e.Rank][round-s.Warmup] {
				slow++
			}
		}
		t.Logf("seed %d: %d ranks on the switch before it is slow; it was moved last in round %d, after %d slow ones", seed, before, there, slow)
		if before < c.MinCohort {
			t.Errorf("seed %d: the switch sums %d ranks after %d rounds, want a cohort", seed, before, s.Warmup+e.From)
		}
		if slow > steeredWithin {
			t.Errorf("seed %d: rank %d was moved after %d slow rounds, want it on a server within %d and left there", seed, e.Rank, slow, steeredWithin)
		}
		// Fast ranks wait for nobody who is slow: but for those first rounds.
		waits := 0
		for round := e.From + steeredWithin; round < e.To; round++ {
			for rank := range ps[0].Comm {
				if rank != e.Rank && ps[0].Comm[rank][round] > 60*time.Millisecond {
					waits++
				}
			}
		}
		if waits > 0 {
			t.Errorf("seed %d: the others wait for a slow rank in %d rounds, want none", seed, waits)
		}
	}
}

// adversary is a job of four ranks and the same rounds over and over, by rank how many times longer than others it computes.
type adversary [][4]float64

// square has rank 3 be slow for so many rounds, and then as fast as the others for so many.
func square(slow, fast int) (a adversary) {
	for round := range slow + fast {
		turn := [4]float64{1, 1, 1, 1}
		if round < slow {
			turn[3] = 4
		}
		a = append(a, turn)
	}
	return a
}

// moves returns when ranks are moved.
func (a adversary) moves(t rapid.TB, c adapt.Config, rounds int) (at []time.Duration) {
	s := &scenario.Scenario{
		Name: "adversary", Servers: 1, Links: scenario.Links{Worker: 50e6}, Rounds: rounds, Seed: 1,
		Jobs: []scenario.Job{{
			Name: "train", Ranks: 4, Depth: 1, Tensors: scenario.Tensors{Sizes: []int{256}}, Compute: scenario.Compute{Mean: 200 * time.Millisecond},
		}},
	}
	ps, err := timing.Run(s, timing.Options{Mode: "auto", Seed: 1, Costs: timing.Lab(), Adapt: &c, Compute: func(_, rank, round int) time.Duration {
		return time.Duration(a[round%len(a)][rank] * float64(s.Jobs[0].Compute.Mean))
	}})
	if err != nil {
		t.Fatal(err)
	}
	for i, m := range ps[0].Moves {
		if at = append(at, m.At); i > 0 && at[i] < at[i-1] {
			t.Fatalf("moves %+v are not in the order of time", ps[0].Moves)
		}
	}
	return at
}

// busiest returns the most moves of any minute.
func busiest(at []time.Duration) (most int) {
	for from := range at {
		n := 0
		for _, x := range at[from:] {
			if x-at[from] < time.Minute {
				n++
			}
		}
		most = max(most, n)
	}
	return most
}

// TestNeverFlaps: whatever ranks do in order to be moved, in no minute are there more moves than the policy allows.
func TestNeverFlaps(t *testing.T) {
	for _, c := range policies() {
		t.Run(c.Rule, func(t *testing.T) {
			rapid.Check(t, func(t *rapid.T) {
				c := c
				c.Moves = rapid.IntRange(1, 6).Draw(t, "moves a minute")
				c.Dwell = rapid.SampledFrom([]time.Duration{0, c.Dwell}).Draw(t, "dwell")
				var a adversary
				for range rapid.IntRange(1, 6).Draw(t, "phases") {
					var turn [4]float64
					for rank := range turn {
						turn[rank] = rapid.SampledFrom([]float64{1, 1, 1, 1.1, 1.5, 4, 16}).Draw(t, "factor")
					}
					for range rapid.IntRange(1, 24).Draw(t, "rounds") {
						a = append(a, turn)
					}
				}
				if n := busiest(a.moves(t, c, 200)); n > c.Moves {
					t.Errorf("%d moves in a minute, want at most %d", n, c.Moves)
				}
			})
		})
	}
}

// TestWorstPattern: the rank that changes just when it has been moved would be moved more often than the policy allows, and is not.
func TestWorstPattern(t *testing.T) {
	for _, c := range policies() {
		t.Run(c.Rule, func(t *testing.T) {
			c.Dwell = 0
			free := c
			free.Moves = 600
			worst, most := adversary(nil), 0
			for slow := 1; slow <= 12; slow++ {
				for fast := 2; fast <= 20; fast += 3 {
					a := square(slow, fast)
					if n := busiest(a.moves(t, free, 150)); n > most {
						worst, most = a, n
					}
				}
			}
			for _, moves := range []int{1, 3, most - 1} {
				c.Moves = moves
				if n := busiest(worst.moves(t, c, 300)); n != moves {
					t.Errorf("%d moves in a minute, want %d: no more are allowed, and without a limit it were %d", n, moves, most)
				}
			}
			if most < 6 {
				t.Errorf("no pattern has more than %d moves in a minute: they are no adversaries", most)
			}
			t.Logf("up to %d moves in a minute", most)
		})
	}
}
