package agg

import "xagg/wire"

// SwitchPlan is one epoch of a job on a switch: plain comparable data.
type SwitchPlan struct {
	Job, Epoch uint16
	Ranks      uint64 // all ranks of the job
	Cohort     uint64 // the ranks that are summed here; the others are steered
	Servers    int    // number of servers, 0 = the switch is the finalizer
	Base       uint32 // first slot of the epoch's half of the lease
	Pool       uint32 // slots per version, a power of two; the half has 2*Pool slots
	NextEpoch  uint16 // armed epoch, 0 = none
}

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
	slots []switchSlot
}

// NewSwitch returns a switch with the given number of slots, none of them used and no plan installed.
func NewSwitch(slots int) *Switch { panic("not written") }

// Install adds a plan, or replaces the plan of the same job and epoch. members has an entry for every rank in
// plan.Ranks, serverPorts the switch port of every server of the plan in the order of their indices.
// It refuses a lease that does not fit the slots, a pool that is not a power of two, and a cohort outside the ranks.
func (s *Switch) Install(plan SwitchPlan, members map[uint8]Member, serverPorts []uint16) error {
	panic("not written")
}

// Remove takes a plan away. Slots are left as they are: they clean themselves.
func (s *Switch) Remove(job, epoch uint16) { panic("not written") }

// Arm sets the epoch that RESULTs of chunk 0 announce from now on.
func (s *Switch) Arm(job, epoch, next uint16) { panic("not written") }

// Handle takes a packet that has passed the checks of its form (short, length, version, type, checksum) at time now,
// in microseconds of the switch's own clock, and turns p into the answer.
func (s *Switch) Handle(now uint64, in Ingress, p *wire.Packet) Outcome { panic("not written") }

// Slot returns what a CTRL question for the slot is answered with, or false beyond the slots.
func (s *Switch) Slot(index uint32, p *wire.Packet) bool { panic("not written") }

type switchSlot struct{}
