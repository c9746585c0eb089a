package policy

import (
	"fmt"
	"math/bits"
	"slices"
	"strings"
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
	return s.Rule == t.Rule && s.Mode == t.Mode && s.Pool == t.Pool && slices.Equal(s.Steer, t.Steer) && slices.Equal(s.Servers, t.Servers)
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
