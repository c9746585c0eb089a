package worker_test

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"xagg/api"
	"xagg/worker"
)

// scripted is a controller whose Join does what a test says.
type scripted struct {
	api.UnimplementedControllerServer
	join  func(req *api.JoinRequest, stream grpc.ServerStreamingServer[api.JoinEvent]) error
	leave func() // before the answer; may be nil
}

func (s *scripted) Join(req *api.JoinRequest, stream grpc.ServerStreamingServer[api.JoinEvent]) error {
	return s.join(req, stream)
}

func (s *scripted) Leave(context.Context, *api.LeaveRequest) (*api.LeaveReply, error) {
	if s.leave != nil {
		s.leave()
	}
	return &api.LeaveReply{}, nil
}

func goodReady() *api.Ready {
	return &api.Ready{Job: 1, Epoch: 1, Ranks: 2, Pool: 8, MaxChunks: 4, ServiceIp: "10.77.255.254", ServiceMac: "02:78:61:00:ff:fe"}
}

func sendReady(stream grpc.ServerStreamingServer[api.JoinEvent], r *api.Ready) error {
	return stream.Send(&api.JoinEvent{Event: &api.JoinEvent_Ready{Ready: r}})
}

// closing is a link that notes that it was closed.
type closing struct {
	worker.Link
	closed atomic.Bool
}

func (l *closing) Close() error { l.closed.Store(true); return l.Link.Close() }

func newClosing() *closing {
	return &closing{Link: worker.NewFrameLink(workerAddr(1), true, func([]byte) {})}
}

// TestJoinRefused: every way in which a join can fail is an error that says so, and closes the link.
func TestJoinRefused(t *testing.T) {
	ready := func(change func(r *api.Ready)) func(*api.JoinRequest, grpc.ServerStreamingServer[api.JoinEvent]) error {
		r := proto.CloneOf(goodReady())
		change(r)
		return func(_ *api.JoinRequest, stream grpc.ServerStreamingServer[api.JoinEvent]) error {
			return sendReady(stream, r)
		}
	}
	for name, c := range map[string]struct {
		join func(*api.JoinRequest, grpc.ServerStreamingServer[api.JoinEvent]) error
		want string
	}{
		"no such job": {func(*api.JoinRequest, grpc.ServerStreamingServer[api.JoinEvent]) error {
			return status.Error(codes.NotFound, `no job "train"`)
		}, `controller: no job "train"`},
		"unavailable": {func(*api.JoinRequest, grpc.ServerStreamingServer[api.JoinEvent]) error {
			return status.Error(codes.Unavailable, "gone")
		}, "is 'xagg controller' running"},
		"no event": {func(*api.JoinRequest, grpc.ServerStreamingServer[api.JoinEvent]) error { return nil }, "EOF"},
		"empty event": {func(_ *api.JoinRequest, stream grpc.ServerStreamingServer[api.JoinEvent]) error {
			return stream.Send(&api.JoinEvent{})
		}, "want ready or abort"},
		"abort": {func(_ *api.JoinRequest, stream grpc.ServerStreamingServer[api.JoinEvent]) error {
			return stream.Send(&api.JoinEvent{Event: &api.JoinEvent_Abort{Abort: &api.Abort{Reason: "ranks differ", Ranks: []uint32{0, 1}}}})
		}, "aborted by ranks 0 and 1: ranks differ"},
		"job id 0":    {ready(func(r *api.Ready) { r.Job = 0 }), "job id 0"},
		"job id wide": {ready(func(r *api.Ready) { r.Job = 1 << 16 }), "job id 65536"},
		"epoch 0":     {ready(func(r *api.Ready) { r.Epoch = 0 }), "epoch 0"},
		"few ranks":   {ready(func(r *api.Ready) { r.Ranks = 1 }), "1 ranks"},
		"many ranks":  {ready(func(r *api.Ready) { r.Ranks = 65 }), "65 ranks"},
		"begun":       {ready(func(r *api.Ready) { r.AllReduces = 1 << 63 }), "9223372036854775808 all-reduces"},
		"depth":       {ready(func(r *api.Ready) { r.Depth = 17 }), "depth of 17"},
		"mode":        {ready(func(r *api.Ready) { r.Consistency = &api.Consistency{Mode: "lax"} }), `consistency "lax"`},
		"no quorum":   {ready(func(r *api.Ready) { r.Consistency = &api.Consistency{Mode: "quorum", Rounds: 8} }), "quorum of 0"},
		"quorum":      {ready(func(r *api.Ready) { r.Consistency = &api.Consistency{Mode: "quorum", Quorum: 3, Rounds: 8} }), "quorum of 3"},
		"staleness":   {ready(func(r *api.Ready) { r.Consistency = &api.Consistency{Mode: "async", Staleness: 1 << 31} }), "staleness of 2147483648"},
		"rounds": {ready(func(r *api.Ready) {
			r.Depth, r.Consistency = 3, &api.Consistency{Mode: "quorum", Quorum: 1, Rounds: 4}
		}), "keep 4 rounds"},
		"pool":          {ready(func(r *api.Ready) { r.Pool = 6 }), "pool of 6"},
		"no chunks":     {ready(func(r *api.Ready) { r.MaxChunks = 0 }), "0 chunks"},
		"service":       {ready(func(r *api.Ready) { r.ServiceIp = "::1" }), `"::1"`},
		"service MAC":   {ready(func(r *api.Ready) { r.ServiceMac = "x" }), `"x"`},
		"service EUI64": {ready(func(r *api.Ready) { r.ServiceMac = "02:00:5e:10:00:00:00:01" }), "6 bytes"},
	} {
		link := newClosing()
		w, err := worker.Join(t.Context(), serve(t, &scripted{join: c.join}), worker.Config{Job: "train", Rank: 1, Link: link})
		if w != nil || err == nil || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), `join job "train" as rank 1`) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
		if !link.closed.Load() {
			t.Errorf("%s: link is open", name)
		}
	}
	if _, err := worker.Join(t.Context(), nil, worker.Config{Rank: 64, Link: newClosing()}); err == nil {
		t.Error("rank 64 joined")
	}
}

