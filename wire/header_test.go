package wire

import (
	"bytes"
	"encoding/hex"
	"errors"
	"strings"
	"testing"
)

// The sizes at which a chunk changes its number of blocks or is full.
var sizes = []int{0, 1, 63, 64, 65, 255, 256}

func unhex(s string) []byte {
	b, err := hex.DecodeString(strings.Join(strings.Fields(s), ""))
	if err != nil {
		panic(err)
	}
	return b
}

// goldenPacket and goldenBytes are one packet in both forms; the bytes, tag and checksums included, were computed by
// another program from docs/protocol.md.
func goldenPacket() *Packet {
	p := &Packet{Header: Header{
		Type: TypeGrad, Flags: FlagLast | FlagResend | FlagSaturated, Job: 0x1234, Epoch: 0x0102, Rank: 5, Blocks: 1,
		Seq: 0x01020304, Round: 7, Chunk: 300, Elems: 2, Exponent: -3, Amax: 127, Contributors: 1 << 5,
	}}
	p.Lanes[0], p.Lanes[1] = 1, -2
	p.Seal()
	return p
}

var goldenBytes = append(unhex(`
	11 0b 1234 0102 05 01  01020304 00000007 0000012c  0002 fd 7f  0000000000000020
	037fadcd 03539e31  00000000 00000000  0000 00 0000000000
	00000001 fffffffe`), make([]byte, 62*4)...)

// All fields at once, each byte of each another.
var (
	fullHeader = Header{
		Type: TypeResult, Flags: 0xa5, Job: 0x0203, Epoch: 0x0405, Rank: 0x06, Blocks: 0, Seq: 0x08090a0b,
		Round: 0x0c0d0e0f, Chunk: 0x10111213, Elems: 0, Exponent: -128, Amax: 0x17,
		Contributors: 0x18191a1b1c1d1e1f, Tag: [2]uint32{0x20212223, 0x24252627}, SpreadUs: 0x28292a2b,
		BlockedUs: 0x2c2d2e2f, NextEpoch: 0x3031, Reason: 0x32,
	}
	fullHeaderBytes = unhex(`13a5 0203 0405 06 00 08090a0b 0c0d0e0f 10111213 0000 80 17 18191a1b1c1d1e1f
		20212223 24252627 28292a2b 2c2d2e2f 3031 32 0000000000`)
)

func TestGolden(t *testing.T) {
	buf := bytes.Repeat([]byte{0xee}, MaxLen)
	if n := goldenPacket().Encode(buf); n != len(goldenBytes) || !bytes.Equal(buf[:n], goldenBytes) {
		t.Errorf("Encode:\n% x\nwant\n% x", buf[:n], goldenBytes)
	}
	var p Packet
	if err := p.Decode(goldenBytes); err != nil || p != *goldenPacket() {
		t.Errorf("Decode: %v\n%+v\nwant\n%+v", err, p.Header, goldenPacket().Header)
	}

	PutHeader(buf, &fullHeader)
	if !bytes.Equal(buf[:HeaderLen], fullHeaderBytes) {
		t.Errorf("PutHeader:\n% x\nwant\n% x", buf[:HeaderLen], fullHeaderBytes)
	}
	var h Header
	if err := DecodeHeader(fullHeaderBytes, &h); err != nil || h != fullHeader {
		t.Errorf("DecodeHeader: %v\n%+v\nwant\n%+v", err, h, fullHeader)
	}
}

func TestRoundTripSizes(t *testing.T) {
	for _, n := range sizes {
		p := randomPacket(3, 63, n)
		if want := HeaderLen + (n+63)/64*256; p.Len() != want {
			t.Errorf("%d lanes: length %d, want %d", n, p.Len(), want)
		}
		buf := make([]byte, p.Len())
		if got := p.Encode(buf); got != len(buf) {
			t.Errorf("%d lanes: encoded %d bytes, want %d", n, got, len(buf))
		}
		var q Packet
		if err := q.Decode(buf); err != nil || q != *p {
			t.Errorf("%d lanes: decoded %+v: %v", n, q.Header, err)
		}
		if !q.TagOK() {
			t.Errorf("%d lanes: tag does not fit", n)
		}
	}
}

