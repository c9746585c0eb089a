package scenario

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"xagg/controller"
)

const ms = time.Millisecond

// tiny returns a scenario of three ranks whose buckets take 10 ms each through a link, with two rounds. Computation takes 100, 120
// and 200 ms.
func tiny() *Scenario {
	s := one(3, Compute{Mean: 100 * ms, Slow: map[int]float64{1: 1.2, 2: 2}})
	s.Links.Worker = 32_000_000
	s.Warmup, s.Rounds = 1, 1
	s.Jobs[0].Tensors.Sizes = []int{10_000, 10_000}
	s.Jobs[0].Quorum, s.Jobs[0].Async = &Quorum{Ranks: 2}, &Async{}
	return s
}

// TestIdeal compares schedules with ones that were made by hand.
func TestIdeal(t *testing.T) {
	for _, c := range []struct {
		name        string
		consistency controller.Mode
		change      func(*Scenario)
		comm, round [3][2]int // by rank and round, ms
	}{
		{
			"sync", controller.ModeSync, func(*Scenario) {},
			// The slowest is through at 220, and so are all.
			[3][2]int{{120, 120}, {100, 100}, {20, 20}}, [3][2]int{{220, 220}, {220, 220}, {220, 220}},
		},
		{
			"sync, backward", controller.ModeSync, func(s *Scenario) { s.Jobs[0].Compute.Backward = 0.5 },
			// Rank 2 is ready at 150 and 200, which makes sums at 160 and 210; the others at 75 and 100, 90 and 120.
			[3][2]int{{135, 135}, {120, 120}, {20, 20}}, [3][2]int{{210, 210}, {210, 210}, {210, 210}},
		},
		{
			"sync, slow link", controller.ModeSync, func(s *Scenario) { s.Jobs[0].Links = map[int]Rate{0: 3_200_000} },
			// Rank 0 sends from 100 to 300, and receives from when rank 2 begins to send, 200, to 400. In the second round the others
			// are 100 ahead of it.
			[3][2]int{{300, 200}, {180, 280}, {100, 200}}, [3][2]int{{400, 300}, {300, 400}, {300, 400}},
		},
		{
			"quorum", controller.ModeQuorum, func(*Scenario) {},
			// Ranks 0 and 1 are through at 140, and in the next round at 280; rank 2 is late and waits for nothing.
			[3][2]int{{40, 40}, {20, 20}, {0, 0}}, [3][2]int{{140, 140}, {140, 140}, {200, 200}},
		},
		{
			"quorum, wait", controller.ModeQuorum, func(s *Scenario) { s.Jobs[0].Quorum.Wait = 70 * ms },
			// Rank 0 is through at 110 and 120, so sums are made at 180 and 190; then it begins at 190.
			[3][2]int{{90, 90}, {70, 70}, {0, 0}}, [3][2]int{{190, 190}, {190, 190}, {200, 200}},
		},
		{
			"quorum, long wait", controller.ModeQuorum, func(s *Scenario) { s.Jobs[0].Quorum.Wait = time.Second },
			[3][2]int{{120, 120}, {100, 100}, {20, 20}}, [3][2]int{{220, 220}, {220, 220}, {220, 220}},
		},
		{
			"quorum, skipped", controller.ModeQuorum, func(s *Scenario) { s.Jobs[0].Compute.Slow[2] = 4 },
			// Others have sums of the second round at 270; rank 2, which comes at 400, has them at once.
			[3][2]int{{40, 40}, {20, 20}, {0, 0}}, [3][2]int{{140, 140}, {140, 140}, {400, 0}},
		},
		{
			"async", controller.ModeAsync, func(s *Scenario) { s.Jobs[0].Async.Staleness = 1 },
			// The first all-reduces wait for rank 2 and are through at 220, as in sync; then nobody waits.
			[3][2]int{{120, 20}, {100, 20}, {20, 20}}, [3][2]int{{220, 120}, {220, 140}, {220, 220}},
		},
		{
			"async, late result", controller.ModeAsync, func(s *Scenario) {
				// The link that brings the sum of the others' first is slow: rank 2 has nothing of it.
				s.Jobs[0].Links = map[int]Rate{1: 3_200_000}
			},
			// Rank 1 begins to send at 200, when the scouts of all are there, and is through at 300 and 400. In the second round, which
			// the others begin at 220, their contributions count when rank 1's of the first do.
			[3][2]int{{120, 80}, {280, 200}, {20, 20}}, [3][2]int{{220, 180}, {400, 320}, {220, 220}},
		},
	} {
		s := tiny()
		c.change(s)
		if err := s.Validate(); err != nil {
			t.Fatal(err)
		}
		got := s.Ideal(1, 0, c.consistency)
		for rank := range 3 {
			for round := range 2 {
				comm, took := got.Comm[rank][round], got.Round[rank][round]
				if comm != time.Duration(c.comm[rank][round])*ms || took != time.Duration(c.round[rank][round])*ms {
					t.Errorf("%s: rank %d, round %d: communication %v in %v, want %d in %d ms", c.name, rank, round, comm, took,
						c.comm[rank][round], c.round[rank][round])
				}
				want := s.Compute(1, 0, rank, round)
				if c.round[rank][round] == 0 {
					want = 0
				}
				if got.Compute[rank][round] != want || got.Skipped[rank][round] != (want == 0) {
					t.Errorf("%s: rank %d, round %d: computes %v, want %v; skipped: %v", c.name, rank, round, got.Compute[rank][round], want,
						got.Skipped[rank][round])
				}
			}
			if got.Begin[rank][1] != got.Round[rank][0] {
				t.Errorf("%s: rank %d begins its second round at %v", c.name, rank, got.Begin[rank][1])
			}
		}
	}
}