// TestJoinCancel: ctx bounds the wait for the others.
func TestJoinCancel(t *testing.T) {
	joined := make(chan struct{})
	client := serve(t, &scripted{join: func(_ *api.JoinRequest, stream grpc.ServerStreamingServer[api.JoinEvent]) error {
		close(joined)
		<-stream.Context().Done()
		return nil
	}})
	ctx, cancel := context.WithCancelCause(t.Context())
	impatient := errors.New("enough")
	go func() { <-joined; cancel(impatient) }()
	if _, err := worker.Join(ctx, client, worker.Config{Job: "train", Link: newClosing()}); !errors.Is(err, impatient) {
		t.Errorf("%v, want %v", err, impatient)
	}
}

// TestJoinRequest: the controller learns where the worker is and what it plans.
func TestJoinRequest(t *testing.T) {
	first := make(chan *api.JoinRequest, 1)
	client := serve(t, &scripted{join: func(req *api.JoinRequest, stream grpc.ServerStreamingServer[api.JoinEvent]) error {
		select {
		case first <- req:
		default: // it looks for the controller again
		}
		return sendReady(stream, goodReady())
	}})
	w, err := worker.Join(t.Context(), client, worker.Config{Job: "train", Rank: 1, Link: newClosing(), Plan: "float32 3x100"})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	want := &api.JoinRequest{Job: "train", Rank: 1, Ip: "10.77.0.2", UdpPort: 19860, Digest: "xagg/1 lanes=256 margin=3 float32 3x100"}
	if got := <-first; !proto.Equal(got, want) {
		t.Errorf("request %v, want %v", got, want)
	}
	if w.Rank() != 1 || w.Ranks() != 2 {
		t.Errorf("rank %d of %d", w.Rank(), w.Ranks())
	}
}

// TestOddRank: ranks that plan different things do not start.
func TestOddRank(t *testing.T) {
	n := newTestnet(t, netConfig{ranks: 2})
	errs := n.errors(func(r int) error {
		w, err := worker.Join(t.Context(), n.client, worker.Config{Job: "train", Rank: r, Link: n.links[r], Plan: []string{"a", "b"}[r]})
		if err == nil {
			w.Close()
		}
		return err
	})
	for r, err := range errs {
		var abort *worker.AbortError
		if !errors.As(err, &abort) || len(abort.Ranks) != 1 || !strings.Contains(err.Error(), "plans") {
			t.Errorf("rank %d: %v", r, err)
		}
	}
}

