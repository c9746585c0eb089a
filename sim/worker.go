package sim

import (
	"math"
	"slices"
	"time"

	"xagg/wire"
	"xagg/worker/transport"
)

// worker is a rank's process.
type worker struct {
	rank     int
	life     int       // number of the process, from 0
	addr     wire.Addr // of it
	endpoint *transport.Endpoint

	calls     []*call // under way, in their order
	work      int     // index of the oldest all-reduce that is not done
	next      int     // of the one to begin next
	seen      int     // of the one whose rounds the observer is told of
	computing bool    // what it begins next is planned

	wake   time.Duration // planned; zero = never
	opened map[uint32]bool
	asked  map[question]uint32 // async: the seq of each
	base   uint32              // the first seq since the last recovery: everything before it was answered
	dead   bool
	round  uint32 // that it began with, and
	first  int    // the index of the all-reduce
}

// call is an all-reduce of a worker.
type call struct {
	*transport.Call
	ints   []int32
	floats []float32
	told   []int32 // what the observer saw
	began  time.Duration
}

// question is what in an async job an answer has in common with its question, which has another seq.
type question struct {
	async        bool
	round, chunk uint32
}

// seq returns the seq of the question that an answer is for.
func (k *worker) seq(h *wire.Header) uint32 {
	if k.asked == nil {
		return h.Seq
	}
	return k.asked[questionOf(h)]
}

func questionOf(h *wire.Header) question {
	return question{h.Flags&wire.FlagAsync != 0, h.Round, h.Chunk}
}

// newWorker returns a rank's process. The configuration says where one begins that came back.
func (w *world) newWorker(rank, life int, cfg transport.Config) *worker {
	first := int(cfg.AllReduces)
	k := &worker{
		rank: rank, life: life, addr: workerAddr(rank), work: first, next: first, seen: first, first: first,
		round: cfg.Round, base: cfg.Seq, opened: map[uint32]bool{},
	}
	k.addr.Port += uint16(life)
	cfg.Job, cfg.Epoch, cfg.Rank, cfg.Ranks = w.jobID(), w.controller.epoch, rank, w.s.Workers
	cfg.Pool, cfg.MaxChunks, cfg.Depth = w.s.Pool, w.s.MaxChunks, w.s.Depth
	cfg.Quorum, cfg.Wait, cfg.Rounds = w.s.quorum().Ranks, w.quorum(cfg.Epoch).Wait, int(w.s.serverRounds())
	if w.s.Async != nil {
		cfg.Async, cfg.Staleness = true, w.s.Async.Staleness
		k.asked = map[question]uint32{}
	}
	cfg.Observe = func(round transport.Round) { w.observe(k, &round) }
	k.endpoint = transport.New(cfg)
	return k
}

// computes has a worker begin its next all-reduce when it has computed, unless it has as many under way as it may.
func (w *world) computes(k *worker) {
	if k.computing || k.next == len(w.works) || len(k.calls) >= max(1, w.s.Ahead) {
		return
	}
	k.computing = true
	d := w.upTo(w.s.Compute[k.rank])
	if len(w.s.Late) > 0 {
		d += w.s.Late[k.rank]
	}
	w.events.add(event{at: w.now + d, kind: begin, node: k.rank, job: w.job, number: k.life})
}

// newCall returns a call, whose memory may have been another's.
func (w *world) newCall() *call {
	n := len(w.spare)
	if n == 0 {
		return &call{}
	}
	c := w.spare[n-1]
	w.spare = w.spare[:n-1]
	return c
}

