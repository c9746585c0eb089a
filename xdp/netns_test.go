package xdp

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"xagg/api"
	"xagg/tests/require"
	"xagg/wire"
)

// enterNamespace moves the test's goroutine into a new network namespace. Its thread ends with the test, since it stays
// locked, and the namespace and all links in it end with the thread.
func enterNamespace(t *testing.T) {
	t.Helper()
	require.Have(t, require.XDP, require.Netns)
	runtime.LockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		t.Fatalf("make network namespace: %v", err)
	}
}

// vethPair makes the links "server" and "switch" in this namespace, joined and up, each with that many queues.
func vethPair(t *testing.T, mtu, queues int) {
	t.Helper()
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU, attrs.HardwareAddr = "server", mtu, serverAddr.MAC[:]
	attrs.NumRxQueues, attrs.NumTxQueues = queues, queues
	veth := &netlink.Veth{LinkAttrs: attrs, PeerName: "switch", PeerNumRxQueues: uint32(queues), PeerNumTxQueues: uint32(queues)}
	if err := netlink.LinkAdd(veth); err != nil {
		t.Fatalf("make veth pair: %v", err)
	}
	for _, name := range []string{"server", "switch"} {
		if err := netlink.LinkSetUp(linkByName(t, name)); err != nil {
			t.Fatalf("set %s up: %v", name, err)
		}
	}
}

func linkByName(t *testing.T, name string) netlink.Link {
	t.Helper()
	l, err := netlink.LinkByName(name)
	if err != nil {
		t.Fatalf("find link %s: %v", name, err)
	}
	return l
}

// packetSocket opens a socket for whole frames on the link.
func packetSocket(t *testing.T, name string) int {
	t.Helper()
	const all = unix.ETH_P_ALL>>8 | unix.ETH_P_ALL<<8&0xff00 // network order
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatalf("open packet socket: %v", err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	if err := unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: all, Ifindex: linkByName(t, name).Attrs().Index}); err != nil {
		t.Fatalf("bind packet socket to %s: %v", name, err)
	}
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 5}); err != nil {
		t.Fatal(err)
	}
	return fd
}

// answerTo sends the frame and returns the first frame of the protocol that comes back.
func answerTo(t *testing.T, fd int, frame []byte) []byte {
	t.Helper()
	b, err := sendAndReceive(fd, frame)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func sendAndReceive(fd int, frame []byte) ([]byte, error) {
	if _, err := unix.Write(fd, frame); err != nil {
		return nil, fmt.Errorf("send frame: %w", err)
	}
	b := make([]byte, 2048)
	for {
		n, from, err := unix.Recvfrom(fd, b, 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("no answer: %w", err)
		}
		if from.(*unix.SockaddrLinklayer).Pkttype == unix.PACKET_OUTGOING {
			continue
		}
		var p wire.Packet
		if src, _, err := wire.ParseFrame(b[:n], &p); err == nil && src.Port == wire.Port {
			return b[:n], nil
		} else if !errors.Is(err, wire.ErrNotXAgg) && err != nil {
			return nil, fmt.Errorf("bad answer: %w\n%s", err, hex.Dump(b[:n]))
		}
	}
}

// onePlan is a job of two ranks.
var onePlan = &api.ServerPlan{Job: 5, Epoch: 1, Ranks: 0b11, Chunks: 2, Rounds: 2, NextEpoch: 9,
	ServiceIp: "10.77.255.254", ServiceMac: "02:78:61:00:ff:fe"}

func grad(rank uint8, lanes int) *wire.Packet {
	p := &wire.Packet{Header: wire.Header{Type: wire.TypeGrad, Job: 5, Epoch: 1, Rank: rank, Contributors: 1 << rank,
		Elems: uint16(lanes), Blocks: wire.BlocksFor(lanes), Flags: wire.FlagLast}}
	for i := range p.Lanes[:lanes] {
		p.Lanes[i] = int32(i*1000) * (1 - 2*int32(rank))
	}
	p.Lanes[0] = int32(rank) + 1
	p.Seal()
	return p
}

// exchange sends the contributions of two ranks and checks the ACK and the RESULT.
func exchange(t *testing.T, fd int, lanes int) {
	t.Helper()
	var p wire.Packet
	b := answerTo(t, fd, wire.AppendFrame(nil, workerAddr(0), serverAddr, grad(0, lanes), true))
	src, dst, err := wire.ParseFrame(b, &p)
	if err != nil || src != serverAddr || dst != workerAddr(0) || p.Type != wire.TypeAck || p.Contributors != 1 || p.Blocks != 0 {
		t.Fatalf("first answer: %v from %v to %v: %+v", err, src, dst, p.Header)
	}
	b = answerTo(t, fd, wire.AppendFrame(nil, workerAddr(1), serverAddr, grad(1, lanes), true))
	src, dst, err = wire.ParseFrame(b, &p)
	if err != nil || src != serverAddr || dst != serviceAddr || p.Type != wire.TypeResult || p.Contributors != 3 || p.NextEpoch != 9 {
		t.Fatalf("second answer: %v from %v to %v: %+v", err, src, dst, p.Header)
	}
	if !p.TagOK() || p.Lanes[0] != 3 || lanes > 1 && p.Lanes[1] != 0 {
		t.Fatalf("result: tag %v, lanes %v", p.TagOK(), p.Lanes[:4])
	}
}

func testLog(t *testing.T) (*slog.Logger, *bytes.Buffer) {
	var b bytes.Buffer
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(b.String())
		}
	})
	return slog.New(slog.NewTextHandler(&b, nil)), &b
}

