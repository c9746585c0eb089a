package bench

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"xagg/api"
	"xagg/lab/loop"
	"xagg/lab/netns"
	"xagg/lab/results"
	"xagg/lab/testbed"
	"xagg/wire"
)

// Roles of processes and kernel threads, as [results.Usage] names them.
const (
	roleSwitch     = "switch"
	roleServer     = "server"
	roleWorkers    = "workers"
	roleController = "controller"
	roleKernel     = "kernel"
)

// meter measures what runs on a testbed use of the machine. What belongs to it for as long as the testbed is there it finds
// out once: the processes of switch, servers and controller, the kernel threads that poll the servers' interfaces, and the
// servers' XDP programs.
type meter struct {
	bed      *testbed.Testbed
	pids     map[string][]int // by role
	programs []*ebpf.Program
	stats    io.Closer // has the kernel count the run time of programs
}

// newMeter prepares a testbed that is ready: interfaces are polled by threads from now on, and the kernel measures the run
// time of BPF programs. switchPID is the process of a switch that is not the testbed's; 0 = it is.
func newMeter(bed *testbed.Testbed, servers []string, switchPID int) (_ *meter, err error) {
	m := &meter{bed: bed, pids: map[string][]int{}}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("prepare to measure: %w", err), m.close())
		}
	}()
	pids := bed.PIDs()
	if switchPID == 0 {
		switchPID = pids[testbed.SwitchName]
	}
	if switchPID != 0 {
		m.pids[roleSwitch] = []int{switchPID}
	}
	m.pids[roleController] = []int{pids[testbed.ControllerName]}
	if m.stats, err = ebpf.EnableStats(unix.BPF_STATS_RUN_TIME); err != nil {
		return nil, fmt.Errorf("have the kernel measure BPF programs: %w", err)
	}
	for _, name := range servers {
		threads, err := threadNAPI(bed.Hosts(), name)
		if err != nil {
			return nil, err
		}
		m.pids[roleServer] = append(append(m.pids[roleServer], pids[name]), threads...)
		programs, err := programsOf(pids[name])
		if err != nil {
			return nil, err
		}
		m.programs = append(m.programs, programs...)
	}
	// What the wire costs is nobody's but the kernel's; by threads of its own it does not interrupt those that are counted.
	for _, name := range bed.Hosts().Wires() {
		if _, err := threadNAPI(bed.Hosts(), name); err != nil {
			return nil, err
		}
	}
	return m, nil
}

func (m *meter) close() error {
	var errs []error
	for _, p := range m.programs {
		errs = append(errs, p.Close())
	}
	if m.stats != nil {
		errs = append(errs, m.stats.Close())
	}
	return errors.Join(errs...)
}

