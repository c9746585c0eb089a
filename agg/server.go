package agg

import "xagg/wire"

// ServerPlan is one epoch of a job on an aggregation server: plain comparable data.
type ServerPlan struct {
	Job, Epoch uint16
	Ranks      uint64 // all ranks of the job: a chunk closes when they are all in
	Base       uint32 // first slot of the job's lease
	Chunks     uint32 // chunks per round that the lease has room for
	Rounds     uint32 // rounds that the lease has room for, a power of two
	NextEpoch  uint16 // armed epoch, 0 = none
}

// Server is the reference model of xdp/xagg.bpf.c. Its zero value is not usable, see [NewServer].
type Server struct {
	slots []serverSlot
}

// NewServer returns a server with the given number of slots, none of them used and no plan installed.
func NewServer(slots int) *Server { panic("not written") }

// Install adds a plan, or replaces the plan of the same job and epoch. It refuses a lease that does not fit the slots
// and a number of rounds that is not a power of two.
func (s *Server) Install(plan ServerPlan) error { panic("not written") }

// Remove takes a plan away. Slots are left as they are: they clean themselves.
func (s *Server) Remove(job, epoch uint16) { panic("not written") }

// Arm sets the epoch that RESULTs of chunk 0 announce from now on.
func (s *Server) Arm(job, epoch, next uint16) { panic("not written") }

// Handle takes a packet that has passed the checks of its form (short, length, version, type, checksum) at time now,
// in microseconds of the server's own clock, and turns p into the answer.
func (s *Server) Handle(now uint64, p *wire.Packet) Outcome { panic("not written") }

type serverSlot struct{}
