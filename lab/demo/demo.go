// Package demo is the project's main job on real input: workers all-reduce gradient vectors in the modes switch, server
// and hybrid, on a lab of network namespaces or in one process, and every integer that they receive is compared with a
// plain loop's sum.
package demo

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/status"

	"xagg/api"
	"xagg/bmv2/fault"
	"xagg/controller"
	"xagg/internal/stats"
	"xagg/lab"
	"xagg/lab/testbed"
	"xagg/policy"
	"xagg/wire"
	"xagg/wire/check"
	"xagg/worker"
	"xagg/worker/grads"
	"xagg/worker/replay"
)

// Kinds of labs.
const (
	LabNetns  = "netns"
	LabMemory = "memory"
)

// Switches.
const (
	SwitchEngine       = testbed.SwitchEngine
	SwitchSimpleSwitch = testbed.SwitchSimpleSwitch
)

// Modes are the modes of the demo in the order in which they run.
var Modes = []string{string(policy.ModeSwitch), string(policy.ModeServer), string(policy.ModeHybrid)}

// Options say what a demo is to do.
type Options struct {
	Modes     []string              // some of Modes, ModeSteered and ModeTCP
	Lab       string                // LabNetns or LabMemory
	Switch    string                // SwitchEngine or SwitchSimpleSwitch; the latter in namespaces only
	Workers   int                   // 1..64
	Set       *grads.Set            // of at least as many ranks
	Grads     string                // how worker processes name Set: see `xagg worker --grads`
	Rounds    int                   // vectors of a run; 0: what grads.Set.Schedule makes of it
	Buckets   int                   // that each vector is cut into, all-reduced at the same time; 0 = 1
	Depth     int                   // rounds of a job that may be under way; 0 = 1
	Straggler map[int]time.Duration // by rank: how much later it comes to every all-reduce
	Steer     []int                 // ranks that hybrid steers to the server; none: the stragglers, or else the last rank
	Faults    []fault.Spec          // what happens on the links of the switch's ports
	Kills     []Kill                // what dies while each job runs; in namespaces only
	// Consistency says what results are; the zero value is sync. Rounds 0 are as many as let a straggler of the run fall
	// behind by all its rounds, as far as servers can keep them.
	Consistency controller.Consistency
	// NoChecksum has the workers send without UDP checksums.
	NoChecksum bool
	Seed       uint64 // of the plans that ModeSteered draws
	// SimpleSwitch is the program of SwitchSimpleSwitch; empty: the one on the PATH.
	SimpleSwitch string
	Pcap         string        // file that all frames of all switch ports are written to and that is checked then
	Timeout      time.Duration // of one all-reduce
	Progress     func(format string, args ...any)
	Log          *slog.Logger
}

// UsageError is an error of options that do not fit each other.
type UsageError struct{ problem string }

func (e *UsageError) Error() string { return e.problem }

func usagef(format string, args ...any) error {
	return &UsageError{fmt.Sprintf(format, args...)}
}

