package agg

import (
	"cmp"
	"fmt"
	"math/bits"

	"xagg/wire"
)

// ServerPlan is one epoch of a job on an aggregation server: plain comparable data.
type ServerPlan struct {
	Job, Epoch uint16
	Ranks      uint64 // all ranks of the job: a chunk closes at the latest when they are all in
	Base       uint32 // first slot of the job's lease, which all its epochs share
	Chunks     uint32 // chunks per round that the lease has room for
	Rounds     uint32 // rounds that the lease has room for, a power of two, at least 2
	NextEpoch  uint16 // armed epoch, 0 = none
	Quorum     uint32 // ranks that are enough to close a chunk; 0 = all have to be in
	WaitUs     uint32 // ... when its first arrival is so long ago, in microseconds
	Async      bool   // running sums; the lease has 4 rounds
	Staleness  uint32 // ... contributions that a rank may be ahead of the slowest
}

// Server is the reference model of xdp/xagg.bpf.c. Its zero value is not usable, see [NewServer].
type Server struct {
	slots []slot
	plans map[uint16][]ServerPlan // by job
}

// NewServer returns a server with the given number of slots, none of them used and no plan installed. A slot takes
// memory for lanes only when it is used for the first time.
func NewServer(slots int) *Server {
	return &Server{slots: make([]slot, slots), plans: make(map[uint16][]ServerPlan)}
}

// Install adds a plan, or replaces the plan of the same job and epoch. It refuses a lease that does not fit the slots
// and a number of rounds that is not a power of two or less than 2: whoever sends a round has the results of the
// round before, but another worker may still need them. It refuses a quorum of more ranks than there are, and an async
// plan that has a quorum or not 4 rounds.
func (s *Server) Install(plan ServerPlan) error {
	if err := s.check(&plan); err != nil {
		return fmt.Errorf("install job %d epoch %d on the server: %w", plan.Job, plan.Epoch, err)
	}
	s.Remove(plan.Job, plan.Epoch)
	s.plans[plan.Job] = append(s.plans[plan.Job], plan)
	return nil
}

func (s *Server) check(plan *ServerPlan) error {
	switch {
	case plan.Epoch == 0:
		return fmt.Errorf("epoch 0 is no epoch: epochs are 1 to 65535")
	case plan.Ranks == 0:
		return fmt.Errorf("no ranks")
	case plan.Rounds < 2 || !powerOfTwo(plan.Rounds):
		return fmt.Errorf("%d rounds: want a power of two, at least 2", plan.Rounds)
	case plan.Quorum > uint32(bits.OnesCount64(plan.Ranks)):
		return fmt.Errorf("quorum of %d ranks: there are %d", plan.Quorum, bits.OnesCount64(plan.Ranks))
	case plan.Async && plan.Quorum != 0:
		return fmt.Errorf("async with a quorum: it closes nothing")
	case plan.Async && plan.Rounds != asyncRounds:
		return fmt.Errorf("async with %d rounds: want %d", plan.Rounds, asyncRounds)
	}
	return checkLease(plan.Base, uint64(plan.Rounds)*uint64(plan.Chunks), len(s.slots))
}

// Remove takes a plan away. Slots are left as they are: they clean themselves.
func (s *Server) Remove(job, epoch uint16) {
	plans := s.plans[job]
	for i := range plans {
		if plans[i].Epoch == epoch {
			s.plans[job] = append(plans[:i], plans[i+1:]...)
			break
		}
	}
	if len(s.plans[job]) == 0 {
		delete(s.plans, job)
	}
}

// Clear makes n slots from base on like ones that were never used. No plan's lease may hold them.
func (s *Server) Clear(base, n uint32) { clear(s.slots[base : base+n]) }

// Arm sets the epoch that RESULTs of chunk 0 announce from now on. It does nothing when the plan is not installed.
func (s *Server) Arm(job, epoch, next uint16) {
	if plan := s.plan(job, epoch); plan != nil {
		plan.NextEpoch = next
	}
}

func (s *Server) plan(job, epoch uint16) *ServerPlan {
	for i := range s.plans[job] {
		if plan := &s.plans[job][i]; plan.Epoch == epoch {
			return plan
		}
	}
	return nil
}

