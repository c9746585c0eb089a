package report

import (
	"bytes"
	"io"
	"testing"
	"time"

	"xagg/lab/results"
)

// Whatever can be read can be reported, and written is read the same.
func FuzzReport(f *testing.F) {
	var b bytes.Buffer
	h := results.Header{Time: time.Unix(0, 0).UTC(), Lab: "netns", Switch: "engine", Modes: []string{"switch", "server/quorum"}, Scenarios: []results.Scenario{{Name: "a", Heterogeneous: true}}}
	if err := results.WriteHeader(&b, h); err != nil {
		f.Fatal(err)
	}
	f.Add(b.Bytes())
	for rep := range 2 {
		for i, mode := range h.Modes {
			m := [][]float64{{0.1, 0.2}, {0.1, 0.3 / float64(i+1)}}
			r := results.Run{Scenario: "a", Mode: mode, Repetition: rep, Jobs: []results.Job{{Name: "j", Values: 9, Comm: m, Round: m, Compute: m, Floor: m, Span: 1, IdealSpan: 1, Skipped: [][]int{{1}},
				Open: []results.Sample{{Time: 1}, {Time: 2, Server: 3}}}}, Usage: results.Usage{Bytes: 72, CPU: map[string]float64{"switch": 1}}}
			if err := results.WriteRun(&b, r); err != nil {
				f.Fatal(err)
			}
		}
	}
	if err := results.WriteRun(&b, results.Run{Scenario: "a", Mode: "tcp", Failed: "why"}); err != nil {
		f.Fatal(err)
	}
	f.Add(b.Bytes())
	f.Add(b.Bytes()[:b.Len()/2])
	f.Fuzz(func(t *testing.T, text []byte) {
		file, err := results.Read("a", bytes.NewReader(text))
		if err != nil {
			return
		}
		a, err := results.Analyze(results.DefaultLimit, file)
		if err != nil {
			return
		}
		for name, write := range forms(Compare(a), file) {
			if err := write(io.Discard); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
	})
}