// validate checks the options and fills in what was left open.
func (o *Options) validate() error {
	if o.Set.Ranks() < o.Workers || o.Workers < 1 {
		return usagef("%d workers, but the gradients have %d ranks", o.Workers, o.Set.Ranks())
	}
	if o.Workers > wire.MaxRanks {
		return usagef("%d workers: a job has at most %d", o.Workers, wire.MaxRanks)
	}
	if o.Rounds < 0 || o.Rounds > grads.MaxRounds {
		return usagef("%d rounds: want 1 to %d, or 0 for each step %d times", o.Rounds, grads.MaxRounds, grads.RepeatsPerStep)
	}
	o.Buckets, o.Depth = cmp.Or(o.Buckets, 1), cmp.Or(o.Depth, 1)
	if o.Buckets < 0 || o.Buckets > replay.MaxBuckets {
		return usagef("%d buckets: want 1 to %d", o.Buckets, replay.MaxBuckets)
	}
	if o.Depth < 0 || o.Depth > controller.MaxDepth {
		return usagef("depth %d: want 1 to %d rounds under way", o.Depth, controller.MaxDepth)
	}
	if o.Timeout <= 0 {
		return usagef("timeout %v: want a positive duration", o.Timeout)
	}
	for _, mode := range o.Modes {
		if !slices.Contains(Modes, mode) && mode != ModeSteered && mode != ModeTCP {
			return usagef("mode %q: want %q, %q, %q, %q or %q", mode, Modes[0], Modes[1], Modes[2], ModeSteered, ModeTCP)
		}
		if mode == string(policy.ModeHybrid) && o.Workers < 3 {
			return usagef("mode hybrid with %d workers: it needs a rank to steer and two for the switch to sum", o.Workers)
		}
	}
	for rank, delay := range o.Straggler {
		if rank < 0 || rank >= o.Workers {
			return usagef("straggler %d: ranks are 0 to %d", rank, o.Workers-1)
		}
		if delay < 0 {
			return usagef("straggler %d: delay %v: want a duration that is not negative", rank, delay)
		}
	}
	switch {
	case o.Lab != LabNetns && o.Lab != LabMemory:
		return usagef("lab %q: want %q or %q", o.Lab, LabNetns, LabMemory)
	case o.Switch != SwitchEngine && o.Switch != SwitchSimpleSwitch:
		return usagef("switch %q: want %q or %q", o.Switch, SwitchEngine, SwitchSimpleSwitch)
	case slices.Contains(o.Modes, ModeTCP) && o.Lab == LabMemory:
		return usagef("the lab in memory has no TCP; mode %s needs --lab %s", ModeTCP, LabNetns)
	case o.Switch == SwitchSimpleSwitch && o.Lab == LabMemory:
		return usagef("the lab in memory has the embedded engine only; %s needs --lab %s", o.Switch, LabNetns)
	}
	if err := o.checkConsistency(); err != nil {
		return err
	}
	if err := o.checkKills(); err != nil {
		return err
	}
	if err := fault.Check(o.Faults); err != nil {
		return &UsageError{err.Error()}
	}
	if o.Pcap != "" && slices.ContainsFunc(o.Faults, func(f fault.Spec) bool { return f.Corrupt > 0 }) {
		return usagef("a capture that is to be checked and faults that corrupt packets do not go together: leave out one of them")
	}
	if len(o.Steer) == 0 {
		o.Steer = o.slowest()
	}
	return nil
}

// chunks returns the number of chunks of the longest vectors.
func (o *Options) chunks() (n int) {
	for b := range o.Buckets {
		from, to := replay.Bucket(o.Set.MaxLen(), o.Buckets, b)
		n += chunks(to - from)
	}
	return n
}

// slowest returns the stragglers, the slowest first and at most as many as leave two ranks for the switch to sum; the
// last rank if there are none.
func (o *Options) slowest() []int {
	late := func(a, b int) int { return cmp.Or(cmp.Compare(o.Straggler[b], o.Straggler[a]), cmp.Compare(a, b)) }
	ranks := slices.SortedFunc(maps.Keys(o.Straggler), late)
	if len(ranks) == 0 {
		ranks = []int{o.Workers - 1}
	}
	return ranks[:min(len(ranks), max(o.Workers-2, 1))]
}

// reduced is what a worker holds after one all-reduce.
type reduced struct {
	rank int
	life int     // of its process: how often it had died
	sums []int32 // the integers; valid during the call that is given them
	// masks are the contributors by chunk, valid likewise; nil where the job has all of them in every chunk.
	masks []uint64
	line  replay.Line
}

// stage is where the demo's jobs run.
type stage interface {
	// controller returns the connection to the controller's API.
	controller() grpc.ClientConnInterface
	// run runs all workers of a job that exists, until they have left. take is called for every all-reduce of every
	// rank, of one rank in order, from several goroutines; its error ends the run.
	run(ctx context.Context, job string, take func(reduced) error) error
	// reduceTCP sums the vectors of the given all-reduces over TCP. take is called like run's.
	reduceTCP(ctx context.Context, steps []int, take func(summed) error) error
	// restart kills parts of the stage, calls killed and starts them again.
	restart(ctx context.Context, killed func(), parts []string) error
	// ready waits until the controller says that all parts are.
	ready(ctx context.Context) error
	// faults returns what Options.Faults have done so far.
	faults() []fault.PathCounts
	// close removes it.
	close() error
}

