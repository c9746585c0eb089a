package agg

import (
	"fmt"
	"math"
	"math/bits"
	"slices"
	"time"

	"xagg/wire"
)

// WindowConfig configures a worker's window. All fields down to Pool are needed.
type WindowConfig struct {
	Job   uint16
	Epoch uint16 // of the first Depth rounds
	Rank  uint8
	Ranks uint64 // mask of all ranks
	// Pool: a seq may be sent when seq-Pool was answered. A power of two, at most the pool of every plan that the job
	// will run under: with a smaller one the rule is stricter than it needs to be, with a larger one slots break.
	Pool uint32
	// Depth is the number of rounds that may be under way; 0 = 1.
	Depth int
	// Round and Seq are what the first round and its chunk 0 are numbered: not 0 for a rank that comes back to a job.
	Round, Seq uint32
	// Quorum is the least number of ranks that are enough for a RESULT, whatever the plan, 0 = all, and Wait how long aggregators
	// keep a chunk open for more, as far as is known: see [Window.SetWait].
	Quorum int
	Wait   time.Duration
	// Async is set when a RESULT answers a contribution at once: nobody waits for anybody, but a WAIT says that the
	// contribution was not added, since this rank is too far ahead.
	Async bool
}

const (
	// A bmv2 egress queue holds 64 packets. Every chunk in flight may become one RESULT at each rank's port. At a server's
	// port all ranks' chunks meet: with their share of the queue each they cannot overflow it, so there is no reason to go
	// lower, however many packets are lost for other reasons.
	maxCongestion     = 64
	initialCongestion = 16
	leastCongestion   = 8

	probeMin = 50 * time.Millisecond // between two probes of a round that is known to wait for a rank
	probeMax = time.Second           // the interval grows up to this
	pollGap  = time.Millisecond      // between any two polls: a poll is a whole GRAD
)

// Window is a worker's side of the protocol for one job: which chunk to send now, what an answer means, when to look
// again. Time is a time.Duration since an arbitrary fixed origin of the caller's; it must not run backwards.
//
// Up to Depth rounds are under way at once. They are one sequence of chunks, numbered by seq, and the rules below know
// of rounds only where an answer says which chunk it is for, and where a round begins or ends.
//
// Two limits hold at once. The window rule protects the aggregators' slots: a chunk is ready when the chunk that is
// Pool before it was answered by a RESULT or by an ACK that covers this rank; a WAIT does not count, since the switch
// may still need the slot. The congestion window protects the network: it bounds the chunks in flight, those sent
// and not answered by anything, grows by one per window of deliveries and is halved by a loss, once per flight.
//
// A chunk without a RESULT is lost, or waits for another rank; for a straggler all chunks wait. What tells the two apart
// is a RESULT of a later chunk. A chunk that is behind it is sent again whenever its timer runs out. Of all the others
// one at a time is sent again, as a probe, and the longer the job waits for a rank, as WAITs and ACKs say, the rarer.
//
// With a quorum nobody waits for a straggler, but it is a repeated contribution that closes a chunk once its time is
// over. So every chunk is sent again: when its timer runs out, and what an aggregator has, when the chunk may be closed.
type Window struct {
	cfg    WindowConfig
	round  uint32 // number of the newest round
	epoch  uint16 // of the newest round
	next   uint16 // newest epoch that a round announced which is not among rounds any more, else the first one
	rounds []span // the newest Depth rounds, ascending

	base   uint32  // seq of the first of chunks
	chunks []chunk // of rounds
	first  uint32  // seq: no chunk before it is unfinished
	newest uint32  // seq: no chunk from here on is finished
	left   int     // unfinished chunks

	ready     fifo     // chunks that the window rule allows and that were never sent
	lost      fifo     // chunks that are lost, waiting for room in the congestion window
	silent    fifo     // chunks whose timer ran out, to be probed
	timers    schedule // of the chunks in flight
	polls     schedule // of the overdue chunks; with a quorum, of all that were delivered
	probes    schedule // of the delivered chunks
	nextPoll  time.Duration
	nextProbe time.Duration
	interval  time.Duration // between probes while a rank is missing
	asked     bool          // a probe has not been answered
	blank     bool          // async: chunks were forgotten, and none is known again

	flight    int           // chunks in flight
	limit     int           // congestion window
	limitMin  int           // of it
	limitMax  int           // of it
	delivered int           // deliveries since the limit last changed
	undo      int           // the limit before it was last halved, 0 when that is settled
	cut       time.Duration // when it was last halved
	rtt       rtt

	stats Stats
}

