package xdp

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"math/bits"
	"net"
	"net/netip"
	"slices"
	"sync"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"xagg/api"
	"xagg/wire"
)

// Agent is the gRPC service through which a controller uses a server: it leases slots to jobs and installs their
// plans in a [Store]. It keeps the books; the store does as it is told.
type Agent struct {
	api.UnimplementedAgentServer
	name, iface string

	mu     sync.Mutex
	store  Store
	leases *leases
	epochs map[uint16]map[uint16]bool // installed epochs by job; a job has a lease if and only if it has an entry
	watch  watch
}

// NewAgent returns an agent for the store, with the plans that are installed there already. Name and iface are what
// Info says of the server; iface is empty where there is no interface.
func NewAgent(name, iface string, store Store) *Agent {
	a := &Agent{
		name: name, iface: iface, store: store,
		leases: newLeases(store.Slots()), epochs: make(map[uint16]map[uint16]bool),
	}
	for _, p := range store.Plans() {
		a.leases.byJob[p.Job] = p.Lease
		a.note(p.Job, p.Epoch)
	}
	return a
}

// Close ends what the agent measures. The store may be closed after it.
func (a *Agent) Close() {
	if p, ok := a.store.(program); ok {
		a.watch.end(p)
	}
}

// note enters an installed plan into the books.
func (a *Agent) note(job, epoch uint16) {
	if a.epochs[job] == nil {
		a.epochs[job] = make(map[uint16]bool)
	}
	a.epochs[job][epoch] = true
}

// Info implements [api.AgentServer].
func (a *Agent) Info(context.Context, *api.InfoRequest) (*api.ServerInfo, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return &api.ServerInfo{
		Name: a.name, Interface: a.iface, Mode: a.store.Mode(),
		MemoryBytes: uint64(a.store.Slots()) * SlotSize,
		Slots:       a.store.Slots(), SlotsFree: a.leases.free(),
		Instance: a.store.Instance(),
	}, nil
}

