package pitfalls

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"xagg/api"
	"xagg/worker"
)

// TestPitfall5: a rank that comes a second late costs the others no storm of retransmissions.
func TestPitfall5(t *testing.T) {
	const chunks, lanes = 400, 400 * 256
	for mode, policy := range policies {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			b := newBench(t, 4, lanes, policy)
			var packets, resends atomic.Uint64
			err := b.run(func(ctx context.Context, w *worker.Worker) error {
				if w.Rank() == 0 {
					select { // the straggler computes
					case <-time.After(time.Second):
					case <-ctx.Done():
						return ctx.Err()
					}
				}
				info, err := w.AllReduceInt32(ctx, "k", make([]int32, lanes))
				packets.Add(info.Packets)
				resends.Add(info.Resends)
				return err
			})
			if err != nil {
				t.Fatal(err)
			}
			// The wish of 1 % holds in simulated time (sim.TestStraggler); here scheduling adds to it.
			if n, limit := resends.Load(), packets.Load()/20; n > limit {
				t.Errorf("%d of %d packets were sent again, want at most %d", n, packets.Load(), limit)
			}
		})
	}
}

// TestPitfall6: a rank dies in the middle of a chunk, and the next job on the same slots is right from its first result on.
func TestPitfall6(t *testing.T) {
	for mode, policy := range policies {
		t.Run(mode, func(t *testing.T) {
			b := newBench(t, 3, 5000, policy)
			for round := range 3 {
				group, ctx := errgroup.WithContext(t.Context())
				for rank := range 2 { // the others contribute, and wait for rank 2
					group.Go(func() error {
						w, err := b.join(ctx, rank, nil, worker.Config{})
						if err != nil {
							return err
						}
						defer w.Close()
						err = sumInts(ctx, w, "k", 5000, func(int, int) int32 { return 12345 })
						if abort, ok := errors.AsType[*worker.AbortError](err); !ok || len(abort.Ranks) != 1 || abort.Ranks[0] != 2 {
							return fmt.Errorf("rank %d ends with %v, want the abort of rank 2", rank, err)
						}
						return nil
					})
				}
				w, err := b.join(ctx, 2, nil, worker.Config{})
				if err != nil {
					t.Fatal(err)
				}
				b.reached("contributions of the others are in slots", func() bool { return b.summed() > 0 })
				w.Close() // without a word
				if err := group.Wait(); err != nil {
					t.Fatal(err)
				}
				err = b.run(func(ctx context.Context, w *worker.Worker) error {
					return sumInts(ctx, w, "k", 5000, func(rank, i int) int32 { return int32(i + rank + round) })
				})
				if err != nil {
					t.Fatalf("after death %d: %v", round+1, err)
				}
			}
		})
	}
}

// summed returns the number of contributions that switch and servers have summed.
func (b *bench) summed() (n uint64) {
	status, err := b.client.Status(b.Context(), &api.StatusRequest{})
	if err != nil {
		b.Fatal(err)
	}
	n = status.GetSwitch().GetReasons()["summed"]
	for _, s := range status.GetServers() {
		n += s.GetReasons()["summed"]
	}
	return n
}

// TestPitfall7: a rank that starts anew while the others go on is not let into their rounds. The others hear of it, and all
// begin together.
func TestPitfall7(t *testing.T) {
	b := newBench(t, 3, 1000, policies["switch"])
	began := make(chan struct{}, 3)
	group, ctx := errgroup.WithContext(t.Context())
	for rank := range 3 {
		group.Go(func() error {
			w, err := b.join(ctx, rank, nil, worker.Config{})
			if err != nil {
				return err
			}
			defer w.Close()
			for round := 0; ; round++ {
				err := sumInts(ctx, w, "k", 1000, func(rank, i int) int32 { return int32(rank*1000 + i) })
				if rank == 1 && round == 5 {
					return err // it dies
				}
				if err != nil {
					if abort, ok := errors.AsType[*worker.AbortError](err); !ok || len(abort.Ranks) != 1 || abort.Ranks[0] != 1 {
						return fmt.Errorf("rank %d ends with %v, want the abort of rank 1", rank, err)
					}
					began <- struct{}{}
					return nil
				}
			}
		})
	}
	if err := group.Wait(); err != nil {
		t.Fatal(err)
	}
	if len(began) != 2 {
		t.Fatalf("%d ranks have heard of it, want 2", len(began))
	}
	if err := b.run(func(ctx context.Context, w *worker.Worker) error {
		return sumInts(ctx, w, "k", 1000, func(rank, i int) int32 { return int32(rank + i) })
	}); err != nil {
		t.Fatal(err)
	}
}

