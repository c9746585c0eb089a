package controller

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	p4v1 "github.com/p4lang/p4runtime/go/p4/v1"
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
	infos int // how often it was asked for them since it started
	plans map[planKey]*api.ServerPlan
	calls []string
	// tells has it list its plans, as agents do today.
	tells    bool
	instance uint64
	onCall   func() error // before each call that changes something; an error refuses it
	open     func(*api.OpenSlotsRequest) []*api.OpenSlot
	stats    func(*api.StatsRequest) *api.StatsReply
}

func newFakeAgent(tb testing.TB, name string, slots uint32) *fakeAgent {
	a := &fakeAgent{name: name, slots: slots, plans: make(map[planKey]*api.ServerPlan), tells: true}
	a.start()
	tb.Cleanup(a.stop)
	return a
}

// start serves, as an agent that has lost everything.
func (a *fakeAgent) start() {
	a.mu.Lock()
	clear(a.plans)
	a.instance++
	a.mu.Unlock()
	a.resume()
}

// resume serves again after stop, with what there was.
func (a *fakeAgent) resume() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.lis, a.srv = bufconn.Listen(1<<20), grpc.NewServer()
	a.infos = 0
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
	a.infos++
	return &api.ServerInfo{Name: a.name, Mode: "memory", Slots: a.slots, SlotsFree: a.slots - a.used(), Instance: a.instance}, nil
}

func (a *fakeAgent) List(context.Context, *api.ListRequest) (*api.ListReply, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.tells {
		return nil, status.Error(codes.Unimplemented, "unknown method List")
	}
	return &api.ListReply{Plans: slices.Collect(maps.Values(a.plans))}, nil
}

// asked is whether a call may change something. a is locked.
func (a *fakeAgent) asked(format string, args ...any) error {
	if a.onCall != nil {
		if err := a.onCall(); err != nil {
			return err
		}
	}
	a.calls = append(a.calls, fmt.Sprintf(format, args...))
	return nil
}

// log returns the calls that changed something, and forgets them.
func (a *fakeAgent) log() []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	calls := a.calls
	a.calls = nil
	return calls
}

func (a *fakeAgent) Install(_ context.Context, p *api.ServerPlan) (*api.InstallReply, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	key := planKey{a.name, uint16(p.Job), uint16(p.Epoch)}
	if err := a.asked("install job %d epoch %d ranks %x chunks %d rounds %d", p.Job, p.Epoch, p.Ranks, p.Chunks, p.Rounds); err != nil {
		return nil, err
	}
	if _, there := a.plans[key]; !there && a.used()+p.Chunks*p.Rounds > a.slots {
		return nil, status.Errorf(codes.ResourceExhausted, "%d slots are needed and %d are free", p.Chunks*p.Rounds, a.slots-a.used())
	}
	a.plans[key] = p
	return &api.InstallReply{}, nil
}

func (a *fakeAgent) Arm(_ context.Context, r *api.ArmRequest) (*api.ArmReply, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := a.asked("arm job %d epoch %d with %d", r.Job, r.Epoch, r.NextEpoch); err != nil {
		return nil, err
	}
	p := a.plans[planKey{a.name, uint16(r.Job), uint16(r.Epoch)}]
	if p == nil {
		return nil, status.Error(codes.NotFound, "no such plan")
	}
	p.NextEpoch = r.NextEpoch
	return &api.ArmReply{}, nil
}

func (a *fakeAgent) Remove(_ context.Context, r *api.RemoveRequest) (*api.RemoveReply, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := a.asked("remove job %d epoch %d", r.Job, r.Epoch); err != nil {
		return nil, err
	}
	if r.Job == 0 {
		clear(a.plans)
	}
	delete(a.plans, planKey{a.name, uint16(r.Job), uint16(r.Epoch)})
	return &api.RemoveReply{}, nil
}

func (a *fakeAgent) Stats(_ context.Context, r *api.StatsRequest) (*api.StatsReply, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.stats != nil {
		return a.stats(r), nil
	}
	return &api.StatsReply{Reasons: map[string]uint64{"summed": 7}}, nil
}

