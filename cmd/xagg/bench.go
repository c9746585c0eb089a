package main

import (
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"xagg/lab/bench"
)

func newBenchCommand(env *env) *cobra.Command {
	cmd := &cobra.Command{Use: "bench", Short: "Measure"}
	cmd.AddCommand(newBenchRunCommand(env), newBenchReportCommand(env))
	cmd.AddCommand(newBenchLossCommand(env))
	cmd.AddCommand(newBenchWorkerCommand(env), newBenchParameterServerCommand(env))
	cmd.AddCommand(newBenchTrainCommand(env), newBenchTrainWorkerCommand(env))
	cmd.AddCommand(newBenchTopologyCommand(env))
	cmd.AddCommand(newBenchAggregatorCommand(env))
	return cmd
}

func newBenchLossCommand(env *env) *cobra.Command {
	opts := bench.LossOptions{}
	var (
		percent []float64
		output  string
	)
	cmd := &cobra.Command{
		Use:   "loss",
		Short: "Measure all-reduces on links that lose frames, beside a parameter server over TCP",
		Long: `Make a lab of network namespaces whose links lose a share of all frames in both directions, and all-reduce in it
with the switch, with an XDP server, with both, and over TCP with a parameter server on a host of its own. The switch
is software, and everything shares this machine's cores: compare modes and rates, not speeds with a network's.`,
		Example: `  xagg bench loss
  xagg bench loss --percent 0,1 --lanes 1000000 --repeat 5 -o json`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			switch {
			case output != "text" && output != "json":
				return usagef("--output %q: want text or json", output)
			case opts.Lanes < 1 || opts.Allreduces < 1 || opts.Repeat < 1 || opts.Timeout <= 0 || len(percent) == 0:
				return usagef("--lanes, --all-reduces, --repeat and --timeout must be positive, and --percent not empty")
			case opts.Workers < 3:
				return usagef("--workers %d: mode hybrid needs at least 3", opts.Workers)
			}
			for _, p := range percent {
				if p < 0 || p > 50 {
					return usagef("--percent %g: want 0 to 50", p)
				}
				opts.Rates = append(opts.Rates, p/100)
			}
			opts.Log, _ = newLogger(env.stderr, "warn", cmd.Flag("log-format").Value.String())
			opts.Progress = func(format string, args ...any) { fmt.Fprintf(env.stderr, format+"\n", args...) }
			rows, err := bench.Loss(cmd.Context(), opts)
			if err != nil {
				return demoError(cmd.Context(), err)
			}
			if output == "json" {
				return bench.WriteLossJSON(env.stdout, rows)
			}
			return bench.WriteLossTable(env.stdout, rows)
		},
	}
	f := cmd.Flags()
	var defaults []float64
	for _, rate := range bench.LossRates {
		defaults = append(defaults, 100*rate)
	}
	f.Float64SliceVar(&percent, "percent", defaults, "of frames that are lost, in each direction of each link")
	f.IntVar(&opts.Lanes, "lanes", 65536, "values of a vector")
	f.IntVar(&opts.Workers, "workers", 4, "number of workers")
	f.IntVar(&opts.Allreduces, "all-reduces", 20, "of each mode at each rate, per repetition")
	f.IntVar(&opts.Repeat, "repeat", 3, "repetitions of everything")
	f.DurationVar(&opts.Timeout, "timeout", 2*time.Minute, "of one all-reduce")
	f.Uint64Var(&opts.Seed, "seed", 1, "of the losses")
	f.StringVarP(&output, "output", "o", "text", "text or json")
	return cmd
}
