package demo

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"math"
	"sync"

	"xagg/worker/grads"
)

// verifier checks what workers received against sums of its own. It shares no code with the aggregation: the input is
// quantized and added by plain loops here.
type verifier struct {
	set   *grads.Set
	steps []int // [all-reduce] index of the step that it sums
	limit float64

	mu       sync.Mutex
	residual []map[int][]float32 // [rank][length][lane] what clipping left over for the next vector of that length
	wanted   map[int]*wanted
	digests  [][sha256.Size]byte // [all-reduce] of exponent and sums
	relL2    float64             // the largest of all all-reduces
	maxAbs   float64
}

// wanted is what every worker must hold after an all-reduce.
type wanted struct {
	exponent int8
	sums     []int32
	takers   uint64 // ranks that were checked
}

func newVerifier(set *grads.Set, ranks int, steps []int) *verifier {
	return &verifier{
		set:      set,
		steps:    steps,
		limit:    float64(math.MaxInt32 / int32(ranks)),
		residual: make([]map[int][]float32, ranks),
		wanted:   map[int]*wanted{},
		digests:  make([][sha256.Size]byte, len(steps)),
	}
}

// check compares the integers that a rank received in an all-reduce. Every rank reports its all-reduces in order.
func (v *verifier) check(rank, index int, exponent int8, sums []int32) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	if index < 0 || index >= len(v.steps) {
		return fmt.Errorf("rank %d reports all-reduce %d, there are %d", rank, index, len(v.steps))
	}
	w := v.wanted[index]
	if w == nil {
		var err error
		if w, err = v.sum(index, exponent); err != nil {
			return err
		}
		v.wanted[index] = w
	}
	if exponent != w.exponent {
		return fmt.Errorf("all-reduce %d: rank %d has exponent %d, another rank %d", index, rank, exponent, w.exponent)
	}
	if len(sums) != len(w.sums) {
		return fmt.Errorf("all-reduce %d: rank %d has %d lanes, want %d", index, rank, len(sums), len(w.sums))
	}
	for i, s := range sums {
		if s != w.sums[i] {
			return fmt.Errorf("all-reduce %d: rank %d has %d in lane %d, the plain sum is %d", index, rank, s, i, w.sums[i])
		}
	}
	if w.takers |= 1 << rank; w.takers == 1<<len(v.residual)-1 {
		w.sums = nil // every rank was checked
	}
	return nil
}

// sum quantizes and adds the input of an all-reduce, and measures how far the sum is from the one in float64.
func (v *verifier) sum(index int, exponent int8) (*wanted, error) {
	step := v.steps[index]
	n := v.set.Len(step)
	sums, exact := make([]int64, n), make([]float64, n)
	scale := math.Ldexp(1, int(exponent))
	for rank := range v.residual {
		x, err := v.set.Vector(step, rank)
		if err != nil {
			return nil, err
		}
		if v.residual[rank] == nil {
			v.residual[rank] = map[int][]float32{}
		}
		residual := v.residual[rank][n]
		if residual == nil {
			residual = make([]float32, n)
			v.residual[rank][n] = residual
		}
		for i := range x {
			exact[i] += float64(x[i])
			scaled := float64(x[i]+residual[i]) * scale
			lane := max(-v.limit, min(v.limit, math.RoundToEven(scaled)))
			residual[i] = 0
			if math.Abs(scaled-lane) > 0.5 {
				residual[i] = float32((scaled - lane) / scale)
			}
			sums[i] += int64(lane)
		}
	}
	w := &wanted{exponent: exponent, sums: make([]int32, n)}
	digest := sha256.New()
	digest.Write([]byte{byte(exponent)})
	var lane [4]byte
	var squares, off float64
	for i, s := range sums {
		if s != int64(int32(s)) {
			return nil, fmt.Errorf("all-reduce %d: the sum of lane %d overflows: %d", index, i, s)
		}
		w.sums[i] = int32(s)
		binary.BigEndian.PutUint32(lane[:], uint32(s))
		digest.Write(lane[:])
		d := float64(s)/scale - exact[i]
		off += d * d
		squares += exact[i] * exact[i]
		v.maxAbs = max(v.maxAbs, math.Abs(d))
	}
	if squares > 0 {
		v.relL2 = max(v.relL2, math.Sqrt(off/squares))
	}
	digest.Sum(v.digests[index][:0])
	return w, nil
}

// complete returns an error when any rank has not reported every all-reduce.
func (v *verifier) complete() error {
	v.mu.Lock()
	defer v.mu.Unlock()
	for index := range v.steps {
		var have uint64
		if w := v.wanted[index]; w != nil {
			have = w.takers
		}
		for rank := range v.residual {
			if have&(1<<rank) == 0 {
				return fmt.Errorf("all-reduce %d: rank %d has not reported", index, rank)
			}
		}
	}
	return nil
}
