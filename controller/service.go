package controller

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"xagg/api"
	"xagg/policy"
	"xagg/policy/place"
	"xagg/wire"
)

// service answers the API.
type service struct {
	api.UnimplementedControllerServer
	c   *Controller
	ctx context.Context // ends with Run
}

// apiError gives an error the status code that the API promises. One that is a status already stays as it is.
func apiError(err error) error {
	if _, ok := err.(interface{ GRPCStatus() *status.Status }); ok {
		return err
	}
	var (
		fieldErr *policy.FieldError
		slotsErr *policy.SlotsError
		existErr *existsError
		fullErr  *exhaustedError
		shortErr *place.ShortError
		seatErr  *seatError
		changing *changeError
	)
	code := codes.Unknown
	switch {
	case err == nil:
		return nil
	case errors.As(err, &fieldErr):
		code = codes.InvalidArgument
	case errors.As(err, &slotsErr), errors.As(err, &fullErr), errors.As(err, &shortErr):
		code = codes.ResourceExhausted
	case errors.As(err, &existErr):
		code = codes.AlreadyExists
	case errors.As(err, &seatErr), errors.As(err, &changing):
		code = codes.FailedPrecondition
	case errors.Is(err, errNotReady):
		code = codes.Unavailable
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		code = status.FromContextError(err).Code()
	default:
		if st, ok := status.FromError(err); ok { // of a device, wrapped
			code = st.Code()
		}
	}
	return status.Error(code, err.Error())
}

func invalid(name, format string, args ...any) error { return apiError(fieldf(name, format, args...)) }

// Status implements the API.
func (s *service) Status(ctx context.Context, _ *api.StatusRequest) (*api.StatusReply, error) {
	return s.c.status(ctx), nil
}

// CreateJob implements the API.
func (s *service) CreateJob(_ context.Context, req *api.CreateJobRequest) (*api.Job, error) {
	spec := JobSpec{
		Name: req.GetName(), Ranks: int(req.GetRanks()), MaxElems: req.GetMaxElems(), Policy: ruleOf(req.GetPolicy()),
		Consistency: consistencyOf(req.GetConsistency()), Depth: int(req.GetDepth()),
		Weight: int(req.GetWeight()),
	}
	var err error
	if spec.Adapt, err = s.c.adaptOf(req.GetAdapt()); err != nil {
		return nil, apiError(fmt.Errorf("create job %q: %w", spec.Name, err))
	}
	// Not the caller's context: a caller that goes away must not leave half a job.
	job, err := s.c.createJob(s.ctx, spec)
	if err != nil {
		return nil, apiError(err)
	}
	return job, nil
}

// ruleOf returns the rule that a request asks for, nil = none.
func ruleOf(p *api.Policy) *policy.Static {
	if p == nil {
		return nil
	}
	rule := policy.Static{
		Rule: p.GetRule(), Mode: policy.Mode(p.GetMode()), Servers: p.GetServers(), Pool: int(p.GetPool()),
	}
	for _, r := range p.GetSteer() {
		rule.Steer = append(rule.Steer, int(r))
	}
	rule.Quorum = int(p.GetQuorum())
	if p.WaitUs != nil {
		rule.Wait = new(time.Duration(p.GetWaitUs()) * time.Microsecond)
	}
	return &rule
}

// createJob plans a job and installs its part on the servers; when that fails the job is no more.
func (c *Controller) createJob(ctx context.Context, spec JobSpec) (*api.Job, error) {
	c.mu.Lock()
	j, err := c.intent.create(spec)
	if err != nil {
		c.mu.Unlock()
		return nil, fmt.Errorf("create job %q: %w", spec.Name, err)
	}
	id := j.id // from now on workers may join, and the job begin anew
	c.meets[spec.Name] = newRendezvous(j)
	c.mu.Unlock()
	if err := c.apply(ctx, id); err != nil {
		if rerr := c.dropJob(ctx, spec.Name, err); rerr != nil {
			c.log.Warn("job that was not created is not removed everywhere yet", "job", spec.Name, "err", rerr)
		}
		return nil, fmt.Errorf("create job %q: %w", spec.Name, err)
	}
	c.log.Info("job created", "job", spec.Name, "id", id, "consistency", j.spec.Consistency.String(), "depth", j.spec.Depth,
		"plan", j.decision.Explanation)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.intent.jobs[spec.Name] != j {
		return nil, status.Errorf(codes.Aborted, "create job %q: it was removed meanwhile", spec.Name)
	}
	return c.describe(j), nil
}

