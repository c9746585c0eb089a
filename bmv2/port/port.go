// Package port sends and receives whole Ethernet frames on a network interface, as a switch port does: every frame
// that arrives, whatever its destination, with its VLAN tag and its checksums, and none of those that leave.
//
// It uses an AF_PACKET socket with batched system calls and needs CAP_NET_RAW in the interface's network namespace.
package port

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	// MaxFrame is the size in bytes of the longest frame that is received; longer ones are dropped and counted.
	MaxFrame = 9728
	// Batch is the largest number of frames that one system call sends or receives.
	Batch = 32

	receiveBuffer = 4 << 20 // bytes in the kernel, for bursts
)

// Errors of Open that a caller may want to tell apart.
var (
	ErrNoInterface   = errors.New("no such network interface")
	ErrNotPermitted  = errors.New("not permitted")
	ErrInterfaceDown = errors.New("network interface is down")
)

// Options say what a port is used for. The zero value is a switch port.
type Options struct {
	// NetNS is the path of the network namespace the interface is in; empty means the calling thread's.
	NetNS string
	// Outgoing also receives the frames that the host sends, and those that other programs send.
	Outgoing bool
	// Timestamps asks the kernel for the time at which each frame came.
	Timestamps bool
	// Down, if set, is called once whenever the interface is found to be down or gone, and not again before it has
	// carried frames. Receive or Send calls it, whichever finds out.
	Down func()
}

// Meta says where a received frame comes from.
type Meta struct {
	// Time is when the kernel saw the frame; zero without Options.Timestamps.
	Time time.Time
	// Outgoing is set for a frame that left by the interface.
	Outgoing bool
}

// Port is an open interface. Receive and Send may be called at the same time, by one goroutine each.
type Port struct {
	name   string
	file   *os.File
	raw    syscall.RawConn
	in     batch
	out    batch
	opts   Options
	closed atomic.Bool
	down   atomic.Bool // told to opts.Down
	mu     sync.Mutex
	counts Counts
}

// Counts are the frames that a port lost.
type Counts struct {
	TooLong    uint64 // received, longer than MaxFrame
	Partial    uint64 // received with a checksum that the sender left to its interface: turn off its tx offload
	Unsendable uint64 // the interface did not take it: down, or longer than its MTU
}

// InNetNS calls f on a thread that is in the network namespace at path; with an empty path it just calls f. Sockets
// stay in the namespace they were made in.
func InNetNS(path string, f func() error) error {
	if path == "" {
		return f()
	}
	result := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		ns, err := os.Open(path)
		if err != nil {
			result <- fmt.Errorf("open network namespace: %w", err)
			return
		}
		defer ns.Close()
		if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
			result <- fmt.Errorf("enter network namespace %s: %w", path, err)
			return
		}
		result <- f()
	}()
	return <-result
}

// Open opens the interface of that name. It sets the interface promiscuous until Close.
func Open(name string, opts Options) (*Port, error) {
	var p *Port
	err := InNetNS(opts.NetNS, func() (err error) {
		p, err = open(name, opts)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("open interface %s: %w", name, err)
	}
	return p, nil
}

func open(name string, opts Options) (*Port, error) {
	iface, err := net.InterfaceByName(name)
	if err != nil {
		return nil, fmt.Errorf("%w (see 'ip link')", ErrNoInterface)
	}
	// Protocol 0 receives nothing, so that no frame of another interface slips in before the bind.
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if errors.Is(err, unix.EPERM) {
		return nil, fmt.Errorf("%w: run as root, or with CAP_NET_RAW", ErrNotPermitted)
	} else if err != nil {
		return nil, fmt.Errorf("make AF_PACKET socket: %w", err)
	}
	p := &Port{name: name, file: os.NewFile(uintptr(fd), "port "+name), opts: opts}
	if err := p.setup(fd, iface.Index); err != nil {
		p.file.Close()
		return nil, err
	}
	if p.raw, err = p.file.SyscallConn(); err != nil {
		p.file.Close()
		return nil, err
	}
	p.in.init(MaxFrame)
	p.out.init(0)
	return p, nil
}

func (p *Port) setup(fd, index int) error {
	var errs []error
	set := func(level, opt, v int) {
		if err := unix.SetsockoptInt(fd, level, opt, v); err != nil {
			errs = append(errs, fmt.Errorf("set socket option %d: %w", opt, err))
		}
	}
	set(unix.SOL_PACKET, unix.PACKET_AUXDATA, 1)
	if !p.opts.Outgoing {
		set(unix.SOL_PACKET, unix.PACKET_IGNORE_OUTGOING, 1)
	}
	if p.opts.Timestamps {
		set(unix.SOL_SOCKET, unix.SO_TIMESTAMPNS, 1)
	}
	if unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, receiveBuffer) != nil {
		set(unix.SOL_SOCKET, unix.SO_RCVBUF, receiveBuffer) // without CAP_NET_ADMIN: as much as the system allows
	}
	mreq := unix.PacketMreq{Ifindex: int32(index), Type: unix.PACKET_MR_PROMISC}
	if err := unix.SetsockoptPacketMreq(fd, unix.SOL_PACKET, unix.PACKET_ADD_MEMBERSHIP, &mreq); err != nil {
		errs = append(errs, fmt.Errorf("set promiscuous: %w", err))
	}
	if err := unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: htons(unix.ETH_P_ALL), Ifindex: index}); err != nil {
		if errors.Is(err, unix.ENETDOWN) {
			err = ErrInterfaceDown
		}
		errs = append(errs, fmt.Errorf("bind: %w", err))
	}
	return errors.Join(errs...)
}

