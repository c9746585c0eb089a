package agg

// SlotState is what a server's slot tells of its owner and of who is in. An epoch of 0 says that it was never used.
type SlotState struct {
	Job, Epoch      uint16
	Round           uint32
	Mask            uint64 // ranks that are in
	FirstUs, LastUs uint64 // arrivals, on the clock of Handle
}

// Look returns the state of a slot.
func (s *Server) Look(slot uint32) SlotState {
	at := &s.slots[slot]
	return SlotState{at.job, at.epoch, at.round, at.mask, at.firstAt, at.lastAt}
}
