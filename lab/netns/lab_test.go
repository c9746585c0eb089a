package netns

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"xagg/bmv2/fault"
	"xagg/tests/require"
)

// newLab makes a lab whose switch is a plain bridge, so that frames cross it.
func newLab(t *testing.T, spec Spec) *Lab {
	t.Helper()
	require.Have(t, require.Netns, require.XDP)
	lab, err := Create(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := lab.Close(); err != nil {
			t.Error(err)
		}
		gone(t, spec.RunDir, lab.ID())
	})
	var ports []string
	for _, h := range spec.Hosts {
		ports = append(ports, PortName(h.Port))
	}
	if err := lab.spaces[Switch].join(ports...); err != nil {
		t.Fatal(err)
	}
	if err := (end{lab.spaces[Switch], "br0"}).waitUp(t.Context()); err != nil {
		t.Fatal(err)
	}
	return lab
}

// gone fails the test if anything of the lab is left.
func gone(t *testing.T, dir, id string) {
	t.Helper()
	left, _ := filepath.Glob(filepath.Join(mountDir, "xagg-"+id+"-*"))
	more, _ := filepath.Glob(filepath.Join(dir, id+"*"))
	if left = append(left, more...); len(left) != 0 {
		t.Errorf("left of lab %s: %v", id, left)
	}
}

