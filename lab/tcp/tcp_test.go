package tcp

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"xagg/lab/exchange"
)

// start runs a job's servers and its workers on the loopback interface. wait waits until the servers have ended.
func start(t testing.TB, plan exchange.Plan, servers int) (workers []*Worker, wait func() error) {
	t.Helper()
	var group errgroup.Group
	var addrs []string
	for i := range servers {
		s, err := NewServer(plan, i, servers)
		if err != nil {
			t.Fatal(err)
		}
		lis, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		group.Go(func() error { return s.Serve(lis) })
		addrs = append(addrs, lis.Addr().String())
	}
	for rank := range plan.Ranks {
		var conns []net.Conn
		for _, addr := range addrs {
			conn, err := net.Dial("tcp", addr)
			if err != nil {
				t.Fatal(err)
			}
			conns = append(conns, conn)
		}
		w, err := NewWorker(conns, rank, plan)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { w.Close() })
		workers = append(workers, w)
	}
	return workers, group.Wait
}

// value is what a rank gives: a small integer, so that the order of the sum does not matter.
func value(rank, round, bucket, i int) float32 {
	return float32((i*(rank+1) + 31*round + 7*bucket) % 1000)
}

// TestAllReduce: all workers get the sums, of buckets of any length, round after round, at any number of servers, whoever
// is slow.
func TestAllReduce(t *testing.T) {
	for _, c := range []struct {
		ranks, servers, rounds int
		buckets                []int
	}{
		{1, 1, 3, []int{1}}, {2, 1, 3, []int{0}}, {3, 1, 5, []int{1}}, {4, 1, 4, []int{stripe - 1}}, {2, 1, 4, []int{stripe}},
		{3, 1, 4, []int{stripe + 1}}, {5, 1, 6, []int{3*stripe + 7}}, {2, 1, 4, []int{3 * readSize}},
		{3, 1, 5, []int{1, 0, grain, 3*stripe + 5, 0, 17}}, {4, 3, 5, []int{5, 100, 40_000, 0, 1, 2, 3, 3 * least, 10_000}},
		{2, 2, 4, []int{100}}, {3, 4, 4, []int{0, 0}},
	} {
		t.Run(fmt.Sprintf("%d ranks, %d servers, buckets %v", c.ranks, c.servers, c.buckets), func(t *testing.T) {
			workers, wait := start(t, exchange.Plan{Ranks: c.ranks, Buckets: c.buckets}, c.servers)
			var group errgroup.Group
			for rank, w := range workers {
				group.Go(func() error { return train(t.Context(), w, rank, c.ranks, c.rounds, c.buckets) })
			}
			if err := errors.Join(group.Wait(), wait()); err != nil {
				t.Error(err)
			}
		})
	}
}

// train all-reduces rounds of buckets, all of a round at the same time, and leaves.
func train(ctx context.Context, w *Worker, rank, ranks, rounds int, buckets []int) error {
	random := rand.New(rand.NewPCG(1, uint64(rank)))
	data := make([][]float32, len(buckets))
	for round := range rounds {
		for b, n := range buckets {
			data[b] = make([]float32, n)
			for i := range data[b] {
				data[b][i] = value(rank, round, b, i)
			}
			time.Sleep(time.Duration(random.IntN(300)) * time.Microsecond) // the workers compute
			if err := w.Start(b, data[b]); err != nil {
				return err
			}
		}
		for b := range buckets {
			before := time.Now()
			if at, err := w.Wait(ctx, b); err != nil {
				return err
			} else if at.After(time.Now()) || at.Before(before.Add(-time.Minute)) {
				return fmt.Errorf("bucket %d was there at %v, it is %v", b, at, time.Now())
			}
			for i, got := range data[b] {
				var want float32
				for r := range ranks {
					want += value(r, round, b, i)
				}
				if got != want {
					return fmt.Errorf("rank %d, round %d, bucket %d: value %d is %g, want %g", rank, round, b, i, got, want)
				}
			}
		}
	}
	return w.Close()
}