// RemoveJob implements the API.
func (s *service) RemoveJob(_ context.Context, req *api.RemoveJobRequest) (*api.RemoveJobReply, error) {
	if !s.c.hasJob(req.GetName()) {
		return nil, noJob(req.GetName())
	}
	if err := s.c.dropJob(s.ctx, req.GetName(), errRemoved); err != nil {
		return nil, apiError(fmt.Errorf("remove job %q: it is forgotten, but not gone from the switch, which is tried again: %w",
			req.GetName(), err))
	}
	s.c.log.Info("job removed", "job", req.GetName())
	return &api.RemoveJobReply{}, nil
}

func (c *Controller) hasJob(name string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.intent.jobs[name] != nil
}

// dropJob forgets a job, tells its workers why, and removes what is installed of it.
func (c *Controller) dropJob(ctx context.Context, name string, why error) error {
	c.mu.Lock()
	if meet := c.meets[name]; meet != nil {
		meet.abort(why, nil)
	}
	delete(c.intent.jobs, name)
	delete(c.meets, name)
	c.forget(name)
	delete(c.errs, name)
	c.mu.Unlock()
	c.trySave()

	c.applying.Lock()
	defer c.applying.Unlock()
	return c.bury(ctx)
}

func noJob(name string) error {
	return status.Errorf(codes.NotFound, "there is no job %q; see 'xagg job list'", name)
}

// Join implements the API.
func (s *service) Join(req *api.JoinRequest, stream api.Controller_JoinServer) error {
	l, err := s.c.join(s.ctx, req)
	if err != nil {
		return err
	}
	defer s.c.gone(s.ctx, l)
	meet, ready := l.meet, l.ready
	var told uint64 // the last recovery that the rank knows of
	for {
		freeze, recovers, lost := s.c.news(l)
		if lost != nil {
			return sendAbort(stream, lost, []uint32{req.GetRank()})
		}
		if ready == nil && recovers != nil && recovers.Recovery != told {
			if err := stream.Send(&api.JoinEvent{Event: &api.JoinEvent_Freeze{Freeze: recovers}}); err != nil {
				return err
			}
			told = recovers.Recovery
		}
		select {
		case <-freeze:
		case <-ready:
			ready = nil
			event := s.c.readyEvent(l)
			if event == nil {
				continue // the job was removed this very moment: it is over
			}
			if err := stream.Send(&api.JoinEvent{Event: &api.JoinEvent_Ready{Ready: event}}); err != nil {
				return err
			}
		case <-meet.over:
			return s.c.farewell(meet, stream)
		case <-stream.Context().Done():
			return status.FromContextError(stream.Context().Err()).Err()
		case <-s.ctx.Done():
			return status.Error(codes.Unavailable, "the controller is stopping")
		}
	}
}

// listener is a stream to a rank.
type listener struct {
	meet   *rendezvous
	rank   int
	seat   *seat
	stream int             // its number
	ready  <-chan struct{} // closes when the rank may go on
}

// listener returns the next stream to a rank that has joined.
func (r *rendezvous) listener(rank int) *listener {
	s := r.seats[rank]
	l := &listener{meet: r, rank: rank, seat: s, ready: r.ready}
	if s == nil {
		return l // of what is over: the stream says so
	}
	s.stream++
	l.stream = s.stream
	if s.back != nil {
		l.ready = s.back
	}
	return l
}

// news returns what a rank has to be told, and a channel that closes when there is more: of a recovery that it takes part
// in, and why it cannot take part in the job any more.
func (c *Controller) news(l *listener) (more <-chan struct{}, freeze *api.Freeze, lost error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if rec := l.meet.recovery; rec.underWay() && rec.ranks>>l.rank&1 != 0 {
		freeze = &api.Freeze{Recovery: rec.number, Reason: rec.reason}
	}
	if l.seat != nil && l.meet.left>>l.rank&1 == 0 { // who has left needs nothing more
		lost = l.seat.lost
	}
	return l.meet.freeze, freeze, lost
}