func (a *fakeAgent) OpenSlots(_ context.Context, r *api.OpenSlotsRequest) (*api.OpenSlotsReply, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	reply := &api.OpenSlotsReply{}
	if a.open != nil {
		reply.Slots = a.open(r)
	}
	return reply, nil
}

// visited reports whether the controller has been there since the agent started.
func (a *fakeAgent) visited() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.infos > 0
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
	life   *life
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
	r.live(cfg)
	return r
}

// live starts a controller.
func (r *room) live(cfg Config) {
	t := r.t
	t.Helper()
	l := &life{conns: make(map[net.Conn]struct{})}
	log := slog.New(slog.NewTextHandler(io.MultiWriter(testWriter{t}, l), &slog.HandlerOptions{Level: slog.LevelInfo}))
	c, err := New(cfg, fromEpochOne, impatient, WithLogger(log), WithDialer(func(ctx context.Context, address string) (net.Conn, error) {
		if address == cfg.Switch.Address {
			return l.keep(r.sw.Dial(ctx, address))
		}
		return l.keep(r.agents[strings.TrimSuffix(address, ":1")].dial(ctx))
	}))
	if err != nil {
		t.Fatal(err)
	}
	lis := bufconn.Listen(1 << 20)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- c.Run(ctx, lis) }()
	conn, err := grpc.NewClient("passthrough:///controller", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return lis.DialContext(ctx) }))
	if err != nil {
		t.Fatal(err)
	}
	r.c, r.client, r.life = c, api.NewControllerClient(conn), l
	l.end = sync.OnceFunc(func() {
		conn.Close()
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	t.Cleanup(l.end)
}

// life is what a controller's process has.
type life struct {
	mu    sync.Mutex
	conns map[net.Conn]struct{}
	over  bool
	state []byte // the state file at that moment
	log   []string
	end   func() // ends the controller as SIGTERM does
}

// Write takes a line of the log.
func (l *life) Write(line []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.log = append(l.log, string(line))
	return len(line), nil
}

func (l *life) logged() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.log)
}

func (l *life) keep(conn net.Conn, err error) (net.Conn, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err == nil && l.over {
		conn.Close()
		return nil, errors.New("this controller is dead")
	}
	if err == nil {
		l.conns[conn] = struct{}{}
	}
	return conn, err
}

// kill ends what a controller does, as far as anybody else can see, as SIGKILL would: it writes to nothing any more.
func (r *room) kill() {
	r.c.saving.Lock()
	defer r.c.saving.Unlock()
	l := r.life
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.over {
		return
	}
	state, err := os.ReadFile(r.c.cfg.State)
	if err != nil {
		r.t.Error(err)
	}
	l.over, l.state = true, state
	for conn := range l.conns {
		conn.Close()
	}
}

// restart kills the controller, if it lives, and starts another one with what it has kept.
func (r *room) restart() {
	r.t.Helper()
	r.kill()
	r.life.end()
	cfg := r.c.cfg
	cfg.State = filepath.Join(r.t.TempDir(), "state")
	if err := os.WriteFile(cfg.State, r.life.state, 0o600); err != nil {
		r.t.Fatal(err)
	}
	r.live(cfg)
}

// changes returns what was changed on the devices since it was asked last.
func (r *room) changes() []string {
	changes := r.sw.Log()
	for _, name := range slices.Sorted(maps.Keys(r.agents)) {
		for _, call := range r.agents[name].log() {
			changes = append(changes, name+": "+call)
		}
	}
	return changes
}

type testWriter struct{ t *testing.T }

func (w testWriter) Write(b []byte) (int, error) {
	w.t.Log(strings.TrimSuffix(string(b), "\n"))
	return len(b), nil
}

// patience is how long tests wait for what must come: long enough for a busy machine.
const patience = time.Minute

