package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"xagg/api"
	"xagg/internal/endpoint"
	"xagg/lab/netns"
	"xagg/lab/scenario"
	"xagg/lab/testbed"
	"xagg/lab/train"
	"xagg/wire"
	"xagg/worker"
)

func newBenchTrainCommand(env *env) *cobra.Command {
	var (
		opts        train.Options
		modes, slow []string
		moving      string
		output      string
	)
	cmd := &cobra.Command{
		Use:   "train",
		Short: "Train a small network through every mode while a rank is slow, beside a single process",
		Long: `Train a small network data-parallel, with real gradients, through every mode of aggregation, while one rank computes
slower than the others, and beside it in a single process that sums the ranks' gradients itself. Says after how many
steps, and after how long, each mode reaches a loss, and what it comes to in the end, over several seeds.

A rank really computes its gradient, and then sleeps until the time that its computation is to take is over.

With root the hosts are network namespaces with veth links, and every rank is a process. Without, everything runs in one
process.`,
		Example: `  xagg bench train
  xagg bench train --slow 3=4 --skew 1 --seeds 5 -o json > train.json
  xagg bench train --slow 3=1 --moving 20=4 --staleness 0,4,16 --modes switch,server/async`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			if output != "text" && output != "json" {
				return usagef("--output %q: want text or json", output)
			}
			for _, name := range modes {
				mode, err := scenario.ParseMode(name)
				if err != nil {
					return usagef("--modes: %w", err)
				}
				opts.Modes = append(opts.Modes, mode)
			}
			opts.Compute.Slow = map[int]float64{}
			for _, s := range slow {
				rank, factor, err := parseFactor(s)
				if err != nil {
					return usagef("--slow %q: want RANK=FACTOR, as in 3=2.5", s)
				}
				opts.Compute.Slow[rank] = factor
			}
			if moving != "" {
				every, factor, err := parseFactor(moving)
				if err != nil {
					return usagef("--moving %q: want ROUNDS=FACTOR, as in 20=4", moving)
				}
				opts.Compute.Moving = &scenario.Moving{Every: every, Factor: factor}
			}
			opts.Command = append([]string{"xagg"}, os.Args[min(1, len(os.Args)):]...)
			opts.Progress = func(format string, args ...any) { fmt.Fprintf(env.stderr, format+"\n", args...) }
			opts.Log, _ = newLogger(env.stderr, "warn", cmd.Flag("log-format").Value.String())
			if opts.Lab == "" {
				opts.Lab = train.LabNetns
				if err := netns.Available(); err != nil {
					opts.Progress("%v: running in one process instead (--lab memory), with the aggregation server in user space", err)
					opts.Lab = train.LabMemory
				}
			}
			report, err := train.Run(cmd.Context(), opts)
			if report == nil || len(report.Modes) == 0 {
				return trainError(cmd.Context(), err)
			}
			write := report.WriteTable
			if output == "json" {
				write = report.WriteJSON
			}
			if err := errors.Join(write(env.stdout), err); err != nil {
				return err
			}
			switch {
			case !report.Complete:
				return errInterrupted
			case report.Failed():
				return &exitError{exitFailure, errors.New("some runs have failed")}
			}
			return nil
		},
	}
	f := cmd.Flags()
	var names []string
	for _, m := range train.DefaultModes {
		names = append(names, string(m))
	}
	f.StringSliceVar(&modes, "modes", names, "modes to train through: tcp, switch, server, hybrid, server/quorum, hybrid/quorum, server/async")
	f.IntSliceVar(&opts.Stalenesses, "staleness", train.DefaultStaleness, "contributions that a rank may be ahead of the slowest: a run of async modes for each")
	f.IntVar(&opts.Ranks, "workers", 4, "number of workers")
	f.IntVar(&opts.Rounds, "rounds", 120, "steps of every rank")
	f.IntVar(&opts.Batch, "batch", 32, "samples of a rank's gradient")
	f.Float64Var(&opts.Rate, "rate", 0.2, "of learning; a gradient counts rate / workers")
	f.Float64Var(&opts.Skew, "skew", 0.5, "share of a rank's samples that are from classes of its own, 0 to 1")
	f.IntVar(&opts.Every, "every", 4, "steps from one point of the curves to the next")
	f.DurationVar(&opts.Compute.Mean, "compute", 6*time.Millisecond, "how long a rank computes in a step")
	f.StringArrayVar(&slow, "slow", []string{"3=2.5"}, "RANK=FACTOR: this rank computes longer; hybrid modes have a server sum it")
	f.Float64Var(&opts.Compute.Jitter, "jitter", 0.1, "sigma of a lognormal factor of every computation")
	f.StringVar(&moving, "moving", "", "ROUNDS=FACTOR: another rank, at random, computes longer after every so many rounds")
	f.IntVar(&opts.Quorum, "quorum", 0, "ranks that are enough in quorum modes (default all but one)")
	f.DurationVar(&opts.Wait, "wait", 2*time.Millisecond, "how long quorum modes wait for more ranks, from a chunk's first arrival")
	f.Float64Var(&opts.Target, "target", 0, "loss on held-out samples to reach (default what the single process has after two thirds of its steps)")
	f.IntVar(&opts.Seeds, "seeds", 4, "number of seeds: everything is repeated with each")
	f.Uint64Var(&opts.Seed, "seed", 1, "the first of them: of task, first parameters, batches and compute times")
	f.StringVar(&opts.Lab, "lab", "", "netns (a process per rank, in network namespaces; needs root) or memory (one process); default: what the privileges allow")
	f.StringVar(&opts.Switch, "switch", testbed.SwitchEngine, "engine (embedded) or simple_switch_grpc (must be installed; netns only)")
	f.StringVarP(&output, "output", "o", "text", "text or json")
	return cmd
}

