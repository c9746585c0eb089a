package pitfalls

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"xagg/api"
	"xagg/bmv2/fault"
	"xagg/worker"
)

// quorumOf is the consistency of a job that waits for k ranks and so much longer.
func quorumOf(k uint32, wait time.Duration) *api.Consistency {
	return &api.Consistency{Mode: "quorum", Quorum: k, WaitUs: uint32(wait.Microseconds())}
}

// TestPitfall8: a rank that goes away while the others wait for all to come is no rank too many later.
func TestPitfall8(t *testing.T) {
	b := newBench(t, 3, 100, policies["hybrid"])
	for range 5 {
		joining, stop := context.WithCancel(t.Context())
		gone := make(chan error, 1)
		go func() {
			w, err := b.join(joining, 1, nil, worker.Config{})
			if err == nil {
				w.Close()
			}
			gone <- err
		}()
		b.reached("rank 1 waits for the others", func() bool { return b.joined() == 1<<1 })
		stop()
		if err := <-gone; !errors.Is(err, context.Canceled) {
			t.Fatalf("rank 1 has joined: %v", err)
		}
		b.reached("its place is free", func() bool { return b.joined() == 0 })
	}
	err := b.run(func(ctx context.Context, w *worker.Worker) error {
		return sumInts(ctx, w, "k", 100, func(rank, i int) int32 { return int32(rank + i) })
	})
	if err != nil {
		t.Fatal(err)
	}
}

// joined returns the mask of the ranks that wait or work.
func (b *bench) joined() uint64 {
	status, err := b.client.Status(b.Context(), &api.StatusRequest{})
	if err != nil {
		b.Fatal(err)
	}
	return status.GetJobs()[0].GetJoined()
}

// TestPitfall10: what a worker gave too late is not lost when the result without it overwrites its vector: it is in the
// next one. That is row 20 too, as aggregators see it: a late packet opens no new sum, is counted as late, and is answered
// with the result.
func TestPitfall10(t *testing.T) {
	const n = 700
	for _, mode := range []string{"server", "hybrid"} {
		t.Run(mode, func(t *testing.T) {
			// The wait is what the ranks of the second all-reduce may come apart by on a busy machine.
			b := newBench(t, 3, n, policies[mode], quorumOf(2, time.Second))
			second := newBarrier(3)
			first := make(chan struct{}) // the first two have finished without rank 2
			var done sync.WaitGroup
			done.Add(2)
			go func() { done.Wait(); close(first) }()
			err := b.run(func(ctx context.Context, w *worker.Worker) error {
				rank := w.Rank()
				data := make([]int32, n)
				fill := func(x int32) {
					for i := range data {
						data[i] = x*int32(i+1) + int32(rank)
					}
				}
				want := func(info worker.Info, late int, ranks int, x int32, base int32) error {
					if info.Late != late || info.Least != ranks || info.Most != ranks {
						return fmt.Errorf("%d late chunks and %d to %d contributors, want %d and %d", info.Late, info.Least, info.Most, late, ranks)
					}
					for i, got := range data {
						if got != x*int32(i+1)+base {
							return fmt.Errorf("value %d is %d, want %d", i, got, x*int32(i+1)+base)
						}
					}
					return nil
				}
				if rank == 2 {
					select {
					case <-first:
					case <-ctx.Done():
						return ctx.Err()
					}
				}
				fill(10)
				info, err := w.AllReduceInt32(ctx, "k", data)
				if err != nil {
					return err
				}
				late := 0
				if rank == 2 {
					late = 3 // all chunks
				} else {
					done.Done()
					<-first
				}
				if err := want(info, late, 2, 20, 0+1); err != nil {
					return fmt.Errorf("first: %w", err)
				}
				if err := second.wait(ctx); err != nil {
					return err
				}
				fill(1)
				if info, err = w.AllReduceInt32(ctx, "k", data); err != nil {
					return err
				}
				// All ranks of now, and what rank 2 gave before: 10 (i+1) + 2.
				if err := want(info, 0, 3, 13, 0+1+2+2); err != nil {
					return fmt.Errorf("second: %w", err)
				}
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
			if n := b.counted("late"); n == 0 {
				t.Error("nothing was counted as late")
			}
		})
	}
}

// counted returns the number of packets that switch and servers have counted under a reason.
func (b *bench) counted(reason string) (n uint64) {
	status, err := b.client.Status(b.Context(), &api.StatusRequest{})
	if err != nil {
		b.Fatal(err)
	}
	n = status.GetSwitch().GetReasons()[reason]
	for _, s := range status.GetServers() {
		n += s.GetReasons()[reason]
	}
	return n
}

// TestPitfall13: values at the ends of float32, all zero, denormal: sums are as exact as they can be; NaN and Inf are an
// error at all ranks that names rank, tensor and index, before anything is sent.
func TestPitfall13(t *testing.T) {
	const tiny = math.SmallestNonzeroFloat32
	for name, c := range map[string][3]float32{ // the values of the ranks
		"zero":          {0, 0, 0},
		"denormal":      {tiny, 2 * tiny, 0},
		"largest":       {math.MaxFloat32 / 4, math.MaxFloat32 / 4, math.MaxFloat32 / 4},
		"one has it":    {0, 0, -1.5},
		"cancel":        {math.MaxFloat32 / 2, -math.MaxFloat32 / 2, 0},
		"negative zero": {float32(math.Copysign(0, -1)), 0, 0},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t, 3, 300, policies["switch"])
			err := b.run(func(ctx context.Context, w *worker.Worker) error {
				for range 3 { // with a scout and without
					data := make([]float32, 300)
					for i := range data {
						data[i] = c[w.Rank()]
					}
					if _, err := w.AllReduce(ctx, "k", data); err != nil {
						return err
					}
					exact := float64(c[0]) + float64(c[1]) + float64(c[2])
					largest := max(math.Abs(float64(c[0])), math.Abs(float64(c[1])), math.Abs(float64(c[2])))
					for i, got := range data {
						// Three ranks, 26 bits of the largest each; exponents below -126 are not scaled any further.
						if off := math.Abs(float64(got) - exact); off > 3*max(largest/(1<<25), 0x1p-127) {
							return fmt.Errorf("value %d is %g, want %g", i, got, exact)
						}
					}
				}
				return nil
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
	for name, bad := range map[string]float32{"NaN": float32(math.NaN()), "+Inf": float32(math.Inf(1)), "-Inf": float32(math.Inf(-1))} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t, 3, 300, policies["switch"])
			group, ctx := errgroup.WithContext(t.Context())
			for rank := range 3 {
				group.Go(func() error {
					w, err := b.join(ctx, rank, nil, worker.Config{})
					if err != nil {
						return err
					}
					defer w.Close()
					data := make([]float32, 300)
					if rank == 1 {
						data[257] = bad
					}
					_, err = w.AllReduce(ctx, "layer 3", data)
					var own *worker.NonFiniteError
					var other *worker.AbortError
					switch {
					case rank == 1 && errors.As(err, &own) && own.Rank == 1 && own.Key == "layer 3" && own.Index == 257:
					case rank != 1 && errors.As(err, &other) && len(other.Ranks) == 1 && other.Ranks[0] == 1:
					default:
						return fmt.Errorf("rank %d: %w, want rank 1, layer 3, value 257", rank, err)
					}
					return nil
				})
			}
			if err := group.Wait(); err != nil {
				t.Error(err)
			}
			if n := b.counted("summed"); n > 2 { // the others' scouts
				t.Errorf("%d packets were summed", n)
			}
		})
	}
}

