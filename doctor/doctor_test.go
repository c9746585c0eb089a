package doctor

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"xagg/lab/netns"
	"xagg/tests/require"
	"xagg/xdp"
)

func TestWriteText(t *testing.T) {
	r := Report{Checks: []Check{
		ok("6.18.44"),
		warn("apt-get install x\nneeded only for y", "not installed"),
		fail("run as root", "create lab: no\nmore of it"),
	}}
	r.Checks[0].Name, r.Checks[1].Name, r.Checks[2].Name = "kernel", "a longer name", "XDP"
	var got bytes.Buffer
	if err := r.WriteText(&got); err != nil {
		t.Fatal(err)
	}
	want := `ok    kernel         6.18.44
warn  a longer name  not installed
      apt-get install x
      needed only for y
fail  XDP            create lab: no; more of it
      run as root

1 ok, 1 warn, 1 fail: xagg lacks something on this machine; 'xagg demo --lab memory' needs none of it
`
	if diff := cmp.Diff(want, got.String()); diff != "" {
		t.Errorf("text (-want +got):\n%s", diff)
	}
}

func TestWriteJSON(t *testing.T) {
	for _, want := range []bool{true, false} {
		r := Report{Checks: []Check{ok("6.18.44"), warn("apt-get install x", "not installed")}}
		if !want {
			r.Checks = append(r.Checks, fail("run as root", "no"))
		}
		var out bytes.Buffer
		if err := r.WriteJSON(&out); err != nil {
			t.Fatal(err)
		}
		var got struct {
			SchemaVersion int     `json:"schema_version"`
			OK            *bool   `json:"ok"`
			Checks        []Check `json:"checks"`
		}
		dec := json.NewDecoder(&out)
		dec.DisallowUnknownFields()
		if err := dec.Decode(&got); err != nil {
			t.Fatal(err)
		}
		if got.SchemaVersion != SchemaVersion || got.OK == nil || *got.OK != want || !cmp.Equal(got.Checks, r.Checks) {
			t.Errorf("JSON: %+v, want ok %v and %+v", got, want, r.Checks)
		}
	}
}

// What programs say, as they do.
const (
	clangSays = "Debian clang version 16.0.6 (15~deb12u1)\nTarget: x86_64-pc-linux-gnu\nThread model: posix"
	stripSays = "llvm-strip, compatible with GNU strip\nDebian LLVM version 16.0.6\n  Optimized build."
	p4cSays   = "p4c-bm2-ss\nVersion 1.2.5.16 (SHA: 34b86e9bac BUILD: Release)"
	qemuSays  = "QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18+b3)\nCopyright (c) 2003-2022 Fabrice Bellard"
	bmv2Helps = "Usage: SWITCH_NAME [options] <path to JSON config file>\nOptions:\n  -i [ --interface ] arg      <port-num>@<interface-name>\n" +
		"  --device-id arg             Device ID\n  --no-p4                     Enable the switch to start without\n" +
		"Target specific options:\n  --grpc-server-addr arg          Bind gRPC server\n  --grpc-server-ssl               Enable\n" +
		"  --cpu-port arg                  Choose a numerical value"
)

// complete is a machine that has everything.
func complete() Machine {
	return with(nil)
}

