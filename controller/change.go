package controller

import (
	"fmt"
	"time"

	"xagg/policy"
)

// stage is how far a change of plan is.
type stage uint8

const (
	// stageBeside: the new plan is being installed beside the old one. Nobody knows of it: it may still be given up.
	stageBeside stage = iota
	// stageArmed: the old plan announces the new one, and ranks change to it. There is no way back.
	stageArmed
	// stageRetiring: every rank has finished the last round of the old plan, which is being removed.
	stageRetiring
)

// change is a change of a job's plan that is under way.
type change struct {
	from, to plan
	stage    stage
	began    time.Time
}

// plans returns the plans that a job needs installed, the older first.
func (j *job) plans() []plan {
	if j.change != nil && j.change.stage != stageRetiring {
		return []plan{j.change.from, j.change.to}
	}
	return []plan{j.plan}
}

// announced returns the epoch that a plan has to announce, 0 = none.
func (j *job) announced(p plan) uint16 {
	if j.change != nil && j.change.stage == stageArmed && p.epoch == j.change.from.epoch {
		return j.change.to.epoch
	}
	return 0
}

// retire notes that nobody needs the old plan any more.
func (j *job) retire() {
	j.plan = j.change.to
	j.change.stage = stageRetiring
}

// last returns the newest plan that a rank of the job may be in.
func (j *job) last() plan {
	if j.change != nil {
		return j.change.to
	}
	return j.plan
}

// nextEpoch returns the epoch after another one. Epochs alternate between the halves of the lease, also where they go
// round: 65535 is followed by 2, since 0 is none and 1 has the half of 65535.
func nextEpoch(epoch uint16) uint16 {
	if epoch == 1<<16-1 {
		return 2
	}
	return epoch + 1
}

// changeError says that a job's plan cannot be changed now.
type changeError struct{ msg string }

func (e *changeError) Error() string { return e.msg }

// rest returns a rule with what it leaves open as the job's plan has it: quorum and wait, and who sums where it says nothing
// but these.
func (j *job) rest(rule policy.Static) policy.Static {
	has := j.decision.Rule()
	if rule.Mode == "" && (rule.Quorum != 0 || rule.Wait != nil) && len(rule.Steer) == 0 && len(rule.Servers) == 0 {
		rule.Mode, rule.Steer, rule.Servers = has.Mode, has.Steer, has.Servers
	}
	if rule.Quorum == 0 {
		rule.Quorum = has.Quorum
	}
	if rule.Wait == nil {
		rule.Wait = has.Wait
	}
	return rule
}

// replan decides the next plan of a job of which so many ranks are there. It has the pool that the job has leased, and what the
// rule leaves open as the job's plan has it; where it names no servers, those that have room. same is true when it is the one that
// the job has. Errors: [*policy.FieldError], *changeError and [*place.ShortError].
func (in *intent) replan(j *job, rule policy.Static, there int) (d policy.Decision, same bool, err error) {
	if j.recovering != recoverNot {
		return d, false, &changeError{fmt.Sprintf("it recovers from a loss; wait until that is done: see 'xagg job show %s'", j.spec.Name)}
	}
	if c := j.change; c != nil {
		return d, false, &changeError{fmt.Sprintf("its plan is changing from epoch %d to %d already; wait until that is done: see 'xagg job show %s'",
			c.from.epoch, c.to.epoch, j.spec.Name)}
	}
	if d, err = in.decide(j, rule); err != nil {
		return d, false, err
	}
	return d, d.Plan.Equal(j.decision.Plan) && j.newPlan(j.epoch, d, there).quorum == j.quorum, nil
}

// decide is the part of replan that does not look at what the job is doing. Errors are those of deal.
func (in *intent) decide(j *job, rule policy.Static) (d policy.Decision, err error) {
	rule = j.rest(rule)
	if len(rule.Servers) == 0 {
		placed, err := in.deal(j.spec, rule, j)
		if err != nil {
			return d, err
		}
		d = placed.Decision
	} else if d, err = rule.Decide(policy.Input{
		Job: j.spec.Name, Ranks: j.spec.Ranks, Servers: in.serverNames(), Pool: j.decision.Pool,
		Quorum: j.spec.Consistency.Quorum, Wait: j.spec.Consistency.Wait,
	}); err != nil {
		return d, err
	}
	return d, j.spec.Consistency.allows(d.Plan)
}

// beginChange begins to change the plan of a job of which so many ranks are there. Errors: *exhaustedError.
func (in *intent) beginChange(j *job, d policy.Decision, there int) (*change, error) {
	j.change = &change{from: j.plan, to: j.newPlan(nextEpoch(j.epoch), d, there)}
	if err := in.checkTables(j); err != nil {
		j.change = nil
		return nil, err
	}
	return j.change, nil
}
