package engine

import (
	"errors"
	"fmt"
	"slices"
	"sort"
)

// MatchKind is how a table compares a field of its key.
type MatchKind int

// The match kinds. KindValid compares a header's validity.
const (
	Exact MatchKind = iota
	LPM
	Ternary
	Range
	KindValid
)

var kinds = map[string]MatchKind{"exact": Exact, "lpm": LPM, "ternary": Ternary, "range": Range, "valid": KindValid}

// String returns the kind as the JSON spells it.
func (k MatchKind) String() string {
	return [...]string{"exact", "lpm", "ternary", "range", "valid"}[k]
}

// KeyField describes a field of a table's key.
type KeyField struct {
	Name  string // as the control plane knows it
	Kind  MatchKind
	Width int // bits
}

// Match is one field of an entry's key. Values and masks are big-endian and exactly as long as the field, in bytes.
type Match struct {
	Value  []byte // exact, lpm, ternary; range: the low end; valid: one byte, 0 or 1
	Mask   []byte // ternary; range: the high end
	Prefix int    // lpm
}

// Entry is a table entry.
type Entry struct {
	Match    []Match
	Priority int // ternary and range tables: larger wins; ignored elsewhere
	Action   *Action
	Args     [][]byte // big-endian, exactly as long as the parameters

	prio    int // bmv2's: smaller wins
	value   []uint64
	mask    []uint64 // range fields: the high end
	prefix  int
	args    []uint64
	next    flowNode
	counter cell
	id      string
	seq     uint64
}

// Counter returns the entry's direct counter.
func (e *Entry) Counter() CounterValue { return e.counter.value() }

// maxPriority is where bmv2's priorities (smaller is better) and the control plane's (larger is better) are mirrored.
const maxPriority = 1<<31 - 1

// Errors of the methods of Table.
var (
	ErrExists       = errors.New("entry already exists")
	ErrNotFound     = errors.New("no such entry")
	ErrFull         = errors.New("table is full")
	ErrConst        = errors.New("entries are constant")
	ErrConstDefault = errors.New("default action is constant")
	ErrNoKey        = errors.New("table has no key")
	ErrBadEntry     = errors.New("bad entry")
)

// Table is a match-action table.
type Table struct {
	prog     *Program
	name     string
	kind     MatchKind
	size     int
	keys     []tableKey
	words    int // of the key
	bits     int // of the key, for the packed fast path
	actions  []*Action
	immut    bool
	counters bool

	defAction *Action
	defArgs   []uint64
	defBytes  [][]byte
	initial   struct {
		action *Action
		args   [][]byte
	}
	constAction *Action // the default may only have this action
	constEntry  bool    // the default may not be changed at all

	nextHit, nextMiss flowNode
	hitMiss           bool
	next              map[int]flowNode // by action id

	byID    map[string]*Entry
	sets    []*keySet // exact: one; lpm: one per prefix length in use, longest first
	list    []*Entry  // ternary, range: best first
	nextSeq uint64
}

type tableKey struct {
	f     *field
	h     *header // valid
	kind  MatchKind
	name  string
	width int
	off   int // first word in the key
	words int
	mask  []uint64 // static mask, or nil
}

// keySet holds the entries that have one mask.
type keySet struct {
	prefix int
	mask   []uint64 // nil = everything
	small  map[uint64]*Entry
	large  map[string]*Entry
}

// Name is the table's fully qualified name.
func (t *Table) Name() string { return t.name }

// Size is the largest number of entries.
func (t *Table) Size() int { return t.size }

// Const reports whether the entries are part of the program and cannot be changed.
func (t *Table) Const() bool { return t.immut }

// HasCounters reports whether the entries have direct counters.
func (t *Table) HasCounters() bool { return t.counters }

// Keys returns the fields of the key in order; none for a table that only runs its default action.
func (t *Table) Keys() []KeyField {
	out := make([]KeyField, len(t.keys))
	for i := range t.keys {
		k := &t.keys[i]
		out[i] = KeyField{k.name, k.kind, k.width}
	}
	return out
}

