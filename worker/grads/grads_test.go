package grads_test

import (
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"

	"xagg/lab/data"
	"xagg/worker/grads"
	"xagg/worker/npy"
)

func vec(v ...float32) *fstest.MapFile { return &fstest.MapFile{Data: npy.Append(nil, v)} }

func TestOpen(t *testing.T) {
	set, err := grads.Open(fstest.MapFS{
		"b-rank0.npy":      vec(1, 2),
		"b-rank1.npy":      vec(3, 4),
		"a_rank0.npy":      vec(5),
		"a_rank1.npy":      vec(6),
		"README.md":        {Data: []byte("what this is")},
		"rank.npy":         {Data: []byte("ignored")},
		"sub/c-rank0.npy":  vec(9, 9, 9),
		"d-rank7.npy.orig": {},
	})
	if err != nil {
		t.Fatal(err)
	}
	if set.Ranks() != 2 || !cmp.Equal(set.Steps(), []string{"a", "b"}) || set.Len(0) != 1 || set.Len(1) != 2 || set.MaxLen() != 2 {
		t.Errorf("%d ranks, steps %v, lengths %d and %d", set.Ranks(), set.Steps(), set.Len(0), set.Len(1))
	}
	for _, c := range []struct {
		step, rank int
		want       []float32
	}{{0, 0, []float32{5}}, {0, 1, []float32{6}}, {1, 0, []float32{1, 2}}, {1, 1, []float32{3, 4}}} {
		if got, err := set.Vector(c.step, c.rank); err != nil || !cmp.Equal(got, c.want) {
			t.Errorf("step %d, rank %d: %v, %v, want %v", c.step, c.rank, got, err, c.want)
		}
	}
	for _, c := range [][2]int{{2, 0}, {-1, 0}, {0, 2}, {0, -1}} {
		if v, err := set.Vector(c[0], c[1]); err == nil {
			t.Errorf("step %d, rank %d: %v", c[0], c[1], v)
		}
	}
}

func TestOpenDefault(t *testing.T) {
	set, err := grads.Open(data.Gradients)
	if err != nil {
		t.Fatal(err)
	}
	if set.Ranks() != 4 || !cmp.Equal(set.Steps(), []string{"step001", "step020", "step100"}) || set.MaxLen() != 85066 {
		t.Errorf("%d ranks, steps %v, length %d", set.Ranks(), set.Steps(), set.MaxLen())
	}
}

func TestErrors(t *testing.T) {
	inf, nan := float32(math.Inf(-1)), float32(math.NaN())
	for _, c := range []struct {
		name string
		fs   fstest.MapFS
		want string
	}{
		{"nothing", fstest.MapFS{"x.npy": vec(1)}, "no files *rank{R}.npy"},
		{"missing rank", fstest.MapFS{"s-rank0.npy": vec(1), "s-rank2.npy": vec(1)}, `step "s" has no file of rank 1, but there is a rank 2`},
		{"missing in one step", fstest.MapFS{"a-rank0.npy": vec(1), "b-rank0.npy": vec(1), "b-rank1.npy": vec(1)},
			`step "a" has no file of rank 1`},
		{"lengths", fstest.MapFS{"rank0.npy": vec(1, 2), "rank1.npy": vec(1)}, "rank1.npy has 1 values, rank0.npy has 2"},
		{"rank 64", fstest.MapFS{"rank64.npy": vec(1)}, "rank 64, at most 63"},
		{"twice", fstest.MapFS{"s-rank1.npy": vec(1), "s-rank01.npy": vec(1)}, "are both rank 1"},
		{"truncated", fstest.MapFS{"rank0.npy": {Data: npy.Append(nil, []float32{1, 2})[:130]}}, "rank0.npy: file is truncated"},
		{"trailing", fstest.MapFS{"rank0.npy": {Data: append(npy.Append(nil, []float32{1, 2}), 0)}}, "rank0.npy: file has bytes after"},
		{"dtype", fstest.MapFS{"rank0.npy": {Data: []byte(strings.Replace(string(npy.Append(nil, nil)), "<f4", "<f8", 1))}}, "rank0.npy: unsupported dtype"},
		{"NaN", fstest.MapFS{"s-rank0.npy": vec(1, 2), "s-rank1.npy": vec(1, nan)}, "step s, rank 1: value 1 is NaN"},
		{"Inf", fstest.MapFS{"s-rank0.npy": vec(inf, 2), "s-rank1.npy": vec(1, 1)}, "step s, rank 0: value 0 is -Inf"},
	} {
		set, err := grads.Open(c.fs)
		for step := 0; err == nil && step < len(set.Steps()); step++ {
			for rank := 0; err == nil && rank < set.Ranks(); rank++ {
				_, err = set.Vector(step, rank)
			}
		}
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", c.name, err, c.want)
		}
	}
}

