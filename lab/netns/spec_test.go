package netns

import (
	"net"
	"net/netip"
	"strings"
	"testing"
)

func TestValidate(t *testing.T) {
	if err := star("", 64, 4, 1e9).Validate(); err != nil {
		t.Errorf("validate a full lab: %v", err)
	}
	for _, c := range []struct {
		name   string
		change func(*Spec)
		want   string
	}{
		{"id", func(s *Spec) { s.ID = "A lab" }, `id "A lab"`},
		{"id that leaves the folder", func(s *Spec) { s.ID = "../x" }, `id "../x"`},
		{"no hosts", func(s *Spec) { s.Hosts = nil }, "no hosts"},
		{"name", func(s *Spec) { s.Hosts[0].Name = "w/0" }, `host "w/0": name`},
		{"same name", func(s *Spec) { s.Hosts[1].Name = "w0" }, "host w0: name is taken by host w0"},
		{"name of the switch", func(s *Spec) { s.Hosts[1].Name = "switch" }, "name is taken by the switch"},
		{"name of a bridge", func(s *Spec) { s.Hosts[1].Name = "s0-br" }, "name is taken by host s0-br"},
		{"IPv6", func(s *Spec) { s.Hosts[0].Addr = netip.MustParsePrefix("fd00::1/64") }, "want an IPv4 address"},
		{"no address", func(s *Spec) { s.Hosts[0].Addr = netip.Prefix{} }, "want an IPv4 address"},
		{"same address", func(s *Spec) { s.Hosts[1].Addr = s.Hosts[0].Addr }, "host w1: address 10.77.0.1 is host w0's"},
		{"no MAC", func(s *Spec) { s.Hosts[0].MAC = nil }, "unicast"},
		{"multicast MAC", func(s *Spec) { s.Hosts[0].MAC = net.HardwareAddr{1, 0, 0x5e, 0, 0, 1} }, "unicast"},
		{"same MAC", func(s *Spec) { s.Hosts[1].MAC = s.Hosts[0].MAC }, "host w1: MAC 02:78:61:00:00:01 is host w0's"},
		{"port 0", func(s *Spec) { s.Hosts[0].Port = 0 }, "port 0: want 1 to 509"},
		{"the CPU's port", func(s *Spec) { s.Hosts[0].Port = 510 }, "port 510: want 1 to 509"},
		{"same port", func(s *Spec) { s.Hosts[1].Port = 1 }, "host w1: port 1 is host w0's"},
		{"queues", func(s *Spec) { s.Hosts[0].Queues = 4097 }, "host w0: 4097 queues: want 0 to 4096"},
		{"rate", func(s *Spec) { s.Hosts[0].Rate = 1e12 }, "host w0: rate 1000000000000 bit/s"},
	} {
		t.Run(c.name, func(t *testing.T) {
			spec := star("", 2, 1, 0)
			c.change(&spec)
			if err := spec.Validate(); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("validate: %v, want an error with %q", err, c.want)
			}
		})
	}
}
