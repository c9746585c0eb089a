package rules

import (
	"strings"
	"testing"

	"xagg/policy/telemetry"
)

func snapshot() *telemetry.Snapshot {
	return &telemetry.Snapshot{
		Time: 10,
		Job:  telemetry.Job{Name: "train", Size: 4, Cohort: 4, RoundP50: 0.1, LagMedian: 0.001, LagMAD: 0.0005, RateMedian: 1e6},
		Ranks: []telemetry.Rank{
			{Rank: 0, Rate: 1e6, LagP50: 0.001}, {Rank: 1, Rate: 1e6, LagP50: 0.0005}, {Rank: 2, Rate: 1e6},
			{Rank: 3, Rate: 2.5e5, LagP50: 0.08, BlockedP50: 0.07, BlockedP95: 0.09, ResendShare: 0.03, LateShare: 0.9},
		},
		Switch: telemetry.Switch{Slots: 4096, SlotsFree: 0.05},
	}
}

// TestShipped: every rule that comes with the program compiles, is named as its file, and tells the rank that is slow in
// every way from the others.
func TestShipped(t *testing.T) {
	for _, name := range Names() {
		r, err := Shipped(name)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if r.Name != name || r.About == "" {
			t.Errorf("%s: named %q, about %q", name, r.Name, r.About)
		}
		scores, holds, err := r.Scores(snapshot())
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		for rank, score := range scores {
			if slow := rank == 3; slow != (holds[rank] && score > r.Enter.Above) || !slow && score >= r.Leave.Below {
				t.Errorf("%s: rank %d has score %v, enters above %v, leaves below %v, when %v", name, rank, score, r.Enter.Above,
					r.Leave.Below, holds[rank])
			}
		}
		if _, _, err := r.Scores(&telemetry.Snapshot{Job: telemetry.Job{Size: 1}, Ranks: make([]telemetry.Rank, 1)}); err != nil {
			t.Errorf("%s: nothing measured yet: %v", name, err)
		}
	}
}

// TestExpressions: whole numbers go with doubles, and indices stay indices.
func TestExpressions(t *testing.T) {
	for text, want := range map[string]float64{
		"3 * rank.lag_p50":                       0.24,
		"rank.rank - 1":                          2,
		"ranks[1].lag_p50 * 2":                   0.001,
		"rank.lag_p50 > 0 ? 1 : 0":               1,
		"7":                                      7,
		"-1":                                     -1,
		"math.greatest(rank.resend_share, 1, 0)": 1,
		"math.least(2, job.size)":                2,
		"double(ranks.filter(r, r.lag_p50 > 0.01).size())": 1,
		"ranks.exists(r, r.rank == 3) ? time : 0":          10,
		"cel.bind(x, job.size - job.cohort, x * x + 1)":    1,
		"switch.slots / 2": 2048,
	} {
		r, err := Compile(Spec{Name: "x", Score: text, Enter: Enter{1, 1, 1}, Leave: Leave{1, 1, 1}})
		if err != nil {
			t.Errorf("%s: %v", text, err)
			continue
		}
		scores, _, err := r.Scores(snapshot())
		if err != nil || scores[3] < want-1e-12 || scores[3] > want+1e-12 {
			t.Errorf("%s: %v, %v; want %v", text, scores, err, want)
		}
	}
}

func TestBad(t *testing.T) {
	const rest = "\nenter: {above: 2, for: 1, of: 1}\nleave: {below: 1, for: 1, of: 1}\n"
	for src, want := range map[string]string{
		"name: x\nscore: rank.speed" + rest:             "r.yaml:2:8: score: ERROR: <input>:1:5: undefined field 'speed'",
		"name: x\nscore: rank.lag_p50 > 1" + rest:       "r.yaml:2:8: score: it is of type bool, want double",
		"name: x\nscore: rank.lag_p50 +" + rest:         "r.yaml:2:8: score: ERROR: <input>:1:15: Syntax error",
		"name: x\nscore: \"1\"\nwhen: rank.rank" + rest: "r.yaml:3:7: when: it is of type double, want bool",
		"name: x" + rest:                "score: it is missing",
		"score: \"1\"" + rest:           "name: it is missing",
		"name: x\nscores: \"1\"" + rest: `r.yaml:2:1: unknown field "scores"`,
		"name: x\nscore: \"1\"\nenter: {above: 1, for: 1, of: 1}\nleave: {below: 2, for: 1, of: 1}":    "r.yaml:4:16: leave.below: 2 is above enter.above, 1",
		"name: x\nscore: \"1\"\nenter: {above: 1, for: 3, of: 2}\nleave: {below: 1, for: 1, of: 1}":    "r.yaml:3:24: enter.for: 3 of 2 rounds: want 1 to 2",
		"name: x\nscore: \"1\"\nenter: {above: 1, for: 1, of: 65}\nleave: {below: 1, for: 1, of: 1}":   "r.yaml:3:31: enter.of: 65 rounds: want 1 to 64",
		"name: x\nscore: \"1\"\nenter: {above: .nan, for: 1, of: 1}\nleave: {below: 1, for: 1, of: 1}": "r.yaml:3:16: enter.above: NaN: want a finite number",
	} {
		_, err := Parse("r.yaml", []byte(src))
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q:\ngot  %v\nwant %s", src, err, want)
		}
	}
}

// TestBadScores: an expression that cannot be evaluated is an error that names rule and rank.
func TestBadScores(t *testing.T) {
	for text, want := range map[string]string{
		"rank.lag_p50 / switch.slots_free": `evaluate score of rule "x" for rank 0: it is NaN`,
		"ranks[9].lag_p50":                 `evaluate score of rule "x" for rank 0: index out of bounds: 9`,
		"ranks.map(a, ranks.map(b, ranks.map(c, ranks.map(d, ranks.map(e, 1.0))))).size() > 1 ? 1.0 : 0.0": "cost limit",
	} {
		r, err := Compile(Spec{Name: "x", Score: text, Enter: Enter{1, 1, 1}, Leave: Leave{1, 1, 1}})
		if err != nil {
			t.Errorf("%s: %v", text, err)
			continue
		}
		s := snapshot()
		s.Switch.SlotsFree = 0
		s.Ranks[0].LagP50 = 0
		for len(s.Ranks) < 9 {
			s.Ranks = append(s.Ranks, telemetry.Rank{})
		}
		if _, _, err := r.Scores(s); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, want %s", text, err, want)
		}
	}
}

func BenchmarkScores(b *testing.B) {
	r, err := Shipped("outlier")
	if err != nil {
		b.Fatal(err)
	}
	s := snapshot()
	for len(s.Ranks) < 16 {
		s.Ranks = append(s.Ranks, telemetry.Rank{})
	}
	for b.Loop() {
		if _, _, err := r.Scores(s); err != nil {
			b.Fatal(err)
		}
	}
}