// span is a round: the chunks of a window that belong together.
type span struct {
	seq       uint32   // of its first chunk
	chunks    uint32   // so many
	ids       []uint32 // their numbers in the round, ascending, where it has others that got their RESULT before a restart
	left      uint32   // unfinished chunks
	epoch     uint16
	announced uint16 // by its chunk 0; 0 = nothing
	held      fifo   // async: chunks that were not added
}

type chunkState uint8

const (
	unsent    chunkState = iota
	inFlight             // sent, no answer yet; due is its timeout
	timedOut             // it is lost or waits for others: a probe will tell
	lost                 // to be sent again as soon as the congestion window has room
	delivered            // an ACK or a WAIT said that it is in; from due on it may be probed
	overdue              // delivered, and a later chunk is finished, or there is a quorum; due is the next poll
	finished             // its RESULT was taken
)

type chunk struct {
	sent  time.Duration // last transmission
	due   time.Duration
	mask  uint64 // ranks that are known to be in
	state chunkState
	open  bool  // answered by a RESULT or an ACK: the chunk Pool after it is ready
	sends uint8 // transmissions, saturating
	alone bool  // all transmissions but the last were answered
}

// NewWindow returns a window before its first round.
func NewWindow(cfg WindowConfig) *Window {
	if cfg.Rank >= wire.MaxRanks || cfg.Ranks>>cfg.Rank&1 == 0 || bits.OnesCount32(cfg.Pool) != 1 || cfg.Depth < 0 {
		panic(fmt.Sprintf("agg: new window: rank %d, ranks %#x, pool %d, depth %d: the rank must be one of the ranks and the "+
			"pool a power of two", cfg.Rank, cfg.Ranks, cfg.Pool, cfg.Depth))
	}
	cfg.Depth = max(cfg.Depth, 1)
	return &Window{
		cfg:      cfg,
		round:    cfg.Round - 1,
		epoch:    cfg.Epoch,
		next:     cfg.Epoch,
		base:     cfg.Seq,
		limit:    int(min(cfg.Pool, initialCongestion)),
		limitMin: int(min(cfg.Pool, uint32(max(1, min(leastCongestion, maxCongestion/bits.OnesCount64(cfg.Ranks)))))),
		limitMax: int(min(cfg.Pool, maxCongestion)),
		cut:      math.MinInt64,
		rtt:      newRTT(),
	}
}

// SetWait sets how long aggregators keep a chunk open for more. It decides when the window asks again, and nothing else: one that
// is too long closes chunks late, one that is too short asks in vain.
func (w *Window) SetWait(wait time.Duration) { w.cfg.Wait = wait }

// MayBegin reports whether a round may begin: fewer than Depth are under way, and of all rounds that are Depth or more
// before it every RESULT is in.
func (w *Window) MayBegin() bool { return len(w.rounds) < w.cfg.Depth || w.rounds[0].left == 0 }

// NextRound returns the number of the round to begin next.
func (w *Window) NextRound() uint32 { return w.round + 1 }

// NextSeq returns the seq of that round's chunk 0.
func (w *Window) NextSeq() uint32 { return w.base + uint32(len(w.chunks)) }

// Begin starts the next round, which [Window.MayBegin], with the given number of chunks (at least 1). It returns the
// round's number and the epoch that the round runs under.
func (w *Window) Begin(now time.Duration, chunks uint32) (round uint32, epoch uint16) {
	return w.start(now, chunks, nil)
}

// allowed reports whether the window rule allows a chunk.
func (w *Window) allowed(i uint32) bool {
	before := i - w.cfg.Pool
	return !w.has(before) || w.at(before).open
}

// start adds the next round, see add.
func (w *Window) start(now time.Duration, chunks uint32, ids []uint32) (round uint32, epoch uint16) {
	if chunks == 0 && ids == nil || !w.MayBegin() {
		panic(fmt.Sprintf("agg: begin round: %d chunks while %d of %d rounds up to %d are unfinished",
			chunks, w.left, len(w.rounds), w.round))
	}
	w.epoch = w.nextEpoch()
	if len(w.rounds) == w.cfg.Depth {
		w.next = w.epoch
		n := w.rounds[0].chunks
		w.rounds = w.rounds[:copy(w.rounds, w.rounds[1:])]
		w.chunks = w.chunks[:copy(w.chunks, w.chunks[n:])]
		w.base += n
	}
	if w.left == 0 {
		w.rest(now, w.NextSeq())
	}
	w.round++
	w.add(chunks, ids)
	return w.round, w.epoch
}

