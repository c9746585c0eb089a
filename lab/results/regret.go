package results

import (
	"slices"
	"strings"
)

// Static are the ways to divide ranks between switch and servers that stay as they are, as modes spell them without their consistency.
var Static = []string{"switch", "server", "hybrid"}

// Following is the name of a way that follows what is measured, likewise.
const Following = "auto"

// Regret is what a job takes in a mode whose plan follows what is measured, in multiples of what it takes with static choices under the same
// consistency.
type Regret struct {
	Mode int // of Analysis.Modes
	// Of are the mean time of a round in multiples of that with each static choice of which there is a run, by mode.
	Of map[int]Estimate
}

// Worst returns the largest upper end of the intervals: it is the bound of the ratio to the best static choice, whichever that is. Which one is
// best is not looked up in the same measurements: the bound holds against each of them, so that with [Confidence] it holds against the best.
func (r *Regret) Worst() float64 {
	worst := 0.0
	for _, e := range r.Of {
		worst = max(worst, e.High)
	}
	return worst
}

// AtMost reports whether the ratio to the best static choice is at most bound: yes if it is to each of them, and no if it is not to one of them.
func (r *Regret) AtMost(bound float64) Verdict {
	all := Yes
	for _, e := range r.Of {
		switch e.AtMost(bound) {
		case No:
			return No
		case NotResolved:
			all = NotResolved
		}
	}
	return all
}

// regrets computes those of job i from the runs of the modes.
func (j *JobResult) regrets(i int, modes []string, all [][]trial) {
	for m, mode := range modes {
		if way, _, _ := strings.Cut(mode, "/"); way != Following || len(all[m]) == 0 {
			continue
		}
		r := Regret{Mode: m, Of: map[int]Estimate{}}
		for other, name := range modes {
			way, _, _ := strings.Cut(name, "/")
			if slices.Contains(Static, way) && Consistency(name) == Consistency(mode) && len(all[other]) > 0 {
				r.Of[other] = compare(all[m], all[other], func(run *Run) float64 { return run.Jobs[i].pace() })
			}
		}
		if len(r.Of) > 0 {
			j.Regrets = append(j.Regrets, r)
		}
	}
}

// pace returns the mean time of a round: what all measured rounds together took, by their number. Where ranks skip rounds, or go through them at
// different times, it is what training takes.
func (j *Job) pace() float64 { return j.Span / float64(len(j.Comm[0])) }
