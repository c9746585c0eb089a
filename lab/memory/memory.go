// Package memory is the lab in one process: the embedded engine, the controller, aggregation servers in user space and
// the workers' links between them. It needs no privileges and runs the same code as the other labs, but for the kernel:
// frames go from function to function.
package memory

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/test/bufconn"

	"xagg/api"
	"xagg/bmv2"
	"xagg/bmv2/fault"
	"xagg/controller"
	"xagg/internal/endpoint"
	"xagg/internal/metrics"
	"xagg/lab"
	"xagg/worker"
	"xagg/xdp"
)

// Config says what a lab is to be.
type Config struct {
	Topology lab.Topology
	// Slots is the memory of every server, in slots of one chunk. 0 means [DefaultSlots].
	Slots uint32
	// Faults damage the links of the switch's ports; see [bmv2.Config].
	Faults []fault.Spec
	// State is the file that the controller keeps its state in; empty = it keeps none.
	State string
	// NoChecksum has the workers send without UDP checksums.
	NoChecksum bool
	// PcapFile, if set, is a pcapng file that all frames of all switch ports are written to.
	PcapFile string
	// Log receives what switch and controller have to say; nil discards it.
	Log *slog.Logger
}

// DefaultSlots is the memory of a server if nothing else is asked for: slots are made when they are used.
const DefaultSlots = 1 << 20

// Lab is a running lab.
type Lab struct {
	cfg     Config
	engine  atomic.Pointer[bmv2.Engine]
	servers []*server
	clients []*endpoint.Conn // of the servers' agents
	conn    *endpoint.Conn   // to the controller
	group   errgroup.Group
	links   []atomic.Pointer[worker.FrameLink] // by rank: who receives at the worker's port
	once    sync.Once
	err     error

	mu        sync.Mutex
	listeners map[string]*bufconn.Listener
	ctl       *controller.Controller
	stop      context.CancelFunc // of the controller
	stopped   chan struct{}      // closed when it has
}

// server is an aggregation server with its agent.
type server struct {
	host   lab.Host
	memory atomic.Pointer[xdp.Memory]
	agent  *grpc.Server
}

const (
	switchAddr     = "unix:switch" // no socket: names in the dialer's table
	controllerAddr = "unix:controller"
	pipeSize       = 1 << 20 // bytes in flight on an in-memory connection
)

// New starts switch, servers and controller and waits until the controller has programmed them, or ctx ends.
func New(ctx context.Context, cfg Config) (*Lab, error) {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Slots == 0 {
		cfg.Slots = DefaultSlots
	}
	l := &Lab{
		cfg: cfg, listeners: make(map[string]*bufconn.Listener),
		links: make([]atomic.Pointer[worker.FrameLink], len(cfg.Topology.Workers)),
	}
	if err := l.start(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("start the lab in memory: %w", err), l.Close())
	}
	return l, nil
}

func (l *Lab) start(ctx context.Context) (err error) {
	for _, host := range l.cfg.Topology.Servers {
		s := &server{host: host}
		l.servers = append(l.servers, s)
		s.memory.Store(l.newMemory())
		l.serve(s)
		conn, err := endpoint.DialBy(l.dial, agentAddr(host))
		if err != nil {
			return err
		}
		l.clients = append(l.clients, conn)
	}
	if err := l.startSwitch(l.cfg.PcapFile); err != nil {
		return err
	}
	if err := l.startController(ctx); err != nil {
		return err
	}
	if l.conn, err = endpoint.DialBy(l.dial, controllerAddr); err != nil {
		return err
	}
	return l.ctl.Ready(ctx)
}

func agentAddr(host lab.Host) string { return "unix:" + host.Name }

// listen returns a listener that takes the place of the one that was at an address.
func (l *Lab) listen(addr string) *bufconn.Listener {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.listeners[addr] = bufconn.Listen(pipeSize)
	return l.listeners[addr]
}

func (l *Lab) dial(ctx context.Context, addr string) (net.Conn, error) {
	l.mu.Lock()
	lis, ok := l.listeners[addr]
	l.mu.Unlock()
	if !ok {
		return nil, fmt.Errorf("dial %s: not in this lab", addr)
	}
	return lis.DialContext(ctx)
}

// startSwitch starts an empty switch with everybody at its ports.
func (l *Lab) startSwitch(pcapFile string) error {
	engine, err := bmv2.NewEngine(bmv2.Config{CPUPort: lab.CPUPort, Faults: l.cfg.Faults, PcapFile: pcapFile, Log: l.cfg.Log})
	if err != nil {
		return err
	}
	l.engine.Store(engine)
	lis := l.listen(switchAddr)
	l.group.Go(func() error { return engine.Serve(lis) })
	for rank, host := range l.cfg.Topology.Workers {
		err := engine.Attach(host.Port, func(frame []byte) {
			if link := l.links[rank].Load(); link != nil {
				link.In(frame)
			}
		})
		if err != nil {
			return err
		}
	}
	for _, s := range l.servers {
		var answer []byte
		err := engine.Attach(s.host.Port, func(frame []byte) {
			answer = s.handle(frame, answer[:0])
			if len(answer) > 0 {
				_ = engine.Inject(s.host.Port, answer) // lost with the switch, where that is closed
			}
		})
		if err != nil {
			return err
		}
	}
	return nil
}

