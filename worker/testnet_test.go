package worker_test

import (
	"context"
	"fmt"
	"math/bits"
	"math/rand/v2"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"

	"xagg/agg"
	"xagg/api"
	"xagg/wire"
	"xagg/worker"
)

// What the test network is made of, as in the lab.
const (
	testJob   = 7
	testEpoch = 3
)

var service = wire.Addr{MAC: [6]byte{2, 'x', 'a', 0, 0xff, 0xfe}, IP: [4]byte{10, 77, 255, 254}, Port: wire.Port}

func workerAddr(rank int) wire.Addr {
	return wire.Addr{MAC: [6]byte{2, 'x', 'a', 0, 0, byte(rank + 1)}, IP: [4]byte{10, 77, 0, byte(rank + 1)}, Port: wire.Port}
}

func serverAddr(s int) wire.Addr {
	return wire.Addr{MAC: [6]byte{2, 'x', 'a', 0, 1, byte(s + 1)}, IP: [4]byte{10, 77, 1, byte(s + 1)}, Port: wire.Port}
}

// netConfig describes a test network. The zero value with ranks set is a lossless one in mode "switch".
type netConfig struct {
	ranks     int
	steered   uint64 // ranks that a server gets; with servers
	servers   int
	pool      uint32 // default 16
	chunks    uint32 // longest round, default 64
	depth     uint32 // default 1
	quorum    uint32 // 0 = sync
	wait      time.Duration
	async     bool
	staleness uint32
	begun     uint64 // all-reduces before the ranks came
	seed      uint64
	loss      float64            // probability of a frame's loss on each hop
	dup       float64            // probability of a second copy
	delay     int                // frames that may overtake a frame
	tamper    func(*wire.Packet) // changes answers before they reach a worker
	watch     func(*wire.Packet) // sees what workers send
}

// testnet is a switch, servers and links between them in memory, built on the reference models of package agg, with a
// controller's service for the workers. Frames move when a worker sends: no goroutine of its own is needed.
type testnet struct {
	netConfig
	client api.ControllerClient

	mu      sync.Mutex
	rng     *rand.Rand
	start   time.Time
	sw      *agg.Switch
	srv     []*agg.Server
	links   []*worker.FrameLink
	pending []hop
}

// hop is a frame on its way to a node: 0..63 are the ranks, 64.. the servers, -1 is the switch. in is the switch port.
type hop struct {
	frame []byte
	to    int
	in    uint16
}

const toSwitch = -1

func newTestnet(t testing.TB, cfg netConfig) *testnet {
	n, stop := startTestnet(cfg)
	t.Cleanup(stop)
	return n
}

// startTestnet panics when the configuration is wrong.
func startTestnet(cfg netConfig) (n *testnet, stop func()) {
	if cfg.pool == 0 {
		cfg.pool = 16
	}
	if cfg.chunks == 0 {
		cfg.chunks = 64
	}
	n = &testnet{netConfig: cfg, rng: rand.New(rand.NewPCG(cfg.seed, 1)), start: time.Now()}
	n.sw = agg.NewSwitch(int(4 * cfg.pool))
	for range cfg.servers {
		n.srv = append(n.srv, agg.NewServer(int(n.serverRounds()*cfg.chunks)))
	}
	n.install(testEpoch)
	for r := range cfg.ranks {
		port := uint16(r + 1)
		n.links = append(n.links, worker.NewFrameLink(workerAddr(r), true, func(frame []byte) {
			n.mu.Lock()
			defer n.mu.Unlock()
			if n.watch != nil {
				var p wire.Packet
				if _, _, err := wire.ParseFrame(frame, &p); err != nil {
					panic(err)
				}
				n.watch(&p)
			}
			n.put(hop{frame, toSwitch, port})
			n.move()
		}))
	}
	n.client, stop = startController(newTestController(&api.Ready{
		Job: testJob, Epoch: testEpoch, Ranks: uint32(n.ranks), Pool: n.pool, MaxChunks: n.chunks, Depth: n.depth, Consistency: n.consistency(),
		AllReduces: n.begun,
		ServiceIp:  netip.AddrFrom4(service.IP).String(), ServiceMac: net.HardwareAddr(service.MAC[:]).String(),
	}))
	return n, stop
}

// serverRounds is the number of rounds that a server keeps: twice the depth, in powers of two; more with a quorum.
func (n *testnet) serverRounds() uint32 {
	switch {
	case n.quorum > 0:
		return 64
	case n.async:
		return 4
	}
	return 1 << bits.Len32(2*max(n.depth, 1)-1)
}

func (n *testnet) consistency() *api.Consistency {
	switch {
	case n.async:
		return &api.Consistency{Mode: "async", Staleness: n.staleness}
	case n.quorum == 0:
		return nil
	}
	return &api.Consistency{Mode: "quorum", Quorum: n.quorum, WaitUs: uint32(n.wait.Microseconds()), Rounds: n.serverRounds()}
}

