// Package kernel runs what depends on the kernel under the oldest kernel that is supported, in a virtual machine.
package kernel

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"xagg/tests/kernel/boot"
	"xagg/tests/require"
)

// modules are the kernel modules that a lab needs, each after those that it needs itself.
var modules = []string{"llc", "stp", "bridge", "veth", "sch_tbf"}

// Under Linux 6.1 the kernel's verifier takes the server's program, whose verdicts, packets and maps are the reference
// model's, and frames go out and come back over a lab's links.
func TestOldestKernel(t *testing.T) {
	require.Have(t, require.QEMU)
	dir := t.TempDir()
	files := []boot.File{{Name: "modules", Mode: unix.S_IFDIR | 0o755}}
	for i, name := range modules {
		files = append(files, boot.File{
			Name: fmt.Sprintf("modules/%02d-%s.ko", i, name), Mode: unix.S_IFREG | 0o644, Data: read(t, find(t, "lib/modules/*/kernel/*/"+name+".ko",
				"lib/modules/*/kernel/*/*/"+name+".ko")),
		})
	}
	commands := [][]string{
		{"/xdp.test", "-test.v", "-test.run", "^TestAgainstReference$"},
		{"/xdp.test", "-test.run", "^$", "-test.bench", "/hot", "-test.benchtime", "1x"}, // the other object
		{"/lab.test", "-test.v", "-test.run", "^TestServerOverLink$"},
		{"/doctor.test", "-test.v", "-test.run", "^TestLocal$"},
	}
	encoded, err := json.Marshal(commands)
	if err != nil {
		t.Fatal(err)
	}
	files = append(files, boot.File{Name: boot.CommandFile[1:], Mode: unix.S_IFREG | 0o644, Data: encoded})
	for name, build := range map[string][]string{
		"init":        {"build", "./guest"},
		"doctor.test": {"test", "-c", "xagg/doctor"},
		"xdp.test":    {"test", "-c", "xagg/xdp"},
		"lab.test":    {"test", "-c", "xagg/tests/lab"},
	} {
		out := filepath.Join(dir, name)
		last := len(build) - 1
		args := append(append([]string{}, build[:last]...), "-ldflags=-s -w", "-o", out, build[last])
		cmd := exec.Command("go", args...)
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0") // no shared libraries in the machine
		if output, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("go %s: %v\n%s", strings.Join(args, " "), err, output)
		}
		files = append(files, boot.File{Name: name, Mode: unix.S_IFREG | 0o755, Data: read(t, out)})
	}
	initrd := filepath.Join(dir, "initrd")
	if err := os.WriteFile(initrd, boot.Archive(files), 0o644); err != nil {
		t.Fatal(err)
	}

	console := run(t, find(t, "boot/vmlinuz-*"), initrd)
	_, line, ok := strings.Cut(console, "\n"+boot.Marker)
	line, _, _ = strings.Cut(line, "\n")
	var result boot.Result
	if err := json.Unmarshal([]byte(line), &result); !ok || err != nil {
		t.Fatalf("the machine did not say how it went (%v):\n%s", err, console)
	}
	if result.Error != "" || !strings.HasPrefix(result.Release, "6.1.") {
		t.Fatalf("kernel %s: %s\n%s", result.Release, result.Error, console)
	}
	t.Logf("kernel %s\n%s", result.Release, console)
}

// run boots the machine and returns what its console showed.
func run(t *testing.T, kernel, initrd string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	var out bytes.Buffer
	// Without hardware acceleration, which a machine that is virtual itself need not have.
	cmd := exec.CommandContext(ctx, "qemu-system-x86_64", "-accel", "tcg", "-m", "1024", "-smp", "2", "-nic", "none",
		"-nographic", "-no-reboot", "-kernel", kernel, "-initrd", initrd,
		"-append", "console=ttyS0 quiet panic=-1 rdinit=/init")
	cmd.Stdout, cmd.Stderr = &out, &out
	begin := time.Now()
	if err := cmd.Run(); err != nil {
		t.Fatalf("qemu: %v\n%s", err, out.String())
	}
	t.Logf("the machine ran for %v", time.Since(begin).Round(time.Second))
	return strings.ReplaceAll(out.String(), "\r", "")
}

// find returns the one file of the unpacked kernel package that fits one of the patterns.
func find(t *testing.T, patterns ...string) string {
	t.Helper()
	for _, pattern := range patterns {
		found, err := filepath.Glob(filepath.Join(os.Getenv(require.KernelVariable), pattern))
		if err != nil {
			t.Fatal(err)
		}
		if len(found) > 0 {
			return found[0]
		}
	}
	t.Fatalf("no %s in %s", patterns[0], os.Getenv(require.KernelVariable))
	return ""
}

func read(t *testing.T, path string) []byte {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return data
}
