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

// Stats returns the counts so far. It waits for an all-reduce under way.
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
func (w *Worker) AllReduce(ctx context.Context, key string, data []float32) (Info, error) {
	return w.do(ctx, key, func(now time.Duration) error { return w.endpoint.Begin(now, key, data) })
}

// AllReduceInt32 replaces data by the sum of all workers' data, like AllReduce but without scaling. A sum beyond int32
// is an [IntegrityError].
func (w *Worker) AllReduceInt32(ctx context.Context, key string, data []int32) (Info, error) {
	return w.do(ctx, key, func(now time.Duration) error {
		w.endpoint.BeginInt32(now, key, data)
		return nil
	})
}

// call is one all-reduce under way.
type call struct {
	w       *Worker
	ctx     context.Context
	linkErr error // last error of the link
}

// do carries out an all-reduce, which begin begins.
func (w *Worker) do(ctx context.Context, key string, begin func(now time.Duration) error) (Info, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.ctx.Err() != nil {
		return Info{}, fmt.Errorf("all-reduce %q: %w", key, w.ended())
	}
	ctx, cancel := context.WithTimeout(ctx, w.timeout)
	defer cancel()
	defer context.AfterFunc(ctx, w.link.Wake)()
	c := &call{w: w, ctx: ctx}
	err := begin(w.now())
	if err == nil {
		err = c.run()
	}
	if err != nil {
		err = fmt.Errorf("all-reduce %q of job %q: %w", key, w.job, err)
		w.Abort(err) // the others wait for this worker's part in vain
		return Info{}, err
	}
	return w.endpoint.Info(), nil
}

// now is the endpoint's time.
func (w *Worker) now() time.Duration { return time.Since(w.start) }

// run moves packets until the all-reduce is done: it sends what the endpoint wants sent and gives it what comes.
func (c *call) run() error {
	w := c.w
	e := w.endpoint
	for !e.Done() {
		if err := c.interrupted(); err != nil {
			return err
		}
		now := w.now()
		for {
			batch := e.Due(now, w.batch)
			if len(batch) == 0 {
				break
			}
			if err := c.send(batch); err != nil {
				return err
			}
		}
		until, ok := c.ctx.Deadline()
		if d, some := e.Deadline(); some && (!ok || w.start.Add(d).Before(until)) {
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
			if err := e.Take(now, b[:w.sizes[i]]); err != nil {
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
		c.w.linkLoss++
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
	late := w.endpoint.Overdue(w.now())
	late.Service, late.Err = w.service, c.linkErr
	return late
}
