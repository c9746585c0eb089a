package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"xagg/controller"
	"xagg/lab/demo"
	"xagg/lab/netns"
	"xagg/policy"
)

func newDemoCommand(env *env) *cobra.Command {
	var (
		opts       demo.Options
		modes      []string
		stragglers []string
		output     string
		kills      []string
		faults     faultFlags
	)
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "All-reduce real gradients in all modes and compare every integer with a plain sum",
		Long: `All-reduce gradient vectors over four workers, a P4 switch and an XDP aggregation server, in three modes:

  switch   the switch sums all ranks
  server   all ranks are steered to the server
  hybrid   the switch sums some ranks, the stragglers go to the server, which combines both

and on request

  steered  the plan changes at random while the job runs, with two servers
  tcp      a parameter server over TCP sums instead, at a host of its own on the same switch: what to compare with

and compare the integers that every worker receives with a plain loop's sum of the quantized inputs. Exit code 0 only
if all are equal, and the same in all modes. With a quorum each chunk's integers are compared with the sum over the ranks
in its mask of what these had to give, what was left out of their vectors before included; in an async job all that a worker was told with the sum of all
contributions.

With --kill parts of the lab die (kill -9) in the middle of each job and are started again at once: the report says how long it took until
every worker had the result of an all-reduce that was begun after it, and every integer is checked as ever.

With root the hosts are network namespaces with veth links, and the server's program is XDP in the kernel. Without,
everything runs in one process.`,
		Example: `  xagg demo
  xagg demo --mode hybrid --straggler 3=20ms --pcap demo.pcapng
  xagg demo --grads synthetic:1000000 --workers 8 --rounds 5 -o json
  xagg demo --mode steered --rounds 50
  xagg demo --depth 4 --buckets 8
  xagg demo --consistency quorum --quorum 3 --wait 5ms --straggler 3=40ms
  xagg demo --mode steered --consistency quorum --quorum 2 --wait 5ms --straggler 3=10ms --rounds 50
  xagg demo --consistency async --staleness 2 --straggler 3=20ms
  xagg demo --switch simple_switch_grpc
  xagg demo --kill switch@3 --rounds 20
  xagg demo --kill server@5 --kill controller@5 --rounds 20 --pcap recovered.pcapng
  xagg demo --consistency quorum --quorum 3 --wait 5ms --kill worker2@5 --rounds 150
  xagg demo --fault drop=5%,reorder=5% --fault corrupt=1%,port=65`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if output != "text" && output != "json" {
				return usagef("--output %q: want text or json", output)
			}
			if err := prepareDemo(env, cmd, &opts, modes, stragglers, kills); err != nil {
				return demoError(cmd.Context(), err)
			}
			var err error
			if opts.Faults, err = faults.specs(); err != nil {
				return err
			}
			opts.Log = env.log
			if !cmd.Flags().Changed("log-level") {
				// The progress says what goes on; what switch and controller log is for whoever asks.
				opts.Log, _ = newLogger(env.stderr, "warn", cmd.Flag("log-format").Value.String())
			}
			report, err := demo.Run(cmd.Context(), opts)
			if err != nil {
				return demoError(cmd.Context(), err)
			}
			write := report.WriteTable
			if output == "json" {
				write = report.WriteJSON
			}
			if err := write(env.stdout); err != nil {
				return err
			}
			if !report.Exact {
				return &exitError{exitFailure, errors.New("the demo is not exact")}
			}
			return nil
		},
	}
	f := cmd.Flags()
	f.StringSliceVar(&modes, "mode", nil, "modes to run: switch, server, hybrid, steered, tcp (default the first three, as far as the workers allow)")
	f.StringVar(&opts.Lab, "lab", "", "netns (hosts in network namespaces, XDP; needs root) or memory (one process); default: what the privileges allow")
	f.StringVar(&opts.Switch, "switch", demo.SwitchEngine, "engine (embedded) or simple_switch_grpc (must be installed)")
	f.StringVar(&opts.SimpleSwitch, "simple-switch", "", "path of simple_switch_grpc (default: the one on the PATH)")
	f.StringVar(&opts.Grads, "grads", "", "directory with *rank{R}.npy, or synthetic:N for N lanes (default: the embedded gradients)")
	f.IntVar(&opts.Workers, "workers", 0, "number of workers (default: the ranks of the gradients; 4 for synthetic ones)")
	f.IntVar(&opts.Rounds, "rounds", 0, "vectors to all-reduce per mode (default: each step three times)")
	f.IntVar(&opts.Depth, "depth", 1, "rounds of a job that may be under way")
	f.IntVar(&opts.Buckets, "buckets", 1, "pieces that each vector is cut into, all-reduced at the same time as far as the depth goes")
	f.StringVar((*string)(&opts.Consistency.Mode), "consistency", string(controller.ModeSync),
		"what a result is: sync (the sum of all ranks), quorum (of at least --quorum) or async (what was added meanwhile)")
	f.IntVar(&opts.Consistency.Quorum, "quorum", 0, "ranks that are enough for a result (quorum)")
	f.DurationVar(&opts.Consistency.Wait, "wait", 0, "how long a chunk is kept open for more ranks, from its first arrival (quorum)")
	f.IntVar(&opts.Consistency.Rounds, "keep-rounds", 0, "rounds that servers keep for stragglers, a power of two (quorum) (default: all of the run, up to 256)")
	f.IntVar(&opts.Consistency.Staleness, "staleness", 0, "contributions that a rank may be ahead of the slowest (async)")
	f.StringArrayVar(&stragglers, "straggler", nil, "RANK=DELAY: this rank comes later to every all-reduce, and hybrid steers it")
	f.StringArrayVar(&kills, "kill", nil, "PART@ROUND: kill -9 of switch, server, controller or, with a quorum, a worker as worker2, and its start, when so many all-reduces are done "+
		"(several of one round die together; needs root)")
	faults.add(f)
	f.BoolVar(&opts.NoChecksum, "no-checksum", false, "workers send without UDP checksums; damaged packets then show in the results' tags")
	f.Uint64Var(&opts.Seed, "seed", 1, "of the plans that mode steered draws")
	f.StringVar(&opts.Pcap, "pcap", "", "write all frames of all switch ports to this file, and check it")
	f.DurationVar(&opts.Timeout, "timeout", 60*time.Second, "of one all-reduce")
	f.StringVarP(&output, "output", "o", "text", "text or json")
	return cmd
}

