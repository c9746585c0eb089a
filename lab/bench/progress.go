package bench

import (
	"fmt"
	"slices"
	"time"

	"xagg/internal/stats"
	"xagg/lab/results"
)

// Progress knows how far a suite is. It is pure: times are told.
type Progress struct {
	steps    []Step
	at       int           // the next step, or the one under way
	took     time.Duration // of steps that are over
	expected time.Duration // what was expected of these
}

// NewProgress returns the progress of a suite before its first run.
func NewProgress(steps []Step) *Progress { return &Progress{steps: steps} }

// Over tells that a step is over, after so long.
func (p *Progress) Over(step Step, took time.Duration) {
	p.at = step.Number + 1
	if step.Estimate > 0 {
		p.took += took
		p.expected += Estimate(p.steps[step.Number : step.Number+1])
		if step.Number > 0 && p.steps[step.Number-1].Scenario == step.Scenario {
			p.expected -= openTime
		}
	}
}

// Left returns about how long the rest takes when the current step has been under way for so long: what is estimated, in
// proportion to what those that are over took.
func (p *Progress) Left(underWay time.Duration) time.Duration {
	if p.at >= len(p.steps) {
		return 0
	}
	factor := 1.0
	if p.expected > 0 {
		factor = p.took.Seconds() / p.expected.Seconds()
	}
	rest := time.Duration(factor * float64(Estimate(p.steps[p.at:])))
	return max(0, rest-min(underWay, time.Duration(factor*float64(p.steps[p.at].Estimate))))
}

// Now describes what is under way.
func (p *Progress) Now(underWay time.Duration) string {
	if p.at >= len(p.steps) {
		return ""
	}
	s := p.steps[p.at]
	return fmt.Sprintf("[%d/%d] %s, %s, repetition %d: %s left", p.at+1, len(p.steps), s.Scenario.Name, s.Mode, s.Repetition+1,
		roughly(p.Left(underWay)))
}

// Line describes a run that is over.
func (p *Progress) Line(step Step, run *results.Run) string {
	head := fmt.Sprintf("[%d/%d] %s, %s, repetition %d", step.Number+1, len(p.steps), step.Scenario.Name, step.Mode, step.Repetition+1)
	switch {
	case run.Skipped != "":
		return head + ": skipped: " + run.Skipped
	case run.Failed != "":
		return head + ": failed: " + run.Failed
	}
	for _, j := range run.Jobs {
		head += ":"
		if len(run.Jobs) > 1 {
			head += " " + j.Name
		}
		head += fmt.Sprintf(" communication %.1f ms (floor %.1f ms)", 1e3*stats.Mean(slices.Concat(j.Comm...)), 1e3*stats.Mean(slices.Concat(j.Floor...)))
	}
	head += fmt.Sprintf(", busiest core %.0f %%", 100*run.Usage.Busiest)
	if run.Usage.Limited() {
		head += " (limited by the machine)"
	}
	return head + ", " + roughly(p.Left(0)) + " left"
}

// roughly spells a duration for people.
func roughly(d time.Duration) string {
	if d >= time.Minute {
		return fmt.Sprintf("%dm%02ds", int(d.Minutes()), int(d.Seconds())%60)
	}
	return fmt.Sprintf("%ds", int(d.Seconds()+0.5))
}
