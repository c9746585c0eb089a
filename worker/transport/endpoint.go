package transport

import (
	"fmt"
	"math"
	"slices"
	"time"

	"xagg/agg"
	"xagg/wire"
	"xagg/worker/scale"
)

// Config says whose end of which job an endpoint is.
type Config struct {
	Job       uint16 // id of the job's incarnation
	Epoch     uint16 // of the first round, 1..65535
	Rank      int    // 0..Ranks-1
	Ranks     int    // 1..wire.MaxRanks
	Pool      uint32 // see agg.WindowConfig
	MaxChunks int    // of a round, at least 1: a longer vector takes several
	// Observe, if set, is called after every round that has succeeded.
	Observe func(Round)
}

// Round is what an observer sees of a round: the integers that the network has summed.
type Round struct {
	Key      string
	Number   uint32
	Epoch    uint16
	Scout    bool // carried no lanes: it only found the largest magnitude of a tensor without history
	Modular  bool // integers were sent as they are
	Exponent int8 // value = lane * 2^-exponent
	Offset   int  // of the first lane in the tensor: long ones take several rounds
	Sum      []int32
	Mask     uint64 // contributors
}

// Info describes an all-reduce that has succeeded.
type Info struct {
	Round     uint32 // number of its first round
	Rounds    int    // rounds that it took, a scout included
	Epoch     uint16 // of its last round
	Exponent  int8   // value = lane * 2^-exponent; 0 for int32
	Mask      uint64 // contributors
	Chunks    int    // of all its rounds
	Packets   uint64 // sent, resends included
	Resends   uint64
	Clipped   int // values of this worker that did not fit; the rest goes into the tensor's next all-reduce
	Saturated int // chunks in which any worker clipped
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
	Wrong     uint64 // answers that were refused: another shape, a tag that does not fit, a NACK
}

// Endpoint is a worker's end of a job. An all-reduce begins with [Endpoint.Begin] or [Endpoint.BeginInt32] and is under
// way until [Endpoint.Done]; meanwhile the caller sends what [Endpoint.Due] asks for, hands in what it receives with
// [Endpoint.Take], and asks Due again at [Endpoint.Deadline] at the latest. Time is a time.Duration since an origin of
// the caller's; it must not run backwards. After an error the endpoint is of no further use.
type Endpoint struct {
	round     round
	maxChunks int
	observe   func(Round)
	tensors   map[string]*tensor

	// The all-reduce under way.
	key    string
	tensor *tensor // nil for integers
	vec    vector  // the whole of it
	amax   uint8   // of this worker's values
	offset int     // of the round under way in it
	began  time.Duration
	before agg.Stats
	info   Info
	done   bool
	sum    []int32 // for the observer
}

// tensor is what an endpoint remembers of a float32 tensor between its all-reduces.
type tensor struct {
	len      int
	amax     uint8  // of the RESULTs of the last all-reduce; 0 = not known, or it was all zero
	residual []rest // what was clipped
}

type rest struct {
	index int
	value float32
}

// New returns an endpoint before its first all-reduce. It panics if the configuration is out of range.
func New(cfg Config) *Endpoint {
	if cfg.Ranks < 1 || cfg.Ranks > wire.MaxRanks || cfg.Rank < 0 || cfg.Rank >= cfg.Ranks || cfg.MaxChunks < 1 {
		panic(fmt.Sprintf("transport: new endpoint: rank %d of %d with %d chunks", cfg.Rank, cfg.Ranks, cfg.MaxChunks))
	}
	all := ^uint64(0) >> (wire.MaxRanks - cfg.Ranks)
	return &Endpoint{
		round: round{
			window: agg.NewWindow(agg.WindowConfig{
				Job: cfg.Job, Epoch: cfg.Epoch, Rank: uint8(cfg.Rank), Ranks: all, Pool: cfg.Pool,
			}),
			ranks: all,
			limit: scale.Limit(cfg.Ranks),
			header: wire.Header{
				Type: wire.TypeGrad, Job: cfg.Job, Rank: uint8(cfg.Rank), Contributors: 1 << cfg.Rank,
			},
		},
		maxChunks: cfg.MaxChunks,
		observe:   cfg.Observe,
		tensors:   map[string]*tensor{},
		done:      true,
	}
}

