// Package recovery decides how a job goes on when a switch or a server has lost its memory: given what each of its
// frozen workers has, who hands over which RESULTs, what is summed again, and under which numbers. It is the pure core of
// the section "Recovery" of docs/protocol.md; the controller, the workers and the simulation share it.
//
// Rounds and seqs are compared in serial-number order. All functions are deterministic.
package recovery

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	"xagg/wire"
)

// State is what a frozen worker has.
type State struct {
	Began    uint32 // the round that the worker began with: 0, but of one that came back
	First    uint32 // oldest unfinished round; the same as Next when there is none
	Next     uint32 // the next round to begin
	Boundary uint32 // the first round after all all-reduces that have begun, Next or a later one
	Seq      uint32 // the next one to be used
	// AllReduces is the number of the job's all-reduces that have begun, those before the worker came among them: so many
	// have all their rounds before Boundary.
	AllReduces uint64
	// Returns are the all-reduces that ranks came back for, as far as the worker knows, ascending: see Restart.
	Returns []uint64
	// Rounds are all rounds from the oldest of which RESULTs are held to Boundary, and at least those from First on,
	// ascending. Behind Boundary there may be more, of which RESULTs were handed over before.
	Rounds []Held
}

// ChunkID names a chunk of a job.
type ChunkID struct{ Round, Chunk uint32 }

// Restart is what all workers of a job have in common when they go on: which chunks are missing everywhere, and their
// seqs. The missing chunks are numbered in the order of (round, chunk), without a gap: Round's first one has Seq. Rounds
// that nobody had begun go on from there, without the chunks of them that are final.
type Restart struct {
	Round  uint32 // of the first missing chunk, or the first round that nobody has begun
	Seq    uint32 // of the first missing chunk
	Finals []Held // the known rounds from Round on, ascending: which of their chunks are final
	// Returns are the all-reduces, by number, that ranks came back for, ascending; those that all have begun are left out.
	// What is known of any tensor's scale is forgotten where one of them begins, for a rank that came back does not know it.
	Returns []uint64
}

// Final reports whether a chunk has a RESULT already, which never changes again.
func (r *Restart) Final(id ChunkID) bool {
	if wire.SerialLess(id.Round, r.Round) {
		return true
	}
	i, ok := find(r.Finals, id.Round)
	return ok && r.Finals[i].Has(id.Chunk)
}

// Base returns the seq of the first missing chunk of a round or of those after it. The round is one of Finals, or the
// one after them. It is not the same for a worker's oldest unfinished round as Seq where the worker came back for it.
func (r *Restart) Base(round uint32) uint32 {
	seq := r.Seq
	for i := range r.Finals {
		if wire.SerialLess(r.Finals[i].Round, round) {
			seq += r.Finals[i].Missing()
		}
	}
	return seq
}

// Plan is how a job goes on.
type Plan struct {
	Restart
	HandOver map[int][]ChunkID // by rank: the RESULTs that it hands over, ascending
	Lacks    map[int][]ChunkID // by rank: the RESULTs that it is given, ascending
	// Return is the round that a rank which comes back begins with: the first after all all-reduces that have begun.
	// ReturnSeq is the seq of its chunk 0, and ReturnAllReduce the number of its all-reduce. They hold where CanReturn does.
	Return, ReturnSeq uint32
	ReturnAllReduce   uint64

	next  uint32
	ahead bool // there are RESULTs of rounds whose all-reduces nobody who is there has begun
}

// CanReturn reports whether ranks can come back with the plan, to a job of a depth whose servers keep so many rounds: the
// rounds that they begin at once must not take the memory of one that is not over, nor be such as have RESULTs already.
func (p *Plan) CanReturn(depth, rounds uint32) bool {
	return !p.ahead && p.Return-p.Round+depth <= rounds
}

// LetIn has ranks come back with the plan, which CanReturn.
func (p *Plan) LetIn() {
	if i, known := slices.BinarySearch(p.Returns, p.ReturnAllReduce); !known {
		p.Returns = slices.Insert(p.Returns, i, p.ReturnAllReduce)
	}
}

// Complete reports whether nothing has to be summed again: every round that has begun has all its RESULTs.
func (p *Plan) Complete() bool { return p.Round == p.next }

// BehindError is a rank that lacks a RESULT which others had, and which nobody has kept. In a quorum job it has fallen
// behind too far; otherwise somebody has broken the rules.
type BehindError struct {
	Rank  int
	Round uint32
}

