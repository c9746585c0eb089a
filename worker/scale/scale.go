// Package scale turns float32 values into the integer lanes of the aggregation protocol and back (docs/protocol.md,
// "Scale"): pure functions, without state. A value x becomes round(x * 2^exponent), half to even; the exponent comes
// from the largest magnitude of all workers, with room for their sum and a margin for growth.
package scale

import (
	"encoding/binary"
	"math"
	"math/bits"

	"xagg/wire"
)

// Margin is the number of bits by which the largest magnitude may grow before values are clipped.
const Margin = 3

// MaxExponent bounds exponents to [-MaxExponent, MaxExponent].
const MaxExponent = 126

const (
	absMask = 1<<31 - 1
	infBits = 0x7f800000 // Inf, and beyond it NaN
)

// Amax returns the biased float32 exponent of the largest magnitude in x: |x| < 2^(amax-126) for all of them. It is 0
// only if all values are zero; denormal numbers count as 1. bad is the index of the first NaN or Inf, or -1; amax is 0
// if there is one.
func Amax(x []float32) (amax uint8, bad int) {
	// The bits of magnitudes are ordered like the magnitudes, with Inf and NaN last. Four maxima hide the latency.
	var m0, m1, m2, m3 uint32
	rest := x
	for ; len(rest) >= 4; rest = rest[4:] {
		m0 = max(m0, math.Float32bits(rest[0])&absMask)
		m1 = max(m1, math.Float32bits(rest[1])&absMask)
		m2 = max(m2, math.Float32bits(rest[2])&absMask)
		m3 = max(m3, math.Float32bits(rest[3])&absMask)
	}
	for _, v := range rest {
		m0 = max(m0, math.Float32bits(v)&absMask)
	}
	switch m := max(m0, m1, m2, m3); {
	case m >= infBits:
		for i, v := range x {
			if math.Float32bits(v)&absMask >= infBits {
				return 0, i
			}
		}
	case m != 0:
		amax = uint8(max(m>>23, 1))
	}
	return amax, -1
}

// Exponent returns the exponent for values below 2^(amax-126) of 1..64 ranks. For amax 0, all zero, it is 0.
func Exponent(amax uint8, ranks int) int8 {
	if amax == 0 {
		return 0
	}
	log2 := bits.Len(uint(ranks - 1)) // rounded up
	e := 31 - (int(amax) - 126) - log2 - Margin
	return int8(min(max(e, -MaxExponent), MaxExponent))
}

// Limit returns the largest magnitude of a lane: the sum of as many lanes as there are ranks still fits an int32.
func Limit(ranks int) int32 { return math.MaxInt32 / int32(ranks) }

// roundBias rounds a float64 below 2^51 to an integer, half to even, when it is added: the low bits of the sum's
// mantissa are the integer in two's complement.
const roundBias = 3 << 51

// Encode quantizes the values of src, finite and at most wire.MaxLanes, to lanes of magnitude at most limit, and writes
// them to dst in network order, followed by zeros: dst has room for whole blocks. tag is wire.TagLanes of the lanes.
// What did not fit was clipped; [Clipped] says what it was.
func Encode(dst []byte, src []float32, exponent int8, limit int32) (tag [2]uint32, clipped bool) {
	var lanes [wire.MaxLanes]int32
	factor, hi := math.Ldexp(1, int(exponent)), float64(limit)
	run, out := lanes[:len(src)], dst[:4*len(src)]
	for i, x := range src {
		v := float64(x) * factor // exact
		if math.Abs(v) > hi && math.Abs(math.RoundToEven(v)) > hi {
			v = math.Copysign(hi, v)
			clipped = true
		}
		lane := int32(math.Float64bits(v + roundBias))
		run[i] = lane
		binary.BigEndian.PutUint32(out[4*i:4*i+4], uint32(lane))
	}
	clear(dst[4*len(src):])
	return wire.TagLanes(run), clipped
}

// Clipped calls rest for every value of src that [Encode] clips with the same exponent and limit, with what is missing
// from it.
func Clipped(src []float32, exponent int8, limit int32, rest func(i int, missing float32)) {
	factor, hi := math.Ldexp(1, int(exponent)), float64(limit)
	for i, x := range src {
		if v := float64(x) * factor; math.Abs(v) > hi && math.Abs(math.RoundToEven(v)) > hi {
			rest(i, float32((v-math.Copysign(hi, v))/factor))
		}
	}
}

// EncodeInt32 writes the values of src, at most wire.MaxLanes, to dst in network order, followed by zeros: dst has room
// for whole blocks. tag is wire.TagLanes of them.
func EncodeInt32(dst []byte, src []int32) (tag [2]uint32) {
	for i, v := range src {
		binary.BigEndian.PutUint32(dst[4*i:], uint32(v))
	}
	clear(dst[4*len(src):])
	return wire.TagLanes(src)
}

// DecodeMean is Decode of the mean of the values of so many ranks.
func DecodeMean(dst []float32, lanes []int32, exponent int8, ranks int) {
	factor, n := math.Ldexp(1, -int(exponent)), float64(ranks)
	lanes = lanes[:len(dst)]
	for i, v := range lanes {
		dst[i] = float32(float64(v) / n * factor)
	}
}

// Decode writes the values of summed lanes to dst: lane * 2^-exponent, rounded to float32 once. A sum beyond float32
// becomes Inf, as it does in float32 arithmetic. len(lanes) >= len(dst).
func Decode(dst []float32, lanes []int32, exponent int8) {
	factor := math.Ldexp(1, -int(exponent))
	lanes = lanes[:len(dst)]
	for i, v := range lanes {
		dst[i] = float32(float64(v) * factor)
	}
}