func TestParse(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "rank0.npy"), npy.Append(nil, []float32{7}), 0o644); err != nil {
		t.Fatal(err)
	}
	set, err := grads.Parse(dir, 3)
	if err != nil || set.Ranks() != 1 || !cmp.Equal(set.Steps(), []string{""}) {
		t.Errorf("directory: %+v, %v", set, err)
	}
	set, err = grads.Parse("synthetic:1000", 3)
	if err != nil || set.Ranks() != 3 || len(set.Steps()) != grads.SyntheticSteps || set.MaxLen() != 1000 {
		t.Errorf("synthetic: %+v, %v", set, err)
	}
	for _, spec := range []string{"synthetic:", "synthetic:-1", "synthetic:many", filepath.Join(dir, "nowhere")} {
		if _, err := grads.Parse(spec, 3); err == nil {
			t.Errorf("%s: no error", spec)
		}
	}
}

// TestSynthetic: vectors depend on step and rank alone, are finite and spread over many binades.
func TestSynthetic(t *testing.T) {
	const n = 5000
	seen := map[float32]bool{}
	for step := range 2 {
		for rank := range 2 {
			a, err := grads.Synthetic(n, 2, 2).Vector(step, rank)
			if err != nil {
				t.Fatal(err)
			}
			b, err := grads.Synthetic(n, 64, 9).Vector(step, rank)
			if err != nil || !cmp.Equal(a, b) {
				t.Errorf("step %d, rank %d differs between sets: %v", step, rank, err)
			}
			if seen[a[0]] {
				t.Errorf("step %d, rank %d begins like another vector", step, rank)
			}
			seen[a[0]] = true
			lo, hi, negative := math.Inf(1), 0.0, 0
			for _, x := range a {
				m := math.Abs(float64(x))
				lo, hi = min(lo, m), max(hi, m)
				if x < 0 {
					negative++
				}
			}
			if hi/lo < 1000 || negative < n/3 || negative > 2*n/3 {
				t.Errorf("step %d, rank %d: magnitudes from %g to %g, %d of %d negative", step, rank, lo, hi, negative, n)
			}
		}
	}
}

func TestSchedule(t *testing.T) {
	set := grads.Synthetic(1, 1, 2)
	for rounds, want := range map[int][]int{
		0: {0, 0, 0, 1, 1, 1}, 1: {0}, 4: {0, 0, 0, 1}, 8: {0, 0, 0, 1, 1, 1, 0, 0},
	} {
		if got := set.Schedule(rounds); !cmp.Equal(got, want) {
			t.Errorf("%d rounds: %v, want %v", rounds, got, want)
		}
	}
}

func TestCheck(t *testing.T) {
	set, err := grads.Open(fstest.MapFS{
		"a-rank0.npy": vec(1, 2),
		"a-rank1.npy": vec(3, 4),
		"b-rank0.npy": vec(5, 6),
		"b-rank1.npy": vec(7, float32(math.NaN())),
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := set.Check(2, 0); err == nil || !strings.Contains(err.Error(), "step b, rank 1: value 1 is NaN") {
		t.Errorf("check of all vectors: %v, want step, rank and index of the NaN", err)
	}
	if err := set.Check(1, 0); err != nil {
		t.Errorf("check of rank 0 alone: %v", err)
	}
	if err := set.Check(2, grads.RepeatsPerStep); err != nil {
		t.Errorf("check of a run over the first step alone: %v", err)
	}
	if err := grads.Synthetic(10, 2, 2).Check(2, 0); err != nil {
		t.Errorf("check of a synthetic set: %v", err)
	}
}
