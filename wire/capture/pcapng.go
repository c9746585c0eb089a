package capture

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"math/bits"
	"time"
)

// pcapng reads the next generation format (draft-ietf-opsawg-pcapng): its sections, interfaces and the three kinds of
// packet blocks. Other blocks are skipped.
type pcapng struct {
	r      *bufio.Reader
	order  binary.ByteOrder
	ifaces []iface
	last   time.Time // of the packet before: simple packet blocks have no time
	head   [12]byte
	buf    []byte
}

type iface struct {
	link    LinkType
	snapLen uint32
	units   uint64 // per second, of its time stamps
	offset  int64  // seconds to add to its time stamps
}

const (
	blockSection   = 0x0a0d0d0a // the same in both byte orders
	blockInterface = 1
	blockPacket    = 2 // obsolete
	blockSimple    = 3
	blockEnhanced  = 6

	byteOrderMagic = 0x1a2b3c4d

	optionEnd        = 0
	optionResolution = 9
	optionOffset     = 14

	// A block that is read has at most this length; there is room for a packet and its options.
	maxBlock = maxPacket + 64<<10
)

func newPcapng(r *bufio.Reader) (*pcapng, error) {
	f := &pcapng{r: r, order: binary.LittleEndian}
	typ, body, err := f.block()
	if err != nil {
		return nil, err
	}
	if typ != blockSection {
		return nil, fmt.Errorf("%w: pcapng begins with a block of type %#x", ErrFormat, typ)
	}
	return f, f.section(body)
}

func (f *pcapng) next(p *Packet) error {
	for {
		typ, body, err := f.block()
		if err != nil {
			return err
		}
		switch typ {
		case blockSection:
			err = f.section(body)
		case blockInterface:
			err = f.iface(body)
		case blockEnhanced, blockPacket:
			return f.packet(p, typ, body)
		case blockSimple:
			return f.simple(p, body)
		}
		if err != nil {
			return err
		}
	}
}

// block reads one block and returns its body if it is of a kind that is used. io.EOF is the end between two blocks.
func (f *pcapng) block() (typ uint32, body []byte, err error) {
	h := f.head[:]
	if _, err := io.ReadFull(f.r, h[:8]); err != nil {
		return 0, nil, err
	}
	body = h[8:8]
	typ = f.order.Uint32(h)
	if typ == blockSection {
		// The byte order of a section's header is known only from its body.
		if err := readFull(f.r, h[8:]); err != nil {
			return 0, nil, err
		}
		body = h[8:]
		switch uint32(byteOrderMagic) {
		case binary.LittleEndian.Uint32(body):
			f.order = binary.LittleEndian
		case binary.BigEndian.Uint32(body):
			f.order = binary.BigEndian
		default:
			return 0, nil, fmt.Errorf("%w: pcapng section with the byte order % x", ErrFormat, body)
		}
	}
	length := f.order.Uint32(h[4:])
	if length%4 != 0 || length < uint32(12+len(body)) || length > math.MaxInt32 {
		return 0, nil, fmt.Errorf("%w: pcapng block of %d bytes", ErrFormat, length)
	}
	rest := int(length) - 12 - len(body)
	switch typ {
	case blockSection, blockInterface, blockPacket, blockSimple, blockEnhanced:
		if length > maxBlock {
			return 0, nil, fmt.Errorf("%w: pcapng block of %d bytes", ErrFormat, length)
		}
		f.buf = resize(f.buf, len(body)+rest)
		copy(f.buf, body)
		err, body = readFull(f.r, f.buf[len(body):]), f.buf
	default:
		_, err = f.r.Discard(rest)
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
	}
	if err == nil {
		err = readFull(f.r, h[:4])
	}
	if err == nil && f.order.Uint32(h[:4]) != length {
		err = fmt.Errorf("%w: pcapng block of %d bytes ends with the length %d", ErrFormat, length, f.order.Uint32(h[:4]))
	}
	return typ, body, err
}

func (f *pcapng) section(body []byte) error {
	if len(body) < 16 {
		return fmt.Errorf("%w: pcapng section header of %d bytes", ErrFormat, len(body))
	}
	if major := f.order.Uint16(body[4:]); major != 1 {
		return fmt.Errorf("%w: pcapng version %d, want 1", ErrFormat, major)
	}
	f.ifaces = f.ifaces[:0]
	return nil
}

