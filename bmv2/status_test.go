package bmv2_test

import (
	"context"
	"io"
	"os"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	p4v1 "github.com/p4lang/p4runtime/go/p4/v1"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"
)

const (
	switchJSON = "engine/testdata/switch.json"
	switchInfo = "engine/testdata/switch.p4info.txtpb"
)

// bothRigs runs a test on the engine and, where it is installed, on the real switch.
func bothRigs(t *testing.T, f func(t *testing.T, r *rig, n names)) {
	for name, make := range map[string]func(*testing.T) *rig{"engine": engineRig, "simple_switch_grpc": realRig} {
		t.Run(name, func(t *testing.T) {
			r := make(t)
			f(t, r, names{t, r.start(t, switchJSON, switchInfo)})
		})
	}
}

func update(typ p4v1.Update_Type, e *p4v1.TableEntry) *p4v1.Update {
	return &p4v1.Update{Type: typ, Entity: &p4v1.Entity{Entity: &p4v1.Entity_TableEntry{TableEntry: e}}}
}

func counterUpdate(typ p4v1.Update_Type, id uint32, index *p4v1.Index, packets, bytes int64) *p4v1.Update {
	return &p4v1.Update{Type: typ, Entity: &p4v1.Entity{Entity: &p4v1.Entity_CounterEntry{CounterEntry: &p4v1.CounterEntry{
		CounterId: id, Index: index, Data: &p4v1.CounterData{PacketCount: packets, ByteCount: bytes}}}}}
}

func directUpdate(typ p4v1.Update_Type, e *p4v1.TableEntry, packets, bytes int64) *p4v1.Update {
	return &p4v1.Update{Type: typ, Entity: &p4v1.Entity{Entity: &p4v1.Entity_DirectCounterEntry{
		DirectCounterEntry: &p4v1.DirectCounterEntry{TableEntry: e, Data: &p4v1.CounterData{PacketCount: packets, ByteCount: bytes}}}}}
}