// add adds a round of so many chunks, with the given numbers where ids is not nil.
func (w *Window) add(chunks uint32, ids []uint32) {
	seq := w.NextSeq()
	w.rounds = append(w.rounds, span{seq: seq, chunks: chunks, ids: ids, left: chunks, epoch: w.epoch})
	w.left += int(chunks)
	n := len(w.chunks)
	w.chunks = slices.Grow(w.chunks, int(chunks))[:n+int(chunks)]
	clear(w.chunks[n:])
	for i := seq; i != seq+chunks; i++ {
		switch {
		case w.allowed(i):
			w.ready.push(i)
		case i-seq >= w.cfg.Pool:
			return // the rest waits for chunks of this round
		}
	}
}

// rest forgets what concerns finished chunks only. Every chunk is finished; the next has the given seq.
func (w *Window) rest(now time.Duration, seq uint32) {
	w.first, w.newest = seq, seq
	w.ready.reset()
	w.lost.reset()
	w.silent.reset()
	w.timers.reset()
	w.polls.reset()
	w.probes.reset()
	w.nextPoll, w.nextProbe, w.interval, w.asked, w.blank = now, now, 0, false, false
}

// nextEpoch returns the epoch of the next round, once it may begin: what the rounds that are Depth or more before it
// have announced decides it, and all ranks have those.
func (w *Window) nextEpoch() uint16 {
	if len(w.rounds) == w.cfg.Depth {
		if e := w.rounds[0].announced; e != 0 && wire.SerialLess16(w.next, e) {
			return e
		}
	}
	return w.next
}

// Epoch returns the oldest epoch under which this rank still has, or may begin, a round: all its rounds under older
// ones are finished.
func (w *Window) Epoch() uint16 {
	for i := range w.rounds {
		if r := &w.rounds[i]; r.left > 0 {
			return r.epoch
		}
	}
	return w.nextEpoch()
}

// has reports whether the chunk belongs to one of the rounds; one before them is finished.
func (w *Window) has(seq uint32) bool { return seq-w.base < uint32(len(w.chunks)) }

func (w *Window) at(seq uint32) *chunk { return &w.chunks[seq-w.base] }

// in reports whether the chunk is in a state.
func (w *Window) in(seq uint32, state chunkState) bool { return w.has(seq) && w.at(seq).state == state }

// span returns the round that a chunk belongs to.
func (w *Window) span(seq uint32) (number uint32, r *span) {
	i := len(w.rounds) - 1
	for i > 0 && wire.SerialLess(seq, w.rounds[i].seq) {
		i--
	}
	return w.round - uint32(len(w.rounds)-1-i), &w.rounds[i]
}

// Send is one transmission that the window asks for.
type Send struct {
	Round  uint32
	Chunk  uint32
	Seq    uint32
	Resend bool // FlagResend is to be set
}

// Next returns the next transmission that is due at time now, or false when nothing is. Every true return counts as
// sent: the caller must send it. Resends come before new chunks.
func (w *Window) Next(now time.Duration) (Send, bool) {
	for {
		c, ok := w.timers.due(now, w, inFlight)
		if !ok {
			break
		}
		w.timeout(now, c)
	}
	if w.flight < w.limit {
		if c, ok := w.pop(&w.lost, lost); ok {
			return w.fly(now, c), true
		}
		if w.cfg.Quorum > 0 {
			if c, ok := w.polls.due(now, w, overdue); ok {
				w.at(c).alone = true
				return w.fly(now, c), true
			}
		}
	}
	if w.cfg.Quorum == 0 && now >= w.nextPoll {
		if c, ok := w.polls.due(now, w, overdue); ok {
			return w.poll(now, c), true
		}
	}
	if now >= w.nextProbe {
		if c, ok := w.pop(&w.silent, timedOut); ok {
			w.probed(now)
			return w.fly(now, c), true
		}
		if c, ok := w.probes.due(now, w, delivered); ok {
			w.probed(now)
			return w.poll(now, c), true
		}
	}
	if w.flight < w.limit {
		if c, ok := w.pop(&w.ready, unsent); ok {
			return w.fly(now, c), true
		}
	}
	return Send{}, false
}

