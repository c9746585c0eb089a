package demo

import (
	"math"
	"slices"
	"strings"
	"testing"

	"xagg/wire"
	"xagg/worker/grads"
	"xagg/worker/replay"
)

// history is what ranks of a job hold after each of its all-reduces, computed apart from the verifier: every rank by
// itself.
type history struct {
	exponent int8
	masks    [][]uint64 // [all-reduce][chunk]
	sums     [][]int32
}

// record sums three vectors of a set in buckets, with the contributors that masks says.
func record(t *testing.T, set *grads.Set, ranks, buckets int, masks func(number, chunk int) uint64) *history {
	t.Helper()
	h := &history{exponent: 20}
	steps := set.Schedule(3)
	kept := make([][][]float32, ranks)
	for r := range kept {
		for b := range buckets {
			from, to := replay.Bucket(set.MaxLen(), buckets, b)
			kept[r] = append(kept[r], make([]float32, to-from))
		}
	}
	for i, step := range steps {
		for b := range buckets {
			from, to := replay.Bucket(set.MaxLen(), buckets, b)
			sum, mask := make([]int32, to-from), make([]uint64, chunks(to-from))
			for c := range mask {
				mask[c] = masks(i*buckets+b, c)
			}
			for r := range ranks {
				x, err := set.Vector(step, r)
				if err != nil {
					t.Fatal(err)
				}
				for j, v := range x[from:to] {
					v += kept[r][b][j]
					kept[r][b][j] = v
					if mask[j/wire.MaxLanes]&(1<<r) != 0 {
						sum[j] += int32(math.RoundToEven(math.Ldexp(float64(v), int(h.exponent))))
						kept[r][b][j] = 0
					}
				}
			}
			h.masks, h.sums = append(h.masks, mask), append(h.sums, sum)
		}
	}
	return h
}

// TestVerifier: the verifier agrees with what is right, with a quorum too, and nothing that is wrong passes it.
func TestVerifier(t *testing.T) {
	const ranks, buckets, quorum = 3, 2, 2
	set := grads.Synthetic(1000, ranks, 2)
	// Some rank is late in every chunk but every fourth.
	late := func(number, chunk int) uint64 { return 0b111 &^ (1 << ((number + 2*chunk) % 4)) }
	for name, c := range map[string]struct {
		change func(h *history, rank int)
		want   string
	}{
		"right":         {func(*history, int) {}, ""},
		"lane":          {func(h *history, rank int) { h.sums[3][7] += int32(rank) }, "in lane 7, the plain sum is"},
		"all ranks":     {func(h *history, _ int) { h.sums[5][0]-- }, "in lane 0, the plain sum is"},
		"exponent":      {func(h *history, rank int) { h.exponent += int8(rank) }, "another rank"},
		"other mask":    {func(h *history, rank int) { h.masks[4][1] ^= uint64(rank) }, "contributors"},
		"below quorum":  {func(h *history, _ int) { h.masks[2][0] = 0b100 }, "want at least 2"},
		"nobody's bit":  {func(h *history, _ int) { h.masks[2][0] |= 0b1000 }, "want at least 2"},
		"short":         {func(h *history, rank int) { h.sums[1] = h.sums[1][:500-rank] }, "lanes, want 500"},
		"missing masks": {func(h *history, _ int) { h.masks[1] = h.masks[1][:1] }, "contributors of 1 chunks"},
		"silent":        {func(h *history, rank int) { h.sums = h.sums[:6-rank/2] }, "rank 2 has not reported"},
		// A mask that lies about who was late is seen when the values come, or do not come, with the next vector.
		"wrong mask": {func(h *history, _ int) { h.masks[0][0] = 0b111 }, "the plain sum is"},
	} {
		v := newVerifier(set, ranks, set.Schedule(3), buckets, quorum)
		var wrong error
		for rank := range ranks {
			h := record(t, set, ranks, buckets, late)
			c.change(h, rank)
			for number := range h.sums {
				if err := v.check(rank, number, h.exponent, h.masks[number], h.sums[number]); err != nil && wrong == nil {
					wrong = err
				}
			}
		}
		if wrong == nil {
			wrong = v.complete()
		}
		if c.want == "" && wrong != nil || c.want != "" && (wrong == nil || !strings.Contains(wrong.Error(), c.want)) {
			t.Errorf("%s: %v, want %q", name, wrong, c.want)
		}
		if c.want == "" {
			if least, mean := v.contributors(); least != 2 || mean <= 2 || mean >= 3 {
				t.Errorf("%s: %d contributors at least, %v on average", name, least, mean)
			}
		}
	}
}

