package worker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"math/bits"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"xagg/api"
	"xagg/wire"
	"xagg/worker/scale"
	"xagg/worker/transport"
)

// DefaultTimeout is how long an all-reduce may take unless [WithTimeout] says otherwise.
const DefaultTimeout = time.Minute

// Config says which worker of which job this is.
type Config struct {
	Job  string // name
	Rank int
	// Link is closed by Worker.Close, or by Join when it fails.
	Link Link
	// Plan is what all ranks must agree on beside the protocol, in words: which tensors of which lengths they are going
	// to reduce. The controller compares it and names the odd rank. It may be empty.
	Plan string
}

// Option changes how a worker works.
type Option func(*Worker)

// WithTimeout sets how long an all-reduce may take, from its call to its last result.
func WithTimeout(d time.Duration) Option { return func(w *Worker) { w.timeout = d } }

// WithLogger sets where the worker logs to; the default is slog.Default().
func WithLogger(log *slog.Logger) Option { return func(w *Worker) { w.log = log } }

// WithObserver has f called after every round that has succeeded, before the all-reduce returns.
func WithObserver(f func(Round)) Option { return func(w *Worker) { w.observe = f } }

// Round is what an observer sees of a round: the integers that the network has summed.
type Round = transport.Round

// Worker takes part in a job. Its methods may be called from several goroutines; all-reduces are carried out in the
// order in which they were begun.
type Worker struct {
	rank    int
	job     string
	digest  string
	ready   *api.Ready
	client  api.ControllerClient
	link    Link
	service string
	timeout time.Duration
	log     *slog.Logger
	observe func(Round)

	// ctx is the session: it ends, with its cause, when the worker leaves, fails or is told to stop, and so does the
	// stream to the controller.
	ctx     context.Context
	end     context.CancelCauseFunc
	stream  chan struct{} // closed when nobody listens to the stream any more
	reports *reporter
	leaving atomic.Bool
	failing atomic.Bool // this worker's own error is about to end the session

	driven chan struct{} // closed when nobody moves packets any more
	work   chan struct{} // wakes the driver where it was idle
	start  time.Time     // origin of the endpoint's time
	bufs   [][]byte      // of the driver
	sizes  []int

	mu       sync.Mutex // guards what follows
	endpoint *transport.Endpoint
	pending  []*Pending // in the order of their calls
	idle     bool       // no all-reduce is under way, and the driver waits for work
	failure  error      // why the endpoint is of no use any more
	linkErr  error      // the link's last, since an all-reduce was begun
	linkLoss uint64
	batch    [][]byte

	recovery       uint64 // number of the last recovery
	recovering     string // why the job recovers; empty = it does not
	giveUpRecovery context.CancelFunc
	recoveries     sync.WaitGroup
}

// maxDepth is the largest depth that a job can have.
const maxDepth = 16

// batchSize is the number of packets that one system call moves at most.
const batchSize = 64

// Join takes a worker's place in a job and waits until all ranks have taken theirs. ctx bounds that wait. It ends
// early, with an error, when the job is removed or the ranks do not agree on what they are going to do.
func Join(ctx context.Context, client api.ControllerClient, cfg Config, opts ...Option) (*Worker, error) {
	w := &Worker{
		rank:    cfg.Rank,
		job:     cfg.Job,
		client:  client,
		link:    cfg.Link,
		timeout: DefaultTimeout,
		log:     slog.Default(),
		start:   time.Now(),
		stream:  make(chan struct{}),
		driven:  make(chan struct{}),
		work:    make(chan struct{}, 1),
		idle:    true,
		batch:   make([][]byte, 0, batchSize),
		bufs:    make([][]byte, batchSize),
		sizes:   make([]int, batchSize),

		giveUpRecovery: func() {},
	}
	for i := range w.bufs {
		w.bufs[i] = make([]byte, wire.MaxLen+1) // one more shows what is too long
	}
	for _, opt := range opts {
		opt(w)
	}
	w.log = w.log.With("job", cfg.Job, "rank", cfg.Rank)
	w.ctx, w.end = context.WithCancelCause(context.Background())
	if err := w.join(ctx, cfg); err != nil {
		w.end(err)
		w.link.Close()
		return nil, fmt.Errorf("join job %q as rank %d: %w", cfg.Job, cfg.Rank, err)
	}
	return w, nil
}

