package adapt

import (
	"reflect"
	"strings"
	"testing"
	"time"

	"xagg/internal/strictyaml"
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
