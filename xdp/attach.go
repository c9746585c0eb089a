package xdp

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Mode says where the kernel runs an XDP program. It implements [github.com/spf13/pflag.Value].
type Mode string

// The modes. Auto is native where the driver can do it and generic elsewhere.
const (
	Auto    Mode = "auto"
	Native  Mode = "native"  // in the driver, before a socket buffer exists
	Generic Mode = "generic" // in the stack, on a copy: for function, not for speed
)

// MaxNativeMTU is the largest MTU in bytes that drivers take a native program with, since a frame must fit a page; it
// is veth's limit.
const MaxNativeMTU = 3506

// Set implements pflag.Value.
func (m *Mode) Set(text string) error {
	switch mode := Mode(text); mode {
	case Auto, Native, Generic:
		*m = mode
		return nil
	}
	return fmt.Errorf("XDP mode %q: want auto, native or generic", text)
}

// String returns the mode.
func (m *Mode) String() string { return string(*m) }

// Type implements pflag.Value.
func (m *Mode) Type() string { return "mode" }

func (m Mode) flags() link.XDPAttachFlags {
	if m == Native {
		return link.XDPDriverMode
	}
	return link.XDPGenericMode
}

// NoInterfaceError says that there is no such interface in this network namespace.
type NoInterfaceError struct {
	Name string
	Err  error
}

// Error implements error.
func (e *NoInterfaceError) Error() string {
	return fmt.Sprintf("no interface %q in this network namespace ('ip link' lists them)", e.Name)
}

// Unwrap returns the cause.
func (e *NoInterfaceError) Unwrap() error { return e.Err }

// Attach attaches the program to an interface of this network namespace, natively or generically as mode says, and
// tells log which it was. Where a native veth's peer is in this namespace too it is given an XDP program that passes
// everything: without one a native veth drops what the server sends. A peer elsewhere needs it as well, see
// [AttachPass].
func (s *Server) Attach(name string, mode Mode, log *slog.Logger) error {
	iface, err := interfaceByName(name)
	if err != nil {
		return err
	}
	s.record.setInterface(name)
	log = log.With("interface", name)
	if mode != Generic {
		err := s.attachNative(iface, log)
		if err == nil {
			log.Info("XDP attached", "mode", Native)
			return nil
		}
		if mode == Native || !nativeUnsupported(err) {
			return fmt.Errorf("attach XDP program to %s in native mode: %w", name, cure(name, err))
		}
		log.Warn("native XDP is not to be had here; using generic mode, which copies every frame and is much slower", "err", err)
	}
	l, err := attach(s.objects.Xagg, iface.Index, Generic)
	if err != nil {
		return fmt.Errorf("attach XDP program to %s in generic mode: %w", name, cure(name, err))
	}
	s.link, s.mode = l, Generic
	log.Info("XDP attached", "mode", Generic)
	return nil
}

// errMTU says that the interface's MTU is too big for a native program.
type errMTU struct {
	name string
	mtu  int
}

func (e errMTU) Error() string {
	return fmt.Sprintf("its MTU is %d, above %d; 'ip link set dev %s mtu 1500'", e.mtu, MaxNativeMTU, e.name)
}

func (s *Server) attachNative(iface *net.Interface, log *slog.Logger) error {
	if iface.MTU > MaxNativeMTU {
		return errMTU{iface.Name, iface.MTU}
	}
	l, err := attach(s.objects.Xagg, iface.Index, Native)
	if err != nil {
		return err
	}
	s.link, s.mode = l, Native
	return s.attachPeer(iface, log)
}

// attachPeer gives the veth peer of the interface, if there is one in this namespace, the program that passes all.
func (s *Server) attachPeer(iface *net.Interface, log *slog.Logger) error {
	l, err := netlink.LinkByIndex(iface.Index)
	if err != nil {
		return fmt.Errorf("look for a veth peer: %w", err)
	}
	if l.Type() != "veth" {
		return nil
	}
	if attrs := l.Attrs(); attrs.NetNsID >= 0 || attrs.ParentIndex == 0 {
		log.Info("the veth peer is in another network namespace: it needs a native XDP program too, or it receives nothing")
		return nil
	}
	pass, err := attachPass(l.Attrs().ParentIndex, Native)
	if err != nil {
		// Whoever has put a program there has done what is needed.
		if errors.Is(err, unix.EBUSY) || errors.Is(err, unix.EEXIST) {
			return nil
		}
		return fmt.Errorf("veth peer: %w", err)
	}
	s.peer = pass
	return nil
}

// AttachPass attaches a program that passes every frame to the interface with that index in the calling thread's
// network namespace. The receiving end of a veth pair needs one, in native mode, to get what a native program at the
// other end sends (XDP_TX). Closing what is returned detaches it, and so does the end of the process.
func AttachPass(ifindex int, mode Mode) (io.Closer, error) {
	l, err := attachPass(ifindex, mode)
	if err != nil {
		return nil, err
	}
	return l, nil
}

func attachPass(ifindex int, mode Mode) (link.Link, error) {
	prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name:         "xagg_pass",
		Type:         ebpf.XDP,
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, xdpPass), asm.Return()},
		License:      "Apache-2.0",
	})
	if err != nil {
		return nil, fmt.Errorf("load XDP pass program: %w", explain(err))
	}
	defer prog.Close() // the link keeps it
	l, err := attach(prog, ifindex, mode)
	if err != nil {
		return nil, fmt.Errorf("attach XDP pass program to interface %d in %s mode: %w", ifindex, mode, explain(err))
	}
	return l, nil
}

const xdpPass = 2 // XDP_PASS

func attach(prog *ebpf.Program, ifindex int, mode Mode) (link.Link, error) {
	return link.AttachXDP(link.XDPOptions{Program: prog, Interface: ifindex, Flags: mode.flags()})
}

// nativeUnsupported tells a driver that cannot do it from a reason that generic mode would not cure either.
func nativeUnsupported(err error) bool {
	return !errors.Is(err, unix.EBUSY) && !errors.Is(err, unix.EEXIST) && !errors.Is(err, unix.EPERM) && !errors.Is(err, unix.ENODEV)
}

// cure adds to an error of attaching what to do about it.
func cure(name string, err error) error {
	switch {
	case errors.Is(err, unix.EBUSY), errors.Is(err, unix.EEXIST):
		return fmt.Errorf("another XDP program is attached to %s, 'ip link show dev %s' says which; is another xagg server running there? (%w)", name, name, err)
	case errors.Is(err, unix.EPERM):
		return explain(err)
	case errors.Is(err, unix.EOPNOTSUPP):
		return fmt.Errorf("its driver has no native XDP; use --xdp-mode generic (%w)", err)
	}
	return err
}
