package sim

import (
	"math/bits"
	"time"

	"xagg/agg"
	"xagg/wire"
)

// controller changes a job's plan by the steps of docs/protocol.md, "Changing a plan", with a pause after each.
type controller struct {
	plan  int      // in force, or to be replaced
	epoch uint16   // of it
	steps []func() // of the change under way; the next one first
	// waiting is set when the next step has to wait until all ranks use the new plan.
	waiting bool
}

// nextEpoch returns the epoch after another. Two that follow each other are of different halves.
func nextEpoch(e uint16) uint16 {
	if e == 0xffff {
		return 2 // 65535 is odd, and so would be 1
	}
	return e + 1
}

// epoch returns the epoch of the plan with the given index: the one in force, or the one after it.
func (w *world) epoch(plan int) uint16 {
	if plan > w.controller.plan {
		return nextEpoch(w.controller.epoch)
	}
	return w.controller.epoch
}

// plan returns the plan of an epoch.
func (w *world) plan(epoch uint16) *Plan {
	if i, ok := w.installed[epoch]; ok {
		return &w.s.Plans[i]
	}
	return &Plan{}
}

func (w *world) installServer(plan, server int) {
	w.installed[w.epoch(plan)] = plan
	q := w.quorum(w.epoch(plan))
	p := agg.ServerPlan{
		Job: w.jobID(), Epoch: w.epoch(plan), Ranks: w.s.all(), Chunks: uint32(w.s.MaxChunks), Rounds: w.s.serverRounds(),
		Quorum: uint32(q.Ranks), WaitUs: uint32(q.Wait.Microseconds()),
		Async: w.s.Async != nil, Staleness: w.s.staleness(),
	}
	if w.opts.mistake != nil {
		w.opts.mistake(w, server, &p)
	}
	if err := w.servers[server].Install(p); err != nil {
		w.failf("%v", err)
	}
}

// quorum returns that of the plan of an epoch, or one of no ranks.
func (w *world) quorum(epoch uint16) Quorum {
	if w.closings == nil {
		return Quorum{}
	}
	return w.closings.quorums[epoch]
}

// setQuorum fixes the quorum of a plan's epoch, while so many ranks are there.
func (w *world) setQuorum(epoch uint16, plan, there int) {
	q := w.s.quorumOf(plan, there)
	w.closings.quorums[epoch] = q
	if own := w.s.Plans[plan].Quorum; own != nil && q.Ranks < own.Ranks {
		w.report.Lowered++
	}
}

// staleness returns that of an async schedule, or 0.
func (s *Schedule) staleness() uint32 {
	if s.Async == nil {
		return 0
	}
	return uint32(s.Async.Staleness)
}

func (w *world) installSwitch(plan int) {
	w.installed[w.epoch(plan)] = plan
	p := &w.s.Plans[plan]
	members := make(map[uint8]agg.Member, w.s.Workers)
	for r := range w.s.Workers {
		members[uint8(r)] = agg.Member{Port: workerPort(r), Src: ipNumber(workerAddr(r).IP)}
	}
	ports := make([]uint16, len(p.Servers))
	for i, server := range p.Servers {
		ports[i] = serverPort(server)
	}
	epoch := w.epoch(plan)
	err := w.sw.Install(agg.SwitchPlan{
		Job: w.jobID(), Epoch: epoch, Ranks: w.s.all(), Cohort: p.Cohort, Servers: len(p.Servers),
		Base: uint32(epoch%2) * 2 * w.s.largestPool(), Pool: p.Pool,
		Quorum: w.s.Quorum != nil, WaitUs: uint32(w.quorum(epoch).Wait.Microseconds()),
	}, members, ports)
	if err != nil {
		w.failf("%v", err)
	}
}

// serverRounds is the number of rounds that a server keeps: twice the depth, in powers of two; with a quorum all there are.
func (s *Schedule) serverRounds() uint32 {
	switch {
	case s.Quorum != nil:
		return quorumRounds
	case s.Async != nil:
		return asyncRounds
	}
	return 1 << bits.Len(uint(2*max(s.Depth, 1)-1))
}