// TestAbort: the controller ends an all-reduce that is under way, and a Leave that waits.
func TestAbort(t *testing.T) {
	for name, call := range map[string]func(w *worker.Worker) error{
		"all-reduce": func(w *worker.Worker) error {
			_, err := w.AllReduce(context.Background(), "w", []float32{1})
			return err
		},
		"leave": func(w *worker.Worker) error { return w.Leave(context.Background()) },
	} {
		t.Run(name, func(t *testing.T) {
			n := newTestnet(t, netConfig{ranks: 3})
			workers := n.join(t)
			errs := make(chan error)
			go func() { errs <- call(workers[0]) }()
			workers[2].Close() // without leaving
			err := <-errs
			var abort *worker.AbortError
			if !errors.As(err, &abort) || !slices.Equal(abort.Ranks, []int{2}) {
				t.Errorf("%v, want an abort by rank 2", err)
			}
		})
	}
}

// TestAbortReason: a worker that gives up tells the others why, and itself remembers its own reason.
func TestAbortReason(t *testing.T) {
	n := newTestnet(t, netConfig{ranks: 3})
	workers := n.join(t)
	errs := make(chan error)
	go func() {
		_, err := workers[0].AllReduce(context.Background(), "w", []float32{1})
		errs <- err
	}()
	reason := errors.New("disk full \xff")
	workers[2].Abort(reason)
	var abort *worker.AbortError
	if err := <-errs; !errors.As(err, &abort) || !slices.Equal(abort.Ranks, []int{2}) || abort.Reason != "rank 2 gave up: disk full ?" {
		t.Errorf("%v, want an abort by rank 2 that says why", err)
	}
	if _, err := workers[2].AllReduce(t.Context(), "w", []float32{1}); !errors.Is(err, reason) {
		t.Errorf("the worker that gave up: %v, want its own reason", err)
	}
	workers[2].Abort(errors.New("another")) // is no news
	if err := workers[2].Leave(t.Context()); !errors.Is(err, reason) {
		t.Errorf("leave after giving up: %v", err)
	}
}

// TestAbortWithoutController: nobody waits for a controller that does not listen.
func TestAbortWithoutController(t *testing.T) {
	n := newTestnet(t, netConfig{ranks: 1})
	stuck := make(chan struct{})
	defer close(stuck)
	client := serve(t, &scripted{
		join: func(_ *api.JoinRequest, stream grpc.ServerStreamingServer[api.JoinEvent]) error {
			if err := sendReady(stream, goodReady()); err != nil {
				return err
			}
			<-stream.Context().Done()
			return nil
		},
		leave: func() { <-stuck },
	})
	w, err := worker.Join(t.Context(), client, worker.Config{Job: "train", Link: n.links[0]})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	reason := errors.New("no more")
	w.Abort(reason)
	if _, err := w.AllReduce(t.Context(), "k", nil); !errors.Is(err, reason) {
		t.Errorf("after giving up: %v", err)
	}
}

// TestControllerLost: a controller that goes away does not end a job that runs.
func TestControllerLost(t *testing.T) {
	n := newTestnet(t, netConfig{ranks: 1})
	client := serve(t, &scripted{join: func(_ *api.JoinRequest, stream grpc.ServerStreamingServer[api.JoinEvent]) error {
		r := goodReady()
		r.Job, r.Epoch, r.Ranks, r.Pool = testJob, testEpoch, 1, n.pool
		return sendReady(stream, r) // and the stream ends
	}})
	w, err := worker.Join(t.Context(), client, worker.Config{Job: "train", Link: n.links[0]})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	for range 20 {
		data := []int32{5}
		if _, err := w.AllReduceInt32(t.Context(), "k", data); err != nil || data[0] != 5 {
			t.Fatalf("sum %v, %v", data, err)
		}
	}
	if err := w.Leave(t.Context()); err != nil {
		t.Error(err)
	}
}

