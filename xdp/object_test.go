package xdp

import (
	"bufio"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"xagg/tests/require"
)

// TestObjectsBelongToSources fails when a source or an object changed without the other: 'go generate ./xdp' mends it.
func TestObjectsBelongToSources(t *testing.T) {
	sums := make(map[string]string)
	f, err := os.Open("objects.sum")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	compiler := ""
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		if comment, ok := strings.CutPrefix(lines.Text(), "# "); ok {
			if strings.Contains(comment, "clang version") {
				compiler = comment
			}
			continue
		}
		sum, name, ok := strings.Cut(lines.Text(), "  ")
		if !ok {
			t.Fatalf("objects.sum: %q", lines.Text())
		}
		sums[name] = sum
	}
	if compiler == "" {
		t.Error("objects.sum does not name the compiler")
	}
	var files []string
	for _, pattern := range []string{"*.bpf.c", "*.h", "*.o"} {
		names, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, names...)
	}
	if len(files) != len(sums) {
		t.Errorf("objects.sum has %d files, there are %d: %v", len(sums), len(files), files)
	}
	for _, name := range files {
		b, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		if sum := sha256.Sum256(b); hex.EncodeToString(sum[:]) != sums[name] {
			t.Errorf("%s is not the file that the objects were made with; run 'go generate ./xdp'", name)
		}
	}
}

// TestGenerateReproduces compiles the sources again and compares every generated file with the committed one. It needs
// the compiler that objects.sum names; another version makes other objects that are as good.
func TestGenerateReproduces(t *testing.T) {
	require.Have(t, require.Clang)
	want, err := os.ReadFile("objects.sum")
	if err != nil {
		t.Fatal(err)
	}
	version, err := exec.Command("clang-16", "--version").Output()
	if err != nil {
		t.Fatal(err)
	}
	if first, _, _ := strings.Cut(string(version), "\n"); !strings.Contains(string(want), first) {
		require.Check(t, &require.NotSupportedError{
			Feature: require.Clang, Err: fmt.Errorf("the objects were made by another compiler than %s", first),
		})
	}
	dir := t.TempDir()
	cmd := exec.Command("./generate.sh", dir)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("generate: %v\n%s", err, out)
	}
	made, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, file := range made {
		names = append(names, file.Name())
		got, err := os.ReadFile(filepath.Join(dir, file.Name()))
		if err != nil {
			t.Fatal(err)
		}
		want, err := os.ReadFile(file.Name())
		if err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s differs from what its sources give; run 'go generate ./xdp'", file.Name())
		}
	}
	if len(names) != 5 {
		t.Errorf("generated %v, want 5 files", names)
	}
}
