package bench

import (
	"encoding/json"
	"errors"
	"io"
	"reflect"
	"strings"
	"testing"
	"time"

	"xagg/lab/results"
	"xagg/policy/adapt"
	"xagg/policy/telemetry"
	"xagg/policy/trace"
)

// recorded is what a controller tells of a job of four ranks in which rank 3 becomes slow, a line every 10 ms.
func recorded(t *testing.T) *decisions {
	t.Helper()
	c := adapt.DefaultConfig()
	c.Rule = "outlier"
	engine, err := c.New(4)
	if err != nil {
		t.Fatal(err)
	}
	d := &decisions{ended: make(chan error, 1)}
	d.ended <- io.EOF
	w := trace.NewWriter(&d.trace, "train", 4, c, nil)
	for round := range 12 {
		s := telemetry.Snapshot{Time: float64(round), Ranks: make([]telemetry.Rank, 4), Servers: []telemetry.Server{{Name: "s0", Ready: true}}}
		s.Job.Size, s.Job.Round, s.Job.Rounds, s.Job.RoundP50 = 4, float64(round), float64(round+1), 0.1
		if round >= 4 {
			s.Ranks[3].LagP50 = 1
		}
		if s.Ranks[3].Steered = round > 8; s.Ranks[3].Steered {
			s.Ranks[3].LagP50 = 0
		}
		decision := engine.Step(&s)
		if err := w.Step(&s, &decision); err != nil {
			t.Fatal(err)
		}
	}
	for i := range strings.Count(d.trace.String(), "\n") {
		d.heard = append(d.heard, time.Duration(i)*10*ms)
	}
	return d
}

// under is a rank whose rounds take 20 ms.
func under(rank int, at time.Duration) int { return int(at/(20*ms)) - rank }

// TestDecisions: what was decided is decided again, and the moves are noted with the round that was under way when they were heard of.
func TestDecisions(t *testing.T) {
	j := &results.Job{Name: "train"}
	if err := recorded(t).read(j, under); err != nil {
		t.Fatal(err)
	}
	// The ninth decision is the 18th line after the first.
	want := []results.Move{{Round: 9 - 3, Rank: 3, To: "server", Why: "score 200 above 4 in 5 of 8 rounds"}}
	if !reflect.DeepEqual(j.Moves, want) || j.Quorums != nil {
		t.Errorf("moves %+v, quorums %+v, want moves %+v alone", j.Moves, j.Quorums, want)
	}

	changed := recorded(t)
	text := strings.Replace(changed.trace.String(), `"to":"server"`, `"to":"switch"`, 1)
	changed.trace.Reset()
	changed.trace.WriteString(text)
	if err := changed.read(j, under); err == nil || !strings.Contains(err.Error(), "policy of job train: a decision differs from the one that was recorded") {
		t.Errorf("a decision that comes out otherwise: %v", err)
	}

	broken := recorded(t)
	<-broken.ended
	broken.ended <- errors.New("connection lost")
	if err := broken.read(j, under); err == nil || !strings.Contains(err.Error(), "connection lost") {
		t.Errorf("a stream that breaks off: %v", err)
	}

	calm := &results.Job{}
	if err := (&decisions{}).note(calm, under); err != nil || calm.Moves == nil {
		t.Errorf("moves %#v, %v, where nobody is moved: want none, but not nil", calm.Moves, err)
	}
}

// TestDecisionsQuorum: what a policy makes of quorum and wait is noted when it changes.
func TestDecisionsQuorum(t *testing.T) {
	d := &decisions{}
	for i, x := range []adapt.Decision{{}, {Quorum: 3}, {Quorum: 3}, {Quorum: 3, Wait: 0.002}, {Quorum: 2, Wait: 0.002}, {}} {
		line, err := json.Marshal(map[string]any{"kind": "decision", "decision": x})
		if err != nil {
			t.Fatal(err)
		}
		d.trace.Write(append(line, '\n'))
		d.heard = append(d.heard, time.Duration(i)*20*ms)
	}
	j := &results.Job{}
	if err := d.note(j, under); err != nil {
		t.Fatal(err)
	}
	if want := []results.Quorum{{Round: 1, Ranks: 3}, {Round: 3, Ranks: 3, Wait: 0.002}, {Round: 4, Ranks: 2, Wait: 0.002}}; !reflect.DeepEqual(j.Quorums, want) {
		t.Errorf("quorums %+v, want %+v", j.Quorums, want)
	}
}
