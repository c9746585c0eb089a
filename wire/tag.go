package wire

import "math/bits"

// P is the modulus of the integrity tag: the largest prime below 2^26. The sum of 64 residues stays below 2^32.
const P = 67108859

// Coefficients are the tag's published multipliers: lane i of a chunk counts K[t][i] times in tag t, each in [1, P).
// K[t][i] = 1 + splitmix64(seed_t + i) mod (P-1) with the seeds 0x7861676730 and 0x3178616767.
var Coefficients = func() (k [2][MaxLanes]uint32) {
	for t := range k {
		for i := range k[t] {
			k[t][i] = uint32(1 + splitmix64(tagSeed[t]+uint64(i))%(P-1))
		}
	}
	return k
}()

// The seeds lie far apart, so that the two sequences share no number and no two places share a pair: consecutive seeds
// would make K[1] a shifted K[0] and a round's h_1 the h_0 of the round beside it.
var tagSeed = [2]uint64{0x7861676730, 0x3178616767}

// splitmix64 is the output function of Steele, Lea and Flood's generator (OOPSLA 2014), here a public mixing function.
func splitmix64(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// TagPlace returns h(job, round, chunk, rank): the part of a contribution's tag that says where it belongs, in [0, P).
// With FlagAsync the place is that of round 0 and rank 0, whoever contributes when.
func TagPlace(job uint16, round, chunk uint32, rank uint8) [2]uint32 {
	a := uint64(job)<<48 | uint64(rank)<<32 | uint64(round)
	var h [2]uint32
	for t := range h {
		h[t] = uint32(splitmix64(splitmix64(tagSeed[t]^a)+uint64(chunk)) % P)
	}
	return h
}

// TagLanes returns the sum of K[t][i] * lanes[i] mod P for both coefficient sequences; len(lanes) <= MaxLanes.
func TagLanes(lanes []int32) [2]uint32 {
	// |lane| <= 2^31 and K < 2^26: fifteen products stay below 2^61. The sum is made small again before each eight by
	// shifts and one addition instead of a division.
	var s0, s1 int64
	k0, k1 := Coefficients[0][:len(lanes)], Coefficients[1][:len(lanes)]
	for len(lanes) >= 8 {
		v, a, b := (*[8]int32)(lanes), (*[8]uint32)(k0), (*[8]uint32)(k1)
		s0 = shrink(s0) + int64(v[0])*int64(a[0]) + int64(v[1])*int64(a[1]) + int64(v[2])*int64(a[2]) +
			int64(v[3])*int64(a[3]) + int64(v[4])*int64(a[4]) + int64(v[5])*int64(a[5]) +
			int64(v[6])*int64(a[6]) + int64(v[7])*int64(a[7])
		s1 = shrink(s1) + int64(v[0])*int64(b[0]) + int64(v[1])*int64(b[1]) + int64(v[2])*int64(b[2]) +
			int64(v[3])*int64(b[3]) + int64(v[4])*int64(b[4]) + int64(v[5])*int64(b[5]) +
			int64(v[6])*int64(b[6]) + int64(v[7])*int64(b[7])
		lanes, k0, k1 = lanes[8:], k0[8:], k1[8:]
	}
	for i, v := range lanes {
		s0 += int64(v) * int64(k0[i])
		s1 += int64(v) * int64(k1[i])
	}
	return [2]uint32{mod(s0), mod(s1)}
}

// shrink returns a number congruent to v mod P of less than 2^40 in magnitude: 2^26 is 5 mod P.
func shrink(v int64) int64 { return v>>26*5 + v&(1<<26-1) }

func mod(v int64) uint32 {
	v %= P
	if v < 0 {
		v += P
	}
	return uint32(v)
}

// Seal sets the packet's tag for its sender: p is a GRAD of one rank, its place and lanes are set.
func (p *Packet) Seal() {
	round, rank := p.Round, p.Rank
	if p.Flags&FlagAsync != 0 {
		round, rank = 0, 0
	}
	h, l := TagPlace(p.Job, round, p.Chunk, rank), TagLanes(p.Lanes[:p.Elems])
	for t := range p.Tag {
		p.Tag[t] = (h[t] + l[t]) % P
	}
}

// TagOK reports whether the tag of a packet with lanes (GRAD, PARTIAL or RESULT) fits its place, mask and lanes: that
// the lanes are the sum of exactly the contributions of the ranks in the mask. With FlagAsync see [DifferenceOK].
func (p *Packet) TagOK() bool {
	l := TagLanes(p.Lanes[:p.Elems])
	want := [2]uint64{uint64(l[0]), uint64(l[1])}
	for m := p.Contributors; m != 0; m &= m - 1 {
		h := TagPlace(p.Job, p.Round, p.Chunk, uint8(bits.TrailingZeros64(m)))
		want[0] += uint64(h[0])
		want[1] += uint64(h[1])
	}
	return uint64(p.Tag[0])%P == want[0]%P && uint64(p.Tag[1])%P == want[1]%P
}

// DifferenceOK reports whether the difference of the tags of two running sums of a chunk (docs/protocol.md, "Async")
// fits the difference of their lanes, read as signed, and the number of additions between them.
func DifferenceOK(job uint16, chunk, additions uint32, before, after [2]uint32, lanes []int32) bool {
	h, l := TagPlace(job, 0, chunk, 0), TagLanes(lanes)
	for t := range h {
		want := (uint64(h[t])*uint64(additions) + uint64(l[t]) + uint64(before[t])) % P
		if uint64(after[t])%P != want {
			return false
		}
	}
	return true
}
