package controller

import (
	"context"
	"errors"
	"fmt"
	"math/bits"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"xagg/api"
	"xagg/policy"
	"xagg/recovery"
	"xagg/wire"
)

const (
	// freezeTimeout is how long a recovery waits for workers: they stop at once, and their hosts answer or are gone.
	freezeTimeout = 20 * time.Second
	// installPause is how long a recovery waits before it tries again to install a plan, unless a device comes back before.
	installPause = time.Second
)

// recoverAll recovers every running job that needs a device which has lost its memory. What the job's packets may still
// meet there is nothing, so until its ranks have stopped nothing is installed there either.
func (c *Controller) recoverAll(ctx context.Context, reason string, needs func(*job) bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, j := range c.intent.sorted() {
		if needs(j) {
			c.recover(ctx, j, reason)
		}
	}
}

// lower recovers a job that runs, if a plan of it wants more ranks for a result than are there: no round under it would end, and
// none would tell of another plan. The recovery's plan wants no more than there are. c.mu is held.
func (c *Controller) lower(ctx context.Context, j *job, meet *rendezvous) {
	for _, p := range j.plans() {
		if j.newPlan(p.epoch, p.decision, meet.strength()).quorum < p.quorum && !meet.recovery.underWay() {
			c.recover(ctx, j, fmt.Sprintf("rank %s is gone, and the plan wants %d ranks for a result", policy.FormatMask(meet.absent()), p.quorum))
			return
		}
	}
}

// raise changes the plan of a job that runs to the quorum that was decided, once as many ranks are there again. c.mu is held.
func (c *Controller) raise(ctx context.Context, j *job, meet *rendezvous) {
	due := func() bool {
		return meet.state == stateRunning && j.change == nil && j.recovering == recoverNot && meet.fresh() == 0 &&
			j.newPlan(j.epoch, j.decision, meet.strength()).quorum > j.quorum
	}
	if meet.raising || !due() {
		return
	}
	meet.raising = true
	c.running.Go(func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		meet.raising = false
		if c.intent.byID(meet.id) != j || !due() {
			return
		}
		if err := c.replan(ctx, j, meet, j.decision.Rule()); err != nil {
			c.log.Warn("more ranks are there, and the plan is not changed yet", "job", meet.job, "err", err)
		}
	})
}

// onServer reports whether a job's plan, or the one that it changes to or from, has a server.
func (j *job) onServer(name string) bool {
	return slices.ContainsFunc(j.plans(), func(p plan) bool { return slices.Contains(p.decision.Servers, name) })
}

// recover begins a recovery of a job, if it runs. One that is under way begins anew: what its ranks have told may not
// be all that is lost. c.mu is held.
func (c *Controller) recover(ctx context.Context, j *job, reason string) {
	meet := c.meets[j.spec.Name]
	if meet.state != stateRunning {
		return
	}
	before := meet.recovery
	anew := before.underWay()
	before.giveUp()
	meet.recovers()
	c.recoveries++
	rec := newRecovering(c.recoveries, reason, meet.there(), meet.returning(), time.Now())
	if anew {
		rec.stopped = before.stopped
	}
	meet.recovery = rec
	j.recovering = recoverHeld
	close(meet.freeze)
	meet.freeze = make(chan struct{})
	c.log.Warn("job recovers", "job", meet.job, "recovery", rec.number, "reason", reason)
	c.running.Go(func() { c.carryOut(ctx, j, meet, rec) })
}

