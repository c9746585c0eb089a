package check

import (
	"maps"
	"slices"

	"xagg/wire"
)

const (
	// mostPending is how many states of a running sum wait for the ones before them, at most. Beyond it those are taken
	// to be missing from the capture.
	mostPending = 64
	// recentStates and recentRounds are how many states of a running sum, and contributions of a rank to it, are remembered
	// for what is repeated late.
	recentStates = 32
	recentRounds = 8
)

// sumKey is what a running sum is known by.
type sumKey struct {
	job, epoch uint16
	chunk      uint32
}

// step is one contribution to a running sum.
type step struct {
	rank  uint8
	round uint32
}

// runningSum is what is known of one running sum. All packets of a state, which is what the sum is after a number of
// additions, must agree; each state is the one before it and the next contribution of the rank that it names as the last.
// So every contribution is counted once, in the order of its rank's clock.
type runningSum struct {
	shape   shape // without seq, which is the sender's own
	first   Ref
	grads   map[step]value
	pending map[uint32]*sumState // by additions, that wait for what is before them
	known   map[uint32]stateID   // the recent ones of those that were checked

	// The last state that was checked, at first that of no additions.
	additions uint32
	lanes     []int32
	value     value // its lanes are not used
	clocks    [wire.MaxRanks]uint32
	// unknown is the number of additions that are not in the capture: a clock may be so much further.
	unknown uint32
}

// stateID is what all packets of a state agree on.
type stateID struct {
	value
	rank uint8
}

// sumState is a state as RESULTs tell it.
type sumState struct {
	stateID
	lanes []int32
	masks map[uint32]uint64 // by the round that was asked for
	head  wire.Header
	at    Ref
	frame []byte
}

func (s *sumState) size() int { return 4*len(s.lanes) + len(s.frame) }

// async takes a packet with ASYNC whose form is in order.
func (c *Checker) async(at Ref, p *wire.Packet, frame []byte) *fault {
	if p.Type == wire.TypeGrad && !wire.DifferenceOK(p.Job, p.Chunk, 1, [2]uint32{}, p.Tag, p.Lanes[:p.Elems]) {
		return faultf(wireReason(wire.ReasonTag), "the tag does not fit the lanes and the place")
	}
	key, sh := sumKey{p.Job, p.Epoch, p.Chunk}, shapeOf(&p.Header)
	sh.seq = 0
	r := c.sums[key]
	if r == nil {
		r = &runningSum{shape: sh, first: at, grads: map[step]value{}, pending: map[uint32]*sumState{},
			known: map[uint32]stateID{}, lanes: make([]int32, p.Elems)}
		c.sums[key] = r
		c.sumOrder = append(c.sumOrder, key)
		c.jobs[p.Job] = true
		c.report.RunningSums++
	}
	if sh != r.shape {
		f := faultf(wireReason(wire.ReasonShape), "%s, but another packet of the running sum says %s", sh, r.shape)
		f.other = r.first
		return f
	}
	switch p.Type {
	case wire.TypeGrad:
		return c.addend(r, key, p)
	case wire.TypeResult:
		return c.state(r, key, at, p, frame)
	}
	return nil
}

// addend takes a contribution.
func (c *Checker) addend(r *runningSum, key sumKey, p *wire.Packet) *fault {
	s, v := step{p.Rank, p.Round}, c.value(p)
	if old, ok := r.grads[s]; ok {
		if old == v {
			return nil
		}
		return faultf(ReasonConflict, "rank %d has contributed something else as its round %d before: %s",
			p.Rank, p.Round, c.differences(&old, &v, int(p.Elems)))
	}
	if wire.SerialLess(p.Round+recentRounds, r.clocks[p.Rank]) {
		c.report.Late++
		return nil
	}
	r.grads[s] = v
	c.advance(r, key)
	return nil
}

// state takes a RESULT.
func (c *Checker) state(r *runningSum, key sumKey, at Ref, p *wire.Packet, frame []byte) *fault {
	n, id := p.Seq, stateID{c.value(p), p.Rank}
	if n == 0 && r.additions < 1<<31 { // it is told again after 2^32 additions
		return faultf(ReasonSum, "a running sum of no additions is not told")
	}
	if !wire.SerialLess(r.additions, n) {
		old, ok := r.known[n]
		switch {
		case !ok:
			c.report.Late++
		case old != id:
			return c.otherState(r, n, &old, &id)
		case n == r.additions:
			return r.misses(p.Round, p.Contributors)
		}
		return nil
	}
	if s := r.pending[n]; s != nil {
		if s.stateID != id {
			return c.otherState(r, n, &s.stateID, &id)
		}
		if old, ok := s.masks[p.Round]; ok && old != p.Contributors {
			return faultf(ReasonConflict, "another RESULT of the same state and round has the mask %#x, this one %#x", old, p.Contributors)
		}
		s.masks[p.Round] = p.Contributors
		return nil
	}
	s := &sumState{stateID: id, lanes: slices.Clone(p.Lanes[:p.Elems]), masks: map[uint32]uint64{p.Round: p.Contributors},
		head: p.Header, at: at, frame: slices.Clone(frame)}
	r.pending[n] = s
	c.held += s.size()
	c.advance(r, key)
	for len(r.pending) > mostPending || len(r.pending) > 0 && c.held > c.opts.Held {
		c.skip(r, key)
	}
	return nil
}

func (c *Checker) otherState(r *runningSum, n uint32, old, id *stateID) *fault {
	if old.rank != id.rank {
		return faultf(ReasonConflict, "another RESULT of %d additions names rank %d as the last contributor, this one rank %d",
			n, old.rank, id.rank)
	}
	return faultf(ReasonConflict, "another RESULT of %d additions says something else: %s",
		n, c.differences(&old.value, &id.value, int(r.shape.elems)))
}

