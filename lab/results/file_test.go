package results

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// times returns a matrix of ranks and rounds that are all t.
func times(ranks, rounds int, t float64) [][]float64 {
	m := make([][]float64, ranks)
	for i := range m {
		m[i] = make([]float64, rounds)
		for n := range m[i] {
			m[i][n] = t
		}
	}
	return m
}

// steady is a run of one job with four ranks and five rounds whose times are all the same.
func steady(scenario, mode string, repetition int, comm, floor float64) Run {
	return Run{
		Kind: KindRun, Scenario: scenario, Mode: mode, Repetition: repetition, Seed: uint64(repetition) + 1, Began: time.Unix(int64(repetition), 0).UTC(),
		Took: time.Second,
		Jobs: []Job{{
			Name: "train", Buckets: 2, Values: 1000, Comm: times(4, 5, comm), Round: times(4, 5, 0.1+comm), Compute: times(4, 5, 0.1),
			Floor: times(4, 5, floor), Span: 5 * (0.1 + comm), IdealSpan: 5 * (0.1 + floor), Packets: 500, Resends: 5, Chunks: 200, Late: 20, Error: 1e-8,
			Slots: 64, Memory: 4096, Open: []Sample{{Time: 0.5, Server: 1}},
		}},
		Usage: Usage{Seconds: 1, Bytes: 80e3, CPU: map[string]float64{"switch": 0.002, "workers": 0.001}, BPF: 0.0005, Busiest: 0.4, Partials: 50},
	}
}

func header(modes ...string) Header {
	return Header{
		Kind: KindHeader, SchemaVersion: SchemaVersion, Time: time.Unix(0, 0).UTC(), Command: []string{"xagg", "bench", "run"}, Cores: 2, Lab: "netns",
		Switch: "engine", XDPMode: "native", Repeat: 3, Scenarios: []Scenario{{Name: "even", YAML: "name: even\n"}, {Name: "slow", YAML: "name: slow\n"}}, Modes: modes,
	}
}

func write(t *testing.T, h Header, runs ...Run) string {
	t.Helper()
	var b bytes.Buffer
	if err := WriteHeader(&b, h); err != nil {
		t.Fatal(err)
	}
	for _, r := range runs {
		if err := WriteRun(&b, r); err != nil {
			t.Fatal(err)
		}
	}
	return b.String()
}

