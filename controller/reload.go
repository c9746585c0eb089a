package controller

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"xagg/api"
	"xagg/internal/strictyaml"
	"xagg/policy"
	"xagg/policy/adapt"
)

// File is a configuration file, which is read when the controller starts and at every reload.
type File struct {
	Path string
	// State is the state file, whatever the configuration says; empty = what it says, or else [DefaultState].
	State string
}

// Load reads the file.
func (f File) Load() (Config, error) {
	cfg, _, err := f.read()
	return cfg, err
}

// read is Load, and returns the text too.
func (f File) read() (cfg Config, src []byte, err error) {
	if src, err = os.ReadFile(f.Path); err != nil {
		return Config{}, nil, fmt.Errorf("read configuration: %w", err)
	}
	if cfg, err = Parse(f.Path, src); err != nil {
		return Config{}, nil, err
	}
	switch {
	case f.State != "":
		cfg.State = f.State
	case cfg.State == "":
		cfg.State = DefaultState(f.Path)
	}
	return cfg, src, nil
}

// WithFile says where the configuration comes from, so that it can be read again: see [Controller.Reload].
func WithFile(f File) Option { return func(c *Controller) { c.file = f } }

// reloaded is what became of the configuration file; guarded by Controller.mu.
type reloaded struct {
	err     error     // why it was not taken when it was read last
	success time.Time // when it was taken last
	restart []*api.ConfigChange
}

// Outcomes of a difference between two configurations.
const (
	outcomeCreated   = "created"
	outcomeRemoved   = "removed"
	outcomeReplanned = "replanned" // created anew, since it has not begun
	outcomeChanged   = "changed"
	outcomeKept      = "kept" // it runs, and is in the file no more
	outcomeRestart   = "restart"
	outcomeFailed    = "failed"
)

var (
	errDeconfigured = errors.New("the job is in the configuration no more")
	errReconfigured = errors.New("the job was configured anew before it began: join again")
)

// reload is what another configuration changes. It is made and checked as a whole before any of it is carried out.
type reload struct {
	next    Config // that holds from then on: what cannot change is as it was
	trial   intent // with the jobs that are removed and created
	changes []*api.ConfigChange
	drop    map[string]error             // jobs that go, with what their workers are told
	create  []string                     // jobs that come
	specs   map[string]JobSpec           // of jobs that stay, and are another
	steer   map[string]policy.Static     // rules of plans that change
	told    map[string]*api.ConfigChange // of these
	adapts  map[string][]string          // servers with memory for jobs whose adapt is another
}

func (r *reload) note(field, outcome, format string, args ...any) *api.ConfigChange {
	change := &api.ConfigChange{Field: field, Outcome: outcome, Note: fmt.Sprintf(format, args...)}
	r.changes = append(r.changes, change)
	return change
}

// fixed tells what is another and cannot change while the controller runs.
func (r *reload) fixed(was, is *Config) {
	for _, f := range []struct {
		field string
		same  bool
	}{
		{"listen", was.Listen == is.Listen}, {"switch", was.Switch == is.Switch}, {"service", was.Service == is.Service},
		{"hosts", slices.Equal(was.Hosts, is.Hosts)}, {"servers", slices.Equal(was.Servers, is.Servers)}, {"state", was.State == is.State},
	} {
		if !f.same {
			r.note(f.field, outcomeRestart, "it cannot change while the controller runs; restart it: jobs that run go on")
		}
	}
}

