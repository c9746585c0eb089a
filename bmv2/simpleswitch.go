package bmv2

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	p4v1 "github.com/p4lang/p4runtime/go/p4/v1"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"

	"xagg/bmv2/port"
	"xagg/internal/endpoint"
)

// SimpleSwitchBinary is the name of the real switch's program.
const SimpleSwitchBinary = "simple_switch_grpc"

// SimpleSwitchConfig is what a real simple_switch_grpc needs beside a Config.
type SimpleSwitchConfig struct {
	Config
	// Binary is the program to run; empty means simple_switch_grpc on the PATH.
	Binary string
	// NetNS is the path of the network namespace to run in; empty means the caller's. A switch elsewhere is reached
	// at a unix:PATH address only.
	NetNS string
	// DataAddr is a gRPC address to take and give frames at instead of network interfaces; see package dataplane.
	DataAddr string
	// Prepare, if set, is called with the command before it starts, for environment and process attributes.
	Prepare func(*exec.Cmd)
}

// SimpleSwitch is a running simple_switch_grpc process.
type SimpleSwitch struct {
	addr string
	cmd  *exec.Cmd
	log  *tail
	done chan struct{} // closed when the process has ended
	err  error         // how it ended; valid after done
	once sync.Once
}

// ErrNoSimpleSwitch says that there is no simple_switch_grpc on this machine.
var ErrNoSimpleSwitch = errors.New("simple_switch_grpc is not installed")

// FindSimpleSwitch returns the path of the program that binary names, or that is on the PATH if binary is empty.
func FindSimpleSwitch(binary string) (string, error) {
	name := binary
	if name == "" {
		name = SimpleSwitchBinary
	}
	path, err := exec.LookPath(name)
	if err != nil {
		return "", environment(fmt.Errorf("%w: %w", ErrNoSimpleSwitch, err),
			"build github.com/p4lang/behavioral-model with PI, or use the embedded engine")
	}
	return path, nil
}

// StartSimpleSwitch starts simple_switch_grpc and waits until it answers P4Runtime or ctx ends. The process dies with
// the calling one. An [EnvironmentError] says whether the binary is missing, an interface does not exist or the port
// is in use, and quotes the end of the process's log. cfg.PcapFile is not for this target: use package capture on its
// interfaces.
func StartSimpleSwitch(ctx context.Context, cfg SimpleSwitchConfig) (*SimpleSwitch, error) {
	s, err := startSimpleSwitch(ctx, cfg)
	if err != nil {
		return nil, fmt.Errorf("start simple_switch_grpc: %w", err)
	}
	return s, nil
}