// join takes a rank's seat in a job, and in a new incarnation of it when the last one has ended. A rank that only lost its
// stream gets its seat again, and one of a quorum job that was gone is let in.
func (c *Controller) join(ctx context.Context, req *api.JoinRequest) (*listener, error) {
	m, err := c.memberOf(req)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	j, meet := c.intent.jobs[req.GetJob()], c.meets[req.GetJob()]
	if j == nil {
		return nil, noJob(req.GetJob())
	}
	rank := int(req.GetRank())
	if rank >= j.spec.Ranks {
		return nil, invalid("rank", "%d is beyond the ranks 0..%d of job %q", rank, j.spec.Ranks-1, j.spec.Name)
	}
	s := seat{member: m, digest: req.GetDigest()}
	if id := req.GetId(); id != 0 {
		if id != uint32(meet.id) {
			return nil, status.Errorf(codes.Aborted, "job %q has begun anew without this rank", meet.job)
		}
		if err := meet.reseat(rank, s); err != nil {
			return nil, apiError(err)
		}
		c.log.Info("rank is back", "job", meet.job, "rank", rank, "host", m.host.Name, "still_away", policy.FormatMask(meet.stillAway()))
		if meet.outdated(rank) {
			c.recover(ctx, j, fmt.Sprintf("rank %d was away while the plan changed", rank))
		}
		c.raise(ctx, j, meet)
		c.running.Go(c.trySave) // a controller that is restarted waits for it
		return meet.listener(rank), nil
	}
	if meet.stillAway()>>rank&1 != 0 { // whoever was this rank would have come with the id
		c.lose(ctx, meet, rank, func() { meet.goes(rank, "was started anew") })
	}
	if meet.ended() {
		c.intent.renew(j)
		meet = newRendezvous(j)
		c.meets[j.spec.Name] = meet
		c.log.Info("job begins anew", "job", j.spec.Name, "id", j.id)
	}
	if err := meet.join(rank, s); err != nil {
		return nil, apiError(err)
	}
	c.log.Info("rank joined", "job", j.spec.Name, "rank", rank, "host", m.host.Name, "udp_port", m.udpPort)
	if meet.state == stateInstalling {
		j.members = meet.members()
		c.running.Go(func() { c.install(ctx, meet) })
	}
	if meet.returning()>>rank&1 != 0 {
		c.recover(ctx, j, fmt.Sprintf("rank %d comes back", rank))
	}
	return meet.listener(rank), nil
}

// memberOf finds the host that a rank says it is on.
func (c *Controller) memberOf(req *api.JoinRequest) (member, error) {
	ip, err := netip.ParseAddr(req.GetIp())
	if err != nil {
		return member{}, invalid("ip", "%q is not an address", req.GetIp())
	}
	i := slices.IndexFunc(c.cfg.Hosts, func(h Host) bool { return h.IP == ip })
	if i < 0 {
		return member{}, invalid("ip", "%s is none of the controller's hosts; add it to the configuration", ip)
	}
	if p := req.GetUdpPort(); p < 1 || p > 0xffff {
		return member{}, invalid("udp_port", "%d is outside 1..65535", p)
	}
	return member{host: c.cfg.Hosts[i], udpPort: uint16(req.GetUdpPort())}, nil
}

// install programs the switch for the ranks that have joined, and lets them go. While a device is not ready it waits,
// as long as the ranks do.
func (c *Controller) install(ctx context.Context, meet *rendezvous) {
	name := meet.job
	for {
		changed := c.links.changed()
		err := c.apply(ctx, meet.id)
		if err == nil {
			c.mu.Lock()
			meet.settled = true
			c.mu.Unlock()
			c.trySave() // first: ranks that were let go come back to a controller that knows it
			c.mu.Lock()
			meet.installed()
			c.mu.Unlock()
			c.log.Info("job runs", "job", name)
			return
		}
		if !errors.Is(err, errNotReady) {
			c.mu.Lock()
			meet.abort(fmt.Errorf("the job cannot be installed: %w", err), nil)
			c.mu.Unlock()
			c.log.Error("job cannot be installed", "job", name, "err", err)
			return
		}
		c.log.Warn("job waits to be installed", "job", name, "err", err)
		select {
		case <-changed:
		case <-meet.over:
			return
		case <-ctx.Done():
			return
		}
	}
}

// gone tells a rendezvous that a stream to a rank has ended, unless there is a newer one. That all streams end with the
// controller says nothing of the ranks: they are expected back.
func (c *Controller) gone(ctx context.Context, l *listener) {
	c.mu.Lock()
	goes := l.seat != nil && l.meet.seats[l.rank] == l.seat && l.seat.stream == l.stream && !c.stopping
	if goes {
		c.lose(ctx, l.meet, l.rank, func() { l.meet.gone(l.rank) })
	}
	c.mu.Unlock()
	if goes {
		c.trySave()
	}
}