// with returns a machine that has everything, but says something else for some commands.
func with(says map[string]string) Machine {
	all := map[string]string{
		"clang-16 --version":           clangSays,
		"llvm-strip-16 --version":      stripSays,
		"p4c-bm2-ss --version":         p4cSays,
		"simple_switch_grpc --version": "1.15.5",
		"simple_switch_grpc --help":    bmv2Helps,
		"mn --version":                 "2.3.0",
		"/usr/bin/python3 -c import mininet.net; print(mininet.net.VERSION)":             "2.3.0",
		"qemu-system-x86_64 --version":                                                   qemuSays,
		"/usr/bin/python3 -c import importlib.metadata as m; print(m.version('torch'))":  "1.13.0a0+gitunknown",
		"/usr/bin/python3 -c import importlib.metadata as m; print(m.version('mpi4py'))": "3.1.4",
		"mpirun.openmpi --version":                                                       "mpirun.openmpi (OpenRTE) 4.1.4\n\nReport bugs to http://www.open-mpi.org/community/help/",
	}
	for command, said := range says {
		all[command] = said
	}
	return Machine{
		Uname: func() (string, error) { return "6.1.0-50-amd64", nil },
		ReadFile: func(path string) ([]byte, error) {
			switch path {
			case "/proc/self/status":
				return []byte("Name:\txagg\nCapInh:\t0000000000000000\nCapEff:\t000001ffffffffff\n"), nil
			case "/proc/meminfo":
				return []byte("MemTotal:       24681860 kB\nMemFree:        21842552 kB\nMemAvailable:   23810368 kB\n"), nil
			}
			return nil, fs.ErrNotExist
		},
		FSType: func(path string) (int64, error) { return unix.BPF_FS_MAGIC, nil },
		Output: func(_ context.Context, name string, args ...string) (string, error) {
			said, ok := all[strings.Join(append([]string{name}, args...), " ")]
			switch {
			case !ok || said == "absent":
				return "", &exec.Error{Name: name, Err: exec.ErrNotFound}
			case strings.HasPrefix(said, "fails: "):
				return said, errors.New("exit status 1")
			}
			return said, nil
		},
		Namespaces: func() error { return nil },
		Bounce:     func(context.Context, xdp.Mode) error { return nil },
		Rate:       func(context.Context) error { return nil },
		Records:    func() ([]netns.Record, error) { return []netns.Record{{ID: "a", Alive: true}}, nil },
		Pinned: func() ([]xdp.PinnedServer, error) {
			return []xdp.PinnedServer{{Dir: "/b/eth0", Interface: "eth0", Agent: true, Attached: true}}, nil
		},
	}
}

func TestCompleteMachine(t *testing.T) {
	r, err := Examine(t.Context(), complete())
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range r.Checks {
		if c.Status != OK || c.Name == "" || c.Detail == "" || c.Cure != "" {
			t.Errorf("%+v, want ok without a cure", c)
		}
	}
	if len(r.Checks) != len(checks) || !r.OK() {
		t.Errorf("report of %d checks is ok: %v, want %d and true", len(r.Checks), r.OK(), len(checks))
	}
}