// Begin begins an all-reduce of float32 values at time now: data is replaced by the sum of all ranks' data, and must
// not be touched before the all-reduce is done. key names the tensor, whose scale and clipped remainders are kept from
// one all-reduce to the next. A NaN or Inf is a [NonFiniteError]. The all-reduce before must be done.
func (e *Endpoint) Begin(now time.Duration, key string, data []float32) error {
	e.mustBeDone()
	t, ok := e.tensors[key]
	if !ok {
		t = &tensor{len: len(data)}
		e.tensors[key] = t
	}
	if t.len != len(data) {
		return fmt.Errorf("%d values, but the tensor had %d before: use one key per tensor", len(data), t.len)
	}
	own, bad := scale.Amax(data)
	if bad < 0 && len(t.residual) > 0 {
		if err := e.addResidual(key, t, data); err != nil {
			return err
		}
		own, bad = scale.Amax(data)
	}
	if bad >= 0 {
		return &NonFiniteError{Rank: e.rank(), Key: key, Index: bad, Value: data[bad]}
	}
	e.begin(now, key, t, vector{f32: data}, own)
	// Nothing is known of a tensor's scale before its first all-reduce and after one of zeros.
	if t.amax == 0 {
		e.beginRound(now, vector{scout: true})
		return nil
	}
	e.scaled()
	e.beginNext(now, 0)
	return nil
}

// BeginInt32 begins an all-reduce of integers at time now, like [Endpoint.Begin] but without scaling. A sum beyond
// int32 is an [IntegrityError].
func (e *Endpoint) BeginInt32(now time.Duration, key string, data []int32) {
	e.mustBeDone()
	e.begin(now, key, nil, vector{i32: data, modular: true}, 0)
	e.beginNext(now, 0)
}

func (e *Endpoint) mustBeDone() {
	if !e.done {
		panic(fmt.Sprintf("transport: begin all-reduce: round %d is under way", e.round.header.Round))
	}
}

func (e *Endpoint) begin(now time.Duration, key string, t *tensor, vec vector, amax uint8) {
	e.key, e.tensor, e.vec, e.amax, e.offset = key, t, vec, amax, 0
	e.began, e.before = now, e.round.window.Stats()
	e.info, e.done = Info{}, false
	e.round.clip = func(i int, value float32) {
		t.residual = append(t.residual, rest{e.offset + i, value})
	}
}

// addResidual adds to data what was clipped before, and forgets it.
func (e *Endpoint) addResidual(key string, t *tensor, data []float32) error {
	for _, r := range t.residual {
		data[r.index] += r.value
		if math.IsInf(float64(data[r.index]), 0) {
			return &NonFiniteError{Rank: e.rank(), Key: key, Index: r.index, Value: data[r.index], Residual: true}
		}
	}
	t.residual = t.residual[:0]
	return nil
}

// scaled fixes the exponent of the all-reduce from what is known of the tensor; what its RESULTs say is for the next.
func (e *Endpoint) scaled() {
	e.info.Exponent = scale.Exponent(e.tensor.amax, e.ranks())
	e.tensor.amax = 0
}

// beginNext begins the round of the vector's part from offset on.
func (e *Endpoint) beginNext(now time.Duration, offset int) {
	e.offset = offset
	e.beginRound(now, e.vec.slice(offset, min(offset+e.longest(), e.vec.len())))
}

// longest returns the number of lanes that the job's longest round has room for.
func (e *Endpoint) longest() int { return e.maxChunks * wire.MaxLanes }

func (e *Endpoint) beginRound(now time.Duration, vec vector) {
	r := &e.round
	r.sum = nil
	if e.observe != nil {
		e.sum = slices.Grow(e.sum[:0], vec.len())[:vec.len()]
		r.sum = e.sum
	}
	r.begin(now, vec, e.info.Exponent, e.amax)
	if e.info.Rounds == 0 {
		e.info.Round = r.header.Round
	}
}