// TestStreams: results of early values come while late ones are not sent, and the next bucket does not wait for them.
func TestStreams(t *testing.T) {
	const n = 2 * grain
	workers, _ := start(t, exchange.Plan{Ranks: 2, Buckets: []int{n, 5}}, 1)
	first, whole := make([]float32, n), make([]float32, n)
	for i := range whole {
		first[i], whole[i] = 1, 2
	}
	if err := workers[0].Start(0, first); err != nil {
		t.Fatal(err)
	}
	// The other worker's first half, by its connection.
	other := workers[1].peers[0]
	if _, err := other.Write(exchange.Bytes(whole[:n/2])); err != nil {
		t.Fatal(err)
	}
	got := make([]float32, n/2)
	for have := 0; have < 2*n; {
		m, err := other.Read(exchange.Bytes(got)[have:])
		if err != nil {
			t.Fatal(err)
		}
		have += m
	}
	if slices.ContainsFunc(got, func(x float32) bool { return x != 3 }) {
		t.Error("wrong sums")
	}
}

// TestShare: servers have every value of every bucket once, and nearly the same number.
func TestShare(t *testing.T) {
	plan := exchange.Plan{Ranks: 1, Buckets: []int{0, 1, 1023, 4096, 100_003, 5000, 5, 6, 7}}
	for servers := 1; servers < 6; servers++ {
		have := make([]int, len(plan.Buckets))
		for server := range servers {
			for b, share := range share(plan, server, servers) {
				if share[0] < share[1] && share[0] != have[b] {
					t.Errorf("%d servers: bucket %d goes on at %d instead of %d", servers, b, share[0], have[b])
				}
				have[b] += share[1] - share[0]
			}
		}
		if !slices.Equal(have, plan.Buckets) {
			t.Errorf("%d servers sum %v, want %v", servers, have, plan.Buckets)
		}
	}
}

// TestWorkerDies: a worker that goes away in the middle of a round ends it for all, with an error.
func TestWorkerDies(t *testing.T) {
	workers, wait := start(t, exchange.Plan{Ranks: 3, Buckets: []int{4 * stripe}}, 1)
	var group errgroup.Group
	for _, w := range workers[:2] {
		group.Go(func() error { return w.AllReduce(t.Context(), make([]float32, 4*stripe)) })
	}
	if _, err := workers[2].peers[0].Write(make([]byte, 100)); err != nil {
		t.Fatal(err)
	}
	workers[2].Close()
	if err := wait(); err == nil || !strings.Contains(err.Error(), "worker 2") {
		t.Errorf("server: %v, want an error of worker 2", err)
	}
	if err := group.Wait(); err == nil || !strings.Contains(err.Error(), "TCP aggregator at 127.0.0.1:") {
		t.Errorf("other workers: %v, want an error that names the aggregator", err)
	}
}

// TestServerDies: a server that goes away ends the all-reduce at all servers.
func TestServerDies(t *testing.T) {
	workers, wait := start(t, exchange.Plan{Ranks: 2, Buckets: []int{4 * least}}, 2)
	if err := workers[0].Start(0, make([]float32, 4*least)); err != nil {
		t.Fatal(err)
	}
	workers[1].peers[1].Close() // ends the second server
	if _, err := workers[0].Wait(t.Context(), 0); err == nil {
		t.Error("an all-reduce without a server")
	}
	workers[1].Close()
	if err := wait(); err == nil {
		t.Error("servers have ended well")
	}
}

