package bench

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"xagg/lab/testbed"
)

// lockDir is what programs of this project lock while they have the kernel make threads. Every machine has it.
const lockDir = "/run"

// threadNAPI has the kernel poll the interfaces of a host by threads, where they are polled at all: a veth that has an XDP program.
// What its driver, its XDP program and the stack behind it do is then the CPU time of these threads instead of whoever was
// interrupted. It returns the threads.
func threadNAPI(hosts testbed.Hosts, host string) ([]int, error) {
	// A thread does not tell whose interface it polls. So those are the host's that are new, and nobody else makes any meanwhile.
	lock, err := os.Open(lockDir)
	if err != nil {
		return nil, err
	}
	defer lock.Close()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		return nil, fmt.Errorf("lock %s: %w", lockDir, err)
	}
	before, err := napiThreads()
	if err != nil {
		return nil, err
	}
	err = hosts.Do(host, func() error {
		links, err := netlink.LinkList()
		if err != nil {
			return err
		}
		sys, err := mountSys()
		if err != nil {
			return err
		}
		defer unix.Close(sys)
		for _, link := range links {
			if link.Type() != "veth" {
				continue
			}
			err := writeAt(sys, filepath.Join("class/net", link.Attrs().Name, "threaded"), "1")
			if err != nil && !errors.Is(err, unix.EOPNOTSUPP) { // it is not polled
				return err
			}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("have the interfaces of %s polled by threads: %w", host, err)
	}
	after, err := napiThreads()
	if err != nil {
		return nil, err
	}
	var pids []int
	for pid := range maps.Keys(after) {
		if !before[pid] {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

// mountSys returns a sysfs of the thread's network namespace. It is not attached anywhere, and goes when it is closed.
func mountSys() (int, error) {
	fs, err := unix.Fsopen("sysfs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return -1, fmt.Errorf("open a sysfs: %w", err)
	}
	defer unix.Close(fs)
	if err := unix.FsconfigCreate(fs); err != nil {
		return -1, fmt.Errorf("make a sysfs: %w", err)
	}
	sys, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("mount a sysfs: %w", err)
	}
	return sys, nil
}

// writeAt writes a file below a folder.
func writeAt(dir int, path, text string) error {
	fd, err := unix.Openat(dir, path, unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open %s: %w", path, err)
	}
	defer unix.Close(fd)
	if _, err := unix.Write(fd, []byte(text)); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	return nil
}

// napiThreads returns the kernel's threads that poll interfaces: their names begin with "napi/".
func napiThreads() (map[int]bool, error) {
	files, err := filepath.Glob("/proc/[0-9]*/comm")
	if err != nil {
		return nil, err
	}
	threads := map[int]bool{}
	for _, file := range files {
		name, err := os.ReadFile(file)
		if err != nil || !strings.HasPrefix(string(name), "napi/") {
			continue // it has ended, or is another
		}
		if pid, err := strconv.Atoi(filepath.Base(filepath.Dir(file))); err == nil {
			threads[pid] = true
		}
	}
	return threads, nil
}
