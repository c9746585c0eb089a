package adapt

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/goccy/go-yaml"

	"xagg/internal/strictyaml"
	"xagg/policy"
	"xagg/policy/cost"
	"xagg/policy/rules"
	"xagg/policy/telemetry"
)

// Config is a policy that follows what is measured: plain data, read from YAML.
type Config struct {
	// Rule is the name of a rule that comes with the program, or else Define is a rule of one's own.
	Rule   string      `yaml:"rule,omitempty"`
	Define *rules.Spec `yaml:"define,omitempty"`
	// Cost are the parameters of rule cost-model; nil = the defaults.
	Cost   *cost.Params `yaml:"cost,omitempty"`
	Window int          `yaml:"window"` // rounds that percentiles are over
	Limits `yaml:",inline"`
}

// DefaultConfig returns what holds unless a policy says otherwise.
func DefaultConfig() Config {
	return Config{Rule: cost.Name, Window: telemetry.DefaultWindow, Limits: DefaultLimits()}
}

// Parse reads a policy from YAML. name is the file's, for errors, which begin with file, line and column.
func Parse(name string, src []byte) (Config, error) { return ParseOver(DefaultConfig(), name, src) }

// ParseOver is Parse on top of another policy than the default: see [WithBase].
func ParseOver(base Config, name string, src []byte) (Config, error) {
	c := base // of an empty file
	if len(strings.TrimSpace(string(src))) > 0 {
		if err := strictyaml.DecodeContext(WithBase(context.Background(), base), name, src, &c, strictyaml.Durations()); err != nil {
			return c, err
		}
	}
	if _, err := c.Compile(0); err != nil {
		return c, strictyaml.Locate(name, src, policy.FieldOf(err), err)
	}
	return c, nil
}

type baseKey struct{}

// WithBase has policies that are read with the context be as base in what they leave out: fields of mappings too, but
// for pin, which is one field. A policy that names another rule than base, or defines one, takes nothing of base's rule.
func WithBase(ctx context.Context, base Config) context.Context {
	return context.WithValue(ctx, baseKey{}, base)
}

// UnmarshalYAML reads a policy, also one that is a part of something else, on top of the context's base, or else the default.
func (c *Config) UnmarshalYAML(ctx context.Context, read func(any) error) error {
	base, ok := ctx.Value(baseKey{}).(Config)
	if !ok {
		base = DefaultConfig()
	}
	var given map[string]any
	if err := read(&given); err != nil {
		return err
	}
	if rule, named := given["rule"]; named && rule != base.Rule || given["define"] != nil {
		base.Rule, base.Define, base.Cost = "", nil, nil
	}
	type plain Config
	p := plain(base)
	if err := read(&p); err != nil {
		return err
	}
	if p.Rule == "" && p.Define == nil {
		p.Rule = DefaultConfig().Rule
	}
	*c = Config(p)
	return nil
}

// Open returns the policy that a name stands for: a file, or else a rule that comes with the program, with the default
// limits.
func Open(name string) (Config, error) {
	src, err := ReadSource(name)
	if err != nil {
		return Config{}, err
	}
	return Parse(filepath.Base(name), src)
}

// ReadSource returns the YAML of the policy that a name stands for, as [Open] has it: of a rule only its name.
func ReadSource(name string) ([]byte, error) {
	src, err := os.ReadFile(name)
	switch {
	case err == nil:
		return src, nil
	case errors.Is(err, os.ErrNotExist) && slices.Contains(Names(), name):
		return []byte("rule: " + name + "\n"), nil
	case errors.Is(err, os.ErrNotExist):
		return nil, fmt.Errorf("open policy %q: no such file, and no rule of that name; rules are %s", name, strings.Join(Names(), ", "))
	}
	return nil, fmt.Errorf("open policy: %w", err)
}

// YAML returns the policy as a file has it.
func (c *Config) YAML() string {
	src, err := yaml.Marshal(c)
	if err != nil {
		panic(err) // plain data
	}
	return string(src)
}

// Compile checks the policy for a job of so many ranks, 0 = of any number, and returns its rule. Its errors are of type
// [*policy.FieldError].
func (c *Config) Compile(ranks int) (Rule, error) {
	fail := func(field string, err error) (Rule, error) { return Rule{}, &policy.FieldError{Field: field, Err: err} }
	under := func(field string, err error) (Rule, error) {
		if bad, ok := errors.AsType[*policy.FieldError](err); ok {
			return fail(field+"."+bad.Field, bad.Err)
		}
		return Rule{}, err
	}
	if c.Window < 1 || c.Window > telemetry.MaxWindow {
		return fail("window", fmt.Errorf("%d rounds: want 1 to %d", c.Window, telemetry.MaxWindow))
	}
	if err := c.Validate(ranks); err != nil {
		return Rule{}, err
	}
	switch {
	case c.Cost != nil && c.Rule != cost.Name:
		return fail("cost", fmt.Errorf("it belongs to rule %q; leave it out or name that rule", cost.Name))
	case c.Define != nil && c.Rule != "":
		return fail("define", errors.New("a rule of one's own and the name of another do not go together; leave out one of them"))
	case c.Define != nil:
		r, err := rules.Compile(*c.Define)
		if err != nil {
			return under("define", err)
		}
		return ByScore(r), nil
	case c.Rule == cost.Name:
		p := cost.DefaultParams()
		if c.Cost != nil {
			p = *c.Cost
		}
		if err := p.Validate(); err != nil {
			return under("cost", err)
		}
		return ByCost(p), nil
	case !slices.Contains(rules.Names(), c.Rule):
		return fail("rule", unknown(c.Rule))
	}
	r, err := rules.Shipped(c.Rule)
	if err != nil {
		return fail("rule", err)
	}
	return ByScore(r), nil
}

// New returns the engine of a job of so many ranks.
func (c *Config) New(ranks int) (*Engine, error) {
	rule, err := c.Compile(ranks)
	if err != nil {
		return nil, err
	}
	return New(ranks, rule, c.Limits), nil
}