// TestVerifierAllRanks: without masks results are of all ranks.
func TestVerifierAllRanks(t *testing.T) {
	set := grads.Synthetic(600, 2, 1)
	h := record(t, set, 2, 1, func(int, int) uint64 { return 0b11 })
	v := newVerifier(set, 2, set.Schedule(3), 1, 2)
	for rank := range 2 {
		for number, sum := range h.sums {
			if err := v.check(rank, number, h.exponent, nil, slices.Clone(sum)); err != nil {
				t.Error(err)
			}
		}
	}
	if err := v.complete(); err != nil {
		t.Error(err)
	}
}

// TestVerifierBalance: at the end what was given is what was received and left out; a value too many is an error, and so
// is an all-reduce that a rank reports twice.
func TestVerifierBalance(t *testing.T) {
	const exponent = 20
	set := grads.Synthetic(1, 1, 1)
	x, err := set.Vector(0, 0)
	if err != nil {
		t.Fatal(err)
	}
	v := newVerifier(set, 1, []int{0}, 1, 1)
	sums := []int32{int32(math.RoundToEven(math.Ldexp(float64(x[0]), exponent)))}
	if err := v.check(0, 0, exponent, nil, sums); err != nil {
		t.Fatal(err)
	}
	if err := v.complete(); err != nil {
		t.Fatal(err)
	}
	v.residual[0][tensor{1, 0}][0]++
	if err := v.complete(); err == nil || !strings.Contains(err.Error(), "rounding explains") {
		t.Errorf("%v, want an error: a value is left out that nobody gave", err)
	}
	if err := v.check(0, 0, exponent, nil, sums); err == nil || !strings.Contains(err.Error(), "twice") {
		t.Errorf("%v, want an error: the rank has reported before", err)
	}
}

// TestWitness: a rank dies in the middle of an all-reduce, misses one and comes back without what had been left out of its
// vectors. What it gives to any other all-reduce is an error, and so is what it has left out before.
func TestWitness(t *testing.T) {
	const ranks, exponent = 3, 20
	set := grads.Synthetic(2*wire.MaxLanes, ranks, 1)
	steps := set.Schedule(6)
	// Rank 2 is left out of the second chunk of the first, has begun the second, which has it in that chunk only, misses the
	// third, and is in all from the fourth on.
	masks := [][]uint64{{0b111, 0b011}, {0b011, 0b111}, {0b011, 0b011}, {0b111, 0b111}, {0b111, 0b011}, {0b111, 0b111}}
	for name, remembers := range map[string]bool{"without memory": false, "with what was lost": true} {
		w, v := &witness{}, newVerifier(set, ranks, steps, 1, 2)
		kept := make([]float32, set.MaxLen()) // of rank 2
		for number, step := range steps {
			if number == 3 && !remembers {
				clear(kept)
			}
			sums := make([]int32, set.MaxLen())
			for rank := range ranks {
				x, err := set.Vector(step, rank)
				if err != nil {
					t.Fatal(err)
				}
				for i, x := range x {
					in := masks[number][i/wire.MaxLanes]>>rank&1 != 0
					if rank == 2 {
						if x += kept[i]; in {
							kept[i] = 0
						} else {
							kept[i] = x
						}
					}
					if in {
						sums[i] += int32(math.RoundToEven(math.Ldexp(float64(x), exponent)))
					}
				}
			}
			for rank := range ranks {
				life := 0
				if rank == 2 && number >= 3 {
					life = 1
				}
				if rank == 2 && (number == 1 || number == 2) {
					continue
				}
				r := reduced{rank: rank, life: life, sums: sums, masks: masks[number], line: replay.Line{Exponent: exponent}}
				if err := w.take(number, r); err != nil {
					t.Fatal(err)
				}
			}
		}
		err := w.testify(v)
		if remembers && (err == nil || !strings.Contains(err.Error(), "all-reduce 3: rank")) {
			t.Errorf("%s: %v, want an error of all-reduce 3", name, err)
		} else if !remembers && err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}
