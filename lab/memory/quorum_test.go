package memory_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"xagg/api"
	"xagg/lab"
	"xagg/lab/memory"
	"xagg/wire"
	"xagg/worker"
)

// TestRankComesBack: a quorum job goes on without a rank that dies, and lets it in again when it is started anew, also
// while the switch loses its memory. All ranks have the same sums of the same ranks in every round.
func TestRankComesBack(t *testing.T) {
	const ranks, lanes = 3, 3000
	topology, err := lab.Star(ranks, 1)
	if err != nil {
		t.Fatal(err)
	}
	l, err := memory.New(t.Context(), memory.Config{Topology: topology})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
	createJob(t, l, &api.CreateJobRequest{
		Name: "q", Ranks: ranks, MaxElems: lanes, Policy: &api.Policy{Mode: "server", Pool: 16}, Depth: 2,
		Consistency: &api.Consistency{Mode: "quorum", Quorum: 2, WaitUs: 3000},
	})
	client := api.NewControllerClient(l.Controller())
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Second)
	defer cancel()

	var mu sync.Mutex
	rounds := map[uint32]worker.Round{}
	var with atomic.Uint64 // the mask of the last round
	observe := func(rank int) func(worker.Round) {
		return func(r worker.Round) {
			mu.Lock()
			defer mu.Unlock()
			with.Store(r.Mask)
			if other, ok := rounds[r.Number]; !ok {
				r.Sum, r.Masks = slices.Clone(r.Sum), slices.Clone(r.Masks)
				rounds[r.Number] = r
			} else if !slices.Equal(other.Sum, r.Sum) || !slices.Equal(other.Masks, r.Masks) {
				t.Errorf("rank %d, round %d: sums of %x, others have sums of %x", rank, r.Number, r.Masks, other.Masks)
			}
		}
	}
	// One all-reduce more than anybody has begun when stop is set is the last one of all.
	var begun, last atomic.Int64
	last.Store(1 << 40)
	work := func(ctx context.Context, rank int) error {
		w, err := worker.Join(ctx, client, worker.Config{Job: "q", Rank: rank, Link: l.Link(rank, wire.Port)},
			worker.WithObserver(observe(rank)), worker.WithTimeout(20*time.Second))
		if err != nil {
			return err
		}
		defer w.Close()
		data := make([]float32, lanes)
		for {
			for i := range data {
				data[i] = float32(rank + i%5)
			}
			info, err := w.AllReduce(ctx, "w", data)
			if err != nil {
				return fmt.Errorf("rank %d: %w", rank, err)
			}
			n := int64(info.Round)
			for old := begun.Load(); old < n && !begun.CompareAndSwap(old, n); old = begun.Load() {
			}
			if n >= last.Load() {
				return w.Leave(ctx)
			}
		}
	}
	until := func(what string, ok func() bool) {
		t.Helper()
		tick := time.NewTicker(time.Millisecond)
		defer tick.Stop()
		for !ok() {
			select {
			case <-tick.C:
			case <-ctx.Done():
				reply, _ := client.Status(context.WithoutCancel(ctx), &api.StatusRequest{})
				t.Fatalf("waited in vain: %s; %v", what, reply.GetJobs())
			}
		}
	}
	group, running := errgroup.WithContext(ctx)
	for rank := range 2 {
		group.Go(func() error { return work(running, rank) })
	}
	for range 3 {
		life, die := context.WithCancel(running)
		dead := make(chan error, 1)
		go func() { dead <- dies(life, client, l, observe(2)) }()
		until("all three take part", func() bool { return with.Load() == 0b111 })
		if err := l.LoseSwitch(); err != nil {
			t.Fatal(err)
		}
		n := begun.Load()
		until("the job goes on after the loss of the switch", func() bool { return begun.Load() > n+2 })
		die()
		if err := <-dead; err != nil {
			t.Fatal(err)
		}
		until("rank 2 is missed", func() bool { return with.Load() == 0b011 })
		n = begun.Load()
		until("the job goes on without rank 2", func() bool { return begun.Load() > n+2 })
	}
	last.Store(begun.Load() + 10)
	if err := group.Wait(); err != nil {
		t.Fatal(err)
	}
}

// dies is a worker that ends without a word when its context does.
func dies(ctx context.Context, client api.ControllerClient, l *memory.Lab, observe func(worker.Round)) error {
	w, err := worker.Join(ctx, client, worker.Config{Job: "q", Rank: 2, Link: l.Link(2, wire.Port)}, worker.WithObserver(observe))
	if err != nil {
		return err
	}
	defer w.Close()
	data := make([]float32, 3000)
	for {
		for i := range data {
			data[i] = float32(2 + i%5)
		}
		p, err := w.Start("w", data)
		if err != nil {
			return err
		}
		if _, err := p.Wait(ctx); errors.Is(err, context.Canceled) {
			return nil
		} else if err != nil {
			return err
		}
	}
}
