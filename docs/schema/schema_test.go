package schema

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/goccy/go-yaml"
	"github.com/santhosh-tekuri/jsonschema/v6"

	"xagg/policy/adapt"
	"xagg/policy/rules"
)

func compile(t *testing.T, name string) *jsonschema.Schema {
	t.Helper()
	text, ok := Of(name)
	if !ok {
		t.Fatalf("there is no schema of %s", name)
	}
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	c := jsonschema.NewCompiler()
	c.AssertFormat()
	if err := c.AddResource(name, doc); err != nil {
		t.Fatal(err)
	}
	s, err := c.Compile(name)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// validate validates YAML, as an editor does: its value as JSON.
func validate(s *jsonschema.Schema, src []byte) error {
	text, err := yaml.YAMLToJSON(src)
	if err != nil {
		return err
	}
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(text))
	if err != nil {
		return err
	}
	return s.Validate(doc)
}

// TestGood: every file that comes with the program, and every good one of the tests, is what its schema says.
func TestGood(t *testing.T) {
	for kind, globs := range map[string][]string{
		"controller": {"../../controller/example.yaml", "../../controller/testdata/*.good.yaml"},
		"scenario":   {"../../scenarios/*.yaml", "../../lab/scenario/testdata/*.good.yaml"},
	} {
		s := compile(t, kind)
		for _, glob := range globs {
			paths, err := filepath.Glob(glob)
			if err != nil || len(paths) == 0 {
				t.Errorf("%s: no files, %v", glob, err)
			}
			for _, path := range paths {
				src, err := os.ReadFile(path)
				if err != nil {
					t.Fatal(err)
				}
				if err := validate(s, src); err != nil {
					t.Errorf("%s: %v", path, err)
				}
			}
		}
	}
	s := compile(t, "policy")
	for _, name := range adapt.Names() {
		c, err := adapt.Open(name)
		if err != nil {
			t.Fatal(err)
		}
		c.Pin = map[int]adapt.Place{0: adapt.Switch}
		if err := validate(s, []byte(c.YAML())); err != nil {
			t.Errorf("policy %s: %v", name, err)
		}
	}
	for _, name := range rules.Names() { // as rules of one's own
		r, err := rules.Shipped(name)
		if err != nil {
			t.Fatal(err)
		}
		c := adapt.DefaultConfig()
		c.Rule, c.Define = "", &r.Spec
		if err := validate(s, []byte(c.YAML())); err != nil {
			t.Errorf("rule %s: %v", name, err)
		}
	}
}

// TestBad: files whose form is wrong are refused. What only their meaning is wrong in, a schema cannot see; these are the files, so
// that none is taken for the other.
func TestBad(t *testing.T) {
	for kind, b := range map[string]struct{ glob, meaning string }{
		"controller": {"../../controller/testdata/*.bad.yaml", `adapt-cel adapt-leave adapt-over adapt-type bad-agent bad-listen group-mac ip-service ip-twice job-name-twice job-policy job-quorum
			job-wait-long mac-twice memory-small multicast-ip name-switch name-twice no-switch-name policy-server policy port-cpu port-twice reserve`},
		"scenario": {"../../lab/scenario/testdata/*.bad.yaml", `buckets episode-from episode-overlap episode-rank episode-to-late episode-to job-name job-names link-rank link-slow link-zero
			loss-much loss-rank mean-long model name pool quorum-lag-most quorum-lag quorum-ranks quorum-rounds quorum-wait-long quorum-wait
			ranks-sum rate-huge rate-server-huge rate-server-sum rate-slow rate-zero rounds-many size-huge size-negative size-zero slow-fast
			slow-rank steer-rank steer-twice tensors-both values-huge`},
	} {
		s := compile(t, kind)
		paths, err := filepath.Glob(b.glob)
		if err != nil || len(paths) == 0 {
			t.Errorf("%s: no files, %v", b.glob, err)
		}
		var passed []string
		for _, path := range paths {
			src, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			if validate(s, src) == nil {
				passed = append(passed, strings.TrimSuffix(filepath.Base(path), ".bad.yaml"))
			}
		}
		if want := strings.Fields(b.meaning); !slices.Equal(passed, want) {
			t.Errorf("%s: the schema takes\n%s\nwant\n%s", kind, strings.Join(passed, " "), strings.Join(want, " "))
		}
	}
	for kind, bad := range map[string][]string{
		"policy":      {"rle: outlier", "rule: 7", "dwell: 5", "window: many", "pin: {0: moon}", "pin: {x: switch}", "moves: 0", "define: {score: x, entr: {}}", "freeze: 1"},
		"policy-test": {"tests: 7", "policy: x\ntests: [{nam: x}]", "tests: [{ranks: 0}]", "tests: [{ranks: 4, steps: [{rounds: 1, every: 5}]}]", "tests: [{steps: [{rank: {lag_p50: high}}]}]"},
	} {
		s := compile(t, kind)
		for _, src := range bad {
			if validate(s, []byte(src)) == nil {
				t.Errorf("%s: %s is taken", kind, fmt.Sprintf("%q", src))
			}
		}
	}
	const good = "policy: outlier\ntests: [{name: x, ranks: 4, steered: [1], steps: [{rounds: 20, every: 50ms, job: {round_p50: 0.1}, ranks: {3: {lag_p50: 0.3}}, expect: {steered: [3], within: 10, moves: 1}}]}]"
	if err := validate(compile(t, "policy-test"), []byte(good)); err != nil {
		t.Error(err)
	}
}

