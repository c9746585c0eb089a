package p4rt

import (
	"bytes"
	"errors"
	"fmt"

	p4cfg "github.com/p4lang/p4runtime/go/p4/config/v1"
	p4v1 "github.com/p4lang/p4runtime/go/p4/v1"
	"google.golang.org/grpc/codes"

	"xagg/bmv2/engine"
)

func (p *pipeline) table(id uint32) (*table, error) {
	t := p.tables[id]
	if t == nil {
		return nil, invalid("invalid P4 id: no table %#x", id)
	}
	return t, nil
}

// key reads an entry's match fields and priority. The order of checks is PI's.
func (t *table) key(te *p4v1.TableEntry) (*engine.Entry, error) {
	e := &engine.Entry{Priority: int(te.GetPriority())}
	if len(te.GetMatch()) > len(t.keys) {
		return nil, invalid("too many fields in match key: %d, table %s has %d", len(te.GetMatch()), t.t.Name(), len(t.keys))
	}
	matched, ordered := 0, false
	for i := range t.keys {
		k := &t.keys[i]
		switch k.match {
		case p4cfg.MatchField_TERNARY, p4cfg.MatchField_RANGE, p4cfg.MatchField_OPTIONAL:
			ordered = true
		}
		var mf *p4v1.FieldMatch
		for _, f := range te.GetMatch() {
			if f.GetFieldId() == k.id {
				mf = f
				break
			}
		}
		var m engine.Match
		var err error
		if mf != nil {
			matched++
			m, err = k.read(mf)
		} else {
			m, err = k.wildcard()
		}
		if err != nil {
			return nil, err
		}
		e.Match = append(e.Match, m)
	}
	switch {
	case matched != len(te.GetMatch()):
		return nil, invalid("unknown field in match key of table %s", t.t.Name())
	case !ordered && te.GetPriority() > 0:
		return nil, invalid("non-zero priority for non-ternary match in table %s", t.t.Name())
	case ordered && te.GetPriority() == 0:
		return nil, invalid("zero priority for ternary match in table %s", t.t.Name())
	case te.GetPriority() < 0:
		return nil, errorf(codes.Unknown, "table %s: priority %d is negative", t.t.Name(), te.GetPriority())
	}
	return e, nil
}

func (k *keyField) read(mf *p4v1.FieldMatch) (m engine.Match, err error) {
	wrong := invalid("match field %s: invalid match type, want %v", k.name, k.match)
	value := func(b []byte) []byte {
		v, e := padded(b, k.width)
		if e != nil && err == nil {
			err = invalid("match field %s: bytestring %x does not fit within %d bits", k.name, b, k.width)
		}
		return v
	}
	switch k.match {
	case p4cfg.MatchField_EXACT:
		f := mf.GetExact()
		if f == nil {
			return m, wrong
		}
		m.Value = value(f.GetValue())
	case p4cfg.MatchField_LPM:
		f := mf.GetLpm()
		if f == nil {
			return m, wrong
		}
		m.Value, m.Prefix = value(f.GetValue()), int(f.GetPrefixLen())
		switch {
		case err != nil:
		case m.Prefix < 0 || m.Prefix > k.width:
			err = invalid("match field %s: prefix length %d of %d bits", k.name, m.Prefix, k.width)
		case m.Prefix == 0:
			err = invalid("match field %s: omit it instead of a prefix length of 0", k.name)
		case !zeroBehind(m.Value, m.Prefix, k.width):
			err = invalid("match field %s: bits behind the prefix are not zero", k.name)
		}
	case p4cfg.MatchField_TERNARY:
		f := mf.GetTernary()
		if f == nil {
			return m, wrong
		}
		m.Value, m.Mask = value(f.GetValue()), value(f.GetMask())
		if err != nil {
			return m, err
		}
		if isZero(m.Mask) {
			return m, invalid("match field %s: omit it instead of a mask of 0", k.name)
		}
		for i := range m.Value {
			if m.Value[i]&^m.Mask[i] != 0 {
				return m, invalid("match field %s: value has bits that the mask has not", k.name)
			}
		}
	case p4cfg.MatchField_RANGE:
		f := mf.GetRange()
		if f == nil {
			return m, wrong
		}
		m.Value, m.Mask = value(f.GetLow()), value(f.GetHigh())
		switch {
		case err != nil:
		case everything(f):
			err = invalid("match field %s: omit it instead of a range of everything", k.name)
		case bytes.Compare(m.Value, m.Mask) > 0:
			err = invalid("match field %s: low end is above the high end", k.name)
		}
	case p4cfg.MatchField_OPTIONAL:
		f := mf.GetOptional()
		if f == nil {
			return m, wrong
		}
		m.Value, m.Mask = value(f.GetValue()), allOnes(k.width)
	}
	return m, err
}

