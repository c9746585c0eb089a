package controller

import (
	"encoding/json"
	"math"
	"sync/atomic"
	"testing"
	"time"

	"xagg/api"
	"xagg/controller/p4rt"
	"xagg/policy"
	"xagg/policy/telemetry"
	"xagg/wire"
)

// TestDevicesAreReadWhileWanted: nobody reads counters while no policy wants to know. Then the switch is asked one question a
// period and each server one, which is also asked to measure; and what they say comes to the policy.
func TestDevicesAreReadWhileWanted(t *testing.T) {
	var reads, asked, measured atomic.Int64
	r := newRoom(t, testConfig(), func(r *room) {
		r.sw.OnRead = func() error { reads.Add(1); return nil }
		r.agents["s0"].stats = func(req *api.StatsRequest) *api.StatsReply {
			n := uint64(asked.Add(1))
			if req.Measure {
				measured.Add(1)
			}
			return &api.StatsReply{
				Reasons: map[string]uint64{"summed": 1000 * n, "duplicate": 100 * n}, Instance: 1, Slots: 100, SlotsFree: 25,
				RunFrames: 50 * n, RunNs: 10_000 * n, WatchedNs: 20_000_000 * n,
			}
		}
	})
	r.ready()
	job := r.create("train", 2, &api.Policy{Rule: policy.RuleStatic, Mode: "switch", Pool: 16})
	r.joinAll("train", 2)
	reads.Store(0)
	asked.Store(0)
	time.Sleep(3 * DeviceEvery)
	if reads.Load() != 0 || asked.Load() != 0 {
		t.Fatalf("the switch was asked %d times and a server %d times for what nobody wants to know", reads.Load(), asked.Load())
	}

	count := func(n uint64) { // since the beginning
		cells := make([]p4rt.Count, wire.NumReasons)
		cells[wire.ReasonNone] = p4rt.Count{Packets: 80 * n, Bytes: 80_000 * n}
		cells[wire.ReasonDuplicate] = p4rt.Count{Packets: 15 * n, Bytes: 15_000 * n}
		cells[wire.ReasonMask] = p4rt.Count{Packets: 5 * n, Bytes: 5_000 * n}
		r.sw.SetCounter(counterReasons, cells)
	}
	began := time.Now()
	if _, err := r.client.Adapt(r.context(), &api.AdaptRequest{Job: "train", Adapt: "{rule: outlier, dry_run: true}"}); err != nil {
		t.Fatal(err)
	}
	var s telemetry.Snapshot
	r.until("the policy is told", func() bool {
		count(uint64(time.Since(began) / (10 * time.Millisecond)))
		for rank := range uint32(2) {
			round := &api.Round{Round: uint32(time.Since(began) / time.Millisecond), ComputeUs: 10, CommUs: 10, Chunks: 1}
			if _, err := r.client.Report(r.context(), &api.ReportRequest{Job: "train", Rank: rank, Id: job.Id, Rounds: []*api.Round{round}}); err != nil {
				t.Fatal(err)
			}
		}
		reply, err := r.client.Explain(r.context(), &api.ExplainRequest{Job: "train"})
		if err != nil {
			t.Fatal(err)
		}
		if len(reply.Snapshot) == 0 {
			return false
		}
		if err := json.Unmarshal(reply.Snapshot, &s); err != nil {
			t.Fatal(err)
		}
		return s.Switch.Known && s.Servers[0].Timed && asked.Load() >= 4
	})
	took := time.Since(began)
	if most := int64(took/DeviceEvery) + 2; reads.Load() > most || asked.Load() > most || measured.Load() != asked.Load() {
		t.Errorf("within %v the switch was asked %d times, a server %d times, and %d times to measure; want %d at most", took, reads.Load(), asked.Load(),
			measured.Load(), most)
	}
	// 100 packets in 10 ms.
	if w := s.Switch; w.PacketsPerSecond < 1_000 || w.PacketsPerSecond > 100_000 || math.Abs(w.BytesPerSecond-1000*w.PacketsPerSecond) > 1 ||
		w.DuplicateShare != 0.15 || w.RefusedShare != 0.05 {
		t.Errorf("switch: %+v", w)
	}
	if v := s.Servers[0]; !v.Known || v.PacketsPerSecond < 100 || v.NsPerPacket != 200 || math.Abs(v.CPU-0.0005) > 1e-9 || v.Slots != 100 || v.SlotsUsed != 75 {
		t.Errorf("server: %+v", v)
	}
	if v := s.Servers[1]; !v.Known || v.Timed || v.PacketsPerSecond != 0 { // its counters stand still
		t.Errorf("the other server: %+v", v)
	}
}
