package p4rt

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"

	configv1 "github.com/p4lang/p4runtime/go/p4/config/v1"
	p4v1 "github.com/p4lang/p4runtime/go/p4/v1"
	"google.golang.org/protobuf/proto"
)

// Program is a compiled P4 program with the P4Info that names what a controller can touch. It is the one place that
// translates names to the numbers of the wire and back. It does not change once it is made.
type Program struct {
	info   *configv1.P4Info
	json   []byte
	cookie uint64

	tables   map[string]*table
	tableIDs map[uint32]*table
	counters map[string]*configv1.Counter
	direct   map[string]uint32 // table name to direct counter id
	regs     map[string]int    // register name to size
	in, out  *header
}

type table struct {
	id      uint32
	name    string
	size    int64
	isConst bool
	fields  []field
	actions []scoped
}

// scoped is an action with where a table may use it.
type scoped struct {
	*action
	scope configv1.ActionRef_Scope
}

type field struct {
	id   uint32
	name string
	bits int
	kind configv1.MatchField_MatchType
}

type action struct {
	id     uint32
	name   string
	params []field
}

type header struct {
	name   string
	fields []field
}

// NewProgram takes a P4Info and the bmv2 JSON that was compiled with it. A P4Info that names what the JSON does not
// have is refused.
func NewProgram(info *configv1.P4Info, jsonProgram []byte) (*Program, error) {
	p := &Program{
		info:     info,
		json:     jsonProgram,
		tables:   make(map[string]*table),
		tableIDs: make(map[uint32]*table),
		counters: make(map[string]*configv1.Counter),
		direct:   make(map[string]uint32),
		regs:     make(map[string]int),
	}
	actions := make(map[uint32]*action)
	for _, a := range info.GetActions() {
		act := &action{id: a.GetPreamble().GetId(), name: a.GetPreamble().GetName()}
		for _, param := range a.GetParams() {
			act.params = append(act.params, field{id: param.GetId(), name: param.GetName(), bits: int(param.GetBitwidth())})
		}
		actions[act.id] = act
	}
	for _, t := range info.GetTables() {
		tab := &table{
			id:      t.GetPreamble().GetId(),
			name:    t.GetPreamble().GetName(),
			size:    t.GetSize(),
			isConst: t.GetIsConstTable(),
		}
		for _, m := range t.GetMatchFields() {
			tab.fields = append(tab.fields, field{m.GetId(), m.GetName(), int(m.GetBitwidth()), m.GetMatchType()})
		}
		for _, ref := range t.GetActionRefs() {
			act := actions[ref.GetId()]
			if act == nil {
				return nil, fmt.Errorf("read P4Info: table %s refers to action %d, which it does not define", tab.name, ref.GetId())
			}
			tab.actions = append(tab.actions, scoped{act, ref.GetScope()})
		}
		p.tables[tab.name], p.tableIDs[tab.id] = tab, tab
	}
	for _, c := range info.GetCounters() {
		p.counters[c.GetPreamble().GetName()] = c
	}
	for _, c := range info.GetDirectCounters() {
		tab := p.tableIDs[c.GetDirectTableId()]
		if tab == nil {
			return nil, fmt.Errorf("read P4Info: direct counter %s belongs to table %d, which it does not define",
				c.GetPreamble().GetName(), c.GetDirectTableId())
		}
		p.direct[tab.name] = c.GetPreamble().GetId()
	}
	for _, r := range info.GetRegisters() {
		p.regs[r.GetPreamble().GetName()] = int(r.GetSize())
	}
	for _, h := range info.GetControllerPacketMetadata() {
		hdr := &header{name: h.GetPreamble().GetName()}
		for _, m := range h.GetMetadata() {
			hdr.fields = append(hdr.fields, field{id: m.GetId(), name: m.GetName(), bits: int(m.GetBitwidth())})
		}
		switch hdr.name {
		case "packet_in":
			p.in = hdr
		case "packet_out":
			p.out = hdr
		}
	}
	if err := p.checkJSON(); err != nil {
		return nil, err
	}
	blob, err := proto.MarshalOptions{Deterministic: true}.Marshal(info)
	if err != nil {
		return nil, fmt.Errorf("encode P4Info: %w", err)
	}
	p.cookie = cookie(blob, jsonProgram)
	return p, nil
}