// carryOut takes a recovery to its end, unless it is given up.
func (c *Controller) carryOut(ctx context.Context, j *job, meet *rendezvous, rec *recovering) {
	log := c.log.With("job", meet.job, "recovery", rec.number)
	last := rec.began
	took := func(step string, args ...any) {
		now := time.Now()
		log.Info(step, append(args, "took", now.Sub(last).Round(time.Microsecond))...)
		last = now
	}
	if !c.awaitRanks(ctx, meet, rec, rec.asked, (*recovering).silent) {
		return
	}
	took("ranks have stopped")
	if !c.decide(ctx, j, meet, rec) {
		return
	}
	handed, lacked := 0, 0
	for _, ids := range rec.plan.HandOver {
		handed += len(ids)
	}
	for _, ids := range rec.plan.Lacks {
		lacked += len(ids)
	}
	took("job goes on from where it was", "epoch", rec.epoch, "round", rec.plan.Round, "seq", rec.plan.Seq,
		"results", handed, "lacked", lacked)
	if !c.installRecovery(ctx, j, meet, rec) {
		return
	}
	took("plan is installed", "epoch", rec.epoch)
	if !c.awaitRanks(ctx, meet, rec, rec.given, (*recovering).waited) {
		return
	}
	took("results are handed over")

	c.mu.Lock()
	defer c.mu.Unlock()
	if !rec.underWay() {
		return
	}
	j.recovering = recoverNot
	for rank, s := range meet.seats {
		switch bit := uint64(1) << rank; {
		case rec.ranks&bit != 0:
			s.epoch, s.missed = rec.epoch, false // nothing of an older one is left to do
			s.fresh = wire.SerialLess(rec.plan.Round, s.round)
		case rec.back&bit != 0 && rec.letsIn:
			s.epoch, s.fresh = rec.epoch, wire.SerialLess(rec.plan.Round, rec.plan.Return)
			s.round, s.seq, s.allReduces, s.returns = rec.plan.Return, rec.plan.ReturnSeq, rec.plan.ReturnAllReduce, rec.plan.Returns
			close(s.back)
		}
	}
	rec.resume()
	c.recoveryTimes.Observe(time.Since(rec.stopped).Seconds())
	c.running.Go(c.trySave) // where ranks that came back begin
	log.Info("job has recovered", "took", time.Since(rec.stopped).Round(time.Microsecond))
	c.links.announce()
	if rec.back != 0 && !rec.letsIn {
		c.running.Go(func() { c.letIn(ctx, j, meet, rec) })
	}
}

// letIn tries again to let ranks in that came back when they could not be.
func (c *Controller) letIn(ctx context.Context, j *job, meet *rendezvous, rec *recovering) {
	select {
	case <-time.After(installPause):
	case <-meet.over:
		return
	case <-ctx.Done():
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.intent.byID(meet.id) == j && meet.recovery == rec && meet.returning() != 0 {
		c.recover(ctx, j, rec.reason)
	}
}

// awaitRanks waits for a step that ranks take. Those that do not take it in time, as late says, are gone; those that have
// not come back to a controller that was restarted have more time than that.
func (c *Controller) awaitRanks(ctx context.Context, meet *rendezvous, rec *recovering, done <-chan struct{}, late func(*recovering) uint64) bool {
	tick := time.NewTicker(freezeTimeout)
	defer tick.Stop()
	for {
		select {
		case <-done:
			return true
		case <-rec.void:
			return false
		case <-ctx.Done():
			return false
		case <-tick.C:
			if c.expelLate(ctx, meet, rec, late) {
				return false
			}
		}
	}
}

// expelLate takes ranks out of a recovery that it waits for in vain, and reports whether there were any.
func (c *Controller) expelLate(ctx context.Context, meet *rendezvous, rec *recovering, late func(*recovering) uint64) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	ranks := late(rec) &^ meet.stillAway()
	if !rec.underWay() || ranks == 0 {
		return false
	}
	c.expel(ctx, meet, ranks, fmt.Sprintf("did not answer within %v; the job recovers from this: %s", freezeTimeout, rec.reason))
	return true
}

// expel takes ranks out of a job that is recovering; the recovery begins anew with the others, where they are enough.
// c.mu is held.
func (c *Controller) expel(ctx context.Context, meet *rendezvous, ranks uint64, how string) {
	for ; ranks != 0 && !meet.ended(); ranks &= ranks - 1 {
		rank := bits.TrailingZeros64(ranks)
		c.log.Warn("rank is left out of the recovery", "job", meet.job, "rank", rank, "err", how)
		meet.seats[rank].lost = errors.New(how)
		meet.goes(rank, how)
	}
	if j := c.intent.byID(meet.id); j != nil && !meet.ended() {
		c.recover(ctx, j, meet.recovery.reason)
	}
	c.links.announce()
}

