package train

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/status"

	"xagg/api"
	"xagg/controller"
	"xagg/lab"
	"xagg/lab/scenario"
	"xagg/lab/testbed"
	"xagg/policy"
	"xagg/wire"
)

// Kinds of labs.
const (
	LabNetns  = "netns"
	LabMemory = "memory"
)

// DefaultModes are the modes that are compared unless others are asked for.
var DefaultModes = []scenario.Mode{"tcp", "switch", "server", "hybrid", "server/quorum", "hybrid/quorum", "server/async"}

// DefaultStaleness is what async modes are compared with.
var DefaultStaleness = []int{0, 2, 8}

// Options say what [Run] is to do.
type Options struct {
	Plan                         // of every run, but for its mode, staleness and seed
	Modes        []scenario.Mode // no ring, gloo or mpi
	Stalenesses  []int           // of async modes: a run for each
	Seeds        int             // how many, from Plan.Seed on
	Quorum       int             // ranks that are enough in quorum modes; 0 = all but one
	Wait         time.Duration   // how long they wait for more
	Target       float64         // loss on held-out samples; 0: what the single process has after two thirds of its steps
	Lab          string          // LabNetns or LabMemory
	Switch       string          // see testbed.Config
	SimpleSwitch string          //
	Command      []string        // for the report
	Log          *slog.Logger
	Progress     func(format string, args ...any)
}

// UsageError is an error of options that do not fit each other.
type UsageError struct{ problem string }

func (e *UsageError) Error() string { return e.problem }

func usagef(format string, args ...any) error { return &UsageError{fmt.Sprintf(format, args...)} }

// Limits of the options.
const (
	MaxRounds  = 100_000
	MaxBatch   = 4096
	MaxCompute = time.Second
	maxFactor  = 100
	minRanks   = 3 // hybrid sums two in the switch and one in a server
)

// validate checks the options and fills in what was left open.
func (o *Options) validate() error {
	if o.Quorum == 0 {
		o.Quorum = o.Ranks - 1
	}
	c := &o.Compute
	switch {
	case o.Ranks < minRanks || o.Ranks > wire.MaxRanks:
		return usagef("%d workers: want %d to %d", o.Ranks, minRanks, wire.MaxRanks)
	case o.Rounds < 2 || o.Rounds > MaxRounds:
		return usagef("%d rounds: want 2 to %d", o.Rounds, MaxRounds)
	case o.Batch < 1 || o.Batch > MaxBatch:
		return usagef("batch of %d: want 1 to %d samples", o.Batch, MaxBatch)
	case !(o.Rate > 0 && o.Rate <= 100):
		return usagef("rate of learning %g: want a positive number up to 100", o.Rate)
	case !(o.Skew >= 0 && o.Skew <= 1):
		return usagef("skew %g: want 0 (all ranks see all classes alike) to 1 (each its own only)", o.Skew)
	case o.Every < 1 || o.Every > o.Rounds:
		return usagef("a checkpoint every %d rounds: want 1 to %d", o.Every, o.Rounds)
	case o.Seeds < 1:
		return usagef("%d seeds: want at least 1", o.Seeds)
	case o.Target < 0:
		return usagef("target loss %g: want a positive number, or 0 for one of the single process", o.Target)
	case c.Mean < 0 || c.Mean > MaxCompute:
		return usagef("computation of %v: want 0s to %v", c.Mean, MaxCompute)
	case !(c.Jitter >= 0 && c.Jitter <= 2):
		return usagef("jitter %g: want 0 to 2, the sigma of a lognormal factor", c.Jitter)
	case c.Moving != nil && (c.Moving.Every < 1 || !(c.Moving.Factor >= 1 && c.Moving.Factor <= maxFactor)):
		return usagef("a straggler that moves every %d rounds and is slower by %g: want at least 1 round, and a factor of 1 to %d",
			c.Moving.Every, c.Moving.Factor, maxFactor)
	case o.Quorum < 1 || o.Quorum > o.Ranks:
		return usagef("quorum %d: want 1 to %d", o.Quorum, o.Ranks)
	case o.Wait < 0 || o.Wait > policy.MaxWait || o.Wait%time.Microsecond != 0:
		return usagef("wait %v: want whole microseconds from 0s to %v", o.Wait, policy.MaxWait)
	case o.Lab != LabNetns && o.Lab != LabMemory:
		return usagef("lab %q: want %q or %q", o.Lab, LabNetns, LabMemory)
	case o.Switch != testbed.SwitchEngine && o.Switch != testbed.SwitchSimpleSwitch:
		return usagef("switch %q: want %q or %q", o.Switch, testbed.SwitchEngine, testbed.SwitchSimpleSwitch)
	case o.Switch != testbed.SwitchEngine && o.Lab == LabMemory:
		return usagef("the lab in memory has the embedded engine only; %s needs --lab %s", o.Switch, LabNetns)
	}
	for rank, factor := range c.Slow {
		if rank < 0 || rank >= o.Ranks || !(factor > 0 && factor <= maxFactor) {
			return usagef("rank %d computes slower by %g: ranks are 0 to %d, and factors up to %d", rank, factor, o.Ranks-1, maxFactor)
		}
	}
	for _, mode := range o.Modes {
		if r := mode.Reducer(); r != scenario.XAgg && r != scenario.ParameterServer {
			return usagef("mode %s: training runs through this project's modes and %s", mode, scenario.ParameterServer)
		}
	}
	for _, s := range o.Stalenesses {
		if s < 0 || s > controller.MaxStaleness {
			return usagef("staleness %d: want 0 to %d", s, controller.MaxStaleness)
		}
	}
	return nil
}