// Handle takes a packet that has passed the checks of its form (short, length, version, type, checksum) at time now,
// in microseconds of the server's own clock, and turns p into the answer. It allocates only a slot's first lanes.
func (s *Server) Handle(now uint64, p *wire.Packet) Outcome {
	if p.Type != wire.TypeGrad && p.Type != wire.TypePartial {
		return drop(wire.ReasonType)
	}
	if len(s.plans[p.Job]) == 0 {
		return refuse(p, wire.ReasonUnknownJob)
	}
	plan := s.plan(p.Job, p.Epoch)
	if plan == nil {
		return refuse(p, wire.ReasonEpoch)
	}
	if why := plan.admit(p); why != wire.ReasonNone {
		return refuse(p, why)
	}
	switch {
	case p.Flags&wire.FlagAsync == 0:
		return s.once(now, plan, p)
	case plan.Async && p.Type == wire.TypeGrad:
		return s.async(now, plan, p)
	default:
		return refuse(p, wire.ReasonShape)
	}
}

// once sums p in a chunk that closes.
func (s *Server) once(now uint64, plan *ServerPlan, p *wire.Packet) Outcome {
	slot := &s.slots[plan.slot(p)]

	added := false
	switch order := slot.compare(p); {
	case order < 0:
		slot.claim(now, p)
		added = true
	case order > 0:
		return refuse(p, wire.ReasonStale)
	case !slot.fits(p):
		return refuse(p, wire.ReasonShape)
	case slot.closed && p.Contributors&^slot.mask != 0:
		slot.result(p)
		p.Flags |= wire.FlagLate
		return Outcome{Reason: wire.ReasonLate, Dest: ToSender}
	case slot.closed:
		slot.result(p)
		return Outcome{Reason: wire.ReasonDuplicate, Dest: ToSender}
	case slot.mask&p.Contributors == 0:
		slot.add(now, p)
		added = true
	case p.Contributors&^slot.mask != 0 && plan.Quorum == 0:
		// With quorum a rank that came after a flush may claim the switch's slot while the PARTIAL is still on its way; then
		// the PARTIAL's ranks come by themselves.
		return refuse(p, wire.ReasonOverlap)
	}

	out := Outcome{Dest: ToSender}
	if !added {
		out.Reason = wire.ReasonDuplicate
	}
	if slot.closed = plan.closes(now, slot); slot.closed {
		slot.nextEpoch = announced(p.Chunk, plan.NextEpoch)
		slot.result(p)
		out.Dest = ToService
		return out
	}
	if added && p.Type == wire.TypePartial {
		out.Dest = ToService // for all of the cohort
	}
	slot.tell(wire.TypeAck, now, p)
	return out
}

// slot returns the index of p's slot, unless p is for a running sum.
func (plan *ServerPlan) slot(p *wire.Packet) uint32 {
	round := p.Round & (plan.Rounds - 1)
	if plan.Async {
		round = 2 + p.Round&1 // behind the running sums and their clocks
	}
	return plan.Base + round*plan.Chunks + p.Chunk
}

// closes reports whether an open slot closes now.
func (plan *ServerPlan) closes(now uint64, slot *slot) bool {
	return slot.mask == plan.Ranks || plan.Quorum != 0 &&
		uint32(bits.OnesCount64(slot.mask)) >= plan.Quorum && now-slot.firstAt >= uint64(plan.WaitUs)
}

// result turns p into the RESULT of a slot that a server closed.
func (s *slot) result(p *wire.Packet) {
	s.put(wire.TypeResult, p)
	p.Flags |= wire.FlagServer
}

// admit checks whether the plan takes p at all.
func (plan *ServerPlan) admit(p *wire.Packet) wire.Reason {
	switch {
	case bit(p.Rank)&plan.Ranks == 0:
		return wire.ReasonRank
	case p.Type == wire.TypeGrad && p.Contributors != bit(p.Rank),
		p.Contributors == 0, p.Contributors&^plan.Ranks != 0:
		return wire.ReasonMask
	case p.Type == wire.TypeGrad && !tagInRange(p):
		return wire.ReasonTag
	case p.Chunk >= plan.Chunks:
		return wire.ReasonRange
	}
	return wire.ReasonNone
}

// compare orders the slot's owner against p, a packet that hashes to it: negative when the owner is older, so that p
// claims the slot, zero when p belongs to it. A slot that was never used and one of another job are older; the lease is
// this job's now. Rounds and then epochs come in serial-number order.
func (s *slot) compare(p *wire.Packet) int {
	if s.epoch == 0 || s.job != p.Job {
		return -1
	}
	return cmp.Or(int(int32(s.round-p.Round)), int(int16(s.epoch-p.Epoch)))
}
