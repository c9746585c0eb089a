package sim

import (
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"xagg/agg"
	"xagg/wire"
	"xagg/wire/capture"
	"xagg/wire/check"
	"xagg/worker/transport"
)

// Options say how a schedule is run.
type Options struct {
	// Trace, if set, is told everything that happens, a line each.
	Trace io.Writer
	// NoCheck leaves out the trace checker: long runs need the memory.
	NoCheck bool

	sabotage func(w *world, node int, arrival kind, p *wire.Packet) bool // may change a packet that is sent, and says so
}

// Report is what was seen in a run.
type Report struct {
	End        time.Duration   // simulated time
	Rounds     []time.Duration // of every all-reduce: from the first rank's beginning to the last one's end
	Packets    uint64          // that workers have sent
	Resends    uint64          // of them
	Frames     int             // put on a line
	Losses     int
	Overflows  int // lost in a full queue
	Damaged    int
	Reasons    [wire.NumReasons]int // packets at aggregators
	Errors     []error              // with which workers have ended all-reduces; only in jobs that may fail
	Epochs     map[uint16]bool      // that rounds were run under
	Recoveries int                  // that were begun
	HandedOver int                  // RESULTs, in them
	Partial    int                  // chunks without all ranks, as each rank was told
	Deaths     int                  // of workers that may come back
	Returns    int                  // of those
	Rejoined   int                  // chunks of such a worker's first all-reduce that have its contribution
}

// maxEvents ends a run that goes on without getting anywhere.
const maxEvents = 20_000_000

// firstJob is the id of the first job; the next one's is one more.
const firstJob = 40

// world is a run.
type world struct {
	s       *Schedule
	opts    Options
	rng     *rand.Rand
	now     time.Duration
	events  queue
	free    [][]byte // frame buffers
	p       wire.Packet
	batch   [][]byte
	sw      *agg.Switch
	servers []*agg.Server
	hosts   []host
	workers []*worker

	controller controller
	installed  map[uint16]int // plans by epoch
	recoverer  recoverer
	returning  uint64 // mask of ranks that are there again and have not been let in
	job        int    // counted from 0
	ended      bool   // the job; the next has not started yet

	checker  *check.Checker
	seen     capture.Packet
	captured int
	epochs   map[uint32]uint16 // of the job, by round
	begun    []time.Duration   // of the job's all-reduces
	sums     []expected        // likewise
	ledger   *ledger           // nil without a quorum
	failure  error
	report   Report
}

// worker is a worker.
type worker struct {
	rank     int
	endpoint *transport.Endpoint
	work     int // index of the all-reduce under way, or of the next
	ints     []int32
	floats   []float32
	told     []int32 // with a quorum: what the observer saw
	began    time.Duration
	wake     time.Duration // planned; zero = never
	opened   map[uint32]bool
	base     uint32 // the first seq since the last recovery: everything before it was answered
	dead     bool
	life     int       // number of its process, from 0
	addr     wire.Addr // of it
	round    uint32    // that it began with, and
	first    int       // the index of the all-reduce; -1 where that is the job's first
}

// Run runs a schedule and returns what was seen, and the first thing that was not as it must be.
func Run(s *Schedule, opts Options) (*Report, error) {
	if err := s.check(); err != nil {
		return nil, err
	}
	return run(s, opts)
}

func run(s *Schedule, opts Options) (*Report, error) {
	w := &world{s: s, opts: opts, rng: rand.New(rand.NewPCG(s.Seed, 0x3031)), batch: make([][]byte, 0, 64)}
	w.report.Epochs = map[uint16]bool{}
	w.sw = agg.NewSwitch(4 * int(s.largestPool()))
	for range s.Servers {
		w.servers = append(w.servers, agg.NewServer(int(s.serverRounds())*s.MaxChunks))
	}
	for i := range s.Links {
		l := line{Link: &s.Links[i]}
		w.hosts = append(w.hosts, host{l, l})
	}
	if !opts.NoCheck && s.Damage != Unprotected {
		w.checker = check.New(check.Options{Findings: 3})
	}
	w.events.add(event{kind: start})
	if s.Crash != nil {
		w.events.add(event{at: s.Crash.At, kind: crash, node: s.Crash.Rank})
	}
	for i := range s.Losses {
		w.events.add(event{at: s.Losses[i].At, kind: lose, node: i})
	}
	for _, d := range s.Deaths {
		w.events.add(event{at: d.At, kind: die, node: d.Rank})
		w.events.add(event{at: d.Back, kind: comeBack, node: d.Rank})
	}
	for n := 0; w.failure == nil; n++ {
		e, ok := w.events.pop()
		if !ok {
			break
		}
		if n == maxEvents {
			w.failf("%d events and no end", n)
		}
		w.now = e.at
		w.happen(&e)
	}
	w.report.End = w.now
	if w.failure == nil {
		w.verdict()
	}
	return &w.report, w.failure
}

