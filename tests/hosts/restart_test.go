package hosts

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"xagg/xdp"
)

// bpfDir returns a directory on a BPF file system of the test's own, which does not exist yet.
func bpfDir(t *testing.T) string {
	t.Helper()
	root := t.TempDir()
	if err := unix.Mount("bpf", root, "bpf", 0, ""); err != nil {
		t.Fatalf("mount a BPF file system: %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(root, unix.MNT_DETACH); err != nil { // a test that failed may hold it open
			t.Error(err)
		}
	})
	return filepath.Join(root, "s0")
}

// kill ends a process as an operator's kill -9 does, and waits until it is gone.
func kill(t *testing.T, p *process) {
	t.Helper()
	if err := unix.Kill(p.PID(), unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	<-p.Done()
}

// TestAgentKilled kills the agent of the server that sums everything, in the middle of a job. The job goes on without it,
// the next agent takes over, and the controller can do with it whatever it could before.
func TestAgentKilled(t *testing.T) {
	m := newMachines(t)
	pin := bpfDir(t)
	server := m.startAll("--pin", pin)
	if _, err := m.ask("job", "steer", "train", "--mode", "server"); err != nil {
		t.Fatal(err)
	}
	workers := m.startWorkers("--grads", "synthetic:5000", "--rounds", "600", "--delay", "10ms")
	more := func(what string) {
		t.Helper()
		then := workers[0].reduced()
		wait(t, "all-reduces "+what, func() error {
			if n := workers[0].reduced() - then; n < 20 {
				return fmt.Errorf("%d of 20", n)
			}
			return nil
		})
	}
	more("with an agent")
	kill(t, server)
	killed := time.Now()
	more("without one")
	restart := time.Now()
	server = m.startServer("--pin", pin)
	wait(t, "the next agent", func() error {
		if !strings.Contains(server.stderr.String(), "server ready") {
			return errors.New("it is not ready")
		}
		return nil
	})
	ready := time.Now()
	if !strings.Contains(server.stderr.String(), "took over") {
		t.Error("the next agent did not take over")
	}
	wait(t, "the controller", m.well)
	t.Logf("ran %v without an agent; the next one was ready %v after its start, the controller had it %v later",
		restart.Sub(killed).Round(time.Millisecond),
		ready.Sub(restart).Round(time.Millisecond), time.Since(ready).Round(time.Millisecond))
	more("with the next agent")

	if _, err := m.ask("job", "steer", "train", "--mode", "hybrid", "--steer", "1"); err != nil {
		t.Errorf("change the plan: %v", err)
	}
	resends := uint64(0)
	for rank, w := range workers {
		if err := w.Wait(); err != nil || w.reduced() != 600 {
			t.Errorf("worker %d: %v, %d all-reduces over all three ranks, want 600", rank, err, w.reduced())
		}
		epochs := make(map[uint16]bool)
		for line := range strings.Lines(w.stdout.String()) {
			var r struct {
				Epoch   uint16
				Resends uint64
			}
			if err := json.Unmarshal([]byte(line), &r); err != nil {
				t.Fatal(err)
			}
			epochs[r.Epoch] = true
			resends += r.Resends
		}
		if len(epochs) != 2 {
			t.Errorf("worker %d: all-reduces under %d plans, want the one before the change and the one after", rank, len(epochs))
		}
	}
	t.Logf("%d contributions were sent again", resends)

	if _, err := m.ask("job", "remove", "train"); err != nil {
		t.Error(err)
	}
	wait(t, "the server's memory to be free", func() error {
		status, err := m.ask("status", "-o", "json")
		var all struct {
			Servers []struct {
				Slots     uint32 `json:"slots"`
				SlotsFree uint32 `json:"slots_free"`
			} `json:"servers"`
		}
		if err == nil {
			err = json.Unmarshal([]byte(status), &all)
		}
		if err == nil && (len(all.Servers) != 1 || all.Servers[0].Slots == 0 || all.Servers[0].Slots != all.Servers[0].SlotsFree) {
			err = errors.New(status)
		}
		return err
	})
	server.Stop()
	if err := server.Wait(); err != nil {
		t.Errorf("end of the server: %v", err)
	}
	if _, err := os.Stat(pin); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%s is still there: %v", pin, err)
	}
}

// TestHostGone removes the interface below a pinned program. Doctor knows by the record what is left.
func TestHostGone(t *testing.T) {
	m := newMachines(t)
	pin := bpfDir(t)
	server := m.startServer("--pin", pin)
	wait(t, "the server", func() error {
		if !strings.Contains(server.stderr.String(), "server ready") {
			return errors.New("it is not ready")
		}
		return nil
	})
	kill(t, server)
	left := func() (xdp.PinnedServer, error) {
		servers, err := xdp.PinnedServers()
		i := slices.IndexFunc(servers, func(s xdp.PinnedServer) bool { return s.Dir == pin })
		if i < 0 {
			return xdp.PinnedServer{}, errors.Join(err, errors.New("nothing is pinned"))
		}
		return servers[i], err
	}
	if s, err := left(); err != nil || s.Agent || !s.Attached || s.Interface != "eth0" {
		t.Errorf("after kill -9: %+v, %v, want a program at eth0 without an agent", s, err)
	}
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	wait(t, "the kernel to remove the interface", func() error {
		s, err := left()
		if err == nil && s.Attached {
			err = errors.New("it is still there")
		}
		return err
	})
	if err := xdp.RemovePins(pin); err != nil {
		t.Error(err)
	}
	if s, err := left(); err == nil {
		t.Errorf("left: %+v", s)
	}
}