// cookie identifies a P4Info with its JSON. It is never 0, which a switch without a cookie has.
func cookie(info, jsonProgram []byte) uint64 {
	h := sha256.New()
	h.Write(info)
	h.Write(jsonProgram)
	return max(1, binary.BigEndian.Uint64(h.Sum(nil)))
}

// checkJSON compares names: a table, counter or register of the P4Info that the JSON lacks means that the two were
// not compiled together, and the switch would refuse them with less to say.
func (p *Program) checkJSON() error {
	type named []struct {
		Name string `json:"name"`
	}
	var compiled struct {
		Pipelines []struct {
			Tables named `json:"tables"`
		} `json:"pipelines"`
		Actions   named `json:"actions"`
		Counters  named `json:"counter_arrays"`
		Registers named `json:"register_arrays"`
	}
	if err := json.Unmarshal(p.json, &compiled); err != nil {
		return fmt.Errorf("read compiled program: %w", err)
	}
	has := map[string]bool{}
	add := func(kind string, list named) {
		for _, n := range list {
			has[kind+n.Name] = true
		}
	}
	for _, pipe := range compiled.Pipelines {
		add("table ", pipe.Tables)
	}
	add("action ", compiled.Actions)
	add("counter ", compiled.Counters)
	add("register ", compiled.Registers)

	want := func(kind, name string) error {
		if has[kind+name] {
			return nil
		}
		return fmt.Errorf("%w: it names %s%s, which the compiled program does not have", ErrProgramMismatch, kind, name)
	}
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(p.tables)) {
		errs = append(errs, want("table ", name))
		for _, a := range p.tables[name].actions {
			errs = append(errs, want("action ", a.name))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(p.counters)) {
		errs = append(errs, want("counter ", name))
	}
	for _, name := range slices.Sorted(maps.Keys(p.regs)) {
		errs = append(errs, want("register ", name))
	}
	return errors.Join(errs...)
}

// ErrProgramMismatch is wrapped by errors about a P4Info that does not belong to the program it came with, or to the
// controller that wants to use it.
var ErrProgramMismatch = errors.New("P4Info does not belong to the program")

// Cookie identifies P4Info and compiled program: a hash of both, never 0. Its upper half is that of the cookies that
// [Run] pushes the program with.
func (p *Program) Cookie() uint64 { return p.cookie }

// pushCookie returns the cookie of a pipeline that is pushed with the program: the lower half is another one each time, so
// that a pipeline which was pushed since, and has lost its tables and registers by that, is told from one that was not.
func (p *Program) pushCookie() uint64 { return p.cookie&^cookiePush | (1 + rand.Uint64N(cookiePush)) }

// runs reports whether a pipeline with a cookie was pushed with the program.
func (p *Program) runs(cookie uint64) bool { return cookie&^cookiePush == p.cookie&^cookiePush }

// cookiePush is the part of a pipeline's cookie that says which push it was.
const cookiePush = 1<<32 - 1

// Registers returns the sizes of the program's registers by name.
func (p *Program) Registers() map[string]int { return maps.Clone(p.regs) }

// TableSizes returns the number of entries that each table takes, by its name.
func (p *Program) TableSizes() map[string]int {
	sizes := make(map[string]int, len(p.tables))
	for name, tab := range p.tables {
		sizes[name] = int(tab.size)
	}
	return sizes
}

// CounterSize returns the number of cells of an indirect counter.
func (p *Program) CounterSize(name string) (int, bool) {
	c, ok := p.counters[name]
	return int(c.GetSize()), ok
}