func TestReadWhatWasWritten(t *testing.T) {
	h := header("switch", "tcp")
	runs := []Run{steady("even", "switch", 0, 0.2, 0.1), steady("even", "tcp", 0, 0.4, 0.1)}
	skipped := Run{Kind: KindRun, Scenario: "slow", Mode: "tcp", Skipped: "no mininet: apt-get install mininet"}
	text := write(t, h, runs...) + "\n" + write(t, h, skipped)
	f, err := Read("a.jsonl", strings.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	want := &File{Name: "a.jsonl", Sessions: []Session{{h, runs}, {h, []Run{skipped}}}}
	if diff := cmp.Diff(want, f); diff != "" {
		t.Error(diff)
	}
	if f, err = Read("a.jsonl", strings.NewReader(strings.TrimSuffix(text, "\n"))); err != nil || cmp.Diff(want, f) != "" {
		t.Errorf("without the last newline: %v", err)
	}
}

// Wherever a crash cuts the last line off, what is before it is read.
func TestReadCut(t *testing.T) {
	before := write(t, header("switch"), steady("even", "switch", 0, 0.2, 0.1))
	text := before + write(t, header("switch"), steady("even", "switch", 0, 0.2, 0.1))
	for cut := len(before); cut < len(text); cut += 7 {
		f, err := Read("a.jsonl", strings.NewReader(text[:cut]))
		if err != nil {
			t.Fatalf("cut off after %d bytes: %v", cut, err)
		}
		whole := text[cut-1] == '\n' || text[cut] == '\n'
		if (f.Cut == "") != whole || len(f.Sessions[0].Runs) != 1 {
			t.Fatalf("cut off after %d bytes: %q, %d runs", cut, f.Cut, len(f.Sessions[0].Runs))
		}
	}
}

func TestReadErrors(t *testing.T) {
	head := write(t, header("switch"))
	run := func(change func(*Run)) string {
		r := steady("even", "switch", 0, 0.2, 0.1)
		change(&r)
		return write(t, header("switch"), r)
	}
	for name, tt := range map[string]struct{ text, want string }{
		"empty":           {"", "a.jsonl: no results"},
		"not JSON":        {head + "{\n" + head, "a.jsonl:2: read results"},
		"kind":            {head + `{"kind":"aggregator"}` + "\n", `a.jsonl:2: kind "aggregator"`},
		"no kind":         {`{"mode":"tcp"}` + "\n", `a.jsonl:1: no "kind"`},
		"newer":           {strings.Replace(head, `"schema_version":1`, `"schema_version":99`, 1), "a.jsonl:1: schema version 99"},
		"no version":      {strings.Replace(head, `"schema_version":1`, `"schema_version":0`, 1), "a.jsonl:1: schema version 0"},
		"header is wrong": {strings.Replace(head, `"cores":2`, `"cores":"two"`, 1), "a.jsonl:1: read header"},
		"no header":       {`{"kind":"run"}` + "\n", "a.jsonl:1: a run before the first header"},
		"scenario":        {run(func(r *Run) { r.Scenario = "other" }), "no such scenario"},
		"twice":           {head + strings.TrimPrefix(run(func(*Run) {}), head) + strings.TrimPrefix(run(func(*Run) {}), head), "a.jsonl:3: run of even, mode switch, repetition 0 is there already"},
		"mode":            {run(func(r *Run) { r.Mode = "" }), "want a mode"},
		"both":            {run(func(r *Run) { r.Skipped, r.Failed = "a", "b" }), "both skipped and failed"},
		"no jobs":         {run(func(r *Run) { r.Jobs = nil }), "no jobs"},
		"no times":        {run(func(r *Run) { r.Jobs[0].Comm = nil }), "no communication times"},
		"ranks":           {run(func(r *Run) { r.Jobs[0].Floor = times(3, 5, 1) }), "floor has 3 ranks, comm 4"},
		"rounds":          {run(func(r *Run) { r.Jobs[0].Round[2] = []float64{1} }), "round of rank 2 has 1 rounds"},
		"negative":        {run(func(r *Run) { r.Jobs[0].Comm[1][1] = -1 }), "comm of rank 1: -1 seconds"},
		"moves":           {run(func(r *Run) { r.Jobs[0].Moves = []Move{{Round: -1, Rank: 4, To: "server"}} }), "rank 4 is moved in round -1, there are 4 ranks and 5 rounds"},
		"quorum":          {run(func(r *Run) { r.Jobs[0].Quorums = []Quorum{{Round: 1, Ranks: 5}} }), "5 ranks are enough after 0 s from round 1 on"},
		"moves late":      {run(func(r *Run) { r.Jobs[0].Moves = []Move{{Round: 5, Rank: 1, To: "server"}} }), "rank 1 is moved in round 5"},
		"skipped":         {run(func(r *Run) { r.Jobs[0].Skipped = [][]int{nil, {1, 5}} }), "rank 1 has skipped rounds [1 5] of 5"},
		"skipped twice":   {run(func(r *Run) { r.Jobs[0].Skipped = [][]int{{1, 1}} }), "rank 0 has skipped rounds [1 1] of 5"},
		"skipped by whom": {run(func(r *Run) { r.Jobs[0].Skipped = make([][]int, 5) }), "skipped has rank 4, comm 4 ranks"},
		"all skipped": {run(func(r *Run) {
			all := []int{0, 1, 2, 3, 4}
			r.Jobs[0].Skipped = [][]int{all, all, all, all}
		}), "all rounds were skipped"},
		"no span": {run(func(r *Run) { r.Jobs[0].Span = 0 }), "1000 values in 0 seconds"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := Read("a.jsonl", strings.NewReader(tt.text))
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %v, want %q", err, tt.want)
			}
		})
	}
}
