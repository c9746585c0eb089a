// Package cases tests policies as code is tested: a file says what is measured, step by step, and where each rank is to be
// then.
package cases

import (
	"fmt"
	"maps"
	"math/bits"
	"slices"
	"strings"
	"time"

	"xagg/internal/strictyaml"
	"xagg/policy"
	"xagg/policy/adapt"
	"xagg/policy/telemetry"
)

// File holds the tests of a policy.
type File struct {
	// Policy names a file beside this one, or a rule that comes with the program.
	Policy string `yaml:"policy"`
	Tests  []Test `yaml:"tests"`
}

// Test is one job from its beginning.
type Test struct {
	Name    string `yaml:"name"`
	Ranks   int    `yaml:"ranks"`
	Steered []int  `yaml:"steered"` // ranks that servers sum in the beginning; the others are in the switch's cohort
	Steps   []Step `yaml:"steps"`
}

// Step is a time in which measurements stay the same, and what is expected of it.
type Step struct {
	Rounds int           `yaml:"rounds"`
	Every  time.Duration `yaml:"every"` // a round takes so long; 0 = 100ms
	// Fields of telemetry by their name without its group, as 'xagg policy explain' lists them; what is not named is as in the step
	// before, and 0 in the first. Rank is all ranks', Ranks single ones'. Of a list, such as rank.ready, the number is the value of each
	// of the step's rounds.
	Job    map[string]float64         `yaml:"job"`
	Rank   map[string]float64         `yaml:"rank"`
	Ranks  map[int]map[string]float64 `yaml:"ranks"`
	Switch map[string]float64         `yaml:"switch"`
	// Servers is the number of servers that are ready; nil: as before, and 1 in the first step.
	Servers *int `yaml:"servers"`

	Expect Expect `yaml:"expect"`
}

// Expect is what a step is to come to.
type Expect struct {
	// Steered are the ranks that servers sum at the end of the step; nil: anybody.
	Steered *[]int `yaml:"steered"`
	// Within is the number of rounds of the step after which that must be so, and stay so; 0 = at its end.
	Within int    `yaml:"within"`
	Moves  *int   `yaml:"moves"` // in the step, exactly; nil: any number
	Held   string `yaml:"held"`  // what some rank is told at the end, or a part of it
	Error  string `yaml:"error"` // what the last decision says, or a part of it
}

// Parse reads a file of tests. name is the file's, for errors.
func Parse(name string, src []byte) (*File, error) {
	var f File
	if err := strictyaml.Decode(name, src, &f, strictyaml.Durations()); err != nil {
		return nil, err
	}
	fail := func(field, format string, args ...any) error {
		return strictyaml.Locate(name, src, field, fmt.Errorf("%s: "+format, append([]any{field}, args...)...))
	}
	if f.Policy == "" {
		return nil, fail("policy", "it is missing: want a file, or the name of a rule")
	}
	if len(f.Tests) == 0 {
		return nil, fail("tests", "there are none")
	}
	for i, t := range f.Tests {
		at := fmt.Sprintf("tests[%d]", i)
		if t.Ranks < 1 || t.Ranks > policy.MaxRanks {
			return nil, fail(at+".ranks", "%d: want 1 to %d", t.Ranks, policy.MaxRanks)
		}
		if len(t.Steps) == 0 {
			return nil, fail(at+".steps", "there are none")
		}
		for _, rank := range t.Steered {
			if rank < 0 || rank >= t.Ranks {
				return nil, fail(at+".steered", "rank %d: ranks are 0 to %d", rank, t.Ranks-1)
			}
		}
		s := telemetry.Snapshot{Ranks: make([]telemetry.Rank, t.Ranks)}
		for k, step := range t.Steps {
			at := fmt.Sprintf("%s.steps[%d]", at, k)
			switch {
			case step.Rounds < 1:
				return nil, fail(at+".rounds", "%d: want at least 1", step.Rounds)
			case step.Every < 0:
				return nil, fail(at+".every", "%v: want a positive duration", step.Every)
			case step.Expect.Within < 0 || step.Expect.Within > step.Rounds:
				return nil, fail(at+".expect.within", "%d: want 1 to the step's %d rounds", step.Expect.Within, step.Rounds)
			case step.Expect.Within > 0 && step.Expect.Steered == nil:
				return nil, fail(at+".expect.within", "within which rounds what? say which ranks are to be steered")
			}
			for rank := range step.Ranks {
				if rank < 0 || rank >= t.Ranks {
					return nil, fail(at+".ranks", "rank %d: ranks are 0 to %d", rank, t.Ranks-1)
				}
			}
			if field, err := step.apply(&s); err != nil {
				return nil, fail(at+"."+field, "%w", err)
			}
		}
	}
	return &f, nil
}

