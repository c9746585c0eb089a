package agg

import "xagg/wire"

// asyncRounds is the number of rounds that the lease of an async plan has: one of running sums, one of their clocks and
// two of scouts.
const asyncRounds = 4

// async adds p to its chunk's running sum. The sum is a slot whose seq counts the additions. A second slot's lanes are
// the clocks: how many contributions of each rank were added. Both are the first slot's owner's.
func (s *Server) async(now uint64, plan *ServerPlan, p *wire.Packet) Outcome {
	sum, clocks := &s.slots[plan.Base+p.Chunk], &s.slots[plan.Base+plan.Chunks+p.Chunk]
	if sum.job != p.Job || sum.epoch != p.Epoch {
		sum.begin(p)
		sum.seq = 0
		clocks.lanes = zeros(clocks.lanes, wire.MaxRanks)
	}
	if !sum.fits(p) {
		return refuse(p, wire.ReasonShape)
	}

	out := Outcome{Dest: ToSender}
	switch early := int32(p.Round) - clocks.lanes[p.Rank]; {
	case early > 0:
		return refuse(p, wire.ReasonClock)
	case early < -1:
		return drop(wire.ReasonStale)
	case early == -1:
		out.Reason = wire.ReasonDuplicate
	default:
		sum.mask = plan.within(clocks.lanes, p.Round, int64(plan.Staleness))
		if sum.mask != plan.Ranks {
			sum.tell(wire.TypeWait, sum.firstAt, p)
			return Outcome{Reason: wire.ReasonHeld, Dest: ToSender}
		}
		sum.add(now, p)
		sum.at(now)
		for t := range sum.tag {
			sum.tag[t] %= wire.P // there is no bound on the number of additions
		}
		sum.seq++
		clocks.lanes[p.Rank]++
	}
	sum.mask = plan.within(clocks.lanes, p.Round, -1)
	sum.result(p)
	p.Seq = sum.seq
	p.NextEpoch = announced(p.Chunk, plan.NextEpoch)
	return out
}

// at sets the time of the last addition, and no others: answers of a running sum tell none.
func (s *slot) at(now uint64) { s.firstAt, s.prevAt, s.lastAt = now, now, now }

// within returns the ranks whose clocks are at most that many contributions behind a round, in serial-number order.
func (plan *ServerPlan) within(clocks []int32, round uint32, behind int64) (ranks uint64) {
	for rank, clock := range clocks {
		if int64(int32(round)-clock) <= behind {
			ranks |= bit(uint8(rank))
		}
	}
	return ranks & plan.Ranks
}