func TestDecodeRefuses(t *testing.T) {
	valid := goldenBytes
	edit := func(off int, b byte) func([]byte) []byte {
		return func(p []byte) []byte { p[off] = b; return p }
	}
	for name, c := range map[string]struct {
		edit   func([]byte) []byte
		err    error
		reason Reason
	}{
		"empty":             {func(p []byte) []byte { return nil }, ErrShort, ReasonShort},
		"no whole header":   {func(p []byte) []byte { return p[:HeaderLen-1] }, ErrShort, ReasonShort},
		"no lanes":          {func(p []byte) []byte { return p[:HeaderLen] }, ErrShort, ReasonShort},
		"a byte less":       {func(p []byte) []byte { return p[:len(p)-1] }, ErrShort, ReasonShort},
		"a byte more":       {func(p []byte) []byte { return append(p, 0) }, ErrLength, ReasonLength},
		"fewer blocks":      {edit(OffBlocks, 0), ErrLength, ReasonLength},
		"more blocks":       {edit(OffBlocks, 2), ErrShort, ReasonShort},
		"five blocks":       {func(p []byte) []byte { p[OffBlocks] = 5; return append(p, make([]byte, 1024)...) }, ErrLength, ReasonLength},
		"no elems":          {edit(OffElems+1, 0), ErrElems, ReasonLength},
		"elems of 2 blocks": {edit(OffElems+1, 65), ErrElems, ReasonLength},
		"65535 elems":       {func(p []byte) []byte { p[OffElems], p[OffElems+1] = 0xff, 0xff; return p }, ErrElems, ReasonLength},
		// 65,535 lanes need 1,024 blocks, of which a byte keeps none.
		"65535 elems in none": {func(p []byte) []byte {
			p[OffElems], p[OffElems+1], p[OffBlocks] = 0xff, 0xff, 0
			return p[:HeaderLen]
		}, ErrElems, ReasonLength},
		"reserved first": {edit(OffReserved, 1), ErrReserved, ReasonLength},
		"reserved last":  {edit(HeaderLen-1, 0x80), ErrReserved, ReasonLength},
		"version 0":      {edit(OffVersionType, 0x01), ErrVersion, ReasonVersion},
		"version 2":      {edit(OffVersionType, 0x21), ErrVersion, ReasonVersion},
		"type 0":         {edit(OffVersionType, 0x10), ErrType, ReasonType},
		"type 8":         {edit(OffVersionType, 0x18), ErrType, ReasonType},
		// The order of the checks.
		"version before length":   {func(p []byte) []byte { p[0] = 0x21; return p[:100] }, ErrVersion, ReasonVersion},
		"type before length":      {func(p []byte) []byte { p[0] = 0x1f; return append(p, 0) }, ErrType, ReasonType},
		"version before type":     {edit(OffVersionType, 0x2f), ErrVersion, ReasonVersion},
		"version before reserved": {func(p []byte) []byte { p[0], p[HeaderLen-1] = 0x21, 1; return p }, ErrVersion, ReasonVersion},
	} {
		t.Run(name, func(t *testing.T) {
			var p Packet
			err := p.Decode(c.edit(bytes.Clone(valid)))
			if !errors.Is(err, c.err) {
				t.Errorf("error %v, want %v", err, c.err)
			}
			if r := ReasonOf(err); r != c.reason {
				t.Errorf("reason %v, want %v", r, c.reason)
			}
		})
	}
}

// Answers without lanes keep the elems of the chunk they speak of.
func TestShortAnswersKeepElems(t *testing.T) {
	for _, typ := range []Type{TypeAck, TypeWait, TypeNack, TypeCtrl} {
		p := Packet{Header: Header{Type: typ, Elems: 256}}
		buf := make([]byte, p.Len())
		p.Encode(buf)
		var q Packet
		if err := q.Decode(buf); err != nil || q.Header != p.Header {
			t.Errorf("%v: %v", typ, err)
		}
	}
}

func TestReasonOf(t *testing.T) {
	for err, want := range map[error]Reason{
		nil: ReasonNone, ErrShort: ReasonShort, ErrLength: ReasonLength, ErrElems: ReasonLength,
		ErrReserved: ReasonLength, ErrVersion: ReasonVersion, ErrType: ReasonType, ErrChecksum: ReasonChecksum,
		ErrNotXAgg: ReasonRoute,
	} {
		if got := ReasonOf(err); got != want {
			t.Errorf("ReasonOf(%v) = %v, want %v", err, got, want)
		}
	}
}

