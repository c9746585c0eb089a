package exchange

import (
	"math"
	"math/rand/v2"
	"testing"
)

// TestAddVectors compares the vectors' sums with a plain loop's, bit by bit, at all lengths and alignments, with what lies
// around them.
func TestAddVectors(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	number := func() float32 {
		if random.IntN(50) == 0 {
			return []float32{0, float32(math.Copysign(0, -1)), float32(math.Inf(1)), math.MaxFloat32, math.SmallestNonzeroFloat32}[random.IntN(5)]
		}
		return float32(random.NormFloat64())
	}
	for length := range 200 {
		for offset := range 9 {
			x, y := make([]float32, length+2*9), make([]float32, length+2*9)
			for i := range x {
				x[i], y[i] = number(), number()
			}
			want := append([]float32(nil), x...)
			for i := range length {
				want[offset+i] += y[2*offset+i]
			}
			Add(x[offset:offset+length], y[2*offset:2*offset+length])
			for i := range x {
				if math.Float32bits(x[i]) != math.Float32bits(want[i]) {
					t.Fatalf("length %d offset %d: value %d is %v, want %v", length, offset, i, x[i], want[i])
				}
			}
		}
	}
}
