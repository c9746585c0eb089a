package xdp

import (
	"fmt"
	"slices"
)

// MaxJobs is the number of jobs that a server can have leases for at a time.
const MaxJobs = 64

// asyncRounds is how many rounds the lease of an async job has: one of running sums, one of their clocks, and two of scouts.
const asyncRounds = 4

// Lease is a range of slots that belongs to one job: rounds x chunks of them from Base on. All epochs of the job share
// it, since an owner (job, epoch, round) is part of every slot.
type Lease struct {
	Base   uint32 // first slot
	Chunks uint32 // chunks per round, at least 1
	Rounds uint32 // a power of two
	Index  uint32 // the job's number among those that have a lease, below MaxJobs; statistics are kept under it
}

// Slots returns the number of slots of the lease.
func (l Lease) Slots() uint32 { return l.Chunks * l.Rounds }

// NoRoomError says that the arena has no room for a lease.
type NoRoomError struct {
	Job    uint16
	Want   uint64 // slots asked for
	Free   uint32 // slots that are free in all
	Gap    uint32 // slots of the largest free range
	Slots  uint32 // slots of the arena
	Leases int    // of other jobs
}

// Error implements error.
func (e *NoRoomError) Error() string {
	if e.Leases >= MaxJobs {
		return fmt.Sprintf("lease %d slots to job %d: %d jobs have leases, no more can; remove one first", e.Want, e.Job, e.Leases)
	}
	return fmt.Sprintf("lease %d slots to job %d: %d of %d are free, %d in one piece, %d jobs have leases; "+
		"remove a job or start the server with more --memory (a slot takes %d bytes)",
		e.Want, e.Job, e.Free, e.Slots, e.Gap, e.Leases, SlotSize)
}

// leases hands out the slots of an arena, first fit. It is pure bookkeeping.
type leases struct {
	slots uint32
	byJob map[uint16]Lease
}

func newLeases(slots uint32) *leases { return &leases{slots: slots, byJob: make(map[uint16]Lease)} }

// grant leases chunks x rounds slots to a job that has no lease yet.
func (l *leases) grant(job uint16, chunks, rounds uint32) (Lease, error) {
	want := uint64(chunks) * uint64(rounds)
	taken := l.sorted()
	var at, largest uint32
	for i := 0; ; i++ {
		end := l.slots
		if i < len(taken) {
			end = taken[i].Base
		}
		gap := end - at
		if uint64(gap) >= want && len(taken) < MaxJobs {
			lease := Lease{Base: at, Chunks: chunks, Rounds: rounds, Index: l.freeIndex()}
			l.byJob[job] = lease
			return lease, nil
		}
		largest = max(largest, gap)
		if i == len(taken) {
			return Lease{}, &NoRoomError{job, want, l.free(), largest, l.slots, len(taken)}
		}
		at = taken[i].Base + taken[i].Slots()
	}
}

// checkLeases reports whether the plans could have been installed in an arena of so many slots: all plans of a job have
// one lease, which lies within the arena, overlaps no other and has an index of its own.
func checkLeases(slots uint32, plans []Plan) error {
	books := newLeases(slots)
	for _, p := range plans {
		if lease, ok := books.byJob[p.Job]; ok && lease != p.Lease {
			return fmt.Errorf("plans of job %d have different leases", p.Job)
		}
		books.byJob[p.Job] = p.Lease
	}
	var used [MaxJobs]bool
	end := uint64(0)
	for _, lease := range books.sorted() {
		if lease.Chunks == 0 || lease.Rounds == 0 || uint64(lease.Base) < end {
			return fmt.Errorf("the lease at slot %d is empty or overlaps another", lease.Base)
		}
		end = uint64(lease.Base) + uint64(lease.Chunks)*uint64(lease.Rounds)
		if end > uint64(slots) {
			return fmt.Errorf("the lease at slot %d ends beyond the arena", lease.Base)
		}
		if lease.Index >= MaxJobs || used[lease.Index] {
			return fmt.Errorf("the lease at slot %d has no index of its own", lease.Base)
		}
		used[lease.Index] = true
	}
	return nil
}

// release takes a job's lease back.
func (l *leases) release(job uint16) { delete(l.byJob, job) }

// free returns the number of slots that belong to nobody.
func (l *leases) free() uint32 {
	n := l.slots
	for _, lease := range l.byJob {
		n -= lease.Slots()
	}
	return n
}

func (l *leases) sorted() []Lease {
	taken := make([]Lease, 0, len(l.byJob))
	for _, lease := range l.byJob {
		taken = append(taken, lease)
	}
	slices.SortFunc(taken, func(a, b Lease) int { return int(int64(a.Base) - int64(b.Base)) })
	return taken
}

// freeIndex returns the lowest index that no lease has.
func (l *leases) freeIndex() uint32 {
	var used [MaxJobs]bool
	for _, lease := range l.byJob {
		used[lease.Index] = true
	}
	return uint32(slices.Index(used[:], false))
}