func htons(v uint16) uint16 { return v<<8 | v>>8 }

// Name is the interface's name.
func (p *Port) Name() string { return p.name }

// Close ends Receive and Send. It may be called more than once.
func (p *Port) Close() error {
	if p.closed.Swap(true) {
		return nil
	}
	return p.file.Close()
}

// Counts returns what the port lost so far.
func (p *Port) Counts() Counts {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.counts
}

func (p *Port) count(f func(*Counts)) {
	p.mu.Lock()
	f(&p.counts)
	p.mu.Unlock()
}

// mmsghdr is struct mmsghdr.
type mmsghdr struct {
	hdr unix.Msghdr
	len uint32
	_   [4]byte
}

const (
	controlLen = 128 // room for auxiliary data and a timestamp
	vlanRoom   = 4   // in front of every received frame, to put a tag back
)

// batch is the memory of a batched system call.
type batch struct {
	msgs    [Batch]mmsghdr
	iovs    [Batch]unix.Iovec
	control [Batch][controlLen]byte
	addrs   [Batch]unix.RawSockaddrLinklayer
	bufs    [Batch][]byte
}

func (b *batch) init(size int) {
	for i := range b.msgs {
		m := &b.msgs[i].hdr
		m.Iov = &b.iovs[i]
		m.SetIovlen(1)
		if size == 0 {
			continue
		}
		b.bufs[i] = make([]byte, vlanRoom+size)
		b.iovs[i].Base = &b.bufs[i][vlanRoom]
		b.iovs[i].SetLen(size)
	}
}

// arm gives the kernel's inputs their full length again.
func (b *batch) arm() {
	for i := range b.msgs {
		m := &b.msgs[i].hdr
		m.Control = &b.control[i][0]
		m.SetControllen(controlLen)
		m.Name = (*byte)(unsafe.Pointer(&b.addrs[i]))
		m.Namelen = unix.SizeofSockaddrLinklayer
	}
}

// Receive calls f with every frame until the port is closed or finished, and returns nil then. The frame is valid
// only during the call.
func (p *Port) Receive(f func(frame []byte, meta Meta)) error {
	for {
		n, err := p.receive()
		finished := errors.Is(err, os.ErrDeadlineExceeded)
		if finished {
			n, err = p.receiveNow()
		}
		if p.closed.Load() {
			return nil
		}
		if err != nil {
			return fmt.Errorf("receive on interface %s: %w", p.name, err)
		}
		for i := range n {
			if frame, meta, ok := p.frame(i); ok {
				f(frame, meta)
			}
		}
		if finished && n == 0 {
			return nil
		}
	}
}

// Finish makes Receive return once it has delivered the frames that the kernel has by now.
func (p *Port) Finish() error { return p.file.SetReadDeadline(time.Unix(1, 0)) }

func (p *Port) recvmmsg(fd uintptr) (n int, errno syscall.Errno) {
	p.in.arm()
	for {
		r, _, e := unix.Syscall6(unix.SYS_RECVMMSG, fd, uintptr(unsafe.Pointer(&p.in.msgs[0])), Batch, 0, 0, 0)
		if e != unix.EINTR {
			return int(r), e
		}
	}
}

// receiveNow does not wait.
func (p *Port) receiveNow() (n int, err error) {
	var errno syscall.Errno
	if err := p.raw.Control(func(fd uintptr) { n, errno = p.recvmmsg(fd) }); err != nil {
		return 0, err
	}
	switch errno {
	case 0:
		return n, nil
	case unix.ENETDOWN: // which the kernel says once
		p.isDown()
	}
	return 0, nil // nothing there, or the interface is gone
}

func (p *Port) receive() (n int, err error) {
	var errno syscall.Errno
	err = p.raw.Read(func(fd uintptr) bool {
		n, errno = p.recvmmsg(fd)
		return errno != unix.EAGAIN
	})
	switch {
	case err != nil:
		return 0, err
	case errno == unix.ENETDOWN:
		p.isDown() // reported once when the interface goes down; frames come again when it is up
		return 0, nil
	case errno != 0:
		return 0, errno
	}
	p.down.Store(false)
	return n, nil
}

