package memory_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"xagg/api"
	"xagg/policy/telemetry"
	"xagg/wire"
	"xagg/worker"
)

// TestTelemetry: what a policy is told of switch and servers while a job runs; the counts of the ranks' packets, which in the
// end are exactly those that the ranks have sent; and nothing impossible while the switch loses all that it has counted.
func TestTelemetry(t *testing.T) {
	const ranks, chunks = 4, 16
	l := newLab(t, ranks, 1)
	client := api.NewControllerClient(l.Controller())
	createJob(t, l, &api.CreateJobRequest{Name: "train", Ranks: ranks, MaxElems: chunks * wire.MaxLanes,
		Policy: &api.Policy{Rule: "static", Mode: "hybrid", Steer: []uint32{3}}, Adapt: "{rule: outlier, dry_run: true}"})

	var stop atomic.Bool
	var reduced, resting sync.WaitGroup // until all have stopped, and until they may leave
	reduced.Add(ranks)
	resting.Add(1)
	var workers [ranks]*worker.Worker
	group, ctx := errgroup.WithContext(t.Context())
	for rank := range ranks {
		group.Go(func() error {
			err := func() (err error) {
				defer reduced.Done()
				workers[rank], err = worker.Join(ctx, client, worker.Config{Job: "train", Rank: rank, Link: l.Link(rank, wire.Port)})
				if err != nil {
					return err
				}
				return reduceUntil(ctx, workers[rank], rank, ranks, chunks*wire.MaxLanes, &stop)
			}()
			if err != nil {
				return err
			}
			defer workers[rank].Close()
			resting.Wait()
			return workers[rank].Leave(ctx)
		})
	}
	defer func() {
		resting.Done()
		if err := group.Wait(); err != nil {
			t.Error(err)
		}
	}()

	// until asks for snapshots until one is as wanted. None of them may have a number that no rule may be given.
	until := func(what string, ok func(s *telemetry.Snapshot) bool) {
		t.Helper()
		var s telemetry.Snapshot
		for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(20 * time.Millisecond) {
			if time.Now().After(deadline) || ctx.Err() != nil {
				stop.Store(true)
				t.Fatalf("%s: not within 30 s (%v): %+v", what, context.Cause(ctx), s)
			}
			reply, err := client.Explain(t.Context(), &api.ExplainRequest{Job: "train"})
			if err != nil || len(reply.Snapshot) == 0 {
				continue
			}
			s = telemetry.Snapshot{}
			if err := json.Unmarshal(reply.Snapshot, &s); err != nil {
				t.Error(err)
			}
			if err := s.Check(); err != nil {
				t.Error(err)
			}
			if ok(&s) {
				return
			}
		}
	}
	running := func(s *telemetry.Snapshot) bool {
		w, v, slow, fast := s.Switch, s.Servers[0], s.Ranks[3], s.Ranks[0]
		frame := float64(wire.MaxFrameLen)
		return w.Known && w.PacketsPerSecond > slow.SwitchPackets+fast.SwitchPackets && w.RefusedShare < 0.01 && // server's answers come too
			slow.SwitchPackets > 0 && near(slow.SwitchBytes, frame*slow.SwitchPackets) && near(fast.SwitchBytes, frame*fast.SwitchPackets) &&
			v.Known && !v.Timed && v.PacketsPerSecond > 0 && v.SlotsUsed == 2*chunks && v.Slots > v.SlotsUsed &&
			fast.Arrivals == 0 && slow.Arrivals > 0 && slow.ArrivalP99 >= slow.ArrivalP50 && slow.ArrivalP50 > 0 &&
			s.Job.PartialShare > 0.4 && s.Job.PartialShare < 0.6 && // of each chunk a PARTIAL, and one rank by itself
			s.Job.BusySlots > 0 && s.Job.SlotOccupancy <= 1 && s.Job.BlockedShare <= 1
	}
	until("the job runs", running)
	stop.Store(true)
	reduced.Wait()
	if ctx.Err() != nil {
		return
	}
	// A packet that was sent again may still be under way.
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		var differs error
		scraped := scrape(t, l.Collectors()[0])
		for rank, w := range workers {
			label := fmt.Sprintf("rank=%d", rank)
			packets := value(t, scraped, "xagg_rank_packets_total", "job=train", label).GetCounter().GetValue()
			bytes := value(t, scraped, "xagg_rank_bytes_total", "job=train", label).GetCounter().GetValue()
			sent := float64(w.Stats().Sent)
			if sent == 0 || packets != sent || bytes != sent*float64(wire.MaxFrameLen) {
				differs = errors.Join(differs, fmt.Errorf("rank %d has sent %v packets, the switch has counted %v of %v bytes", rank, sent, packets, bytes))
			}
		}
		if differs == nil {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal(differs)
		}
	}
}

