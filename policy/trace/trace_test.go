package trace

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"strings"
	"testing"

	"xagg/policy/adapt"
	"xagg/policy/telemetry"
)

// record makes the trace of a job whose last rank is slow for a while.
func record(t *testing.T, c adapt.Config) []byte {
	t.Helper()
	var out bytes.Buffer
	w := NewWriter(&out, "train", 4, c, nil)
	engine, err := c.New(4)
	if err != nil {
		t.Fatal(err)
	}
	random := rand.New(rand.NewPCG(1, 2))
	steered := uint64(0)
	for i := range 200 {
		s := telemetry.Snapshot{
			Time:    float64(i) * 0.2,
			Job:     telemetry.Job{Name: "train", Size: 4, Round: float64(i), Rounds: float64(min(i+1, 32)), RoundP50: 0.1},
			Ranks:   make([]telemetry.Rank, 4),
			Servers: []telemetry.Server{{Name: "s0", Ready: true}},
		}
		for r := range s.Ranks {
			s.Ranks[r] = telemetry.Rank{Rank: float64(r), Steered: steered>>r&1 != 0, LagP50: random.Float64() / 300}
		}
		if i > 30 && i < 120 {
			s.Ranks[3].LagP50 = 0.1 + random.Float64()/7
		}
		d := engine.Step(&s)
		steered = d.Steered
		if err := w.Step(&s, &d); err != nil {
			t.Fatal(err)
		}
	}
	return out.Bytes()
}

// TestReplay: a trace's own policy decides again as it did, byte for byte, after its way through the file; another decides
// otherwise; a changed decision is found.
func TestReplay(t *testing.T) {
	c := adapt.DefaultConfig()
	c.Rule = "outlier"
	c.Pin = map[int]adapt.Place{1: adapt.Switch}
	data := record(t, c)
	traces, err := Read("t", bytes.NewReader(data))
	if err != nil || len(traces) != 1 || len(traces[0].Steps) != 200 || traces[0].Cut {
		t.Fatalf("%d traces, %v", len(traces), err)
	}
	if err := traces[0].Verify(); err != nil {
		t.Error(err)
	}
	moves := func(decisions []adapt.Decision) (n int) {
		for _, d := range decisions {
			n += len(d.Moves)
		}
		return n
	}
	own, err := traces[0].Replay(c)
	if err != nil || moves(own) != 2 {
		t.Errorf("%d moves, %v; want there and back", moves(own), err)
	}
	c.Freeze = true
	if frozen, err := traces[0].Replay(c); err != nil || moves(frozen) != 0 {
		t.Errorf("%d moves of a frozen policy, %v", moves(frozen), err)
	}
	changed, err := Read("t", bytes.NewReader(bytes.Replace(data, []byte(`"rank":3,"to":"server"`), []byte(`"rank":2,"to":"server"`), 1)))
	if err != nil {
		t.Fatal(err)
	}
	if err := changed[0].Verify(); !errors.Is(err, errDiffers) {
		t.Errorf("a changed decision: %v", err)
	}
}

// TestContinue: a trace that begins in the midst of things knows what went before.
func TestContinue(t *testing.T) {
	c := adapt.DefaultConfig()
	c.Rule = "outlier"
	traces, err := Read("t", bytes.NewReader(record(t, c)))
	if err != nil {
		t.Fatal(err)
	}
	engine, err := c.New(4)
	if err != nil {
		t.Fatal(err)
	}
	whole := traces[0]
	for i := range whole.Steps[:35] { // the slow rank is not steered yet
		engine.Step(&whole.Steps[i].Snapshot)
	}
	var out bytes.Buffer
	state := engine.State()
	w := NewWriter(&out, "train", 4, c, &state)
	for i := range whole.Steps[35:] {
		if err := w.Step(&whole.Steps[35+i].Snapshot, whole.Steps[35+i].Decision); err != nil {
			t.Fatal(err)
		}
	}
	rest, err := Read("t", &out)
	if err != nil {
		t.Fatal(err)
	}
	if err := rest[0].Verify(); err != nil {
		t.Error(err)
	}
	if rest[0].State = nil; rest[0].Verify() == nil {
		t.Error("the state makes no difference")
	}
}

func TestRead(t *testing.T) {
	good := string(record(t, adapt.DefaultConfig()))
	cut, err := Read("t", strings.NewReader(good[:len(good)-10]))
	if err != nil || len(cut) != 1 || !cut[0].Cut || len(cut[0].Steps) != 200 {
		t.Errorf("a trace that was cut off: %v", err)
	}
	job := `{"kind":"job","schema_version":1,"job":"a","ranks":2,"policy":""}` + "\n"
	for src, want := range map[string]string{
		"":                             "read t: it is empty",
		`{"kind":"snapshot"}` + "\n":   `t:1: a trace begins with a line of kind "job", this is "snapshot"`,
		job + "{\n":                    "t:2: read line",
		job + `{"kind":"moon"}` + "\n": `t:2: kind "moon"`,
		job + `{"kind":"decision","decision":{}}` + "\n":               "t:2: a decision without a snapshot before it",
		`{"kind":"job","schema_version":2,"job":"a","ranks":2}` + "\n": "t:1: schema version 2, this program reads up to 1",
		`{"kind":"job","schema_version":1,"job":"a","ranks":0}` + "\n": "t:1: 0 ranks",
		job + `{"kind":"snapshot"}` + "\n":                             `t:2: a line of kind "snapshot" without one`,
		`{"kind":"job"}` + "\n":                                        `without its schema_version`,
	} {
		if _, err := Read("t", strings.NewReader(src)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q:\ngot  %v\nwant %s", src, err, want)
		}
	}
}
