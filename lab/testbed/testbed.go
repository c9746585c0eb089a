// Package testbed runs a switch, aggregation servers and their controller as processes on hosts that exist, and programs
// beside them whose output it reads. What is run on it, and what hosts and links are made of, is the business of others.
package testbed

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"github.com/goccy/go-yaml"

	"xagg/api"
	"xagg/bmv2"
	"xagg/bmv2/capture"
	"xagg/internal/endpoint"
	"xagg/lab"
	"xagg/lab/netns"
	"xagg/xdp"
)

// Switches.
const (
	SwitchEngine       = "engine"
	SwitchSimpleSwitch = bmv2.SimpleSwitchBinary
)

// startTimeout bounds the time until switch, servers and controller are ready.
const startTimeout = 60 * time.Second

// Config says what runs on the hosts.
type Config struct {
	Topology lab.Topology // its workers, servers and others are hosts by these names
	// Switch is SwitchEngine or SwitchSimpleSwitch.
	Switch string
	// SwitchAddr is where a switch that runs already answers P4Runtime; then none is started. Empty: one is.
	SwitchAddr string
	// SimpleSwitch is the program of SwitchSimpleSwitch; empty: the one on the PATH.
	SimpleSwitch string
	// XAgg is the program of everything else; empty: this one.
	XAgg   string
	Memory xdp.Size // of each server; 0: DefaultMemory
	Pcap   string   // file that all frames of all ports of a switch that is started are written to; empty: none
	// Restarts is set when Restart may be called: the controller then keeps its state in a file, and the capture is taken
	// beside the switch, so that its end is not lost with the switch.
	Restarts bool
	Log      *slog.Logger
}

// DefaultMemory is the memory of a server unless a configuration asks for more.
const DefaultMemory xdp.Size = 64 << 20

// Testbed is what runs. Its methods may be called from several goroutines.
type Testbed struct {
	hosts      Hosts
	cfg        Config
	xagg       string // the program
	switchAddr string // where the switch answers P4Runtime
	conn       *endpoint.Conn
	capture    *capture.Capture // beside a switch that does not capture itself

	mu      sync.Mutex
	target  *bmv2.SimpleSwitch // nil with the engine
	daemons []*daemon
	running map[string]*netns.Child // by Program.Name
}

// daemon is a process that runs as long as the testbed.
type daemon struct {
	name  string
	host  string
	args  []string
	child *netns.Child
	log   string // file of its stderr
}

// Start starts switch, servers and controller and returns when they are ready. From then on the hosts belong to the testbed;
// they are removed when it fails, too.
func Start(ctx context.Context, hosts Hosts, cfg Config) (*Testbed, error) {
	b := &Testbed{hosts: hosts, cfg: cfg, running: map[string]*netns.Child{}}
	err := b.start(ctx)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("start the lab: %w", err), b.Close())
	}
	return b, nil
}

// Hosts returns the machines.
func (b *Testbed) Hosts() Hosts { return b.hosts }

// Controller returns the connection to the controller's API.
func (b *Testbed) Controller() *endpoint.Conn { return b.conn }

// ControllerAddr returns the address of the controller's API.
func (b *Testbed) ControllerAddr() string { return b.socket("controller") }

// AgentAddr returns the address of the agent of a server.
func (b *Testbed) AgentAddr(server string) string { return b.socket(server) }

// PIDs returns the processes that run as long as the testbed, by name: the servers', ControllerName and, unless it ran
// before, SwitchName.
func (b *Testbed) PIDs() map[string]int {
	b.mu.Lock()
	defer b.mu.Unlock()
	pids := map[string]int{}
	for _, d := range b.daemons {
		pids[d.name] = d.child.PID()
	}
	if b.target != nil {
		pids[SwitchName] = b.target.PID()
	}
	return pids
}

// Names of processes; those of servers are their hosts'.
const (
	SwitchName     = "switch"
	ControllerName = "controller"
)

// socket returns the address of a unix socket in the hosts' folder.
func (b *Testbed) socket(name string) string {
	return "unix:" + filepath.Join(b.hosts.Dir(), name+".sock")
}

func (b *Testbed) start(ctx context.Context) (err error) {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	if b.xagg = b.cfg.XAgg; b.xagg == "" {
		if b.xagg, err = os.Executable(); err != nil {
			return fmt.Errorf("find this program: %w", err)
		}
	}
	if b.switchAddr = b.cfg.SwitchAddr; b.switchAddr == "" {
		b.switchAddr = b.socket(SwitchName)
		if err := b.startSwitch(ctx); err != nil {
			return err
		}
	}
	memory := max(b.cfg.Memory, DefaultMemory)
	var agents []string
	for _, h := range b.cfg.Topology.Servers {
		agents = append(agents, b.AgentAddr(h.Name))
		err := b.daemon(h.Name, h.Name, "server", "--interface", b.hosts.Interface(h.Name), "--listen", b.AgentAddr(h.Name),
			"--name", h.Name, "--memory", memory.String(), "--no-pin") // all of it ends with the lab
		if err != nil {
			return err
		}
	}
	controller := b.cfg.Topology.ControllerConfig(b.switchAddr, agents, b.ControllerAddr())
	if b.cfg.Restarts {
		controller.State = filepath.Join(b.hosts.Dir(), "controller.state")
	}
	config, err := yaml.Marshal(controller)
	if err != nil {
		return fmt.Errorf("write the controller's configuration: %w", err)
	}
	file := filepath.Join(b.hosts.Dir(), "controller.yaml")
	if err := os.WriteFile(file, config, 0o644); err != nil {
		return fmt.Errorf("write the controller's configuration: %w", err)
	}
	// The controller talks through unix sockets only and may sit in any namespace; the switch's is there already.
	if err := b.daemon(ControllerName, netns.Switch, "controller", "--config", file); err != nil {
		return err
	}
	if b.conn, err = endpoint.Dial(b.ControllerAddr()); err != nil {
		return fmt.Errorf("connect to the controller: %w", err)
	}
	return b.Ready(ctx)
}

