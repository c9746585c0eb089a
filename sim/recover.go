package sim

import (
	"bytes"
	"cmp"
	"errors"
	"math"
	"math/bits"
	"slices"
	"time"

	"xagg/agg"
	"xagg/recovery"
	"xagg/worker/transport"
)

// Loss is a moment at which devices lose all their memory. Whatever job runs then recovers, by the steps of
// docs/protocol.md, "Recovery", with a pause before each; a loss in the middle of a recovery begins it anew.
type Loss struct {
	At      time.Duration `yaml:"at"`
	Switch  bool          `yaml:"switch,omitempty"`
	Servers []int         `yaml:"servers,omitempty"`
}

// Death is a worker that dies, without a word, and is started again. It comes back through a recovery, without memory. It
// does not die while the others are not enough without it.
type Death struct {
	Rank int           `yaml:"rank"`
	At   time.Duration `yaml:"at"`
	Back time.Duration `yaml:"back"` // not before At
}

// recoverer is the controller's part of a recovery.
type recoverer struct {
	number   int // of the last one; what concerns an earlier one means nothing any more
	underWay bool
	back     uint64 // mask of the ranks that want to come back with it
	left     int    // ranks that have not taken the step under way
	states   map[int]recovery.State
	plan     recovery.Plan
	results  map[recovery.ChunkID][]byte
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
	if w.s.Async != nil {
		w.loseAsync(l)
		return
	}
	w.recover()
}

// recover begins a recovery, of those who are there. One that is under way begins anew.
func (w *world) recover() {
	w.report.Recoveries++
	r := &w.recoverer
	*r = recoverer{number: r.number + 1, underWay: true, back: w.returning, states: map[int]recovery.State{}}
	w.perRank(freeze)
}

// perRank has every rank that is there take a step at some time.
func (w *world) perRank(k kind) {
	w.recoverer.left = 0
	for _, worker := range w.workers {
		if !worker.dead {
			w.stepOf(worker.rank, k)
		}
	}
}

// stepOf has a rank take a step of the recovery at some time.
func (w *world) stepOf(rank int, k kind) {
	w.recoverer.left++
	w.events.add(event{at: w.now + w.upTo(w.s.Control), kind: k, node: rank, job: w.job, number: w.recoverer.number})
}

// able returns how many workers but one, or none, can be in all results from now on: one that came back counts from its first
// round on.
func (w *world) able(without *worker) (n int) {
	oldest := uint32(math.MaxUint32)
	for _, k := range w.workers {
		if !k.dead && k != without {
			oldest = min(oldest, k.endpoint.Progress(w.now).Round)
		}
	}
	return w.since(oldest, without)
}

// since returns how many workers but one, or none, have begun with a round, or before.
func (w *world) since(round uint32, without *worker) (n int) {
	for _, k := range w.workers {
		if !k.dead && k != without && k.round <= round {
			n++
		}
	}
	return n
}

// mayDie kills a worker if the others are enough.
func (w *world) mayDie(k *worker) {
	if !k.dead && w.able(k) >= max(1, w.s.Quorum.Ranks) {
		w.die(k)
	}
}

// die is a worker's end. A recovery that waits for it begins anew without it, and one begins where a plan wants more than are
// left.
func (w *world) die(k *worker) {
	w.notef("rank %d dies", k.rank)
	w.report.Deaths++
	k.dead = true
	w.ledger.dies(k)
	for round, u := range w.epochs { // what it alone has begun the others may run under the plan after it
		if u.ranks &^= 1 << k.rank; u.ranks == 0 {
			delete(w.epochs, round)
		} else {
			w.epochs[round] = u
		}
	}
	short := w.recoverer.underWay
	for epoch := range w.installed {
		short = short || w.quorum(epoch).Ranks > w.able(nil)
	}
	if w.maybeEnd(); !w.ended && short {
		w.recover()
	}
}

// comeBack lets a recovery begin with which a worker is let in that was started again.
func (w *world) comeBack(rank int) {
	w.notef("rank %d is there again", rank)
	w.returning |= 1 << rank
	w.recover()
}

// enter lets a worker begin that came back.
func (w *world) enter(rank int) {
	p := &w.recoverer.plan
	w.notef("rank %d comes back with all-reduce %d: round %d, seq %d", rank, p.ReturnAllReduce, p.Return, p.ReturnSeq)
	if p.ReturnAllReduce > uint64(len(w.begun)) {
		w.failf("rank %d comes back with all-reduce %d, and %d have begun", rank, p.ReturnAllReduce, len(w.begun))
		return
	}
	w.report.Returns++
	w.returning &^= 1 << rank
	w.ledger.comesBack(rank, int(p.ReturnAllReduce))
	k := w.newWorker(rank, w.workers[rank].life+1, transport.Config{
		Round: p.Return, Seq: p.ReturnSeq, AllReduces: p.ReturnAllReduce, Returns: p.Returns,
	})
	w.workers[rank] = k
	w.computes(k)
	w.stepped()
}

// fresh reports whether a worker came back and the rounds that it misses may not be over: it would not hear of a plan that
// others are told of in those.
func (w *world) fresh() bool {
	there := slices.DeleteFunc(slices.Clone(w.workers), func(k *worker) bool { return k.dead })
	slices.SortFunc(there, func(a, b *worker) int { return cmp.Compare(a.round, b.round) })
	over := there[0].round
	for _, k := range there {
		if k.round > over {
			return true
		}
		over = max(over, k.endpoint.Progress(w.now).Round)
	}
	return false
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
	if ahead, ok := errors.AsType[*recovery.AheadError](err); ok {
		w.die(w.workers[ahead.Rank])
		return
	}
	if err != nil {
		w.failf("recovery: %v", err)
		return
	}
	there := w.since(plan.Round, nil)
	switch {
	case r.back == 0:
	case plan.CanReturn(uint32(max(w.s.Depth, 1)), w.s.serverRounds()):
		plan.LetIn()
		if plan.Return == plan.Round {
			there += bits.OnesCount64(r.back)
		}
	default:
		r.back = 0
		for rank := range w.workers {
			if w.returning>>rank&1 != 0 {
				w.events.add(event{at: w.now + time.Second, kind: comeBack, node: rank})
			}
		}
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
	if w.closings != nil {
		w.setQuorum(c.epoch, c.plan, there)
	}
	w.notef("controller: install epoch %d everywhere, after round %d, from seq %d on", c.epoch, plan.Round, plan.Seq)
	for _, server := range w.s.Plans[c.plan].Servers {
		w.installServer(c.plan, server)
	}
	w.installSwitch(c.plan)
	for epoch := range old {
		w.removeEpoch(epoch)
	}
	clear(w.epochs) // what is missing of a round is summed under another
	w.perRank(resume)
	for rank := range w.workers {
		if r.back>>rank&1 != 0 {
			w.stepOf(rank, enter)
		}
	}
}

// stepped notes that a rank goes on. After the last one the controller does what it did before.
func (w *world) stepped() {
	r := &w.recoverer
	if r.left--; r.left == 0 {
		r.underWay = false
		w.events.add(event{at: w.now + w.upTo(w.s.Control), kind: control, job: w.job, number: r.number})
	}
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
	k.endpoint.SetWait(w.quorum(w.controller.epoch).Wait)
	if err := k.endpoint.Resume(w.now, w.controller.epoch, r.plan.Restart, lacked); err != nil {
		w.failf("rank %d: %v", k.rank, err)
		return
	}
	w.stepped()
	w.goOn(k)
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