// decide makes of what the ranks have told how the job goes on, and its next plan.
func (c *Controller) decide(ctx context.Context, j *job, meet *rendezvous, rec *recovering) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !rec.underWay() {
		return false
	}
	if len(rec.states) == 0 { // a quorum job has one rank at least: this one is over
		return false
	}
	plan, err := recovery.Make(rec.states)
	var (
		behind *recovery.BehindError
		ahead  *recovery.AheadError
		bad    *recovery.StateError
	)
	blame := func(rank int) bool {
		c.expel(ctx, meet, 1<<rank, fmt.Sprintf("cannot take part any more: %v", err))
		return false
	}
	switch {
	case errors.As(err, &behind):
		return blame(behind.Rank)
	case errors.As(err, &ahead):
		return blame(ahead.Rank)
	case errors.As(err, &bad):
		return blame(bad.Rank)
	case err != nil:
		meet.abort(fmt.Errorf("the job cannot go on after %s: %w", rec.reason, err), nil)
		return false
	}
	if absent := j.ranks() &^ rec.ranks; absent != 0 && meet.enough == len(meet.seats) && !plan.Complete() {
		// It had left, and so has what the others lack, but not any more.
		meet.abort(fmt.Errorf("the job cannot go on after %s: round %d has to be summed again, and rank %s has left and is gone",
			rec.reason, plan.Round, spellMask(absent)), nil)
		return false
	}
	if j.change != nil { // it is taken to its end
		j.plan = j.change.to
		j.change = nil
	}
	there := meet.since(plan.Round, rec.ranks) // can be in every result from now on
	if rec.back != 0 {
		j.members = meet.members()
		if plan.CanReturn(uint32(j.spec.Depth), j.rounds()) {
			plan.LetIn()
			rec.letsIn = true
			if plan.Return == plan.Round {
				there += bits.OnesCount64(rec.back)
			}
		}
	}
	j.plan = j.newPlan(nextEpoch(j.epoch), j.decision, there)
	j.recovering = recoverInstalling
	rec.decide(plan, j.epoch)
	return true
}

// installRecovery installs a recovering job's plan, and removes all older ones: no packet of theirs that is still under
// way must find a slot of the new one. While a device is not ready it waits, as long as the ranks do.
func (c *Controller) installRecovery(ctx context.Context, j *job, meet *rendezvous, rec *recovering) bool {
	for {
		changed := c.links.changed()
		err := c.apply(ctx, meet.id)
		if err == nil || c.installed(meet.id) {
			return !closed(rec.void)
		}
		if code := status.Code(err); code == codes.ResourceExhausted || code == codes.InvalidArgument {
			c.mu.Lock()
			if rec.underWay() {
				meet.abort(fmt.Errorf("the job's plan cannot be installed again: %w", err), nil)
			}
			c.mu.Unlock()
			return false
		}
		c.mu.Lock()
		news := fmt.Sprint(err) != fmt.Sprint(rec.blocked)
		rec.blocked = err
		c.mu.Unlock()
		if news {
			c.log.Warn("recovery waits", "job", meet.job, "recovery", rec.number, "err", err)
		}
		pause := time.NewTimer(installPause)
		select {
		case <-changed:
		case <-pause.C:
		case <-rec.void:
		case <-ctx.Done():
		}
		pause.Stop()
		if closed(rec.void) || ctx.Err() != nil {
			return false
		}
	}
}

// installed reports whether an owner has all that it wants, and the switch nothing else of it. What a server cannot be
// rid of at the moment harms nobody. Neither c.mu nor c.applying is held.
func (c *Controller) installed(owner uint16) bool {
	want := c.wanted(owner)
	c.applying.Lock()
	defer c.applying.Unlock()
	have := c.have[owner]
	if len(have.entities) != len(want.entities) {
		return false
	}
	for key := range want.entities {
		if h, ok := have.entities[key]; !ok || h.doubt {
			return false
		}
	}
	for key, w := range want.plans {
		if have.plans[key] != w {
			return false
		}
	}
	return true
}

