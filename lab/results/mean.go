package results

import "math"

// Mean returns the mean of independent measurements, and half of the width of its interval of [Confidence], Student's: +Inf for fewer than
// two of them.
func Mean(x []float64) (m, half float64) {
	m = mean(x)
	if len(x) < 2 {
		return m, math.Inf(1)
	}
	square := 0.0
	for _, v := range x {
		square += (v - m) * (v - m)
	}
	n := len(x)
	return m, studentQuantile(n-1) * math.Sqrt(square/float64(n-1)/float64(n))
}
