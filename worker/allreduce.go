package worker

import (
	"context"
	"errors"
	"fmt"
	"time"

	"xagg/worker/transport"
)

// Info describes an all-reduce that has succeeded.
type Info = transport.Info

// Stats are a worker's counts since it joined.
type Stats struct {
	transport.Stats
	LinkLoss uint64 // sends that failed in a way that may pass
}

// Stats returns the counts so far.
func (w *Worker) Stats() Stats {
	w.mu.Lock()
	defer w.mu.Unlock()
	return Stats{w.endpoint.Stats(), w.linkLoss}
}

// AllReduce replaces data by the sum of all workers' data. All ranks must make the same calls, with the same key and
// length, in the same order; key names the tensor, whose scale and clipped remainders are kept from one all-reduce to
// the next. It returns when the sum is complete, the worker's timeout has passed ([DeadlineError]), ctx is done, or the
// job has ended ([AbortError]). A NaN or Inf in data is a [NonFiniteError]. After an error the contents of data are
// unspecified, and the job is over for all its workers.
//
// The sum is exact up to the quantization of each worker's values: half of 2^-Info.Exponent each. Where it exceeds
// float32 it is Inf.
//
// In a job with a quorum data is replaced by the mean of those workers that were in time instead, chunk by chunk:
// Info.Least, Most and Late say of how many. What of this worker came too late is added to the tensor's next all-reduce.
//
// In an async job nobody waits for anybody: data is replaced by the sum of all contributions to the tensor that were added
// since this worker's last all-reduce of it, its own one among them. Info.Additions says how many those are.
func (w *Worker) AllReduce(ctx context.Context, key string, data []float32) (Info, error) {
	p, err := w.Start(key, data)
	return p.result(ctx, err)
}

// AllReduceInt32 replaces data by the sum of all workers' data, like AllReduce but without scaling; with a
// quorum too it is the sum, of those that were in time. A sum beyond int32 is an [IntegrityError].
func (w *Worker) AllReduceInt32(ctx context.Context, key string, data []int32) (Info, error) {
	p, err := w.StartInt32(key, data)
	return p.result(ctx, err)
}

// Start begins an all-reduce like [Worker.AllReduce] and does not wait for it: data must not be touched until
// [Pending.Wait] has returned its result. Any number may be under way; the job's depth says of how many of them packets
// are in the network at once. They end in the order in which they were begun, and only one of a key at a time.
func (w *Worker) Start(key string, data []float32) (*Pending, error) {
	return w.begin(key, func(now time.Duration) (*transport.Call, error) { return w.endpoint.Begin(now, key, data) })
}

// StartInt32 begins an all-reduce like [Worker.AllReduceInt32] and does not wait for it, see [Worker.Start].
func (w *Worker) StartInt32(key string, data []int32) (*Pending, error) {
	return w.begin(key, func(now time.Duration) (*transport.Call, error) { return w.endpoint.BeginInt32(now, key, data) })
}

// Pending is an all-reduce under way.
type Pending struct {
	w        *Worker
	key      string
	call     *transport.Call
	deadline time.Time
	done     chan struct{} // closed when info and err are there
	compute  time.Duration // since the all-reduce before; 0 = it was under way still
	ended    time.Time
	info     Info
	err      error
}

// Ended returns when the all-reduce ended, be it with a result or with an error. It may be called once Wait has said which.
func (p *Pending) Ended() time.Time { return p.ended }

// Wait waits for the all-reduce, and returns what [Worker.AllReduce] would. When ctx is done before, it returns ctx's
// error, and the all-reduce goes on.
func (p *Pending) Wait(ctx context.Context) (Info, error) {
	select {
	case <-p.done:
		return p.info, p.err
	case <-ctx.Done():
		return Info{}, fmt.Errorf("wait for all-reduce %q of job %q: %w", p.key, p.w.job, ctx.Err())
	}
}

// result waits for an all-reduce, which ends with ctx, and the job with it. err is why there is none.
func (p *Pending) result(ctx context.Context, err error) (Info, error) {
	if err != nil {
		return Info{}, err
	}
	select {
	case <-p.done:
	case <-ctx.Done():
		p.w.fail(p.w.interrupted(p, ctx.Err()))
		<-p.done
	}
	return p.info, p.err
}

// begin begins an all-reduce and lets the driver know.
func (w *Worker) begin(key string, begin func(now time.Duration) (*transport.Call, error)) (*Pending, error) {
	w.mu.Lock()
	if w.ctx.Err() != nil || w.failure != nil || w.leaving.Load() {
		defer w.mu.Unlock()
		return nil, fmt.Errorf("all-reduce %q: %w", key, w.ended())
	}
	p := &Pending{w: w, key: key, deadline: time.Now().Add(w.timeout), done: make(chan struct{})}
	call, err := begin(w.now())
	if err != nil {
		w.mu.Unlock()
		w.fail(p.wrap(err)) // the others wait for this worker's part in vain
		return nil, p.wrap(err)
	}
	p.call = call
	p.compute = w.reports.computed(len(w.pending) == 0)
	w.pending = append(w.pending, p)
	idle := w.idle
	w.idle = false
	w.mu.Unlock()
	if idle {
		w.work <- struct{}{}
	} else {
		w.link.Wake()
	}
	return p, nil
}

