package ring

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"xagg/lab/exchange"
)

// connect returns both ends of a connection on the loopback interface.
func connect(t testing.TB) (a, b net.Conn) {
	t.Helper()
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer lis.Close()
	if a, err = net.Dial("tcp", lis.Addr().String()); err != nil {
		t.Fatal(err)
	}
	if b, err = lis.Accept(); err != nil {
		t.Fatal(err)
	}
	return a, b
}

// start makes a ring on the loopback interface.
func start(t testing.TB, plan exchange.Plan) []*Worker {
	t.Helper()
	lefts, rights := make([]net.Conn, plan.Ranks), make([]net.Conn, plan.Ranks)
	if plan.Ranks > 1 {
		for rank := range plan.Ranks {
			rights[rank], lefts[(rank+1)%plan.Ranks] = connect(t)
		}
	}
	workers := make([]*Worker, plan.Ranks)
	var group errgroup.Group
	for rank := range workers {
		group.Go(func() (err error) {
			workers[rank], err = Join(t.Context(), lefts[rank], rights[rank], rank, plan)
			return err
		})
	}
	if err := group.Wait(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for _, w := range workers {
			w.Close()
		}
	})
	return workers
}

// value is what a rank gives: a small integer, so that the order of the sum does not matter.
func value(rank, round, bucket, i int) float32 {
	return float32((i*(rank+1) + 31*round + 7*bucket) % 1000)
}

