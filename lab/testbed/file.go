package testbed

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"os"

	"xagg/lab/netns"
)

// Existing describes hosts and a switch that somebody else runs, Mininet for one: the content of a JSON file.
type Existing struct {
	Lab    string         `json:"lab"` // what made them, for reports: "mininet"
	Switch ExistingSwitch `json:"switch"`
	Hosts  []ExistingHost `json:"hosts"`
	Wires  []string       `json:"wires"` // files through which namespaces in the middle of links can be entered
}

// ExistingSwitch is a switch that runs.
type ExistingSwitch struct {
	Kind    string `json:"kind"`    // SwitchEngine or SwitchSimpleSwitch
	Netns   string `json:"netns"`   // file through which its network namespace can be entered, such as /proc/PID/ns/net
	Address string `json:"address"` // where it answers P4Runtime
	PID     int    `json:"pid"`     // of its process
}

// ExistingHost is a host that exists. Its name says what it is for, as in [lab.Star].
type ExistingHost struct {
	Name          string       `json:"name"`
	Netns         string       `json:"netns"`   // file through which its network namespace can be entered
	Address       netip.Prefix `json:"address"` // with the length of the network's prefix
	MAC           string       `json:"mac"`
	Interface     string       `json:"interface"` // that has them
	Port          int          `json:"port"`      // of the switch
	PortInterface string       `json:"port_interface"`
}

// ReadExisting reads the description of hosts.
func ReadExisting(file string) (*Existing, error) {
	src, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("read hosts: %w", err)
	}
	dec := json.NewDecoder(bytes.NewReader(src))
	dec.DisallowUnknownFields()
	e := &Existing{}
	if err := dec.Decode(e); err != nil {
		return nil, fmt.Errorf("read hosts from %s: %w", file, err)
	}
	s := e.Switch
	if e.Lab == "" || s.Address == "" || s.PID < 1 || s.Kind != SwitchEngine && s.Kind != SwitchSimpleSwitch {
		return nil, fmt.Errorf("read hosts from %s: want lab, and switch.kind (%s or %s), switch.address and switch.pid",
			file, SwitchEngine, SwitchSimpleSwitch)
	}
	return e, nil
}

// Adopt makes a lab of the hosts.
func (e *Existing) Adopt() (*netns.Adopted, error) {
	spec := netns.AdoptSpec{Switch: e.Switch.Netns, Wires: e.Wires}
	for _, h := range e.Hosts {
		mac, err := net.ParseMAC(h.MAC)
		if err != nil {
			return nil, fmt.Errorf("adopt host %s: %w", h.Name, err)
		}
		spec.Hosts = append(spec.Hosts, netns.ExistingHost{
			Host:      netns.Host{Name: h.Name, Addr: h.Address, MAC: mac, Port: h.Port},
			Path:      h.Netns,
			Interface: h.Interface, PortInterface: h.PortInterface,
		})
	}
	return netns.Adopt(spec)
}
