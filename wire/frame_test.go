package wire

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"strings"
	"testing"
)

// goldenFrame is goldenPacket from rank 5 to the service; the checksums were computed by another program.
var goldenFrame = append(unhex(`
	02786100fffe 027861000006 0800
	45 00 0154 0000 4000 40 11 24fb 0a4d0006 0a4dfffe
	9c40 4d94 0140 800c`), goldenBytes...)

func TestGoldenFrame(t *testing.T) {
	prefix := []byte("before")
	got := AppendFrame(bytes.Clone(prefix), workerAddr(5), serviceAddr, goldenPacket(), true)
	if !bytes.Equal(got, append(prefix, goldenFrame...)) {
		t.Errorf("AppendFrame:\n% x\nwant\n% x", got[len(prefix):], goldenFrame)
	}
	var p Packet
	src, dst, err := ParseFrame(goldenFrame, &p)
	if err != nil || src != workerAddr(5) || dst != serviceAddr || p != *goldenPacket() {
		t.Errorf("ParseFrame: %v to %v: %+v: %v", src, dst, p.Header, err)
	}

	// Dirty spare capacity must not shine through.
	dirty := bytes.Repeat([]byte{0xff}, len(goldenFrame))
	if got := AppendFrame(dirty[:0], workerAddr(5), serviceAddr, goldenPacket(), true); !bytes.Equal(got, goldenFrame) {
		t.Errorf("AppendFrame into used memory:\n% x", got)
	}

	without := AppendFrame(nil, workerAddr(5), serviceAddr, goldenPacket(), false)
	if binary.BigEndian.Uint16(without[ethernetLen+offUDPSum:]) != 0 {
		t.Error("checksum was not asked for but is there")
	}
	if _, _, err := ParseFrame(without, &p); err != nil {
		t.Errorf("frame without a UDP checksum: %v", err)
	}

	udp := AppendUDP(nil, workerAddr(5), serviceAddr, goldenBytes, true)
	if !bytes.Equal(udp, goldenFrame) {
		t.Errorf("AppendUDP:\n% x\nwant\n% x", udp, goldenFrame)
	}
}

func TestUDPPayloads(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 7))
	fill := map[string]func() byte{
		"random": func() byte { return byte(rng.Uint32()) },
		"ones":   func() byte { return 0xff }, // carries in every addition of the checksum
		"zeros":  func() byte { return 0 },
	}
	for name, next := range fill {
		for n := range 1500 {
			payload := make([]byte, n)
			for i := range payload {
				payload[i] = next()
			}
			src, dst := workerAddr(uint8(n)), Addr{Port: uint16(n)}
			frame := AppendUDP(nil, src, dst, payload, true)
			s, d, got, err := ParseUDP(frame)
			if err != nil || s != src || d != dst || !bytes.Equal(got, payload) {
				t.Fatalf("%s, %d bytes: %v to %v, %d bytes: %v", name, n, s, d, len(got), err)
			}
			if want := plainChecksum(frame); binary.BigEndian.Uint16(frame[ethernetLen+offUDPSum:]) != want {
				t.Fatalf("%s, %d bytes: checksum %#x, want %#x", name, n, frame[ethernetLen+offUDPSum:FrameOverhead], want)
			}
		}
	}
}

// plainChecksum is the UDP checksum as RFC 768 and RFC 1071 tell it, 16 bits at a time.
func plainChecksum(frame []byte) uint16 {
	b := append([]byte{}, frame[ethernetLen+offSrcIP:ethernetLen+offUDP]...)
	b = append(b, 0, protocolUDP, frame[ethernetLen+offUDPLen], frame[ethernetLen+offUDPLen+1])
	b = append(b, frame[ethernetLen+offUDP:ethernetLen+offUDPSum]...)
	b = append(b, 0, 0)
	b = append(b, frame[FrameOverhead:]...)
	if len(b)%2 != 0 {
		b = append(b, 0)
	}
	var sum uint32
	for ; len(b) > 0; b = b[2:] {
		sum += uint32(binary.BigEndian.Uint16(b))
		sum = sum>>16 + sum&0xffff
	}
	if sum == 0xffff {
		return 0xffff
	}
	return ^uint16(sum)
}