// socket opens a UDP socket in a host.
func socket(t *testing.T, lab *Lab, host, addr string) *net.UDPConn {
	t.Helper()
	var conn *net.UDPConn
	err := lab.Do(host, func() error {
		c, err := net.ListenPacket("udp4", addr)
		if err == nil {
			conn = c.(*net.UDPConn)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	conn.SetDeadline(time.Now().Add(10 * time.Second))
	return conn
}

func TestFramesCross(t *testing.T) {
	t.Parallel()
	lab := newLab(t, star(t.TempDir(), 2, 1, 0))
	w0 := socket(t, lab, "w0", "10.77.0.1:19860")
	for _, host := range []struct{ name, addr string }{{"w1", "10.77.0.2:7"}, {"s0", "10.77.1.1:7"}} {
		peer := socket(t, lab, host.name, host.addr)
		want := bytes.Repeat([]byte(host.name), 700)
		if _, err := w0.WriteTo(want, peer.LocalAddr()); err != nil {
			t.Fatal(err)
		}
		got := make([]byte, 2000)
		n, from, err := peer.ReadFrom(got)
		if err != nil || !bytes.Equal(got[:n], want) || from.String() != "10.77.0.1:19860" {
			t.Errorf("%s received %d bytes from %v: %v", host.name, n, from, err)
		}
	}
}

func TestLinksAreQuietAndPlain(t *testing.T) {
	t.Parallel()
	lab := newLab(t, star(t.TempDir(), 1, 1, 0))
	for _, c := range []struct {
		space  string
		ifaces []string
	}{
		{Switch, []string{"p1", "p65"}}, {"w0", []string{"eth0"}}, {"s0", []string{"eth0"}}, {"s0-br", []string{"up", "down"}},
	} {
		for _, iface := range c.ifaces {
			err := lab.Do(c.space, func() error {
				for _, get := range []struct {
					name string
					cmd  uint32
				}{
					{"rx", unix.ETHTOOL_GRXCSUM}, {"tx", unix.ETHTOOL_GTXCSUM}, {"sg", unix.ETHTOOL_GSG},
					{"tso", unix.ETHTOOL_GTSO}, {"gso", unix.ETHTOOL_GGSO}, {"gro", unix.ETHTOOL_GGRO},
				} {
					on, err := ethtool(iface, get.cmd, 0)
					if err != nil || on != 0 {
						t.Errorf("%s:%s: %s is %d, %v, want off", c.space, iface, get.name, on, err)
					}
				}
				return nil
			})
			if err != nil {
				t.Error(err)
			}
			link, err := lab.spaces[c.space].links.LinkByName(iface)
			if err != nil {
				t.Fatal(err)
			}
			if link.Attrs().MTU != mtu {
				t.Errorf("%s:%s: MTU %d, want %d", c.space, iface, link.Attrs().MTU, mtu)
			}
			addrs, err := lab.spaces[c.space].links.AddrList(link, netlink.FAMILY_V6)
			if err != nil || len(addrs) != 0 {
				t.Errorf("%s:%s: IPv6 addresses %v, %v, want none", c.space, iface, addrs, err)
			}
			// Nobody has sent anything yet.
			if s := link.Attrs().Statistics; s.TxPackets != 0 || s.RxPackets != 0 {
				t.Errorf("%s:%s: %d frames sent and %d received by themselves", c.space, iface, s.TxPackets, s.RxPackets)
			}
		}
	}
	err := lab.Do("s0-br", func() error {
		link, err := netlink.LinkByName("down")
		if err != nil {
			return err
		}
		if xdp := link.Attrs().Xdp; xdp == nil || !xdp.Attached || xdp.AttachMode != nl_XDP_ATTACHED_DRV {
			t.Errorf("XDP of the bridge's port to the server: %+v, want a native program", xdp)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

// A link has the queues that its host asks for at both ends, and where it asks for them the offloads of any veth. Each
// offload can be set by itself.
func TestQueuesAndOffloads(t *testing.T) {
	t.Parallel()
	spec := star(t.TempDir(), 2, 0, 0)
	spec.Hosts[1].Queues, spec.Hosts[1].Offloads = 3, true
	lab := newLab(t, spec)
	for _, c := range []struct {
		space, iface string
		queues       int
		tso          uint32
	}{{"w0", HostInterface, 1, 0}, {Switch, "p1", 1, 0}, {"w1", HostInterface, 3, 1}, {Switch, "p2", 3, 1}} {
		err := lab.Do(c.space, func() error {
			link, err := netlink.LinkByName(c.iface)
			if err != nil {
				return err
			}
			if a := link.Attrs(); a.NumTxQueues != c.queues || a.NumRxQueues != c.queues {
				t.Errorf("%s:%s: %d queues to send and %d to receive, want %d", c.space, c.iface, a.NumTxQueues, a.NumRxQueues, c.queues)
			}
			if on, err := ethtool(c.iface, unix.ETHTOOL_GTSO, 0); err != nil || on != c.tso {
				t.Errorf("%s:%s: tso is %d, %v, want %d", c.space, c.iface, on, err, c.tso)
			}
			for _, want := range []uint32{1 - c.tso, c.tso} {
				if err := SetOffload(c.iface, "tso", want == 1); err != nil {
					return err
				}
				// TSO needs the offloads that it is made of.
				if on, err := ethtool(c.iface, unix.ETHTOOL_GTSO, 0); err != nil || c.tso == 1 && on != want {
					t.Errorf("%s:%s: tso is %d, %v, want %d", c.space, c.iface, on, err, want)
				}
			}
			if err := SetOffload(c.iface, "lro", true); err == nil || !strings.Contains(err.Error(), "no such feature") {
				t.Errorf("unknown feature: %v", err)
			}
			return nil
		})
		if err != nil {
			t.Error(err)
		}
	}
}

// nl_XDP_ATTACHED_DRV is XDP_ATTACHED_DRV of linux/if_link.h.
const nl_XDP_ATTACHED_DRV = 1

// The rate holds in both directions, for a plain link and for what a server answers by XDP_TX.
func TestRate(t *testing.T) {
	t.Parallel()
	const (
		rate   = 16_000_000 // bits per second
		frames = 150
		size   = 1400
	)
	bits := float64(8 * frames * (size + 8 + 20 + 14))
	atLeast := time.Duration(0.85 * bits / rate * float64(time.Second)) // the bucket is full at first

	spec := star(t.TempDir(), 2, 1, 0)
	for i, h := range spec.Hosts {
		if h.Name != "w0" {
			spec.Hosts[i].Rate = rate
		}
	}
	lab := newLab(t, spec)
	reflect(t, lab, "s0")

	w0, w1 := socket(t, lab, "w0", "10.77.0.1:0"), socket(t, lab, "w1", "10.77.0.2:0")
	server := &net.UDPAddr{IP: net.IPv4(10, 77, 1, 1), Port: 7}
	for _, c := range []struct {
		name         string
		from, to     *net.UDPConn
		dst          net.Addr
		receivedFrom string
	}{
		{"to a worker", w0, w1, w1.LocalAddr(), "10.77.0.1"},
		{"from a worker", w1, w0, w0.LocalAddr(), "10.77.0.2"},
		{"to a server and back by XDP_TX", w0, w0, server, "10.77.1.1"},
	} {
		// One frame ahead settles ARP.
		buf := make([]byte, size)
		received := 0
		receive := func() {
			defer func() { received++ }()
			if _, from, err := c.to.ReadFrom(buf); err != nil {
				t.Fatalf("%s: frame %d: %v", c.name, received, err)
			} else if host := from.(*net.UDPAddr).IP.String(); host != c.receivedFrom {
				t.Fatalf("%s: a frame from %s, want %s", c.name, host, c.receivedFrom)
			}
		}
		if _, err := c.from.WriteTo(buf, c.dst); err != nil {
			t.Fatal(err)
		}
		receive()
		start := time.Now()
		sent := make(chan error, 1)
		go func() { // the receive buffer does not hold all
			for range frames {
				if _, err := c.from.WriteTo(make([]byte, size), c.dst); err != nil {
					sent <- err
					return
				}
			}
			sent <- nil
		}()
		for range frames {
			receive()
		}
		if err := <-sent; err != nil {
			t.Fatal(err)
		}
		if took := time.Since(start); took < atLeast {
			t.Errorf("%s: %d frames took %v, want at least %v", c.name, frames, took, atLeast)
		}
	}
}

// A relay carries what a bridge would, in both directions and from XDP_TX, and does to frames what it is told.
func TestFaults(t *testing.T) {
	t.Parallel()
	const delay = 20 * time.Millisecond
	spec := star(t.TempDir(), 3, 1, 0)
	spec.Faults = []fault.Spec{
		{Drop: 1, Port: 2, Direction: fault.Out},
		{Duplicate: 1, Port: 1, Direction: fault.In},
		{Delay: delay, Delayed: 1, Port: 65},
	}
	lab := newLab(t, spec)
	reflect(t, lab, "s0")
	w0, w1, w2 := socket(t, lab, "w0", "10.77.0.1:19860"), socket(t, lab, "w1", "10.77.0.2:19860"), socket(t, lab, "w2", "10.77.0.3:19860")
	buf := make([]byte, 2000)
	send := func(from, to *net.UDPConn, text string) {
		t.Helper()
		if _, err := from.WriteTo([]byte(text), to.LocalAddr()); err != nil {
			t.Fatal(err)
		}
	}
	receive := func(to *net.UDPConn, want string) {
		t.Helper()
		n, _, err := to.ReadFrom(buf)
		if err != nil || string(buf[:n]) != want {
			t.Fatalf("received %q, %v, want %q", buf[:n], err, want)
		}
	}
	send(w0, w2, "twice")
	receive(w2, "twice")
	receive(w2, "twice")
	send(w2, w1, "lost")
	send(w1, w0, "once")
	receive(w0, "once")
	send(w1, w0, "and once")
	receive(w0, "and once")

	server := &net.UDPAddr{IP: net.IPv4(10, 77, 1, 1), Port: 7}
	start := time.Now()
	if _, err := w0.WriteTo([]byte("mirrored"), server); err != nil {
		t.Fatal(err)
	}
	receive(w0, "mirrored")
	receive(w0, "mirrored")
	if took := time.Since(start); took < 2*delay {
		t.Errorf("the way to the server and back took %v, want at least %v", took, 2*delay)
	}
	want := map[string]fault.Counts{
		"1 in":  {Frames: 2, Duplicated: 2},
		"2 out": {Frames: 1, Dropped: 1},
		"65 in": {Frames: 2, Delayed: 2}, "65 out": {Frames: 2, Delayed: 2},
	}
	for _, c := range lab.Faults() {
		if name := fmt.Sprint(c.Port, " ", c.Direction); c.Counts != want[name] {
			t.Errorf("port %s: %+v, want %+v", name, c.Counts, want[name])
		}
	}
	if n := len(lab.Faults()); n != len(want) {
		t.Errorf("%d faulty directions, want %d", n, len(want))
	}
}

// reflect attaches a program to the host's interface that sends every UDP datagram back to where it came from, and
// passes the rest.
func reflect(t *testing.T, lab *Lab, host string) {
	t.Helper()
	const pass, tx = 2, 3
	var ins asm.Instructions
	ins = append(ins,
		asm.LoadMem(asm.R2, asm.R1, 0, asm.Word), // data
		asm.LoadMem(asm.R3, asm.R1, 4, asm.Word), // data_end
		asm.Mov.Reg(asm.R4, asm.R2),
		asm.Add.Imm(asm.R4, 42),
		asm.JGT.Reg(asm.R4, asm.R3, "pass"),
		asm.LoadMem(asm.R4, asm.R2, 12, asm.Half),
		asm.JNE.Imm(asm.R4, 0x0008, "pass"), // 0x0800, IPv4
		asm.LoadMem(asm.R4, asm.R2, 23, asm.Byte),
		asm.JNE.Imm(asm.R4, 17, "pass"),
	)
	swap := func(a, b int16, size asm.Size) {
		ins = append(ins,
			asm.LoadMem(asm.R4, asm.R2, a, size), asm.LoadMem(asm.R5, asm.R2, b, size),
			asm.StoreMem(asm.R2, a, asm.R5, size), asm.StoreMem(asm.R2, b, asm.R4, size))
	}
	for i := range int16(3) {
		swap(2*i, 6+2*i, asm.Half) // MAC addresses
	}
	swap(26, 30, asm.Word) // IPv4 addresses
	swap(34, 36, asm.Half) // UDP ports
	ins = append(ins, asm.Mov.Imm(asm.R0, tx), asm.Return(),
		asm.Mov.Imm(asm.R0, pass).WithSymbol("pass"), asm.Return())
	prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.XDP, Instructions: ins, License: "Apache-2.0"})
	if err != nil {
		t.Fatal(err)
	}
	defer prog.Close()
	err = lab.Do(host, func() error {
		link, err := netlink.LinkByName(HostInterface)
		if err != nil {
			return err
		}
		return netlink.LinkSetXdpFdWithFlags(link, prog.FD(), unix.XDP_FLAGS_DRV_MODE)
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestStart(t *testing.T) {
	t.Parallel()
	lab := newLab(t, star(t.TempDir(), 1, 0, 0))
	home, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	cmd := exec.Command("readlink", "/proc/self/ns/net", "/proc/self/ns/mnt")
	cmd.Stdout = &out
	child, err := lab.Start("w0", cmd)
	if err != nil {
		t.Fatal(err)
	}
	if err := child.Wait(); err != nil {
		t.Fatal(err)
	}
	mnt, err := os.Readlink("/proc/self/ns/mnt")
	if err != nil {
		t.Fatal(err)
	}
	ns := strings.Fields(out.String())
	if len(ns) != 2 || ns[0] == home || ns[1] != mnt {
		t.Errorf("namespaces of the child: %v, want another network than %s and the same mounts, %s", ns, home, mnt)
	}
	if _, err := lab.Start("w1", exec.Command("true")); err == nil || !strings.Contains(err.Error(), `"w1"`) {
		t.Errorf("start in an unknown host: %v", err)
	}
	if _, err := lab.Start("w0", exec.Command("/no/such/program")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("start an unknown program: %v", err)
	}
	// A program that ignores SIGTERM, and what it has started, end all the same.
	stubborn := exec.Command("sh", "-c", "trap '' TERM; sleep 600 & echo $!; wait; wait; sleep 600")
	stdout, err := stubborn.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	child, err = lab.Start("w0", stubborn)
	if err != nil {
		t.Fatal(err)
	}
	var grandchild int
	if _, err := fmt.Fscan(stdout, &grandchild); err != nil {
		t.Fatal(err)
	}
	child.Stop()
	if child.Wait() == nil {
		t.Error("the stubborn child ended by itself")
	}
	ended(t, grandchild)
	if err := lab.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := lab.Start("w0", exec.Command("true")); !errors.Is(err, os.ErrClosed) {
		t.Errorf("start in a closed lab: %v, want %v", err, os.ErrClosed)
	}
	if _, err := os.Readlink("/proc/thread-self/ns/net"); err != nil {
		t.Error(err)
	}
}

// ended waits until no process, or only one that nobody has reaped, has the number.
func ended(t *testing.T, pid int) {
	t.Helper()
	fd, err := unix.PidfdOpen(pid, 0)
	if err == unix.ESRCH {
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 10_000); n != 1 {
		t.Errorf("process %d is still there: %v", pid, err)
	}
}

// An owner that is killed takes its processes along, and the next lab in the folder removes the rest. One that is
// interrupted leaves nothing.
func TestOwnerEnds(t *testing.T) {
	t.Parallel()
	require.Have(t, require.Netns)
	for _, c := range []struct {
		name   string
		signal os.Signal
		left   int // namespaces
	}{
		{"killed", unix.SIGKILL, 4},
		{"interrupted", unix.SIGINT, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			owner := exec.Command("/proc/self/exe")
			owner.Env = append(os.Environ(), ownerDir+"="+dir)
			out, err := owner.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := owner.Start(); err != nil {
				t.Fatal(err)
			}
			defer owner.Process.Kill()
			line, err := bufio.NewReader(out).ReadString('\n')
			var id string
			var child int
			if _, scan := fmt.Sscanf(line, "ready %s %d\n", &id, &child); scan != nil {
				t.Fatalf("owner said %q (%v), want that it is ready", line, err)
			}
			if swept, err := Sweep(dir); err != nil || len(swept) != 0 {
				t.Errorf("sweep while the owner lives: %v, %v", swept, err)
			}
			owner.Process.Signal(c.signal)
			owner.Wait()
			ended(t, child)
			left, _ := filepath.Glob(filepath.Join(mountDir, "xagg-"+id+"-*"))
			if len(left) != c.left {
				t.Errorf("left by the owner: %v, want %d namespaces", left, c.left)
			}
			lab, err := Create(t.Context(), star(dir, 1, 0, 0))
			if err != nil {
				t.Fatal(err)
			}
			gone(t, dir, id)
			if err := lab.Close(); err != nil {
				t.Error(err)
			}
			gone(t, dir, lab.ID())
		})
	}
}

// On a machine where `ip netns add` has not run yet, the first that runs while a lab is there does not get in the way of
// its removal.
func TestBesideIP(t *testing.T) {
	t.Parallel()
	require.Have(t, require.Netns)
	for _, program := range []string{"ip", "unshare"} {
		if _, err := exec.LookPath(program); err != nil {
			t.Skip(err)
		}
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	// A machine whose /run is new, as far as the owner can see.
	owner := exec.Command("unshare", "--mount", "--propagation", "private", "sh", "-c",
		`umount --lazy /run/netns 2>/dev/null; mount -t tmpfs none /run && exec "$0"`, self)
	owner.Env = append(os.Environ(), ownerDir+"="+dir, fmt.Sprintf("%s=xt%d", useIP, os.Getpid()))
	if out, err := owner.CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

func TestCreateFails(t *testing.T) {
	t.Parallel()
	require.Have(t, require.Netns)
	t.Run("cancelled", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		spec := star(t.TempDir(), 1, 1, 0)
		spec.ID = fmt.Sprintf("xt%dc", os.Getpid())
		if _, err := Create(ctx, spec); !errors.Is(err, context.Canceled) {
			t.Errorf("create: %v, want %v", err, context.Canceled)
		}
		gone(t, spec.RunDir, spec.ID)
	})
	t.Run("name in use", func(t *testing.T) {
		spec := star(t.TempDir(), 1, 1, 0)
		spec.ID = fmt.Sprintf("xt%dn", os.Getpid())
		foreign, err := newSpace("xagg-" + spec.ID + "-s0")
		if err != nil {
			t.Fatal(err)
		}
		defer removeSpace(foreign.name)
		defer foreign.close()
		if _, err := Create(t.Context(), spec); err == nil || !strings.Contains(err.Error(), "ip netns delete "+foreign.name) {
			t.Errorf("create: %v, want the cure", err)
		}
		if _, err := os.Stat(filepath.Join(mountDir, foreign.name)); err != nil {
			t.Errorf("somebody else's namespace: %v", err)
		}
	})
	t.Run("id in use", func(t *testing.T) {
		spec := star(t.TempDir(), 1, 0, 0)
		spec.ID = fmt.Sprintf("xt%di", os.Getpid())
		lab, err := Create(t.Context(), spec)
		if err != nil {
			t.Fatal(err)
		}
		defer lab.Close()
		if _, err := Create(t.Context(), spec); !errors.Is(err, fs.ErrExist) {
			t.Errorf("create: %v, want %v", err, fs.ErrExist)
		}
		if err := lab.Do("w0", func() error { return nil }); err != nil {
			t.Errorf("the lab that was there: %v", err)
		}
	})
}
