package aggregator

import (
	"bytes"
	"encoding/json"
	"math"
	"slices"
	"strings"
	"testing"
)

func TestQuotients(t *testing.T) {
	// One without a partner is left out.
	if got := quotients([]float64{6, 9, 1000}, []float64{2, 3}); !slices.Equal(got, []float64{3, 3}) {
		t.Error(got)
	}
}

func measurements() []Measurement {
	var all []Measurement
	for repetition := range 3 {
		add := func(s Subject, lanes int, cpu float64) {
			all = append(all, Measurement{Subject: s, Cores: "one", Lanes: lanes, Repetition: repetition, Bytes: 2e9,
				Usage: Usage{Seconds: 4, CPU: cpu * float64(repetition+1), Busy: 3}, ProgramNs: float64(lanes)})
		}
		add(TCPPlain, 0, 4)
		add(TCPOffloads, 0, 2)
		add(XDPFrames, 256, 1)
		add(XDPSockets, 256, 8)
	}
	return all
}

func TestSummary(t *testing.T) {
	r := &Report{Limit: 0.2, Measurements: measurements()}
	r.summarize()
	if len(r.Rows) != 4 || len(r.Ratios) != 4 {
		t.Fatalf("%d rows, %d ratios", len(r.Rows), len(r.Ratios))
	}
	row := r.Rows[2]
	if row.Subject != XDPFrames || row.CPUPerGB != 1 || row.Least != 0.5 || row.Most != 1.5 || row.GBPerCPU != 1 || row.GBPerS != 0.5 ||
		row.BusyPerGB != 1.5 || row.ProgramNs != 256 {
		t.Errorf("row %+v", row)
	}
	for i, want := range []struct {
		ratio, target float64
		met           string
	}{{4, 3.3, "yes"}, {2, 2, "yes"}, {0.5, 0, ""}, {0.25, 0, ""}} {
		got := r.Ratios[i]
		if math.Abs(got.Ratio-want.ratio) > 1e-9 || got.Target != want.target || got.Pairs != 3 || !got.Resolved {
			t.Errorf("ratio %d: %+v, want %+v", i, got, want)
		}
		// Exactly at the target the last bit decides.
		if want.ratio != want.target && got.Met != want.met {
			t.Errorf("ratio %d: met %q, want %q", i, got.Met, want.met)
		}
	}
	r.Measurements = r.Measurements[:4]
	r.summarize()
	if got := r.Ratios[0]; got.Resolved || got.Met != "not resolved" {
		t.Errorf("of one pair: %+v", got)
	}
}

func TestWrite(t *testing.T) {
	r := &Report{SchemaVersion: SchemaVersion, Workers: 4, Values: granularity, Repeat: 3, Limit: 0.2, XDPMode: "native", Notes: notes,
		Measurements: measurements(), CoreSets: []CoreSet{{"one", []int{1}, []int{1}}}}
	r.summarize()
	var text, data bytes.Buffer
	if err := r.WriteText(&text); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"Interrupted", `aggregator on [1], load on [1]`, "1.000   (0.500, 1.500)", "4.00 to 4.00", "yes", "Not counted"} {
		if !strings.Contains(text.String(), want) {
			t.Errorf("no %q in\n%s", want, text.String())
		}
	}
	for line := range strings.Lines(text.String()) {
		if len(line) > 121 {
			t.Errorf("%d columns: %s", len(line), line)
		}
	}
	if err := r.WriteJSON(&data); err != nil {
		t.Fatal(err)
	}
	var back Report
	if err := json.Unmarshal(data.Bytes(), &back); err != nil || len(back.Ratios) != 4 || back.Rows[0] != r.Rows[0] || back.Measurements[3] != r.Measurements[3] {
		t.Errorf("read back: %v %+v", err, back)
	}
	// Without a pair too.
	r.Measurements = r.Measurements[:3]
	r.summarize()
	if err := r.WriteJSON(&data); err != nil {
		t.Error(err)
	}
}

func TestOptionsCheck(t *testing.T) {
	good := Options{Workers: 2, Values: granularity, Bytes: 1, Repeat: 1, Limit: 0.1}
	if err := good.Check(); err != nil {
		t.Error(err)
	}
	for want, bad := range map[string]func(*Options){
		"1 workers":    func(o *Options) { o.Workers = 1 },
		"65 workers":   func(o *Options) { o.Workers = 65 },
		"16385 values": func(o *Options) { o.Values++ },
		"0 values":     func(o *Options) { o.Values = 0 },
		"repetitions":  func(o *Options) { o.Repeat = 0 },
		"the limit":    func(o *Options) { o.Limit = 0 },
		"bytes":        func(o *Options) { o.Bytes = 0 },
	} {
		o := good
		bad(&o)
		if err := o.Check(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}