// pop removes and returns the first chunk of a queue that is still in a state.
func (w *Window) pop(q *fifo, state chunkState) (uint32, bool) {
	for {
		c, ok := q.pop()
		if !ok || w.in(c, state) {
			return c, ok
		}
	}
}

// timeout takes chunk i out of flight.
func (w *Window) timeout(now time.Duration, i uint32) {
	w.flight--
	w.at(i).alone = false
	if wire.SerialLess(i, w.newest) {
		w.lose(now, i)
		return
	}
	if w.cfg.Async {
		w.lose(now, i) // it would have been answered
		return
	}
	if w.cfg.Quorum > 0 {
		w.again(i)
		return
	}
	w.at(i).state = timedOut
	w.silent.push(i)
}

// again has a chunk sent again.
func (w *Window) again(i uint32) {
	w.at(i).state = lost
	w.lost.push(i)
}

// lose has a lost chunk sent again. All that was in flight when the limit was halved belongs to one loss event.
func (w *Window) lose(now time.Duration, i uint32) {
	w.again(i)
	if w.at(i).sent >= w.cut {
		w.undo = w.limit
		w.limit = max(w.limitMin, w.limit/2)
		w.delivered = 0
		w.cut = now
	}
}

// fly puts chunk i in flight.
func (w *Window) fly(now time.Duration, i uint32) Send {
	c := w.at(i)
	c.state = inFlight
	c.due = now + w.rtt.rto
	if w.cfg.Quorum > 0 || w.cfg.Async {
		c.due = now + w.patience(c) // nobody may be there to answer
	}
	w.flight++
	w.timers.add(c.due, i)
	return w.send(now, i)
}

// patience is how long to wait for an answer to the next transmission of c: twice as long as for the one before.
func (w *Window) patience(c *chunk) time.Duration {
	return min(w.rtt.rto<<min(c.sends, 2), rtoMax)
}

// poll asks for a delivered chunk again.
func (w *Window) poll(now time.Duration, i uint32) Send {
	w.nextPoll = now + pollGap
	w.await(now, i, 0)
	return w.send(now, i)
}

// await plans when to ask for a delivered chunk again, which an aggregator keeps open for so long, as far as is known.
func (w *Window) await(now time.Duration, i uint32, open time.Duration) {
	c := w.at(i)
	c.due = now + w.patience(c)
	if w.cfg.Quorum > 0 {
		if open > 0 {
			c.due = now + max(open, w.rtt.srtt)
		}
		c.state = overdue
		w.polls.add(c.due, i)
		return
	}
	if !w.cfg.Async && wire.SerialLess(i, w.newest) {
		c.state = overdue
		w.polls.add(c.due, i)
	} else {
		c.state = delivered
		w.probes.add(c.due, i)
	}
}

// probed plans the probe after this one, in case that it is lost: an aggregator answers what it knows already.
func (w *Window) probed(now time.Duration) {
	w.asked = true
	w.nextProbe = now + 2*w.rtt.rto
}

// waits notes that an aggregator waits for another rank, if that answers a probe.
func (w *Window) waits(now time.Duration) {
	if !w.asked {
		return
	}
	w.asked = false
	w.interval = min(max(4*w.interval, probeMin), probeMax)
	w.nextProbe = now + w.interval
}

// moves notes that the round goes on. What comes next may be on its way.
func (w *Window) moves(now time.Duration) {
	w.asked = false
	w.interval /= 4
	w.nextProbe = now + max(w.interval, w.rtt.rto)
}

func (w *Window) send(now time.Duration, i uint32) Send {
	c := w.at(i)
	round, r := w.span(i)
	s := Send{Round: round, Chunk: r.id(i), Seq: i, Resend: c.sends > 0}
	c.sent = now
	c.sends = inc(c.sends)
	w.stats.Sent++
	if s.Resend {
		w.stats.Resends++
	}
	return s
}

// inc counts up to the end of its range.
func inc(n uint8) uint8 {
	if n < math.MaxUint8 {
		n++
	}
	return n
}

// Event says what an answer meant.
type Event uint8