// TestWriteCodes is a batch whose updates have the expected codes, in order, on both switches.
func TestWriteCodes(t *testing.T) {
	const (
		ins = p4v1.Update_INSERT
		mod = p4v1.Update_MODIFY
		del = p4v1.Update_DELETE
	)
	bothRigs(t, func(t *testing.T, r *rig, n names) {
		exact := func(args ...uint64) *p4v1.TableEntry {
			return n.entry("I.exact_t", 0, []any{1, 0x123, 1}, "I.exact_hit", args...)
		}
		change := func(e *p4v1.TableEntry, f func(*p4v1.TableEntry)) *p4v1.TableEntry {
			f(e)
			return e
		}
		raw := func(b ...byte) *p4v1.TableEntry {
			return change(exact(1), func(e *p4v1.TableEntry) { e.Match[1].GetExact().Value = b })
		}
		deflt := func(table, action string, args ...uint64) *p4v1.TableEntry {
			return change(n.entry(table, 0, nil, action, args...), func(e *p4v1.TableEntry) { e.IsDefaultAction = true })
		}
		kinds := n.counter("I.kinds")
		at := func(i int64) *p4v1.Index { return &p4v1.Index{Index: i} }
		entity := func(e *p4v1.Entity) *p4v1.Update { return &p4v1.Update{Type: ins, Entity: e} }

		for _, c := range []struct {
			name string
			u    *p4v1.Update
			want codes.Code
		}{
			{"insert", update(ins, exact(1)), codes.OK},
			{"insert again", update(ins, exact(2)), codes.AlreadyExists},
			{"modify", update(mod, exact(3)), codes.OK},
			{"modify another", update(mod, n.entry("I.exact_t", 0, []any{2, 0x123, 1}, "I.exact_hit", 1)), codes.NotFound},
			{"delete another", update(del, n.entry("I.exact_t", 0, []any{2, 0x123, 1}, "")), codes.NotFound},
			{"delete", update(del, n.entry("I.exact_t", 0, []any{1, 0x123, 1}, "")), codes.OK},
			{"no update type", update(0, exact(1)), codes.InvalidArgument},
			{"non-canonical value", update(ins, raw(0, 0, 0, 1, 0x23)), codes.OK},
			{"the same, canonical", update(ins, exact(1)), codes.AlreadyExists},
			{"value too wide", update(ins, raw(0x11, 0x23)), codes.InvalidArgument},
			{"value empty", update(ins, raw()), codes.OK},
			{"argument too wide", update(ins, n.entry("I.exact_t", 0, []any{9, 9, 1}, "I.exact_hit", 0x10000)), codes.InvalidArgument},
			{"unknown table", update(ins, change(exact(1), func(e *p4v1.TableEntry) { e.TableId = 0x02000001 })), codes.InvalidArgument},
			{"missing match field", update(ins, n.entry("I.exact_t", 0, []any{1, nil, 1}, "I.exact_hit", 1)), codes.InvalidArgument},
			{"unknown match field", update(ins, change(exact(1), func(e *p4v1.TableEntry) { e.Match[0].FieldId = 77 })), codes.InvalidArgument},
			{"too many match fields", update(ins, change(exact(1), func(e *p4v1.TableEntry) { e.Match = append(e.Match, e.Match[0]) })),
				codes.InvalidArgument},
			{"other match kind", update(ins, n.entry("I.exact_t", 0, []any{lpm{1, 4}, 1, 1}, "I.exact_hit", 1)), codes.InvalidArgument},
			{"priority where none is", update(ins, n.entry("I.exact_t", 5, []any{1, 1, 1}, "I.exact_hit", 1)), codes.InvalidArgument},
			{"no action", update(ins, n.entry("I.exact_t", 0, []any{1, 1, 1}, "")), codes.InvalidArgument},
			{"another table's action", update(ins, n.entry("I.exact_t", 0, []any{1, 1, 1}, "I.lpm_hit", 1)), codes.InvalidArgument},
			{"too few arguments", update(ins, n.entry("I.exact_t", 0, []any{1, 1, 1}, "I.exact_hit")), codes.InvalidArgument},
			{"unknown argument", update(ins, change(n.entry("I.exact_t", 0, []any{1, 1, 1}, "I.exact_hit", 1), func(e *p4v1.TableEntry) {
				e.Action.GetAction().Params[0].ParamId = 9
			})), codes.InvalidArgument},
			{"idle timeout", update(ins, change(exact(1), func(e *p4v1.TableEntry) { e.IdleTimeoutNs = 5 })), codes.InvalidArgument},
			{"action profile member", update(ins, change(exact(1), func(e *p4v1.TableEntry) {
				e.Action = &p4v1.TableAction{Type: &p4v1.TableAction_ActionProfileMemberId{ActionProfileMemberId: 1}}
			})), codes.InvalidArgument},
			{"meter config", update(ins, change(n.entry("I.exact_t", 0, []any{1, 1, 1}, "I.exact_hit", 1), func(e *p4v1.TableEntry) {
				e.MeterConfig = &p4v1.MeterConfig{}
			})), codes.InvalidArgument},

			{"lpm", update(ins, n.entry("I.lpm_t", 0, []any{1, lpm{0x0a000000, 8}}, "I.lpm_hit", 1)), codes.OK},
			{"lpm with bits behind the prefix", update(ins, n.entry("I.lpm_t", 0, []any{1, lpm{0x0a000001, 8}}, "I.lpm_hit", 1)),
				codes.InvalidArgument},
			{"lpm of length 0", update(ins, n.entry("I.lpm_t", 0, []any{1, lpm{0, 0}}, "I.lpm_hit", 1)), codes.InvalidArgument},
			{"lpm too long", update(ins, n.entry("I.lpm_t", 0, []any{1, lpm{0, 33}}, "I.lpm_hit", 1)), codes.InvalidArgument},
			{"lpm left out", update(ins, n.entry("I.lpm_t", 0, []any{1, nil}, "I.lpm_hit", 1)), codes.OK},

			{"ternary", update(ins, n.entry("I.ternary_t", 3, []any{ternary{1, 1}, nil, 1, nil}, "I.ternary_hit", 1)), codes.OK},
			{"ternary with another priority", update(ins, n.entry("I.ternary_t", 4, []any{ternary{1, 1}, nil, 1, nil}, "I.ternary_hit", 1)),
				codes.OK},
			{"ternary without priority", update(ins, n.entry("I.ternary_t", 0, []any{ternary{1, 1}, nil, 1, nil}, "I.ternary_hit", 1)),
				codes.InvalidArgument},
			{"ternary with mask 0", update(ins, n.entry("I.ternary_t", 4, []any{ternary{0, 0}, nil, 1, nil}, "I.ternary_hit", 1)),
				codes.InvalidArgument},
			{"ternary value beyond mask", update(ins, n.entry("I.ternary_t", 4, []any{ternary{3, 1}, nil, 1, nil}, "I.ternary_hit", 1)),
				codes.InvalidArgument},
			{"default-only action in an entry", update(ins, n.entry("I.ternary_t", 4, []any{ternary{2, 2}, nil, 1, nil}, "NoAction")),
				codes.PermissionDenied},
			{"range", update(ins, n.entry("I.range_t", 1, []any{between{1, 3}, nil}, "I.range_hit", 1)), codes.OK},
			{"range turned round", update(ins, n.entry("I.range_t", 1, []any{between{3, 1}, nil}, "I.range_hit", 1)), codes.InvalidArgument},
			{"range of everything", update(ins, change(n.entry("I.range_t", 1, []any{between{0, 0xffff}, nil}, "I.range_hit", 1),
				func(e *p4v1.TableEntry) { e.Match[0].GetRange().Low = []byte{0, 0} })), codes.InvalidArgument},
			{"range of everything, canonical", update(ins, n.entry("I.range_t", 1, []any{between{0, 0xffff}, nil}, "I.range_hit", 1)), codes.OK},

			{"modify default", update(mod, deflt("I.lpm_t", "I.lpm_hit", 5)), codes.OK},
			{"reset default", update(mod, deflt("I.lpm_t", "")), codes.OK},
			{"insert default", update(ins, deflt("I.lpm_t", "I.lpm_hit", 5)), codes.InvalidArgument},
			{"delete default", update(del, deflt("I.lpm_t", "")), codes.InvalidArgument},
			{"default with key", update(mod, change(n.entry("I.lpm_t", 0, []any{1, nil}, "I.lpm_hit", 5), func(e *p4v1.TableEntry) {
				e.IsDefaultAction = true
			})), codes.InvalidArgument},
			{"constant default", update(mod, deflt("I.range_t", "I.range_hit", 5)), codes.PermissionDenied},
			{"reset constant default", update(mod, deflt("I.range_t", "")), codes.PermissionDenied},
			{"constant entries", update(ins, n.entry("I.fixed_t", 1, []any{5, nil}, "I.fixed_hit", 5)), codes.Unknown},

			{"counter", counterUpdate(mod, kinds, at(3), 5, 500), codes.OK},
			{"insert counter", counterUpdate(ins, kinds, at(3), 5, 500), codes.InvalidArgument},
			{"reset counter", counterUpdate(del, kinds, at(3), 0, 0), codes.OK},
			{"counter index", counterUpdate(mod, kinds, at(16), 5, 500), codes.Unknown},
			{"negative counter index", counterUpdate(mod, kinds, at(-1), 5, 500), codes.InvalidArgument},
			{"all counters", counterUpdate(mod, kinds, nil, 5, 500), codes.Unimplemented},
			{"unknown counter", counterUpdate(mod, kinds+1, at(1), 5, 500), codes.InvalidArgument},
			{"direct counter", directUpdate(mod, n.entry("I.exact_t", 0, []any{1, 0x123, 1}, ""), 7, 700), codes.OK},
			{"direct counter of no entry", directUpdate(mod, n.entry("I.exact_t", 0, []any{3, 0x123, 1}, ""), 7, 700), codes.InvalidArgument},
			{"direct counter of a table without", directUpdate(mod, n.entry("I.lpm_t", 0, []any{1, nil}, ""), 7, 700), codes.InvalidArgument},

			{"group", group(ins, 5, [2]uint32{1, 1}, [2]uint32{2, 1}), codes.OK},
			{"group again", group(ins, 5, [2]uint32{1, 1}), codes.AlreadyExists},
			{"modify group", group(mod, 5, [2]uint32{1, 1}, [2]uint32{1, 2}), codes.OK},
			{"modify no group", group(mod, 6, [2]uint32{1, 1}), codes.NotFound},
			{"delete no group", group(del, 6), codes.NotFound},
			{"delete group", group(del, 5), codes.OK},
			{"replica twice", group(ins, 7, [2]uint32{1, 1}, [2]uint32{1, 1}), codes.InvalidArgument},
			{"group 0", group(ins, 0, [2]uint32{1, 1}), codes.InvalidArgument},
			{"group 32768", group(ins, 32768, [2]uint32{1, 1}), codes.OutOfRange},
			{"group 32767", group(ins, 32767, [2]uint32{1, 1}), codes.OK},

			{"register", entity(&p4v1.Entity{Entity: &p4v1.Entity_RegisterEntry{RegisterEntry: &p4v1.RegisterEntry{}}}), codes.Unimplemented},
			{"value set", entity(&p4v1.Entity{Entity: &p4v1.Entity_ValueSetEntry{ValueSetEntry: &p4v1.ValueSetEntry{}}}), codes.Unimplemented},
			{"no entity", entity(nil), codes.Unknown},
			{"action profile", entity(&p4v1.Entity{Entity: &p4v1.Entity_ActionProfileMember{
				ActionProfileMember: &p4v1.ActionProfileMember{ActionProfileId: 0x11000001}}}), codes.InvalidArgument},
			{"meter", entity(&p4v1.Entity{Entity: &p4v1.Entity_MeterEntry{MeterEntry: &p4v1.MeterEntry{MeterId: 0x14000001}}}),
				codes.InvalidArgument},
		} {
			// Between two updates that succeed, so that the details have to tell them apart.
			_, err := r.client.Write(t.Context(), &p4v1.WriteRequest{ElectionId: election, Updates: []*p4v1.Update{
				counterUpdate(mod, kinds, at(1), 1, 1), c.u, counterUpdate(mod, kinds, at(1), 1, 1)}})
			if c.want == codes.OK {
				if err != nil {
					t.Errorf("%s: %s, want OK", c.name, details(err))
				}
				continue
			}
			if status.Code(err) != codes.Unknown {
				t.Errorf("%s: the batch is %v, want Unknown", c.name, status.Code(err))
				continue
			}
			var got []codes.Code
			for _, d := range status.Convert(err).Details() {
				got = append(got, codes.Code(d.(*p4v1.Error).CanonicalCode))
			}
			if d := cmp.Diff([]codes.Code{codes.OK, c.want, codes.OK}, got); d != "" {
				t.Errorf("%s: %s", c.name, d)
			}
		}

		// The table holds 8 entries; one value of those above is in it, and the empty one.
		for i := range 6 {
			r.write(t, update(ins, n.entry("I.exact_t", 0, []any{7, i, 1}, "I.exact_hit", 1)))
		}
		_, err := r.client.Write(t.Context(), &p4v1.WriteRequest{ElectionId: election, Updates: []*p4v1.Update{
			update(ins, n.entry("I.exact_t", 0, []any{7, 99, 1}, "I.exact_hit", 1))}})
		if ds := status.Convert(err).Details(); len(ds) != 1 || codes.Code(ds[0].(*p4v1.Error).CanonicalCode) != codes.Unknown {
			t.Errorf("table full: %v, want Unknown in the details", err)
		}
		_, err = r.client.Write(t.Context(), &p4v1.WriteRequest{ElectionId: election, Atomicity: p4v1.WriteRequest_ROLLBACK_ON_ERROR})
		if status.Code(err) != codes.Unimplemented {
			t.Errorf("atomic write: %v, want Unimplemented", err)
		}
	})
}