// NeedsPriority reports whether entries of the table are ordered by priority.
func (t *Table) NeedsPriority() bool { return t.kind == Ternary || t.kind == Range }

// Action returns the table's action of that name, or nil.
func (t *Table) Action(name string) *Action {
	for _, a := range t.actions {
		if a.name == name {
			return a
		}
	}
	return nil
}

// Actions returns the table's actions.
func (t *Table) Actions() []*Action { return slices.Clone(t.actions) }

func (c *compiler) loadTable(jt *jsonTable) (*Table, error) {
	t := &Table{prog: c.prog, name: jt.Name, counters: jt.WithCounters, next: map[int]flowNode{}, byID: map[string]*Entry{}}
	switch {
	case jt.Type != "simple":
		return nil, fmt.Errorf("type %q (action profile) is not supported", jt.Type)
	case jt.Timeout:
		return nil, fmt.Errorf("support_timeout (idle timeouts) is not supported")
	case jt.DirectMeters != nil:
		return nil, fmt.Errorf("direct meter %s is not supported", *jt.DirectMeters)
	case jt.Profile != "":
		return nil, fmt.Errorf("action profile %s is not supported", jt.Profile)
	}
	kind, ok := kinds[jt.MatchType]
	if !ok || kind == KindValid {
		return nil, fmt.Errorf("match type %q is not supported", jt.MatchType)
	}
	t.kind = kind
	switch {
	case jt.Entries != nil:
		t.size = len(jt.Entries)
	case jt.MaxSize != nil && *jt.MaxSize >= 0:
		t.size = *jt.MaxSize
	default:
		return nil, fmt.Errorf("has neither max_size nor entries")
	}
	for i := range jt.Key {
		if err := c.tableKey(t, &jt.Key[i]); err != nil {
			return nil, err
		}
	}
	if t.kind == Exact {
		t.sets = []*keySet{t.newSet(nil, 0)}
	}
	if len(jt.ActionIDs) != len(jt.Actions) {
		return nil, fmt.Errorf("%d action_ids and %d actions", len(jt.ActionIDs), len(jt.Actions))
	}
	for i, id := range jt.ActionIDs {
		a := c.actions[id]
		if a == nil || a.name != jt.Actions[i] {
			return nil, fmt.Errorf("no action %s with id %d", jt.Actions[i], id)
		}
		t.actions = append(t.actions, a)
	}
	return t, nil
}

func (c *compiler) tableKey(t *Table, jk *jsonKey) error {
	kind, ok := kinds[jk.MatchType]
	if !ok {
		return fmt.Errorf("key %s: match type %q is not supported", jk.Name, jk.MatchType)
	}
	// As bmv2: range tables take every kind, ternary ones all but range, LPM ones one LPM field, exact ones exact.
	allowed := map[MatchKind][]MatchKind{
		Exact: {Exact, KindValid}, LPM: {Exact, KindValid, LPM},
		Ternary: {Exact, KindValid, LPM, Ternary}, Range: {Exact, KindValid, LPM, Ternary, Range},
	}[t.kind]
	if !slices.Contains(allowed, kind) {
		return fmt.Errorf("key %s: match type %v in a table of match type %v", jk.Name, kind, t.kind)
	}
	k := tableKey{kind: kind, name: jk.Name, off: t.words}
	if kind == KindValid {
		h, err := c.headerRef(jk.Target)
		if err != nil {
			return err
		}
		k.h, k.width = h, 1
	} else {
		f, err := c.fieldRef(jk.Target)
		if err != nil {
			return err
		}
		k.f, k.width = f, f.width
		if jk.Mask != nil {
			m, err := parseHex(*jk.Mask)
			if err != nil || m.Sign() < 0 {
				return fmt.Errorf("key %s: mask %s", jk.Name, *jk.Mask)
			}
			k.mask = bigToWords(m, f.words)
		}
	}
	if k.name == "" && k.f != nil { // bmv2's own default
		k.name = k.f.name
	} else if k.name == "" {
		k.name = k.h.name
	}
	if kind == LPM {
		for i := range t.keys {
			if t.keys[i].kind == LPM {
				return fmt.Errorf("key %s: a second lpm field", jk.Name)
			}
		}
	}
	k.words = numWords(k.width)
	t.words += k.words
	t.bits += k.width
	t.keys = append(t.keys, k)
	return nil
}

