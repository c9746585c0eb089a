// Package tune judges and chooses policies by simulation: what a policy costs beside the best plan that could have been chosen beforehand, and which of its
// parameters are best for given scenarios. What it says follows from its seeds.
package tune

import (
	"encoding/json"
	"fmt"
	"io"
	"runtime"
	"text/tabwriter"

	"golang.org/x/sync/errgroup"

	"xagg/controller"
	"xagg/lab/scenario"
	"xagg/policy"
	"xagg/sim/timing"
)

// SchemaVersion is that of [RegretReport]'s JSON. It rises when a field changes its meaning or goes.
const SchemaVersion = 1

// RegretReport says of jobs what it costs to know nothing beforehand.
type RegretReport struct {
	SchemaVersion int      `json:"schema_version"`
	Seeds         []uint64 `json:"seeds"`
	Rows          []Regret `json:"rows"`
}

// Regret is of a job of a scenario. Times are mean times of a round over all ranks, rounds and seeds, in seconds.
type Regret struct {
	Scenario    string             `json:"scenario"`
	Job         string             `json:"job"`
	Consistency string             `json:"consistency"` // sync or quorum; an async job's plan stays
	Static      map[string]float64 `json:"static"`      // by mode: plans that stay, made with knowledge of who is slow
	Best        string             `json:"best"`        // of them
	Adaptive    float64            `json:"adaptive"`    // of the plan that follows what is measured
	// Regret is by which share Adaptive is longer than the best one's; below 0 where following is better than any plan that stays.
	Regret float64 `json:"regret"`
	Moves  float64 `json:"moves"` // of ranks, mean over seeds
	Alike  bool    `json:"alike"` // all ranks and their links are
	// Failed says by mode why it could not be simulated.
	Failed map[string]string `json:"failed,omitempty"`
}

// Regrets simulates the modes of a scenario with every seed and returns a row for each of its jobs and consistencies, but those in which the
// mode that follows what is measured cannot be simulated: these have no Adaptive, and say in Failed why. opts.Mode and opts.Seed do not
// count.
func Regrets(s *scenario.Scenario, opts timing.Options, seeds []uint64) []Regret {
	var rows []Regret
	for _, consistency := range []controller.Mode{controller.ModeSync, controller.ModeQuorum} {
		var modes []scenario.Mode
		for _, m := range timing.Modes() {
			if m.Consistency() == consistency && s.Skip(m) == "" {
				modes = append(modes, m)
			}
		}
		if len(modes) > 0 {
			rows = append(rows, regrets(s, opts, seeds, string(consistency), modes)...)
		}
	}
	return rows
}

func regrets(s *scenario.Scenario, opts timing.Options, seeds []uint64, consistency string, modes []scenario.Mode) []Regret {
	runs := make([]timing.Report, len(modes)*len(seeds))
	failed := make([]error, len(runs))
	var group errgroup.Group
	group.SetLimit(runtime.GOMAXPROCS(0))
	for i := range runs {
		group.Go(func() error {
			opts := opts
			opts.Mode, opts.Seed = modes[i/len(seeds)], seeds[i%len(seeds)]
			failed[i] = runs[i].Add(s, opts)
			return nil
		})
	}
	group.Wait()
	var rows []Regret
	for number := range s.Jobs {
		row := Regret{
			Scenario: s.Name, Job: s.Jobs[number].Name, Consistency: consistency, Static: map[string]float64{}, Failed: map[string]string{}, Alike: s.Alike(number),
		}
		for m, mode := range modes {
			mean, moves := 0.0, 0.0
			for i := range seeds {
				if err := failed[m*len(seeds)+i]; err != nil {
					row.Failed[string(mode)] = err.Error()
					continue
				}
				r := &runs[m*len(seeds)+i].Rows[number]
				mean += r.Round.Mean / float64(len(seeds))
				moves += float64(len(r.Moves)) / float64(len(seeds))
			}
			switch {
			case row.Failed[string(mode)] != "":
			case mode.Rule() != "":
				row.Adaptive, row.Moves = mean, moves
			default:
				row.Static[string(mode)] = mean
				if best, ok := row.Static[row.Best]; !ok || mean < best {
					row.Best = string(mode)
				}
			}
		}
		if best := row.Static[row.Best]; best > 0 && row.Adaptive > 0 {
			row.Regret = row.Adaptive/best - 1
		}
		rows = append(rows, row)
	}
	return rows
}

// Exceeding says of which rows the regret is above a limit, or of sync jobs whose ranks are alike how much longer rounds are than in mode switch.
// Of rows that cannot be compared it says nothing: WriteText tells why they cannot.
func (r *RegretReport) Exceeding(limit, alike float64) (why []string) {
	for _, x := range r.Rows {
		of := fmt.Sprintf("job %s of scenario %s, %s", x.Job, x.Scenario, x.Consistency)
		sw := x.Static[string(policy.ModeSwitch)]
		switch {
		case x.Adaptive == 0 || x.Best == "":
		case x.Regret > limit:
			why = append(why, fmt.Sprintf("%s: rounds are %.1f %% longer than in mode %s, more than %.1f %%", of, 100*x.Regret, x.Best, 100*limit))
		case x.Alike && sw > 0 && x.Adaptive/sw-1 > alike:
			why = append(why, fmt.Sprintf("%s: all ranks are alike, and rounds are %.1f %% longer than in mode switch, more than %.1f %%", of,
				100*(x.Adaptive/sw-1), 100*alike))
		}
	}
	return why
}

// WriteJSON writes the report as JSON.
func (r *RegretReport) WriteJSON(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(r)
}

// WriteText writes the report as a table.
func (r *RegretReport) WriteText(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "scenario\tjob\tconsistency\tbest static\tround\tadaptive\tregret\tmoves\t")
	for _, x := range r.Rows {
		if x.Adaptive == 0 || x.Best == "" {
			continue
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%.1f ms\t%.1f ms\t%+.1f %%\t%.1f\t\n", x.Scenario, x.Job, x.Consistency, x.Best, 1e3*x.Static[x.Best], 1e3*x.Adaptive,
			100*x.Regret, x.Moves)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	told := map[string]bool{}
	for _, x := range r.Rows {
		for _, mode := range timing.Modes() {
			if why := x.Failed[string(mode)]; why != "" && !told[why] {
				told[why] = true
				if _, err := fmt.Fprintf(w, "not simulated: %s\n", why); err != nil {
					return err
				}
			}
		}
	}
	return nil
}