// begin lets a worker begin its next all-reduce.
func (w *world) begin(k *worker) {
	k.computing = false
	work := k.next
	v := &w.works[work]
	w.notef("rank %d begins all-reduce %d", k.rank, work)
	if work == len(w.begun) {
		w.begun = append(w.begun, w.now)
	}
	k.next++
	c := w.newCall()
	c.began = w.now
	if k.calls = append(k.calls, c); len(k.calls) > 1 {
		w.report.Together++
	}
	if w.ledger != nil {
		w.ledger.begins(k.rank, work)
	}
	if w.ledger != nil || w.running != nil {
		c.told = slices.Grow(c.told[:0], v.Lanes)[:v.Lanes]
	}
	var err error
	if v.Float {
		c.ints, c.floats = c.ints[:0], slices.Grow(c.floats[:0], v.Lanes)[:v.Lanes]
		for i := range c.floats {
			c.floats[i] = w.float(work, k.rank, i)
		}
		c.Call, err = k.endpoint.Begin(w.now, v.key(), c.floats)
	} else {
		c.ints = slices.Grow(c.ints[:0], v.Lanes)[:v.Lanes]
		for i := range c.ints {
			c.ints[i] = w.int(work, k.rank, i)
		}
		c.Call, err = k.endpoint.BeginInt32(w.now, v.key(), c.ints)
	}
	if err != nil {
		w.failf("rank %d: %v", k.rank, err)
		return
	}
	w.computes(k)
	w.goOn(k)
}

// goOn takes what is done and sends what is due.
func (w *world) goOn(k *worker) {
	for len(k.calls) > 0 && k.calls[0].Done() && !w.ended {
		w.finish(k)
	}
	w.pump(k)
}

// pump sends what is due and plans the next look.
func (w *world) pump(k *worker) {
	if k.dead || len(k.calls) == 0 || w.ended {
		return
	}
	end := k.calls[0].began + w.s.Timeout
	if w.now >= end {
		w.error(k, k.endpoint.Overdue(w.now))
		return
	}
	for {
		batch := k.endpoint.Due(w.now, w.batch[:0])
		if len(batch) == 0 {
			break
		}
		for _, payload := range batch {
			w.checkSend(k, payload)
			frame := wire.AppendUDP(w.buffer(), k.addr, service, payload, w.s.Damage != Unprotected)
			w.tell("sent", k.rank, atSwitch, frame)
			w.transmit(k.rank, atSwitch, frame)
		}
	}
	at := end
	if d, ok := k.endpoint.Deadline(); ok {
		at = min(at, d)
	}
	if at <= w.now {
		w.failf("rank %d wants to be asked at %v, which is past", k.rank, at)
		return
	}
	if at != k.wake {
		k.wake = at
		w.events.add(event{at: at, kind: wake, node: k.rank, job: w.job})
	}
}

// under is under which epoch a round runs.
type under struct {
	epoch uint16
	ranks uint64 // mask of those who have sent something of it, and live
}

// checkSend checks that a contribution may be sent: that the chunk that is Pool before it was answered, and that the
// other ranks run the round under the same plan.
func (w *world) checkSend(k *worker, payload []byte) {
	var h wire.Header
	if err := wire.DecodeHeader(payload, &h); err != nil {
		w.failf("rank %d sends a packet that nobody can read: %v", k.rank, err)
		return
	}
	if w.s.Damage == Unprotected {
		return // what was damaged may have said anything
	}
	u, ok := w.epochs[h.Round]
	if ok && u.epoch != h.Epoch {
		w.failf("rank %d runs round %d under epoch %d, another under %d", k.rank, h.Round, h.Epoch, u.epoch)
	}
	w.epochs[h.Round] = under{h.Epoch, u.ranks | 1<<k.rank}
	if k.asked != nil {
		k.asked[questionOf(&h)] = h.Seq
	}
	if h.Seq-k.base >= w.s.Pool && !k.opened[h.Seq-w.s.Pool] {
		w.failf("rank %d sends seq %d before seq %d was answered: the pool is %d", k.rank, h.Seq, h.Seq-w.s.Pool, w.s.Pool)
	}
}

// atWorker is a frame's arrival at a worker.
func (w *world) atWorker(k *worker, frame []byte) {
	if k.dead || w.ended {
		return
	}
	_, _, payload, err := wire.ParseUDP(frame)
	if err != nil {
		w.failf("rank %d receives what is no packet: %v", k.rank, err)
		return
	}
	w.tell("received", k.rank, atHost, frame)
	var h wire.Header
	if wire.DecodeHeader(payload, &h) == nil && h.Job == w.jobID() &&
		(h.Type == wire.TypeResult || h.Type == wire.TypeAck && h.Contributors>>k.rank&1 != 0) {
		k.opened[k.seq(&h)] = true
	}
	if err := k.endpoint.Take(w.now, payload); err != nil {
		w.error(k, err)
		return
	}
	w.goOn(k)
}