// readAll reads entities; what came before an error is returned too.
func readAll(t *testing.T, r *rig, want ...*p4v1.Entity) ([]*p4v1.Entity, error) {
	t.Helper()
	s, err := r.client.Read(t.Context(), &p4v1.ReadRequest{Entities: want})
	if err != nil {
		t.Fatal(err)
	}
	var out []*p4v1.Entity
	for {
		m, err := s.Recv()
		if err == io.EOF {
			return out, nil
		}
		if err != nil {
			return out, err
		}
		out = append(out, m.Entities...)
	}
}

func tableEntity(e *p4v1.TableEntry) *p4v1.Entity {
	return &p4v1.Entity{Entity: &p4v1.Entity_TableEntry{TableEntry: e}}
}

// TestReadsAgree reads everything from both switches after the same writes and packets.
func TestReadsAgree(t *testing.T) {
	var results [2][]*p4v1.Entity
	var errs [2][]codes.Code
	for i, r := range []*rig{engineRig(t), realRig(t)} {
		n := names{t, r.start(t, switchJSON, switchInfo)}
		programSwitch(t, r, n.info)
		e := n.entry("I.exact_t", 0, []any{5, 5, 0}, "I.exact_hit", 3)
		e.Metadata, e.CounterData = []byte("note"), &p4v1.CounterData{PacketCount: 9, ByteCount: 90}
		d := n.entry("I.lpm_t", 0, nil, "I.lpm_hit", 0xabc)
		d.IsDefaultAction = true
		r.write(t, insertEntry(e), update(p4v1.Update_MODIFY, d))
		r.exchange(t, recordedFrames())

		counters := &p4v1.CounterData{}
		tables := func(f func(*p4v1.TableEntry)) *p4v1.Entity {
			e := &p4v1.TableEntry{}
			f(e)
			return tableEntity(e)
		}
		for _, q := range []*p4v1.Entity{
			tables(func(e *p4v1.TableEntry) { e.CounterData = counters }),
			tables(func(e *p4v1.TableEntry) { e.IsDefaultAction = true }),
			tables(func(e *p4v1.TableEntry) { e.TableId = n.table("I.lpm_t").Preamble.Id; e.IsDefaultAction = true }),
			tableEntity(n.entry("I.exact_t", 0, []any{1, 0x123, 1}, "")),
			tableEntity(n.entry("I.exact_t", 0, []any{1, 0x999, 1}, "")),
			tableEntity(n.entry("I.exact_t", 0, []any{1, nil, 1}, "")),
			tables(func(e *p4v1.TableEntry) { e.TableId = 0x02000001 }),
			{Entity: &p4v1.Entity_CounterEntry{CounterEntry: &p4v1.CounterEntry{}}},
			{Entity: &p4v1.Entity_CounterEntry{CounterEntry: &p4v1.CounterEntry{CounterId: n.counter("I.kinds"), Index: &p4v1.Index{Index: 3}}}},
			{Entity: &p4v1.Entity_CounterEntry{CounterEntry: &p4v1.CounterEntry{CounterId: n.counter("I.kinds"), Index: &p4v1.Index{Index: 16}}}},
			{Entity: &p4v1.Entity_DirectCounterEntry{DirectCounterEntry: &p4v1.DirectCounterEntry{
				TableEntry: &p4v1.TableEntry{TableId: n.table("I.exact_t").Preamble.Id}}}},
			{Entity: &p4v1.Entity_DirectCounterEntry{DirectCounterEntry: &p4v1.DirectCounterEntry{
				TableEntry: n.entry("I.exact_t", 0, []any{1, 0x123, 1}, "")}}},
			{Entity: &p4v1.Entity_DirectCounterEntry{DirectCounterEntry: &p4v1.DirectCounterEntry{
				TableEntry: &p4v1.TableEntry{TableId: n.table("I.exact_t").Preamble.Id, IsDefaultAction: true}}}},
			{Entity: &p4v1.Entity_DirectCounterEntry{DirectCounterEntry: &p4v1.DirectCounterEntry{TableEntry: &p4v1.TableEntry{}}}},
			{Entity: &p4v1.Entity_DirectCounterEntry{}},
			group(0, 0).Entity,
			group(0, 2).Entity,
			group(0, 77).Entity,
			{Entity: &p4v1.Entity_RegisterEntry{RegisterEntry: &p4v1.RegisterEntry{}}},
			{Entity: &p4v1.Entity_MeterEntry{MeterEntry: &p4v1.MeterEntry{}}},
			{Entity: &p4v1.Entity_ActionProfileGroup{ActionProfileGroup: &p4v1.ActionProfileGroup{}}},
			{},
		} {
			got, err := readAll(t, r, q)
			if err == nil {
				results[i] = append(results[i], got...)
			}
			errs[i] = append(errs[i], status.Code(err))
		}
	}
	if d := cmp.Diff(errs[1], errs[0]); d != "" {
		t.Errorf("codes of the reads (- simple_switch_grpc, + engine):\n%s", d)
	}
	// The order of entities is nobody's promise, nor that of replicas.
	less := func(a, b proto.Message) bool { return key(a) < key(b) }
	opts := []gocmp{protocmp.Transform(), protocmp.SortRepeated(func(a, b *p4v1.Replica) bool { return less(a, b) }),
		protocmp.SortRepeated(func(a, b *p4v1.FieldMatch) bool { return a.FieldId < b.FieldId })}
	sortEntities(results[0])
	sortEntities(results[1])
	if d := cmp.Diff(results[1], results[0], opts...); d != "" {
		t.Errorf("entities (- simple_switch_grpc, + engine):\n%s", d)
	}
	t.Logf("%d entities read", len(results[0]))
}