// TestVeth sends frames out and back over a veth pair, in both modes. Answers are shorter than the question (ACK), and
// as long (RESULT).
func TestVeth(t *testing.T) {
	for _, c := range []struct{ ask, active Mode }{{Native, Native}, {Generic, Generic}, {Auto, Native}} {
		t.Run(string(c.ask), func(t *testing.T) {
			enterNamespace(t)
			vethPair(t, 1500, 1)
			server := load(t, 100)
			log, out := testLog(t)
			if err := server.Attach("server", c.ask, log); err != nil {
				t.Fatal(err)
			}
			if server.Mode() != string(c.active) || !strings.Contains(out.String(), "mode="+string(c.active)) {
				t.Fatalf("mode %q, log %q", server.Mode(), out)
			}
			agent := NewAgent("s0", "server", server)
			if _, err := agent.Install(t.Context(), onePlan); err != nil {
				t.Fatal(err)
			}
			exchange(t, packetSocket(t, "switch"), 256)
			stats, err := agent.Stats(t.Context(), &api.StatsRequest{Job: 5})
			if err != nil || len(stats.Ranks) != 2 || stats.Reasons["summed"] != 2 {
				t.Fatalf("stats: %v %v", stats, err)
			}
			if err := server.Close(); err != nil {
				t.Fatal(err)
			}
			for _, name := range []string{"server", "switch"} {
				if xdp := linkByName(t, name).Attrs().Xdp; xdp != nil && xdp.Attached {
					t.Errorf("a program is still attached to %s", name)
				}
			}
		})
	}
}

// TestPitfall29 sends from a socket of the stack. A veth leaves UDP checksums to a card that does not exist: what arrives
// does not fit its checksum, and is refused in both modes. With that offload off, as labs and hosts have it, it is summed.
// (TestVeth has what the row says of the two modes.)
func TestPitfall29(t *testing.T) {
	for _, mode := range []Mode{Native, Generic} {
		t.Run(string(mode), func(t *testing.T) {
			enterNamespace(t)
			vethPair(t, 1500, 1)
			server := load(t, 4)
			log, _ := testLog(t)
			if err := server.Attach("server", mode, log); err != nil {
				t.Fatal(err)
			}
			if _, err := NewAgent("s0", "server", server).Install(t.Context(), onePlan); err != nil {
				t.Fatal(err)
			}
			worker, link := workerAddr(0), linkByName(t, "switch")
			addr := &net.IPNet{IP: worker.IP[:], Mask: net.CIDRMask(16, 32)}
			if err := netlink.AddrAdd(link, &netlink.Addr{IPNet: addr}); err != nil {
				t.Fatal(err)
			}
			if err := netlink.NeighAdd(&netlink.Neigh{LinkIndex: link.Attrs().Index, State: netlink.NUD_PERMANENT,
				IP: serverAddr.IP[:], HardwareAddr: serverAddr.MAC[:]}); err != nil {
				t.Fatal(err)
			}
			conn, err := net.DialUDP("udp4", &net.UDPAddr{IP: worker.IP[:], Port: int(worker.Port)},
				&net.UDPAddr{IP: serverAddr.IP[:], Port: wire.Port})
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			question := wire.AppendFrame(nil, worker, serverAddr, grad(0, 256), true)[wire.FrameOverhead:]

			if _, err := conn.Write(question); err != nil {
				t.Fatal(err)
			}
			// When another one behind it is answered, it has been there.
			answerTo(t, packetSocket(t, "switch"), wire.AppendFrame(nil, workerAddr(1), serverAddr, grad(1, 256), true))
			counts, err := server.Reasons()
			if err != nil || counts[wire.ReasonChecksum] != 1 || counts[wire.ReasonNone] != 1 {
				t.Fatalf("with the offload: %v %v", reasonMap(counts), err)
			}

			ethtool(t, "switch", words(unix.ETHTOOL_STXCSUM, 0))
			for range 2 { // the RESULT of the first goes to the service, of the second to the sender
				if _, err := conn.Write(question); err != nil {
					t.Fatal(err)
				}
			}
			if err := conn.SetReadDeadline(time.Now().Add(5 * time.Second)); err != nil {
				t.Fatal(err)
			}
			b := make([]byte, 2048)
			n, err := conn.Read(b)
			if err != nil {
				t.Fatalf("without the offload: no answer: %v", err)
			}
			var p wire.Packet
			if err := p.Decode(b[:n]); err != nil || p.Type != wire.TypeResult || p.Contributors != 0b11 || !p.TagOK() {
				t.Fatalf("without the offload: %+v, %v", p.Header, err)
			}
		})
	}
}

