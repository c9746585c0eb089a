package agg

import (
	"fmt"
	"math/bits"
	"slices"

	"xagg/wire"
)

// SwitchPlan is one epoch of a job on a switch: plain comparable data.
type SwitchPlan struct {
	Job, Epoch uint16
	Ranks      uint64 // all ranks of the job
	Cohort     uint64 // the ranks that are summed here; the others are steered
	Servers    int    // number of servers, 0 = the switch is the finalizer
	Base       uint32 // first slot of the epoch's half of the lease
	Pool       uint32 // slots per version, a power of two; the half has 2*Pool slots. 0 only without a cohort
	NextEpoch  uint16 // armed epoch, 0 = none
	Quorum     bool   // a duplicate flushes an open slot
	WaitUs     uint32 // ... whose first arrival is so long ago, in microseconds
}

// final reports whether the switch closes the plan's chunks itself.
func (plan *SwitchPlan) final() bool { return plan.Servers == 0 }

// Ingress says where a packet came in: what the packet itself cannot claim.
type Ingress struct {
	Port uint16 // switch port
	Src  uint32 // IPv4 source address
	// ToService is set when the IPv4 destination is the service address; only returning packets are asked for it.
	ToService bool
}

// Member is where a rank of a job is admitted.
type Member struct {
	Port uint16
	Src  uint32
}

// Switch is the reference model of p4/xagg.p4. Its zero value is not usable, see [NewSwitch].
type Switch struct {
	slots []slot
	plans map[uint16][]*switchEntry // by job
}

// switchEntry is a plan as it is looked up.
type switchEntry struct {
	SwitchPlan
	members [wire.MaxRanks]Member
	servers []uint16 // ports
}

// NewSwitch returns a switch with the given number of slots, none of them used and no plan installed. A slot takes
// memory for lanes only when it is used for the first time.
func NewSwitch(slots int) *Switch {
	return &Switch{slots: make([]slot, slots), plans: make(map[uint16][]*switchEntry)}
}

// Install adds a plan, or replaces the plan of the same job and epoch. members has an entry for every rank in
// plan.Ranks, serverPorts the switch port of every server of the plan in the order of their indices.
// It refuses a lease that does not fit the slots, a pool that is not a power of two, a cohort outside the ranks, one that
// leaves ranks out when there is no server for them, and quorum without a server: who comes after a flush needs one.
func (s *Switch) Install(plan SwitchPlan, members map[uint8]Member, serverPorts []uint16) error {
	e := &switchEntry{SwitchPlan: plan, servers: slices.Clone(serverPorts)}
	if err := s.check(e, members); err != nil {
		return fmt.Errorf("install job %d epoch %d on the switch: %w", plan.Job, plan.Epoch, err)
	}
	for rank, m := range members {
		if plan.Ranks&bit(rank) != 0 {
			e.members[rank] = m
		}
	}
	s.Remove(plan.Job, plan.Epoch)
	s.plans[plan.Job] = append(s.plans[plan.Job], e)
	return nil
}

func (s *Switch) check(e *switchEntry, members map[uint8]Member) error {
	switch {
	case e.Epoch == 0:
		return fmt.Errorf("epoch 0 is no epoch: epochs are 1 to 65535")
	case e.Ranks == 0:
		return fmt.Errorf("no ranks")
	case e.Cohort&^e.Ranks != 0:
		return fmt.Errorf("cohort %#x: not a part of the ranks %#x", e.Cohort, e.Ranks)
	case e.Servers != len(e.servers):
		return fmt.Errorf("%d servers: there are ports for %d", e.Servers, len(e.servers))
	case e.final() && e.Cohort != e.Ranks:
		return fmt.Errorf("cohort %#x of the ranks %#x: the others need a server", e.Cohort, e.Ranks)
	case e.final() && e.Quorum:
		return fmt.Errorf("quorum: it needs a server")
	case !powerOfTwo(e.Pool) && (e.Pool != 0 || e.Cohort != 0):
		return fmt.Errorf("pool %d: want a power of two", e.Pool)
	}
	for ranks := e.Ranks; ranks != 0; ranks &= ranks - 1 {
		rank := uint8(bits.TrailingZeros64(ranks))
		if _, ok := members[rank]; !ok {
			return fmt.Errorf("rank %d: no port and address given", rank)
		}
	}
	return checkLease(e.Base, 2*uint64(e.Pool), len(s.slots))
}

// Remove takes a plan away. Slots are left as they are: they clean themselves.
func (s *Switch) Remove(job, epoch uint16) {
	plans := slices.DeleteFunc(s.plans[job], func(e *switchEntry) bool { return e.Epoch == epoch })
	if s.plans[job] = plans; len(plans) == 0 {
		delete(s.plans, job)
	}
}

// Arm sets the epoch that RESULTs of chunk 0 announce from now on. It does nothing when the plan is not installed.
func (s *Switch) Arm(job, epoch, next uint16) {
	if e := s.plan(job, epoch); e != nil {
		e.NextEpoch = next
	}
}

func (s *Switch) plan(job, epoch uint16) *switchEntry {
	for _, e := range s.plans[job] {
		if e.Epoch == epoch {
			return e
		}
	}
	return nil
}

// Handle takes a packet that has passed the checks of its form (short, length, version, type, checksum) at time now,
// in microseconds of the switch's own clock, and turns p into the answer. It allocates only a slot's first lanes.
func (s *Switch) Handle(now uint64, in Ingress, p *wire.Packet) Outcome {
	switch p.Type {
	case wire.TypeGrad:
		return s.grad(now, in, p)
	case wire.TypeResult, wire.TypeAck, wire.TypeWait, wire.TypeNack:
		return s.returning(in, p)
	default:
		return drop(wire.ReasonType)
	}
}