// link resolves what follows the table, and its default entry and constant entries.
func (c *compiler) linkTable(t *Table, jt *jsonTable, find func(*string) (flowNode, error)) error {
	_, hit := jt.Next["__HIT__"]
	_, miss := jt.Next["__MISS__"]
	var err error
	switch {
	case hit != miss || hit && len(jt.Next) != 2:
		return fmt.Errorf("next_tables needs both __HIT__ and __MISS__ and nothing else, or neither")
	case hit:
		t.hitMiss = true
		if t.nextHit, err = find(jt.Next["__HIT__"]); err != nil {
			return err
		}
		if t.nextMiss, err = find(jt.Next["__MISS__"]); err != nil {
			return err
		}
	default:
		for _, a := range t.actions {
			name, ok := jt.Next[a.name]
			if !ok {
				return fmt.Errorf("next_tables has nothing for action %s", a.name)
			}
			if t.next[a.id], err = find(name); err != nil {
				return err
			}
		}
		if t.nextMiss, err = find(jt.BaseNext); err != nil {
			return err
		}
	}
	if d := jt.Default; d != nil {
		a := c.actions[d.ActionID]
		if a == nil {
			return fmt.Errorf("default_entry: no action with id %d", d.ActionID)
		}
		args, err := a.parseArgs(d.Data)
		if err != nil {
			return fmt.Errorf("default_entry: %w", err)
		}
		// p4c may leave the default action out of the table's own actions only if it is constant.
		if _, ok := t.next[a.id]; !ok && !t.hitMiss {
			return fmt.Errorf("default_entry: action %s is not one of the table's", a.name)
		}
		t.initial.action, t.initial.args = a, args
		if d.ActionConst {
			t.constAction = a
		}
		t.constEntry = d.EntryConst
		t.resetDefault()
	}
	for i := range jt.Entries {
		je := &jt.Entries[i]
		e, err := c.constEntry(t, je)
		if err != nil {
			return fmt.Errorf("entry %d: %w", i, err)
		}
		if err := t.insert(e); err != nil {
			return fmt.Errorf("entry %d: %w", i, err)
		}
	}
	t.immut = jt.Entries != nil
	return nil
}

func (c *compiler) constEntry(t *Table, je *jsonEntry) (*Entry, error) {
	a := c.actions[je.Action.ID]
	if a == nil || !slices.Contains(t.actions, a) {
		return nil, fmt.Errorf("no action with id %d", je.Action.ID)
	}
	args, err := a.parseArgs(je.Action.Data)
	if err != nil {
		return nil, err
	}
	if je.Priority < 0 || je.Priority > maxPriority {
		return nil, fmt.Errorf("priority %d", je.Priority)
	}
	e := &Entry{Action: a, Args: args, Priority: maxPriority - je.Priority}
	if len(je.MatchKey) != len(t.keys) {
		return nil, fmt.Errorf("%d match fields, want %d", len(je.MatchKey), len(t.keys))
	}
	for i := range je.MatchKey {
		jm, k := &je.MatchKey[i], &t.keys[i]
		if jm.MatchType != k.kind.String() {
			return nil, fmt.Errorf("match type %q, want %q", jm.MatchType, k.kind)
		}
		bytes := func(s string) []byte {
			v, err2 := parseHex(s)
			if err2 != nil || v.Sign() < 0 || v.BitLen() > k.width {
				err = errors.Join(err, fmt.Errorf("field %s: bad value %q", k.name, s))
				return nil
			}
			return v.FillBytes(make([]byte, (k.width+7)/8))
		}
		var m Match
		switch k.kind {
		case KindValid:
			valid, err2 := asBool(jm.Key)
			err = errors.Join(err, err2)
			m.Value = []byte{0}
			if valid {
				m.Value[0] = 1
			}
		case Range:
			m.Value, m.Mask = bytes(jm.Start), bytes(jm.End)
		default:
			key, err2 := asString(jm.Key)
			err = errors.Join(err, err2)
			m.Value, m.Prefix = bytes(key), jm.Prefix
			if k.kind == Ternary {
				m.Mask = bytes(jm.Mask)
			}
		}
		if err != nil {
			return nil, fmt.Errorf("match field %s: %w", k.name, err)
		}
		e.Match = append(e.Match, m)
	}
	return e, nil
}

