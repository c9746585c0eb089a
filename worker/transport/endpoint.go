package transport

import (
	"bytes"
	"fmt"
	"math"
	"slices"
	"time"

	"xagg/agg"
	"xagg/recovery"
	"xagg/wire"
	"xagg/worker/scale"
)

// Config says whose end of which job an endpoint is.
type Config struct {
	Job       uint16 // id of the job's incarnation
	Epoch     uint16 // of the first Depth rounds, 1..65535
	Rank      int    // 0..Ranks-1
	Ranks     int    // 1..wire.MaxRanks
	Pool      uint32 // see agg.WindowConfig
	Depth     int    // rounds that may be under way; 0 = 1
	MaxChunks int    // of a round, at least 1: a longer vector takes several

	// Quorum, if not 0, is the least number of ranks that are enough for a RESULT, Wait how long aggregators keep a chunk open
	// for more, as far as is known, see [Endpoint.SetWait], and Rounds how many rounds servers keep for those who come later.
	Quorum int
	Wait   time.Duration
	Rounds int

	// Async is set where results are differences of running sums, and Staleness how many contributions a rank may be ahead
	// of the slowest.
	Async     bool
	Staleness int

	// Round and Seq say where the first all-reduce begins, see agg.WindowConfig, and AllReduces how many of the job's have
	// begun before: not 0 for a rank that comes back to a job. Returns is what recovery.Restart has.
	Round, Seq uint32
	AllReduces uint64
	Returns    []uint64

	// Observe, if set, is called after every round that has succeeded, in their order.
	Observe func(Round)
}

// Round is what an observer sees of a round: the integers that the network has summed.
type Round struct {
	Key      string
	Number   uint32
	Epoch    uint16
	Async    bool // the integers are a difference of two running sums
	Scout    bool // carried no lanes: it only found the largest magnitude of a tensor without history
	Modular  bool // integers were sent as they are
	Exponent int8 // value = lane * 2^-exponent
	Offset   int  // of the first lane in the tensor: long ones take several rounds
	Sum      []int32
	Mask     uint64   // contributors to every chunk
	Masks    []uint64 // contributors by chunk, valid during the call; nil where Mask says it all
	// Additions is the number of contributions in the integers by chunk, valid during the call; nil where Masks tell.
	Additions []uint32
}

// Info describes an all-reduce that has succeeded.
type Info struct {
	Round     uint32 // number of its first round
	Rounds    int    // rounds that it took, a scout included
	Epoch     uint16 // of its last round
	Exponent  int8   // value = lane * 2^-exponent; 0 for int32
	Mask      uint64 // contributors to every chunk
	Least     int    // contributors of the chunk that had the fewest, and
	Most      int    // of the one that had the most
	Late      int    // chunks without this worker: its values go into the tensor's next all-reduce
	Additions int    // async: contributions in the result, this worker's among them, of the chunk that had the most
	Behind    int    // rounds by which others were known to be ahead when it was done
	Path      string // who closed its chunks: "switch", "server" or "both"
	Chunks    int    // of all its rounds
	Packets   uint64 // sent, resends included
	Resends   uint64
	Clipped   int // values of this worker that did not fit; the rest goes into the tensor's next all-reduce
	Saturated int // chunks in which any worker clipped; in an async job, for the first time under the epoch
	// Last is the rank that came last in the chunk where everybody else waited longest for it, for Blocked. Spread is
	// the longest time from a chunk's first to its last arrival. Both are measured by the aggregator.
	Last     int
	Spread   time.Duration
	Blocked  time.Duration
	Duration time.Duration
}

// Stats are an endpoint's counts since it was made.
type Stats struct {
	agg.Stats
	Malformed uint64 // payloads received that are no packet for a worker
	Late      uint64 // answers that were not needed any more
	Early     uint64 // RESULTs of rounds that this worker had not begun, and took when it did
	Wrong     uint64 // answers that were refused: another shape, a tag that does not fit, a NACK
}

