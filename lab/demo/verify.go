package demo

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"math"
	"math/bits"
	"slices"
	"sync"

	"xagg/wire"
	"xagg/worker/grads"
	"xagg/worker/replay"
)

// verifier checks what workers received against sums of its own. It shares no code with the aggregation: the input is
// quantized and added by plain loops here. It knows from the masks alone what of a rank was left out.
//
// All-reduces have numbers: buckets of them for each vector.
type verifier struct {
	set     *grads.Set
	steps   []int // [vector] index of the step that it is of
	buckets int   // of a vector
	limit   float64
	quorum  int // ranks that a chunk must have

	mu       sync.Mutex
	vectors  [][]float32 // [rank] the vectors of the step that was summed last, of
	step     int
	away     [][]absence            // [rank]
	residual []map[tensor][]float32 // [rank][tensor][lane] what was left out, for the tensor's next all-reduce
	balance  map[tensor]*balance
	wanted   []wanted            // [all-reduce]
	digests  [][sha256.Size]byte // [all-reduce] of exponent and sums
	relL2    float64             // the largest of all all-reduces
	maxAbs   float64
	counted  int // contributors, of all chunks
	chunks   int
	least    int // contributors of a chunk
}

// tensor is what keeps its scale and what was left out from one all-reduce to the next.
type tensor struct{ lanes, bucket int }

// balance is the account of a tensor by lane, over all all-reduces: what the ranks gave, what workers received, and the
// most by which rounding may have put the two apart.
type balance struct{ given, received, rounding []float64 }

// absence is from which all-reduce on a rank was dead, and with which it came back. What it had begun may be in the sums
// of the first of these; the rest of that, and what had been left out before, is lost.
type absence struct{ from, to int }

// wanted is what every worker must hold after an all-reduce.
type wanted struct {
	exponent int8
	masks    []uint64 // contributors by chunk
	sums     []int32
	takers   uint64 // ranks that were checked; none: nothing else is known
}

func newVerifier(set *grads.Set, ranks int, steps []int, buckets, quorum int) *verifier {
	return &verifier{
		set:      set,
		steps:    steps,
		buckets:  buckets,
		quorum:   quorum,
		step:     -1,
		limit:    float64(math.MaxInt32 / int32(ranks)),
		residual: make([]map[tensor][]float32, ranks),
		away:     make([][]absence, ranks),
		balance:  map[tensor]*balance{},
		wanted:   make([]wanted, len(steps)*buckets),
		digests:  make([][sha256.Size]byte, len(steps)*buckets),
		least:    ranks,
	}
}

// name spells an all-reduce.
func (v *verifier) name(number int) string {
	if v.buckets == 1 {
		return fmt.Sprintf("all-reduce %d", number)
	}
	return fmt.Sprintf("all-reduce %d, bucket %d", number/v.buckets, number%v.buckets)
}

// take checks what a rank holds after an all-reduce.
func (v *verifier) take(number int, r reduced) error {
	return v.check(r.rank, number, r.line.Exponent, r.masks, r.sums)
}

// check compares the integers that a rank received in an all-reduce, and their contributors by chunk; none stands for all
// ranks. Every rank reports its all-reduces in order.
func (v *verifier) check(rank, number int, exponent int8, masks []uint64, sums []int32) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	if masks == nil {
		masks = slices.Repeat([]uint64{v.all()}, chunks(len(sums)))
	}
	w := &v.wanted[number]
	if w.takers == 0 {
		if err := v.sum(w, number, exponent, masks); err != nil {
			return err
		}
		if len(sums) == len(w.sums) {
			received := v.account(number).received
			for i, s := range sums {
				received[i] += math.Ldexp(float64(s), -int(exponent))
			}
		}
	}
	if w.takers>>rank&1 != 0 {
		return fmt.Errorf("%s: rank %d reports it twice", v.name(number), rank)
	}
	fail := func(format string, args ...any) error {
		return fmt.Errorf("%s: rank %d has %s", v.name(number), rank, fmt.Sprintf(format, args...))
	}
	if exponent != w.exponent {
		return fail("exponent %d, another rank %d", exponent, w.exponent)
	}
	if len(sums) != len(w.sums) {
		return fail("%d lanes, want %d", len(sums), len(w.sums))
	}
	for i := range w.masks {
		if i >= len(masks) || masks[i] != w.masks[i] {
			return fail("contributors %#x, another rank %#x", masks, w.masks)
		}
	}
	for i, s := range sums {
		if s != w.sums[i] {
			return fail("%d in lane %d, the plain sum is %d", s, i, w.sums[i])
		}
	}
	if w.takers |= 1 << rank; w.takers == v.all() {
		w.sums, w.masks = nil, nil // every rank was checked
	}
	return nil
}

// all is the mask of all ranks.
func (v *verifier) all() uint64 { return 1<<len(v.residual) - 1 }

// load makes a step's vectors those that are summed.
func (v *verifier) load(step int) error {
	if v.step == step {
		return nil
	}
	v.vectors = v.vectors[:0]
	for rank := range v.residual {
		x, err := v.set.Vector(step, rank)
		if err != nil {
			return err
		}
		v.vectors = append(v.vectors, x)
	}
	v.step = step
	return nil
}

// account returns the account of the tensor of an all-reduce.
func (v *verifier) account(number int) *balance {
	lanes, bucket := v.set.Len(v.steps[number/v.buckets]), number%v.buckets
	b := v.balance[tensor{lanes, bucket}]
	if b == nil {
		from, to := replay.Bucket(lanes, v.buckets, bucket)
		b = &balance{make([]float64, to-from), make([]float64, to-from), make([]float64, to-from)}
		v.balance[tensor{lanes, bucket}] = b
	}
	return b
}