// everything is PI's test for a range that should have been left out: it compares the byte strings as they came, so
// that only low and high ends of one length are found.
func everything(f *p4v1.FieldMatch_Range) bool {
	return isZero(f.GetLow()) && bytes.Equal(f.GetHigh(), allOnes(8*len(f.GetLow())))
}

func (k *keyField) wildcard() (engine.Match, error) {
	m := engine.Match{Value: make([]byte, k.bytes)}
	switch k.match {
	case p4cfg.MatchField_EXACT:
		return m, invalid("missing non-ternary field %s in match key", k.name)
	case p4cfg.MatchField_TERNARY, p4cfg.MatchField_OPTIONAL:
		m.Mask = make([]byte, k.bytes)
	case p4cfg.MatchField_RANGE:
		m.Mask = allOnes(k.width)
	}
	return m, nil
}

// matches turns an entry's key into match fields; what matches everything is left out.
func (t *table) matches(e *engine.Entry, te *p4v1.TableEntry) {
	if t.t.NeedsPriority() {
		te.Priority = int32(e.Priority)
	}
	for i := range t.keys {
		k, m := &t.keys[i], &e.Match[i]
		f := &p4v1.FieldMatch{FieldId: k.id}
		switch k.match {
		case p4cfg.MatchField_EXACT:
			f.FieldMatchType = &p4v1.FieldMatch_Exact_{Exact: &p4v1.FieldMatch_Exact{Value: canonical(m.Value)}}
		case p4cfg.MatchField_LPM:
			if m.Prefix == 0 {
				continue
			}
			f.FieldMatchType = &p4v1.FieldMatch_Lpm{
				Lpm: &p4v1.FieldMatch_LPM{Value: canonical(m.Value), PrefixLen: int32(m.Prefix)}}
		case p4cfg.MatchField_TERNARY:
			if isZero(m.Mask) {
				continue
			}
			f.FieldMatchType = &p4v1.FieldMatch_Ternary_{
				Ternary: &p4v1.FieldMatch_Ternary{Value: canonical(m.Value), Mask: canonical(m.Mask)}}
		case p4cfg.MatchField_RANGE:
			if isZero(m.Value) && bytes.Equal(m.Mask, allOnes(k.width)) {
				continue
			}
			f.FieldMatchType = &p4v1.FieldMatch_Range_{
				Range: &p4v1.FieldMatch_Range{Low: canonical(m.Value), High: canonical(m.Mask)}}
		case p4cfg.MatchField_OPTIONAL:
			if isZero(m.Mask) {
				continue
			}
			f.FieldMatchType = &p4v1.FieldMatch_Optional_{Optional: &p4v1.FieldMatch_Optional{Value: canonical(m.Value)}}
		}
		te.Match = append(te.Match, f)
	}
}

// keyID identifies an entry's key within its table.
func keyID(e *engine.Entry) string { return fmt.Sprint(e.Priority, e.Match) }

// action reads an entry's action. isDefault says which of the table's actions are allowed.
func (t *table) action(te *p4v1.TableEntry) (*action, [][]byte, error) {
	isDefault := te.GetIsDefaultAction()
	if isDefault && t.constDefault {
		return nil, nil, errorf(codes.PermissionDenied, "table %s has a const default action", t.t.Name())
	}
	if te.GetAction() == nil {
		return nil, nil, nil
	}
	pa := te.GetAction().GetAction()
	if pa == nil {
		return nil, nil, invalid("cannot provide indirect action for direct table %s", t.t.Name())
	}
	a := t.actions[pa.GetActionId()]
	if a == nil {
		return nil, nil, invalid("invalid action %#x for table %s", pa.GetActionId(), t.t.Name())
	}
	switch {
	case a.scope == p4cfg.ActionRef_TABLE_ONLY && isDefault:
		return nil, nil, errorf(codes.PermissionDenied, "cannot use TABLE_ONLY action %s as default action", a.a.Name())
	case a.scope == p4cfg.ActionRef_DEFAULT_ONLY && !isDefault:
		return nil, nil, errorf(codes.PermissionDenied, "cannot use DEFAULT_ONLY action %s in table entry", a.a.Name())
	}
	if len(pa.GetParams()) != len(a.params) {
		return nil, nil, invalid("unexpected number of parameters of action %s: %d, want %d",
			a.a.Name(), len(pa.GetParams()), len(a.params))
	}
	args := make([][]byte, len(a.params))
	for _, p := range pa.GetParams() {
		i, ok := a.index[p.GetParamId()]
		if !ok {
			return nil, nil, invalid("action %s has no parameter %d", a.a.Name(), p.GetParamId())
		}
		v, err := padded(p.GetValue(), int(a.params[i].GetBitwidth()))
		if err != nil {
			return nil, nil, invalid("action %s: parameter %s: bytestring %x does not fit within %d bits",
				a.a.Name(), a.params[i].GetName(), p.GetValue(), a.params[i].GetBitwidth())
		}
		args[i] = v
	}
	for i, v := range args {
		if v == nil { // another one was given twice
			return nil, nil, invalid("action %s: parameter %s is missing", a.a.Name(), a.params[i].GetName())
		}
	}
	return a, args, nil
}

