package worker

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"xagg/agg"
	"xagg/wire"
	"xagg/worker/scale"
)

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

// Stats are a worker's counts since it joined.
type Stats struct {
	agg.Stats
	Malformed uint64 // payloads received that are no packet for a worker
	Late      uint64 // answers that were not needed any more
	Wrong     uint64 // answers that were refused: another shape, a tag that does not fit, a NACK
	LinkLoss  uint64 // sends that failed in a way that may pass
}

// Stats returns the counts so far. It waits for an all-reduce under way.
func (w *Worker) Stats() Stats {
	w.mu.Lock()
	defer w.mu.Unlock()
	s := w.round.stats
	s.Stats = w.round.window.Stats()
	return s
}

// tensor is what a worker remembers of a float32 tensor between its all-reduces.
type tensor struct {
	len      int
	amax     uint8  // of the RESULTs of the last all-reduce; 0 = not known, or it was all zero
	residual []rest // what was clipped
}

type rest struct {
	index int
	value float32
}

// AllReduce replaces data by the sum of all workers' data. All ranks must make the same calls, with the same key and
// length, in the same order; key names the tensor, whose scale and clipped remainders are kept from one all-reduce to
// the next. It returns when the sum is complete, the worker's timeout has passed ([DeadlineError]), ctx is done, or the
// job has ended ([AbortError]). A NaN or Inf in data is a [NonFiniteError]. After an error the contents of data are
// unspecified, and the job is over for all its workers.
//
// The sum is exact up to the quantization of each worker's values: half of 2^-Info.Exponent each. Where it exceeds
// float32 it is Inf.
func (w *Worker) AllReduce(ctx context.Context, key string, data []float32) (Info, error) {
	return w.do(ctx, key, func(c *call) error {
		t, err := c.tensor(data)
		if err != nil {
			return err
		}
		own, bad := scale.Amax(data)
		if bad < 0 && len(t.residual) > 0 {
			if err := c.addResidual(t, data); err != nil {
				return err
			}
			own, bad = scale.Amax(data)
		}
		if bad >= 0 {
			return &NonFiniteError{Rank: w.rank, Key: key, Index: bad, Value: data[bad]}
		}
		// Nothing is known of a tensor's scale before its first all-reduce and after one of zeros.
		if t.amax == 0 {
			if err := c.round(vector{scout: true}, 0, own); err != nil {
				return err
			}
			t.amax = w.round.total.amax
		}
		c.info.Exponent = scale.Exponent(t.amax, w.Ranks())
		t.amax = 0
		return c.rounds(vector{f32: data}, own, func(offset int) {
			t.amax = max(t.amax, w.round.total.amax)
		})
	})
}

// AllReduceInt32 replaces data by the sum of all workers' data, like AllReduce but without scaling. A sum beyond int32
// is an [IntegrityError].
func (w *Worker) AllReduceInt32(ctx context.Context, key string, data []int32) (Info, error) {
	return w.do(ctx, key, func(c *call) error {
		return c.rounds(vector{i32: data, modular: true}, 0, func(int) {})
	})
}

// call is one all-reduce under way.
type call struct {
	w       *Worker
	ctx     context.Context
	key     string
	started time.Time
	info    Info
	linkErr error // last error of the link
}

// do carries out an all-reduce: f sends nothing unless through c.
func (w *Worker) do(ctx context.Context, key string, f func(c *call) error) (Info, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.ctx.Err() != nil {
		return Info{}, fmt.Errorf("all-reduce %q: %w", key, w.ended())
	}
	ctx, cancel := context.WithTimeout(ctx, w.timeout)
	defer cancel()
	defer context.AfterFunc(ctx, w.link.Wake)()
	c := &call{w: w, ctx: ctx, key: key, started: time.Now()}
	before := w.round.window.Stats()
	if err := f(c); err != nil {
		err = fmt.Errorf("all-reduce %q of job %q: %w", key, w.job, err)
		w.Abort(err) // the others wait for this worker's part in vain
		return Info{}, err
	}
	after := w.round.window.Stats()
	c.info.Packets, c.info.Resends = after.Sent-before.Sent, after.Resends-before.Resends
	c.info.Mask = w.round.ranks
	c.info.Duration = time.Since(c.started)
	return c.info, nil
}

// tensor returns what is known of the call's tensor.
func (c *call) tensor(data []float32) (*tensor, error) {
	t, ok := c.w.keys[c.key]
	if !ok {
		t = &tensor{len: len(data)}
		c.w.keys[c.key] = t
	}
	if t.len != len(data) {
		return nil, fmt.Errorf("%d values, but the tensor had %d before: use one key per tensor", len(data), t.len)
	}
	return t, nil
}