// verdict is what can be said only at the end.
func (w *world) verdict() {
	if w.job != w.s.Jobs {
		w.failf("nothing happens any more and job %d has not ended", w.job)
	}
	if w.checker == nil {
		return
	}
	r := w.checker.Finish()
	if len(r.Violations) > 0 {
		v := &r.Violations[0]
		w.failf("trace checker: %d packets break the protocol, the first is number %d, %s: %s: %s",
			r.ViolationCount, v.Number, v.Packet, v.Reason, v.Detail)
	} else if r.Verdict != check.OK {
		w.failf("trace checker: %s: %+v", r.Verdict, r.Incomplete)
	}
}

func (w *world) happen(e *event) {
	switch e.kind {
	case atSwitch:
		w.atSwitch(e.node, e.frame)
		w.free = append(w.free, e.frame)
	case atHost:
		if e.node >= w.s.Workers {
			w.atServer(e.node-w.s.Workers, e.frame)
		} else {
			w.atWorker(w.workers[e.node], e.frame)
		}
		w.free = append(w.free, e.frame)
	case wake:
		if k := w.workers[e.node]; e.job == w.job && k.wake == e.at {
			k.wake = 0
			w.pump(k)
		}
	case begin:
		if k := w.workers[e.node]; e.job == w.job && !k.dead && k.life == e.number {
			w.begin(k)
		}
	case control:
		if e.job == w.job && !w.ended && e.number == w.recoverer.number {
			w.control()
		}
	case lose:
		w.lose(&w.s.Losses[e.node])
	case die:
		if k := w.workers[e.node]; !w.ended {
			w.mayDie(k)
		}
	case comeBack:
		if !w.ended && w.workers[e.node].dead {
			w.comeBack(e.node)
		}
	case freeze, decide, resume, enter:
		if e.job == w.job && !w.ended && e.number == w.recoverer.number {
			switch e.kind {
			case freeze:
				w.freeze(e.node)
			case decide:
				w.decide()
			case enter:
				w.enter(e.node)
			default:
				w.resume(w.workers[e.node])
			}
		}
	case crash:
		if w.job == 0 && !w.ended {
			w.notef("rank %d dies", e.node)
			w.workers[e.node].dead = true
			w.maybeEnd()
		}
	case start:
		w.start()
	}
}

// start starts the next job, on the slots of the one before.
func (w *world) start() {
	w.ended = false
	w.notef("job %d starts", w.jobID())
	w.workers = w.workers[:0]
	w.epochs, w.begun = map[uint32]uint16{}, w.begun[:0]
	w.sums = make([]expected, len(w.s.Vectors))
	w.controller, w.installed = controller{epoch: w.s.Epoch}, map[uint16]int{}
	w.returning, w.recoverer.underWay = 0, false
	if w.ledger = nil; w.s.Quorum != nil {
		w.ledger = newLedger(w.s.Workers)
	}
	for _, server := range w.s.Plans[0].Servers {
		w.installServer(0, server)
	}
	w.installSwitch(0)
	for r := range w.s.Workers {
		w.workers = append(w.workers, w.newWorker(r, 0, transport.Config{}))
		w.next(w.workers[r])
	}
	w.events.add(event{at: w.now + w.upTo(w.s.Control), kind: control, job: w.job, number: w.recoverer.number})
}

