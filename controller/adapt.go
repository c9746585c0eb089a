package controller

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"math/bits"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"xagg/api"
	"xagg/policy"
	"xagg/policy/adapt"
	"xagg/policy/telemetry"
	"xagg/policy/trace"
)

// ReportEvery is how often ranks of a job whose plan follows what is measured report their rounds.
const ReportEvery = 100 * time.Millisecond

// recordBuffer is how many lines a reader of a trace may be behind.
const recordBuffer = 1024

// adaptation has the plan of an incarnation of a job follow what is measured. It is guarded by Controller.mu.
type adaptation struct {
	id       uint16 // of the incarnation
	config   adapt.Config
	follow   *adapt.Follower
	decision *adapt.Decision // the last one
	steering bool            // what it decided is being carried out
	failed   string          // why what it decided last could not be
	readers  map[*reader]bool
}

// reader reads a trace.
type reader struct {
	lines chan []byte // closed when there will be no more
	over  bool        // because the job is over
}

// validateAdapt checks how a job's plan is to follow what is measured. Errors are of type [*policy.FieldError].
func (j JobSpec) validateAdapt() error {
	if j.Adapt == nil {
		return nil
	}
	if j.Consistency.Mode == ModeAsync {
		return fieldf("adapt", "the plan of an async job does not change while it runs; leave it out")
	}
	if _, err := j.Adapt.Compile(j.Ranks); err != nil {
		return under("adapt", err)
	}
	return nil
}

// note says in words what keeps a job's plan from being what the configuration or its policy would have; empty = nothing does.
// c.mu is held.
func (c *Controller) note(j *job) string {
	note := c.intent.deviates(j)
	a := c.adaptations[j.spec.Name]
	if a == nil || a.id != j.id || a.decision == nil {
		return note
	}
	for _, of := range []struct{ what, why string }{
		{"its policy cannot decide, and the plan stays", a.decision.Error}, {"what its policy decided was not carried out", a.failed},
	} {
		switch {
		case of.why == "":
		case note != "":
			note += "; " + of.what + ": " + of.why
		default:
			note = of.what + ": " + of.why
		}
	}
	return note
}

// adaptable checks how the plan of a job that is there is to follow what is measured from a plan on, as spec says, and returns the
// servers that have memory for what may come. Errors are those of deal.
func (in *intent) adaptable(j *job, spec JobSpec, from policy.Plan) (homes []string, err error) {
	if err := spec.validateAdapt(); err != nil {
		return nil, err
	}
	if spec.Adapt != nil && from.Cohort == 0 && spec.Consistency.Mode != ModeQuorum {
		return nil, fieldf("adapt", "servers sum all ranks of the job, which leaves nothing to move; first steer it to mode %q or %q",
			policy.ModeSwitch, policy.ModeHybrid)
	}
	if spec.Adapt == nil || len(from.Servers) > 0 {
		return from.Servers, nil
	}
	placed, err := in.deal(spec, policy.Static{Mode: policy.ModeSwitch}, j)
	return placed.Homes, err
}

// adapts returns what has the plan of a running job follow what is measured, or nil. c.mu is held.
func (c *Controller) adapts(j *job) *adaptation {
	if j.spec.Adapt == nil {
		delete(c.adaptations, j.spec.Name)
		return nil
	}
	a := c.adaptations[j.spec.Name]
	if a != nil && a.id == j.id {
		return a
	}
	follow, err := j.spec.Adapt.Follow(j.spec.Ranks, j.epoch)
	if err != nil { // it was checked before
		c.log.Error("plan does not follow what is measured", "job", j.spec.Name, "err", err)
		return nil
	}
	b := &adaptation{
		id: j.id, config: *j.spec.Adapt, follow: follow, readers: map[*reader]bool{},
	}
	if a != nil {
		b.readers = a.readers
		b.tell(b.header(j))
	}
	c.adaptations[j.spec.Name] = b
	return b
}

// header is the line that begins a trace of a job.
func (a *adaptation) header(j *job) []byte {
	var line bytes.Buffer
	state := a.follow.State()
	trace.NewWriter(&line, j.spec.Name, j.spec.Ranks, a.config, &state)
	return line.Bytes()
}

// tell gives lines to all readers. One that is too far behind loses its stream.
func (a *adaptation) tell(lines ...[]byte) {
	for r := range a.readers {
		for _, line := range lines {
			select {
			case r.lines <- bytes.TrimSuffix(line, []byte("\n")):
				continue
			default:
			}
			close(r.lines)
			delete(a.readers, r)
			break
		}
	}
}

