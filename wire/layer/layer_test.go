package layer

import (
	"bytes"
	"errors"
	"net"
	"testing"

	"github.com/google/gopacket"
	"github.com/google/gopacket/layers"

	"xagg/wire"
)

var (
	worker  = wire.Addr{MAC: [6]byte{2, 0x78, 0x61, 0, 0, 1}, IP: [4]byte{10, 77, 0, 1}, Port: 40000}
	service = wire.Addr{MAC: [6]byte{2, 0x78, 0x61, 0, 0xff, 0xfe}, IP: [4]byte{10, 77, 255, 254}, Port: wire.Port}
)

func grad(elems int) *wire.Packet {
	p := &wire.Packet{Header: wire.Header{
		Type: wire.TypeGrad, Job: 1, Epoch: 2, Rank: 3, Seq: 4, Round: 5, Chunk: 6, Elems: uint16(elems),
		Blocks: wire.BlocksFor(elems), Contributors: 1 << 3,
	}}
	for i := range p.Lanes[:elems] {
		p.Lanes[i] = int32(i)*1000003 - 7
	}
	p.Seal()
	return p
}

// serialize builds a frame with gopacket's own layers.
func serialize(t *testing.T, src, dst wire.Addr, x *XAgg) ([]byte, error) {
	t.Helper()
	eth := &layers.Ethernet{SrcMAC: src.MAC[:], DstMAC: dst.MAC[:], EthernetType: layers.EthernetTypeIPv4}
	ip := &layers.IPv4{
		Version: 4, TTL: 64, Flags: layers.IPv4DontFragment, Protocol: layers.IPProtocolUDP,
		SrcIP: net.IP(src.IP[:]), DstIP: net.IP(dst.IP[:]),
	}
	udp := &layers.UDP{SrcPort: layers.UDPPort(src.Port), DstPort: layers.UDPPort(dst.Port)}
	if err := udp.SetNetworkLayerForChecksum(ip); err != nil {
		t.Fatal(err)
	}
	buf := gopacket.NewSerializeBuffer()
	err := gopacket.SerializeLayers(buf, gopacket.SerializeOptions{FixLengths: true, ComputeChecksums: true}, eth, ip, udp, x)
	return buf.Bytes(), err
}

// Frames that gopacket builds are those of wire.AppendFrame, byte for byte, and it reads what AppendFrame builds.
func TestFramesAgree(t *testing.T) {
	for _, n := range []int{0, 1, 63, 64, 65, 255, 256} {
		p := grad(n)
		want := wire.AppendFrame(nil, worker, service, p, true)
		x := &XAgg{Packet: *p}
		x.Blocks = 77 // FixLengths puts it right
		got, err := serialize(t, worker, service, x)
		if err != nil || !bytes.Equal(got, want) {
			t.Errorf("%d lanes: %v\n% x\nwant\n% x", n, err, got, want)
		}
		for dir, frame := range map[string][]byte{
			"to the service": want, "back": wire.AppendFrame(nil, service, worker, p, true),
		} {
			packet := gopacket.NewPacket(frame, layers.LayerTypeEthernet, gopacket.Default)
			if fail := packet.ErrorLayer(); fail != nil {
				t.Fatalf("%d lanes, %s: %v", n, dir, fail.Error())
			}
			x, ok := packet.Layer(LayerTypeXAgg).(*XAgg)
			if !ok || x.Packet != *p || packet.ApplicationLayer() != gopacket.ApplicationLayer(x) {
				t.Errorf("%d lanes, %s: %v", n, dir, packet)
			}
		}
	}
}

func TestFixLengths(t *testing.T) {
	x := &XAgg{Packet: wire.Packet{Header: wire.Header{Type: wire.TypeAck, Elems: 256, Blocks: 4}}}
	if _, err := serialize(t, service, worker, x); err != nil || x.Blocks != 0 {
		t.Errorf("ACK: %d blocks: %v", x.Blocks, err)
	}
	x.Type, x.Blocks, x.Elems = wire.TypeCtrl, 4, 0
	if _, err := serialize(t, service, worker, x); err != nil || x.Blocks != 4 {
		t.Errorf("CTRL: %d blocks: %v", x.Blocks, err)
	}
	x.Type, x.Elems = wire.TypeGrad, 257
	if _, err := serialize(t, worker, service, x); err == nil {
		t.Error("257 lanes were serialized")
	}
	x.Type, x.Blocks = wire.TypeCtrl, 5
	if _, err := serialize(t, worker, service, x); err == nil {
		t.Error("five blocks were serialized")
	}
}

func newParser(eth *layers.Ethernet, ip *layers.IPv4, udp *layers.UDP, x *XAgg) *gopacket.DecodingLayerParser {
	return gopacket.NewDecodingLayerParser(layers.LayerTypeEthernet, eth, ip, udp, x)
}

func TestDecodingLayerParser(t *testing.T) {
	var (
		eth     layers.Ethernet
		ip      layers.IPv4
		udp     layers.UDP
		x       XAgg
		decoded []gopacket.LayerType
	)
	parser := newParser(&eth, &ip, &udp, &x)
	p := grad(256)
	frame := wire.AppendFrame(nil, worker, service, p, true)
	if err := parser.DecodeLayers(frame, &decoded); err != nil || len(decoded) != 4 || decoded[3] != LayerTypeXAgg {
		t.Fatalf("decoded %v: %v", decoded, err)
	}
	if x.Packet != *p || !x.TagOK() || len(x.LayerContents()) != p.Len() || len(x.LayerPayload()) != 0 {
		t.Errorf("decoded %+v", x.Header)
	}
	if n := testing.AllocsPerRun(100, func() {
		if err := parser.DecodeLayers(frame, &decoded); err != nil {
			t.Fatal(err)
		}
	}); n != 0 {
		t.Errorf("%v allocations a packet", n)
	}

	if err := parser.DecodeLayers(frame[:200], &decoded); !errors.Is(err, wire.ErrShort) || !parser.Truncated {
		t.Errorf("cut in its lanes: %v, truncated %v", err, parser.Truncated)
	}
	if err := parser.DecodeLayers(frame[:60], &decoded); !errors.Is(err, wire.ErrShort) || !parser.Truncated {
		t.Errorf("cut in its header: %v, truncated %v", err, parser.Truncated)
	}
	frame[wire.FrameOverhead] = 0x21
	if err := parser.DecodeLayers(frame, &decoded); !errors.Is(err, wire.ErrVersion) || parser.Truncated {
		t.Errorf("another version: %v, truncated %v", err, parser.Truncated)
	}
}

func BenchmarkDecodingLayerParser(b *testing.B) {
	var (
		eth     layers.Ethernet
		ip      layers.IPv4
		udp     layers.UDP
		x       XAgg
		decoded []gopacket.LayerType
	)
	parser := newParser(&eth, &ip, &udp, &x)
	frame := wire.AppendFrame(nil, worker, service, grad(256), true)
	b.SetBytes(int64(len(frame)))
	b.ReportAllocs()
	for b.Loop() {
		if err := parser.DecodeLayers(frame, &decoded); err != nil {
			b.Fatal(err)
		}
	}
}