// finish is the end of a worker's oldest all-reduce.
func (w *world) finish(k *worker) {
	w.notef("rank %d has finished all-reduce %d", k.rank, k.work)
	c := k.calls[0]
	w.checkValues(k, c)
	k.calls = k.calls[:copy(k.calls, k.calls[1:])]
	w.spare = append(w.spare, c)
	k.work++
	if w.behind(k.work) == 0 {
		w.report.Rounds = append(w.report.Rounds, w.now-w.begun[k.work-1])
	}
	if k.work < len(w.works) {
		w.computes(k)
		return
	}
	w.maybeEnd()
}

// behind counts the workers that have not finished as many all-reduces.
func (w *world) behind(work int) (n int) {
	for _, k := range w.workers {
		if k.work < work {
			n++
		}
	}
	return n
}

// observe checks a round's integers.
func (w *world) observe(k *worker, r *transport.Round) {
	w.report.Epochs[r.Epoch] = true
	work := k.seen
	v := &w.works[work]
	if r.Key != v.key() || r.Modular == v.Float || !r.Scout && r.Offset+len(r.Sum) > v.Lanes {
		w.failf("rank %d: round %d is of %q, lanes %d to %d, and all-reduce %d is under way, of %q and %d lanes", k.rank, r.Number, r.Key,
			r.Offset, r.Offset+len(r.Sum), work, v.key(), v.Lanes)
		return
	}
	if !r.Scout && r.Offset+len(r.Sum) == v.Lanes {
		k.seen++
	}
	if w.ledger != nil {
		if err := w.ledger.take(k.rank, work, r, w.s.Quorum.Ranks, w.s.all()); err != nil {
			w.failf("rank %d: round %d of vector %d: %v", k.rank, r.Number, work, err)
		}
		copy(k.calls[work-k.work].told[r.Offset:], r.Sum)
		for _, mask := range r.Masks {
			if mask != w.s.all() {
				w.report.Partial++
			}
			if work == k.first && k.life > 0 && mask>>k.rank&1 != 0 {
				w.report.Rejoined++
			}
		}
		return
	}
	if r.Async {
		if err := w.running.take(k.rank, work, r); err != nil {
			w.failf("rank %d: round %d of vector %d: %v", k.rank, r.Number, work, err)
		}
		copy(k.calls[work-k.work].told, r.Sum)
		return
	}
	if r.Mask != w.s.all() {
		w.failf("rank %d: round %d has mask %#x", k.rank, r.Number, r.Mask)
	}
	want := w.sum(work, r.Exponent)[r.Offset:][:len(r.Sum)]
	if i := difference(r.Sum, want); i >= 0 {
		w.failf("rank %d: round %d, lane %d of vector %d is %d, want %d", k.rank, r.Number, r.Offset+i, work, r.Sum[i], want[i])
	}
}

// checkValues checks what a worker's oldest all-reduce, which is done, returns.
func (w *world) checkValues(k *worker, c *call) {
	info := c.Info()
	if info.Clipped != 0 {
		w.failf("rank %d has clipped %d values", k.rank, info.Clipped)
	}
	want := c.told
	if w.ledger == nil && w.running == nil {
		want = w.sum(k.work, info.Exponent)
	}
	if !w.works[k.work].Float {
		if i := difference(c.ints, want); i >= 0 {
			w.failf("rank %d: value %d of vector %d is %d, want %d", k.rank, i, k.work, c.ints[i], want[i])
		}
		return
	}
	unit := math.Ldexp(1, -int(info.Exponent))
	for i, got := range c.floats {
		if x := float32(float64(want[i]) * unit); got != x {
			w.failf("rank %d: value %d of vector %d is %g, want %g", k.rank, i, k.work, got, x)
			return
		}
	}
}
