package controller

import (
	"context"
	"errors"
	"fmt"
	"math/bits"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"xagg/api"
	"xagg/policy"
)

// Steer implements the API.
func (s *service) Steer(_ context.Context, req *api.SteerRequest) (*api.Job, error) {
	rule := ruleOf(req.GetPolicy())
	if rule == nil {
		return nil, invalid("policy", "is missing; it says who sums from now on")
	}
	// Not the caller's context: a caller that goes away must not leave half a change.
	job, err := s.c.steer(s.ctx, req.GetJob(), *rule)
	if err != nil {
		return nil, apiError(err)
	}
	return job, nil
}

// steer changes the plan of a job.
func (c *Controller) steer(ctx context.Context, name string, rule policy.Static) (*api.Job, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	j, meet := c.intent.jobs[name], c.meets[name]
	if j == nil {
		return nil, noJob(name)
	}
	if err := c.replan(ctx, j, meet, rule); err != nil {
		return nil, fmt.Errorf("steer job %q: %w", name, err)
	}
	j.rule = c.intent.ruleOf(j.spec) // what the configuration says now was overruled
	c.running.Go(c.trySave)
	return c.describe(j), nil
}

// replan changes the plan of a job to the one that a rule makes. c.mu is held, though not all the time.
func (c *Controller) replan(ctx context.Context, j *job, meet *rendezvous, rule policy.Static) error {
	there := j.spec.Ranks
	switch meet.state {
	case stateWaiting:
	case stateRunning:
		there = meet.strength()
	case stateInstalling:
		return &changeError{"it is being installed; try again when it runs"}
	default:
		return &changeError{fmt.Sprintf("it is %s; it can be steered again when ranks have joined anew", meet.state)}
	}
	decision, same, err := c.intent.replan(j, rule, there)
	if err != nil {
		return err
	}
	if fresh := meet.fresh(); fresh != 0 && !same {
		return &changeError{fmt.Sprintf("rank %s has come back and does not take part yet; try again in a second", policy.FormatMask(fresh))}
	}
	switch {
	case same:
	case meet.state == stateWaiting:
		err = c.replace(ctx, j, meet, decision)
	case j.async():
		// Its sums are no rounds that a change could come between.
		err = &changeError{"it is async and runs; its plan can be changed before its ranks have joined"}
	default:
		err = c.change(ctx, j, meet, decision)
	}
	if err == nil && c.intent.byID(meet.id) != j {
		err = status.Error(codes.Aborted, "it was removed or began anew meanwhile")
	}
	if err == nil {
		j.settle(decision.Plan)
	}
	return err
}

// unlocked applies what an owner wants while c.mu is not held, which it is before and after.
func (c *Controller) unlocked(ctx context.Context, owner uint16) error {
	c.mu.Unlock()
	defer c.mu.Lock()
	return c.apply(ctx, owner)
}

// replace gives a job that has not begun another plan: nobody has seen the one it had. c.mu is held, though not all the
// time.
func (c *Controller) replace(ctx context.Context, j *job, meet *rendezvous, d policy.Decision) error {
	before := j.plan
	j.plan = j.newPlan(j.epoch, d, j.spec.Ranks)
	if err := c.intent.checkTables(j); err != nil {
		j.plan = before
		return err
	}
	err := c.unlocked(ctx, meet.id)
	if err != nil && c.intent.byID(meet.id) == j && meet.state == stateWaiting && j.decision.Plan.Equal(d.Plan) {
		j.plan = before
		if err := c.unlocked(ctx, meet.id); err != nil {
			c.log.Warn("plan that was not taken is not removed everywhere yet", "job", meet.job, "err", err)
		}
	}
	if err == nil {
		c.log.Info("job has another plan", "job", meet.job, "plan", d.Explanation)
	}
	return err
}

// change changes the plan of a running job: the new plan is installed beside the old one, or nothing changes; then the
// old one announces it, and the rest goes on by itself. c.mu is held, though not all the time.
func (c *Controller) change(ctx context.Context, j *job, meet *rendezvous, d policy.Decision) error {
	ch, err := c.intent.beginChange(j, d, meet.strength())
	if err != nil {
		return err
	}
	ch.began = time.Now()
	if err := c.unlocked(ctx, meet.id); err != nil {
		c.giveUpChange(ctx, j, ch, meet)
		return err
	}
	c.arm(ctx, j, ch, meet)
	c.running.Go(func() { c.finishChange(ctx, j, ch, meet) })
	return nil
}

