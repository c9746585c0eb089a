package main

import (
	"bytes"
	"context"
	"encoding/json"
	"strings"
	"testing"

	"xagg/doctor"
)

func TestDoctor(t *testing.T) {
	var out, errs bytes.Buffer
	code := run(t.Context(), &env{stdout: &out, stderr: &errs}, []string{"doctor", "-o", "json"})
	var report struct {
		SchemaVersion int `json:"schema_version"`
		OK            bool
		Checks        []doctor.Check
	}
	if err := json.Unmarshal(out.Bytes(), &report); err != nil {
		t.Fatalf("%v: %s", err, out.String())
	}
	// Whether the machine has everything decides nothing but the exit code.
	want := exitOK
	for _, c := range report.Checks {
		if c.Status == doctor.Fail {
			want = exitEnvironment
		}
	}
	if code != want || report.OK != (want == exitOK) || report.SchemaVersion != doctor.SchemaVersion || len(report.Checks) == 0 {
		t.Errorf("exit code %d, want %d; %s%s", code, want, out.String(), errs.String())
	}

	for _, args := range [][]string{{"doctor", "-o", "xml"}, {"doctor", "me"}} {
		errs.Reset()
		if code := run(t.Context(), &env{stdout: &out, stderr: &errs}, args); code != exitUsage || !strings.HasPrefix(errs.String(), "xagg: ") {
			t.Errorf("%v: exit code %d, want %d: %s", args, code, exitUsage, errs.String())
		}
	}
}

// TestDoctorInterrupted: an interrupted look says that it is one, and nothing of the machine.
func TestDoctorInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	var out, errs bytes.Buffer
	if code := run(ctx, &env{stdout: &out, stderr: &errs}, []string{"doctor"}); code != exitInterrupted || out.Len() > 0 || !strings.Contains(errs.String(), "interrupted") {
		t.Errorf("exit code %d, want %d; printed %q and %q", code, exitInterrupted, &out, &errs)
	}
}
