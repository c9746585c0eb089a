package engine

import (
	"bytes"
	"testing"
)

// The check values are those of the catalogue of parametrised CRC algorithms, and of RFC 1071's example.
func TestAlgorithms(t *testing.T) {
	check := []byte("123456789")
	for _, c := range []struct {
		name string
		in   []byte
		want uint64
	}{
		{"crc16", check, 0xbb3d},
		{"crc32", check, 0xcbf43926},
		{"crcCCITT", check, 0x29b1},
		{"csum16", []byte{0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7}, ^uint64(0xddf2) & 0xffff},
		{"csum16", []byte{0x01}, 0xfeff},
		{"csum16", nil, 0xffff},
		{"csum16", bytes.Repeat([]byte{0xff}, 1000), 0},
		{"identity", []byte{1, 2, 3}, 0x010203},
		{"identity", []byte{1, 2, 3, 4, 5, 6, 7, 8, 9}, 0x0102030405060708},
		{"xor16", []byte{0x12, 0x34, 0x11}, 0x0334},
	} {
		if got := algorithms[c.name](c.in); got != c.want {
			t.Errorf("%s of %x: %#x, want %#x", c.name, c.in, got, c.want)
		}
	}
}