// lose carries out how a rank goes away, and what that means for the others. c.mu is held.
func (c *Controller) lose(ctx context.Context, meet *rendezvous, rank int, goes func()) {
	over := meet.ended()
	goes()
	rec := meet.recovery
	switch j := c.intent.byID(meet.id); {
	case over:
	case meet.ended():
		c.log.Warn("job is over", "job", meet.job, "rank", rank, "state", meet.state, "err", meet.err)
	case j != nil && rec.underWay() && (rec.ranks|rec.back)>>rank&1 != 0:
		c.recover(ctx, j, rec.reason) // without it
	case meet.state == stateRunning && meet.absent()>>rank&1 != 0:
		c.log.Warn("rank is gone; the others go on", "job", meet.job, "rank", rank, "gone", policy.FormatMask(meet.absent()))
		if j != nil {
			c.lower(ctx, j, meet)
		}
	}
	c.links.announce() // a change of plan may have waited for it
}

// readyEvent returns what the ranks of a job have to know, or nil when the incarnation is no more.
func (c *Controller) readyEvent(l *listener) *api.Ready {
	c.mu.Lock()
	defer c.mu.Unlock()
	j := c.intent.byID(l.meet.id)
	if j == nil {
		return nil
	}
	consistency := j.spec.Consistency.proto()
	consistency.WaitUs = microsOf(j.decision.Wait)
	return &api.Ready{
		Job:        uint32(j.id),
		Epoch:      uint32(j.epoch),
		Ranks:      uint32(j.spec.Ranks),
		Pool:       uint32(j.decision.Pool),
		MaxChunks:  j.chunks(),
		ServiceIp:  c.cfg.Service.IP.String(),
		ServiceMac: c.cfg.Service.MAC.String(),
		Round:      l.seat.round,
		Seq:        l.seat.seq,
		AllReduces: l.seat.allReduces,
		Returns:    l.seat.returns,

		Consistency: consistency,
		Depth:       uint32(j.spec.Depth),
	}
}

// farewell ends a rank's stream, with an abort event unless all have left.
func (c *Controller) farewell(meet *rendezvous, stream api.Controller_JoinServer) error {
	c.mu.Lock()
	err, odd := meet.err, meet.odd
	c.mu.Unlock()
	if err == nil {
		return nil
	}
	return sendAbort(stream, err, odd)
}

func sendAbort(stream api.Controller_JoinServer, why error, odd []uint32) error {
	return stream.Send(&api.JoinEvent{Event: &api.JoinEvent_Abort{Abort: &api.Abort{Reason: why.Error(), Ranks: odd}}})
}

// Leave implements the API.
func (s *service) Leave(ctx context.Context, req *api.LeaveRequest) (*api.LeaveReply, error) {
	meet, err := s.c.leave(s.ctx, req)
	if err != nil {
		return nil, err
	}
	s.c.trySave()
	if req.GetError() != "" {
		return &api.LeaveReply{}, nil
	}
	select {
	case <-meet.over:
	case <-ctx.Done():
		return nil, status.FromContextError(ctx.Err()).Err()
	case <-s.ctx.Done():
		return nil, status.Error(codes.Unavailable, "the controller is stopping")
	}
	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	if meet.err != nil {
		return nil, status.Errorf(codes.Aborted, "job %q ended before all ranks had finished: %v", meet.job, meet.err)
	}
	return &api.LeaveReply{}, nil
}

func (c *Controller) leave(ctx context.Context, req *api.LeaveRequest) (*rendezvous, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	meet := c.meets[req.GetJob()]
	if meet == nil {
		return nil, noJob(req.GetJob())
	}
	if int(req.GetRank()) >= len(meet.seats) {
		return nil, invalid("rank", "%d is beyond the ranks 0..%d of job %q", req.GetRank(), len(meet.seats)-1, meet.job)
	}
	if id := req.GetId(); id != 0 && id != uint32(meet.id) {
		return nil, status.Errorf(codes.Aborted, "job %q has begun anew without this rank", meet.job)
	}
	if reason := req.GetError(); reason != "" {
		rank := int(req.GetRank())
		c.log.Warn("rank gave up", "job", meet.job, "rank", rank, "err", reason)
		c.lose(ctx, meet, rank, func() { meet.giveUp(rank, reason) })
		return meet, nil
	}
	if err := meet.leave(int(req.GetRank())); err != nil {
		return nil, apiError(err)
	}
	c.links.announce() // a change of plan may have waited for it
	c.log.Info("rank left", "job", meet.job, "rank", req.GetRank(), "all", meet.state == stateFinished)
	return meet, nil
}

