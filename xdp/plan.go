package xdp

import (
	"errors"
	"net/netip"

	"xagg/wire"
)

// Plan is one epoch of a job on a server: plain comparable data, checked by the [Agent].
type Plan struct {
	Job, Epoch uint16
	Ranks      uint64 // all ranks of the job: a chunk closes when they are all in
	Lease      Lease
	NextEpoch  uint16     // armed epoch, 0 = none
	Quorum     uint32     // ranks that are enough to close a chunk; 0 = all have to be in
	WaitUs     uint32     // ... when its first arrival is so long ago, in microseconds
	Async      bool       // running sums; the lease has 4 rounds
	Staleness  uint32     // ... contributions that a rank may be ahead of the slowest
	ServiceIP  netip.Addr // IPv4; where RESULTs go
	ServiceMAC [6]byte
}

// ErrNoPlanRoom is returned by Install when a store holds as many plans as it can.
var ErrNoPlanRoom = errors.New("no room for another plan")

// ErrNoPlan is returned by Arm when the plan is not installed.
var ErrNoPlan = errors.New("plan is not installed")

// OpenSlot is a chunk that waits for contributions.
type OpenSlot struct {
	Epoch        uint16
	Round, Chunk uint32
	Contributors uint64 // mask of the ranks that are in
	AgeUs        uint64 // microseconds since the first of them arrived
	IdleUs       uint64 // ... since the last
}

// Store is the data plane as the [Agent] sees it. What it is asked for was checked: leases do not overlap and lie
// within the slots. Its methods may be called from one goroutine at a time.
type Store interface {
	// Slots returns the number of slots of the arena.
	Slots() uint32
	// Mode returns "native", "generic" or "memory".
	Mode() string
	// Instance returns the number of the arena: another one when its memory is not what it was. It is not 0.
	Instance() uint64
	// Plans returns the plans that are installed, in no order. At first they are those that an earlier agent left.
	Plans() []Plan
	// Seen reports whether the job has ever had a plan in this arena, so that its old contributions may be anywhere.
	Seen(job uint16) bool
	// Install adds a plan, or replaces the plan of the same job and epoch in one step. When it returns, every packet
	// sees the plan.
	Install(Plan) error
	// Clear makes the slots of a lease like ones that were never used. No plan may be installed for the lease.
	Clear(Lease) error
	// Arm sets the epoch that RESULTs of chunk 0 announce from now on. [ErrNoPlan] when there is no such plan.
	Arm(job, epoch, next uint16) error
	// Remove takes a plan away, if it is there. When it returns, no packet is summed under it any more, so that its
	// slots may be leased again.
	Remove(job, epoch uint16) error
	// Reasons returns the number of packets under each reason since the start.
	Reasons() ([wire.NumReasons]uint64, error)
	// Ranks returns the statistics of the ranks of the job with that index in [0, MaxJobs).
	Ranks(index uint32) ([wire.MaxRanks]RankStats, error)
	// ResetRanks zeroes them.
	ResetRanks(index uint32) error
	// OpenSlots returns the chunks of the plans, which are all of one job, that wait for contributions, in no order. It
	// may be called at the same time as any other method; plans that are removed meanwhile may be in the answer.
	OpenSlots(plans []Plan) ([]OpenSlot, error)
}
