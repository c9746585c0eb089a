package worker_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"xagg/worker"
)

// bucket is an all-reduce of a pipelined step.
type bucket struct {
	key  string
	size int
	ints bool
}

var buckets = []bucket{
	{"a", 300, false}, {"b", 1, true}, {"c", 2000, true}, {"a", 300, false}, {"d", 0, false}, {"e", 256, true},
	{"f", 5*256 + 1, false}, {"a", 300, false}, {"b", 1, true}, {"g", 3000, false},
}

// start begins a bucket's all-reduce and returns a function that waits for it and checks its result.
func (b bucket) start(w *worker.Worker, ranks, index int) (func() error, error) {
	seed := uint64(index)
	if b.ints {
		data := make([]int32, b.size)
		for i := range data {
			data[i] = int32((w.Rank() + 1) * (i + index))
		}
		p, err := w.StartInt32(b.key, data)
		return func() error {
			if _, err := p.Wait(context.Background()); err != nil {
				return err
			}
			for i, v := range data {
				if want := int32(ranks * (ranks + 1) / 2 * (i + index)); v != want {
					return fmt.Errorf("bucket %d: value %d is %d, want %d", index, i, v, want)
				}
			}
			return nil
		}, err
	}
	data := values(b.size, w.Rank(), seed)
	p, err := w.Start(b.key, data)
	return func() error {
		info, err := p.Wait(context.Background())
		if err != nil {
			return err
		}
		var all [][]float32
		for r := range ranks {
			all = append(all, values(b.size, r, seed))
		}
		for i, lane := range wantSum(all, info.Exponent) {
			if want := float32(math.Ldexp(float64(lane), -int(info.Exponent))); data[i] != want {
				return fmt.Errorf("bucket %d: value %d is %g, want %g", index, i, data[i], want)
			}
		}
		return nil
	}, err
}

// TestPipelined begins many all-reduces at once, while the plan changes: every sum is exact, and all ranks run the same
// rounds in the same order, over links that lose, duplicate and reorder.
func TestPipelined(t *testing.T) {
	for mode, cfg := range modes(3) {
		for _, depth := range []uint32{1, 2, 4} {
			t.Run(fmt.Sprintf("%s/%d", mode, depth), func(t *testing.T) {
				t.Parallel()
				cfg := cfg // each test has its own
				cfg.seed, cfg.loss, cfg.dup, cfg.delay = 12, 0.01, 0.05, 2
				cfg.depth, cfg.chunks, cfg.pool = depth, 4, 4
				n := newTestnet(t, cfg)
				workers, recorders := n.joinObserved(t)
				arm := func() {
					n.mu.Lock()
					defer n.mu.Unlock()
					n.install(testEpoch + 1)
					if n.servers > 0 {
						n.srv[0].Arm(testJob, testEpoch, testEpoch+1)
					} else {
						n.sw.Arm(testJob, testEpoch, testEpoch+1)
					}
				}
				n.each(t, func(r int) error {
					var waits []func() error
					for step := range 2 {
						for i, b := range buckets {
							wait, err := b.start(workers[r], n.ranks, 100*step+i)
							if err != nil {
								return err
							}
							waits = append(waits, wait)
						}
						if step == 0 && r == 0 {
							arm()
						}
					}
					for _, wait := range waits {
						if err := wait(); err != nil {
							return err
						}
					}
					return workers[r].Leave(t.Context())
				})
				for r := 1; r < n.ranks; r++ {
					if diff := cmp.Diff(recorders[0].rounds, recorders[r].rounds); diff != "" {
						t.Errorf("rank %d saw other rounds than rank 0:\n%s", r, diff)
					}
				}
				last := recorders[0].rounds[len(recorders[0].rounds)-1]
				if last.Epoch != testEpoch+1 {
					t.Errorf("the last round ran under epoch %d, want %d", last.Epoch, testEpoch+1)
				}
				for i, r := range recorders[0].rounds {
					if r.Number != uint32(i) {
						t.Fatalf("round %d was observed as number %d", r.Number, i)
					}
				}
			})
		}
	}
}

// TestWait: the context of a Wait ends the wait, not the all-reduce.
func TestWait(t *testing.T) {
	n := newTestnet(t, netConfig{ranks: 2, depth: 2})
	workers := n.join(t)
	data := [2][]int32{{1, 2}, {3, 4}}
	p, err := workers[0].StartInt32("k", data[0])
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := p.Wait(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("%v, want a cancelled wait", err)
	}
	if _, err := workers[1].AllReduceInt32(t.Context(), "k", data[1]); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if info, err := p.Wait(t.Context()); err != nil || info.Mask != 3 || !slices.Equal(data[0], []int32{4, 6}) {
			t.Errorf("sum %v, info %+v, %v", data[0], info, err)
		}
	}
}

// TestPendingErrors: what ends the job ends all that is under way, and nothing begins any more.
func TestPendingErrors(t *testing.T) {
	n := newTestnet(t, netConfig{ranks: 2, depth: 2})
	workers := n.join(t)
	var pending []*worker.Pending
	for _, key := range []string{"a", "b", "c"} {
		p, err := workers[0].Start(key, make([]float32, 300))
		if err != nil {
			t.Fatal(err)
		}
		pending = append(pending, p)
	}
	var bad *worker.NonFiniteError
	if _, err := workers[0].Start("d", []float32{float32(math.NaN())}); !errors.As(err, &bad) || bad.Key != "d" {
		t.Errorf("%v, want a NaN", err)
	}
	for i, p := range pending {
		if _, err := p.Wait(t.Context()); !errors.As(err, &bad) {
			t.Errorf("all-reduce %d: %v, want the NaN", i, err)
		}
	}
	if _, err := workers[0].Start("e", nil); !errors.As(err, &bad) {
		t.Errorf("another all-reduce: %v", err)
	}
	if _, err := workers[1].AllReduce(t.Context(), "a", make([]float32, 300)); !errors.As(err, new(*worker.AbortError)) {
		t.Errorf("rank 1: %v, want an abort", err)
	}
}

// TestLeavePending: a worker leaves when all that it has begun is done.
func TestLeavePending(t *testing.T) {
	n := newTestnet(t, netConfig{ranks: 2, depth: 3})
	workers := n.join(t)
	n.each(t, func(r int) error {
		data := make([][]int32, 8)
		for i := range data {
			data[i] = []int32{int32(i)}
			if _, err := workers[r].StartInt32(fmt.Sprint(i), data[i]); err != nil {
				return err
			}
		}
		if err := workers[r].Leave(t.Context()); err != nil {
			return err
		}
		for i := range data {
			if data[i][0] != int32(2*i) {
				return fmt.Errorf("sum %d is %d, want %d", i, data[i][0], 2*i)
			}
		}
		_, err := workers[r].StartInt32("k", nil)
		if !errors.Is(err, worker.ErrLeft) {
			return fmt.Errorf("after it has left: %v", err)
		}
		return nil
	})
}
