package xdp

import (
	"fmt"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// slotState is what a slot tells of its owner and of who is in.
type slotState struct {
	job, epoch      uint16
	round           uint32
	mask            uint64
	firstUs, lastUs uint64 // arrivals, in microseconds of the clock that openSlots is told
}

// openSlots returns the chunks of the plans, all of one job, that wait for contributions at time now. It reads every slot
// of the job's lease once, and keeps those that belong to a plan and lack a rank.
func openSlots(plans []Plan, now uint64, read func(slot uint32) (slotState, error)) ([]OpenSlot, error) {
	if len(plans) == 0 {
		return nil, nil
	}
	ranks := make(map[uint16]uint64, len(plans))
	for _, p := range plans {
		ranks[p.Epoch] = p.Ranks
	}
	job, lease := plans[0].Job, plans[0].Lease
	var open []OpenSlot
	for i := range lease.Slots() {
		s, err := read(lease.Base + i)
		if err != nil {
			return nil, fmt.Errorf("read slot %d: %w", lease.Base+i, err)
		}
		all, ok := ranks[s.epoch]
		if !ok || s.job != job || s.mask == all {
			continue
		}
		open = append(open, OpenSlot{
			Epoch: s.epoch, Round: s.round, Chunk: i % lease.Chunks, Contributors: s.mask,
			AgeUs: now - min(s.firstUs, now), IdleUs: now - min(s.lastUs, now),
		})
	}
	return open, nil
}

// OpenSlots implements [Store]. It takes about a microsecond a slot of the job's lease; each is locked while it is
// copied.
func (s *Server) OpenSlots(plans []Plan) ([]OpenSlot, error) {
	var clock unix.Timespec // the program's
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &clock); err != nil {
		return nil, fmt.Errorf("read clock: %w", err)
	}
	var v xaggSlot
	return openSlots(plans, uint64(clock.Nano())/1000, func(slot uint32) (slotState, error) {
		if err := s.objects.Arena.LookupWithFlags(slot, &v, ebpf.LookupLock); err != nil {
			return slotState{}, err
		}
		return slotState{
			job: v.Job, epoch: v.Epoch, round: v.Round, mask: v.Mask, firstUs: v.FirstNs / 1000, lastUs: v.LastNs / 1000,
		}, nil
	})
}
