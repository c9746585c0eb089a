package main

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"

	"xagg/api"
	"xagg/policy/adapt"
	"xagg/policy/telemetry"
	"xagg/policy/trace"
)

// predicting is a decision of a rule that predicts.
func predicting(steered uint64, alternatives ...adapt.Alternative) *adapt.Decision {
	d := &adapt.Decision{Time: 1.5, Round: 20, Rule: "mine", Steered: steered, Alternatives: alternatives}
	for rank := range 4 {
		w := adapt.Why{Rank: rank, Place: adapt.Switch, When: true}
		if steered>>rank&1 != 0 {
			w.Place = adapt.Server
		}
		d.Ranks = append(d.Ranks, w)
	}
	return d
}

var (
	onServer = adapt.Alternative{Steered: 0b1000, Round: 0.1005, Blocked: 0.0002, Cost: 0.1006}
	onSwitch = adapt.Alternative{Steered: 0, Round: 0.1, Blocked: 0.06, Cost: 0.106}
)

// TestExplainAlternatives: what else could be done is told with what is predicted of it, and which of it was decided.
func TestExplainAlternatives(t *testing.T) {
	quorum := func(a adapt.Alternative, enough int) adapt.Alternative {
		a.Quorum = enough
		return a
	}
	both := predicting(0b1000, quorum(onServer, 2), quorum(onServer, 3), quorum(onSwitch, 3))
	both.Quorum, both.Wait = 3, 0.002
	for _, tt := range []struct {
		name     string
		decision *adapt.Decision
		want     string
	}{
		{"best", predicting(0b1000, onServer, onSwitch), `
SERVERS SUM  ROUND     SLOTS BLOCKED  COST
3            100.5 ms  0.2 ms         100.6 ms  chosen
none         100.0 ms  60.0 ms        106.0 ms
`},
		{"not the best yet", predicting(0, onServer, onSwitch), `
SERVERS SUM  ROUND     SLOTS BLOCKED  COST
3            100.5 ms  0.2 ms         100.6 ms
none         100.0 ms  60.0 ms        106.0 ms  chosen
the cheapest is predicted to cost 5.4 ms less than the chosen one: a rank moves`},
		{"quorum", both, `
SERVERS SUM  ENOUGH  ROUND     SLOTS BLOCKED  COST
3            2       100.5 ms  0.2 ms         100.6 ms
3            3       100.5 ms  0.2 ms         100.6 ms  chosen
none         3       100.0 ms  60.0 ms        106.0 ms
3 ranks are enough for a result, chunks wait 2.0 ms for more
`},
		{"pinned elsewhere", predicting(0b10, onServer, onSwitch), "\nthat servers sum 1 is none of them\n"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			snapshot, err := json.Marshal(telemetry.Snapshot{Ranks: make([]telemetry.Rank, 4)})
			if err != nil {
				t.Fatal(err)
			}
			decision, err := json.Marshal(tt.decision)
			if err != nil {
				t.Fatal(err)
			}
			var out bytes.Buffer
			reply := &api.ExplainReply{Job: &api.Job{Name: "train"}, Adapt: "rule: mine\n", Snapshot: snapshot, Decision: decision}
			if err := writeExplanation(&env{stdout: &out}, reply); err != nil {
				t.Fatal(err)
			}
			if !strings.Contains(out.String(), tt.want) || strings.Contains(out.String(), "the cheapest is") != strings.Contains(tt.want, "the cheapest is") {
				t.Errorf("got\n%s\nwant\n%s", out.String(), tt.want)
			}
		})
	}
	var out bytes.Buffer
	if err := writeAlternatives(&out, predicting(0)); err != nil || out.Len() > 0 {
		t.Errorf("of a rule that does not predict it says %q, %v", out.String(), err)
	}
}

// TestReplayPredictions: what is predicted of a decision is what its own rule says, or else the recorded one.
func TestReplayPredictions(t *testing.T) {
	recorded := &trace.Trace{Job: trace.Job{Job: "train", Ranks: 4}}
	for step, d := range []*adapt.Decision{predicting(0, onSwitch, onServer), predicting(0b1000, onServer, onSwitch), nil} {
		s := telemetry.Snapshot{Time: float64(step), Ranks: make([]telemetry.Rank, 4)}
		s.Job.Size, s.Job.Round, s.Job.Rounds = 4, float64(step), float64(step)
		recorded.Steps = append(recorded.Steps, trace.Step{Snapshot: s, Decision: d})
	}
	frozen := adapt.DefaultConfig() // which leaves all ranks on the switch, and predicts nothing
	frozen.Rule, frozen.Freeze = "outlier", true
	var out bytes.Buffer
	if err := replayTrace(&env{stdout: &out}, recorded, []string{"frozen"}, []adapt.Config{frozen}, "text"); err != nil {
		t.Fatal(err)
	}
	const want = `job train, 4 ranks, 3 steps
TIME    ROUND  RECORDED                                       frozen
2.00 s  2      ?                                              servers sum none
mean           round 100.2 ms, predicted in 2 of 3 steps      round 100.0 ms, predicted in 2 of 3 steps
`
	if squeeze(out.String()) != squeeze(want) {
		t.Errorf("got\n%s\nwant\n%s", out.String(), want)
	}

	out.Reset()
	if err := replayTrace(&env{stdout: &out}, recorded, []string{"frozen"}, []adapt.Config{frozen}, "json"); err != nil {
		t.Fatal(err)
	}
	var rounds []float64
	for dec := json.NewDecoder(&out); dec.More(); {
		var line struct{ Round float64 }
		if err := dec.Decode(&line); err != nil {
			t.Fatal(err)
		}
		rounds = append(rounds, line.Round)
	}
	if len(rounds) != 3 || rounds[0] != 0.1 || rounds[1] != 0.1 || rounds[2] != 0 {
		t.Errorf("rounds %v are predicted, want 0.1, 0.1 and none", rounds)
	}

	// Steps in which the quorum or its wait changes are shown.
	out.Reset()
	for i := range recorded.Steps {
		recorded.Steps[i].Decision = predicting(0)
		recorded.Steps[i].Decision.Quorum, recorded.Steps[i].Decision.Wait = 3, []float64{0.001, 0.002, 0.002}[i]
	}
	if err := replayTrace(&env{stdout: &out}, recorded, nil, nil, "text"); err != nil || strings.Count(out.String(), "quorum 3, wait 1.0 ms") != 1 ||
		strings.Count(out.String(), "quorum 3, wait 2.0 ms") != 2 {
		t.Errorf("with other waits: %v\n%s", err, out.String())
	}

	out.Reset()
	for i := range recorded.Steps {
		recorded.Steps[i].Decision = predicting(0)
	}
	if err := replayTrace(&env{stdout: &out}, recorded, nil, nil, "text"); err != nil || strings.Contains(out.String(), "mean") {
		t.Errorf("where nobody predicts: %v\n%s", err, out.String())
	}
}

// squeeze makes runs of spaces one.
func squeeze(s string) string {
	return strings.Join(strings.FieldsFunc(s, func(r rune) bool { return r == ' ' }), " ")
}