// A computed checksum of 0 is sent as 0xffff, since 0 says that there is none.
func TestZeroChecksumIsSentAsOnes(t *testing.T) {
	payload := make([]byte, 2)
	frame := AppendUDP(nil, workerAddr(0), serviceAddr, payload, true)
	copy(payload, frame[ethernetLen+offUDPSum:]) // adding the complement of the rest makes the sum all ones
	frame = AppendUDP(nil, workerAddr(0), serviceAddr, payload, true)
	if got := binary.BigEndian.Uint16(frame[ethernetLen+offUDPSum:]); got != 0xffff {
		t.Errorf("checksum %#x, want 0xffff", got)
	}
	if _, _, _, err := ParseUDP(frame); err != nil {
		t.Error(err)
	}
}

func TestParseFrameRefuses(t *testing.T) {
	edit := func(off int, b ...byte) func([]byte) []byte {
		return func(f []byte) []byte { copy(f[off:], b); return f }
	}
	cut := func(n int) func([]byte) []byte { return func(f []byte) []byte { return f[:n] } }
	add := func(off int, n int) func([]byte) []byte {
		return func(f []byte) []byte {
			binary.BigEndian.PutUint16(f[off:], uint16(int(binary.BigEndian.Uint16(f[off:]))+n))
			return f
		}
	}
	for name, c := range map[string]struct {
		edit   func([]byte) []byte
		err    error
		reason Reason
	}{
		"ARP":                  {edit(offEtherType, 0x08, 0x06), ErrNotXAgg, ReasonRoute},
		"IPv6":                 {edit(offEtherType, 0x86, 0xdd), ErrNotXAgg, ReasonRoute},
		"VLAN":                 {edit(offEtherType, 0x81, 0x00), ErrNotXAgg, ReasonRoute},
		"IP version 6":         {edit(ethernetLen, 0x65), ErrNotXAgg, ReasonRoute},
		"IP options":           {edit(ethernetLen, 0x46), ErrNotXAgg, ReasonRoute},
		"IP header of 16":      {edit(ethernetLen, 0x44), ErrNotXAgg, ReasonRoute},
		"first fragment":       {edit(ethernetLen+offFragment, 0x20), ErrNotXAgg, ReasonRoute},
		"last fragment":        {edit(ethernetLen+offFragment, 0x00, 0x01), ErrNotXAgg, ReasonRoute},
		"TCP":                  {edit(ethernetLen+offProtocol, 6), ErrNotXAgg, ReasonRoute},
		"other ports":          {edit(ethernetLen+offDstPort, 0x4d, 0x95), ErrNotXAgg, ReasonRoute},
		"empty":                {cut(0), ErrShort, ReasonShort},
		"ends in Ethernet":     {cut(13), ErrShort, ReasonShort},
		"ends in IPv4":         {cut(33), ErrShort, ReasonShort},
		"ends in UDP":          {cut(41), ErrShort, ReasonShort},
		"ends before XAgg":     {cut(42), ErrShort, ReasonShort},
		"ends in XAgg":         {cut(MinFrameLen - 1), ErrShort, ReasonShort},
		"ends in lanes":        {cut(MinFrameLen), ErrShort, ReasonShort},
		"a byte less":          {cut(len(goldenFrame) - 1), ErrShort, ReasonShort},
		"a byte more":          {func(f []byte) []byte { return append(f, 0) }, ErrLength, ReasonLength},
		"IPv4 says less":       {add(ethernetLen+offTotalLen, -1), ErrLength, ReasonLength},
		"IPv4 says more":       {add(ethernetLen+offTotalLen, 1), ErrLength, ReasonLength},
		"UDP says less":        {add(ethernetLen+offUDPLen, -256), ErrLength, ReasonLength},
		"UDP says more":        {add(ethernetLen+offUDPLen, 256), ErrLength, ReasonLength},
		"UDP says nothing":     {edit(ethernetLen+offUDPLen, 0, 0), ErrLength, ReasonLength},
		"fewer blocks":         {edit(FrameOverhead+OffBlocks, 0), ErrLength, ReasonLength},
		"more blocks":          {edit(FrameOverhead+OffBlocks, 2), ErrShort, ReasonShort},
		"too many blocks":      {edit(FrameOverhead+OffBlocks, 5), ErrLength, ReasonLength},
		"elems":                {edit(FrameOverhead+OffElems, 1), ErrElems, ReasonLength},
		"reserved":             {edit(FrameOverhead+OffReserved+4, 1), ErrReserved, ReasonLength},
		"version":              {edit(FrameOverhead, 0x21), ErrVersion, ReasonVersion},
		"type":                 {edit(FrameOverhead, 0x1f), ErrType, ReasonType},
		"IPv4 checksum":        {edit(ethernetLen+offIPv4Sum, 0, 0), ErrChecksum, ReasonChecksum},
		"TTL":                  {edit(ethernetLen+offTTL, 63), ErrChecksum, ReasonChecksum},
		"address":              {edit(ethernetLen+offSrcIP, 11), ErrChecksum, ReasonChecksum},
		"UDP checksum":         {edit(ethernetLen+offUDPSum, 0x80, 0x0d), ErrChecksum, ReasonChecksum},
		"source port":          {edit(ethernetLen+offSrcPort, 1), ErrChecksum, ReasonChecksum},
		"lane":                 {edit(FrameOverhead+HeaderLen, 0x80), ErrChecksum, ReasonChecksum},
		"last byte":            {edit(len(goldenFrame)-1, 1), ErrChecksum, ReasonChecksum},
		"length before others": {func(f []byte) []byte { f[FrameOverhead] = 0x2f; f[ethernetLen+offTTL] = 0; return f[:200] }, ErrLength, ReasonLength},
		"short before length":  {func(f []byte) []byte { f[ethernetLen+offTotalLen]++; return f[:len(f)-1] }, ErrShort, ReasonShort},
		"type before checksum": {edit(FrameOverhead, 0x10), ErrType, ReasonType},
	} {
		t.Run(name, func(t *testing.T) {
			var p Packet
			_, _, err := ParseFrame(c.edit(bytes.Clone(goldenFrame)), &p)
			if !errors.Is(err, c.err) {
				t.Errorf("error %v, want %v", err, c.err)
			}
			if r := ReasonOf(err); r != c.reason {
				t.Errorf("reason %v, want %v", r, c.reason)
			}
		})
	}
	// The port of either side makes it ours: answers come from it.
	var p Packet
	if _, _, err := ParseFrame(AppendFrame(nil, serviceAddr, workerAddr(0), goldenPacket(), false), &p); err != nil {
		t.Errorf("answer: %v", err)
	}
}