// measured takes what a rank reports of its rounds, and decides when that completes one. What is decided is carried out
// until ctx ends. c.mu is held.
func (c *Controller) measured(ctx context.Context, j *job, meet *rendezvous, rank int, rounds []*api.Round) {
	a := c.adapts(j)
	if a == nil || len(rounds) == 0 {
		return
	}
	report := telemetry.Report{Rank: rank}
	for _, r := range rounds {
		round := telemetry.Round{
			Number: r.GetRound(), Compute: clipped(r.GetComputeUs()), Comm: clipped(r.GetCommUs()),
			Chunks: int(r.GetChunks()), Late: int(r.GetLate()), Packets: r.GetPackets(), Resends: r.GetResends(), Behind: int(r.GetBehind()),
			Held: clipped(r.GetHeldUs()), Blocked: clipped(r.GetBlockedUs()),
		}
		for _, l := range r.GetLast() {
			round.Last = append(round.Last, telemetry.Last{
				Rank: int(l.GetRank()), Chunks: int(l.GetChunks()), Blocked: clipped(l.GetBlockedUs()),
			})
		}
		report.Rounds = append(report.Rounds, round)
	}
	now := time.Since(c.origin)
	if err := a.follow.Report(now, j.epoch, meet.there(), report); err != nil {
		c.log.Warn("report of a rank is left out", "job", j.spec.Name, "err", err)
		return
	}
	c.judge(ctx, j, a, now)
}

// clipped is a duration of so many microseconds; what is too large for one stays too large for a round.
func clipped(us uint64) time.Duration { return time.Duration(min(us, 1<<50)) * time.Microsecond }

// judge decides once a round. While the plan changes, or the job recovers, nothing is decided. c.mu is held.
func (c *Controller) judge(ctx context.Context, j *job, a *adaptation, now time.Duration) {
	if j.change != nil || j.recovering != recoverNot || a.steering {
		return
	}
	s := &a.follow.Snapshot
	c.observe(j, s)
	a.follow.Measure(now, float64(j.spec.MaxElems)*4)
	c.devices.fill(s, now, j.id)
	d, next, ok := a.follow.Decide(j.decision.Plan)
	if !ok {
		return
	}
	a.decision, a.failed = &d, ""
	if len(a.readers) > 0 {
		var lines bytes.Buffer
		if err := trace.Continue(&lines).Step(s, &d); err != nil {
			c.log.Error("cannot record a decision", "job", j.spec.Name, "err", err)
		}
		a.tell(bytes.SplitAfter(bytes.TrimSuffix(lines.Bytes(), []byte("\n")), []byte("\n"))...)
	}
	if d.Error != "" {
		c.log.Warn("policy cannot decide", "job", j.spec.Name, "err", d.Error)
	}
	for _, m := range d.Moves {
		c.log.Info("policy moves a rank", "job", j.spec.Name, "rank", m.Rank, "to", m.To, "rule", d.Rule, "why", m.Why, "dry_run", d.DryRun)
	}
	rule, same := j.decided(next)
	if same {
		return
	}
	a.steering = true
	name, id := j.spec.Name, j.id
	c.running.Go(func() {
		_, err := c.steer(ctx, name, rule)
		c.mu.Lock()
		defer c.mu.Unlock()
		a.steering = false
		if err != nil && c.intent.byID(id) != nil {
			a.failed = err.Error()
			c.log.Warn("what the policy decided was not carried out", "job", name, "err", err)
		}
	})
}

// decided returns the rule of the plan that a policy has decided on; same is true when the job has it already.
func (j *job) decided(next policy.Plan) (rule policy.Static, same bool) {
	same = next.Equal(j.decision.Plan)
	next.Servers = j.homes
	return next.Rule(), same
}

// observe fills in of a snapshot what the controller itself knows. c.mu is held.
func (c *Controller) observe(j *job, s *telemetry.Snapshot) {
	p := &j.decision.Plan
	mode := j.spec.Consistency.Mode
	if mode == "" {
		mode = ModeSync
	}
	s.Job = telemetry.Job{
		Name: j.spec.Name, Size: float64(j.spec.Ranks), Mode: string(mode), Pool: float64(p.Pool),
		Cohort: float64(bits.OnesCount64(p.Cohort)), Steered: float64(bits.OnesCount64(p.Steered)),
		Quorum: float64(p.Quorum), Least: float64(j.spec.Consistency.Quorum), Wait: p.Wait.Seconds(),
	}
	s.Switch = telemetry.Switch{Slots: float64(c.intent.slots)}
	if c.intent.slots > 0 {
		s.Switch.SlotsFree = float64(c.intent.slotsFree()) / float64(c.intent.slots)
	}
	s.Servers = c.links.servers(s.Servers[:0])
	for i := range s.Servers {
		s.Servers[i].MemoryFree = c.intent.memoryFree(s.Servers[i].Name)
	}
}