// Run runs the demo. An inexact result is no error but a report that says so.
func Run(ctx context.Context, opts Options) (_ *Report, err error) {
	if err := opts.validate(); err != nil {
		return nil, err
	}
	servers := 1
	if slices.Contains(opts.Modes, ModeSteered) {
		servers = steeredServers
	}
	topology, err := lab.Star(opts.Workers, servers)
	if err != nil {
		return nil, err
	}
	if slices.Contains(opts.Modes, ModeTCP) {
		topology.AddOther()
	}
	for _, f := range opts.Faults {
		if !linked(topology, f.Port) {
			return nil, usagef("fault %q: there is nothing at port %d; workers are at ports 1 to %d, the server is at port %d",
				f, f.Port, opts.Workers, topology.Servers[0].Port)
		}
	}
	// What is wrong with a vector should be said before anything is started.
	if err := opts.Set.Check(opts.Workers, opts.Rounds); err != nil {
		return nil, err
	}
	opts.Progress("starting the lab: %s, %d workers, one switch (%s), servers: %d", opts.Lab, opts.Workers, opts.Switch, servers)
	start := startNetns
	if opts.Lab == LabMemory {
		start = startMemory
	}
	bed, err := start(ctx, topology, &opts)
	if err != nil {
		return nil, err
	}
	defer func() {
		if bed != nil {
			err = errors.Join(err, bed.close())
		}
	}()

	report := &Report{SchemaVersion: SchemaVersion, Exact: true}
	var first *verifier
	for _, mode := range opts.Modes {
		if mode == ModeTCP {
			run, err := runTCP(ctx, bed, &opts)
			if err != nil {
				return nil, fmt.Errorf("mode %s: %w", mode, err)
			}
			report.Exact = report.Exact && run.Exact
			report.Runs = append(report.Runs, run)
			continue
		}
		run, v, err := runMode(ctx, bed, &opts, mode)
		if err != nil {
			return nil, fmt.Errorf("mode %s: %w", mode, err)
		}
		if first == nil {
			first = v
		}
		// With a quorum it is chance who was in time.
		if run.Exact && !opts.isQuorum() && !slices.Equal(v.digests, first.digests) {
			run.Exact, run.Error = false, "its integers are not those of the first mode"
		}
		report.Exact = report.Exact && run.Exact
		report.Runs = append(report.Runs, run)
	}
	if opts.Pcap == "" {
		return report, nil
	}
	err, bed = bed.close(), nil // the capture is complete when the switch has ended
	if err != nil {
		return nil, err
	}
	opts.Progress("checking the capture %s", opts.Pcap)
	report.Capture, err = checkCapture(opts.Pcap)
	if err != nil {
		return nil, err
	}
	report.Exact = report.Exact && report.Capture.OK
	return report, nil
}

// abortGrace is how long the workers of a job have to end by themselves when one of them has failed. The controller
// tells them within moments, and what they say then belongs to the picture.
const abortGrace = 2 * time.Second

// eachRank runs work for all ranks and returns what they failed of: first and perhaps only the cause, then what that
// meant for the others. ctx ends for them a while after the first has failed.
func eachRank(ctx context.Context, ranks int, work func(ctx context.Context, rank int) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	errs := make([]error, ranks)
	var group sync.WaitGroup
	var once sync.Once
	for rank := range ranks {
		group.Go(func() {
			if err := work(ctx, rank); err != nil {
				errs[rank] = fmt.Errorf("worker %d: %w", rank, err)
				once.Do(func() { time.AfterFunc(abortGrace, cancel) })
			}
		})
	}
	group.Wait()
	slices.SortStableFunc(errs, func(a, b error) int { return cmp.Compare(consequence(a), consequence(b)) })
	return errors.Join(errs...)
}

// consequence is 1 for an error that another worker's failure has brought about, and else 0.
func consequence(err error) int {
	if _, ok := errors.AsType[*worker.AbortError](err); ok || errors.Is(err, context.Canceled) {
		return 1
	}
	return 0
}

// linked reports whether a fault's port has a host.
func linked(t lab.Topology, port uint16) bool {
	at := func(h lab.Host) bool { return port == 0 || h.Port == port }
	return slices.ContainsFunc(slices.Concat(t.Workers, t.Servers, t.Others), at)
}