func (t *table) tableAction(a *engine.Action, args [][]byte) *p4v1.TableAction {
	b := t.byAction[a]
	if b == nil {
		return nil // an action that p4c made for itself
	}
	pa := &p4v1.Action{ActionId: b.id}
	for i, v := range args {
		pa.Params = append(pa.Params, &p4v1.Action_Param{ParamId: b.params[i].GetId(), Value: canonical(v)})
	}
	return &p4v1.TableAction{Type: &p4v1.TableAction_Action{Action: pa}}
}

// targetError is how PI reports what the target itself refuses: as UNKNOWN, but for the two that it finds out itself.
func targetError(t *table, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, engine.ErrExists):
		return errorf(codes.AlreadyExists, "match entry exists in table %s, use MODIFY to change its action", t.t.Name())
	case errors.Is(err, engine.ErrNotFound):
		return errorf(codes.NotFound, "cannot find match entry in table %s", t.t.Name())
	}
	return errorf(codes.Unknown, "table %s: %v", t.t.Name(), err)
}

func (p *pipeline) writeTable(typ p4v1.Update_Type, te *p4v1.TableEntry) error {
	t, err := p.table(te.GetTableId())
	if err != nil {
		return err
	}
	if te.GetTimeSinceLastHit() != nil {
		return invalid("time_since_last_hit must not be set in a write")
	}
	switch typ {
	case p4v1.Update_INSERT, p4v1.Update_MODIFY:
		return t.put(typ, te)
	case p4v1.Update_DELETE:
		if te.GetIsDefaultAction() {
			return invalid("cannot use DELETE for default entry of table %s", t.t.Name())
		}
		e, err := t.key(te)
		if err != nil {
			return err
		}
		if err := t.t.Delete(e); err != nil {
			return targetError(t, err)
		}
		delete(t.meta, keyID(e))
		return nil
	}
	return updateType(typ)
}

func updateType(typ p4v1.Update_Type) error {
	if typ == p4v1.Update_UNSPECIFIED {
		return invalid("update type is not set")
	}
	return invalid("invalid update type %d", typ)
}

func (t *table) put(typ p4v1.Update_Type, te *p4v1.TableEntry) error {
	isDefault := te.GetIsDefaultAction()
	insert := typ == p4v1.Update_INSERT
	if insert && isDefault {
		return invalid("cannot use INSERT for default entry of table %s", t.t.Name())
	}
	if insert && te.GetAction() == nil {
		return invalid("table %s: 'action' field must be set", t.t.Name())
	}
	var e *engine.Entry
	var err error
	if isDefault {
		if len(te.GetMatch()) != 0 {
			return invalid("non-empty key for default entry of table %s", t.t.Name())
		}
		if te.GetPriority() != 0 {
			return invalid("non-zero priority for default entry of table %s", t.t.Name())
		}
	} else if e, err = t.key(te); err != nil {
		return err
	}
	a, args, err := t.action(te)
	if err != nil {
		return err
	}
	if a == nil && !isDefault {
		return invalid("table %s: 'action' field must be set for non-default entries", t.t.Name())
	}
	switch {
	case te.GetMeterConfig() != nil || te.GetMeterCounterData() != nil:
		return invalid("table %s has no direct meters", t.t.Name())
	case te.GetCounterData() != nil && t.counter == nil:
		return invalid("table %s has no direct counters", t.t.Name())
	case te.GetCounterData() != nil && isDefault:
		return errorf(codes.Unknown, "table %s: direct counters of default entries are not supported", t.t.Name())
	case te.GetIdleTimeoutNs() < 0:
		return invalid("idle_timeout_ns must be a positive value")
	case te.GetIdleTimeoutNs() > 0:
		return invalid("idle_timeout_ns must be 0: table %s does not support idle timeouts", t.t.Name())
	}
	meta := entryMeta{te.GetMetadata(), te.GetControllerMetadata()}
	if isDefault {
		if a == nil {
			err, meta = t.t.ResetDefault(), entryMeta{}
		} else {
			err = t.t.SetDefault(a.a, args)
		}
		if err != nil {
			return targetError(t, err)
		}
		t.defaults = meta
		return nil
	}
	e.Action, e.Args = a.a, args
	if insert {
		err = t.t.Insert(e)
	} else {
		err = t.t.Modify(e)
	}
	if err != nil {
		return targetError(t, err)
	}
	t.meta[keyID(e)] = meta
	if d := te.GetCounterData(); d != nil {
		return targetError(t, t.t.SetCounter(e, counterValue(t.counter, d)))
	}
	return nil
}

