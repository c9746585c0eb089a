// Package rules holds rules that operators read and write: a score by rank, in CEL (https://cel.dev) over the fields of a
// telemetry snapshot, and the thresholds between which a rank stays where it is. It is pure.
package rules

import (
	"fmt"
	"math"
	"reflect"
	"strings"

	"cel.dev/cel-go/cel"
	"cel.dev/cel-go/common/ast"
	"cel.dev/cel-go/common/operators"
	"cel.dev/cel-go/common/types"
	"cel.dev/cel-go/ext"

	"xagg/policy"
	"xagg/policy/telemetry"
)

// Spec is a rule: plain data, read from YAML.
type Spec struct {
	Name  string `yaml:"name"`
	About string `yaml:"about"` // a sentence: what it is for
	// Score is a CEL expression: a double, which is evaluated for each rank. What does not evaluate, by a division by zero or an index out
	// of range, is an error of that decision, which changes nothing.
	Score string `yaml:"score"`
	// When is a CEL expression: a bool, evaluated for each rank; where it is false the rank is as one that is below both
	// thresholds. Empty: always.
	When  string `yaml:"when"`
	Enter Enter  `yaml:"enter"` // when a rank of the cohort is steered to a server
	Leave Leave  `yaml:"leave"` // when a steered rank comes back to the cohort
}

// Enter says when a rank is steered: its score was above Above in For of the last Of rounds.
type Enter struct {
	Above float64 `yaml:"above"`
	For   int     `yaml:"for"`
	Of    int     `yaml:"of"`
}

// Leave says when a rank comes back: its score was below Below in For of the last Of rounds.
type Leave struct {
	Below float64 `yaml:"below"`
	For   int     `yaml:"for"`
	Of    int     `yaml:"of"`
}

// MaxOf is the largest number of rounds that thresholds look back.
const MaxOf = 64

func fieldf(field, format string, args ...any) error {
	return &policy.FieldError{Field: field, Err: fmt.Errorf(format, args...)}
}

// Rule is a rule that can be evaluated. It may be used from several goroutines.
type Rule struct {
	Spec
	score, when cel.Program
}

// Compile checks a rule and makes it ready. Its errors are of type [*policy.FieldError].
func Compile(spec Spec) (*Rule, error) {
	r := &Rule{Spec: spec}
	if spec.Name == "" {
		return nil, fieldf("name", "it is missing")
	}
	if err := ValidateThresholds(spec.Enter, spec.Leave); err != nil {
		return nil, err
	}
	var err error
	if r.score, err = compile("score", spec.Score, cel.DoubleType); err != nil {
		return nil, err
	}
	if spec.When != "" {
		if r.when, err = compile("when", spec.When, cel.BoolType); err != nil {
			return nil, err
		}
	}
	return r, nil
}

// ValidateThresholds checks the thresholds of a rule. Its errors are of type [*policy.FieldError].
func ValidateThresholds(enter Enter, leave Leave) error {
	for _, t := range []struct {
		name   string
		value  float64
		n, of  int
		symbol string
	}{{"enter", enter.Above, enter.For, enter.Of, "above"}, {"leave", leave.Below, leave.For, leave.Of, "below"}} {
		switch {
		case math.IsNaN(t.value) || math.IsInf(t.value, 0):
			return fieldf(t.name+"."+t.symbol, "%v: want a finite number", t.value)
		case t.of < 1 || t.of > MaxOf:
			return fieldf(t.name+".of", "%d rounds: want 1 to %d", t.of, MaxOf)
		case t.n < 1 || t.n > t.of:
			return fieldf(t.name+".for", "%d of %d rounds: want 1 to %d", t.n, t.of, t.of)
		}
	}
	if leave.Below > enter.Above {
		return fieldf("leave.below", "%v is above enter.above, %v: a rank between the two would go to and fro; want at most that",
			leave.Below, enter.Above)
	}
	return nil
}

// environment is what expressions can use.
var environment = func() *cel.Env {
	object := func(t reflect.Type) *cel.Type { return cel.ObjectType(t.String()) }
	env, err := cel.NewEnv(
		ext.NativeTypes(reflect.TypeFor[telemetry.Job](), reflect.TypeFor[telemetry.Rank](), reflect.TypeFor[telemetry.Switch](),
			reflect.TypeFor[telemetry.Server](), ext.ParseStructTags(true)),
		ext.Math(), ext.Lists(), ext.Bindings(),
		cel.CrossTypeNumericComparisons(true),
		cel.Variable("time", cel.DoubleType),
		cel.Variable("job", object(reflect.TypeFor[telemetry.Job]())),
		cel.Variable("rank", object(reflect.TypeFor[telemetry.Rank]())),
		cel.Variable("ranks", cel.ListType(object(reflect.TypeFor[telemetry.Rank]()))),
		cel.Variable("switch", object(reflect.TypeFor[telemetry.Switch]())),
		cel.Variable("servers", cel.ListType(object(reflect.TypeFor[telemetry.Server]()))),
	)
	if err != nil {
		panic(err) // it is the same everywhere, and tests have it
	}
	return env
}()

