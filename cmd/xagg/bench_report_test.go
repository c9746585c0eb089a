package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"xagg/lab/results"
)

// reported runs 'xagg bench report' and returns what it wrote.
func reported(t *testing.T, stdin string, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	var out, err bytes.Buffer
	code = run(t.Context(), &env{stdin: strings.NewReader(stdin), stdout: &out, stderr: &err}, append([]string{"bench", "report"}, args...))
	return code, out.String(), err.String()
}

func TestBenchReport(t *testing.T) {
	var b bytes.Buffer
	if err := results.WriteHeader(&b, results.Header{Lab: "netns", Switch: "engine", Modes: []string{"switch", "tcp"}, Scenarios: []results.Scenario{{Name: "even"}}}); err != nil {
		t.Fatal(err)
	}
	for _, mode := range []string{"switch", "tcp"} {
		one := [][]float64{{0.25}}
		err := results.WriteRun(&b, results.Run{Scenario: "even", Mode: mode, Jobs: []results.Job{{Name: "train", Values: 100, Comm: one, Round: one, Compute: one, Floor: one, Span: 1}}})
		if err != nil {
			t.Fatal(err)
		}
	}
	file := filepath.Join(t.TempDir(), "results.jsonl")
	if err := os.WriteFile(file, b.Bytes(), 0o644); err != nil {
		t.Fatal(err)
	}
	for output, want := range map[string]string{"text": "Which should I use", "markdown": "## Which should I use", "html": "<!DOCTYPE html>", "gobench": "BenchmarkXagg/scenario=even/mode=tcp 1 250000000 ns/op"} {
		if code, stdout, stderr := reported(t, "", file, "-o", output); code != exitOK || !strings.Contains(stdout, want) || stderr != "" {
			t.Errorf("%s: exit code %d: %s", output, code, stderr)
		}
		out := filepath.Join(t.TempDir(), "report")
		if code, stdout, stderr := reported(t, b.String(), "-", "-o", output, "--out", out); code != exitOK || stdout != "" || stderr != "" {
			t.Errorf("%s --out: exit code %d: %s%s", output, code, stdout, stderr)
		}
		if text, err := os.ReadFile(out); err != nil || !strings.Contains(string(text), want) {
			t.Errorf("%s --out: %v", output, err)
		}
	}

	more := filepath.Join("..", "..", "lab", "report", "testdata")
	code, stdout, stderr := reported(t, "", file, "--train", filepath.Join(more, "train.json"), "--aggregator", filepath.Join(more, "aggregator.json"))
	if code != exitOK || !strings.Contains(stdout, "Does training still converge?") || !strings.Contains(stdout, "What does an aggregator cost?") {
		t.Errorf("more files: exit code %d: %s", code, stderr)
	}

	if err := os.WriteFile(file, b.Bytes()[:b.Len()-9], 0o644); err != nil {
		t.Fatal(err)
	}
	if code, stdout, stderr := reported(t, "", file); code != exitOK || !strings.Contains(stderr, file+":3: the last line breaks off and was left out") || stdout == "" {
		t.Errorf("a file that breaks off: exit code %d: %s", code, stderr)
	}
	nowhere := filepath.Join(t.TempDir(), "no", "report")
	for _, tt := range []struct {
		code int
		want string
		args []string
	}{
		{exitUsage, "want 'xagg bench report", nil},
		{exitUsage, `--output "pdf"`, []string{file, "-o", "pdf"}},
		{exitUsage, "--limit 0", []string{file, "--limit", "0"}},
		{exitFailure, "read results: open", []string{nowhere}},
		{exitFailure, "write report: open", []string{file, "--out", nowhere}},
		{exitFailure, "standard input: no results", []string{"-"}},
		{exitFailure, "read results: open", []string{file, "--train", nowhere}},
		{exitFailure, "its kind is", []string{file, "--aggregator", filepath.Join(more, "train.json")}},
	} {
		if code, stdout, stderr := reported(t, "", tt.args...); code != tt.code || !strings.Contains(stderr, tt.want) || stdout != "" {
			t.Errorf("%v: exit code %d: %s", tt.args, code, stderr)
		}
	}
}
