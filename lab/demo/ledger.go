package demo

import (
	"fmt"
	"math"
	"sync"

	"xagg/worker/grads"
	"xagg/worker/replay"
)

// ledger checks an async job: at its end every rank must have been told the sum of all contributions exactly once. Like
// the verifier it quantizes and adds by plain loops of its own.
type ledger struct {
	set       *grads.Set
	vectors   []replay.Vector
	ranks     int
	buckets   int
	staleness int
	limit     float64

	mu       sync.Mutex
	told     map[tensor][][]uint32 // [tensor][rank][lane] sum of all results, modulo 2^32
	exponent map[tensor]int8
	taken    []int // [rank] all-reduces
	counted  int   // contributions in results, of the chunks that had the most
	most     int
	relL2    float64 // of the sums of all contributions, the largest of all tensors
	maxAbs   float64
}

func newLedger(o *Options) *ledger {
	return &ledger{
		set:       o.Set,
		vectors:   replay.Vectors(o.Set, o.Rounds, o.settle()),
		ranks:     o.Workers,
		buckets:   o.Buckets,
		staleness: o.Consistency.Staleness,
		limit:     float64(math.MaxInt32 / (o.Workers * (2*o.Consistency.Staleness + 3))),
		told:      map[tensor][][]uint32{},
		exponent:  map[tensor]int8{},
		taken:     make([]int, o.Workers),
	}
}

// take notes what a rank was told by an all-reduce. Every rank reports its all-reduces in order.
func (l *ledger) take(number int, r reduced) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if number != l.taken[r.rank] {
		return fmt.Errorf("rank %d reports all-reduce %d, want %d", r.rank, number, l.taken[r.rank])
	}
	l.taken[r.rank]++
	t := tensor{l.set.Len(l.vectors[number/l.buckets].Step), number % l.buckets}
	from, to := replay.Bucket(t.lanes, l.buckets, t.bucket)
	if l.told[t] == nil {
		l.told[t] = make([][]uint32, l.ranks)
		l.exponent[t] = r.line.Exponent
	}
	if l.told[t][r.rank] == nil {
		l.told[t][r.rank] = make([]uint32, to-from)
	}
	// The sums begin at 0 with the job, and the scale of a tensor stays.
	if r.line.Exponent != l.exponent[t] {
		return fmt.Errorf("all-reduce %d: rank %d has exponent %d, another all-reduce of the tensor %d", number, r.rank,
			r.line.Exponent, l.exponent[t])
	}
	if len(r.sums) != to-from {
		return fmt.Errorf("all-reduce %d: rank %d has %d lanes, want %d", number, r.rank, len(r.sums), to-from)
	}
	for i, s := range r.sums {
		l.told[t][r.rank][i] += uint32(s)
	}
	// Its own contribution, and of no other rank more than lie between the farthest behind and the farthest ahead.
	additions, bound := r.line.Additions, 1+(l.ranks-1)*(2*l.staleness+3)
	if to > from && (additions < 1 || additions > bound) {
		return fmt.Errorf("all-reduce %d: rank %d was told of %d contributions, want 1 to %d", number, r.rank, additions, bound)
	}
	l.counted += additions
	l.most = max(l.most, additions)
	return nil
}

// complete returns an error unless every rank was told the sum of all contributions.
func (l *ledger) complete() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	for rank, n := range l.taken {
		if want := len(l.vectors) * l.buckets; n != want {
			return fmt.Errorf("rank %d has reported %d all-reduces of %d", rank, n, want)
		}
	}
	for t, told := range l.told {
		want, err := l.sum(t)
		if err != nil {
			return err
		}
		for rank, lanes := range told {
			for i, s := range lanes {
				if s != uint32(want[i]) {
					return fmt.Errorf("rank %d was told %d in all in lane %d of bucket %d, the sum of all contributions is %d",
						rank, int32(s), i, t.bucket, want[i])
				}
			}
		}
	}
	return nil
}

// sum quantizes and adds all contributions to a tensor, and measures how far the sum is from the one in float64.
func (l *ledger) sum(t tensor) ([]int64, error) {
	from, to := replay.Bucket(t.lanes, l.buckets, t.bucket)
	sums, exact := make([]int64, to-from), make([]float64, to-from)
	scale := math.Ldexp(1, int(l.exponent[t]))
	for rank := range l.ranks {
		rest := make([]float32, to-from) // what was clipped
		zeros := 0
		for _, v := range l.vectors {
			if l.set.Len(v.Step) != t.lanes {
				continue
			}
			x := make([]float32, t.lanes)
			if v.Zeros {
				zeros++
			} else {
				var err error
				if x, err = l.set.Vector(v.Step, rank); err != nil {
					return nil, err
				}
			}
			for i, x := range x[from:to] {
				exact[i] += float64(x)
				scaled := float64(x+rest[i]) * scale
				lane := max(-l.limit, min(l.limit, math.RoundToEven(scaled)))
				rest[i] = 0
				if math.Abs(scaled-lane) > 0.5 {
					rest[i] = float32((scaled - lane) / scale)
				}
				if zeros > 1 && lane != 0 {
					return nil, fmt.Errorf("lane %d of rank %d was clipped by so much that not all of it was added in the end", from+i, rank)
				}
				sums[i] += int64(lane)
			}
		}
	}
	maxAbs, relL2 := distance(func(i int) float64 { return float64(sums[i]) / scale }, exact)
	l.maxAbs, l.relL2 = max(l.maxAbs, maxAbs), max(l.relL2, relL2)
	return sums, nil
}

// additions returns how many contributions results had, at most and on average.
func (l *ledger) additions() (most int, mean float64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.most, float64(l.counted) / float64(l.ranks*len(l.vectors)*l.buckets)
}
