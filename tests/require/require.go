// Package require says what a test needs from the machine it runs on. A test that needs something the machine lacks
// is skipped with the reason, unless the environment variable XAGG_REQUIRE lists that feature: then it fails. CI lists
// what it has installed, so that a skip there is never silent.
//
//	XAGG_REQUIRE=xdp,netns go test ./...
package require

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"golang.org/x/sys/unix"

	"xagg/lab/peers"
)

// Variable is the environment variable that lists, separated by commas, the features that must not be skipped.
const Variable = "XAGG_REQUIRE"

// KernelVariable is the environment variable that names a folder with an unpacked kernel package of Linux 6.1
// (boot/vmlinuz-* and lib/modules), such as dpkg -x makes of Debian 12's linux-image-*.
const KernelVariable = "XAGG_KERNEL"

// Feature is something that a test needs and a machine may lack.
type Feature string

// The features that tests may ask for.
const (
	XDP     Feature = "xdp"     // XDP programs can be loaded (root or CAP_BPF and CAP_NET_ADMIN)
	Netns   Feature = "netns"   // network namespaces and links can be made (root)
	Mininet Feature = "mininet" // Mininet is installed for /usr/bin/python3, and netns
	P4C     Feature = "p4c"     // p4c-bm2-ss is on PATH
	BMv2    Feature = "bmv2"    // simple_switch_grpc is on PATH
	QEMU    Feature = "qemu"    // qemu-system-x86_64 is on PATH, and [KernelVariable] names a kernel to boot in it
	Clang   Feature = "clang"   // clang-16 and llvm-strip-16, which compile the BPF objects, are on PATH
	Gloo    Feature = "gloo"    // torch with Gloo is installed for /usr/bin/python3
	MPI     Feature = "mpi"     // Open MPI is installed, and mpi4py for /usr/bin/python3
)

// probes has one function per feature; each reports in a few words what is missing and how to get it.
var probes = map[Feature]func() error{
	XDP:     sync.OnceValue(probeXDP),
	Netns:   sync.OnceValue(probeNetns),
	Mininet: sync.OnceValue(probeMininet),
	P4C:     executable("p4c-bm2-ss"),
	BMv2:    executable("simple_switch_grpc"),
	QEMU:    probeQEMU,
	Clang:   executable("clang-16", "llvm-strip-16"),
	Gloo:    sync.OnceValue(func() error { return library(peers.Gloo) }),
	MPI:     sync.OnceValue(func() error { return library(peers.MPI) }),
}

// NotSupportedError says that the machine lacks a feature. It is the only reason for which a test may be skipped.
type NotSupportedError struct {
	Feature Feature
	Err     error // why, and how to get it
}

// Error implements error.
func (e *NotSupportedError) Error() string {
	return fmt.Sprintf("%s is not supported here: %v", e.Feature, e.Err)
}

// Unwrap returns the cause.
func (e *NotSupportedError) Unwrap() error { return e.Err }

// Probe returns nil where the machine has the feature and a [*NotSupportedError] where it lacks it. The answer is
// found out once per process.
func Probe(f Feature) error {
	probe, ok := probes[f]
	if !ok {
		return fmt.Errorf("probe %q: no such feature", f)
	}
	if err := probe(); err != nil {
		return &NotSupportedError{Feature: f, Err: err}
	}
	return nil
}

// Have returns where the machine has all the features; otherwise it skips the test, or fails it where [Variable]
// lists the one that is missing.
func Have(t testing.TB, features ...Feature) {
	t.Helper()
	for _, f := range features {
		Check(t, Probe(f))
	}
}

// Check is for what only the attempt shows: it does nothing for nil, skips the test where err is or wraps a
// [*NotSupportedError] that [Variable] does not list, and fails it otherwise.
func Check(t testing.TB, err error) {
	t.Helper()
	if err == nil {
		return
	}
	if skip, why := verdict(err, os.Getenv(Variable)); skip {
		t.Skip(why)
	} else {
		t.Fatal(why)
	}
}

// verdict decides whether err lets a test be skipped when the features in list are required.
func verdict(err error, list string) (skip bool, why string) {
	required, bad := parse(list)
	if bad != nil {
		return false, bad.Error()
	}
	var missing *NotSupportedError
	switch {
	case !errors.As(err, &missing):
		return false, err.Error()
	case slices.Contains(required, missing.Feature):
		return false, fmt.Sprintf("%s=%s: %v", Variable, list, err)
	}
	return true, err.Error()
}

// parse reads a list of features; an unknown name is an error, since a misspelt requirement would never be enforced.
func parse(list string) ([]Feature, error) {
	var features []Feature
	for name := range strings.SplitSeq(list, ",") {
		name = strings.TrimSpace(name)
		if name == "" {
			continue
		}
		if _, ok := probes[Feature(name)]; !ok {
			return nil, fmt.Errorf("parse %s: no such feature: %q", Variable, name)
		}
		features = append(features, Feature(name))
	}
	return features, nil
}

// executable returns a probe for programs on PATH.
func executable(names ...string) func() error {
	return func() error {
		for _, name := range names {
			if _, err := exec.LookPath(name); err != nil {
				return err
			}
		}
		return nil
	}
}

// library looks for a library of collective operations.
func library(l peers.Library) error {
	_, err := l.Available(context.Background())
	return err
}

// probeQEMU looks for the virtual machine and a kernel for it.
func probeQEMU() error {
	if _, err := exec.LookPath("qemu-system-x86_64"); err != nil {
		return fmt.Errorf("%w (apt-get install qemu-system-x86)", err)
	}
	dir := os.Getenv(KernelVariable)
	if dir == "" {
		return fmt.Errorf("%s does not name an unpacked kernel package (apt-get download linux-image-6.1..., dpkg -x)", KernelVariable)
	}
	_, err := os.Stat(dir)
	return err
}

// probeXDP loads the smallest XDP program.
func probeXDP() error {
	prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type:         ebpf.XDP,
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 2), asm.Return()},
		License:      "Apache-2.0",
	})
	if err != nil {
		return fmt.Errorf("load an XDP program: %w (needs root)", err)
	}
	return prog.Close()
}

// probeNetns makes a network namespace on a thread of its own; both end with the goroutine, because a goroutine that
// ends while locked takes its thread along.
func probeNetns() error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		done <- unix.Unshare(unix.CLONE_NEWNET)
	}()
	if err := <-done; err != nil {
		return fmt.Errorf("make a network namespace: %w (needs root)", err)
	}
	return nil
}

// probeMininet imports Mininet with the system's Python, which is the one that the distribution's package serves.
func probeMininet() error {
	if err := probeNetns(); err != nil {
		return err
	}
	if _, err := exec.LookPath("mnexec"); err != nil {
		return fmt.Errorf("%w (apt-get install mininet)", err)
	}
	if out, err := exec.Command("/usr/bin/python3", "-c", "import mininet.net").CombinedOutput(); err != nil {
		return fmt.Errorf("import mininet: %w: %s (apt-get install mininet)", err, strings.TrimSpace(string(out)))
	}
	return nil
}