// misses checks the mask of a RESULT of the last state: the ranks with more contributions than the round has before it.
func (r *runningSum) misses(round uint32, mask uint64) *fault {
	var want uint64
	for rank, clock := range r.clocks {
		if wire.SerialLess(round, clock) {
			want |= 1 << rank
		}
	}
	if r.unknown != 0 || mask == want {
		return nil
	}
	return faultf(wireReason(wire.ReasonMask), "the mask %#x, but the ranks that have come to round %d are %#x", mask, round, want)
}

// advance checks the states that follow the last one, as far as they and their contributions are known.
func (c *Checker) advance(r *runningSum, key sumKey) {
	for {
		s := r.pending[r.additions+1]
		if s == nil {
			return
		}
		diff := make([]int32, len(s.lanes))
		for i, v := range s.lanes {
			diff[i] = v - r.lanes[i] // sums wrap, contributions do not
		}
		got := value{lanes: c.hash.sum(diff), tag: subTag(s.tag, r.value.tag)}
		round, ok := r.next(s.rank, &got)
		if !ok {
			return
		}
		g := r.grads[step{s.rank, round}]
		want := value{g.lanes, g.tag, max(r.value.amax, g.amax), r.value.flags | g.flags}
		got.amax, got.flags = s.amax, s.flags
		if r.unknown != 0 { // of the additions that are not in the capture
			want.amax, want.flags = got.amax, got.flags
		}
		r.clocks[s.rank] = round + 1
		c.enter(r, s)
		c.report.Additions++
		if got != want {
			c.blame(key, s, c.explainStep(r, s.rank, round, &want, &got))
			continue
		}
		for _, round := range slices.Sorted(maps.Keys(s.masks)) {
			if f := r.misses(round, s.masks[round]); f != nil {
				c.blame(key, s, f)
				break
			}
		}
	}
}

// next returns the round of the contribution that a rank added, or false when it has not been seen yet. got tells it
// where the clock is not known.
func (r *runningSum) next(rank uint8, got *value) (uint32, bool) {
	round := r.clocks[rank]
	if r.unknown == 0 {
		_, ok := r.grads[step{rank, round}]
		return round, ok
	}
	found := false
	for s, g := range r.grads {
		if s.rank == rank && g.lanes == got.lanes && g.tag == got.tag && !wire.SerialLess(s.round, r.clocks[rank]) &&
			(!found || wire.SerialLess(s.round, round)) {
			round, found = s.round, true
		}
	}
	return round, found
}

// enter makes a pending state the last one.
func (c *Checker) enter(r *runningSum, s *sumState) {
	delete(r.pending, s.head.Seq)
	c.held -= s.size()
	r.additions, r.lanes, r.value = s.head.Seq, s.lanes, s.value
	r.known[r.additions] = s.stateID
	delete(r.known, r.additions-recentStates)
	delete(r.grads, step{s.rank, r.clocks[s.rank] - 1 - recentRounds})
}

// explainStep says what is wrong with a state that is not the one before it and the contribution that is next.
func (c *Checker) explainStep(r *runningSum, rank uint8, round uint32, want, got *value) *fault {
	if got.lanes == 0 && want.lanes != 0 {
		return faultf(wireReason(wire.ReasonMask), "rank %d is the last contributor, but its round %d is not added", rank, round)
	}
	if want.lanes != got.lanes {
		if got.lanes == add(want.lanes, want.lanes) {
			return faultf(ReasonTwice, "round %d of rank %d is added twice", round, rank)
		}
		for s, g := range r.grads {
			if s != (step{rank, round}) && g.lanes == got.lanes && g.tag == got.tag {
				reason := wireReason(wire.ReasonClock)
				if wire.SerialLess(s.round, r.clocks[s.rank]) {
					reason = ReasonTwice
				}
				return faultf(reason, "round %d of rank %d is added instead of round %d of rank %d", s.round, s.rank, round, rank)
			}
		}
	}
	reason := ReasonSum
	if want.lanes == got.lanes && want.tag != got.tag {
		reason = wireReason(wire.ReasonTag)
	}
	return faultf(reason, "not the sum before it and round %d of rank %d: %s", round, rank, c.differences(want, got, int(r.shape.elems)))
}

func (c *Checker) blame(key sumKey, s *sumState, f *fault) {
	c.violation(s.at, f, &s.head, s.frame)
}

// skip goes on with the next state that is known, over what is not in the capture: a contribution, or the states before.
func (c *Checker) skip(r *runningSum, key sumKey) {
	var s *sumState
	for n, p := range r.pending {
		if s == nil || n-r.additions < s.head.Seq-r.additions {
			s = p
		}
	}
	gap := Incomplete{Job: key.job, Epoch: key.epoch, Round: r.clocks[s.rank], Chunk: key.chunk}
	missing := s.head.Seq - r.additions
	if missing == 1 && r.unknown == 0 {
		gap.Ranks = []int{int(s.rank)} // its contribution has not been seen
		r.clocks[s.rank]++
	} else {
		gap.Ranks, gap.Additions = []int{}, int(missing)
		gap.Round = 0
		r.unknown += missing
	}
	c.incomplete(gap)
	c.enter(r, s)
	c.advance(r, key)
}

// finishSums accounts for what could not be checked.
func (c *Checker) finishSums() {
	for _, key := range c.sumOrder {
		r := c.sums[key]
		for len(r.pending) > 0 {
			c.skip(r, key)
		}
	}
}
