package sim

import (
	"fmt"
	"math/bits"
	"time"

	"xagg/agg"
	"xagg/wire"
	"xagg/worker/transport"
)

// Quorum makes a job one whose chunks close with some of the ranks.
type Quorum struct {
	Ranks int           `yaml:"ranks"` // that are enough, 1..workers
	Wait  time.Duration `yaml:"wait"`  // how long a chunk is kept open for more, from its first arrival
}

func (q *Quorum) check(least, most int) error {
	if q.Ranks < least || q.Ranks > most || q.Wait < 0 || q.Wait > time.Hour {
		return fmt.Errorf("a quorum of %d ranks and %v, want %d..%d and up to an hour", q.Ranks, q.Wait, least, most)
	}
	return nil
}

// quorumOf returns the quorum of a plan while so many ranks are there, or one of no ranks. More than are there it does not
// want, but it wants as many as workers take.
func (s *Schedule) quorumOf(plan, there int) Quorum {
	q := s.Plans[plan].Quorum
	if q == nil {
		return s.quorum()
	}
	return Quorum{min(q.Ranks, max(there, s.Quorum.Ranks)), q.Wait}
}

// chunk is one of a round under a plan.
type chunk struct {
	epoch         uint16
	round, number uint32
}

// closing is what an outcome of a chunk says: its mask.
type closing struct {
	round, number uint32
	mask          uint64
}

// closings follows when servers of a job with a quorum close chunks: when that is what its plan's quorum means, whatever they
// were told.
type closings struct {
	quorums map[uint16]Quorum // of plans by epoch, for as long as the epoch lasts
	first   map[chunk]uint64  // first arrivals, by the server's clock
	done    map[chunk]bool
	masks   map[closing]bool
}

func newClosings() *closings {
	return &closings{map[uint16]Quorum{}, map[chunk]uint64{}, map[chunk]bool{}, map[closing]bool{}}
}

// answers checks what a server answers to a packet at a time of its clock: all are the ranks of the job.
func (c *closings) answers(now uint64, h *wire.Header, dest agg.Dest, all uint64) error {
	q, ok := c.quorums[h.Epoch]
	closes := h.Type == wire.TypeResult && dest == agg.ToService
	if !ok || h.Type != wire.TypeAck && !closes {
		return nil // it was closed before, or is refused
	}
	at := chunk{h.Epoch, h.Round, h.Chunk}
	if _, begun := c.first[at]; !begun {
		c.first[at] = now
	}
	age := now - c.first[at]
	enough := h.Contributors == all || bits.OnesCount64(h.Contributors) >= q.Ranks && age >= uint64(q.Wait.Microseconds())
	what := map[bool]string{true: "closes", false: "leaves open"}[closes]
	switch {
	case closes != enough:
		return fmt.Errorf("a server %s chunk %d of round %d, with mask %#x after %d us: under epoch %d %d ranks are enough, after %v",
			what, h.Chunk, h.Round, h.Contributors, age, h.Epoch, q.Ranks, q.Wait)
	case c.done[at]:
		return fmt.Errorf("a server %s chunk %d of round %d under epoch %d, which it had closed", what, h.Chunk, h.Round, h.Epoch)
	case closes:
		c.done[at], c.masks[closing{h.Round, h.Chunk, h.Contributors}] = true, true
	}
	return nil
}

// quorumRounds is how many rounds the servers of a quorum job keep: more than a random schedule has, so that no rank
// falls behind too far.
const quorumRounds = 256

// ledger follows by the masks of results what has become of the integers that ranks gave in a job with a quorum.
type ledger struct {
	w        *world
	begun    []int                // by rank: all-reduces
	given    map[[2]int][]int32   // by all-reduce and rank, of those that somebody asked for: see gave
	residual []map[string][]int32 // by rank and key: what was left out so far
	results  map[uint32]outcome   // by round: what the first rank that had it was told
	want     []int32              // of a chunk
}

// outcome is a round's result.
type outcome struct {
	work   int // the all-reduce
	offset int
	sum    []int32
	masks  []uint64
	told   uint64 // mask of the ranks that were told so and live
}

func newLedger(w *world) *ledger {
	l := &ledger{
		w: w, begun: make([]int, w.s.Workers), given: map[[2]int][]int32{}, residual: make([]map[string][]int32, w.s.Workers),
		results: map[uint32]outcome{},
	}
	for r := range l.residual {
		l.residual[r] = map[string][]int32{}
	}
	return l
}

// begins notes that a rank begins an all-reduce.
func (l *ledger) begins(rank, work int) { l.begun[rank] = work + 1 }