func TestPipelineCodes(t *testing.T) {
	bothRigs(t, func(t *testing.T, r *rig, n names) {
		program, err := os.ReadFile(switchJSON)
		if err != nil {
			t.Fatal(err)
		}
		push := func(action p4v1.SetForwardingPipelineConfigRequest_Action, id *p4v1.Uint128, cookie uint64) codes.Code {
			_, err := r.client.SetForwardingPipelineConfig(t.Context(), &p4v1.SetForwardingPipelineConfigRequest{
				ElectionId: id, Action: action, Config: &p4v1.ForwardingPipelineConfig{
					P4Info: n.info, P4DeviceConfig: program, Cookie: &p4v1.ForwardingPipelineConfig_Cookie{Cookie: cookie}}})
			return status.Code(err)
		}
		get := func(typ p4v1.GetForwardingPipelineConfigRequest_ResponseType) *p4v1.ForwardingPipelineConfig {
			c, err := r.client.GetForwardingPipelineConfig(t.Context(), &p4v1.GetForwardingPipelineConfigRequest{ResponseType: typ})
			if err != nil {
				t.Fatal(err)
			}
			return c.Config
		}
		if c := get(p4v1.GetForwardingPipelineConfigRequest_COOKIE_ONLY); c.Cookie != nil || c.P4Info != nil || c.P4DeviceConfig != nil {
			t.Errorf("config without cookie: %v", c)
		}
		for _, c := range []struct {
			action p4v1.SetForwardingPipelineConfigRequest_Action
			id     *p4v1.Uint128
			want   codes.Code
		}{
			{p4v1.SetForwardingPipelineConfigRequest_UNSPECIFIED, election, codes.InvalidArgument},
			{p4v1.SetForwardingPipelineConfigRequest_VERIFY, election, codes.OK},
			{p4v1.SetForwardingPipelineConfigRequest_VERIFY, &p4v1.Uint128{Low: 2}, codes.PermissionDenied},
			{p4v1.SetForwardingPipelineConfigRequest_VERIFY, nil, codes.PermissionDenied},
			{p4v1.SetForwardingPipelineConfigRequest_VERIFY_AND_COMMIT, election, codes.OK},
		} {
			if got := push(c.action, c.id, 77); got != c.want {
				t.Errorf("%v as %v: %v, want %v", c.action, c.id, got, c.want)
			}
		}
		if c := get(p4v1.GetForwardingPipelineConfigRequest_COOKIE_ONLY); c.Cookie.GetCookie() != 77 || c.P4Info != nil || c.P4DeviceConfig != nil {
			t.Errorf("cookie only: %v", c)
		}
		if c := get(p4v1.GetForwardingPipelineConfigRequest_ALL); !proto.Equal(c.P4Info, n.info) || string(c.P4DeviceConfig) != string(program) {
			t.Error("the whole config is not what was pushed")
		}
		if c := get(p4v1.GetForwardingPipelineConfigRequest_P4INFO_AND_COOKIE); !proto.Equal(c.P4Info, n.info) || c.P4DeviceConfig != nil {
			t.Error("P4Info and cookie are not what was pushed")
		}
		caps, err := r.client.Capabilities(t.Context(), &p4v1.CapabilitiesRequest{})
		if err != nil || caps.P4RuntimeApiVersion == "" {
			t.Errorf("capabilities: %v %v", caps, err)
		}
	})
}

