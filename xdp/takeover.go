package xdp

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/netip"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
)

// PinnedError says that what is pinned cannot be taken over.
type PinnedError struct {
	Dir string
	Why string // a clause
}

// Error implements error.
func (e *PinnedError) Error() string {
	return fmt.Sprintf("take over the server pinned in %s: %s; --replace removes it and begins with empty memory", e.Dir, e.Why)
}

// takeOver continues the server that an earlier agent of the interface has pinned: its program is running all the time.
// It returns nil when there is nothing that runs; what is left of it is removed then.
func (p *pins) takeOver(cfg Config, log *slog.Logger) (*Server, error) {
	r, ok, err := p.read()
	if err != nil || !ok {
		return nil, err
	}
	refuse := func(format string, args ...any) error { return &PinnedError{p.dir, fmt.Sprintf(format, args...)} }
	slots, err := cfg.Memory.Slots()
	if err != nil {
		return nil, err
	}

	s := &Server{plans: make(map[planKey]Plan), record: r, slots: slots}
	fail := func(err error) (*Server, error) { return nil, errors.Join(err, s.Close()) }
	s.link, err = link.LoadPinnedLink(p.path(pinLink), nil)
	if r.Complete == 0 || errors.Is(err, fs.ErrNotExist) { // the link is pinned almost last, and removed first
		log.Warn("removing what an agent left that died before it was ready, or before it had removed all", "pins", p.dir)
		return fail(p.clear())
	}
	if err != nil {
		return fail(fmt.Errorf("open %s: %w", p.path(pinLink), explain(err)))
	}
	ifindex, program, err := attachedTo(s.link)
	if err != nil {
		return fail(fmt.Errorf("look at %s: %w", p.path(pinLink), err))
	}
	if ifindex == 0 {
		log.Warn("removing a pinned server whose interface is gone", "pins", p.dir, "was", r.iface())
		return fail(p.clear())
	}
	if r.Object != objectHash() {
		return fail(refuse("it runs another version of the program, which this xagg does not know; start the xagg that pinned it"))
	}
	if s.mode, err = modeAt(cfg.Interface, program); err != nil {
		return fail(err)
	}
	switch {
	case s.mode == "":
		return fail(refuse("its program is not the one at %s but at an interface that was called %s; choose another directory with --pin",
			cfg.Interface, r.iface()))
	case cfg.Mode != Auto && cfg.Mode != s.mode:
		return fail(refuse("it runs in %s mode; --xdp-mode %[1]s or auto takes it over", s.mode))
	}
	if Size(r.Memory) != cfg.Memory {
		return fail(refuse("its memory has %v; --memory %[1]v takes it over", Size(r.Memory)))
	}
	if s.peer, err = link.LoadPinnedLink(p.path(pinPeer), nil); errors.Is(err, fs.ErrNotExist) {
		s.peer = nil
	} else if err != nil {
		return fail(fmt.Errorf("open %s: %w", p.path(pinPeer), explain(err)))
	}
	if s.recordMap, err = ebpf.LoadPinnedMap(p.path(pinRecord), nil); err != nil {
		return fail(fmt.Errorf("open %s: %w", p.path(pinRecord), explain(err)))
	}
	if err := s.openMaps(p); err != nil {
		return fail(err)
	}
	if prog, err := ebpf.NewProgramFromID(program); err == nil { // for its running time; CAP_SYS_ADMIN is needed for both
		s.objects.Xagg = prog
	}
	if s.grace, err = newGracePeriod(); err != nil {
		return fail(fmt.Errorf("take over server: %w", explain(err)))
	}
	if err := s.restore(); err != nil {
		return fail(refuse("%v", err))
	}
	return s, nil
}

// openMaps opens the maps that are pinned.
func (s *Server) openMaps(p *pins) error {
	spec, err := xaggSpec(s.slots)
	if err != nil {
		return err
	}
	o := &s.objects
	for name, to := range map[string]**ebpf.Map{
		xaggMapArena: &o.Arena, xaggMapPlans: &o.Plans, xaggMapJobs: &o.Jobs, xaggMapReasons: &o.Reasons, xaggMapRanks: &o.Ranks,
	} {
		if *to, err = ebpf.LoadPinnedMap(p.path(name), nil); err != nil {
			return fmt.Errorf("open %s: %w", p.path(name), explain(err))
		}
		if err := spec.Maps[name].Compatible(*to); err != nil {
			return &PinnedError{p.dir, fmt.Sprintf("map %s: %v", name, err)}
		}
	}
	return nil
}

// restore reads the plans that are installed, and finishes what an agent had begun when it died.
func (s *Server) restore() error {
	var (
		key   uint32
		entry xaggPlan
		jobs  = make(map[uint32]bool)
		plans []Plan
	)
	entries := s.objects.Plans.Iterate()
	for entries.Next(&key, &entry) {
		plan := planOfEntry(key, &entry)
		plans = append(plans, plan)
		s.plans[planKey{plan.Job, plan.Epoch}] = plan
		jobs[uint32(plan.Job)] = true
	}
	if err := entries.Err(); err != nil {
		return fmt.Errorf("read its plans: %w", err)
	}
	if err := checkLeases(s.slots, plans); err != nil {
		return err
	}
	// A job is entered before its first plan, and taken out after its last one.
	var job uint32
	var mark uint8
	var over []uint32
	marks := s.objects.Jobs.Iterate()
	for marks.Next(&job, &mark) {
		if !jobs[job] {
			over = append(over, job)
		}
	}
	if err := marks.Err(); err != nil {
		return fmt.Errorf("read its jobs: %w", err)
	}
	for _, job := range over {
		if err := s.objects.Jobs.Delete(job); err != nil {
			return fmt.Errorf("remove job %d: %w", job, err)
		}
	}
	return s.grace.wait() // for what the last agent removed or replaced
}

// planOfEntry is the inverse of put.
func planOfEntry(key uint32, e *xaggPlan) Plan {
	p := Plan{
		Job: uint16(key >> 16), Epoch: uint16(key), Ranks: e.Ranks, NextEpoch: e.NextEpoch,
		Lease:  Lease{Base: e.Base, Chunks: e.Chunks, Rounds: e.RoundsMask + 1, Index: e.Index},
		Quorum: e.Quorum, WaitUs: uint32(e.WaitNs / 1000), Staleness: e.Staleness,
	}
	if e.Async != 0 {
		p.Async, p.Lease.Base, p.Lease.Rounds = true, e.Sums, asyncRounds
	}
	var ip [4]byte
	binary.NativeEndian.PutUint32(ip[:], e.ServiceIp)
	p.ServiceIP = netip.AddrFrom4(ip)
	for i, part := range e.ServiceMac.Part {
		binary.NativeEndian.PutUint16(p.ServiceMAC[2*i:], part)
	}
	return p
}

// modeAt returns the mode in which an interface of this network namespace runs a program, empty where it does not.
func modeAt(name string, program ebpf.ProgramID) (Mode, error) {
	l, err := netlink.LinkByName(name)
	if err != nil {
		return "", &NoInterfaceError{name, err}
	}
	xdp := l.Attrs().Xdp
	if xdp == nil || !xdp.Attached || xdp.ProgId != uint32(program) {
		return "", nil
	}
	if xdp.AttachMode == nl.XDP_ATTACHED_DRV {
		return Native, nil
	}
	return Generic, nil
}
