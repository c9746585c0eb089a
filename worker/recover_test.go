package worker_test

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"xagg/api"
	"xagg/wire"
	"xagg/worker"
)

// recoverer is a controller whose streams and recoveries the test directs.
type recoverer struct {
	api.UnimplementedControllerServer
	ready   *api.Ready
	joins   chan *api.JoinRequest
	streams chan error // ends a stream
	events  chan *api.JoinEvent
	again   error // what a rank that comes back gets instead of its seat
	frozen  chan *api.FrozenRequest
	over    chan *api.HandOverRequest
	resume  chan *api.ResumeReply
	reports chan *api.ReportRequest
}

func newRecoverer(ready *api.Ready) *recoverer {
	return &recoverer{
		ready: ready, joins: make(chan *api.JoinRequest, 10), streams: make(chan error), events: make(chan *api.JoinEvent),
		frozen: make(chan *api.FrozenRequest, 10), over: make(chan *api.HandOverRequest, 10), resume: make(chan *api.ResumeReply),
		reports: make(chan *api.ReportRequest),
	}
}

func (c *recoverer) Join(req *api.JoinRequest, stream grpc.ServerStreamingServer[api.JoinEvent]) error {
	c.joins <- req
	if req.Id != 0 && c.again != nil {
		return c.again
	}
	if err := stream.Send(&api.JoinEvent{Event: &api.JoinEvent_Ready{Ready: c.ready}}); err != nil {
		return err
	}
	for {
		select {
		case event := <-c.events:
			if err := stream.Send(event); err != nil {
				return err
			}
		case err := <-c.streams:
			return err
		case <-stream.Context().Done():
			return nil
		}
	}
}

func (c *recoverer) Frozen(ctx context.Context, req *api.FrozenRequest) (*api.FrozenReply, error) {
	c.frozen <- req
	if req.Recovery == 1 { // is superseded
		<-ctx.Done()
		return nil, ctx.Err()
	}
	reply := &api.FrozenReply{}
	for _, r := range req.Rounds {
		for chunk := range r.Chunks {
			if r.Held[chunk/64]>>(chunk%64)&1 != 0 {
				reply.HandOver = append(reply.HandOver, &api.ChunkID{Round: r.Round, Chunk: chunk})
			}
		}
	}
	return reply, nil
}

