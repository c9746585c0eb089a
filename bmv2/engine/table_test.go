package engine

import (
	"bytes"
	"errors"
	"fmt"
	"math/big"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// tableCase is a table of random key fields beside a list of its entries that is searched in the plainest way.
type tableCase struct {
	t    *Table
	m    *machine
	list []*Entry
}

func newTableCase(t *rapid.T, kind MatchKind) *tableCase {
	a := &Action{name: "a", id: 1}
	x := &tableCase{t: &Table{
		prog: &Program{}, name: "t", kind: kind, size: 12, actions: []*Action{a}, byID: map[string]*Entry{},
		next: map[int]flowNode{1: nil},
	}}
	allowed := map[MatchKind][]MatchKind{
		Exact: {Exact}, LPM: {Exact}, Ternary: {Exact, LPM, Ternary}, Range: {Exact, LPM, Ternary, Range},
	}[kind]
	width := rapid.OneOf(rapid.IntRange(1, 16), rapid.SampledFrom([]int{31, 32, 33, 64, 65, 128, 200}))
	h := &header{name: "h", meta: true}
	off, haveLPM := 0, false
	n := rapid.IntRange(1, 3).Draw(t, "fields")
	for i := range n {
		k := rapid.SampledFrom(allowed).Draw(t, "kind")
		if i == n-1 {
			k = kind
		}
		if k == LPM && haveLPM {
			k = Exact
		}
		haveLPM = haveLPM || k == LPM
		w := width.Draw(t, "width")
		f := &field{name: fmt.Sprint("h.f", i), off: off, words: numWords(w), width: w, hdr: h}
		off += f.words
		x.t.keys = append(x.t.keys, tableKey{f: f, kind: k, name: f.name, width: w, off: x.t.words, words: f.words})
		x.t.words += f.words
		x.t.bits += w
	}
	if kind == Exact {
		x.t.sets = []*keySet{x.t.newSet(nil, 0)}
	}
	x.m = &machine{phv: make([]uint64, off)}
	return x
}

// small draws values from few, so that entries and keys meet.
func small(t *rapid.T, width int) *big.Int {
	v := big.NewInt(int64(rapid.IntRange(0, 3).Draw(t, "value")))
	if rapid.Bool().Draw(t, "high") {
		v.Lsh(v, uint(max(width-2, 0)))
	}
	return v.Mod(v, new(big.Int).Lsh(big.NewInt(1), uint(width)))
}

func fill(v *big.Int, width int) []byte { return v.FillBytes(make([]byte, (width+7)/8)) }

func (x *tableCase) entry(t *rapid.T) *Entry {
	e := &Entry{Action: x.t.actions[0], Priority: rapid.IntRange(1, 4).Draw(t, "priority")}
	for i := range x.t.keys {
		k := &x.t.keys[i]
		m := Match{Value: fill(small(t, k.width), k.width)}
		switch k.kind {
		case LPM:
			m.Prefix = rapid.IntRange(0, k.width).Draw(t, "prefix")
		case Ternary, Range:
			m.Mask = fill(small(t, k.width), k.width)
		}
		e.Match = append(e.Match, m)
	}
	return e
}

// hits reports whether the key, one value per field, matches the entry.
func (x *tableCase) hits(e *Entry, key []*big.Int) bool {
	for i := range x.t.keys {
		k, m, v := &x.t.keys[i], &e.Match[i], key[i]
		lo, mask := new(big.Int).SetBytes(m.Value), new(big.Int).SetBytes(m.Mask)
		switch k.kind {
		case Exact:
			if v.Cmp(lo) != 0 {
				return false
			}
		case LPM:
			s := uint(k.width - m.Prefix)
			if new(big.Int).Rsh(v, s).Cmp(new(big.Int).Rsh(lo, s)) != 0 {
				return false
			}
		case Ternary:
			if new(big.Int).And(v, mask).Cmp(new(big.Int).And(lo, mask)) != 0 {
				return false
			}
		case Range:
			if v.Cmp(lo) < 0 || v.Cmp(mask) > 0 {
				return false
			}
		}
	}
	return true
}

// best searches the list: the longest prefix, else the highest priority, else the first.
func (x *tableCase) best(key []*big.Int) *Entry {
	var best *Entry
	for _, e := range x.list {
		if !x.hits(e, key) {
			continue
		}
		switch {
		case best == nil:
			best = e
		case x.t.kind == LPM && e.Match[len(e.Match)-1].Prefix > best.Match[len(e.Match)-1].Prefix:
			best = e
		case x.t.NeedsPriority() && e.Priority > best.Priority:
			best = e
		}
	}
	return best
}

// same reports whether two entries have the same key, as the switch sees it: bits under a mask do not count.
func (x *tableCase) same(a, b *Entry) bool {
	if x.t.NeedsPriority() && a.Priority != b.Priority {
		return false
	}
	for i := range x.t.keys {
		k, m, n := &x.t.keys[i], a.Match[i], b.Match[i]
		if k.kind == Ternary {
			m.Value, n.Value = bytes.Clone(m.Value), bytes.Clone(n.Value)
			for j := range m.Value {
				m.Value[j] &= m.Mask[j]
				n.Value[j] &= n.Mask[j]
			}
		}
		if k.kind == LPM {
			s := uint(k.width - m.Prefix)
			p, q := new(big.Int).SetBytes(m.Value), new(big.Int).SetBytes(n.Value)
			if m.Prefix != n.Prefix || p.Rsh(p, s).Cmp(q.Rsh(q, s)) != 0 {
				return false
			}
			continue
		}
		if !bytes.Equal(m.Value, n.Value) || !bytes.Equal(m.Mask, n.Mask) {
			return false
		}
	}
	return true
}

// TestTablesAgreeWithLists inserts, deletes and looks up at random, for every match kind and key width.
func TestTablesAgreeWithLists(t *testing.T) {
	found := 0
	rapid.Check(t, func(t *rapid.T) {
		x := newTableCase(t, rapid.SampledFrom([]MatchKind{Exact, LPM, Ternary, Range}).Draw(t, "table"))
		for range rapid.IntRange(1, 40).Draw(t, "steps") {
			switch rapid.IntRange(0, 3).Draw(t, "step") {
			case 0, 1:
				e := x.entry(t)
				i := slices.IndexFunc(x.list, func(o *Entry) bool { return x.same(o, e) })
				err := x.t.Insert(e)
				switch {
				case i >= 0 && !errors.Is(err, ErrExists):
					t.Fatalf("insert an entry twice: %v", err)
				case i < 0 && len(x.list) == x.t.size && !errors.Is(err, ErrFull):
					t.Fatalf("insert into a full table: %v", err)
				case i < 0 && len(x.list) < x.t.size && err != nil:
					t.Fatalf("insert: %v", err)
				}
				if err == nil {
					x.list = append(x.list, e)
				}
			case 2:
				if len(x.list) == 0 {
					if err := x.t.Delete(x.entry(t)); !errors.Is(err, ErrNotFound) {
						t.Fatalf("delete from an empty table: %v", err)
					}
					continue
				}
				i := rapid.IntRange(0, len(x.list)-1).Draw(t, "delete")
				if err := x.t.Delete(&Entry{Match: x.list[i].Match, Priority: x.list[i].Priority}); err != nil {
					t.Fatalf("delete: %v", err)
				}
				x.list = slices.Delete(x.list, i, i+1)
			case 3:
				var key []*big.Int
				for i := range x.t.keys {
					f := x.t.keys[i].f
					v := small(t, f.width)
					key = append(key, v)
					copy(x.m.phv[f.off:f.off+f.words], bigToWords(v, f.words))
				}
				want, got := x.best(key), x.t.lookup(x.m)
				if got != want {
					t.Fatalf("lookup of %v in %v: %+v, want %+v", key, x.t.Keys(), got, want)
				}
				if got != nil {
					found++
				}
			}
			if n := len(x.t.Entries()); n != len(x.list) {
				t.Fatalf("%d entries, want %d", n, len(x.list))
			}
		}
	})
	if found == 0 {
		t.Error("no lookup found anything")
	}
}

func TestBadEntries(t *testing.T) {
	p := load(t, "switch.json")
	tb := p.Table("I.exact_t")
	hit := tb.Action("I.exact_hit")
	good := func() *Entry {
		return &Entry{Match: []Match{{Value: []byte{1}}, {Value: []byte{1, 2}}, {Value: []byte{1}}}, Action: hit, Args: [][]byte{{0, 1}}}
	}
	for name, f := range map[string]func(*Entry){
		"match fields":    func(e *Entry) { e.Match = e.Match[:2] },
		"value length":    func(e *Entry) { e.Match[1].Value = []byte{1} },
		"value bits":      func(e *Entry) { e.Match[0].Value = []byte{0x10} },
		"action":          func(e *Entry) { e.Action = p.Table("I.lpm_t").Action("I.lpm_hit") },
		"arguments":       func(e *Entry) { e.Args = nil },
		"argument length": func(e *Entry) { e.Args = [][]byte{{1}} },
	} {
		e := good()
		f(e)
		if err := tb.Insert(e); !errors.Is(err, ErrBadEntry) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := tb.Insert(good()); err != nil {
		t.Error(err)
	}
	if err := p.Table("I.fixed_t").Insert(good()); !errors.Is(err, ErrConst) {
		t.Errorf("constant entries: %v", err)
	}
	constant := p.Table("I.range_t")
	if err := constant.SetDefault(constant.Action("I.range_hit"), [][]byte{{0, 1}}); !errors.Is(err, ErrConstDefault) {
		t.Errorf("constant default: %v", err)
	}
}