func (f *pcapng) iface(body []byte) error {
	if len(body) < 8 {
		return fmt.Errorf("%w: pcapng interface of %d bytes", ErrFormat, len(body))
	}
	i := iface{link: LinkType(f.order.Uint16(body)), snapLen: f.order.Uint32(body[4:]), units: 1e6}
	for opts := body[8:]; len(opts) >= 4; {
		code, n := f.order.Uint16(opts), int(f.order.Uint16(opts[2:]))
		if code == optionEnd {
			break
		}
		if padded := (n + 3) &^ 3; 4+padded > len(opts) {
			return fmt.Errorf("%w: pcapng interface option of %d bytes", ErrFormat, n)
		}
		value := opts[4 : 4+n]
		opts = opts[4+(n+3)&^3:]
		switch {
		case code == optionResolution && n == 1:
			if i.units = resolution(value[0]); i.units == 0 {
				return fmt.Errorf("%w: pcapng time resolution %#x", ErrFormat, value[0])
			}
		case code == optionOffset && n == 8:
			i.offset = int64(f.order.Uint64(value))
		}
	}
	f.ifaces = append(f.ifaces, i)
	return nil
}

// resolution returns the units per second of an if_tsresol option, or 0 when they are more than 64 bits hold.
func resolution(v byte) uint64 {
	if v&0x80 != 0 {
		return 1 << (v & 0x7f) // 0 from 64 on
	}
	units := uint64(1)
	for range v {
		if units > math.MaxUint64/10 {
			return 0
		}
		units *= 10
	}
	return units
}

// packet reads an enhanced packet block, or a packet block, which differs in its first word only.
func (f *pcapng) packet(p *Packet, typ uint32, body []byte) error {
	if len(body) < 20 {
		return fmt.Errorf("%w: pcapng packet block of %d bytes", ErrFormat, len(body))
	}
	id := f.order.Uint32(body)
	if typ == blockPacket {
		id = uint32(f.order.Uint16(body))
	}
	i, err := f.lookup(id)
	if err != nil {
		return err
	}
	captured, length := f.order.Uint32(body[12:]), f.order.Uint32(body[16:])
	if captured > maxPacket || captured > length || int(captured) > len(body)-20 {
		return fmt.Errorf("%w: a packet with %d of %d bytes captured in a block of %d", ErrFormat, captured, length, len(body))
	}
	f.last = i.time(uint64(f.order.Uint32(body[4:]))<<32 | uint64(f.order.Uint32(body[8:])))
	*p = Packet{Time: f.last, Link: i.link, Len: int(length), Data: body[20 : 20+captured]}
	return nil
}

func (f *pcapng) simple(p *Packet, body []byte) error {
	if len(body) < 4 {
		return fmt.Errorf("%w: pcapng simple packet block of %d bytes", ErrFormat, len(body))
	}
	i, err := f.lookup(0)
	if err != nil {
		return err
	}
	length := f.order.Uint32(body)
	data := body[4:]
	captured := length
	if i.snapLen != 0 {
		captured = min(captured, i.snapLen)
	}
	if int64(captured) > int64(len(data)) {
		return fmt.Errorf("%w: a packet of %d bytes in a block of %d", ErrFormat, captured, len(body))
	}
	*p = Packet{Time: f.last, Link: i.link, Len: int(length), Data: data[:captured]}
	return nil
}

func (f *pcapng) lookup(id uint32) (*iface, error) {
	if uint64(id) >= uint64(len(f.ifaces)) {
		return nil, fmt.Errorf("%w: a packet of interface %d, the section has %d", ErrFormat, id, len(f.ifaces))
	}
	return &f.ifaces[id], nil
}

func (i *iface) time(ts uint64) time.Time {
	hi, lo := bits.Mul64(ts%i.units, 1e9)
	nanos, _ := bits.Div64(hi, lo, i.units) // hi < units, as the first factor is
	return time.Unix(int64(ts/i.units)+i.offset, int64(nanos))
}
