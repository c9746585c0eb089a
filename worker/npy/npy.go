// Package npy reads and writes one-dimensional float32 arrays in NumPy's .npy format, versions 1.0 and 2.0
// (https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html). It is strict: another dtype, shape or byte
// order, a truncated file and bytes after the data are errors.
package npy

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"
)

// Errors that a caller may want to tell apart; what Read returns says more.
var (
	ErrFormat    = errors.New("not a .npy file that can be read")
	ErrDtype     = errors.New("unsupported dtype")
	ErrShape     = errors.New("unsupported shape")
	ErrTruncated = errors.New("file is truncated")
	ErrTrailing  = errors.New("file has bytes after its data")
)

const magic = "\x93NUMPY"

// maxHeader bounds the dictionary's length in bytes. NumPy's own limit is 10,000.
const maxHeader = 1 << 16

// Header says what a file holds.
type Header struct {
	Len    int   // number of float32 values
	Offset int64 // of the first value, in bytes from the file's beginning
}

// CheckSize reports as an error that a file of size bytes does not hold exactly the header and its values.
func (h Header) CheckSize(size int64) error {
	switch want := h.Offset + 4*int64(h.Len); {
	case size < want:
		return fmt.Errorf("%w: %d bytes, its header promises %d", ErrTruncated, size, want)
	case size > want:
		return fmt.Errorf("%w: %d bytes, its header promises %d", ErrTrailing, size, want)
	}
	return nil
}

// ReadHeader reads a file's header from r, and not a byte more.
func ReadHeader(r io.Reader) (Header, error) {
	pre := make([]byte, 12)
	if err := readFull(r, pre[:10]); err != nil {
		return Header{}, err
	}
	if string(pre[:6]) != magic {
		return Header{}, fmt.Errorf("%w: it begins with % x instead of % x", ErrFormat, pre[:6], magic)
	}
	var n, off int
	switch major, minor := pre[6], pre[7]; {
	case major == 1 && minor == 0:
		n, off = int(binary.LittleEndian.Uint16(pre[8:])), 10
	case major == 2 && minor == 0:
		if err := readFull(r, pre[10:]); err != nil {
			return Header{}, err
		}
		n, off = int(binary.LittleEndian.Uint32(pre[8:])), 12
	default:
		return Header{}, fmt.Errorf("%w: format version %d.%d, want 1.0 or 2.0", ErrFormat, major, minor)
	}
	if n > maxHeader {
		return Header{}, fmt.Errorf("%w: header of %d bytes, at most %d are read", ErrFormat, n, maxHeader)
	}
	dict := make([]byte, n)
	if err := readFull(r, dict); err != nil {
		return Header{}, err
	}
	elems, err := parseDict(string(dict))
	if err != nil {
		return Header{}, err
	}
	return Header{Len: elems, Offset: int64(off + n)}, nil
}

// Read reads a whole file from r: its header, its values, and then nothing more may follow.
func Read(r io.Reader) ([]float32, error) {
	h, err := ReadHeader(r)
	if err != nil {
		return nil, err
	}
	// The length is a claim of the file: memory grows with what is there, not with what is claimed.
	var b bytes.Buffer
	if _, err := b.ReadFrom(io.LimitReader(r, 4*int64(h.Len)+1)); err != nil {
		return nil, fmt.Errorf("read values: %w", err)
	}
	if err := h.CheckSize(h.Offset + int64(b.Len())); err != nil {
		if errors.Is(err, ErrTrailing) {
			return nil, fmt.Errorf("%w: its header promises %d values", ErrTrailing, h.Len)
		}
		return nil, err
	}
	v, raw := make([]float32, h.Len), b.Bytes()
	for i := range v {
		v[i] = math.Float32frombits(binary.LittleEndian.Uint32(raw[4*i:]))
	}
	return v, nil
}

// Append appends a file of version 1.0 that holds v to b, as NumPy writes it.
func Append(b []byte, v []float32) []byte {
	dict := fmt.Sprintf("{'descr': '<f4', 'fortran_order': False, 'shape': (%d,), }", len(v))
	// Spaces and a newline bring the values to a multiple of 64 bytes.
	pad := 63 - (len(magic)+4+len(dict))%64
	b = append(b, magic...)
	b = append(b, 1, 0)
	b = binary.LittleEndian.AppendUint16(b, uint16(len(dict)+pad+1))
	b = append(b, dict...)
	b = append(b, strings.Repeat(" ", pad)...)
	b = append(b, '\n')
	for _, x := range v {
		b = binary.LittleEndian.AppendUint32(b, math.Float32bits(x))
	}
	return b
}

