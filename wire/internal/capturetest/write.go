// Package capturetest writes capture files for tests, with what package capture reads.
package capturetest

import (
	"encoding/binary"
	"time"

	"xagg/wire/capture"
)

// Packet is an Ethernet frame to be written.
type Packet struct {
	Time  time.Time
	Frame []byte
	Cut   int // captured length, 0 = all
}

// Links are the link types that Pcap and Pcapng can give to frames.
var Links = []capture.LinkType{capture.LinkEthernet, capture.LinkLinuxSLL, capture.LinkLinuxSLL2}

// Dress returns the frame with the link's header in place of the Ethernet header.
func Dress(link capture.LinkType, frame []byte) []byte {
	etherType, source, rest := frame[12:14], frame[6:12], frame[14:]
	var h []byte
	switch link {
	case capture.LinkLinuxSLL:
		h = append([]byte{0, 0, 0, 1, 0, 6}, source...)
		h = append(h, 0, 0)
		h = append(h, etherType...)
	case capture.LinkLinuxSLL2:
		h = append(h, etherType...)
		h = append(h, 0, 0, 0, 0, 0, 7, 0, 1, 4, 6)
		h = append(h, source...)
		h = append(h, 0, 0)
	default:
		return frame
	}
	return append(h, rest...)
}

// Order is a byte order that can append.
type Order interface {
	binary.ByteOrder
	binary.AppendByteOrder
}

// Pcap returns a classic capture file, with nanoseconds or else microseconds.
func Pcap(order Order, nanos bool, link capture.LinkType, packets []Packet) []byte {
	magic, unit := uint32(0xa1b2c3d4), int64(1000)
	if nanos {
		magic, unit = 0xa1b23c4d, 1
	}
	b := order.AppendUint32(nil, magic)
	b = order.AppendUint16(b, 2)
	b = order.AppendUint16(b, 4)
	b = append(b, make([]byte, 8)...)
	b = order.AppendUint32(b, 65536)
	b = order.AppendUint32(b, uint32(link))
	for _, p := range packets {
		data, captured := captured(link, p)
		b = order.AppendUint32(b, uint32(p.Time.Unix()))
		b = order.AppendUint32(b, uint32(int64(p.Time.Nanosecond())/unit))
		b = order.AppendUint32(b, uint32(captured))
		b = order.AppendUint32(b, uint32(len(data)))
		b = append(b, data[:captured]...)
	}
	return b
}

// Pcapng returns a file of one section with two interfaces, of which the second has the packets, in nanoseconds.
func Pcapng(order Order, link capture.LinkType, packets []Packet) []byte {
	b := Section(order)
	b = append(b, Interface(order, 147, nil)...)
	b = append(b, Interface(order, link, []byte{9})...)
	for _, p := range packets {
		data, captured := captured(link, p)
		ns := uint64(p.Time.UnixNano())
		body := order.AppendUint32(nil, 1)
		body = order.AppendUint32(body, uint32(ns>>32))
		body = order.AppendUint32(body, uint32(ns))
		body = order.AppendUint32(body, uint32(captured))
		body = order.AppendUint32(body, uint32(len(data)))
		body = pad(append(body, data[:captured]...))
		body = order.AppendUint16(body, 1) // a comment
		body = order.AppendUint16(body, 2)
		body = append(body, 'h', 'i', 0, 0, 0, 0, 0, 0)
		b = append(b, Block(order, 6, body)...)
	}
	return b
}

// Section returns a pcapng section header of unknown length.
func Section(order Order) []byte {
	body := order.AppendUint32(nil, 0x1a2b3c4d)
	body = order.AppendUint16(body, 1)
	body = order.AppendUint16(body, 0)
	body = order.AppendUint64(body, 1<<64-1)
	return Block(order, 0x0a0d0d0a, body)
}

// Interface returns a pcapng interface description; resolution is the value of the option if_tsresol, if not nil.
func Interface(order Order, link capture.LinkType, resolution []byte) []byte {
	body := order.AppendUint16(nil, uint16(link))
	body = order.AppendUint16(body, 0)
	body = order.AppendUint32(body, 0)
	if resolution != nil {
		body = order.AppendUint16(body, 9)
		body = order.AppendUint16(body, uint16(len(resolution)))
		body = pad(append(body, resolution...))
		body = order.AppendUint32(body, 0)
	}
	return Block(order, 1, body)
}

// Block returns a pcapng block.
func Block(order Order, typ uint32, body []byte) []byte {
	body = pad(body)
	b := order.AppendUint32(nil, typ)
	b = order.AppendUint32(b, uint32(len(body)+12))
	b = append(b, body...)
	return order.AppendUint32(b, uint32(len(body)+12))
}

func pad(b []byte) []byte { return append(b, make([]byte, -len(b)&3)...) }

func captured(link capture.LinkType, p Packet) (data []byte, n int) {
	data = Dress(link, p.Frame)
	if n = len(data); p.Cut > 0 {
		n = min(n, p.Cut)
	}
	return data, n
}