// steer returns the ranks that hybrid modes have a server sum: those that are slower, at most as many as leave two for the
// switch, and the last one if there are none.
func (o *Options) steer() (ranks []uint32) {
	for rank := range o.Ranks {
		if o.Compute.Slow[rank] > 1 && len(ranks) < o.Ranks-2 {
			ranks = append(ranks, uint32(rank))
		}
	}
	if ranks == nil {
		ranks = []uint32{uint32(o.Ranks - 1)}
	}
	return ranks
}

// job returns the request for a run's job.
func (o *Options) job(p *Plan) *api.CreateJobRequest {
	elems := Parameters
	consistency := &api.Consistency{Mode: string(p.Mode.Consistency())}
	switch p.Mode.Consistency() {
	case controller.ModeQuorum:
		consistency.Quorum, consistency.WaitUs = uint32(o.Quorum), uint32(o.Wait.Microseconds())
		// A rank that is slower for good catches up again and again, see pace; so much it may miss meanwhile.
		consistency.Rounds = controller.MaxRounds
	case controller.ModeAsync:
		consistency.Staleness = uint32(p.Staleness)
		elems = (elems + wire.MaxLanes - 1) / wire.MaxLanes * wire.MaxLanes
	}
	req := &api.CreateJobRequest{
		Name: "train", Ranks: uint32(p.Ranks), MaxElems: uint32(elems), Consistency: consistency,
		Policy: &api.Policy{Rule: policy.RuleStatic, Mode: string(p.Mode.Policy())},
	}
	if p.Mode.Policy() == policy.ModeHybrid {
		req.Policy.Steer = o.steer()
	}
	return req
}

// plans returns the runs of a seed, in an order that is rotated from seed to seed.
func (o *Options) plans(seed int) (plans []Plan) {
	for _, mode := range o.Modes {
		stalenesses := []int{0}
		if mode.Consistency() == controller.ModeAsync {
			stalenesses = o.Stalenesses
		}
		for _, s := range stalenesses {
			p := o.Plan
			p.Mode, p.Staleness, p.Seed = mode, s, o.Plan.Seed+uint64(seed)
			plans = append(plans, p)
		}
	}
	first := 0
	if len(plans) > 0 {
		first = seed % len(plans)
	}
	return slices.Concat(plans[first:], plans[:first])
}

// What a run takes beside computation, by experience on two cores: this is for estimates alone.
const (
	perRun  = 500 * time.Millisecond // to start and end its workers, and to evaluate what came of it
	perStep = 2 * time.Millisecond   // all-reduce
	perLab  = 3 * time.Second
)

// Estimate says about how long the runs will take.
func (o *Options) Estimate() time.Duration {
	d := perLab
	for seed := range o.Seeds {
		for _, p := range o.plans(seed) {
			d += perRun + time.Duration(p.Rounds)*perStep + p.pace()
		}
	}
	return d
}

// pace returns about how long the computations of a run take of it: a quorum does not wait for its slowest rank, the others do, even
// async ones in the end.
func (p *Plan) pace() (d time.Duration) {
	for i := range p.Rounds {
		var all []time.Duration
		for rank := range p.Ranks {
			all = append(all, p.compute(rank, i))
		}
		slices.Sort(all)
		if p.Mode.Consistency() == controller.ModeQuorum {
			d += all[len(all)-2]
		} else {
			d += all[len(all)-1]
		}
	}
	return d
}

// bed is where runs take place.
type bed interface {
	controller() grpc.ClientConnInterface
	// work runs all ranks of a plan; where the plan needs a job, it exists. take is called with the steps of every rank, of one rank in order, from
	// several goroutines.
	work(ctx context.Context, p Plan, job string, take func(rank int, s Step) error) error
	xdpMode(ctx context.Context) string
	close() error
}

