package policy

import (
	"fmt"
	"math/bits"
	"slices"
	"strings"
	"time"
)

// RuleStatic is the name of the rule [Static].
const RuleStatic = "static"

// Mode says who sums.
type Mode string

const (
	// ModeSwitch has the switch sum all ranks.
	ModeSwitch Mode = "switch"
	// ModeServer steers all ranks to the servers.
	ModeServer Mode = "server"
	// ModeHybrid has the switch sum some ranks, and steers the others to the servers, which combine both.
	ModeHybrid Mode = "hybrid"
)

// Static is a rule that decides by what it was told, whatever the network does. Its zero value has the switch sum
// all ranks with the default pool.
type Static struct {
	Rule    string   `yaml:"rule"`    // "static", or empty for the same
	Mode    Mode     `yaml:"mode"`    // empty = switch
	Steer   []int    `yaml:"steer"`   // ModeHybrid: ranks that go to the servers
	Servers []string `yaml:"servers"` // ModeServer and ModeHybrid: names; empty = all there are
	Pool    int      `yaml:"pool"`    // slots per version, a power of two; 0 = as many as the switch's ports can queue, at most MaxDefaultPool
	// Quorum is how many ranks are enough for a result of a job with a quorum: from the job's own to all; 0 = the job's own.
	Quorum int `yaml:"quorum"`
	// Wait is how long a chunk of such a job is kept open for more, from its first arrival: up to MaxWait, in whole
	// microseconds; nil = the job's own.
	Wait *time.Duration `yaml:"wait"`
}

// mode returns the mode with its default.
func (s Static) mode() Mode {
	if s.Mode == "" {
		return ModeSwitch
	}
	return s.Mode
}

// Complete returns the rule with its defaults filled in, where there are these servers: rules that are equal then decide the
// same. The pool stays open.
func (s Static) Complete(servers []string) Static {
	s.Rule, s.Mode = RuleStatic, s.mode()
	if s.Mode != ModeSwitch && len(s.Servers) == 0 {
		s.Servers = servers
	}
	return s
}

// Equal reports whether two rules say the same in the same words.
func (s Static) Equal(t Static) bool {
	return s.Rule == t.Rule && s.Mode == t.Mode && s.Pool == t.Pool && slices.Equal(s.Steer, t.Steer) && slices.Equal(s.Servers, t.Servers) &&
		s.Quorum == t.Quorum && (s.Wait == nil) == (t.Wait == nil) && (s.Wait == nil || *s.Wait == *t.Wait)
}

// Validate checks what can be checked without a job. Its errors are of type [*FieldError].
func (s Static) Validate() error {
	if s.Rule != "" && s.Rule != RuleStatic {
		return fieldf("rule", "%q is not a rule; want %q", s.Rule, RuleStatic)
	}
	switch s.mode() {
	case ModeSwitch:
		if len(s.Servers) > 0 {
			return fieldf("servers", "mode %q uses no servers; leave them out, or set mode to %q or %q",
				ModeSwitch, ModeServer, ModeHybrid)
		}
	case ModeServer, ModeHybrid:
	default:
		return fieldf("mode", "%q is not a mode; want %q, %q or %q", s.Mode, ModeSwitch, ModeServer, ModeHybrid)
	}
	if s.mode() == ModeHybrid {
		if len(s.Steer) == 0 {
			return fieldf("steer", "mode %q needs at least one rank that goes to a server", ModeHybrid)
		}
	} else if len(s.Steer) > 0 {
		return fieldf("steer", "only mode %q steers single ranks, not mode %q", ModeHybrid, s.mode())
	}
	for i, r := range s.Steer {
		field := fmt.Sprintf("steer[%d]", i)
		if r < 0 || r >= MaxRanks {
			return fieldf(field, "rank %d is outside 0..%d", r, MaxRanks-1)
		}
		if slices.Contains(s.Steer[:i], r) {
			return fieldf(field, "rank %d is listed twice", r)
		}
	}
	for i, name := range s.Servers {
		field := fmt.Sprintf("servers[%d]", i)
		if name == "" {
			return fieldf(field, "a server's name cannot be empty")
		}
		if slices.Contains(s.Servers[:i], name) {
			return fieldf(field, "server %q is listed twice", name)
		}
	}
	if s.Pool < 0 || bits.OnesCount(uint(s.Pool)) > 1 {
		return fieldf("pool", "%d is not a power of two", s.Pool)
	}
	if s.Quorum < 0 || s.Quorum > MaxRanks {
		return fieldf("quorum", "%d is outside 1..%d", s.Quorum, MaxRanks)
	}
	if s.Wait == nil {
		return nil
	}
	return CheckWait("wait", *s.Wait)
}

