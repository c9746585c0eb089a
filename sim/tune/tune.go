package tune

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/goccy/go-yaml"
	"golang.org/x/sync/errgroup"

	"xagg/lab/scenario"
	"xagg/policy/adapt"
	"xagg/policy/cost"
	"xagg/policy/rules"
	"xagg/sim/timing"
)

// Dimension is a parameter of a policy, and the values that are tried.
type Dimension struct {
	Path   string   // in the policy's YAML, such as "cost.price" or "define.enter.above"
	Values []string // YAML
}

// ParseDimension reads a dimension from "path=value,value...".
func ParseDimension(s string) (Dimension, error) {
	path, values, ok := strings.Cut(s, "=")
	if d := (Dimension{path, strings.Split(values, ",")}); ok && path != "" && !slices.Contains(d.Values, "") {
		return d, nil
	}
	return Dimension{}, fmt.Errorf("%q: want a field of the policy and its values, such as cost.price=0,0.05,0.1", s)
}

// DefaultSpace returns what is searched of a policy unless something else is asked for: its thresholds and what they look at.
func DefaultSpace(c adapt.Config) []Dimension {
	window := Dimension{"window", []string{"8", "4", "16"}}
	if c.Define == nil && c.Rule == cost.Name {
		return []Dimension{
			{"cost.price", []string{"0.1", "0", "0.05", "0.2"}}, {"cost.trust", []string{"16", "0", "4", "64"}}, {"cost.enter.above", []string{"0.02", "0.01", "0.05"}}, window,
		}
	}
	space := []Dimension{window}
	if c.Define != nil {
		times := func(x float64) (values []string) {
			for _, f := range []float64{1, 0.5, 2} {
				values = append(values, fmt.Sprint(f*x))
			}
			return values
		}
		space = append(space, Dimension{"define.enter.above", times(c.Define.Enter.Above)}, Dimension{"define.leave.below", times(c.Define.Leave.Below)})
	}
	return space
}

// Open returns a policy in a form in which every parameter can be set: a rule that comes with the program is written out.
func Open(c adapt.Config) (adapt.Config, error) {
	switch {
	case c.Define != nil:
	case c.Rule == cost.Name:
		if c.Cost == nil {
			p := cost.DefaultParams()
			c.Cost = &p
		}
	default:
		r, err := rules.Shipped(c.Rule)
		if err != nil {
			return c, err
		}
		c.Rule, c.Define = "", &r.Spec
	}
	return c, nil
}

// with returns a policy with some of its fields set.
func with(c adapt.Config, fields map[string]string) (adapt.Config, error) {
	var tree map[string]any
	if err := yaml.Unmarshal([]byte(c.YAML()), &tree); err != nil {
		return c, err
	}
	for path, text := range fields {
		var value any
		if err := yaml.Unmarshal([]byte(text), &value); err != nil {
			return c, fmt.Errorf("%s: %q: %w", path, text, err)
		}
		at, names := tree, strings.Split(path, ".")
		for _, name := range names[:len(names)-1] {
			next, ok := at[name].(map[string]any)
			if !ok {
				return c, fmt.Errorf("%s: the policy has no %q to set it in", path, name)
			}
			at = next
		}
		at[names[len(names)-1]] = value
	}
	src, err := yaml.Marshal(tree)
	if err != nil {
		return c, err
	}
	return adapt.Parse("policy", src)
}

// Case is a scenario that policies are tried in.
type Case struct {
	*scenario.Scenario
	// Compute, if set, is how long ranks compute, instead of what the scenario draws: see [timing.Options].
	Compute func(job, rank, round int) time.Duration
}

// Options say how to search.
type Options struct {
	Space   []Dimension
	Runs    int    // policies that are tried at most, beside the one that the search begins with
	Seeds   int    // each of them in every scenario with so many seeds; as many others judge the one that is chosen
	Seed    uint64 // the first, and of the choice of policies where there are more than Runs
	Timing  timing.Options
	Current func(done, all int) // hears how far it is; nil: nobody
}

// Candidate is a policy, and what it came to. Means are over scenarios, jobs, consistencies and seeds.
type Candidate struct {
	Fields   map[string]string `json:"fields"`   // that differ from the policy that the search began with
	Relative float64           `json:"relative"` // mean time of a round, in multiples of the best plan's that stays
	Slots    float64           `json:"slots"`    // of the switch that jobs have leased
	Memory   float64           `json:"memory"`   // bytes of servers that jobs have leased
	Moves    float64           `json:"moves"`    // of ranks
	Config   adapt.Config      `json:"-"`
}

