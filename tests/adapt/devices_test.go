package adapt

import (
	"context"
	"encoding/json"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"xagg/api"
	"xagg/lab/scenario"
	"xagg/lab/testbed"
	"xagg/policy"
	"xagg/policy/telemetry"
	"xagg/tests/require"
	"xagg/wire"
	"xagg/worker"
)

// TestDevicesInLab: of a hybrid job on real links a policy is told what the switch has counted of each rank, when the steered rank's
// contributions came to the server, and how long the XDP program runs for a frame.
func TestDevicesInLab(t *testing.T) {
	t.Run(testbed.SwitchEngine, func(t *testing.T) { testDevices(t, testbed.SwitchEngine) })
	t.Run(testbed.SwitchSimpleSwitch, func(t *testing.T) {
		require.Have(t, require.BMv2)
		testDevices(t, testbed.SwitchSimpleSwitch)
	})
}

func testDevices(t *testing.T, kind string) {
	s, err := scenario.Load("../../scenarios/homogeneous.yaml")
	if err != nil {
		t.Fatal(err)
	}
	const chunks, lanes = 32, 32 * wire.MaxLanes
	ranks := s.Jobs[0].Ranks
	p := withSwitch(t, s, kind)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	client := api.NewControllerClient(p.controller)
	slow := ranks - 1
	if _, err := client.CreateJob(ctx, &api.CreateJobRequest{
		Name: "train", Ranks: uint32(ranks), MaxElems: lanes, Adapt: "{rule: outlier, dry_run: true}",
		Policy: &api.Policy{Rule: policy.RuleStatic, Mode: string(policy.ModeHybrid), Steer: []uint32{uint32(slow)}},
	}); err != nil {
		t.Fatal(err)
	}
	var stop atomic.Bool
	group, ctx := errgroup.WithContext(ctx)
	for rank := range ranks {
		group.Go(func() error {
			link, err := p.link(rank)
			if err != nil {
				return err
			}
			w, err := worker.Join(ctx, client, worker.Config{Job: "train", Rank: rank, Link: link})
			if err != nil {
				return err
			}
			defer w.Close()
			data := make([]int32, lanes)
			for data[0] < int32(ranks) { // until all have seen that they are to stop
				clear(data)
				if stop.Load() {
					data[0] = 1
				}
				if rank == slow {
					time.Sleep(2 * time.Millisecond)
				}
				if _, err := w.AllReduceInt32(ctx, "g", data); err != nil {
					return err
				}
			}
			return w.Leave(ctx)
		})
	}
	// told reports whether all of it is known, and fails the test for what cannot be.
	told := func(s *telemetry.Snapshot) bool {
		v, late, early := &s.Servers[0], &s.Ranks[slow], &s.Ranks[0]
		if !s.Switch.Known || !v.Known || !v.Timed || v.NsPerPacket == 0 || late.Arrivals < chunks || s.Job.Rounds < 2 {
			return false
		}
		t.Logf("%+v\n%+v\n%+v\n%+v", s.Job, s.Switch, *v, *late)
		if v.NsPerPacket < 20 || v.NsPerPacket > 100e3 || v.CPU <= 0 || v.CPU > 1 {
			t.Errorf("the server's program runs for %v ns a frame and on %v of a core", v.NsPerPacket, v.CPU)
		}
		if late.SwitchPackets <= 0 || early.SwitchPackets <= 0 || s.Switch.PacketsPerSecond < late.SwitchPackets+early.SwitchPackets {
			t.Errorf("the switch gets %v packets a second, %v and %v of them from ranks %d and 0", s.Switch.PacketsPerSecond, late.SwitchPackets, early.SwitchPackets, slow)
		}
		// Its contributions come after the switch's sums, which do not wait for it, by about what it computes longer.
		if early.Arrivals != 0 || late.ArrivalP50 < 100e-6 || late.ArrivalP99 > 10 {
			t.Errorf("arrivals at the server: %v of rank 0; half of rank %d's within %v s, 99 %% within %v s", early.Arrivals, slow, late.ArrivalP50, late.ArrivalP99)
		}
		if s.Job.PartialShare < 0.4 || s.Job.PartialShare > 0.6 {
			t.Errorf("PARTIALs are %v of what the server summed, want about half", s.Job.PartialShare)
		}
		return true
	}
	for known := false; !known && ctx.Err() == nil; time.Sleep(50 * time.Millisecond) {
		reply, err := client.Explain(ctx, &api.ExplainRequest{Job: "train"})
		if err != nil || len(reply.Snapshot) == 0 {
			continue
		}
		var s telemetry.Snapshot
		if err := json.Unmarshal(reply.Snapshot, &s); err != nil {
			t.Error(err)
			break
		}
		if err := s.Check(); err != nil {
			t.Error(err)
			break
		}
		known = told(&s)
	}
	stop.Store(true)
	if err := group.Wait(); err != nil {
		t.Error(err)
	}
}
