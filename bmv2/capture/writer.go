// Package capture writes frames of any number of interfaces to one pcapng file, each with its direction. A [Writer]
// takes them from whoever has them; a [Capture] reads them from network interfaces.
package capture

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io"
	"os"
	"sync"
	"time"
)

// Direction is a frame's way through its interface.
type Direction uint32

// The directions, as pcapng encodes them.
const (
	In  Direction = 1
	Out Direction = 2
)

// Block types and options of pcapng (draft-ietf-opsawg-pcapng).
const (
	blockSection   = 0x0a0d0d0a
	blockInterface = 1
	blockPacket    = 6

	byteOrderMagic = 0x1a2b3c4d
	linkEthernet   = 1

	optEnd         = 0
	optComment     = 1
	optName        = 2 // of an interface
	optResolution  = 9 // of an interface's times
	optPacketFlags = 2 // of a packet
	nanoseconds    = 9
)

// Writer writes a pcapng file. It may be used by several goroutines.
type Writer struct {
	mu     sync.Mutex
	w      *bufio.Writer
	file   io.Closer // nil if the caller closes
	count  uint32    // of interfaces
	buf    []byte
	err    error
	closed bool
}

// Create makes or truncates a file for a capture.
func Create(name string) (*Writer, error) {
	f, err := os.Create(name)
	if err != nil {
		return nil, fmt.Errorf("create capture: %w", err)
	}
	w := NewWriter(f)
	w.file = f
	return w, nil
}

// NewWriter begins a capture on w, which the caller closes after the Writer.
func NewWriter(w io.Writer) *Writer {
	c := &Writer{w: bufio.NewWriterSize(w, 1<<16)}
	c.block(blockSection, func(b []byte) []byte {
		b = binary.LittleEndian.AppendUint32(b, byteOrderMagic)
		b = binary.LittleEndian.AppendUint32(b, 1)              // version 1.0
		return append(b, "\xff\xff\xff\xff\xff\xff\xff\xff"...) // section length: not known
	})
	return c
}

// block writes a block and keeps the first error.
func (c *Writer) block(kind uint32, body func([]byte) []byte) {
	b := binary.LittleEndian.AppendUint32(c.buf[:0], kind)
	b = binary.LittleEndian.AppendUint32(b, 0)
	b = body(b)
	n := uint32(len(b) + 4)
	binary.LittleEndian.PutUint32(b[4:], n)
	b = binary.LittleEndian.AppendUint32(b, n)
	c.buf = b
	if c.err == nil {
		_, c.err = c.w.Write(b)
	}
}

func option(b []byte, code uint16, value []byte) []byte {
	b = binary.LittleEndian.AppendUint16(b, code)
	b = binary.LittleEndian.AppendUint16(b, uint16(len(value)))
	return pad(append(b, value...), len(value))
}

func pad(b []byte, n int) []byte {
	for ; n%4 != 0; n++ {
		b = append(b, 0)
	}
	return b
}

// AddInterface announces an interface and returns its number for Write. name must be shorter than 64 KiB.
func (c *Writer) AddInterface(name string) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.block(blockInterface, func(b []byte) []byte {
		b = binary.LittleEndian.AppendUint32(b, linkEthernet)
		b = binary.LittleEndian.AppendUint32(b, 0) // no limit to the length of frames
		b = option(b, optName, []byte(name))
		b = option(b, optResolution, []byte{nanoseconds})
		return option(b, optEnd, nil)
	})
	c.count++
	return int(c.count - 1)
}

// Write adds a frame of an interface.
func (c *Writer) Write(iface int, t time.Time, d Direction, frame []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return
	}
	c.block(blockPacket, func(b []byte) []byte {
		ns := uint64(t.UnixNano())
		b = binary.LittleEndian.AppendUint32(b, uint32(iface))
		b = binary.LittleEndian.AppendUint32(b, uint32(ns>>32))
		b = binary.LittleEndian.AppendUint32(b, uint32(ns))
		b = binary.LittleEndian.AppendUint32(b, uint32(len(frame)))
		b = binary.LittleEndian.AppendUint32(b, uint32(len(frame)))
		b = pad(append(b, frame...), len(frame))
		b = option(b, optPacketFlags, binary.LittleEndian.AppendUint32(nil, uint32(d)))
		return option(b, optEnd, nil)
	})
}

// Close writes what is buffered and returns the first error that writing had. It may be called more than once.
func (c *Writer) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil
	}
	c.closed = true
	if err := c.w.Flush(); c.err == nil {
		c.err = err
	}
	if c.file != nil {
		if err := c.file.Close(); c.err == nil {
			c.err = err
		}
	}
	if c.err != nil {
		return fmt.Errorf("write capture: %w", c.err)
	}
	return nil
}