// TestTelemetryOfLostSwitch: a switch that has lost its memory counts anew; rates and totals never fall below 0 or what they
// were, and are there again when it is.
func TestTelemetryOfLostSwitch(t *testing.T) {
	const ranks = 2
	l := newLab(t, ranks, 1)
	client := api.NewControllerClient(l.Controller())
	createJob(t, l, &api.CreateJobRequest{Name: "train", Ranks: ranks, MaxElems: wire.MaxLanes,
		Policy: &api.Policy{Rule: "static", Mode: "switch"}, Adapt: "{rule: outlier, dry_run: true}"})
	var stop atomic.Bool
	group, ctx := errgroup.WithContext(t.Context())
	for rank := range ranks {
		group.Go(func() error {
			w, err := worker.Join(ctx, client, worker.Config{Job: "train", Rank: rank, Link: l.Link(rank, wire.Port)})
			if err != nil {
				return err
			}
			defer w.Close()
			if err := reduceUntil(ctx, w, rank, ranks, wire.MaxLanes, &stop); err != nil {
				return err
			}
			return w.Leave(ctx)
		})
	}
	total := 0.0
	// known waits until the switch is known, and more of the rank than at the beginning.
	known := func(what string) {
		t.Helper()
		before := total
		for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(20 * time.Millisecond) {
			if time.Now().After(deadline) || ctx.Err() != nil {
				t.Errorf("%s: not within 30 s: %v", what, context.Cause(ctx))
				return
			}
			if scraped := scrape(t, l.Collectors()[0]); len(scraped["xagg_rank_packets_total"].GetMetric()) > 0 {
				n := value(t, scraped, "xagg_rank_packets_total", "job=train", "rank=1").GetCounter().GetValue()
				if n < total {
					t.Errorf("%s: the total fell from %v to %v", what, total, n)
				}
				total = n
			}
			reply, err := client.Explain(t.Context(), &api.ExplainRequest{Job: "train"})
			if err != nil || len(reply.Snapshot) == 0 {
				continue
			}
			var s telemetry.Snapshot
			if err := json.Unmarshal(reply.Snapshot, &s); err != nil {
				t.Error(err)
			}
			if err := s.Check(); err != nil {
				t.Error(err)
			}
			if s.Switch.Known && s.Switch.PacketsPerSecond > 0 && s.Ranks[1].SwitchPackets > 0 && total > before {
				return
			}
		}
	}
	known("before")
	if err := l.LoseSwitch(); err != nil {
		t.Error(err)
	}
	known("after")
	if total < 2 {
		t.Errorf("%v packets altogether", total)
	}
	stop.Store(true)
	if err := group.Wait(); err != nil {
		t.Error(err)
	}
}

func near(a, b float64) bool { return a-b < 1e-6*b && b-a < 1e-6*b }

// reduceUntil all-reduces until all ranks have seen that they are to stop.
func reduceUntil(ctx context.Context, w *worker.Worker, rank, ranks, lanes int, stop *atomic.Bool) error {
	data := make([]int32, lanes)
	for {
		for i := range data {
			data[i] = int32(i + rank)
		}
		data[0] = 0
		if stop.Load() {
			data[0] = 1
		}
		time.Sleep(time.Millisecond)
		if _, err := w.AllReduceInt32(ctx, "g", data); err != nil {
			return err
		}
		for i := 1; i < lanes; i++ {
			if want := int32(ranks*i + ranks*(ranks-1)/2); data[i] != want {
				return fmt.Errorf("sum %d is %d, want %d", i, data[i], want)
			}
		}
		if data[0] == int32(ranks) {
			return nil
		}
	}
}