// install installs an epoch of the job's plan.
func (n *testnet) install(epoch uint16) {
	all := ^uint64(0) >> (64 - n.ranks)
	members, ports := map[uint8]agg.Member{}, []uint16{}
	for r := range n.ranks {
		members[uint8(r)] = agg.Member{Port: uint16(r + 1), Src: ipNumber(workerAddr(r).IP)}
	}
	for s, srv := range n.srv {
		ports = append(ports, uint16(65+s))
		if err := srv.Install(agg.ServerPlan{Job: testJob, Epoch: epoch, Ranks: all, Chunks: n.chunks, Rounds: n.serverRounds(),
			Quorum: n.quorum, WaitUs: uint32(n.wait.Microseconds()), Async: n.async, Staleness: n.staleness}); err != nil {
			panic(err)
		}
	}
	err := n.sw.Install(agg.SwitchPlan{Job: testJob, Epoch: epoch, Ranks: all, Cohort: all &^ n.steered,
		Servers: len(n.srv), Base: uint32(epoch) % 2 * 2 * n.pool, Pool: n.pool,
		Quorum: n.quorum > 0, WaitUs: uint32(n.wait.Microseconds())}, members, ports)
	if err != nil {
		panic(err)
	}
}

func ipNumber(ip [4]byte) uint32 {
	return uint32(ip[0])<<24 | uint32(ip[1])<<16 | uint32(ip[2])<<8 | uint32(ip[3])
}

// join lets all ranks join, concurrently, and returns the workers. They are closed with the test.
func (n *testnet) join(t testing.TB, opts ...worker.Option) []*worker.Worker {
	t.Helper()
	workers := make([]*worker.Worker, n.ranks)
	n.each(t, func(r int) (err error) {
		workers[r], err = n.joinRank(t.Context(), r, opts...)
		return err
	})
	for _, w := range workers {
		t.Cleanup(func() { w.Close() })
	}
	return workers
}

func (n *testnet) joinRank(ctx context.Context, r int, opts ...worker.Option) (*worker.Worker, error) {
	return worker.Join(ctx, n.client, worker.Config{Job: "train", Rank: r, Link: n.links[r]}, opts...)
}

// each calls f for every rank, concurrently, and fails the test if one fails.
func (n *testnet) each(t testing.TB, f func(rank int) error) {
	t.Helper()
	for r, err := range n.errors(f) {
		if err != nil {
			t.Errorf("rank %d: %v", r, err)
		}
	}
	if t.Failed() {
		t.FailNow()
	}
}

// errors calls f for every rank, concurrently, and returns what they return.
func (n *testnet) errors(f func(rank int) error) []error {
	errs := make([]error, n.ranks)
	var wg sync.WaitGroup
	for r := range n.ranks {
		wg.Go(func() { errs[r] = f(r) })
	}
	wg.Wait()
	return errs
}

// put sends a frame over a link, with the faults that are asked for.
func (n *testnet) put(h hop) {
	if n.rng.Float64() < n.loss {
		return
	}
	n.pending = append(n.pending, h)
	if n.rng.Float64() < n.dup {
		n.pending = append(n.pending, hop{append([]byte(nil), h.frame...), h.to, h.in})
	}
}

// move delivers frames, in random order where frames may overtake each other, until few enough are left.
func (n *testnet) move() {
	for len(n.pending) > n.delay {
		i := 0
		if n.delay > 0 {
			i = n.rng.IntN(len(n.pending))
		}
		h := n.pending[i]
		n.pending = append(n.pending[:i], n.pending[i+1:]...)
		switch {
		case h.to == toSwitch:
			n.atSwitch(h)
		case h.to >= 64:
			n.atServer(h.to-64, h)
		default:
			n.links[h.to].In(h.frame)
		}
	}
}

func (n *testnet) now() uint64 { return uint64(time.Since(n.start).Microseconds()) }

func (n *testnet) atSwitch(h hop) {
	var p wire.Packet
	src, dst, err := wire.ParseFrame(h.frame, &p)
	if err != nil {
		return // counted and dropped
	}
	out := n.sw.Handle(n.now(), agg.Ingress{Port: h.in, Src: ipNumber(src.IP), ToService: dst.IP == service.IP}, &p)
	switch out.Dest {
	case agg.ToSender:
		n.toRank(int(h.in-1), &p)
	case agg.ToAll:
		for r := range n.ranks {
			n.toRank(r, &p)
		}
	case agg.ToCohort:
		for m := ^uint64(0) >> (64 - n.ranks) &^ n.steered; m != 0; m &= m - 1 {
			n.toRank(bits.TrailingZeros64(m), &p)
		}
	case agg.ToServer:
		n.put(hop{wire.AppendFrame(nil, src, serverAddr(out.Server), &p, true), 64 + out.Server, 0})
	case agg.ToServerAsService:
		n.put(hop{wire.AppendFrame(nil, service, serverAddr(out.Server), &p, true), 64 + out.Server, 0})
	case agg.ToAddress:
		n.toRank(int(dst.IP[3]-1), &p)
	}
}