// costLimit bounds the work of one evaluation, in units of CEL's own.
const costLimit = 100_000

// compile checks an expression.
func compile(field, text string, want *cel.Type) (cel.Program, error) {
	if strings.TrimSpace(text) == "" {
		return nil, fieldf(field, "it is missing: want an expression, a %s; see 'xagg policy explain'", want)
	}
	parsed, issues := environment.Parse(text)
	if issues.Err() != nil {
		return nil, fieldf(field, "%w", issues.Err())
	}
	doubles(parsed.NativeRep().Expr())
	checked, issues := environment.Check(parsed)
	if issues.Err() != nil {
		return nil, fieldf(field, "%w", issues.Err())
	}
	if !checked.OutputType().IsExactType(want) {
		return nil, fieldf(field, "it is of type %s, want %s", checked.OutputType(), want)
	}
	program, err := environment.Program(checked, cel.EvalOptions(cel.OptOptimize), cel.CostLimit(costLimit))
	if err != nil {
		return nil, fieldf(field, "%w", err)
	}
	return program, nil
}

// arithmetic are the functions whose operands are doubles wherever telemetry is among them.
var arithmetic = map[string]bool{
	operators.Add: true, operators.Subtract: true, operators.Multiply: true, operators.Divide: true, operators.Negate: true,
	operators.Conditional: true, operators.Less: true, operators.LessEquals: true, operators.Greater: true, operators.GreaterEquals: true,
	operators.Equals: true, operators.NotEquals: true, "math.@max": true, "math.@min": true,
}

// doubles makes the whole numbers of an expression doubles, as all numbers of telemetry are: who writes 3 * job.lag_median need
// not know that CEL multiplies no int with a double. Indices stay what they are.
func doubles(e ast.Expr) {
	numbers := ast.NewExprFactory()
	convert := func(e ast.Expr) {
		if e.Kind() != ast.LiteralKind {
			return
		}
		if n, ok := e.AsLiteral().(types.Int); ok {
			e.SetKindCase(numbers.NewLiteral(e.ID(), types.Double(n)))
		}
	}
	convert(e)
	ast.PostOrderVisit(e, ast.NewExprVisitor(func(e ast.Expr) {
		if e.Kind() == ast.CallKind && arithmetic[e.AsCall().FunctionName()] {
			for _, arg := range e.AsCall().Args() {
				convert(arg)
				if arg.Kind() == ast.ListKind { // of math.greatest and math.least
					for _, x := range arg.AsList().Elements() {
						convert(x)
					}
				}
			}
		}
	}))
}

// Scores evaluates the rule for all ranks of a snapshot. holds says for which ranks When is true.
func (r *Rule) Scores(s *telemetry.Snapshot) (scores []float64, holds []bool, err error) {
	vars := map[string]any{
		"time": s.Time, "job": &s.Job, "ranks": s.Ranks, "switch": &s.Switch, "servers": s.Servers, "rank": nil,
	}
	scores, holds = make([]float64, len(s.Ranks)), make([]bool, len(s.Ranks))
	for i := range s.Ranks {
		vars["rank"] = &s.Ranks[i]
		holds[i] = true
		if r.when != nil {
			v, _, err := r.when.Eval(vars)
			if err != nil {
				return nil, nil, fmt.Errorf("evaluate when of rule %q for rank %d: %w", r.Name, i, err)
			}
			holds[i] = v.Value().(bool)
		}
		v, _, err := r.score.Eval(vars)
		if err != nil {
			return nil, nil, fmt.Errorf("evaluate score of rule %q for rank %d: %w", r.Name, i, err)
		}
		scores[i] = v.Value().(float64)
		if math.IsNaN(scores[i]) || math.IsInf(scores[i], 0) {
			return nil, nil, fmt.Errorf("evaluate score of rule %q for rank %d: it is %v, want a finite number; does it divide by zero?",
				r.Name, i, scores[i])
		}
	}
	return scores, holds, nil
}
