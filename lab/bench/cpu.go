package bench

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// cpuTime returns the CPU time that a process has used so far, by all its threads, those that have ended included, to the
// nanosecond; of a kernel thread likewise. A process that was reaped has none: an error.
func cpuTime(pid int) (time.Duration, error) {
	// The clock of another process: MAKE_PROCESS_CPUCLOCK(pid, CPUCLOCK_SCHED) of linux/posix-timers_types.h.
	const sched = 2
	var t unix.Timespec
	if err := unix.ClockGettime(int32(^pid<<3|sched), &t); err != nil {
		return 0, fmt.Errorf("read the CPU time of process %d: %w", pid, err)
	}
	return time.Duration(t.Nano()), nil
}

// core is what a CPU core, or all of them, did since the machine started.
type core struct{ busy, stolen, total time.Duration }

// tick is the unit of /proc/stat: USER_HZ is 100 on every architecture that Go runs on.
const tick = 10 * time.Millisecond

// readCores returns what each core has done.
func readCores() ([]core, error) {
	stat, err := os.ReadFile("/proc/stat")
	if err != nil {
		return nil, err
	}
	return parseCores(stat)
}

// parseCores reads the cores of /proc/stat. Time that a core waits for a disk is idle; what guests use is part of user.
func parseCores(stat []byte) ([]core, error) {
	var cores []core
	for line := range strings.Lines(string(stat)) {
		fields := strings.Fields(line)
		if len(fields) < 9 || !strings.HasPrefix(fields[0], "cpu") || fields[0] == "cpu" {
			continue
		}
		var c core
		// user nice system idle iowait irq softirq steal
		for i, field := range fields[1:9] {
			n, err := strconv.ParseInt(field, 10, 64)
			if err != nil {
				return nil, fmt.Errorf("read /proc/stat: %w", err)
			}
			t := time.Duration(n) * tick
			c.total += t
			switch i {
			case 3, 4:
			case 7:
				c.stolen += t
			default:
				c.busy += t
			}
		}
		cores = append(cores, c)
	}
	if len(cores) == 0 {
		return nil, fmt.Errorf("read /proc/stat: it has no cores")
	}
	return cores, nil
}

// load says how busy cores were between two looks: the busiest of them, the share of time that the hypervisor took from
// all, and the seconds that all were busy.
func load(before, after []core) (busiest, stolen, seconds float64) {
	var steal, total time.Duration
	for i := range min(len(before), len(after)) {
		busy, all := after[i].busy-before[i].busy, after[i].total-before[i].total
		if all > 0 {
			busiest = max(busiest, float64(busy)/float64(all))
		}
		seconds += busy.Seconds()
		steal += after[i].stolen - before[i].stolen
		total += all
	}
	if total > 0 {
		stolen = float64(steal) / float64(total)
	}
	return busiest, stolen, seconds
}

// descendants returns a process and those that descend from it.
func descendants(pid int) []int {
	pids := []int{pid}
	tasks, _ := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid)) // none: it has ended
	for _, task := range tasks {
		children, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%s/children", pid, task.Name()))
		for _, child := range bytes.Fields(children) {
			if n, err := strconv.Atoi(string(child)); err == nil {
				pids = append(pids, descendants(n)...)
			}
		}
	}
	return pids
}