// Endpoint is a worker's end of a job. All-reduces begin with [Endpoint.Begin] or [Endpoint.BeginInt32], as many at a
// time as the caller likes, and end in that order, each when its [Call] is done; meanwhile the caller sends what
// [Endpoint.Due] asks for, hands in what it receives with [Endpoint.Take], and asks Due again at [Endpoint.Deadline] at
// the latest. Due alone decides what is sent, Take alone what is taken. Time is a time.Duration since an origin of the
// caller's; it must not run backwards. After an error the endpoint is of no further use.
//
// The rounds of all calls are one sequence, the same on all ranks: those of a call begin after those of the call before
// it. So a call that has to wait, for the call before it of the same key or for its own scout, holds up all that come
// after it. What of the sequence is under way, at most Config.Depth rounds, the endpoint calls live.
type Endpoint struct {
	cfg     Config
	ranks   uint64 // all ranks of the job
	parts   int    // contributions that a result may be the sum of
	limit   int32  // of a lane's magnitude
	window  *agg.Window
	tensors map[tensorKey]*tensor

	calls []*Call  // that are not done, in their order
	begun int      // so many of them have begun all of their rounds
	done  uint64   // all-reduces of the job that are done, or were before this worker's first
	live  []*round // that have begun and are not accounted for, ascending
	kept  []*round // finished, ascending: their RESULTs may be asked for (docs/protocol.md, "Recovery")
	free  []*round // for their memory

	frozen bool                        // between Freeze and Resume
	finals []recovery.Held             // of rounds that have not begun, ascending: chunks whose RESULT was handed over
	given  map[recovery.ChunkID][]byte // those
	// returns are the all-reduces that ranks came back for, ascending: where one of them begins all scales are forgotten.
	returns []uint64
	idle    time.Duration // since when no call is under way, where none is

	scouts uint32 // async: scouts that have begun
	placed uint32 // async: chunks of all tensors so far

	// early are RESULTs of rounds that this worker has not begun, by round: of a quorum job in which it is behind. They are not
	// sent again, and their chunks need not be sent.
	early   map[uint32][][]byte
	earlier int // so many RESULTs are in early

	last    Info   // of the call that was done last
	newest  uint32 // number of the newest round of which a RESULT was seen
	answer  wire.Packet
	clipped []int32 // integers of a chunk within the limit
	stats   Stats   // but for the window's own
	// unknown is why an aggregator refused the last contribution that was answered at all, if it did because it has no
	// plan for it: it has lost its memory.
	unknown wire.Reason
}

// Call is an all-reduce.
type Call struct {
	key     string
	tensor  *tensor
	vec     vector // the whole of it
	amax    uint8  // of this worker's values
	next    int    // offset of the round to begin next
	scout   bool   // its scout is under way
	started bool   // its first round has begun
	rounds  int    // under way
	done    bool
	began   time.Duration
	end     uint32 // number of its last round, once it is done
	info    Info
	lasts   []Last // by rank
	held    Held
}

// Held is how long aggregators held an all-reduce's chunks in slots, as they measured it, summed over the chunks.
type Held struct {
	Incomplete time.Duration // from a chunk's first contribution to its last
	Blocked    time.Duration // of that, while all but the last rank had given theirs
}

// Done reports whether the all-reduce is done: its result is in its data.
func (c *Call) Done() bool { return c.done }

// Info describes the all-reduce once it is done.
func (c *Call) Info() Info { return c.info }

// Behind returns by how many rounds others are known to be ahead of a call that is done. Whoever has taken all that has arrived
// knows best.
func (e *Endpoint) Behind(c *Call) int { return int(max(0, int32(e.newest-c.end))) }

// Lasts returns, by rank, for what of the all-reduce the others waited for it, once it is done.
func (c *Call) Lasts() []Last { return c.lasts }

// Held returns how long aggregators held the chunks of the all-reduce, once it is done.
func (c *Call) Held() Held { return c.held }

// Last is what others waited for a rank, as the aggregators measured it.
type Last struct {
	Chunks  int           // on which it was the last
	Blocked time.Duration // how long all others had waited for it, in the chunk where that was longest
}

func (l *Last) add(m Last) {
	l.Chunks += m.Chunks
	l.Blocked = max(l.Blocked, m.Blocked)
}

// tensorKey names a tensor. What one key means for float32 and for int32 has nothing to do with each other.
type tensorKey struct {
	key     string
	modular bool
}