// TestPitfall9: workers that are going to do different things are told so before anything is sent, all of them, and by
// the name of the odd one.
func TestPitfall9(t *testing.T) {
	b := newBench(t, 4, 100, policies["switch"])
	var group errgroup.Group
	for rank := range 4 {
		group.Go(func() error {
			plan := "float32 1x100"
			if rank == 2 {
				plan = "float32 1x99"
			}
			w, err := b.join(t.Context(), rank, nil, worker.Config{Plan: plan})
			if err == nil {
				w.Close()
				return fmt.Errorf("rank %d has joined", rank)
			}
			if abort, ok := errors.AsType[*worker.AbortError](err); !ok || len(abort.Ranks) != 1 || abort.Ranks[0] != 2 ||
				!strings.Contains(err.Error(), "99") {
				return fmt.Errorf("rank %d: %w, want rank 2 and its plan", rank, err)
			}
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		t.Error(err)
	}
}

// TestPitfall11: sums at the ends of int32 are exact, those beyond it an error that names round and chunk, never a wrong
// sum; values of any magnitude are scaled so that their sum fits.
func TestPitfall11(t *testing.T) {
	for _, ranks := range []int{2, 3, 7, 32} {
		t.Run(fmt.Sprintf("%d ranks", ranks), func(t *testing.T) {
			b := newBench(t, ranks, 300, policies["switch"])
			err := b.run(func(ctx context.Context, w *worker.Worker) error {
				share := int32(math.MaxInt32 / ranks)
				for i, value := range []func(rank, i int) int32{
					func(int, int) int32 { return share },
					func(int, int) int32 { return -share },
					func(_, i int) int32 { return share * int32(1-2*(i%2)) },
					// One has all, the others nothing.
					func(rank, i int) int32 { return math.MaxInt32 * int32(boolean(rank == i%ranks)) },
					func(rank, _ int) int32 { return math.MinInt32 * int32(boolean(rank == 0)) },
					// Sums on the way may be beyond int32, the last one is not.
					func(rank, _ int) int32 { return int32(1-2*(rank%2)) * math.MaxInt32 * int32(boolean(rank < ranks/2*2)) },
				} {
					if err := sumInts(ctx, w, "k", 300, value); err != nil {
						return fmt.Errorf("values %d: %w", i, err)
					}
				}
				return nil
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
}

// TestPitfall12: a sum that does not fit int32 wraps in the switch and on the server, and is an error, never a wrong sum.
func TestPitfall12(t *testing.T) {
	for mode, policy := range policies {
		t.Run(mode, func(t *testing.T) {
			b := newBench(t, 3, 300, policy)
			group, ctx := errgroup.WithContext(t.Context())
			for rank := range 3 {
				group.Go(func() error {
					w, err := b.join(ctx, rank, nil, worker.Config{})
					if err != nil {
						return err
					}
					defer w.Close()
					err = sumInts(ctx, w, "k", 300, func(rank, i int) int32 { return math.MaxInt32/3 + int32(boolean(i == 299)) })
					_, integrity := errors.AsType[*worker.IntegrityError](err)
					_, abort := errors.AsType[*worker.AbortError](err) // of the one who was told first
					if !integrity && !abort || !strings.Contains(err.Error(), "round 0, chunk 1: result's tag") {
						return fmt.Errorf("rank %d: %v, want an error that names round 0 and chunk 1", rank, err)
					}
					return nil
				})
			}
			if err := group.Wait(); err != nil {
				t.Error(err)
			}
		})
	}
}

func boolean(b bool) int {
	if b {
		return 1
	}
	return 0
}

// TestPitfall17: counters do not go round where they must not: hundreds of jobs one after the other, more chunks than 16
// bits count, and ranks at the sign bits of masks.
func TestPitfall17(t *testing.T) {
	t.Run("300 jobs", func(t *testing.T) {
		b := newBench(t, 2, 10, policies["switch"])
		for i := range 300 {
			err := b.run(func(ctx context.Context, w *worker.Worker) error {
				return sumInts(ctx, w, "k", 10, func(rank, lane int) int32 { return int32(i*100 + rank + lane) })
			})
			if err != nil {
				t.Fatalf("job %d: %v", i, err)
			}
			if i%10 == 0 { // an incarnation each, and now and then a job of its own
				if _, err := b.client.RemoveJob(t.Context(), &api.RemoveJobRequest{Name: b.job}); err != nil {
					t.Fatal(err)
				}
				b.create(10, policies["switch"], nil)
			}
		}
	})
	t.Run("66,000 chunks", func(t *testing.T) {
		rounds := 330
		if testing.Short() {
			t.Skip("takes seconds")
		}
		const lanes = 200 * 256
		b := newBench(t, 2, lanes, policies["switch"])
		err := b.run(func(ctx context.Context, w *worker.Worker) error {
			for round := range rounds {
				if err := sumInts(ctx, w, "k", lanes, func(rank, i int) int32 { return int32(round*7 + rank + i) }); err != nil {
					return fmt.Errorf("round %d: %w", round, err)
				}
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	})
	t.Run("64 ranks", func(t *testing.T) {
		for _, policy := range []*api.Policy{
			policies["switch"], policies["server"], {Rule: "static", Mode: "hybrid", Steer: []uint32{31, 32, 63}},
		} {
			b := newBench(t, 64, 300, policy)
			err := b.run(func(ctx context.Context, w *worker.Worker) error {
				return sumInts(ctx, w, "k", 300, func(rank, i int) int32 { return int32(1<<(rank%24) + i) })
			})
			if err != nil {
				t.Errorf("mode %s: %v", policy.Mode, err)
			}
		}
	})
}

// TestPitfall35: half a second in which nothing of one rank gets through leaves no backed-off timers behind.
func TestPitfall35(t *testing.T) {
	const lanes = 64 * 256
	for mode, policy := range policies {
		t.Run(mode, func(t *testing.T) {
			b := newBench(t, 3, lanes, policy)
			var cut atomic.Bool
			var rounds atomic.Int64
			var healed, pace atomic.Int64 // when, and what twenty rounds took before, in nanoseconds
			start := time.Now()
			var recovered []time.Duration // what the rounds after the burst took, twenty and what is left of one; rank 0's
			group, ctx := errgroup.WithContext(t.Context())
			for rank := range 3 {
				group.Go(func() error {
					wrap := func(l worker.Link) worker.Link {
						if rank == 1 {
							return &lossy{Link: l, cut: &cut}
						}
						return l
					}
					w, err := b.join(ctx, rank, wrap, worker.Config{})
					if err != nil {
						return err
					}
					defer w.Close()
					for round := range 60 {
						err := sumInts(ctx, w, "k", lanes, func(rank, i int) int32 { return int32(rank + i + round) })
						if err != nil {
							return err
						}
						if rank != 0 {
							continue
						}
						switch rounds.Add(1) {
						case 20:
							pace.Store(int64(time.Since(start)))
							cut.Store(true)
							time.AfterFunc(500*time.Millisecond, func() {
								healed.Store(int64(time.Since(start)))
								cut.Store(false)
							})
						case 40, 60: // twenty rounds after the burst, or part of it, and as many again
							if at := healed.Load(); at != 0 {
								now := time.Since(start)
								recovered = append(recovered, now-time.Duration(at))
								healed.Store(int64(now))
							}
						}
					}
					return w.Leave(ctx)
				})
			}
			if err := group.Wait(); err != nil {
				t.Fatal(err)
			}
			if len(recovered) == 0 {
				t.Fatal("no burst was seen")
			}
			// Timers that stay long make all rounds long, and other programs hardly come in both parts.
			usual := time.Duration(pace.Load())
			if took := slices.Min(recovered); took > time.Second+2*usual {
				t.Errorf("after the burst 20 rounds took %v, and 20 before it %v", recovered, usual)
			}
			t.Logf("%v, before it %v", recovered, usual)
		})
	}
}
