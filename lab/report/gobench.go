package report

import (
	"fmt"
	"io"
	"runtime"
	"slices"
	"strings"
	"time"

	"xagg/lab/results"
)

// WriteBenchmarks writes runs in the format of Go's benchmarks (golang.org/design/14313-benchmark-format): a line for every
// job of every finished run, so that benchstat compares two files, or modes by "-col /mode". ns/op is the mean communication time of a
// rank and round. What two files must have in common to be compared is in configuration lines, the rest in comments; a run that was
// limited by the machine has "limited: true", which benchstat keeps apart.
func WriteBenchmarks(w io.Writer, files ...*results.File) error {
	var b strings.Builder
	b.WriteString("Unit ns/op better=lower assume=nothing\nUnit round-ns/op better=lower assume=nothing\nUnit p99-ns/op better=lower assume=nothing\n")
	b.WriteString("Unit exposed-ns/op better=lower assume=nothing\nUnit x-floor better=lower assume=nothing\nUnit cpu-s/GB better=lower assume=nothing\n")
	for _, f := range files {
		for _, s := range f.Sessions {
			h := s.Header
			fmt.Fprintf(&b, "\n# %s, revision %s, kernel %s: %s\n", h.Time.UTC().Format(time.RFC3339), h.Revision, h.Kernel, strings.Join(h.Command, " "))
			fmt.Fprintf(&b, "goos: linux\ngoarch: %s\npkg: xagg\ncpu: %s\nlab: %s\nswitch: %s\n", runtime.GOARCH, h.CPU, h.Lab, h.Switch)
			if h.XDPMode != "" {
				fmt.Fprintf(&b, "xdp: %s\n", h.XDPMode)
			}
			limited := false
			b.WriteString("limited: false\n")
			for _, r := range s.Runs {
				if !r.Finished() {
					continue
				}
				if l := r.Usage.Limited(); l != limited {
					limited = l
					fmt.Fprintf(&b, "limited: %v\n", limited)
				}
				a, err := results.Analyze(results.DefaultLimit, &results.File{Name: f.Name, Sessions: []results.Session{{Header: h, Runs: []results.Run{r}}}})
				if err != nil {
					return fmt.Errorf("write benchmarks: %w", err)
				}
				sc, m := a.Scenarios[0], slices.Index(a.Modes, r.Mode)
				for _, job := range sc.Jobs {
					name := "BenchmarkXagg/scenario=" + r.Scenario
					if len(sc.Jobs) > 1 {
						name += "/job=" + strings.Join(strings.Fields(job.Name), "_")
					}
					cell := job.Cells[m]
					fmt.Fprintf(&b, "%s/mode=%s %d %.0f ns/op %.0f p99-ns/op %.0f round-ns/op %.0f exposed-ns/op %.4g x-floor %.4g cpu-s/GB\n", name,
						strings.ReplaceAll(r.Mode, "/", "-"), cell.Comm.N, 1e9*cell.Comm.Mean, 1e9*cell.Comm.P99, 1e9*cell.Round.Mean, 1e9*cell.Exposed, cell.OfFloor.Ratio, sc.Costs[m].Total())
				}
			}
		}
	}
	if _, err := io.WriteString(w, b.String()); err != nil {
		return fmt.Errorf("write benchmarks: %w", err)
	}
	return nil
}
