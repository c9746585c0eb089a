package sim

import (
	"fmt"
	"math/bits"
	"slices"

	"xagg/wire"
	"xagg/worker/transport"
)

// Async makes a job one of running sums: an all-reduce returns what was added to the tensor since the rank's last one. At
// the end of the job each tensor has all-reduces of zeros, until every rank was told of everything.
type Async struct {
	Staleness int `yaml:"staleness"` // contributions that a rank may be ahead of the slowest
}

// asyncRounds is the number of rounds that the lease of an async job has: see docs/protocol.md.
const asyncRounds = 4

// checkAsync checks what an async job needs.
func (s *Schedule) checkAsync() error {
	switch {
	case s.Async == nil:
		return nil
	case s.Async.Staleness < 0 || s.Async.Staleness > 1000:
		return fmt.Errorf("staleness %d, want 0..1000", s.Async.Staleness)
	case s.Quorum != nil:
		return fmt.Errorf("async with a quorum: it closes nothing")
	case len(s.Plans) != 1 || s.Plans[0].Cohort != 0 || len(s.Plans[0].Servers) == 0:
		return fmt.Errorf("async: want one plan, of servers alone: the plan of an async job is not changed")
	}
	if chunks := s.tensorChunks(); chunks > uint32(s.MaxChunks) {
		return fmt.Errorf("async: tensors of %d chunks, but max_chunks is %d: they have chunks of their own", chunks, s.MaxChunks)
	}
	return nil
}

// tensorChunks returns the number of chunks of all tensors.
func (s *Schedule) tensorChunks() (chunks uint32) {
	seen := map[Work]bool{}
	for _, v := range s.Vectors {
		if !seen[v] {
			seen[v] = true
			chunks += v.chunks()
		}
	}
	return chunks
}

func (v *Work) chunks() uint32 { return uint32(max(1, (v.Lanes+wire.MaxLanes-1)/wire.MaxLanes)) }

// settle returns what an async job all-reduces: its vectors, and then of each tensor as many of zeros as it takes until a
// rank's last one has all of what all ranks gave to those before. A rank is that many contributions ahead of none.
func (s *Schedule) settle() (works []allReduce) {
	for _, v := range s.Vectors {
		works = append(works, allReduce{Work: v})
	}
	if s.Async == nil {
		return works
	}
	seen := map[Work]bool{}
	for _, v := range s.Vectors {
		for i := 0; i <= s.Async.Staleness && !seen[v]; i++ {
			works = append(works, allReduce{Work: v, zeros: true})
		}
		seen[v] = true
	}
	return works
}

// running follows the contributions of an async job: in which order servers have added them, and what ranks were told. It
// knows of servers only which contribution they say to have added; the sums are its own.
type running struct {
	w       *world
	tensors map[Work]*runningTensor
	sums    map[place]*runningSum
	want    []int32 // of a chunk
}

type runningTensor struct {
	base     uint32 // its first chunk
	works    []int  // its all-reduces
	exponent int8   // of all of them; fixed by the first that anybody is told of
	known    bool
	taken    []int     // by rank: all-reduces that it was told of, and
	told     [][]int32 // the sum of these
	total    []int32   // of all contributions; computed when somebody has it
}

// place is where a sum runs. Only a damaged contribution reaches a server that is not its chunk's.
type place struct {
	server int
	chunk  uint32
}

// runningSum is a chunk's on a server.
type runningSum struct {
	order  []addition
	clocks []uint32 // by rank: contributions that were added
	told   []int    // by rank: additions that it was told of
}

// addition is one contribution.
type addition struct {
	rank  uint8
	clock uint32 // number of it, from 0: the rank's contributions to the chunk
}

func newRunning(w *world) *running {
	a := &running{w: w, tensors: map[Work]*runningTensor{}, sums: map[place]*runningSum{}}
	base := uint32(0)
	for i := range w.works {
		v := w.works[i].Work
		t := a.tensors[v]
		if t == nil {
			t = &runningTensor{base: base, taken: make([]int, w.s.Workers), told: make([][]int32, w.s.Workers)}
			for rank := range t.told {
				t.told[rank] = make([]int32, v.Lanes)
			}
			a.tensors[v] = t
			base += v.chunks()
		}
		t.works = append(t.works, i)
	}
	return a
}

func (a *running) sum(at place) *runningSum {
	s := a.sums[at]
	if s == nil {
		s = &runningSum{clocks: make([]uint32, a.w.s.Workers), told: make([]int, a.w.s.Workers)}
		a.sums[at] = s
	}
	return s
}

