package controller

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"

	"xagg/api"
	"xagg/controller/p4rt"
	"xagg/controller/p4rt/p4rttest"
	"xagg/policy"
	"xagg/wire"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// testConfig is a lab of 4 workers and 2 servers.
func testConfig() Config {
	cfg := DefaultConfig()
	cfg.Switch.Address = "switch:1"
	cfg.Service = Service{netip.MustParseAddr("10.77.255.254"), MAC{2, 0x78, 0x61, 0, 0xff, 0xfe}}
	for i := range byte(4) {
		cfg.Hosts = append(cfg.Hosts, Host{
			Name: fmt.Sprintf("w%d", i), IP: netip.AddrFrom4([4]byte{10, 77, 0, i + 1}), MAC: MAC{2, 0x78, 0x61, 0, 0, i + 1}, Port: uint16(i) + 1,
		})
	}
	for i := range byte(2) {
		cfg.Servers = append(cfg.Servers, Server{
			Name: fmt.Sprintf("s%d", i), Agent: fmt.Sprintf("s%d:1", i),
			IP: netip.AddrFrom4([4]byte{10, 77, 1, i + 1}), MAC: MAC{2, 0x78, 0x61, 0, 1, i + 1}, Port: uint16(i) + 65,
		})
	}
	return cfg
}

var hybrid = policy.Static{Mode: policy.ModeHybrid, Steer: []int{3}, Pool: 16}

// fakeAgent is an aggregation server's agent with room for a number of slots.
type fakeAgent struct {
	api.UnimplementedAgentServer
	name string

	mu    sync.Mutex
	lis   *bufconn.Listener
	srv   *grpc.Server
	slots uint32
	plans map[planKey]*api.ServerPlan
	calls []string
}

func newFakeAgent(tb testing.TB, name string, slots uint32) *fakeAgent {
	a := &fakeAgent{name: name, slots: slots, plans: make(map[planKey]*api.ServerPlan)}
	a.start()
	tb.Cleanup(a.stop)
	return a
}

func (a *fakeAgent) start() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.lis, a.srv = bufconn.Listen(1<<20), grpc.NewServer()
	clear(a.plans)
	api.RegisterAgentServer(a.srv, a)
	go a.srv.Serve(a.lis)
}

func (a *fakeAgent) stop() { a.srv.Stop() }

func (a *fakeAgent) dial(ctx context.Context) (net.Conn, error) {
	a.mu.Lock()
	lis := a.lis
	a.mu.Unlock()
	return lis.DialContext(ctx)
}

func (a *fakeAgent) used() (n uint32) {
	for _, p := range a.plans {
		n += p.Chunks * p.Rounds
	}
	return n
}

func (a *fakeAgent) Info(context.Context, *api.InfoRequest) (*api.ServerInfo, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return &api.ServerInfo{Name: a.name, Mode: "memory", Slots: a.slots, SlotsFree: a.slots - a.used()}, nil
}

func (a *fakeAgent) Install(_ context.Context, p *api.ServerPlan) (*api.InstallReply, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	key := planKey{a.name, uint16(p.Job), uint16(p.Epoch)}
	a.calls = append(a.calls, fmt.Sprintf("install job %d epoch %d ranks %x chunks %d rounds %d", p.Job, p.Epoch, p.Ranks, p.Chunks, p.Rounds))
	if _, there := a.plans[key]; !there && a.used()+p.Chunks*p.Rounds > a.slots {
		return nil, status.Errorf(codes.ResourceExhausted, "%d slots are needed and %d are free", p.Chunks*p.Rounds, a.slots-a.used())
	}
	a.plans[key] = p
	return &api.InstallReply{}, nil
}

func (a *fakeAgent) Remove(_ context.Context, r *api.RemoveRequest) (*api.RemoveReply, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.calls = append(a.calls, fmt.Sprintf("remove job %d epoch %d", r.Job, r.Epoch))
	if r.Job == 0 {
		clear(a.plans)
	}
	delete(a.plans, planKey{a.name, uint16(r.Job), uint16(r.Epoch)})
	return &api.RemoveReply{}, nil
}

func (a *fakeAgent) Stats(context.Context, *api.StatsRequest) (*api.StatsReply, error) {
	return &api.StatsReply{Reasons: map[string]uint64{"summed": 7}}, nil
}

func (a *fakeAgent) planKeys() []planKey {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Collect(maps.Keys(a.plans))
}

// room is a running controller with fake devices.
type room struct {
	t      *testing.T
	c      *Controller
	client api.ControllerClient
	sw     *p4rttest.Server
	agents map[string]*fakeAgent
}