func (r *room) context() context.Context {
	ctx, cancel := context.WithTimeout(r.t.Context(), patience)
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
	deadline := time.After(patience)
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
	r := newRoom(t, testConfig(), nil)
	r.ready()
	cells := make([]p4rt.Count, 64)
	cells[wire.ReasonDuplicate].Packets = 5
	r.sw.SetCounter(counterReasons, cells)
	r.sw.SetCounter(counterSent, []p4rt.Count{wire.TypeResult: {Packets: 9}})
	reply, err := r.client.Status(r.context(), &api.StatusRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if !reply.Switch.Ready || reply.Switch.Slots != 4096 || reply.Switch.SlotsFree != 4096 {
		t.Errorf("switch: %v", reply.Switch)
	}
	if reply.Switch.Reasons["duplicate"] != 5 || len(reply.Switch.Reasons) != wire.NumReasons ||
		!maps.Equal(reply.Switch.Sent, map[string]uint64{"PARTIAL": 0, "RESULT": 9, "WAIT": 0, "NACK": 0}) {
		t.Errorf("switch counters: %v", reply.Switch)
	}
	if len(reply.Servers) != 2 || !reply.Servers[0].Ready || reply.Servers[0].Reasons["summed"] != 7 || reply.Servers[1].Info.Slots != 1000 {
		t.Errorf("servers: %v", reply.Servers)
	}
	r.agents["s1"].stop()
	r.sw.Stop()
	r.until("status tells what is gone", func() bool {
		reply, err := r.client.Status(r.context(), &api.StatusRequest{})
		return err == nil && !reply.Switch.Ready && strings.Contains(reply.Switch.Error, "closed") && !reply.Servers[1].Ready && reply.Servers[1].Error != "" &&
			reply.Servers[0].Ready
	})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	err = r.c.Ready(ctx)
	if err == nil || !errors.Is(err, errNotReady) || !strings.Contains(err.Error(), "switch sw") || !strings.Contains(err.Error(), "server s1") {
		t.Errorf("Ready: %v", err)
	}
}

func TestJoinRefuses(t *testing.T) {
	r := newRoom(t, testConfig(), nil)
	r.ready()
	r.create("train", 4, nil)
	k := r.join("train", 1, "d")
	r.until("rank 1 has joined", func() bool { return r.job("train").Joined == 0b10 })
	for _, tt := range []struct {
		req  *api.JoinRequest
		code codes.Code
		want string
	}{
		{&api.JoinRequest{Job: "other", Ip: "10.77.0.1", UdpPort: 1}, codes.NotFound, `there is no job "other"`},
		{&api.JoinRequest{Job: "train", Rank: 4, Ip: "10.77.0.1", UdpPort: 1}, codes.InvalidArgument, `rank: 4 is beyond the ranks 0..3 of job "train"`},
		{&api.JoinRequest{Job: "train", Rank: 0, Ip: "10.77.0.9", UdpPort: 1}, codes.InvalidArgument, "ip: 10.77.0.9 is none of the controller's hosts"},
		{&api.JoinRequest{Job: "train", Rank: 0, Ip: "w0", UdpPort: 1}, codes.InvalidArgument, `ip: "w0" is not an address`},
		{&api.JoinRequest{Job: "train", Rank: 0, Ip: "10.77.0.1"}, codes.InvalidArgument, "udp_port: 0 is outside 1..65535"},
		{&api.JoinRequest{Job: "train", Rank: 0, Ip: "10.77.0.1", UdpPort: 65536}, codes.InvalidArgument, "udp_port: 65536 is outside 1..65535"},
		{&api.JoinRequest{Job: "train", Rank: 1, Ip: "10.77.0.1", UdpPort: 1}, codes.FailedPrecondition, `rank 1 of job "train" has joined already`},
		{&api.JoinRequest{Job: "train", Rank: 0, Ip: "10.77.0.2", UdpPort: wire.Port}, codes.FailedPrecondition, "rank 0 needs another port"},
	} {
		stream, err := r.client.Join(r.context(), tt.req)
		if err == nil {
			_, err = stream.Recv()
		}
		if status.Code(err) != tt.code || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%v\ngot  %v\nwant %s: %s", tt.req, err, tt.code, tt.want)
		}
	}
	for _, tt := range []struct {
		req  *api.LeaveRequest
		code codes.Code
	}{
		{&api.LeaveRequest{Job: "other"}, codes.NotFound},
		{&api.LeaveRequest{Job: "train", Rank: 4}, codes.InvalidArgument},
		{&api.LeaveRequest{Job: "train", Rank: 1}, codes.FailedPrecondition},   // not begun
		{&api.LeaveRequest{Job: "train", Rank: 1, Id: 1 << 16}, codes.Aborted}, // another incarnation
		{&api.LeaveRequest{Job: "train", Rank: 0, Error: "tired"}, codes.OK},   // is not there
	} {
		if _, err := r.client.Leave(r.context(), tt.req); status.Code(err) != tt.code {
			t.Errorf("leave %v: %v, want %s", tt.req, err, tt.code)
		}
	}
	k.cancel()
	r.until("rank 1's seat is free again", func() bool { return r.job("train").Joined == 0 })
}