func (a *Action) parseArgs(data []string) ([][]byte, error) {
	if len(data) != len(a.params) {
		return nil, fmt.Errorf("action %s: %d arguments, want %d", a.name, len(data), len(a.params))
	}
	var out [][]byte
	for i, s := range data {
		v, err := parseHex(s)
		p := a.params[i]
		if err != nil || v.Sign() < 0 || v.BitLen() > p.width {
			return nil, fmt.Errorf("action %s: argument %s: bad value %q", a.name, p.name, s)
		}
		out = append(out, v.FillBytes(make([]byte, (p.width+7)/8)))
	}
	return out, nil
}

// pack lays arguments out as the action's code reads them.
func (a *Action) pack(args [][]byte) ([]uint64, error) {
	if len(args) != len(a.params) {
		return nil, fmt.Errorf("%w: action %s: %d arguments, want %d", ErrBadEntry, a.name, len(args), len(a.params))
	}
	out := make([]uint64, a.words)
	for i, p := range a.params {
		if err := putWords(out[p.off:p.off+p.words], args[i], p.width); err != nil {
			return nil, fmt.Errorf("%w: action %s: argument %s: %w", ErrBadEntry, a.name, p.name, err)
		}
	}
	return out, nil
}

// putWords reads a big-endian value of exactly width bits.
func putWords(dst []uint64, b []byte, width int) error {
	n := (width + 7) / 8
	if len(b) != n {
		return fmt.Errorf("%d bytes, want %d", len(b), n)
	}
	if r := width % 8; r != 0 && b[0]>>r != 0 {
		return fmt.Errorf("value does not fit %d bits", width)
	}
	loadWords(dst, b, uint(8*n-width), uint(width))
	return nil
}

// prepare checks an entry and fills in what the lookup needs.
func (t *Table) prepare(e *Entry) error {
	if len(t.keys) == 0 {
		return ErrNoKey
	}
	if err := t.prepareKey(e); err != nil {
		return err
	}
	if e.Action == nil || !slices.Contains(t.actions, e.Action) {
		return fmt.Errorf("%w: not an action of table %s", ErrBadEntry, t.name)
	}
	args, err := e.Action.pack(e.Args)
	if err != nil {
		return err
	}
	e.args = args
	if e.next = t.nextHit; !t.hitMiss {
		e.next = t.next[e.Action.id]
	}
	return nil
}

