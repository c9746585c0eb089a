package netns

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"regexp"

	"xagg/bmv2/fault"
)

const (
	// RunDir is where labs keep their records unless [Spec.RunDir] names another folder.
	RunDir = "/run/xagg"
	// Switch is the name under which the switch's namespace is addressed; no host may have it.
	Switch = "switch"
	// HostInterface is the name of every host's interface.
	HostInterface = "eth0"
	// MaxPort is the largest port number of a switch: v1model ports have 9 bits, 510 is the CPU's and 511 drops.
	MaxPort = 509
	// MaxQueues is the largest number of queues of an interface, Linux's for a veth.
	MaxQueues = 4096
	// MaxRate is the largest rate of a link in bits per second.
	MaxRate = 20_000_000_000
)

// Spec describes a lab: hosts around one switch.
type Spec struct {
	// ID makes the names of the lab's namespaces unique on the machine: lower-case letters and digits, at most 16.
	// Empty: a random one.
	ID string
	// RunDir is the folder of the lab's record and files. Empty: [RunDir].
	RunDir string
	// KeepDead leaves alone what dead labs left in the folder. Otherwise [Create] removes it.
	KeepDead bool
	// Hosts are the machines around the switch.
	Hosts []Host
	// Faults damage the links of the ports that they are about.
	Faults []fault.Spec
}

// Host describes one machine and its link to the switch.
type Host struct {
	Name   string           // lower-case letters, digits and dashes, unique in the lab
	Addr   netip.Prefix     // IPv4 address and the length of its network's prefix
	MAC    net.HardwareAddr // of its interface, 6 bytes
	Port   int              // the switch's port at the other end, 1..[MaxPort]; the interface there is [PortName]
	Rate   uint64           // bits per second in each direction, at most [MaxRate]; 0: not limited
	Bridge bool             // put a bridge in the middle of the link, as a host whose program answers by XDP_TX needs

	Queues   int  // of each direction of the link's interfaces, at most [MaxQueues]; 0: one
	Offloads bool // leave checksum and segmentation offloads as the kernel sets them for a veth
}

// PortName returns the name of the interface of a switch port.
func PortName(port int) string { return fmt.Sprintf("p%d", port) }

var (
	idPattern   = regexp.MustCompile(`^[a-z0-9]{1,16}$`)
	namePattern = regexp.MustCompile(`^[a-z0-9][a-z0-9-]{0,31}$`)
)

// Validate reports everything that is wrong with the spec.
func (s Spec) Validate() error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if s.ID != "" && !idPattern.MatchString(s.ID) {
		bad("id %q: want 1 to 16 lower-case letters and digits", s.ID)
	}
	if len(s.Hosts) == 0 {
		bad("no hosts")
	}
	// Every namespace of the lab by the name it has there, the bridges' too.
	spaces := map[string]string{Switch: "the switch"}
	ports, addrs, macs := map[int]string{}, map[netip.Addr]string{}, map[string]string{}
	for _, h := range s.Hosts {
		if !namePattern.MatchString(h.Name) {
			bad("host %q: name: want 1 to 32 lower-case letters, digits and dashes", h.Name)
		}
		for _, name := range s.spacesOf(h) {
			if other, taken := spaces[name]; taken {
				bad("host %s: name is taken by %s", h.Name, other)
			}
			spaces[name] = "host " + h.Name
		}
		if !h.Addr.Addr().Is4() {
			bad("host %s: address %v: want an IPv4 address with a prefix length", h.Name, h.Addr)
		} else if other, taken := addrs[h.Addr.Addr()]; taken {
			bad("host %s: address %v is host %s's", h.Name, h.Addr.Addr(), other)
		}
		addrs[h.Addr.Addr()] = h.Name
		if len(h.MAC) != 6 || h.MAC[0]&1 != 0 || bytes.Equal(h.MAC, make([]byte, 6)) {
			bad("host %s: MAC %q: want 6 bytes of a unicast address", h.Name, h.MAC)
		} else if other, taken := macs[h.MAC.String()]; taken {
			bad("host %s: MAC %v is host %s's", h.Name, h.MAC, other)
		}
		macs[h.MAC.String()] = h.Name
		if h.Port < 1 || h.Port > MaxPort {
			bad("host %s: port %d: want 1 to %d", h.Name, h.Port, MaxPort)
		} else if other, taken := ports[h.Port]; taken {
			bad("host %s: port %d is host %s's", h.Name, h.Port, other)
		}
		ports[h.Port] = h.Name
		if h.Queues < 0 || h.Queues > MaxQueues {
			bad("host %s: %d queues: want 0 to %d", h.Name, h.Queues, MaxQueues)
		}
		if h.Rate > MaxRate {
			bad("host %s: rate %d bit/s: want at most %d", h.Name, h.Rate, uint64(MaxRate))
		}
	}
	if err := fault.Check(s.Faults); err != nil {
		errs = append(errs, err)
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("check lab: %w", err)
	}
	return nil
}

// spacesOf returns the names, inside the lab, of the namespaces that the host needs.
func (s Spec) spacesOf(h Host) []string {
	if h.Bridge || s.faulty(h) {
		return []string{h.Name, h.middle()}
	}
	return []string{h.Name}
}

// faulty reports whether any fault is about the host's link.
func (s Spec) faulty(h Host) bool {
	return fault.NewLink(s.Faults, uint16(h.Port), fault.In) != nil || fault.NewLink(s.Faults, uint16(h.Port), fault.Out) != nil
}

// middle returns the name of the namespace in the middle of the host's link.
func (h Host) middle() string { return h.Name + "-br" }

// spaces returns the names of all the lab's namespaces.
func (s Spec) spaces() []string {
	names := []string{Switch}
	for _, h := range s.Hosts {
		names = append(names, s.spacesOf(h)...)
	}
	return names
}