func arbitrate(t *testing.T, s p4v1.P4Runtime_StreamChannelClient, id uint64) {
	t.Helper()
	err := s.Send(&p4v1.StreamMessageRequest{Update: &p4v1.StreamMessageRequest_Arbitration{
		Arbitration: &p4v1.MasterArbitrationUpdate{ElectionId: &p4v1.Uint128{Low: id}}}})
	if err != nil {
		t.Fatal(err)
	}
}

func expectRole(t *testing.T, who string, s p4v1.P4Runtime_StreamChannelClient, want codes.Code, id uint64) {
	t.Helper()
	m, err := s.Recv()
	if err != nil {
		t.Fatalf("%s: %v", who, err)
	}
	a := m.GetArbitration()
	if codes.Code(a.GetStatus().GetCode()) != want || a.GetElectionId().GetLow() != id {
		t.Errorf("%s: %v, want %v and election id %d", who, m, want, id)
	}
}

func TestArbitration(t *testing.T) {
	bothRigs(t, func(t *testing.T, r *rig, n names) {
		open := func() (p4v1.P4Runtime_StreamChannelClient, context.CancelFunc) {
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			t.Cleanup(cancel)
			s, err := r.client.StreamChannel(ctx)
			if err != nil {
				t.Fatal(err)
			}
			return s, cancel
		}
		write := func(id uint64) codes.Code {
			_, err := r.client.Write(t.Context(), &p4v1.WriteRequest{ElectionId: &p4v1.Uint128{Low: id}, Updates: []*p4v1.Update{
				counterUpdate(p4v1.Update_MODIFY, n.counter("I.kinds"), &p4v1.Index{Index: 1}, 1, 1)}})
			return status.Code(err)
		}
		expectCode := func(what string, got, want codes.Code) {
			t.Helper()
			if got != want {
				t.Errorf("%s: %v, want %v", what, got, want)
			}
		}
		expectCode("write as primary", write(1), codes.OK)
		second, leave := open()
		arbitrate(t, second, 5)
		expectRole(t, "second, higher", second, codes.OK, 5)
		expectRole(t, "first, after it", r.stream, codes.AlreadyExists, 5)
		expectCode("write as former primary", write(1), codes.PermissionDenied)
		expectCode("write as new primary", write(5), codes.OK)
		third, _ := open()
		arbitrate(t, third, 3)
		expectRole(t, "third, between", third, codes.AlreadyExists, 5)
		fourth, _ := open()
		arbitrate(t, fourth, 3)
		if _, err := fourth.Recv(); status.Code(err) != codes.InvalidArgument {
			t.Errorf("fourth, with the third's id: %v, want InvalidArgument", err)
		}
		leave()
		expectRole(t, "third, after the second left", third, codes.OK, 3)
		expectRole(t, "first, after the second left", r.stream, codes.AlreadyExists, 3)
		expectCode("write as promoted", write(3), codes.OK)
		arbitrate(t, r.stream, 9)
		expectRole(t, "first, with a higher id", r.stream, codes.OK, 9)
		expectRole(t, "third, after it", third, codes.AlreadyExists, 9)
		arbitrate(t, r.stream, 2)
		expectRole(t, "first, with a lower id", r.stream, codes.AlreadyExists, 3)
		expectRole(t, "third, after it", third, codes.OK, 3)
	})
}