// CheckWait checks how long chunks are to be kept open, which a field of that name says. Its errors are of type
// [*FieldError].
func CheckWait(field string, wait time.Duration) error {
	if wait < 0 || wait > MaxWait {
		return fieldf(field, "%s is outside 0s..%s", wait, MaxWait)
	}
	if wait%time.Microsecond != 0 {
		return fieldf(field, "%s is not a whole number of microseconds", wait)
	}
	return nil
}

// Decide plans a job. Its errors are of type [*FieldError], and of type [*SlotsError] where the switch has too few
// free slots.
func (s Static) Decide(in Input) (Decision, error) {
	if in.Ranks < 1 || in.Ranks > MaxRanks {
		return Decision{}, fieldf("ranks", "%d ranks, want 1..%d", in.Ranks, MaxRanks)
	}
	if err := s.Validate(); err != nil {
		return Decision{}, err
	}
	all := allRanks(in.Ranks)
	plan := Plan{Cohort: all, Pool: s.Pool}
	if s.mode() != ModeSwitch {
		servers, err := s.servers(in)
		if err != nil {
			return Decision{}, err
		}
		plan.Servers = servers
	}
	switch s.mode() {
	case ModeServer:
		plan.Cohort, plan.Steered = 0, all
	case ModeHybrid:
		for i, r := range s.Steer {
			if r >= in.Ranks {
				return Decision{}, fieldf(fmt.Sprintf("steer[%d]", i), "rank %d is beyond the job's ranks 0..%d",
					r, in.Ranks-1)
			}
			plan.Steered |= 1 << r
		}
		plan.Cohort = all &^ plan.Steered
		if n := bits.OnesCount64(plan.Cohort); n < 2 {
			return Decision{}, fieldf("steer", "%d of %d ranks are steered, which leaves the switch %d to sum; "+
				"a cohort has at least 2, otherwise use mode %q", len(s.Steer), in.Ranks, n, ModeServer)
		}
	}
	var err error
	if plan.Quorum, plan.Wait, err = s.quorum(in); err != nil {
		return Decision{}, err
	}
	if in.Pool != 0 {
		if s.Pool != 0 && s.Pool != in.Pool {
			return Decision{}, fieldf("pool", "%d, but the job was created with a pool of %d, which stays; leave it out",
				s.Pool, in.Pool)
		}
		plan.Pool = in.Pool
		return Decision{Plan: plan, Explanation: s.explain(in, plan)}, nil
	}
	if plan.Pool == 0 {
		plan.Pool = defaultPool(plan)
		if in.MaxPool != 0 {
			plan.Pool = min(plan.Pool, in.MaxPool)
		}
	}
	if need := SlotsPerPool * plan.Pool; need > in.Slots {
		return Decision{}, &SlotsError{Pool: plan.Pool, Need: need, Free: in.Slots}
	}
	return Decision{Plan: plan, Explanation: s.explain(in, plan)}, nil
}

