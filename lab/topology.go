// Package lab makes experiments: hosts and links, in network namespaces (package netns), in Mininet or in one process
// (package memory), the processes on them (package testbed), and the demo (package demo).
package lab

import (
	"fmt"
	"net/netip"

	"xagg/controller"
	"xagg/wire"
)

// CPUPort is the switch port of packet-in and packet-out in every lab. xagg.p4 has it compiled in.
const CPUPort = 510

// Limits of a star.
const (
	MaxWorkers = wire.MaxRanks
	MaxServers = 64
)

// Host is a machine of the lab: plain data.
type Host struct {
	Name string
	IP   netip.Addr
	MAC  controller.MAC
	Port uint16 // of the switch that it hangs on
}

// Topology is a star: workers and aggregation servers around one switch. It is plain data; the labs build it.
type Topology struct {
	ServiceIP  netip.Addr     // the address that workers send to; the switch answers for it
	ServiceMAC controller.MAC //
	Workers    []Host         // rank r is Workers[r]
	Servers    []Host
	Others     []Host // that only talk through the switch
}

// Star returns the topology with the given number of workers (switch ports 1..64) and servers (ports 65..128), all in
// 10.77.0.0/16.
func Star(workers, servers int) (Topology, error) {
	if workers < 1 || workers > MaxWorkers {
		return Topology{}, fmt.Errorf("make a star: %d workers, want 1 to %d", workers, MaxWorkers)
	}
	if servers < 0 || servers > MaxServers {
		return Topology{}, fmt.Errorf("make a star: %d servers, want 0 to %d", servers, MaxServers)
	}
	t := Topology{
		ServiceIP:  netip.AddrFrom4([4]byte{10, 77, 255, 254}),
		ServiceMAC: controller.MAC{0x02, 0x78, 0x61, 0x00, 0xff, 0xfe},
	}
	for i := range workers {
		t.Workers = append(t.Workers, host("w", i, 0, 1))
	}
	for i := range servers {
		t.Servers = append(t.Servers, host("s", i, 1, MaxWorkers+1))
	}
	return t, nil
}

// AddOther adds a host that takes no part in the aggregation, at a port beyond those of workers and servers, and returns
// it.
func (t *Topology) AddOther() Host {
	h := host("h", len(t.Others), 2, MaxWorkers+MaxServers+1)
	t.Others = append(t.Others, h)
	return h
}

func host(prefix string, i int, net byte, firstPort int) Host {
	return Host{
		Name: fmt.Sprintf("%s%d", prefix, i),
		IP:   netip.AddrFrom4([4]byte{10, 77, net, byte(i + 1)}),
		MAC:  controller.MAC{0x02, 0x78, 0x61, 0x00, net, byte(i + 1)},
		Port: uint16(firstPort + i),
	}
}

// ControllerConfig returns the configuration of the star's controller: switchAddr is where the switch answers
// P4Runtime, agentAddrs where the agents of the servers listen, in their order, listen where the controller is to.
func (t Topology) ControllerConfig(switchAddr string, agentAddrs []string, listen string) controller.Config {
	cfg := controller.DefaultConfig()
	cfg.Listen = listen
	cfg.Switch.Address = switchAddr
	cfg.Switch.CPUPort = CPUPort
	cfg.Service = controller.Service{IP: t.ServiceIP, MAC: t.ServiceMAC}
	for _, h := range t.Workers {
		cfg.Hosts = append(cfg.Hosts, controller.Host{Name: h.Name, IP: h.IP, MAC: h.MAC, Port: h.Port})
	}
	for _, h := range t.Others {
		cfg.Hosts = append(cfg.Hosts, controller.Host{Name: h.Name, IP: h.IP, MAC: h.MAC, Port: h.Port})
	}
	for i, h := range t.Servers {
		cfg.Servers = append(cfg.Servers, controller.Server{Name: h.Name, Agent: agentAddrs[i], IP: h.IP, MAC: h.MAC, Port: h.Port})
	}
	return cfg
}

// Addr returns the host's wire address with the given UDP port.
func (h Host) Addr(port uint16) wire.Addr {
	return wire.Addr{MAC: h.MAC, IP: h.IP.As4(), Port: port}
}
