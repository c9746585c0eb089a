// Package capture reads packets from capture files: pcap and pcapng, plain or compressed by gzip, one file at a time
// or several merged by time.
//
// gopacket's pcapgo is not used for it because its link type has eight bits, so that it cannot tell LINUX_SLL2 (276)
// from link type 20, and because a damaged pcapng file makes it divide by zero or allocate gigabytes.
package capture

import (
	"bufio"
	"compress/gzip"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"time"
)

// LinkType says what a captured packet begins with, by the numbers of pcap-linktype(7).
type LinkType uint32

// The link types that [Packet.IPv4] knows.
const (
	LinkEthernet  LinkType = 1
	LinkLinuxSLL  LinkType = 113 // "cooked" capture of an interface without Ethernet, or of several
	LinkLinuxSLL2 LinkType = 276 // its successor, which tcpdump -i any writes
)

// String returns the link type's name, or its number.
func (l LinkType) String() string {
	switch l {
	case LinkEthernet:
		return "Ethernet"
	case LinkLinuxSLL:
		return "LINUX_SLL"
	case LinkLinuxSLL2:
		return "LINUX_SLL2"
	}
	return fmt.Sprintf("link type %d", uint32(l))
}

// ErrFormat is a file that is neither pcap nor pcapng, or a damaged one.
var ErrFormat = errors.New("not a readable capture file")

// maxPacket is the largest captured length that is believed, in bytes: libpcap's and Wireshark's own limit.
const maxPacket = 256 << 10

// Packet is a captured packet.
type Packet struct {
	Time time.Time
	Link LinkType
	Len  int    // bytes on the wire; more than len(Data) when the capture cut the packet
	Data []byte // captured bytes, valid until the next packet is read
}

// Cut reports whether the capture kept only a part of the packet.
func (p *Packet) Cut() bool { return len(p.Data) < p.Len }

// IPv4 returns the packet from its IPv4 header on, or false when it is no IPv4 packet, of another link type or cut
// before that header.
func (p *Packet) IPv4() ([]byte, bool) {
	var header, etherType int // length of the link's header, offset of the type in it
	switch p.Link {
	case LinkEthernet:
		header, etherType = 14, 12
	case LinkLinuxSLL:
		header, etherType = 16, 14
	case LinkLinuxSLL2:
		header, etherType = 20, 0
	default:
		return nil, false
	}
	if len(p.Data) < header || binary.BigEndian.Uint16(p.Data[etherType:]) != 0x0800 {
		return nil, false
	}
	return p.Data[header:], true
}

// Reader reads the packets of one capture file in their order.
type Reader struct {
	format
	n int
}

type format interface {
	next(*Packet) error
}

// NewReader reads the beginning of a capture file. A file of another kind is [ErrFormat].
func NewReader(r io.Reader) (*Reader, error) {
	return newReader(r, true)
}

func newReader(r io.Reader, mayBeCompressed bool) (*Reader, error) {
	br := bufio.NewReaderSize(r, 64<<10)
	magic, err := br.Peek(4)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	var f format
	switch {
	case len(magic) < 4:
		return nil, fmt.Errorf("%w: %d bytes long", ErrFormat, len(magic))
	case magic[0] == 0x1f && magic[1] == 0x8b && mayBeCompressed:
		z, err := gzip.NewReader(br)
		if err != nil {
			return nil, fmt.Errorf("%w: %w", ErrFormat, err)
		}
		return newReader(z, false)
	case binary.BigEndian.Uint32(magic) == blockSection:
		f, err = newPcapng(br)
	default:
		f, err = newPcap(br)
	}
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		err = fmt.Errorf("%w: it ends in its own header", ErrFormat)
	}
	if err != nil {
		return nil, err
	}
	return &Reader{format: f}, nil
}

// Next reads the next packet. The end of the file is io.EOF; a file that ends within a packet, as it is left by a
// capture that was killed, is io.ErrUnexpectedEOF, and a damaged one [ErrFormat].
func (r *Reader) Next(p *Packet) error {
	if err := r.next(p); err != nil {
		return err
	}
	r.n++
	return nil
}

// Number returns the number of the packet read last, counted from 1 as Wireshark does.
func (r *Reader) Number() int { return r.n }

// readFull is io.ReadFull for what must not be missing: any end of the file is unexpected.
func readFull(r io.Reader, b []byte) error {
	_, err := io.ReadFull(r, b)
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}