func startSimpleSwitch(ctx context.Context, cfg SimpleSwitchConfig) (*SimpleSwitch, error) {
	if err := cfg.check(); err != nil {
		return nil, err
	}
	if cfg.DataAddr != "" && len(cfg.Ports) != 0 {
		return nil, fmt.Errorf("data plane at %s: there are network interfaces too", cfg.DataAddr)
	}
	if cfg.PcapFile != "" {
		return nil, fmt.Errorf("capture file %s: only the engine writes one itself", cfg.PcapFile)
	}
	if len(cfg.Faults) != 0 {
		return nil, errors.New("only the engine damages frames itself: have it done on the links")
	}
	binary, err := FindSimpleSwitch(cfg.Binary)
	if err != nil {
		return nil, err
	}
	if cfg.GRPCAddr == "" {
		cfg.GRPCAddr = DefaultGRPCAddr
	}
	if err := cfg.checkMachine(); err != nil {
		return nil, err
	}
	s := &SimpleSwitch{addr: cfg.GRPCAddr, log: newTail(), done: make(chan struct{})}
	args := cfg.args()
	if cfg.Program != nil {
		file, err := os.CreateTemp("", "xagg-*.json")
		if err != nil {
			return nil, err
		}
		defer os.Remove(file.Name()) // the switch has read it once it answers
		if _, err := file.Write(cfg.Program); err != nil {
			return nil, errors.Join(err, file.Close())
		}
		if err := file.Close(); err != nil {
			return nil, err
		}
		args = append([]string{file.Name()}, args...)
	} else {
		args = append([]string{"--no-p4"}, args...)
	}
	s.cmd = exec.Command(binary, args...)
	s.cmd.Stdout, s.cmd.Stderr = s.log, s.log
	if cfg.Prepare != nil {
		cfg.Prepare(s.cmd)
	}
	if s.cmd.SysProcAttr == nil {
		s.cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	s.cmd.SysProcAttr.Pdeathsig = syscall.SIGKILL
	if err := s.run(cfg.NetNS); err != nil {
		return nil, err
	}
	if err := s.ready(ctx); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

// checkMachine looks for what simple_switch_grpc itself reports badly or not at all.
func (cfg *SimpleSwitchConfig) checkMachine() error {
	err := port.InNetNS(cfg.NetNS, func() error {
		for number, iface := range cfg.Ports {
			if _, err := net.InterfaceByName(iface); err != nil {
				return environment(fmt.Errorf("port %d: interface %s: %w", number, iface, port.ErrNoInterface), "see 'ip link'")
			}
		}
		// The switch would go on without a server.
		if !strings.HasPrefix(cfg.GRPCAddr, "unix:") {
			lis, err := endpoint.Listen(cfg.GRPCAddr)
			if err != nil {
				return refusedAddress(err)
			}
			return lis.Close()
		}
		return nil
	})
	if err == nil && len(cfg.Ports) != 0 && unix.Geteuid() != 0 {
		err = environment(errors.New("network interfaces as ports need root"), "run as root, or use the lab in memory")
	}
	return err
}

func (cfg *SimpleSwitchConfig) args() []string {
	args := []string{"--device-id", strconv.FormatUint(cfg.DeviceID, 10), "--log-console", "--log-level", "warn"}
	numbers := make([]int, 0, len(cfg.Ports))
	for number := range cfg.Ports {
		numbers = append(numbers, int(number))
	}
	slices.Sort(numbers)
	for _, number := range numbers {
		args = append(args, "-i", fmt.Sprintf("%d@%s", number, cfg.Ports[uint16(number)]))
	}
	args = append(args, "--", "--grpc-server-addr", cfg.GRPCAddr)
	if cfg.CPUPort != 0 {
		args = append(args, "--cpu-port", strconv.Itoa(int(cfg.CPUPort)))
	}
	if cfg.DataAddr != "" {
		args = append(args, "--dp-grpc-server-addr", cfg.DataAddr)
	}
	return args
}

// run starts the process on a thread of its own, which lives as long as the process: the kernel sends the parent
// death signal when the *thread* that started a process ends, and the thread may be in another network namespace.
func (s *SimpleSwitch) run(netns string) error {
	started := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked
		err := port.InNetNS(netns, func() error {
			if err := s.cmd.Start(); err != nil {
				return err
			}
			started <- nil
			s.err = s.cmd.Wait()
			close(s.done)
			return nil
		})
		if err != nil {
			started <- err
		}
	}()
	return <-started
}

// ready waits until the switch answers.
func (s *SimpleSwitch) ready(ctx context.Context) error {
	conn, err := endpoint.Dial(s.addr, grpc.WithConnectParams(grpc.ConnectParams{MinConnectTimeout: time.Second}))
	if err != nil {
		return err
	}
	defer conn.Close()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		select {
		case <-s.done:
			cancel()
		case <-ctx.Done():
		}
	}()
	client := p4v1.NewP4RuntimeClient(conn)
	for {
		// The server refuses connections until it listens; a failed attempt must not end the wait.
		_, err := client.Capabilities(ctx, &p4v1.CapabilitiesRequest{}, grpc.WaitForReady(true))
		if err == nil {
			return nil
		}
		select {
		case <-s.done:
			return s.diagnose()
		case <-ctx.Done():
			select {
			case <-s.done:
				return s.diagnose()
			default:
			}
			return fmt.Errorf("no answer at %s: %w; end of its log:\n%s", s.addr, ctx.Err(), s.log)
		default:
		}
	}
}

// diagnose says why the process ended.
func (s *SimpleSwitch) diagnose() error {
	log := s.log.String()
	cure := ""
	switch {
	case strings.Contains(log, "could not be opened") || strings.Contains(log, "Operation not permitted"):
		cure = "ports need root, and interfaces that are up"
	case strings.Contains(log, "ddress already in use"):
		cure = "another program listens there: end it, or choose another address"
	case strings.Contains(log, "shared libraries"):
		cure = "its libraries are not found: run ldconfig, or set LD_LIBRARY_PATH"
	}
	return environment(fmt.Errorf("it has ended (%v); end of its log:\n%s", s.err, log), cure)
}

// Name implements [Target].
func (s *SimpleSwitch) Name() string { return SimpleSwitchBinary }

// PID returns the process's number.
func (s *SimpleSwitch) PID() int { return s.cmd.Process.Pid }

// GRPCAddr implements [Target].
func (s *SimpleSwitch) GRPCAddr() string { return s.addr }

// Done returns a channel that is closed when the process has ended, for whatever reason.
func (s *SimpleSwitch) Done() <-chan struct{} { return s.done }

// Log returns the end of the process's log.
func (s *SimpleSwitch) Log() string { return s.log.String() }

// stopTimeout is how long the process may take to end by itself.
const stopTimeout = 3 * time.Second

// Close implements [Target]: it ends the process and waits for it.
func (s *SimpleSwitch) Close() error {
	s.once.Do(func() {
		select {
		case <-s.done:
			return
		default:
		}
		// A process that is not waited for cannot have given its number to another.
		_ = s.cmd.Process.Signal(syscall.SIGTERM)
		timer := time.AfterFunc(stopTimeout, func() { _ = s.cmd.Process.Kill() })
		defer timer.Stop()
		<-s.done
	})
	return nil
}

// tail keeps the last bytes that were written to it.
type tail struct {
	mu  sync.Mutex
	buf []byte
}

const tailSize = 4096

func newTail() *tail { return &tail{buf: make([]byte, 0, 2*tailSize)} }

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.buf = append(t.buf, p...)
	if len(t.buf) > tailSize {
		t.buf = append(t.buf[:0], t.buf[len(t.buf)-tailSize:]...)
	}
	return len(p), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return strings.TrimSpace(string(t.buf))
}
