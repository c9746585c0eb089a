package wire

import (
	"math/rand/v2"
	"testing"
)

// randomPacket returns a sealed GRAD of the rank with the given number of valid lanes, the same for the same seed.
func randomPacket(seed uint64, rank uint8, elems int) *Packet {
	rng := rand.New(rand.NewPCG(seed, uint64(rank)))
	p := &Packet{Header: Header{
		Type: TypeGrad, Job: 0x1234, Epoch: 0x0102, Rank: rank, Blocks: BlocksFor(elems), Seq: 0x01020304,
		Round: 7, Chunk: 300, Elems: uint16(elems), Exponent: -3, Amax: 127, Contributors: 1 << rank,
	}}
	for i := range p.Lanes[:elems] {
		p.Lanes[i] = int32(rng.Uint32()) >> 6 // room for 64 ranks
	}
	p.Seal()
	return p
}

func BenchmarkEncode(b *testing.B) {
	p, buf := randomPacket(1, 0, MaxLanes), make([]byte, MaxLen)
	b.SetBytes(MaxLen)
	b.ReportAllocs()
	for b.Loop() {
		p.Encode(buf)
	}
}

func BenchmarkDecode(b *testing.B) {
	p, buf := randomPacket(1, 0, MaxLanes), make([]byte, MaxLen)
	p.Encode(buf)
	b.SetBytes(MaxLen)
	b.ReportAllocs()
	for b.Loop() {
		if err := p.Decode(buf); err != nil {
			b.Fatal(err)
		}
	}
}

// The bytes of the lanes, so MB/s compare with Encode and Decode.
func BenchmarkTagLanes(b *testing.B) {
	p := randomPacket(1, 0, MaxLanes)
	b.SetBytes(MaxLanes * 4)
	for b.Loop() {
		tagSink = TagLanes(p.Lanes[:])
	}
}

var tagSink [2]uint32

func BenchmarkTagOK64Ranks(b *testing.B) {
	sum := randomPacket(1, 0, MaxLanes)
	for r := uint8(1); r < MaxRanks; r++ {
		addPacket(sum, randomPacket(1, r, MaxLanes))
	}
	for b.Loop() {
		if !sum.TagOK() {
			b.Fatal("tag does not fit")
		}
	}
}

// addPacket does to sum what an aggregator does with a contribution.
func addPacket(sum, p *Packet) {
	for i, v := range p.Lanes {
		sum.Lanes[i] += v
	}
	for t, v := range p.Tag {
		sum.Tag[t] += v
	}
	sum.Contributors |= p.Contributors
	sum.Amax = max(sum.Amax, p.Amax)
	sum.Type, sum.Rank = TypeResult, p.Rank
}

func BenchmarkAppendFrame(b *testing.B) {
	p, buf := randomPacket(1, 0, MaxLanes), make([]byte, 0, MaxFrameLen)
	b.SetBytes(MaxFrameLen)
	b.ReportAllocs()
	for b.Loop() {
		AppendFrame(buf, workerAddr(0), serviceAddr, p, true)
	}
}

func BenchmarkParseFrame(b *testing.B) {
	p := randomPacket(1, 0, MaxLanes)
	frame := AppendFrame(nil, workerAddr(0), serviceAddr, p, true)
	b.SetBytes(int64(len(frame)))
	b.ReportAllocs()
	for b.Loop() {
		if _, _, err := ParseFrame(frame, p); err != nil {
			b.Fatal(err)
		}
	}
}

var serviceAddr = Addr{MAC: [6]byte{2, 0x78, 0x61, 0, 0xff, 0xfe}, IP: [4]byte{10, 77, 255, 254}, Port: Port}

func workerAddr(rank uint8) Addr {
	return Addr{MAC: [6]byte{2, 0x78, 0x61, 0, 0, rank + 1}, IP: [4]byte{10, 77, 0, rank + 1}, Port: 40000}
}
