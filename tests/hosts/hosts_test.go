// Package hosts tests docs/hosts.md: machines with one NIC each, whose control traffic is TCP through the same switch
// that their gradients pass.
package hosts

import (
	"bytes"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv4"

	"xagg/lab/netns"
	"xagg/tests/require"
)

// config is the one of docs/hosts.md, with the socket of the switch to fill in.
const config = `
listen: 10.77.2.1:19860
switch: {name: s1, address: %q, device_id: 0, cpu_port: 510}
service: {ip: 10.77.255.254, mac: 02:78:61:00:ff:fe}
hosts:
- {name: w0, ip: 10.77.0.1, mac: 02:78:61:00:00:01, port: 1}
- {name: w1, ip: 10.77.0.2, mac: 02:78:61:00:00:02, port: 2}
- {name: w2, ip: 10.77.0.3, mac: 02:78:61:00:00:03, port: 3}
- {name: control, ip: 10.77.2.1, mac: 02:78:61:00:02:01, port: 100}
servers:
- {name: s0, agent: 10.77.1.1:19861, ip: 10.77.1.1, mac: 02:78:61:00:01:01, port: 65}
policy: {mode: hybrid, steer: [2]}
jobs:
- {name: train, ranks: 3, max_elems: 100000}
`

// machines are the ones of docs/hosts.md.
type machines struct {
	*netns.Lab
	t    *testing.T
	xagg string // the program
}

func newMachines(t *testing.T) *machines {
	t.Helper()
	require.Have(t, require.Netns, require.XDP)
	xagg := filepath.Join(t.TempDir(), "xagg")
	if out, err := exec.Command("go", "build", "-o", xagg, "xagg/cmd/xagg").CombinedOutput(); err != nil {
		t.Fatalf("build xagg: %v\n%s", err, out)
	}
	host := func(name, ip string, port int, bridge bool) netns.Host {
		addr := netip.MustParseAddr(ip)
		b := addr.As4()
		return netns.Host{Name: name, Addr: netip.PrefixFrom(addr, 16), Port: port, Bridge: bridge,
			MAC: net.HardwareAddr{0x02, 0x78, 0x61, 0, b[2], b[3]}}
	}
	lab, err := netns.Create(t.Context(), netns.Spec{RunDir: t.TempDir(), Hosts: []netns.Host{
		host("w0", "10.77.0.1", 1, false), host("w1", "10.77.0.2", 2, false), host("w2", "10.77.0.3", 3, false),
		host("s0", "10.77.1.1", 65, true), host("control", "10.77.2.1", 100, false),
	}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := lab.Close(); err != nil {
			t.Error(err)
		}
	})
	return &machines{lab, t, xagg}
}

// process is xagg in a host.
type process struct {
	*netns.Child
	stdout, stderr output
}

// output is what a process has written so far.
type output struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (o *output) Write(b []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.Write(b)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.String()
}

// start runs xagg in a host; what it says is shown when the test fails.
func (m *machines) start(in string, args ...string) *process {
	m.t.Helper()
	p := &process{}
	cmd := exec.Command(m.xagg, args...)
	cmd.Stdout, cmd.Stderr = &p.stdout, &p.stderr
	child, err := m.Start(in, cmd)
	if err != nil {
		m.t.Fatal(err)
	}
	p.Child = child
	m.t.Cleanup(func() {
		child.Stop()
		if m.t.Failed() {
			m.t.Logf("%s in %s:\n%s%s", args[0], in, tail(p.stdout.String()), p.stderr.String())
		}
	})
	return p
}

// tail returns the last lines of a text that may be long.
func tail(text string) string {
	const most = 2000
	return text[max(0, len(text)-most):]
}

// ask runs a command against the controller from a worker's host, and returns what it says.
func (m *machines) ask(args ...string) (string, error) {
	m.t.Helper()
	var out bytes.Buffer
	cmd := exec.Command(m.xagg, append(args, "--controller", "10.77.2.1:19860")...)
	cmd.Stdout, cmd.Stderr = &out, &out
	child, err := m.Start("w0", cmd)
	if err != nil {
		return "", err
	}
	if err := child.Wait(); err != nil {
		return "", fmt.Errorf("%w: %s", err, out.String())
	}
	return out.String(), nil
}

