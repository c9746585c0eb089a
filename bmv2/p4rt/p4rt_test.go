package p4rt

import (
	"bytes"
	"math/big"
	"os"
	"testing"

	p4cfg "github.com/p4lang/p4runtime/go/p4/config/v1"
	p4v1 "github.com/p4lang/p4runtime/go/p4/v1"
	"google.golang.org/protobuf/encoding/prototext"
	"google.golang.org/protobuf/proto"

	"xagg/bmv2/engine"
)

func testPipeline(t testing.TB) *pipeline {
	t.Helper()
	program, err := os.ReadFile("../engine/testdata/switch.json")
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile("../engine/testdata/switch.p4info.txtpb")
	if err != nil {
		t.Fatal(err)
	}
	info := new(p4cfg.P4Info)
	if err := prototext.Unmarshal(text, info); err != nil {
		t.Fatal(err)
	}
	prog, err := engine.Load(program, engine.Options{})
	if err != nil {
		t.Fatal(err)
	}
	p, err := bind(prog, info)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// FuzzPadded compares byte strings with big integers.
func FuzzPadded(f *testing.F) {
	f.Add([]byte{0, 1}, uint16(9))
	f.Add([]byte{}, uint16(1))
	f.Add([]byte{1, 0xff}, uint16(9))
	f.Add([]byte{2, 0}, uint16(9))
	f.Fuzz(func(t *testing.T, b []byte, width uint16) {
		w := int(width)%2048 + 1
		v := new(big.Int).SetBytes(b)
		got, err := padded(b, w)
		if (err == nil) != (v.BitLen() <= w) {
			t.Fatalf("%x in %d bits: %v", b, w, err)
		}
		if err != nil {
			return
		}
		if len(got) != (w+7)/8 || new(big.Int).SetBytes(got).Cmp(v) != 0 {
			t.Fatalf("%x in %d bits: %x", b, w, got)
		}
		if c := canonical(got); new(big.Int).SetBytes(c).Cmp(v) != 0 || len(c) > 1 && c[0] == 0 || len(c) == 0 {
			t.Fatalf("canonical form of %x: %x", got, c)
		}
	})
}

// FuzzWrite looks for updates that make the server panic, and reads everything back after them.
func FuzzWrite(f *testing.F) {
	info := testPipeline(f).info
	add := func(u *p4v1.Update) {
		b, err := proto.Marshal(&p4v1.WriteRequest{Updates: []*p4v1.Update{u}})
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	for _, t := range info.Tables {
		te := &p4v1.TableEntry{TableId: t.Preamble.Id, Priority: 1}
		for _, m := range t.MatchFields {
			te.Match = append(te.Match, &p4v1.FieldMatch{FieldId: m.Id,
				FieldMatchType: &p4v1.FieldMatch_Exact_{Exact: &p4v1.FieldMatch_Exact{Value: []byte{1}}}})
		}
		te.Action = &p4v1.TableAction{Type: &p4v1.TableAction_Action{Action: &p4v1.Action{
			ActionId: t.ActionRefs[0].Id, Params: []*p4v1.Action_Param{{ParamId: 1, Value: []byte{7}}}}}}
		add(&p4v1.Update{Type: p4v1.Update_INSERT, Entity: &p4v1.Entity{Entity: &p4v1.Entity_TableEntry{TableEntry: te}}})
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var r p4v1.WriteRequest
		if proto.Unmarshal(b, &r) != nil {
			return
		}
		p := testPipeline(t)
		for _, u := range r.Updates {
			_ = p.write(u)
		}
		count := 0
		out := func(*p4v1.Entity) { count++ }
		if err := p.readTables(&p4v1.TableEntry{CounterData: &p4v1.CounterData{}}, out); err != nil {
			t.Error(err)
		}
		if err := p.readTables(&p4v1.TableEntry{IsDefaultAction: true}, out); err != nil {
			t.Error(err)
		}
		if count < len(p.order) {
			t.Errorf("%d entities read, there are %d default actions", count, len(p.order))
		}
	})
}

func TestPacketHeaders(t *testing.T) {
	p := testPipeline(t)
	frame, err := p.encodeOut(&p4v1.PacketOut{Payload: []byte("load"), Metadata: []*p4v1.PacketMetadata{
		{MetadataId: 2, Value: []byte{0x01, 0xfe}}, {MetadataId: 1, Value: []byte{0x55}}}})
	if want := []byte{0x55<<1 | 1, 0xfe, 'l', 'o', 'a', 'd'}; err != nil || !bytes.Equal(frame, want) {
		t.Errorf("packet-out: %x %v, want %x", frame, err, want)
	}
	for name, m := range map[string]*p4v1.PacketMetadata{
		"unknown field": {MetadataId: 3, Value: []byte{1}}, "too wide": {MetadataId: 1, Value: []byte{0x80}},
	} {
		if _, err := p.encodeOut(&p4v1.PacketOut{Metadata: []*p4v1.PacketMetadata{m}}); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
	in := p.decodeIn([]byte{0xff, 0x05, 'x'})
	want := &p4v1.PacketIn{Payload: []byte("x"), Metadata: []*p4v1.PacketMetadata{
		{MetadataId: 1, Value: []byte{1, 0xfe}}, {MetadataId: 2, Value: []byte{5}}}}
	if !proto.Equal(in, want) {
		t.Errorf("packet-in: %v, want %v", in, want)
	}
	if in := p.decodeIn([]byte{1}); in != nil {
		t.Errorf("packet-in without a header: %v", in)
	}
}
