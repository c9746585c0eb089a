package p4rt

import (
	p4v1 "github.com/p4lang/p4runtime/go/p4/v1"
)

// bit-level access to the controller headers, most significant bit first.

func getBits(b []byte, off, width int) []byte {
	out := make([]byte, (width+7)/8)
	for i := range width {
		src, dst := off+i, 8*len(out)-width+i
		out[dst/8] |= b[src/8] >> (7 - src%8) & 1 << (7 - dst%8)
	}
	return out
}

func putBits(b []byte, off, width int, v []byte) {
	for i := range width {
		src, dst := 8*len(v)-width+i, off+i
		b[dst/8] |= v[src/8] >> (7 - src%8) & 1 << (7 - dst%8)
	}
}

// encodeOut is the frame of a packet-out: the packet_out header in front of the payload.
func (p *pipeline) encodeOut(po *p4v1.PacketOut) ([]byte, error) {
	if p.out == nil {
		if len(po.GetMetadata()) != 0 {
			return nil, invalid("unexpected metadata in packet-out: the program has no packet_out header")
		}
		return po.GetPayload(), nil
	}
	frame := make([]byte, p.out.bytes(), p.out.bytes()+len(po.GetPayload()))
	values := map[uint32][]byte{}
	for _, m := range po.GetMetadata() {
		values[m.GetMetadataId()] = m.GetValue()
	}
	off, found := 0, 0
	for _, f := range p.out.fields {
		width := int(f.GetBitwidth())
		if v, ok := values[f.GetId()]; ok {
			found++
			b, err := padded(v, width)
			if err != nil {
				return nil, invalid("packet-out metadata %s: bytestring %x does not fit within %d bits", f.GetName(), v, width)
			}
			putBits(frame, off, width, b)
		}
		off += width
	}
	if found != len(values) {
		return nil, invalid("unknown metadata id in packet-out")
	}
	return append(frame, po.GetPayload()...), nil
}

// decodeIn takes the packet_in header off a frame; nil if the frame is too short to have one.
func (p *pipeline) decodeIn(frame []byte) *p4v1.PacketIn {
	if p.in == nil {
		return &p4v1.PacketIn{Payload: append([]byte(nil), frame...)}
	}
	n := p.in.bytes()
	if len(frame) < n {
		return nil
	}
	pi := &p4v1.PacketIn{Payload: append([]byte(nil), frame[n:]...)}
	off := 0
	for _, f := range p.in.fields {
		width := int(f.GetBitwidth())
		pi.Metadata = append(pi.Metadata, &p4v1.PacketMetadata{
			MetadataId: f.GetId(), Value: canonical(getBits(frame, off, width))})
		off += width
	}
	return pi
}
