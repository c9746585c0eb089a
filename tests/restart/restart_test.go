package restart

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"

	"xagg/api"
	"xagg/bmv2"
	"xagg/controller"
	"xagg/internal/endpoint"
	"xagg/lab"
	"xagg/wire"
	"xagg/worker"
	"xagg/worker/grads"
	"xagg/worker/replay"
	"xagg/xdp"
)

// stage is a star in memory whose controller can be killed.
type stage struct {
	t      *testing.T
	star   lab.Topology
	engine *bmv2.Engine
	cfg    controller.Config
	conn   *endpoint.Conn // to the controller, whichever it is

	mu        sync.Mutex
	listeners map[string]*bufconn.Listener
	life      *life
	links     []atomic.Pointer[worker.FrameLink] // by rank
}

// life is what a controller's process has.
type life struct {
	mu    sync.Mutex
	over  bool
	conns []net.Conn
	stop  context.CancelFunc
	done  chan error
}

func (l *life) keep(conn net.Conn, err error) (net.Conn, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err == nil && l.over {
		conn.Close()
		return nil, errors.New("this controller is dead")
	}
	if err == nil {
		l.conns = append(l.conns, conn)
	}
	return conn, err
}

func (s *stage) listen(address string) *bufconn.Listener {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.listeners[address] = bufconn.Listen(1 << 20)
	return s.listeners[address]
}

func (s *stage) dial(ctx context.Context, address string) (net.Conn, error) {
	s.mu.Lock()
	lis := s.listeners[address]
	s.mu.Unlock()
	if lis == nil {
		return nil, fmt.Errorf("nobody listens at %s", address)
	}
	return lis.DialContext(ctx)
}

func newStage(t *testing.T, workers, servers int) *stage {
	star, err := lab.Star(workers, servers)
	if err != nil {
		t.Fatal(err)
	}
	s := &stage{t: t, star: star, listeners: make(map[string]*bufconn.Listener)}
	if s.engine, err = bmv2.NewEngine(bmv2.Config{CPUPort: lab.CPUPort}); err != nil {
		t.Fatal(err)
	}
	var serving sync.WaitGroup
	var stops []func()
	lis := s.listen("unix:switch")
	serving.Go(func() { s.engine.Serve(lis) })
	var agents []string
	for _, host := range star.Servers {
		memory, agent := xdp.NewMemory(1<<16), grpc.NewServer()
		api.RegisterAgentServer(agent, xdp.NewAgent(host.Name, "memory", memory))
		agents = append(agents, "unix:"+host.Name)
		lis := s.listen("unix:" + host.Name)
		serving.Go(func() { agent.Serve(lis) })
		stops = append(stops, agent.Stop)
		began := time.Now()
		var answer []byte
		if err := s.engine.Attach(host.Port, func(frame []byte) {
			answer = memory.Handle(uint64(time.Since(began).Microseconds()), frame, answer[:0])
			if len(answer) > 0 {
				s.engine.Inject(host.Port, answer)
			}
		}); err != nil {
			t.Fatal(err)
		}
	}
	s.links = make([]atomic.Pointer[worker.FrameLink], workers)
	for rank, host := range star.Workers {
		if err := s.engine.Attach(host.Port, func(frame []byte) {
			if link := s.links[rank].Load(); link != nil {
				link.In(frame)
			}
		}); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		s.engine.Close()
		for _, stop := range stops {
			stop()
		}
		serving.Wait()
	})
	s.cfg = star.ControllerConfig("unix:switch", agents, "unix:controller")
	s.cfg.State = filepath.Join(t.TempDir(), "state")
	s.begin()
	if s.conn, err = endpoint.DialBy(s.dial, "unix:controller", grpc.WithConnectParams(grpc.ConnectParams{
		Backoff: backoff.Config{BaseDelay: 5 * time.Millisecond, Multiplier: 1, MaxDelay: 5 * time.Millisecond},
	})); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		s.conn.Close()
		s.life.stop()
		<-s.life.done
	})
	return s
}