func (t *Table) prepareKey(e *Entry) error {
	if len(e.Match) != len(t.keys) {
		return fmt.Errorf("%w: %d match fields, want %d", ErrBadEntry, len(e.Match), len(t.keys))
	}
	e.value, e.mask = make([]uint64, t.words), make([]uint64, t.words)
	for i := range t.keys {
		k, m := &t.keys[i], &e.Match[i]
		v, mask := e.value[k.off:k.off+k.words], e.mask[k.off:k.off+k.words]
		fail := func(err error) error { return fmt.Errorf("%w: match field %s: %w", ErrBadEntry, k.name, err) }
		if err := putWords(v, m.Value, k.width); err != nil {
			return fail(err)
		}
		for j := range mask {
			mask[j] = ^uint64(0)
		}
		switch k.kind {
		case LPM:
			if m.Prefix < 0 || m.Prefix > k.width {
				return fail(fmt.Errorf("prefix length %d of %d bits", m.Prefix, k.width))
			}
			copy(mask, prefixMask(m.Prefix, k.width))
			e.prefix = m.Prefix
		case Ternary, Range:
			if err := putWords(mask, m.Mask, k.width); err != nil {
				return fail(err)
			}
		}
		if k.kind != Range {
			if k.mask != nil {
				andWords(v, v, k.mask)
			}
			andWords(v, v, mask)
		}
	}
	e.prio = 0
	if t.NeedsPriority() {
		if e.Priority < 0 || e.Priority > maxPriority {
			return fmt.Errorf("%w: priority %d", ErrBadEntry, e.Priority)
		}
		e.prio = maxPriority - e.Priority
	}
	// Two entries are the same if key, masks and priority are.
	id := make([]byte, 0, 16*t.words+4)
	for i := range e.value {
		for s := 0; s < 64; s += 8 {
			id = append(id, byte(e.value[i]>>s), byte(e.mask[i]>>s))
		}
	}
	id = append(id, byte(e.prio), byte(e.prio>>8), byte(e.prio>>16), byte(e.prio>>24))
	e.id = string(id)
	return nil
}

func prefixMask(prefix, width int) []uint64 {
	m := make([]uint64, numWords(width))
	for i := width - prefix; i < width; i++ {
		m[i/64] |= 1 << (i % 64)
	}
	return m
}

func (t *Table) newSet(mask []uint64, prefix int) *keySet {
	s := &keySet{mask: mask, prefix: prefix}
	if t.bits <= 64 {
		s.small = map[uint64]*Entry{}
	} else {
		s.large = map[string]*Entry{}
	}
	return s
}

// packKey is the key as one number, for keys of at most 64 bits: every field is one word.
func (t *Table) packKey(key []uint64) uint64 {
	var v uint64
	for i := range t.keys {
		v = v<<uint(t.keys[i].width) | key[i]
	}
	return v
}

func appendKey(b []byte, key []uint64) []byte {
	for _, v := range key {
		b = append(b, byte(v), byte(v>>8), byte(v>>16), byte(v>>24), byte(v>>32), byte(v>>40), byte(v>>48), byte(v>>56))
	}
	return b
}

func (t *Table) insert(e *Entry) error {
	if err := t.prepare(e); err != nil {
		return err
	}
	if t.byID[e.id] != nil {
		return ErrExists
	}
	if len(t.byID) >= t.size {
		return fmt.Errorf("%w: it holds %d entries", ErrFull, t.size)
	}
	e.seq = t.nextSeq
	t.nextSeq++
	t.byID[e.id] = e
	t.place(e)
	return nil
}

func (t *Table) place(e *Entry) {
	if t.NeedsPriority() {
		i := sort.Search(len(t.list), func(i int) bool { return t.list[i].prio > e.prio })
		t.list = slices.Insert(t.list, i, e)
		return
	}
	i, found := 0, true
	if t.kind == LPM {
		i, found = slices.BinarySearchFunc(t.sets, e.prefix, func(s *keySet, p int) int { return p - s.prefix })
	}
	if !found {
		t.sets = slices.Insert(t.sets, i, t.newSet(e.mask, e.prefix))
	}
	s := t.sets[i]
	if s.small != nil {
		s.small[t.packKey(e.value)] = e
	} else {
		s.large[string(appendKey(nil, e.value))] = e
	}
}

func (t *Table) remove(e *Entry) {
	delete(t.byID, e.id)
	if t.NeedsPriority() {
		t.list = slices.DeleteFunc(t.list, func(x *Entry) bool { return x == e })
		return
	}
	for i, s := range t.sets {
		if s.prefix != e.prefix {
			continue
		}
		if s.small != nil {
			delete(s.small, t.packKey(e.value))
		} else {
			delete(s.large, string(appendKey(nil, e.value)))
		}
		if t.kind == LPM && len(s.small)+len(s.large) == 0 {
			t.sets = slices.Delete(t.sets, i, i+1)
		}
		return
	}
}