// isDown tells that the interface is down, unless that was told before.
func (p *Port) isDown() {
	if !p.down.Swap(true) && p.opts.Down != nil {
		p.opts.Down()
	}
}

const (
	statusPartial   = 1 << 3 // TP_STATUS_CSUMNOTREADY
	statusVLAN      = 1 << 4 // TP_STATUS_VLAN_VALID
	statusVLANTPID  = 1 << 6 // TP_STATUS_VLAN_TPID_VALID
	packetOutgoing  = 4      // PACKET_OUTGOING
	addressesLength = 12     // of an Ethernet header
)

// frame looks at a received message: it puts the VLAN tag back that the kernel took off, and reads the control data.
func (p *Port) frame(i int) (frame []byte, meta Meta, ok bool) {
	m := &p.in.msgs[i]
	if m.hdr.Flags&unix.MSG_TRUNC != 0 || int(m.len) > MaxFrame {
		p.count(func(c *Counts) { c.TooLong++ })
		return nil, meta, false
	}
	buf := p.in.bufs[i][:vlanRoom+int(m.len)]
	frame = buf[vlanRoom:]
	meta.Outgoing = p.in.addrs[i].Pkttype == packetOutgoing
	for c := p.in.control[i][:m.hdr.Controllen]; len(c) >= unix.SizeofCmsghdr; {
		h := (*unix.Cmsghdr)(unsafe.Pointer(&c[0]))
		if int(h.Len) < unix.SizeofCmsghdr || int(h.Len) > len(c) {
			break
		}
		data := c[unix.CmsgLen(0):h.Len]
		switch {
		case h.Level == unix.SOL_PACKET && h.Type == unix.PACKET_AUXDATA && len(data) >= 20:
			status := binary.NativeEndian.Uint32(data)
			if status&statusPartial != 0 && !meta.Outgoing {
				p.count(func(c *Counts) { c.Partial++ })
			}
			if status&statusVLAN != 0 && len(frame) >= addressesLength {
				tpid := uint16(unix.ETH_P_8021Q)
				if status&statusVLANTPID != 0 {
					tpid = binary.NativeEndian.Uint16(data[18:])
				}
				copy(buf, frame[:addressesLength])
				frame = buf
				binary.BigEndian.PutUint16(frame[addressesLength:], tpid)
				binary.BigEndian.PutUint16(frame[addressesLength+2:], binary.NativeEndian.Uint16(data[16:]))
			}
		case h.Level == unix.SOL_SOCKET && h.Type == unix.SO_TIMESTAMPNS && len(data) >= 16:
			meta.Time = time.Unix(int64(binary.NativeEndian.Uint64(data)), int64(binary.NativeEndian.Uint64(data[8:])))
		}
		c = c[min(unix.CmsgSpace(int(h.Len)-unix.CmsgLen(0)), len(c)):]
	}
	return frame, meta, true
}

// Send sends frames in order. Those that the interface does not take (it is down, they are longer than its MTU) are
// counted and dropped, as on a wire; an error is returned only when the port is closed or broken.
func (p *Port) Send(frames [][]byte) error {
	for len(frames) > 0 {
		n := min(len(frames), Batch)
		for i, f := range frames[:n] {
			if len(f) == 0 {
				f = []byte{0} // an empty frame has no address; the kernel refuses this one too
			}
			p.out.iovs[i].Base = &f[0]
			p.out.iovs[i].SetLen(len(f))
		}
		sent, err := p.send(n)
		if p.closed.Load() {
			return fmt.Errorf("send on interface %s: %w", p.name, os.ErrClosed)
		}
		if err != nil {
			return fmt.Errorf("send on interface %s: %w", p.name, err)
		}
		frames = frames[sent:]
	}
	return nil
}

// send returns the number of frames that are done with, sent or dropped.
func (p *Port) send(n int) (done int, err error) {
	var errno syscall.Errno
	err = p.raw.Write(func(fd uintptr) bool {
		for {
			r, _, e := unix.Syscall6(unix.SYS_SENDMMSG, fd, uintptr(unsafe.Pointer(&p.out.msgs[0])), uintptr(n), 0, 0, 0)
			switch e {
			case unix.EINTR:
				continue
			case unix.EAGAIN:
				return false
			}
			done, errno = int(r), e
			return true
		}
	})
	if err != nil {
		return 0, err
	}
	switch errno {
	case 0:
		p.down.Store(false)
		return done, nil
	case unix.ENETDOWN, unix.ENXIO: // the latter once it is deleted
		p.isDown()
	case unix.EBADF, unix.ENOTSOCK, unix.EFAULT:
		return 0, errno
	}
	// Everything else is about the first frame: ENOBUFS, ENETDOWN, ENXIO, EMSGSIZE, EINVAL.
	p.count(func(c *Counts) { c.Unsendable++ })
	return 1, nil
}