func (w *Worker) join(ctx context.Context, cfg Config) error {
	if cfg.Rank < 0 || cfg.Rank >= wire.MaxRanks {
		return fmt.Errorf("ranks are 0 to %d", wire.MaxRanks-1)
	}
	stop := context.AfterFunc(ctx, func() { w.end(context.Cause(ctx)) })
	defer stop()
	w.digest = digest(cfg.Plan)
	events, err := w.client.Join(w.ctx, w.joinRequest())
	if err != nil {
		return w.rpcError(err)
	}
	event, err := events.Recv()
	if err != nil {
		return w.rpcError(err)
	}
	switch e := event.Event.(type) {
	case *api.JoinEvent_Ready:
		w.ready = e.Ready
	case *api.JoinEvent_Abort:
		return aborted(e.Abort)
	default:
		return fmt.Errorf("controller sent %T first, want ready or abort", e)
	}
	if err := w.setUp(); err != nil {
		return fmt.Errorf("controller's ready event: %w", err)
	}
	if !stop() {
		return context.Cause(ctx) // came in the last moment; the stream is ending
	}
	go w.listen(events)
	w.reports = newReporter(uint16(w.ready.Epoch))
	go w.reports.run(w)
	go w.drive()
	context.AfterFunc(w.ctx, w.link.Wake)
	return nil
}

func (w *Worker) joinRequest() *api.JoinRequest {
	local := w.link.LocalAddr()
	return &api.JoinRequest{
		Job: w.job, Rank: uint32(w.rank), Ip: local.Addr().String(), UdpPort: uint32(local.Port()), Digest: w.digest,
	}
}

// digest is what all ranks must agree on.
func digest(plan string) string {
	return fmt.Sprintf("xagg/%d lanes=%d margin=%d %s", wire.Version, wire.MaxLanes, scale.Margin, plan)
}

// rpcError makes an error of a call to the controller readable: the reason for which the session has ended, if that is
// what ended the call, or the controller's words.
func (w *Worker) rpcError(err error) error {
	if w.ctx.Err() != nil {
		return context.Cause(w.ctx)
	}
	if _, ok := status.FromError(err); ok {
		return &rpcError{err}
	}
	return err
}

// setUp checks the controller's ready event and makes everything that depends on it.
func (w *Worker) setUp() error {
	r := w.ready
	switch {
	case r.Job == 0 || r.Job > 0xffff:
		return fmt.Errorf("job id %d, want 1..65535", r.Job)
	case r.Epoch == 0 || r.Epoch > 0xffff:
		return fmt.Errorf("epoch %d, want 1..65535", r.Epoch)
	case r.Ranks <= uint32(w.rank) || r.Ranks > wire.MaxRanks:
		return fmt.Errorf("%d ranks, want 1..%d and more than this one's %d", r.Ranks, wire.MaxRanks, w.rank)
	case bits.OnesCount32(r.Pool) != 1:
		return fmt.Errorf("pool of %d slots, want a power of two", r.Pool)
	case r.Depth > maxDepth:
		return fmt.Errorf("depth of %d rounds, want at most %d", r.Depth, maxDepth)
	case r.AllReduces > math.MaxInt:
		return fmt.Errorf("%d all-reduces have begun, want at most %d", r.AllReduces, math.MaxInt)
	case r.MaxChunks == 0 || r.MaxChunks > 1<<24:
		return fmt.Errorf("at most %d chunks in a round, want 1..%d", r.MaxChunks, 1<<24)
	}
	ip, err := netip.ParseAddr(r.ServiceIp)
	if err != nil || !ip.Is4() {
		return fmt.Errorf("service address %q, want IPv4", r.ServiceIp)
	}
	mac, err := net.ParseMAC(r.ServiceMac)
	if err != nil || len(mac) != 6 {
		return fmt.Errorf("service MAC %q, want 6 bytes", r.ServiceMac)
	}
	w.service = netip.AddrPortFrom(ip, wire.Port).String()
	if err := w.link.Connect(wire.Addr{MAC: [6]byte(mac), IP: ip.As4(), Port: wire.Port}); err != nil {
		return err
	}
	c := r.Consistency
	switch c.GetMode() {
	case "", "sync":
		c = nil
	case "quorum":
		switch {
		case c.Quorum == 0 || c.Quorum > r.Ranks:
			return fmt.Errorf("quorum of %d ranks, want 1..%d", c.Quorum, r.Ranks)
		case c.Rounds < 2*max(r.Depth, 1):
			return fmt.Errorf("servers keep %d rounds, want at least %d", c.Rounds, 2*max(r.Depth, 1))
		}
	case "async":
		if uint64(r.Ranks)*(2*uint64(c.Staleness)+3) > 1<<24 {
			return fmt.Errorf("staleness of %d contributions, want less", c.Staleness)
		}
	default:
		return fmt.Errorf("consistency %q, want sync, quorum or async", c.GetMode())
	}
	w.endpoint = transport.New(transport.Config{
		Job:       uint16(r.Job),
		Epoch:     uint16(r.Epoch),
		Rank:      w.rank,
		Ranks:     int(r.Ranks),
		Pool:      r.Pool,
		Depth:     int(r.Depth),
		Quorum:    int(c.GetQuorum()),
		Wait:      time.Duration(c.GetWaitUs()) * time.Microsecond,
		Rounds:    int(c.GetRounds()),
		Async:     c.GetMode() == "async",
		Staleness: int(c.GetStaleness()),
		MaxChunks: int(r.MaxChunks),
		Observe:   w.observe,

		Round: r.Round, Seq: r.Seq, AllReduces: r.AllReduces, Returns: r.Returns,
	})
	return nil
}

