package scenario

import (
	"math"
	"slices"
	"testing"
	"time"
)

// TestValues: the exact sums are those of what ranks get, at every place and in every round; what follows on a round is
// another, on a larger scale by less than workers have room for.
func TestValues(t *testing.T) {
	for _, ranks := range []int{1, 3, 4, 6, 64} {
		s := one(ranks, Compute{Mean: time.Second})
		v, err := s.NewValues(3, 0)
		if err != nil {
			t.Fatal(err)
		}
		for _, piece := range [][2]int{{0, 1}, {17, 3000}, {84_000, 2000}, {85_066 * 2, 90_000}} {
			offset, n := piece[0], piece[1]
			var before []float64
			for round := range 2 * ValuesPeriod {
				want, got := make([]float64, n), make([]float64, n)
				values := make([]float32, n)
				for rank := range ranks {
					v.Fill(values, rank, round, offset)
					for i, x := range values {
						want[i] += float64(x)
					}
				}
				v.Sums(round, offset, n, func(at int, factor float64, sums []float64) {
					for i, x := range sums {
						got[at+i] = factor * x
					}
				})
				for i := range want {
					if math.Abs(got[i]-want[i]) > 1e-12*math.Max(1, math.Abs(want[i])) {
						t.Fatalf("%d ranks, round %d: sum %d from %d on is %g, want %g", ranks, round, i, offset, got[i], want[i])
					}
				}
				if n > 1 && before != nil && slices.Equal(before, want) {
					t.Errorf("rounds %d and %d have the same sums", round-1, round)
				}
				before = want
			}
		}
	}
	for round := range 2 * ValuesPeriod {
		if f := scale(round+1) / scale(round); f >= 8 || f == 1 {
			t.Errorf("round %d has %g times the values of the one before", round+1, f)
		}
	}
}

// TestValuesOfRanks: ranks that have the same recorded gradient have other values at each place.
func TestValuesOfRanks(t *testing.T) {
	v, err := one(64, Compute{Mean: time.Second}).NewValues(1, 0)
	if err != nil {
		t.Fatal(err)
	}
	var all [][]float32
	for rank := range 64 {
		values := make([]float32, 5000)
		v.Fill(values, rank, 0, 0)
		for other, have := range all {
			if slices.Equal(have, values) {
				t.Errorf("ranks %d and %d have the same values", other, rank)
			}
		}
		all = append(all, values)
	}
}

// TestValuesOfSeeds: seeds choose among all recorded steps.
func TestValuesOfSeeds(t *testing.T) {
	s := one(4, Compute{Mean: time.Second})
	first := map[float32]bool{}
	for seed := range uint64(50) {
		v, err := s.NewValues(seed, 0)
		if err != nil {
			t.Fatal(err)
		}
		var sum float32
		for _, x := range v.vectors[0] {
			sum += x
		}
		first[sum] = true
	}
	if len(first) != 3 {
		t.Errorf("%d steps in 50 seeds, want 3", len(first))
	}
}
