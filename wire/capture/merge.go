package capture

import (
	"errors"
	"io"
)

// Merger reads several captures as one, in the order of time. Packets of one file keep their order, and of packets
// with the same time the one of the earlier file comes first.
type Merger struct {
	readers []*Reader
	heads   []Packet
	errs    []error // why a reader has no head
	taken   int     // the reader whose head was returned last, -1 = none
}

// Merge returns a Merger of the readers, from which nothing has been read yet.
func Merge(readers ...*Reader) *Merger {
	m := &Merger{readers: readers, heads: make([]Packet, len(readers)), errs: make([]error, len(readers)), taken: -1}
	for i := range readers {
		m.advance(i)
	}
	return m
}

func (m *Merger) advance(i int) { m.errs[i] = m.readers[i].Next(&m.heads[i]) }

// Next reads the next packet and says which reader, counted from 0, it came from; the reader's Number is the packet's.
// A file that ends in the midst of a packet just ends, [Merger.Truncated] tells of it. Damage in a file is an error
// with that file's index, io.EOF the end of all.
func (m *Merger) Next(p *Packet) (int, error) {
	if m.taken >= 0 {
		m.advance(m.taken)
		m.taken = -1
	}
	first := -1
	for i, err := range m.errs {
		switch {
		case err == nil:
			if first < 0 || m.heads[i].Time.Before(m.heads[first].Time) {
				first = i
			}
		case !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF):
			return i, err
		}
	}
	if first < 0 {
		return -1, io.EOF
	}
	*p, m.taken = m.heads[first], first
	return first, nil
}

// Truncated reports whether reader i ended in the midst of a packet.
func (m *Merger) Truncated(i int) bool { return errors.Is(m.errs[i], io.ErrUnexpectedEOF) }