func packetOut(port uint64, payload []byte) *p4v1.StreamMessageRequest {
	return &p4v1.StreamMessageRequest{Update: &p4v1.StreamMessageRequest_Packet{Packet: &p4v1.PacketOut{
		Payload: payload, Metadata: []*p4v1.PacketMetadata{{MetadataId: 2, Value: num(port)}, {MetadataId: 1, Value: num(0)}}}}}
}

// TestPacketIO sends a frame to the switch's own CPU port, and has another frame sent there by the program.
func TestPacketIO(t *testing.T) {
	bothRigs(t, func(t *testing.T, r *rig, n names) {
		payload := []byte("\x01\x02\x03\x04\x05\x06\x07\x08\x09\x0a\x0b\x0c\x42\x42to myself")
		if err := r.stream.Send(packetOut(cpuPort, payload)); err != nil {
			t.Fatal(err)
		}
		m, err := r.stream.Recv()
		if err != nil {
			t.Fatal(err)
		}
		// The program adds no packet_in header here: the frame's first two bytes are taken for it.
		want := &p4v1.PacketIn{Payload: payload[2:], Metadata: []*p4v1.PacketMetadata{
			{MetadataId: 1, Value: []byte{2}}, {MetadataId: 2, Value: []byte{2}}}}
		if d := cmp.Diff(want, m.GetPacket(), protocmp.Transform()); d != "" {
			t.Errorf("packet-in: %s", d)
		}
	})
}