// tensor is what an endpoint remembers of a tensor between its all-reduces.
type tensor struct {
	len  int
	user *Call // the call of it that is under way
	amax uint8 // of the RESULTs of the last all-reduce; 0 = not known, or it was all zero
	lost bool  // amax means nothing any more: a rank came back since that all-reduce began
	// What RESULTs lacked of this worker's values: what was clipped, and with a quorum what came too late.
	floats []rest[float32]
	ints   []rest[int32]
	sums   sums // async
}

// sums are the running sums of a tensor, as far as a worker knows them. Its chunks are the job's from base on.
type sums struct {
	base     uint32
	epoch    uint16 // under which they began at 0; 0 = not yet
	clock    uint32 // this worker's contributions under the epoch
	scaled   bool   // the exponent is fixed, for the epoch
	exponent int8
	lanes    []int32
	chunks   []sum
}

// sum is what beside the lanes the last RESULT said of a chunk.
type sum struct {
	tag       [2]uint32
	additions uint32
	saturated bool // some worker has clipped, which the running sum does not forget
}

type rest[T float32 | int32] struct {
	index int
	value T
}

// New returns an endpoint before its first all-reduce. It panics if the configuration is out of range.
func New(cfg Config) *Endpoint {
	if cfg.Ranks < 1 || cfg.Ranks > wire.MaxRanks || cfg.Rank < 0 || cfg.Rank >= cfg.Ranks || cfg.MaxChunks < 1 ||
		cfg.Depth < 0 || cfg.Quorum < 0 || cfg.Quorum > cfg.Ranks ||
		cfg.Staleness < 0 || cfg.Async && cfg.Quorum > 0 {
		panic(fmt.Sprintf("transport: new endpoint: rank %d of %d with %d chunks, depth %d and quorum %d",
			cfg.Rank, cfg.Ranks, cfg.MaxChunks, cfg.Depth, cfg.Quorum))
	}
	cfg.Depth = max(cfg.Depth, 1)
	all := ^uint64(0) >> (wire.MaxRanks - cfg.Ranks)
	parts := cfg.Ranks
	if cfg.Async {
		parts *= 2*cfg.Staleness + 3
	}
	return &Endpoint{
		cfg:   cfg,
		ranks: all,
		parts: parts,
		limit: scale.Limit(parts),
		window: agg.NewWindow(agg.WindowConfig{
			Job: cfg.Job, Epoch: cfg.Epoch, Rank: uint8(cfg.Rank), Ranks: all, Pool: cfg.Pool, Depth: cfg.Depth,
			Round: cfg.Round, Seq: cfg.Seq, Quorum: cfg.Quorum, Wait: cfg.Wait,
			Async: cfg.Async,
		}),
		newest:  cfg.Round - 1,
		done:    cfg.AllReduces,
		returns: cfg.Returns,
		tensors: map[tensorKey]*tensor{},
		given:   map[recovery.ChunkID][]byte{},
	}
}

// Begin begins an all-reduce of float32 values at time now: data is replaced by the sum of all ranks' data, or with a
// quorum by the mean of those that were in time, chunk by chunk, and must not be touched before the call is done. key
// names the tensor, whose scale is kept from one all-reduce to the next, and what was left out of it: clipped remainders
// and the values of chunks that went without this worker. In an async job it is replaced by the sum of all contributions
// to the tensor that were added since this worker's last all-reduce of it. A NaN or Inf is a [NonFiniteError].
func (e *Endpoint) Begin(now time.Duration, key string, data []float32) (*Call, error) {
	t, err := e.tensor(tensorKey{key: key}, len(data))
	if err != nil {
		return nil, err
	}
	amax, bad := scale.Amax(data)
	if bad >= 0 {
		return nil, &NonFiniteError{Rank: e.cfg.Rank, Key: key, Index: bad, Value: data[bad]}
	}
	return e.begin(now, &Call{key: key, tensor: t, vec: vector{f32: data}, amax: amax})
}

// BeginInt32 begins an all-reduce of integers at time now, like [Endpoint.Begin] but without scaling, and with a quorum
// too it is the sum. A sum beyond int32 is an [IntegrityError].
func (e *Endpoint) BeginInt32(now time.Duration, key string, data []int32) (*Call, error) {
	t, err := e.tensor(tensorKey{key, true}, len(data))
	if err != nil {
		return nil, err
	}
	return e.begin(now, &Call{key: key, tensor: t, vec: vector{i32: data, modular: true}})
}

