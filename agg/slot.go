package agg

import (
	"fmt"
	"math/bits"

	"xagg/wire"
)

// slot is what switch and server slots have in common: a sum under way or finished, and who owns it. Its zero value
// was never used; no packet of an installed plan has epoch 0.
type slot struct {
	job, epoch        uint16
	seq, round, chunk uint32

	// The shape: what all contributors must agree on.
	elems    uint16
	blocks   uint8
	exponent int8
	shape    wire.Flags // of wire.ShapeFlags

	sticky    wire.Flags // of wire.StickyFlags
	amax      uint8
	last      uint8  // rank of the last contributor
	nextEpoch uint16 // that the RESULT announced; 0 until then, and where the slot only makes a PARTIAL
	closed    bool   // nothing is added any more
	mask      uint64
	tag       [2]uint32

	// Arrival times in microseconds: the first, the last and the one before the last.
	firstAt, prevAt, lastAt uint64

	lanes []int32 // at least blocks*64, kept for the slot's next owners
}

// begin gives the slot to p's owner, with p's shape and an empty sum.
func (s *slot) begin(p *wire.Packet) {
	*s = slot{
		job: p.Job, epoch: p.Epoch, seq: p.Seq, round: p.Round, chunk: p.Chunk,
		elems: p.Elems, blocks: p.Blocks, exponent: p.Exponent, shape: p.Flags & wire.ShapeFlags,
		lanes: zeros(s.lanes, int(p.Blocks)*wire.BlockLanes),
	}
}

// claim overwrites the slot with the contribution p.
func (s *slot) claim(now uint64, p *wire.Packet) {
	s.begin(p)
	s.firstAt, s.lastAt = now, now
	s.add(now, p)
}

// zeros returns n lanes of 0, in the memory of lanes if it is enough.
func zeros(lanes []int32, n int) []int32 {
	if cap(lanes) < n {
		return make([]int32, n)
	}
	lanes = lanes[:n]
	clear(lanes)
	return lanes
}

// add adds the contribution p, which has the slot's shape.
func (s *slot) add(now uint64, p *wire.Packet) {
	s.sticky |= p.Flags & wire.StickyFlags
	s.amax = max(s.amax, p.Amax)
	s.last = p.Rank
	s.mask |= p.Contributors
	s.tag[0] += p.Tag[0]
	s.tag[1] += p.Tag[1]
	s.prevAt, s.lastAt = s.lastAt, now
	for i, v := range p.Lanes[:len(s.lanes)] {
		s.lanes[i] += v // wraps; the tag tells
	}
}

// fits reports whether p has the slot's shape, as far as both kinds of slots have it in common.
func (s *slot) fits(p *wire.Packet) bool {
	return s.elems == p.Elems && s.blocks == p.Blocks && s.exponent == p.Exponent && s.shape == p.Flags&wire.ShapeFlags
}

// put turns p into a RESULT or PARTIAL with the slot's sum.
func (s *slot) put(t wire.Type, p *wire.Packet) {
	p.Type = t
	p.Flags = p.Flags&wire.ShapeFlags | s.sticky
	s.values(p)
	p.Reason = wire.ReasonNone
	copy(p.Lanes[:len(s.lanes)], s.lanes)
}

// values sets the fields of p that come from the sum, but lanes and flags.
func (s *slot) values(p *wire.Packet) {
	p.Rank = s.last
	p.Amax = s.amax
	p.Contributors = s.mask
	p.Tag = s.tag
	p.SpreadUs = uint32(s.lastAt - s.firstAt)
	p.BlockedUs = uint32(s.lastAt - s.prevAt)
	p.NextEpoch = s.nextEpoch
}

// tell turns p into a WAIT or ACK with the mask so far.
func (s *slot) tell(t wire.Type, now uint64, p *wire.Packet) {
	p.Type = t
	p.Flags &= wire.ShapeFlags
	p.Blocks = 0
	p.Amax = s.amax
	p.Contributors = s.mask
	p.Tag = [2]uint32{}
	p.SpreadUs = uint32(now - s.firstAt)
	p.BlockedUs = 0
	p.NextEpoch = 0
	p.Reason = wire.ReasonNone
}

// refuse turns p into a NACK to its sender.
func refuse(p *wire.Packet, why wire.Reason) Outcome {
	p.Type = wire.TypeNack
	p.Flags &= wire.ShapeFlags
	p.Blocks = 0
	p.SpreadUs = 0
	p.BlockedUs = 0
	p.NextEpoch = 0
	p.Reason = why
	return Outcome{Reason: why, Dest: ToSender}
}

// drop counts a packet that is not answered.
func drop(why wire.Reason) Outcome { return Outcome{Reason: why} }

// tagInRange reports whether both tag lanes of a GRAD are residues.
func tagInRange(p *wire.Packet) bool { return p.Tag[0] < wire.P && p.Tag[1] < wire.P }

// bit returns rank's bit, 0 for a rank that no mask has.
func bit(rank uint8) uint64 { return 1 << rank }

// announced returns the epoch that the RESULT of a chunk carries when it closes now.
func announced(chunk uint32, next uint16) uint16 {
	if chunk != 0 {
		return 0
	}
	return next
}

// checkLease checks that the slots from base on are there.
func checkLease(base uint32, slots uint64, have int) error {
	if uint64(base)+slots > uint64(have) {
		return fmt.Errorf("lease of %d slots from %d on: there are %d slots", slots, base, have)
	}
	return nil
}

func powerOfTwo(n uint32) bool { return bits.OnesCount32(n) == 1 }
