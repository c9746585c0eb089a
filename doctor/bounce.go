package doctor

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"xagg/lab/netns"
	"xagg/xdp"
)

// flags are the flags of an attachment in that mode.
func flags(mode xdp.Mode) int {
	if mode == xdp.Native {
		return unix.XDP_FLAGS_DRV_MODE
	}
	return unix.XDP_FLAGS_SKB_MODE
}

// Actions of enum xdp_action in linux/bpf.h.
const (
	xdpPass = 2
	xdpTX   = 3
)

// etherType marks the frames of the check: IEEE 802's number for local experiments.
const etherType = 0x88b5

// reflector is a program that sends frames of [etherType] back to their sender, and passes others.
var reflector = &ebpf.ProgramSpec{
	Name: "xagg_reflect",
	Type: ebpf.XDP,
	Instructions: asm.Instructions{
		asm.LoadMem(asm.R2, asm.R1, 0, asm.Word), // xdp_md.data
		asm.LoadMem(asm.R3, asm.R1, 4, asm.Word), // xdp_md.data_end
		asm.Mov.Reg(asm.R4, asm.R2),
		asm.Add.Imm(asm.R4, 14),
		asm.JGT.Reg(asm.R4, asm.R3, "pass"),
		asm.LoadMem(asm.R4, asm.R2, 12, asm.Half),
		asm.HostTo(asm.BE, asm.R4, asm.Half),
		asm.JNE.Imm(asm.R4, etherType, "pass"),
		// Swap the MAC addresses, 4 + 2 bytes each.
		asm.LoadMem(asm.R4, asm.R2, 0, asm.Word),
		asm.LoadMem(asm.R5, asm.R2, 6, asm.Word),
		asm.StoreMem(asm.R2, 0, asm.R5, asm.Word),
		asm.StoreMem(asm.R2, 6, asm.R4, asm.Word),
		asm.LoadMem(asm.R4, asm.R2, 4, asm.Half),
		asm.LoadMem(asm.R5, asm.R2, 10, asm.Half),
		asm.StoreMem(asm.R2, 4, asm.R5, asm.Half),
		asm.StoreMem(asm.R2, 10, asm.R4, asm.Half),
		asm.Mov.Imm(asm.R0, xdpTX),
		asm.Return(),
		asm.Mov.Imm(asm.R0, xdpPass).WithSymbol("pass"),
		asm.Return(),
	},
	License: "Apache-2.0",
}

// The two ends of the check's link.
var (
	switchMAC = net.HardwareAddr{0x02, 0x78, 0x61, 0, 0xff, 0xfe}
	serverMAC = net.HardwareAddr{0x02, 0x78, 0x61, 0, 0x01, 0x01}
)

const (
	serverName = "s0"
	serverPort = 65
)

// server is a lab of one server behind a bridge, as in every lab. It leaves alone what others left: that is reported.
func server(rate uint64) netns.Spec {
	return netns.Spec{KeepDead: true, Hosts: []netns.Host{{
		Name: serverName, Addr: netip.MustParsePrefix("10.77.1.1/16"), MAC: serverMAC, Port: serverPort,
		Rate: rate, Bridge: true,
	}}}
}

// rate makes a lab with a limited link.
func rate(ctx context.Context) error {
	lab, err := netns.Create(ctx, server(1_000_000_000))
	if err != nil {
		return err
	}
	return lab.Close()
}

// bounce sends a frame from the switch of a lab to a server that runs the reflector, and waits for it to come back.
func bounce(ctx context.Context, mode xdp.Mode) (err error) {
	lab, err := netns.Create(ctx, server(0))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, lab.Close()) }()
	err = lab.Do(serverName, func() error {
		prog, err := ebpf.NewProgram(reflector)
		if err != nil {
			return fmt.Errorf("load an XDP program: %w", err)
		}
		defer prog.Close() // the interface keeps it
		link, err := netlink.LinkByName(netns.HostInterface)
		if err == nil {
			err = netlink.LinkSetXdpFdWithFlags(link, prog.FD(), flags(mode))
		}
		if err != nil {
			return fmt.Errorf("attach an XDP program in %s mode: %w", mode, err)
		}
		return nil
	})
	if err != nil {
		return err
	}
	return lab.Do(netns.Switch, func() error { return sendAndReceive(ctx, netns.PortName(serverPort)) })
}

// sendAndReceive sends a frame out of an interface and waits for it to come back with its addresses swapped.
func sendAndReceive(ctx context.Context, iface string) error {
	link, err := net.InterfaceByName(iface)
	if err != nil {
		return err
	}
	proto := htons(etherType)
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, int(proto))
	if err != nil {
		return fmt.Errorf("open a packet socket: %w", err)
	}
	defer unix.Close(fd)
	if err := unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: proto, Ifindex: link.Index}); err != nil {
		return fmt.Errorf("bind a packet socket to %s: %w", iface, err)
	}
	frame := func(dst, src net.HardwareAddr) []byte {
		f := append(append([]byte{}, dst...), src...)
		f = binary.BigEndian.AppendUint16(f, etherType)
		return append(f, bytes.Repeat([]byte("xagg"), 100)...)
	}
	if _, err := unix.Write(fd, frame(serverMAC, switchMAC)); err != nil {
		return fmt.Errorf("send a frame: %w", err)
	}
	want, got := frame(switchMAC, serverMAC), make([]byte, 2048)
	for deadline := time.Now().Add(2 * time.Second); ; {
		n, err := unix.Read(fd, got)
		switch {
		case err == nil && bytes.Equal(got[:n], want):
			return nil
		case err == nil, err == unix.EINTR:
			continue // not ours
		case err != unix.EAGAIN:
			return fmt.Errorf("receive a frame: %w", err)
		}
		left := time.Until(deadline)
		if left <= 0 || ctx.Err() != nil {
			return errors.New("a frame that the XDP program should send back did not come back within 2 s")
		}
		unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, int(left.Milliseconds())+1)
	}
}

func htons(v uint16) uint16 {
	return binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, v))
}