// planReload says what another configuration would change, and changes nothing. Errors are such that nothing of it should be
// carried out; those of type [*policy.FieldError] name the field at fault. c.mu is held.
func (c *Controller) planReload(is *Config) (*reload, error) {
	r := &reload{
		next: c.cfg, drop: map[string]error{}, specs: map[string]JobSpec{}, steer: map[string]policy.Static{},
		told: map[string]*api.ConfigChange{}, adapts: map[string][]string{},
	}
	r.next.Policy, r.next.Adapt, r.next.Jobs, r.next.Reserve = is.Policy, is.Adapt, is.Jobs, is.Reserve
	r.fixed(&c.cfg, is)
	if err := r.next.Validate(); err != nil { // of the file it is valid: it needs what is there after a restart alone
		return nil, fmt.Errorf("%w; restart the controller to have all of the file, whose other parts cannot change while it runs", err)
	}
	r.trial = c.intent
	r.trial.cfg, r.trial.jobs = &r.next, maps.Clone(c.intent.jobs)
	if !c.cfg.Policy.Complete(nil).Equal(is.Policy.Complete(nil)) {
		r.note("policy", outcomeChanged, "jobs of the file that have no policy of their own follow it")
	}
	if adaptText(&c.cfg.Adapt) != adaptText(&is.Adapt) {
		r.note("adapt", outcomeChanged, "policies of jobs of the file follow it in what they leave out, those of jobs to come too")
	}
	if c.cfg.Reserve != is.Reserve {
		r.note("reserve", outcomeChanged, "it is kept for jobs to come when others are created from now on")
	}
	was := make(map[string]JobSpec)
	for _, spec := range c.cfg.Jobs {
		was[spec.Name] = spec
		if c.intent.jobs[spec.Name] == nil || slices.ContainsFunc(is.Jobs, func(s JobSpec) bool { return s.Name == spec.Name }) {
			continue
		}
		if st := c.meets[spec.Name].state; st == stateRunning || st == stateInstalling {
			r.note("jobs."+spec.Name, outcomeKept, "it is in the file no more, but it is %s; 'xagg job remove %s' ends it", st, spec.Name)
			continue
		}
		r.note("jobs."+spec.Name, outcomeRemoved, "it is in the file no more")
		r.drop[spec.Name] = errDeconfigured
		delete(r.trial.jobs, spec.Name)
	}
	for i, spec := range is.Jobs {
		if c.intent.jobs[spec.Name] == nil {
			r.note("jobs."+spec.Name, outcomeCreated, "its workers may join")
			r.create = append(r.create, spec.Name)
			continue
		}
		before, ok := was[spec.Name]
		if !ok {
			before = c.intent.jobs[spec.Name].spec
		}
		if err := c.planReloadOf(r, before, spec); err != nil {
			return nil, under(fmt.Sprintf("jobs[%d]", i), err)
		}
	}
	// What comes is planned after all that goes is gone.
	var specs []JobSpec
	var indexes []int
	for i, spec := range is.Jobs {
		if slices.Contains(r.create, spec.Name) {
			specs, indexes = append(specs, spec), append(indexes, i)
		}
	}
	if _, _, err := r.trial.createAll(specs); err != nil {
		return nil, plansError(indexes, err)
	}
	return r, nil
}

// planReloadOf is planReload for a job that is there. before is what the configuration said of it.
func (c *Controller) planReloadOf(r *reload, before, spec JobSpec) error {
	j, meet, at := c.intent.jobs[spec.Name], c.meets[spec.Name], "jobs."+spec.Name
	begun := meet.state == stateRunning || meet.state == stateInstalling
	fixed := j.fixed(spec)
	replan := !j.rule.Equal(r.trial.ruleOf(spec))
	adapts := adaptText(before.Adapt) != adaptText(spec.Adapt) && adaptText(j.spec.Adapt) != adaptText(spec.Adapt)
	// A job that nobody is in is created anew; one that ranks wait in only if they could not go on with it.
	if !begun && (len(fixed) > 0 || replan && (meet.state != stateWaiting || meet.joined() == 0)) {
		r.note(at, outcomeReplanned, "it has not begun, or is over, and is created as it is configured now")
		r.drop[spec.Name] = errReconfigured
		delete(r.trial.jobs, spec.Name)
		r.create = append(r.create, spec.Name)
		return nil
	}
	for _, field := range fixed {
		r.note(at+"."+field, outcomeRestart, "it cannot change while the job runs; 'xagg job remove %s' and a reload give the job what is configured", spec.Name)
	}
	next := j.spec
	next.Policy = spec.Policy
	from := j.last().decision.Plan
	if replan {
		rule := r.trial.ruleOf(next)
		if rule.Pool != 0 && rule.Pool != j.decision.Pool {
			r.note(at+".policy.pool", outcomeRestart, "a job keeps its pool of %d while it runs", j.decision.Pool)
		}
		rule.Pool = 0
		d, err := r.trial.decide(j, rule)
		if err != nil {
			return under("policy", err)
		}
		from = d.Plan
		if _, same, err := r.trial.replan(j, rule, meet.strength()); err != nil { // it is busy
			r.note(at+".policy", outcomeFailed, "%v, then reload again", err)
		} else {
			if !same {
				r.told[spec.Name] = r.note(at+".policy", outcomeChanged, "the plan changes while the job runs: %s", d.Explanation)
			}
			r.steer[spec.Name] = rule
		}
	}
	if next.weight() != spec.weight() {
		r.note(at+".weight", outcomeChanged, "its share of what jobs to come leave to it; it keeps its pool")
	}
	next.Weight = spec.Weight
	if adapts {
		next.Adapt = spec.Adapt
		homes, err := r.trial.adaptable(j, next, from)
		if err != nil {
			return err
		}
		r.adapts[spec.Name] = homes
		r.note(at+".adapt", outcomeChanged, "by which policy the plan follows what is measured, from now on")
	}
	r.specs[spec.Name] = next
	return nil
}

// fixed returns the fields of a job that another configuration of it has otherwise and that cannot change while it runs.
func (j *job) fixed(spec JobSpec) (fields []string) {
	spec = spec.complete()
	for _, f := range []struct {
		field string
		same  bool
	}{
		{"ranks", j.spec.Ranks == spec.Ranks}, {"max_elems", j.spec.MaxElems == spec.MaxElems},
		{"consistency", j.spec.Consistency == spec.Consistency}, {"depth", j.spec.Depth == spec.Depth},
	} {
		if !f.same {
			fields = append(fields, f.field)
		}
	}
	return fields
}

