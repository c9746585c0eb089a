package aggregator

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"xagg/lab/netns"
	"xagg/wire"
)

// link is one veth pair of the lab: the aggregator's host at one end, and at the other, in the switch's namespace, its
// load.
type link struct {
	lab   *netns.Lab
	host  netns.Host
	cores CoreSet
	kind  string
}

// hostFor describes the aggregator's host number n.
func hostFor(n int, name string, queues int, offloads bool) netns.Host {
	return netns.Host{
		Name: name, Port: n, Queues: queues, Offloads: offloads,
		Addr: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 78, byte(n), 1}), 24),
		MAC:  net.HardwareAddr{2, 0x78, 0x61, 0, 1, byte(n)},
	}
}

// server returns the aggregator's address.
func (l *link) server() wire.Addr {
	return wire.Addr{MAC: [6]byte(l.host.MAC), IP: l.host.Addr.Addr().As4(), Port: wire.Port}
}

// source returns the address of a rank, which the load's end has.
func (l *link) source(rank int) wire.Addr {
	net := l.server().IP[2]
	return wire.Addr{MAC: [6]byte{2, 0x78, 0x61, 0, 3, net}, IP: [4]byte{10, 78, net, byte(100 + rank)}, Port: uint16(40000 + rank)}
}

// port is the interface of the load's end.
func (l *link) port() string { return netns.PortName(l.host.Port) }

// network returns the processors that receive at the load's end, one for each queue.
func (l *link) network() []int {
	if len(l.cores.Aggregator) == 1 {
		return l.cores.Load[:1]
	}
	return l.cores.Aggregator
}

// address gives the load's end its addresses and tells it the aggregator's.
func (l *link) address(ranks int) error {
	return l.lab.Do(netns.Switch, func() error {
		iface, err := netlink.LinkByName(l.port())
		if err != nil {
			return err
		}
		mac := l.source(0).MAC
		if err := netlink.LinkSetHardwareAddr(iface, mac[:]); err != nil {
			return fmt.Errorf("set MAC of %s: %w", l.port(), err)
		}
		for rank := range ranks {
			ip := l.source(rank).IP
			if err := netlink.AddrAdd(iface, &netlink.Addr{IPNet: &net.IPNet{IP: ip[:], Mask: net.CIDRMask(24, 32)}}); err != nil {
				return fmt.Errorf("add address to %s: %w", l.port(), err)
			}
		}
		server := l.server()
		if err := netlink.NeighAdd(&netlink.Neigh{LinkIndex: iface.Attrs().Index, State: netlink.NUD_PERMANENT,
			IP: server.IP[:], HardwareAddr: server.MAC[:]}); err != nil {
			return fmt.Errorf("add neighbour of %s: %w", l.port(), err)
		}
		return nil
	})
}

// tune gives each transmit queue of both ends its processor.
func (l *link) tune() error {
	for _, end := range []struct {
		host, iface string
		cpus        []int
	}{{l.host.Name, netns.HostInterface, l.cores.Aggregator}, {netns.Switch, l.port(), l.cores.Aggregator}} {
		err := l.lab.Do(end.host, func() error {
			return inSysfs(func(root string) error {
				dir := filepath.Join(root, "class/net", end.iface)
				if len(end.cpus) < 2 {
					return nil // there is one queue, for everybody
				}
				for queue, cpu := range end.cpus {
					path := filepath.Join(dir, fmt.Sprintf("queues/tx-%d/xps_cpus", queue))
					if err := os.WriteFile(path, []byte(mask(cpu)), 0); err != nil && !errors.Is(err, os.ErrNotExist) {
						return err
					}
				}
				return nil
			})
		})
		if err != nil {
			return fmt.Errorf("tune %s:%s: %w", end.host, end.iface, err)
		}
	}
	return nil
}

// steer has the frames that an end receives handled by softirqs of the processors.
func (l *link) steer(host, iface string, cpus []int) error {
	return l.lab.Do(host, func() error {
		return inSysfs(func(root string) error {
			paths, err := filepath.Glob(filepath.Join(root, "class/net", iface, "queues/rx-*/rps_cpus"))
			if err != nil {
				return err
			}
			for _, path := range paths {
				if err := os.WriteFile(path, []byte(mask(cpus...)), 0); err != nil {
					return fmt.Errorf("steer packets of %s:%s: %w", host, iface, err)
				}
			}
			return nil
		})
	})
}

// mask spells a set of processors as sysfs does: words of 32 bits in hexadecimal, the highest first.
func mask(cpus ...int) string {
	words := make([]uint32, slices.Max(cpus)/32+1)
	for _, cpu := range cpus {
		words[cpu/32] |= 1 << (cpu % 32)
	}
	slices.Reverse(words)
	var text []string
	for _, w := range words {
		text = append(text, fmt.Sprintf("%08x", w))
	}
	return strings.Join(text, ",")
}

// inSysfs runs f with the path of a sysfs that shows the thread's network namespace. It is mounted nowhere.
func inSysfs(f func(root string) error) error {
	fs, err := unix.Fsopen("sysfs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return fmt.Errorf("open sysfs: %w", err)
	}
	defer unix.Close(fs)
	if err := unix.FsconfigCreate(fs); err != nil {
		return fmt.Errorf("create sysfs: %w", err)
	}
	mount, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("mount sysfs: %w", err)
	}
	defer unix.Close(mount)
	return f(fmt.Sprintf("/proc/self/fd/%d", mount))
}

// napiThreads runs f in a namespace of the lab, after which the interface receives by NAPI, and has its queues served by
// threads of the kernel instead of whoever is interrupted. It returns these, bound to the processors, a queue each. They
// run before everything else on their processor, as softirqs do.
func (l *link) napiThreads(host, iface string, cpus []int, f func() error) ([]int, error) {
	prefix := "napi/" + iface + "-"
	before, err := threadsNamed(prefix)
	if err != nil {
		return nil, err
	}
	if err := l.lab.Do(host, func() error {
		if err := f(); err != nil {
			return err
		}
		return inSysfs(func(root string) error {
			return os.WriteFile(filepath.Join(root, "class/net", iface, "threaded"), []byte("1"), 0)
		})
	}); err != nil {
		return nil, fmt.Errorf("set up %s:%s: %w", host, iface, err)
	}
	after, err := threadsNamed(prefix)
	if err != nil {
		return nil, err
	}
	threads := slices.DeleteFunc(after, func(pid int) bool { return slices.Contains(before, pid) })
	if len(threads) == 0 {
		return nil, &UnsupportedError{"threads that serve network queues", "5.12", nil}
	}
	for queue, tid := range threads {
		if err := pin(tid, cpus[queue%len(cpus)]); err != nil {
			return nil, err
		}
		if err := unix.SchedSetAttr(tid, &unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_FIFO, Priority: 1}, 0); err != nil {
			return nil, fmt.Errorf("give thread %d priority: %w", tid, err)
		}
	}
	return threads, nil
}
