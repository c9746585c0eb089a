package scale_test

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/big"
	"math/rand/v2"
	"testing"

	"github.com/google/go-cmp/cmp"

	"xagg/wire"
	"xagg/worker/scale"
)

const (
	denormMin = math.SmallestNonzeroFloat32
	maxFloat  = math.MaxFloat32
)

var inf, nan = float32(math.Inf(1)), float32(math.NaN())

func TestAmax(t *testing.T) {
	negZero := float32(math.Copysign(0, -1))
	for _, c := range []struct {
		x    []float32
		amax uint8
		bad  int
	}{
		{nil, 0, -1},
		{[]float32{0, negZero, 0, 0, negZero}, 0, -1},
		{[]float32{denormMin}, 1, -1},
		{[]float32{-denormMin, 0, 0, 0, 0, 0}, 1, -1},
		{[]float32{0x1p-127}, 1, -1},
		{[]float32{0x1p-126}, 1, -1}, // the smallest normal number
		{[]float32{0x1p-125}, 2, -1},
		{[]float32{1}, 127, -1},
		{[]float32{0, 0, 0, 0, 0, 0, -1.9999999}, 127, -1},
		{[]float32{2, 1, 1}, 128, -1},
		{[]float32{1, -2}, 128, -1},
		{[]float32{1, 1, -2}, 128, -1},
		{[]float32{1, 1, 1, 2}, 128, -1},
		{[]float32{1, 1, 1, 1, 2}, 128, -1},
		{[]float32{maxFloat}, 254, -1},
		{[]float32{-maxFloat, 1}, 254, -1},
		{[]float32{inf}, 0, 0},
		{[]float32{1, 2, 3, 4, 5, -inf, nan}, 0, 5},
		{[]float32{1, nan}, 0, 1},
		{[]float32{1, 2, 3, float32(math.Copysign(math.NaN(), -1))}, 0, 3},
	} {
		if amax, bad := scale.Amax(c.x); amax != c.amax || bad != c.bad {
			t.Errorf("Amax(%v) = %d, %d; want %d, %d", c.x, amax, bad, c.amax, c.bad)
		}
	}
}

// TestExponent checks what an exponent is for, at every amax and number of ranks: no value that amax allows is clipped,
// with Margin bits to spare, and that no larger exponent would do (unless the bound of exponents is reached).
func TestExponent(t *testing.T) {
	if e := scale.Exponent(0, 4); e != 0 {
		t.Errorf("exponent of zeros is %d, want 0", e)
	}
	for ranks := 1; ranks <= wire.MaxRanks; ranks++ {
		pow2 := math.Pow(2, math.Ceil(math.Log2(float64(ranks))))
		for amax := 1; amax <= 254; amax++ {
			e := scale.Exponent(uint8(amax), ranks)
			top := math.Ldexp(1, amax-126+scale.Margin) // values, margin included, are below it
			if sum := math.Ldexp(top*pow2, int(e)); sum > 1<<31 || sum < 1<<31 && e != scale.MaxExponent {
				t.Fatalf("amax %d, %d ranks: exponent %d lets sums reach %g", amax, ranks, e, sum)
			}
			if e < -scale.MaxExponent || e > scale.MaxExponent {
				t.Fatalf("amax %d, %d ranks: exponent %d", amax, ranks, e)
			}
		}
	}
	// The example of the protocol's formula: 31 - (127-126) - 2 - 3.
	if e := scale.Exponent(127, 4); e != 25 {
		t.Errorf("exponent of values below 2, 4 ranks, is %d, want 25", e)
	}
}

func TestLimit(t *testing.T) {
	for ranks := 1; ranks <= wire.MaxRanks; ranks++ {
		l := int64(scale.Limit(ranks))
		if l*int64(ranks) > math.MaxInt32 || (l+1)*int64(ranks) <= math.MaxInt32 {
			t.Errorf("limit of %d ranks is %d", ranks, l)
		}
	}
}

type clip struct {
	I    int
	Rest float32
}

