package layer

import (
	"fmt"
	"testing"

	"github.com/google/gopacket"
)

// FuzzDecodeFromBytes decodes any payload as package wire does, with a layer that has held another packet before, and
// serializes what it has decoded to the same bytes.
func FuzzDecodeFromBytes(f *testing.F) {
	for _, elems := range []int{0, 1, 64, 65, 256} {
		p := grad(elems)
		payload := make([]byte, p.Len())
		p.Encode(payload)
		f.Add(payload)
		f.Add(payload[:len(payload)-1])
	}
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, data []byte) {
		x := XAgg{Packet: *grad(256)}
		want := x.Packet
		wantErr := want.Decode(data)
		err := x.DecodeFromBytes(data, gopacket.NilDecodeFeedback)
		if fmt.Sprint(err) != fmt.Sprint(wantErr) || err == nil && x.Packet != want {
			t.Fatalf("decoded %+v, %v, want %+v, %v", x.Header, err, want.Header, wantErr)
		}
		if err != nil {
			return
		}
		buf := gopacket.NewSerializeBuffer()
		if err := x.SerializeTo(buf, gopacket.SerializeOptions{}); err != nil {
			t.Fatal(err)
		}
		if string(buf.Bytes()) != string(data) {
			t.Fatalf("serialized % x, want % x", buf.Bytes(), data)
		}
	})
}