// servers returns what is known of the servers, in their order.
func (l *links) servers(list []telemetry.Server) []telemetry.Server {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, name := range l.order {
		list = append(list, telemetry.Server{Name: name, Ready: l.agents[name].ready})
	}
	return list
}

// adaptOf reads a policy of a request on top of the configuration's; nil = none.
func (c *Controller) adaptOf(src string) (*adapt.Config, error) {
	if src == "" {
		return nil, nil
	}
	c.mu.Lock()
	base := c.cfg.Adapt
	c.mu.Unlock()
	a, err := adapt.ParseOver(base, "adapt", []byte(src))
	if err != nil {
		return nil, field("adapt", err)
	}
	return &a, nil
}

// Adapt implements the API.
func (s *service) Adapt(_ context.Context, req *api.AdaptRequest) (*api.Job, error) {
	c := s.c
	a, err := c.adaptOf(req.GetAdapt())
	if err != nil {
		return nil, apiError(err)
	}
	c.mu.Lock()
	j := c.intent.jobs[req.GetJob()]
	if j == nil {
		c.mu.Unlock()
		return nil, noJob(req.GetJob())
	}
	spec := j.spec
	spec.Adapt = a
	homes, err := c.intent.adaptable(j, spec, j.last().decision.Plan)
	if err != nil {
		c.mu.Unlock()
		return nil, apiError(err)
	}
	j.spec = spec
	j.homes = homes
	if old := c.adaptations[spec.Name]; old != nil {
		old.id = 0 // is made anew
	}
	out := c.describe(j)
	c.mu.Unlock()
	c.log.Info("job has another policy", "job", spec.Name, "adapt", req.GetAdapt())
	c.trySave()
	return out, nil
}

// Explain implements the API.
func (s *service) Explain(_ context.Context, req *api.ExplainRequest) (*api.ExplainReply, error) {
	c := s.c
	c.mu.Lock()
	defer c.mu.Unlock()
	j := c.intent.jobs[req.GetJob()]
	if j == nil {
		return nil, noJob(req.GetJob())
	}
	reply := &api.ExplainReply{Job: c.describe(j)}
	if j.spec.Adapt == nil {
		return reply, nil
	}
	reply.Adapt = j.spec.Adapt.YAML()
	a := c.adaptations[j.spec.Name]
	if a == nil || a.id != j.id || a.decision == nil {
		return reply, nil
	}
	reply.Error, reply.Gaps = a.failed, a.follow.Gaps()
	var err error
	if reply.Snapshot, err = json.Marshal(&a.follow.Snapshot); err != nil {
		return nil, fmt.Errorf("explain job %q: %w", j.spec.Name, err)
	}
	if reply.Decision, err = json.Marshal(a.decision); err != nil {
		return nil, fmt.Errorf("explain job %q: %w", j.spec.Name, err)
	}
	return reply, nil
}

// Record implements the API.
func (s *service) Record(req *api.RecordRequest, stream grpc.ServerStreamingServer[api.TraceLine]) error {
	c := s.c
	c.mu.Lock()
	j := c.intent.jobs[req.GetJob()]
	if j == nil {
		c.mu.Unlock()
		return noJob(req.GetJob())
	}
	a := c.adapts(j)
	if a == nil {
		c.mu.Unlock()
		return status.Errorf(codes.FailedPrecondition, "the plan of job %q follows nothing that is measured; give it a policy: "+
			"'xagg job adapt %[1]s --policy cost-model', with dry_run to record only", j.spec.Name)
	}
	r := &reader{lines: make(chan []byte, recordBuffer)}
	r.lines <- bytes.TrimSuffix(a.header(j), []byte("\n"))
	a.readers[r] = true
	c.mu.Unlock()
	defer func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if a := c.adaptations[req.GetJob()]; a != nil {
			delete(a.readers, r)
		}
	}()
	for {
		select {
		case line, ok := <-r.lines:
			switch {
			case !ok && r.over:
				return nil
			case !ok:
				return status.Errorf(codes.ResourceExhausted, "the reader is more than %d lines behind", recordBuffer)
			}
			if err := stream.Send(&api.TraceLine{Json: line}); err != nil {
				return err
			}
		case <-stream.Context().Done():
			return nil
		case <-s.ctx.Done():
			return nil
		}
	}
}

// forget ends what adapted a job that is no more. c.mu is held.
func (c *Controller) forget(name string) {
	if a := c.adaptations[name]; a != nil {
		for r := range a.readers {
			r.over = true
			close(r.lines)
		}
		delete(c.adaptations, name)
	}
}
