package sim

import (
	"fmt"
	"math/bits"
	"time"

	"xagg/wire"
	"xagg/worker/transport"
)

// Quorum makes a job one whose chunks close with some of the ranks.
type Quorum struct {
	Ranks int           `yaml:"ranks"` // that are enough, 1..workers
	Wait  time.Duration `yaml:"wait"`  // how long a chunk is kept open for more, from its first arrival
}

// quorumRounds is how many rounds the servers of a quorum job keep: more than a random schedule has, so that no rank
// falls behind too far.
const quorumRounds = 256

// ledger follows by the masks of results what has become of the integers that ranks gave in a job with a quorum.
type ledger struct {
	given    map[[2]int][]int32   // by all-reduce and rank: the input, with what was left out before
	residual []map[string][]int32 // by rank and key: what was left out so far
	results  map[uint32]outcome   // by round: what the first rank that had it was told
}

// outcome is a round's result.
type outcome struct {
	sum   []int32
	masks []uint64
	told  uint64 // mask of the ranks that were told so and live
}

func newLedger(ranks int) *ledger {
	l := &ledger{
		given: map[[2]int][]int32{}, residual: make([]map[string][]int32, ranks), results: map[uint32]outcome{},
	}
	for r := range l.residual {
		l.residual[r] = map[string][]int32{}
	}
	return l
}

// give notes that a rank begins an all-reduce with an input.
func (l *ledger) give(rank, work int, key string, input []int32) {
	given := make([]int32, len(input))
	copy(given, input)
	for i, v := range l.residual[rank][key] {
		given[i] += v
	}
	l.residual[rank][key] = make([]int32, len(input))
	l.given[[2]int{work, rank}] = given
}

// dies notes that a rank is gone: what it alone was told of may be summed again, by others.
func (l *ledger) dies(rank int) {
	for number, o := range l.results {
		if o.told &^= 1 << rank; o.told == 0 {
			delete(l.results, number)
		} else {
			l.results[number] = o
		}
	}
}

// comesBack notes that a rank begins with an all-reduce, and without what had been left out of its vectors before.
func (l *ledger) comesBack(rank, work int) {
	l.residual[rank] = map[string][]int32{}
	for at := range l.given {
		if at[0] >= work && at[1] == rank {
			delete(l.given, at)
		}
	}
}

// take checks a round that a rank was told of: that it is the same for all ranks, and the sum of what exactly the ranks in
// its masks gave. It notes what was left out of the rank's own.
func (l *ledger) take(rank, work int, key string, r *transport.Round, quorum int, all uint64) error {
	if first, ok := l.results[r.Number]; ok {
		first.told |= 1 << rank
		l.results[r.Number] = first
		if i := difference(r.Sum, first.sum); i >= 0 {
			return fmt.Errorf("lane %d is %d, another rank was told %d", r.Offset+i, r.Sum[i], first.sum[i])
		}
		for c, mask := range r.Masks {
			if mask != first.masks[c] {
				return fmt.Errorf("chunk %d has mask %#x, another rank was told %#x", c, mask, first.masks[c])
			}
		}
	} else {
		l.results[r.Number] = outcome{append([]int32{}, r.Sum...), append([]uint64{}, r.Masks...), 1 << rank}
	}
	for c, mask := range r.Masks {
		if mask&^all != 0 || bits.OnesCount64(mask) < quorum {
			return fmt.Errorf("chunk %d has mask %#x, want %d ranks", c, mask, quorum)
		}
		for i := c * wire.MaxLanes; i < min((c+1)*wire.MaxLanes, len(r.Sum)); i++ {
			var want int32
			for m := mask; m != 0; m &= m - 1 {
				given, ok := l.given[[2]int{work, bits.TrailingZeros64(m)}]
				if !ok {
					return fmt.Errorf("chunk %d has mask %#x, and rank %d has not begun", c, mask, bits.TrailingZeros64(m))
				}
				want += given[r.Offset+i]
			}
			if r.Sum[i] != want {
				return fmt.Errorf("lane %d is %d, want %d of mask %#x", r.Offset+i, r.Sum[i], want, mask)
			}
			if mask>>rank&1 == 0 {
				l.residual[rank][key][r.Offset+i] = l.given[[2]int{work, rank}][r.Offset+i]
			}
		}
	}
	return nil
}