// lookup returns the entry that the packet hits, or nil.
func (t *Table) lookup(m *machine) *Entry {
	if len(t.byID) == 0 {
		return nil
	}
	key := m.key[:0]
	for i := range t.keys {
		k := &t.keys[i]
		switch {
		case k.h != nil:
			var v uint64
			if k.h.isValid(m.phv) {
				v = 1
			}
			key = append(key, v)
		case k.f.hidden || k.f.hdr.isValid(m.phv):
			key = append(key, m.phv[k.f.off:k.f.off+k.f.words]...)
		default: // bmv2 takes zero for the fields of invalid headers here, and only here
			for range k.f.words {
				key = append(key, 0)
			}
		}
		for j, w := range k.mask {
			key[k.off+j] &= w
		}
	}
	m.key = key
	if t.list != nil {
		for _, e := range t.list {
			if t.matches(e, key) {
				return e
			}
		}
		return nil
	}
	for _, s := range t.sets {
		k := key
		if s.mask != nil {
			k = append(key, key...)[len(key):] // a copy behind the key, where m.key has room for it
			andWords(k, k, s.mask)
		}
		var e *Entry
		if s.small != nil {
			e = s.small[t.packKey(k)]
		} else {
			m.keyBuf = appendKey(m.keyBuf[:0], k)
			e = s.large[string(m.keyBuf)]
		}
		if e != nil {
			return e
		}
	}
	return nil
}

func (t *Table) matches(e *Entry, key []uint64) bool {
	for i := range t.keys {
		k := &t.keys[i]
		v, w, x := e.value[k.off:k.off+k.words], e.mask[k.off:k.off+k.words], key[k.off:k.off+k.words]
		if k.kind == Range {
			if lessWords(x, v) || lessWords(w, x) {
				return false
			}
			continue
		}
		for j := range x {
			if x[j]&w[j] != v[j] {
				return false
			}
		}
	}
	return true
}

// lessWords compares unsigned values.
func lessWords(a, b []uint64) bool {
	for i := len(a) - 1; i >= 0; i-- {
		if a[i] != b[i] {
			return a[i] < b[i]
		}
	}
	return false
}

func (t *Table) resetDefault() {
	t.defAction, t.defBytes = t.initial.action, t.initial.args
	if t.defAction != nil {
		t.defArgs, _ = t.defAction.pack(t.defBytes) // was parsed with these widths
	}
	t.relinkMiss()
}

// relinkMiss sets what follows a miss: bmv2 takes the default action's successor unless the table branches on hit.
func (t *Table) relinkMiss() {
	if !t.hitMiss && t.defAction != nil {
		t.nextMiss = t.next[t.defAction.id]
	}
}

// exec applies the table and returns what comes next.
func (t *Table) exec(m *machine) flowNode {
	if len(t.keys) != 0 {
		if e := t.lookup(m); e != nil {
			if t.counters {
				e.counter.count(m.length)
			}
			e.Action.run(m, e.args)
			return e.next
		}
	}
	if t.defAction != nil {
		t.defAction.run(m, t.defArgs)
	}
	return t.nextMiss
}

// Insert adds an entry. The table keeps e, which must not be changed after. Errors: ErrConst, ErrNoKey, ErrBadEntry,
// ErrExists, ErrFull.
func (t *Table) Insert(e *Entry) error {
	t.prog.mu.Lock()
	defer t.prog.mu.Unlock()
	if t.immut {
		return ErrConst
	}
	return t.insert(e)
}