// tensor returns the tensor of a key, which has so many values. Integers of which nothing is kept need not have as many
// as the last time.
func (e *Endpoint) tensor(key tensorKey, n int) (*tensor, error) {
	t, ok := e.tensors[key]
	if !ok {
		t = &tensor{}
		if e.cfg.Async {
			chunks := chunksOf(n)
			if e.placed+chunks > uint32(e.cfg.MaxChunks) {
				return nil, fmt.Errorf("%d chunks with those of the tensors before, but the job was created for %d",
					e.placed+chunks, e.cfg.MaxChunks)
			}
			t.sums.base = e.placed
			e.placed += chunks
		}
		e.tensors[key] = t
	}
	if ok && t.len != n && (!key.modular || e.cfg.Quorum > 0 || e.cfg.Async) {
		return nil, fmt.Errorf("%d values, but the tensor had %d before: use one key per tensor", n, t.len)
	}
	t.len = n
	return t, nil
}

func (e *Endpoint) begin(now time.Duration, c *Call) (*Call, error) {
	c.began = now
	e.calls = append(e.calls, c)
	if err := e.advance(now); err != nil {
		return nil, err
	}
	return c, nil
}

// advance begins the rounds that may begin.
func (e *Endpoint) advance(now time.Duration) error {
	for !e.frozen && e.begun < len(e.calls) && e.window.MayBegin() {
		c := e.calls[e.begun]
		if !c.started {
			if c.tensor.user != nil {
				return nil
			}
			if err := e.start(c); err != nil {
				return err
			}
		}
		switch {
		case c.scout && c.rounds > 0:
			return nil
		case c.scout:
			if err := e.beginRound(now, c, vector{scout: true}, 0); err != nil {
				return err
			}
		default:
			offset, to := c.next, min(c.next+e.longest(), c.vec.len())
			if c.next = to; to == c.vec.len() {
				e.begun++
			}
			if err := e.beginRound(now, c, c.vec.slice(offset, to), offset); err != nil {
				return err
			}
		}
		e.account(now) // a round may have begun with all its RESULTs
	}
	return nil
}

// start prepares a call's first round. The call before it of the same tensor is done.
func (e *Endpoint) start(c *Call) error {
	t := c.tensor
	c.started = true
	t.user = c
	if err := e.addResidual(c); err != nil {
		return err
	}
	if e.cfg.Async {
		e.startAsync(c)
		return nil
	}
	if slices.Contains(e.returns, e.done+uint64(e.begun)) {
		for _, t := range e.tensors {
			t.lost = true
		}
	}
	if c.vec.modular {
		return nil
	}
	if t.lost {
		t.amax, t.lost = 0, false
	}
	// Nothing is known of a tensor's scale before its first all-reduce and after one of zeros.
	if c.scout = t.amax == 0; !c.scout {
		e.scaled(c)
	}
	return nil
}

// addResidual adds to a call's data what the RESULTs before lacked, and forgets it.
func (e *Endpoint) addResidual(c *Call) error {
	t := c.tensor
	for _, r := range t.ints {
		sum := int64(c.vec.i32[r.index]) + int64(r.value)
		if c.vec.i32[r.index] = int32(sum); int64(int32(sum)) != sum {
			return fmt.Errorf("value %d becomes %d with what earlier rounds went without: more than int32 holds", r.index, sum)
		}
	}
	t.ints = t.ints[:0]
	if len(t.floats) == 0 {
		return nil
	}
	data := c.vec.f32
	for _, r := range t.floats {
		data[r.index] += r.value
		if math.IsInf(float64(data[r.index]), 0) {
			return &NonFiniteError{Rank: e.cfg.Rank, Key: c.key, Index: r.index, Value: data[r.index], Residual: true}
		}
	}
	t.floats = t.floats[:0]
	c.amax, _ = scale.Amax(data)
	return nil
}

// keep keeps the values of a vector, which lies at an offset of the tensor, for the next all-reduce.
func (t *tensor) keep(v vector, offset int) {
	for i, x := range v.f32 {
		if x != 0 {
			t.floats = append(t.floats, rest[float32]{offset + i, x})
		}
	}
	for i, x := range v.i32 {
		if x != 0 {
			t.ints = append(t.ints, rest[int32]{offset + i, x})
		}
	}
}

