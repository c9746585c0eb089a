package main

import (
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"xagg/lab/report"
	"xagg/lab/results"
)

func newBenchReportCommand(env *env) *cobra.Command {
	var (
		output, out string
		aggregator  string
		training    string
		limit       float64
	)
	cmd := &cobra.Command{
		Use:   "report RESULTS.jsonl...",
		Short: "Say what measurements came to",
		Long: `Read what 'xagg bench run' measured, and say which way of aggregating is the fastest in which scenario, by how much, and
how sure that is. A ratio whose interval is too wide is called not resolved, and a run that was limited by this machine's cores
carries no claim.

The HTML file needs nothing else and can be sent as it is. The format gobench is that of Go's benchmarks: two such files
are compared by benchstat, and modes of one by 'benchstat -col /mode'.`,
		Example: `  xagg bench report results.jsonl
  xagg bench report results.jsonl -o html --out report.html
  xagg bench report results.jsonl --aggregator aggregator.json --train train.json -o html --out report.html
  xagg bench report old.jsonl -o gobench --out old.txt`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			if limit <= 0 {
				return usagef("--limit %g: want more than 0, as a share", limit)
			}
			switch output {
			case "html", "markdown", "text", "gobench":
			default:
				return usagef("--output %q: want html, markdown, text or gobench", output)
			}
			var files []*results.File
			for _, name := range args {
				f, err := readResults(env, name)
				if err != nil {
					return err
				}
				if f.Cut != "" {
					fmt.Fprintf(env.stderr, "xagg: %s\n", f.Cut)
				}
				files = append(files, f)
			}
			write := func(w io.Writer) error { return report.WriteBenchmarks(w, files...) }
			if output != "gobench" {
				a, err := results.Analyze(limit, files...)
				if err != nil {
					return err
				}
				var more []*report.Extra
				for _, x := range []struct {
					name string
					read func(name string, src []byte) (*report.Extra, error)
				}{{aggregator, report.Aggregator}, {training, report.Train}} {
					if x.name == "" {
						continue
					}
					src, err := os.ReadFile(x.name)
					if err != nil {
						return fmt.Errorf("read results: %w", err)
					}
					e, err := x.read(x.name, src)
					if err != nil {
						return err
					}
					more = append(more, e)
				}
				d := report.Compare(a, more...)
				write = map[string]func(io.Writer) error{"html": d.WriteHTML, "markdown": d.WriteMarkdown, "text": d.WriteText}[output]
			}
			if out == "" {
				return write(env.stdout)
			}
			return writeFile(out, write)
		},
	}
	f := cmd.Flags()
	f.StringVarP(&output, "output", "o", "text", "html, markdown, text or gobench")
	f.StringVar(&out, "out", "", "file to write to instead of the standard output")
	f.StringVar(&aggregator, "aggregator", "", "file that 'xagg bench aggregator -o json' has written: a section of its own")
	f.StringVar(&training, "train", "", "file that 'xagg bench train -o json' has written: a section of its own")
	f.Float64Var(&limit, "limit", results.DefaultLimit, "width of an interval above which a ratio is not resolved, as a share of switch-only's time")
	return cmd
}

// readResults reads a file of results; "-" is the standard input.
func readResults(env *env, name string) (*results.File, error) {
	if name == "-" {
		return results.Read("standard input", env.stdin)
	}
	f, err := os.Open(name)
	if err != nil {
		return nil, fmt.Errorf("read results: %w", err)
	}
	defer f.Close()
	return results.Read(name, f)
}

// writeFile writes a file that is either whole or not there.
func writeFile(name string, write func(io.Writer) error) error {
	f, err := os.CreateTemp(filepath.Dir(name), "."+filepath.Base(name)+".*")
	if err != nil {
		return fmt.Errorf("write report: %w", err)
	}
	defer os.Remove(f.Name()) // it is gone already if all went well
	err = write(f)
	if err == nil {
		err = f.Chmod(0o644)
	}
	if errClose := f.Close(); err == nil {
		err = errClose
	}
	if err == nil {
		err = os.Rename(f.Name(), name)
	}
	if err != nil {
		return fmt.Errorf("write report: %w", err)
	}
	return nil
}
