package results

import (
	"math"
	"testing"
)

func TestMean(t *testing.T) {
	// Student's quantile for two degrees of freedom is 4.303, the deviation 1.
	if m, half := Mean([]float64{1, 2, 3}); m != 2 || math.Abs(half-4.303/math.Sqrt(3)) > 1e-3 {
		t.Errorf("%g ± %g, want 2 ± 2.484", m, half)
	}
	if m, half := Mean([]float64{5}); m != 5 || !math.IsInf(half, 1) {
		t.Errorf("%g ± %g, want 5 and anything", m, half)
	}
}