// TestAllReduce: all ranks get the sums, of buckets of any length, round after round, whoever is slow.
func TestAllReduce(t *testing.T) {
	for _, c := range []struct {
		ranks, rounds int
		buckets       []int
	}{
		{1, 3, []int{5, 0}}, {2, 4, []int{1}}, {2, 3, []int{0}}, {3, 5, []int{1, 2, 3, 0, 4}}, {2, 4, []int{100_000}},
		{5, 4, []int{200_003, 7, 100, 20_000}}, {4, 6, []int{1000, 1000, 1000, 1000, 1000, 1000, 1000, 1000}}, {8, 3, []int{3, 50_000}},
	} {
		t.Run(fmt.Sprintf("%d ranks, buckets %v", c.ranks, c.buckets), func(t *testing.T) {
			plan := exchange.Plan{Ranks: c.ranks, Buckets: c.buckets}
			var group errgroup.Group
			for rank, w := range start(t, plan) {
				group.Go(func() error {
					if err := train(t.Context(), w, rank, c.rounds, plan); err != nil {
						return fmt.Errorf("rank %d: %w", rank, err)
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

// train all-reduces rounds of buckets, all of a round at the same time, and leaves.
func train(ctx context.Context, w *Worker, rank, rounds int, plan exchange.Plan) error {
	random := rand.New(rand.NewPCG(1, uint64(rank)))
	data := make([][]float32, len(plan.Buckets))
	for round := range rounds {
		for b, n := range plan.Buckets {
			data[b] = make([]float32, n)
			for i := range data[b] {
				data[b][i] = value(rank, round, b, i)
			}
			time.Sleep(time.Duration(random.IntN(300)) * time.Microsecond) // the ranks compute
			if err := w.Start(b, data[b]); err != nil {
				return err
			}
		}
		for b := range plan.Buckets {
			if _, err := w.Wait(ctx, b); err != nil {
				return err
			}
			for i, got := range data[b] {
				var want float32
				for r := range plan.Ranks {
					want += value(r, round, b, i)
				}
				if got != want {
					return fmt.Errorf("round %d, bucket %d: value %d is %g, want %g", round, b, i, got, want)
				}
			}
		}
	}
	if err := w.Leave(); err != nil {
		return err
	}
	return w.Close()
}

// TestRankDies: a rank that dies in the middle of an all-reduce ends it for all, with an error that names a neighbour.
func TestRankDies(t *testing.T) {
	workers := start(t, exchange.Plan{Ranks: 4, Buckets: []int{1000}})
	var group errgroup.Group
	for rank, w := range workers[:3] {
		group.Go(func() error {
			err := w.Start(0, make([]float32, 1000))
			if err == nil {
				_, err = w.Wait(t.Context(), 0)
			}
			left, right := fmt.Sprintf("left neighbour, rank %d at ", (rank+3)%4), fmt.Sprintf("right neighbour, rank %d at ", rank+1)
			if err == nil || !strings.Contains(err.Error(), left) && !strings.Contains(err.Error(), right) {
				return fmt.Errorf("rank %d: %v, want an error of its neighbour", rank, err)
			}
			return nil
		})
	}
	workers[3].Close()
	if err := group.Wait(); err != nil {
		t.Error(err)
	}
}

// TestRankLeaves: who goes on when a neighbour has left is told so.
func TestRankLeaves(t *testing.T) {
	workers := start(t, exchange.Plan{Ranks: 2, Buckets: []int{10}})
	if err := workers[0].Leave(); err != nil {
		t.Fatal(err)
	}
	workers[0].Close()
	err := workers[1].Start(0, make([]float32, 10))
	if err == nil {
		_, err = workers[1].Wait(t.Context(), 0)
	}
	if err == nil || !strings.Contains(err.Error(), "neighbour, rank 0 at") {
		t.Errorf("%v, want an error of the neighbour", err)
	}
}

// TestDeadline: an all-reduce that waits for another rank ends with its context.
func TestDeadline(t *testing.T) {
	w := start(t, exchange.Plan{Ranks: 2, Buckets: []int{10}})[0]
	if err := w.Start(0, make([]float32, 10)); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if _, err := w.Wait(ctx, 0); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v, want %v", err, context.DeadlineExceeded)
	}
	if err := w.Start(0, nil); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v, want %v", err, context.DeadlineExceeded)
	}
}

// TestMisuse: what a caller must not do.
func TestMisuse(t *testing.T) {
	w := start(t, exchange.Plan{Ranks: 2, Buckets: []int{1, 2}})[0]
	for _, c := range []struct {
		bucket, n int
		want      string
	}{
		{1, 2, "bucket 1, but 0 is next"}, {0, 2, "2 values, want 1"}, {0, 1, ""}, {1, 2, ""}, {0, 1, "bucket 0 is under way"},
	} {
		err := w.Start(c.bucket, make([]float32, c.n))
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("start bucket %d with %d values: %v, want %q", c.bucket, c.n, err, c.want)
		}
	}
}

// TestRefused: neighbours that do not belong there, and frames that nobody asked for.
func TestRefused(t *testing.T) {
	plan := exchange.Plan{Ranks: 3, Buckets: []int{5}}
	for want, say := range map[string]exchange.Hello{
		"left neighbour, rank 2":  exchange.NewHello(exchange.Plan{Ranks: 3, Buckets: []int{6}}, 2),
		"it is rank 1":            exchange.NewHello(plan, 1),
		"rank 2 of 4, but this j": exchange.NewHello(exchange.Plan{Ranks: 4, Buckets: []int{5}}, 2),
	} {
		right, _ := connect(t)
		left, neighbour := connect(t)
		neighbour.Write(exchange.Bytes([]exchange.Hello{say}))
		if _, err := Join(t.Context(), left, right, 0, plan); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, want %q", say, err, want)
		}
	}
	right, _ := connect(t)
	left, _ := connect(t)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if _, err := Join(ctx, left, right, 0, plan); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a silent neighbour: %v", err)
	}
	for _, frame := range [][]byte{
		{1, 0, 0, 0, 1, 0, 0, 0}, // there is no bucket 1
		append([]byte{0, 0, 0, 0, 6, 0, 0, 0}, make([]byte, 24)...),
	} {
		right, _ := connect(t)
		left, neighbour := connect(t)
		neighbour.Write(exchange.Bytes([]exchange.Hello{exchange.NewHello(plan, 2)}))
		w, err := Join(t.Context(), left, right, 0, plan)
		if err != nil {
			t.Fatal(err)
		}
		if err := w.Start(0, make([]float32, 5)); err != nil {
			t.Fatal(err)
		}
		neighbour.Write(bytes.Repeat(frame, 3)) // more than this and the next all-reduce take
		w.ended.Wait()
		if !errors.Is(w.err, errFrame) {
			t.Errorf("% x: %v, want %v", frame, w.err, errFrame)
		}
		w.Close()
	}
}

// BenchmarkAllReduce is an all-reduce of 1 MiB by four workers over the loopback interface.
func BenchmarkAllReduce(b *testing.B) {
	const ranks, elems = 4, 1 << 18
	workers := start(b, exchange.Plan{Ranks: ranks, Buckets: []int{elems}})
	b.SetBytes(4 * elems)
	b.ResetTimer()
	var group errgroup.Group
	for _, w := range workers {
		group.Go(func() error {
			data := make([]float32, elems)
			for range b.N {
				if err := w.Start(0, data); err != nil {
					return err
				}
				if _, err := w.Wait(b.Context(), 0); err != nil {
					return err
				}
			}
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		b.Fatal(err)
	}
}
