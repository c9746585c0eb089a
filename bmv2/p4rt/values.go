package p4rt

import (
	"bytes"
	"math/bits"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

func errorf(c codes.Code, format string, args ...any) error { return status.Errorf(c, format, args...) }

func invalid(format string, args ...any) error { return errorf(codes.InvalidArgument, format, args...) }

// padded turns a P4Runtime byte string, canonical or not, into exactly the bytes of a value of width bits.
func padded(b []byte, width int) ([]byte, error) {
	n := (width + 7) / 8
	t := bytes.TrimLeft(b, "\x00")
	if len(t) > n || len(t) == n && n > 0 && len(t) > 0 && 8*(n-1)+bits.Len8(t[0]) > width {
		return nil, invalid("bytestring %x does not fit within %d bits", b, width)
	}
	out := make([]byte, n)
	copy(out[n-len(t):], t)
	return out, nil
}

// canonical is the shortest byte string of a value.
func canonical(b []byte) []byte {
	t := bytes.TrimLeft(b, "\x00")
	if len(t) == 0 {
		return []byte{0}
	}
	return t
}

func allOnes(width int) []byte {
	b := bytes.Repeat([]byte{0xff}, (width+7)/8)
	if r := width % 8; r != 0 {
		b[0] = 0xff >> (8 - r)
	}
	return b
}

func isZero(b []byte) bool { return len(bytes.TrimLeft(b, "\x00")) == 0 }

// zeroBehind reports whether all bits of a width-bit value behind the prefix are zero.
func zeroBehind(v []byte, prefix, width int) bool {
	for i := range width - prefix {
		if v[len(v)-1-i/8]>>(i%8)&1 != 0 {
			return false
		}
	}
	return true
}
