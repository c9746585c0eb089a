package ring

import (
	"testing"

	"pgregory.net/rapid"
)

// TestBucket: whatever is passed on when and in which pieces, all ranks have the sum, and each has sent its share of the bytes.
func TestBucket(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		ranks, n := rapid.IntRange(1, 7).Draw(t, "ranks"), rapid.IntRange(0, 40).Draw(t, "values")
		buckets, want := make([]bucket, ranks), make([]float32, n)
		wires := make([][]float32, ranks) // what a rank has sent and its right neighbour not taken
		sent := make([]int, ranks)
		for rank := range ranks {
			values := make([]float32, n)
			for i := range values {
				values[i] = float32(rank*n + i)
				want[i] += values[i]
			}
			buckets[rank] = newBucket(rank, ranks, values)
		}
		for {
			// What may happen: rank sends (2 rank), rank takes (2 rank + 1).
			var may []int
			for rank := range ranks {
				if values, _ := buckets[rank].sendable(); len(values) > 0 {
					may = append(may, 2*rank)
				}
				if len(wires[(rank+ranks-1)%ranks]) > 0 {
					may = append(may, 2*rank+1)
				}
			}
			if len(may) == 0 {
				break
			}
			event := rapid.SampledFrom(may).Draw(t, "event")
			rank := event / 2
			if event%2 == 0 {
				values, last := buckets[rank].sendable()
				if rest := len(buckets[rank].segment(buckets[rank].out.step)) - buckets[rank].out.at; last != (len(values) == rest) && last {
					t.Fatalf("rank %d: %d values are called the rest of %d", rank, len(values), rest)
				}
				k := rapid.IntRange(1, len(values)).Draw(t, "pass")
				wires[rank] = append(wires[rank], values[:k]...)
				buckets[rank].pass(k)
				sent[rank] += k
				continue
			}
			wire := &wires[(rank+ranks-1)%ranks]
			k := rapid.IntRange(1, len(*wire)).Draw(t, "take")
			if rest := buckets[rank].take((*wire)[:k]); len(rest) > 0 {
				t.Fatalf("rank %d does not want %d values", rank, len(rest))
			}
			*wire = (*wire)[k:]
		}
		all := 0
		for rank, b := range buckets {
			if !b.received() || !b.passed() {
				t.Fatalf("rank %d is stuck: received to %+v, sent to %+v", rank, b.in, b.out)
			}
			for i, x := range b.values {
				if x != want[i] {
					t.Fatalf("rank %d: value %d is %g, want %g", rank, i, x, want[i])
				}
			}
			all += sent[rank]
		}
		if all != 2*(ranks-1)*n {
			t.Fatalf("%d values went over the links, want %d", all, 2*(ranks-1)*n)
		}
	})
}
