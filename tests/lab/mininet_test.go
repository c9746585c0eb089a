package lab

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"xagg/lab/results"
	"xagg/tests/require"
)

// python is the distribution's, which its Mininet is for.
const python = "/usr/bin/python3"

// mininetDir is the Mininet topology's folder.
const mininetDir = "../../bmv2/mininet"

// The tests of the Mininet topology and of its demo, which start nothing.
func TestMininetModules(t *testing.T) {
	require.Have(t, require.Mininet)
	cmd := exec.Command(python, "-B", "-m", "unittest")
	cmd.Dir = mininetDir
	if out, err := cmd.CombinedOutput(); err != nil || !bytes.Contains(out, []byte("\nOK\n")) {
		t.Errorf("%v: %v\n%s", cmd, err, out)
	}
}

// build compiles the xagg binary into a folder of the test's own.
func build(t *testing.T) string {
	t.Helper()
	xagg := filepath.Join(t.TempDir(), "xagg")
	if out, err := exec.Command("go", "build", "-o", xagg, "xagg/cmd/xagg").CombinedOutput(); err != nil {
		t.Fatalf("build xagg: %v\n%s", err, out)
	}
	return xagg
}

// mininetDemo returns the demo's command, with its temporary files in temp.
func mininetDemo(xagg, temp string, args ...string) *exec.Cmd {
	cmd := exec.Command(python, append([]string{"-B", "demo.py", "--xagg", xagg}, args...)...)
	cmd.Dir = mininetDir
	cmd.Env = append(os.Environ(), "TMPDIR="+temp)
	return cmd
}

// The demo in Mininet is exact with both switches, and leaves nothing behind.
func TestMininetDemo(t *testing.T) {
	require.Have(t, require.Mininet, require.XDP)
	xagg := build(t)
	for _, c := range []struct {
		kind    string
		feature require.Feature
	}{{"engine", require.Mininet}, {"simple_switch_grpc", require.BMv2}} {
		t.Run(c.kind, func(t *testing.T) {
			require.Have(t, c.feature)
			temp := t.TempDir()
			cmd := mininetDemo(xagg, temp, "--switch", c.kind, "--rounds", "1")
			var table, log bytes.Buffer
			cmd.Stdout, cmd.Stderr = &table, &log
			if err := cmd.Run(); err != nil {
				t.Fatalf("%v: %v\n%s%s", cmd, err, table.String(), log.String())
			}
			rows := strings.Split(strings.TrimSpace(table.String()), "\n")
			if len(rows) != 4 {
				t.Fatalf("table of %d lines, want a head and three modes:\n%s", len(rows), table.String())
			}
			for i, mode := range []string{"switch", "server", "hybrid"} {
				want := fmt.Sprintf("%s %s 4 1", mode, c.kind)
				row := strings.Join(strings.Fields(rows[i+1]), " ")
				if !strings.HasPrefix(row, want) || !strings.HasSuffix(row, " yes") {
					t.Errorf("row %q, want %q ... yes", row, want)
				}
			}
			if left, err := os.ReadDir(temp); err != nil || len(left) != 0 {
				t.Errorf("left behind: %v, %v", left, err)
			}
		})
	}
}

// A demo that is killed takes its processes along, and the next one removes what it recorded. An interrupted one says
// so in a line, and leaves nothing.
func TestMininetDemoEnds(t *testing.T) {
	require.Have(t, require.Mininet, require.XDP)
	xagg, temp := build(t), t.TempDir()
	end := func(sig syscall.Signal) (log string) {
		t.Helper()
		cmd := mininetDemo(xagg, temp, "--rounds", "1000000")
		stderr, err := cmd.StderrPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		lines := bufio.NewScanner(stderr)
		for lines.Scan() {
			log += lines.Text() + "\n"
			if strings.HasPrefix(lines.Text(), "mode ") { // switch, server and controller run
				if n := len(running(t, xagg)); n < 3 {
					t.Errorf("%d processes of xagg in a demo that runs", n)
				}
				if err := cmd.Process.Signal(sig); err != nil {
					t.Error(err)
				}
			}
		}
		if err := cmd.Wait(); err == nil {
			t.Errorf("%v was of no use", sig)
		}
		for deadline := time.Now().Add(10 * time.Second); len(running(t, xagg)) > 0; time.Sleep(10 * time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("%v: processes %v outlive the demo\n%s", sig, running(t, xagg), log)
			}
		}
		return log
	}
	end(syscall.SIGKILL)
	// Any run sweeps what a dead one has recorded: this one, if no other on the machine was faster.
	log := end(syscall.SIGINT)
	if !strings.HasSuffix(log, "\ndemo.py: interrupted\n") || strings.Contains(log, "Traceback") {
		t.Errorf("an interrupted demo says:\n%s", log)
	}
	if left, err := os.ReadDir(temp); err != nil || len(left) != 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

// small is a scenario of few and short rounds.
const small = `
name: small
about: Three workers, of which one is slow.
links: {worker: 20Mbit}
warmup: 1
rounds: 2
jobs:
  - name: train
    ranks: 3
    tensors: {sizes: [1000, 3000]}
    compute: {mean: 5ms, slow: {2: 2}}
    quorum: {ranks: 2}
`

