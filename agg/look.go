package agg

import "xagg/wire"

// SlotState is what a server's slot tells of its owner and of who is in. An epoch of 0 says that it was never used.
type SlotState struct {
	Job, Epoch      uint16
	Round           uint32
	Closed          bool
	Mask            uint64                // ranks that are in
	FirstUs, LastUs uint64                // arrivals, on the clock of Handle; of a running sum both are the last
	Clocks          [wire.MaxRanks]uint32 // of the slot behind a running sum: contributions added, by rank
}

// Look returns the state of a slot.
func (s *Server) Look(slot uint32) SlotState {
	at := &s.slots[slot]
	state := SlotState{
		Job: at.job, Epoch: at.epoch, Round: at.round, Closed: at.closed, Mask: at.mask, FirstUs: at.firstAt, LastUs: at.lastAt,
	}
	for rank := range min(len(at.lanes), wire.MaxRanks) {
		state.Clocks[rank] = uint32(at.lanes[rank])
	}
	return state
}