// TestNames: each name has a schema, and each schema a name.
func TestNames(t *testing.T) {
	entries, err := files.ReadDir(".")
	if err != nil || len(entries) != len(Names) {
		t.Errorf("%d files for the names %v, %v", len(entries), Names, err)
	}
	for _, name := range Names {
		if !strings.Contains(compile(t, name).Title, name) {
			t.Errorf("the schema of %s has another title", name)
		}
	}
}

// TestRanges: what is outside of a field's range neither the schema takes nor the program, and a range that the program has the
// schema has too.
func TestRanges(t *testing.T) {
	s := compile(t, "policy")
	fields, err := Fields("policy")
	if err != nil {
		t.Fatal(err)
	}
	const own = "define: {name: x, score: rank.lag_p50, enter: {above: 3, for: 1, of: 1}, leave: {below: 0, for: 1, of: 1}}\n"
	for _, f := range fields {
		if f.Type != "integer" && f.Type != "number" {
			continue
		}
		set := func(value float64) string {
			var doc map[string]any
			base := "cost: {enter: {above: 0.5, for: 1, of: 1}, leave: {below: 0.1, for: 1, of: 1}}"
			if strings.HasPrefix(f.Name, "define.") {
				base = own
			}
			if err := yaml.Unmarshal([]byte(base), &doc); err != nil {
				t.Fatal(err)
			}
			at := doc
			steps := strings.Split(f.Name, ".")
			for _, step := range steps[:len(steps)-1] {
				at = at[step].(map[string]any)
			}
			at[steps[len(steps)-1]] = value
			if f.Type == "integer" {
				at[steps[len(steps)-1]] = int64(value)
			}
			src, err := yaml.Marshal(doc)
			if err != nil {
				t.Fatal(err)
			}
			return string(src)
		}
		values := []float64{-1, 1 << 40}
		if f.Range != "" {
			var least, most float64
			if _, err := fmt.Sscanf(f.Range, "%v to %v", &least, &most); err != nil {
				t.Fatal(err)
			}
			values = []float64{least - 1, most + 1}
		}
		for _, value := range values {
			src := set(value)
			_, parsed := adapt.Parse("p.yaml", []byte(src))
			if strings.HasSuffix(f.Name, ".above") || strings.HasSuffix(f.Name, ".below") {
				continue // they are held against each other
			}
			if checked := validate(s, []byte(src)); (parsed == nil) != (checked == nil) {
				t.Errorf("%s: %v is, to the program: %v, to the schema: %v", f.Name, value, parsed, checked)
			} else if f.Range != "" && parsed == nil {
				t.Errorf("%s: %v is taken, and the range is %s", f.Name, value, f.Range)
			}
		}
	}
}