func (n *testnet) toRank(r int, p *wire.Packet) {
	q := *p
	if n.tamper != nil {
		n.tamper(&q)
	}
	n.put(hop{wire.AppendFrame(nil, service, workerAddr(r), &q, false), r, 0})
}

func (n *testnet) atServer(s int, h hop) {
	var p wire.Packet
	src, _, err := wire.ParseFrame(h.frame, &p)
	if err != nil {
		return
	}
	out := n.srv[s].Handle(n.now(), &p)
	dst := service
	switch out.Dest {
	case agg.Nowhere:
		return
	case agg.ToSender:
		dst = src
	}
	n.put(hop{wire.AppendFrame(nil, serverAddr(s), dst, &p, false), toSwitch, uint16(65 + s)})
}

// testController is the rendezvous of one job, as the controller's service promises it.
type testController struct {
	api.UnimplementedControllerServer
	ready *api.Ready

	mu      sync.Mutex
	digests map[uint32]string
	left    uint64
	abort   *api.Abort
	changed chan struct{} // closed and replaced at every change
}

func newTestController(ready *api.Ready) *testController {
	return &testController{ready: ready, digests: map[uint32]string{}, changed: make(chan struct{})}
}

// serve serves a controller for the time of a test and returns its client.
func serve(t testing.TB, c api.ControllerServer) api.ControllerClient {
	client, stop := startController(c)
	t.Cleanup(stop)
	return client
}

// startController serves a controller in memory.
func startController(c api.ControllerServer) (client api.ControllerClient, stop func()) {
	lis := bufconn.Listen(1 << 20)
	srv := grpc.NewServer()
	api.RegisterControllerServer(srv, c)
	done := make(chan struct{})
	go func() { defer close(done); srv.Serve(lis) }()
	conn, err := grpc.NewClient("passthrough:controller", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return lis.DialContext(ctx) }))
	if err != nil {
		panic(err)
	}
	return api.NewControllerClient(conn), func() {
		conn.Close()
		srv.Stop()
		<-done
	}
}

// change calls f under the lock and wakes everybody who waits.
func (c *testController) change(f func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	f()
	close(c.changed)
	c.changed = make(chan struct{})
}

// wait waits until the job was aborted or ok, called under the lock, holds.
func (c *testController) wait(ctx context.Context, ok func() bool) (*api.Abort, error) {
	for {
		c.mu.Lock()
		abort, good, changed := c.abort, ok(), c.changed
		c.mu.Unlock()
		if abort != nil || good {
			return abort, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

func (c *testController) Join(req *api.JoinRequest, stream grpc.ServerStreamingServer[api.JoinEvent]) error {
	c.change(func() {
		for r, d := range c.digests {
			if d != req.Digest && c.abort == nil {
				c.abort = &api.Abort{Reason: fmt.Sprintf("rank %d plans %q, rank %d plans %q", req.Rank, req.Digest, r, d),
					Ranks: []uint32{req.Rank}}
			}
		}
		c.digests[req.Rank] = req.Digest
	})
	abort, err := c.wait(stream.Context(), func() bool { return len(c.digests) == int(c.ready.Ranks) })
	if err == nil && abort == nil {
		if err := stream.Send(&api.JoinEvent{Event: &api.JoinEvent_Ready{Ready: c.ready}}); err != nil {
			return err
		}
		abort, err = c.wait(stream.Context(), c.finished)
	}
	if abort != nil {
		return stream.Send(&api.JoinEvent{Event: &api.JoinEvent_Abort{Abort: abort}})
	}
	c.change(func() {
		if c.abort == nil && c.left>>req.Rank&1 == 0 {
			c.abort = &api.Abort{Reason: fmt.Sprintf("rank %d went away", req.Rank), Ranks: []uint32{req.Rank}}
		}
	})
	return err
}

func (c *testController) finished() bool { return bits.OnesCount64(c.left) == int(c.ready.Ranks) }

func (c *testController) Leave(ctx context.Context, req *api.LeaveRequest) (*api.LeaveReply, error) {
	if req.Id != c.ready.Job {
		return nil, status.Errorf(codes.Aborted, "leave incarnation %d, want %d", req.Id, c.ready.Job)
	}
	if req.Error != "" {
		c.change(func() {
			if c.abort == nil {
				c.abort = &api.Abort{Reason: fmt.Sprintf("rank %d gave up: %s", req.Rank, req.Error), Ranks: []uint32{req.Rank}}
			}
		})
		return &api.LeaveReply{}, nil
	}
	c.change(func() { c.left |= 1 << req.Rank })
	abort, err := c.wait(ctx, c.finished)
	if abort != nil {
		return nil, status.Error(codes.Aborted, abort.Reason)
	}
	return &api.LeaveReply{}, err
}