// TestClose: a server that is closed ends, whether its workers are there or not.
func TestClose(t *testing.T) {
	for there := range 3 {
		s, err := NewServer(exchange.Plan{Ranks: 2, Buckets: []int{5}}, 0, 1)
		if err != nil {
			t.Fatal(err)
		}
		lis, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		served := make(chan error, 1)
		go func() { served <- s.Serve(lis) }()
		for rank := range there {
			conn, err := net.Dial("tcp", lis.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			w, err := NewWorker([]net.Conn{conn}, rank, s.plan)
			if err != nil {
				t.Fatal(err)
			}
			defer w.Close()
			if err := w.Start(0, make([]float32, 5)); err != nil {
				t.Fatal(err)
			}
			if there == 2 && rank == 1 { // both are welcome when there is a sum
				if _, err := w.Wait(t.Context(), 0); err != nil {
					t.Fatal(err)
				}
			}
		}
		s.Close()
		if err := <-served; !errors.Is(err, net.ErrClosed) {
			t.Errorf("with %d workers: %v, want %v", there, err, net.ErrClosed)
		}
	}
	s, err := NewServer(exchange.Plan{Ranks: 2, Buckets: []int{5}}, 0, 1)
	if err != nil {
		t.Fatal(err)
	}
	s.Close()
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Serve(lis); !errors.Is(err, net.ErrClosed) {
		t.Errorf("closed before: %v, want %v", err, net.ErrClosed)
	}
}

// TestAhead: a worker that does not wait for results ends the job.
func TestAhead(t *testing.T) {
	workers, wait := start(t, exchange.Plan{Ranks: 2, Buckets: []int{10}}, 1)
	if _, err := workers[0].peers[0].Write(make([]byte, 44)); err != nil {
		t.Fatal(err)
	}
	if err := wait(); !errors.Is(err, errAhead) {
		t.Errorf("%v, want %v", err, errAhead)
	}
}

// TestDeadline: an all-reduce that waits for another worker ends with its context.
func TestDeadline(t *testing.T) {
	workers, _ := start(t, exchange.Plan{Ranks: 2, Buckets: []int{1}}, 1)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if err := workers[0].AllReduce(ctx, make([]float32, 1)); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v, want %v", err, context.DeadlineExceeded)
	}
}

// TestOrder: buckets are started in their order, and one at a time.
func TestOrder(t *testing.T) {
	workers, _ := start(t, exchange.Plan{Ranks: 2, Buckets: []int{1, 2}}, 1)
	w := workers[0]
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

// TestRefused: workers that do not belong to the job, and jobs that cannot be.
func TestRefused(t *testing.T) {
	plan := exchange.Plan{Ranks: 2, Buckets: []int{5}}
	for want, say := range map[string]exchange.Hello{
		"rank 2 of 2, but":    exchange.NewHello(plan, 2, 0, 1),
		"for another process": exchange.NewHello(plan, 0, 1, 2),
	} {
		s, err := NewServer(plan, 0, 1)
		if err != nil {
			t.Fatal(err)
		}
		lis, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		conn, err := net.Dial("tcp", lis.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if _, err := conn.Write(exchange.Bytes([]exchange.Hello{say})); err != nil {
			t.Fatal(err)
		}
		if err := s.Serve(lis); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, want %q", say, err, want)
		}
	}
	for _, c := range []struct {
		plan            exchange.Plan
		server, servers int
	}{{exchange.Plan{}, 0, 1}, {plan, 1, 1}, {plan, -1, 1}} {
		if _, err := NewServer(c.plan, c.server, c.servers); err == nil {
			t.Errorf("made %+v", c)
		}
	}
}

// BenchmarkAllReduce is an all-reduce of 1 MiB by four workers over the loopback interface.
func BenchmarkAllReduce(b *testing.B) {
	const ranks, elems = 4, 1 << 18
	workers, _ := start(b, exchange.Plan{Ranks: ranks, Buckets: []int{elems}}, 1)
	b.SetBytes(4 * elems)
	b.ResetTimer()
	var group errgroup.Group
	for _, w := range workers {
		group.Go(func() error {
			data := make([]float32, elems)
			for range b.N {
				if err := w.AllReduce(b.Context(), data); err != nil {
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