// hear takes a RESULT of a round that this worker has not begun: others are ahead.
func (e *Endpoint) hear(payload []byte) {
	p := &e.answer
	if p.Decode(payload) != nil || !e.window.Enough(p.Contributors) || !p.TagOK() {
		e.stats.Wrong++
		return
	}
	if wire.SerialLess(e.newest, p.Round) {
		e.newest = p.Round
	}
	e.keepEarly(payload)
}

// startAsync prepares a call's first round in an async job.
func (e *Endpoint) startAsync(c *Call) {
	s := &c.tensor.sums
	if epoch := e.window.Epoch(); s.epoch != epoch {
		*s = sums{base: s.base, epoch: epoch, scaled: c.vec.modular || c.vec.len() == 0,
			lanes: make([]int32, c.vec.len()), chunks: make([]sum, chunksOf(c.vec.len()))}
	}
	c.scout = !s.scaled
	c.info.Exponent = s.exponent
}

// chunksOf returns the number of chunks of a vector.
func chunksOf(n int) uint32 { return uint32(max(1, (n+wire.MaxLanes-1)/wire.MaxLanes)) }

// zerosAmax stands for the largest magnitude of an async tensor whose first vectors are zero on all ranks: its scale stays,
// and that of zeros would round everything that comes later away.
const zerosAmax = 127

// scaled fixes the exponent of a call from what is known of the tensor; what its RESULTs say is for the next.
func (e *Endpoint) scaled(c *Call) {
	amax := c.tensor.amax
	if e.cfg.Async && amax == 0 {
		amax = zerosAmax
	}
	c.info.Exponent = scale.Exponent(amax, e.parts)
	c.tensor.amax = 0
	c.tensor.sums.exponent, c.tensor.sums.scaled = c.info.Exponent, true
}

// longest returns the number of lanes that the job's longest round has room for.
func (e *Endpoint) longest() int { return e.cfg.MaxChunks * wire.MaxLanes }

// beginRound begins a round of a call: that of vec, which lies at an offset of the call's vector.
func (e *Endpoint) beginRound(now time.Duration, c *Call, vec vector, offset int) error {
	r := e.newRound()
	if err := r.begin(now, c, vec, offset); err != nil {
		return err
	}
	if c.rounds++; c.info.Rounds == 0 && c.rounds == 1 {
		c.info.Round = r.number
	}
	e.live = append(e.live, r)
	if err := e.receiveGiven(r); err != nil {
		return err
	}
	return e.takeEarly(now, r)
}

// maxEarly bounds how many RESULTs are kept of rounds that have not begun: 37 MB.
const maxEarly = 1 << 15

// keepEarly keeps the RESULT under examination, of a round that has not begun.
func (e *Endpoint) keepEarly(payload []byte) {
	p := &e.answer
	if ahead := p.Round - e.window.NextRound(); ahead >= uint32(e.cfg.Rounds) || e.earlier == maxEarly {
		return // asked for when it is time
	}
	if e.early == nil {
		e.early = map[uint32][][]byte{}
	}
	e.early[p.Round] = append(e.early[p.Round], bytes.Clone(payload))
	e.earlier++
}

// takeEarly takes the RESULTs that were kept of a round that has begun.
func (e *Endpoint) takeEarly(now time.Duration, r *round) error {
	kept := e.early[r.number]
	delete(e.early, r.number)
	e.earlier -= len(kept)
	for _, payload := range kept {
		p := &e.answer
		if err := wire.DecodeHeader(payload, &p.Header); err != nil {
			return fmt.Errorf("decode result: %w", err) // it was decoded before
		}
		if p.Chunk >= r.chunks || r.taken[p.Chunk] || p.Epoch != r.header.Epoch {
			e.stats.Late++
			continue
		}
		e.stats.Early++
		if err := r.take(now, payload); err != nil {
			return err
		}
	}
	return nil
}

// newRound returns a round whose memory may have been another's.
func (e *Endpoint) newRound() *round {
	if n := len(e.free); n > 0 {
		r := e.free[n-1]
		e.free = e.free[:n-1]
		return r
	}
	return &round{e: e}
}

