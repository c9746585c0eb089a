package timing

import (
	"math/bits"
	"time"

	"xagg/controller"
	"xagg/policy"
	"xagg/policy/adapt"
	"xagg/policy/telemetry"
	"xagg/wire"
)

// epochDelay is how long after it has finished the last round of a plan a worker says so (worker.reportDelay).
const epochDelay = 5 * time.Millisecond

// auto has a job's plan follow what its ranks report, as the controller does (controller/adapt.go).
type auto struct {
	world   *world
	job     *job
	follow  *adapt.Follower
	reports [][]telemetry.Round // by rank: what it has not reported yet
	known   []uint16            // by rank: under which epoch the controller knows it to be
	change  *change             // of plan, that is under way
	moves   []Move
	steered bool // servers have had ranks to sum
}

// change is a change of plan.
type change struct {
	to    policy.Plan
	epoch uint16
	steps []func() error // left
	armed bool           // and so waits until all ranks use the new plan
}

// adapt makes a job's plan follow what is measured.
func (w *world) adapt(j *job, cfg *adapt.Config) error {
	follow, err := cfg.Follow(len(j.ranks), j.epoch)
	if err != nil {
		return err
	}
	n := len(j.ranks)
	j.auto = &auto{
		world: w, job: j, follow: follow, reports: make([][]telemetry.Round, n), known: make([]uint16, n),
	}
	return nil
}

// start lets ranks report, each at its own moments.
func (a *auto) start() {
	for r, k := range a.job.ranks {
		a.known[r] = a.job.epoch
		k.report = func(c bucketCall) { a.ended(r, c) }
		a.world.agenda.at(time.Duration(a.world.rng.Int64N(int64(controller.ReportEvery))), func() { a.tick(r) })
	}
}

// ended notes an all-reduce of a rank for its next report, and whether it goes on under another plan.
func (a *auto) ended(rank int, c bucketCall) {
	i, held := c.Info(), c.Held()
	round := telemetry.Round{
		Number: i.Round, Compute: c.compute, Comm: i.Duration, Chunks: i.Chunks, Late: i.Late, Packets: i.Packets, Resends: i.Resends,
		Behind: a.job.ranks[rank].endpoint.Behind(c.Call), Held: held.Incomplete, Blocked: held.Blocked,
	}
	for other, l := range c.Lasts() {
		if l.Chunks > 0 {
			round.Last = append(round.Last, telemetry.Last{Rank: other, Chunks: l.Chunks, Blocked: l.Blocked})
		}
	}
	a.reports[rank] = append(a.reports[rank], round)
	if epoch := a.job.ranks[rank].endpoint.Epoch(); epoch != a.known[rank] {
		a.world.agenda.at(a.world.agenda.now+epochDelay, func() {
			a.known[rank] = epoch
			if p := a.job.installed[epoch]; p != nil {
				a.job.ranks[rank].endpoint.SetWait(p.Wait)
			}
			a.proceed()
		})
	}
}

// tick is a rank's report.
func (a *auto) tick(rank int) {
	w := a.world
	if a.job.left == 0 {
		return
	}
	if rounds := a.reports[rank]; len(rounds) > 0 {
		a.reports[rank] = nil
		if err := a.follow.Report(w.agenda.now, a.job.epoch, a.job.all(), telemetry.Report{Rank: rank, Rounds: rounds}); err != nil {
			w.failf("job %s: %v", a.job.spec.Name, err)
			return
		}
		a.judge()
	}
	w.agenda.at(w.agenda.now+controller.ReportEvery, func() { a.tick(rank) })
}