// A checksum that Linux left to a device is told from a damaged packet.
func TestUnfinishedChecksum(t *testing.T) {
	frame := bytes.Clone(goldenFrame)
	// 10.77.0.6 + 10.77.255.254 + 17 + 320 in words of 16 bits.
	binary.BigEndian.PutUint16(frame[ethernetLen+offUDPSum:], 0x0a4d+0x0006+0x0a4d+0xfffe-0xffff+17+320)
	var p Packet
	_, _, err := ParseFrame(frame, &p)
	if !errors.Is(err, ErrChecksum) || !strings.Contains(err.Error(), "unfinished") {
		t.Errorf("error %v", err)
	}
	frame[len(frame)-1] ^= 1 // whatever the payload is
	if _, _, err := ParseFrame(frame, &p); err == nil || !strings.Contains(err.Error(), "unfinished") {
		t.Errorf("error %v", err)
	}
	frame[ethernetLen+offUDPSum] ^= 1
	if _, _, err := ParseFrame(frame, &p); !errors.Is(err, ErrChecksum) || strings.Contains(err.Error(), "unfinished") {
		t.Errorf("error %v", err)
	}
}

// With a checksum no single bit of an IPv4 packet can change unseen.
func TestEveryBitIsProtected(t *testing.T) {
	frame := bytes.Clone(goldenFrame)
	var p Packet
	for i := ethernetLen; i < len(frame); i++ {
		for bit := range 8 {
			frame[i] ^= 1 << bit
			if _, _, err := ParseFrame(frame, &p); err == nil {
				t.Errorf("byte %d, bit %d: accepted", i, bit)
			}
			frame[i] ^= 1 << bit
		}
	}
}

func FuzzParseFrame(f *testing.F) {
	f.Add(goldenFrame)
	f.Add(goldenFrame[:MinFrameLen])
	f.Add(AppendFrame(nil, serviceAddr, workerAddr(0), &Packet{Header: Header{Type: TypeAck, Elems: 256}}, false))
	f.Fuzz(func(t *testing.T, b []byte) {
		_, _, payload, uerr := ParseUDP(b)
		var p Packet
		src, dst, err := ParseFrame(b, &p)
		if err != nil {
			if r := ReasonOf(err); !r.Fault() {
				t.Fatalf("%v is counted under %v", err, r)
			}
			return
		}
		if uerr != nil || len(payload) != p.Len() {
			t.Fatalf("ParseUDP: %d bytes: %v", len(payload), uerr)
		}
		again := AppendFrame(nil, src, dst, &p, true)
		var q Packet
		if s, d, err := ParseFrame(again, &q); err != nil || s != src || d != dst || q != p {
			t.Fatalf("second parse: %v to %v: %v", s, d, err)
		}
	})
}
