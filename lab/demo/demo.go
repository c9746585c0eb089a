// Package demo is the project's main job on real input: workers all-reduce gradient vectors in the modes switch, server
// and hybrid, on a lab of network namespaces or in one process, and every integer that they receive is compared with a
// plain loop's sum.
package demo

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"

	"xagg/api"
	"xagg/lab"
	"xagg/policy"
	"xagg/wire"
	"xagg/wire/check"
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
	SwitchEngine       = "engine"
	SwitchSimpleSwitch = "simple_switch_grpc"
)

// Modes are the modes of the demo in the order in which they run.
var Modes = []string{string(policy.ModeSwitch), string(policy.ModeServer), string(policy.ModeHybrid)}

// Options say what a demo is to do.
type Options struct {
	Modes     []string              // some of Modes, and ModeSteered
	Lab       string                // LabNetns or LabMemory
	Switch    string                // SwitchEngine or SwitchSimpleSwitch; the latter in namespaces only
	Workers   int                   // 1..64
	Set       *grads.Set            // of at least as many ranks
	Grads     string                // how worker processes name Set: see `xagg worker --grads`
	Rounds    int                   // all-reduces of a run; 0: what grads.Set.Schedule makes of it
	Straggler map[int]time.Duration // by rank: how much later it comes to every all-reduce
	Steer     []int                 // ranks that hybrid steers to the server; none: the stragglers, or else the last rank
	Seed      uint64                // of the plans that ModeSteered draws
	Pcap      string                // file that all frames of all switch ports are written to and that is checked then
	Timeout   time.Duration         // of one all-reduce
	Progress  func(format string, args ...any)
	Log       *slog.Logger
}

// UsageError is an error of options that do not fit each other.
type UsageError struct{ problem string }

func (e *UsageError) Error() string { return e.problem }

func usagef(format string, args ...any) error {
	return &UsageError{fmt.Sprintf(format, args...)}
}

// MissingError is an error of a machine that lacks something.
type MissingError struct {
	What string // the program
	Cure string // what to do
}

func (e *MissingError) Error() string {
	return fmt.Sprintf("%s is not on the PATH: %s", e.What, e.Cure)
}

// validate checks the options and fills in what was left open.
func (o *Options) validate() error {
	if o.Set.Ranks() < o.Workers || o.Workers < 1 {
		return usagef("%d workers, but the gradients have %d ranks", o.Workers, o.Set.Ranks())
	}
	if o.Workers > wire.MaxRanks {
		return usagef("%d workers: a job has at most %d", o.Workers, wire.MaxRanks)
	}
	if o.Rounds < 0 {
		return usagef("%d rounds", o.Rounds)
	}
	for _, mode := range o.Modes {
		if !slices.Contains(Modes, mode) && mode != ModeSteered {
			return usagef("mode %q: want %q, %q, %q or %q", mode, Modes[0], Modes[1], Modes[2], ModeSteered)
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
			return usagef("straggler %d: delay %v", rank, delay)
		}
	}
	switch {
	case o.Lab != LabNetns && o.Lab != LabMemory:
		return usagef("lab %q: want %q or %q", o.Lab, LabNetns, LabMemory)
	case o.Switch != SwitchEngine && o.Switch != SwitchSimpleSwitch:
		return usagef("switch %q: want %q or %q", o.Switch, SwitchEngine, SwitchSimpleSwitch)
	case o.Switch == SwitchSimpleSwitch && o.Lab == LabMemory:
		return usagef("the lab in memory has the embedded engine only; %s needs --lab %s", o.Switch, LabNetns)
	}
	if len(o.Steer) == 0 {
		for rank := range o.Straggler {
			o.Steer = append(o.Steer, rank)
		}
		slices.Sort(o.Steer)
		if len(o.Steer) == 0 || o.Workers-len(o.Steer) < 2 {
			o.Steer = []int{o.Workers - 1}
		}
	}
	return nil
}

// reduced is what a worker holds after one all-reduce.
type reduced struct {
	rank int
	sums []int32 // the integers; valid during the call that is given them
	line replay.Line
}