// startAll starts switch, server, with more options, and controller. It waits until all is well and returns the server.
func (m *machines) startAll(serverArgs ...string) *process {
	m.t.Helper()
	socket := "unix:" + filepath.Join(m.Dir(), "p4rt.sock")
	file := filepath.Join(m.t.TempDir(), "controller.yaml")
	if err := os.WriteFile(file, fmt.Appendf(nil, config, socket), 0o644); err != nil {
		m.t.Fatal(err)
	}
	m.start(netns.Switch, "switch", "--no-p4", "-i", "1@p1", "-i", "2@p2", "-i", "3@p3", "-i", "65@p65", "-i", "100@p100",
		"--", "--grpc-server-addr", socket, "--cpu-port", "510")
	server := m.startServer(serverArgs...)
	m.start("control", "controller", "--config", file)
	// A worker host asks across the switch whether all is well.
	wait(m.t, "switch, server and controller", func() error { return m.well() })
	return server
}

func (m *machines) startServer(args ...string) *process {
	m.t.Helper()
	return m.start("s0", append([]string{"server", "--interface", "eth0", "--name", "s0", "--listen", "10.77.1.1:19861"}, args...)...)
}

// well reports whether all is well.
func (m *machines) well() error {
	_, err := m.ask("status")
	return err
}

// startWorkers starts a worker for every rank of the job.
func (m *machines) startWorkers(args ...string) (workers []*process) {
	m.t.Helper()
	for rank := range 3 {
		workers = append(workers, m.start(fmt.Sprintf("w%d", rank), append([]string{
			"worker", "--controller", "10.77.2.1:19860", "--job", "train", "--rank", fmt.Sprint(rank),
			"--ip", fmt.Sprintf("10.77.0.%d", rank+1)}, args...)...))
	}
	return workers
}

// reduced counts a worker's all-reduces over all three ranks.
func (p *process) reduced() int { return strings.Count(p.stdout.String(), `"mask":"0x7"`) }

func TestOneNICEach(t *testing.T) {
	m := newMachines(t)
	m.startAll("--no-pin")
	status, err := m.ask("status")
	if err != nil || !strings.Contains(status, "train") {
		t.Errorf("status does not show the configured job: %v\n%s", err, status)
	}
	t.Run("ping", func(t *testing.T) {
		err := m.Do("w0", func() error { return ping("10.77.1.1") })
		if err != nil {
			t.Error(err)
		}
	})
	for rank, w := range m.startWorkers("--grads", "synthetic:50000", "--rounds", "3") {
		if err := w.Wait(); err != nil || w.reduced() != 3 {
			t.Errorf("worker %d: %v, %d all-reduces over all three ranks, want 3", rank, err, w.reduced())
		}
	}
}

// wait tries until try succeeds, for half a minute.
func wait(t *testing.T, what string, try func() error) {
	t.Helper()
	deadline := time.Now().Add(30 * time.Second)
	for {
		err := try()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("wait for %s: %v", what, err)
		}
		select {
		case <-time.After(50 * time.Millisecond):
		case <-t.Context().Done():
			t.Fatal(t.Context().Err())
		}
	}
}

// ping sends an echo request and waits for its reply.
func ping(addr string) error {
	conn, err := icmp.ListenPacket("ip4:icmp", "0.0.0.0")
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(10 * time.Second)); err != nil {
		return err
	}
	msg := icmp.Message{Type: ipv4.ICMPTypeEcho, Body: &icmp.Echo{ID: 1, Seq: 1, Data: []byte("across the switch")}}
	b, err := msg.Marshal(nil)
	if err != nil {
		return err
	}
	if _, err := conn.WriteTo(b, &net.IPAddr{IP: net.ParseIP(addr)}); err != nil {
		return err
	}
	buf := make([]byte, 1500)
	n, from, err := conn.ReadFrom(buf)
	if err != nil {
		return fmt.Errorf("ping %s: %w", addr, err)
	}
	reply, err := icmp.ParseMessage(1, buf[:n])
	if err != nil {
		return err
	}
	if reply.Type != ipv4.ICMPTypeEchoReply || from.String() != addr {
		return fmt.Errorf("ping %s: got %v from %v", addr, reply.Type, from)
	}
	return nil
}
