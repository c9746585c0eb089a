package sim

import (
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"runtime/debug"
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

	// mistake may change a plan that is installed on a server.
	mistake  func(w *world, server int, p *agg.ServerPlan)
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
	Raises     int                  // changes of plan to a larger quorum that ranks began rounds under
	Lowers     int                  // ... to a smaller one
	Lowered    int                  // plans that wanted more ranks than were there
	Partial    int                  // chunks without all ranks, as each rank was told
	Deaths     int                  // of workers that may come back
	Returns    int                  // of those
	Together   int                  // all-reduces that began when others of the worker were under way
	Additions  int                  // contributions in a chunk's result, in async, at most
	SumsLost   int                  // async jobs of which a server lost the sums
	Rejoined   int                  // chunks of such a worker's first all-reduce that have its contribution
}

// maxEvents ends a run that goes on without getting anywhere.
const maxEvents = 20_000_000

// firstJob is the id of the first job; the next one's is one more.
const firstJob = 40

// world is a run.
type world struct {
	s       *Schedule
	works   []allReduce // of each job
	shift   int         // see int
	opts    Options
	rng     *rand.Rand
	now     time.Duration
	events  queue
	free    [][]byte // frame buffers
	spare   []*call
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
	unseen   int              // RESULTs of running sums that were lost or late before the switch: only one tells a sum's state
	epochs   map[uint32]under // of the job, by round
	begun    []time.Duration  // of the job's all-reduces
	sums     []expected       // likewise
	ledger   *ledger          // nil without a quorum
	closings *closings        // likewise
	running  *running         // nil but in async
	sumsLost bool             // of the job, on a server, for good
	missed   bool             // ... and a worker has said so
	failure  error
	report   Report
}

// Run runs a schedule and returns what was seen, and the first thing that was not as it must be.
func Run(s *Schedule, opts Options) (*Report, error) {
	if err := s.check(); err != nil {
		return nil, err
	}
	return run(s, opts)
}

func run(s *Schedule, opts Options) (report *Report, err error) {
	w := &world{s: s, opts: opts, rng: rand.New(rand.NewPCG(s.Seed, 0x3031)), batch: make([][]byte, 0, 64), works: s.settle(), shift: s.shift()}
	defer func() {
		if cause := recover(); cause != nil { // a schedule that makes something panic is to be printed like others that fail
			report, err = &w.report, fmt.Errorf("%v: panic: %v\n%s", w.now, cause, debug.Stack())
		}
	}()
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
	} else if r.Verdict != check.OK && !(r.Verdict == check.Lacking && w.unseen > 0) {
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
	case restore:
		if e.job == w.job && !w.ended {
			w.installSwitch(0)
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
	w.epochs, w.begun = map[uint32]under{}, w.begun[:0]
	w.sums = make([]expected, len(w.works))
	w.controller, w.installed = controller{epoch: w.s.Epoch}, map[uint16]int{}
	w.returning, w.recoverer.underWay = 0, false
	if w.ledger, w.closings = nil, nil; w.s.Quorum != nil {
		w.ledger, w.closings = newLedger(w), newClosings()
		w.setQuorum(w.s.Epoch, 0, w.s.Workers)
	}
	if w.sumsLost, w.missed, w.running = false, false, nil; w.s.Async != nil {
		w.running = newRunning(w)
	}
	for _, server := range w.s.Plans[0].Servers {
		w.installServer(0, server)
	}
	w.installSwitch(0)
	for r := range w.s.Workers {
		w.workers = append(w.workers, w.newWorker(r, 0, transport.Config{}))
		w.computes(w.workers[r])
	}
	w.events.add(event{at: w.now + w.upTo(w.s.Control), kind: control, job: w.job, number: w.recoverer.number})
}

func (w *world) jobID() uint16 { return firstJob + uint16(w.job) }

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
	case w.sumsLost:
		if !errors.As(err, &late) || late.Unknown == wire.ReasonNone && len(late.Missing) == 0 {
			w.failf("rank %d ends, when sums were lost, with an error that does not say what it waits for: %v", k.rank, err)
		}
		w.missed = w.missed || late != nil && late.Unknown != wire.ReasonNone
		k.dead = true
		w.maybeEnd()
		return
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

// maybeEnd ends the job when all that live are through.
func (w *world) maybeEnd() {
	for _, k := range w.workers {
		if !k.dead && k.work < len(w.works) {
			return
		}
	}
	if w.ledger != nil {
		if err := w.ledger.balance(); err != nil {
			w.failf("%v", err)
		}
	}
	if through := w.behind(len(w.works)) == 0; w.sumsLost && !w.missed && !through {
		w.failf("sums were lost, and nobody was told so")
	}
	w.end()
}

// end ends the job.
func (w *world) end() {
	for _, k := range w.workers {
		if w.running != nil && k.work == len(w.works) {
			if err := w.running.complete(k.rank); err != nil {
				w.failf("%v", err)
			}
		}
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

// int is an integer of an input: sums of it do not overflow.
func (w *world) int(work, rank, i int) int32 {
	if w.works[work].zeros {
		return 0
	}
	return int32(w.mix(work, rank, i)) >> w.shift
}

// float is a value of an input: the magnitudes of all vectors are alike, so that nothing is clipped.
func (w *world) float(work, rank, i int) float32 {
	if w.works[work].zeros {
		return 0
	}
	const half = 126 << 23 // 0.5, and a mantissa makes it up to 1
	x := w.mix(work, rank, i)
	return math.Float32frombits(uint32(x>>63)<<31 | half | uint32(x>>32)&(1<<23-1))
}

// lane is what a value of an input is on the wire.
func (w *world) lane(work, rank, i int, exponent int8) int32 {
	if !w.works[work].Float {
		return w.int(work, rank, i)
	}
	return int32(math.RoundToEven(math.Ldexp(float64(w.float(work, rank, i)), int(exponent))))
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
	*e = expected{exponent, make([]int32, w.works[work].Lanes)}
	for i := range e.sum {
		for rank := range w.s.Workers {
			e.sum[i] += w.lane(work, rank, i, exponent)
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