// mininetBench returns the comparison's command, with its temporary files in temp and its results in out.
func mininetBench(t *testing.T, xagg, temp, out string, args ...string) *exec.Cmd {
	t.Helper()
	file := filepath.Join(t.TempDir(), "small.yaml")
	if err := os.WriteFile(file, []byte(small), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(python, append([]string{"-B", "bench.py", "--xagg", xagg, "--out", out, file}, args...)...)
	cmd.Dir = mininetDir
	cmd.Env = append(os.Environ(), "TMPDIR="+temp)
	return cmd
}

// The comparison in Mininet runs with each switch that is there, writes results and reports, and leaves nothing else.
func TestMininetBench(t *testing.T) {
	require.Have(t, require.Mininet, require.XDP)
	temp, folder := t.TempDir(), t.TempDir()
	cmd := mininetBench(t, build(t), temp, filepath.Join(folder, "r.jsonl"), "--", "--repeat", "1", "--modes", "tcp,switch,server,auto,hybrid/quorum,auto/quorum")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %v\n%s", cmd, err, out)
	}
	file, err := os.Open(filepath.Join(folder, "r.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	r, err := results.Read(file.Name(), file)
	if err != nil {
		t.Fatal(err)
	}
	names := map[string]string{"engine": "small"}
	if require.Probe(require.BMv2) == nil {
		names["simple_switch_grpc"] = "small-by-4"
	}
	if len(r.Sessions) != len(names) {
		t.Fatalf("%d sessions, want one per switch of %v", len(r.Sessions), names)
	}
	for _, s := range r.Sessions {
		if s.Header.Lab != "mininet" || len(s.Runs) != 6 {
			t.Errorf("%d runs in lab %q with %s, want 6 in mininet", len(s.Runs), s.Header.Lab, s.Header.Switch)
		}
		for _, run := range s.Runs {
			if !run.Finished() || run.Scenario != names[s.Header.Switch] || run.Usage.CPU["switch"] <= 0 {
				t.Errorf("%s: %s in mode %s: failed %q, skipped %q, CPU seconds %v", s.Header.Switch, run.Scenario, run.Mode, run.Failed,
					run.Skipped, run.Usage.CPU)
			}
		}
	}
	for _, name := range []string{"r.html", "r.md"} {
		if report, err := os.ReadFile(filepath.Join(folder, name)); err != nil || !bytes.Contains(report, []byte("Mininet")) {
			t.Errorf("%s, %v: no word of Mininet in\n%s", name, err, report)
		}
	}
	if left, err := os.ReadDir(temp); err != nil || len(left) != 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

// A comparison that is interrupted ends what it has started, and reports what was finished.
func TestMininetBenchInterrupted(t *testing.T) {
	require.Have(t, require.Mininet, require.XDP)
	xagg, temp, folder := build(t), t.TempDir(), t.TempDir()
	cmd := mininetBench(t, xagg, temp, filepath.Join(folder, "r.jsonl"), "--switch", "engine", "--", "--repeat", "1000", "--modes", "switch")
	stderr, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var log string
	for lines := bufio.NewScanner(stderr); lines.Scan(); {
		log += lines.Text() + "\n"
		if strings.HasPrefix(lines.Text(), "[2/1000] ") {
			if err := cmd.Process.Signal(syscall.SIGINT); err != nil {
				t.Error(err)
			}
		}
	}
	err = cmd.Wait()
	if exit, ok := errors.AsType[*exec.ExitError](err); !ok || exit.ExitCode() != 130 {
		t.Errorf("%v, want exit status 130", err)
	}
	if !strings.HasSuffix(log, "\nbench.py: interrupted\n") || strings.Contains(log, "Traceback") {
		t.Errorf("an interrupted comparison says:\n%s", log)
	}
	if pids := running(t, xagg); len(pids) > 0 {
		t.Errorf("processes %v outlive the comparison", pids)
	}
	if _, err := os.Stat(filepath.Join(folder, "r.html")); err != nil {
		t.Errorf("no report of what was finished: %v", err)
	}
	if left, err := os.ReadDir(temp); err != nil || len(left) != 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

// Without Mininet it says what to install, and exits with 3.
func TestMininetBenchMissing(t *testing.T) {
	empty := t.TempDir() // a module of that name without anything
	if err := os.WriteFile(filepath.Join(empty, "mininet.py"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(python, "-B", "bench.py", "scenario.yaml")
	cmd.Dir, cmd.Env = mininetDir, append(os.Environ(), "PYTHONPATH="+empty)
	out, err := cmd.CombinedOutput()
	if exit, ok := errors.AsType[*exec.ExitError](err); !ok || exit.ExitCode() != 3 || !bytes.Contains(out, []byte("apt-get install mininet")) {
		t.Errorf("%v, want exit status 3 and what to install:\n%s", err, out)
	}
}

// running returns the processes of a program.
func running(t *testing.T, program string) []string {
	t.Helper()
	found, err := filepath.Glob("/proc/[0-9]*/exe")
	if err != nil {
		t.Fatal(err)
	}
	return slices.DeleteFunc(found, func(link string) bool {
		target, err := os.Readlink(link)
		return err != nil || target != program
	})
}

// Mininet's own command line knows the topology and its classes.
func TestMininetCustom(t *testing.T) {
	require.Have(t, require.Mininet)
	path := filepath.Dir(build(t)) + ":" + os.Getenv("PATH")
	cmd := exec.Command("mn", "--custom", filepath.Join(mininetDir, "xagg_mininet.py"), "--topo", "xagg,2,1", "--host", "xagg",
		"--switch", "xagg_engine", "--controller", "none", "--test", "none")
	temp := t.TempDir()
	cmd.Env = append(os.Environ(), "PATH="+path, "TMPDIR="+temp, "PYTHONDONTWRITEBYTECODE=1")
	if out, err := cmd.CombinedOutput(); err != nil || !bytes.Contains(out, []byte("*** Done")) {
		t.Errorf("%v: %v\n%s", cmd, err, out)
	}
	if left, err := os.ReadDir(temp); err != nil || len(left) != 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}
