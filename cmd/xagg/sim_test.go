package main

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"xagg/sim/timing"
)

// TestSim: predictions of a scenario as text and JSON, for the scenario's ranks and for other numbers of them.
func TestSim(t *testing.T) {
	const file = "../../scenarios/slow-4.yaml"
	var out, errs bytes.Buffer
	code := run(context.Background(), &env{stdout: &out, stderr: &errs}, []string{"sim", "-f", file, "--modes", "switch,hybrid", "--workers", "2,8",
		"--rounds", "3", "-o", "json"})
	if code != exitOK {
		t.Fatalf("exit code %d: %s", code, &errs)
	}
	var report timing.Report
	if err := json.Unmarshal(out.Bytes(), &report); err != nil {
		t.Fatal(err)
	}
	if len(report.Rows) != 4 || report.SchemaVersion != timing.SchemaVersion {
		t.Fatalf("%d rows of version %d", len(report.Rows), report.SchemaVersion)
	}
	for i, want := range []struct {
		mode    string
		workers int
		skipped bool
	}{{"switch", 2, false}, {"hybrid", 2, true}, {"switch", 8, false}, {"hybrid", 8, false}} {
		r := report.Rows[i]
		if r.Mode != want.mode || r.Workers != want.workers || (r.Skipped != "") != want.skipped || !want.skipped && r.Comm.Mean <= 0 {
			t.Errorf("row %d: %+v, want %+v", i, r, want)
		}
	}
	out.Reset()
	if code := run(context.Background(), &env{stdout: &out, stderr: &errs}, []string{"sim", file, "--modes", "switch", "--rounds", "3"}); code != exitOK {
		t.Fatalf("exit code %d: %s", code, &errs)
	}
	if text := out.String(); !strings.Contains(text, "slow-4") || strings.Count(text, "\n") != 2 {
		t.Errorf("text:\n%s", text)
	}
}

// TestSimUsage: what is wrong with a command line is said.
func TestSimUsage(t *testing.T) {
	const file = "../../scenarios/slow-4.yaml"
	wrong := filepath.Join(t.TempDir(), "wrong.yaml")
	if err := os.WriteFile(wrong, []byte("name: wrong\nwrokers: 4\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		args []string
		want string
	}{
		{nil, "which scenario?"},
		{[]string{wrong}, "wrong.yaml:2:1: unknown field"},
		{[]string{file, "--modes", "tcp"}, "its traffic is TCP's"},
		{[]string{file, "--modes", "swich"}, `mode "swich": want`},
		{[]string{file, "--workers", "65"}, "65 ranks, want 2 to 64"},
		{[]string{file, "--rounds", "-1"}, "--rounds -1"},
		{[]string{file, "--hop", "2s"}, "--hop 2s"},
		{[]string{file, "--output", "xml"}, "want text or json"},
		{[]string{file, "--policy", "nobody"}, `open policy "nobody"`},
	} {
		var errs bytes.Buffer
		if code := run(context.Background(), &env{stdout: &bytes.Buffer{}, stderr: &errs}, append([]string{"sim"}, tt.args...)); code != exitUsage ||
			!strings.Contains(errs.String(), tt.want) {
			t.Errorf("%v: exit code %d, %s; want %d and %q", tt.args, code, &errs, exitUsage, tt.want)
		}
	}
}
