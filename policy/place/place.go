// Package place divides the slots of switches and the memory of aggregation servers among jobs. It is pure: what there is,
// what jobs have and what others ask for goes in; out come the pool, the slots and the servers of each of those, with the
// reasons, or what there is too little of.
//
// Jobs that are placed together are solved together, so that their order does not matter:
//
//  1. Every job has a place: its own pool where it asks for one, or else a pool of at least 1, and memory at one server at
//     least where servers may sum for it. Otherwise the answer is a [*ShortError].
//  2. Pools are fair: the smallest ratio of pool to weight is as large as it can be, then the next one, and so on. No pool is
//     larger than is of use. All together the jobs get no more than their weights' part of the slots, and of what is free they
//     leave the share that is kept for jobs to come, but for pools that are asked for and pools of 1.
//  3. Servers are even: the sum of the squares of their loads, in streams of packets, is as small as it can be; of choices
//     that are equal in that, jobs are spread over as many servers as they may have.
//
// The first two are solved exactly, apart from memory so tight that packing it becomes hard. The third is for few jobs with
// few servers, and a local optimum for many; [Placement.Even] says which.
package place

import (
	"fmt"
	"math"
	"math/bits"
	"slices"
	"strings"

	"xagg/policy"
)

// Problem is what there is, and what is asked for.
type Problem struct {
	Switches []Switch
	Servers  []Server
	Jobs     []Job   // to be placed, together
	Held     []Held  // what the jobs have that are there, which they keep
	Reserve  float64 // share of all slots, and of each server's memory, that is kept for jobs to come, at least 0 and below 1
}

// Switch is a switch that any job's ranks can reach.
type Switch struct {
	Name  string
	Slots int
}

// Server is an aggregation server.
type Server struct {
	Name   string
	Memory uint64 // in slots; 0 = not known, and taken for as much as anybody asks for
	Jobs   int    // that it can have at a time; 0 = any number
}

// Job asks for a place.
type Job struct {
	// Input is what its rule decides from: its name, its ranks, and what else there is but Servers, Slots and MaxPool. A job with
	// a Pool has its slots already and gets servers alone.
	policy.Input
	Weight int // at least 1
	// Rule says what its plan is like. Of the servers that it names, or of all where it names none, the job gets those that
	// have room and that share the load evenly; a pool that it asks for it gets.
	Rule policy.Static
	// Steerable jobs may come to plans that steer any of their ranks: they have memory at servers from the beginning, and a
	// pool that fits all plans unless they ask for another.
	Steerable bool
	Memory    uint64 // slots that it takes of every server that sums for it
}

// Held is what a job has that is there.
type Held struct {
	Job           string
	Weight, Ranks int
	Switch        string
	Base, Size    int      // of its slots at the switch
	Servers       []string // that it has memory at
	Streams       int      // of packets that come to these, all together: [policy.Plan.Streams]
	Memory        uint64   // slots of each of them
}

// Placement is the place of a job.
type Placement struct {
	Job string
	policy.Decision
	Switch string // empty: the job had its slots before
	Base   int    // of its [policy.SlotsPerPool] x Pool slots in a row
	// Homes are the servers that it has memory at: those of its plan, or of plans to come where the switch sums all ranks now.
	Homes []string
	Quota int  // the pool that its weight entitles it to among all jobs, at least 1
	Even  bool // no other choice of servers shares their load more evenly
}

// JobError is a mistake in what one job asks for.
type JobError struct {
	Index int // of Problem.Jobs
	Name  string
	Err   error
}

// Error names the job.
func (e *JobError) Error() string { return fmt.Sprintf("job %q: %v", e.Name, e.Err) }

// Unwrap returns the error without the job.
func (e *JobError) Unwrap() error { return e.Err }

// ShortError says of what there is too little, and how much.
type ShortError struct {
	What       string // "slots of the switch", in the plural
	Need, Free uint64
	Hint       string // what can be done
}

// Error has the numbers, and what can be done.
func (e *ShortError) Error() string {
	return fmt.Sprintf("%d %s are needed and %d are free, %d too few; %s", e.Need, e.What, e.Free, e.Need-e.Free, e.Hint)
}

// Solve places the jobs, in their order. It is deterministic, and the order of the jobs changes nothing but the order of the
// answer. Its errors are of type [*JobError], [*ShortError] and, where the problem itself makes no sense, [*policy.FieldError].
func (p *Problem) Solve() ([]Placement, error) {
	deals, err := p.deal()
	if err != nil {
		return nil, err
	}
	shares, err := p.divide(deals)
	if err != nil {
		return nil, err
	}
	free := p.free()
	_, all := p.weights()
	out := make([]Placement, len(p.Jobs))
	for i, j := range p.Jobs {
		d, s := &deals.jobs[i], &shares[i]
		in := j.Input
		in.Servers, in.Slots, in.MaxPool = d.names, free, s.pool
		decision, err := d.rule.Decide(in)
		if err != nil {
			return nil, &JobError{i, j.Job, err}
		}
		out[i] = Placement{Job: j.Job, Decision: decision, Homes: d.names, Quota: s.quota, Even: deals.even}
		if j.Pool == 0 {
			out[i].Switch, out[i].Base = p.Switches[s.run.sw].Name, s.run.base
		}
		out[i].Explanation += p.explain(i, all, d, s, &out[i])
	}
	return out, nil
}