func TestCreateJobRefuses(t *testing.T) {
	r := newRoom(t, testConfig(), nil)
	r.ready()
	r.create("train", 4, nil)
	for _, tt := range []struct {
		req  *api.CreateJobRequest
		code codes.Code
		want string
	}{
		{&api.CreateJobRequest{Name: "train", Ranks: 4, MaxElems: 1}, codes.AlreadyExists, `job "train" exists`},
		{&api.CreateJobRequest{Name: "b", Ranks: 65, MaxElems: 1}, codes.InvalidArgument, "ranks: 65 is outside 1..64"},
		{&api.CreateJobRequest{Name: "b", Ranks: 4}, codes.InvalidArgument, "max_elems: is missing"},
		{&api.CreateJobRequest{Name: "b", Ranks: 4, MaxElems: 1, Policy: &api.Policy{Rule: "adaptive"}}, codes.InvalidArgument, `policy.rule: "adaptive" is not a rule`},
		{&api.CreateJobRequest{Name: "b", Ranks: 2, MaxElems: 1, Policy: hybridPolicy()}, codes.InvalidArgument, "steer[0]: rank 3 is beyond the job's ranks 0..1"},
		{&api.CreateJobRequest{Name: "b", Ranks: 4, MaxElems: 1, Policy: &api.Policy{Pool: 1024}}, codes.ResourceExhausted,
			"4096 slots of the switch are needed and 3968 are free, 128 too few"},
		// 2 rounds of 501 chunks in 1000 slots.
		{&api.CreateJobRequest{Name: "b", Ranks: 4, MaxElems: 501 * 256, Policy: hybridPolicy()}, codes.ResourceExhausted,
			`1002 slots of memory at one of the servers s0, s1 for job "b" are needed and 1000 are free, 2 too few`},
		// The server's own words: it has less than it said.
		{&api.CreateJobRequest{Name: "b", Ranks: 4, MaxElems: 256, Policy: hybridPolicy()}, codes.ResourceExhausted,
			"server s0: 2 slots are needed and 1 are free"},
	} {
		if strings.HasPrefix(tt.want, "server s0") {
			r.agents["s0"].mu.Lock()
			r.agents["s0"].slots = 1
			r.agents["s0"].mu.Unlock()
		}
		_, err := r.client.CreateJob(r.context(), tt.req)
		words := status.Convert(err).Message()
		if status.Code(err) != tt.code || !strings.Contains(words, tt.want) || strings.Contains(words, "rpc error") {
			t.Errorf("%v\ngot  %v\nwant %s: %s", tt.req, err, tt.code, tt.want)
		}
	}
	for name, a := range r.agents {
		if keys := a.planKeys(); len(keys) != 0 {
			t.Errorf("server %s keeps %v of refused jobs", name, keys)
		}
	}
	reply, err := r.client.Status(r.context(), &api.StatusRequest{})
	if err != nil || len(reply.Jobs) != 1 || reply.Switch.SlotsFree != 4096-128 {
		t.Errorf("after the refusals: %v, %v", reply, err)
	}
}

