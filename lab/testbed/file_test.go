package testbed

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"xagg/lab/netns"
	"xagg/tests/require"
)

const existing = `{
  "lab": "mininet",
  "switch": {"kind": "engine", "netns": %q, "address": "unix:/tmp/s.sock", "pid": 7},
  "hosts": [{"name": "w0", "netns": %q, "address": "10.77.0.1/16", "mac": "02:78:61:00:00:01", "interface": "eth0", "port": 1, "port_interface": "p1"}]
}`

// write writes a file and returns its path.
func write(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "hosts.json")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestReadExisting(t *testing.T) {
	for _, c := range []struct{ old, new, want string }{
		{`"lab"`, `"laboratory"`, `unknown field "laboratory"`},
		{`"engine"`, `"tofino"`, "want lab, and switch.kind (engine or simple_switch_grpc)"},
		{`"pid": 7`, `"pid": 0`, "switch.pid"},
		{`10.77.0.1/16`, `10.77.0.1`, "no '/'"},
	} {
		text := strings.Replace(fmt.Sprintf(existing, "a", "b"), c.old, c.new, 1)
		if _, err := ReadExisting(write(t, text)); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s for %s: error %v, want one with %q", c.new, c.old, err, c.want)
		}
	}
	e, err := ReadExisting(write(t, fmt.Sprintf(existing, "a", "b")))
	if err != nil {
		t.Fatal(err)
	}
	e.Hosts[0].MAC = "02"
	if _, err := e.Adopt(); err == nil || !strings.Contains(err.Error(), "adopt host w0") {
		t.Errorf("with MAC 02: error %v", err)
	}
}

// Programs run on hosts that a file describes.
func TestAdopt(t *testing.T) {
	require.Have(t, require.Netns)
	made := create(t).hosts
	e, err := ReadExisting(write(t, fmt.Sprintf(existing, made.Path(netns.Switch), made.Path("w0"))))
	if err != nil {
		t.Fatal(err)
	}
	hosts, err := e.Adopt()
	if err != nil {
		t.Fatal(err)
	}
	b := &Testbed{hosts: hosts, running: map[string]*netns.Child{}}
	t.Cleanup(func() {
		if err := b.Close(); err != nil {
			t.Error(err)
		}
	})
	found := ""
	p := shell("cat /proc/net/dev")
	if err := b.Run(t.Context(), p, func(line []byte) error { found += string(line) + "\n"; return nil }); err != nil || !strings.Contains(found, "eth0") {
		t.Errorf("found %q, %v, want the host's interface", found, err)
	}
}