// check refuses what makes no sense.
func (p *Problem) check() error {
	fail := func(field, format string, args ...any) error {
		return &policy.FieldError{Field: field, Err: fmt.Errorf(format, args...)}
	}
	if !(p.Reserve >= 0 && p.Reserve < 1) { // NaN too
		return fail("reserve", "%v is not a share of at least 0 and below 1", p.Reserve)
	}
	if len(p.Switches) == 0 {
		return fail("switches", "there is none")
	}
	names := map[string]bool{}
	for i, j := range p.Jobs {
		switch {
		case j.Weight < 1:
			return &JobError{i, j.Job, fail("weight", "%d is less than 1", j.Weight)}
		case names[j.Job]:
			return &JobError{i, j.Job, fail("name", "another job has it")}
		}
		names[j.Job] = true
	}
	for i, h := range p.Held {
		at := fmt.Sprintf("held[%d]", i)
		sw := p.switchOf(h.Switch)
		switch {
		case names[h.Job]:
			return fail(at, "job %q is there", h.Job)
		case h.Weight < 1:
			return fail(at, "job %q has the weight %d", h.Job, h.Weight)
		case sw < 0:
			return fail(at, "job %q has slots of switch %q, which there is not", h.Job, h.Switch)
		case h.Size < 0 || h.Base < 0 || h.Base > p.Switches[sw].Slots-h.Size:
			return fail(at, "job %q has the slots %d to %d of switch %q, which has %d", h.Job, h.Base, h.Base+h.Size-1, h.Switch, p.Switches[sw].Slots)
		}
		for _, name := range h.Servers {
			if p.serverOf(name) < 0 {
				return fail(at, "job %q has memory of server %q, which there is not", h.Job, name)
			}
		}
	}
	return nil
}

func (p *Problem) switchOf(name string) int {
	return slices.IndexFunc(p.Switches, func(s Switch) bool { return s.Name == name })
}

func (p *Problem) serverOf(name string) int {
	return slices.IndexFunc(p.Servers, func(s Server) bool { return s.Name == name })
}

// slots returns the number of slots of all switches.
func (p *Problem) slots() (n int) {
	for _, s := range p.Switches {
		n += s.Slots
	}
	return n
}

// free returns the number of those that no job has.
func (p *Problem) free() int {
	n := p.slots()
	for _, h := range p.Held {
		n -= h.Size
	}
	return n
}

// weights returns the sum of the weights of the jobs to be placed, and of all.
func (p *Problem) weights() (asking, all int) {
	for _, j := range p.Jobs {
		asking += j.Weight
	}
	all = asking
	for _, h := range p.Held {
		all += h.Weight
	}
	return asking, all
}

// within returns the share of an amount that is not kept for jobs to come.
func (p *Problem) within(amount float64) float64 {
	return math.Floor(amount*(1-p.Reserve) + 1e-9) // 1 - 0.9 is a little less than 0.1
}

// QuotaSlots returns how many of so many slots a job is entitled to by its weight, where all jobs that are there, itself too,
// weigh so much.
func QuotaSlots(slots int, reserve float64, weight, all int) int {
	p := Problem{Reserve: reserve}
	return int(p.within(float64(slots)) * float64(weight) / float64(all))
}

// quotaPool returns a number of slots as a pool, at least 1.
func quotaPool(slots int) int { return 1 << (bits.Len(uint(max(1, slots/policy.SlotsPerPool))) - 1) }

// explain says in words what the rule's own explanation does not: what of its pool is due to other jobs, and why a job is not
// at all the servers that it may have. All jobs weigh so much together.
func (p *Problem) explain(i, all int, d *dealt, s *share, at *Placement) string {
	var b strings.Builder
	quota := fmt.Sprintf("a pool of %d, by its weight of %d in %d", s.quota, p.Jobs[i].Weight, all)
	if p.Reserve > 0 {
		quota += fmt.Sprintf(" and with %.3g %% of the slots kept for jobs to come", 100*p.Reserve)
	}
	switch {
	case p.Jobs[i].Pool != 0:
	case s.asked > s.quota:
		fmt.Fprintf(&b, "; it asked for more than its quota, %s", quota)
	case s.asked == 0 && s.pool < min(s.useful, s.quota):
		fmt.Fprintf(&b, "; more would be of use, up to %d, but what is free beside what is kept for jobs to come is too little or scattered; its quota is %s", s.useful, quota)
	case s.asked == 0 && s.pool < s.useful:
		fmt.Fprintf(&b, "; more would be of use, up to %d; its quota is %s", s.useful, quota)
	}
	if len(at.Servers) == 0 && len(d.names) > 0 {
		fmt.Fprintf(&b, "; %d slots are kept at %s for ranks that come to be steered", p.Jobs[i].Memory, strings.Join(d.names, " and "))
	}
	for _, name := range d.without {
		fmt.Fprintf(&b, "; not at %s", name)
	}
	return b.String()
}