func (e *BehindError) Error() string {
	return fmt.Sprintf("rank %d has not finished round %d, whose results nobody keeps any more: it has fallen too far behind",
		e.Rank, e.Round)
}

// AheadError is a rank that came back for a round whose predecessors nobody who is still there has begun.
type AheadError struct {
	Rank  int
	Round uint32 // the one that nobody has begun
}

func (e *AheadError) Error() string {
	return fmt.Sprintf("rank %d came back for a round after %d, which nobody who is there has begun: it must come back once more",
		e.Rank, e.Round)
}

// DisagreementError is two ranks that do not carry out the same all-reduces.
type DisagreementError struct {
	Round  uint32
	Ranks  [2]int
	Chunks [2]uint32 // of the round, as they say
}

func (e *DisagreementError) Error() string {
	return fmt.Sprintf("round %d has %d chunks at rank %d and %d at rank %d: all ranks must reduce the same tensors in the same order",
		e.Round, e.Chunks[0], e.Ranks[0], e.Chunks[1], e.Ranks[1])
}

// CountError is two ranks that have carried out different all-reduces, since they count them differently.
type CountError struct {
	Ranks      [2]int
	AllReduces [2]uint64 // that have begun, as they say
	Boundary   [2]uint32 // the first round after them
}

func (e *CountError) Error() string {
	return fmt.Sprintf("%d all-reduces take the rounds before %d at rank %d, and %d those before %d at rank %d: "+
		"all ranks must reduce the same tensors in the same order",
		e.AllReduces[0], e.Boundary[0], e.Ranks[0], e.AllReduces[1], e.Boundary[1], e.Ranks[1])
}

// StateError is a state that no worker can be in.
type StateError struct {
	Rank   int
	Reason string
}

func (e *StateError) Error() string { return fmt.Sprintf("state of rank %d: %s", e.Rank, e.Reason) }

// round is what all workers together know of a round.
type round struct {
	Held        // by anybody
	first int   // the lowest rank that knows it
	ranks []int // who holds a part of it, ascending
	parts [][]uint64
}

// Make decides how the ranks that are there go on from their states. There must be one at least.
// Errors: [*StateError], [*DisagreementError], [*CountError], [*BehindError], [*AheadError].
func Make(states map[int]State) (Plan, error) {
	ranks := slices.Sorted(maps.Keys(states))
	known, err := union(states, ranks)
	if err != nil {
		return Plan{}, err
	}
	some := states[ranks[0]]
	first, next, boundary, seq := some.First, some.Next, some.Boundary, some.Seq
	for _, s := range states {
		next, boundary, seq = latest(next, s.Next), latest(boundary, s.Boundary), latest(seq, s.Seq)
		if wire.SerialLess(s.First, first) {
			first = s.First
		}
	}
	p := Plan{Restart: Restart{Round: next, Seq: seq}, Return: boundary, ReturnSeq: seq, next: next}
	if p.ReturnAllReduce, p.Returns, err = count(states, ranks, boundary); err != nil {
		return Plan{}, err
	}
	for r := next - 1; !wire.SerialLess(r, first); r-- { // of the rounds that somebody needs and somebody has begun
		i, ok := search(known, r)
		if ok && known[i].Full() {
			continue
		}
		if err := lost(states, ranks, r, ok); err != nil {
			return Plan{}, err
		}
		p.Round = r
	}
	for i := range known {
		r := &known[i]
		if wire.SerialLess(r.Round, p.Round) {
			continue
		}
		p.Finals = append(p.Finals, r.Held)
		if wire.SerialLess(r.Round, boundary) {
			p.ReturnSeq += r.Missing()
		} else if r.Missing() < r.Chunks {
			p.ahead = true
		}
	}
	p.exchange(states, ranks, known)
	return p, nil
}

// lost says why a round of which nobody has all RESULTs cannot be summed again, or nil: a rank has finished it, or began
// after it while nobody knows how many chunks it has.
func lost(states map[int]State, ranks []int, r uint32, known bool) error {
	for _, rank := range ranks {
		s := states[rank]
		switch {
		case !wire.SerialLess(r, s.First): // the rank needs it
		case wire.SerialLess(r, s.Began):
			if !known {
				return &AheadError{rank, r}
			}
		default:
			i := slices.IndexFunc(ranks, func(other int) bool { return !wire.SerialLess(r, states[other].First) })
			return &BehindError{ranks[i], r}
		}
	}
	return nil
}