func readFull(r io.Reader, b []byte) error {
	switch _, err := io.ReadFull(r, b); {
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return fmt.Errorf("%w: it ends inside its header", ErrTruncated)
	case err != nil:
		return fmt.Errorf("read header: %w", err)
	}
	return nil
}

// parseDict reads the header's Python dictionary, which must have exactly the keys descr, fortran_order and shape,
// and returns the number of values.
func parseDict(s string) (elems int, err error) {
	p := parser{rest: s}
	seen := map[string]bool{}
	p.want("{")
	for p.err == nil && !p.take("}") {
		key := p.str()
		p.want(":")
		if p.err == nil && seen[key] {
			p.fail("key %q twice", key)
		}
		seen[key] = true
		switch key {
		case "descr":
			p.descr()
		case "fortran_order": // a vector is the same in both orders
			if !p.take("True") && !p.take("False") {
				p.fail("fortran_order is neither True nor False")
			}
		case "shape":
			elems = p.shape()
		default:
			p.fail("unknown key %q", key)
		}
		if !p.take(",") {
			p.want("}")
			break
		}
	}
	p.space()
	if p.err == nil && p.rest != "" {
		p.fail("%q after the dictionary", p.rest)
	}
	for _, key := range []string{"descr", "fortran_order", "shape"} {
		if p.err == nil && !seen[key] {
			p.fail("no key %q", key)
		}
	}
	return elems, p.err
}

// parser consumes a string from its front; after the first error it does nothing any more.
type parser struct {
	rest string
	err  error
}

func (p *parser) fail(format string, args ...any) {
	if p.err == nil {
		p.err = fmt.Errorf("%w: header: %s", ErrFormat, fmt.Sprintf(format, args...))
	}
}

func (p *parser) space() { p.rest = strings.TrimLeft(p.rest, " \t\n\r") }

func (p *parser) take(tok string) bool {
	if p.err != nil {
		return false
	}
	p.space()
	rest, ok := strings.CutPrefix(p.rest, tok)
	if ok {
		p.rest = rest
	}
	return ok
}

func (p *parser) want(tok string) {
	if p.err == nil && !p.take(tok) {
		p.fail("want %q before %.20q", tok, p.rest)
	}
}

// str reads a string in single or double quotes, without escapes.
func (p *parser) str() string {
	quote := "'"
	if p.take(`"`) {
		quote = `"`
	} else {
		p.want("'")
	}
	s, rest, ok := strings.Cut(p.rest, quote)
	if !ok || strings.ContainsRune(s, '\\') {
		p.fail("want a plain string before %.20q", p.rest)
		return ""
	}
	p.rest = rest
	return s
}

func (p *parser) descr() {
	if p.take("[") {
		p.err = fmt.Errorf("%w: a record, want '<f4' (little-endian float32)", ErrDtype)
		return
	}
	if d := p.str(); p.err == nil && d != "<f4" {
		p.err = fmt.Errorf("%w: %q, want '<f4' (little-endian float32)", ErrDtype, d)
	}
}

// shape reads a tuple of one number.
func (p *parser) shape() int {
	p.want("(")
	text := p.rest
	var dims []int
	for p.err == nil && !p.take(")") {
		p.space()
		i := 0
		for i < len(p.rest) && '0' <= p.rest[i] && p.rest[i] <= '9' {
			i++
		}
		n, err := strconv.ParseInt(p.rest[:i], 10, 48)
		if err != nil {
			p.fail("want a length in the shape before %.20q", p.rest)
			return 0
		}
		p.rest = p.rest[i:]
		dims = append(dims, int(n))
		if !p.take(",") {
			if len(dims) == 1 { // (7) is a number, not a tuple
				p.want(",")
			}
			p.want(")")
			break
		}
	}
	if p.err == nil && len(dims) != 1 {
		p.err = fmt.Errorf("%w: (%s has %d dimensions, want one", ErrShape, text[:len(text)-len(p.rest)], len(dims))
	}
	if p.err != nil {
		return 0
	}
	return dims[0]
}
