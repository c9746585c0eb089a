package bmv2_test

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	p4cfg "github.com/p4lang/p4runtime/go/p4/config/v1"
	p4v1 "github.com/p4lang/p4runtime/go/p4/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/encoding/prototext"

	"xagg/bmv2"
	"xagg/bmv2/dataplane"
	"xagg/bmv2/engine"
	"xagg/bmv2/p4rt"
	"xagg/tests/require"
)

const cpuPort = 510

// rig is a switch under test: a controller's connection to it, and a way to exchange frames.
type rig struct {
	name     string
	client   p4v1.P4RuntimeClient
	stream   p4v1.P4Runtime_StreamChannelClient
	exchange func(t *testing.T, in []dataplane.Frame) [][]dataplane.Frame
}

func realRig(t *testing.T) *rig {
	require.Have(t, require.BMv2)
	dir := t.TempDir()
	data := "unix:" + filepath.Join(dir, "data.sock")
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	s, err := bmv2.StartSimpleSwitch(ctx, bmv2.SimpleSwitchConfig{
		Config:   bmv2.Config{GRPCAddr: "unix:" + filepath.Join(dir, "p4rt.sock"), CPUPort: cpuPort},
		DataAddr: data,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	conn, err := grpc.NewClient(s.GRPCAddr(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	dp, err := dataplane.Dial(data, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { dp.Close() })
	return &rig{
		name: "simple_switch_grpc", client: p4v1.NewP4RuntimeClient(conn),
		exchange: func(t *testing.T, in []dataplane.Frame) [][]dataplane.Frame {
			t.Helper()
			var out [][]dataplane.Frame
			for batch := range slices.Chunk(in, dataplane.MaxBatch) {
				ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
				o, err := dp.Exchange(ctx, batch)
				cancel()
				if err != nil {
					t.Fatalf("%v\n%s", err, s.Log())
				}
				out = append(out, o...)
			}
			return out
		},
	}
}

func engineRig(t *testing.T) *rig {
	var prog *engine.Program
	var server *p4rt.Server
	server = p4rt.New(p4rt.Config{
		Commit: func(p *engine.Program) { prog = p },
		PacketOut: func(frame []byte) error {
			var in [][]byte // the program is locked while it emits
			prog.Process(cpuPort, frame, 0, func(port uint16, b []byte) {
				if port == cpuPort {
					in = append(in, bytes.Clone(b))
				}
			})
			for _, b := range in {
				server.PacketIn(b)
			}
			return nil
		},
	})
	lis := bufconn.Listen(1 << 20)
	g := grpc.NewServer(grpc.MaxRecvMsgSize(p4rt.MaxMessage))
	p4v1.RegisterP4RuntimeServer(g, server)
	done := make(chan error, 1)
	go func() { done <- g.Serve(lis) }()
	t.Cleanup(func() {
		g.Stop()
		<-done
	})
	conn, err := grpc.NewClient("passthrough:///engine", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return lis.DialContext(ctx) }))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return &rig{
		name: "engine", client: p4v1.NewP4RuntimeClient(conn),
		exchange: func(t *testing.T, in []dataplane.Frame) [][]dataplane.Frame {
			out := make([][]dataplane.Frame, len(in))
			for i, f := range in {
				prog.Process(f.Port, f.Bytes, uint64(i), func(port uint16, b []byte) {
					if port != cpuPort {
						out[i] = append(out[i], dataplane.Frame{Port: port, Bytes: bytes.Clone(b)})
					}
				})
			}
			return out
		},
	}
}

// election is the election id of the tests' controller.
var election = &p4v1.Uint128{Low: 1}

// start makes the rig's controller the primary and pushes a program.
func (r *rig) start(t *testing.T, json, p4info string) *p4cfg.P4Info {
	t.Helper()
	stream, err := r.client.StreamChannel(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	r.stream = stream
	err = stream.Send(&p4v1.StreamMessageRequest{Update: &p4v1.StreamMessageRequest_Arbitration{
		Arbitration: &p4v1.MasterArbitrationUpdate{ElectionId: election}}})
	if err != nil {
		t.Fatal(err)
	}
	if m, err := stream.Recv(); err != nil || m.GetArbitration().GetStatus().GetCode() != 0 {
		t.Fatalf("%s: arbitration: %v %v", r.name, m, err)
	}
	program, err := os.ReadFile(json)
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(p4info)
	if err != nil {
		t.Fatal(err)
	}
	info := new(p4cfg.P4Info)
	if err := prototext.Unmarshal(text, info); err != nil {
		t.Fatal(err)
	}
	_, err = r.client.SetForwardingPipelineConfig(t.Context(), &p4v1.SetForwardingPipelineConfigRequest{
		ElectionId: election, Action: p4v1.SetForwardingPipelineConfigRequest_VERIFY_AND_COMMIT,
		Config: &p4v1.ForwardingPipelineConfig{P4Info: info, P4DeviceConfig: program},
	})
	if err != nil {
		t.Fatalf("%s: push %s: %v", r.name, json, err)
	}
	return info
}

func (r *rig) write(t *testing.T, updates ...*p4v1.Update) {
	t.Helper()
	if _, err := r.client.Write(t.Context(), &p4v1.WriteRequest{ElectionId: election, Updates: updates}); err != nil {
		t.Fatalf("%s: write: %v", r.name, details(err))
	}
}

// compare runs frames through both switches and compares what left them.
func compare(t *testing.T, json, p4info string, setup func(t *testing.T, r *rig, info *p4cfg.P4Info), in []dataplane.Frame,
	mask func([]byte)) {
	t.Helper()
	want, got := realRig(t), engineRig(t)
	var out [2][][]dataplane.Frame
	for i, r := range []*rig{want, got} {
		info := r.start(t, json, p4info)
		setup(t, r, info)
		out[i] = r.exchange(t, in)
	}
	left, failed := 0, 0
	for i := range in {
		w, g := out[0][i], out[1][i]
		left += len(w)
		sortFrames(w, mask)
		sortFrames(g, mask)
		if d := difference(w, g); d != "" {
			if failed++; failed > 5 {
				t.Fatal("and more")
			}
			t.Errorf("frame %d, port %d:\n%s\n%s", i, in[i].Port, hex.Dump(in[i].Bytes), d)
		}
	}
	t.Logf("%d frames in, %d out, the same from both switches", len(in), left)
	if left == 0 {
		t.Error("no frame left the switch: the test compares nothing")
	}
}

// sortFrames masks what may differ and orders the frames: the switch's egress threads do not.
func sortFrames(list []dataplane.Frame, mask func([]byte)) {
	if mask != nil {
		for _, f := range list {
			mask(f.Bytes)
		}
	}
	slices.SortFunc(list, func(a, b dataplane.Frame) int {
		return cmp.Or(cmp.Compare(a.Port, b.Port), bytes.Compare(a.Bytes, b.Bytes))
	})
}

func difference(want, got []dataplane.Frame) string {
	if len(want) != len(got) {
		return fmt.Sprintf("%d frames left simple_switch_grpc, %d the engine: %v, %v",
			len(want), len(got), ports(want), ports(got))
	}
	for i := range want {
		w, g := want[i], got[i]
		if w.Port != g.Port {
			return fmt.Sprintf("out of port %d from simple_switch_grpc, of port %d from the engine", w.Port, g.Port)
		}
		if !bytes.Equal(w.Bytes, g.Bytes) {
			at := 0
			for at < min(len(w.Bytes), len(g.Bytes)) && w.Bytes[at] == g.Bytes[at] {
				at++
			}
			from := at &^ 15
			return fmt.Sprintf("port %d: differ from byte %d on (%d and %d bytes)\nsimple_switch_grpc, from %d:\n%sengine, from %d:\n%s",
				w.Port, at, len(w.Bytes), len(g.Bytes),
				from, hex.Dump(w.Bytes[min(from, len(w.Bytes)):min(from+64, len(w.Bytes))]),
				from, hex.Dump(g.Bytes[min(from, len(g.Bytes)):min(from+64, len(g.Bytes))]))
		}
	}
	return ""
}

func ports(list []dataplane.Frame) (out []uint16) {
	for _, f := range list {
		out = append(out, f.Port)
	}
	return out
}

// value makes random operands that are often at the borders.
func value(r *rand.Rand, b []byte) {
	switch r.IntN(6) {
	case 0:
		clear(b)
	case 1:
		for i := range b {
			b[i] = 0xff
		}
	case 2:
		clear(b)
		b[0] = 0x80
	case 3:
		clear(b)
		b[len(b)-1] = byte(r.IntN(256))
	default:
		for i := range b {
			b[i] = byte(r.Uint32())
		}
	}
}

func exprFrames(n int) []dataplane.Frame {
	r := rand.New(rand.NewPCG(1, 2))
	// The operands' places in the packet, in bytes; the first 5 bytes are fields that are not whole bytes.
	sizes := []int{5, 4, 4, 6, 8, 8, 16, 16, 16, 256, 256, 1, 1, 4, 4, 8, 8}
	var in []dataplane.Frame
	for i := range n {
		f := make([]byte, 1+5+4+4+6+8+8+16+16+16+256+256+1+1+4+4+8+8)
		f[0] = byte(i % 9)
		at := 1
		for j, n := range sizes {
			value(r, f[at:at+n])
			if j > 0 && r.IntN(5) == 0 && sizes[j-1] == n {
				copy(f[at:at+n], f[at-n:at]) // equal operands
			}
			at += n
		}
		res := make([]byte, 1+1+2+4+8+16+256+1+4+8)
		value(r, res)
		in = append(in, dataplane.Frame{Port: uint16(r.IntN(8)), Bytes: append(f, res...)})
	}
	return in
}

func TestExpressionsAgree(t *testing.T) {
	compare(t, "engine/testdata/expr.json", "engine/testdata/expr.p4info.txtpb", nothing, exprFrames(400), nil)
}

// names finds ids in a P4Info by name.
type names struct {
	t    *testing.T
	info *p4cfg.P4Info
}

func (n names) table(name string) *p4cfg.Table {
	for _, x := range n.info.Tables {
		if x.Preamble.Name == name {
			return x
		}
	}
	n.t.Fatalf("no table %s", name)
	return nil
}

func (n names) action(name string) *p4cfg.Action {
	for _, x := range n.info.Actions {
		if x.Preamble.Name == name {
			return x
		}
	}
	n.t.Fatalf("no action %s", name)
	return nil
}

func (n names) counter(name string) uint32 {
	for _, x := range n.info.Counters {
		if x.Preamble.Name == name {
			return x.Preamble.Id
		}
	}
	n.t.Fatalf("no counter %s", name)
	return 0
}

func num(v uint64) []byte {
	b := binary.BigEndian.AppendUint64(nil, v)
	b = bytes.TrimLeft(b, "\x00")
	if len(b) == 0 {
		return []byte{0}
	}
	return b
}

type lpm struct {
	v      uint64
	prefix int32
}

type ternary struct{ v, mask uint64 }

type between struct{ low, high uint64 }

type optional uint64

// entry builds a table entry; a nil match is left out.
func (n names) entry(table string, priority int32, match []any, action string, args ...uint64) *p4v1.TableEntry {
	ti := n.table(table)
	e := &p4v1.TableEntry{TableId: ti.Preamble.Id, Priority: priority}
	for i, m := range match {
		f := &p4v1.FieldMatch{FieldId: ti.MatchFields[i].Id}
		switch m := m.(type) {
		case nil:
			continue
		case int:
			f.FieldMatchType = &p4v1.FieldMatch_Exact_{Exact: &p4v1.FieldMatch_Exact{Value: num(uint64(m))}}
		case lpm:
			f.FieldMatchType = &p4v1.FieldMatch_Lpm{Lpm: &p4v1.FieldMatch_LPM{Value: num(m.v), PrefixLen: m.prefix}}
		case ternary:
			f.FieldMatchType = &p4v1.FieldMatch_Ternary_{Ternary: &p4v1.FieldMatch_Ternary{Value: num(m.v), Mask: num(m.mask)}}
		case between:
			f.FieldMatchType = &p4v1.FieldMatch_Range_{Range: &p4v1.FieldMatch_Range{Low: num(m.low), High: num(m.high)}}
		case optional:
			f.FieldMatchType = &p4v1.FieldMatch_Optional_{Optional: &p4v1.FieldMatch_Optional{Value: num(uint64(m))}}
		}
		e.Match = append(e.Match, f)
	}
	if action != "" {
		ai := n.action(action)
		a := &p4v1.Action{ActionId: ai.Preamble.Id}
		for i, v := range args {
			a.Params = append(a.Params, &p4v1.Action_Param{ParamId: ai.Params[i].Id, Value: num(v)})
		}
		e.Action = &p4v1.TableAction{Type: &p4v1.TableAction_Action{Action: a}}
	}
	return e
}

func insertEntry(e *p4v1.TableEntry) *p4v1.Update {
	return &p4v1.Update{Type: p4v1.Update_INSERT, Entity: &p4v1.Entity{Entity: &p4v1.Entity_TableEntry{TableEntry: e}}}
}

func group(typ p4v1.Update_Type, id uint32, replicas ...[2]uint32) *p4v1.Update {
	g := &p4v1.MulticastGroupEntry{MulticastGroupId: id}
	for _, r := range replicas {
		g.Replicas = append(g.Replicas, &p4v1.Replica{PortKind: &p4v1.Replica_EgressPort{EgressPort: r[0]}, Instance: r[1]})
	}
	return &p4v1.Update{Type: typ, Entity: &p4v1.Entity{Entity: &p4v1.Entity_PacketReplicationEngineEntry{
		PacketReplicationEngineEntry: &p4v1.PacketReplicationEngineEntry{
			Type: &p4v1.PacketReplicationEngineEntry_MulticastGroupEntry{MulticastGroupEntry: g}}}}}
}

func programSwitch(t *testing.T, r *rig, info *p4cfg.P4Info) {
	n := names{t, info}
	var u []*p4v1.Update
	add := func(e *p4v1.TableEntry) { u = append(u, insertEntry(e)) }
	add(n.entry("I.exact_t", 0, []any{1, 0x123, 1}, "I.exact_hit", 11))
	add(n.entry("I.exact_t", 0, []any{1, 0x123, 0}, "I.exact_hit", 12))
	add(n.entry("I.exact_t", 0, []any{2, 0x123, 0}, "I.exact_hit", 13))
	add(n.entry("I.exact_t", 0, []any{2, 0x124, 0}, "NoAction"))
	add(n.entry("I.lpm_t", 0, []any{1, lpm{0x0a000000, 8}}, "I.lpm_hit", 21))
	add(n.entry("I.lpm_t", 0, []any{1, lpm{0x0a010000, 16}}, "I.lpm_hit", 22))
	add(n.entry("I.lpm_t", 0, []any{1, lpm{0x0a010203, 32}}, "I.lpm_hit", 23))
	add(n.entry("I.lpm_t", 0, []any{1, nil}, "I.lpm_hit", 24))
	add(n.entry("I.lpm_t", 0, []any{2, lpm{0x0a014000, 19}}, "NoAction"))
	add(n.entry("I.ternary_t", 10, []any{ternary{0x0a000000, 0xff000000}, nil, 1, nil}, "I.ternary_hit", 31))
	add(n.entry("I.ternary_t", 20, []any{ternary{0x0a010000, 0xffff0000}, ternary{0x23, 0xff}, 1, nil}, "I.ternary_hit", 32))
	add(n.entry("I.ternary_t", 5, []any{nil, nil, 1, nil}, "I.ternary_hit", 33))
	add(n.entry("I.ternary_t", 30, []any{nil, ternary{0x100, 0xf00}, 2, optional(2)}, "I.ternary_drop"))
	add(n.entry("I.ternary_t", 29, []any{nil, nil, 2, optional(2)}, "I.ternary_hit", 34))
	add(n.entry("I.range_t", 1, []any{between{1, 3}, nil}, "I.range_hit", 41))
	add(n.entry("I.range_t", 2, []any{between{2, 2}, ternary{4, 4}}, "I.range_hit", 42))
	add(n.entry("I.range_t", 3, []any{nil, ternary{7, 7}}, "NoAction"))
	add(n.entry("E.replica", 0, []any{7, 1}, "E.rewrite", 0x020000000001))
	add(n.entry("E.replica", 0, []any{9, 3}, "E.rewrite", 0x020000000003))
	u = append(u,
		group(p4v1.Update_INSERT, 1, [2]uint32{1, 7}, [2]uint32{2, 7}, [2]uint32{3, 9}),
		group(p4v1.Update_INSERT, 2, [2]uint32{3, 0}, [2]uint32{3, 1}, [2]uint32{1, 1}),
		group(p4v1.Update_INSERT, 3))
	r.write(t, u...)
}

func pick(r *rand.Rand, list ...uint64) uint64 { return list[r.IntN(len(list))] }

// askFrame is a frame for switch.p4 that often hits its tables' entries and parser's branches, and is often cut short.
func askFrame(r *rand.Rand) []byte {
	f := make([]byte, 12)
	value(r, f)
	typ := uint16(pick(r, 0x1234, 0x1234, 0x1234, 0x1234, 0x8001, 0x9000, 0x0800, 0x86dd))
	f = binary.BigEndian.AppendUint16(f, typ)
	if typ == 0x0800 {
		return cut(r, append(f, ipPacket(r)...))
	}
	if typ>>12 == 8 {
		f = append(f, 1, 2, 3, 4)
	}
	kind := pick(r, 0, 1, 1, 2, 2, 3, 3, 4, 8, 9, 10, 11, 12, 13, 14, 15)
	f = binary.BigEndian.AppendUint16(f, uint16(kind<<12|pick(r, 0x123, 0x123, 0x124, 0x223, uint64(r.IntN(4096)))))
	f = binary.BigEndian.AppendUint16(f, uint16(pick(r, 0, 1, 1, 2, 3, 4, 9999)))
	f = binary.BigEndian.AppendUint32(f, uint32(pick(r, 0x0a010203, 0x0a010204, 0x0a020000, 0x0a015000, uint64(r.Uint32()))))
	f = append(f, byte(pick(r, 1, 2, 3, 5, 7)<<5|pick(r, 3, 16, 17, 31)))
	f = binary.BigEndian.AppendUint16(f, uint16(pick(r, 0, 1, 2, 3, 4, 300, 511, 512)))
	if r.IntN(2) == 0 {
		f = append(f, 1, 2, 3, 4, 0xbe, 0xef)
	}
	tail := make([]byte, r.IntN(60))
	value(r, append(tail, 0)[:len(tail)+1])
	return cut(r, append(f, tail...))
}

func cut(r *rand.Rand, f []byte) []byte {
	if r.IntN(6) == 0 {
		return f[:1+r.IntN(len(f))]
	}
	return f
}

func sum16(parts ...[]byte) uint16 {
	var s uint32
	for _, p := range parts {
		for len(p) > 1 {
			s += uint32(binary.BigEndian.Uint16(p))
			p = p[2:]
		}
		if len(p) == 1 {
			s += uint32(p[0]) << 8
		}
	}
	for s > 0xffff {
		s = s>>16 + s&0xffff
	}
	return ^uint16(s)
}

func ipPacket(r *rand.Rand) []byte {
	payload := make([]byte, r.IntN(40))
	for i := range payload {
		payload[i] = byte(r.Uint32())
	}
	udp := binary.BigEndian.AppendUint16(nil, uint16(r.Uint32()))
	udp = binary.BigEndian.AppendUint16(udp, uint16(pick(r, 53, 54)))
	udp = binary.BigEndian.AppendUint16(udp, uint16(8+len(payload)))
	udp = append(append(udp, 0, 0), payload...)
	ip := []byte{0x45, 0, 0, 0, 1, 2, 0x40, 0, 64, byte(pick(r, 17, 17, 17, 6)), 0, 0, 10, 0, 0, 1, 10, 0, 0, 2}
	binary.BigEndian.PutUint16(ip[2:], uint16(20+len(udp)))
	if r.IntN(4) != 0 {
		binary.BigEndian.PutUint16(ip[10:], sum16(ip))
	}
	if r.IntN(4) != 0 {
		binary.BigEndian.PutUint16(udp[6:], sum16(ip[12:20], []byte{0, 17}, udp[4:6], udp))
	}
	if r.IntN(4) == 0 {
		udp[len(udp)-1] ^= 1
	}
	return append(ip, udp...)
}

func TestSwitchesAgree(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	var in []dataplane.Frame
	for range 1500 {
		in = append(in, dataplane.Frame{Port: uint16(pick(r, 0, 1, 1, 2, 2, 3)), Bytes: askFrame(r)})
	}
	compare(t, "engine/testdata/switch.json", "engine/testdata/switch.p4info.txtpb", programSwitch, in, nil)
}