// runMode runs one job.
func runMode(ctx context.Context, bed stage, opts *Options, mode string) (Result, *verifier, error) {
	fail := func(err error) (Result, *verifier, error) { return Result{}, nil, err }
	client := api.NewControllerClient(bed.controller())
	before, err := client.Status(ctx, &api.StatusRequest{})
	if err != nil {
		return fail(fmt.Errorf("ask the controller for its status: %w", err))
	}
	faults := bed.faults()
	job, err := client.CreateJob(ctx, opts.request(mode))
	if err != nil {
		return fail(fmt.Errorf("create job: %s", status.Convert(err).Message()))
	}
	opts.Progress("%s: job %d: %s", mode, job.Id, job.Explanation)

	steps := opts.Set.Schedule(opts.Rounds)
	v := newVerifier(opts.Set, opts.Workers, steps, opts.Buckets, opts.quorum())
	verify := v.take
	var l *ledger
	if opts.isAsync() {
		l = newLedger(opts)
		verify = l.take
	}
	var later *witness
	if opts.killsWorkers() {
		later = &witness{}
		verify = later.take
	}
	vectors := len(replay.Vectors(opts.Set, opts.Rounds, opts.settle()))
	run := Result{
		Mode: mode, Switch: opts.Switch, Lab: opts.Lab, Workers: opts.Workers, Servers: len(job.Servers),
		Consistency: string(opts.Consistency.Mode),
		Allreduces:  len(steps), Buckets: opts.Buckets, Depth: opts.Depth, Lanes: opts.Set.MaxLen(), Chunks: opts.chunks(), Exact: true,
	}
	var mu sync.Mutex
	slowest, finished := make([]float64, vectors), make([]int, vectors)
	plans := newEpochs(vectors * opts.Buckets)
	steering := steerer{
		client: client, job: job.Name, ranks: opts.Workers, modes: ModesOf(opts.Consistency.Mode), least: opts.Consistency.Quorum,
		quorums: map[uint16]int{uint16(job.Epoch): int(job.Quorum)}, random: rand.New(rand.NewPCG(opts.Seed, 0)), progress: opts.Progress,
	}
	for _, s := range before.Servers {
		steering.servers = append(steering.servers, s.Name)
	}
	var group errgroup.Group
	steer, stop := context.WithCancel(ctx)
	defer stop()
	if mode == ModeSteered {
		group.Go(func() error { return steering.run(steer) })
	}
	kills := newKiller(opts, mode, bed.restart)
	group.Go(func() error { return kills.run(ctx) })
	err = bed.run(ctx, job.Name, func(r reduced) error {
		if i, b := r.line.Index, r.line.Bucket; i < 0 || i >= vectors || b < 0 || b >= opts.Buckets {
			return fmt.Errorf("rank %d reports vector %d, bucket %d; there are %d vectors with %d buckets", r.rank, i, b, vectors, opts.Buckets)
		}
		number := r.line.Index*opts.Buckets + r.line.Bucket
		wrong := verify(number, r)
		if err := plans.agree(number, r.rank, r.line.Epoch, r.masks); len(opts.Kills) == 0 {
			wrong = errors.Join(wrong, err) // what a rank lacks when parts die it gets under another epoch than those who have it
		}
		kills.took(r.rank, number, r.line.Began, r.line.Ended)
		mu.Lock()
		defer mu.Unlock()
		if wrong != nil && run.Exact {
			run.Exact, run.Error = false, wrong.Error()
		}
		run.Packets += r.line.Packets
		run.Resends += r.line.Resends
		run.Saturated += r.line.Saturated
		run.Late += r.line.Late
		index := r.line.Index
		slowest[index] = max(slowest[index], r.line.Seconds) // the buckets of a vector begin together
		if finished[index]++; finished[index] == opts.Workers*opts.Buckets {
			opts.Progress("%s: all-reduce %d of %d: %s, %v", mode, index+1, vectors, r.line.Step, seconds(slowest[index]))
		}
		return nil
	})
	stop()
	kills.ended()
	if err := errors.Join(err, group.Wait()); err != nil {
		return fail(err)
	}
	if len(opts.Kills) > 0 {
		if run.Kills, err = kills.killed(); err != nil {
			return fail(err)
		}
		if err := bed.ready(ctx); err != nil {
			return fail(err)
		}
	}
	complete := v.complete
	switch {
	case later != nil:
		complete = func() error { return later.testify(v) }
	case l != nil:
		complete = l.complete
	}
	if err := complete(); err != nil && run.Exact {
		run.Exact, run.Error = false, err.Error()
	}
	if mode == ModeSteered {
		run.Changes = plans.changes()
		if err := plans.enough(steering.quorums); err != nil && run.Exact {
			run.Exact, run.Error = false, err.Error()
		}
		if err := steering.leftOver(ctx); err != nil {
			return fail(err)
		}
	}
	after, err := client.Status(ctx, &api.StatusRequest{})
	if err != nil {
		return fail(fmt.Errorf("ask the controller for its status: %w", err))
	}
	if _, err := client.RemoveJob(ctx, &api.RemoveJobRequest{Name: job.Name}); err != nil {
		return fail(fmt.Errorf("remove job: %s", status.Convert(err).Message()))
	}
	run.Faults = since(faults, bed.faults())
	run.counted(before, after)
	if len(job.Servers) > 0 && len(after.Servers) > 0 {
		run.XDPMode = after.Servers[0].GetInfo().GetMode()
	}
	run.SecondsPerAllreduce, run.AllreduceSeconds = stats.Median(slowest), slowest
	run.MaxAbsError, run.RelL2Error = v.maxAbs, v.relL2
	if l != nil {
		run.MaxAbsError, run.RelL2Error = l.maxAbs, l.relL2
		run.MostAdditions, run.MeanAdditions = l.additions()
	} else {
		run.LeastContributors, run.MeanContributors = v.contributors()
	}
	return run, v, nil
}