func TestSpan(t *testing.T) {
	timing := &Timing{
		Begin: [][]time.Duration{{0, 5, 10}, {1, 4, 11}},
		Round: [][]time.Duration{{5, 5, 6}, {3, 7, 4}},
	}
	for from, want := range []time.Duration{16, 12, 6} {
		if got := timing.Span(from); got != want {
			t.Errorf("from round %d it spans %d, want %d", from, got, want)
		}
	}
}

func TestBusy(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		ready := rapid.SliceOf(rapid.IntRange(0, 40)).Draw(t, "ready")
		slices.Sort(ready)
		busy := map[int]bool{}
		var from, to []time.Duration
		for _, r := range ready {
			d := r + rapid.IntRange(0, 12).Draw(t, "took")
			from, to = append(from, time.Duration(r)), append(to, time.Duration(d))
			for ; r < d; r++ {
				busy[r] = true
			}
		}
		if got := Busy(from, to); got != time.Duration(len(busy)) {
			t.Fatalf("from %v to %v are %d, want %d", from, to, got, len(busy))
		}
	})
}

// draws a valid scenario with one job.
func draws(t *rapid.T) *Scenario {
	ranks := rapid.IntRange(1, 5).Draw(t, "ranks")
	s := one(ranks, Compute{
		Mean: time.Duration(rapid.IntRange(1, 200).Draw(t, "mean")) * ms, Jitter: rapid.Float64Range(0, 1).Draw(t, "jitter"),
		Slow: map[int]float64{}, Backward: rapid.Float64Range(0, 1).Draw(t, "backward"),
	})
	s.Warmup, s.Rounds = 1, rapid.IntRange(1, 8).Draw(t, "rounds")
	j := &s.Jobs[0]
	j.Tensors.Sizes = rapid.SliceOfN(rapid.IntRange(1, 100_000), 1, 5).Draw(t, "sizes")
	j.Links = map[int]Rate{}
	for rank := range ranks {
		j.Links[rank] = Rate(rapid.IntRange(1_000_000, 100_000_000).Draw(t, "link"))
		j.Compute.Slow[rank] = rapid.Float64Range(1, 5).Draw(t, "slow")
	}
	j.Quorum = &Quorum{Ranks: rapid.IntRange(1, ranks).Draw(t, "quorum"), Wait: time.Duration(rapid.IntRange(0, 100).Draw(t, "wait")) * ms, Rounds: 256}
	j.Async = &Async{Staleness: rapid.IntRange(0, 3).Draw(t, "staleness")}
	if err := s.Validate(); err != nil {
		t.Fatal(err)
	}
	return s
}

var consistencies = []controller.Mode{controller.ModeSync, controller.ModeQuorum, controller.ModeAsync}

// TestIdealBounds: nothing is faster than the links and the consistency allow.
func TestIdealBounds(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := draws(t)
		j := &s.Jobs[0]
		values := j.Tensors.Values()
		for _, c := range consistencies {
			d := s.ideal(1, 0, c, 1)
			timing := d.timing()
			for round, ranks := range d.turns {
				for rank, r := range ranks {
					comm := timing.Comm[rank][round]
					// Each bucket's time is rounded up by less than a nanosecond.
					if least := s.LinkRate(0, rank).time(values) - time.Duration(len(r.done)); c != controller.ModeQuorum && comm < least {
						t.Fatalf("%s: rank %d, round %d: communication %v, its link needs %v", c, rank, round, comm, least)
					}
					for b := range r.done {
						if r.done[b] < r.ready[b] {
							t.Fatalf("%s: rank %d, round %d: bucket %d is done before it is ready", c, rank, round, b)
						}
						if c == controller.ModeSync {
							for other := range ranks {
								if least := ranks[other].ready[b] + d.link[other][b]; r.done[b] < least {
									t.Fatalf("rank %d, round %d: bucket %d is done at %v, rank %d's values are through at %v", rank, round, b, r.done[b], other, least)
								}
							}
						}
						if c == controller.ModeAsync {
							if before := round - 1 - j.Async.Staleness; before >= 0 {
								for other := range ranks {
									if least := d.turns[before][other].ready[b] + d.link[other][b]; r.done[b] < least {
										t.Fatalf("rank %d is %d contributions ahead of rank %d", rank, round-before, other)
									}
								}
							}
						}
						if c == controller.ModeQuorum {
							through := 0
							for other := range ranks {
								if ranks[other].ready[b]+d.link[other][b] <= r.done[b] {
									through++
								}
							}
							if through < j.Quorum.Ranks {
								t.Fatalf("rank %d, round %d: bucket %d is done with %d ranks", rank, round, b, through)
							}
						}
					}
					if timing.Round[rank][round] < timing.Compute[rank][round] {
						t.Fatalf("%s: rank %d, round %d takes %v, computation %v", c, rank, round, timing.Round[rank][round], timing.Compute[rank][round])
					}
				}
			}
		}
	})
}

