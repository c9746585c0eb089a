package demo

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/goccy/go-yaml"
	"google.golang.org/grpc"

	"xagg/api"
	"xagg/bmv2"
	"xagg/bmv2/capture"
	"xagg/bmv2/fault"
	"xagg/internal/endpoint"
	"xagg/lab"
	"xagg/lab/netns"
	"xagg/worker/replay"
	"xagg/xdp"
)

// startTimeout bounds the time until switch, servers and controller are ready.
const startTimeout = 60 * time.Second

// namespaces is a testbed of one process per host, each in a network namespace of its own.
type namespaces struct {
	lab      *netns.Lab
	topology lab.Topology
	opts     *Options
	xagg     string // this program
	conn     *endpoint.Conn
	target   *bmv2.SimpleSwitch // nil with the engine
	capture  *capture.Capture   // of a real switch's ports
	daemons  []*daemon
}

// daemon is a process that runs as long as the testbed.
type daemon struct {
	name  string
	child *netns.Child
	log   string // file of its stderr
}

func startNetns(ctx context.Context, topology lab.Topology, opts *Options) (testbed, error) {
	xagg, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("find this program: %w", err)
	}
	spec := netns.Spec{Faults: opts.Faults}
	for _, h := range slices.Concat(topology.Workers, topology.Servers, topology.Others) {
		spec.Hosts = append(spec.Hosts, netns.Host{
			Name: h.Name, Addr: netip.PrefixFrom(h.IP, 16), MAC: net.HardwareAddr(h.MAC[:]), Port: int(h.Port),
			Bridge: slices.Contains(topology.Servers, h),
		})
	}
	hosts, err := netns.Create(ctx, spec)
	if err != nil {
		return nil, err
	}
	n := &namespaces{lab: hosts, topology: topology, opts: opts, xagg: xagg}
	if err := n.start(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("start the lab: %w", err), n.close())
	}
	return n, nil
}

func (n *namespaces) controller() grpc.ClientConnInterface { return n.conn }

// socket returns the address of a unix socket in the lab's folder.
func (n *namespaces) socket(name string) string {
	return "unix:" + filepath.Join(n.lab.Dir(), name+".sock")
}

func (n *namespaces) start(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	if err := n.startSwitch(ctx); err != nil {
		return err
	}
	var agents []string
	for _, h := range n.topology.Servers {
		agents = append(agents, n.socket(h.Name))
		err := n.daemon(h.Name, h.Name, "server", "--interface", netns.HostInterface, "--listen", n.socket(h.Name), "--name", h.Name,
			"--memory", n.memory(), "--no-pin") // all of it ends with the lab
		if err != nil {
			return err
		}
	}
	config, err := yaml.Marshal(n.topology.ControllerConfig(n.socket("switch"), agents, n.socket("controller")))
	if err != nil {
		return fmt.Errorf("write the controller's configuration: %w", err)
	}
	file := filepath.Join(n.lab.Dir(), "controller.yaml")
	if err := os.WriteFile(file, config, 0o644); err != nil {
		return fmt.Errorf("write the controller's configuration: %w", err)
	}
	// The controller talks through unix sockets only and may sit in any namespace; the switch's is there already.
	if err := n.daemon("controller", netns.Switch, "controller", "--config", file); err != nil {
		return err
	}
	n.conn, err = endpoint.Dial(n.socket("controller"))
	if err != nil {
		return fmt.Errorf("connect to the controller: %w", err)
	}
	return n.ready(ctx)
}

// memory returns the size of a server's memory: twice what one of the demo's jobs needs, and not less than the default.
func (n *namespaces) memory() string {
	size := xdp.Size(2*n.opts.rounds()) * xdp.SlotSize * xdp.Size(chunks(n.opts.maxElems()))
	const mib = 1 << 20
	return fmt.Sprintf("%dMiB", max(64, (size+mib-1)/mib))
}

func (n *namespaces) startSwitch(ctx context.Context) error {
	if n.opts.Switch == SwitchSimpleSwitch {
		return n.startSimpleSwitch(ctx)
	}
	args := []string{"switch", "--no-p4", "--device-id", "0"}
	for _, h := range n.lab.Hosts() {
		args = append(args, "-i", fmt.Sprintf("%d@%s", h.Port, netns.PortName(h.Port)))
	}
	if n.opts.Pcap != "" {
		args = append(args, "--pcap", n.opts.Pcap)
	}
	args = append(args, "--", "--grpc-server-addr", n.socket("switch"), "--cpu-port", strconv.Itoa(lab.CPUPort))
	return n.daemon("switch", netns.Switch, args...)
}

func (n *namespaces) startSimpleSwitch(ctx context.Context) (err error) {
	config := bmv2.Config{Ports: map[uint16]string{}, CPUPort: lab.CPUPort, GRPCAddr: n.socket("switch"), Log: n.opts.Log}
	var interfaces []capture.Interface
	for _, h := range n.lab.Hosts() {
		name := netns.PortName(h.Port)
		config.Ports[uint16(h.Port)] = name
		interfaces = append(interfaces, capture.Interface{Name: name})
	}
	path := n.lab.Path(netns.Switch)
	if n.opts.Pcap != "" {
		if n.capture, err = capture.Start(n.opts.Pcap, path, interfaces); err != nil {
			return fmt.Errorf("capture the switch's ports: %w", err)
		}
	}
	n.target, err = bmv2.StartSimpleSwitch(ctx, bmv2.SimpleSwitchConfig{Config: config, Binary: n.opts.SimpleSwitch, NetNS: path})
	return err
}

