package xdp

import (
	"fmt"
	"maps"
	"slices"
	"sync"

	"xagg/agg"
	"xagg/wire"
)

// Memory is the aggregation server in user space: frame in, frame out. It keeps the rules of [agg.Server], counts
// reasons and ranks like the XDP program, and its answers are the same bytes. It is a [Store], and all of its methods
// may be called from several goroutines.
type Memory struct {
	// Clock, if it is set before the server is used, tells the time of Handle when there is no frame: chunks grow older
	// also while nobody sends. Without it their ages are those at the newest frame.
	Clock func() uint64

	mu      sync.Mutex
	slots   uint32
	server  *agg.Server
	plans   map[planKey]Plan
	number  uint64 // of the instance
	seen    map[uint16]bool
	now     uint64 // of the newest frame
	reasons [wire.NumReasons]uint64
	ranks   [MaxJobs][wire.MaxRanks]RankStats
	packet  wire.Packet
}

type planKey struct{ job, epoch uint16 }

// NewMemory returns a server with that many slots, at least 1.
func NewMemory(slots uint32) *Memory {
	return &Memory{
		slots: slots, server: agg.NewServer(int(slots)), plans: make(map[planKey]Plan),
		number: newInstance(), seen: make(map[uint16]bool),
	}
}

// Handle takes an Ethernet frame that reached the server at time now, in microseconds of any one monotonic clock, and
// appends the answer's frame to b, if there is one. It returns the longer slice, or b itself. The frame is not kept.
// What is not for port [wire.Port] is left alone; where the XDP program passes it on to the stack, nobody is there.
func (m *Memory) Handle(now uint64, frame, b []byte) []byte {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.now = max(m.now, now)
	p := &m.packet
	src, dst, err := wire.ParseFrame(frame, p)
	if dst.Port != wire.Port {
		return b
	}
	if err != nil {
		m.reasons[wire.ReasonOf(err)]++
		return b
	}
	plan, question := m.plans[planKey{p.Job, p.Epoch}], p.Header
	out := m.server.Handle(now, p)
	m.reasons[out.Reason]++
	if out.Reason == wire.ReasonNone {
		switch rank := &m.ranks[plan.Lease.Index][question.Rank]; question.Type {
		case wire.TypeGrad:
			rank.Add(p.SpreadUs) // in an ACK and a RESULT alike: since the first arrival
		case wire.TypePartial:
			rank.Partials++
		}
	}
	switch out.Dest {
	case agg.ToSender:
		return wire.AppendFrame(b, dst, src, p, false)
	case agg.ToService:
		service := wire.Addr{MAC: plan.ServiceMAC, IP: plan.ServiceIP.As4(), Port: wire.Port}
		return wire.AppendFrame(b, dst, service, p, false)
	}
	return b
}

// Slots implements [Store].
func (m *Memory) Slots() uint32 { return m.slots }

// Mode implements [Store].
func (m *Memory) Mode() string { return "memory" }

// Instance implements [Store].
func (m *Memory) Instance() uint64 { return m.number }

// Plans implements [Store].
func (m *Memory) Plans() []Plan {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Collect(maps.Values(m.plans))
}

// Seen implements [Store].
func (m *Memory) Seen(job uint16) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.seen[job]
}

// Install implements [Store].
func (m *Memory) Install(p Plan) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	err := m.server.Install(agg.ServerPlan{
		Job: p.Job, Epoch: p.Epoch, Ranks: p.Ranks, NextEpoch: p.NextEpoch,
		Base: p.Lease.Base, Chunks: p.Lease.Chunks, Rounds: p.Lease.Rounds,
		Quorum: p.Quorum, WaitUs: p.WaitUs, Async: p.Async, Staleness: p.Staleness,
	})
	if err != nil {
		return fmt.Errorf("install plan of job %d epoch %d: %w", p.Job, p.Epoch, err)
	}
	m.plans[planKey{p.Job, p.Epoch}] = p
	m.seen[p.Job] = true
	return nil
}

// Clear implements [Store].
func (m *Memory) Clear(l Lease) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.server.Clear(l.Base, l.Slots())
	return nil
}

// Arm implements [Store].
func (m *Memory) Arm(job, epoch, next uint16) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	p, ok := m.plans[planKey{job, epoch}]
	if !ok {
		return ErrNoPlan
	}
	m.server.Arm(job, epoch, next)
	p.NextEpoch = next
	m.plans[planKey{job, epoch}] = p
	return nil
}

// Remove implements [Store].
func (m *Memory) Remove(job, epoch uint16) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.server.Remove(job, epoch)
	delete(m.plans, planKey{job, epoch})
	return nil
}

// Reasons implements [Store].
func (m *Memory) Reasons() ([wire.NumReasons]uint64, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.reasons, nil
}

// Ranks implements [Store].
func (m *Memory) Ranks(index uint32) ([wire.MaxRanks]RankStats, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.ranks[index], nil
}

// ResetRanks implements [Store].
func (m *Memory) ResetRanks(index uint32) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	clear(m.ranks[index][:])
	return nil
}

// OpenSlots implements [Store].
func (m *Memory) OpenSlots(plans []Plan) ([]OpenSlot, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.Clock != nil {
		m.now = max(m.now, m.Clock())
	}
	return openSlots(plans, m.now, func(slot uint32) (slotState, error) {
		s := m.server.Look(slot)
		return slotState{
			job: s.Job, epoch: s.Epoch, round: s.Round, closed: s.Closed, mask: s.Mask,
			firstUs: s.FirstUs, lastUs: s.LastUs, clocks: s.Clocks,
		}, nil
	})
}
