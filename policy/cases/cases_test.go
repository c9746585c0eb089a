package cases

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"xagg/policy/adapt"
)

// TestFiles runs the tests of the rules that come with the program.
func TestFiles(t *testing.T) {
	files, err := filepath.Glob("testdata/*.yaml")
	if err != nil || len(files) != len(adapt.Names()) {
		t.Fatalf("%d files, %v; want one for each of %v", len(files), err, adapt.Names())
	}
	for _, file := range files {
		src, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		f, err := Parse(filepath.Base(file), src)
		if err != nil {
			t.Fatal(err)
		}
		c, err := adapt.Open(f.Policy)
		if err != nil {
			t.Fatal(err)
		}
		for _, test := range f.Tests {
			if err := test.Run(c); err != nil {
				t.Errorf("%s: %v", file, err)
			}
		}
	}
}

// TestFailures: a test that the policy does not pass says where and how.
func TestFailures(t *testing.T) {
	c, err := adapt.Open("outlier")
	if err != nil {
		t.Fatal(err)
	}
	for steps, want := range map[string]string{
		"{rounds: 30, job: {round_p50: 0.1}, ranks: {3: {lag_p50: 0.3}}, expect: {steered: []}}": `test "x", step 1, round 30: ranks 3 are steered, want none`,
		"{rounds: 30, expect: {moves: 1}}":   `test "x", step 1, round 30: 0 moves, want 1`,
		"{rounds: 30, expect: {held: moon}}": `no rank is held by "moon"`,
		"{rounds: 3, rank: {lag_p50: -1}}":   `the decision's error is "check snapshot: rank.lag_p50 is -1, want none below 0", want ""`,
		"{rounds: 9, job: {round_p50: 0.1}, ranks: {3: {lag_p50: 0.3}}, expect: {steered: [3], within: 2}}": "step 1, round 2: ranks none are steered, want 3",
	} {
		f, err := Parse("t.yaml", []byte("policy: outlier\ntests:\n- {name: x, ranks: 4, steps: ["+steps+"]}\n"))
		if err != nil {
			t.Errorf("%s: %v", steps, err)
			continue
		}
		err = f.Tests[0].Run(c)
		if bad := (*Failure)(nil); !errors.As(err, &bad) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s:\ngot  %v\nwant %s", steps, err, want)
		}
	}
}

func TestBad(t *testing.T) {
	for src, want := range map[string]string{
		"tests: [{name: x, ranks: 1, steps: [{rounds: 1}]}]":                                    "policy: it is missing",
		"policy: x\ntests: []":                                                                  "t.yaml:2:8: tests: there are none",
		"policy: x\ntests: [{name: x, ranks: 65, steps: [{rounds: 1}]}]":                        "tests[0].ranks: 65: want 1 to 64",
		"policy: x\ntests: [{name: x, ranks: 1, steps: []}]":                                    "tests[0].steps: there are none",
		"policy: x\ntests: [{name: x, ranks: 1, steps: [{rounds: 0}]}]":                         "steps[0].rounds: 0: want at least 1",
		"policy: x\ntests: [{name: x, ranks: 1, steps: [{rounds: 1, rank: {speed: 1}}]}]":       "t.yaml:2:63: tests[0].steps[0].rank.speed: there is no such field; there are rank, steered",
		"policy: x\ntests: [{name: x, ranks: 3, steps: [{rounds: 1, ranks: {2: {speed: 1}}}]}]": "t.yaml:2:68: tests[0].steps[0].ranks.2.speed: there is no such field",
		"policy: x\ntests: [{name: x, ranks: 1, steps: [{rounds: 1, job: {name: 1}}]}]":         "job.name: it is a string",
		"policy: x\ntests: [{name: x, ranks: 1, steps: [{rounds: 1, ranks: {1: {}}}]}]":         "rank 1: ranks are 0 to 0",
		"policy: x\ntests: [{name: x, ranks: 1, steps: [{rounds: 1, expect: {within: 1}}]}]":    "say which ranks are to be steered",
		"policy: x\ntests: [{name: x, ranks: 1, steps: [{rounds: 1, expect: {stered: []}}]}]":   `unknown field "stered"`,
		"policy: x\ntests: [{name: x, ranks: 1, steps: [{rounds: 1, every: 1}]}]":               "t.yaml:2:",
	} {
		if _, err := Parse("t.yaml", []byte(src)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s:\ngot  %v\nwant %s", src, err, want)
		}
	}
}
