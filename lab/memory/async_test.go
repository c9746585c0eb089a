package memory_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"xagg/api"
	"xagg/wire"
	"xagg/worker"
)

// TestAsync runs an async job from its creation to its end: nobody waits for the straggler further than the staleness
// allows, and in the end everybody has been told everything once.
func TestAsync(t *testing.T) {
	const ranks, lanes, rounds, staleness = 4, 1000, 20, 2
	l := newLab(t, ranks, 2)
	createJob(t, l, &api.CreateJobRequest{
		Name: "async", Ranks: ranks, MaxElems: 2 * 4 * wire.MaxLanes, Depth: 2,
		Policy:      &api.Policy{Rule: "static", Mode: "server"},
		Consistency: &api.Consistency{Mode: "async", Staleness: staleness},
	})
	var all sync.WaitGroup // of the ranks that have added their last
	all.Add(ranks)
	value := func(rank, round, i int) int32 { return int32((rank+1)*1000*(round+1) + i) }
	group, ctx := errgroup.WithContext(t.Context())
	for rank := range ranks {
		group.Go(func() error {
			w, err := worker.Join(ctx, api.NewControllerClient(l.Controller()),
				worker.Config{Job: "async", Rank: rank, Link: l.Link(rank, wire.Port)})
			if err != nil {
				all.Done()
				return err
			}
			defer w.Close()
			told := map[string][]int64{"a": make([]int64, lanes), "b": make([]int64, lanes)}
			reduce := func(ctx context.Context, key string, round int) error {
				data := make([]int32, lanes)
				if round >= 0 {
					for i := range data {
						data[i] = value(rank, round, i)
					}
				}
				info, err := w.AllReduceInt32(ctx, key, data)
				if err == nil && info.Additions > (ranks-1)*(2*staleness+3)+1 {
					err = fmt.Errorf("%d additions in a result", info.Additions)
				}
				for i, v := range data {
					told[key][i] += int64(v)
				}
				return err
			}
			err = func() error {
				defer all.Done()
				for round := range rounds {
					if rank == 3 {
						time.Sleep(2 * time.Millisecond) // the straggler computes
					}
					for _, key := range []string{"a", "b"} {
						if err := reduce(ctx, key, round); err != nil {
							return err
						}
					}
				}
				return nil
			}()
			if err != nil {
				return err
			}
			all.Wait()
			for _, key := range []string{"a", "b"} { // with nothing of its own a rank hears the rest
				if err := reduce(ctx, key, -1); err != nil {
					return err
				}
				for i, got := range told[key] {
					var want int64
					for r := range ranks {
						for round := range rounds {
							want += int64(value(r, round, i))
						}
					}
					if got != want {
						return fmt.Errorf("rank %d was told %d of lane %d of %s, the ranks gave %d", rank, got, i, key, want)
					}
				}
			}
			return w.Leave(ctx)
		})
	}
	if err := group.Wait(); err != nil {
		t.Fatal(err)
	}
}