// counterValue keeps the units that the counter has.
func counterValue(spec *p4cfg.CounterSpec, d *p4v1.CounterData) engine.CounterValue {
	var v engine.CounterValue
	if spec.GetUnit() != p4cfg.CounterSpec_BYTES {
		v.Packets = uint64(d.GetPacketCount())
	}
	if spec.GetUnit() != p4cfg.CounterSpec_PACKETS {
		v.Bytes = uint64(d.GetByteCount())
	}
	return v
}

func counterData(v engine.CounterValue) *p4v1.CounterData {
	return &p4v1.CounterData{PacketCount: int64(v.Packets), ByteCount: int64(v.Bytes)}
}

type reply func(*p4v1.Entity)

func (p *pipeline) readTables(te *p4v1.TableEntry, out reply) error {
	if te.GetTableId() == 0 {
		for _, t := range p.order {
			if err := t.read(te, out); err != nil {
				return err
			}
		}
		return nil
	}
	t, err := p.table(te.GetTableId())
	if err != nil {
		return err
	}
	return t.read(te, out)
}

func (t *table) read(te *p4v1.TableEntry, out reply) error {
	if te.GetTimeSinceLastHit() != nil {
		return invalid("table %s does not support idle timeouts: do not set time_since_last_hit", t.t.Name())
	}
	if te.GetIsDefaultAction() {
		a, args := t.t.Default()
		r := &p4v1.TableEntry{
			TableId: te.GetTableId(), IsDefaultAction: true,
			Metadata: t.defaults.metadata, ControllerMetadata: t.defaults.controller,
		}
		r.TableId = t.info.GetPreamble().GetId()
		if a != nil {
			r.Action = t.tableAction(a, args)
		}
		out(&p4v1.Entity{Entity: &p4v1.Entity_TableEntry{TableEntry: r}})
		return nil
	}
	entries := []*engine.Entry{}
	if len(te.GetMatch()) == 0 {
		entries = t.t.Entries()
	} else {
		k, err := t.key(te)
		if err != nil {
			return err
		}
		e, err := t.t.Get(k)
		switch {
		case err == nil:
			entries = append(entries, e)
		case !errors.Is(err, engine.ErrNotFound):
			return targetError(t, err)
		}
	}
	for _, e := range entries {
		m := t.meta[keyID(e)]
		r := &p4v1.TableEntry{
			TableId: t.info.GetPreamble().GetId(), Action: t.tableAction(e.Action, e.Args),
			Metadata: m.metadata, ControllerMetadata: m.controller,
		}
		t.matches(e, r)
		if te.GetCounterData() != nil && t.counter != nil {
			r.CounterData = counterData(e.Counter())
		}
		out(&p4v1.Entity{Entity: &p4v1.Entity_TableEntry{TableEntry: r}})
	}
	return nil
}

// directEntry finds the table of a direct counter.
func (p *pipeline) directEntry(te *p4v1.TableEntry) (*table, error) {
	if te == nil {
		return nil, invalid("missing table_entry field in DirectCounterEntry")
	}
	t, err := p.table(te.GetTableId())
	if err != nil {
		return nil, err
	}
	if t.counter == nil {
		return nil, invalid("table %s has no direct counters", t.t.Name())
	}
	return t, nil
}

