package netns

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"
	"unsafe"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"xagg/xdp"
)

// mtu is every link's: the protocol's longest packet fits, and native XDP takes no more than 3,506 on a veth.
const mtu = 1500

// The interfaces in the middle of a link.
const (
	middleUp   = "up"   // towards the switch
	middleDown = "down" // towards the host
)

// connect makes the host's link to the switch.
func (l *Lab) connect(h Host) error {
	host, port := l.spaces[h.Name], PortName(h.Port)
	sw, sender, up := l.spaces[Switch], host, HostInterface
	if middle := l.spaces[h.middle()]; middle != nil {
		if err := h.veth(middle, middleDown, host, HostInterface, h.MAC); err != nil {
			return err
		}
		if err := h.veth(sw, port, middle, middleUp, nil); err != nil {
			return err
		}
		if h.Bridge {
			if err := l.passXDP(middle, middleDown); err != nil {
				return err
			}
			// A veth that gets an XDP program turns GRO on by itself.
			if err := middle.noOffloads(middleDown); err != nil {
				return err
			}
		}
		join := func() error { return middle.join(middleDown, middleUp) }
		if l.spec.faulty(h) {
			join = func() error { return l.relay(middle, uint16(h.Port)) }
		}
		if err := join(); err != nil {
			return err
		}
		sender, up = middle, middleUp
	} else if err := h.veth(sw, port, host, HostInterface, h.MAC); err != nil {
		return err
	}
	if h.Rate > 0 {
		if err := sw.limit(port, h.Rate); err != nil {
			return err
		}
		if err := sender.limit(up, h.Rate); err != nil {
			return err
		}
	}
	if err := host.address(HostInterface, &net.IPNet{
		IP:   h.Addr.Addr().AsSlice(),
		Mask: net.CIDRMask(h.Addr.Bits(), 32),
	}); err != nil {
		return err
	}
	l.ends = append(l.ends, end{host, HostInterface}, end{sw, port})
	return nil
}

// end is one end of a link.
type end struct {
	*space
	iface string
}

// veth makes a pair of interfaces for the host's link, brings both up and turns their offloads off. mac is b's; nil
// leaves a random one.
func (h Host) veth(a *space, nameA string, b *space, nameB string, mac net.HardwareAddr) error {
	attrs := netlink.NewLinkAttrs()
	queues := max(1, h.Queues)
	attrs.Name, attrs.MTU, attrs.NumTxQueues, attrs.NumRxQueues = nameA, mtu, queues, queues
	err := a.links.LinkAdd(&netlink.Veth{
		LinkAttrs:        attrs,
		PeerName:         nameB,
		PeerMTU:          mtu,
		PeerHardwareAddr: mac,
		PeerNamespace:    netlink.NsFd(b.handle),
		PeerNumTxQueues:  uint32(queues),
		PeerNumRxQueues:  uint32(queues),
	})
	if err != nil {
		return fmt.Errorf("make link %s:%s to %s:%s: %w", a.name, nameA, b.name, nameB, err)
	}
	for _, e := range []end{{a, nameA}, {b, nameB}} {
		if !h.Offloads {
			if err := e.noOffloads(e.iface); err != nil {
				return err
			}
		}
		if err := e.up(e.iface); err != nil {
			return err
		}
	}
	return nil
}

// up brings an interface up.
func (s *space) up(iface string) error {
	link, err := s.links.LinkByName(iface)
	if err == nil {
		err = s.links.LinkSetUp(link)
	}
	if err != nil {
		return fmt.Errorf("bring up %s:%s: %w", s.name, iface, err)
	}
	return nil
}

// address gives an interface its IPv4 address.
func (s *space) address(iface string, ipnet *net.IPNet) error {
	link, err := s.links.LinkByName(iface)
	if err == nil {
		err = s.links.AddrAdd(link, &netlink.Addr{IPNet: ipnet})
	}
	if err != nil {
		return fmt.Errorf("set address of %s:%s to %v: %w", s.name, iface, ipnet, err)
	}
	return nil
}

// join makes a bridge of the interfaces. It has no address, and learns nothing about multicast, which would make it
// send queries.
func (s *space) join(ports ...string) error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU = "br0", mtu
	snooping := false
	bridge := &netlink.Bridge{LinkAttrs: attrs, MulticastSnooping: &snooping}
	if err := s.links.LinkAdd(bridge); err != nil {
		return fmt.Errorf("make bridge %s:br0: %w", s.name, err)
	}
	for _, port := range ports {
		link, err := s.links.LinkByName(port)
		if err == nil {
			err = s.links.LinkSetMaster(link, bridge)
		}
		if err != nil {
			return fmt.Errorf("join %s:%s to the bridge: %w", s.name, port, err)
		}
	}
	return s.up("br0")
}

