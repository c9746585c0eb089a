package engine

import (
	"math/big"
	"math/bits"
)

// Wide values are little-endian slices of 64-bit words, two's complement modulo 2^(64*len). In every function below
// the operands have the length of dst, and dst may be one of them.

func addWords(dst, a, b []uint64) {
	a, b = a[:len(dst)], b[:len(dst)]
	var c uint64
	for i := range dst {
		dst[i], c = bits.Add64(a[i], b[i], c)
	}
}

func subWords(dst, a, b []uint64) {
	a, b = a[:len(dst)], b[:len(dst)]
	var c uint64
	for i := range dst {
		dst[i], c = bits.Sub64(a[i], b[i], c)
	}
}

func andWords(dst, a, b []uint64) {
	a, b = a[:len(dst)], b[:len(dst)]
	for i := range dst {
		dst[i] = a[i] & b[i]
	}
}

func orWords(dst, a, b []uint64) {
	a, b = a[:len(dst)], b[:len(dst)]
	for i := range dst {
		dst[i] = a[i] | b[i]
	}
}

func xorWords(dst, a, b []uint64) {
	a, b = a[:len(dst)], b[:len(dst)]
	for i := range dst {
		dst[i] = a[i] ^ b[i]
	}
}

func notWords(dst, a []uint64) {
	a = a[:len(dst)]
	for i := range dst {
		dst[i] = ^a[i]
	}
}

// mulWords is the schoolbook product; dst must not be an operand.
func mulWords(dst, a, b []uint64) {
	clear(dst)
	n := len(dst)
	for i := 0; i < n; i++ {
		if a[i] == 0 {
			continue
		}
		var carry uint64
		for j := 0; i+j < n; j++ {
			hi, lo := bits.Mul64(a[i], b[j])
			var c uint64
			lo, c = bits.Add64(lo, dst[i+j], 0)
			hi += c
			lo, c = bits.Add64(lo, carry, 0)
			hi += c
			dst[i+j], carry = lo, hi
		}
	}
}

// shlWords sets dst = a << n, with zeros moving in.
func shlWords(dst, a []uint64, n uint) {
	a = a[:len(dst)]
	w, s := int(n/64), n%64
	for i := len(dst) - 1; i >= 0; i-- {
		var v uint64
		if i >= w {
			v = a[i-w] << s
			if s != 0 && i > w {
				v |= a[i-w-1] >> (64 - s)
			}
		}
		dst[i] = v
	}
}

// shrWords sets dst = a >> n, with fill (0 or all ones) moving in. a may be longer than dst.
func shrWords(dst, a []uint64, n uint, fill uint64) {
	w, s := int(n/64), n%64
	at := func(i int) uint64 {
		if i < len(a) {
			return a[i]
		}
		return fill
	}
	for i := range dst {
		v := at(i+w) >> s
		if s != 0 {
			v |= at(i+w+1) << (64 - s)
		}
		dst[i] = v
	}
}

// cmpWords compares two's complement values of one length: -1, 0 or 1.
func cmpWords(a, b []uint64) int {
	b = b[:len(a)]
	i := len(a) - 1
	if a[i] != b[i] {
		if int64(a[i]) < int64(b[i]) {
			return -1
		}
		return 1
	}
	for i--; i >= 0; i-- {
		if a[i] != b[i] {
			if a[i] < b[i] {
				return -1
			}
			return 1
		}
	}
	return 0
}

// bigToWords returns v modulo 2^(64*n) in two's complement.
func bigToWords(v *big.Int, n int) []uint64 {
	m := new(big.Int).Lsh(big.NewInt(1), uint(64*n))
	r := new(big.Int).Mod(v, m) // Euclidean: never negative
	out := make([]uint64, n)
	b := r.FillBytes(make([]byte, 8*n))
	loadWords(out, b, 0, uint(64*n))
	return out
}

// wordsToBig returns the value of a two's complement slice, or of an unsigned one.
func wordsToBig(w []uint64, signed bool) *big.Int {
	b := make([]byte, 8*len(w))
	storeWords(b, 0, uint(64*len(w)), w)
	v := new(big.Int).SetBytes(b)
	if signed && w[len(w)-1]>>63 != 0 {
		v.Sub(v, new(big.Int).Lsh(big.NewInt(1), uint(64*len(w))))
	}
	return v
}

// numWords is the number of 64-bit words that hold n bits.
func numWords(n int) int { return (n + 63) / 64 }

// lowMask has the low n bits set, 0 <= n; n >= 64 sets all.
func lowMask(n int) uint64 {
	if n >= 64 {
		return ^uint64(0)
	}
	return 1<<uint(n) - 1
}

// maskTop clears the bits of the top word that lie beyond width.
func maskTop(w []uint64, width int) {
	if r := width % 64; r != 0 {
		w[len(w)-1] &= lowMask(r)
	}
}
