// Package lab tests what only a lab of real links shows: frames that leave one host and reach another.
package lab

import (
	"context"
	"encoding/binary"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"xagg/lab/netns"
	"xagg/tests/require"
	"xagg/wire"
	"xagg/xdp"
)

var (
	service = wire.Addr{MAC: [6]byte{2, 0x78, 0x61, 0, 0xff, 0xfe}, IP: [4]byte{10, 77, 255, 254}, Port: wire.Port}
	server  = wire.Addr{MAC: [6]byte{2, 0x78, 0x61, 0, 1, 1}, IP: [4]byte{10, 77, 1, 1}, Port: wire.Port}
)

const serverPort = 65

func worker(rank uint8) wire.Addr {
	return wire.Addr{MAC: [6]byte{2, 0x78, 0x61, 0, 0, rank + 1}, IP: [4]byte{10, 77, 0, rank + 1}, Port: 40000 + uint16(rank)}
}

// The server's program, attached to a host of a lab, takes contributions from the switch's port and answers there.
func TestServerOverLink(t *testing.T) {
	require.Have(t, require.Netns, require.XDP)
	for _, mode := range []xdp.Mode{xdp.Native, xdp.Generic} {
		t.Run(mode.String(), func(t *testing.T) {
			lab, err := netns.Create(t.Context(), netns.Spec{RunDir: t.TempDir(), Hosts: []netns.Host{{
				Name: "s0", Addr: netip.PrefixFrom(netip.AddrFrom4(server.IP), 16), MAC: net.HardwareAddr(server.MAC[:]),
				Port: serverPort, Bridge: true,
			}}})
			if err != nil {
				t.Fatal(err)
			}
			defer func() {
				if err := lab.Close(); err != nil {
					t.Error(err)
				}
			}()
			s, err := xdp.Load(4 << 20)
			if err != nil {
				t.Fatal(err)
			}
			defer s.Close()
			log := slog.New(slog.NewTextHandler(t.Output(), nil))
			if err := lab.Do("s0", func() error { return s.Attach(netns.HostInterface, mode, log) }); err != nil {
				t.Fatal(err)
			}
			if s.Mode() != mode.String() {
				t.Errorf("active mode %q, want %q", s.Mode(), mode)
			}
			plan := xdp.Plan{
				Job: 7, Epoch: 1, Ranks: 0b11, Lease: xdp.Lease{Chunks: 2, Rounds: 2},
				ServiceIP: netip.AddrFrom4(service.IP), ServiceMAC: service.MAC,
			}
			if err := s.Install(plan); err != nil {
				t.Fatal(err)
			}
			var port *link
			err = lab.Do(netns.Switch, func() (err error) {
				port, err = open(netns.PortName(serverPort))
				return err
			})
			if err != nil {
				t.Fatal(err)
			}
			defer port.close()

			grad := func(rank uint8) *wire.Packet {
				p := &wire.Packet{Header: wire.Header{
					Type: wire.TypeGrad, Job: plan.Job, Epoch: plan.Epoch, Rank: rank, Blocks: wire.MaxBlocks,
					Chunk: 1, Elems: wire.MaxLanes, Exponent: 20, Contributors: 1 << rank,
				}}
				for i := range p.Lanes {
					p.Lanes[i] = int32(1000*int(rank+1) - 7*i)
				}
				p.Seal()
				return p
			}
			ask := func(rank uint8, want wire.Type, to wire.Addr) wire.Packet {
				t.Helper()
				if err := port.send(wire.AppendFrame(nil, worker(rank), server, grad(rank), true)); err != nil {
					t.Fatal(err)
				}
				answer, src, dst, err := port.receive(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				if answer.Type != want || src != server || dst != to {
					t.Fatalf("rank %d: %v from %v to %v, want %v from %v to %v", rank, answer.Type, src, dst, want, server, to)
				}
				return answer
			}
			ask(0, wire.TypeAck, worker(0))
			result := ask(1, wire.TypeResult, service)
			if result.Contributors != plan.Ranks || !result.TagOK() {
				t.Errorf("result of %b, its tag fits: %v; want %b and true", result.Contributors, result.TagOK(), plan.Ranks)
			}
			for i, sum := range result.Lanes {
				if want := int32(3000 - 14*i); sum != want {
					t.Fatalf("lane %d is %d, want %d", i, sum, want)
				}
			}
		})
	}
}

// link sends and receives frames at an interface.
type link struct{ fd int }

// open opens the interface of that name in the thread's network namespace.
func open(name string) (*link, error) {
	iface, err := net.InterfaceByName(name)
	if err != nil {
		return nil, err
	}
	all := binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, unix.ETH_P_ALL))
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	if err := unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: all, Ifindex: iface.Index}); err != nil {
		unix.Close(fd)
		return nil, os.NewSyscallError("bind", err)
	}
	return &link{fd}, nil
}

func (l *link) close() { unix.Close(l.fd) }

func (l *link) send(frame []byte) error {
	_, err := unix.Write(l.fd, frame)
	return os.NewSyscallError("send", err)
}

// receive returns the next packet of the protocol that has arrived, within ten seconds.
func (l *link) receive(ctx context.Context) (p wire.Packet, src, dst wire.Addr, err error) {
	buf := make([]byte, 2048)
	for deadline := time.Now().Add(10 * time.Second); ; {
		n, from, err := unix.Recvfrom(l.fd, buf, 0)
		if sender, ok := from.(*unix.SockaddrLinklayer); err == nil && ok && sender.Pkttype != unix.PACKET_OUTGOING {
			if src, dst, err = wire.ParseFrame(buf[:n], &p); err == nil {
				return p, src, dst, nil
			}
			continue
		}
		if err == nil || errors.Is(err, unix.EINTR) {
			continue
		}
		left := time.Until(deadline)
		if !errors.Is(err, unix.EAGAIN) || left <= 0 || ctx.Err() != nil {
			return p, src, dst, os.NewSyscallError("receive", err)
		}
		unix.Poll([]unix.PollFd{{Fd: int32(l.fd), Events: unix.POLLIN}}, int(left.Milliseconds())+1)
	}
}