// TestIdealOrder: what waits for less is never later, and neither is what has faster links. With a quorum that is not so
// where ranks skip rounds: one that is a little faster may have to compute what it would have skipped.
func TestIdealOrder(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := draws(t)
		j := &s.Jobs[0]
		skipped := false // in any schedule so far
		ends := func(c controller.Mode) (at []time.Duration) {
			d := s.ideal(1, 0, c, 1)
			for _, ranks := range d.turns {
				for _, r := range ranks {
					at = append(at, r.done...)
					skipped = skipped || r.skipped
				}
			}
			return at
		}
		notLater := func(what string, a, b []time.Duration) {
			for i := range a {
				if a[i] > b[i] {
					t.Fatalf("%s: %v against %v", what, a, b)
				}
			}
		}
		sync, quorum, async := ends(controller.ModeSync), ends(controller.ModeQuorum), ends(controller.ModeAsync)
		notLater("quorum against sync", quorum, sync)
		notLater("async against sync", async, sync)

		wait := j.Quorum.Wait
		j.Quorum.Wait = 0
		if less := ends(controller.ModeQuorum); !skipped {
			notLater("quorum that waits less", less, quorum)
		}
		j.Quorum.Wait = wait
		k := j.Quorum.Ranks
		j.Quorum.Ranks = j.Ranks
		if all := ends(controller.ModeQuorum); !slices.Equal(all, sync) {
			t.Fatalf("a quorum of all: %v, in sync %v", all, sync)
		}
		j.Quorum.Ranks = k
		j.Async.Staleness++
		notLater("larger staleness", ends(controller.ModeAsync), async)
		j.Async.Staleness--

		rank := rapid.IntRange(0, j.Ranks-1).Draw(t, "faster")
		j.Links[rank] *= 2
		for i, before := range [][]time.Duration{sync, quorum, async} {
			if now := ends(consistencies[i]); consistencies[i] != controller.ModeQuorum || !skipped {
				notLater(fmt.Sprintf("%s, faster link of rank %d", consistencies[i], rank), now, before)
			}
		}
	})
}

// TestLag compares with counting what others have begun.
func TestLag(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		d := draws(t).ideal(1, 0, controller.ModeQuorum, 1)
		want := 0
		for round, ranks := range d.turns {
			for late := range ranks {
				for b, at := range ranks[late].ready {
					for other := range ranks {
						begun := -1
						for _, r := range d.turns {
							for _, ready := range r[other].ready {
								if ready <= at {
									begun++
								}
							}
						}
						want = max(want, begun-round*len(d.buckets)-b)
					}
				}
			}
		}
		if got, _ := d.lag(); got != want {
			t.Fatalf("lag of %d, want %d", got, want)
		}
	})
}

func TestQuorumRounds(t *testing.T) {
	s := one(4, Compute{Mean: 10 * ms})
	s.Jobs[0].Quorum = &Quorum{Ranks: 3}
	if got := s.QuorumRounds(0); got != 8 {
		t.Errorf("%d rounds are kept where nobody is late", got)
	}
	s.Jobs[0].Compute.Slow = map[int]float64{1: 10} // others need 16.4 ms for a round, and are 7 rounds ahead in the end
	if got := s.QuorumRounds(0); got != 16 {
		t.Errorf("%d rounds are kept for who is late", got)
	}
	s.Jobs[0].Quorum.Rounds = 64
	if got := s.QuorumRounds(0); got != 64 {
		t.Errorf("%d rounds are kept where 64 are asked for", got)
	}
}

// TestEstimate: an estimate is longer than the ideal, by more for those who send more.
func TestEstimate(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := draws(t)
		for _, m := range Modes() {
			got, ideal := s.Estimate(1, m), s.Ideal(1, 0, m.Consistency()).Span(0)
			if got <= ideal {
				t.Fatalf("%s: estimate %v, ideal %v", m, got, ideal)
			}
		}
		if tcp, ring := s.Estimate(1, "tcp"), s.Estimate(1, "ring"); ring < tcp {
			t.Fatalf("ring %v, tcp %v", ring, tcp)
		}
	})
}
