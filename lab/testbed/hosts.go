package testbed

import (
	"net"
	"net/netip"
	"os/exec"
	"slices"

	"xagg/bmv2/fault"
	"xagg/lab"
	"xagg/lab/netns"
)

// Hosts are machines around a switch that exist, each in a network namespace of its own, and so is the switch's, which is addressed as
// [netns.Switch]. [*netns.Lab] implements it.
type Hosts interface {
	// Dir returns a folder for sockets and other files, which is removed with the hosts.
	Dir() string
	// Hosts returns the machines.
	Hosts() []netns.Host
	// Interface returns the name of a host's interface in its namespace.
	Interface(host string) string
	// PortInterface returns the name, in the switch's namespace, of the interface of one of its ports.
	PortInterface(port int) string
	// Wires returns the namespaces in the middle of links, by names that Do takes.
	Wires() []string
	// Path returns the file through which the namespace of a host can be entered.
	Path(host string) string
	// Do runs f in the namespace of a host. Goroutines that f starts are not in the namespace, sockets that it opens are.
	Do(host string, f func() error) error
	// Start starts a command in a host.
	Start(host string, cmd *exec.Cmd) (*netns.Child, error)
	// Faults returns what happened on the links on purpose so far.
	Faults() []fault.PathCounts
	// Close stops everything that was started and removes the hosts.
	Close() error
}

// Spec returns the lab of a topology; rate gives the rate of a host's link in bits per second, 0 for one that is not limited. A nil
// rate limits none.
func Spec(topology lab.Topology, rate func(lab.Host) uint64) netns.Spec {
	var spec netns.Spec
	for _, h := range slices.Concat(topology.Workers, topology.Servers, topology.Others) {
		host := netns.Host{
			Name: h.Name, Addr: netip.PrefixFrom(h.IP, 16), MAC: net.HardwareAddr(h.MAC[:]), Port: int(h.Port),
			Bridge: slices.Contains(topology.Servers, h),
		}
		if rate != nil {
			host.Rate = rate(h)
		}
		spec.Hosts = append(spec.Hosts, host)
	}
	return spec
}