// adaptText is a policy as text; empty = none.
func adaptText(a *adapt.Config) string {
	if a == nil {
		return ""
	}
	return a.YAML()
}

// Reload reads the configuration file again and has the controller follow it. All of it is checked before anything changes; a
// file that is wrong, or asks for what does not fit, changes nothing, and is the reply's error, in the log and in the status
// until one is taken. With dry it only says what would change. What is begun is carried out until ctx ends.
func (c *Controller) Reload(ctx context.Context, dry bool) (*api.ReloadConfigReply, error) {
	if c.file.Path == "" {
		return nil, status.Error(codes.FailedPrecondition, "the controller has no configuration file that it could read again")
	}
	c.reloading.Lock()
	defer c.reloading.Unlock()
	is, src, err := c.file.read()
	var r *reload
	c.mu.Lock()
	if c.stopping {
		c.mu.Unlock()
		return nil, status.Error(codes.Unavailable, "the controller is stopping")
	}
	if err == nil {
		if r, err = c.planReload(&is); err != nil {
			err = strictyaml.Locate(c.file.Path, src, policy.FieldOf(err), err)
		}
	}
	if dry || err != nil {
		if !dry {
			c.reloaded.err = err
		}
		c.mu.Unlock()
		if err != nil {
			c.log.Error("configuration is not taken, and nothing is changed", "file", c.file.Path, "dry_run", dry, "err", err)
			return &api.ReloadConfigReply{Error: err.Error()}, nil
		}
		return &api.ReloadConfigReply{Changes: r.changes}, nil
	}
	c.take(r)
	c.mu.Unlock()
	c.follow(ctx, r)
	for _, change := range r.changes {
		c.log.Info("configuration has changed", "field", change.Field, "outcome", change.Outcome, "note", change.Note)
	}
	c.log.Info("configuration is read again", "file", c.file.Path, "changes", len(r.changes))
	return &api.ReloadConfigReply{Changes: r.changes}, nil
}

// take makes a new configuration the one that holds. c.mu is held, and has been since it was planned.
func (c *Controller) take(r *reload) {
	c.cfg.Policy, c.cfg.Adapt, c.cfg.Jobs, c.cfg.Reserve = r.next.Policy, r.next.Adapt, r.next.Jobs, r.next.Reserve
	for name, why := range r.drop {
		c.meets[name].abort(why, nil)
		delete(c.meets, name)
		c.forget(name)
		delete(c.errs, name)
	}
	c.intent.jobs, c.intent.nextID = r.trial.jobs, r.trial.nextID
	for _, name := range r.create {
		j := c.intent.jobs[name]
		c.meets[name] = newRendezvous(j)
		if len(j.decision.Servers) > 0 {
			c.errs[name] = errNotInstalled
		}
	}
	for name, spec := range r.specs {
		c.intent.jobs[name].spec = spec
		homes, adapts := r.adapts[name]
		if !adapts {
			continue
		}
		c.intent.jobs[name].homes = homes
		if a := c.adaptations[name]; a != nil {
			a.id = 0 // is made anew
		}
	}
	c.reloaded = reloaded{success: time.Now()}
	for _, change := range r.changes {
		if change.Outcome == outcomeRestart {
			c.reloaded.restart = append(c.reloaded.restart, change)
		}
	}
}

// follow has the devices follow. What a device does not do now is in the status, and is tried again when it is back.
func (c *Controller) follow(ctx context.Context, r *reload) {
	if len(r.drop) > 0 {
		c.trySave()
		c.applying.Lock()
		err := c.bury(ctx)
		c.applying.Unlock()
		if err != nil {
			c.log.Warn("a job that was removed is not gone from the switch yet", "err", err)
		}
	}
	for _, name := range r.create {
		c.mu.Lock()
		j := c.intent.jobs[name]
		if j == nil { // it was removed this very moment
			c.mu.Unlock()
			continue
		}
		id := j.id
		c.mu.Unlock()
		if err := c.apply(ctx, id); err != nil {
			c.log.Warn("job is not installed yet", "job", name, "err", err)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(r.steer)) {
		_, err := c.steer(ctx, name, r.steer[name])
		if change := r.told[name]; err != nil && change != nil {
			change.Outcome, change.Note = outcomeFailed, err.Error()+"; reload again"
		}
	}
	c.trySave()
}

// ReloadConfig implements the API.
func (s *service) ReloadConfig(_ context.Context, req *api.ReloadConfigRequest) (*api.ReloadConfigReply, error) {
	// Not the caller's context: a caller that goes away must not leave half a change.
	return s.c.Reload(s.ctx, req.GetDryRun())
}

// configStatus says what became of the configuration file. c.mu is held.
func (c *Controller) configStatus() *api.ConfigStatus {
	out := &api.ConfigStatus{
		File: c.file.Path, SuccessTime: float64(c.reloaded.success.UnixNano()) / 1e9, Restart: c.reloaded.restart,
	}
	if c.reloaded.err != nil {
		out.Error = c.reloaded.err.Error()
	}
	return out
}