func (p *Pending) wrap(err error) error {
	return fmt.Errorf("all-reduce %q of job %q: %w", p.key, p.w.job, err)
}

// now is the endpoint's time.
func (w *Worker) now() time.Duration { return time.Since(w.start) }

// drive carries out the all-reduces until the session ends: it sends what the endpoint wants sent and gives it what
// comes. Nothing is sent or received while none is under way.
func (w *Worker) drive() {
	defer close(w.driven)
	for {
		select {
		case <-w.work:
		case <-w.ctx.Done():
			w.fail(context.Cause(w.ctx))
			return
		}
		if err := w.run(); err != nil {
			w.fail(err)
		}
	}
}

// run moves packets until no all-reduce is under way.
func (w *Worker) run() error {
	var received int
	var linkErr error
	for {
		until, err := w.step(received, linkErr)
		if err != nil || until.IsZero() {
			return err
		}
		received, linkErr = w.link.Recv(w.bufs, w.sizes, until)
	}
}

// step handles so many received payloads, and the link's error, and sends what is due. It returns until when to wait for
// more: the zero time when no all-reduce is under way any more.
func (w *Worker) step(received int, linkErr error) (until time.Time, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.ctx.Err() != nil {
		return until, context.Cause(w.ctx)
	}
	if w.failure != nil {
		return until, nil
	}
	if err := w.linkError("receive", linkErr); err != nil {
		return until, err
	}
	e := w.endpoint
	now := w.now()
	for i, b := range w.bufs[:received] {
		if err := e.Take(now, b[:w.sizes[i]]); err != nil {
			return until, err
		}
	}
	w.reports.note(e.Epoch())
	for len(w.pending) > 0 && w.pending[0].call.Done() {
		p := w.pending[0]
		w.pending = w.pending[:copy(w.pending, w.pending[1:])]
		p.info, p.ended = p.call.Info(), time.Now()
		p.info.Behind = e.Behind(p.call)
		w.reports.round(p)
		close(p.done)
	}
	if len(w.pending) == 0 {
		w.idle, w.linkErr = true, nil
		return until, nil
	}
	until = w.pending[0].deadline
	if !time.Now().Before(until) {
		return until, w.overdue(now)
	}
	for {
		batch := e.Due(now, w.batch)
		if len(batch) == 0 {
			break
		}
		if err := w.send(batch); err != nil {
			return until, err
		}
	}
	if d, ok := e.Deadline(); ok && w.start.Add(d).Before(until) {
		until = w.start.Add(d)
	}
	return until, nil
}

// send sends a batch. What the link could not take for the moment is lost and will be sent again.
func (w *Worker) send(batch [][]byte) error {
	for len(batch) > 0 {
		n, err := w.link.Send(batch)
		batch = batch[n:]
		if err == nil {
			continue
		}
		if err := w.linkError("send", err); err != nil {
			return err
		}
		w.linkLoss++
		batch = batch[min(1, len(batch)):]
	}
	return nil
}

// linkError returns err if the link is of no use any more, and remembers it otherwise.
func (w *Worker) linkError(verb string, err error) error {
	switch {
	case err == nil:
	case Transient(err):
		w.linkErr = err
	default:
		return fmt.Errorf("%s: %w", verb, err)
	}
	return nil
}

// overdue says that the oldest all-reduce under way takes too long.
func (w *Worker) overdue(now time.Duration) error {
	late := w.endpoint.Overdue(now)
	late.Service, late.Err, late.Recovering = w.service, w.linkErr, w.recovering
	return late
}

// interrupted returns why an all-reduce ends whose context has ended with err.
func (w *Worker) interrupted(p *Pending, err error) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if errors.Is(err, context.DeadlineExceeded) && len(w.pending) > 0 && !w.endpoint.Done() {
		err = w.overdue(w.now())
	}
	return err
}

// fail ends all all-reduces under way with an error, and the job with them. The endpoint is not used any more then.
func (w *Worker) fail(err error) {
	w.mu.Lock()
	if w.failure != nil {
		w.mu.Unlock()
		return
	}
	w.failure = err
	pending := w.pending
	w.pending = nil
	w.mu.Unlock()
	for _, p := range pending {
		p.err, p.ended = p.wrap(err), time.Now()
	}
	if len(pending) > 0 {
		err = pending[0].err
	}
	w.Abort(err)
	for _, p := range pending {
		close(p.done)
	}
}
