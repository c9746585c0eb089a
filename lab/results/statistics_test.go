package results

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"xagg/internal/stats"
)

func TestDescribe(t *testing.T) {
	sample := make([]float64, 200)
	for i := range sample {
		sample[i] = float64((i*37)%200 + 1) // 1 to 200, not in order
	}
	got := Describe(sample)
	want := Distribution{N: 200, Mean: 100.5, P1: 2, P25: 50, P50: 100, P75: 150, P99: 198, Smallest: 1, Greatest: 200}
	if got != want {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
	if one := Describe([]float64{3}); one != (Distribution{1, 3, 3, 3, 3, 3, 3, 3, 3}) {
		t.Errorf("of one value: %+v", one)
	}
}

// The quantiles are those of printed tables.
func TestStudentQuantile(t *testing.T) {
	for degrees, want := range map[int]float64{1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 9: 2.262, 10: 2.228, 29: 2.045, 120: 1.980} {
		if got := studentQuantile(degrees); math.Abs(got-want) > 5e-4 {
			t.Errorf("%d degrees of freedom: %.4f, want %.3f", degrees, got, want)
		}
	}
}

// Intervals hold the truth as often as they say, with as few repetitions as there are; the bootstrap's do not.
func TestCoverage(t *testing.T) {
	const trials, truth = 4000, 0.6
	rnd := rand.New(rand.NewPCG(4, 1))
	for _, tt := range []struct {
		name  string
		noise func() float64 // of a pair's logarithm, mean 0
		least float64
	}{
		{"normal", func() float64 { return 0.05 * rnd.NormFloat64() }, 0.94},
		{"heavy tails", func() float64 { return 0.03 * rnd.NormFloat64() / math.Sqrt((rnd.ExpFloat64()+rnd.ExpFloat64())/2) }, 0.93},
		{"skewed", func() float64 { return 0.05 * (math.Sqrt(rnd.ExpFloat64()) - math.Gamma(1.5)) }, 0.93},
	} {
		for _, n := range []int{2, 3, 5, 10} {
			held, bootstrapped := 0, 0
			for range trials {
				pairs := make([]float64, n)
				for i := range pairs {
					pairs[i] = truth * math.Exp(tt.noise())
				}
				if e := Ratios(pairs); e.Low <= truth && truth <= e.High {
					held++
				}
				if low, high := percentileBootstrap(rnd, pairs); low <= truth && truth <= high {
					bootstrapped++
				}
			}
			share, other := float64(held)/trials, float64(bootstrapped)/trials
			t.Logf("%s, %d repetitions: %.3f of the intervals hold the truth; of a percentile bootstrap's %.3f", tt.name, n, share, other)
			if share < tt.least || share > 0.99 {
				t.Errorf("%s, %d repetitions: %.3f of the intervals hold the truth", tt.name, n, share)
			}
			if n == 3 && other > 0.85 {
				t.Errorf("%s: the bootstrap is good enough with %d repetitions: %.3f", tt.name, n, other)
			}
		}
	}
}

// percentileBootstrap is what Ratios does not do.
func percentileBootstrap(rnd *rand.Rand, pairs []float64) (low, high float64) {
	means := make([]float64, 200)
	for i := range means {
		for range pairs {
			means[i] += math.Log(pairs[rnd.IntN(len(pairs))])
		}
		means[i] = math.Exp(means[i] / float64(len(pairs)))
	}
	slices.Sort(means)
	return stats.Quantile(means, 0.025), stats.Quantile(means, 0.975)
}

// A ratio and its inverse have the same interval, upside down; a factor on all pairs is one on the interval.
func TestRatiosProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		pairs := rapid.SliceOfN(rapid.Float64Range(0.01, 100), 2, 12).Draw(t, "pairs")
		factor := rapid.Float64Range(0.1, 10).Draw(t, "factor")
		e := Ratios(pairs)
		inverse, scaled := make([]float64, len(pairs)), make([]float64, len(pairs))
		for i, r := range pairs {
			inverse[i], scaled[i] = 1/r, factor*r
		}
		i, s := Ratios(inverse), Ratios(scaled)
		near := func(what string, got, want float64) {
			if math.Abs(got/want-1) > 1e-9 {
				t.Errorf("%s: %g, want %g", what, got, want)
			}
		}
		near("low of the inverse", i.Low, 1/e.High)
		near("high of the inverse", i.High, 1/e.Low)
		near("scaled ratio", s.Ratio, factor*e.Ratio)
		near("scaled low", s.Low, factor*e.Low)
		near("scaled high", s.High, factor*e.High)
		if e.Low > e.Ratio || e.Ratio > e.High || e.Ratio < slices.Min(pairs)*(1-1e-9) || e.Ratio > slices.Max(pairs)*(1+1e-9) {
			t.Errorf("%+v of %v", e, pairs)
		}
	})
}

func TestResolved(t *testing.T) {
	for _, tt := range []struct {
		e        Estimate
		resolved bool
		half     Verdict // at most 0.5
	}{
		{Estimate{Ratio: 0.4, Low: 0.35, High: 0.45, Pairs: 3}, true, Yes},
		{Estimate{Ratio: 0.4, Low: 0.25, High: 0.55, Pairs: 3}, false, NotResolved},
		{Estimate{Ratio: 0.3, Low: 0.1, High: 0.5, Pairs: 3}, false, Yes}, // how much is open, that it is so is not
		{Estimate{Ratio: 4, Low: 3.7, High: 4.3, Pairs: 3}, true, No},     // 15 % of itself
		{Estimate{Ratio: 0.4, Low: 0.35, High: 0.45, Pairs: 3, Limited: true}, true, NotResolved},
		{Ratios([]float64{0.4}), false, NotResolved},
		{Ratios(nil), false, NotResolved},
	} {
		if got := tt.e.Resolved(0.2001); got != tt.resolved {
			t.Errorf("%+v: resolved %v", tt.e, got)
		}
		if got := tt.e.AtMost(0.5); got != tt.half {
			t.Errorf("%+v: at most 0.5: %v", tt.e, got)
		}
	}
}
func TestMean(t *testing.T) {
	// Student's quantile for two degrees of freedom is 4.303, the deviation 1.
	if m, half := Mean([]float64{1, 2, 3}); m != 2 || math.Abs(half-4.303/math.Sqrt(3)) > 1e-3 {
		t.Errorf("%g ± %g, want 2 ± 2.484", m, half)
	}
	if m, half := Mean([]float64{5}); m != 5 || !math.IsInf(half, 1) {
		t.Errorf("%g ± %g, want 5 and anything", m, half)
	}
}
