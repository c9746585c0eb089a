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

	p4config "github.com/p4lang/p4runtime/go/p4/config/v1"

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

// TestCompile compiles the source again. What the compiler that xagg.lock records makes of it is what is committed;
// another one has to accept it.
func TestCompile(t *testing.T) {
	require.Have(t, require.P4C)
	dir := t.TempDir()
	jsonFile, infoFile := filepath.Join(dir, "xagg.json"), filepath.Join(dir, "xagg.p4info.txtpb")
	out, err := exec.Command("p4c-bm2-ss", "--std", "p4-16", "-o", jsonFile, "--p4runtime-files", infoFile, "xagg.p4").CombinedOutput()
	if err != nil {
		t.Fatalf("compile xagg.p4: %v\n%s", err, out)
	}
	version, err := exec.Command("p4c-bm2-ss", "--version").CombinedOutput()
	if err != nil {
		t.Fatal(err)
	}
	lock, err := os.ReadFile("xagg.lock")
	if err != nil {
		t.Fatal(err)
	}
	recorded, _, _ := strings.Cut(string(lock), "\n")
	if !strings.Contains(string(version), strings.TrimPrefix(recorded, "compiler p4c-bm2-ss ")) {
		t.Logf("compiled, but not compared: this is %s, recorded is %s", bytes.TrimSpace(version), recorded)
		return
	}
	if len(out) != 0 {
		t.Errorf("the compiler warns:\n%s", out)
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

// TestDocumentation compares the package's documentation with P4Info: every table with its match fields and actions,
// every action's parameters, every counter and controller header, and all widths.
func TestDocumentation(t *testing.T) {
	info, err := P4Info()
	if err != nil {
		t.Fatal(err)
	}
	doc, err := os.ReadFile("doc.go")
	if err != nil {
		t.Fatal(err)
	}
	var lines []string
	for line := range strings.Lines(string(doc)) {
		lines = append(lines, strings.Fields(strings.TrimPrefix(line, "//"))...)
	}
	text := strings.Join(lines, " ")

	actions := map[uint32]string{}
	for _, a := range info.Actions {
		var params []string
		for _, p := range a.Params {
			params = append(params, fmt.Sprintf("%s:%d", p.Name, p.Bitwidth))
		}
		actions[a.Preamble.Id] = fmt.Sprintf("%s(%s)", a.Preamble.Alias, strings.Join(params, ", "))
	}
	var tables []string
	names := map[uint32]string{}
	for _, table := range info.Tables {
		names[table.Preamble.Id] = table.Preamble.Name
		words := []string{"table", table.Preamble.Name}
		for _, m := range table.MatchFields {
			words = append(words, fmt.Sprintf("%s:%d", m.Name, m.Bitwidth))
			if m.GetMatchType() != p4config.MatchField_EXACT {
				words = append(words, strings.ToLower(m.GetMatchType().String()))
			}
		}
		for _, ref := range table.ActionRefs {
			if ref.Scope == p4config.ActionRef_DEFAULT_ONLY {
				continue // NoAction
			}
			if ref.Id == table.InitialDefaultAction.GetActionId() {
				words = append(words, "default")
			}
			words = append(words, actions[ref.Id])
		}
		tables = append(tables, strings.Join(words, " "))
	}
	if want := strings.Join(tables, " "); !strings.Contains(text, want+" set_plan:") {
		t.Errorf("the documentation's tables are not those of P4Info:\n%s", strings.Join(tables, "\n"))
	}
	for _, c := range info.Counters {
		want := fmt.Sprintf("%s[%d]", c.Preamble.Name, c.Size)
		if !strings.Contains(text, want) || c.Spec.Unit != p4config.CounterSpec_BOTH {
			t.Errorf("counter %s of unit %v: not as documented", want, c.Spec.Unit)
		}
	}
	for _, c := range info.DirectCounters {
		want := fmt.Sprintf("%s (direct, on %s)", c.Preamble.Name, names[c.DirectTableId])
		if !strings.Contains(text, want) {
			t.Errorf("counter %s: not as documented", want)
		}
	}
	for _, h := range info.ControllerPacketMetadata {
		var fields []string
		for _, f := range h.Metadata {
			fields = append(fields, fmt.Sprintf("%s:%d", f.Name, f.Bitwidth))
		}
		if want := fmt.Sprintf("%s {%s}", h.Preamble.Name, strings.Join(fields, ", ")); !strings.Contains(text, want) {
			t.Errorf("controller header %s: not as documented", want)
		}
	}
}
