package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"xagg/lab/aggregator"
	"xagg/lab/results"
)

func newBenchAggregatorCommand(env *env) *cobra.Command {
	var (
		opts      aggregator.Options
		megabytes int
		output    string
	)
	cmd := &cobra.Command{
		Use:   "aggregator",
		Short: "Measure the processor time of the XDP server beside a TCP aggregator's",
		Long: `Measure how much processor time the XDP server and the TCP aggregator need to sum the same bytes on the same
processors, in turn. The XDP server is fed with XDP frames, as a card's driver with native XDP would, and from UDP
sockets; the TCP aggregator with and without TSO, GSO and GRO. All of it runs in a lab of network namespaces on this
machine: leave it alone meanwhile. Every number of every result is compared with the plain sum.

The report says what is counted and what is not. After Ctrl-C it is one of what was finished.`,
		Example: `  xagg bench aggregator
  xagg bench aggregator --repeat 20 -o json >report.json`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if output != "text" && output != "json" {
				return usagef("--output %q: want text or json", output)
			}
			opts.Bytes = int64(megabytes) * 1e6
			if err := opts.Check(); err != nil {
				return usagef("%w", err)
			}
			opts.Log, _ = newLogger(env.stderr, "warn", cmd.Flag("log-format").Value.String())
			opts.Progress = func(format string, args ...any) { fmt.Fprintf(env.stderr, format+"\n", args...) }
			opts.TCPServer = func(addr string, ranks, values int, cpus []int) *exec.Cmd {
				var list []string
				for _, cpu := range cpus {
					list = append(list, strconv.Itoa(cpu))
				}
				cmd := exec.Command("/proc/self/exe", "bench", "aggregator", "serve-tcp", "--listen", addr,
					"--workers", strconv.Itoa(ranks), "--values", strconv.Itoa(values), "--processors", strings.Join(list, ","))
				cmd.Args[0] = os.Args[0]
				return cmd
			}
			report, err := aggregator.Run(cmd.Context(), opts)
			if cmd.Context().Err() != nil {
				err = errInterrupted
			}
			if report == nil || len(report.Measurements) == 0 {
				return err
			}
			report.Command = os.Args
			write := report.WriteText
			if output == "json" {
				write = report.WriteJSON
			}
			return errors.Join(err, write(env.stdout))
		},
	}
	f := cmd.Flags()
	f.IntVar(&opts.Workers, "workers", 4, "number of workers")
	f.IntVar(&opts.Values, "values", 65536, "of a worker's vector, a multiple of 16384")
	f.IntVar(&megabytes, "megabytes", 500, "of gradients that each measurement sums, 10^6 bytes each")
	f.IntVar(&opts.Repeat, "repeat", 10, "measurements of everything, in turn")
	f.Float64Var(&opts.Limit, "limit", results.DefaultLimit, "width of a ratio's interval above which it is not resolved, as a share of the ratio (or of 1)")
	f.StringVarP(&output, "output", "o", "text", "text or json")
	cmd.AddCommand(newServeTCPCommand(env.stdout))
	return cmd
}

// newServeTCPCommand is the process of the TCP aggregator, which bench aggregator starts.
func newServeTCPCommand(stdout io.Writer) *cobra.Command {
	var (
		listen          string
		workers, values int
		processors      []int
	)
	cmd := &cobra.Command{
		Use:    "serve-tcp",
		Short:  "Be the TCP aggregator of 'xagg bench aggregator'",
		Hidden: true,
		Args:   cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			return aggregator.ServeTCP(stdout, listen, workers, values, processors)
		},
	}
	f := cmd.Flags()
	f.StringVar(&listen, "listen", "", "address")
	f.IntVar(&workers, "workers", 0, "number of workers")
	f.IntVar(&values, "values", 0, "of a vector")
	f.IntSliceVar(&processors, "processors", nil, "to run on")
	return cmd
}