// encode runs Encode on one packet's lanes and returns the lanes; it checks the tag and the zeros behind.
func encode(t testing.TB, src []float32, exponent int8, limit int32) (lanes []int32, clips []clip) {
	t.Helper()
	dst := make([]byte, int(wire.BlocksFor(len(src)))*wire.BlockLen)
	for i := range dst {
		dst[i] = 0xaa
	}
	tag, clipped := scale.Encode(dst, src, exponent, limit)
	scale.Clipped(src, exponent, limit, func(i int, rest float32) { clips = append(clips, clip{i, rest}) })
	if clipped != (clips != nil) {
		t.Fatalf("values were clipped: %v, but these are: %v", clipped, clips)
	}
	lanes = make([]int32, len(src))
	for i := range lanes {
		lanes[i] = int32(binary.BigEndian.Uint32(dst[4*i:]))
	}
	for _, b := range dst[4*len(src):] {
		if b != 0 {
			t.Fatalf("lanes beyond the %d values are not zero", len(src))
		}
	}
	if want := wire.TagLanes(lanes); tag != want {
		t.Fatalf("tag %v of %d lanes, want %v", tag, len(src), want)
	}
	return lanes, clips
}

func TestEncodeRounding(t *testing.T) {
	negZero := float32(math.Copysign(0, -1))
	for _, c := range []struct {
		x        float32
		exponent int8
		lane     int32
	}{
		{0, 0, 0}, {negZero, 0, 0}, {negZero, 126, 0},
		{0.5, 0, 0}, {1.5, 0, 2}, {2.5, 0, 2}, {3.5, 0, 4}, {-0.5, 0, 0}, {-1.5, 0, -2}, {-2.5, 0, -2}, {-3.5, 0, -4},
		{0.49999997, 0, 0}, {0.50000006, 0, 1}, {-0.49999997, 0, 0}, {-0.50000006, 0, -1},
		{1, 25, 1 << 25}, {-1, 25, -1 << 25}, {1, -1, 0}, {3, -1, 2}, {5, -1, 2}, {1 << 30, 0, 1 << 30},
		{denormMin, 126, 0}, {0x1p-126, 126, 1}, {0x1p-127, 126, 0}, {0x1.8p-126, 126, 2}, {-0x1.8p-126, 126, -2},
		{maxFloat, -98, 1<<30 - 1<<6}, {-maxFloat, -98, -1<<30 + 1<<6}, {maxFloat, -126, 4},
		{16777215, 6, 16777215 << 6},
	} {
		lanes, clips := encode(t, []float32{c.x}, c.exponent, scale.Limit(1))
		if lanes[0] != c.lane || clips != nil {
			t.Errorf("%g * 2^%d = %d with clips %v, want %d", c.x, c.exponent, lanes[0], clips, c.lane)
		}
	}
}

func TestEncodeClipping(t *testing.T) {
	for _, c := range []struct {
		name     string
		x        float32
		exponent int8
		limit    int32
		lane     int32
		rest     []clip
	}{
		{"at the limit", 100, 0, 100, 100, nil},
		{"at the lower limit", -100, 0, 100, -100, nil},
		{"rounds to the even limit", 100.5, 0, 100, 100, nil},
		{"rounds to the even lower limit", -100.5, 0, 100, -100, nil},
		{"rounds beyond the odd limit", 101.5, 0, 101, 101, []clip{{0, 0.5}}},
		{"rounds beyond the odd lower limit", -101.5, 0, 101, -101, []clip{{0, -0.5}}},
		{"above", 103, 0, 100, 100, []clip{{0, 3}}},
		{"below", -103, 0, 100, -100, []clip{{0, -3}}},
		{"rest in the value's units", 103, 1, 100, 100, []clip{{0, 53}}},
		{"rest with a negative exponent", 1030, -3, 100, 100, []clip{{0, 230}}},
		{"largest value, largest exponent", maxFloat, 126, 1 << 24, 1 << 24, []clip{{0, maxFloat}}},
		{"lowest value, largest exponent", -maxFloat, 126, 1 << 24, -1 << 24, []clip{{0, -maxFloat}}},
		{"one rank's limit", 1 << 31, 0, math.MaxInt32, math.MaxInt32, []clip{{0, 1}}},
		{"one rank's lower limit", -1 << 31, 0, math.MaxInt32, -math.MaxInt32, []clip{{0, -1}}},
	} {
		lanes, clips := encode(t, []float32{c.x}, c.exponent, c.limit)
		if lanes[0] != c.lane || !cmp.Equal(clips, c.rest) {
			t.Errorf("%s: %g is lane %d, rest %v; want %d, %v", c.name, c.x, lanes[0], clips, c.lane, c.rest)
		}
	}
}