func (s *Switch) grad(now uint64, in Ingress, p *wire.Packet) Outcome {
	if len(s.plans[p.Job]) == 0 {
		return refuse(p, wire.ReasonUnknownJob)
	}
	plan := s.plan(p.Job, p.Epoch)
	if plan == nil {
		return refuse(p, wire.ReasonEpoch)
	}
	own := bit(p.Rank)
	switch {
	case own&plan.Ranks == 0:
		return refuse(p, wire.ReasonRank)
	case in.Port != plan.members[p.Rank].Port:
		return drop(wire.ReasonPort)
	case in.Src != plan.members[p.Rank].Src:
		return drop(wire.ReasonSource)
	case p.Contributors != own:
		return refuse(p, wire.ReasonMask)
	case !tagInRange(p):
		return refuse(p, wire.ReasonTag)
	case own&plan.Cohort == 0:
		return plan.forward(p, wire.ReasonSteered)
	case p.Flags&wire.FlagAsync != 0:
		return refuse(p, wire.ReasonShape) // a running sum is on a server
	}
	slot := &s.slots[plan.Base+p.Seq&(2*plan.Pool-1)]

	switch {
	case slot.job != p.Job || slot.epoch != p.Epoch || wire.SerialLess(slot.seq, p.Seq):
		// The lease is this job's and its half is this epoch's: any other owner is dead. An owner with an older seq is
		// answered: see the window rule.
		slot.claim(now, p)
	case slot.seq != p.Seq: // newer
		if plan.final() {
			return refuse(p, wire.ReasonStale)
		}
		return plan.forward(p, wire.ReasonForwarded)
	case slot.round != p.Round || slot.chunk != p.Chunk || !slot.fits(p):
		return refuse(p, wire.ReasonShape)
	case slot.mask&own == 0 && slot.closed: // by a flush
		return plan.forward(p, wire.ReasonForwarded)
	case slot.mask&own == 0:
		slot.add(now, p)
	case !slot.closed && plan.Quorum && now-slot.firstAt >= uint64(plan.WaitUs): // a flush
		slot.closed = true
		slot.put(wire.TypePartial, p)
		return Outcome{Reason: wire.ReasonDuplicate, Dest: ToServerAsService, Server: plan.server(p)}
	case !slot.closed:
		slot.tell(wire.TypeWait, now, p)
		return Outcome{Reason: wire.ReasonDuplicate, Dest: ToSender}
	case plan.final():
		slot.put(wire.TypeResult, p)
		return Outcome{Reason: wire.ReasonDuplicate, Dest: ToSender}
	default:
		slot.put(wire.TypePartial, p)
		return Outcome{Reason: wire.ReasonDuplicate, Dest: ToServer, Server: plan.server(p)}
	}

	if slot.mask != plan.Cohort {
		return Outcome{}
	}
	slot.closed = true
	if plan.final() {
		slot.nextEpoch = announced(p.Chunk, plan.NextEpoch)
		slot.put(wire.TypeResult, p)
		return Outcome{Dest: ToAll}
	}
	slot.put(wire.TypePartial, p)
	return Outcome{Dest: ToServerAsService, Server: plan.server(p)}
}

// returning passes on a server's answer. What is refused here is itself an answer and so never answered.
func (s *Switch) returning(in Ingress, p *wire.Packet) Outcome {
	if len(s.plans[p.Job]) == 0 {
		return drop(wire.ReasonUnknownJob)
	}
	plan := s.plan(p.Job, p.Epoch)
	switch {
	case plan == nil:
		return drop(wire.ReasonEpoch)
	case !slices.Contains(plan.servers, in.Port):
		return drop(wire.ReasonPort)
	case !in.ToService:
		return Outcome{Reason: wire.ReasonReturned, Dest: ToAddress}
	case p.Type == wire.TypeResult:
		return Outcome{Reason: wire.ReasonReturned, Dest: ToAll}
	default:
		return Outcome{Reason: wire.ReasonReturned, Dest: ToCohort}
	}
}

// server returns the index of the server that p's chunk belongs to.
func (plan *SwitchPlan) server(p *wire.Packet) int { return int(p.Chunk % uint32(plan.Servers)) }

// forward passes p to its chunk's server as it is.
func (plan *SwitchPlan) forward(p *wire.Packet, why wire.Reason) Outcome {
	p.Flags |= wire.FlagForwarded
	return Outcome{Reason: why, Dest: ToServer, Server: plan.server(p)}
}

// slotClosed is the reason field of a CTRL answer for a slot that is closed.
const slotClosed wire.Reason = 1

// Slot turns p, a CTRL question that arrives at time now, into its answer for the slot with the given index, or returns false
// beyond the slots. p.Blocks blocks of lanes are answered; those beyond the slot's own are zero here and not defined on the
// wire.
func (s *Switch) Slot(now uint64, index uint32, p *wire.Packet) bool {
	if uint64(index) >= uint64(len(s.slots)) {
		return false
	}
	slot := &s.slots[index]
	p.Job, p.Epoch = slot.job, slot.epoch
	p.Seq, p.Round, p.Chunk = slot.seq, slot.round, slot.chunk
	p.Elems, p.Exponent = slot.elems, slot.exponent
	p.Flags = slot.shape | slot.sticky
	slot.values(p)
	if p.Reason = 0; slot.closed {
		p.Reason = slotClosed
	} else {
		p.SpreadUs = uint32(now - slot.firstAt)
	}
	lanes := p.Lanes[:int(p.Blocks)*wire.BlockLanes]
	clear(lanes[copy(lanes, slot.lanes):])
	return true
}
