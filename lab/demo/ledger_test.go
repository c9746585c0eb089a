package demo

import (
	"math"
	"strings"
	"testing"

	"xagg/controller"
	"xagg/worker/grads"
	"xagg/worker/replay"
)

// TestLedger: what ranks were told in all is the sum of all contributions, or it does not pass. One rank adds all that it
// has before the other begins, as far as the staleness allows.
func TestLedger(t *testing.T) {
	const ranks, lanes, exponent = 2, 300, 16
	opts := &Options{
		Set: grads.Synthetic(lanes, ranks, 1), Workers: ranks, Rounds: 3, Buckets: 1,
		Consistency: controller.Consistency{Mode: controller.ModeAsync, Staleness: 5},
	}
	vectors := replay.Vectors(opts.Set, opts.Rounds, opts.settle())
	if len(vectors) != 3+7 || vectors[2].Zeros || !vectors[3].Zeros {
		t.Fatalf("vectors %v", vectors)
	}
	for name, c := range map[string]struct {
		change func(results [][]reduced)
		want   string
	}{
		"right":          {func([][]reduced) {}, ""},
		"later":          {func(r [][]reduced) { r[0][3].sums[9]--; r[0][4].sums[9]++ }, ""},
		"wraps":          {func(r [][]reduced) { r[0][3].sums[9] += math.MaxInt32; r[0][4].sums[9] -= math.MaxInt32 }, ""},
		"one lane":       {func(r [][]reduced) { r[1][9].sums[9]++ }, "rank 1 was told"},
		"never told":     {func(r [][]reduced) { clear(r[0][6].sums) }, "rank 0 was told"},
		"exponent":       {func(r [][]reduced) { r[1][4].line.Exponent++ }, "another all-reduce of the tensor"},
		"not its own":    {func(r [][]reduced) { r[1][0].line.Additions = 0 }, "was told of 0 contributions, want 1 to 14"},
		"too many":       {func(r [][]reduced) { r[0][9].line.Additions = 15 }, "was told of 15 contributions"},
		"lanes":          {func(r [][]reduced) { r[0][0].sums = r[0][0].sums[1:] }, "has 299 lanes, want 300"},
		"ends too early": {func(r [][]reduced) { r[1] = r[1][:9] }, "rank 1 has reported 9 all-reduces of 10"},
	} {
		results := make([][]reduced, ranks)
		var sum [lanes]int32
		last := make([][lanes]int32, ranks)
		look := func(rank int) {
			r := reduced{rank: rank, sums: make([]int32, lanes), line: replay.Line{Exponent: exponent, Additions: 1}}
			if v := vectors[len(results[rank])]; !v.Zeros {
				x, err := opts.Set.Vector(v.Step, rank)
				if err != nil {
					t.Fatal(err)
				}
				for i := range x {
					sum[i] += int32(math.RoundToEven(math.Ldexp(float64(x[i]), exponent)))
				}
			}
			for i := range r.sums {
				r.sums[i] = sum[i] - last[rank][i]
			}
			last[rank] = sum
			results[rank] = append(results[rank], r)
		}
		for i := range len(vectors) + opts.Consistency.Staleness {
			if i < len(vectors) {
				look(0)
			}
			if j := i - opts.Consistency.Staleness; j >= 0 {
				look(1)
			}
		}
		c.change(results)
		l := newLedger(opts)
		var wrong error
		for _, rank := range results {
			for number, r := range rank {
				if err := l.take(number, r); err != nil && wrong == nil {
					wrong = err
				}
			}
		}
		if wrong == nil {
			wrong = l.complete()
		}
		if c.want == "" && wrong != nil || c.want != "" && (wrong == nil || !strings.Contains(wrong.Error(), c.want)) {
			t.Errorf("%s: %v, want %q", name, wrong, c.want)
		}
	}
}