// quorum returns the schedule's quorum, or one of no ranks.
func (s *Schedule) quorum() Quorum {
	if s.Quorum == nil {
		return Quorum{}
	}
	return *s.Quorum
}

func (s *Schedule) largestPool() (pool uint32) {
	for _, p := range s.Plans {
		pool = max(pool, p.Pool)
	}
	return pool
}

// change returns the steps from plan i to the one after it.
func (w *world) change(i int) (steps []func()) {
	old, next := &w.s.Plans[i], &w.s.Plans[i+1]
	if w.closings != nil {
		w.setQuorum(w.epoch(i+1), i+1, w.able(nil))
	}
	step := func(f func()) { steps = append(steps, f) }
	for _, server := range next.Servers {
		step(func() {
			w.notef("controller: install epoch %d on server %d", w.epoch(i+1), server)
			w.installServer(i+1, server)
		})
	}
	step(func() {
		w.notef("controller: install epoch %d on the switch", w.epoch(i+1))
		w.installSwitch(i + 1)
	})
	step(func() {
		w.notef("controller: arm epoch %d", w.epoch(i+1))
		if len(old.Servers) == 0 {
			w.sw.Arm(w.jobID(), w.epoch(i), w.epoch(i+1))
			return
		}
		// Chunk 0 is with the first server.
		w.servers[old.Servers[0]].Arm(w.jobID(), w.epoch(i), w.epoch(i+1))
	})
	step(func() {
		for _, k := range w.workers { // as soon as they have heard
			k.endpoint.SetWait(w.quorum(w.epoch(i + 1)).Wait)
		}
		w.controller.waiting = !w.allUse(w.epoch(i + 1))
	})
	step(func() {
		w.notef("controller: remove epoch %d from the switch", w.epoch(i))
		w.sw.Remove(w.jobID(), w.epoch(i))
	})
	for _, server := range old.Servers {
		step(func() {
			w.notef("controller: remove epoch %d from server %d", w.epoch(i), server)
			w.servers[server].Remove(w.jobID(), w.epoch(i))
		})
	}
	step(func() {
		delete(w.installed, w.epoch(i))
		switch before, after := w.quorum(w.epoch(i)).Ranks, w.quorum(w.epoch(i+1)).Ranks; {
		case before < after:
			w.report.Raises++
		case before > after:
			w.report.Lowers++
		}
		w.controller.epoch = w.epoch(i + 1)
		w.controller.plan++
	})
	return steps
}

// allUse reports whether every rank has finished all rounds before an epoch.
func (w *world) allUse(epoch uint16) bool {
	if w.s.Damage == Unprotected {
		return false // a damaged RESULT may have announced anything
	}
	for _, k := range w.workers {
		if wire.SerialLess16(k.endpoint.Epoch(), epoch) && (w.s.Quorum == nil || !k.dead) {
			return false
		}
	}
	return true
}

// control takes the controller's next step.
func (w *world) control() {
	c := &w.controller
	if len(c.steps) == 0 {
		if c.plan+1 >= len(w.s.Plans) {
			return
		}
		if w.fresh() {
			w.events.add(event{at: w.now + 5*time.Millisecond, kind: control, job: w.job, number: w.recoverer.number})
			return
		}
		c.steps = w.change(c.plan)
	}
	c.steps[0]()
	pause := w.upTo(w.s.Control)
	if c.waiting {
		c.waiting = false // ask again
		pause += 5 * time.Millisecond
	} else {
		c.steps = c.steps[1:]
	}
	w.events.add(event{at: w.now + pause, kind: control, job: w.job, number: w.recoverer.number})
}

// removeJob takes the job away from everywhere.
func (w *world) removeJob() {
	for epoch := range w.installed {
		w.removeEpoch(epoch)
	}
}
