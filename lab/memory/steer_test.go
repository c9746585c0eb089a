package memory_test

import (
	"context"
	"slices"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"xagg/api"
	"xagg/lab/memory"
	"xagg/worker/grads"
	"xagg/worker/replay"
)

// alternate changes the plan of a running job between two every few milliseconds, until ctx ends.
func alternate(ctx context.Context, client api.ControllerClient, job string, plans [2]*api.Policy) error {
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for i := 0; ; {
		_, err := client.Steer(ctx, &api.SteerRequest{Job: job, Policy: plans[i%2]})
		switch {
		case ctx.Err() != nil:
			return nil
		case err == nil:
			i++
		case status.Code(err) != codes.FailedPrecondition: // the change before is under way, or the job is over
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
	}
}

// measured are the durations of the all-reduces of a job.
type measured struct {
	mu      sync.Mutex
	longest []time.Duration // by all-reduce, over the ranks
	epoch   []uint16
}

func (m *measured) take(_ int, r replay.Reduced) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.longest[r.Index] = max(m.longest[r.Index], r.Info.Duration)
	m.epoch[r.Index] = r.Info.Epoch
	return nil
}

func median(d []time.Duration) time.Duration {
	if len(d) == 0 {
		return 0
	}
	return slices.Sorted(slices.Values(d))[len(d)/2]
}

// BenchmarkChangeOfPlan measures what a change of plan costs the rounds around it: the all-reduces before (the one that
// announced the new plan) and after (the first one under it), beside all others of the same job. The two plans
// differ in the order of two servers only, so that all-reduces take equally long under both.
func BenchmarkChangeOfPlan(b *testing.B) {
	for _, lanes := range []int{256, 1 << 14} {
		b.Run(map[int]string{256: "1chunk", 1 << 14: "64chunks"}[lanes], func(b *testing.B) {
			l := newLab(b, 4, 2)
			plans := [2]*api.Policy{
				{Rule: "static", Mode: "server", Servers: []string{"s1", "s0"}}, {Rule: "static", Mode: "server", Servers: []string{"s0", "s1"}},
			}
			createJob(b, l, &api.CreateJobRequest{Name: "bench", Ranks: 4, MaxElems: uint32(lanes),
				Policy: &api.Policy{Rule: "static", Mode: "server", Servers: []string{"s0", "s1"}, Pool: 16}})
			m := &measured{longest: make([]time.Duration, b.N), epoch: make([]uint16, b.N)}
			steer(b, l, lanes, b.N, plans, m)
			var before, after, other []time.Duration
			for i := 1; i < b.N; i++ {
				switch {
				case m.epoch[i] != m.epoch[i-1]:
					after = append(after, m.longest[i])
				case i+1 < b.N && m.epoch[i+1] != m.epoch[i]:
					before = append(before, m.longest[i])
				default:
					other = append(other, m.longest[i])
				}
			}
			us := func(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e3 }
			b.ReportMetric(float64(len(after)), "changes")
			b.ReportMetric(us(median(before)), "us-before")
			b.ReportMetric(us(median(after)), "us-after")
			b.ReportMetric(us(median(other)), "us-other")
			if o := median(other); o > 0 {
				b.ReportMetric(us(median(before)+median(after)-2*o), "us/change")
				b.ReportMetric(float64(median(after))/float64(o), "after/other")
				b.ReportMetric(float64(median(before))/float64(o), "before/other")
			}
		})
	}
}

// steer runs a job that exists while its plan alternates.
func steer(tb testing.TB, l *memory.Lab, lanes, rounds int, plans [2]*api.Policy, m *measured) {
	ctx, stop := context.WithCancel(tb.Context())
	defer stop()
	done := make(chan error, 1)
	go func() { done <- alternate(ctx, api.NewControllerClient(l.Controller()), "bench", plans) }()
	err := reduce(ctx, l, "bench", grads.Synthetic(lanes, 4, 1), rounds, []int{0, 1, 2, 3}, m.take)
	stop()
	if err := <-done; err != nil {
		tb.Error(err)
	}
	if err != nil {
		tb.Fatal(err)
	}
}