// TestGiveUp: the others learn who cannot go on, and why; a word of an earlier incarnation does not end the next.
func TestGiveUp(t *testing.T) {
	r := newRoom(t, testConfig(), nil)
	r.ready()
	r.create("train", 3, nil)
	giveUp := func(id uint32) error {
		_, err := r.client.Leave(r.context(), &api.LeaveRequest{Job: "train", Rank: 1, Error: `tensor "x": value 17 is NaN`, Id: id})
		return err
	}
	ranks, first := r.joinAll("train", 3)
	if err := giveUp(first.Job); err != nil {
		t.Fatal(err)
	}
	const want = `rank 1 on host w1 gave up: tensor "x": value 17 is NaN`
	for _, k := range ranks {
		if a := k.aborted(); !slices.Equal(a.Ranks, []uint32{1}) || a.Reason != want {
			t.Errorf("rank %d: %v, want %s", k.n, a, want)
		}
	}
	if j := r.job("train"); j.State != "aborted" || j.Error != want {
		t.Errorf("job: %v", j)
	}
	for _, k := range ranks {
		k.cancel() // the streams have ended with the event
	}
	ranks, second := r.joinAll("train", 3)
	if err := giveUp(first.Job); status.Code(err) != codes.Aborted {
		t.Errorf("give up incarnation %d while %d runs: %v", first.Job, second.Job, err)
	}
	if j := r.job("train"); j.State != "running" {
		t.Errorf("job: %v", j)
	}
	errs := make(chan error)
	for _, k := range ranks {
		go func() { errs <- k.leave() }()
	}
	for range ranks {
		if err := <-errs; err != nil {
			t.Errorf("leave: %v", err)
		}
	}
}

// TestDigestsDiffer names the odd rank, and a second try works.
func TestDigestsDiffer(t *testing.T) {
	r := newRoom(t, testConfig(), nil)
	r.ready()
	first := r.create("train", 3, nil)
	ranks := []*rank{r.join("train", 0, "a"), r.join("train", 1, "a"), r.join("train", 2, "b")}
	for _, k := range ranks {
		if a := k.aborted(); !slices.Equal(a.Ranks, []uint32{2}) || !strings.Contains(a.Reason, `rank 2 has "b", the others have "a"`) {
			t.Errorf("rank %d: %v", k.n, a)
		}
	}
	if j := r.job("train"); j.State != "aborted" || !strings.Contains(j.Error, "rank 2") {
		t.Errorf("job: %v", j)
	}
	_, ready := r.joinAll("train", 3)
	if ready.Job == first.Id {
		t.Error("the second incarnation has the first one's id")
	}
}

// TestWorkerDies ends a running job for the others, who learn whose fault it is; then the job runs anew.
func TestWorkerDies(t *testing.T) {
	r := newRoom(t, testConfig(), nil)
	r.ready()
	r.create("train", 4, hybridPolicy())
	ranks, first := r.joinAll("train", 4)
	left := make(chan error, 1)
	go func() { left <- ranks[0].leave() }()
	r.until("rank 0 has left", func() bool { return r.job("train").Left == 1 })
	ranks[2].cancel()
	for _, k := range []*rank{ranks[1], ranks[3]} {
		if a := k.aborted(); !slices.Equal(a.Ranks, []uint32{2}) || a.Reason != "rank 2 on host w2 went away without leaving" {
			t.Errorf("rank %d: %v", k.n, a)
		}
	}
	if err := <-left; status.Code(err) != codes.Aborted || !strings.Contains(err.Error(), "rank 2") {
		t.Errorf("leave: %v", err)
	}

	// A new incarnation: a fresh id, and nothing of the old one is left.
	again, second := r.joinAll("train", 4)
	if second.Job == first.Job {
		t.Errorf("both incarnations have the id %d", first.Job)
	}
	old := fmt.Sprintf("hdr.x.job=%d", first.Job)
	for key := range r.sw.Entities() {
		if strings.Contains(key, old+" ") || strings.Contains(key, old+"]") {
			t.Errorf("the switch still has %s", key)
		}
	}
	for name, a := range r.agents {
		if keys := a.planKeys(); !slices.Equal(keys, []planKey{{name, uint16(second.Job), 1}}) {
			t.Errorf("server %s has %v", name, keys)
		}
	}

	// The end of a job by its removal.
	if _, err := r.client.RemoveJob(r.context(), &api.RemoveJobRequest{Name: "train"}); err != nil {
		t.Fatal(err)
	}
	if a := again[1].aborted(); a.Reason != "the job was removed" || len(a.Ranks) != 0 {
		t.Errorf("got %v", a)
	}
}

