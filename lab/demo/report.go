package demo

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"xagg/bmv2/fault"
	"xagg/controller"
	"xagg/wire"
)

// SchemaVersion is the version of a Report's JSON form. It changes when a field changes its meaning or goes away.
const SchemaVersion = 1

// Report is what a demo found out.
type Report struct {
	SchemaVersion int      `json:"schema_version"`
	Exact         bool     `json:"exact"` // all runs are exact, and have the same integers
	Runs          []Result `json:"runs"`
	Capture       *Capture `json:"capture,omitempty"` // of --pcap
}

// Result is what one job of the demo came to.
type Result struct {
	Mode        string `json:"mode"`   // switch, server, hybrid, steered or tcp
	Switch      string `json:"switch"` // engine or simple_switch_grpc
	Lab         string `json:"lab"`    // netns or memory
	Workers     int    `json:"workers"`
	Servers     int    `json:"servers"` // that the plan used
	XDPMode     string `json:"xdp_mode,omitempty"`
	Allreduces  int    `json:"allreduces"`  // of vectors
	Buckets     int    `json:"buckets"`     // of each, all-reduced at the same time
	Depth       int    `json:"depth"`       // rounds that may be under way
	Consistency string `json:"consistency"` // sync, quorum or async
	// LeastContributors and MeanContributors are of the ranks of a chunk, of all all-reduces.
	LeastContributors int     `json:"least_contributors,omitempty"`
	MeanContributors  float64 `json:"mean_contributors,omitempty"`
	// MostAdditions and MeanAdditions are of the contributions in a result of an async job.
	MostAdditions int     `json:"most_additions,omitempty"`
	MeanAdditions float64 `json:"mean_additions,omitempty"`
	// Late counts chunks that were closed without a rank, for each such rank.
	Late   int `json:"late_chunks,omitempty"`
	Lanes  int `json:"lanes"`  // of the longest vector
	Chunks int `json:"chunks"` // of it
	// Exact: the integers on every worker equal a plain loop's sum of the quantized inputs, and those of the other runs;
	// with a quorum, of what the contributors of each chunk had to give; async: all that a worker was told is that sum of
	// all contributions.
	// tcp: every worker has the same numbers, which are not far from the sum in float64.
	Exact bool `json:"exact"`
	// Error says what is not exact.
	Error string `json:"error,omitempty"`
	// MaxAbsError and RelL2Error are the largest of all all-reduces, against a float64 sum of the inputs.
	MaxAbsError float64 `json:"max_abs_error"`
	RelL2Error  float64 `json:"rel_l2_error"`
	// SecondsPerAllreduce is the median over the all-reduces of the time that the slowest worker took for it.
	SecondsPerAllreduce float64 `json:"seconds_per_allreduce"`
	// AllreduceSeconds are the times of all of them, in order.
	AllreduceSeconds []float64 `json:"allreduce_seconds"`
	Packets          uint64    `json:"packets"`  // that the workers sent
	Partials         uint64    `json:"partials"` // that the switch sent
	Resends          uint64    `json:"resends"`  // of the packets
	// Changes is how often the plan changed between two all-reduces, in all ranks at the same one.
	Changes   int    `json:"changes,omitempty"`
	Saturated uint64 `json:"saturated_lanes"`
	// Reasons are the packets of the run by what the switch, and each server by its name, has done with them.
	Reasons map[string]map[string]uint64 `json:"reasons"`
	// Kills is what was killed on purpose. Packets are counted from the last death on by what died.
	Kills []Killed `json:"kills,omitempty"`
	// Faults is what happened on the links on purpose.
	Faults []fault.PathCounts `json:"faults,omitempty"`
}

// Capture is the verdict on a demo's own capture.
type Capture struct {
	File    string `json:"file"`
	Packets int    `json:"packets"`
	OK      bool   `json:"ok"`
	Error   string `json:"error,omitempty"`
}

// WriteJSON writes the report as one JSON object.
func (r *Report) WriteJSON(w io.Writer) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(r)
}