// sum quantizes and adds the input of an all-reduce of which the contributors are known, and measures how far the sum is
// from the one in float64.
func (v *verifier) sum(w *wanted, number int, exponent int8, masks []uint64) error {
	if err := v.load(v.steps[number/v.buckets]); err != nil {
		return err
	}
	lanes, bucket := v.set.Len(v.step), number%v.buckets
	from, to := replay.Bucket(lanes, v.buckets, bucket)
	n := to - from
	if len(masks) != chunks(n) {
		return fmt.Errorf("%s: contributors of %d chunks, there are %d", v.name(number), len(masks), chunks(n))
	}
	for _, m := range masks {
		ranks := bits.OnesCount64(m)
		if ranks < v.quorum || m&^v.all() != 0 {
			return fmt.Errorf("%s: a chunk has the contributors %#x, want at least %d of %d ranks", v.name(number), m, v.quorum,
				len(v.residual))
		}
		v.counted += ranks
		v.chunks++
		v.least = min(v.least, ranks)
	}
	sums, exact := make([]int64, n), make([]float64, n)
	scale := math.Ldexp(1, int(exponent))
	account := v.account(number)
	for rank, vector := range v.vectors {
		if v.residual[rank] == nil {
			v.residual[rank] = map[tensor][]float32{}
		}
		residual := v.residual[rank][tensor{lanes, bucket}]
		if residual == nil {
			residual = make([]float32, n)
			v.residual[rank][tensor{lanes, bucket}] = residual
		}
		away := v.isAway(rank, number)
		for i, x := range vector[from:to] {
			in := masks[i/wire.MaxLanes]>>rank&1 != 0
			if away && !in {
				continue
			}
			account.given[i] += float64(x)
			x += residual[i]
			account.rounding[i] += math.Abs(float64(x)) * 0x1p-24
			if !in {
				residual[i] = x
				continue
			}
			exact[i] += float64(x)
			account.rounding[i] += 0.5 / scale
			scaled := float64(x) * scale
			lane := max(-v.limit, min(v.limit, math.RoundToEven(scaled)))
			residual[i] = 0
			if math.Abs(scaled-lane) > 0.5 {
				residual[i] = float32((scaled - lane) / scale)
			}
			sums[i] += int64(lane)
		}
	}
	w.exponent, w.masks, w.sums = exponent, slices.Clone(masks), make([]int32, n)
	digest := sha256.New()
	digest.Write([]byte{byte(exponent)})
	var lane [4]byte
	for i, s := range sums {
		if s != int64(int32(s)) {
			return fmt.Errorf("%s: the sum of lane %d overflows: %d", v.name(number), i, s)
		}
		w.sums[i] = int32(s)
		binary.BigEndian.PutUint32(lane[:], uint32(s))
		digest.Write(lane[:])
	}
	maxAbs, relL2 := distance(func(i int) float64 { return float64(sums[i]) / scale }, exact)
	v.maxAbs, v.relL2 = max(v.maxAbs, maxAbs), max(v.relL2, relL2)
	digest.Sum(v.digests[number][:0])
	return nil
}

func (v *verifier) isAway(rank, number int) bool {
	return slices.ContainsFunc(v.away[rank], func(a absence) bool { return a.from <= number && number < a.to })
}

// leave notes that a rank died, before any all-reduce is checked that it has not reported.
func (v *verifier) leave(rank int, a absence) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.away[rank] = append(v.away[rank], a)
}

// forget strikes what was left out of a rank's vectors so far: with the rank it is lost.
func (v *verifier) forget(rank int) {
	v.mu.Lock()
	defer v.mu.Unlock()
	for name, residual := range v.residual[rank] {
		for i, x := range residual {
			v.balance[name].given[i] -= float64(x)
		}
	}
	v.residual[rank] = nil
}

// contributors returns how many ranks chunks had, at least and on average.
func (v *verifier) contributors() (least int, mean float64) {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.least, float64(v.counted) / float64(max(v.chunks, 1))
}

// complete returns an error when any rank has not reported every all-reduce, or when what the ranks gave is not what
// they received and what was left out.
func (v *verifier) complete() error {
	v.mu.Lock()
	defer v.mu.Unlock()
	for number, w := range v.wanted {
		for rank := range v.residual {
			if w.takers&(1<<rank) == 0 && !v.isAway(rank, number) {
				return fmt.Errorf("%s: rank %d has not reported", v.name(number), rank)
			}
		}
	}
	for name, b := range v.balance {
		for i, given := range b.given {
			there := b.received[i]
			for _, residual := range v.residual {
				if residual[name] != nil {
					there += float64(residual[name][i])
				}
			}
			if math.Abs(given-there) > b.rounding[i]*(1+0x1p-20) {
				return fmt.Errorf("lane %d of bucket %d of %d lanes: the ranks gave %g, in the sums and left out are %g: rounding explains %g only",
					i, name.bucket, name.lanes, given, there, b.rounding[i])
			}
		}
	}
	return nil
}

// distance returns how far values are from exact ones: the largest difference, and the norm of all differences relative to
// the norm of the exact values, 0 where that is 0.
func distance(value func(i int) float64, exact []float64) (maxAbs, relL2 float64) {
	var squares, off float64
	for i, x := range exact {
		d := value(i) - x
		maxAbs = max(maxAbs, math.Abs(d))
		off += d * d
		squares += x * x
	}
	if squares > 0 {
		relL2 = math.Sqrt(off / squares)
	}
	return maxAbs, relL2
}