// Due appends the payloads that are to be sent at time now to batch, up to its capacity, and returns it. They count as
// sent; the caller sends them before the next call of a method, which may change them. As long as the batch was filled
// there may be more.
func (e *Endpoint) Due(now time.Duration, batch [][]byte) [][]byte {
	if e.done {
		return batch
	}
	return e.round.due(now, batch)
}

// Deadline returns the time at which Due must be asked again if nothing arrives before; false when nothing is
// outstanding. It is asked after Due has returned all that was due.
func (e *Endpoint) Deadline() (time.Duration, bool) {
	if e.done {
		return 0, false
	}
	return e.round.window.Deadline()
}

// Take handles a payload that arrived at time now from the service address. It does not keep it. An error, an
// [IntegrityError] or a [RefusedError], ends the all-reduce.
func (e *Endpoint) Take(now time.Duration, payload []byte) error {
	if err := e.round.take(now, payload); err != nil {
		return err
	}
	if !e.done && e.round.window.Done() {
		e.finishRound(now)
	}
	return nil
}

// finishRound accounts for the round that has ended, and begins the next if there is one.
func (e *Endpoint) finishRound(now time.Duration) {
	r := &e.round
	i, t := &e.info, &r.total
	i.Rounds++
	i.Epoch = r.header.Epoch
	i.Chunks += int(r.chunks)
	i.Clipped += t.clipped
	i.Saturated += t.saturated
	i.Spread = max(i.Spread, microseconds(t.spread))
	if b := microseconds(t.blocked); b >= i.Blocked {
		i.Last, i.Blocked = int(t.last), b
	}
	if e.observe != nil {
		e.observe(Round{
			Key:      e.key,
			Number:   r.header.Round,
			Epoch:    r.header.Epoch,
			Scout:    r.vec.scout,
			Modular:  r.vec.modular,
			Exponent: r.header.Exponent,
			Offset:   e.offset,
			Sum:      r.sum,
			Mask:     r.ranks,
		})
	}
	if e.tensor != nil {
		e.tensor.amax = max(e.tensor.amax, t.amax)
	}
	if r.vec.scout {
		e.scaled()
		e.beginNext(now, 0)
		return
	}
	if next := e.offset + r.vec.len(); next < e.vec.len() {
		e.beginNext(now, next)
		return
	}
	after := r.window.Stats()
	i.Packets, i.Resends = after.Sent-e.before.Sent, after.Resends-e.before.Resends
	i.Mask = r.ranks
	i.Duration = now - e.began
	e.done = true
}

func microseconds(us uint32) time.Duration { return time.Duration(us) * time.Microsecond }

// Done reports whether no all-reduce is under way.
func (e *Endpoint) Done() bool { return e.done }

// Info describes the all-reduce that was done last.
func (e *Endpoint) Info() Info { return e.info }

// Epoch returns the epoch of the plan that the newest round runs or ran under. When it changes, every RESULT of the
// rounds before is in: one round is under way at a time.
func (e *Endpoint) Epoch() uint16 { return e.round.header.Epoch }

// Stats returns the counts so far.
func (e *Endpoint) Stats() Stats {
	s := e.round.stats
	s.Stats = e.round.window.Stats()
	return s
}

// Overdue describes the all-reduce under way at time now as one that has taken too long, as far as packets tell: whom
// it waits for and where.
func (e *Endpoint) Overdue(now time.Duration) *DeadlineError {
	r := &e.round
	missing, first, left := r.window.Missing()
	return &DeadlineError{
		Rank:    e.rank(),
		Round:   r.header.Round,
		Chunk:   first,
		Left:    left,
		Chunks:  int(r.chunks),
		Missing: maskRanks(missing),
		Server:  r.server[min(int(first), len(r.server)-1)],
		Waited:  now - e.began,
	}
}

func (e *Endpoint) rank() int { return int(e.round.header.Rank) }

func (e *Endpoint) ranks() int { return len(maskRanks(e.round.ranks)) }