// giveUpChange has a job keep its plan: nobody has been told of the new one. c.mu is held, though not all the time.
func (c *Controller) giveUpChange(ctx context.Context, j *job, ch *change, meet *rendezvous) {
	if j.change != ch {
		return
	}
	j.change = nil
	if err := c.unlocked(ctx, meet.id); err != nil {
		c.log.Warn("plan that was not taken is not removed everywhere yet", "job", meet.job, "err", err)
	}
}

// arm has the old plan announce the new one, which is installed. c.mu is held, though not all the time.
func (c *Controller) arm(ctx context.Context, j *job, ch *change, meet *rendezvous) {
	if j.change != ch {
		return // the job began anew, with the new plan
	}
	ch.stage = stageArmed
	c.log.Info("job changes its plan", "job", meet.job, "from", ch.from.epoch, "to", ch.to.epoch, "plan", ch.to.decision.Explanation)
	if err := c.unlocked(ctx, meet.id); err != nil {
		c.log.Warn("new plan is not announced yet", "job", meet.job, "err", err)
	}
}

// resumeChange carries on with a change that an earlier controller has begun.
func (c *Controller) resumeChange(ctx context.Context, j *job, ch *change, meet *rendezvous) {
	for {
		changed := c.links.changed()
		if c.resumeBeside(ctx, j, ch, meet) {
			break
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return
		}
	}
	c.finishChange(ctx, j, ch, meet)
}

// resumeBeside installs the new plan of a change beside the old one, unless it is installed, and has it announced. It reports
// whether that is done, or is given up.
func (c *Controller) resumeBeside(ctx context.Context, j *job, ch *change, meet *rendezvous) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if j.change != ch || ch.stage != stageBeside {
		return true
	}
	err := c.unlocked(ctx, meet.id)
	switch {
	case err == nil:
		c.arm(ctx, j, ch, meet)
	case errors.Is(err, errNotReady):
		return false
	default:
		c.log.Warn("new plan cannot be installed; the job keeps the one that it has", "job", meet.job, "err", err)
		c.giveUpChange(ctx, j, ch, meet)
	}
	return true
}

// resume carries on with what an earlier controller has begun, and waits for the ranks of its jobs to come back.
func (c *Controller) resume(ctx context.Context) {
	c.mu.Lock()
	defer c.mu.Unlock()
	away := false
	for _, j := range c.intent.sorted() {
		meet := c.meets[j.spec.Name]
		away = away || meet.stillAway() != 0
		c.lower(ctx, j, meet)
		if ch := j.change; ch != nil {
			c.running.Go(func() { c.resumeChange(ctx, j, ch, meet) })
		}
	}
	if away {
		c.running.Go(func() { c.missRanks(ctx) })
	}
}

// missRanks takes ranks for gone that have not come back in time to a controller that was restarted.
func (c *Controller) missRanks(ctx context.Context) {
	select {
	case <-time.After(c.grace):
	case <-ctx.Done():
		return
	}
	c.mu.Lock()
	for _, j := range c.intent.sorted() {
		meet := c.meets[j.spec.Name]
		for away := meet.stillAway(); away != 0; away &= meet.stillAway() {
			rank := bits.TrailingZeros64(away)
			c.log.Warn("rank has not come back", "job", meet.job, "rank", rank)
			c.lose(ctx, meet, rank, func() {
				meet.goes(rank, fmt.Sprintf("has not come back within %v after the controller was restarted", c.grace))
			})
		}
	}
	c.mu.Unlock()
	c.trySave()
	c.links.announce()
}

// finishChange carries a change to its end: it has the new plan announced until every rank has finished the last round
// of the old one, and removes that.
func (c *Controller) finishChange(ctx context.Context, j *job, ch *change, meet *rendezvous) {
	over := meet.over
	for {
		changed := c.links.changed()
		if c.advance(ctx, j, ch, meet) {
			return
		}
		select {
		case <-changed:
		case <-over:
			over = nil
		case <-ctx.Done():
			return
		}
	}
}