func TestIncompleteMachines(t *testing.T) {
	change := func(f func(*Machine)) Machine {
		m := complete()
		f(&m)
		return m
	}
	release := func(s string) Machine {
		return change(func(m *Machine) { m.Uname = func() (string, error) { return s, nil } })
	}
	file := func(text string) Machine {
		return change(func(m *Machine) { m.ReadFile = func(string) ([]byte, error) { return []byte(text), nil } })
	}
	bounce := func(bad xdp.Mode, err error) Machine {
		return change(func(m *Machine) {
			m.Bounce = func(_ context.Context, mode xdp.Mode) error {
				if mode == bad {
					return err
				}
				return nil
			}
		})
	}
	pins := func(servers ...xdp.PinnedServer) Machine {
		return change(func(m *Machine) { m.Pinned = func() ([]xdp.PinnedServer, error) { return servers, nil } })
	}
	lost := errors.New("a frame did not come back")
	for _, c := range []struct {
		check        string
		machine      Machine
		status       Status
		detail, cure string
	}{
		{"kernel", release("6.0.12"), Fail, "6.0.12 is older than 6.1", "Debian 12"},
		{"kernel", release("5.15.0-91-generic"), Fail, "older", "6.1"},
		{"kernel", release("odd"), Warn, `parse kernel release "odd"`, "6.1"},
		{"privileges", file("CapEff:\t0000000000003000\n"), Fail, "lacks CAP_SYS_ADMIN, CAP_BPF", "sudo"},
		{"privileges", file("Name:\txagg\n"), Fail, "read capabilities", "sudo"},
		{"namespaces", change(func(m *Machine) { m.Namespaces = func() error { return netns.ErrNotPermitted } }),
			Fail, "need root", "sudo"},
		{"XDP native", bounce(xdp.Native, lost), Fail, "did not come back", "generic mode"},
		{"XDP native", bounce(xdp.Native, fmt.Errorf("create lab: %w", netns.ErrNotPermitted)), Fail, "need root", "sudo"},
		{"XDP generic", bounce(xdp.Generic, lost), Warn, "did not come back", "driver"},
		{"BTF", change(func(m *Machine) { m.FSType = func(string) (int64, error) { return 0, fs.ErrNotExist } }),
			Warn, "does not exist", "CONFIG_DEBUG_INFO_BTF"},
		{"bpffs", change(func(m *Machine) { m.FSType = func(string) (int64, error) { return unix.SYSFS_MAGIC, nil } }),
			Warn, "nothing is mounted at /sys/fs/bpf", "mount -t bpf bpf /sys/fs/bpf"},
		{"tbf", change(func(m *Machine) { m.Rate = func(context.Context) error { return unix.ENOENT } }), Warn, "no such file", "sch_tbf"},
		{"memory", file("MemAvailable:    500000 kB\n"), Warn, "488 MiB free", "--memory"},
		{"memory", file(""), Warn, "read free memory", ""},
		{"leftovers", change(func(m *Machine) {
			m.Records = func() ([]netns.Record, error) {
				return []netns.Record{{ID: "a1", Alive: true}, {ID: "b2", Namespaces: []string{"x", "y"}}}, nil
			}
		}), Warn, "b2 (2 namespaces, 0 processes, 0 folders)", "xagg doctor --fix"},
		{"pinned servers", pins(xdp.PinnedServer{Dir: "/b/eth0", Interface: "eth0", Attached: true}),
			Warn, "without an agent: eth0 in /b/eth0", "xagg server --interface"},
		{"pinned servers", pins(xdp.PinnedServer{Dir: "/b/eth1", Interface: "eth1"}),
			Warn, "interfaces that are gone: eth1 in /b/eth1", "xagg doctor --fix"},
		{"pinned servers", change(func(m *Machine) {
			m.Pinned = func() ([]xdp.PinnedServer, error) { return nil, errors.New("no mounts") }
		}), Warn, "no mounts", ""},
		{"clang", with(map[string]string{"clang-16 --version": "absent"}), Warn, "clang-16: not installed", "apt-get install clang-16"},
		{"clang", with(map[string]string{"llvm-strip-16 --version": "absent"}), Warn, "llvm-strip-16: not installed", "llvm-16"},
		{"p4c", with(map[string]string{"p4c-bm2-ss --version": "absent"}), Warn, "not installed", "p4lang/p4c 1.2.5"},
		{"p4c", with(map[string]string{"p4c-bm2-ss --version": "Version 1.2.50 (SHA: x)"}), Warn, "1.2.50: the committed", "1.2.5"},
		{"p4c", with(map[string]string{"p4c-bm2-ss --version": "fails: no libgc"}), Warn, "no libgc", "1.2.5"},
		{"simple_switch_grpc", with(map[string]string{"simple_switch_grpc --version": "absent"}), Warn, "not installed", "embedded engine"},
		{"simple_switch_grpc", with(map[string]string{"simple_switch_grpc --help": strings.ReplaceAll(bmv2Helps, "--cpu-port", "--cpu-ports")}),
			Warn, "1.15.5 has no option --cpu-port", "P4Runtime"},
		{"Mininet", with(map[string]string{"mn --version": "absent"}), Warn, "mn: not installed", "apt-get install mininet"},
		{"Mininet", with(map[string]string{
			"/usr/bin/python3 -c import mininet.net; print(mininet.net.VERSION)": "fails: ModuleNotFoundError: No module named 'mininet'",
		}), Warn, "No module named 'mininet'", "apt-get install mininet"},
		{"Gloo", with(map[string]string{
			"/usr/bin/python3 -c import importlib.metadata as m; print(m.version('torch'))": "fails: PackageNotFoundError: torch",
		}), Warn, "PackageNotFoundError: torch", "apt-get install python3-torch"},
		{"Open MPI", with(map[string]string{"mpirun.openmpi --version": "absent"}), Warn, "mpirun.openmpi: not installed", "openmpi-bin"},
		{"Open MPI", with(map[string]string{
			"/usr/bin/python3 -c import importlib.metadata as m; print(m.version('mpi4py'))": "fails: PackageNotFoundError: mpi4py",
		}), Warn, "PackageNotFoundError: mpi4py", "python3-mpi4py"},
		{"qemu", with(map[string]string{"qemu-system-x86_64 --version": "absent"}), Warn, "not installed", "qemu-system-x86"},
	} {
		t.Run(c.check+"/"+c.detail, func(t *testing.T) {
			r, err := Examine(t.Context(), c.machine)
			if err != nil {
				t.Fatal(err)
			}
			for _, got := range r.Checks {
				if got.Name != c.check {
					continue
				}
				if got.Status != c.status || !strings.Contains(got.Detail, c.detail) || !strings.Contains(got.Cure, c.cure) {
					t.Errorf("%+v, want %s with %q and a cure with %q", got, c.status, c.detail, c.cure)
				}
			}
			if c.status == Fail && r.OK() {
				t.Error("the report is ok")
			}
		})
	}
}