// describe returns a job as the API shows it; c is locked.
func (c *Controller) describe(j *job) *api.Job {
	meet := c.meets[j.spec.Name]
	out := &api.Job{
		Name:        j.spec.Name,
		Id:          uint32(j.id),
		Epoch:       uint32(j.epoch),
		Ranks:       uint32(j.spec.Ranks),
		Chunks:      j.chunks(),
		Pool:        uint32(j.decision.Pool),
		Cohort:      j.decision.Cohort,
		Servers:     j.decision.Servers,
		Explanation: j.explanation(),
		Joined:      meet.joined(),
		Left:        meet.left,
		Gone:        meet.absent(),
		Awaited:     meet.stillAway(),
		Recovery:    meet.recovery.describe(),
		Note:        c.note(j),
		State:       string(meet.state),
		Consistency: j.spec.Consistency.proto(),
		Depth:       uint32(j.spec.Depth),
		Weight:      uint32(j.spec.weight()),
		QuotaSlots:  uint32(c.intent.quota(j)),
		Change:      describeChange(j.change, meet),
		Quorum:      uint32(j.quorum),
		WaitUs:      microsOf(j.decision.Wait),
	}
	switch {
	case meet.err != nil:
		out.Error = meet.err.Error()
	case c.errs[j.spec.Name] != nil:
		out.Error = c.errs[j.spec.Name].Error()
	}
	return out
}

// status gathers what is known, and asks the devices for their counters. What does not answer in time is missing.
func (c *Controller) status(ctx context.Context) *api.StatusReply {
	reply, _ := c.survey(ctx, false)
	return reply
}

// survey is status, and returns what the servers have answered, by name. They measure running times if they are to.
func (c *Controller) survey(ctx context.Context, measure bool) (*api.StatusReply, map[string]*api.StatsReply) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	reply := c.links.status()
	c.mu.Lock()
	reply.Switch.Slots = uint32(c.intent.slots)
	reply.Switch.SlotsFree = uint32(c.intent.slotsFree())
	for _, j := range c.intent.sorted() {
		reply.Jobs = append(reply.Jobs, c.describe(j))
	}
	reply.Config = c.configStatus()
	c.mu.Unlock()

	var asking sync.WaitGroup
	if reply.Switch.Ready {
		asking.Go(func() {
			counts, err := c.countSwitch(ctx)
			if errors.Is(err, errNotReady) {
				return
			}
			if err != nil {
				reply.Switch.Error = fmt.Sprintf("it was programmed, but does not tell its counters: %v", err)
				return
			}
			reply.Switch.Reasons = make(map[string]uint64)
			for r := range wire.Reason(wire.NumReasons) {
				reply.Switch.Reasons[r.String()] = counts.Counters[counterReasons][r].Packets
			}
			reply.Switch.Sent = make(map[string]uint64)
			for _, t := range []wire.Type{wire.TypePartial, wire.TypeResult, wire.TypeWait, wire.TypeNack} {
				reply.Switch.Sent[t.String()] = counts.Counters[counterSent][t].Packets
			}
		})
	}
	var mu sync.Mutex
	answers := make(map[string]*api.StatsReply)
	for _, server := range reply.Servers {
		client, err := c.links.agent(server.Name)
		if err != nil {
			continue
		}
		asking.Go(func() {
			if info, err := client.Info(ctx, &api.InfoRequest{}); err == nil {
				server.Info = info
			}
			if stats, err := c.countServer(ctx, server.Name, measure); err == nil {
				server.Reasons = stats.GetReasons()
				mu.Lock()
				answers[server.Name] = stats
				mu.Unlock()
			}
		})
	}
	asking.Wait()
	return reply, answers
}

// status returns what the links alone know.
func (l *links) status() *api.StatusReply {
	l.mu.Lock()
	defer l.mu.Unlock()
	reply := &api.StatusReply{Switch: &api.SwitchStatus{Name: l.sw.name, Address: l.sw.address, Ready: l.sw.ready}}
	if !l.sw.ready {
		reply.Switch.Error = l.sw.err.Error()
	}
	for _, name := range l.order {
		a := l.agents[name]
		s := &api.ServerStatus{Name: name, Address: a.server.Agent, Ready: a.ready, Info: a.info}
		if !a.ready {
			s.Error = a.err.Error()
		}
		reply.Servers = append(reply.Servers, s)
	}
	return reply
}
