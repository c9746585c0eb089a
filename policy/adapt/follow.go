package adapt

import (
	"time"

	"xagg/policy"
	"xagg/policy/telemetry"
)

// Follower has the plan of a job follow what its ranks report: what goes on around an [Engine] wherever a job runs, in a controller and in simulations. It is
// pure: reports and what devices count in, decisions and the plans that they ask for out.
type Follower struct {
	// Snapshot is what is known of the job. Whoever asks for decisions fills in Job, Switch and Servers, then has it measured, and adds what devices count.
	Snapshot telemetry.Snapshot
	engine   *Engine
	window   *telemetry.Window
	epoch    uint16 // of the plan that the window's rounds ran under
	round    float64
	judged   bool // round was
}

// Follow returns what follows a job of so many ranks, whose plan has an epoch.
func (c *Config) Follow(ranks int, epoch uint16) (*Follower, error) {
	engine, err := c.New(ranks)
	if err != nil {
		return nil, err
	}
	return &Follower{engine: engine, window: telemetry.NewWindow(ranks, c.Window), epoch: epoch}, nil
}

// Report takes what a rank reports, at a time since the observation began, while the plan of an epoch holds and so many ranks are there. Its errors are those
// of [telemetry.Window.Add].
func (f *Follower) Report(now time.Duration, epoch uint16, there uint64, report telemetry.Report) error {
	if f.epoch != epoch { // numbers of one plan say little of another
		f.window.Forget()
		f.epoch = epoch
	}
	f.window.Present(there)
	return f.window.Add(now, report)
}

// Measure fills in of Snapshot what reports tell. A gradient has so many bytes.
func (f *Follower) Measure(now time.Duration, bytes float64) { f.window.Fill(&f.Snapshot, now, bytes) }

// Decide decides from Snapshot, once a round: ok is false when it tells of none that was not decided on before. next is the plan that the decision
// makes of the present one, and equals it where nothing is to change.
func (f *Follower) Decide(plan policy.Plan) (d Decision, next policy.Plan, ok bool) {
	s := &f.Snapshot
	for i := range s.Ranks {
		s.Ranks[i].Steered = plan.Steered>>i&1 != 0
	}
	if f.judged && s.Job.Round == f.round || s.Job.Rounds == 0 {
		return d, plan, false
	}
	f.judged, f.round = true, s.Job.Round
	d = f.engine.Step(s)
	return d, d.Apply(plan), true
}

// State returns a copy of what the engine knows.
func (f *Follower) State() State { return f.engine.State() }

// Gaps returns how many rounds were left out, see [telemetry.Window.Gaps].
func (f *Follower) Gaps() uint64 { return f.window.Gaps() }