// Result is what a search found.
type Result struct {
	SchemaVersion int         `json:"schema_version"`
	Tried         int         `json:"tried"`   // that are another policy than the default
	Invalid       int         `json:"invalid"` // combinations that are no policy
	Failed        int         `json:"failed"`  // policies with which some job does not get to its end
	Possible      int         `json:"possible"`
	Default       Candidate   `json:"default"` // that the search began with
	Front         []Candidate `json:"front"`   // none is better in all of round time, slots and memory; by round time
	Chosen        Candidate   `json:"chosen"`
	// Judged is the chosen one, and Before the default, with other seeds than those that it was chosen with.
	Judged Candidate `json:"judged"`
	Before Candidate `json:"before"`
	Policy string    `json:"policy"` // YAML of the chosen one
}

// ErrNothing says that a search has nothing to compare.
var ErrNothing = errors.New("no scenario has a job whose plan can follow what is measured")

// Tune searches the parameters of a policy. The result depends on its arguments alone, and not on the number of cores.
func Tune(base adapt.Config, cases []Case, opts Options) (*Result, error) {
	base, err := Open(base)
	if err != nil {
		return nil, err
	}
	candidates, result, err := candidates(base, opts)
	if err != nil {
		return nil, err
	}
	seeds := func(from uint64) (list []uint64) {
		for i := range uint64(opts.Seeds) {
			list = append(list, from+i)
		}
		return list
	}
	trial, err := newTrial(cases, opts.Timing, seeds(opts.Seed))
	if err != nil {
		return nil, err
	}
	all := len(candidates)*len(trial.runs) + 2*len(trial.runs)
	done := 0
	progress := func() {
		if done += len(trial.runs); opts.Current != nil {
			opts.Current(done, all)
		}
	}
	var judged []Candidate
	for i := range candidates {
		switch err := trial.judge(&candidates[i]); {
		case err == nil:
			judged = append(judged, candidates[i])
		case i == 0:
			return nil, err
		default:
			result.Failed++
		}
		progress()
	}
	candidates = judged
	result.Default, result.Front = candidates[0], front(candidates)
	result.Chosen = choose(candidates)
	result.Policy = result.Chosen.Config.YAML()
	held, err := newTrial(cases, opts.Timing, seeds(opts.Seed+uint64(opts.Seeds)))
	if err != nil {
		return nil, err
	}
	result.Judged, result.Before = result.Chosen, result.Default
	for _, c := range []*Candidate{&result.Judged, &result.Before} {
		if err := held.judge(c); err != nil {
			return nil, err
		}
		progress()
	}
	return result, nil
}

// candidates returns the policies to try, the one that the search begins with first.
func candidates(base adapt.Config, opts Options) ([]Candidate, *Result, error) {
	r := &Result{SchemaVersion: SchemaVersion, Possible: 1}
	for _, d := range opts.Space {
		if r.Possible > math.MaxInt32/len(d.Values) {
			return nil, nil, fmt.Errorf("more than %d combinations; search fewer parameters at once", math.MaxInt32)
		}
		r.Possible *= len(d.Values)
	}
	order := rand.New(rand.NewPCG(opts.Seed, 0x7e)).Perm(r.Possible)
	if r.Possible <= opts.Runs {
		slices.Sort(order)
	}
	list := []Candidate{{Fields: map[string]string{}, Config: base}}
	known := map[string]bool{base.YAML(): true}
	var first error // of what is wrong with a policy
	for _, n := range order {
		if len(list) > opts.Runs {
			break
		}
		c := Candidate{Fields: map[string]string{}}
		for _, d := range opts.Space {
			c.Fields[d.Path] = d.Values[n%len(d.Values)]
			n /= len(d.Values)
		}
		var err error
		if c.Config, err = with(base, c.Fields); err != nil {
			r.Invalid++
			first = cmp.Or(first, err)
			continue
		}
		for path := range c.Fields { // what is as it was
			rest := map[string]string{path: c.Fields[path]}
			if one, err := with(base, rest); err == nil && one.YAML() == base.YAML() {
				delete(c.Fields, path)
			}
		}
		if text := c.Config.YAML(); !known[text] {
			known[text] = true
			list = append(list, c)
		}
	}
	r.Tried = len(list) - 1
	if r.Invalid > 0 && len(list) == 1 {
		return nil, nil, fmt.Errorf("no combination is a policy: %w", first)
	}
	return list, r, nil
}

// trial is what candidates are tried in.
type trial struct {
	runs []run
}

// run is a scenario in a mode with a seed.
type run struct {
	s    *scenario.Scenario
	opts timing.Options
	best map[string]float64 // by job: mean time of a round with the best plan that stays
}

