package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"xagg/lab/results"
	"xagg/lab/scenario"
)

// Suite is a set of runs: every scenario in every mode, several times.
type Suite struct {
	Scenarios []*scenario.Scenario
	Modes     []scenario.Mode
	Repeat    int // repetitions of everything
	// Header is written before the first run, with the XDP mode that servers turn out to have.
	Header results.Header
	// Missing says why a mode cannot run on this machine, with what to install; empty = it can.
	Missing func(scenario.Mode) string
	// Open makes the place where the runs of a scenario take place.
	Open func(context.Context, *scenario.Scenario) (Place, error)
	// Took, if set, is told of every run when it is over.
	Took func(Step, *results.Run)
	// Begins, if set, is told of every run before it begins; of one that is skipped too.
	Begins func(Step)
}

// Place is where a scenario takes place.
type Place interface {
	// Run runs the scenario once in a mode. The error is the run's; if the place is of no use any more, Healthy says so.
	Run(ctx context.Context, mode scenario.Mode, seed uint64) (*results.Run, error)
	// XDPMode returns where the servers' programs run: "native" or "generic"; "" if there are none.
	XDPMode() string
	// Healthy reports whether another run can take place here.
	Healthy() bool
	// Close removes the place.
	Close() error
}

// Step is a run that is to be.
type Step struct {
	Number     int // from 0, in the order in which they take place
	Scenario   *scenario.Scenario
	Mode       scenario.Mode
	Repetition int    // from 0
	Seed       uint64 // of compute times, values and faults
	// Skip says why it cannot take place; empty = it can.
	Skip string
	// Estimate is about how long it takes.
	Estimate time.Duration
}

// Steps returns the runs in their order: scenario by scenario; in each, repetition by repetition; in each of these all modes one
// after the other, in every second one backwards, and then beginning with another one. So whatever changes on the machine meanwhile meets all
// modes alike, of any two modes each comes first in half of the repetitions, and none always runs after the same other.
func (s *Suite) Steps() []Step {
	var steps []Step
	for _, sc := range s.Scenarios {
		for repetition := range s.Repeat {
			for i := range s.Modes {
				if repetition%2 == 1 {
					i = len(s.Modes) - 1 - i
				}
				mode := s.Modes[(i+repetition/2)%len(s.Modes)]
				step := Step{
					Number: len(steps), Scenario: sc, Mode: mode, Repetition: repetition, Seed: sc.Seed + uint64(repetition), Skip: sc.Skip(mode),
				}
				if step.Skip == "" && s.Missing != nil {
					step.Skip = s.Missing(mode)
				}
				if step.Skip == "" {
					step.Estimate = sc.Estimate(step.Seed, mode)
				}
				steps = append(steps, step)
			}
		}
	}
	return steps
}

// openTime is about how long it takes to make the place of a scenario and to remove it. Measured in a lab of network namespaces on
// two cores; nothing depends on it but what people are told to expect.
const openTime = 1500 * time.Millisecond

// Estimate returns about how long steps take.
func Estimate(steps []Step) (sum time.Duration) {
	for i, step := range steps {
		sum += step.Estimate
		if step.Estimate > 0 && (i == 0 || steps[i-1].Scenario != step.Scenario) {
			sum += openTime
		}
	}
	return sum
}

// Summary counts runs.
type Summary struct{ Finished, Failed, Skipped int }

// Run runs the suite and writes every run to out as soon as it is over. A run that fails is written with its error, and the suite
// goes on. It ends early, with an error, when ctx does or when out cannot be written.
func (s *Suite) Run(ctx context.Context, out io.Writer) (summary Summary, err error) {
	var place Place
	leave := func() error {
		if place == nil {
			return nil
		}
		p := place
		place = nil
		return p.Close()
	}
	defer func() { err = errors.Join(err, leave()) }()
	var here *scenario.Scenario
	header := s.Header
	begun := false // the header is written
	for _, step := range s.Steps() {
		if ctx.Err() != nil {
			return summary, context.Cause(ctx)
		}
		if here != step.Scenario || place != nil && !place.Healthy() {
			if err := leave(); err != nil {
				return summary, fmt.Errorf("scenario %s: %w", here.Name, err)
			}
			here = step.Scenario
		}
		if s.Begins != nil {
			s.Begins(step)
		}
		run := &results.Run{Began: time.Now()}
		switch {
		case step.Skip != "":
			run.Skipped = step.Skip
			summary.Skipped++
		default:
			began := time.Now()
			if place == nil {
				if place, err = s.Open(ctx, step.Scenario); err == nil {
					header.XDPMode = place.XDPMode()
				}
			}
			var done *results.Run
			if err == nil {
				done, err = place.Run(ctx, step.Mode, step.Seed)
			}
			if ctx.Err() != nil { // what a run says that was interrupted is of no use
				return summary, context.Cause(ctx)
			}
			if err != nil {
				run.Failed, err = err.Error(), nil
				summary.Failed++
			} else {
				run = done
				summary.Finished++
			}
			run.Began, run.Took = began, time.Since(began)
		}
		run.Scenario, run.Mode, run.Repetition, run.Seed = step.Scenario.Name, string(step.Mode), step.Repetition, step.Seed
		if !begun {
			if err := results.WriteHeader(out, header); err != nil {
				return summary, err
			}
			begun = true
		}
		if err := results.WriteRun(out, *run); err != nil {
			return summary, err
		}
		if s.Took != nil {
			s.Took(step, run)
		}
	}
	return summary, nil
}
