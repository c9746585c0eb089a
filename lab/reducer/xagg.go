package reducer

import (
	"context"
	"fmt"
	"time"

	"xagg/api"
	"xagg/controller"
	"xagg/lab/loop"
	"xagg/lab/scenario"
	"xagg/policy"
	"xagg/policy/adapt"
	"xagg/worker"
)

// xagg sums in the switch and on the servers of this project.
type xagg struct {
	worker *worker.Worker
	under  []*worker.Pending // by bucket
	keys   []string
	parts  float64
}

// NewXAgg joins a job, which has been created, as cfg says, and waits until all ranks have. The link is closed with the
// reducer.
func NewXAgg(ctx context.Context, client api.ControllerClient, cfg loop.Config, name string, link worker.Link, opts ...worker.Option) (loop.Reducer, error) {
	buckets := cfg.Scenario.Jobs[cfg.Job].Tensors.Buckets()
	w, err := worker.Join(ctx, client, worker.Config{Job: name, Rank: cfg.Rank, Link: link, Plan: plan(cfg.Scenario, buckets)}, opts...)
	if err != nil {
		return nil, err
	}
	if want := cfg.Scenario.Jobs[cfg.Job].Ranks; w.Ranks() != want {
		w.Close()
		return nil, fmt.Errorf("job %q has %d ranks, the scenario's has %d", name, w.Ranks(), want)
	}
	x := &xagg{worker: w, under: make([]*worker.Pending, len(buckets)), parts: float64(w.Ranks())}
	for b := range buckets {
		x.keys = append(x.keys, fmt.Sprintf("bucket %d", b))
	}
	if cfg.Mode.Consistency() == controller.ModeQuorum {
		x.parts = 1 // results are means
	}
	return x, nil
}

// plan spells what all ranks must agree on.
func plan(s *scenario.Scenario, buckets []int) string {
	return fmt.Sprintf("float32 rounds=%d buckets=%v", s.Warmup+s.Rounds, buckets)
}

func (x *xagg) Start(bucket int, values []float32) (err error) {
	x.under[bucket], err = x.worker.Start(x.keys[bucket], values)
	return err
}

func (x *xagg) Wait(ctx context.Context, bucket int) (loop.Outcome, error) {
	info, err := x.under[bucket].Wait(ctx)
	if err != nil {
		return loop.Outcome{}, err
	}
	return loop.Outcome{
		Done: loop.At(x.under[bucket].Ended()), Packets: info.Packets, Resends: info.Resends, Chunks: info.Chunks, Late: info.Late,
		Behind: info.Behind, Parts: x.parts,
	}, nil
}

func (x *xagg) Leave(ctx context.Context) error { return x.worker.Leave(ctx) }

func (x *xagg) Close() error { return x.worker.Close() }

// JobRequest returns what the controller is asked for before a job of a scenario can run in a mode of this project. Who is
// slow, the plan of a mode that follows what is measured has to find out.
func JobRequest(s *scenario.Scenario, job int, m scenario.Mode) *api.CreateJobRequest {
	j, c := &s.Jobs[job], s.Consistency(job, m)
	p := &api.Policy{Rule: policy.RuleStatic, Mode: string(m.Policy()), Pool: uint32(j.Pool)}
	follow := ""
	if rule := m.Rule(); rule != "" {
		a := adapt.DefaultConfig()
		a.Rule = rule
		follow = a.YAML()
	}
	if m.Policy() == policy.ModeHybrid {
		for _, rank := range s.Steered(job) {
			p.Steer = append(p.Steer, uint32(rank))
		}
	}
	return &api.CreateJobRequest{
		Adapt: follow,
		Name:  j.Name, Ranks: uint32(j.Ranks), MaxElems: uint32(s.MaxElems(job, m)), Depth: uint32(j.Depth), Policy: p,
		Consistency: &api.Consistency{
			Mode: string(c.Mode), Quorum: uint32(c.Quorum), WaitUs: uint32(c.Wait / time.Microsecond), Rounds: uint32(c.Rounds),
			Staleness: uint32(c.Staleness),
		},
	}
}