// Frozen implements the API.
func (s *service) Frozen(ctx context.Context, req *api.FrozenRequest) (*api.FrozenReply, error) {
	meet, rec, err := s.c.takesPart(s.ctx, req.GetJob(), req.GetRank(), req.GetId(), req.GetRecovery())
	if err != nil {
		return nil, err
	}
	rank := int(req.GetRank())
	state := recovery.State{
		First: req.GetFirst(), Next: req.GetNext(), Boundary: req.GetBoundary(), Seq: req.GetSeq(),
		AllReduces: req.GetAllReduces(), Returns: req.GetReturns(),
	}
	for _, h := range req.GetRounds() {
		state.Rounds = append(state.Rounds, recovery.Held{Round: h.GetRound(), Chunks: h.GetChunks(), Bits: h.GetHeld()})
	}
	s.c.mu.Lock()
	state.Began = meet.seats[rank].round
	rec.tell(rank, state)
	s.c.mu.Unlock()
	if err := s.step(ctx, meet, rec, rec.planned); err != nil {
		return nil, err
	}
	reply := &api.FrozenReply{}
	for _, id := range rec.plan.HandOver[rank] {
		reply.HandOver = append(reply.HandOver, &api.ChunkID{Round: id.Round, Chunk: id.Chunk})
	}
	return reply, nil
}

// HandOver implements the API.
func (s *service) HandOver(ctx context.Context, req *api.HandOverRequest) (*api.ResumeReply, error) {
	meet, rec, err := s.c.takesPart(s.ctx, req.GetJob(), req.GetRank(), req.GetId(), req.GetRecovery())
	if err != nil {
		return nil, err
	}
	if !closed(rec.planned) {
		return nil, status.Errorf(codes.FailedPrecondition, "recovery %d has not asked for anything yet", rec.number)
	}
	rank := int(req.GetRank())
	s.c.mu.Lock()
	if err := rec.give(rank, req.GetResults(), meet.id); err != nil {
		s.c.expel(s.ctx, meet, 1<<rank, err.Error())
		s.c.mu.Unlock()
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	s.c.mu.Unlock()
	if err := s.step(ctx, meet, rec, rec.resumed); err != nil {
		return nil, err
	}
	reply := &api.ResumeReply{
		Epoch: uint32(rec.epoch), Round: rec.plan.Round, Seq: rec.plan.Seq, Results: rec.lacked(rank), Returns: rec.plan.Returns,
	}
	for _, h := range rec.plan.Finals {
		reply.Finals = append(reply.Finals, &api.Held{Round: h.Round, Chunks: h.Chunks, Held: h.Bits})
	}
	return reply, nil
}

// began reports whether a recovery is one of this controller's. It does not leave a rank stopped: one that was given up was
// followed by another, or its job is over. c.mu is held.
func (c *Controller) began(number uint64) bool { return c.earlier < number && number <= c.recoveries }

// takesPart finds the recovery that a rank takes part in.
func (c *Controller) takesPart(ctx context.Context, job string, rank, id uint32, number uint64) (*rendezvous, *recovering, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	meet := c.meets[job]
	switch {
	case meet == nil:
		return nil, nil, noJob(job)
	case uint32(meet.id) != id:
		return nil, nil, status.Errorf(codes.Aborted, "job %q has begun anew without this rank", job)
	case int(rank) >= len(meet.seats) || meet.seats[rank] == nil:
		return nil, nil, invalid("rank", "%d has not joined job %q", rank, job)
	}
	rec := meet.recovery
	if rec == nil || rec.number != number || rec.ranks>>rank&1 == 0 || closed(rec.void) {
		if j := c.intent.byID(meet.id); j != nil && !rec.underWay() && !c.began(number) {
			// An earlier controller has stopped the rank, and did not get further.
			c.recover(ctx, j, "a controller that ended in the middle of a recovery")
		}
		return nil, nil, status.Errorf(codes.Aborted, "recovery %d of job %q is no more", number, job)
	}
	return meet, rec, nil
}

// step waits until a recovery is so far.
func (s *service) step(ctx context.Context, meet *rendezvous, rec *recovering, done <-chan struct{}) error {
	select {
	case <-done:
		return nil
	case <-rec.void:
		return status.Errorf(codes.Aborted, "recovery %d of job %q is no more", rec.number, meet.job)
	case <-ctx.Done():
		return status.FromContextError(ctx.Err()).Err()
	case <-s.ctx.Done():
		return status.Error(codes.Unavailable, "the controller is stopping")
	}
}
