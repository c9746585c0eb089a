package adapt

import (
	"reflect"
	"strings"
	"testing"
	"time"

	"xagg/internal/strictyaml"
	"xagg/policy/cost"
)

// TestParse: what a file does not say is the default, alone and as a part of something else, and what is written is read
// again.
func TestParse(t *testing.T) {
	want := DefaultConfig()
	want.Rule, want.Dwell, want.Pin = "threshold", 0, map[int]Place{2: Server}
	const src = "rule: threshold\ndwell: 0s\npin: {2: server}\n"
	got, err := Parse("p.yaml", []byte(src))
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, %v\nwant %+v", got, err, want)
	}
	var part struct {
		Adapt *Config `yaml:"adapt"`
	}
	if err := strictyaml.Decode("c.yaml", []byte("adapt: {rule: threshold, dwell: 0s, pin: {2: server}}"), &part); err != nil || !reflect.DeepEqual(*part.Adapt, want) {
		t.Errorf("got %+v, %v\nwant %+v", part.Adapt, err, want)
	}
	again, err := Parse("p.yaml", []byte(want.YAML()))
	if err != nil || !reflect.DeepEqual(again, want) {
		t.Errorf("written as\n%s\nand read as %+v, %v", want.YAML(), again, err)
	}
	if c, err := Parse("p.yaml", nil); err != nil || !reflect.DeepEqual(c, DefaultConfig()) {
		t.Errorf("of nothing: %+v, %v", c, err)
	}
	own, err := Parse("p.yaml", []byte("define:\n  name: mine\n  score: rank.lag_p95\n  enter: {above: 2, for: 1, of: 2}\n  leave: {below: 1, for: 1, of: 2}\ndwell: 1m\n"))
	if err != nil || own.Rule != "" || own.Define.Name != "mine" || own.Dwell != time.Minute {
		t.Errorf("a rule of one's own: %+v, %v", own, err)
	}
}

func TestParseBad(t *testing.T) {
	for src, want := range map[string]string{
		"rule: moon":        `p.yaml:1:7: rule: find rule "moon": want one of cost-model, bandwidth, late, loss`,
		"rules: moon":       `p.yaml:1:1: unknown field "rules"`,
		"window: 0":         "p.yaml:1:9: window: 0 rounds: want 1 to 4096",
		"dwell: 5":          "p.yaml:1:8: ",
		"moves: 0":          "p.yaml:1:8: moves: 0 a minute",
		"pin: {70: switch}": "p.yaml:1:",
		"cost: {price: 11}": "p.yaml:1:15: cost.price: 11: want 0 to 10",
		"cost: {prize: 1}":  `p.yaml:1:8: unknown field "prize"`,
		"cost: {leave: {below: 1, for: 1, of: 1}}": "p.yaml:1:23: cost.leave.below: 1 is above enter.above, 0.02",
		"rule: loss\ncost: {price: 1}":             `p.yaml:2:7: cost: it belongs to rule "cost-model"`,
		"rule: loss\ndefine: {name: x}":            "p.yaml:2:9: define: a rule of one's own and the name of another",
		"define: {name: x, score: rank.moon, enter: {above: 1, for: 1, of: 1}, leave: {below: 1, for: 1, of: 1}}": "p.yaml:1:26: define.score: ERROR: <input>:1:5: undefined field 'moon'",
	} {
		if _, err := Parse("p.yaml", []byte(src)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q:\ngot  %v\nwant %s", src, err, want)
		}
	}
	var part struct {
		Adapt *Config `yaml:"adapt"`
	}
	if err := strictyaml.Decode("c.yaml", []byte("adapt: {rulez: x}"), &part); err == nil || !strings.Contains(err.Error(), `unknown field "rulez"`) {
		t.Errorf("an unknown field of a part: %v", err)
	}
}

// TestParseOver: what a policy leaves out is as in what it is read on top of, and that stays as it was.
func TestParseOver(t *testing.T) {
	base, err := Parse("base", []byte("cost: {price: 0.5, enter: {above: 0.3, for: 1, of: 1}}\nwindow: 16\ndwell: 3s\npin: {0: switch, 1: server}\nfreeze: true\n"))
	if err != nil {
		t.Fatal(err)
	}
	written := base.YAML()
	mine, err := Parse("base", []byte("define: {name: mine, score: rank.lag_p50, enter: {above: 2, for: 1, of: 2}, leave: {below: 1, for: 1, of: 2}}\nmoves: 3"))
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		base Config
		src  string
		want func(*Config)
	}{
		{base, "", func(*Config) {}},
		{base, "{}", func(*Config) {}},
		{base, "dwell: 0s\nfreeze: false\nwindow: 2", func(c *Config) { c.Dwell, c.Freeze, c.Window = 0, false, 2 }},
		{base, "pin: {2: server}", func(c *Config) { c.Pin = map[int]Place{2: Server} }},
		{base, "cost: {hop: 0.2, enter: {of: 4}}", func(c *Config) {
			p := *base.Cost
			p.Hop, p.Enter.Of = 0.2, 4
			c.Cost = &p
		}},
		{base, "rule: cost-model\nmoves: 1", func(c *Config) { c.Moves = 1 }},
		{base, "rule: outlier", func(c *Config) { c.Rule, c.Cost = "outlier", nil }},
		{mine, "window: 3", func(c *Config) { c.Window = 3 }},
		{mine, "rule: cost-model\ncost: {price: 1}", func(c *Config) {
			p := cost.DefaultParams()
			p.Price = 1
			c.Rule, c.Define, c.Cost = cost.Name, nil, &p
		}},
		{mine, "define: {name: other, score: rank.lag_p95, enter: {above: 2, for: 1, of: 2}, leave: {below: 1, for: 1, of: 2}}", func(c *Config) {
			d := *mine.Define
			d.Name, d.Score = "other", "rank.lag_p95"
			c.Define = &d
		}},
	} {
		want := tt.base
		tt.want(&want)
		if got, err := ParseOver(tt.base, "p.yaml", []byte(tt.src)); err != nil || got.YAML() != want.YAML() {
			t.Errorf("%s: %v\ngot\n%s\nwant\n%s", tt.src, err, got.YAML(), want.YAML())
		}
	}
	if base.YAML() != written {
		t.Errorf("what policies were read on top of has become\n%s\nof\n%s", base.YAML(), written)
	}
}
