// Package stats describes samples of numbers. Of an empty one every function returns 0: nothing was measured.
package stats

import (
	"math"
	"slices"
)

// Mean returns the arithmetic mean.
func Mean(sample []float64) float64 {
	sum := 0.0
	for _, v := range sample {
		sum += v
	}
	return sum / float64(max(len(sample), 1))
}

// Deviation returns the standard deviation of what the sample was drawn from, with n - 1 degrees of freedom; 0 of a single value.
func Deviation(sample []float64) float64 {
	mean, square := Mean(sample), 0.0
	for _, v := range sample {
		square += (v - mean) * (v - mean)
	}
	return math.Sqrt(square / float64(max(len(sample)-1, 1)))
}

// Median returns the middle of a sample in any order, or the mean of the two values there.
func Median(sample []float64) float64 {
	s := slices.Sorted(slices.Values(sample))
	if len(s) == 0 {
		return 0
	}
	return (s[(len(s)-1)/2] + s[len(s)/2]) / 2
}

// Quantile returns the smallest value of an ascending sample that a share q, 0..1, of the sample does not exceed: a value that was measured,
// not one between two.
func Quantile(sorted []float64, q float64) float64 {
	if len(sorted) == 0 {
		return 0
	}
	return sorted[max(0, int(math.Ceil(q*float64(len(sorted))))-1)]
}