// advance does of a change what can be done now, and reports whether it is over.
func (c *Controller) advance(ctx context.Context, j *job, ch *change, meet *rendezvous) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.intent.byID(meet.id) != j || j.change != ch {
		return true
	}
	if ch.stage == stageArmed && meet.behind(ch.to.epoch) == 0 {
		j.retire()
		meet.retired(j.epoch)
	}
	err := c.unlocked(ctx, meet.id)
	if err != nil {
		c.mu.Unlock()
		if c.installed(meet.id) {
			err = nil
		}
		c.mu.Lock()
	}
	switch {
	case j.change != ch:
		return true
	case ch.stage != stageRetiring || err != nil:
		return false
	}
	// A server that cannot be reached keeps the old plan until it is back, which harms nobody: the slots are its own.
	j.change = nil
	if !ch.began.IsZero() { // not one that another controller began
		c.changes.Observe(time.Since(ch.began).Seconds())
	}
	c.log.Info("job has changed its plan", "job", meet.job, "epoch", j.epoch)
	c.running.Go(c.trySave)
	c.links.announce()
	return true
}

// Report implements the API.
func (s *service) Report(_ context.Context, req *api.ReportRequest) (*api.ReportReply, error) {
	return s.c.report(s.ctx, req)
}

func (c *Controller) report(ctx context.Context, req *api.ReportRequest) (*api.ReportReply, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	j, meet := c.intent.jobs[req.GetJob()], c.meets[req.GetJob()]
	switch {
	case j == nil:
		return nil, noJob(req.GetJob())
	case req.GetId() != uint32(j.id):
		return nil, status.Errorf(codes.FailedPrecondition, "job %q has id %d by now, not %d", j.spec.Name, j.id, req.GetId())
	case int(req.GetRank()) >= len(meet.seats) || meet.seats[req.GetRank()] == nil:
		return nil, invalid("rank", "%d has not joined job %q", req.GetRank(), j.spec.Name)
	case req.GetEpoch() != 0 && req.GetEpoch() != uint32(j.epoch) && req.GetEpoch() != uint32(j.last().epoch):
		return nil, invalid("epoch", "%d is none of job %q, which is at %d", req.GetEpoch(), j.spec.Name, j.last().epoch)
	}
	if p := req.GetProgress(); p != nil {
		meet.seats[req.GetRank()].heard = hearing{p, time.Now()}
		meet.begins(int(req.GetRank()), p.GetRound())
		c.raise(ctx, j, meet)
	}
	reply := &api.ReportReply{}
	if j.spec.Adapt != nil {
		reply.EveryMs = uint32(ReportEvery.Milliseconds())
	}
	if j.quorum > 0 {
		reply.WaitUs = new(microsOf(j.last().decision.Wait))
	}
	if req.GetEpoch() == 0 {
		c.measured(ctx, j, meet, int(req.GetRank()), req.GetRounds())
		return reply, nil
	}
	meet.reached(int(req.GetRank()), uint16(req.GetEpoch()))
	if j.change != nil {
		c.running.Go(c.trySave) // a controller that is restarted need not be told again
	}
	c.log.Debug("rank reported", "job", j.spec.Name, "rank", req.GetRank(), "epoch", req.GetEpoch())
	c.measured(ctx, j, meet, int(req.GetRank()), req.GetRounds())
	c.links.announce()
	return reply, nil
}

// describeChange returns a change as the API shows it; c is locked.
func describeChange(ch *change, meet *rendezvous) *api.Change {
	if ch == nil {
		return nil
	}
	out := &api.Change{
		Epoch:       uint32(ch.to.epoch),
		Cohort:      ch.to.decision.Cohort,
		Servers:     ch.to.decision.Servers,
		Explanation: ch.to.explanation(),
		Behind:      meet.behind(ch.to.epoch),
		Quorum:      uint32(ch.to.quorum),
		WaitUs:      microsOf(ch.to.decision.Wait),
	}
	switch ch.stage {
	case stageBeside:
		out.WaitsFor = "the new plan to be installed"
	case stageArmed:
		noun := "ranks"
		if bits.OnesCount64(out.Behind) == 1 {
			noun = "rank"
		}
		out.WaitsFor = fmt.Sprintf("%s %s to finish the last round of epoch %d", noun, policy.FormatMask(out.Behind), ch.from.epoch)
	case stageRetiring:
		out.WaitsFor = fmt.Sprintf("the plan of epoch %d to be removed", ch.from.epoch)
	}
	return out
}