// request returns the job of a mode.
func (o *Options) request(mode string) *api.CreateJobRequest {
	req := &api.CreateJobRequest{
		Name:        "demo-" + mode,
		Ranks:       uint32(o.Workers),
		MaxElems:    uint32(o.maxElems()),
		Depth:       uint32(o.Depth),
		Consistency: o.consistency(),
		Policy:      &api.Policy{Rule: policy.RuleStatic, Mode: mode},
	}
	if mode == string(policy.ModeHybrid) {
		for _, rank := range o.Steer {
			req.Policy.Steer = append(req.Policy.Steer, uint32(rank))
		}
	}
	if mode == ModeSteered {
		req.Policy = &api.Policy{Rule: policy.RuleStatic, Mode: ModesOf(o.Consistency.Mode)[0], Pool: uint32(policy.SteerablePool(o.Workers))}
	}
	return req
}

// counted fills in what switch and servers have counted of the run.
func (run *Result) counted(before, after *api.StatusReply) {
	run.Reasons = map[string]map[string]uint64{"switch": risen(before.GetSwitch().GetReasons(), after.GetSwitch().GetReasons())}
	for i, server := range after.GetServers() {
		run.Reasons[server.GetName()] = risen(before.GetServers()[i].GetReasons(), server.GetReasons())
	}
	run.Partials = rise(sent(before, wire.TypePartial), sent(after, wire.TypePartial))
}

// risen returns what counters have counted since before, or since whoever counts has died, without zeros.
func risen(before, after map[string]uint64) map[string]uint64 {
	counts := map[string]uint64{}
	for name, n := range after {
		if n = rise(before[name], n); n != 0 {
			counts[name] = n
		}
	}
	return counts
}

func rise(before, after uint64) uint64 {
	if after < before {
		return after
	}
	return after - before
}

// since returns what faults have done since before.
func since(before, after []fault.PathCounts) []fault.PathCounts {
	for i := range after {
		if i < len(before) {
			after[i].Sub(before[i].Counts)
		}
	}
	return after
}

// sent returns how many packets of a type the switch has sent.
func sent(status *api.StatusReply, t wire.Type) uint64 {
	return status.GetSwitch().GetSent()[t.String()]
}

// chunks returns the number of chunks of so many lanes.
func chunks(lanes int) int { return (lanes + wire.MaxLanes - 1) / wire.MaxLanes }

// checkCapture checks the demo's own capture.
func checkCapture(name string) (*Capture, error) {
	file, err := os.Open(name)
	if err != nil {
		return nil, fmt.Errorf("check capture: %w", err)
	}
	defer file.Close()
	report, err := check.Files([]check.Input{{Name: name, Reader: file}}, check.Options{})
	if err != nil {
		return nil, fmt.Errorf("check capture: %w", err)
	}
	c := &Capture{File: name, Packets: report.Packets, OK: report.Verdict == check.OK}
	if !c.OK {
		var text strings.Builder
		if err := report.WriteText(&text); err != nil {
			return nil, err
		}
		c.Error = text.String()
	}
	return c, nil
}
