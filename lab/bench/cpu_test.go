package bench

import (
	"math"
	"os"
	"os/exec"
	"slices"
	"testing"
	"time"
)

const stat = `cpu  300 0 100 1000 10 0 10 20 0 0
cpu0 200 0 50 500 10 0 10 20 0 0
cpu1 100 0 50 500 0 0 0 0 0 0
intr 12345
`

func TestParseCores(t *testing.T) {
	cores, err := parseCores([]byte(stat))
	want := []core{{2600 * time.Millisecond, 200 * time.Millisecond, 7900 * time.Millisecond}, {1500 * time.Millisecond, 0, 6500 * time.Millisecond}}
	if err != nil || !slices.Equal(cores, want) {
		t.Errorf("%v, %v, want %v", cores, err, want)
	}
	for _, bad := range []string{"", "intr 1\n", "cpu0 a 0 0 0 0 0 0 0\n"} {
		if cores, err := parseCores([]byte(bad)); err == nil {
			t.Errorf("%q: %v, want an error", bad, cores)
		}
	}
}

func TestLoad(t *testing.T) {
	before := []core{{0, 0, 0}, {time.Second, 0, 2 * time.Second}}
	after := []core{{time.Second, time.Second, 4 * time.Second}, {4 * time.Second, 0, 6 * time.Second}}
	busiest, stolen, seconds := load(before, after)
	if busiest != 0.75 || stolen != 0.125 || seconds != 4 {
		t.Errorf("busiest %g, stolen %g, %g s; want 0.75, 0.125, 4", busiest, stolen, seconds)
	}
	if busiest, stolen, seconds = load(before, before); busiest != 0 || stolen != 0 || seconds != 0 {
		t.Errorf("no time: busiest %g, stolen %g, %g s; want zeros", busiest, stolen, seconds)
	}
}

// TestCPUTime: the clock of a process is what the kernel says of it when it has ended.
func TestCPUTime(t *testing.T) {
	cmd := exec.Command("sh", "-c", "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done; echo done; read line")
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := stdout.Read(make([]byte, 8)); err != nil {
		t.Fatal(err)
	}
	got, err := cpuTime(cmd.Process.Pid)
	stdin.Close()
	cmd.Wait()
	want := cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()
	if err != nil || got <= 0 || math.Abs((want-got).Seconds()) > 0.05 {
		t.Errorf("%v, %v; the kernel says %v in the end", got, err, want)
	}
	if got, err := cpuTime(cmd.Process.Pid); err == nil {
		t.Errorf("%v of a process that was reaped, want an error", got)
	}
}

func TestDescendants(t *testing.T) {
	cmd := exec.Command("sh", "-c", "sh -c 'echo; sleep 60; :' & wait")
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := stdout.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	pids := descendants(os.Getpid())
	if len(pids) < 3 || pids[0] != os.Getpid() || !slices.Contains(pids, cmd.Process.Pid) {
		t.Errorf("%v, want this process, its child %d and that one's", pids, cmd.Process.Pid)
	}
	for _, pid := range descendants(cmd.Process.Pid) {
		if p, err := os.FindProcess(pid); err == nil {
			p.Kill()
		}
	}
	cmd.Wait()
}
