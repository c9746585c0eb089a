package check

import (
	"math"
	"math/big"
	"math/rand/v2"
	"testing"

	"xagg/wire"
)

func TestFingerprint(t *testing.T) {
	h := newHasher(rand.Uint64N)
	rng := rand.New(rand.NewPCG(3, 4))
	modulus := new(big.Int).SetUint64(q)
	if !modulus.ProbablyPrime(20) {
		t.Fatal("the modulus is no prime")
	}
	for n := 0; n <= wire.MaxLanes; n++ {
		a, b := make([]int32, n), make([]int32, n)
		want := new(big.Int)
		for i := range a {
			a[i], b[i] = int32(rng.Uint32()), int32(rng.Uint32())
			if n%3 == 0 {
				a[i], b[i] = math.MinInt32, math.MaxInt32
			}
			want.Add(want, new(big.Int).Mul(big.NewInt(int64(a[i])), new(big.Int).SetUint64(h.c[i])))
		}
		if got := h.sum(a); got != want.Mod(want, modulus).Uint64() {
			t.Fatalf("%d lanes: %d, want %d", n, got, want)
		}
		// Linear in the integers, so that a sum that wraps shows.
		sum, wraps := make([]int32, n), false
		for i := range a {
			sum[i] = a[i] + b[i]
			wraps = wraps || int64(sum[i]) != int64(a[i])+int64(b[i])
		}
		if got := add(h.sum(a), h.sum(b)) == h.sum(sum); got == wraps {
			t.Fatalf("%d lanes: sum equal %v, wraps %v", n, got, wraps)
		}
	}
}

func TestSingle(t *testing.T) {
	h := newHasher(rand.Uint64N)
	lanes := make([]int32, wire.MaxLanes)
	before := h.sum(lanes)
	for i := range lanes {
		for _, change := range []int32{1, -1, math.MaxInt32, math.MinInt32} {
			lanes[i] = change
			if lane, d, ok := h.single(sub(h.sum(lanes), before), len(lanes)); !ok || lane != i || d != int64(change) {
				t.Fatalf("lane %d changed by %d: lane %d, %d, %v", i, change, lane, d, ok)
			}
			lanes[i] = 0
		}
	}
	lanes[1], lanes[2] = 1, 1
	if lane, d, ok := h.single(sub(h.sum(lanes), before), len(lanes)); ok {
		t.Errorf("two lanes are explained by lane %d and %d", lane, d)
	}
}

func BenchmarkFingerprint(b *testing.B) {
	h := newHasher(rand.Uint64N)
	lanes := make([]int32, wire.MaxLanes)
	b.SetBytes(wire.MaxLanes * 4)
	for b.Loop() {
		sink = h.sum(lanes)
	}
}

var sink uint64
