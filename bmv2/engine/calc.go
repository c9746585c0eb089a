package engine

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"math/bits"
)

// calculation is a named calculation: a list of inputs that is laid out as bytes, and an algorithm over them.
type calculation struct {
	inputs  []calcInput
	payload bool // the packet behind the parsed headers follows
	sum     func([]byte) uint64
}

type calcInput struct {
	f     *field
	h     *header
	k     []uint64 // constant
	width int      // of the constant
}

var algorithms = map[string]func([]byte) uint64{
	"csum16":   checksum16,
	"cksum16":  checksum16,
	"crc16":    crc16,
	"crc32":    func(b []byte) uint64 { return uint64(crc32.ChecksumIEEE(b)) },
	"crcCCITT": crcCCITT,
	"identity": identity,
	"xor16":    xor16,
}

func (c *compiler) loadCalculations(j *jsonProgram) error {
	for _, jc := range j.Calculations {
		calc := &calculation{sum: algorithms[jc.Algo]}
		if calc.sum == nil {
			return fmt.Errorf("calculation %s: algorithm %q is not supported", jc.Name, jc.Algo)
		}
		bit := 0
		for i := range jc.Input {
			in := &jc.Input[i]
			switch in.Type {
			case "payload":
				calc.payload = true
				continue
			case "field":
				f, err := c.fieldRef(in.Value)
				if err != nil {
					return fmt.Errorf("calculation %s: %w", jc.Name, err)
				}
				calc.inputs = append(calc.inputs, calcInput{f: f})
				bit += f.width
			case "header":
				h, err := c.headerRef(in.Value)
				if err != nil {
					return fmt.Errorf("calculation %s: %w", jc.Name, err)
				}
				if bit%8 != 0 {
					return fmt.Errorf("calculation %s: header %s does not start at a byte", jc.Name, h.name)
				}
				calc.inputs = append(calc.inputs, calcInput{h: h})
			case "hexstr":
				n, err := c.value(in, nil)
				if err != nil {
					return fmt.Errorf("calculation %s: %w", jc.Name, err)
				}
				if in.Bitwidth < 1 || in.Bitwidth > maxFieldBits {
					return fmt.Errorf("calculation %s: constant of %d bits", jc.Name, in.Bitwidth)
				}
				calc.inputs = append(calc.inputs, calcInput{k: bigToWords(n.k, numWords(in.Bitwidth)), width: in.Bitwidth})
				bit += in.Bitwidth
			default:
				return fmt.Errorf("calculation %s: input type %q is not supported", jc.Name, in.Type)
			}
		}
		if c.calcs[jc.Name] != nil {
			return fmt.Errorf("calculation %s: defined twice", jc.Name)
		}
		c.calcs[jc.Name] = calc
	}
	return nil
}

// output builds the input and runs the algorithm. Fields and headers that are not valid are left out; a last byte
// that is not full is filled with zero bits.
func (c *calculation) output(m *machine) uint64 {
	buf, bit := m.calc[:0], uint(0)
	grow := func(width int) {
		n := int(bit+uint(width)+7) / 8
		for len(buf) < n {
			if cap(buf) >= n {
				old := len(buf)
				buf = buf[:n]
				clear(buf[old:])
			} else {
				buf = append(buf, 0)
			}
		}
	}
	for i := range c.inputs {
		in := &c.inputs[i]
		switch {
		case in.f != nil:
			if !in.f.hdr.isValid(m.phv) {
				continue
			}
			grow(in.f.width)
			in.f.store(m.phv, buf, bit)
			bit += uint(in.f.width)
		case in.h != nil:
			if !in.h.isValid(m.phv) {
				continue
			}
			// Invalid fields before it may have left a header in the middle of a byte; bmv2 gives up there.
			bit = (bit + 7) &^ 7
			grow(8 * in.h.nbytes)
			in.h.deparse(m.phv, buf[bit/8:])
			bit += uint(8 * in.h.nbytes)
		default:
			grow(in.width)
			storeWords(buf, bit, uint(in.width), in.k)
			bit += uint(in.width)
		}
	}
	if c.payload {
		buf = append(buf, m.data...)
	}
	m.calc = buf
	return c.sum(buf)
}

// checksum16 is the Internet checksum (RFC 1071).
func checksum16(b []byte) uint64 {
	var sum, carry uint64
	for len(b) >= 8 {
		sum, carry = bits.Add64(sum, binary.BigEndian.Uint64(b), carry)
		b = b[8:]
	}
	var tail [8]byte
	copy(tail[:], b)
	sum, carry = bits.Add64(sum, binary.BigEndian.Uint64(tail[:]), carry)
	sum, carry = bits.Add64(sum, 0, carry)
	sum += carry
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return uint64(^uint16(sum))
}

// crc16 is CRC-16/ARC: polynomial 0x8005, reflected, initial value 0.
func crc16(b []byte) uint64 {
	var r uint16
	for _, v := range b {
		r ^= uint16(v)
		for range 8 {
			if r&1 != 0 {
				r = r>>1 ^ 0xa001
			} else {
				r >>= 1
			}
		}
	}
	return uint64(r)
}

// crcCCITT is CRC-16/CCITT-FALSE: polynomial 0x1021, initial value 0xffff.
func crcCCITT(b []byte) uint64 {
	r := uint16(0xffff)
	for _, v := range b {
		r ^= uint16(v) << 8
		for range 8 {
			if r&0x8000 != 0 {
				r = r<<1 ^ 0x1021
			} else {
				r <<= 1
			}
		}
	}
	return uint64(r)
}

// identity is the first eight bytes as a number.
func identity(b []byte) uint64 {
	var v uint64
	for _, x := range b[:min(8, len(b))] {
		v = v<<8 | uint64(x)
	}
	return v
}

// xor16 is the exclusive or of 16-bit words, the last one filled with zeros.
func xor16(b []byte) uint64 {
	var v uint16
	for ; len(b) >= 2; b = b[2:] {
		v ^= binary.BigEndian.Uint16(b)
	}
	if len(b) == 1 {
		v ^= uint16(b[0]) << 8
	}
	return uint64(v)
}