// programsOf returns the BPF programs that a process holds.
func programsOf(pid int) (programs []*ebpf.Program, err error) {
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/fdinfo/*", pid))
	if err != nil {
		return nil, err
	}
	var ids []uint64
	for _, file := range files {
		info, err := os.Open(file)
		if err != nil {
			continue // it was closed meanwhile
		}
		for lines := bufio.NewScanner(info); lines.Scan(); {
			if text, ok := strings.CutPrefix(lines.Text(), "prog_id:"); ok {
				if id, err := strconv.ParseUint(strings.TrimSpace(text), 10, 32); err == nil && !slices.Contains(ids, id) {
					ids = append(ids, id)
				}
			}
		}
		info.Close()
	}
	for _, id := range ids {
		p, err := ebpf.NewProgramFromID(ebpf.ProgramID(id))
		if err != nil {
			return programs, fmt.Errorf("open BPF program %d: %w", id, err)
		}
		programs = append(programs, p)
	}
	return programs, nil
}

// look is what has been used so far.
type look struct {
	at     time.Duration // on the monotonic clock
	cores  []core
	cpu    map[string]time.Duration // by role; without the workers, who come and go
	bpf    time.Duration
	frames map[string]uint64
	status *api.StatusReply
}

// look looks. The CPU times come first, and the controller, which asks switch and servers for their counters, is asked last.
func (m *meter) look(ctx context.Context) (*look, error) {
	l := &look{at: loop.Now(), cpu: map[string]time.Duration{}, frames: map[string]uint64{}}
	var err error
	if l.cores, err = readCores(); err != nil {
		return nil, err
	}
	for role, pids := range m.pids {
		for _, pid := range pids {
			t, err := cpuTree(pid)
			if err != nil {
				return nil, err
			}
			l.cpu[role] += t
		}
	}
	for _, p := range m.programs {
		stats, err := p.Stats()
		if err != nil {
			return nil, fmt.Errorf("read the run time of a BPF program: %w", err)
		}
		l.bpf += stats.Runtime
	}
	hosts := m.bed.Hosts()
	err = hosts.Do(netns.Switch, func() error {
		for _, h := range hosts.Hosts() {
			link, err := netlink.LinkByName(hosts.PortInterface(h.Port))
			if err != nil {
				return fmt.Errorf("count the frames of port %d: %w", h.Port, err)
			}
			s := link.Attrs().Statistics
			l.frames[h.Name] = s.RxPackets + s.TxPackets
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	l.status, err = api.NewControllerClient(m.bed.Controller()).Status(ctx, &api.StatusRequest{})
	return l, err
}

// cpuTree returns the CPU time that a process and its descendants have used so far.
func cpuTree(pid int) (sum time.Duration, err error) {
	for i, pid := range descendants(pid) {
		t, err := cpuTime(pid)
		if err != nil && i == 0 {
			return 0, err
		}
		sum += t // of a child that has ended meanwhile: nothing
	}
	return sum, nil
}

// usage returns what was used between two looks, with the CPU time of the workers, who are not in the looks. All that the cores were
// busy with beyond that is the kernel's: the stacks of hosts that are not polled by threads, queues of links, and whatever else
// runs on the machine, this program included.
func usage(before, after *look, workers, servers time.Duration) results.Usage {
	u := results.Usage{
		Seconds: (after.at - before.at).Seconds(),
		CPU:     map[string]float64{roleWorkers: workers.Seconds()},
		BPF:     (after.bpf - before.bpf).Seconds(),
		Frames:  map[string]uint64{},
	}
	for role, t := range after.cpu {
		u.CPU[role] = (t - before.cpu[role]).Seconds()
	}
	u.CPU[roleServer] += servers.Seconds()
	var busy float64
	u.Busiest, u.Stolen, busy = load(before.cores, after.cores)
	for _, seconds := range u.CPU {
		busy -= seconds
	}
	u.CPU[roleKernel] = max(0, busy)
	for name, n := range after.frames {
		u.Frames[name] = n - before.frames[name]
	}
	u.Partials = sent(after.status, wire.TypePartial) - sent(before.status, wire.TypePartial)
	u.Reasons = reasons(before.status, after.status)
	return u
}

func sent(status *api.StatusReply, t wire.Type) uint64 {
	return status.GetSwitch().GetSent()[t.String()]
}

// reasons returns what the switch, and each server by its name, has done with packets between two statuses, without zeros.
func reasons(before, after *api.StatusReply) map[string]map[string]uint64 {
	risen := func(before, after map[string]uint64) map[string]uint64 {
		counts := map[string]uint64{}
		for name, n := range after {
			if n -= before[name]; n != 0 {
				counts[name] = n
			}
		}
		return counts
	}
	all := map[string]map[string]uint64{testbed.SwitchName: risen(before.GetSwitch().GetReasons(), after.GetSwitch().GetReasons())}
	for i, s := range after.GetServers() {
		all[s.GetName()] = risen(before.GetServers()[i].GetReasons(), s.GetReasons())
	}
	return all
}

// worker is the CPU time of a process that comes and goes with a run, between two moments.
type worker struct {
	mu            sync.Mutex
	pid           int
	before, after time.Duration
	ended         bool // after is from the moment when it was over
}

func (w *worker) started(pid int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.pid = pid
}

// begin and end mark the moments. Of a process that has ended before, the end is where it ended.
func (w *worker) begin() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.pid != 0 && !w.ended {
		w.before, _ = cpuTree(w.pid)
	}
}

func (w *worker) end() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.pid == 0 || w.ended {
		return
	}
	if t, err := cpuTree(w.pid); err == nil {
		w.after = t
	}
}

// over is called when the process has ended, with all that it has used; it counts unless the end was marked before.
func (w *worker) over(used time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.ended = true
	if w.after == 0 {
		w.after = used
	}
}

func (w *worker) used() time.Duration {
	w.mu.Lock()
	defer w.mu.Unlock()
	return max(0, w.after-w.before)
}
