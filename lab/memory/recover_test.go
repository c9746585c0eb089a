package memory_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"xagg/api"
	"xagg/lab"
	"xagg/lab/memory"
	"xagg/wire"
	"xagg/worker"
)

// lossy is a job that runs while devices lose their memory.
type lossy struct {
	*testing.T
	lab    *memory.Lab
	client api.ControllerClient
	ranks  int
	depth  int
	lanes  int

	mu    sync.Mutex
	ended []time.Time // by all-reduce: when the last rank had its result
	done  atomic.Int64
}

func newLossy(t *testing.T, servers, depth int, policy *api.Policy, log *slog.Logger) *lossy {
	const ranks, lanes = 3, 5000
	topology, err := lab.Star(ranks, servers)
	if err != nil {
		t.Fatal(err)
	}
	l, err := memory.New(t.Context(), memory.Config{Topology: topology, State: filepath.Join(t.TempDir(), "state"), Log: log})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
	j := &lossy{T: t, lab: l, client: api.NewControllerClient(l.Controller()), ranks: ranks, depth: depth, lanes: lanes}
	createJob(t, l, &api.CreateJobRequest{Name: "job", Ranks: ranks, MaxElems: 2000, Depth: uint32(depth), Policy: policy})
	return j
}

// laneOf is lane i of a rank's vector in an all-reduce.
func laneOf(rank, k, i int) int32 { return int32((rank+1)*(k+3)*1000 + i*(rank+2)) }

// run has all ranks carry out all-reduces until stop is closed, at least a few and all the same number, as many at a
// time as the job's depth, and checks every sum.
func (j *lossy) run(stop <-chan struct{}) error {
	var last atomic.Int64 // the number of all-reduces, once it is known
	last.Store(1 << 40)
	go func() {
		<-stop
		last.Store(j.done.Load() + int64(j.depth) + 3)
	}()
	group, ctx := errgroup.WithContext(j.Context())
	log := slog.New(slog.DiscardHandler)
	if os.Getenv("XAGG_TEST_LOG") != "" {
		log = slog.Default()
	}
	for rank := range j.ranks {
		group.Go(func() (err error) {
			w, err := worker.Join(ctx, j.client, worker.Config{Job: "job", Rank: rank, Link: j.lab.Link(rank, wire.Port)},
				worker.WithTimeout(30*time.Second), worker.WithLogger(log))
			if err != nil {
				return err
			}
			defer w.Close()
			type pending struct {
				*worker.Pending
				k    int
				data []int32
			}
			var under []pending
			finish := func() error {
				p := under[0]
				under = under[1:]
				if _, err := p.Wait(ctx); err != nil {
					return fmt.Errorf("rank %d: %w", rank, err)
				}
				for i, v := range p.data {
					want := int32(0)
					for r := range j.ranks {
						want += laneOf(r, p.k, i)
					}
					if v != want {
						return fmt.Errorf("rank %d, all-reduce %d, lane %d: %d, want %d", rank, p.k, i, v, want)
					}
				}
				j.finished(p.k)
				return nil
			}
			for k := 0; int64(k) < last.Load(); k++ {
				data := make([]int32, 1+(k*977)%j.lanes)
				for i := range data {
					data[i] = laneOf(rank, k, i)
				}
				p, err := w.StartInt32(fmt.Sprint("t", k%(j.depth+1)), data)
				if err != nil {
					return fmt.Errorf("rank %d: %w", rank, err)
				}
				if under = append(under, pending{p, k, data}); len(under) == j.depth {
					if err := finish(); err != nil {
						return err
					}
				}
			}
			for len(under) > 0 {
				if err := finish(); err != nil {
					return err
				}
			}
			return w.Leave(ctx)
		})
	}
	return group.Wait()
}

// finished notes that a rank has the result of an all-reduce.
func (j *lossy) finished(k int) {
	j.mu.Lock()
	defer j.mu.Unlock()
	for len(j.ended) <= k {
		j.ended = append(j.ended, time.Time{})
	}
	j.ended[k] = time.Now()
	j.done.Store(int64(len(j.ended)))
}

// next waits until an all-reduce that was begun after the call has ended, for a minute at most, and returns how long that took.
func (j *lossy) next() (time.Duration, error) {
	ctx, cancel := context.WithTimeout(j.Context(), time.Minute)
	defer cancel()
	began, n := time.Now(), j.done.Load()
	tick := time.NewTicker(200 * time.Microsecond)
	defer tick.Stop()
	for j.done.Load() <= n+int64(j.depth) {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return 0, ctx.Err()
		}
	}
	return time.Since(began), nil
}

// epoch returns the epoch of the job's plan.
func (j *lossy) epoch() uint32 {
	reply, err := j.client.Status(j.Context(), &api.StatusRequest{})
	if err != nil || len(reply.Jobs) == 0 {
		return 0
	}
	return reply.Jobs[0].Epoch
}

