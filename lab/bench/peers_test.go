package bench

import (
	"math"
	"slices"
	"testing"
	"time"

	"xagg/lab/scenario"
)

// Libraries' ranks compute as long and sum the same as in all other modes.
func TestPeerPlan(t *testing.T) {
	const job, seed = 0, 7
	s := &scenario.Scenario{
		Name: "s", Servers: 1, Warmup: 2, Rounds: 3, Links: scenario.Links{Worker: 40e6},
		Jobs: []scenario.Job{{Name: "a", Ranks: 5, Tensors: scenario.Tensors{Sizes: []int{3000, 7}},
			Compute: scenario.Compute{Mean: 50 * time.Millisecond, Jitter: 0.3, Slow: map[int]float64{1: 2}, Backward: 0.5}}},
	}
	plan, err := peerPlan(s, seed, job)
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(plan.Buckets, []int{3000, 7}) || len(plan.Ready) != 5 || len(plan.Values) != scenario.ValuesPeriod {
		t.Fatalf("buckets %v, %d ranks, %d steps", plan.Buckets, len(plan.Ready), len(plan.Values))
	}
	for rank, rounds := range plan.Ready {
		if len(rounds) != 5 {
			t.Fatalf("rank %d has %d rounds, warm-up included, want 5", rank, len(rounds))
		}
		for round, ready := range rounds {
			if want := s.Ready(job, s.Compute(seed, job, rank, round)); !slices.Equal(ready, want) {
				t.Errorf("rank %d, round %d: ready after %v, want %v", rank, round, ready, want)
			}
		}
	}
	values, err := s.NewValues(seed, job)
	if err != nil {
		t.Fatal(err)
	}
	for round := range 5 {
		ranks := plan.Values[round%len(plan.Values)]
		values.Sums(round, 0, 3007, func(at int, factor float64, sums []float64) {
			for i, want := range sums {
				var sum float64
				for _, vector := range ranks {
					sum += float64(vector[at+i])
				}
				if math.Abs(sum-factor*want) > 1e-9 {
					t.Fatalf("round %d: value %d sums up to %g, want %g", round, at+i, sum, factor*want)
				}
			}
		})
	}
}