func (b *Testbed) startSwitch(ctx context.Context) error {
	real := b.cfg.Switch == SwitchSimpleSwitch
	beside := b.cfg.Pcap != "" && (real || b.cfg.Restarts)
	if beside {
		var interfaces []capture.Interface
		for _, h := range b.hosts.Hosts() {
			interfaces = append(interfaces, capture.Interface{Name: b.hosts.PortInterface(h.Port)})
		}
		var err error
		if b.capture, err = capture.Start(b.cfg.Pcap, b.hosts.Path(netns.Switch), interfaces); err != nil {
			return fmt.Errorf("capture the switch's ports: %w", err)
		}
	}
	if real {
		return b.runSimpleSwitch(ctx)
	}
	args := []string{"switch", "--no-p4", "--device-id", "0"}
	for _, h := range b.hosts.Hosts() {
		args = append(args, "-i", fmt.Sprintf("%d@%s", h.Port, b.hosts.PortInterface(h.Port)))
	}
	if b.cfg.Pcap != "" && !beside {
		args = append(args, "--pcap", b.cfg.Pcap)
	}
	args = append(args, "--", "--grpc-server-addr", b.switchAddr, "--cpu-port", strconv.Itoa(lab.CPUPort))
	return b.daemon(SwitchName, netns.Switch, args...)
}

func (b *Testbed) runSimpleSwitch(ctx context.Context) (err error) {
	config := bmv2.Config{Ports: map[uint16]string{}, CPUPort: lab.CPUPort, GRPCAddr: b.switchAddr, Log: b.cfg.Log}
	for _, h := range b.hosts.Hosts() {
		config.Ports[uint16(h.Port)] = b.hosts.PortInterface(h.Port)
	}
	b.target, err = bmv2.StartSimpleSwitch(ctx, bmv2.SimpleSwitchConfig{
		Config: config, Binary: b.cfg.SimpleSwitch, NetNS: b.hosts.Path(netns.Switch),
	})
	return err
}

// daemon starts this program in a host with the given arguments.
func (b *Testbed) daemon(name, host string, args ...string) error {
	d := &daemon{name: name, host: host, args: args, log: filepath.Join(b.hosts.Dir(), name+".log")}
	if err := b.launch(d); err != nil {
		return err
	}
	b.daemons = append(b.daemons, d)
	return nil
}

// launch starts a daemon's process, whose log goes on where that of the one before it ended.
func (b *Testbed) launch(d *daemon) error {
	log, err := os.OpenFile(d.log, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return fmt.Errorf("start %s: %w", d.name, err)
	}
	defer log.Close()                                                                   // the child has its own
	cmd := exec.Command(b.xagg, append([]string{"--log-format", "text"}, d.args...)...) // its end may be shown to a person
	cmd.Stdout, cmd.Stderr = log, log
	child, err := b.hosts.Start(d.host, cmd)
	if err != nil {
		return err
	}
	d.child = child
	return nil
}

// Dead returns an error when switch, a server or the controller has ended, with the end of its log.
func (b *Testbed) Dead() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, d := range b.daemons {
		select {
		case <-d.child.Done():
			return fmt.Errorf("%s has ended (%v):\n%s", d.name, d.child.Wait(), tail(d.log))
		default:
		}
	}
	if b.target != nil {
		select {
		case <-b.target.Done():
			return fmt.Errorf("%s has ended:\n%s", b.target.Name(), b.target.Log())
		default:
		}
	}
	return nil
}

// Ready waits until the controller says that switch and servers are.
func (b *Testbed) Ready(ctx context.Context) error {
	client := api.NewControllerClient(b.conn)
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		if err := b.Dead(); err != nil {
			return err
		}
		status, err := client.Status(ctx, &api.StatusRequest{})
		if err == nil {
			if err = notReady(status); err == nil {
				return nil
			}
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("wait for switch, servers and controller: %w: %w", ctx.Err(), err)
		}
	}
}

func notReady(status *api.StatusReply) error {
	if s := status.Switch; !s.GetReady() {
		return fmt.Errorf("switch %s is not ready: %s", s.GetName(), s.GetError())
	}
	for _, s := range status.Servers {
		if !s.Ready {
			return fmt.Errorf("server %s is not ready: %s", s.Name, s.Error)
		}
	}
	return nil
}

// Close ends everything and removes the hosts.
func (b *Testbed) Close() error {
	var errs []error
	if b.conn != nil {
		errs = append(errs, b.conn.Close())
	}
	if b.target != nil {
		errs = append(errs, b.target.Close())
	}
	if b.capture != nil {
		errs = append(errs, b.capture.Close())
	}
	return errors.Join(append(errs, b.hosts.Close())...)
}