// TestPitfall14: a mean of some ranks is divided by their number, not by that of all.
func TestPitfall14(t *testing.T) {
	const n = 300
	b := newBench(t, 4, n, policies["server"], quorumOf(2, 50*time.Millisecond))
	enough := make(chan struct{})
	var done sync.WaitGroup
	done.Add(2)
	go func() { done.Wait(); close(enough) }()
	err := b.run(func(ctx context.Context, w *worker.Worker) error {
		if w.Rank() >= 2 { // come when the others have finished
			select {
			case <-enough:
			case <-ctx.Done():
				return ctx.Err()
			}
		} else {
			defer done.Done()
		}
		data := make([]float32, n)
		for i := range data {
			data[i] = float32(w.Rank()*2 + 1) // 1, 3, 5, 7
		}
		info, err := w.AllReduce(ctx, "k", data)
		if err != nil {
			return err
		}
		for i, got := range data {
			if math.Abs(float64(got)-2) > 1e-6 || info.Most != 2 { // the mean of 1 and 3
				return fmt.Errorf("value %d is %g of %d ranks, want 2 of 2", i, got, info.Most)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// TestPitfall16: vectors of any length, on any path.
func TestPitfall16(t *testing.T) {
	for mode, policy := range policies {
		t.Run(mode, func(t *testing.T) {
			b := newBench(t, 3, 1031, policy)
			err := b.run(func(ctx context.Context, w *worker.Worker) error {
				for _, n := range []int{0, 1, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1031} {
					key := fmt.Sprintf("of %d", n)
					if err := sumInts(ctx, w, key, n, func(rank, i int) int32 { return int32(rank*1000000 + i*n) }); err != nil {
						return err
					}
				}
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
		})
	}
}

// TestPitfall19: partial sums that are sent before all are in, while packets come twice and out of order: whatever
// overlaps, everything is counted once, in this result or, by the late rank, in the next.
func TestPitfall19(t *testing.T) {
	const ranks, n, rounds = 4, 900, 12
	faults := []fault.Spec{{Duplicate: 0.4, Reorder: 0.2, Drop: 0.05, Seed: 3}}
	b := newFaultyBench(t, ranks, n, &api.Policy{Rule: "static", Mode: "hybrid", Steer: []uint32{3}}, faults,
		&api.Consistency{Mode: "quorum", Quorum: 2, WaitUs: 3000, Rounds: 32})
	together := newBarrier(ranks)
	var mu sync.Mutex
	counted := make([][]int64, ranks) // by rank that was told: the sum of all its results
	value := func(rank, round, i int) int32 { return int32((rank+1)*100000 + round*1000 + i) }
	err := b.run(func(ctx context.Context, w *worker.Worker) error {
		rank := w.Rank()
		total := make([]int64, n)
		for round := range rounds {
			data := make([]int32, n)
			for i := range data {
				data[i] = value(rank, round, i)
			}
			if _, err := w.AllReduceInt32(ctx, "k", data); err != nil {
				return err
			}
			for i, v := range data {
				total[i] += int64(v)
			}
		}
		// What came too late at last is in rounds that add nothing, which all ranks begin together.
		for range 20 {
			if err := together.wait(ctx); err != nil {
				return err
			}
			data := make([]int32, n)
			if _, err := w.AllReduceInt32(ctx, "k", data); err != nil {
				return err
			}
			for i, v := range data {
				total[i] += int64(v)
			}
		}
		mu.Lock()
		defer mu.Unlock()
		counted[rank] = total
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for i := range n {
		var want int64
		for rank := range ranks {
			for round := range rounds {
				want += int64(value(rank, round, i))
			}
		}
		for rank, total := range counted {
			if total[i] != want {
				t.Fatalf("rank %d was told %d in sum of lane %d, the ranks gave %d", rank, total[i], i, want)
			}
		}
	}
}

// barrier lets ranks begin something together.
type barrier struct {
	ranks int
	mu    sync.Mutex
	here  int
	open  chan struct{}
}

func newBarrier(ranks int) *barrier { return &barrier{ranks: ranks, open: make(chan struct{})} }

func (b *barrier) wait(ctx context.Context) error {
	b.mu.Lock()
	open := b.open
	if b.here++; b.here == b.ranks {
		b.here, b.open = 0, make(chan struct{})
		close(open)
	}
	b.mu.Unlock()
	select {
	case <-open:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// TestPitfall21: ranks move between switch and server while packets are lost, and no contribution is counted twice or
// never.
func TestPitfall21(t *testing.T) {
	const ranks, n = 4, 2000
	faults := []fault.Spec{{Drop: 0.03, Duplicate: 0.03, Reorder: 0.03, Seed: 5}}
	b := newFaultyBench(t, ranks, n, policies["switch"], faults, nil)
	steering, stop := context.WithCancel(t.Context())
	var group errgroup.Group
	changes := 0
	group.Go(func() error {
		for i := 0; steering.Err() == nil; i++ {
			plan := []*api.Policy{policies["server"], policies["hybrid"], policies["switch"]}[i%3]
			job, err := b.client.Steer(steering, &api.SteerRequest{Job: b.job, Policy: plan})
			if err == nil && job.GetChange() != nil {
				changes++
			}
			if err != nil { // the change before is under way
				i--
				select {
				case <-time.After(2 * time.Millisecond):
				case <-steering.Done():
				}
			}
		}
		return nil
	})
	err := b.run(func(ctx context.Context, w *worker.Worker) error {
		for round := range 60 {
			if err := sumInts(ctx, w, "k", n, func(rank, i int) int32 { return int32(rank*1000 + i + round) }); err != nil {
				return err
			}
		}
		return nil
	})
	stop()
	if err := errors.Join(err, group.Wait()); err != nil {
		t.Fatal(err)
	}
	if changes < 3 {
		t.Errorf("the plan changed %d times, which shows nothing", changes)
	}
	t.Logf("%d changes", changes)
}

// TestPitfall34: many to one. All ranks send to one server through queues that hold a fraction of what they may have
// under way, and nobody starves.
func TestPitfall34(t *testing.T) {
	const ranks, n = 16, 64 * 256
	b := newBench(t, ranks, n, &api.Policy{Rule: "static", Mode: "server", Servers: []string{"s0"}, Pool: 64})
	err := b.run(func(ctx context.Context, w *worker.Worker) error {
		for round := range 5 {
			if err := sumInts(ctx, w, "k", n, func(rank, i int) int32 { return int32(rank + i + round) }); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}