// TestEncodeLengths encodes vectors of every length that a packet can have, with clipped values in random places, and
// compares with arithmetic on big numbers.
func TestEncodeLengths(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for n := range wire.MaxLanes + 1 {
		exponent := int8(r.IntN(2*scale.MaxExponent+1) - scale.MaxExponent)
		limit := scale.Limit(1 + r.IntN(wire.MaxRanks))
		src := make([]float32, n)
		for i := range src {
			// From far below one lane to a few binades beyond the limit.
			src[i] = float32(math.Ldexp(r.NormFloat64(), r.IntN(36)-4-int(exponent)))
			if math.IsInf(float64(src[i]), 0) {
				src[i] = maxFloat
			}
		}
		lanes, clips := encode(t, src, exponent, limit)
		var want []int32
		var wantClips []clip
		for i, x := range src {
			lane, rest := exactLane(x, exponent, limit)
			want = append(want, lane)
			if rest != nil {
				wantClips = append(wantClips, clip{i, *rest})
			}
		}
		if n > 0 && !cmp.Equal(lanes, want) {
			t.Fatalf("%d values, exponent %d: lanes differ (-want +got):\n%s", n, exponent, cmp.Diff(want, lanes))
		}
		if !cmp.Equal(clips, wantClips) {
			t.Fatalf("%d values, exponent %d: clips differ (-want +got):\n%s", n, exponent, cmp.Diff(wantClips, clips))
		}
	}
}

// exactLane is the rule in arbitrary precision.
func exactLane(x float32, exponent int8, limit int32) (lane int32, rest *float32) {
	v := new(big.Rat).SetFloat64(float64(x))
	unit := new(big.Rat).SetFloat64(math.Ldexp(1, int(exponent)))
	v.Mul(v, unit)
	// floor(v + 1/2), one less when that was a tie that went to an odd number
	half := big.NewRat(1, 2)
	up := new(big.Rat).Add(v, half)
	q := new(big.Int).Div(up.Num(), up.Denom()) // Euclidean: floor for a positive divisor
	if up.IsInt() && q.Bit(0) == 1 {
		q.Sub(q, big.NewInt(1))
	}
	if q.CmpAbs(big.NewInt(int64(limit))) <= 0 {
		return int32(q.Int64()), nil
	}
	lane = limit
	if q.Sign() < 0 {
		lane = -limit
	}
	diff := new(big.Rat).Sub(v, new(big.Rat).SetInt64(int64(lane)))
	f, _ := diff.Quo(diff, unit).Float32()
	return lane, &f
}

func TestEncodeInt32(t *testing.T) {
	for _, n := range []int{0, 1, 63, 64, 65, 255, 256} {
		src := make([]int32, n)
		for i := range src {
			src[i] = int32(i) * 0x01020304
		}
		if n > 1 {
			src[0], src[n-1] = math.MinInt32, math.MaxInt32
		}
		p := wire.Packet{Header: wire.Header{Blocks: wire.BlocksFor(n)}}
		copy(p.Lanes[:], src)
		want := make([]byte, p.Len())
		p.Encode(want)
		got := make([]byte, int(p.Blocks)*wire.BlockLen)
		for i := range got {
			got[i] = 0xaa
		}
		if tag := scale.EncodeInt32(got, src); tag != wire.TagLanes(src) {
			t.Errorf("%d lanes: tag %v, want %v", n, tag, wire.TagLanes(src))
		}
		if !cmp.Equal(got, want[wire.HeaderLen:]) {
			t.Errorf("%d lanes: bytes differ (-want +got):\n%s", n, cmp.Diff(want[wire.HeaderLen:], got))
		}
	}
}

func TestDecode(t *testing.T) {
	for _, c := range []struct {
		lane     int32
		exponent int8
		want     float32
	}{
		{0, 25, 0}, {1, 0, 1}, {-1, 0, -1}, {1 << 25, 25, 1}, {math.MaxInt32, 0, 1 << 31}, {math.MinInt32, 0, -1 << 31},
		{16777217, 0, 16777216}, {16777219, 0, 16777220}, // float32 rounds half to even
		{1, 126, 0x1p-126}, {3, -126, 0x1.8p127}, {4, -126, inf}, {-4, -126, -inf},
	} {
		var got [1]float32
		scale.Decode(got[:], []int32{c.lane, 7}, c.exponent)
		if got[0] != c.want {
			t.Errorf("%d * 2^-%d = %g, want %g", c.lane, c.exponent, got[0], c.want)
		}
	}
}

