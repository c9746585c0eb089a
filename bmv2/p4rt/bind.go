package p4rt

import (
	"fmt"

	p4cfg "github.com/p4lang/p4runtime/go/p4/config/v1"
	p4v1 "github.com/p4lang/p4runtime/go/p4/v1"

	"xagg/bmv2/engine"
)

// pipeline is a loaded program with the P4Info that names its objects.
type pipeline struct {
	prog     *engine.Program
	info     *p4cfg.P4Info
	tables   map[uint32]*table
	order    []*table // as in the P4Info
	counters map[uint32]*counter
	ctrOrder []*counter
	replicas map[uint16]map[engine.Replica]*p4v1.Replica
	in, out  *packetMeta
}

type table struct {
	t            *engine.Table
	info         *p4cfg.Table
	keys         []keyField
	actions      map[uint32]*action
	byAction     map[*engine.Action]*action
	constDefault bool
	counter      *p4cfg.CounterSpec // of the direct counter, or nil

	meta     map[string]entryMeta // by key
	defaults entryMeta
}

// entryMeta is what a controller stores with an entry and the switch only keeps.
type entryMeta struct {
	metadata   []byte
	controller uint64
}

type keyField struct {
	id    uint32
	name  string
	match p4cfg.MatchField_MatchType
	width int
	bytes int
}

type action struct {
	a      *engine.Action
	id     uint32
	params []*p4cfg.Action_Param // as in the P4Info
	index  map[uint32]int        // parameter id to position
	scope  p4cfg.ActionRef_Scope
}

type counter struct {
	c    *engine.Counter
	id   uint32
	spec *p4cfg.CounterSpec
}

// packetMeta is the layout of packet_in or packet_out.
type packetMeta struct {
	fields []*p4cfg.ControllerPacketMetadata_Metadata
	bits   int
}

func (m *packetMeta) bytes() int { return (m.bits + 7) / 8 }

// bind joins a P4Info and the program it came with. An error names the first object that differs.
func bind(prog *engine.Program, info *p4cfg.P4Info) (*pipeline, error) {
	p := &pipeline{
		prog: prog, info: info,
		tables: map[uint32]*table{}, counters: map[uint32]*counter{},
		replicas: map[uint16]map[engine.Replica]*p4v1.Replica{},
	}
	actions := map[uint32]*p4cfg.Action{}
	for _, a := range info.GetActions() {
		actions[a.GetPreamble().GetId()] = a
	}
	directs := map[uint32]*p4cfg.DirectCounter{}
	for _, c := range info.GetDirectCounters() {
		directs[c.GetPreamble().GetId()] = c
	}
	named := map[string]bool{}
	for _, ti := range info.GetTables() {
		t, err := bindTable(prog, ti, actions, directs)
		if err != nil {
			return nil, fmt.Errorf("table %s: %w", ti.GetPreamble().GetName(), err)
		}
		if p.tables[ti.GetPreamble().GetId()] != nil {
			return nil, fmt.Errorf("table %s: id %#x is not unique", ti.GetPreamble().GetName(), ti.GetPreamble().GetId())
		}
		named[ti.GetPreamble().GetName()] = true
		p.tables[ti.GetPreamble().GetId()] = t
		p.order = append(p.order, t)
	}
	for _, t := range prog.Tables() {
		if len(t.Keys()) != 0 && !t.Const() && !named[t.Name()] {
			return nil, fmt.Errorf("table %s: is in the JSON but not in the P4Info", t.Name())
		}
	}
	for _, ci := range info.GetCounters() {
		name := ci.GetPreamble().GetName()
		c := prog.Counter(name)
		switch {
		case c == nil || c.Direct():
			return nil, fmt.Errorf("counter %s: is in the P4Info but not in the JSON", name)
		case int64(c.Size()) != ci.GetSize():
			return nil, fmt.Errorf("counter %s: %d cells in the P4Info, %d in the JSON", name, ci.GetSize(), c.Size())
		}
		n := &counter{c: c, id: ci.GetPreamble().GetId(), spec: ci.GetSpec()}
		p.counters[n.id] = n
		p.ctrOrder = append(p.ctrOrder, n)
	}
	for _, ri := range info.GetRegisters() {
		name := ri.GetPreamble().GetName()
		r := prog.Register(name)
		switch {
		case r == nil:
			return nil, fmt.Errorf("register %s: is in the P4Info but not in the JSON", name)
		case int32(r.Size()) != ri.GetSize():
			return nil, fmt.Errorf("register %s: %d cells in the P4Info, %d in the JSON", name, ri.GetSize(), r.Size())
		}
	}
	for _, k := range []struct {
		kind string
		n    int
		name func() string
	}{
		{"action profile", len(info.GetActionProfiles()), func() string { return info.ActionProfiles[0].Preamble.GetName() }},
		{"meter", len(info.GetMeters()), func() string { return info.Meters[0].Preamble.GetName() }},
		{"direct meter", len(info.GetDirectMeters()), func() string { return info.DirectMeters[0].Preamble.GetName() }},
		{"value set", len(info.GetValueSets()), func() string { return info.ValueSets[0].Preamble.GetName() }},
		{"digest", len(info.GetDigests()), func() string { return info.Digests[0].Preamble.GetName() }},
		{"extern", len(info.GetExterns()), func() string { return info.Externs[0].GetExternTypeName() }},
	} {
		if k.n != 0 {
			return nil, fmt.Errorf("%s %s: not supported", k.kind, k.name())
		}
	}
	for _, h := range info.GetControllerPacketMetadata() {
		m := &packetMeta{fields: h.GetMetadata()}
		for _, f := range m.fields {
			if f.GetBitwidth() < 1 {
				return nil, fmt.Errorf("controller header %s: field %s has no width", h.GetPreamble().GetName(), f.GetName())
			}
			m.bits += int(f.GetBitwidth())
		}
		switch h.GetPreamble().GetName() {
		case "packet_in":
			p.in = m
		case "packet_out":
			p.out = m
		}
	}
	return p, nil
}