// TestAfterLeave: a worker that has left does nothing more.
func TestAfterLeave(t *testing.T) {
	n := newTestnet(t, netConfig{ranks: 1})
	w := n.join(t)[0]
	if err := w.Leave(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := w.AllReduce(t.Context(), "w", nil); !errors.Is(err, worker.ErrLeft) {
		t.Errorf("all-reduce: %v", err)
	}
	if err := w.Leave(t.Context()); !errors.Is(err, worker.ErrLeft) {
		t.Errorf("leave: %v", err)
	}
}

// TestLeaveWaits: nobody leaves before everybody does.
func TestLeaveWaits(t *testing.T) {
	n := newTestnet(t, netConfig{ranks: 2})
	workers := n.join(t)
	left := make(chan error, 1)
	go func() { left <- workers[0].Leave(t.Context()) }()
	select {
	case err := <-left:
		t.Fatalf("rank 0 left alone: %v", err)
	case <-time.After(50 * time.Millisecond):
	}
	if err := workers[1].Leave(t.Context()); err != nil {
		t.Error(err)
	}
	if err := <-left; err != nil {
		t.Error(err)
	}
}

// deafLink never receives anything, and waits until it is woken whatever the deadline says.
type deafLink struct {
	worker.Link
	wake    chan struct{}
	waiting chan struct{}
}

func (l *deafLink) Recv([][]byte, []int, time.Time) (int, error) {
	select {
	case l.waiting <- struct{}{}:
	default:
	}
	<-l.wake
	return 0, nil
}

func (l *deafLink) Wake() {
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

// TestWake: what ends an all-reduce wakes a worker that waits for packets.
func TestWake(t *testing.T) {
	for name, end := range map[string]func(cancel func(), other *worker.Worker){
		"cancel": func(cancel func(), _ *worker.Worker) { cancel() },
		"abort":  func(_ func(), other *worker.Worker) { other.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			n := newTestnet(t, netConfig{ranks: 2})
			links := []worker.Link{&deafLink{Link: n.links[0], wake: make(chan struct{}, 1), waiting: make(chan struct{}, 1)}, n.links[1]}
			workers := make([]*worker.Worker, 2)
			n.each(t, func(r int) (err error) {
				workers[r], err = worker.Join(t.Context(), n.client, worker.Config{Job: "train", Rank: r, Link: links[r]})
				return err
			})
			ctx, cancel := context.WithCancel(t.Context())
			errs := make(chan error)
			go func() {
				_, err := workers[0].AllReduce(ctx, "w", []float32{1})
				errs <- err
			}()
			<-links[0].(*deafLink).waiting
			end(cancel, workers[1])
			if err := <-errs; err == nil {
				t.Error("the all-reduce succeeded")
			}
			cancel()
			for _, w := range workers {
				w.Close()
			}
		})
	}
}

// TestQuietEnd: a stream that ends because all have left is nothing to warn of.
func TestQuietEnd(t *testing.T) {
	leave, logged := make(chan struct{}), make(chan string, 10)
	s := &scripted{join: func(_ *api.JoinRequest, stream grpc.ServerStreamingServer[api.JoinEvent]) error {
		r := goodReady()
		r.Ranks = 1
		if err := sendReady(stream, r); err != nil {
			return err
		}
		<-leave
		return nil
	}}
	s.leave = func() {
		close(leave)
		select { // the stream's end gets ahead of this answer
		case msg := <-logged:
			logged <- msg
		case <-time.After(50 * time.Millisecond):
		}
	}
	log := slog.New(slog.NewTextHandler(writerFunc(func(b []byte) { logged <- string(b) }), nil))
	link := worker.NewFrameLink(workerAddr(0), true, func([]byte) {})
	w, err := worker.Join(t.Context(), serve(t, s), worker.Config{Job: "train", Link: link}, worker.WithLogger(log))
	if err != nil {
		t.Fatal(err)
	}
	if err := w.Leave(t.Context()); err != nil {
		t.Error(err)
	}
	w.Close()
	if len(logged) > 0 {
		t.Errorf("logged %s", <-logged)
	}
}

type writerFunc func(b []byte)

func (f writerFunc) Write(b []byte) (int, error) { f(b); return len(b), nil }
