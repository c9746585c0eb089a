package aggregator

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// cpuTime returns the processor time that all threads of a process have used, or that a thread of the kernel has: the
// scheduler's nanoseconds, by the process's CPU-time clock (clock_getcpuclockid(3): the number's complement, and 2 for the
// scheduler's).
func cpuTime(pid int) (time.Duration, error) {
	var t unix.Timespec
	if err := unix.ClockGettime(int32(^pid<<3|2), &t); err != nil {
		return 0, fmt.Errorf("read processor time of process %d: %w", pid, err)
	}
	return time.Duration(t.Nano()), nil
}

// cpuTimes returns the sum of cpuTime.
func cpuTimes(pids []int) (sum time.Duration, err error) {
	for _, pid := range pids {
		t, err := cpuTime(pid)
		if err != nil {
			return 0, err
		}
		sum += t
	}
	return sum, nil
}

// allowed returns the processors that this process may use.
func allowed() ([]int, error) {
	var set unix.CPUSet
	if err := unix.SchedGetaffinity(0, &set); err != nil {
		return nil, fmt.Errorf("read affinity: %w", err)
	}
	var cpus []int
	for cpu := range 8 * len(set) * 8 {
		if set.IsSet(cpu) {
			cpus = append(cpus, cpu)
		}
	}
	return cpus, nil
}

// pin binds a thread (0: the calling one) to processors.
func pin(tid int, cpus ...int) error {
	var set unix.CPUSet
	for _, cpu := range cpus {
		set.Set(cpu)
	}
	if err := unix.SchedSetaffinity(tid, &set); err != nil {
		return fmt.Errorf("bind thread %d to processors %v: %w", tid, cpus, err)
	}
	return nil
}

// priority is the nice value of whatever takes part, so that other programs disturb a measurement little.
const priority = -20

// on runs f on a thread that is bound to the processors meanwhile, and comes before other programs there.
func on(cpus []int, f func() error) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	before, err := allowed()
	if err != nil {
		return err
	}
	if err := takeOver(cpus); err != nil {
		return err
	}
	err = f()
	return errors.Join(err, pin(0, before...), unix.Setpriority(unix.PRIO_PROCESS, 0, 0))
}

// takeOver binds the thread to processors and gives it priority there.
func takeOver(cpus []int) error {
	if err := pin(0, cpus...); err != nil {
		return err
	}
	if err := unix.Setpriority(unix.PRIO_PROCESS, 0, priority); err != nil {
		return fmt.Errorf("set priority: %w", err)
	}
	return nil
}

// idle returns for how long the processors have been idle, by /proc/stat, which the kernel keeps in nanoseconds where it
// stops the tick of an idle processor and rounds to hundredths of a second; and what a hypervisor has taken from them.
func idle(cpus []int) (idle, stolen time.Duration, err error) {
	data, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0, 0, err
	}
	const tick = time.Second / 100 // USER_HZ is 100 everywhere
	for line := range strings.Lines(string(data)) {
		// Its name, user, nice, system, idle, iowait, irq, softirq, steal.
		fields := strings.Fields(line)
		if len(fields) < 9 {
			continue
		}
		cpu, err := strconv.Atoi(strings.TrimPrefix(fields[0], "cpu"))
		if err != nil || !slices.Contains(cpus, cpu) {
			continue
		}
		var ticks [9]uint64
		for i := range ticks[1:] {
			if ticks[i+1], err = strconv.ParseUint(fields[i+1], 10, 64); err != nil {
				return 0, 0, fmt.Errorf("read /proc/stat: %w", err)
			}
		}
		idle += time.Duration(ticks[4]+ticks[5]) * tick
		stolen += time.Duration(ticks[8]) * tick
	}
	return idle, stolen, nil
}

// threadsNamed returns the threads of the kernel whose names begin so, in the order of their numbers.
func threadsNamed(prefix string) ([]int, error) {
	names, err := filepath.Glob("/proc/[0-9]*/comm")
	if err != nil {
		return nil, err
	}
	var pids []int
	for _, name := range names {
		comm, err := os.ReadFile(name)
		if err != nil || !bytes.HasPrefix(comm, []byte(prefix)) {
			continue // it is gone, or another
		}
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(name)))
		if err != nil {
			return nil, err
		}
		pids = append(pids, pid)
	}
	slices.Sort(pids)
	return pids, nil
}