// count returns the number of the all-reduce that begins with a boundary, the last of all, and those that ranks came back
// for and that somebody has not begun.
func count(states map[int]State, ranks []int, boundary uint32) (next uint64, returns []uint64, err error) {
	last := ranks[slices.IndexFunc(ranks, func(rank int) bool { return states[rank].Boundary == boundary })]
	next = states[last].AllReduces
	least := next
	for _, rank := range ranks {
		s := states[rank]
		if s.AllReduces > next || (s.AllReduces == next) != (s.Boundary == boundary) {
			return 0, nil, &CountError{[2]int{last, rank}, [2]uint64{next, s.AllReduces}, [2]uint32{boundary, s.Boundary}}
		}
		least = min(least, s.AllReduces)
		returns = append(returns, s.Returns...)
	}
	slices.Sort(returns)
	passed, _ := slices.BinarySearch(returns, least)
	return next, slices.Compact(returns[passed:]), nil
}

// union returns what is known of every round that anybody told of, ascending.
func union(states map[int]State, ranks []int) ([]round, error) {
	var known []round
	for _, rank := range ranks {
		s := states[rank]
		if reason := s.invalid(); reason != "" {
			return nil, &StateError{rank, reason}
		}
		for _, h := range s.Rounds {
			i, ok := search(known, h.Round)
			if !ok {
				known = slices.Insert(known, i, round{Held: NewHeld(h.Round, h.Chunks), first: rank})
			}
			r := &known[i]
			if r.Chunks != h.Chunks {
				return nil, &DisagreementError{h.Round, [2]int{r.first, rank}, [2]uint32{r.Chunks, h.Chunks}}
			}
			for w, bits := range h.Bits {
				r.Bits[w] |= bits
			}
			r.ranks = append(r.ranks, rank)
			r.parts = append(r.parts, h.Bits)
		}
	}
	return known, nil
}

// exchange decides who hands over what to whom: of several who hold a RESULT the one that has the least to do.
func (p *Plan) exchange(states map[int]State, ranks []int, known []round) {
	p.HandOver, p.Lacks = make(map[int][]ChunkID), make(map[int][]ChunkID)
	for i := range known {
		r := &known[i]
		for c := range r.Chunks {
			if !r.Has(c) {
				continue
			}
			id, giver, wanted := ChunkID{r.Round, c}, -1, false
			for _, rank := range ranks {
				part, ok := slices.BinarySearch(r.ranks, rank)
				switch {
				case ok && has(r.parts[part], c):
					if giver < 0 || len(p.HandOver[rank]) < len(p.HandOver[giver]) {
						giver = rank
					}
				case !wire.SerialLess(r.Round, states[rank].First):
					p.Lacks[rank] = append(p.Lacks[rank], id)
					wanted = true
				}
			}
			if wanted {
				p.HandOver[giver] = append(p.HandOver[giver], id)
			}
		}
	}
}

// invalid says why a worker cannot be in a state, or nothing.
func (s *State) invalid() string {
	switch {
	case wire.SerialLess(s.Next, s.First) || wire.SerialLess(s.Boundary, s.Next):
		return fmt.Sprintf("first, next and boundary are %d, %d and %d, which do not ascend", s.First, s.Next, s.Boundary)
	}
	for i, h := range s.Rounds {
		switch {
		case h.Chunks == 0 || len(h.Bits) != words(h.Chunks) || h.Chunks%64 != 0 && h.Bits[len(h.Bits)-1]>>(h.Chunks%64) != 0:
			return fmt.Sprintf("round %d of %d chunks has %d words of bits, or bits beyond them", h.Round, h.Chunks, len(h.Bits))
		case i > 0 && !wire.SerialLess(s.Rounds[i-1].Round, h.Round):
			return fmt.Sprintf("round %d comes after round %d", h.Round, s.Rounds[i-1].Round)
		}
	}
	at, _ := find(s.Rounds, s.First)
	for r := s.First; r != s.Boundary; r++ {
		if at == len(s.Rounds) || s.Rounds[at].Round != r {
			return fmt.Sprintf("round %d is missing", r)
		}
		at++
	}
	return ""
}

func latest(a, b uint32) uint32 {
	if wire.SerialLess(a, b) {
		return b
	}
	return a
}

func compare(a, b uint32) int { return cmp.Compare(int32(a-b), 0) }

func find(rounds []Held, r uint32) (int, bool) {
	return slices.BinarySearchFunc(rounds, r, func(h Held, r uint32) int { return compare(h.Round, r) })
}

func search(known []round, r uint32) (int, bool) {
	return slices.BinarySearchFunc(known, r, func(k round, r uint32) int { return compare(k.Round, r) })
}
