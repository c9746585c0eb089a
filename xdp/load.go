package xdp

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/cilium/ebpf/rlimit"
	"golang.org/x/sys/unix"

	"xagg/wire"
)

// ErrPrivileges says that the kernel does not let this process load or attach XDP programs.
var ErrPrivileges = errors.New("needs root, or CAP_BPF, CAP_PERFMON and CAP_NET_ADMIN")

// Server is the aggregation server in the kernel: the XDP program and its maps. It is a [Store]. All of it vanishes
// with Close or with the process, unless it is pinned, as [Serve] does.
type Server struct {
	objects   xaggObjects
	slots     uint32
	mode      Mode
	link      link.Link // of the program; nil before Attach
	peer      link.Link // of the program that passes all at a veth's other end; nil where that has another or needs none
	grace     *gracePeriod
	plans     map[planKey]Plan
	record    record
	recordMap *ebpf.Map
}

// Load loads the program with an arena of as many slots as fit into memory. Nothing is attached yet.
func Load(memory Size) (*Server, error) {
	slots, err := memory.Slots()
	if err != nil {
		return nil, err
	}
	// Before Linux 5.11 maps counted as locked memory; where they still do, the default limit is 8 MiB.
	if err := rlimit.RemoveMemlock(); err != nil {
		return nil, fmt.Errorf("raise the limit of locked memory: %w", explain(err))
	}
	spec, err := xaggSpec(slots)
	if err != nil {
		return nil, err
	}
	s := &Server{
		slots: slots, plans: make(map[planKey]Plan),
		record: record{Instance: newInstance(), Memory: uint64(memory), Object: objectHash()},
	}
	if err := spec.LoadAndAssign(&s.objects, nil); err != nil {
		if errors.Is(err, unix.ENOMEM) || errors.Is(err, unix.E2BIG) {
			return nil, fmt.Errorf("load XDP program with %v of memory (%d slots): %w; start with less memory", memory, slots, err)
		}
		return nil, fmt.Errorf("load XDP program: %w", explain(err))
	}
	if s.grace, err = newGracePeriod(); err == nil {
		s.recordMap, err = ebpf.NewMap(&recordSpec)
	}
	if err != nil {
		s.Close()
		return nil, fmt.Errorf("load XDP program: %w", explain(err))
	}
	return s, nil
}

// xaggSpec describes the object with an arena of so many slots.
func xaggSpec(slots uint32) (*ebpf.CollectionSpec, error) {
	spec, err := loadXagg()
	if err != nil {
		return nil, err
	}
	spec.Maps[xaggMapArena].MaxEntries = slots
	return spec, nil
}

// explain turns the kernel's permission errors into what is needed.
func explain(err error) error {
	if errors.Is(err, os.ErrPermission) {
		return fmt.Errorf("%w (%w)", ErrPrivileges, err)
	}
	return err
}

// Close detaches the program and frees its memory, except for what is pinned.
func (s *Server) Close() error {
	var errs []error
	closeIf := func(there bool, c io.Closer) {
		if there {
			errs = append(errs, c.Close())
		}
	}
	closeIf(s.peer != nil, s.peer)
	closeIf(s.link != nil, s.link)
	s.peer, s.link = nil, nil
	closeIf(s.grace != nil, s.grace)
	closeIf(s.recordMap != nil, s.recordMap)
	return errors.Join(append(errs, s.objects.Close())...)
}

// Slots implements [Store].
func (s *Server) Slots() uint32 { return s.slots }

// Mode implements [Store]: the mode that is active, empty before Attach.
func (s *Server) Mode() string { return string(s.mode) }

// Instance implements [Store].
func (s *Server) Instance() uint64 { return s.record.Instance }

// Seen implements [Store].
func (s *Server) Seen(job uint16) bool { return s.record.seen(job) }

// Plans implements [Store].
func (s *Server) Plans() []Plan { return slices.Collect(maps.Values(s.plans)) }

// Install implements [Store].
func (s *Server) Install(p Plan) error {
	if !s.Seen(p.Job) {
		s.record.setSeen(p.Job)
		if err := s.writeRecord(); err != nil {
			return fmt.Errorf("install plan of job %d epoch %d: %w", p.Job, p.Epoch, err)
		}
	}
	// The job first: a packet in between is of a known job and an unknown epoch, which is true.
	known := s.jobKnown(p.Job)
	err := s.objects.Jobs.Put(uint32(p.Job), uint8(1))
	if err == nil {
		err = s.put(p)
	}
	if errors.Is(err, unix.E2BIG) {
		err = ErrNoPlanRoom
	}
	if err != nil {
		if !known {
			s.objects.Jobs.Delete(uint32(p.Job))
		}
		return fmt.Errorf("install plan of job %d epoch %d: %w", p.Job, p.Epoch, err)
	}
	s.plans[planKey{p.Job, p.Epoch}] = p
	return nil
}