// Install implements [api.AgentServer]. Installing a plan again replaces it; all plans of a job have the same lease.
func (a *Agent) Install(_ context.Context, req *api.ServerPlan) (*api.InstallReply, error) {
	plan, err := planOf(req)
	if err != nil {
		return nil, err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	lease, leased := a.leases.byJob[plan.Job]
	switch {
	case !leased:
		if lease, err = a.leases.grant(plan.Job, plan.Lease.Chunks, plan.Lease.Rounds); err != nil {
			return nil, status.Error(codes.ResourceExhausted, err.Error())
		}
		if err = a.prepare(plan.Job, lease); err != nil {
			a.leases.release(plan.Job)
			return nil, status.Errorf(codes.Internal, "prepare lease of job %d: %v", plan.Job, err)
		}
	case lease.Chunks != plan.Lease.Chunks:
		return nil, invalid("chunks", "is %d, but the lease of job %d has %d; remove the job's plans first",
			plan.Lease.Chunks, plan.Job, lease.Chunks)
	case lease.Rounds != plan.Lease.Rounds:
		return nil, invalid("rounds", "is %d, but the lease of job %d has %d; remove the job's plans first",
			plan.Lease.Rounds, plan.Job, lease.Rounds)
	case slices.ContainsFunc(a.store.Plans(), func(p Plan) bool { return p.Job == plan.Job && p.Async != plan.Async }):
		// Running sums and rounds would use the same slots in different ways.
		return nil, invalid("async", "is %v, which another plan of job %d is not; remove the job's plans first",
			plan.Async, plan.Job)
	}
	plan.Lease = lease
	if err := a.store.Install(plan); err != nil {
		if !leased {
			a.leases.release(plan.Job)
		}
		code := codes.Internal
		if errors.Is(err, ErrNoPlanRoom) {
			code = codes.ResourceExhausted
		}
		return nil, status.Error(code, err.Error())
	}
	a.note(plan.Job, plan.Epoch)
	return &api.InstallReply{Base: lease.Base}, nil
}

// prepare makes a new lease ready; a is locked. Slots know old packets from new ones as long as a job id is not used
// again. When it is, by a controller that knows nothing of an earlier one's jobs, what the old job left would be taken
// for the new one's.
func (a *Agent) prepare(job uint16, lease Lease) error {
	if a.store.Seen(job) {
		if err := a.store.Clear(lease); err != nil {
			return err
		}
	}
	if err := a.store.ResetRanks(lease.Index); err != nil {
		return fmt.Errorf("reset statistics: %w", err)
	}
	return nil
}

// Arm implements [api.AgentServer]. It answers NOT_FOUND when the plan is not installed.
func (a *Agent) Arm(_ context.Context, req *api.ArmRequest) (*api.ArmReply, error) {
	job, epoch, err := planKeyOf(req.Job, req.Epoch)
	if err != nil {
		return nil, err
	}
	if req.NextEpoch > math.MaxUint16 {
		return nil, invalid("next_epoch", "is %d, want 0..65535", req.NextEpoch)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	switch err := a.store.Arm(job, epoch, uint16(req.NextEpoch)); {
	case errors.Is(err, ErrNoPlan):
		return nil, status.Errorf(codes.NotFound, "arm job %d epoch %d: %v", job, epoch, err)
	case err != nil:
		return nil, status.Errorf(codes.Internal, "arm job %d epoch %d: %v", job, epoch, err)
	}
	return &api.ArmReply{}, nil
}

// Remove implements [api.AgentServer]. A plan that is not there is removed already; job 0 stands for every plan.
func (a *Agent) Remove(_ context.Context, req *api.RemoveRequest) (*api.RemoveReply, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if req.Job == 0 {
		for job, epochs := range a.epochs {
			for epoch := range epochs {
				if err := a.remove(job, epoch); err != nil {
					return nil, err
				}
			}
		}
		return &api.RemoveReply{}, nil
	}
	job, epoch, err := planKeyOf(req.Job, req.Epoch)
	if err != nil {
		return nil, err
	}
	if a.epochs[job][epoch] {
		err = a.remove(job, epoch)
	}
	return &api.RemoveReply{}, err
}

// remove takes a plan away that is there, and the job's lease with its last one; a is locked.
func (a *Agent) remove(job, epoch uint16) error {
	if err := a.store.Remove(job, epoch); err != nil {
		return status.Errorf(codes.Internal, "remove job %d epoch %d: %v", job, epoch, err)
	}
	delete(a.epochs[job], epoch)
	if len(a.epochs[job]) == 0 {
		delete(a.epochs, job)
		a.leases.release(job)
	}
	return nil
}

// Stats implements [api.AgentServer]. Where the running time of the program is to be measured, that is done for a moment from now
// on, and a later answer says what came of it.
func (a *Agent) Stats(_ context.Context, req *api.StatsRequest) (*api.StatsReply, error) {
	if req.Job > math.MaxUint16 {
		return nil, invalid("job", "is %d, want 0..65535", req.Job)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	counts, err := a.store.Reasons()
	if err != nil {
		return nil, status.Errorf(codes.Internal, "read reasons: %v", err)
	}
	reply := &api.StatsReply{
		Reasons: reasonMap(counts), Instance: a.store.Instance(), Slots: a.store.Slots(), SlotsFree: a.leases.free(),
	}
	if p, ok := a.store.(program); ok {
		run := a.watch.read(p, req.Measure)
		reply.RunFrames, reply.RunNs, reply.WatchedNs = run.frames, uint64(run.time), uint64(run.watched)
	}
	for job, lease := range a.leases.byJob {
		if req.Job != 0 && req.Job != uint32(job) {
			continue
		}
		ranks, err := a.store.Ranks(lease.Index)
		if err != nil {
			return nil, status.Errorf(codes.Internal, "read statistics of job %d: %v", job, err)
		}
		for rank := range ranks {
			if s := &ranks[rank]; s.Packets+s.Partials != 0 {
				reply.Ranks = append(reply.Ranks, &api.RankStats{
					Job: uint32(job), Rank: uint32(rank), Packets: s.Packets, Partials: s.Partials,
					LagSumUs: s.LagSumUs, LagMaxUs: s.LagMaxUs, LagLog2: s.LagLog2[:],
				})
			}
		}
	}
	return reply, nil
}

// List implements [api.AgentServer]. The plans come in the order of their jobs and epochs.
func (a *Agent) List(context.Context, *api.ListRequest) (*api.ListReply, error) {
	a.mu.Lock()
	plans := a.store.Plans()
	a.mu.Unlock()
	slices.SortFunc(plans, func(x, y Plan) int {
		return cmp.Or(cmp.Compare(x.Job, y.Job), cmp.Compare(x.Epoch, y.Epoch))
	})
	reply := &api.ListReply{}
	for _, p := range plans {
		reply.Plans = append(reply.Plans, requestOf(p))
	}
	return reply, nil
}

// maxOpenSlots is how many chunks an answer says at most.
const maxOpenSlots = 1000

// OpenSlots implements [api.AgentServer]. A job without plans has no open chunks.
func (a *Agent) OpenSlots(_ context.Context, req *api.OpenSlotsRequest) (*api.OpenSlotsReply, error) {
	if req.Job == 0 || req.Job > math.MaxUint16 {
		return nil, invalid("job", "is %d, want 1..65535", req.Job)
	}
	a.mu.Lock()
	plans := slices.DeleteFunc(a.store.Plans(), func(p Plan) bool { return uint32(p.Job) != req.Job })
	a.mu.Unlock()
	open, err := a.store.OpenSlots(plans) // takes a while where the lease is large: nobody has to wait for it
	if err != nil {
		return nil, status.Errorf(codes.Internal, "read slots of job %d: %v", req.Job, err)
	}
	slices.SortFunc(open, func(x, y OpenSlot) int {
		return cmp.Or(cmp.Compare(y.AgeUs, x.AgeUs), cmp.Compare(int32(x.Round-y.Round), 0), cmp.Compare(x.Chunk, y.Chunk))
	})
	reply := &api.OpenSlotsReply{}
	for _, s := range open[:min(len(open), maxOpenSlots)] {
		reply.Slots = append(reply.Slots, &api.OpenSlot{
			Epoch: uint32(s.Epoch), Round: s.Round, Chunk: s.Chunk, Contributors: s.Contributors, AgeUs: s.AgeUs, IdleUs: s.IdleUs,
		})
	}
	return reply, nil
}

// invalid is the answer to a request with a bad field.
func invalid(field, format string, args ...any) error {
	return status.Errorf(codes.InvalidArgument, "%s: %s", field, fmt.Sprintf(format, args...))
}

func planKeyOf(job, epoch uint32) (uint16, uint16, error) {
	if job == 0 || job > math.MaxUint16 {
		return 0, 0, invalid("job", "is %d, want 1..65535", job)
	}
	if epoch == 0 || epoch > math.MaxUint16 {
		return 0, 0, invalid("epoch", "is %d, want 1..65535", epoch)
	}
	return uint16(job), uint16(epoch), nil
}

// planOf checks a request. The lease of the plan it returns has only the size that is asked for.
func planOf(req *api.ServerPlan) (plan Plan, err error) {
	if plan.Job, plan.Epoch, err = planKeyOf(req.Job, req.Epoch); err != nil {
		return plan, err
	}
	if plan.Ranks = req.Ranks; plan.Ranks == 0 {
		return plan, invalid("ranks", "is empty, want a mask of 1 to %d ranks", wire.MaxRanks)
	}
	if req.Chunks == 0 {
		return plan, invalid("chunks", "is 0, want at least 1")
	}
	// With fewer rounds a worker that is a round ahead would overwrite a result that another still lacks.
	if req.Rounds < 2 || bits.OnesCount32(req.Rounds) != 1 {
		return plan, invalid("rounds", "is %d, want a power of two, at least 2", req.Rounds)
	}
	plan.Lease = Lease{Chunks: req.Chunks, Rounds: req.Rounds}
	if req.NextEpoch > math.MaxUint16 {
		return plan, invalid("next_epoch", "is %d, want 0..65535", req.NextEpoch)
	}
	plan.NextEpoch = uint16(req.NextEpoch)
	if err = plan.setConsistency(req); err != nil {
		return plan, err
	}
	if plan.ServiceIP, err = netip.ParseAddr(req.ServiceIp); err != nil || !plan.ServiceIP.Is4() {
		return plan, invalid("service_ip", "is %q, want an IPv4 address", req.ServiceIp)
	}
	mac, err := net.ParseMAC(req.ServiceMac)
	if err != nil || len(mac) != 6 {
		return plan, invalid("service_mac", "is %q, want an address like 02:78:61:00:ff:fe", req.ServiceMac)
	}
	plan.ServiceMAC = [6]byte(mac)
	return plan, nil
}

// requestOf is the inverse of planOf.
func requestOf(p Plan) *api.ServerPlan {
	return &api.ServerPlan{
		Job: uint32(p.Job), Epoch: uint32(p.Epoch), Ranks: p.Ranks, Chunks: p.Lease.Chunks, Rounds: p.Lease.Rounds,
		NextEpoch: uint32(p.NextEpoch), ServiceIp: p.ServiceIP.String(), ServiceMac: net.HardwareAddr(p.ServiceMAC[:]).String(),
		Quorum: p.Quorum, WaitUs: p.WaitUs, Async: p.Async, Staleness: p.Staleness,
	}
}

// setConsistency checks and takes over what closes a chunk, or what a running sum needs. Ranks and rounds are there.
func (plan *Plan) setConsistency(req *api.ServerPlan) error {
	ranks := bits.OnesCount64(plan.Ranks)
	switch {
	case req.Quorum > uint32(ranks):
		return invalid("quorum", "is %d, want at most the number of ranks, %d", req.Quorum, ranks)
	case req.Quorum == 0 && req.WaitUs != 0:
		return invalid("wait_us", "is %d, but without a quorum a chunk waits for all ranks", req.WaitUs)
	case !req.Async && req.Staleness != 0:
		return invalid("staleness", "is %d, but the plan is not async", req.Staleness)
	case req.Async && req.Quorum != 0:
		return invalid("quorum", "is %d, but in an async plan no chunk closes", req.Quorum)
	case req.Async && plan.Lease.Rounds != asyncRounds:
		return invalid("rounds", "is %d, want %d in an async plan: sums, clocks and two rounds of scouts", req.Rounds, asyncRounds)
	// A worker divides a lane's range by the contributions that may come between two of its own.
	case uint64(ranks)*(2*uint64(req.Staleness)+3) > math.MaxInt32:
		return invalid("staleness", "is %d, which leaves %d ranks no range for their values; want less", req.Staleness, ranks)
	}
	plan.Quorum, plan.WaitUs, plan.Async, plan.Staleness = req.Quorum, req.WaitUs, req.Async, req.Staleness
	return nil
}