// judge decides once a round, unless the plan is changing.
func (a *auto) judge() {
	if a.change != nil {
		return
	}
	w, j, s := a.world, a.job, &a.follow.Snapshot
	s.Job = telemetry.Job{
		Name: j.spec.Name, Size: float64(len(j.ranks)), Mode: string(j.consistency.Mode), Pool: float64(j.plan.Pool),
		Cohort: float64(bits.OnesCount64(j.plan.Cohort)), Steered: float64(bits.OnesCount64(j.plan.Steered)),
		Quorum: float64(j.plan.Quorum), Least: float64(j.consistency.Quorum), Wait: j.plan.Wait.Seconds(),
	}
	s.Switch = telemetry.Switch{Slots: float64(w.opts.Slots), SlotsFree: w.slotsFree()}
	s.Servers = s.Servers[:0]
	for _, name := range w.names() {
		s.Servers = append(s.Servers, telemetry.Server{Name: name, Ready: true})
	}
	a.follow.Measure(w.agenda.now, float64(j.chunks)*wire.MaxLanes*4)
	w.devices.read.Fill(s, w.agenda.now, j.id)
	d, next, ok := a.follow.Decide(j.plan)
	if !ok {
		return
	}
	if w.opts.Watch != nil {
		w.opts.Watch(j.number, s, &d)
	}
	for _, m := range d.Moves {
		a.moves = append(a.moves, Move{w.agenda.now, j.ranks[m.Rank].round, m})
	}
	if !next.Equal(j.plan) {
		a.steer(next)
	}
}

// slotsFree returns the share of the switch's slots that no job has leased.
func (w *world) slotsFree() float64 {
	leased := 0
	for _, j := range w.jobs {
		leased += policy.SlotsPerPool * j.plan.Pool
	}
	return 1 - float64(leased)/float64(w.opts.Slots)
}

// steer begins the change to a plan with who sums, quorum and wait of this one: the steps of docs/protocol.md, "Changing a plan".
func (a *auto) steer(next policy.Plan) {
	w, j := a.world, a.job
	next.Servers = nil // all that there are
	a.steered = a.steered || next.Steered != 0
	d, err := next.Rule().Decide(w.input(j))
	if err != nil {
		w.failf("job %s: %v", j.spec.Name, err)
		return
	}
	c := &change{to: d.Plan, epoch: nextEpoch(j.epoch)}
	a.change = c
	to, old := w.resolve(c.to), j.installed[j.epoch]
	for _, number := range to.servers {
		c.steps = append(c.steps, func() error { return w.installServer(j, c.epoch, c.to, number) })
	}
	c.steps = append(c.steps,
		func() error { return w.installSwitch(j, c.epoch, to) },
		func() error {
			c.armed = true
			if len(old.servers) == 0 {
				w.sw.Arm(j.id, j.epoch, c.epoch)
			} else { // chunk 0 is with the first server
				w.servers[old.servers[0]].aggregator.Arm(j.id, j.epoch, c.epoch)
			}
			return nil
		})
	a.step()
}

// nextEpoch returns the epoch after another: two that follow each other are of different halves of the lease.
func nextEpoch(e uint16) uint16 {
	if e == 0xffff {
		return 2
	}
	return e + 1
}

// step carries out the next step of the change, and those after it.
func (a *auto) step() {
	w, c := a.world, a.change
	w.agenda.at(w.agenda.now+w.costs.Step, func() {
		if err := c.steps[0](); err != nil {
			w.failf("job %s: %v", a.job.spec.Name, err)
			return
		}
		if c.steps = c.steps[1:]; len(c.steps) > 0 {
			a.step()
			return
		}
		a.proceed()
	})
}

// proceed ends the change once all ranks use the new plan: the old one is removed.
func (a *auto) proceed() {
	w, j, c := a.world, a.job, a.change
	if c == nil || !c.armed || len(c.steps) > 0 {
		return
	}
	for _, epoch := range a.known {
		if wire.SerialLess16(epoch, c.epoch) {
			return
		}
	}
	old := j.epoch
	w.sw.Remove(j.id, old)
	for _, number := range j.installed[old].servers {
		w.servers[number].aggregator.Remove(j.id, old)
	}
	delete(j.installed, old)
	j.plan, j.epoch = c.to, c.epoch
	a.change = nil
}