// CounterName returns the name of an indirect counter.
func (p *Program) CounterName(id uint32) (string, bool) {
	for name, c := range p.counters {
		if c.GetPreamble().GetId() == id {
			return name, true
		}
	}
	return "", false
}

// Contract is what a controller needs of a program.
type Contract struct {
	Tables   []TableContract
	Counters map[string]int // indirect counters: least number of cells
	Direct   []string       // tables that have a direct counter
	In, Out  map[string]int // metadata of packet_in and packet_out: bits
}

// TableContract is what a controller needs of a table.
type TableContract struct {
	Name    string
	Match   map[string]int            // key fields: bits
	Actions map[string]map[string]int // actions: bits of the parameters
}

// Check compares the program with a contract. The error wraps ErrProgramMismatch and names everything that is
// missing, has another width or is there unexpectedly.
func (p *Program) Check(c Contract) error {
	var errs []error
	bad := func(format string, args ...any) {
		errs = append(errs, fmt.Errorf("%w: %s", ErrProgramMismatch, fmt.Sprintf(format, args...)))
	}
	fields := func(where, what string, have []field, want map[string]int) {
		for _, name := range slices.Sorted(maps.Keys(want)) {
			i := slices.IndexFunc(have, func(f field) bool { return f.name == name })
			switch {
			case i < 0:
				bad("%s has no %s %s", where, what, name)
			case have[i].bits != want[name]:
				bad("%s: %s %s has %d bits, want %d", where, what, name, have[i].bits, want[name])
			}
		}
		for _, f := range have {
			if _, ok := want[f.name]; !ok {
				bad("%s has an unknown %s %s", where, what, f.name)
			}
		}
	}
	for _, want := range c.Tables {
		tab := p.tables[want.Name]
		if tab == nil {
			bad("there is no table %s", want.Name)
			continue
		}
		fields("table "+tab.name, "key field", tab.fields, want.Match)
		for _, name := range slices.Sorted(maps.Keys(want.Actions)) {
			act, ok := tab.action(name)
			if !ok {
				bad("table %s has no action %s", tab.name, name)
				continue
			}
			fields("action "+name, "parameter", act.params, want.Actions[name])
		}
	}
	for _, name := range slices.Sorted(maps.Keys(c.Counters)) {
		if size, ok := p.CounterSize(name); !ok {
			bad("there is no counter %s", name)
		} else if size < c.Counters[name] {
			bad("counter %s has %d cells, want at least %d", name, size, c.Counters[name])
		}
	}
	for _, name := range c.Direct {
		if _, ok := p.direct[name]; !ok {
			bad("table %s has no direct counter", name)
		}
	}
	for _, h := range []struct {
		name string
		have *header
		want map[string]int
	}{{"packet_in", p.in, c.In}, {"packet_out", p.out, c.Out}} {
		switch {
		case h.want == nil:
		case h.have == nil:
			bad("there is no controller header %s", h.name)
		default:
			fields("controller header "+h.name, "field", h.have.fields, h.want)
		}
	}
	return errors.Join(errs...)
}

func (t *table) action(name string) (scoped, bool) {
	i := slices.IndexFunc(t.actions, func(a scoped) bool { return a.name == name })
	if i < 0 {
		return scoped{}, false
	}
	return t.actions[i], true
}

func fieldNames(fields []field) string {
	names := make([]string, len(fields))
	for i, f := range fields {
		names[i] = f.name
	}
	return strings.Join(names, ", ")
}

func tableNames(tables map[string]*table) string {
	return strings.Join(slices.Sorted(maps.Keys(tables)), ", ")
}

