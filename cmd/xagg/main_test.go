package main

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// A daemon without a terminal logs JSON, all others text, unless they are told otherwise.
func TestLogFormat(t *testing.T) {
	for format, isJSON := range map[string]bool{"": true, "auto": true, "json": true, "text": false} {
		var stderr bytes.Buffer
		args := []string{"switch", "--no-p4", "--", "--grpc-server-addr", "unix:" + filepath.Join(t.TempDir(), "s")}
		if format != "" {
			args = append([]string{"--log-format", format}, args...)
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel() // it starts, and stops
		if code := run(ctx, &env{stderr: &stderr}, args); code != exitOK {
			t.Fatalf("%s: exit code %d: %s", format, code, &stderr)
		}
		first, _, _ := strings.Cut(stderr.String(), "\n")
		if !strings.Contains(first, "switch is running") || json.Valid([]byte(first)) != isJSON {
			t.Errorf("--log-format %q logs %s", format, first)
		}
	}
}

func TestIsTerminal(t *testing.T) {
	file, err := os.Create(filepath.Join(t.TempDir(), "log"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if isTerminal(file) || isTerminal(new(bytes.Buffer)) {
		t.Error("a file or a buffer is a terminal")
	}
	pty, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Skipf("no terminal to be had: %v", err)
	}
	defer pty.Close()
	if !isTerminal(pty) {
		t.Error("a terminal is none")
	}
}
