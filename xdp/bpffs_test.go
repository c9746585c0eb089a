package xdp

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// enterMounts gives the test's thread mounts of its own, without a BPF file system at the usual place. The thread ends
// with the test, since it is locked.
func enterMounts(t *testing.T) {
	t.Helper()
	enterNamespace(t)
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		t.Fatalf("make mount namespace: %v", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		t.Fatalf("make mounts private: %v", err)
	}
	for {
		there, err := isBPFFS(bpffs)
		if err != nil {
			t.Fatal(err)
		}
		if !there {
			return
		}
		if err := unix.Unmount(bpffs, unix.MNT_DETACH); err != nil {
			t.Fatal(err)
		}
	}
}

// TestPinAuto pins where nobody has prepared anything.
func TestPinAuto(t *testing.T) {
	enterMounts(t)
	vethPair(t, 1500, 1)
	log, _ := testLog(t)
	cfg := Config{Interface: "server", Memory: 10 * SlotSize, Mode: Auto, Pin: PinAuto}
	for range 2 {
		p, err := pinsFor(cfg, log)
		if err != nil {
			t.Fatal(err)
		}
		if !strings.HasPrefix(p.dir, "/sys/fs/bpf/xagg/server@") {
			t.Errorf("pins of an interface outside the first network namespace are in %s", p.dir)
		}
		server, err := start(cfg, p, log)
		if err != nil {
			t.Fatal(err)
		}
		finish(t, server, p)
	}
	if _, err := os.Stat("/sys/fs/bpf/xagg"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the folder of all pins is still there: %v", err)
	}
}

func TestNoBPFFS(t *testing.T) {
	enterMounts(t)
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var none [2]unix.CapUserData
	if err := unix.Capset(&header, &none[0]); err != nil {
		t.Fatal(err)
	}
	log, out := testLog(t)
	cfg := Config{Interface: "server", Pin: PinAuto}
	if p, err := pinsFor(cfg, log); p != nil || err != nil || !strings.Contains(out.String(), "nothing is pinned") {
		t.Errorf("pins %v, %v; log %s", p, err, out)
	}
	cfg.Keep = true // what is to be kept cannot be
	if _, err := pinsFor(cfg, log); !errors.Is(err, ErrPrivileges) || !strings.Contains(err.Error(), "mount -t bpf bpf /sys/fs/bpf") {
		t.Errorf("with --keep: %v", err)
	}
}

// TestDefaultPins names the pins of interfaces whose names the BPF file system does not take.
func TestDefaultPins(t *testing.T) {
	own, err := namespaceNumber("/proc/thread-self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	want := "/sys/fs/bpf/xagg/eth0:100"
	if first, err := namespaceNumber("/proc/1/ns/net"); err != nil || first != own { // a machine may hide process 1
		want += fmt.Sprintf("@%d", own)
	}
	if dir, err := defaultPins("eth0.100"); err != nil || dir != want {
		t.Errorf("pins of eth0.100: %s %v, want %s", dir, err, want)
	}
}