// TestRoundTrip: what one rank encodes with the exponent of its own amax comes back within half a lane, at every
// binade and for every number of ranks.
func TestRoundTrip(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	for amax := 1; amax <= 254; amax++ {
		ranks := 1 + r.IntN(wire.MaxRanks)
		src := make([]float32, 37)
		for i := range src {
			src[i] = math.Float32frombits(uint32(r.IntN(2))<<31 | uint32(amax)<<23 | uint32(r.IntN(1<<23)))
		}
		got, bad := scale.Amax(src)
		if int(got) != amax || bad >= 0 {
			t.Fatalf("amax %d, bad %d, want %d and none", got, bad, amax)
		}
		e := scale.Exponent(got, ranks)
		lanes, clips := encode(t, src, e, scale.Limit(ranks))
		if clips != nil {
			t.Fatalf("amax %d, %d ranks: clips %v", amax, ranks, clips)
		}
		back := make([]float32, len(src))
		scale.Decode(back, lanes, e)
		for i := range src {
			// Half a lane, and the rounding of the result to float32.
			bound := math.Ldexp(0.5, -int(e)) + math.Abs(float64(src[i]))*0x1p-24
			if d := math.Abs(float64(back[i]) - float64(src[i])); d > bound {
				t.Fatalf("amax %d, %d ranks: %g came back as %g, exponent %d", amax, ranks, src[i], back[i], e)
			}
		}
	}
}

func FuzzEncode(f *testing.F) {
	f.Add(uint32(0x3f800000), int8(25), int32(1<<29))
	f.Add(uint32(0x7f7fffff), int8(126), int32(1<<25))
	f.Add(uint32(1), int8(-126), int32(1))
	f.Fuzz(func(t *testing.T, bits uint32, exponent int8, limit int32) {
		x := math.Float32frombits(bits)
		if _, bad := scale.Amax([]float32{x}); bad >= 0 || limit < scale.Limit(wire.MaxRanks) ||
			exponent < -scale.MaxExponent || exponent > scale.MaxExponent {
			t.Skip()
		}
		lanes, clips := encode(t, []float32{x}, exponent, limit)
		lane, rest := exactLane(x, exponent, limit)
		if lanes[0] != lane || (rest != nil) != (clips != nil) || rest != nil && clips[0].Rest != *rest {
			t.Errorf("%g * 2^%d, limit %d: lane %d, clips %v; want %d, %v", x, exponent, limit, lanes[0], clips, lane, rest)
		}
	})
}

var sink [2]uint32

func BenchmarkAmax(b *testing.B) {
	src := gradient(1 << 16)
	b.SetBytes(int64(4 * len(src)))
	for b.Loop() {
		a, _ := scale.Amax(src)
		sink[0] = uint32(a)
	}
}

// BenchmarkEncode is quantize, encode and tag of a vector, packet by packet; a byte is one of the float32 input.
func BenchmarkEncode(b *testing.B) {
	src := gradient(1 << 16)
	amax, _ := scale.Amax(src)
	for _, lanes := range []int{64, 256} {
		b.Run(fmt.Sprint(lanes), func(b *testing.B) {
			dst := make([]byte, wire.MaxLanes*4)
			e, limit := scale.Exponent(amax, 4), scale.Limit(4)
			b.SetBytes(int64(4 * len(src)))
			for b.Loop() {
				for at := 0; at < len(src); at += lanes {
					sink, _ = scale.Encode(dst[:4*lanes], src[at:at+lanes], e, limit)
				}
			}
		})
	}
}

func BenchmarkDecode(b *testing.B) {
	lanes, dst := make([]int32, wire.MaxLanes), make([]float32, wire.MaxLanes)
	b.SetBytes(4 * wire.MaxLanes)
	for b.Loop() {
		scale.Decode(dst, lanes, 25)
	}
}

func gradient(n int) []float32 {
	r := rand.New(rand.NewPCG(5, 6))
	v := make([]float32, n)
	for i := range v {
		v[i] = float32(r.NormFloat64())
	}
	return v
}