// gave returns what a rank gives to an all-reduce: its input, and what was left out of the tensor's vectors before. It is
// asked when the one before it of that tensor is done at the rank, and before this one is.
func (l *ledger) gave(rank, work int) []int32 {
	at := [2]int{work, rank}
	if given, ok := l.given[at]; ok {
		return given
	}
	given := make([]int32, l.w.works[work].Lanes)
	for i := range given {
		given[i] = l.w.int(work, rank, i)
	}
	key := l.w.works[work].key()
	for i, v := range l.residual[rank][key] {
		given[i] += v
	}
	l.residual[rank][key] = make([]int32, len(given))
	l.given[at] = given
	return given
}

// dies notes that a rank is gone: what it alone was told of may be summed again, by others.
func (l *ledger) dies(k *worker) {
	for work := k.work; work < k.next; work++ {
		l.gave(k.rank, work) // it may be in results of which the others are still to be told
	}
	for number, o := range l.results {
		if o.told &^= 1 << k.rank; o.told == 0 {
			delete(l.results, number)
		} else {
			l.results[number] = o
		}
	}
}

// comesBack notes that a rank begins with an all-reduce, and without what had been left out of its vectors before.
func (l *ledger) comesBack(rank, work int) {
	l.residual[rank], l.begun[rank] = map[string][]int32{}, work
	for at := range l.given {
		if at[0] >= work && at[1] == rank {
			delete(l.given, at)
		}
	}
}

// balance checks at the end of the job, value by value, that what ranks gave is what the results have and what the ranks
// keep for the next, by what their endpoints say. Of a process that died nothing is known but what results have of it.
func (l *ledger) balance() error {
	over := map[string][]int32{} // by key: what results have and ranks keep beyond what was given
	for work := range l.w.works {
		over[l.w.works[work].key()] = make([]int32, l.w.works[work].Lanes)
	}
	for _, o := range l.results {
		sum := over[l.w.works[o.work].key()][o.offset:]
		for i, v := range o.sum {
			sum[i] += v
		}
		for c, mask := range o.masks {
			from, to := c*wire.MaxLanes, min((c+1)*wire.MaxLanes, len(o.sum))
			for ; mask != 0; mask &= mask - 1 {
				k := l.w.workers[bits.TrailingZeros64(mask)]
				if !k.dead && o.work >= k.first {
					continue
				}
				for i, v := range l.gave(k.rank, o.work)[o.offset+from : o.offset+to] {
					sum[from+i] -= v
				}
			}
		}
	}
	for _, k := range l.w.workers {
		if k.dead {
			continue
		}
		for work := k.first; work < len(l.w.works); work++ {
			values := over[l.w.works[work].key()]
			for i := range values {
				values[i] -= l.w.int(work, k.rank, i)
			}
		}
		for key, values := range over {
			for i, v := range k.endpoint.Residual(key) {
				values[i] += v
			}
		}
	}
	for key, values := range over {
		for i, v := range values {
			if v != 0 {
				return fmt.Errorf("value %d of %s: results have and ranks keep %d more than was given", i, key, v)
			}
		}
	}
	return nil
}

// take checks a round that a rank was told of: that it is the same for all ranks, and the sum of what exactly the ranks in
// its masks gave. It notes what was left out of the rank's own.
func (l *ledger) take(rank, work int, r *transport.Round, quorum int, all uint64) error {
	own := l.gave(rank, work)
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
		l.results[r.Number] = outcome{work, r.Offset, append([]int32{}, r.Sum...), append([]uint64{}, r.Masks...), 1 << rank}
	}
	for c, mask := range r.Masks {
		if mask&^all != 0 || bits.OnesCount64(mask) < quorum {
			return fmt.Errorf("chunk %d has mask %#x, want %d ranks", c, mask, quorum)
		}
		if !l.w.closings.masks[closing{r.Number, uint32(c), mask}] {
			return fmt.Errorf("chunk %d has mask %#x, with which no server has closed it", c, mask)
		}
		for m := mask; m != 0; m &= m - 1 {
			if r := bits.TrailingZeros64(m); l.begun[r] <= work {
				return fmt.Errorf("chunk %d has mask %#x, and rank %d has not begun", c, mask, r)
			}
		}
		from, to := c*wire.MaxLanes, min((c+1)*wire.MaxLanes, len(r.Sum))
		l.want = append(l.want[:0], make([]int32, to-from)...)
		for m := mask; m != 0; m &= m - 1 {
			for i, v := range l.gave(bits.TrailingZeros64(m), work)[r.Offset+from : r.Offset+to] {
				l.want[i] += v
			}
		}
		if i := difference(r.Sum[from:to], l.want); i >= 0 {
			return fmt.Errorf("lane %d is %d, want %d of mask %#x", r.Offset+from+i, r.Sum[from+i], l.want[i], mask)
		}
		if mask>>rank&1 == 0 {
			copy(l.residual[rank][r.Key][r.Offset+from:], own[r.Offset+from:r.Offset+to])
		}
	}
	return nil
}
