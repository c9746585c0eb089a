package hosts

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"xagg/bmv2"
	"xagg/lab/netns"
	"xagg/tests/require"
)

// victims are machines whose processes are killed and started again. Control traffic has sockets of its own, so that what
// is measured is not TCP's patience.
type victims struct {
	*machines
	real            bool // the switch is simple_switch_grpc
	config          string
	sw, server, ctl *process
	workers         []*process
}

// socket returns the address of a unix socket.
func (v *victims) socket(name string) string {
	return "unix:" + filepath.Join(v.Dir(), name+".sock")
}

func newVictims(t *testing.T, real bool) *victims {
	v := &victims{machines: newMachines(t), real: real}
	text := fmt.Sprintf(config, v.socket("p4rt"))
	text = strings.Replace(text, "listen: 10.77.2.1:19860", "listen: "+v.socket("controller"), 1)
	text = strings.Replace(text, "agent: 10.77.1.1:19861", "agent: "+v.socket("agent"), 1)
	v.config = filepath.Join(t.TempDir(), "controller.yaml")
	if err := os.WriteFile(v.config, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	v.startSwitch()
	v.startServer()
	v.startController()
	wait(t, "switch, server and controller", v.well)
	return v
}

func (v *victims) startSwitch() {
	v.t.Helper()
	ports := []string{"-i", "1@p1", "-i", "2@p2", "-i", "3@p3", "-i", "65@p65", "-i", "100@p100"}
	target := []string{"--", "--grpc-server-addr", v.socket("p4rt"), "--cpu-port", "510"}
	if !v.real {
		v.sw = v.start(netns.Switch, append(append([]string{"switch", "--no-p4"}, ports...), target...)...)
		return
	}
	// A socket that a killed process has left is in its way.
	if err := os.Remove(strings.TrimPrefix(v.socket("p4rt"), "unix:")); err != nil && !errors.Is(err, os.ErrNotExist) {
		v.t.Fatal(err)
	}
	p := &process{}
	cmd := exec.Command(bmv2.SimpleSwitchBinary, append(append([]string{"--no-p4", "--device-id", "0", "--log-level", "off"}, ports...), target...)...)
	cmd.Stdout, cmd.Stderr = &p.stdout, &p.stderr
	child, err := v.Start(netns.Switch, cmd)
	if err != nil {
		v.t.Fatal(err)
	}
	p.Child = child
	v.t.Cleanup(child.Stop)
	v.sw = p
}

func (v *victims) startServer() {
	v.t.Helper()
	v.server = v.start("s0", "server", "--interface", "eth0", "--name", "s0", "--listen", v.socket("agent"), "--no-pin")
}

func (v *victims) startController() {
	v.t.Helper()
	v.ctl = v.start("control", "controller", "--config", v.config)
}

// ask runs a command against the controller.
func (v *victims) ask(args ...string) (string, error) {
	out, err := exec.Command(v.xagg, append(args, "--controller", v.socket("controller"))...).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("%w: %s", err, out)
	}
	return string(out), nil
}

func (v *victims) well() error {
	_, err := v.ask("status")
	return err
}

// startWorkers starts a worker for every rank, which write what they get below a directory.
func (v *victims) startWorkers(dump string, args ...string) {
	v.workers = nil
	for rank := range 3 {
		v.workers = append(v.workers, v.start(fmt.Sprintf("w%d", rank), append([]string{
			"worker", "--controller", v.socket("controller"), "--job", "train", "--rank", fmt.Sprint(rank),
			"--ip", fmt.Sprintf("10.77.0.%d", rank+1), "--dump", dump}, args...)...))
	}
}

// next waits until every rank has a result that was begun after now, and returns how long that took.
func (v *victims) next(after string) time.Duration {
	v.t.Helper()
	began := time.Now()
	then := v.workers[0].reduced()
	for rank, w := range v.workers {
		wait(v.t, fmt.Sprintf("an all-reduce of rank %d after %s", rank, after), func() error {
			select {
			case <-w.Done():
				return fmt.Errorf("it has ended: %w", w.Wait())
			default:
			}
			if w.reduced() < then+2 {
				return fmt.Errorf("it has %d, %d were before; %s", w.reduced(), then, v.recovery())
			}
			return nil
		})
	}
	return time.Since(began)
}