func (c *recoverer) HandOver(ctx context.Context, req *api.HandOverRequest) (*api.ResumeReply, error) {
	c.over <- req
	select {
	case r := <-c.resume:
		return r, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (c *recoverer) Leave(context.Context, *api.LeaveRequest) (*api.LeaveReply, error) {
	return &api.LeaveReply{}, nil
}

func (c *recoverer) Report(ctx context.Context, req *api.ReportRequest) (*api.ReportReply, error) {
	select {
	case c.reports <- req:
	default: // nobody wants to know
	}
	return &api.ReportReply{}, nil
}

func freezeEvent(number uint64) *api.JoinEvent {
	return &api.JoinEvent{Event: &api.JoinEvent_Freeze{Freeze: &api.Freeze{Recovery: number, Reason: "the switch has lost its memory"}}}
}

// alone is a worker of a job of one rank, its network and its controller. While deaf is set nothing it sends arrives.
type alone struct {
	*testnet
	*worker.Worker
	ctl  *recoverer
	sent atomic.Int64
}

func newAlone(t *testing.T, opts ...worker.Option) *alone {
	a := &alone{}
	a.testnet = newTestnet(t, netConfig{ranks: 1, pool: 2, watch: func(*wire.Packet) { a.sent.Add(1) }})
	r := goodReady()
	r.Job, r.Epoch, r.Ranks, r.Pool, r.MaxChunks = testJob, testEpoch, 1, 2, a.chunks
	a.ctl = newRecoverer(r)
	w, err := worker.Join(t.Context(), serve(t, a.ctl), worker.Config{Job: "train", Link: a.links[0]}, opts...)
	if err != nil {
		t.Fatal(err)
	}
	a.Worker = w
	t.Cleanup(func() { w.Close() })
	<-a.ctl.joins
	return a
}

func (a *alone) setLoss(p float64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.loss = p
}

func receive[T any](t *testing.T, what string, c <-chan T) T {
	t.Helper()
	select {
	case v := <-c:
		return v
	case <-time.After(10 * time.Second):
		t.Fatalf("waited in vain: %s", what)
		panic("not reached")
	}
}

// TestRecover stops a worker in the middle of an all-reduce, twice since the first recovery comes to nothing. It sends
// nothing until it resumes, and then ends the all-reduce under the new epoch.
func TestRecover(t *testing.T) {
	a := newAlone(t)
	data := make([]int32, 1000)
	for i := range data {
		data[i] = int32(i)
	}
	if _, err := a.AllReduceInt32(t.Context(), "x", data); err != nil {
		t.Fatal(err)
	}
	a.setLoss(1)
	p, err := a.StartInt32("x", data)
	if err != nil {
		t.Fatal(err)
	}
	a.ctl.events <- freezeEvent(1)
	receive(t, "the first recovery", a.ctl.frozen)
	a.ctl.events <- freezeEvent(2)
	a.ctl.events <- freezeEvent(2) // told once more
	state := receive(t, "the second recovery", a.ctl.frozen)
	sent := a.sent.Load()
	if state.Recovery != 2 || state.First != 1 || state.Next != 2 || state.Boundary != 2 || state.Seq != 8 || state.AllReduces != 2 || len(state.Rounds) != 2 ||
		state.Rounds[0].Held[0] != 0b1111 || state.Rounds[1].Held[0] != 0 || state.Id != testJob {
		t.Errorf("it has %v", state)
	}
	over := receive(t, "what it hands over", a.ctl.over)
	if len(over.Results) != 4 {
		t.Errorf("%d results are handed over, want 4", len(over.Results))
	}
	for i, b := range over.Results {
		var p wire.Packet
		if err := p.Decode(b); err != nil || p.Type != wire.TypeResult || p.Round != 0 || p.Chunk != uint32(i) || !p.TagOK() {
			t.Errorf("result %d is %+v, %v", i, p.Header, err)
		}
	}
	a.mu.Lock()
	a.install(testEpoch + 1)
	a.sw.Remove(testJob, testEpoch)
	a.loss = 0
	a.mu.Unlock()
	if n := a.sent.Load(); n != sent {
		t.Errorf("%d packets were sent while it was frozen", n-sent)
	}
	a.ctl.resume <- &api.ResumeReply{Epoch: testEpoch + 1, Round: 1, Seq: 20, Finals: []*api.Held{{Round: 1, Chunks: 4, Held: []uint64{0}}}}
	info, err := p.Wait(t.Context())
	if err != nil || info.Epoch != testEpoch+1 {
		t.Fatalf("%+v, %v", info, err)
	}
	for i, v := range data {
		if v != int32(i) {
			t.Fatalf("value %d is %d", i, v)
		}
	}
	if len(a.ctl.frozen) != 0 {
		t.Error("it took part in a recovery twice")
	}
}

// TestRecoverIdle: a worker without an all-reduce takes part as well, and what it begins meanwhile waits.
func TestRecoverIdle(t *testing.T) {
	a := newAlone(t)
	a.ctl.events <- freezeEvent(2)
	receive(t, "the recovery", a.ctl.over)
	p, err := a.StartInt32("x", []int32{5})
	if err != nil {
		t.Fatal(err)
	}
	if n := a.sent.Load(); n != 0 {
		t.Errorf("%d packets were sent", n)
	}
	a.mu.Lock()
	a.install(testEpoch + 1)
	a.mu.Unlock()
	a.ctl.resume <- &api.ResumeReply{Epoch: testEpoch + 1}
	if info, err := p.Wait(t.Context()); err != nil || info.Epoch != testEpoch+1 {
		t.Errorf("%+v, %v", info, err)
	}
	if err := a.Leave(t.Context()); err != nil {
		t.Error(err)
	}
}

// TestRecoverInVain: the deadline of an all-reduce goes on, and its error says what the job recovers from.
func TestRecoverInVain(t *testing.T) {
	a := newAlone(t, worker.WithTimeout(200*time.Millisecond))
	a.setLoss(1)
	p, err := a.StartInt32("x", []int32{5})
	if err != nil {
		t.Fatal(err)
	}
	a.ctl.events <- freezeEvent(2)
	_, err = p.Wait(t.Context())
	var late *worker.DeadlineError
	if !errors.As(err, &late) || !strings.Contains(err.Error(), "for the job to recover: the switch has lost its memory") {
		t.Errorf("%v", err)
	}
}

// TestRecoverWrongly: a controller that resumes a worker with something else than it needs ends the job, not its sums.
func TestRecoverWrongly(t *testing.T) {
	a := newAlone(t)
	a.setLoss(1)
	p, err := a.StartInt32("x", []int32{5})
	if err != nil {
		t.Fatal(err)
	}
	a.ctl.events <- freezeEvent(2)
	receive(t, "the recovery", a.ctl.over)
	a.ctl.resume <- &api.ResumeReply{Epoch: testEpoch + 1, Round: 1}
	if _, err := p.Wait(t.Context()); err == nil || !strings.Contains(err.Error(), "the RESULT of round 0, chunk 0 is here: false, it is final: true") {
		t.Errorf("%v", err)
	}
}

// TestListenAgain: a worker whose stream breaks takes its place again, and hears what is said there.
func TestListenAgain(t *testing.T) {
	a := newAlone(t)
	for range 2 {
		a.ctl.streams <- status.Error(codes.Unavailable, "going down")
		if req := receive(t, "the next stream", a.ctl.joins); req.Id != testJob || req.Job != "train" || req.UdpPort != wire.Port {
			t.Errorf("join request %v", req)
		}
	}
	a.ctl.events <- &api.JoinEvent{Event: &api.JoinEvent_Abort{Abort: &api.Abort{Reason: "enough"}}}
	a.setLoss(1)
	var abort *worker.AbortError
	if _, err := a.AllReduceInt32(t.Context(), "x", []int32{5}); !errors.As(err, &abort) || abort.Reason != "enough" {
		t.Errorf("%v", err)
	}
}

// TestForgotten: a controller that does not know the worker is left alone.
func TestForgotten(t *testing.T) {
	said := make(chan string, 10)
	a := newAlone(t, worker.WithLogger(slog.New(slog.NewTextHandler(writerFunc(func(b []byte) {
		if strings.Contains(string(b), "does not know this worker any more") {
			said <- string(b)
		}
	}), nil))))
	a.ctl.again = status.Error(codes.Aborted, "who are you?")
	a.ctl.streams <- status.Error(codes.Unavailable, "going down")
	receive(t, "the next stream", a.ctl.joins)
	receive(t, "a word about it", said)
	for range 3 {
		if _, err := a.AllReduceInt32(t.Context(), "x", []int32{5}); err != nil {
			t.Fatal(err)
		}
	}
	if err := a.Leave(t.Context()); err != nil {
		t.Error(err)
	}
	a.Close()
	if len(said) != 0 || len(a.ctl.joins) != 0 {
		t.Errorf("said %d times more, joined %d times more", len(said), len(a.ctl.joins))
	}
}

// TestProgress: a worker tells how far it is, every second.
func TestProgress(t *testing.T) {
	a := newAlone(t)
	if p := receive(t, "the first report", a.ctl.reports).Progress; p.Waiting || p.Round != 0 || p.ForUs == 0 {
		t.Errorf("before the first all-reduce: %v", p)
	}
	a.setLoss(1)
	if _, err := a.StartInt32("x", make([]int32, 300)); err != nil {
		t.Fatal(err)
	}
	r := receive(t, "the next report", a.ctl.reports)
	if p := r.Progress; r.Epoch != 0 || r.Id != testJob || !p.Waiting || p.Round != 0 || p.ChunksLeft != 2 || p.Chunk != 0 || p.Key != "x" || p.Missing != 0 {
		t.Errorf("in an all-reduce: %v", r)
	}
}