// losses are what a device can lose, by name.
func (j *lossy) losses(servers int) map[string]func() error {
	losses := map[string]func() error{
		"switch":     j.lab.LoseSwitch,
		"controller": func() error { return j.lab.RestartController(j.Context()) },
	}
	if servers == 0 {
		return losses
	}
	losses["server"] = func() error { j.lab.LoseServer(0); return nil }
	losses["agent"] = func() error { j.lab.RestartAgent(servers - 1); return nil }
	losses["switch and server"] = func() error { j.lab.LoseServer(servers - 1); return j.lab.LoseSwitch() }
	losses["switch, then server"] = func() error {
		before := j.epoch()
		if err := j.lab.LoseSwitch(); err != nil {
			return err
		}
		tick := time.NewTicker(time.Millisecond)
		defer tick.Stop()
		for j.epoch() == before && j.Context().Err() == nil { // then the recovery has decided, and may be over
			<-tick.C
		}
		j.lab.LoseServer(0)
		return nil
	}
	losses["switch, then controller"] = func() error {
		if err := j.lab.LoseSwitch(); err != nil {
			return err
		}
		return j.lab.RestartController(j.Context())
	}
	return losses
}

// TestLosses: a job goes on, exactly, whatever loses its memory under load: each device alone, in pairs, one during the
// recovery from the other.
func TestLosses(t *testing.T) {
	for _, mode := range []struct {
		name    string
		servers int
		policy  *api.Policy
	}{
		{"switch", 0, &api.Policy{Mode: "switch", Pool: 4}},
		{"server", 2, &api.Policy{Mode: "server", Pool: 4}},
		{"hybrid", 2, &api.Policy{Mode: "hybrid", Steer: []uint32{1}, Pool: 4}},
	} {
		for _, depth := range []int{1, 3} {
			t.Run(fmt.Sprintf("%s, depth %d", mode.name, depth), func(t *testing.T) {
				var log *slog.Logger
				if os.Getenv("XAGG_TEST_LOG") != "" {
					log = slog.Default()
				}
				j := newLossy(t, mode.servers, depth, mode.policy, log)
				stop, done := make(chan struct{}), make(chan error, 1)
				go func() { done <- j.run(stop) }()
				losses := j.losses(mode.servers)
				names := make([]string, 0, len(losses))
				for name := range losses {
					names = append(names, name)
				}
				slices.Sort(names)
				if _, err := j.next(); err != nil {
					t.Fatal(err)
				}
				for range 2 {
					for _, name := range names {
						if err := losses[name](); err != nil {
							t.Fatalf("lose %s: %v", name, err)
						}
						took, err := j.next()
						if err != nil {
							select {
							case err = <-done:
							default:
								reply, _ := j.client.Status(t.Context(), &api.StatusRequest{})
								t.Logf("status: %v", reply)
							}
							t.Fatalf("after the loss of %s: %v", name, err)
						}
						t.Logf("%s: the next all-reduce ended after %v", name, took.Round(100*time.Microsecond))
					}
				}
				close(stop)
				if err := <-done; err != nil {
					t.Fatal(err)
				}
			})
		}
	}
}

// TestLossesDuringChanges: the same while the plan changes all the time.
func TestLossesDuringChanges(t *testing.T) {
	for _, depth := range []int{1, 2} {
		t.Run(fmt.Sprintf("depth %d", depth), func(t *testing.T) {
			var log *slog.Logger
			if os.Getenv("XAGG_TEST_LOG") != "" {
				log = slog.Default()
			}
			j := newLossy(t, 2, depth, &api.Policy{Mode: "hybrid", Steer: []uint32{1}, Pool: 4}, log)
			stop, done := make(chan struct{}), make(chan error, 1)
			go func() { done <- j.run(stop) }()
			steering, endSteering := context.WithCancel(t.Context())
			defer endSteering()
			steered := make(chan error, 1)
			go func() { steered <- j.steer(steering) }()
			if _, err := j.next(); err != nil {
				t.Fatal(err)
			}
			seed := uint64(depth)
			r := rand.New(rand.NewPCG(seed, 7))
			for range 6 {
				var err error
				switch r.IntN(3) {
				case 0:
					err = j.lab.LoseSwitch()
				case 1:
					j.lab.LoseServer(r.IntN(2))
				default:
					j.lab.LoseServer(r.IntN(2))
					err = j.lab.LoseSwitch()
				}
				if err != nil {
					t.Fatal(err)
				}
				if _, err := j.next(); err != nil {
					reply, _ := j.client.Status(t.Context(), &api.StatusRequest{})
					t.Fatalf("seed %d: %v, %v", seed, err, reply)
				}
			}
			endSteering()
			if err := <-steered; err != nil {
				t.Error(err)
			}
			close(stop)
			if err := <-done; err != nil {
				t.Fatal(err)
			}
		})
	}
}

// steer changes the plan as often as it can be.
func (j *lossy) steer(ctx context.Context) error {
	plans := []*api.Policy{{Mode: "switch"}, {Mode: "server"}, {Mode: "hybrid", Steer: []uint32{2}, Servers: []string{"s1"}}, {Mode: "hybrid", Steer: []uint32{0}}}
	for i := 0; ctx.Err() == nil; {
		_, err := j.client.Steer(ctx, &api.SteerRequest{Job: "job", Policy: plans[i%len(plans)]})
		switch code := status.Code(err); {
		case err == nil:
			i++
		case ctx.Err() != nil, code == codes.FailedPrecondition, code == codes.Unavailable, code == codes.Aborted, code == codes.Canceled,
			code == codes.PermissionDenied: // a switch that was lost this moment
		default:
			return errors.Join(errors.New("steer"), err)
		}
		select {
		case <-time.After(2 * time.Millisecond):
		case <-ctx.Done():
		}
	}
	return nil
}
