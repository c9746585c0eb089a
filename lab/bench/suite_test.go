package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"xagg/lab/results"
	"xagg/lab/scenario"
)

// parse returns a scenario from what differs from an ordinary one.
func parse(t *testing.T, name, job string) *scenario.Scenario {
	t.Helper()
	s, err := scenario.Parse(name, fmt.Appendf(nil, "name: %s\nabout: A test.\nlinks: {worker: 10Mbit}\nwarmup: 1\nrounds: 2\nseed: 7\n"+
		"jobs:\n  - {name: train, ranks: 3, tensors: {sizes: [100, 300]}, compute: {mean: 10ms}%s}\n", name, job))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestSteps(t *testing.T) {
	with, without := parse(t, "with", ", quorum: {ranks: 2}"), parse(t, "without", "")
	s := Suite{
		Scenarios: []*scenario.Scenario{with, without}, Modes: []scenario.Mode{"tcp", "gloo", "server/quorum"}, Repeat: 2,
		Missing: func(m scenario.Mode) string {
			if m == "gloo" {
				return "no gloo: apt-get install it"
			}
			return ""
		},
	}
	var got []string
	for i, step := range s.Steps() {
		if step.Number != i || (step.Skip == "") != (step.Estimate > 0) {
			t.Errorf("step %d: %+v", i, step)
		}
		got = append(got, fmt.Sprintf("%s %s %d %d %.7s", step.Scenario.Name, step.Mode, step.Repetition, step.Seed, step.Skip))
	}
	want := []string{
		"with tcp 0 7 ", "with gloo 0 7 no gloo", "with server/quorum 0 7 ",
		"with server/quorum 1 8 ", "with gloo 1 8 no gloo", "with tcp 1 8 ",
		"without tcp 0 7 ", "without gloo 0 7 no gloo", "without server/quorum 0 7 job tra",
		"without server/quorum 1 8 job tra", "without gloo 1 8 no gloo", "without tcp 1 8 ",
	}
	if !slices.Equal(got, want) {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	steps := s.Steps()
	if est, want := Estimate(steps), 2*openTime+steps[0].Estimate+steps[2].Estimate+steps[3].Estimate+steps[5].Estimate+steps[6].Estimate+steps[11].Estimate; est != want {
		t.Errorf("estimate %v, want %v", est, want)
	}
}

// TestStepsAlternate: of any two modes each comes first in half of the repetitions.
func TestStepsAlternate(t *testing.T) {
	s := Suite{Scenarios: []*scenario.Scenario{parse(t, "one", "")}, Modes: []scenario.Mode{"tcp", "ring", "switch", "server", "auto"}, Repeat: 10}
	at := map[scenario.Mode][]int{}
	followed := map[[2]scenario.Mode]bool{}
	for i, step := range s.Steps() {
		at[step.Mode] = append(at[step.Mode], step.Number)
		if i%len(s.Modes) > 0 {
			followed[[2]scenario.Mode{s.Steps()[i-1].Mode, step.Mode}] = true
		}
	}
	for i, a := range s.Modes {
		for _, b := range s.Modes[:i] {
			first := 0
			for repetition := range s.Repeat {
				if at[a][repetition] < at[b][repetition] {
					first++
				}
			}
			if first != s.Repeat/2 {
				t.Errorf("%s comes before %s in %d of %d repetitions", a, b, first, s.Repeat)
			}
		}
	}
	if len(followed) < 2*len(s.Modes) {
		t.Errorf("only %d pairs of modes follow each other", len(followed))
	}
}

// fakePlace runs what run says.
type fakePlace struct {
	run  func(mode scenario.Mode) error
	sick bool // after a failure
	log  *[]string
}

func (p *fakePlace) Run(_ context.Context, mode scenario.Mode, _ uint64) (*results.Run, error) {
	*p.log = append(*p.log, string(mode))
	if err := p.run(mode); err != nil {
		p.sick = true
		return nil, err
	}
	times := [][]float64{{1}}
	return &results.Run{Jobs: []results.Job{{Name: "train", Comm: times, Round: times, Compute: times, Floor: times, Values: 1, Span: 1}}}, nil
}

func (p *fakePlace) Healthy() bool   { return !p.sick }
func (p *fakePlace) XDPMode() string { return "native" }
func (p *fakePlace) Close() error    { *p.log = append(*p.log, "close"); return nil }

// suite returns a suite whose places are fakes, and what happens in them.
func suite(t *testing.T, run func(mode scenario.Mode) error, modes ...scenario.Mode) (*Suite, *[]string) {
	log := &[]string{}
	return &Suite{
		Scenarios: []*scenario.Scenario{parse(t, "one", ""), parse(t, "two", "")}, Modes: modes, Repeat: 1,
		Header: results.Header{Scenarios: []results.Scenario{{Name: "one"}, {Name: "two"}}},
		Open: func(_ context.Context, s *scenario.Scenario) (Place, error) {
			*log = append(*log, "open "+s.Name)
			return &fakePlace{run: run, log: log}, nil
		},
	}, log
}

// read returns the runs of a file, "scenario mode verdict" each.
func read(t *testing.T, data []byte) (header results.Header, runs []string) {
	t.Helper()
	f, err := results.Read("results", bytes.NewReader(data))
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range f.Sessions[0].Runs {
		verdict := "finished"
		switch {
		case r.Failed != "":
			verdict = r.Failed
		case r.Skipped != "":
			verdict = "skipped"
		}
		runs = append(runs, fmt.Sprintf("%s %s %s", r.Scenario, r.Mode, verdict))
	}
	return f.Sessions[0].Header, runs
}

// TestSuite: all modes of a scenario run in one place; a run that fails is told, and its place, if it is spoilt, replaced.
func TestSuite(t *testing.T) {
	s, log := suite(t, func(mode scenario.Mode) error {
		if mode == "server" {
			return errors.New("the server has ended")
		}
		return nil
	}, "tcp", "server/async", "server", "switch")
	var begun, took int
	s.Begins = func(Step) { begun++ }
	s.Took = func(Step, *results.Run) { took++ }
	var out bytes.Buffer
	summary, err := s.Run(t.Context(), &out)
	if want := (Summary{Finished: 4, Failed: 2, Skipped: 2}); err != nil || summary != want || begun != 8 || took != 8 {
		t.Errorf("%+v, %v, %d begun, %d took; want %+v and 8 of each", summary, err, begun, took, want)
	}
	header, runs := read(t, out.Bytes())
	if header.XDPMode != "native" {
		t.Errorf("header says XDP mode %q, want the place's", header.XDPMode)
	}
	want := []string{
		"one tcp finished", "one server/async skipped", "one server the server has ended", "one switch finished",
		"two tcp finished", "two server/async skipped", "two server the server has ended", "two switch finished",
	}
	if !slices.Equal(runs, want) {
		t.Errorf("runs\n%s\nwant\n%s", strings.Join(runs, "\n"), strings.Join(want, "\n"))
	}
	wantLog := []string{
		"open one", "tcp", "server", "close", "open one", "switch", "close",
		"open two", "tcp", "server", "close", "open two", "switch", "close",
	}
	if !slices.Equal(*log, wantLog) {
		t.Errorf("happened %q, want %q", *log, wantLog)
	}
}

// TestSuiteNoPlace: a place that cannot be made fails the runs in it, one by one.
func TestSuiteNoPlace(t *testing.T) {
	s, _ := suite(t, func(scenario.Mode) error { return nil }, "tcp", "switch")
	open := s.Open
	s.Open = func(ctx context.Context, sc *scenario.Scenario) (Place, error) {
		if sc.Name == "one" {
			return nil, errors.New("no room")
		}
		return open(ctx, sc)
	}
	var out bytes.Buffer
	summary, err := s.Run(t.Context(), &out)
	if want := (Summary{Finished: 2, Failed: 2}); err != nil || summary != want {
		t.Errorf("%+v, %v; want %+v", summary, err, want)
	}
	if _, runs := read(t, out.Bytes()); runs[1] != "one switch no room" {
		t.Errorf("runs %q", runs)
	}
}

// TestSuiteInterrupted: what was finished is in the file, what was under way is not, and the place is removed.
func TestSuiteInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	interrupt := errors.New("interrupt")
	s, log := suite(t, func(mode scenario.Mode) error {
		if mode == "server" {
			cancel(interrupt)
			return errors.New("whatever comes of it")
		}
		return nil
	}, "tcp", "server", "switch")
	var out bytes.Buffer
	summary, err := s.Run(ctx, &out)
	if want := (Summary{Finished: 1}); !errors.Is(err, interrupt) || summary != want {
		t.Errorf("%+v, %v; want %+v and the interrupt", summary, err, want)
	}
	if _, runs := read(t, out.Bytes()); !slices.Equal(runs, []string{"one tcp finished"}) {
		t.Errorf("runs %q, want the one that was finished", runs)
	}
	if want := []string{"open one", "tcp", "server", "close"}; !slices.Equal(*log, want) {
		t.Errorf("happened %q, want %q", *log, want)
	}
}

func TestProgress(t *testing.T) {
	s, _ := suite(t, nil, "tcp", "server/async", "switch")
	steps := s.Steps()
	p := NewProgress(steps)
	all := Estimate(steps)
	if left := p.Left(0); left != all {
		t.Errorf("%v left at the beginning, want %v", left, all)
	}
	// The first takes twice as long as expected: so will the rest.
	first := openTime + steps[0].Estimate
	p.Over(steps[0], 2*first)
	if left, want := p.Left(0), 2*Estimate(steps[1:]); left < want-2*openTime-time.Second || left > want+time.Second {
		t.Errorf("%v left after one, want about %v", left, want)
	}
	if now := p.Now(0); !strings.HasPrefix(now, "[2/6] one, server/async, repetition 1: ") {
		t.Errorf("now %q", now)
	}
	if line := p.Line(steps[1], &results.Run{Skipped: "no server"}); line != "[2/6] one, server/async, repetition 1: skipped: no server" {
		t.Errorf("line %q", line)
	}
	run := &results.Run{Jobs: []results.Job{{Comm: [][]float64{{0.01, 0.03}}, Floor: [][]float64{{0.01, 0.02}}}}, Usage: results.Usage{Busiest: 0.9}}
	if line := p.Line(steps[2], run); !strings.Contains(line, "communication 20.0 ms (floor 15.0 ms), busiest core 90 % (limited by the machine), ") {
		t.Errorf("line %q", line)
	}
	p.Over(steps[5], time.Second)
	if p.Left(0) != 0 || p.Now(0) != "" {
		t.Errorf("%v left at the end, %q", p.Left(0), p.Now(0))
	}
	for d, want := range map[time.Duration]string{1400 * time.Millisecond: "1s", 61 * time.Second: "1m01s", time.Hour: "60m00s"} {
		if got := roughly(d); got != want {
			t.Errorf("%v is %q, want %q", d, got, want)
		}
	}
}