func newTrial(cases []Case, opts timing.Options, seeds []uint64) (*trial, error) {
	t := &trial{}
	for _, c := range cases {
		opts.Compute = c.Compute
		for _, seed := range seeds {
			best := map[string]map[string]float64{} // by consistency and job
			for _, r := range Regrets(c.Scenario, opts, []uint64{seed}) {
				if r.Best == "" || r.Adaptive == 0 {
					continue
				}
				if best[r.Consistency] == nil {
					best[r.Consistency] = map[string]float64{}
				}
				best[r.Consistency][r.Job] = r.Static[r.Best]
			}
			for _, m := range timing.Modes() {
				if of := best[string(m.Consistency())]; m.Rule() != "" && len(of) == len(c.Jobs) {
					o := opts
					o.Mode, o.Seed = m, seed
					t.runs = append(t.runs, run{c.Scenario, o, of})
				}
			}
		}
	}
	if len(t.runs) == 0 {
		return nil, ErrNothing
	}
	return t, nil
}

// judge fills in what a candidate comes to.
func (t *trial) judge(c *Candidate) error {
	reports := make([]timing.Report, len(t.runs))
	var group errgroup.Group
	group.SetLimit(runtime.GOMAXPROCS(0))
	for i := range t.runs {
		group.Go(func() error {
			opts, cfg := t.runs[i].opts, c.Config
			opts.Adapt = &cfg
			return reports[i].Add(t.runs[i].s, opts)
		})
	}
	if err := group.Wait(); err != nil {
		return fmt.Errorf("with %s: %w", c.describe(), err)
	}
	c.Relative, c.Slots, c.Memory, c.Moves = 0, 0, 0, 0
	n := 0.0
	for i := range reports {
		for _, row := range reports[i].Rows {
			n++
			c.Relative += row.Round.Mean / t.runs[i].best[row.Job]
			c.Slots += float64(row.Slots)
			c.Memory += float64(row.Memory)
			c.Moves += float64(len(row.Moves))
		}
	}
	c.Relative, c.Slots, c.Memory, c.Moves = c.Relative/n, c.Slots/n, c.Memory/n, c.Moves/n
	return nil
}

// front returns the candidates that none is better than in all of round time, slots and memory.
func front(all []Candidate) (list []Candidate) {
	for i, c := range all {
		if !slices.ContainsFunc(all[:i], func(d Candidate) bool { return d.same(&c) }) &&
			!slices.ContainsFunc(all, func(d Candidate) bool {
				return d.Relative <= c.Relative && d.Slots <= c.Slots && d.Memory <= c.Memory && !d.same(&c)
			}) {
			list = append(list, c)
		}
	}
	slices.SortStableFunc(list, func(a, b Candidate) int { return cmp.Compare(a.Relative, b.Relative) })
	return list
}

func (c *Candidate) same(d *Candidate) bool {
	return c.Relative == d.Relative && c.Slots == d.Slots && c.Memory == d.Memory
}

// choose returns, of the candidates whose rounds are at most 1 % longer than the shortest, the one with the fewest slots, the least memory, the fewest
// changes from the default, and the fewest moves, in this order.
func choose(all []Candidate) Candidate {
	least := math.Inf(1)
	for _, c := range all {
		least = min(least, c.Relative)
	}
	return slices.MinFunc(slices.DeleteFunc(slices.Clone(all), func(c Candidate) bool { return c.Relative > 1.01*least }), func(a, b Candidate) int {
		return cmp.Or(cmp.Compare(a.Slots, b.Slots), cmp.Compare(a.Memory, b.Memory), cmp.Compare(len(a.Fields), len(b.Fields)), cmp.Compare(a.Moves, b.Moves),
			cmp.Compare(a.Relative, b.Relative))
	})
}

// describe says in which fields a candidate differs from the default.
func (c *Candidate) describe() string {
	var list []string
	for path, value := range c.Fields {
		list = append(list, path+"="+value)
	}
	if len(list) == 0 {
		return "the policy as it is"
	}
	slices.Sort(list)
	return strings.Join(list, " ")
}

// WriteJSON writes the result as JSON.
func (r *Result) WriteJSON(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(r)
}

// WriteText writes the result as a table, and the chosen policy.
func (r *Result) WriteText(w io.Writer) error {
	fmt.Fprintf(w, "Of %d combinations %d were tried beside the policy as it is; %d are no policy, and with %d some job does not get to its end. Rounds are in multiples of the best plan's that stays.\n",
		r.Possible, r.Tried, r.Invalid, r.Failed)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "\tROUND\tSWITCH SLOTS\tSERVER MEMORY\tMOVES\tPOLICY")
	row := func(mark string, c *Candidate) {
		fmt.Fprintf(t, "%s\t%.4f\t%.0f\t%.0f KiB\t%.1f\t%s\n", mark, c.Relative, c.Slots, c.Memory/1024, c.Moves, c.describe())
	}
	for i := range r.Front {
		row("", &r.Front[i])
	}
	row("before", &r.Default)
	row("chosen", &r.Chosen)
	row("before, other seeds", &r.Before)
	row("chosen, other seeds", &r.Judged)
	if err := t.Flush(); err != nil {
		return err
	}
	_, err := fmt.Fprintf(w, "\n%s", r.Policy)
	return err
}