var origin = time.Now()

// now is the time of all servers, in microseconds.
func now() uint64 { return uint64(time.Since(origin).Microseconds()) }

func (l *Lab) newMemory() *xdp.Memory {
	memory := xdp.NewMemory(l.cfg.Slots)
	memory.Clock = now
	return memory
}

func (s *server) handle(frame, b []byte) []byte { return s.memory.Load().Handle(now(), frame, b) }

// serve runs a server's agent.
func (l *Lab) serve(s *server) {
	agent := grpc.NewServer()
	s.agent = agent
	api.RegisterAgentServer(agent, xdp.NewAgent(s.host.Name, "memory", s.memory.Load()))
	lis := l.listen(agentAddr(s.host))
	l.group.Go(func() error {
		if err := agent.Serve(lis); !errors.Is(err, grpc.ErrServerStopped) {
			return err
		}
		return nil
	})
}

// startController starts a controller, which goes on with what Config.State keeps.
func (l *Lab) startController(ctx context.Context) error {
	var agents []string
	for _, s := range l.servers {
		agents = append(agents, agentAddr(s.host))
	}
	cfg := l.cfg.Topology.ControllerConfig(switchAddr, agents, controllerAddr)
	cfg.State = l.cfg.State
	ctl, err := controller.New(cfg, controller.WithLogger(l.cfg.Log), controller.WithDialer(l.dial))
	if err != nil {
		return err
	}
	run, stop := context.WithCancel(context.WithoutCancel(ctx))
	l.ctl, l.stop, l.stopped = ctl, stop, make(chan struct{})
	stopped, lis := l.stopped, l.listen(controllerAddr)
	l.group.Go(func() error {
		defer close(stopped)
		return ctl.Run(run, lis)
	})
	return nil
}

// LoseSwitch replaces the switch by an empty one, as when its process dies and is started again. Nothing of what it does
// from then on is in Config.PcapFile.
func (l *Lab) LoseSwitch() error {
	if err := l.engine.Load().Close(); err != nil {
		return fmt.Errorf("close the switch: %w", err)
	}
	return l.startSwitch("")
}

// LoseServer has a server lose its memory, and its agent with it.
func (l *Lab) LoseServer(server int) {
	s := l.servers[server]
	s.agent.Stop()
	s.memory.Store(l.newMemory())
	l.serve(s)
}

// RestartAgent has the agent of a server end and start again; the server's memory stays.
func (l *Lab) RestartAgent(server int) {
	s := l.servers[server]
	s.agent.Stop()
	l.serve(s)
}

// RestartController has the controller end and start again, with what Config.State keeps.
func (l *Lab) RestartController(ctx context.Context) error {
	l.stop()
	<-l.stopped
	return l.startController(ctx)
}

// Controller returns the connection to the controller's API.
func (l *Lab) Controller() grpc.ClientConnInterface { return l.conn }

// Collectors returns what Prometheus collects: of the controller, then of the servers.
func (l *Lab) Collectors() []prometheus.Collector {
	collectors := []prometheus.Collector{l.ctl.Collector()}
	for _, conn := range l.clients {
		collectors = append(collectors, metrics.NewAgent(api.NewAgentClient(conn)))
	}
	return collectors
}

// Inject has a frame come in at a port of the switch, whoever may have sent it.
func (l *Lab) Inject(port uint16, frame []byte) error { return l.engine.Load().Inject(port, frame) }

// InjectServer has a frame come in at a server, whoever may have sent it, and returns the answer, which goes nowhere.
func (l *Lab) InjectServer(server int, frame []byte) (answer []byte) {
	return l.servers[server].handle(frame, nil)
}

// Link returns a link of the worker with the given rank, at UDP port port. The newest link of a rank receives.
func (l *Lab) Link(rank int, port uint16) worker.Link {
	host := l.cfg.Topology.Workers[rank]
	link := worker.NewFrameLink(host.Addr(port), !l.cfg.NoChecksum, func(frame []byte) {
		// Frames that a closed engine refuses are lost like those of a link that is down.
		_ = l.engine.Load().Inject(host.Port, frame)
	})
	l.links[rank].Store(link)
	return link
}

// Faults returns what Config.Faults have done so far, since the switch was started.
func (l *Lab) Faults() []fault.PathCounts { return l.engine.Load().Faults() }

// Close stops everything and waits for it. It may be called more than once.
func (l *Lab) Close() error {
	l.once.Do(func() {
		var errs []error
		if l.stop != nil {
			l.stop()
		}
		if l.conn != nil {
			errs = append(errs, l.conn.Close())
		}
		for _, conn := range l.clients {
			errs = append(errs, conn.Close())
		}
		for _, s := range l.servers {
			s.agent.Stop()
		}
		if engine := l.engine.Load(); engine != nil {
			errs = append(errs, engine.Close())
		}
		l.err = errors.Join(append(errs, l.group.Wait())...)
	})
	return l.err
}