// TestFinishedJobRunsAgain: static jobs need no removal between two runs.
func TestFinishedJobRunsAgain(t *testing.T) {
	r := newRoom(t, testConfig(), nil)
	r.ready()
	r.create("train", 2, nil)
	seen := make(map[uint32]bool)
	for range 3 {
		ranks, ready := r.joinAll("train", 2)
		if seen[ready.Job] {
			t.Errorf("id %d again", ready.Job)
		}
		seen[ready.Job] = true
		var wg sync.WaitGroup
		for _, k := range ranks {
			wg.Go(func() {
				if err := k.leave(); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
	}
}

// TestStaticJobs runs three configured jobs at once, in all modes.
func TestStaticJobs(t *testing.T) {
	cfg := testConfig()
	cfg.Policy = hybrid
	cfg.Jobs = []JobSpec{
		{Name: "a", Ranks: 4, MaxElems: 300},
		{Name: "b", Ranks: 2, MaxElems: 300, Policy: &policy.Static{}},
		{Name: "c", Ranks: 3, MaxElems: 300, Policy: &policy.Static{Mode: policy.ModeServer, Servers: []string{"s1"}}},
	}
	r := newRoom(t, cfg, nil)
	r.ready()
	for _, name := range []string{"s0", "s1"} { // a may have both, and leaves s1 to c, which may not have s0
		if got := len(r.agents[name].planKeys()); got != 1 {
			t.Errorf("server %s has %d plans, want 1", name, got)
		}
	}
	var wg sync.WaitGroup
	for _, spec := range cfg.Jobs {
		wg.Go(func() {
			ranks, _ := r.joinAll(spec.Name, uint32(spec.Ranks))
			var leaving sync.WaitGroup
			for _, k := range ranks {
				leaving.Go(func() {
					if err := k.leave(); err != nil {
						t.Errorf("job %s: %v", spec.Name, err)
					}
				})
			}
			leaving.Wait()
		})
	}
	wg.Wait()
	rids := make(map[string]bool)
	for _, e := range r.sw.Entities() {
		if entry, ok := e.(p4rt.Entry); ok && entry.Table == tableReplica {
			rids[entry.Key()] = true
		}
	}
	if len(rids) != 4+2+3 {
		t.Errorf("%d replica numbers, want 9", len(rids))
	}

	cfg.Jobs[1].Policy = &policy.Static{Pool: 2048}
	if _, err := New(cfg); err == nil || err.Error() != `plan jobs: 8260 slots of the switch are needed and 4096 are free, 4164 too few; choose a smaller pool than the 2048 of job "b", or remove a job` {
		t.Errorf("a configured job that does not fit: %v", err)
	}
}

// TestInstallFailsAtEachUpdate has the switch refuse each update of an installation in turn: the workers are told, what
// is there is consistent, and the next try works.
func TestInstallFailsAtEachUpdate(t *testing.T) {
	r := newRoom(t, testConfig(), nil)
	r.ready()
	base := r.sw.Entities()
	r.create("train", 4, hybridPolicy())
	var mu sync.Mutex
	fail, n := 0, 0
	r.sw.OnUpdate = func(u p4rt.Update) error {
		mu.Lock()
		defer mu.Unlock()
		if u.Op == p4rt.Delete {
			return nil
		}
		n++
		if n == fail {
			return status.Error(codes.Unknown, "no")
		}
		return nil
	}
	const updates = 16
	for k := 1; k <= updates; k++ {
		mu.Lock()
		fail, n = k, 0
		mu.Unlock()
		var ranks []*rank
		for i := range uint32(4) {
			ranks = append(ranks, r.join("train", i, "d"))
		}
		for _, k2 := range ranks {
			if a := k2.aborted(); !strings.Contains(a.Reason, "the job cannot be installed: install ") || !strings.Contains(a.Reason, ": Unknown (no)") {
				t.Errorf("update %d: %s", k, a.Reason)
			}
		}
		w := &world{r.sw.Entities(), make(map[planKey]serverPlan)}
		for _, a := range r.agents {
			for _, key := range a.planKeys() {
				w.plans[key] = serverPlan{}
			}
		}
		r.c.mu.Lock()
		err := w.consistent(&r.c.intent, r.c.intent.jobs["train"])
		r.c.mu.Unlock()
		if err != nil {
			t.Errorf("update %d refused: %v", k, err)
		}
	}
	mu.Lock()
	fail = 0
	mu.Unlock()
	r.joinAll("train", 4)
	if got := len(r.sw.Entities()) - len(base); got != updates {
		t.Errorf("%d entities of the job, want %d", got, updates)
	}
}

// TestSwitchRestarts: an empty switch is programmed anew, running jobs included, under their next epoch.
func TestSwitchRestarts(t *testing.T) {
	r := newRoom(t, testConfig(), nil)
	r.ready()
	stations := r.serveAll(r.create("train", 4, hybridPolicy()), nil)
	before := len(r.sw.Entities())
	r.sw.Stop()
	r.until("the switch is missed", func() bool {
		reply, err := r.client.Status(r.context(), &api.StatusRequest{})
		return err == nil && !reply.Switch.Ready
	})
	r.create("later", 2, nil) // needs no switch before its ranks join
	later := []*rank{r.join("later", 0, "d"), r.join("later", 1, "d")}
	r.until("the later job waits", func() bool { return r.job("later").State == "installing" && r.job("later").Error != "" })
	r.sw.Start()
	r.ready()
	for _, k := range later {
		k.ready()
	}
	r.replies(stations)
	if got := r.sw.Pushes(); got != 2 {
		t.Errorf("%d pushes, want 2", got)
	}
	r.installed()
	if n := len(r.sw.Entities()) - before; n != 7 { // job, plan, 2 members, 2 replicas, the group of all
		t.Errorf("%d entities of the later job, want 7", n)
	}
	if j := r.job("train"); j.State != "running" || j.Epoch != 2 {
		t.Errorf("job is %v", j)
	}
}

// TestServerRestarts: an agent that does not tell what it has and comes back empty gets its plans again, one that was there all the time keeps them,
// and what was removed meanwhile is removed.
func TestServerRestarts(t *testing.T) {
	r := newRoom(t, testConfig(), func(r *room) { r.agents["s0"].tells = false })
	r.ready()
	job := r.create("train", 4, hybridPolicy())
	gone := r.create("gone", 4, &api.Policy{Mode: "server"})
	s0 := r.agents["s0"]
	s0.stop()
	r.until("the server is missed", func() bool {
		reply, err := r.client.Status(r.context(), &api.StatusRequest{})
		return err == nil && !reply.Servers[0].Ready
	})
	if _, err := r.client.CreateJob(r.context(), &api.CreateJobRequest{Name: "new", Ranks: 4, MaxElems: 1, Policy: hybridPolicy()}); status.Code(err) != codes.Unavailable ||
		!strings.Contains(err.Error(), "server s0 with its agent at s0:1 is not ready: ") {
		t.Errorf("create with a server that is gone: %v", err)
	}
	if _, err := r.client.RemoveJob(r.context(), &api.RemoveJobRequest{Name: "gone"}); err != nil {
		t.Errorf("remove while the server is gone: %v", err)
	}
	if keys := r.agents["s1"].planKeys(); !slices.Equal(keys, []planKey{{"s1", uint16(job.Id), 1}}) {
		t.Errorf("server s1, which is there, has %v", keys)
	}
	s0.mu.Lock()
	s0.calls = nil
	s0.mu.Unlock()
	s0.start()
	r.ready()
	if keys := s0.planKeys(); !slices.Equal(keys, []planKey{{"s0", uint16(job.Id), 1}}) {
		t.Errorf("server s0 has %v", keys)
	}
	s0.mu.Lock()
	defer s0.mu.Unlock()
	if want := fmt.Sprintf("remove job %d epoch 1", gone.Id); !slices.Contains(s0.calls, want) {
		t.Errorf("calls %q lack %q", s0.calls, want)
	}
	if slices.Contains(s0.calls, "remove job 0 epoch 0") {
		t.Error("a server that comes back is wiped, which would lose what it has summed")
	}
}

// TestBeginsFromNothing: what an earlier controller left on switch and servers is gone.
func TestBeginsFromNothing(t *testing.T) {
	cfg := testConfig()
	r := newRoom(t, cfg, func(r *room) {
		program, _, err := loadProgram()
		if err != nil {
			t.Fatal(err)
		}
		old := p4rt.Target{Dial: r.sw.Dial, Election: p4rt.ElectionID{Low: 1}}
		err = p4rt.Run(t.Context(), old, program, func(ctx context.Context, s *p4rt.Session) error {
			in := newIntent(t, cfg)
			j, err := in.create(JobSpec{Name: "old", Ranks: 4, MaxElems: 1, Policy: &hybrid})
			if err != nil {
				return err
			}
			in.joinAll(j)
			for _, step := range diff(newObjects(), desiredJob(in, j)) {
				if err := s.Upsert(ctx, step.entities...); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		r.sw.Log()
		r.agents["s0"].plans[planKey{"s0", 9, 1}] = &api.ServerPlan{Job: 9, Epoch: 1, Chunks: 1000, Rounds: 1}
	})
	r.ready()
	if got := r.sw.Entities(); !maps.EqualFunc(got, entitiesOf(desiredBase(&cfg)), p4rt.Equal) {
		t.Errorf("the switch has %v", got)
	}
	if got := r.sw.Pushes(); got != 1 {
		t.Errorf("%d pushes: the program was there already", got)
	}
	if first := r.sw.Log()[0]; !strings.HasPrefix(first, "delete "+tableJob) {
		t.Errorf("the wipe begins with %s", first)
	}
	if keys := r.agents["s0"].planKeys(); len(keys) != 0 {
		t.Errorf("server s0 has %v", keys)
	}
}

func entitiesOf(o objects) map[string]p4rt.Entity {
	out := make(map[string]p4rt.Entity)
	for key, e := range o.entities {
		out[key] = e.entity
	}
	return out
}

// TestReadSlot asks for several slots at once and gets each its own.
func TestReadSlot(t *testing.T) {
	r := newRoom(t, testConfig(), func(r *room) {
		r.sw.OnPacketOut = func(out *p4v1.PacketOut) []*p4v1.PacketIn {
			var p wire.Packet
			src, dst, err := wire.ParseFrame(out.Payload, &p)
			if err != nil || p.Type != wire.TypeCtrl {
				t.Errorf("packet-out: %v, %v", p.Type, err)
				return nil
			}
			if p.Seq == 13 {
				return nil // as beyond the slots
			}
			p.Job, p.Elems, p.Lanes[0] = uint16(1000+p.Seq), 7, int32(p.Seq)
			return []*p4v1.PacketIn{
				{Payload: []byte("noise")},
				{Payload: wire.AppendFrame(nil, src, dst, &p, false), Metadata: []*p4v1.PacketMetadata{{MetadataId: 1, Value: []byte{0}}}},
			}
		}
	})
	r.ready()
	var wg sync.WaitGroup
	for i := range uint32(10) {
		wg.Go(func() {
			p, err := r.c.ReadSlot(r.context(), i, 2)
			if err != nil || p.Job != uint16(1000+i) || p.Seq != i || p.Blocks != 2 || p.Lanes[0] != int32(i) {
				t.Errorf("slot %d: %+v, %v", i, p.Header, err)
			}
		})
	}
	wg.Wait()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if _, err := r.c.ReadSlot(ctx, 13, 0); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("no answer: %v", err)
	}
	for _, bad := range []struct {
		index  uint32
		blocks uint8
	}{{4096, 0}, {0, 5}} {
		if _, err := r.c.ReadSlot(t.Context(), bad.index, bad.blocks); err == nil {
			t.Errorf("%+v is read", bad)
		}
	}
}
