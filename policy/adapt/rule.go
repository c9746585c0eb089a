package adapt

import (
	"fmt"
	"slices"
	"strings"

	"github.com/goccy/go-yaml"

	"xagg/policy/cost"
	"xagg/policy/rules"
	"xagg/policy/telemetry"
)

// Rule gives ranks scores, and says between which of them a rank stays where it is.
type Rule struct {
	Name  string
	About string // a sentence: what it is for
	Enter rules.Enter
	Leave rules.Leave
	judge func(*telemetry.Snapshot, cost.Bounds) (verdict, error)
}

// verdict is what a rule says of a snapshot.
type verdict struct {
	scores       []float64 // by rank; none: it cannot say anything yet
	holds        []bool    // by rank: whether the rule's condition does; nil = it has none
	alternatives []Alternative
	late         uint64 // ranks that are late
	quorum       int    // how many ranks of a quorum job might be enough, and
	wait         float64
	steady       int // for how many rounds no rank must have become late before ranks join the cohort
}

// ByScore returns the rule of an expression.
func ByScore(r *rules.Rule) Rule {
	return Rule{r.Name, r.About, r.Enter, r.Leave, func(s *telemetry.Snapshot, _ cost.Bounds) (v verdict, err error) {
		v.scores, v.holds, err = r.Scores(s)
		return v, err
	}}
}

// ByCost returns the rule that predicts. The parameters must be valid.
func ByCost(p cost.Params) Rule {
	return Rule{cost.Name, cost.About, p.Enter, p.Leave, func(s *telemetry.Snapshot, b cost.Bounds) (verdict, error) {
		j := p.Judge(s, b)
		return verdict{scores: j.Scores, alternatives: j.Alternatives, late: j.Late, steady: j.Steady, quorum: j.Quorum, wait: j.Wait}, nil
	}}
}

// Names returns the names of the rules that come with the program.
func Names() []string { return append([]string{cost.Name}, rules.Names()...) }

// Source returns a rule that comes with the program as the text of a policy, which is an example for policies of one's own.
func Source(name string) (string, error) {
	switch {
	case name == cost.Name:
		p := cost.DefaultParams()
		src, err := yaml.Marshal(struct {
			Rule string       `yaml:"rule"`
			Cost *cost.Params `yaml:"cost"`
		}{name, &p})
		return string(src), err
	case !slices.Contains(rules.Names(), name):
		return "", unknown(name)
	}
	src, err := rules.Source(name)
	if err != nil {
		return "", err
	}
	return "define:\n  " + strings.ReplaceAll(strings.TrimRight(src, "\n"), "\n", "\n  ") + "\n", nil
}

// unknown is the error for the name of no rule.
func unknown(name string) error {
	return fmt.Errorf("find rule %q: want one of %s", name, strings.Join(Names(), ", "))
}