// TestOtherTrafficPasses checks that the stack still gets what is not the server's.
func TestOtherTrafficPasses(t *testing.T) {
	enterNamespace(t)
	vethPair(t, 1500, 1)
	server := load(t, 1)
	log, _ := testLog(t)
	if err := server.Attach("server", Native, log); err != nil {
		t.Fatal(err)
	}
	fd := packetSocket(t, "server")
	other := wire.AppendUDP(nil, workerAddr(0), wire.Addr{MAC: serverAddr.MAC, IP: serverAddr.IP, Port: 53}, []byte("question"), true)
	if _, err := unix.Write(packetSocket(t, "switch"), other); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 2048)
	for {
		n, _, err := unix.Recvfrom(fd, b, 0)
		if err != nil {
			t.Fatalf("the frame did not pass: %v", err)
		}
		if bytes.Equal(b[:n], other) {
			return
		}
	}
}

func TestAttachErrors(t *testing.T) {
	enterNamespace(t)
	vethPair(t, 9000, 1)
	log, out := testLog(t)
	first, second := load(t, 1), load(t, 1)

	var missing *NoInterfaceError
	if err := first.Attach("nosuch0", Auto, log); !errors.As(err, &missing) || !strings.Contains(err.Error(), `"nosuch0"`) {
		t.Errorf("missing interface: %v", err)
	}
	if err := first.Attach("server", Native, log); err == nil || !strings.Contains(err.Error(), "mtu 1500") {
		t.Errorf("big MTU: %v", err)
	}
	if err := first.Attach("server", Auto, log); err != nil || first.Mode() != "generic" {
		t.Errorf("big MTU in auto mode: %v, mode %q", err, first.Mode())
	}
	if !strings.Contains(out.String(), "level=WARN") || !strings.Contains(out.String(), "MTU") {
		t.Errorf("no warning of the fall-back: %s", out)
	}
	if err := second.Attach("server", Auto, log); err == nil || !strings.Contains(err.Error(), "another XDP program") {
		t.Errorf("second program: %v", err)
	}
	if second.Mode() != "" {
		t.Errorf("a server that is not attached has mode %q", second.Mode())
	}
	// The loopback device has no native XDP.
	if err := netlink.LinkSetMTU(linkByName(t, "lo"), 1500); err != nil {
		t.Fatal(err)
	}
	if err := second.Attach("lo", Native, log); err == nil || !strings.Contains(err.Error(), "--xdp-mode generic") {
		t.Errorf("no native driver: %v", err)
	}
	if err := second.Attach("lo", Auto, log); err != nil || second.Mode() != "generic" {
		t.Errorf("no native driver in auto mode: %v, mode %q", err, second.Mode())
	}
}

// TestServe runs the whole server as the command does.
func TestServe(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	enterNamespace(t)
	vethPair(t, 1500, 1)
	namespace, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	defer namespace.Close()
	socket := filepath.Join(t.TempDir(), "agent.sock")
	// What a process that crashed leaves behind.
	stale, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	stale.SetUnlinkOnClose(false)
	stale.Close()

	log, out := testLog(t)
	cfg := Config{Name: "s0", Interface: "server", Memory: 1 << 20, Mode: Auto, Listen: "unix:" + socket}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	serve := func(cfg Config) error {
		runtime.LockOSThread() // the goroutine ends in the namespace, and its thread with it
		if err := unix.Setns(int(namespace.Fd()), unix.CLONE_NEWNET); err != nil {
			return err
		}
		return Serve(ctx, cfg, log)
	}
	done := make(chan error, 1)
	go func() { done <- serve(cfg) }()

	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	client := api.NewAgentClient(conn)
	patient, giveUp := context.WithTimeout(ctx, 10*time.Second)
	defer giveUp()
	info, err := client.Info(patient, &api.InfoRequest{}, grpc.WaitForReady(true))
	if err != nil || info.Name != "s0" || info.Interface != "server" || info.Mode != "native" || info.Slots != 963 || info.SlotsFree != 963 {
		t.Fatalf("info: %v %v", info, err)
	}
	if _, err := client.Install(ctx, onePlan); err != nil {
		t.Fatal(err)
	}
	exchange(t, packetSocket(t, "switch"), 100)

	second := make(chan error)
	go func() { second <- serve(cfg) }()
	if err := <-second; err == nil || !strings.Contains(err.Error(), "address already in use; a process is serving there") {
		t.Errorf("second server at the same socket: %v", err)
	}
	cfg.Interface = "nosuch0"
	go func() { second <- serve(cfg) }()
	if err := <-second; err == nil || !strings.Contains(err.Error(), `no interface "nosuch0"`) {
		t.Errorf("second server on another interface: %v", err)
	}

	cancel()
	if err := <-done; err != nil {
		t.Errorf("serve: %v", err)
	}
	if _, err := os.Stat(socket); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket is still there: %v", err)
	}
	if xdp := linkByName(t, "server").Attrs().Xdp; xdp != nil && xdp.Attached {
		t.Error("the program is still attached")
	}
	if n := strings.Count(out.String(), "server ready"); n != 1 {
		t.Errorf("%d lines say that the server is ready:\n%s", n, out)
	}
}