// daemon starts this program in a host with the given arguments.
func (n *namespaces) daemon(name, host string, args ...string) error {
	d := &daemon{name: name, log: filepath.Join(n.lab.Dir(), name+".log")}
	log, err := os.Create(d.log)
	if err != nil {
		return fmt.Errorf("start %s: %w", name, err)
	}
	defer log.Close()                                                                 // the child has its own
	cmd := exec.Command(n.xagg, append([]string{"--log-format", "text"}, args...)...) // its end may be shown to a person
	cmd.Stdout, cmd.Stderr = log, log
	if d.child, err = n.lab.Start(host, cmd); err != nil {
		return err
	}
	n.daemons = append(n.daemons, d)
	return nil
}

// dead returns an error when a daemon has ended, with the end of its log.
func (n *namespaces) dead() error {
	for _, d := range n.daemons {
		select {
		case <-d.child.Done():
			return fmt.Errorf("%s has ended (%v):\n%s", d.name, d.child.Wait(), tail(d.log))
		default:
		}
	}
	if n.target != nil {
		select {
		case <-n.target.Done():
			return fmt.Errorf("%s has ended:\n%s", n.target.Name(), n.target.Log())
		default:
		}
	}
	return nil
}

// ready waits until the controller says that switch and servers are.
func (n *namespaces) ready(ctx context.Context) error {
	client := api.NewControllerClient(n.conn)
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		if err := n.dead(); err != nil {
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

// tail returns the last lines of a log file.
func tail(file string) string {
	data, err := os.ReadFile(file)
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimSpace(string(data)), "\n")
	return strings.Join(lines[max(0, len(lines)-10):], "\n")
}

func (n *namespaces) run(ctx context.Context, job string, take func(reduced) error) error {
	return errors.Join(eachRank(ctx, len(n.topology.Workers), func(ctx context.Context, rank int) error {
		return n.worker(ctx, job, rank, take)
	}), n.dead())
}

// worker runs one worker process and takes what it writes: a JSON object per all-reduce on stdout, and its integers in
// a file.
func (n *namespaces) worker(ctx context.Context, job string, rank int, take func(reduced) error) error {
	host := n.topology.Workers[rank]
	dir, err := os.MkdirTemp(n.lab.Dir(), host.Name+"-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	log, err := os.Create(filepath.Join(n.lab.Dir(), host.Name+".log"))
	if err != nil {
		return err
	}
	defer log.Close()
	args := []string{"worker", "--controller", n.socket("controller"), "--job", job, "--rank", strconv.Itoa(rank),
		"--ip", host.IP.String(), "--rounds", strconv.Itoa(n.opts.Rounds), "--buckets", strconv.Itoa(n.opts.Buckets),
		"--settle", strconv.Itoa(n.opts.settle()),
		"--dump", dir, "--timeout", n.opts.Timeout.String()}
	if n.opts.Grads != "" {
		args = append(args, "--grads", n.opts.Grads)
	}
	if n.opts.NoChecksum {
		args = append(args, "--no-checksum")
	}
	if delay := n.opts.Straggler[rank]; delay > 0 {
		args = append(args, "--delay", delay.String())
	}
	cmd := exec.Command(n.xagg, args...)
	cmd.Stderr = log
	out, stdout, err := os.Pipe()
	if err != nil {
		return err
	}
	defer out.Close()
	cmd.Stdout = stdout
	child, err := n.lab.Start(host.Name, cmd)
	stdout.Close()
	if err != nil {
		return err
	}
	defer child.Stop()
	defer context.AfterFunc(ctx, child.Stop)()
	taken := n.take(out, dir, rank, take)
	if taken != nil {
		child.Stop()
	}
	if err := child.Wait(); err != nil && taken == nil {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		return fmt.Errorf("%w:\n%s", err, tail(log.Name()))
	}
	return taken
}

// maxLine bounds what a worker writes of an all-reduce: with a quorum the contributors of each of up to a million chunks.
const maxLine = 32 << 20

// take reads the all-reduces of a worker until it has ended.
func (n *namespaces) take(out io.Reader, dir string, rank int, take func(reduced) error) error {
	lines := bufio.NewScanner(out)
	lines.Buffer(nil, maxLine)
	for lines.Scan() {
		var line replay.Line
		if err := json.Unmarshal(lines.Bytes(), &line); err != nil {
			return fmt.Errorf("read its output: %w: %s", err, lines.Bytes())
		}
		file := filepath.Join(dir, replay.DumpName(line.Index, n.opts.Buckets, line.Bucket, rank))
		data, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		if err := os.Remove(file); err != nil {
			return err
		}
		masks, err := line.Contributors()
		if err != nil {
			return fmt.Errorf("read its output: %w", err)
		}
		r := reduced{rank, make([]int32, len(data)/4), masks, line}
		for i := range r.sums {
			r.sums[i] = int32(binary.LittleEndian.Uint32(data[4*i:]))
		}
		if err := take(r); err != nil {
			return err
		}
	}
	return lines.Err()
}

func (n *namespaces) faults() []fault.PathCounts { return n.lab.Faults() }

func (n *namespaces) close() error {
	var errs []error
	if n.conn != nil {
		errs = append(errs, n.conn.Close())
	}
	if n.target != nil {
		errs = append(errs, n.target.Close())
	}
	if n.capture != nil {
		errs = append(errs, n.capture.Close())
	}
	return errors.Join(append(errs, n.lab.Close())...)
}
