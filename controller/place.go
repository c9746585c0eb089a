package controller

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"xagg/policy"
	"xagg/policy/place"
	"xagg/xdp"
)

const (
	// DefaultReserve is the share of the switch's slots, and of each server's memory, that is kept for jobs to come where nothing
	// else is asked for.
	DefaultReserve = 0.25
	// MaxWeight is the largest weight of a job.
	MaxWeight = 1000
)

// weight returns the job's weight with its default.
func (j JobSpec) weight() int { return max(j.Weight, 1) }

// hosts returns the servers that hold memory for the job: those that it was given, and those of the plans that it has.
func (j *job) hosts() []string {
	hosts := slices.Clone(j.homes)
	for _, p := range append(j.plans(), j.plan) {
		for _, name := range p.decision.Servers {
			if !slices.Contains(hosts, name) {
				hosts = append(hosts, name)
			}
		}
	}
	return hosts
}

// memoryOf returns how many slots of each of its servers a job takes.
func memoryOf(spec JobSpec) uint64 {
	return uint64(spec.Consistency.ServerRounds(max(spec.Depth, 1))) * uint64(chunksOf(spec.MaxElems))
}

// problem returns what there is, and what the jobs have but one.
func (in *intent) problem(but *job) *place.Problem {
	p := &place.Problem{Switches: []place.Switch{{Name: in.cfg.Switch.Name, Slots: in.slots}}, Reserve: in.cfg.Reserve}
	for _, s := range in.cfg.Servers {
		p.Servers = append(p.Servers, place.Server{Name: s.Name, Memory: in.memory(s), Jobs: xdp.MaxJobs})
	}
	for _, j := range in.sorted() {
		if j == but {
			continue
		}
		held := place.Held{
			Job: j.spec.Name, Weight: j.spec.weight(), Ranks: j.spec.Ranks, Switch: in.cfg.Switch.Name, Base: j.lease.base, Size: j.lease.size,
			Servers: j.hosts(), Streams: j.decision.Streams(), Memory: memoryOf(j.spec),
		}
		if j.spec.Adapt != nil { // it may steer any
			held.Streams = j.spec.Ranks
		}
		p.Held = append(p.Held, held)
	}
	return p
}

// memory returns how many slots a server has: as its agent said last, or else as the configuration says; 0 = not known.
func (in *intent) memory(s Server) uint64 {
	if slots := in.serverSlots[s.Name]; slots != 0 {
		return slots
	}
	slots, err := s.Memory.Slots()
	if err != nil {
		return 0 // of none: the configuration was checked
	}
	return uint64(slots)
}

// memoryFree returns the share of a server's memory that no job has; 0 where it is not known how much there is.
func (in *intent) memoryFree(server string) float64 {
	slots := in.memory(in.server(server))
	if slots == 0 {
		return 0
	}
	leased := uint64(0)
	for _, j := range in.jobs {
		if slices.Contains(j.hosts(), server) {
			leased += memoryOf(j.spec)
		}
	}
	return max(0, 1-float64(leased)/float64(slots))
}

// asks returns what a job asks for that is to have a plan by a rule.
func (in *intent) asks(spec JobSpec, rule policy.Static) place.Job {
	return place.Job{
		Input:  policy.Input{Job: spec.Name, Ranks: spec.Ranks, Quorum: spec.Consistency.Quorum, Wait: spec.Consistency.Wait},
		Weight: spec.weight(), Rule: rule, Steerable: spec.Adapt != nil, Memory: memoryOf(spec),
	}
}