// apply puts the step's fields into a snapshot. With an error it returns which of them is at fault.
func (s *Step) apply(to *telemetry.Snapshot) (field string, err error) {
	set := func(group string, target any, fields map[string]float64) {
		for _, name := range slices.Sorted(maps.Keys(fields)) {
			if err == nil {
				field, err = group+"."+name, telemetry.Set(target, name, fields[name])
			}
		}
	}
	set("job", &to.Job, s.Job)
	set("switch", &to.Switch, s.Switch)
	for i := range to.Ranks {
		set("rank", &to.Ranks[i], s.Rank)
	}
	for _, rank := range slices.Sorted(maps.Keys(s.Ranks)) {
		set(fmt.Sprintf("ranks.%d", rank), &to.Ranks[rank], s.Ranks[rank])
	}
	return field, err
}

// Failure is a test that has not come to what it was to.
type Failure struct {
	Test  string
	Step  int // from 1
	Round int // of the step, from 1
	What  string
	// Decision is the one of that round.
	Decision adapt.Decision
}

// Error says it in a line.
func (f *Failure) Error() string {
	return fmt.Sprintf("test %q, step %d, round %d: %s", f.Test, f.Step, f.Round, f.What)
}

// Run runs a test. Its error is of type [*Failure] where the policy is at fault.
func (t *Test) Run(c adapt.Config) error {
	engine, err := c.New(t.Ranks)
	if err != nil {
		return fmt.Errorf("test %q: %w", t.Name, err)
	}
	s := telemetry.Snapshot{Ranks: make([]telemetry.Rank, t.Ranks), Servers: []telemetry.Server{{Name: "s0", Ready: true, MemoryFree: 1}}}
	s.Switch.SlotsFree = 1
	steered := mask(t.Steered)
	ready := make([][]float64, t.Ranks) // of the rounds in the window
	for k, step := range t.Steps {
		if _, err := step.apply(&s); err != nil {
			return fmt.Errorf("test %q: %w", t.Name, err)
		}
		if step.Servers != nil {
			s.Servers = nil
			for i := range *step.Servers {
				s.Servers = append(s.Servers, telemetry.Server{Name: fmt.Sprintf("s%d", i), Ready: true, MemoryFree: 1})
			}
		}
		var d adapt.Decision
		moves := 0
		fail := func(round int, format string, args ...any) error {
			return &Failure{t.Name, k + 1, round, fmt.Sprintf(format, args...), d}
		}
		for round := 1; round <= step.Rounds; round++ {
			every := step.Every
			if every == 0 {
				every = 100 * time.Millisecond
			}
			s.Time += every.Seconds()
			s.Job.Size, s.Job.Round, s.Job.Rounds = float64(t.Ranks), s.Job.Round+1, s.Job.Rounds+1
			n := bits.OnesCount64(steered)
			s.Job.Steered, s.Job.Cohort = float64(n), float64(t.Ranks-n)
			for i := range s.Ranks {
				r := &s.Ranks[i]
				r.Rank, r.Steered, r.Rounds = float64(i), steered>>i&1 != 0, s.Job.Rounds
				ready[i] = append(ready[i], latest(r.Ready)...)
				r.Ready = ready[i][max(0, len(ready[i])-c.Window):]
			}
			d = engine.Step(&s)
			steered = d.Steered
			moves += len(d.Moves)
			if want := step.Expect.Steered; want != nil && (round == step.Rounds || step.Expect.Within > 0 && round >= step.Expect.Within) &&
				steered != mask(*want) {
				return fail(round, "ranks %s are steered, want %s", policy.FormatMask(steered), policy.FormatMask(mask(*want)))
			}
		}
		if want := step.Expect.Moves; want != nil && moves != *want {
			return fail(step.Rounds, "%d moves, want %d", moves, *want)
		}
		if want := step.Expect.Held; want != "" && !slices.ContainsFunc(d.Ranks, func(w adapt.Why) bool { return strings.Contains(w.Held, want) }) {
			return fail(step.Rounds, "no rank is held by %q", want)
		}
		if want := step.Expect.Error; !strings.Contains(d.Error, want) || want == "" && d.Error != "" {
			return fail(step.Rounds, "the decision's error is %q, want %q", d.Error, want)
		}
	}
	return nil
}

// latest returns the last of values, if there is any.
func latest(values []float64) []float64 { return values[max(0, len(values)-1):] }

func mask(ranks []int) (m uint64) {
	for _, r := range ranks {
		if r >= 0 && r < policy.MaxRanks {
			m |= 1 << r
		}
	}
	return m
}
