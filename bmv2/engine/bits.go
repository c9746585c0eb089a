package engine

import "encoding/binary"

// loadBits returns the width bits (1..64) at bit offset off of b, most significant bit first.
func loadBits(b []byte, off, width uint) uint64 {
	i := off / 8
	s := off % 8
	if s+width <= 64 && int(i)+8 <= len(b) {
		return binary.BigEndian.Uint64(b[i:]) << s >> (64 - width)
	}
	// Near the end of b, or nine bytes.
	var v uint64
	last := (off + width - 1) / 8
	v = uint64(b[i]) & (0xff >> s)
	for j := i + 1; j < last; j++ {
		v = v<<8 | uint64(b[j])
	}
	tail := 7 - (off+width-1)%8 // bits of the last byte that are not ours
	if last == i {
		return v >> tail
	}
	return v<<(8-tail) | uint64(b[last])>>tail
}

// storeBits writes the low width bits (1..64) of v at bit offset off of b and leaves the other bits alone.
func storeBits(b []byte, off, width uint, v uint64) {
	if off%8 == 0 {
		p := b[off/8:]
		switch width {
		case 8:
			p[0] = byte(v)
			return
		case 16:
			binary.BigEndian.PutUint16(p, uint16(v))
			return
		case 32:
			binary.BigEndian.PutUint32(p, uint32(v))
			return
		case 48:
			binary.BigEndian.PutUint16(p, uint16(v>>32))
			binary.BigEndian.PutUint32(p[2:], uint32(v))
			return
		case 64:
			binary.BigEndian.PutUint64(p, v)
			return
		}
	}
	for width > 0 {
		i, s := off/8, off%8
		n := min(8-s, width)
		m := byte(lowMask(int(n))) << (8 - s - n)
		b[i] = b[i]&^m | byte(v>>(width-n))<<(8-s-n)&m
		off += n
		width -= n
	}
}

// loadWords fills dst with the width bits at bit offset off of b; bits of dst beyond width become zero.
func loadWords(dst []uint64, b []byte, off, width uint) {
	end := off + width
	if off%8 == 0 && width%64 == 0 {
		p := b[off/8 : end/8]
		for i := range dst[:width/64] {
			dst[i] = binary.BigEndian.Uint64(p[len(p)-8*i-8:])
		}
		clear(dst[width/64:])
		return
	}
	for i := range dst {
		n := min(width, 64)
		if n == 0 {
			dst[i] = 0
			continue
		}
		dst[i] = loadBits(b, end-n, n)
		end -= n
		width -= n
	}
}

// storeWords writes the low width bits of src at bit offset off of b and leaves the other bits alone.
func storeWords(b []byte, off, width uint, src []uint64) {
	end := off + width
	if off%8 == 0 && width%64 == 0 {
		p := b[off/8 : end/8]
		for i := range src[:width/64] {
			binary.BigEndian.PutUint64(p[len(p)-8*i-8:], src[i])
		}
		return
	}
	for _, v := range src {
		n := min(width, 64)
		if n == 0 {
			return
		}
		storeBits(b, end-n, n, v)
		end -= n
		width -= n
	}
}