// add notes that a server has added a contribution, and checks that it is the rank's next, and not too far ahead.
func (a *running) add(server int, h *wire.Header) error {
	s := a.sum(place{server, h.Chunk})
	least := slices.Min(s.clocks)
	if h.Round != s.clocks[h.Rank] || h.Round > least+uint32(a.w.s.Async.Staleness) {
		return fmt.Errorf("contribution %d of rank %d to chunk %d was added at clocks %d, staleness %d", h.Round, h.Rank, h.Chunk,
			s.clocks, a.w.s.Async.Staleness)
	}
	s.clocks[h.Rank]++
	s.order = append(s.order, addition{h.Rank, h.Round})
	return nil
}

// take checks what a rank is told by an all-reduce: of each chunk the sum of exactly the contributions that were added
// since it was told last, its own among them.
func (a *running) take(rank, work int, r *transport.Round) error {
	t := a.tensors[a.w.works[work].Work]
	clock := t.taken[rank]
	switch {
	case clock >= len(t.works) || t.works[clock] != work || r.Offset != 0:
		return fmt.Errorf("lanes from %d on of all-reduce %d, the tensor's number %d is expected", r.Offset, work, clock)
	case t.known && r.Exponent != t.exponent:
		return fmt.Errorf("exponent %d, another all-reduce of the tensor has %d", r.Exponent, t.exponent)
	}
	t.taken[rank]++
	t.known, t.exponent = true, r.Exponent
	servers := a.w.s.Plans[0].Servers
	for c, additions := range r.Additions {
		chunk := t.base + uint32(c)
		s := a.sum(place{servers[int(chunk)%len(servers)], chunk})
		from, to := s.told[rank], s.told[rank]+int(additions)
		s.told[rank] = to
		most := 1 + (a.w.s.Workers-1)*(2*a.w.s.Async.Staleness+3)
		if to > len(s.order) || int(additions) > most {
			return fmt.Errorf("chunk %d: additions %d to %d, there were %d, and at most %d may be in a result", chunk, from, to, len(s.order), most)
		}
		first, last := c*wire.MaxLanes, min((c+1)*wire.MaxLanes, len(r.Sum))
		a.want = append(a.want[:0], make([]int32, last-first)...)
		own := 0
		for _, x := range s.order[from:to] {
			if int(x.rank) == rank {
				own++
			}
			work := t.works[x.clock]
			if a.w.works[work].zeros {
				continue
			}
			for i := range a.want {
				a.want[i] += a.w.lane(work, int(x.rank), first+i, t.exponent)
			}
		}
		if i := difference(r.Sum[first:last], a.want); i >= 0 {
			return fmt.Errorf("lane %d is %d, want %d of additions %d to %d", first+i, r.Sum[first+i], a.want[i], from, to)
		}
		if own != 1 {
			return fmt.Errorf("chunk %d: %d contributions of its own", chunk, own)
		}
		for i, v := range a.want {
			t.told[rank][first+i] += v
		}
		if mask := s.beyond(to, uint32(clock)); mask != r.Masks[c] && a.w.s.Damage != Unprotected {
			return fmt.Errorf("chunk %d has mask %#x, want %#x: who has given more than %d", chunk, r.Masks[c], mask, clock)
		}
		a.w.report.Additions = max(a.w.report.Additions, int(additions))
	}
	return nil
}

// beyond returns the ranks of which, after so many additions, more than n contributions were added.
func (s *runningSum) beyond(additions int, n uint32) (mask uint64) {
	for _, x := range s.order[:additions] {
		if x.clock == n {
			mask |= 1 << x.rank
		}
	}
	return mask
}

// complete checks that a rank which is through was told every contribution of every rank exactly once.
func (a *running) complete(rank int) error {
	for v, t := range a.tensors {
		if t.total == nil {
			t.total = make([]int32, v.Lanes)
			for _, work := range t.works {
				for r := range a.w.s.Workers {
					for i := range t.total {
						t.total[i] += a.w.lane(work, r, i, t.exponent)
					}
				}
			}
		}
		if i := difference(t.told[rank], t.total); i >= 0 {
			return fmt.Errorf("rank %d was told %d in all of value %d of %s, the sum of all contributions is %d", rank, t.told[rank][i], i,
				v.key(), t.total[i])
		}
	}
	return nil
}

// loseAsync is the loss of devices' memory in an async job. The switch needs its plan again; of a server the sums are gone,
// and with them the job: nobody gives it a plan again.
func (w *world) loseAsync(l *Loss) {
	if l.Switch {
		w.events.add(event{at: w.now + w.upTo(w.s.Control), kind: restore, job: w.job})
	}
	for _, server := range l.Servers {
		if slices.Contains(w.s.Plans[0].Servers, server) && !w.sumsLost {
			w.sumsLost = true
			w.report.SumsLost++
		}
	}
}

// shift is by how many bits an integer of an input is smaller than an int32, so that sums do not overflow and nothing is
// clipped.
func (s *Schedule) shift() int {
	if s.Async == nil {
		return 6 // 64 ranks
	}
	return bits.Len(uint(s.Workers * (2*s.Async.Staleness + 3)))
}
