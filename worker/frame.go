package worker

import (
	"fmt"
	"net/netip"
	"sync"
	"time"

	"xagg/wire"
)

// frameQueue bounds the payloads that wait in a FrameLink: about what a socket buffer holds.
const frameQueue = 4096

// FrameLink is a [Link] of whole Ethernet frames within a process: what a worker sends comes out of a function, what
// it is to receive is handed to [FrameLink.In]. It resolves no addresses: the service's MAC is the one that Connect
// tells.
type FrameLink struct {
	addr     wire.Addr
	checksum bool
	out      func(frame []byte)

	mu      sync.Mutex
	service wire.Addr
	queue   [][]byte
	free    [][]byte
	woken   bool
	closed  bool
	dropped uint64
	ready   chan struct{} // holds a token when there is something to look at
}

// NewFrameLink returns a link of a host with the given address. Every frame sent is given to out, which owns it from
// then on and is called by the goroutine that sends. With checksum set frames carry a UDP checksum.
func NewFrameLink(addr wire.Addr, checksum bool, out func(frame []byte)) *FrameLink {
	return &FrameLink{addr: addr, checksum: checksum, out: out, ready: make(chan struct{}, 1)}
}

// In takes a frame that has arrived at the host, as a network card and an IP stack would: frames that are not UDP for
// this address from the service address, or damaged, are dropped. It does not keep the frame, and may be called from
// any goroutine, also from within out.
func (l *FrameLink) In(frame []byte) {
	src, dst, payload, err := wire.ParseUDP(frame)
	l.mu.Lock()
	defer l.mu.Unlock()
	if err != nil || dst != l.addr || src.IP != l.service.IP || src.Port != l.service.Port || l.closed ||
		len(l.queue) >= frameQueue {
		l.dropped++
		return
	}
	var b []byte
	if n := len(l.free); n > 0 {
		b, l.free = l.free[n-1], l.free[:n-1]
	}
	l.queue = append(l.queue, append(b[:0], payload...))
	l.signal()
}

func (l *FrameLink) signal() {
	select {
	case l.ready <- struct{}{}:
	default:
	}
}

// Dropped returns the number of frames that In did not take.
func (l *FrameLink) Dropped() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.dropped
}

// LocalAddr implements [Link].
func (l *FrameLink) LocalAddr() netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom4(l.addr.IP), l.addr.Port)
}

// Connect implements [Link].
func (l *FrameLink) Connect(service wire.Addr) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.service = service
	return nil
}

// Send implements [Link].
func (l *FrameLink) Send(payloads [][]byte) (int, error) {
	l.mu.Lock()
	service := l.service
	l.mu.Unlock()
	for _, p := range payloads {
		frame := make([]byte, 0, wire.FrameOverhead+len(p))
		l.out(wire.AppendUDP(frame, l.addr, service, p, l.checksum))
	}
	return len(payloads), nil
}

// Recv implements [Link].
func (l *FrameLink) Recv(bufs [][]byte, sizes []int, deadline time.Time) (int, error) {
	var timer *time.Timer
	for {
		l.mu.Lock()
		n := min(len(bufs), len(l.queue))
		for i, p := range l.queue[:n] {
			sizes[i] = copy(bufs[i], p)
		}
		l.free = append(l.free, l.queue[:n]...)
		l.queue = l.queue[:copy(l.queue, l.queue[n:])]
		woken, closed := l.woken, l.closed
		l.woken = false
		l.mu.Unlock()
		if n > 0 || woken {
			return n, nil
		}
		if closed {
			return 0, fmt.Errorf("receive at %v: link is closed", l.addr)
		}
		wait := time.Until(deadline)
		if wait <= 0 {
			return 0, nil
		}
		if timer == nil {
			timer = time.NewTimer(wait)
			defer timer.Stop()
		}
		select {
		case <-l.ready:
		case <-timer.C:
		}
	}
}

// Wake implements [Link].
func (l *FrameLink) Wake() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.woken = true
	l.signal()
}

// Close implements [Link].
func (l *FrameLink) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	l.signal()
	return nil
}
