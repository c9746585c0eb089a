package p4

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"xagg/tests/require"
)

// TestCompiledBelongsToSource fails when xagg.p4 was changed and not compiled, or a compiled file was edited.
func TestCompiledBelongsToSource(t *testing.T) {
	lock, err := os.ReadFile("xagg.lock")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"xagg.p4", "xagg.json", "xagg.p4info.txtpb"} {
		data, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		if want := fmt.Sprintf("%x  %s\n", sha256.Sum256(data), name); !strings.Contains(string(lock), want) {
			t.Errorf("%s is not the one that xagg.lock records: run 'make generate' where p4c is installed", name)
		}
	}
}

// TestCompile compiles the source again and compares.
func TestCompile(t *testing.T) {
	require.Have(t, require.P4C)
	dir := t.TempDir()
	jsonFile, infoFile := filepath.Join(dir, "xagg.json"), filepath.Join(dir, "xagg.p4info.txtpb")
	out, err := exec.Command("p4c-bm2-ss", "--std", "p4-16", "-o", jsonFile, "--p4runtime-files", infoFile, "xagg.p4").CombinedOutput()
	if err != nil {
		t.Fatalf("compile xagg.p4: %v\n%s", err, out)
	}
	if len(out) != 0 {
		t.Errorf("the compiler warns:\n%s", out)
	}
	version, err := exec.Command("p4c-bm2-ss", "--version").CombinedOutput()
	if err != nil {
		t.Fatal(err)
	}
	lock, err := os.ReadFile("xagg.lock")
	if err != nil {
		t.Fatal(err)
	}
	if recorded, _, _ := strings.Cut(string(lock), "\n"); !strings.Contains(string(version), strings.TrimPrefix(recorded, "compiler p4c-bm2-ss ")) {
		t.Skipf("this is another compiler (%s) than the one recorded (%s)", bytes.TrimSpace(version), recorded)
	}
	for name, want := range map[string][]byte{jsonFile: JSON, infoFile: P4InfoText} {
		got, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, want) {
			t.Errorf("%s differs from the committed one: run 'make generate'", filepath.Base(name))
		}
	}
}

func TestP4Info(t *testing.T) {
	info, err := P4Info()
	if err != nil {
		t.Fatal(err)
	}
	if len(info.Tables) != 8 {
		t.Errorf("P4Info has %d tables, want the 8 of the package's documentation", len(info.Tables))
	}
}
