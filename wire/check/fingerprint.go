package check

import (
	"math/bits"

	"xagg/wire"
)

// q is the modulus of the fingerprints, the Mersenne prime 2^61-1.
const q = 1<<61 - 1

// hasher takes linear fingerprints of lanes: the sum of c[i] * lanes[i] mod q with coefficients drawn anew for each
// capture. The fingerprint of a sum is the sum of the fingerprints, and two different vectors have the same one with a
// probability of 1 in 2^61, whoever chose them. So 8 bytes stand for a contribution of a kilobyte, and sums can be
// checked in any order.
type hasher struct {
	c       [wire.MaxLanes]uint64
	inverse [wire.MaxLanes]uint64 // of c, filled when the first difference has to be explained
	offset  [wire.MaxLanes + 1]uint64
}

// newHasher draws the coefficients, uniform in [1, q), by random(n) uniform in [0, n).
func newHasher(random func(n uint64) uint64) *hasher {
	h := new(hasher)
	for i := range h.c {
		h.c[i] = 1 + random(q-1)
		h.offset[i+1] = add(h.offset[i], mul(h.c[i], 1<<31))
	}
	return h
}

// sum returns the fingerprint of the lanes, in [0, q).
func (h *hasher) sum(lanes []int32) uint64 {
	// With 2^31 added to each lane all products are positive and below 2^93: 256 of them fit 128 bits.
	var hi, lo uint64
	c := h.c[:len(lanes)]
	for i, v := range lanes {
		phi, plo := bits.Mul64(c[i], uint64(uint32(v)^1<<31))
		var carry uint64
		lo, carry = bits.Add64(lo, plo, 0)
		hi += phi + carry
	}
	return sub(reduce(hi, lo), h.offset[len(lanes)])
}

// single returns the lane and its change that explain the difference of two fingerprints, if one lane of n alone does.
func (h *hasher) single(difference uint64, n int) (lane int, change int64, ok bool) {
	if h.inverse[0] == 0 {
		for i, c := range h.c {
			h.inverse[i] = power(c, q-2)
		}
	}
	const most = 1 << 34 // a changed lane is below it, and so is one that overflowed a few times
	for i := range n {
		d := mul(difference, h.inverse[i])
		switch {
		case d < most:
			return i, int64(d), true
		case q-d < most:
			return i, -int64(q - d), true
		}
	}
	return 0, 0, false
}

// reduce returns hi * 2^64 + lo mod q, for hi < 2^58.
func reduce(hi, lo uint64) uint64 {
	s := lo&q + (hi<<3 | lo>>61)
	s = s&q + s>>61
	if s >= q {
		s -= q
	}
	return s
}

func add(a, b uint64) uint64 { return reduce(0, a+b) }

func sub(a, b uint64) uint64 { return reduce(0, a+q-b) }

func mul(a, b uint64) uint64 {
	hi, lo := bits.Mul64(a, b)
	return reduce(hi, lo)
}

func power(a, n uint64) uint64 {
	r := uint64(1)
	for ; n > 0; n >>= 1 {
		if n&1 != 0 {
			r = mul(r, a)
		}
		a = mul(a, a)
	}
	return r
}