// parseFactor reads NUMBER=FACTOR.
func parseFactor(s string) (number int, factor float64, err error) {
	left, right, ok := strings.Cut(s, "=")
	if !ok {
		return 0, 0, errors.New("no =")
	}
	if number, err = strconv.Atoi(left); err != nil {
		return 0, 0, err
	}
	factor, err = strconv.ParseFloat(right, 64)
	return number, factor, err
}

// trainError says what an error of a training that has come to nothing means on a command line.
func trainError(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return errInterrupted
	}
	if _, ok := errors.AsType[*train.UsageError](err); ok {
		return &exitError{exitUsage, err}
	}
	return err
}

// newBenchTrainWorkerCommand returns the command that the processes of `xagg bench train` are.
func newBenchTrainWorkerCommand(env *env) *cobra.Command {
	var (
		plan                              train.Plan
		spec, ip, controller, job, server string
		rank                              int
	)
	cmd := &cobra.Command{
		Use:    "train-worker",
		Short:  "Be a rank of 'xagg bench train'",
		Hidden: true,
		Args:   cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx := cmd.Context()
			if err := json.Unmarshal([]byte(spec), &plan); err != nil {
				return usagef("--plan: %w", err)
			}
			addr, err := netip.ParseAddr(ip)
			if err != nil {
				return usagef("--ip: %w", err)
			}
			var reducer train.Reducer
			if server != "" {
				conn, err := (&net.Dialer{Timeout: worker.DefaultTimeout}).DialContext(ctx, "tcp", server)
				if err != nil {
					return err
				}
				reducer, err = train.Connect(ctx, conn, plan, rank)
				if err != nil {
					return err
				}
			} else {
				conn, err := endpoint.Dial(controller)
				if err != nil {
					return err
				}
				defer conn.Close()
				link, err := worker.ListenUDP(netip.AddrPortFrom(addr, wire.Port), true)
				if err != nil {
					return err
				}
				reducer, err = train.Join(ctx, api.NewControllerClient(conn), job, plan, rank, link, worker.WithLogger(env.log))
				if err != nil {
					return err
				}
			}
			defer reducer.Close()
			lines := json.NewEncoder(env.stdout)
			return train.Work(ctx, plan, rank, reducer, func(s train.Step) error { return lines.Encode(s) })
		},
	}
	f := cmd.Flags()
	f.StringVar(&spec, "plan", "", "what all ranks do, as JSON")
	f.IntVar(&rank, "rank", 0, "this one")
	f.StringVar(&ip, "ip", "", "IPv4 address that packets are sent from")
	f.StringVar(&controller, "controller", "", "address of the controller")
	f.StringVar(&job, "job", "", "name of the job")
	f.StringVar(&server, "server", "", "address of a parameter server, instead of controller and job")
	return cmd
}
