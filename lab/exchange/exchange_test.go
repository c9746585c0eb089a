package exchange

import (
	"bytes"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

func TestAdd(t *testing.T) {
	for n := range 100 {
		for at := range 4 { // any alignment
			// A value more on either side stays as it is.
			x, y := make([]float32, at+n+1), make([]float32, at+n+1)
			for i := range x {
				x[i], y[i] = rand.Float32(), rand.Float32()
			}
			want := slices.Clone(x)
			for i := range n {
				want[at+i] += y[at+i]
			}
			if Add(x[at:at+n], y[at:at+n]); !slices.Equal(x, want) {
				t.Errorf("%d values from %d on: %v, want %v", n, at, x, want)
			}
		}
	}
	inf := float32(math.Inf(1))
	x := slices.Repeat([]float32{1, inf, -inf, math.MaxFloat32}, 5)
	Add(x, slices.Repeat([]float32{-1, inf, inf, math.MaxFloat32}, 5))
	for i := 0; i < len(x); i += 4 {
		if x[i] != 0 || x[i+1] != inf || x[i+2] == x[i+2] || x[i+3] != inf {
			t.Errorf("%v, want 0, +Inf, NaN, +Inf", x[i:i+4])
		}
	}
}

func TestBytes(t *testing.T) {
	x := []float32{1, -2, 3.5}
	if got := Floats(Bytes(x)); !slices.Equal(got, x) || len(Bytes(x)) != 12 {
		t.Errorf("%v became %v", x, got)
	}
	if Bytes([]float32{}) != nil || Floats(nil) != nil {
		t.Error("memory of nothing")
	}
}

func TestHello(t *testing.T) {
	plan := Plan{3, []int{5, 6}}
	read := func(h Hello) (int, error) { return ReadHello(bytes.NewReader(Bytes([]Hello{h})), plan, 7) }
	if rank, err := read(NewHello(plan, 2, 7)); rank != 2 || err != nil {
		t.Errorf("rank %d, %v", rank, err)
	}
	swapped := NewHello(plan, 2, 7)
	swapped.magic = 0x67676178
	for want, h := range map[string]Hello{
		"or of another byte order":                swapped,
		"rank 3 of 3, but":                        NewHello(plan, 3, 7),
		"rank 0 of 4, but":                        NewHello(Plan{4, plan.Buckets}, 0, 7),
		"for another process":                     NewHello(plan, 0, 8),
		"1 buckets of 11 values in all, but this": NewHello(Plan{3, []int{11}}, 0, 7),
		"2 buckets of 11 values in all, but this": NewHello(Plan{3, []int{6, 5}}, 0, 7),
	} {
		if _, err := read(h); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, want %q", h, err, want)
		}
	}
	for _, p := range []Plan{{0, []int{1}}, {1, nil}, {1, []int{-1}}, {1, []int{MaxValues, 1}}} {
		if p.Check() == nil {
			t.Errorf("%+v is accepted", p)
		}
	}
	if err := plan.Check(); err != nil {
		t.Error(err)
	}
}

// BenchmarkAdd is the sum of 16 KiB.
func BenchmarkAdd(b *testing.B) {
	x, y := make([]float32, 4096), make([]float32, 4096)
	b.SetBytes(4 * 4096)
	for b.Loop() {
		Add(x, y)
	}
}