// WriteTable writes the report for people.
func (r *Report) WriteTable(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "MODE\tSWITCH\tLAB\tWORKERS\tCHUNKS\tTIME/ALL-REDUCE\tPACKETS\tPARTIALS\tRESENDS\tMAX ERROR\tREL L2 ERROR\tEXACT")
	for _, run := range r.Runs {
		exact := "yes"
		if !run.Exact {
			exact = "NO"
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%d\t%d\t%v\t%d\t%d\t%d\t%.2e\t%.2e\t%s\n", run.Mode, run.Switch, run.Lab, run.Workers, run.Chunks,
			seconds(run.SecondsPerAllreduce), run.Packets, run.Partials, run.Resends, run.MaxAbsError, run.RelL2Error, exact)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	for _, run := range r.Runs {
		if len(run.Faults) == 0 {
			continue
		}
		var all fault.Counts
		for _, c := range run.Faults {
			all.Add(c.Counts)
		}
		fmt.Fprintf(w, "%s: links: %d frames, %d dropped, %d duplicated, %d reordered, %d delayed, %d corrupted\n", run.Mode,
			all.Frames, all.Dropped, all.Duplicated, all.Reordered, all.Delayed, all.Corrupted)
		for _, name := range slices.Sorted(maps.Keys(run.Reasons)) {
			if len(run.Reasons[name]) != 0 {
				fmt.Fprintf(w, "%s: %s:%s\n", run.Mode, name, list(run.Reasons[name]))
			}
		}
	}
	for _, run := range r.Runs {
		for _, k := range run.Kills {
			fmt.Fprintf(w, "%s: %s\n", run.Mode, k)
		}
		if run.Error != "" {
			fmt.Fprintf(w, "%s: not exact: %s\n", run.Mode, run.Error)
		}
		if run.Saturated > 0 {
			fmt.Fprintf(w, "%s: %d values did not fit the scale of the round before and were clipped; the rest went into the next "+
				"all-reduce. The sums are exact, the error of those rounds is large.\n", run.Mode, run.Saturated)
		}
	}
	for _, run := range r.Runs {
		if run.Consistency == string(controller.ModeQuorum) {
			fmt.Fprintf(w, "%s: at least %d contributors a chunk, %.2f on average; %d contributions to a chunk came late and were kept for the "+
				"all-reduces after it\n", run.Mode, run.LeastContributors, run.MeanContributors, run.Late)
		}
		if run.Consistency == string(controller.ModeAsync) {
			fmt.Fprintf(w, "%s: results had up to %d contributions, %.2f on average\n", run.Mode, run.MostAdditions, run.MeanAdditions)
		}
		if run.Mode == ModeSteered {
			fmt.Fprintf(w, "steered: the plan changed %d times between %d all-reduces, for all workers at the same one\n", run.Changes, run.Allreduces)
		}
	}
	switch {
	case r.Exact && slices.ContainsFunc(r.Runs, func(run Result) bool { return run.Consistency == string(controller.ModeAsync) }):
		fmt.Fprintln(w, "exact: every worker was told the plain sum of all contributions, each exactly once")
	case r.Exact && slices.ContainsFunc(r.Runs, func(run Result) bool { return run.Consistency == string(controller.ModeQuorum) }):
		fmt.Fprintln(w, "exact: every worker has the same integers and contributors, and they are the plain sum of what these had to give")
	case r.Exact && slices.ContainsFunc(r.Runs, func(run Result) bool { return run.Mode == ModeTCP }):
		fmt.Fprintln(w, "exact: every worker's integers equal the plain sum; over TCP, sums of float32 that are the same on every worker")
	case r.Exact && len(r.Runs) > 1:
		fmt.Fprintln(w, "exact: every worker's integers equal the plain sum, and they are the same in all modes")
	case r.Exact:
		fmt.Fprintln(w, "exact: every worker's integers equal the plain sum")
	}
	if c := r.Capture; c != nil {
		if c.OK {
			fmt.Fprintf(w, "capture %s: %d packets, every result is the sum of exactly its contributions\n", c.File, c.Packets)
		} else {
			fmt.Fprintf(w, "capture %s: %s\n", c.File, c.Error)
		}
	}
	return nil
}

// list spells counts by reason in the order of the reasons' codes.
func list(counts map[string]uint64) string {
	var b strings.Builder
	for reason := range wire.Reason(wire.NumReasons) {
		if n := counts[reason.String()]; n != 0 {
			fmt.Fprintf(&b, " %s %d", reason, n)
		}
	}
	return b.String()
}

func seconds(s float64) time.Duration {
	d := time.Duration(s * float64(time.Second))
	switch {
	case d > time.Second:
		return d.Round(10 * time.Millisecond)
	case d > time.Millisecond:
		return d.Round(10 * time.Microsecond)
	}
	return d
}
