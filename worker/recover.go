package worker

import (
	"context"
	"errors"
	"io"
	"math"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"xagg/api"
	"xagg/recovery"
)

const (
	minBackoff = 50 * time.Millisecond // before a call that could not reach the controller is tried again, doubling
	maxBackoff = 2 * time.Second       // up to this
)

// events are what a controller tells a worker.
type events = grpc.ServerStreamingClient[api.JoinEvent]

// listen does what the controller says until the session ends. A controller that goes away does no harm to a running
// job: it is looked for until it is back.
func (w *Worker) listen(stream events) {
	defer close(w.stream)
	for stream != nil {
		err := w.hear(stream)
		if err == nil {
			return
		}
		w.log.Warn("lost the controller; going on without it until it is back", "err", err)
		stream = w.listenAgain()
	}
}

// hear does what a stream says. It returns why the stream is of no use any more, or nil when the session is over.
func (w *Worker) hear(stream events) error {
	for {
		event, err := stream.Recv()
		switch {
		case w.ctx.Err() != nil, w.failing.Load(), errors.Is(err, io.EOF) && w.leaving.Load():
			return nil
		case errors.Is(err, io.EOF):
			return errors.New("the controller closed the stream")
		case err != nil:
			return err
		case event.GetAbort() != nil:
			w.end(aborted(event.GetAbort()))
			return nil
		case event.GetFreeze() != nil:
			w.freeze(event.GetFreeze())
		}
	}
}

// listenAgain takes the worker's place again, which it still has where the controller knows its incarnation of the job. It
// returns nil when it does not, or the session is over.
func (w *Worker) listenAgain() events {
	var stream events
	err := w.persist(w.ctx, func() (err error) {
		req := w.joinRequest()
		req.Id = w.ready.Job
		if stream, err = w.client.Join(w.ctx, req); err != nil {
			return err
		}
		event, err := stream.Recv() // the place is free again, or it is an error
		if err == nil && event.GetAbort() != nil {
			w.end(aborted(event.GetAbort()))
		}
		return err
	})
	switch {
	case w.ctx.Err() != nil:
		return nil
	case err != nil:
		w.log.Warn("the controller does not know this worker any more; going on without it", "err", err)
		return nil
	}
	w.log.Info("the controller is back")
	return stream
}

// persist makes a call again, with growing pauses, as long as it does not reach the controller and ctx is not done.
func (w *Worker) persist(ctx context.Context, call func() error) error {
	for pause := minBackoff; ; pause = min(2*pause, maxBackoff) {
		err := call()
		if err == nil || ctx.Err() != nil || !unreachable(err) {
			return err
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return err
		}
	}
}

// unreachable reports whether an error says nothing but that the controller is not there now.
func unreachable(err error) bool {
	return errors.Is(err, io.EOF) || status.Code(err) == codes.Unavailable || status.Code(err) == codes.DeadlineExceeded
}

// freeze takes part in a recovery. One that is under way is over: this one has taken its place.
func (w *Worker) freeze(f *api.Freeze) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.failure != nil || f.Recovery == w.recovery {
		return // told again, by another stream
	}
	w.giveUpRecovery()
	ctx, cancel := context.WithCancel(w.ctx)
	w.recovery, w.recovering, w.giveUpRecovery = f.Recovery, f.Reason, cancel
	state := w.endpoint.Freeze()
	w.log.Warn("the job recovers", "recovery", f.Recovery, "reason", f.Reason)
	w.recoveries.Go(func() {
		defer cancel()
		w.recover(ctx, f.Recovery, state)
	})
}

// recover goes through a recovery after the worker has stopped. Where another has begun it leaves the worker as it is.
func (w *Worker) recover(ctx context.Context, number uint64, state recovery.State) {
	began := time.Now()
	var asked *api.FrozenReply
	err := w.persist(ctx, func() (err error) {
		asked, err = w.client.Frozen(ctx, w.frozenRequest(number, state), anySize)
		return err
	})
	if err != nil {
		w.notRecovered(ctx, err)
		return
	}
	over := &api.HandOverRequest{Job: w.job, Rank: uint32(w.rank), Id: w.ready.Job, Recovery: number}
	if over.Results, err = w.results(asked); err != nil {
		w.fail(err)
		return
	}
	var reply *api.ResumeReply
	err = w.persist(ctx, func() (err error) {
		reply, err = w.client.HandOver(ctx, over, anySize)
		return err
	})
	if err != nil {
		w.notRecovered(ctx, err)
		return
	}
	if err := w.resume(number, reply); err != nil {
		w.fail(err)
		return
	}
	w.log.Info("the job goes on", "recovery", number, "epoch", reply.Epoch, "round", reply.Round, "handed_over", len(over.Results),
		"received", len(reply.Results), "took", time.Since(began).Round(time.Microsecond))
}

// anySize lets an answer have as many RESULTs as a vector has chunks.
var anySize = grpc.MaxCallRecvMsgSize(math.MaxInt32)

// notRecovered notes that a recovery came to nothing. The worker stays as it is until another one begins, or the deadlines
// of its all-reduces.
func (w *Worker) notRecovered(ctx context.Context, err error) {
	if ctx.Err() != nil || status.Code(err) == codes.Aborted {
		return // another one has begun, or will
	}
	w.log.Warn("the controller refuses to let this worker take part in the recovery", "err", err)
}

func (w *Worker) frozenRequest(number uint64, s recovery.State) *api.FrozenRequest {
	req := &api.FrozenRequest{
		Job: w.job, Rank: uint32(w.rank), Id: w.ready.Job, Recovery: number,
		First: s.First, Next: s.Next, Boundary: s.Boundary, Seq: s.Seq, AllReduces: s.AllReduces, Returns: s.Returns,
	}
	for _, h := range s.Rounds {
		req.Rounds = append(req.Rounds, &api.Held{Round: h.Round, Chunks: h.Chunks, Held: h.Bits})
	}
	return req
}

// results returns the RESULTs that the controller asks for.
func (w *Worker) results(asked *api.FrozenReply) ([][]byte, error) {
	ids := make([]recovery.ChunkID, len(asked.HandOver))
	for i, id := range asked.HandOver {
		ids[i] = recovery.ChunkID{Round: id.Round, Chunk: id.Chunk}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.endpoint.Results(ids) // they stay as they are while the endpoint is frozen
}

// resume lets the endpoint go on, unless another recovery has begun.
func (w *Worker) resume(number uint64, reply *api.ResumeReply) error {
	restart := recovery.Restart{Round: reply.Round, Seq: reply.Seq, Returns: reply.Returns}
	for _, h := range reply.Finals {
		restart.Finals = append(restart.Finals, recovery.Held{Round: h.Round, Chunks: h.Chunks, Bits: h.Held})
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.recovery != number || w.failure != nil {
		return nil
	}
	w.recovering = ""
	if err := w.endpoint.Resume(w.now(), uint16(reply.Epoch), restart, reply.Results); err != nil {
		return err
	}
	if !w.idle {
		w.link.Wake()
	}
	return nil
}