// newWorker returns a rank's process. The configuration says where one begins that came back.
func (w *world) newWorker(rank, life int, cfg transport.Config) *worker {
	k := &worker{
		rank: rank, life: life, addr: workerAddr(rank), work: int(cfg.AllReduces), round: cfg.Round, base: cfg.Seq,
		opened: map[uint32]bool{}, told: make([]int32, w.s.longest()),
	}
	k.addr.Port += uint16(life)
	if k.first = k.work; life == 0 {
		k.first = -1
	}
	cfg.Job, cfg.Epoch, cfg.Rank, cfg.Ranks = w.jobID(), w.controller.epoch, rank, w.s.Workers
	cfg.Pool, cfg.MaxChunks, cfg.Depth = w.s.Pool, w.s.MaxChunks, w.s.Depth
	cfg.Quorum, cfg.Wait, cfg.Rounds = w.s.quorum().Ranks, w.s.quorum().Wait, int(w.s.serverRounds())
	cfg.Observe = func(round transport.Round) { w.observe(k, &round) }
	k.endpoint = transport.New(cfg)
	return k
}

// next has a worker begin its next all-reduce when it has computed.
func (w *world) next(k *worker) {
	w.events.add(event{at: w.now + w.compute(k.rank), kind: begin, node: k.rank, job: w.job, number: k.life})
}

// compute returns how long a worker computes before its next all-reduce.
func (w *world) compute(rank int) time.Duration {
	d := w.upTo(w.s.Compute[rank])
	if len(w.s.Late) > 0 {
		d += w.s.Late[rank]
	}
	return d
}

func (w *world) jobID() uint16 { return firstJob + uint16(w.job) }

// begin lets a worker begin its next all-reduce.
func (w *world) begin(k *worker) {
	work := w.s.Vectors[k.work]
	w.notef("rank %d begins all-reduce %d", k.rank, k.work)
	if k.work == len(w.begun) {
		w.begun = append(w.begun, w.now)
	}
	k.began = w.now
	key := w.s.key(k.work)
	if work.Float {
		k.floats = slices.Grow(k.floats[:0], work.Lanes)[:work.Lanes]
		for i := range k.floats {
			k.floats[i] = w.float(k.work, k.rank, i)
		}
		if _, err := k.endpoint.Begin(w.now, key, k.floats); err != nil {
			w.failf("rank %d: %v", k.rank, err)
		}
	} else {
		k.ints = slices.Grow(k.ints[:0], work.Lanes)[:work.Lanes]
		for i := range k.ints {
			k.ints[i] = w.int(k.work, k.rank, i)
		}
		if w.ledger != nil {
			w.ledger.give(k.rank, k.work, key, k.ints)
		}
		if _, err := k.endpoint.BeginInt32(w.now, key, k.ints); err != nil {
			w.failf("rank %d: %v", k.rank, err)
		}
	}
	if k.endpoint.Done() { // it was handed over, all of it
		w.finish(k)
		return
	}
	w.pump(k)
}

// pump sends what is due and plans the next look.
func (w *world) pump(k *worker) {
	if k.dead || k.endpoint.Done() || w.ended {
		return
	}
	end := k.began + w.s.Timeout
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
	if e, ok := w.epochs[h.Round]; ok && e != h.Epoch {
		w.failf("rank %d runs round %d under epoch %d, another under %d", k.rank, h.Round, h.Epoch, e)
	}
	w.epochs[h.Round] = h.Epoch
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
		k.opened[h.Seq] = true
	}
	done := k.endpoint.Done()
	if err := k.endpoint.Take(w.now, payload); err != nil {
		w.error(k, err)
		return
	}
	if !done && k.endpoint.Done() {
		w.finish(k)
		return
	}
	w.pump(k)
}