func (p *pipeline) writeDirectCounter(typ p4v1.Update_Type, ce *p4v1.DirectCounterEntry) error {
	t, err := p.directEntry(ce.GetTableEntry())
	if err != nil {
		return err
	}
	if ce.GetTableEntry().GetIsDefaultAction() {
		return errorf(codes.Unknown, "table %s: direct counters of default entries are not supported", t.t.Name())
	}
	e, err := t.key(ce.GetTableEntry())
	if err != nil {
		return err
	}
	var v engine.CounterValue
	switch typ {
	case p4v1.Update_MODIFY:
		v = counterValue(t.counter, ce.GetData())
	case p4v1.Update_DELETE: // resets, as PI does
	case p4v1.Update_INSERT:
		return invalid("INSERT update type not supported for counters")
	default:
		return updateType(typ)
	}
	if err := t.t.SetCounter(e, v); errors.Is(err, engine.ErrNotFound) {
		return invalid("cannot map table entry to handle: no such entry in table %s", t.t.Name())
	} else if err != nil {
		return targetError(t, err)
	}
	return nil
}

func (p *pipeline) readDirectCounters(ce *p4v1.DirectCounterEntry, out reply) error {
	te := ce.GetTableEntry()
	if te != nil && te.GetTableId() == 0 {
		return errorf(codes.Unimplemented, "reading the direct counters of all tables is not supported")
	}
	t, err := p.directEntry(te)
	if err != nil {
		return err
	}
	emit := func(te *p4v1.TableEntry, e *engine.Entry) {
		out(&p4v1.Entity{Entity: &p4v1.Entity_DirectCounterEntry{
			DirectCounterEntry: &p4v1.DirectCounterEntry{TableEntry: te, Data: counterData(e.Counter())}}})
	}
	if te.GetIsDefaultAction() {
		return errorf(codes.Unknown, "table %s: direct counters of default entries are not supported", t.t.Name())
	}
	if len(te.GetMatch()) != 0 {
		k, err := t.key(te)
		if err != nil {
			return err
		}
		e, err := t.t.Get(k)
		if err != nil {
			return invalid("cannot map table entry to handle: no such entry in table %s", t.t.Name())
		}
		emit(te, e)
		return nil
	}
	for _, e := range t.t.Entries() {
		r := &p4v1.TableEntry{TableId: te.GetTableId()}
		t.matches(e, r)
		emit(r, e)
	}
	return nil
}

func (p *pipeline) counter(id uint32) (*counter, error) {
	c := p.counters[id]
	if c == nil {
		return nil, invalid("invalid P4 id: no counter %#x", id)
	}
	return c, nil
}

func (c *counter) index(i *p4v1.Index) (int, error) {
	switch {
	case i.GetIndex() < 0:
		return 0, invalid("a negative number is not a valid index value")
	case i.GetIndex() >= int64(c.c.Size()):
		return 0, errorf(codes.Unknown, "counter %s has %d cells, no %d", c.c.Name(), c.c.Size(), i.GetIndex())
	}
	return int(i.GetIndex()), nil
}

func (p *pipeline) writeCounter(typ p4v1.Update_Type, ce *p4v1.CounterEntry) error {
	c, err := p.counter(ce.GetCounterId())
	if err != nil {
		return err
	}
	if ce.GetIndex() == nil {
		return errorf(codes.Unimplemented, "wildcard write is not supported for counter %s", c.c.Name())
	}
	i, err := c.index(ce.GetIndex())
	if err != nil {
		return err
	}
	switch typ {
	case p4v1.Update_MODIFY:
		c.c.Write(i, counterValue(c.spec, ce.GetData()))
		return nil
	case p4v1.Update_DELETE: // resets, as PI does
		c.c.Write(i, engine.CounterValue{})
		return nil
	case p4v1.Update_INSERT:
		return invalid("INSERT update type not supported for counters")
	}
	return updateType(typ)
}

func (p *pipeline) readCounters(ce *p4v1.CounterEntry, out reply) error {
	list := p.ctrOrder
	if ce.GetCounterId() != 0 {
		c, err := p.counter(ce.GetCounterId())
		if err != nil {
			return err
		}
		list = []*counter{c}
	}
	for _, c := range list {
		from, to := 0, c.c.Size()
		if ce.GetIndex() != nil {
			i, err := c.index(ce.GetIndex())
			if err != nil {
				return err
			}
			from, to = i, i+1
		}
		for i := from; i < to; i++ {
			out(&p4v1.Entity{Entity: &p4v1.Entity_CounterEntry{CounterEntry: &p4v1.CounterEntry{
				CounterId: c.id, Index: &p4v1.Index{Index: int64(i)}, Data: counterData(c.c.Read(i))}}})
		}
	}
	return nil
}
