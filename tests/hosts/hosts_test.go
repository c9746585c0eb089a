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

func TestOneNICEach(t *testing.T) {
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
	// start runs xagg in a host; what it says is shown when the test fails.
	start := func(in string, args ...string) *netns.Child {
		t.Helper()
		var out bytes.Buffer
		cmd := exec.Command(xagg, args...)
		cmd.Stdout, cmd.Stderr = &out, &out
		child, err := lab.Start(in, cmd)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			child.Stop()
			if t.Failed() {
				t.Logf("%s in %s:\n%s", args[0], in, out.String())
			}
		})
		return child
	}

	socket := "unix:" + filepath.Join(lab.Dir(), "p4rt.sock")
	file := filepath.Join(t.TempDir(), "controller.yaml")
	if err := os.WriteFile(file, fmt.Appendf(nil, config, socket), 0o644); err != nil {
		t.Fatal(err)
	}
	start(netns.Switch, "switch", "--no-p4", "-i", "1@p1", "-i", "2@p2", "-i", "3@p3", "-i", "65@p65", "-i", "100@p100",
		"--", "--grpc-server-addr", socket, "--cpu-port", "510")
	start("s0", "server", "--interface", "eth0", "--name", "s0", "--listen", "10.77.1.1:19861")
	start("control", "controller", "--config", file)

	// A worker host asks across the switch whether all is well.
	var status []byte
	wait(t, "switch, server and controller", func() error {
		var out bytes.Buffer
		cmd := exec.Command(xagg, "status", "--controller", "10.77.2.1:19860")
		cmd.Stdout, cmd.Stderr = &out, &out
		child, err := lab.Start("w0", cmd)
		if err != nil {
			return err
		}
		err = child.Wait()
		if status = out.Bytes(); err != nil {
			return fmt.Errorf("%w: %s", err, status)
		}
		return nil
	})
	if !bytes.Contains(status, []byte("train")) {
		t.Errorf("status does not show the configured job:\n%s", status)
	}

	t.Run("ping", func(t *testing.T) {
		err := lab.Do("w0", func() error { return ping("10.77.1.1") })
		if err != nil {
			t.Error(err)
		}
	})

	var workers []*netns.Child
	outs := make([]bytes.Buffer, 3)
	for rank := range 3 {
		cmd := exec.Command(xagg, "worker", "--controller", "10.77.2.1:19860", "--job", "train", "--rank", fmt.Sprint(rank),
			"--ip", fmt.Sprintf("10.77.0.%d", rank+1), "--grads", "synthetic:50000", "--rounds", "3")
		cmd.Stdout, cmd.Stderr = &outs[rank], &outs[rank]
		child, err := lab.Start(fmt.Sprintf("w%d", rank), cmd)
		if err != nil {
			t.Fatal(err)
		}
		workers = append(workers, child)
	}
	for rank, w := range workers {
		if err := w.Wait(); err != nil {
			t.Errorf("worker %d: %v\n%s", rank, err, outs[rank].String())
		} else if n := strings.Count(outs[rank].String(), `"mask":"0x7"`); n != 3 {
			t.Errorf("worker %d: %d all-reduces over all three ranks, want 3:\n%s", rank, n, outs[rank].String())
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
