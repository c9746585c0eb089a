package controller

import (
	"context"
	"errors"
	"sync"
	"time"

	"xagg/api"
	"xagg/controller/p4rt"
	"xagg/policy/telemetry"
	"xagg/wire"
)

// DeviceEvery is how often the counters of switch and servers are read while the policy of a job that runs wants to know. The
// switch is asked one question then, and each server one.
const DeviceEvery = 500 * time.Millisecond

// devices is what the counters of switch and servers have said lately. It has its own locks: nothing that waits for a device
// holds up anything else.
type devices struct {
	// Readings of a device follow each other, so that none says less than the one before.
	switchTurn  chan struct{}
	serverTurns map[string]chan struct{} // by name

	mu     sync.Mutex
	counts telemetry.Devices
}

func (d *devices) init(cfg *Config) {
	d.switchTurn, d.serverTurns = make(chan struct{}, 1), make(map[string]chan struct{})
	for _, s := range cfg.Servers {
		d.serverTurns[s.Name] = make(chan struct{}, 1)
	}
}

// take waits until nobody else has a turn. It ends with receiving from it.
func take(ctx context.Context, turn chan struct{}) error {
	select {
	case turn <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// fill fills in what counters tell of a job.
func (d *devices) fill(s *telemetry.Snapshot, now time.Duration, job uint16) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.counts.Fill(s, now, job)
}

// total returns what the switch has counted of a rank, as far as anybody has looked.
func (d *devices) total(job uint16, rank int) telemetry.Count {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.counts.Total(job, rank)
}

// watchDevices reads the counters of switch and servers as long as a policy wants to know, until ctx ends. What does not
// answer is left out: its numbers are known until they are old.
func (c *Controller) watchDevices(ctx context.Context) {
	tick := time.NewTicker(DeviceEvery)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		if !c.adapting() {
			continue
		}
		var asking sync.WaitGroup
		reading, cancel := context.WithTimeout(ctx, readTimeout)
		asking.Go(func() {
			if _, err := c.countSwitch(reading); err != nil && !errors.Is(err, errNotReady) {
				c.log.Debug("switch does not tell its counters", "err", err)
			}
		})
		for _, s := range c.cfg.Servers {
			asking.Go(func() {
				if _, err := c.countServer(reading, s.Name, true); err != nil && !errors.Is(err, errNotReady) {
					c.log.Debug("server does not tell its counters", "server", s.Name, "err", err)
				}
			})
		}
		asking.Wait()
		cancel()
	}
}

// adapting reports whether the plan of a job that runs follows what is measured.
func (c *Controller) adapting() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	for name, j := range c.intent.jobs {
		if j.spec.Adapt != nil && c.meets[name].state == stateRunning {
			return true
		}
	}
	return false
}

// countSwitch reads the counters of the switch.
func (c *Controller) countSwitch(ctx context.Context) (p4rt.Counts, error) {
	turn := c.devices.switchTurn
	if err := take(ctx, turn); err != nil {
		return p4rt.Counts{}, err
	}
	defer func() { <-turn }()
	session, err := c.links.session()
	if err != nil {
		return p4rt.Counts{}, err
	}
	asked := time.Since(c.origin)
	counts, err := session.Counts(ctx, []string{counterReasons, counterSent}, []string{tableMember})
	if err != nil {
		return p4rt.Counts{}, err
	}
	r := telemetry.SwitchReading{Instance: session.Cookie(), Members: members(counts)}
	for reason := range wire.Reason(wire.NumReasons) {
		n := counts.Counters[counterReasons][reason]
		r.Handled.Packets += n.Packets
		r.Handled.Bytes += n.Bytes
		switch {
		case reason == wire.ReasonDuplicate:
			r.Duplicates = n.Packets
		case reason.Fault():
			r.Refused += n.Packets
		}
	}
	c.mu.Lock()
	alive := make(map[uint16]bool, len(c.intent.jobs))
	for _, j := range c.intent.jobs {
		alive[j.id] = true
	}
	c.mu.Unlock()
	d := &c.devices
	d.mu.Lock()
	defer d.mu.Unlock()
	d.counts.AddSwitch(asked, r)
	d.counts.Forget(func(job uint16) bool { return alive[job] })
	return counts, nil
}

// members returns the counts of the switch's member table.
func members(counts p4rt.Counts) map[telemetry.Member]telemetry.Count {
	out := make(map[telemetry.Member]telemetry.Count, len(counts.Direct[tableMember]))
	for _, e := range counts.Direct[tableMember] {
		var m telemetry.Member
		for _, match := range e.Entry.Match {
			v, _ := match.Value.Uint()
			switch match.Field {
			case fieldJob:
				m.Job = uint16(v)
			case fieldEpoch:
				m.Epoch = uint16(v)
			case fieldRank:
				m.Rank = int(v)
			}
		}
		out[m] = telemetry.Count(e.Count)
	}
	return out
}

// countServer reads the counters of a server, which goes on measuring the running time of its program if it is to.
func (c *Controller) countServer(ctx context.Context, name string, measure bool) (*api.StatsReply, error) {
	turn := c.devices.serverTurns[name]
	if err := take(ctx, turn); err != nil {
		return nil, err
	}
	defer func() { <-turn }()
	client, err := c.links.agent(name)
	if err != nil {
		return nil, err
	}
	asked := time.Since(c.origin)
	stats, err := client.Stats(ctx, &api.StatsRequest{Measure: measure})
	if err != nil {
		return nil, err
	}
	r := telemetry.ServerReading{
		Instance: stats.GetInstance(), Slots: uint64(stats.GetSlots()), SlotsUsed: uint64(stats.GetSlots() - stats.GetSlotsFree()),
		Run: telemetry.Run{
			Frames: stats.GetRunFrames(), Time: time.Duration(stats.GetRunNs()), Watched: time.Duration(stats.GetWatchedNs()),
		},
	}
	for _, n := range stats.GetReasons() {
		r.Packets += n
	}
	for _, s := range stats.GetRanks() {
		a := telemetry.Arrivals{Job: uint16(s.GetJob()), Rank: int(s.GetRank()), Packets: s.GetPackets(), Partials: s.GetPartials()}
		copy(a.LagLog2[:], s.GetLagLog2())
		r.Ranks = append(r.Ranks, a)
	}
	c.devices.mu.Lock()
	defer c.devices.mu.Unlock()
	c.devices.counts.AddServer(asked, name, r)
	return stats, nil
}
