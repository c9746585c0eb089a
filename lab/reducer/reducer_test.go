package reducer_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"xagg/api"
	"xagg/controller"
	"xagg/lab"
	"xagg/lab/loop"
	"xagg/lab/memory"
	"xagg/lab/reducer"
	"xagg/lab/scenario"
	"xagg/lab/tcp"
	"xagg/wire"
)

const experiment = `
name: test
about: Three ranks, one of them slow, with small and large buckets.
links: {worker: 1Gbit}
warmup: 1
rounds: 6
jobs:
- name: train
  ranks: 3
  depth: 4
  tensors: {sizes: [10, 3000, 256, 1, 20000]}
  compute: {mean: 3ms, slow: {2: 3}, backward: 0.5}
  quorum: {ranks: 2, wait: 1ms}
  async: {staleness: 1}
`

// TestModes: a whole run in every mode that needs no other program: every rank reports all rounds, all times are in
// order, and sums that wait for all are exact.
func TestModes(t *testing.T) {
	s, err := scenario.Parse("test.yaml", []byte(experiment))
	if err != nil {
		t.Fatal(err)
	}
	for _, mode := range []scenario.Mode{"tcp", "ring", "switch", "server", "hybrid", "server/quorum", "hybrid/quorum", "server/async"} {
		t.Run(string(mode), func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 50*time.Second)
			defer cancel()
			run := map[scenario.Reducer]func(context.Context, *scenario.Scenario, scenario.Mode, func(int, loop.Round) error) error{
				scenario.ParameterServer: runTCP, scenario.Ring: runRing, scenario.XAgg: runXAgg,
			}[mode.Reducer()]
			rounds := map[int][]loop.Round{} // by rank
			var mu sync.Mutex
			if err := run(ctx, s, mode, func(rank int, r loop.Round) error {
				mu.Lock()
				defer mu.Unlock()
				rounds[rank] = append(rounds[rank], r)
				return nil
			}); err != nil {
				t.Fatal(err)
			}
			check(t, s, mode, rounds)
		})
	}
}

func check(t *testing.T, s *scenario.Scenario, mode scenario.Mode, rounds map[int][]loop.Round) {
	for rank := range s.Jobs[0].Ranks {
		if got, want := len(rounds[rank]), s.Warmup+s.Rounds; got != want {
			t.Fatalf("rank %d reports %d rounds, want %d", rank, got, want)
		}
		var end int64
		for i, r := range rounds[rank] {
			if r.Round != i || r.Begin < end {
				t.Errorf("rank %d reports round %d, begun at %d, as number %d, whose forerunner ended at %d", rank, r.Round, r.Begin, i, end)
			}
			for b := range r.Ready {
				if r.Done[b] <= 0 || r.Ready[b] > r.Done[b] {
					t.Errorf("rank %d, round %d: bucket %d is ready at %d and done at %d", rank, i, b, r.Ready[b], r.Done[b])
				}
			}
			if mode.Consistency() == controller.ModeSync && r.Error > 1e-5 || r.Error != r.Error || r.Error > 2 {
				t.Errorf("rank %d, round %d: error %g", rank, i, r.Error)
			}
			if mode.Reducer() == scenario.XAgg && (r.Chunks == 0 || mode.Consistency() != controller.ModeQuorum && int(r.Packets) < r.Chunks) {
				t.Errorf("rank %d, round %d: %d packets for %d chunks", rank, i, r.Packets, r.Chunks)
			}
			if r.Comm() < 0 || r.Comm() > r.Took() {
				t.Errorf("rank %d, round %d: communication of %v in %v", rank, i, r.Comm(), r.Took())
			}
			end = r.Begin + r.Took().Nanoseconds()
		}
	}
}

// runXAgg runs a job in the lab in memory.
func runXAgg(ctx context.Context, s *scenario.Scenario, mode scenario.Mode, take func(int, loop.Round) error) error {
	topology, err := lab.Star(s.Jobs[0].Ranks, 1)
	if err != nil {
		return err
	}
	l, err := memory.New(ctx, memory.Config{Topology: topology})
	if err != nil {
		return err
	}
	defer l.Close()
	client := api.NewControllerClient(l.Controller())
	if _, err := client.CreateJob(ctx, reducer.JobRequest(s, 0, mode)); err != nil {
		return err
	}
	return each(ctx, s, mode, take, func(ctx context.Context, cfg loop.Config) (loop.Reducer, error) {
		return reducer.NewXAgg(ctx, client, cfg, s.Jobs[0].Name, l.Link(cfg.Rank, wire.Port))
	})
}

// runTCP runs a job with two parameter servers on the loopback interface.
func runTCP(ctx context.Context, s *scenario.Scenario, mode scenario.Mode, take func(int, loop.Round) error) error {
	const servers = 2
	var addrs []string
	var group errgroup.Group
	for i := range servers {
		server, err := tcp.NewServer(reducer.PlanTCP(s, 0), i, servers)
		if err != nil {
			return err
		}
		lis, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return err
		}
		addrs = append(addrs, lis.Addr().String())
		group.Go(func() error { return server.Serve(lis) })
	}
	return errors.Join(each(ctx, s, mode, take, func(ctx context.Context, cfg loop.Config) (loop.Reducer, error) {
		return reducer.NewTCP(ctx, cfg, netip.MustParseAddr("127.0.0.1"), addrs)
	}), group.Wait())
}

// runRing runs a job in a ring on the loopback interface.
func runRing(ctx context.Context, s *scenario.Scenario, mode scenario.Mode, take func(int, loop.Round) error) error {
	var peers []string
	for rank := range s.Jobs[0].Ranks { // loopback addresses of this process's own
		peers = append(peers, fmt.Sprintf("127.%d.%d.%d:19871", os.Getpid()>>8&0xff, os.Getpid()&0xff, rank+1))
	}
	return each(ctx, s, mode, take, func(ctx context.Context, cfg loop.Config) (loop.Reducer, error) {
		return reducer.NewRing(ctx, cfg, peers)
	})
}

// each runs all ranks.
func each(ctx context.Context, s *scenario.Scenario, mode scenario.Mode, take func(int, loop.Round) error,
	connect func(context.Context, loop.Config) (loop.Reducer, error)) error {
	group, ctx := errgroup.WithContext(ctx)
	for rank := range s.Jobs[0].Ranks {
		group.Go(func() error {
			cfg := loop.Config{Scenario: s, Seed: 1, Rank: rank, Mode: mode, Timeout: 20 * time.Second}
			r, err := connect(ctx, cfg)
			if err != nil {
				return err
			}
			defer r.Close()
			if err := loop.Run(ctx, cfg, r, func(r loop.Round) error { return take(rank, r) }); err != nil {
				return fmt.Errorf("rank %d: %w", rank, err)
			}
			return nil
		})
	}
	return group.Wait()
}