// createAll plans jobs together, and reserves what they need of the switch: all of them or none. Their order does not matter.
// Errors: *[place.JobError] with those of one job, which are [*policy.FieldError], *existsError and *exhaustedError, and
// [*place.ShortError].
func (in *intent) createAll(specs []JobSpec) ([]*job, []place.Placement, error) {
	p := in.problem(nil)
	rules := make([]policy.Static, len(specs))
	for i, spec := range specs {
		rule, err := in.mayCreate(spec)
		if err != nil {
			return nil, nil, &place.JobError{Index: i, Name: spec.Name, Err: err}
		}
		rules[i] = rule
		p.Jobs = append(p.Jobs, in.asks(spec.complete(), rule))
	}
	placed, err := p.Solve()
	if err != nil {
		return nil, nil, err
	}
	order := make([]int, len(specs))
	for i := range order {
		order[i] = i
	}
	slices.SortFunc(order, func(a, b int) int { return cmp.Compare(specs[a].Name, specs[b].Name) })
	jobs := make([]*job, len(specs))
	for n, i := range order {
		jobs[i] = &job{
			spec: specs[i].complete(), rule: rules[i], homes: placed[i].Homes, lease: span{placed[i].Base, policy.SlotsPerPool * placed[i].Pool},
		}
		jobs[i].plan = jobs[i].newPlan(in.firstEpoch(), placed[i].Decision, specs[i].Ranks)
		if err := in.admit(jobs[i]); err != nil {
			for _, k := range order[:n] {
				delete(in.jobs, specs[k].Name)
			}
			return nil, nil, &place.JobError{Index: i, Name: specs[i].Name, Err: err}
		}
	}
	return jobs, placed, nil
}

// create is createAll for one job; its errors are without the job's name.
func (in *intent) create(spec JobSpec) (*job, error) {
	jobs, _, err := in.createAll([]JobSpec{spec})
	if err != nil {
		return nil, alone(err)
	}
	return jobs[0], nil
}

// alone returns the error of a problem with one job without the job's name.
func alone(err error) error {
	if one, ok := errors.AsType[*place.JobError](err); ok {
		return one.Err
	}
	return err
}

// deal decides a plan of a job that has its slots, at servers that have room for it. Errors are those of createAll, without
// the job's name.
func (in *intent) deal(spec JobSpec, rule policy.Static, but *job) (place.Placement, error) {
	p := in.problem(but)
	ask := in.asks(spec, rule)
	ask.Pool = but.decision.Pool
	p.Jobs = []place.Job{ask}
	placed, err := p.Solve()
	if err != nil {
		return place.Placement{}, alone(err)
	}
	return placed[0], nil
}

// settle has a job keep memory at the servers of its plan; one whose plan follows what is measured keeps what it had while the
// switch sums all.
func (j *job) settle(p policy.Plan) {
	if len(p.Servers) > 0 || j.spec.Adapt == nil {
		j.homes = p.Servers
	}
}

// quota returns how many of the switch's slots a job is entitled to by its weight.
func (in *intent) quota(j *job) int {
	all := 0
	for _, other := range in.jobs {
		all += other.spec.weight()
	}
	return place.QuotaSlots(in.slots, in.cfg.Reserve, j.spec.weight(), all)
}

// plansError names the configured jobs at fault: those with these indexes were planned together.
func plansError(indexes []int, err error) error {
	if one, ok := errors.AsType[*place.JobError](err); ok {
		return fmt.Errorf("plan job %q: %w", one.Name, under(fmt.Sprintf("jobs[%d]", indexes[one.Index]), one.Err))
	}
	return fmt.Errorf("plan jobs: %w", err)
}

// Place returns where a controller that begins with nothing places the jobs of its configuration, in their order, and why.
// Servers of which the configuration does not say how much memory they have are taken to have enough.
func Place(cfg Config) ([]place.Placement, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("check configuration: %w", err)
	}
	program, slots, err := loadProgram()
	if err != nil {
		return nil, err
	}
	in := freshIntent(&cfg, slots, program.TableSizes())
	indexes := make([]int, len(cfg.Jobs))
	for i := range indexes {
		indexes[i] = i
	}
	_, placed, err := in.createAll(cfg.Jobs)
	if err != nil {
		return nil, plansError(indexes, err)
	}
	return placed, nil
}