var matchKinds = map[p4cfg.MatchField_MatchType]engine.MatchKind{
	p4cfg.MatchField_EXACT: engine.Exact, p4cfg.MatchField_LPM: engine.LPM, p4cfg.MatchField_TERNARY: engine.Ternary,
	p4cfg.MatchField_RANGE: engine.Range, p4cfg.MatchField_OPTIONAL: engine.Ternary,
}

func bindTable(
	prog *engine.Program, ti *p4cfg.Table, actions map[uint32]*p4cfg.Action, directs map[uint32]*p4cfg.DirectCounter,
) (*table, error) {
	t := &table{
		t: prog.Table(ti.GetPreamble().GetName()), info: ti,
		actions: map[uint32]*action{}, byAction: map[*engine.Action]*action{}, meta: map[string]entryMeta{},
		constDefault: ti.GetConstDefaultActionId() != 0,
	}
	if t.t == nil {
		return nil, fmt.Errorf("is in the P4Info but not in the JSON")
	}
	if ti.GetImplementationId() != 0 {
		return nil, fmt.Errorf("action profiles are not supported")
	}
	keys := t.t.Keys()
	if len(keys) != len(ti.GetMatchFields()) {
		return nil, fmt.Errorf("%d match fields in the P4Info, %d in the JSON", len(ti.GetMatchFields()), len(keys))
	}
	for i, mf := range ti.GetMatchFields() {
		k := keys[i]
		kind, ok := matchKinds[mf.GetMatchType()]
		want := k.Kind
		if want == engine.KindValid {
			want = engine.Exact
		}
		switch {
		case !ok || kind != want:
			return nil, fmt.Errorf("match field %s: %v in the P4Info, %v in the JSON", mf.GetName(), mf.GetMatchType(), k.Kind)
		case int(mf.GetBitwidth()) != k.Width:
			return nil, fmt.Errorf("match field %s: %d bits in the P4Info, %d in the JSON", mf.GetName(), mf.GetBitwidth(), k.Width)
		case mf.GetName() != k.Name:
			return nil, fmt.Errorf("match field %s: is named %s in the JSON", mf.GetName(), k.Name)
		}
		t.keys = append(t.keys, keyField{
			id: mf.GetId(), name: mf.GetName(), match: mf.GetMatchType(), width: k.Width, bytes: (k.Width + 7) / 8,
		})
	}
	for _, ref := range ti.GetActionRefs() {
		ai := actions[ref.GetId()]
		if ai == nil {
			return nil, fmt.Errorf("the P4Info has no action with id %#x", ref.GetId())
		}
		name := ai.GetPreamble().GetName()
		a := &action{a: t.t.Action(name), id: ref.GetId(), params: ai.GetParams(), index: map[uint32]int{}, scope: ref.GetScope()}
		if a.a == nil {
			return nil, fmt.Errorf("action %s: is in the P4Info but not in the JSON", name)
		}
		params := a.a.Params()
		if len(params) != len(a.params) {
			return nil, fmt.Errorf("action %s: %d parameters in the P4Info, %d in the JSON", name, len(a.params), len(params))
		}
		for i, pi := range a.params {
			if pi.GetName() != params[i].Name || int(pi.GetBitwidth()) != params[i].Width {
				return nil, fmt.Errorf("action %s: parameter %s:%d in the P4Info, %s:%d in the JSON",
					name, pi.GetName(), pi.GetBitwidth(), params[i].Name, params[i].Width)
			}
			a.index[pi.GetId()] = i
		}
		t.actions[a.id] = a
		t.byAction[a.a] = a
	}
	for _, id := range ti.GetDirectResourceIds() {
		c := directs[id]
		if c == nil {
			return nil, fmt.Errorf("the P4Info has no direct counter with id %#x", id)
		}
		if !t.t.HasCounters() {
			return nil, fmt.Errorf("direct counter %s: is in the P4Info but not in the JSON", c.GetPreamble().GetName())
		}
		t.counter = c.GetSpec()
	}
	return t, nil
}