// Due appends the payloads that are to be sent at time now to batch, up to its capacity, and returns it. They count as
// sent; the caller sends them before the next call of a method, which may change them. As long as the batch was filled
// there may be more.
func (e *Endpoint) Due(now time.Duration, batch [][]byte) [][]byte {
	for !e.frozen && len(batch) < cap(batch) {
		s, ok := e.window.Next(now)
		if !ok {
			break
		}
		batch = append(batch, e.round(s.Round).packet(s))
	}
	return batch
}

// Deadline returns the time at which Due must be asked again if nothing arrives before; false when nothing is
// outstanding. It is asked after Due has returned all that was due.
func (e *Endpoint) Deadline() (time.Duration, bool) {
	if e.frozen || len(e.live) == 0 {
		return 0, false
	}
	return e.window.Deadline()
}

// round returns the round under way with the given number, or nil.
func (e *Endpoint) round(number uint32) *round {
	if len(e.live) == 0 {
		return nil
	}
	if i := number - e.live[0].number; i < uint32(len(e.live)) {
		return e.live[i]
	}
	return nil
}

// find returns the round under way that an answer is for, or nil.
func (e *Endpoint) find(h *wire.Header) *round {
	if h.Job != e.cfg.Job {
		return nil
	}
	if !e.cfg.Async {
		return e.round(h.Round)
	}
	for _, r := range e.live {
		if (h.Flags^r.header.Flags)&wire.FlagAsync == 0 && h.Round == r.header.Round && h.Chunk-r.header.Chunk < r.chunks {
			return r
		}
	}
	return nil
}

// Take handles a payload that arrived at time now from the service address. It does not keep it. An error, an
// [IntegrityError] or a [RefusedError], ends the all-reduces.
func (e *Endpoint) Take(now time.Duration, payload []byte) error {
	if e.frozen {
		return nil
	}
	p := &e.answer
	if err := wire.DecodeHeader(payload, &p.Header); err != nil {
		e.stats.Malformed++
		return nil
	}
	r := e.find(&p.Header)
	if r == nil && e.cfg.Quorum > 0 && p.Job == e.cfg.Job && p.Type == wire.TypeResult && !wire.SerialLess(p.Round, e.window.NextRound()) {
		e.hear(payload)
		return nil
	}
	if r == nil || p.Chunk-r.header.Chunk >= r.chunks || r.taken[p.Chunk-r.header.Chunk] || wire.SerialLess16(p.Epoch, r.header.Epoch) {
		e.stats.Late++
		return nil
	}
	if err := r.take(now, payload); err != nil {
		return err
	}
	e.account(now)
	return e.advance(now)
}

// account accounts for the oldest rounds, as far as they have ended.
func (e *Endpoint) account(now time.Duration) {
	for len(e.live) > 0 && e.live[0].left == 0 {
		e.finishRound(now)
	}
}

// finishRound accounts for the oldest round, which has ended.
func (e *Endpoint) finishRound(now time.Duration) {
	r := e.live[0]
	e.live = e.live[:copy(e.live, e.live[1:])]
	if e.cfg.Async {
		e.free = append(e.free, r) // nobody else has its RESULTs to take
	} else {
		e.kept = append(e.kept, r)
	}
	c := r.call
	c.rounds--
	i, t := &c.info, &r.total
	i.Rounds++
	i.Epoch = r.header.Epoch
	i.Chunks += int(r.chunks)
	i.Packets += t.packets
	i.Resends += t.resends
	i.Clipped += t.clipped
	i.Saturated += t.saturated
	if !r.vec.scout {
		c.count(t)
		if c.lasts == nil {
			c.lasts = make([]Last, e.cfg.Ranks)
		}
		for rank := range r.lasts {
			c.lasts[rank].add(r.lasts[rank])
		}
		c.held.Incomplete += time.Duration(t.held) * time.Microsecond
		c.held.Blocked += time.Duration(t.alone) * time.Microsecond
	}
	i.Spread = max(i.Spread, microseconds(t.spread))
	if b := microseconds(t.blocked); b >= i.Blocked {
		i.Last, i.Blocked = int(t.last), b
	}
	if e.cfg.Observe != nil {
		e.cfg.Observe(Round{
			Key:       c.key,
			Number:    r.number,
			Epoch:     r.header.Epoch,
			Async:     r.async(),
			Scout:     r.vec.scout,
			Modular:   r.vec.modular,
			Exponent:  r.header.Exponent,
			Offset:    r.offset,
			Sum:       r.sum,
			Mask:      t.mask,
			Masks:     r.masks,
			Additions: r.additions,
		})
	}
	c.tensor.amax = max(c.tensor.amax, t.amax)
	switch {
	case r.vec.scout:
		c.scout = false
		e.scaled(c)
	case c.rounds == 0 && c.next == c.vec.len():
		i.Duration = now - c.began
		c.end = r.number
		i.Behind = e.Behind(c)
		c.done = true
		e.done++
		c.tensor.user = nil
		e.idle = now
		e.last = c.info
		e.calls = e.calls[:copy(e.calls, e.calls[1:])]
		e.begun--
	}
	r.call, r.vec = nil, vector{}
}

