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
	topology lab.Topology
	checksum bool
	engine   *bmv2.Engine
	ctl      *controller.Controller
	conn     *endpoint.Conn
	servers  []func(frame, b []byte) (answer []byte)
	clients  []*endpoint.Conn // of the servers' agents
	group    errgroup.Group
	stop     context.CancelFunc
	agents   []*grpc.Server
	links    []atomic.Pointer[worker.FrameLink] // by rank: who receives at the worker's port
	once     sync.Once
	err      error
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
	run, stop := context.WithCancel(context.WithoutCancel(ctx))
	l := &Lab{topology: cfg.Topology, checksum: !cfg.NoChecksum, stop: stop,
		links: make([]atomic.Pointer[worker.FrameLink], len(cfg.Topology.Workers))}
	if err := l.start(ctx, run, cfg); err != nil {
		return nil, errors.Join(fmt.Errorf("start the lab in memory: %w", err), l.Close())
	}
	return l, nil
}

func (l *Lab) start(ctx, run context.Context, cfg Config) error {
	listeners := map[string]*bufconn.Listener{}
	listen := func(addr string) *bufconn.Listener {
		listeners[addr] = bufconn.Listen(pipeSize)
		return listeners[addr]
	}
	dial := func(ctx context.Context, addr string) (net.Conn, error) {
		lis, ok := listeners[addr]
		if !ok {
			return nil, fmt.Errorf("dial %s: not in this lab", addr)
		}
		return lis.DialContext(ctx)
	}

	engine, err := bmv2.NewEngine(bmv2.Config{CPUPort: lab.CPUPort, Faults: cfg.Faults, PcapFile: cfg.PcapFile, Log: cfg.Log})
	if err != nil {
		return err
	}
	l.engine = engine
	switchListener := listen(switchAddr)
	l.group.Go(func() error { return engine.Serve(switchListener) })

	var agentAddrs []string
	for _, host := range cfg.Topology.Servers {
		addr := "unix:" + host.Name
		agentAddrs = append(agentAddrs, addr)
		if err := l.serve(host, cfg.Slots, listen(addr)); err != nil {
			return err
		}
		conn, err := endpoint.DialBy(dial, addr)
		if err != nil {
			return err
		}
		l.clients = append(l.clients, conn)
	}

	for rank, host := range cfg.Topology.Workers {
		err := l.engine.Attach(host.Port, func(frame []byte) {
			if link := l.links[rank].Load(); link != nil {
				link.In(frame)
			}
		})
		if err != nil {
			return err
		}
	}

	ctl, err := controller.New(cfg.Topology.ControllerConfig(switchAddr, agentAddrs, controllerAddr),
		controller.WithLogger(cfg.Log), controller.WithDialer(dial))
	if err != nil {
		return err
	}
	l.ctl = ctl
	controllerListener := listen(controllerAddr)
	l.group.Go(func() error { return ctl.Run(run, controllerListener) })
	l.conn, err = endpoint.DialBy(dial, controllerAddr)
	if err != nil {
		return err
	}
	return ctl.Ready(ctx)
}

// serve runs an aggregation server on its switch port, and its agent on lis.
func (l *Lab) serve(host lab.Host, slots uint32, lis net.Listener) error {
	server := xdp.NewMemory(slots)
	agent := grpc.NewServer()
	api.RegisterAgentServer(agent, xdp.NewAgent(host.Name, "memory", server))
	l.agents = append(l.agents, agent)
	l.group.Go(func() error {
		if err := agent.Serve(lis); !errors.Is(err, grpc.ErrServerStopped) {
			return err
		}
		return nil
	})

	origin := time.Now()
	handle := func(frame, b []byte) []byte {
		return server.Handle(uint64(time.Since(origin).Microseconds()), frame, b)
	}
	l.servers = append(l.servers, handle)
	var answer []byte
	return l.engine.Attach(host.Port, func(frame []byte) {
		answer = handle(frame, answer[:0])
		if len(answer) > 0 {
			// The engine is only ever closed as a whole, and then nobody waits for the answer.
			_ = l.engine.Inject(host.Port, answer)
		}
	})
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
func (l *Lab) Inject(port uint16, frame []byte) error { return l.engine.Inject(port, frame) }

// InjectServer has a frame come in at a server, whoever may have sent it, and returns the answer, which goes nowhere.
func (l *Lab) InjectServer(server int, frame []byte) (answer []byte) {
	return l.servers[server](frame, nil)
}

// Link returns a link of the worker with the given rank, at UDP port port. The newest link of a rank receives.
func (l *Lab) Link(rank int, port uint16) worker.Link {
	host := l.topology.Workers[rank]
	link := worker.NewFrameLink(host.Addr(port), l.checksum, func(frame []byte) {
		// Frames that a closed engine refuses are lost like those of a link that is down.
		_ = l.engine.Inject(host.Port, frame)
	})
	l.links[rank].Store(link)
	return link
}

// Faults returns what Config.Faults have done so far.
func (l *Lab) Faults() []fault.PathCounts { return l.engine.Faults() }

// Close stops everything and waits for it. It may be called more than once.
func (l *Lab) Close() error {
	l.once.Do(func() {
		l.stop()
		var errs []error
		if l.conn != nil {
			errs = append(errs, l.conn.Close())
		}
		for _, conn := range l.clients {
			errs = append(errs, conn.Close())
		}
		for _, agent := range l.agents {
			agent.Stop()
		}
		if l.engine != nil {
			errs = append(errs, l.engine.Close())
		}
		l.err = errors.Join(append(errs, l.group.Wait())...)
	})
	return l.err
}
