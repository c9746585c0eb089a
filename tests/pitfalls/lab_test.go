package pitfalls

import (
	"context"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sync/errgroup"

	"xagg/api"
	"xagg/bmv2/fault"
	"xagg/lab"
	"xagg/lab/memory"
	"xagg/wire"
	"xagg/worker"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// bench is a lab in memory with one job.
type bench struct {
	*testing.T
	*memory.Lab
	client api.ControllerClient
	job    string
	ranks  int
}

// policies are the three ways to sum, for jobs of at least three ranks.
var policies = map[string]*api.Policy{
	"switch": {Rule: "static", Mode: "switch"},
	"server": {Rule: "static", Mode: "server"},
	"hybrid": {Rule: "static", Mode: "hybrid", Steer: []uint32{0}},
}

func newBench(t *testing.T, ranks, maxElems int, policy *api.Policy, consistency ...*api.Consistency) *bench {
	t.Helper()
	return newFaultyBench(t, ranks, maxElems, policy, nil, slices.Concat(consistency, []*api.Consistency{nil})[0])
}

func newFaultyBench(t *testing.T, ranks, maxElems int, policy *api.Policy, faults []fault.Spec, consistency *api.Consistency) *bench {
	t.Helper()
	topology, err := lab.Star(ranks, 2)
	if err != nil {
		t.Fatal(err)
	}
	l, err := memory.New(t.Context(), memory.Config{Topology: topology, Faults: faults})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
	b := &bench{T: t, Lab: l, client: api.NewControllerClient(l.Controller()), job: "job", ranks: ranks}
	b.create(maxElems, policy, consistency)
	return b
}

func (b *bench) create(maxElems int, policy *api.Policy, consistency *api.Consistency) {
	b.Helper()
	_, err := b.client.CreateJob(b.Context(), &api.CreateJobRequest{
		Name: b.job, Ranks: uint32(b.ranks), MaxElems: uint32(maxElems), Policy: policy,
		Consistency: consistency,
	})
	if err != nil {
		b.Fatal(err)
	}
}

// join takes a rank's place, with a link that the caller may have wrapped.
func (b *bench) join(ctx context.Context, rank int, wrap func(worker.Link) worker.Link, cfg worker.Config, opts ...worker.Option) (*worker.Worker, error) {
	link := b.Link(rank, wire.Port)
	if wrap != nil {
		link = wrap(link)
	}
	cfg.Job, cfg.Rank, cfg.Link = b.job, rank, link
	return worker.Join(ctx, b.client, cfg, opts...)
}

// run has every rank join, do its work and leave.
func (b *bench) run(work func(ctx context.Context, w *worker.Worker) error, opts ...worker.Option) error {
	group, ctx := errgroup.WithContext(b.Context())
	for rank := range b.ranks {
		group.Go(func() error {
			w, err := b.join(ctx, rank, nil, worker.Config{}, opts...)
			if err != nil {
				return err
			}
			defer w.Close()
			if err := work(ctx, w); err != nil {
				return fmt.Errorf("rank %d: %w", rank, err)
			}
			return w.Leave(ctx)
		})
	}
	return group.Wait()
}

// sumInts all-reduces integers and compares them with the sum.
func sumInts(ctx context.Context, w *worker.Worker, key string, n int, value func(rank, i int) int32) error {
	data := make([]int32, n)
	for i := range data {
		data[i] = value(w.Rank(), i)
	}
	if _, err := w.AllReduceInt32(ctx, key, data); err != nil {
		return err
	}
	for i, got := range data {
		var want int64
		for rank := range w.Ranks() {
			want += int64(value(rank, i))
		}
		if int64(got) != want {
			return fmt.Errorf("%s: value %d is %d, want %d", key, i, got, want)
		}
	}
	return nil
}

// lossy is a link that loses everything it sends while cut is set.
type lossy struct {
	worker.Link
	cut *atomic.Bool
}

func (l *lossy) Send(payloads [][]byte) (int, error) {
	if l.cut.Load() {
		return len(payloads), nil
	}
	return l.Link.Send(payloads)
}

// reached waits until a condition holds.
func (b *bench) reached(what string, ok func() bool) {
	b.Helper()
	for deadline := time.Now().Add(20 * time.Second); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			b.Fatalf("not within 20 s: %s", what)
		}
	}
}