// testbed is where the demo's jobs run.
type testbed interface {
	// controller returns the connection to the controller's API.
	controller() grpc.ClientConnInterface
	// run runs all workers of a job that exists, until they have left. take is called for every all-reduce of every
	// rank, of one rank in order, from several goroutines; its error ends the run.
	run(ctx context.Context, job string, take func(reduced) error) error
	// close removes the testbed.
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
		run, v, err := runMode(ctx, bed, &opts, mode)
		if err != nil {
			return nil, fmt.Errorf("mode %s: %w", mode, err)
		}
		if first == nil {
			first = v
		}
		if run.Exact && !slices.Equal(v.digests, first.digests) {
			run.Exact, run.Error = false, fmt.Sprintf("its integers are not those of mode %s", report.Runs[0].Mode)
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

// runMode runs one job.
func runMode(ctx context.Context, bed testbed, opts *Options, mode string) (Result, *verifier, error) {
	fail := func(err error) (Result, *verifier, error) { return Result{}, nil, err }
	client := api.NewControllerClient(bed.controller())
	before, err := client.Status(ctx, &api.StatusRequest{})
	if err != nil {
		return fail(fmt.Errorf("ask the controller for its status: %w", err))
	}
	req := &api.CreateJobRequest{
		Name:     "demo-" + mode,
		Ranks:    uint32(opts.Workers),
		MaxElems: uint32(max(opts.Set.MaxLen(), 1)),
		Policy:   &api.Policy{Rule: policy.RuleStatic, Mode: mode},
	}
	if mode == string(policy.ModeHybrid) {
		for _, rank := range opts.Steer {
			req.Policy.Steer = append(req.Policy.Steer, uint32(rank))
		}
	}
	if mode == ModeSteered {
		req.Policy = &api.Policy{Rule: policy.RuleStatic, Mode: string(policy.ModeSwitch), Pool: uint32(policy.SteerablePool(opts.Workers))}
	}
	job, err := client.CreateJob(ctx, req)
	if err != nil {
		return fail(fmt.Errorf("create job: %w", err))
	}
	opts.Progress("%s: job %d: %s", mode, job.Id, job.Explanation)

	steps := opts.Set.Schedule(opts.Rounds)
	v := newVerifier(opts.Set, opts.Workers, steps)
	run := Result{
		Mode: mode, Switch: opts.Switch, Lab: opts.Lab, Workers: opts.Workers, Servers: len(job.Servers),
		Allreduces: len(steps), Lanes: opts.Set.MaxLen(), Chunks: chunks(opts.Set.MaxLen()), Exact: true,
	}
	var mu sync.Mutex
	slowest, finished := make([]float64, len(steps)), make([]int, len(steps))
	plans := epochs{of: make([]uint16, len(steps))}
	steering := steerer{
		client: client, job: job.Name, ranks: opts.Workers, random: rand.New(rand.NewPCG(opts.Seed, 0)), progress: opts.Progress,
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
	err = bed.run(ctx, job.Name, func(r reduced) error {
		index := r.line.Index
		wrong := errors.Join(v.check(r.rank, index, r.line.Exponent, r.sums), plans.agree(index, r.rank, r.line.Epoch))
		mu.Lock()
		defer mu.Unlock()
		if wrong != nil && run.Exact {
			run.Exact, run.Error = false, wrong.Error()
		}
		run.Packets += r.line.Packets
		run.Resends += r.line.Resends
		run.Saturated += r.line.Saturated
		if index >= len(steps) {
			return nil // check has said so
		}
		slowest[index] = max(slowest[index], r.line.Seconds)
		if finished[index]++; finished[index] == opts.Workers {
			opts.Progress("%s: all-reduce %d of %d: %s, %v", mode, index+1, len(steps), r.line.Step, seconds(slowest[index]))
		}
		return nil
	})
	stop()
	if err := errors.Join(err, group.Wait()); err != nil {
		return fail(err)
	}
	if err := v.complete(); err != nil && run.Exact {
		run.Exact, run.Error = false, err.Error()
	}
	if mode == ModeSteered {
		run.Changes = plans.changes()
		if err := steering.leftOver(ctx); err != nil {
			return fail(err)
		}
	}
	after, err := client.Status(ctx, &api.StatusRequest{})
	if err != nil {
		return fail(fmt.Errorf("ask the controller for its status: %w", err))
	}
	if _, err := client.RemoveJob(ctx, &api.RemoveJobRequest{Name: job.Name}); err != nil {
		return fail(fmt.Errorf("remove job: %w", err))
	}
	run.Partials = sent(after, wire.TypePartial) - sent(before, wire.TypePartial)
	if len(job.Servers) > 0 && len(after.Servers) > 0 {
		run.XDPMode = after.Servers[0].GetInfo().GetMode()
	}
	run.SecondsPerAllreduce = median(slowest)
	run.MaxAbsError, run.RelL2Error = v.maxAbs, v.relL2
	return run, v, nil
}

// sent returns how many packets of a type the switch has sent.
func sent(status *api.StatusReply, t wire.Type) uint64 {
	return status.GetSwitch().GetSent()[t.String()]
}

// chunks returns the number of chunks of a vector.
func chunks(lanes int) int { return (lanes + wire.MaxLanes - 1) / wire.MaxLanes }

func median(x []float64) float64 {
	s := slices.Sorted(slices.Values(x))
	if len(s) == 0 {
		return 0
	}
	return (s[(len(s)-1)/2] + s[len(s)/2]) / 2
}

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