const (
	// EventNone: an answer that changes nothing for the caller (old, repeated, for another worker, job or round).
	EventNone Event = iota
	// EventResult: the first RESULT of this chunk of a round under way. The caller takes its lanes; it must have
	// checked the tag and the shape before it called Handle.
	EventResult
	// EventDelivered: an ACK or WAIT told for the first time that the contribution is in.
	EventDelivered
	// EventRefused: a NACK for a chunk of a round under way that has no RESULT yet; its reason is in the header.
	EventRefused
	// EventForgotten: such a NACK says that the switch or a server does not have the job's plan (any more). The window
	// goes on asking, slowly.
	EventForgotten
)

// String returns the event's name.
func (e Event) String() string {
	return [...]string{"none", "result", "delivered", "refused", "forgotten"}[e]
}

// Handle takes the header of an answer that arrived at time now. It counts by job, epoch, round and chunk; a RESULT only
// with a full mask, or with a quorum, and then also for a chunk that was not sent yet and is not in it.
func (w *Window) Handle(now time.Duration, h *wire.Header) Event {
	switch h.Type {
	case wire.TypeResult:
	case wire.TypeAck:
		w.stats.Acks++
	case wire.TypeWait:
		w.stats.Waits++
	case wire.TypeNack:
		w.stats.Nacks++
	default:
		return EventNone
	}
	back := w.round - h.Round
	if h.Job != w.cfg.Job || back >= uint32(len(w.rounds)) {
		return EventNone
	}
	r := &w.rounds[uint32(len(w.rounds))-1-back]
	seq, ok := r.find(h.Chunk)
	if h.Epoch != r.epoch || !ok {
		return EventNone
	}
	c := w.at(seq)
	mine := h.Contributors>>w.cfg.Rank&1 != 0
	if c.state == finished || c.sends == 0 && (h.Type != wire.TypeResult || mine) {
		return EventNone
	}
	switch h.Type {
	case wire.TypeResult:
		if !w.Enough(h.Contributors) {
			return EventNone
		}
		w.stats.Results++
		w.known()
		w.result(now, seq, h)
		r.left--
		// The slowest rank has moved: what is held of this round is not any more, mostly.
		for c, ok := w.pop(&r.held, delivered); ok; c, ok = w.pop(&r.held, delivered) {
			w.again(c)
		}
		if h.Chunk == 0 {
			r.announced = h.NextEpoch
		}
		return EventResult
	case wire.TypeNack:
		switch {
		case !mine:
			return EventNone
		case h.Reason == wire.ReasonStale && w.cfg.Quorum == 0:
			// While all keep the rules, no aggregator goes on to a newer owner before this rank has the RESULT.
			return EventNone
		case h.Reason == wire.ReasonUnknownJob || h.Reason == wire.ReasonEpoch:
			w.forgotten(now, seq, c)
			return EventForgotten
		}
		return EventRefused
	}
	if w.cfg.Async {
		c.mask = 0 // ranks move on
	}
	c.mask |= h.Contributors & w.cfg.Ranks
	if !mine {
		return EventNone
	}
	if h.Type == wire.TypeAck {
		w.opened(seq)
	}
	w.known()
	if c.state == delivered || c.state == overdue {
		w.waits(now)
		return EventNone
	}
	if h.Type == wire.TypeWait {
		w.waits(now)
	} else {
		w.moves(now)
	}
	w.sample(now, h, c)
	w.landed(c)
	if w.cfg.Async && h.Type == wire.TypeWait {
		r.held.push(seq)
	}
	w.await(now, seq, w.cfg.Wait-time.Duration(h.SpreadUs)*time.Microsecond)
	return EventDelivered
}

// Enough reports whether a RESULT may have these contributors.
func (w *Window) Enough(ranks uint64) bool {
	if w.cfg.Async {
		return ranks&^w.cfg.Ranks == 0 && ranks>>w.cfg.Rank&1 != 0
	}
	return ranks == w.cfg.Ranks ||
		w.cfg.Quorum > 0 && ranks&^w.cfg.Ranks == 0 && bits.OnesCount64(ranks) >= w.cfg.Quorum
}

// forgotten has a chunk probed of which an aggregator does not know anything.
func (w *Window) forgotten(now time.Duration, i uint32, c *chunk) {
	if c.state == inFlight {
		w.flight--
	}
	if c.state != timedOut {
		c.state = timedOut
		w.silent.push(i)
	}
	w.blank = w.cfg.Async // others have a recovery, after which all is sent anew
	if w.interval == 0 {
		w.asked = true // one answer is enough
	}
	w.waits(now)
}