// TestStreamErrors are the engine's: simple_switch_grpc drops such messages in silence unless it is told otherwise.
func TestStreamErrors(t *testing.T) {
	r := engineRig(t)
	expect := func(what string, s p4v1.P4Runtime_StreamChannelClient, m *p4v1.StreamMessageRequest, want codes.Code) {
		t.Helper()
		if err := s.Send(m); err != nil {
			t.Fatal(err)
		}
		got, err := s.Recv()
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		if codes.Code(got.GetError().GetCanonicalCode()) != want {
			t.Errorf("%s: %v, want a stream error of %v", what, got, want)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	early, err := r.client.StreamChannel(ctx)
	if err != nil {
		t.Fatal(err)
	}
	arbitrate(t, early, 9)
	expectRole(t, "early", early, codes.OK, 9)
	expect("packet-out before a pipeline", early, packetOut(1, nil), codes.FailedPrecondition)
	_, err = r.client.GetForwardingPipelineConfig(ctx, &p4v1.GetForwardingPipelineConfigRequest{})
	if status.Code(err) != codes.FailedPrecondition {
		t.Errorf("pipeline before a pipeline: %v", err)
	}
	if err := early.CloseSend(); err != nil {
		t.Fatal(err)
	}
	if m, err := early.Recv(); err != io.EOF {
		t.Fatalf("after the end: %v %v", m, err)
	}

	r.start(t, switchJSON, switchInfo)
	bad := packetOut(1, nil)
	bad.GetPacket().Metadata[0].MetadataId = 9
	expect("unknown metadata", r.stream, bad, codes.InvalidArgument)
	ack := &p4v1.StreamMessageRequest{Update: &p4v1.StreamMessageRequest_DigestAck{DigestAck: &p4v1.DigestListAck{}}}
	expect("digest ack", r.stream, ack, codes.Unimplemented)
	second, err := r.client.StreamChannel(ctx)
	if err != nil {
		t.Fatal(err)
	}
	arbitrate(t, second, 5)
	expectRole(t, "second", second, codes.OK, 5)
	expectRole(t, "first", r.stream, codes.AlreadyExists, 5)
	expect("packet-out from a backup", r.stream, packetOut(1, nil), codes.PermissionDenied)

	other, err := r.client.StreamChannel(ctx)
	if err != nil {
		t.Fatal(err)
	}
	err = other.Send(&p4v1.StreamMessageRequest{Update: &p4v1.StreamMessageRequest_Arbitration{
		Arbitration: &p4v1.MasterArbitrationUpdate{DeviceId: 3, ElectionId: election}}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := other.Recv(); status.Code(err) != codes.NotFound {
		t.Errorf("another device: %v, want NotFound", err)
	}
}