// put writes a plan's entry and waits until no packet is handled under what it replaces.
func (s *Server) put(p Plan) error {
	ip := p.ServiceIP.As4()
	entry := xaggPlan{
		Ranks: p.Ranks, Base: p.Lease.Base, Chunks: p.Lease.Chunks, RoundsMask: p.Lease.Rounds - 1, Index: p.Lease.Index,
		ServiceIp: binary.NativeEndian.Uint32(ip[:]), NextEpoch: p.NextEpoch,
		Quorum: p.Quorum, WaitNs: uint64(p.WaitUs) * 1000, Staleness: p.Staleness,
	}
	if p.Async { // sums, their clocks, and two rounds of scouts
		entry.Async, entry.Sums = 1, p.Lease.Base
		entry.Base, entry.RoundsMask = p.Lease.Base+2*p.Lease.Chunks, 1
	}
	for i := range entry.ServiceMac.Part {
		entry.ServiceMac.Part[i] = binary.NativeEndian.Uint16(p.ServiceMAC[2*i:])
	}
	err := s.objects.Plans.Put(planMapKey(p.Job, p.Epoch), entry)
	if err != nil {
		return err
	}
	return s.grace.wait()
}

// planMapKey is how the program spells a plan's key.
func planMapKey(job, epoch uint16) uint32 { return uint32(job)<<16 | uint32(epoch) }

// Clear implements [Store]. It takes about a microsecond a slot.
func (s *Server) Clear(l Lease) error {
	unused := make([]byte, SlotSize)
	for slot := l.Base; slot < l.Base+l.Slots(); slot++ {
		if err := s.objects.Arena.Put(slot, unused); err != nil {
			return fmt.Errorf("clear slot %d: %w", slot, err)
		}
	}
	return nil
}

// Arm implements [Store].
func (s *Server) Arm(job, epoch, next uint16) error {
	p, ok := s.plans[planKey{job, epoch}]
	if !ok {
		return ErrNoPlan
	}
	p.NextEpoch = next
	if err := s.put(p); err != nil {
		return err
	}
	s.plans[planKey{job, epoch}] = p
	return nil
}

// Remove implements [Store].
func (s *Server) Remove(job, epoch uint16) error {
	err := s.objects.Plans.Delete(planMapKey(job, epoch))
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return err
	}
	delete(s.plans, planKey{job, epoch})
	if !s.jobKnown(job) {
		if err := s.objects.Jobs.Delete(uint32(job)); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return err
		}
	}
	return s.grace.wait()
}

func (s *Server) jobKnown(job uint16) bool {
	for key := range s.plans {
		if key.job == job {
			return true
		}
	}
	return false
}

// Reasons implements [Store].
func (s *Server) Reasons() (counts [wire.NumReasons]uint64, err error) {
	var perCPU []uint64
	for r := range counts {
		if err := s.objects.Reasons.Lookup(uint32(r), &perCPU); err != nil {
			return counts, err
		}
		for _, n := range perCPU {
			counts[r] += n
		}
	}
	return counts, nil
}

// Ranks implements [Store].
func (s *Server) Ranks(index uint32) (stats [wire.MaxRanks]RankStats, err error) {
	var perCPU []xaggRankStats
	for rank := range stats {
		if err := s.objects.Ranks.Lookup(index*wire.MaxRanks+uint32(rank), &perCPU); err != nil {
			return stats, err
		}
		for _, c := range perCPU {
			stats[rank].merge(&RankStats{c.Packets, c.Partials, c.LagSumUs, c.LagMaxUs, c.LagLog2})
		}
	}
	return stats, nil
}

// ResetRanks implements [Store].
func (s *Server) ResetRanks(index uint32) error {
	cpus, err := ebpf.PossibleCPU()
	if err != nil {
		return err
	}
	zero := make([]xaggRankStats, cpus)
	for rank := range uint32(wire.MaxRanks) {
		if err := s.objects.Ranks.Put(index*wire.MaxRanks+rank, zero); err != nil {
			return err
		}
	}
	return nil
}

// gracePeriod waits until every program that was running when it was asked has ended. Entries of a hash map may be
// reused for another key as soon as they are replaced or deleted, while a program still reads the old one; and a lease
// must not be given away while a packet is being added under it. A write to a map of maps returns only after an RCU
// grace period, on every kernel since 4.18 (commit 1ae80cf31938): that is all it is used for.
type gracePeriod struct{ outer, inner *ebpf.Map }

func newGracePeriod() (*gracePeriod, error) {
	spec := &ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1}
	inner, err := ebpf.NewMap(spec)
	if err != nil {
		return nil, err
	}
	outer, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.ArrayOfMaps, KeySize: 4, ValueSize: 4, MaxEntries: 1, InnerMap: spec})
	if err != nil {
		inner.Close()
		return nil, err
	}
	return &gracePeriod{outer, inner}, nil
}

func (g *gracePeriod) wait() error {
	if err := g.outer.Put(uint32(0), g.inner); err != nil {
		return fmt.Errorf("wait for running programs: %w", err)
	}
	return nil
}

// Close frees the maps.
func (g *gracePeriod) Close() error { return errors.Join(g.outer.Close(), g.inner.Close()) }
