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
	// progressInterval is how often a worker tells how far it is, unless the controller wants to know of rounds more often.
	progressInterval = time.Second
	// firstReport is how long after it has joined a worker reports first, and hears what the controller wants to know.
	firstReport = 100 * time.Millisecond
	// minInterval is how often a worker reports at most.
	minInterval = 20 * time.Millisecond
	// maxRounds is how many rounds wait to be reported at most; of more the oldest are left out.
	maxRounds = 256
)

// reporter tells the controller under which plan this worker's rounds run, so that the controller knows when nobody
// needs an older plan any more, and how far the worker is, for whoever asks why the job waits. It does so beside the
// all-reduces, which never wait for it.
type reporter struct {
	newest uint16      // epoch that was last handed over; of the driver
	epochs chan uint16 // the newest epoch that is not reported yet
	done   chan struct{}

	// The rest is guarded by the worker's mu.
	wanted bool         // the controller wants to know of rounds
	rounds []*api.Round // that it does not know of yet
	ended  time.Time    // when the last all-reduce ended; zero: none has
}

func newReporter(epoch uint16) *reporter {
	return &reporter{newest: epoch, epochs: make(chan uint16, 1), done: make(chan struct{})}
}

// computed returns how long the worker has computed when an all-reduce begins; 0 where it was waiting for others too.
func (r *reporter) computed(alone bool) time.Duration {
	if !alone || r.ended.IsZero() {
		return 0
	}
	return time.Since(r.ended)
}

// round takes an all-reduce that has ended.
func (r *reporter) round(p *Pending) {
	r.ended = time.Now()
	if !r.wanted {
		return
	}
	i, held := &p.info, p.call.Held()
	round := &api.Round{
		Round: i.Round, ComputeUs: uint64(p.compute.Microseconds()), CommUs: uint64(i.Duration.Microseconds()),
		Chunks: uint32(i.Chunks), Late: uint32(i.Late), Packets: i.Packets, Resends: i.Resends, Behind: uint32(i.Behind),
		HeldUs: uint64(held.Incomplete.Microseconds()), BlockedUs: uint64(held.Blocked.Microseconds()),
	}
	for rank, l := range p.call.Lasts() {
		if l.Chunks > 0 {
			round.Last = append(round.Last, &api.Last{Rank: uint32(rank), Chunks: uint32(l.Chunks), BlockedUs: uint64(l.Blocked.Microseconds())})
		}
	}
	if r.rounds = append(r.rounds, round); len(r.rounds) > maxRounds {
		r.rounds = r.rounds[1:]
	}
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
	tick := time.NewTicker(firstReport)
	defer tick.Stop()
	for {
		select {
		case epoch := <-r.epochs:
			r.report(w, epoch)
		case <-tick.C:
			every, err := r.call(w, 0)
			switch {
			case refused(err):
				w.log.Debug("controller does not hear of progress", "err", err)
				tick.Stop()
			case err != nil:
				tick.Reset(progressInterval)
			default:
				tick.Reset(every)
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
		_, err := r.call(w, epoch)
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

// call makes one report and returns when the next one is to be. epoch is 0 where it only tells how far the worker is.
func (r *reporter) call(w *Worker, epoch uint16) (every time.Duration, err error) {
	ctx, cancel := context.WithTimeout(w.ctx, reportTimeout)
	defer cancel()
	w.mu.Lock()
	rounds := r.rounds
	r.rounds = nil
	w.mu.Unlock()
	reply, err := w.client.Report(ctx, &api.ReportRequest{
		Job: w.job, Rank: uint32(w.rank), Id: w.ready.Job, Epoch: uint32(epoch), Progress: w.progress(), Rounds: rounds,
	})
	w.mu.Lock()
	defer w.mu.Unlock()
	if err != nil { // told next time
		r.rounds = append(rounds, r.rounds...)
		r.rounds = r.rounds[max(0, len(r.rounds)-maxRounds):]
		return 0, err
	}
	if reply.WaitUs != nil {
		w.endpoint.SetWait(time.Duration(reply.GetWaitUs()) * time.Microsecond)
	}
	if r.wanted = reply.GetEveryMs() > 0; !r.wanted {
		r.rounds = nil
		return progressInterval, nil
	}
	return min(max(time.Duration(reply.GetEveryMs())*time.Millisecond, minInterval), progressInterval), nil
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
