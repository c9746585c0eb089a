package bench

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/bits"
	"os"
	"path/filepath"

	"github.com/goccy/go-yaml"

	"xagg/api"
	"xagg/bmv2/fault"
	"xagg/controller"
	"xagg/internal/endpoint"
	"xagg/lab"
	"xagg/lab/netns"
	"xagg/lab/scenario"
	"xagg/lab/testbed"
	"xagg/wire"
	"xagg/xdp"
)

// BedConfig says what the runs of a scenario take place on.
type BedConfig struct {
	Switch       string // testbed.SwitchEngine or testbed.SwitchSimpleSwitch
	SimpleSwitch string // program of the latter; empty: the one on the PATH
	Modes        []scenario.Mode
	Log          *slog.Logger
}

// bed is the place of a scenario's runs on a testbed.
type bed struct {
	s        *scenario.Scenario
	topology lab.Topology
	testbed  *testbed.Testbed
	meter    *meter
	file     string // the scenario's
	mode     string // where the servers' programs run
	agents   map[string]*endpoint.Conn
}

// Topology returns the machines of a scenario: workers, servers, and as many others for parameter servers.
func Topology(s *scenario.Scenario) (lab.Topology, error) {
	ranks := 0
	for _, j := range s.Jobs {
		ranks += j.Ranks
	}
	topology, err := lab.Star(ranks, s.Servers)
	if err != nil {
		return lab.Topology{}, err
	}
	for range s.Servers {
		topology.AddOther()
	}
	return topology, nil
}

// Spec returns the lab of a scenario's machines: their links, and what goes wrong on these.
func Spec(s *scenario.Scenario, topology lab.Topology) netns.Spec {
	rates := map[string]scenario.Rate{}
	var faults []fault.Spec
	for job := range s.Jobs {
		for rank := range s.Jobs[job].Ranks {
			host := topology.Workers[s.Host(job, rank)]
			rates[host.Name] = s.LinkRate(job, rank)
			if loss := s.Jobs[job].Loss[rank]; loss > 0 {
				faults = append(faults, fault.Spec{Port: host.Port, Drop: float64(loss), All: true, Seed: s.Seed})
			}
		}
	}
	spec := testbed.Spec(topology, func(h lab.Host) uint64 {
		if rate, ok := rates[h.Name]; ok {
			return uint64(rate)
		}
		return uint64(s.ServerRate())
	})
	spec.Faults = faults
	return spec
}

// OpenBed makes the place of a scenario's runs: a lab of network namespaces.
func OpenBed(ctx context.Context, s *scenario.Scenario, cfg BedConfig) (Place, error) {
	topology, err := Topology(s)
	if err != nil {
		return nil, err
	}
	hosts, err := netns.Create(ctx, Spec(s, topology))
	if err != nil {
		return nil, err
	}
	return OpenOn(ctx, hosts, s, testbed.Config{
		Topology: topology, Switch: cfg.Switch, SimpleSwitch: cfg.SimpleSwitch, Memory: memory(s, cfg.Modes), Log: cfg.Log,
	}, 0)
}

// OpenOn makes the place of a scenario's runs on hosts that exist; they are removed with it. switchPID is the process of a switch that
// runs already.
func OpenOn(ctx context.Context, hosts testbed.Hosts, s *scenario.Scenario, cfg testbed.Config, switchPID int) (Place, error) {
	t, err := testbed.Start(ctx, hosts, cfg)
	if err != nil {
		return nil, err
	}
	b := &bed{s: s, topology: cfg.Topology, testbed: t, agents: map[string]*endpoint.Conn{}}
	if err := b.prepare(ctx, switchPID); err != nil {
		return nil, errors.Join(err, b.Close())
	}
	return b, nil
}

func (b *bed) prepare(ctx context.Context, switchPID int) (err error) {
	text, err := yaml.Marshal(b.s)
	if err != nil {
		return fmt.Errorf("write the scenario: %w", err)
	}
	b.file = filepath.Join(b.testbed.Hosts().Dir(), "scenario.yaml")
	if err := os.WriteFile(b.file, text, 0o644); err != nil {
		return err
	}
	var servers []string
	for _, h := range b.topology.Servers {
		servers = append(servers, h.Name)
		if b.agents[h.Name], err = endpoint.Dial(b.testbed.AgentAddr(h.Name)); err != nil {
			return err
		}
	}
	now, err := api.NewControllerClient(b.testbed.Controller()).Status(ctx, &api.StatusRequest{})
	if err != nil {
		return fmt.Errorf("ask the controller for its status: %w", err)
	}
	for _, s := range now.GetServers() {
		b.mode = s.GetInfo().GetMode()
	}
	b.meter, err = newMeter(b.testbed, servers, switchPID)
	return err
}

// memory returns the memory of a server that has room for all jobs of a scenario in each of the modes, and for as much again while one
// incarnation follows another.
func memory(s *scenario.Scenario, modes []scenario.Mode) xdp.Size {
	most := 0
	for _, m := range modes {
		if m.Reducer() != scenario.XAgg || s.Skip(m) != "" {
			continue
		}
		slots := 0
		for job := range s.Jobs {
			slots += leaseRounds(s.Consistency(job, m), s.Jobs[job].Depth) * ((s.MaxElems(job, m) + wire.MaxLanes - 1) / wire.MaxLanes)
		}
		most = max(most, slots)
	}
	const mib = 1 << 20
	return (xdp.Size(2*most)*xdp.SlotSize + mib - 1) / mib * mib
}

// leaseRounds returns how many rounds servers keep of a job (docs/protocol.md, "Server slots").
func leaseRounds(c controller.Consistency, depth int) int {
	switch c.Mode {
	case controller.ModeQuorum:
		return c.Rounds
	case controller.ModeAsync:
		return 4
	}
	return 1 << bits.Len(uint(2*depth-1))
}

// XDPMode implements [Place].
func (b *bed) XDPMode() string { return b.mode }

// Healthy implements [Place].
func (b *bed) Healthy() bool { return b.testbed.Dead() == nil }

// Close implements [Place].
func (b *bed) Close() error {
	var errs []error
	for _, conn := range b.agents {
		errs = append(errs, conn.Close())
	}
	if b.meter != nil {
		errs = append(errs, b.meter.close())
	}
	return errors.Join(append(errs, b.testbed.Close())...)
}
