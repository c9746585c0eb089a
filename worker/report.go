package worker

import (
	"context"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"xagg/api"
)

const (
	// reportDelay keeps a report, which nobody is in a hurry for, out of the way of the round that has just begun: the
	// calls of several workers on one machine at that moment are more work than a short round.
	reportDelay    = 5 * time.Millisecond
	reportTimeout  = 5 * time.Second        // of one call
	reportBackoff  = 100 * time.Millisecond // before a report that failed is tried again, doubling
	reportInterval = 5 * time.Second        // up to this
	// progressInterval is how often a worker tells how far it is.
	progressInterval = time.Second
)

// reporter tells the controller under which plan this worker's rounds run, so that the controller knows when nobody
// needs an older plan any more, and how far the worker is, for whoever asks why the job waits. It does so beside the
// all-reduces, which never wait for it.
type reporter struct {
	newest uint16      // epoch that was last handed over; of the driver
	epochs chan uint16 // the newest epoch that is not reported yet
	done   chan struct{}
}

func newReporter(epoch uint16) *reporter {
	return &reporter{newest: epoch, epochs: make(chan uint16, 1), done: make(chan struct{})}
}

// note takes an epoch: every round under older ones is finished.
func (r *reporter) note(epoch uint16) {
	if epoch == r.newest {
		return
	}
	r.newest = epoch
	select { // an older one need not be told any more
	case <-r.epochs:
	default:
	}
	r.epochs <- epoch
}

// run reports until the session ends. What the controller refuses for good is not tried again; it concerns nobody then.
func (r *reporter) run(w *Worker) {
	defer close(r.done)
	tick := time.NewTicker(progressInterval)
	defer tick.Stop()
	for {
		select {
		case epoch := <-r.epochs:
			r.report(w, epoch)
		case <-tick.C:
			if err := r.call(w, 0); refused(err) {
				w.log.Debug("controller does not hear of progress", "err", err)
				tick.Stop()
			}
		case <-w.ctx.Done():
			return
		}
	}
}

// report tells one epoch, unless a newer one comes before it is told.
func (r *reporter) report(w *Worker, epoch uint16) {
	timer := time.NewTimer(reportDelay)
	defer timer.Stop()
	for pause := reportBackoff; ; pause = min(2*pause, reportInterval) {
		select {
		case <-timer.C:
		case epoch = <-r.epochs:
		case <-w.ctx.Done():
			return
		}
		err := r.call(w, epoch)
		switch {
		case err == nil:
			return
		case refused(err):
			w.log.Warn("controller refuses to hear of a change of plan", "epoch", epoch, "err", err)
			return
		}
		w.log.Debug("change of plan is not reported yet", "epoch", epoch, "err", err)
		timer.Reset(pause)
	}
}

// refused reports whether a controller does not take a report for good.
func refused(err error) bool {
	switch status.Code(err) {
	case codes.NotFound, codes.FailedPrecondition, codes.InvalidArgument, codes.Unimplemented:
		return true
	}
	return false
}

// call makes one report. epoch is 0 where it only tells how far the worker is.
func (r *reporter) call(w *Worker, epoch uint16) error {
	ctx, cancel := context.WithTimeout(w.ctx, reportTimeout)
	defer cancel()
	_, err := w.client.Report(ctx, &api.ReportRequest{
		Job: w.job, Rank: uint32(w.rank), Id: w.ready.Job, Epoch: uint32(epoch), Progress: w.progress(),
	})
	return err
}

// progress returns how far the worker is.
func (w *Worker) progress() *api.Progress {
	w.mu.Lock()
	defer w.mu.Unlock()
	p := w.endpoint.Progress(w.now())
	return &api.Progress{
		Waiting: len(w.pending) > 0, Round: p.Round, ChunksLeft: uint32(p.Left), Chunk: p.Chunk, Missing: p.Missing,
		AtServer: p.Server, ForUs: uint64(p.For.Microseconds()), Key: p.Key,
	}
}