// recovery returns what the controller says of the job.
func (v *victims) recovery() string {
	out, err := v.ask("job", "show", "train")
	if err != nil {
		return err.Error()
	}
	return out
}

// TestKills kills the switch, the server with its memory, and the controller, alone and in pairs, and starts each again at
// once. The job goes on with the sums that it would have had.
func TestKills(t *testing.T) {
	for _, sw := range []string{"engine", "simple_switch_grpc"} {
		t.Run(sw, func(t *testing.T) {
			real := sw == "simple_switch_grpc"
			if real {
				require.Have(t, require.BMv2)
			}
			for _, mode := range []string{"switch", "hybrid"} {
				t.Run(mode, func(t *testing.T) { testKills(t, newVictims(t, real), mode) })
			}
		})
	}
}

func testKills(t *testing.T, v *victims, mode string) {
	if _, err := v.ask(append([]string{"job", "steer", "train", "--mode", mode}, map[string][]string{"hybrid": {"--steer", "1"}}[mode]...)...); err != nil {
		t.Fatal(err)
	}
	const rounds = 700
	dump := t.TempDir()
	v.startWorkers(dump, "--grads", "synthetic:5000", "--rounds", fmt.Sprint(rounds), "--delay", "5ms")
	v.next("the start")
	type victim struct {
		process **process
		start   func()
	}
	all := map[string]victim{
		"switch": {&v.sw, v.startSwitch}, "server": {&v.server, v.startServer}, "controller": {&v.ctl, v.startController},
	}
	for _, names := range [][]string{
		{"switch"}, {"server"}, {"controller"}, {"switch", "server"}, {"switch", "controller"}, {"server", "controller"},
	} {
		what := strings.Join(names, " and ")
		began := time.Now()
		for _, name := range names {
			kill(t, *all[name].process)
		}
		for _, name := range names {
			all[name].start()
		}
		v.next("the death of " + what)
		t.Logf("kill -9 of %s: every rank had the next result after %v", what, time.Since(began).Round(time.Millisecond))
		wait(t, "all to be well", v.well)
	}
	for rank, w := range v.workers {
		if err := w.Wait(); err != nil || w.reduced() != rounds {
			t.Errorf("rank %d: %v, %d all-reduces over all ranks, want %d", rank, err, w.reduced(), rounds)
		}
	}
	sameSums(t, dump, rounds)
}

// sameSums compares what the ranks have got, integer by integer.
func sameSums(t *testing.T, dump string, rounds int) {
	t.Helper()
	for round := range rounds {
		var first []byte
		for rank := range 3 {
			name := filepath.Join(dump, fmt.Sprintf("round%03d-rank%d.i32", round, rank))
			b, err := os.ReadFile(name)
			if err != nil {
				t.Fatal(err)
			}
			if rank == 0 {
				first = b
			} else if string(b) != string(first) || len(b) == 0 {
				t.Fatalf("all-reduce %d: rank %d has other sums than rank 0", round, rank)
			}
		}
	}
}

// TestWorkerKilled kills a worker: the others are told by name, and the next incarnation of the job needs nobody's help.
func TestWorkerKilled(t *testing.T) {
	v := newVictims(t, false)
	v.startWorkers(t.TempDir(), "--grads", "synthetic:5000", "--rounds", "100000")
	v.next("the start")
	began := time.Now()
	kill(t, v.workers[1])
	for _, rank := range []int{0, 2} {
		w := v.workers[rank]
		if err := w.Wait(); err == nil || !strings.Contains(w.stderr.String(), "rank 1 on host w1 went away without leaving") {
			t.Errorf("rank %d: %v: %s", rank, err, w.stderr.String())
		}
	}
	t.Logf("kill -9 of a worker: the others had ended after %v", time.Since(began).Round(time.Millisecond))
	v.startWorkers(t.TempDir(), "--grads", "synthetic:5000", "--rounds", "20")
	for rank, w := range v.workers {
		if err := w.Wait(); err != nil || w.reduced() != 20 {
			t.Errorf("rank %d: %v, %d all-reduces, want 20", rank, err, w.reduced())
		}
	}
}
