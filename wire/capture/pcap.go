package capture

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io"
	"time"
)

// pcap reads the classic format, versions 2.x (draft-ietf-opsawg-pcap).
type pcap struct {
	r     *bufio.Reader
	order binary.ByteOrder
	nanos int64 // nanoseconds in a unit of the fraction
	link  LinkType
	head  [16]byte
	buf   []byte
}

const (
	magicMicros = 0xa1b2c3d4
	magicNanos  = 0xa1b23c4d
)

func newPcap(r *bufio.Reader) (*pcap, error) {
	var h [24]byte
	if err := readFull(r, h[:4]); err != nil {
		return nil, err
	}
	f := &pcap{r: r}
	for _, order := range []binary.ByteOrder{binary.LittleEndian, binary.BigEndian} {
		switch order.Uint32(h[:]) {
		case magicMicros:
			f.order, f.nanos = order, 1000
		case magicNanos:
			f.order, f.nanos = order, 1
		}
	}
	if f.order == nil {
		return nil, fmt.Errorf("%w: begins with % x, neither pcap nor pcapng", ErrFormat, h[:4])
	}
	if err := readFull(r, h[4:]); err != nil {
		return nil, err
	}
	if major := f.order.Uint16(h[4:]); major != 2 {
		return nil, fmt.Errorf("%w: pcap version %d, want 2", ErrFormat, major)
	}
	// The upper bits of the field say whether frames end in a check sequence.
	f.link = LinkType(f.order.Uint32(h[20:]) & 0xffff)
	return f, nil
}

func (f *pcap) next(p *Packet) error {
	h := f.head[:]
	if _, err := io.ReadFull(f.r, h); err != nil {
		return err // io.EOF between two packets
	}
	captured, length := f.order.Uint32(h[8:]), f.order.Uint32(h[12:])
	if captured > maxPacket || captured > length {
		return fmt.Errorf("%w: a packet with %d of %d bytes captured", ErrFormat, captured, length)
	}
	f.buf = resize(f.buf, int(captured))
	if err := readFull(f.r, f.buf); err != nil {
		return err
	}
	*p = Packet{
		Time: time.Unix(int64(f.order.Uint32(h[0:])), int64(f.order.Uint32(h[4:]))*f.nanos),
		Link: f.link, Len: int(length), Data: f.buf,
	}
	return nil
}

// resize returns b with n bytes of any content.
func resize(b []byte, n int) []byte {
	if n > cap(b) {
		return make([]byte, n, max(n, 2048))
	}
	return b[:n]
}
