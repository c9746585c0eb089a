package memory_test

import (
	"context"
	"fmt"
	"math/bits"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"xagg/api"
	"xagg/wire"
	"xagg/worker"
)

// TestQuorumOfARunningJob changes how many of four ranks are enough, from 2 to 4 to 3, while the job runs and its last rank is late.
// Every round has as many as the plan of its epoch wants, the late rank is missed only where they may be fewer than four, and every
// integer is the sum of what exactly the ranks in its mask had to give.
func TestQuorumOfARunningJob(t *testing.T) {
	const ranks, lanes = 4, 700
	l := newLab(t, ranks, 2)
	createJob(t, l, &api.CreateJobRequest{
		Name: "q", Ranks: ranks, MaxElems: lanes, Policy: &api.Policy{Mode: "hybrid", Steer: []uint32{3}, Pool: 4}, Depth: 2,
		Consistency: &api.Consistency{Mode: "quorum", Quorum: 2, WaitUs: 500, Rounds: 256},
	})
	client := api.NewControllerClient(l.Controller())
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()

	var mu sync.Mutex
	var rounds []worker.Round // by number
	observe := func(rank int) func(worker.Round) {
		return func(r worker.Round) {
			mu.Lock()
			defer mu.Unlock()
			if int(r.Number) == len(rounds) {
				r.Sum, r.Masks = slices.Clone(r.Sum), slices.Clone(r.Masks)
				rounds = append(rounds, r)
			} else if first := &rounds[r.Number]; !slices.Equal(first.Sum, r.Sum) || !slices.Equal(first.Masks, r.Masks) || first.Epoch != r.Epoch {
				t.Errorf("rank %d, round %d: sums of %x under epoch %d, others have sums of %x under %d", rank, r.Number, r.Masks, r.Epoch,
					first.Masks, first.Epoch)
			}
		}
	}
	input := func(rank, number, lane int) int32 { return int32(rank+1)<<20 | int32(number&0xff)<<12 | int32(lane) }
	var last atomic.Int64
	last.Store(1 << 40)
	work := func(ctx context.Context, rank int) error {
		w, err := worker.Join(ctx, client, worker.Config{Job: "q", Rank: rank, Link: l.Link(rank, wire.Port)},
			worker.WithObserver(observe(rank)), worker.WithTimeout(30*time.Second))
		if err != nil {
			return err
		}
		defer w.Close()
		data := make([]int32, lanes)
		for n := 0; ; n++ {
			if int64(n) > last.Load() {
				return w.Leave(ctx)
			}
			if rank == 3 {
				time.Sleep(15 * time.Millisecond) // late, however busy the machine is
			} else {
				time.Sleep(time.Millisecond)
			}
			for i := range data {
				data[i] = input(rank, n, i)
			}
			if _, err := w.AllReduceInt32(ctx, "w", data); err != nil {
				return fmt.Errorf("rank %d: %w", rank, err)
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
	look := func() *api.Job {
		reply, err := client.Status(ctx, &api.StatusRequest{})
		if err != nil {
			t.Fatal(err)
		}
		return reply.Jobs[0]
	}
	group, running := errgroup.WithContext(ctx)
	for rank := range ranks {
		group.Go(func() error { return work(running, rank) })
	}
	begun := func() int {
		mu.Lock()
		defer mu.Unlock()
		return len(rounds)
	}
	until("the job runs", func() bool { return begun() > 20 })
	wants := map[uint16]int{uint16(look().Epoch): 2}
	for _, quorum := range []uint32{4, 3} {
		job, err := client.Steer(ctx, &api.SteerRequest{Job: "q", Policy: &api.Policy{Quorum: quorum}})
		if err != nil {
			t.Fatal(err)
		}
		if job.Change.GetQuorum() != quorum || job.Change.GetWaitUs() != 500 {
			t.Errorf("job is %v", job)
		}
		wants[uint16(job.Change.GetEpoch())] = int(quorum)
		until("the change is over", func() bool { return look().Change == nil })
		n := begun()
		until("rounds under the new plan", func() bool { return begun() > n+20 })
	}
	// Whoever is ahead may have begun more than this; all end with the same one, which nobody has begun.
	last.Store(int64(begun() + 100))
	if err := group.Wait(); err != nil {
		t.Fatal(err)
	}

	left := make([][]int32, ranks) // by rank: what was left out so far
	for rank := range left {
		left[rank] = make([]int32, lanes)
	}
	seen, missed := map[uint16]int{}, map[uint16]int{}
	for n, r := range rounds {
		want, known := wants[r.Epoch]
		if !known || len(r.Sum) != lanes || len(r.Masks) != 3 {
			t.Fatalf("round %d has %d lanes and %d masks, under epoch %d; there are plans %v", n, len(r.Sum), len(r.Masks), r.Epoch, wants)
		}
		seen[r.Epoch]++
		for i, got := range r.Sum {
			mask, sum := r.Masks[i/wire.MaxLanes], int32(0)
			for rank := range ranks {
				if left[rank][i] += input(rank, n, i); mask>>rank&1 != 0 {
					sum += left[rank][i]
					left[rank][i] = 0
				}
			}
			if got != sum {
				t.Fatalf("round %d, lane %d, of ranks %#x: %d, want %d", n, i, mask, got, sum)
			}
		}
		for _, mask := range r.Masks {
			if bits.OnesCount64(mask) < want {
				t.Errorf("round %d under epoch %d: a chunk of ranks %#x, want %d", n, r.Epoch, mask, want)
			}
			missed[r.Epoch] += ranks - bits.OnesCount64(mask)
		}
	}
	for epoch, want := range wants {
		t.Logf("epoch %d, %d of %d ranks are enough: %d rounds, %d contributions to chunks were late", epoch, want, ranks, seen[epoch], missed[epoch])
		if seen[epoch] < 10 || want < ranks && missed[epoch] == 0 {
			t.Errorf("too few to say anything")
		}
	}
}