// finish is the end of a worker's all-reduce.
func (w *world) finish(k *worker) {
	w.notef("rank %d has finished all-reduce %d", k.rank, k.work)
	w.checkValues(k)
	k.work++
	if w.behind(k.work) == 0 {
		w.report.Rounds = append(w.report.Rounds, w.now-w.begun[k.work-1])
	}
	if k.work < len(w.s.Vectors) {
		w.next(k)
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

// maybeEnd ends the job when all that live are through.
func (w *world) maybeEnd() {
	for _, k := range w.workers {
		if !k.dead && k.work < len(w.s.Vectors) {
			return
		}
	}
	w.end()
}

// error is an all-reduce that has ended with an error: the whole job ends with it.
func (w *world) error(k *worker, err error) {
	w.notef("rank %d: %v", k.rank, err)
	w.report.Errors = append(w.report.Errors, err)
	var (
		late    *transport.DeadlineError
		refused *transport.RefusedError
		wrong   *transport.IntegrityError
	)
	switch {
	case w.s.Damage == Unprotected:
		if !errors.As(err, &late) && !errors.As(err, &refused) && !errors.As(err, &wrong) {
			w.failf("rank %d ends with an error that does not name round and chunk: %v", k.rank, err)
		}
	case w.s.Crash == nil || !w.workers[w.s.Crash.Rank].dead:
		w.failf("rank %d: %v", k.rank, err)
	case !errors.As(err, &late):
		w.failf("rank %d ends with another error than a deadline after a crash: %v", k.rank, err)
	case len(late.Missing) > 0 && !slices.Contains(late.Missing, w.s.Crash.Rank):
		w.failf("rank %d does not name rank %d, which is dead: %v", k.rank, w.s.Crash.Rank, err)
	}
	w.end()
}

// end ends the job.
func (w *world) end() {
	for _, k := range w.workers {
		st := k.endpoint.Stats()
		w.report.Packets += st.Sent
		w.report.Resends += st.Resends
	}
	w.notef("job %d ends", w.jobID())
	w.removeJob()
	w.ended = true
	w.job++
	if w.job < w.s.Jobs {
		w.events.add(event{at: w.now + w.upTo(w.s.Control), kind: start})
	}
}

func (w *world) chance(p float64) bool { return p > 0 && w.rng.Float64() < p }

// upTo returns a time of at most d.
func (w *world) upTo(d time.Duration) time.Duration { return time.Duration(w.rng.Int64N(int64(d) + 1)) }

// clock returns the time by the clock of the switch (0) or of a server (its number + 1) in microseconds: each has begun at
// another time, and runs up to a hundredth too fast or too slow.
func (w *world) clock(device int) uint64 {
	x := w.mix(0, device, -1)
	rate := 1 + (float64(x>>48)/(1<<15)-1)/100
	return x&(1<<40-1) + uint64(float64(w.now/time.Microsecond)*rate)
}

func (w *world) failf(format string, args ...any) {
	if w.failure == nil {
		w.failure = fmt.Errorf("%v: %s", w.now, fmt.Sprintf(format, args...))
		w.notef("FAILED: %v", w.failure)
	}
}

// notef writes a line of the trace.
func (w *world) notef(format string, args ...any) {
	if w.opts.Trace != nil {
		fmt.Fprintf(w.opts.Trace, "%12v  %s\n", w.now, fmt.Sprintf(format, args...))
	}
}

// tell writes a line of the trace on a frame between a host and the switch.
func (w *world) tell(what string, node int, arrival kind, frame []byte) {
	if w.opts.Trace == nil {
		return
	}
	name := fmt.Sprintf("rank %d", node)
	if node >= w.s.Workers {
		name = fmt.Sprintf("server %d", node-w.s.Workers)
	}
	arrow := name + " -> switch"
	if arrival == atHost {
		arrow = "switch -> " + name
	}
	var h wire.Header
	if err := wire.DecodeHeader(frame[wire.FrameOverhead:], &h); err != nil {
		w.notef("%-20s %s: %v", arrow, what, err)
		return
	}
	text := fmt.Sprintf("%v job %d epoch %d round %d chunk %d seq %d mask %#x", h.Type, h.Job, h.Epoch, h.Round, h.Chunk,
		h.Seq, h.Contributors)
	if h.NextEpoch != 0 {
		text += fmt.Sprintf(" next epoch %d", h.NextEpoch)
	}
	if h.Type == wire.TypeNack {
		text += fmt.Sprintf(" %v", h.Reason)
	}
	if h.Flags&wire.FlagResend != 0 {
		text += " RESEND"
	}
	w.notef("%-20s %-13s %s", arrow, what, text)
}

// The inputs, and what a plain loop makes of them.

// mix is a hash of a place of the input.
func (w *world) mix(work, rank, i int) uint64 {
	x := w.s.Seed ^ uint64(w.job)<<56 ^ uint64(work)<<48 ^ uint64(rank)<<40 ^ uint64(i)
	x *= 0x9e3779b97f4a7c15
	x = (x ^ x>>32) * 0xd6e8feb86659fd93
	return x ^ x>>32
}

// int is an integer of an input: 64 of them do not overflow.
func (w *world) int(work, rank, i int) int32 { return int32(w.mix(work, rank, i)) >> 6 }

// float is a value of an input: the magnitudes of all vectors are alike, so that nothing is clipped.
func (w *world) float(work, rank, i int) float32 {
	return float32(int32(w.mix(work, rank, i))) / (1 << 31)
}

// observe checks a round's integers.
func (w *world) observe(k *worker, r *transport.Round) {
	w.report.Epochs[r.Epoch] = true
	if w.ledger != nil {
		if err := w.ledger.take(k.rank, k.work, r.Key, r, w.s.Quorum.Ranks, w.s.all()); err != nil {
			w.failf("rank %d: round %d of vector %d: %v", k.rank, r.Number, k.work, err)
		}
		copy(k.told[:w.s.Vectors[k.work].Lanes][r.Offset:], r.Sum)
		for _, mask := range r.Masks {
			if mask != w.s.all() {
				w.report.Partial++
			}
			if k.work == k.first && mask>>k.rank&1 != 0 {
				w.report.Rejoined++
			}
		}
		return
	}
	if r.Mask != w.s.all() {
		w.failf("rank %d: round %d has mask %#x", k.rank, r.Number, r.Mask)
	}
	want := w.sum(k.work, r.Exponent)[r.Offset:][:len(r.Sum)]
	if i := difference(r.Sum, want); i >= 0 {
		w.failf("rank %d: round %d, lane %d of vector %d is %d, want %d", k.rank, r.Number, r.Offset+i, k.work, r.Sum[i], want[i])
	}
}

// checkValues checks what an all-reduce returns.
func (w *world) checkValues(k *worker) {
	info := k.endpoint.Info()
	if info.Clipped != 0 {
		w.failf("rank %d has clipped %d values", k.rank, info.Clipped)
	}
	if w.ledger != nil {
		if i := difference(k.ints, k.told[:len(k.ints)]); i >= 0 {
			w.failf("rank %d: value %d of vector %d is %d, the observer saw %d", k.rank, i, k.work, k.ints[i], k.told[i])
		}
		return
	}
	want := w.sum(k.work, info.Exponent)
	if !w.s.Vectors[k.work].Float {
		if i := difference(k.ints, want); i >= 0 {
			w.failf("rank %d: value %d of vector %d is %d, want %d", k.rank, i, k.work, k.ints[i], want[i])
		}
		return
	}
	unit := math.Ldexp(1, -int(info.Exponent))
	for i, got := range k.floats {
		if x := float32(float64(want[i]) * unit); got != x {
			w.failf("rank %d: value %d of vector %d is %g, want %g", k.rank, i, k.work, got, x)
			return
		}
	}
}

// expected is the sum of a vector, computed when somebody has it.
type expected struct {
	exponent int8
	sum      []int32
}

// sum returns the integers that an all-reduce must come to: the plain sum of all ranks' inputs.
func (w *world) sum(work int, exponent int8) []int32 {
	e := &w.sums[work]
	if e.sum != nil && e.exponent == exponent {
		return e.sum
	}
	v := w.s.Vectors[work]
	*e = expected{exponent, make([]int32, v.Lanes)}
	for i := range e.sum {
		for rank := range w.s.Workers {
			if v.Float {
				e.sum[i] += int32(math.RoundToEven(math.Ldexp(float64(w.float(work, rank, i)), int(exponent))))
			} else {
				e.sum[i] += w.int(work, rank, i)
			}
		}
	}
	return e.sum
}

// difference returns the first place at which two vectors of one length differ, or -1.
func difference(a, b []int32) int {
	for i := range a {
		if a[i] != b[i] {
			return i
		}
	}
	return -1
}
