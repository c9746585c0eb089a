package lab

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"xagg/tests/require"
)

// python is the distribution's, which its Mininet is for.
const python = "/usr/bin/python3"

// mininetDir is the Mininet topology's folder.
const mininetDir = "../../bmv2/mininet"

// The tests of the Mininet topology and of its demo, which start nothing.
func TestMininetModules(t *testing.T) {
	require.Have(t, require.Mininet)
	cmd := exec.Command(python, "-B", "-m", "unittest")
	cmd.Dir = mininetDir
	if out, err := cmd.CombinedOutput(); err != nil || !bytes.Contains(out, []byte("\nOK\n")) {
		t.Errorf("%v: %v\n%s", cmd, err, out)
	}
}

// The demo in Mininet is exact with both switches, and leaves nothing behind.
func TestMininetDemo(t *testing.T) {
	require.Have(t, require.Mininet, require.XDP)
	xagg := filepath.Join(t.TempDir(), "xagg")
	if out, err := exec.Command("go", "build", "-o", xagg, "xagg/cmd/xagg").CombinedOutput(); err != nil {
		t.Fatalf("build xagg: %v\n%s", err, out)
	}
	for _, c := range []struct {
		kind    string
		feature require.Feature
	}{{"engine", require.Mininet}, {"simple_switch_grpc", require.BMv2}} {
		t.Run(c.kind, func(t *testing.T) {
			require.Have(t, c.feature)
			temp := t.TempDir()
			cmd := exec.Command(python, "-B", "demo.py", "--xagg", xagg, "--switch", c.kind, "--rounds", "1")
			cmd.Dir = mininetDir
			cmd.Env = append(os.Environ(), "TMPDIR="+temp)
			var table, log bytes.Buffer
			cmd.Stdout, cmd.Stderr = &table, &log
			if err := cmd.Run(); err != nil {
				t.Fatalf("%v: %v\n%s%s", cmd, err, table.String(), log.String())
			}
			rows := strings.Split(strings.TrimSpace(table.String()), "\n")
			if len(rows) != 4 {
				t.Fatalf("table of %d lines, want a head and three modes:\n%s", len(rows), table.String())
			}
			for i, mode := range []string{"switch", "server", "hybrid"} {
				want := fmt.Sprintf("%s %s 4 1", mode, c.kind)
				row := strings.Join(strings.Fields(rows[i+1]), " ")
				if !strings.HasPrefix(row, want) || !strings.HasSuffix(row, " yes") {
					t.Errorf("row %q, want %q ... yes", row, want)
				}
			}
			if left, err := os.ReadDir(temp); err != nil || len(left) != 0 {
				t.Errorf("left behind: %v, %v", left, err)
			}
		})
	}
}