// Run makes a lab and runs everything in it. When ctx ends before, the report has what was finished, and says so.
func Run(ctx context.Context, opts Options) (_ *Report, err error) {
	if err := opts.validate(); err != nil {
		return nil, err
	}
	estimate := opts.Estimate()
	runs := opts.Seeds * len(opts.plans(0))
	opts.Progress("%d runs of %d steps on %d ranks; this takes about %v", runs, opts.Rounds, opts.Ranks, estimate.Round(time.Second))
	var refs []*reference // by seed
	for i := range opts.Seeds {
		p := opts.Plan
		p.Seed += uint64(i)
		ref, err := newReference(p)
		if err != nil {
			return nil, err
		}
		refs = append(refs, ref)
	}
	report := newReport(&opts)
	began := time.Now()
	b, err := startLab(ctx, &opts)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, b.close()) }()
	report.Header.XDPMode = b.xdpMode(ctx)
	done := 0
	for i := range opts.Seeds {
		if ctx.Err() != nil {
			break
		}
		ref := refs[i]
		target := cmp.Or(opts.Target, ref.target())
		report.add(ref.result(), target)
		for _, p := range opts.plans(i) {
			run, err := runOne(ctx, b, &opts, p, ref)
			if ctx.Err() != nil {
				break
			}
			done++
			left := time.Duration(float64(time.Since(began)) / float64(done) * float64(runs-done))
			came := fmt.Sprintf("%.2f s, loss %.3f, accuracy %.1f %%", run.Seconds, run.Loss, 100*run.Accuracy)
			if err != nil {
				run.Failed = err.Error()
				came = "failed: " + run.Failed
			}
			report.add(run, target)
			opts.Progress("%s, seed %d: %s; run %d of %d, about %v left", p.Name(), p.Seed, came, done, runs, left.Round(time.Second))
		}
	}
	report.Complete = done == runs
	report.summarize()
	return report, nil
}

// startLab starts the lab that is asked for.
func startLab(ctx context.Context, opts *Options) (bed, error) {
	topology, err := lab.Star(opts.Ranks, 1)
	if err != nil {
		return nil, err
	}
	topology.AddOther() // the parameter server's
	if opts.Lab == LabMemory {
		return startMemory(ctx, topology, opts)
	}
	return startNetns(ctx, topology, opts)
}

// runOne runs a plan and evaluates it.
func runOne(ctx context.Context, b bed, opts *Options, p Plan, ref *reference) (Result, error) {
	steps, err := workers(ctx, b, opts, p)
	if err != nil {
		return Result{Mode: p.Mode, Name: p.Name(), Staleness: p.Staleness, Seed: p.Seed}, err
	}
	return ref.evaluate(p, steps)
}

// workers runs the workers of a plan and returns their steps by rank.
func workers(ctx context.Context, b bed, opts *Options, p Plan) (_ [][]Step, err error) {
	var name string
	if p.Mode.Reducer() == scenario.XAgg {
		client := api.NewControllerClient(b.controller())
		job, err := client.CreateJob(ctx, opts.job(&p))
		if err != nil {
			return nil, fmt.Errorf("create job: %s", status.Convert(err).Message())
		}
		name = job.Name
		defer func() {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
			defer cancel()
			if _, e := client.RemoveJob(ctx, &api.RemoveJobRequest{Name: name}); e != nil && err == nil {
				err = fmt.Errorf("remove job: %s", status.Convert(e).Message())
			}
		}()
	}
	steps := make([][]Step, p.Ranks)
	var mu sync.Mutex
	err = b.work(ctx, p, name, func(rank int, s Step) error {
		mu.Lock()
		defer mu.Unlock()
		if want := len(steps[rank]); s.Step != want {
			return fmt.Errorf("rank %d reports step %d, want %d", rank, s.Step, want)
		}
		steps[rank] = append(steps[rank], s)
		return nil
	})
	if err != nil {
		return nil, err
	}
	for rank := range steps {
		if n := len(steps[rank]); n != p.Rounds+1 {
			return nil, fmt.Errorf("rank %d reported %d steps of %d", rank, n, p.Rounds)
		}
	}
	return steps, nil
}

// eachRank runs work for all ranks, and returns the first error, which ends the others.
func eachRank(ctx context.Context, ranks int, work func(ctx context.Context, rank int) error) error {
	group, ctx := errgroup.WithContext(ctx)
	for rank := range ranks {
		group.Go(func() error {
			if err := work(ctx, rank); err != nil {
				return fmt.Errorf("worker %d: %w", rank, err)
			}
			return nil
		})
	}
	return group.Wait()
}