// known has all forgotten chunks sent again, since an aggregator knows one.
func (w *Window) known() {
	if !w.blank {
		return
	}
	w.blank = false
	for i, ok := w.pop(&w.silent, timedOut); ok; i, ok = w.pop(&w.silent, timedOut) {
		w.again(i)
	}
}

func (w *Window) result(now time.Duration, i uint32, h *wire.Header) {
	c := w.at(i)
	if c.state != unsent && c.state != delivered && c.state != overdue {
		w.sample(now, h, c)
		w.landed(c)
	}
	c.state = finished
	for ; !wire.SerialLess(i, w.newest); w.newest++ {
		switch j := w.newest; w.at(j).state {
		case delivered:
			if w.cfg.Async {
				break // held, see Handle
			}
			w.at(j).state = overdue
			w.at(j).due = now + w.rtt.rto
			w.polls.add(w.at(j).due, j)
		case timedOut:
			w.lose(now, j)
		}
	}
	w.moves(now)
	w.left--
	for w.in(w.first, finished) {
		w.first++
	}
	w.opened(i)
}

// opened notes that chunk i was answered, which makes the chunk Pool after it ready.
func (w *Window) opened(i uint32) {
	c := w.at(i)
	if c.open {
		return // as it is already
	}
	c.open = true
	if n := i + w.cfg.Pool; w.has(n) {
		w.ready.push(n)
	}
}

// landed counts the delivery of a chunk that was in flight or timed out.
func (w *Window) landed(c *chunk) {
	if c.state == inFlight {
		w.flight--
	}
	w.delivered++
	if w.delivered >= w.limit && w.limit < w.limitMax {
		w.delivered = 0
		w.limit++
	}
}

// sample learns from the first answer to chunk c.
func (w *Window) sample(now time.Duration, h *wire.Header, c *chunk) {
	switch {
	case c.alone:
		w.rtt.sample(now - c.sent)
		c.alone = false
	case h.Type == wire.TypeWait && c.sends == 2:
		// A WAIT answers a duplicate only. So both copies arrived, the timeout was one peer's slowness and not a loss,
		// and the WAIT measures the second copy's way.
		w.rtt.sample(now - c.sent)
		w.limit = max(w.limit, w.undo)
		w.undo = 0
	case c.sends > 1:
		// Which copy was answered is unknown (Karn).
	case h.Rank != w.cfg.Rank:
		// It waited for the last contributor, another one: no measure of the network.
	default:
		w.rtt.sample(now - c.sent)
	}
}

// Deadline returns the time at which Next must be asked again if nothing arrives before, or false when nothing is
// outstanding. It is asked after Next returned false.
func (w *Window) Deadline() (time.Duration, bool) {
	t, ok := w.timers.first(w, inFlight)
	earlier := func(at time.Duration) {
		if !ok || at < t {
			t, ok = at, true
		}
	}
	if w.cfg.Quorum == 0 || w.flight < w.limit { // else a timer makes room for a poll
		if at, some := w.polls.first(w, overdue); some {
			earlier(max(at, w.nextPoll))
		}
	}
	if w.silent.any(w, timedOut) {
		earlier(w.nextProbe)
	} else if at, some := w.probes.first(w, delivered); some {
		earlier(max(at, w.nextProbe))
	}
	return t, ok
}

// Done reports whether every RESULT of every round that has begun was taken.
func (w *Window) Done() bool { return w.left == 0 }

// Missing returns, for the oldest unfinished round, the ranks that any unfinished chunk is known to wait for (from WAIT
// and ACK masks; 0 when no aggregator has said anything), the first unfinished chunk and the number of unfinished
// chunks. Without such a round they are 0.
func (w *Window) Missing() (ranks uint64, first uint32, chunks int) {
	if w.Done() {
		return 0, 0, 0
	}
	_, r := w.span(w.first)
	for seq := w.first; seq != r.seq+r.chunks; seq++ {
		if c := w.at(seq); c.state != finished && c.mask != 0 {
			ranks |= w.cfg.Ranks &^ c.mask
		}
	}
	return ranks, r.id(w.first), int(r.left)
}

// Stats are a window's counts since its creation.
type Stats struct {
	Sent    uint64 // packets, resends included
	Resends uint64 // of them sent before
	Results uint64 // RESULTs taken
	Waits   uint64 // WAITs received
	Acks    uint64 // ACKs received
	Nacks   uint64 // NACKs received
}

// Stats returns the counts so far.
func (w *Window) Stats() Stats { return w.stats }