// demoError says what an error of the demo means on a command line.
func demoError(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return errInterrupted
	}
	if _, ok := errors.AsType[*demo.UsageError](err); ok {
		return &exitError{exitUsage, err}
	}
	return err
}

// prepareDemo turns the command line into options.
func prepareDemo(env *env, cmd *cobra.Command, opts *demo.Options, modes, stragglers, kills []string) error {
	if cmd.Flags().Changed("workers") && opts.Workers < 1 {
		return usagef("--workers %d: want at least 1", opts.Workers)
	}
	if cmd.Flags().Changed("buckets") && opts.Buckets < 1 {
		return usagef("--buckets %d: want at least 1", opts.Buckets)
	}
	if cmd.Flags().Changed("depth") && opts.Depth < 1 {
		return usagef("--depth %d: want at least 1", opts.Depth)
	}
	var err error
	if opts.Workers == 0 && strings.HasPrefix(opts.Grads, "synthetic:") {
		opts.Workers = defaultWorkers
	}
	opts.Set, err = openGradients(opts.Grads)
	if err != nil {
		return err
	}
	if opts.Workers == 0 {
		opts.Workers = opts.Set.Ranks()
	}

	opts.Straggler = map[int]time.Duration{}
	for _, s := range stragglers {
		rank, delay, err := parseStraggler(s)
		if err != nil {
			return err
		}
		if _, twice := opts.Straggler[rank]; twice {
			return usagef("--straggler: rank %d is there twice", rank)
		}
		opts.Straggler[rank] = delay
	}

	for _, s := range kills {
		kill, err := demo.ParseKill(s)
		if err != nil {
			return err
		}
		opts.Kills = append(opts.Kills, kill)
	}

	opts.Progress = func(format string, args ...any) { fmt.Fprintf(env.stderr, format+"\n", args...) }
	opts.Modes = modes
	if len(modes) == 0 {
		opts.Modes = demo.ModesOf(opts.Consistency.Mode)
		if last := len(opts.Modes) - 1; opts.Workers < 3 && opts.Modes[last] == string(policy.ModeHybrid) {
			opts.Progress("mode hybrid is left out: it needs three workers")
			opts.Modes = opts.Modes[:last]
		}
	}
	if opts.Lab == "" {
		opts.Lab = demo.LabNetns
		switch err := netns.Available(); {
		case err != nil && len(opts.Kills) > 0:
			return fmt.Errorf("--kill needs parts that are processes of their own, each in a network namespace: %w", err)
		case err != nil && opts.Switch == demo.SwitchEngine:
			opts.Progress("%v: running in one process instead (--lab memory), with the aggregation server in user space", err)
			opts.Lab = demo.LabMemory
		}
	}
	return nil
}

// defaultWorkers is the number of workers of synthetic gradients.
const defaultWorkers = 4

// parseStraggler reads RANK=DELAY.
func parseStraggler(s string) (rank int, delay time.Duration, err error) {
	left, right, ok := strings.Cut(s, "=")
	if ok {
		if rank, err = strconv.Atoi(left); err == nil {
			if delay, err = time.ParseDuration(right); err == nil {
				return rank, delay, nil
			}
		}
	}
	return 0, 0, usagef("--straggler %q: want RANK=DELAY, as in 3=20ms", s)
}