// Rule returns the rule that decides the plan again: who sums, quorum and wait, but not the pool, which stays.
func (p Plan) Rule() Static {
	s := Static{Mode: ModeHybrid, Servers: slices.Clone(p.Servers)}
	switch {
	case p.Steered == 0:
		s.Mode, s.Servers = ModeSwitch, nil
	case p.Cohort == 0:
		s.Mode = ModeServer
	default:
		for m := p.Steered; m != 0; m &= m - 1 {
			s.Steer = append(s.Steer, bits.TrailingZeros64(m))
		}
	}
	if p.Quorum != 0 {
		s.Quorum, s.Wait = p.Quorum, new(p.Wait)
	}
	return s
}

func (s Static) servers(in Input) ([]string, error) {
	if len(in.Servers) == 0 {
		return nil, fieldf("mode", "mode %q needs an aggregation server, and there is none", s.mode())
	}
	if len(s.Servers) == 0 {
		return slices.Clone(in.Servers), nil
	}
	for i, name := range s.Servers {
		if !slices.Contains(in.Servers, name) {
			return nil, fieldf(fmt.Sprintf("servers[%d]", i), "no server %q; there are %s", name,
				strings.Join(in.Servers, ", "))
		}
	}
	return slices.Clone(s.Servers), nil
}

// quorum returns how many ranks are enough for a result, and how long a chunk waits for more; 0 and 0 in a job without a
// quorum.
func (s Static) quorum(in Input) (ranks int, wait time.Duration, err error) {
	ranks, wait = in.Quorum, in.Wait
	if s.Quorum != 0 {
		ranks = s.Quorum
	}
	if s.Wait != nil {
		wait = *s.Wait
	}
	switch {
	case in.Quorum == 0 && s.Quorum != 0:
		return 0, 0, fieldf("quorum", "%d, but the results of job %q are not made by a quorum; leave it out, or create the job with one", s.Quorum, in.Job)
	case in.Quorum == 0 && s.Wait != nil:
		return 0, 0, fieldf("wait", "%s, but the results of job %q are not made by a quorum; leave it out, or create the job with one", wait, in.Job)
	case ranks < in.Quorum || ranks > in.Ranks:
		return 0, 0, fieldf("quorum", "%d is outside %d..%d, from what the job was created with, the least that its ranks take, to all of them",
			ranks, in.Quorum, in.Ranks)
	}
	return ranks, wait, nil
}

func (s Static) explain(in Input, p Plan) string {
	var b strings.Builder
	fmt.Fprintf(&b, "rule %s, mode %s: of the %d ranks of job %q ", RuleStatic, s.mode(), in.Ranks, in.Job)
	switch s.mode() {
	case ModeSwitch:
		fmt.Fprintf(&b, "the switch sums all (%s)", FormatMask(p.Cohort))
	case ModeServer:
		fmt.Fprintf(&b, "all (%s) are steered to %s", FormatMask(p.Steered), serverList(p.Servers))
	case ModeHybrid:
		fmt.Fprintf(&b, "the switch sums %s and %s are steered to %s, which closes chunks",
			FormatMask(p.Cohort), FormatMask(p.Steered), serverList(p.Servers))
	}
	if p.Quorum != 0 {
		fmt.Fprintf(&b, "; %d of them are enough for a result, %s after the first", p.Quorum, p.Wait)
	}
	if in.Pool != 0 {
		fmt.Fprintf(&b, "; pool %d stays", p.Pool)
		if fit := defaultPool(p); fit < p.Pool {
			fmt.Fprintf(&b, ", though with more than %d a port's queue may overflow under this plan", fit)
		}
		return b.String()
	}
	fmt.Fprintf(&b, "; pool %d takes %d of %d free slots", p.Pool, SlotsPerPool*p.Pool, in.Slots)
	return b.String()
}

func serverList(names []string) string {
	if len(names) == 1 {
		return "server " + names[0]
	}
	return "servers " + strings.Join(names, ", ")
}

// SlotsError says that a plan needs more switch slots than are free.
type SlotsError struct {
	Pool, Need, Free int
}

// Error has the numbers, and what can be done.
func (e *SlotsError) Error() string {
	return fmt.Sprintf("a pool of %d needs %d slots and %d are free; choose a smaller pool or remove a job",
		e.Pool, e.Need, e.Free)
}