func TestNames(t *testing.T) {
	seen := map[string]bool{}
	for r := range Reason(NumReasons) {
		name := r.String()
		if name == "" || seen[name] || strings.HasPrefix(name, "reason_") {
			t.Errorf("reason %d has the name %q", uint8(r), name)
		}
		seen[name] = true
	}
	for s, want := range map[string]string{
		Reason(NumReasons).String(): "reason_26", Reason(255).String(): "reason_255", ReasonReturned.String(): "returned",
		TypeGrad.String(): "GRAD", TypeCtrl.String(): "CTRL", Type(8).String(): "8",
		workerAddr(1).String(): "10.77.0.2:40000 (02:78:61:00:00:02)",
	} {
		if s != want {
			t.Errorf("name %q, want %q", s, want)
		}
	}
	for typ := range Type(16) {
		if want := typ >= 1 && typ <= 7; typ.Valid() != want {
			t.Errorf("%v valid: %v", typ, typ.Valid())
		}
	}
}

func TestSerialOrder(t *testing.T) {
	for _, c := range []struct {
		a, b uint32
		want bool
	}{{0, 0, false}, {0, 1, true}, {1, 0, false}, {0xffffffff, 0, true}, {0, 0xffffffff, false}, {5, 0x80000004, true}} {
		if got := SerialLess(c.a, c.b); got != c.want {
			t.Errorf("SerialLess(%#x, %#x) = %v", c.a, c.b, got)
		}
	}
	for _, c := range []struct {
		a, b uint16
		want bool
	}{{0, 0, false}, {0, 1, true}, {65535, 1, true}, {1, 65535, false}, {5, 0x8004, true}} {
		if got := SerialLess16(c.a, c.b); got != c.want {
			t.Errorf("SerialLess16(%#x, %#x) = %v", c.a, c.b, got)
		}
	}
}

func TestNoAllocations(t *testing.T) {
	p, buf := randomPacket(1, 0, MaxLanes), make([]byte, MaxFrameLen)
	n := p.Encode(buf)
	frame := AppendFrame(nil, workerAddr(0), serviceAddr, p, true)
	arp := append(make([]byte, 12), 0x08, 0x06)
	for name, f := range map[string]func(){
		"Encode":      func() { p.Encode(buf) },
		"Decode":      func() { _ = p.Decode(buf[:n]) },
		"Seal":        func() { p.Seal() },
		"TagOK":       func() { p.TagOK() },
		"AppendFrame": func() { AppendFrame(buf[:0], workerAddr(0), serviceAddr, p, true) },
		"AppendUDP":   func() { AppendUDP(buf[:0], workerAddr(0), serviceAddr, frame[FrameOverhead:], true) },
		"ParseFrame":  func() { _, _, _ = ParseFrame(frame, p) },
		"ParseUDP":    func() { _, _, _, _ = ParseUDP(frame) },
		"not XAgg":    func() { _, _, _ = ParseFrame(arp, p) },
	} {
		if got := testing.AllocsPerRun(100, f); got != 0 {
			t.Errorf("%s: %v allocations", name, got)
		}
		p.Encode(buf)
	}
}

func FuzzDecode(f *testing.F) {
	f.Add(goldenBytes)
	f.Add(fullHeaderBytes)
	f.Add(goldenBytes[:HeaderLen])
	f.Fuzz(func(t *testing.T, b []byte) {
		var p Packet
		if err := p.Decode(b); err != nil {
			if r := ReasonOf(err); !r.Fault() || r > ReasonType {
				t.Fatalf("%v is counted under %v", err, r)
			}
			return
		}
		// What decodes encodes to the same bytes, and back to the same packet.
		out := make([]byte, p.Len())
		if p.Encode(out); !bytes.Equal(out, b) {
			t.Fatalf("decoded\n% x\nencoded\n% x", b, out)
		}
		var q Packet
		if err := q.Decode(out); err != nil || q != p {
			t.Fatalf("second decode: %v", err)
		}
		if p.HasLanes() {
			p.TagOK()
			if p.Type == TypeGrad && p.Rank < MaxRanks {
				p.Contributors = 1 << p.Rank
				if p.Seal(); !p.TagOK() {
					t.Fatal("sealed packet does not fit its tag")
				}
			}
		}
	})
}