// newRoom starts a controller; before, if not nil, may prepare the devices.
func newRoom(t *testing.T, cfg Config, before func(*room)) *room {
	t.Helper()
	program, _, err := loadProgram()
	if err != nil {
		t.Fatal(err)
	}
	r := &room{t: t, sw: p4rttest.New(t, program), agents: make(map[string]*fakeAgent)}
	for _, s := range cfg.Servers {
		r.agents[s.Name] = newFakeAgent(t, s.Name, 1000)
	}
	if before != nil {
		before(r)
	}
	log := slog.New(slog.NewTextHandler(testWriter{t}, &slog.HandlerOptions{Level: slog.LevelInfo}))
	r.c, err = New(cfg, WithLogger(log), WithDialer(func(ctx context.Context, address string) (net.Conn, error) {
		if address == cfg.Switch.Address {
			return r.sw.Dial(ctx, address)
		}
		return r.agents[strings.TrimSuffix(address, ":1")].dial(ctx)
	}))
	if err != nil {
		t.Fatal(err)
	}
	lis := bufconn.Listen(1 << 20)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- r.c.Run(ctx, lis) }()
	conn, err := grpc.NewClient("passthrough:///controller", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return lis.DialContext(ctx) }))
	if err != nil {
		t.Fatal(err)
	}
	r.client = api.NewControllerClient(conn)
	t.Cleanup(func() {
		conn.Close()
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	return r
}

type testWriter struct{ t *testing.T }

func (w testWriter) Write(b []byte) (int, error) {
	w.t.Log(strings.TrimSuffix(string(b), "\n"))
	return len(b), nil
}

func (r *room) context() context.Context {
	ctx, cancel := context.WithTimeout(r.t.Context(), 10*time.Second)
	r.t.Cleanup(cancel)
	return ctx
}

func (r *room) ready() {
	r.t.Helper()
	if err := r.c.Ready(r.context()); err != nil {
		r.t.Fatal(err)
	}
}

// until waits for a condition that a device's or a job's change brings about.
func (r *room) until(what string, cond func() bool) {
	r.t.Helper()
	deadline := time.After(10 * time.Second)
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for !cond() {
		select {
		case <-tick.C:
		case <-deadline:
			r.t.Fatalf("waited in vain: %s", what)
		}
	}
}

func (r *room) create(name string, ranks uint32, p *api.Policy) *api.Job {
	r.t.Helper()
	job, err := r.client.CreateJob(r.context(), &api.CreateJobRequest{Name: name, Ranks: ranks, MaxElems: 1000, Policy: p})
	if err != nil {
		r.t.Fatal(err)
	}
	return job
}

func (r *room) job(name string) *api.Job {
	r.t.Helper()
	reply, err := r.client.Status(r.context(), &api.StatusRequest{})
	if err != nil {
		r.t.Fatal(err)
	}
	for _, j := range reply.Jobs {
		if j.Name == name {
			return j
		}
	}
	return nil
}

// rank is a worker's end of a Join.
type rank struct {
	room   *room
	job    string
	n      uint32
	stream api.Controller_JoinClient
	cancel context.CancelFunc
}

func (r *room) join(job string, n uint32, digest string) *rank {
	r.t.Helper()
	ctx, cancel := context.WithCancel(r.context())
	stream, err := r.client.Join(ctx, &api.JoinRequest{
		Job: job, Rank: n, Ip: fmt.Sprintf("10.77.0.%d", n+1), UdpPort: wire.Port, Digest: digest,
	})
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(cancel)
	return &rank{r, job, n, stream, cancel}
}

func (k *rank) ready() *api.Ready {
	k.room.t.Helper()
	event, err := k.stream.Recv()
	if err != nil {
		k.room.t.Fatalf("rank %d: %v", k.n, err)
	}
	if event.GetReady() == nil {
		k.room.t.Fatalf("rank %d: got %v, want ready", k.n, event)
	}
	return event.GetReady()
}

func (k *rank) aborted() *api.Abort {
	k.room.t.Helper()
	event, err := k.stream.Recv()
	if err != nil {
		k.room.t.Fatalf("rank %d: %v", k.n, err)
	}
	if event.GetAbort() == nil {
		k.room.t.Fatalf("rank %d: got %v, want abort", k.n, event)
	}
	return event.GetAbort()
}

func (k *rank) leave() error {
	_, err := k.room.client.Leave(k.room.context(), &api.LeaveRequest{Job: k.job, Rank: k.n})
	return err
}

// joinAll joins all ranks and waits until they are ready.
func (r *room) joinAll(job string, n uint32) ([]*rank, *api.Ready) {
	r.t.Helper()
	var ranks []*rank
	for i := range n {
		ranks = append(ranks, r.join(job, i, "d"))
	}
	var ready *api.Ready
	for _, k := range ranks {
		ready = k.ready()
	}
	return ranks, ready
}

func hybridPolicy() *api.Policy {
	return &api.Policy{Rule: "static", Mode: "hybrid", Steer: []uint32{3}, Pool: 16}
}

func TestJobFromCreateToRemove(t *testing.T) {
	r := newRoom(t, testConfig(), nil)
	r.ready()
	if got := r.sw.Pushes(); got != 1 {
		t.Errorf("%d pipelines pushed, want 1", got)
	}
	base := r.sw.Entities()
	if len(base) != 6+1+2 { // ipv4, flood group, arp and its default
		t.Errorf("%d entities before any job, want 9: %v", len(base), base)
	}

	job := r.create("train", 4, hybridPolicy())
	if job.Cohort != 0b0111 || !slices.Equal(job.Servers, []string{"s0", "s1"}) || job.Chunks != 4 || job.Pool != 16 {
		t.Errorf("job is %v", job)
	}
	for name, a := range r.agents {
		if keys := a.planKeys(); !slices.Equal(keys, []planKey{{name, uint16(job.Id), 1}}) {
			t.Errorf("server %s has the plans %v after CreateJob", name, keys)
		}
	}
	if got := r.sw.Entities(); len(got) != len(base) {
		t.Errorf("the switch has something of the job before anybody joined: %v", got)
	}

	ranks, ready := r.joinAll("train", 4)
	if ready.Job != job.Id || ready.Epoch != 1 || ready.Ranks != 4 || ready.Pool != 16 || ready.MaxChunks != 4 ||
		ready.ServiceIp != "10.77.255.254" || ready.ServiceMac != "02:78:61:00:ff:fe" {
		t.Errorf("ready is %v", ready)
	}
	// job, plan, 4 members, 4 replicas, 2 groups, 2 servers, 2 returning
	if got := r.sw.Entities(); len(got) != len(base)+16 {
		t.Errorf("%d entities of the job, want 16", len(got)-len(base))
	}
	if j := r.job("train"); j.State != "running" || j.Joined != 0b1111 || j.Left != 0 {
		t.Errorf("job is %v", j)
	}

	var wg sync.WaitGroup
	for _, k := range ranks {
		wg.Go(func() {
			if err := k.leave(); err != nil {
				t.Errorf("rank %d: leave: %v", k.n, err)
			}
		})
	}
	wg.Wait()
	if j := r.job("train"); j.State != "finished" || j.Left != 0b1111 {
		t.Errorf("job is %v", j)
	}
	if got := r.sw.Entities(); len(got) != len(base)+16 {
		t.Errorf("entities of a finished job must stay, for late resends: %d left", len(got)-len(base))
	}

	if _, err := r.client.RemoveJob(r.context(), &api.RemoveJobRequest{Name: "train"}); err != nil {
		t.Fatal(err)
	}
	if got := r.sw.Entities(); !maps.EqualFunc(got, base, p4rt.Equal) {
		t.Errorf("after the removal the switch has %v, want %v", got, base)
	}
	for name, a := range r.agents {
		if keys := a.planKeys(); len(keys) != 0 {
			t.Errorf("server %s has the plans %v after RemoveJob", name, keys)
		}
	}
	if _, err := r.client.RemoveJob(r.context(), &api.RemoveJobRequest{Name: "train"}); status.Code(err) != codes.NotFound {
		t.Errorf("second RemoveJob: %v, want NOT_FOUND", err)
	}
}

func TestStatus(t *testing.T) {
	r := newRoom(t, testConfig(), func(r *room) {
		program, _, _ := loadProgram()
		_ = program
	})
	r.ready()
	reply, err := r.client.Status(r.context(), &api.StatusRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if !reply.Switch.Ready || reply.Switch.Slots != 4096 || reply.Switch.SlotsFree != 4096 {
		t.Errorf("switch: %v", reply.Switch)
	}
	if len(reply.Servers) != 2 || !reply.Servers[0].Ready || reply.Servers[0].Reasons["summed"] != 7 || reply.Servers[1].Info.Slots != 1000 {
		t.Errorf("servers: %v", reply.Servers)
	}
	r.agents["s1"].stop()
	r.sw.Stop()
	r.until("status tells what is gone", func() bool {
		reply, err := r.client.Status(r.context(), &api.StatusRequest{})
		return err == nil && !reply.Switch.Ready && reply.Switch.Error != "" && !reply.Servers[1].Ready && reply.Servers[1].Error != "" &&
			reply.Servers[0].Ready
	})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	err = r.c.Ready(ctx)
	if err == nil || !errors.Is(err, errNotReady) || !strings.Contains(err.Error(), "switch s1") || !strings.Contains(err.Error(), "server s1") {
		t.Errorf("Ready: %v", err)
	}
}
