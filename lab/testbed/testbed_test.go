package testbed

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"xagg/lab"
	"xagg/lab/netns"
	"xagg/tests/require"
)

// create returns a testbed on which nothing runs yet.
func create(t *testing.T) *Testbed {
	t.Helper()
	require.Have(t, require.Netns)
	topology, err := lab.Star(1, 0)
	if err != nil {
		t.Fatal(err)
	}
	spec := Spec(topology, func(lab.Host) uint64 { return 10_000_000 })
	spec.RunDir = t.TempDir()
	hosts, err := netns.Create(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	b := &Testbed{hosts: hosts, cfg: Config{Topology: topology}, running: map[string]*netns.Child{}}
	t.Cleanup(func() {
		if err := b.Close(); err != nil {
			t.Error(err)
		}
	})
	return b
}

func shell(script string) Program {
	return Program{Name: "w0", Host: "w0", Cmd: exec.Command("sh", "-c", script)}
}

func TestRun(t *testing.T) {
	b := create(t)
	var lines []string
	pid := 0
	p := shell("echo one; echo two; cat /proc/net/dev | grep -c eth0")
	p.Started = func(n int) { pid = n }
	err := b.Run(t.Context(), p, func(line []byte) error {
		lines = append(lines, string(line))
		return nil
	})
	if want := []string{"one", "two", "1"}; err != nil || !slices.Equal(lines, want) || pid == 0 {
		t.Errorf("lines %q, pid %d, error %v; want %q, the last because the host has an interface", lines, pid, err, want)
	}
	err = b.Run(t.Context(), shell("echo it has rained in >&2; exit 3"), func([]byte) error { return nil })
	if exit, ok := errors.AsType[*exec.ExitError](err); !ok || exit.ExitCode() != 3 || !strings.Contains(err.Error(), "rained in") {
		t.Errorf("error %v, want exit status 3 with the log's end", err)
	}
}

// TestRunStops: a program ends when its lines are refused, and when the context does.
func TestRunStops(t *testing.T) {
	b := create(t)
	refused := errors.New("refused")
	if err := b.Run(t.Context(), shell("echo one; exec sleep 600"), func([]byte) error { return refused }); err != refused {
		t.Errorf("error %v, want the one of the line", err)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	enough := errors.New("enough")
	began := time.Now()
	if err := b.Run(ctx, shell("echo one; exec sleep 600"), func([]byte) error { cancel(enough); return nil }); err != enough {
		t.Errorf("error %v, want the context's cause", err)
	}
	if took := time.Since(began); took > time.Minute {
		t.Errorf("it took %v to stop", took)
	}
}

// TestDead: a daemon that ends is told with the end of its log.
func TestDead(t *testing.T) {
	b := create(t)
	b.xagg = filepath.Join(t.TempDir(), "doomed")
	if err := os.WriteFile(b.xagg, []byte("#!/bin/sh\necho it has rained in >&2\nexit 3\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := b.Dead(); err != nil {
		t.Errorf("%v before anything was started", err)
	}
	if err := b.daemon("doomed", "w0"); err != nil {
		t.Fatal(err)
	}
	<-b.daemons[0].child.Done()
	if err := b.Dead(); err == nil || !strings.Contains(err.Error(), "doomed has ended") || !strings.Contains(err.Error(), "rained in") {
		t.Errorf("%v, want that doomed has ended, and why", err)
	}
}

// TestRestart: processes are killed, all before the first is started again, with the same arguments; a log goes on.
func TestRestart(t *testing.T) {
	b := create(t)
	b.xagg = filepath.Join(t.TempDir(), "daemon")
	if err := os.WriteFile(b.xagg, []byte("#!/bin/sh\necho \"runs with $*\"\nexec sleep 600\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"one", "two"} {
		if err := b.daemon(name, "w0", "as", name); err != nil {
			t.Fatal(err)
		}
	}
	before := b.PIDs()
	dead := 0
	err := b.Restart(t.Context(), func() {
		for _, d := range b.daemons {
			select {
			case <-d.child.Done():
				dead++
			default:
			}
		}
	}, "two", "one")
	if err != nil || dead != 2 {
		t.Errorf("%v, and %d of 2 were dead before any was started again", err, dead)
	}
	after := b.PIDs()
	if len(after) != 2 || after["one"] == before["one"] || after["two"] == before["two"] {
		t.Errorf("processes %v before and %v after", before, after)
	}
	if err := b.Dead(); err != nil {
		t.Error(err)
	}
	want := "runs with --log-format text as two\n"
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(time.Minute); ; <-tick.C {
		log, err := os.ReadFile(b.daemons[1].log)
		if err != nil {
			t.Fatal(err)
		}
		if strings.HasSuffix(string(log), want) { // the first may have been killed before it wrote anything
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("the log is %q, want the end %q", log, want)
		}
	}
	if err := b.Restart(t.Context(), func() {}, "three"); err == nil || !strings.Contains(err.Error(), "no such process") {
		t.Errorf("error %v, want that there is no such process", err)
	}
}
