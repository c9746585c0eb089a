package memory_test

import (
	"context"
	"path/filepath"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sync/errgroup"

	"xagg/api"
	"xagg/lab"
	"xagg/lab/memory"
	"xagg/wire"
	"xagg/worker"
	"xagg/worker/grads"
	"xagg/worker/replay"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func newLab(t testing.TB, workers, servers int) *memory.Lab {
	t.Helper()
	topology, err := lab.Star(workers, servers)
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
	return l
}

func createJob(t testing.TB, l *memory.Lab, req *api.CreateJobRequest) *api.Job {
	t.Helper()
	job, err := api.NewControllerClient(l.Controller()).CreateJob(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	return job
}

// reduce runs all workers of a job that exists, and calls take for every all-reduce.
func reduce(ctx context.Context, l *memory.Lab, job string, set *grads.Set, rounds int, hosts []int, take func(rank int, r replay.Reduced) error) error {
	group, ctx := errgroup.WithContext(ctx)
	for rank, host := range hosts {
		group.Go(func() error {
			return replay.Run(ctx, api.NewControllerClient(l.Controller()), replay.Config{
				Worker: worker.Config{Job: job, Rank: rank, Link: l.Link(host, wire.Port)},
				Set:    set,
				Rounds: rounds,
			}, func(r replay.Reduced) error { return take(rank, r) })
		})
	}
	return group.Wait()
}

// TestSeveralJobs runs jobs of different modes on one switch at the same time, each on hosts of its own.
func TestSeveralJobs(t *testing.T) {
	l := newLab(t, 9, 2)
	jobs := []*api.CreateJobRequest{
		{Name: "a", Ranks: 3, Policy: &api.Policy{Rule: "static", Mode: "switch"}},
		{Name: "b", Ranks: 3, Policy: &api.Policy{Rule: "static", Mode: "server"}},
		{Name: "c", Ranks: 3, Policy: &api.Policy{Rule: "static", Mode: "hybrid", Steer: []uint32{1}, Pool: 4}},
	}
	const lanes, rounds = 5000, 4
	set := grads.Synthetic(lanes, 3, 2)
	group, ctx := errgroup.WithContext(t.Context())
	sums := make([][3][rounds][]int32, len(jobs))
	for i, req := range jobs {
		req.MaxElems = lanes
		job := createJob(t, l, req)
		if want := map[string]int{"a": 0, "b": 2, "c": 2}[req.Name]; len(job.Servers) != want {
			t.Errorf("job %s has %d servers, want %d", req.Name, len(job.Servers), want)
		}
		group.Go(func() error {
			return reduce(ctx, l, req.Name, set, rounds, []int{3 * i, 3*i + 1, 3*i + 2}, func(rank int, r replay.Reduced) error {
				sums[i][rank][r.Index] = append([]int32(nil), r.Sum...)
				return nil
			})
		})
	}
	if err := group.Wait(); err != nil {
		t.Fatal(err)
	}
	for i := range jobs {
		for rank := range 3 {
			for round := range rounds {
				for lane, v := range sums[i][rank][round] {
					if want := sums[0][0][round][lane]; v != want {
						t.Fatalf("job %s, rank %d, all-reduce %d, lane %d: %d, job a has %d", jobs[i].Name, rank, round, lane, v, want)
					}
				}
				if n := len(sums[i][rank][round]); n != lanes {
					t.Fatalf("job %s, rank %d, all-reduce %d has %d lanes, want %d", jobs[i].Name, rank, round, n, lanes)
				}
			}
		}
	}
}

// TestJobAfterJob removes a job and lets the next one use its slots, which still hold the old one's packets.
func TestJobAfterJob(t *testing.T) {
	l := newLab(t, 3, 1)
	client := api.NewControllerClient(l.Controller())
	set := grads.Synthetic(3000, 3, 1)
	for i := range 5 {
		createJob(t, l, &api.CreateJobRequest{Name: "again", Ranks: 3, MaxElems: 3000,
			Policy: &api.Policy{Rule: "static", Mode: "hybrid", Steer: []uint32{uint32(i % 3)}, Pool: 2}})
		err := reduce(t.Context(), l, "again", set, 2, []int{0, 1, 2}, func(int, replay.Reduced) error { return nil })
		if err != nil {
			t.Fatalf("job %d: %v", i, err)
		}
		if _, err := client.RemoveJob(t.Context(), &api.RemoveJobRequest{Name: "again"}); err != nil {
			t.Fatal(err)
		}
	}
}

func TestStartFails(t *testing.T) {
	topology, err := lab.Star(2, 1)
	if err != nil {
		t.Fatal(err)
	}
	_, err = memory.New(t.Context(), memory.Config{Topology: topology, PcapFile: filepath.Join(t.TempDir(), "no", "such", "folder")})
	if err == nil {
		t.Fatal("a capture file in a folder that does not exist gives no error")
	}
}

// BenchmarkAllReduce measures all-reduces of four workers in memory: MB/s of one worker's gradient.
func BenchmarkAllReduce(b *testing.B) {
	const lanes = 1 << 16
	for _, mode := range []string{"switch", "server", "hybrid"} {
		b.Run(mode, func(b *testing.B) {
			l := newLab(b, 4, 1)
			policy := &api.Policy{Rule: "static", Mode: mode}
			if mode == "hybrid" {
				policy.Steer = []uint32{3}
			}
			createJob(b, l, &api.CreateJobRequest{Name: "bench", Ranks: 4, MaxElems: lanes, Policy: policy})
			b.SetBytes(4 * lanes)
			var resends [4]uint64
			start := time.Now()
			err := reduce(b.Context(), l, "bench", grads.Synthetic(lanes, 4, 1), b.N, []int{0, 1, 2, 3}, func(rank int, r replay.Reduced) error {
				resends[rank] += r.Info.Resends
				return nil
			})
			if err != nil {
				b.Fatal(err)
			}
			b.ReportMetric(float64(time.Since(start).Microseconds())/float64(b.N), "us/all-reduce")
			b.ReportMetric(float64(resends[0]+resends[1]+resends[2]+resends[3])/float64(b.N), "resends/all-reduce")
		})
	}
}