// begin starts a controller.
func (s *stage) begin() {
	l := &life{done: make(chan error, 1)}
	c, err := controller.New(s.cfg, controller.WithDialer(func(ctx context.Context, address string) (net.Conn, error) {
		return l.keep(s.dial(ctx, address))
	}))
	if err != nil {
		s.t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	l.stop, s.life = stop, l
	lis := s.listen("unix:controller")
	go func() { l.done <- c.Run(ctx, lis) }()
	ready, cancel := context.WithTimeout(s.t.Context(), 20*time.Second)
	defer cancel()
	if err := c.Ready(ready); err != nil {
		s.t.Fatal(err)
	}
}

// restart kills the controller, as far as devices and state file can see, and starts another one.
func (s *stage) restart() {
	l := s.life
	l.mu.Lock()
	state, err := os.ReadFile(s.cfg.State)
	l.over = true
	for _, conn := range l.conns {
		conn.Close()
	}
	l.mu.Unlock()
	if err != nil {
		s.t.Fatal(err)
	}
	l.stop()
	<-l.done
	s.cfg.State += "+" // the dead one may have written to its own
	if err := os.WriteFile(s.cfg.State, state, 0o600); err != nil {
		s.t.Fatal(err)
	}
	s.begin()
}

// run has all ranks of a job all-reduce, and returns what each was given.
func (s *stage) run(job string, set *grads.Set, rounds int, each func()) ([][][]int32, error) {
	sums := make([][][]int32, len(s.star.Workers))
	group, ctx := errgroup.WithContext(s.t.Context())
	for rank, host := range s.star.Workers {
		sums[rank] = make([][]int32, rounds)
		link := worker.NewFrameLink(host.Addr(wire.Port), true, func(frame []byte) { s.engine.Inject(host.Port, frame) })
		s.links[rank].Store(link)
		group.Go(func() error {
			return replay.Run(ctx, api.NewControllerClient(s.conn), replay.Config{
				Worker: worker.Config{Job: job, Rank: rank, Link: link}, Set: set, Rounds: rounds,
			}, func(r replay.Reduced) error {
				sums[rank][r.Index] = slices.Clone(r.Sum)
				if rank == 0 {
					each()
				}
				return nil
			})
		})
	}
	return sums, group.Wait()
}

// TestControllerIsKilledInWholeJobs kills the controller again and again while a job runs and its plan changes. Every integer
// of every rank is what it is in a job that nothing happens to.
func TestControllerIsKilledInWholeJobs(t *testing.T) {
	const workers, lanes, rounds, kills = 4, 3000, 400, 6
	set := grads.Synthetic(lanes, workers, 1)
	s := newStage(t, workers, 2)
	client := api.NewControllerClient(s.conn)
	create := func(name string) {
		if _, err := client.CreateJob(t.Context(), &api.CreateJobRequest{
			Name: name, Ranks: workers, MaxElems: lanes, Policy: &api.Policy{Rule: "static", Mode: "hybrid", Steer: []uint32{3}, Pool: 8},
		}); err != nil {
			t.Fatal(err)
		}
	}
	create("quiet")
	want, err := s.run("quiet", set, rounds, func() {})
	if err != nil {
		t.Fatal(err)
	}

	create("train")
	plans := []*api.Policy{{Rule: "static", Mode: "switch"}, {Rule: "static", Mode: "server"}, {Rule: "static", Mode: "hybrid", Steer: []uint32{1}}}
	began := make(chan struct{})
	begin := sync.OnceFunc(func() { close(began) })
	progress := make(chan struct{}, rounds)
	var killing sync.WaitGroup
	changes := 0
	killing.Go(func() {
		<-began
		for i := range kills {
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			_, err := client.Steer(ctx, &api.SteerRequest{Job: "train", Policy: plans[i%len(plans)]}, grpc.WaitForReady(true))
			cancel()
			if err == nil {
				changes++
			} else if status.Code(err) != codes.FailedPrecondition { // the change before is under way, or the job is over
				t.Errorf("change %d: %v", i, err)
			}
			s.restart()
			<-progress // rounds go on
		}
	})
	got, err := s.run("train", set, rounds, func() { begin(); progress <- struct{}{} })
	close(progress)
	killing.Wait()
	if err != nil {
		t.Fatal(err)
	}
	for rank := range got {
		for round := range got[rank] {
			if !slices.Equal(got[rank][round], want[0][round]) {
				t.Fatalf("rank %d, all-reduce %d is not what it is without a kill", rank, round)
			}
		}
	}
	if changes == 0 {
		t.Error("the plan never changed")
	}
	t.Logf("%d kills, %d changes of plan, %d all-reduces", kills, changes, rounds)
}