// Encode translates an entity and checks it: names, widths, and that nothing is missing.
func (p *Program) Encode(e Entity) (*p4v1.Entity, error) {
	switch e := e.(type) {
	case Entry:
		te, err := p.encodeEntry(e)
		if err != nil {
			return nil, fmt.Errorf("encode %s: %w", e.Key(), err)
		}
		return &p4v1.Entity{Entity: &p4v1.Entity_TableEntry{TableEntry: te}}, nil
	case Group:
		ge, err := encodeGroup(e)
		if err != nil {
			return nil, fmt.Errorf("encode %s: %w", e.Key(), err)
		}
		return groupEntity(ge), nil
	}
	return nil, fmt.Errorf("encode entity: %T is not one", e)
}

func groupEntity(g *p4v1.MulticastGroupEntry) *p4v1.Entity {
	return &p4v1.Entity{Entity: &p4v1.Entity_PacketReplicationEngineEntry{
		PacketReplicationEngineEntry: &p4v1.PacketReplicationEngineEntry{
			Type: &p4v1.PacketReplicationEngineEntry_MulticastGroupEntry{MulticastGroupEntry: g},
		},
	}}
}

func encodeGroup(g Group) (*p4v1.MulticastGroupEntry, error) {
	if g.ID < 1 || g.ID > MaxGroup {
		return nil, fmt.Errorf("id is outside 1..%d", MaxGroup)
	}
	out := &p4v1.MulticastGroupEntry{MulticastGroupId: g.ID}
	for i, r := range g.Replicas {
		if r.Port > 510 {
			return nil, fmt.Errorf("port %d is outside 0..510", r.Port)
		}
		if r.Instance > 0xffff {
			return nil, fmt.Errorf("instance %d is outside 0..65535", r.Instance)
		}
		if slices.Contains(g.Replicas[:i], r) {
			return nil, fmt.Errorf("port %d with instance %d is there twice", r.Port, r.Instance)
		}
		out.Replicas = append(out.Replicas, &p4v1.Replica{
			PortKind: &p4v1.Replica_Port{Port: []byte(Uint(uint64(r.Port)))},
			Instance: r.Instance,
		})
	}
	return out, nil
}

func (p *Program) encodeEntry(e Entry) (*p4v1.TableEntry, error) {
	tab := p.tables[e.Table]
	if tab == nil {
		return nil, fmt.Errorf("there is no such table; there are %s", tableNames(p.tables))
	}
	if tab.isConst {
		return nil, errors.New("the table's entries are constant")
	}
	out := &p4v1.TableEntry{TableId: tab.id, IsDefaultAction: e.Default}
	if e.Default && len(e.Match) > 0 {
		return nil, errors.New("a default entry has no key fields")
	}
	if !e.Default {
		match, err := tab.encodeMatch(e.Match)
		if err != nil {
			return nil, err
		}
		out.Match = match
	}
	if e.Action == "" { // enough for a delete or a read; a switch refuses it elsewhere
		return out, nil
	}
	act, ok := tab.action(e.Action)
	switch {
	case !ok:
		return nil, fmt.Errorf("the table has no action %s", e.Action)
	case e.Default && act.scope == configv1.ActionRef_TABLE_ONLY:
		return nil, fmt.Errorf("action %s cannot be the default", e.Action)
	case !e.Default && act.scope == configv1.ActionRef_DEFAULT_ONLY:
		return nil, fmt.Errorf("action %s can only be the default", e.Action)
	}
	params, err := encodeParams(act.params, e.Params)
	if err != nil {
		return nil, fmt.Errorf("action %s: %w", act.name, err)
	}
	a := &p4v1.Action{ActionId: act.id}
	for i, v := range params {
		a.Params = append(a.Params, &p4v1.Action_Param{ParamId: act.params[i].id, Value: []byte(v)})
	}
	out.Action = &p4v1.TableAction{Type: &p4v1.TableAction_Action{Action: a}}
	return out, nil
}