// limit puts a token bucket on what leaves an interface. The bucket holds a millisecond's worth, and at least two full
// frames; the queue before it 50 ms, and at least 256 KiB, so that it delays before it drops.
func (s *space) limit(iface string, rate uint64) error {
	link, err := s.links.LinkByName(iface)
	if err == nil {
		bytes := rate / 8 // a second
		burst := max(bytes/1000, 2*(mtu+14))
		err = s.links.QdiscReplace(&netlink.Tbf{
			QdiscAttrs: netlink.QdiscAttrs{
				LinkIndex: link.Attrs().Index,
				Handle:    netlink.MakeHandle(1, 0),
				Parent:    netlink.HANDLE_ROOT,
			},
			Rate:   bytes,
			Limit:  uint32(burst + max(bytes/20, 256<<10)),
			Buffer: netlink.Xmittime(bytes, uint32(burst)),
		})
	}
	if err != nil {
		return fmt.Errorf("limit %s:%s to %d bit/s by tbf: %w", s.name, iface, rate, err)
	}
	return nil
}

// passXDP attaches, natively, an XDP program that passes every frame. The lab holds it until it is closed.
func (l *Lab) passXDP(s *space, iface string) error {
	err := onThread(func() error {
		return s.enter(func() error {
			i, err := net.InterfaceByName(iface)
			if err != nil {
				return err
			}
			pass, err := xdp.AttachPass(i.Index, xdp.Native)
			if err == nil {
				l.closers = append(l.closers, pass)
			}
			return err
		})
	})
	if err != nil {
		return fmt.Errorf("let native XDP through %s:%s: %w", s.name, iface, err)
	}
	return nil
}

// offloads are the ethtool commands that turn features off which would put other frames on a link than a wire
// carries: checksums left for the card to fill in, and frames longer than the MTU.
var offloads = []struct {
	name string
	cmd  uint32
}{
	{"rx", unix.ETHTOOL_SRXCSUM},
	{"tx", unix.ETHTOOL_STXCSUM},
	{"sg", unix.ETHTOOL_SSG},
	{"tso", unix.ETHTOOL_STSO},
	{"gso", unix.ETHTOOL_SGSO},
	{"gro", unix.ETHTOOL_SGRO},
}

// noOffloads turns an interface's offloads off.
func (s *space) noOffloads(iface string) error {
	return onThread(func() error {
		return s.enter(func() error {
			for _, o := range offloads {
				if err := SetOffload(iface, o.name, false); err != nil {
					return fmt.Errorf("%s: %w", s.name, err)
				}
			}
			return nil
		})
	})
}

// SetOffload turns a feature of an interface of the thread's network namespace on or off, by its name at ethtool: rx,
// tx, sg, tso, gso or gro.
func SetOffload(iface, name string, on bool) error {
	var value uint32
	if on {
		value = 1
	}
	for _, o := range offloads {
		if o.name != name {
			continue
		}
		if _, err := ethtool(iface, o.cmd, value); err != nil {
			return fmt.Errorf("set %s of %s to %v: %w", name, iface, on, err)
		}
		return nil
	}
	return fmt.Errorf("set %s of %s to %v: no such feature", name, iface, on)
}

// ethtool gives a command with one value to an interface of the thread's namespace and returns the value that comes
// back: struct ethtool_value of linux/ethtool.h behind a struct ifreq, by ioctl SIOCETHTOOL.
func ethtool(iface string, cmd, value uint32) (uint32, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	defer unix.Close(fd)
	arg := &struct{ cmd, value uint32 }{cmd, value}
	req := struct {
		name [unix.IFNAMSIZ]byte
		data unsafe.Pointer
		_    [16]byte // the union is longer than a pointer
	}{data: unsafe.Pointer(arg)}
	if len(iface) >= len(req.name) {
		return 0, unix.ENODEV
	}
	copy(req.name[:], iface)
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&req)))
	if errno != 0 {
		return 0, errno
	}
	return arg.value, nil
}

// waitUp returns when the link carries frames. The kernel brings a pair up in the background, and what is sent before
// is dropped.
func (e end) waitUp(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, 5*time.Second, errors.New("it did not come up within 5 s"))
	defer cancel()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for {
		link, err := e.links.LinkByName(e.iface)
		if err != nil {
			return fmt.Errorf("find %s:%s: %w", e.name, e.iface, err)
		}
		if link.Attrs().OperState == netlink.OperUp {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for link %s:%s: %w", e.name, e.iface, context.Cause(ctx))
		case <-tick.C:
		}
	}
}
