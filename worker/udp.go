package worker

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/net/ipv4"
	"golang.org/x/sys/unix"

	"xagg/internal/endpoint"
	"xagg/wire"
)

// socketBuffer is what is asked for SO_RCVBUF and SO_SNDBUF: results come in bursts of a window's size. The kernel may
// grant less (net.core.rmem_max).
const socketBuffer = 4 << 20

// UDPLink is a [Link] over a UDP socket, with batched system calls.
type UDPLink struct {
	conn  *net.UDPConn
	batch *ipv4.PacketConn
	woken atomic.Bool

	out, in []ipv4.Message
}

// ListenUDP opens a socket at an IPv4 address of this machine. Port 0 lets the system choose one; [wire.Port] is the
// usual choice where every worker has its own address. What the machine refuses is an [*endpoint.ListenError]. Without checksum the socket sends UDP checksum 0, which leaves
// the detection of damaged packets to the protocol's tag.
func ListenUDP(addr netip.AddrPort, checksum bool) (*UDPLink, error) {
	if !addr.Addr().Is4() || addr.Addr().IsUnspecified() {
		return nil, fmt.Errorf("listen at %v: want an IPv4 address of this machine", addr)
	}
	lc := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		return control(c, func(fd int) error {
			// Asking for more than the system allows is no error, so the best that can be had is taken.
			for _, opt := range []int{unix.SO_RCVBUF, unix.SO_SNDBUF} {
				if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, opt, socketBuffer); err != nil {
					return fmt.Errorf("set socket buffer: %w", err)
				}
			}
			if !checksum {
				if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_NO_CHECK, 1); err != nil {
					return fmt.Errorf("turn off checksums: %w", err)
				}
			}
			return nil
		})
	}}
	conn, err := lc.ListenPacket(context.Background(), "udp4", addr.String())
	if err != nil {
		return nil, endpoint.NewListenError("udp", addr.String(), err)
	}
	udp := conn.(*net.UDPConn)
	return &UDPLink{conn: udp, batch: ipv4.NewPacketConn(udp)}, nil
}

// control calls f with the connection's file descriptor.
func control(c syscall.RawConn, f func(fd int) error) error {
	var err error
	if e := c.Control(func(fd uintptr) { err = f(int(fd)) }); e != nil {
		return e
	}
	return err
}

// LocalAddr returns the socket's own address.
func (l *UDPLink) LocalAddr() netip.AddrPort {
	a := l.conn.LocalAddr().(*net.UDPAddr).AddrPort()
	return netip.AddrPortFrom(a.Addr().Unmap(), a.Port())
}

// Connect connects the socket to the service address. Its MAC is found by the system.
func (l *UDPLink) Connect(service wire.Addr) error {
	raw, err := l.conn.SyscallConn()
	if err == nil {
		err = control(raw, func(fd int) error {
			return unix.Connect(fd, &unix.SockaddrInet4{Port: int(service.Port), Addr: service.IP})
		})
	}
	if err != nil {
		return fmt.Errorf("connect to %v: %w", netip.AddrPortFrom(netip.AddrFrom4(service.IP), service.Port), err)
	}
	return nil
}

// Send implements [Link].
func (l *UDPLink) Send(payloads [][]byte) (int, error) {
	l.out = messages(l.out, payloads)
	sent := 0
	for sent < len(payloads) {
		n, err := l.batch.WriteBatch(l.out[sent:len(payloads)], 0)
		if err != nil {
			return sent, err
		}
		sent += n
	}
	return sent, nil
}

// Recv implements [Link].
func (l *UDPLink) Recv(bufs [][]byte, sizes []int, deadline time.Time) (int, error) {
	if err := l.conn.SetReadDeadline(deadline); err != nil {
		return 0, err
	}
	// A Wake before this line is seen here; one after it cuts the deadline short.
	if l.woken.Swap(false) {
		return 0, nil
	}
	l.in = messages(l.in, bufs)
	n, err := l.batch.ReadBatch(l.in[:len(bufs)], 0)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return 0, nil
	}
	for i := range l.in[:max(n, 0)] {
		sizes[i] = l.in[i].N
	}
	return max(n, 0), err
}

// messages returns ms, grown where needed, with a message for every buffer.
func messages(ms []ipv4.Message, bufs [][]byte) []ipv4.Message {
	for len(ms) < len(bufs) {
		ms = append(ms, ipv4.Message{Buffers: make([][]byte, 1)})
	}
	for i, b := range bufs {
		ms[i].Buffers[0] = b
	}
	return ms
}

// Wake implements [Link].
func (l *UDPLink) Wake() {
	l.woken.Store(true)
	_ = l.conn.SetReadDeadline(time.Unix(1, 0)) // fails only on a closed link, which wakes too
}

// Close closes the socket.
func (l *UDPLink) Close() error { return l.conn.Close() }

// Transient reports whether err, of a [Link], says that a payload was lost on its way rather than that the link is of
// no use: no route or neighbour for now, nobody at the port (yet), no room in a queue.
func Transient(err error) bool {
	for _, errno := range []unix.Errno{unix.ECONNREFUSED, unix.EHOSTUNREACH, unix.ENETUNREACH, unix.EHOSTDOWN, unix.ENETDOWN,
		unix.ENOBUFS} {
		if errors.Is(err, errno) {
			return true
		}
	}
	return false
}
