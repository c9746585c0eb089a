package results

import (
	"math"
	"slices"

	"xagg/internal/stats"
)

// Distribution is what a sample of times comes to, in seconds.
type Distribution struct {
	N                  int
	Mean               float64
	P1, P25, P50, P75  float64
	P99                float64
	Smallest, Greatest float64
}

// Describe returns the distribution of a sample, which is not empty.
func Describe(sample []float64) Distribution {
	s := slices.Sorted(slices.Values(sample))
	return Distribution{
		N: len(s), Mean: stats.Mean(s), Smallest: s[0], Greatest: s[len(s)-1],
		P1: stats.Quantile(s, 0.01), P25: stats.Quantile(s, 0.25), P50: stats.Quantile(s, 0.5), P75: stats.Quantile(s, 0.75), P99: stats.Quantile(s, 0.99),
	}
}

// Confidence is that of every interval.
const Confidence = 0.95

// DefaultLimit is the width above which a ratio is not resolved, see [Estimate.Resolved].
const DefaultLimit = 0.2

// Estimate is a ratio of two times that were measured in pairs, with an interval of [Confidence].
type Estimate struct {
	Ratio     float64 // geometric mean of the pairs'; 0 = there are no pairs
	Low, High float64 // 0 and +Inf where there is only one pair
	Pairs     int
	// Limited says that a run behind it was limited by the machine's cores: it carries no claim.
	Limited bool
}

// Ratios returns the estimate from the ratios of pairs, which are positive.
//
// The pairs are repetitions: the two runs of a pair are neighbours in time and have the same seed, so that what slows the
// machine down for a while, and the computations that the seed draws, are in both and cancel. The rounds of a run are
// no repetitions, they share whatever the run as a whole had (Kalibera and Jones, Rigorous Benchmarking in Reasonable
// Time, ISMM 2013). The interval is Student's for the mean of the ratios' logarithms. A
// bootstrap of three to ten repetitions (percentile or BCa) has not enough values to be as wide as it should: it holds the truth in
// three of four cases where it claims 95 % (Hesterberg, What Teachers Should Know About the Bootstrap, The American
// Statistician 69, 2015; TestCoverage has both).
func Ratios(pairs []float64) Estimate {
	n := len(pairs)
	if n == 0 {
		return Estimate{}
	}
	logs := make([]float64, n)
	for i, r := range pairs {
		logs[i] = math.Log(r)
	}
	m := stats.Mean(logs)
	if n == 1 {
		return Estimate{Ratio: math.Exp(m), High: math.Inf(1), Pairs: 1}
	}
	half := halfWidth(logs)
	return Estimate{Ratio: math.Exp(m), Low: math.Exp(m - half), High: math.Exp(m + half), Pairs: n}
}

// Mean returns the mean of independent measurements, and half of the width of its interval of [Confidence], Student's: +Inf for fewer than
// two of them.
func Mean(x []float64) (m, half float64) {
	if len(x) < 2 {
		return stats.Mean(x), math.Inf(1)
	}
	return stats.Mean(x), halfWidth(x)
}

// halfWidth returns half of the width of Student's interval of [Confidence] for the mean of a sample of at least two.
func halfWidth(x []float64) float64 {
	n := len(x)
	return studentQuantile(n-1) * stats.Deviation(x) / math.Sqrt(float64(n))
}

// Resolved reports whether the interval is at most limit wide, as a share of the time that the ratio is to, or of the
// other one where that is longer.
func (e Estimate) Resolved(limit float64) bool {
	return e.Pairs > 1 && e.High-e.Low <= limit*max(1, e.Ratio)
}

// Verdict is the answer to a question that measurements may not answer.
type Verdict int

// The verdicts.
const (
	NotResolved Verdict = iota
	Yes
	No
)

func (v Verdict) String() string { return [...]string{"not resolved", "yes", "no"}[v] }

// AtMost reports whether the ratio is at most bound: yes or no only if the whole interval says so and no run was
// limited.
func (e Estimate) AtMost(bound float64) Verdict {
	switch {
	case e.Pairs < 2 || e.Limited:
		return NotResolved
	case e.High <= bound:
		return Yes
	case e.Low > bound:
		return No
	}
	return NotResolved
}

// studentQuantile returns the half-width of the interval of [Confidence] of Student's distribution with so many degrees of
// freedom.
func studentQuantile(degrees int) float64 {
	low, high := 0.0, 16.0 // 12.7 with one degree
	for range 60 {
		if middle := (low + high) / 2; studentProbability(middle, degrees) < Confidence {
			low = middle
		} else {
			high = middle
		}
	}
	return high
}

// studentProbability returns the probability that a value of Student's distribution is between -t and t (Abramowitz and
// Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4).
func studentProbability(t float64, degrees int) float64 {
	theta := math.Atan(t / math.Sqrt(float64(degrees)))
	sin, cos := math.Sincos(theta)
	term, sum := 1.0, 0.0
	first := 2
	if degrees%2 == 1 {
		term, first = cos, 3
	}
	for k := first; k <= degrees; k += 2 {
		sum += term
		term *= cos * cos * float64(k-1) / float64(k)
	}
	if degrees%2 == 1 {
		return 2 / math.Pi * (theta + sin*sum)
	}
	return sin * sum
}