// The real checks on this machine: with the privileges they need, the lab's link carries frames to XDP programs.
func TestLocal(t *testing.T) {
	require.Have(t, require.Netns, require.XDP)
	for _, c := range checks[:5] { // what aggregation needs
		if got := c.look(t.Context(), Local()); got.Status != OK {
			t.Errorf("%s: %+v", c.name, got)
		}
	}
	records, err := netns.Records(netns.RunDir)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range records {
		if r.Owner.PID == os.Getpid() {
			t.Errorf("left by the checks: %+v", r)
		}
	}
}

// What the checks make is recorded where leftovers looks, and with it the next lab, should they be killed.
func TestChecksAreRecorded(t *testing.T) {
	require.Have(t, require.Netns)
	lab, err := netns.Create(t.Context(), server(0))
	if err != nil {
		t.Fatal(err)
	}
	defer lab.Close()
	records, err := Local().Records()
	if err != nil {
		t.Fatal(err)
	}
	if !slices.ContainsFunc(records, func(r netns.Record) bool { return r.ID == lab.ID() && r.Owner.PID == os.Getpid() }) {
		t.Errorf("lab %s is not among the records %+v", lab.ID(), records)
	}
}

// A frame that nothing sends back is reported, not waited for.
func TestBounceFails(t *testing.T) {
	require.Have(t, require.Netns, require.XDP)
	lab, err := netns.Create(t.Context(), server(0))
	if err != nil {
		t.Fatal(err)
	}
	defer lab.Close()
	ctx, cancel := context.WithCancel(t.Context())
	cancel() // do not wait for the two seconds
	err = lab.Do(netns.Switch, func() error { return sendAndReceive(ctx, netns.PortName(serverPort)) })
	if err == nil || !strings.Contains(err.Error(), "did not come back") {
		t.Errorf("without a reflector: %v", err)
	}
}

// TestExamineInterrupted: what an interrupted check says is no finding; there is no report with cures for what is there.
func TestExamineInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	m := complete()
	ask := m.Output
	m.Output = func(ctx context.Context, name string, args ...string) (string, error) {
		if name == "p4c-bm2-ss" {
			cancel()
			return "", ctx.Err()
		}
		return ask(ctx, name, args...)
	}
	r, err := Examine(ctx, m)
	if !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "look at p4c") || len(r.Checks) != 0 {
		t.Errorf("error %v and %d checks, want one that names p4c and no checks", err, len(r.Checks))
	}
}

// TestOutputPatience: a program that does not answer is told from one that is not there.
func TestOutputPatience(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 0)
	defer cancel()
	if _, err := output(ctx, "sleep", "60"); err == nil || !strings.Contains(err.Error(), "no answer within") {
		t.Errorf("error %v, want one that says that there was no answer", err)
	}
}