// count adds the contributors of a round.
func (c *Call) count(t *tally) {
	i := &c.info
	if i.Most == 0 {
		i.Mask, i.Least = t.mask, t.least
	}
	i.Mask &= t.mask
	i.Least, i.Most = min(i.Least, t.least), max(i.Most, t.most)
	i.Late += t.late
	i.Additions = max(i.Additions, int(t.additions))
	path := "both"
	switch uint32(t.server) {
	case 0:
		path = "switch"
	case t.chunks:
		path = "server"
	}
	if i.Path == "" {
		i.Path = path
	} else if i.Path != path {
		i.Path = "both"
	}
}

// forget gives up the RESULTs of rounds that nobody can lack any more: of those that are Depth or more before one that
// has a RESULT, for that needed all ranks; with a quorum, where it did not, of those that servers do not keep either.
func (e *Endpoint) forget(newest uint32) {
	keep := uint32(e.cfg.Depth)
	if e.cfg.Quorum > 0 {
		keep = uint32(e.cfg.Rounds)
	}
	n := 0
	for n < len(e.kept) && newest-e.kept[n].number >= keep {
		n++
	}
	if n > 0 {
		e.free = append(e.free, e.kept[:n]...)
		e.kept = e.kept[:copy(e.kept, e.kept[n:])]
	}
}

func microseconds(us uint32) time.Duration { return time.Duration(us) * time.Microsecond }

// Done reports whether no all-reduce is under way.
func (e *Endpoint) Done() bool { return len(e.calls) == 0 }

// Info describes the all-reduce that was done last.
func (e *Endpoint) Info() Info { return e.last }

// Residual returns what the results of a tensor of integers lack of this worker's values so far, value by value: what goes
// into the tensor's next all-reduce. It is nil for a tensor that has had none.
func (e *Endpoint) Residual(key string) []int32 {
	t := e.tensors[tensorKey{key, true}]
	if t == nil {
		return nil
	}
	values := make([]int32, t.len)
	for _, r := range t.ints {
		values[r.index] += r.value
	}
	return values
}

// SetWait sets how long aggregators keep a chunk of a job with a quorum open for more, by the newest plan: what was planned already
// stays.
func (e *Endpoint) SetWait(wait time.Duration) { e.window.SetWait(wait) }

// Epoch returns an epoch: every round of this worker under older ones is finished, and no other will begin.
func (e *Endpoint) Epoch() uint16 { return e.window.Epoch() }

// Stats returns the counts so far.
func (e *Endpoint) Stats() Stats {
	s := e.stats
	s.Stats = e.window.Stats()
	return s
}

// Overdue describes the oldest all-reduce under way at time now as one that has taken too long, as far as packets tell:
// whom it waits for and where. There must be one.
func (e *Endpoint) Overdue(now time.Duration) *DeadlineError {
	d := &DeadlineError{Rank: e.cfg.Rank, Unknown: e.unknown, Waited: now - e.calls[0].began}
	if len(e.live) > 0 {
		r := e.live[0]
		missing, first, left := e.window.Missing()
		d.Round, d.Chunk, d.Left, d.Chunks = r.header.Round, r.header.Chunk+first, left, int(r.chunks)
		d.Missing, d.Server = maskRanks(missing), r.server[first]
	}
	return d
}
