package tcp

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
)

// start runs a server and its workers on the loopback interface. wait waits until the server has ended.
func start(t testing.TB, ranks, elems int) (workers []*Worker, wait func() error) {
	t.Helper()
	s, err := NewServer(ranks, elems)
	if err != nil {
		t.Fatal(err)
	}
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- s.Serve(lis) }()
	for rank := range ranks {
		conn, err := net.Dial("tcp", lis.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		w, err := NewWorker(conn, rank, ranks, elems)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { w.Close() })
		workers = append(workers, w)
	}
	return workers, func() error { return <-done }
}

// TestAllReduce: all workers get the sum, of vectors of any length, round after round, whoever is slow.
func TestAllReduce(t *testing.T) {
	for _, c := range []struct{ ranks, elems, rounds int }{
		{1, 1, 3}, {2, 0, 3}, {3, 1, 5}, {4, part - 1, 4}, {2, part, 4}, {3, part + 1, 4}, {5, 3*part + 7, 6},
	} {
		t.Run(fmt.Sprintf("%d ranks, %d values", c.ranks, c.elems), func(t *testing.T) {
			workers, wait := start(t, c.ranks, c.elems)
			var group errgroup.Group
			for rank, w := range workers {
				group.Go(func() error {
					random := rand.New(rand.NewPCG(1, uint64(rank)))
					for round := range c.rounds {
						data := make([]float32, c.elems)
						for i := range data { // small integers: the order of the sum does not matter
							data[i] = float32((i*(rank+1) + round) % 1000)
						}
						time.Sleep(time.Duration(random.IntN(500)) * time.Microsecond) // the workers compute
						if err := w.AllReduce(t.Context(), data); err != nil {
							return err
						}
						for i, got := range data {
							var want float32
							for r := range c.ranks {
								want += float32((i*(r+1) + round) % 1000)
							}
							if got != want {
								return fmt.Errorf("rank %d, round %d: value %d is %g, want %g", rank, round, i, got, want)
							}
						}
					}
					return w.Close()
				})
			}
			if err := errors.Join(group.Wait(), wait()); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestWorkerDies: a worker that goes away in the middle of a round ends it for all, with an error.
func TestWorkerDies(t *testing.T) {
	workers, wait := start(t, 3, 4*part)
	var group errgroup.Group
	for _, w := range workers[:2] {
		group.Go(func() error { return w.AllReduce(t.Context(), make([]float32, 4*part)) })
	}
	if _, err := workers[2].conn.Write(make([]byte, 100)); err != nil {
		t.Fatal(err)
	}
	workers[2].Close()
	if err := wait(); err == nil || !strings.Contains(err.Error(), "worker 2") {
		t.Errorf("server: %v, want an error of worker 2", err)
	}
	if err := group.Wait(); err == nil {
		t.Error("the other workers have finished")
	}
}

// TestDeadline: an all-reduce that waits for another worker ends with its context.
func TestDeadline(t *testing.T) {
	workers, _ := start(t, 2, 1)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if err := workers[0].AllReduce(ctx, make([]float32, 1)); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v, want %v", err, context.DeadlineExceeded)
	}
}

// TestRefused: workers that do not belong to the job.
func TestRefused(t *testing.T) {
	for want, say := range map[string]hello{
		"no worker, or of another byte order": {0x67676178, 0, 2, 5},
		"rank 2 of 2 with 5 values":           {magic, 2, 2, 5},
		"rank 0 of 3 with 5 values":           {magic, 0, 3, 5},
		"rank 1 of 2 with 6 values":           {magic, 1, 2, 6},
	} {
		s, err := NewServer(2, 5)
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
		if _, err := conn.Write(bytesOf([]hello{say})); err != nil {
			t.Fatal(err)
		}
		if err := s.Serve(lis); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, want %q", say, err, want)
		}
	}
	if _, err := NewServer(0, 1); err == nil {
		t.Error("a job without ranks")
	}
}

// BenchmarkAllReduce is an all-reduce of 1 MiB by four workers over the loopback interface.
func BenchmarkAllReduce(b *testing.B) {
	const ranks, elems = 4, 1 << 18
	workers, _ := start(b, ranks, elems)
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