func (t *table) encodeMatch(match []Match) ([]*p4v1.FieldMatch, error) {
	for _, m := range match {
		if !slices.ContainsFunc(t.fields, func(f field) bool { return f.name == m.Field }) {
			return nil, fmt.Errorf("the table has no key field %s; it has %s", m.Field, fieldNames(t.fields))
		}
	}
	var out []*p4v1.FieldMatch
	for _, f := range t.fields {
		i := slices.IndexFunc(match, func(m Match) bool { return m.Field == f.name })
		if i < 0 {
			return nil, fmt.Errorf("key field %s is missing", f.name)
		}
		m := match[i]
		if m.Value.Bits() > f.bits {
			return nil, fmt.Errorf("key field %s: %s does not fit %d bits", f.name, m.Value, f.bits)
		}
		fm := &p4v1.FieldMatch{FieldId: f.id}
		switch f.kind {
		case configv1.MatchField_EXACT:
			if m.Prefix != 0 {
				return nil, fmt.Errorf("key field %s: exact match takes no prefix length", f.name)
			}
			fm.FieldMatchType = &p4v1.FieldMatch_Exact_{Exact: &p4v1.FieldMatch_Exact{Value: []byte(m.Value)}}
		case configv1.MatchField_LPM:
			if m.Prefix < 1 || m.Prefix > f.bits {
				return nil, fmt.Errorf("key field %s: prefix length %d is outside 1..%d", f.name, m.Prefix, f.bits)
			}
			fm.FieldMatchType = &p4v1.FieldMatch_Lpm{Lpm: &p4v1.FieldMatch_LPM{
				Value: []byte(m.Value), PrefixLen: int32(m.Prefix),
			}}
		default:
			return nil, fmt.Errorf("key field %s: match kind %s is not supported", f.name, f.kind)
		}
		out = append(out, fm)
	}
	if len(match) != len(t.fields) {
		return nil, fmt.Errorf("%d key fields given, the table has %d", len(match), len(t.fields))
	}
	return out, nil
}

// encodeParams returns the values in the order of fields.
func encodeParams(fields []field, params []Param) ([]Value, error) {
	for _, p := range params {
		if !slices.ContainsFunc(fields, func(f field) bool { return f.name == p.Name }) {
			return nil, fmt.Errorf("there is no parameter %s; there are: %s", p.Name, fieldNames(fields))
		}
	}
	values := make([]Value, len(fields))
	for i, f := range fields {
		j := slices.IndexFunc(params, func(p Param) bool { return p.Name == f.name })
		if j < 0 {
			return nil, fmt.Errorf("parameter %s is missing", f.name)
		}
		if params[j].Value.Bits() > f.bits {
			return nil, fmt.Errorf("parameter %s: %s does not fit %d bits", f.name, params[j].Value, f.bits)
		}
		values[i] = params[j].Value
	}
	if len(params) != len(fields) {
		return nil, fmt.Errorf("%d parameters given, want %d", len(params), len(fields))
	}
	return values, nil
}

// Decode translates an entity that was read from a switch.
func (p *Program) Decode(e *p4v1.Entity) (Entity, error) {
	switch e := e.GetEntity().(type) {
	case *p4v1.Entity_TableEntry:
		return p.decodeEntry(e.TableEntry)
	case *p4v1.Entity_PacketReplicationEngineEntry:
		if g := e.PacketReplicationEngineEntry.GetMulticastGroupEntry(); g != nil {
			return decodeGroup(g)
		}
	}
	return nil, fmt.Errorf("decode entity: %T is not known here", e.GetEntity())
}

func decodeGroup(g *p4v1.MulticastGroupEntry) (Entity, error) {
	out := Group{ID: g.GetMulticastGroupId()}
	for _, r := range g.GetReplicas() {
		port := uint64(r.GetEgressPort())
		if b := r.GetPort(); b != nil {
			var ok bool
			if port, ok = Bytes(b).Uint(); !ok || port>>32 != 0 {
				return nil, fmt.Errorf("decode %s: port %x does not fit 32 bits", out.Key(), b)
			}
		}
		out.Replicas = append(out.Replicas, Replica{Port: uint32(port), Instance: r.GetInstance()})
	}
	return out, nil
}

