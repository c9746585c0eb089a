package bench

import (
	"context"
	"fmt"
	"slices"

	"xagg/bmv2/fault"
	"xagg/lab"
	"xagg/lab/scenario"
	"xagg/lab/testbed"
)

// OpenExisting makes the place of a scenario's runs on hosts and a switch that somebody else runs, with the links of [Plan].
func OpenExisting(ctx context.Context, s *scenario.Scenario, e *testbed.Existing, cfg BedConfig) (Place, error) {
	topology, err := Topology(s)
	if err != nil {
		return nil, err
	}
	for _, h := range slices.Concat(topology.Workers, topology.Servers, topology.Others) {
		if err := has(e, h); err != nil {
			return nil, fmt.Errorf("look for the hosts of scenario %s: %w", s.Name, err)
		}
	}
	hosts, err := e.Adopt()
	if err != nil {
		return nil, err
	}
	return OpenOn(ctx, hosts, s, testbed.Config{
		Topology: topology, Switch: e.Switch.Kind, SwitchAddr: e.Switch.Address, Memory: memory(s, cfg.Modes), Log: cfg.Log,
	}, e.Switch.PID)
}

// has reports whether a host is there as it should be.
func has(e *testbed.Existing, h lab.Host) error {
	i := slices.IndexFunc(e.Hosts, func(there testbed.ExistingHost) bool { return there.Name == h.Name })
	if i < 0 {
		return fmt.Errorf("no host %s", h.Name)
	}
	there := e.Hosts[i]
	if there.Address.Addr() != h.IP || there.MAC != h.MAC.String() || there.Port != int(h.Port) {
		return fmt.Errorf("host %s has address %v, MAC %s and port %d, want %v, %v and %d", h.Name, there.Address.Addr(), there.MAC, there.Port,
			h.IP, h.MAC, h.Port)
	}
	return nil
}

// Plan is what somebody else has to make for a scenario: a star with the names and addresses of [lab.Star] and [lab.Topology.AddOther].
type Plan struct {
	YAML    string          `json:"yaml"` // the scenario
	Seed    uint64          `json:"seed"` // of losses
	Workers int             `json:"workers"`
	Servers int             `json:"servers"`
	Others  int             `json:"others"`
	Links   map[string]Link `json:"links"` // by host
}

// Link is a link of a plan.
type Link struct {
	Rate uint64  `json:"rate"` // bits per second in each direction
	Loss float64 `json:"loss"` // share of frames in each direction
}

// NewPlan returns what to make for a scenario, of which text is the YAML.
func NewPlan(s *scenario.Scenario, text string) (*Plan, error) {
	topology, err := Topology(s)
	if err != nil {
		return nil, err
	}
	p := &Plan{
		YAML: text, Seed: s.Seed, Links: map[string]Link{},
		Workers: len(topology.Workers), Servers: len(topology.Servers), Others: len(topology.Others),
	}
	spec := Spec(s, topology)
	for _, h := range spec.Hosts {
		link := Link{Rate: h.Rate}
		if i := slices.IndexFunc(spec.Faults, func(f fault.Spec) bool { return int(f.Port) == h.Port }); i >= 0 {
			link.Loss = spec.Faults[i].Drop
		}
		p.Links[h.Name] = link
	}
	return p, nil
}
