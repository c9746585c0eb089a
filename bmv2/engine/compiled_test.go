package engine

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

var testPrograms = []string{"expr", "small", "switch"}

// TestCompiledBelongsToSource fails when a test program was changed and not compiled, or a compiled file was edited.
func TestCompiledBelongsToSource(t *testing.T) {
	lock := readTestdata(t, "compiled.lock")
	for _, name := range testPrograms {
		for _, ext := range []string{".p4", ".json", ".p4info.txtpb"} {
			want := fmt.Sprintf("%x  %s\n", sha256.Sum256(readTestdata(t, name+ext)), name+ext)
			if !bytes.Contains(lock, []byte(want)) {
				t.Errorf("%s is not the one that compiled.lock records: run 'make generate' where p4c is installed", name+ext)
			}
		}
	}
}

// TestCompile compiles the test programs again. What the compiler that compiled.lock records makes of them is what is
// committed; the engine has to load what any other one makes of them.
func TestCompile(t *testing.T) {
	require.Have(t, require.P4C)
	version, err := exec.Command("p4c-bm2-ss", "--version").CombinedOutput()
	if err != nil {
		t.Fatal(err)
	}
	recorded, _, _ := strings.Cut(string(readTestdata(t, "compiled.lock")), "\n")
	same := strings.Contains(string(version), strings.TrimPrefix(recorded, "compiler p4c-bm2-ss "))
	if !same {
		t.Logf("compiled and loaded, but not compared: this is %s, recorded is %s", bytes.TrimSpace(version), recorded)
	}
	for _, name := range testPrograms {
		out := filepath.Join(t.TempDir(), name)
		cmd := exec.Command("p4c-bm2-ss", "--std", "p4-16",
			"-o", out+".json", "--p4runtime-files", out+".p4info.txtpb", name+".p4")
		cmd.Dir = "testdata"
		if msg, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("compile %s: %v\n%s", name, err, msg)
		}
		for _, ext := range []string{".json", ".p4info.txtpb"} {
			got, err := os.ReadFile(out + ext)
			if err != nil {
				t.Fatal(err)
			}
			if same && !bytes.Equal(got, readTestdata(t, name+ext)) {
				t.Errorf("%s differs from the committed one: run 'make generate'", name+ext)
			}
			if ext == ".json" {
				if _, err := Load(got, Options{}); err != nil {
					t.Errorf("load %s%s: %v", name, ext, err)
				}
			}
		}
	}
}

// TestLoadTestdata loads what p4c makes of them.
func TestLoadTestdata(t *testing.T) {
	for _, name := range testPrograms {
		load(t, name+".json")
	}
}
