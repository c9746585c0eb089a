package qemu

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"xagg/tests/require"
)

// tests are what runs in the machine: every program is loaded, its answers are compared with the reference's, frames go
// out and back over a veth pair, and a second agent takes over from the first.
const tests = "^(TestPitfall29|TestPitfall31|TestPitfall32|TestAgainstReference|TestQuorumWaits|TestRunningSumWraps|TestArrivalsStayInOrder|TestVeth|TestOtherTrafficPasses|TestAttachErrors|TestServe|TestTakeOver|TestPinAuto)$"

// subtests leaves out random traces that the running kernel is enough for: everything takes twenty times as long here.
const subtests = "^(seed_0|native|generic|auto|sync|quorum|async)$"

func TestKernel(t *testing.T) {
	require.Have(t, require.QEMU)
	image, module, err := findKernel(os.Getenv(require.KernelVariable))
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	initrd := filepath.Join(dir, "initrd")
	if err := os.WriteFile(initrd, initramfs(t, module), 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "qemu-system-x86_64",
		"-machine", "q35,accel=tcg", "-cpu", "max", "-smp", "2", "-m", "768",
		"-nodefaults", "-no-user-config", "-display", "none", "-serial", "stdio", "-no-reboot",
		"-kernel", image, "-initrd", initrd,
		// What the kernel does not know is for /init: variables to its environment, the rest to its arguments.
		"-append", "console=ttyS0 quiet panic=-1 "+require.Variable+"=xdp,netns -- -test.v -test.run="+tests+"/"+subtests)
	start := time.Now()
	out, err := cmd.CombinedOutput()
	out = bytes.ReplaceAll(out, []byte("\r"), nil)
	t.Logf("%s, %s:\n%s", filepath.Base(image), time.Since(start).Round(100*time.Millisecond), out)
	if err != nil {
		t.Errorf("qemu: %v", err)
	}
	if !bytes.Contains(out, []byte("xagg: tests ended: <nil>\n")) {
		t.Error("the tests did not pass on this kernel")
	}
	if n := bytes.Count(out, []byte("\n--- PASS: ")); n != strings.Count(tests, "Test") {
		t.Errorf("%d tests passed, want %d", n, strings.Count(tests, "Test"))
	}
}

// findKernel returns the kernel image and its veth module, in an unpacked kernel package.
func findKernel(dir string) (image string, module []byte, err error) {
	images, err := filepath.Glob(filepath.Join(dir, "boot", "vmlinuz-*"))
	if err != nil {
		return "", nil, err
	}
	if len(images) != 1 {
		return "", nil, fmt.Errorf("find kernel in %s: %d files boot/vmlinuz-*, want 1", dir, len(images))
	}
	name := filepath.Join(dir, "lib/modules", strings.TrimPrefix(filepath.Base(images[0]), "vmlinuz-"), "kernel/drivers/net/veth.ko")
	module, err = os.ReadFile(name)
	if errors.Is(err, os.ErrNotExist) {
		module, err = exec.Command("xz", "-dc", name+".xz").Output() // newer distributions compress them
	}
	if err != nil {
		return "", nil, fmt.Errorf("read module %s: %w", name, err)
	}
	return images[0], module, nil
}

// initramfs returns the machine's first and only file system: package xdp's test binary as /init.
func initramfs(t *testing.T, veth []byte) []byte {
	t.Helper()
	binary := filepath.Join(t.TempDir(), "init")
	build := exec.Command("go", "test", "-c", "-o", binary, "xagg/xdp")
	build.Env = append(os.Environ(), "CGO_ENABLED=0") // there are no libraries in the machine
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build test binary: %v\n%s", err, out)
	}
	init, err := os.ReadFile(binary)
	if err != nil {
		t.Fatal(err)
	}
	var a cpio
	for _, dir := range []string{"dev", "proc", "sys", "tmp"} {
		a.add(dir, 0o040755, 0, 0, nil)
	}
	a.add("dev/console", 0o020600, 5, 1, nil) // standard output of /init
	a.add("init", 0o100755, 0, 0, init)
	a.add("veth.ko", 0o100644, 0, 0, veth)
	a.add("TRAILER!!!", 0, 0, 0, nil)
	return a.Bytes()
}

// cpio writes an archive of the "newc" kind, which the kernel unpacks (Documentation/driver-api/early-userspace).
type cpio struct {
	bytes.Buffer
	files int
}

func (a *cpio) add(name string, mode, major, minor int, content []byte) {
	a.files++
	fmt.Fprintf(a, "070701%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%s\x00",
		a.files, mode, 0, 0, 1, 0, len(content), 0, 0, major, minor, len(name)+1, 0, name)
	a.pad()
	a.Write(content)
	a.pad()
}

func (a *cpio) pad() { a.Write(make([]byte, -a.Len()&3)) }