// Modify gives the entry with e's key and priority e's action and arguments; its counter goes on. Errors: ErrConst,
// ErrNoKey, ErrBadEntry, ErrNotFound.
func (t *Table) Modify(e *Entry) error {
	t.prog.mu.Lock()
	defer t.prog.mu.Unlock()
	if t.immut {
		return ErrConst
	}
	if err := t.prepare(e); err != nil {
		return err
	}
	old := t.byID[e.id]
	if old == nil {
		return ErrNotFound
	}
	old.Action, old.Args, old.args, old.next = e.Action, e.Args, e.args, e.next
	return nil
}

// Delete removes the entry with e's key and priority; its action does not matter. Errors: ErrConst, ErrNoKey,
// ErrBadEntry, ErrNotFound.
func (t *Table) Delete(e *Entry) error {
	t.prog.mu.Lock()
	defer t.prog.mu.Unlock()
	if t.immut {
		return ErrConst
	}
	old, err := t.find(e)
	if err != nil {
		return err
	}
	t.remove(old)
	return nil
}

func (t *Table) find(e *Entry) (*Entry, error) {
	if len(t.keys) == 0 {
		return nil, ErrNoKey
	}
	if err := t.prepareKey(e); err != nil {
		return nil, err
	}
	old := t.byID[e.id]
	if old == nil {
		return nil, ErrNotFound
	}
	return old, nil
}

// Get returns a copy of the entry with e's key and priority. Errors: ErrNoKey, ErrBadEntry, ErrNotFound.
func (t *Table) Get(e *Entry) (*Entry, error) {
	t.prog.mu.Lock()
	defer t.prog.mu.Unlock()
	old, err := t.find(e)
	if err != nil {
		return nil, err
	}
	return old.copy(), nil
}

// SetCounter sets the direct counter of the entry with e's key and priority.
func (t *Table) SetCounter(e *Entry, v CounterValue) error {
	t.prog.mu.Lock()
	defer t.prog.mu.Unlock()
	old, err := t.find(e)
	if err != nil {
		return err
	}
	old.counter.set(v)
	return nil
}

func (e *Entry) copy() *Entry {
	c := &Entry{Match: e.Match, Priority: e.Priority, Action: e.Action, Args: e.Args}
	c.counter.set(e.counter.value())
	return c
}

// Entries returns copies of all entries in the order in which they were inserted.
func (t *Table) Entries() []*Entry {
	t.prog.mu.Lock()
	defer t.prog.mu.Unlock()
	out := make([]*Entry, 0, len(t.byID))
	for _, e := range t.byID {
		out = append(out, e)
	}
	slices.SortFunc(out, func(a, b *Entry) int { return int(int64(a.seq - b.seq)) })
	for i, e := range out {
		out[i] = e.copy()
	}
	return out
}

// Default returns the default action and its arguments; nil if the table does nothing on a miss.
func (t *Table) Default() (*Action, [][]byte) {
	t.prog.mu.Lock()
	defer t.prog.mu.Unlock()
	return t.defAction, t.defBytes
}

// InitialDefault returns the default action that the program itself has.
func (t *Table) InitialDefault() (*Action, [][]byte) { return t.initial.action, t.initial.args }

// SetDefault changes the default action. Errors: ErrConstDefault, ErrBadEntry.
func (t *Table) SetDefault(a *Action, args [][]byte) error {
	t.prog.mu.Lock()
	defer t.prog.mu.Unlock()
	if t.constEntry || t.constAction != nil && t.constAction != a {
		return ErrConstDefault
	}
	if a == nil || !slices.Contains(t.actions, a) {
		return fmt.Errorf("%w: not an action of table %s", ErrBadEntry, t.name)
	}
	packed, err := a.pack(args)
	if err != nil {
		return err
	}
	t.defAction, t.defArgs, t.defBytes = a, packed, args
	t.relinkMiss()
	return nil
}

// ResetDefault brings the program's own default action back. Errors: ErrConstDefault.
func (t *Table) ResetDefault() error {
	t.prog.mu.Lock()
	defer t.prog.mu.Unlock()
	if t.constEntry {
		return ErrConstDefault
	}
	t.resetDefault()
	return nil
}
