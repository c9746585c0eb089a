package xdp

import (
	"fmt"
	"math/bits"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"xagg/wire"
)

// slotState is what a slot tells of its owner and of who is in.
type slotState struct {
	job, epoch      uint16
	round           uint32
	closed          bool
	mask            uint64
	firstUs, lastUs uint64                // arrivals, in microseconds of the clock that openSlots is told
	clocks          [wire.MaxRanks]uint32 // of the slot behind a running sum: contributions added, by rank
}

// openSlots returns the chunks of the plans, all of one job, that wait for contributions at time now. It reads every slot
// of the job's lease once at most, and keeps those that belong to a plan and are not closed.
//
// A running sum is never closed: it is open while a rank has added more contributions than another. What it waits for is
// the next contribution of the slowest, and the ranks that are in are those that have added theirs. Its times are both
// that of the last contribution, whose ever it was.
func openSlots(plans []Plan, now uint64, read func(slot uint32) (slotState, error)) ([]OpenSlot, error) {
	if len(plans) == 0 {
		return nil, nil
	}
	byEpoch := make(map[uint16]*Plan, len(plans))
	for i := range plans {
		byEpoch[plans[i].Epoch] = &plans[i]
	}
	lease := plans[0].Lease
	var open []OpenSlot
	for i := uint32(0); i < lease.Slots(); i++ {
		if plans[0].Async && i == lease.Chunks { // the clocks are read with their sums
			i += lease.Chunks
		}
		s, err := read(lease.Base + i)
		if err != nil {
			return nil, fmt.Errorf("read slot %d: %w", lease.Base+i, err)
		}
		plan := byEpoch[s.epoch]
		if plan == nil || s.job != plan.Job {
			continue
		}
		if plan.Async && i < lease.Chunks {
			clocks, err := read(lease.Base + lease.Chunks + i)
			if err != nil {
				return nil, fmt.Errorf("read slot %d: %w", lease.Base+lease.Chunks+i, err)
			}
			s.round, s.mask = slowest(plan.Ranks, &clocks.clocks)
			s.closed, s.firstUs = s.mask == 0, s.lastUs
		}
		if s.closed {
			continue
		}
		open = append(open, OpenSlot{
			Epoch: s.epoch, Round: s.round, Chunk: i % lease.Chunks, Contributors: s.mask,
			AgeUs: now - min(s.firstUs, now), IdleUs: now - min(s.lastUs, now),
		})
	}
	return open, nil
}

// slowest returns the least clock of the ranks, in serial-number order, and the ranks that are ahead of it.
func slowest(ranks uint64, clocks *[wire.MaxRanks]uint32) (least uint32, ahead uint64) {
	least = clocks[bits.TrailingZeros64(ranks)]
	for rank, clock := range clocks {
		if ranks>>rank&1 != 0 && int32(clock-least) < 0 {
			least = clock
		}
	}
	for rank, clock := range clocks {
		if ranks>>rank&1 != 0 && clock != least {
			ahead |= 1 << rank
		}
	}
	return least, ahead
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
			job: v.Job, epoch: v.Epoch, round: v.Round, closed: v.Closed != 0, mask: v.Mask,
			firstUs: v.FirstNs / 1000, lastUs: v.LastNs / 1000, clocks: [wire.MaxRanks]uint32(v.Lanes[:]),
		}, nil
	})
}