func aborted(a *api.Abort) *AbortError {
	e := &AbortError{Reason: a.Reason}
	for _, r := range a.Ranks {
		e.Ranks = append(e.Ranks, int(r))
	}
	return e
}

// Rank returns the worker's rank.
func (w *Worker) Rank() int { return w.rank }

// Ranks returns the number of the job's workers.
func (w *Worker) Ranks() int { return int(w.ready.Ranks) }

// Begun returns how many all-reduces the job had begun before this worker's first one: 0, unless it has come back to a job
// with a quorum. Whoever calls the job's all-reduces goes on with the one of that number, counted from 0, which may be in
// the middle of a step.
func (w *Worker) Begun() int { return int(w.ready.AllReduces) }

// Leave says that this worker has finished its last all-reduce, and waits until all have: until then the job, and what
// the others may still ask of it, stays. It waits for the all-reduces under way; no other can begin.
func (w *Worker) Leave(ctx context.Context) error {
	w.leaving.Store(true)
	if err := w.finish(ctx); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(w.ctx, cancel)()
	// A controller that is being restarted finds the job again.
	patience, stop := context.WithTimeout(ctx, leavePatience)
	defer stop()
	err := w.persist(patience, func() error {
		_, err := w.client.Leave(ctx, w.leaveRequest())
		return err
	})
	if err != nil {
		if status.Code(err) == codes.Aborted {
			select { // the stream's last event says by whom
			case <-w.stream:
			case <-ctx.Done():
			}
		}
		return fmt.Errorf("leave job %q as rank %d: %w", w.job, w.rank, w.rpcError(err))
	}
	w.end(ErrLeft)
	return nil
}

// leavePatience is how long a worker that has finished looks for a controller that does not answer.
const leavePatience = 30 * time.Second

// finish waits for the all-reduces under way.
func (w *Worker) finish(ctx context.Context) error {
	w.mu.Lock()
	pending := slices.Clone(w.pending)
	w.mu.Unlock()
	for _, p := range pending {
		if _, err := p.Wait(ctx); err != nil && w.ctx.Err() == nil {
			return fmt.Errorf("leave job %q as rank %d: %w", w.job, w.rank, err)
		}
	}
	if w.ctx.Err() != nil {
		return w.ended()
	}
	return nil
}

func (w *Worker) leaveRequest() *api.LeaveRequest {
	return &api.LeaveRequest{Job: w.job, Rank: uint32(w.rank), Id: w.ready.Job}
}

// Abort ends the job for all its workers because this one cannot go on, and tells the others why. It does so within
// a second, or not at all where the controller does not answer. An all-reduce that fails has done it already.
func (w *Worker) Abort(reason error) {
	if w.ctx.Err() != nil || !w.failing.CompareAndSwap(false, true) {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), farewellTimeout)
	defer cancel()
	req := w.leaveRequest()
	req.Error = strings.ToValidUTF8(words(reason), "?")
	if _, err := w.client.Leave(ctx, req); err != nil {
		w.log.Warn("could not tell the others why the job ends", "err", w.rpcError(err))
	}
	w.end(reason)
}

// farewellTimeout bounds what a worker that fails does for the others' information.
const farewellTimeout = time.Second

// words says what is wrong for those who are told by whom.
func words(err error) string {
	if bad, ok := errors.AsType[*NonFiniteError](err); ok {
		return bad.What()
	}
	if s := err.Error(); s != "" {
		return s
	}
	return fmt.Sprintf("%T", err)
}

// ended says why the session is over, or is about to be.
func (w *Worker) ended() error {
	err := context.Cause(w.ctx)
	if err == nil {
		if err = w.failure; err == nil {
			return ErrLeft
		}
	}
	if _, ok := errors.AsType[*AbortError](err); ok || err == ErrLeft {
		return err
	}
	return fmt.Errorf("job %q ended before: %w", w.job, err)
}

// Close frees all that the worker holds. Without a Leave or an Abort before it the job ends for all its workers, who
// are not told why.
func (w *Worker) Close() error {
	w.end(ErrLeft)
	<-w.stream
	<-w.reports.done
	w.recoveries.Wait()
	<-w.driven // all-reduces under way end first
	return w.link.Close()
}
