package timing

import (
	"testing"
	"time"

	"xagg/policy/adapt"
	"xagg/policy/telemetry"
)

// TestDevices: counters of simulated devices are what the ranks have sent, and policies are told what follows from them.
func TestDevices(t *testing.T) {
	s := steady(100)
	s.Jobs[0].Compute.Mean = 20 * time.Millisecond
	cfg := adapt.DefaultConfig()
	cfg.Freeze, cfg.Pin = true, map[int]adapt.Place{3: adapt.Server}
	w, err := newWorld(s, Options{Mode: "auto", Seed: 1, Costs: Lab(), Adapt: &cfg})
	if err != nil {
		t.Fatal(err)
	}
	if err := w.run(); err != nil {
		t.Fatal(err)
	}
	j := w.jobs[0]
	for rank, k := range j.ranks {
		sum := telemetry.Count{}
		for m, n := range w.devices.sw.Members {
			if m.Job == j.id && m.Rank == rank {
				sum = telemetry.Count{Packets: sum.Packets + n.Packets, Bytes: sum.Bytes + n.Bytes}
			}
		}
		if sent := k.endpoint.Stats().Sent; sum.Packets != sent || sent == 0 {
			t.Errorf("rank %d has sent %d packets, the switch has counted %v", rank, sent, sum)
		}
	}
	snap := &j.auto.follow.Snapshot
	if err := snap.Check(); err != nil {
		t.Error(err)
	}
	v, x := snap.Servers[0], snap.Switch
	if !v.Known || !v.Timed || v.NsPerPacket != 2500 || v.PacketsPerSecond <= 0 || v.CPU <= 0 || v.CPU > 1 {
		t.Errorf("server: %+v", v)
	}
	fromRanks := 0.0
	for _, r := range snap.Ranks {
		fromRanks += r.SwitchPackets
	}
	// The server's answers come to the switch too.
	if !x.Known || fromRanks <= 0 || x.PacketsPerSecond < 1.1*fromRanks || x.PacketsPerSecond > 2*fromRanks {
		t.Errorf("switch: %+v, of which %v packets a second from ranks", x, fromRanks)
	}
	if slow := snap.Ranks[3]; slow.Arrivals == 0 || snap.Ranks[0].Arrivals != 0 || slow.ArrivalP99 < slow.ArrivalP50 {
		t.Errorf("rank 3: %+v", slow)
	}
	if p := snap.Job.PartialShare; p < 0.45 || p > 0.55 {
		t.Errorf("a PARTIAL and a rank by itself in each chunk, and the share is %v", p)
	}
	if o := snap.Job; o.BusySlots <= 0 || o.SlotOccupancy > 1 || o.BlockedSlotTime <= 0 || o.BlockedShare > 1 {
		t.Errorf("slots: %+v", o)
	}
}