func (p *Program) decodeEntry(te *p4v1.TableEntry) (Entity, error) {
	tab := p.tableIDs[te.GetTableId()]
	if tab == nil {
		return nil, fmt.Errorf("decode table entry: no table has id %#x", te.GetTableId())
	}
	out := Entry{Table: tab.name, Default: te.GetIsDefaultAction()}
	for _, m := range te.GetMatch() {
		i := slices.IndexFunc(tab.fields, func(f field) bool { return f.id == m.GetFieldId() })
		if i < 0 {
			return nil, fmt.Errorf("decode entry of table %s: no key field has id %d", tab.name, m.GetFieldId())
		}
		match := Match{Field: tab.fields[i].name}
		switch m := m.GetFieldMatchType().(type) {
		case *p4v1.FieldMatch_Exact_:
			match.Value = Bytes(m.Exact.GetValue())
		case *p4v1.FieldMatch_Lpm:
			match.Value, match.Prefix = Bytes(m.Lpm.GetValue()), int(m.Lpm.GetPrefixLen())
		default:
			return nil, fmt.Errorf("decode entry of table %s: key field %s: match %T is not supported", tab.name, match.Field, m)
		}
		out.Match = append(out.Match, match)
	}
	if te.GetAction() == nil {
		return out, nil
	}
	a := te.GetAction().GetAction()
	i := slices.IndexFunc(tab.actions, func(act scoped) bool { return act.id == a.GetActionId() })
	if a == nil || i < 0 {
		return nil, fmt.Errorf("decode %s: the table has no action with id %#x", out.Key(), a.GetActionId())
	}
	act := tab.actions[i]
	out.Action = act.name
	for _, param := range a.GetParams() {
		i := slices.IndexFunc(act.params, func(f field) bool { return f.id == param.GetParamId() })
		if i < 0 {
			return nil, fmt.Errorf("decode %s: action %s has no parameter with id %d", out.Key(), act.name, param.GetParamId())
		}
		out.Params = append(out.Params, Param{act.params[i].name, Bytes(param.GetValue())})
	}
	return out, nil
}

// encodePacket translates a packet-out.
func (p *Program) encodePacket(pkt Packet) (*p4v1.PacketOut, error) {
	if p.out == nil {
		return nil, errors.New("encode packet-out: the program has no header packet_out")
	}
	values, err := encodeParams(p.out.fields, pkt.Metadata)
	if err != nil {
		return nil, fmt.Errorf("encode packet-out: %w", err)
	}
	out := &p4v1.PacketOut{Payload: pkt.Payload}
	for i, v := range values {
		out.Metadata = append(out.Metadata, &p4v1.PacketMetadata{MetadataId: p.out.fields[i].id, Value: []byte(v)})
	}
	return out, nil
}

// decodePacket translates a packet-in.
func (p *Program) decodePacket(in *p4v1.PacketIn) (Packet, error) {
	if p.in == nil {
		return Packet{}, errors.New("decode packet-in: the program has no header packet_in")
	}
	pkt := Packet{Payload: in.GetPayload()}
	for _, m := range in.GetMetadata() {
		i := slices.IndexFunc(p.in.fields, func(f field) bool { return f.id == m.GetMetadataId() })
		if i < 0 {
			return Packet{}, fmt.Errorf("decode packet-in: no metadata field has id %d", m.GetMetadataId())
		}
		pkt.Metadata = append(pkt.Metadata, Param{p.in.fields[i].name, Bytes(m.GetValue())})
	}
	return pkt, nil
}

// Packet is a packet-in or packet-out.
type Packet struct {
	Payload  []byte  // the frame, without the controller header
	Metadata []Param // fields of the controller header
}