// addResidual adds to data what was clipped before, and forgets it.
func (c *call) addResidual(t *tensor, data []float32) error {
	for _, r := range t.residual {
		data[r.index] += r.value
		if math.IsInf(float64(data[r.index]), 0) {
			return &NonFiniteError{Rank: c.w.rank, Key: c.key, Index: r.index, Value: data[r.index], Residual: true}
		}
	}
	t.residual = t.residual[:0]
	return nil
}

// rounds sums a vector, in as many rounds as the job's longest round makes necessary, at least one. done is called
// after each.
func (c *call) rounds(vec vector, amax uint8, done func(offset int)) error {
	longest := c.w.maxChunks * wire.MaxLanes
	for offset := 0; ; offset += longest {
		end := min(offset+longest, vec.len())
		if err := c.round(vec.slice(offset, end), offset, amax); err != nil {
			return err
		}
		done(offset)
		if end == vec.len() {
			return nil
		}
	}
}

// round carries out one round: the part of the call's vector from offset on.
func (c *call) round(vec vector, offset int, amax uint8) error {
	w := c.w
	r := &w.round
	r.clip = func(i int, value float32) {
		t := w.keys[c.key]
		t.residual = append(t.residual, rest{offset + i, value})
	}
	r.sum = nil
	if w.observe != nil {
		w.sum = slices.Grow(w.sum[:0], vec.len())[:vec.len()]
		r.sum = w.sum
	}
	r.begin(w.now(), vec, c.info.Exponent, amax)
	if c.info.Rounds == 0 {
		c.info.Round = r.header.Round
	}
	if err := c.run(); err != nil {
		return err
	}
	c.info.Rounds++
	c.info.Epoch = r.header.Epoch
	c.info.Chunks += int(r.chunks)
	t := &r.total
	c.info.Clipped += t.clipped
	c.info.Saturated += t.saturated
	c.info.Spread = max(c.info.Spread, microseconds(t.spread))
	if b := microseconds(t.blocked); b >= c.info.Blocked {
		c.info.Last, c.info.Blocked = int(t.last), b
	}
	if w.observe != nil {
		w.observe(Round{
			Key:      c.key,
			Number:   r.header.Round,
			Epoch:    r.header.Epoch,
			Scout:    vec.scout,
			Modular:  vec.modular,
			Exponent: r.header.Exponent,
			Offset:   offset,
			Sum:      w.sum,
			Mask:     r.ranks,
		})
	}
	return nil
}

func microseconds(us uint32) time.Duration { return time.Duration(us) * time.Microsecond }

// now is the window's time.
func (w *Worker) now() time.Duration { return time.Since(w.start) }

// run moves packets until the round is done: it sends what the window wants sent and gives it what comes.
func (c *call) run() error {
	w := c.w
	r := &w.round
	for !r.window.Done() {
		if err := c.interrupted(); err != nil {
			return err
		}
		now := w.now()
		for {
			batch := r.due(now, w.batch)
			if len(batch) == 0 {
				break
			}
			if err := c.send(batch); err != nil {
				return err
			}
		}
		until, ok := c.ctx.Deadline()
		if d, some := r.window.Deadline(); some && (!ok || w.start.Add(d).Before(until)) {
			until = w.start.Add(d)
		}
		n, err := w.link.Recv(w.bufs, w.sizes, until)
		if err != nil {
			if err := c.linkError("receive", err); err != nil {
				return err
			}
		}
		now = w.now()
		for i, b := range w.bufs[:n] {
			if err := r.take(now, b[:w.sizes[i]]); err != nil {
				return err
			}
		}
	}
	return nil
}

// send sends a batch. What the link could not take for the moment is lost and will be sent again.
func (c *call) send(batch [][]byte) error {
	for len(batch) > 0 {
		n, err := c.w.link.Send(batch)
		batch = batch[n:]
		if err == nil {
			continue
		}
		if err := c.linkError("send", err); err != nil {
			return err
		}
		c.w.round.stats.LinkLoss++
		batch = batch[min(1, len(batch)):]
	}
	return nil
}

// linkError returns err if the link is of no use any more, and remembers it otherwise.
func (c *call) linkError(verb string, err error) error {
	if !Transient(err) {
		return fmt.Errorf("%s: %w", verb, err)
	}
	c.linkErr = err
	return nil
}

// interrupted returns why the call must end, or nil.
func (c *call) interrupted() error {
	w := c.w
	if w.ctx.Err() != nil {
		return context.Cause(w.ctx)
	}
	err := c.ctx.Err()
	if !errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	missing, first, left := w.round.window.Missing()
	return &DeadlineError{
		Rank:    w.rank,
		Round:   w.round.header.Round,
		Chunk:   first,
		Left:    left,
		Chunks:  int(w.round.chunks),
		Missing: maskRanks(missing),
		Server:  w.round.server[min(int(first), len(w.round.server)-1)],
		Service: w.service,
		Waited:  time.Since(c.started),
		Err:     c.linkErr,
	}
}
