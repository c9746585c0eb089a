package sim

import (
	"bytes"
	"slices"
	"time"

	"xagg/agg"
	"xagg/recovery"
)

// Loss is a moment at which devices lose all their memory. Whatever job runs then recovers, by the steps of
// docs/protocol.md, "Recovery", with a pause before each; a loss in the middle of a recovery begins it anew.
type Loss struct {
	At      time.Duration `yaml:"at"`
	Switch  bool          `yaml:"switch,omitempty"`
	Servers []int         `yaml:"servers,omitempty"`
}

// recoverer is the controller's part of a recovery.
type recoverer struct {
	number  int // of the last one; what concerns an earlier one means nothing any more
	left    int // ranks that have not taken the step under way
	states  map[int]recovery.State
	plan    recovery.Plan
	results map[recovery.ChunkID][]byte
}

// lose empties devices, and begins a recovery.
func (w *world) lose(l *Loss) {
	w.notef("the switch (%v) and servers %v lose their memory", l.Switch, l.Servers)
	if l.Switch {
		w.sw = agg.NewSwitch(4 * int(w.s.largestPool()))
	}
	for _, server := range l.Servers {
		w.servers[server] = agg.NewServer(int(w.s.serverRounds()) * w.s.MaxChunks)
	}
	if w.ended {
		return // the next job installs its plan as if nothing had been
	}
	w.report.Recoveries++
	r := &w.recoverer
	*r = recoverer{number: r.number + 1, left: len(w.workers), states: map[int]recovery.State{}}
	w.perRank(freeze)
}

// perRank has every rank take a step at some time.
func (w *world) perRank(k kind) {
	for rank := range w.workers {
		w.events.add(event{at: w.now + w.upTo(w.s.Control), kind: k, node: rank, job: w.job, number: w.recoverer.number})
	}
}

// freeze stops a worker, which tells what it has.
func (w *world) freeze(rank int) {
	r := &w.recoverer
	r.states[rank] = w.workers[rank].endpoint.Freeze()
	w.notef("rank %d has stopped: rounds %d to %d, seq %d", rank, r.states[rank].First, r.states[rank].Next, r.states[rank].Seq)
	if r.left--; r.left == 0 {
		w.events.add(event{at: w.now + w.upTo(w.s.Control), kind: decide, job: w.job, number: r.number})
	}
}

// decide fixes how the job goes on, and installs its plan under the next epoch.
func (w *world) decide() {
	r, c := &w.recoverer, &w.controller
	plan, err := recovery.Make(r.states)
	if err != nil {
		w.failf("recovery: %v", err)
		return
	}
	r.plan, r.results = plan, map[recovery.ChunkID][]byte{}
	for rank, ids := range plan.HandOver {
		payloads, err := w.workers[rank].endpoint.Results(ids)
		if err != nil {
			w.failf("rank %d: %v", rank, err)
			return
		}
		w.report.HandedOver += len(ids)
		for i, id := range ids {
			r.results[id] = bytes.Clone(payloads[i])
		}
	}
	newest := c.epoch
	if len(c.steps) > 0 { // the change under way is taken to its end
		c.plan, newest = c.plan+1, nextEpoch(newest)
	}
	c.steps, c.waiting, c.epoch = nil, false, nextEpoch(newest)
	old := w.installed
	w.installed = map[uint16]int{}
	w.notef("controller: install epoch %d everywhere, after round %d, from seq %d on", c.epoch, plan.Round, plan.Seq)
	for _, server := range w.s.Plans[c.plan].Servers {
		w.installServer(c.plan, server)
	}
	w.installSwitch(c.plan)
	for epoch := range old {
		w.removeEpoch(epoch)
	}
	clear(w.epochs) // what is missing of a round is summed under another
	r.left = len(w.workers)
	w.perRank(resume)
}

// resume lets a worker go on.
func (w *world) resume(k *worker) {
	r := &w.recoverer
	var lacked [][]byte
	for _, id := range r.plan.Lacks[k.rank] {
		lacked = append(lacked, r.results[id])
	}
	w.notef("rank %d goes on with %d RESULTs of others", k.rank, len(lacked))
	k.base = r.plan.Base(r.states[k.rank].First)
	done := k.endpoint.Done()
	if err := k.endpoint.Resume(w.now, w.controller.epoch, r.plan.Restart, lacked); err != nil {
		w.failf("rank %d: %v", k.rank, err)
		return
	}
	if r.left--; r.left == 0 {
		w.events.add(event{at: w.now + w.upTo(w.s.Control), kind: control, job: w.job, number: r.number})
	}
	if !done && k.endpoint.Done() {
		w.finish(k)
		return
	}
	w.pump(k)
}

// removeEpoch takes a plan away from everywhere.
func (w *world) removeEpoch(epoch uint16) {
	w.sw.Remove(w.jobID(), epoch)
	for _, server := range w.servers {
		server.Remove(w.jobID(), epoch)
	}
}

// valid reports whether the servers that lose their memory are there.
func (l *Loss) valid(servers int) bool {
	return !slices.ContainsFunc(l.Servers, func(s int) bool { return s < 0 || s >= servers })
}
