// Package layout tests that the packet format is the same wherever it is spelt: the table in docs/protocol.md, package
// wire, the P4 header in p4/xagg.p4 and the C header in xdp/wire.h. The table is what the others are held against.
package layout

import (
	"cmp"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"unicode"

	gocmp "github.com/google/go-cmp/cmp"

	"xagg/wire"
)

const (
	docsFile = "../../docs/protocol.md"
	p4File   = "../../p4/xagg.p4"
	cFile    = "../../xdp/wire.h"
	goFile   = "../../wire/header.go"
)

// A field is a named run of bits of the header; at counts from its first bit.
type field struct {
	name     string
	at, bits int
}

func source(t *testing.T, file string) string {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func number(t *testing.T, s string) int {
	t.Helper()
	n, err := strconv.Atoi(strings.ReplaceAll(s, ",", ""))
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// find returns the groups of the only match of pattern in file.
func find(t *testing.T, file, pattern string) []string {
	t.Helper()
	m := regexp.MustCompile(pattern).FindAllStringSubmatch(source(t, file), -1)
	if len(m) != 1 {
		t.Fatalf("%s: %d matches of %q, want one", file, len(m), pattern)
	}
	return m[0][1:]
}

// row returns the three columns of the table in the docs that describe field.
func row(t *testing.T, name string) (offset, bits, meaning string) {
	t.Helper()
	c := find(t, docsFile, `(?m)^\| (\d+) \| `+name+` \| ([^|]+) \| ([^|]*)\|$`)
	return c[0], c[1], c[2]
}

// docsFields reads the table: fields in their order, as it lists them.
func docsFields(t *testing.T) []field {
	t.Helper()
	var fields []field
	add := func(name string, at, bits int) { fields = append(fields, field{name, at, bits}) }
	for _, r := range regexp.MustCompile(`(?m)^\| (\d+) \| ([a-z_, ]+) \| ([^|]+) \|`).FindAllStringSubmatch(source(t, docsFile), -1) {
		at := 8 * number(t, r[1])
		names := strings.Split(r[2], ", ")
		if n, each, ok := strings.Cut(r[3], " x "); ok { // "2 x 32"
			for i := range number(t, n) {
				add(r[2]+strconv.Itoa(i), at+i*number(t, each), number(t, each))
			}
			continue
		}
		widths := strings.Split(r[3], "+")
		if len(names) != len(widths) {
			t.Fatalf("%s: %q: %d names with %d widths", docsFile, r[0], len(names), len(widths))
		}
		for i, name := range names {
			add(name, at, number(t, widths[i]))
			at += number(t, widths[i])
		}
	}
	end := 0
	for _, f := range fields {
		if f.at != end {
			t.Errorf("%s: %s begins at bit %d, the field before it ends at %d", docsFile, f.name, f.at, end)
		}
		end = f.at + f.bits
	}
	if end != 8*wire.HeaderLen {
		t.Errorf("%s: the table's fields end at bit %d, want %d", docsFile, end, 8*wire.HeaderLen)
	}
	return fields
}

func TestP4Header(t *testing.T) {
	body := find(t, p4File, `(?s)header xagg_h \{(.*?)\}`)[0]
	var got []field
	at := 0
	for _, m := range regexp.MustCompile(`bit<(\d+)>\s+(\w+);`).FindAllStringSubmatch(body, -1) {
		got = append(got, field{m[2], at, number(t, m[1])})
		at += number(t, m[1])
	}
	same(t, "the P4 header", docsFields(t), got)
}

// C and Go spell version and type as one byte; C's tag and reserved are arrays.
func TestCHeader(t *testing.T) {
	body := find(t, cFile, `(?s)struct xagg_header \{(.*?)\}`)[0]
	width := map[string]int{"__u8": 8, "__s8": 8, "__u16": 16, "__u32": 32, "__u64": 64}
	var got []field
	at := 0
	for _, m := range regexp.MustCompile(`(__[us]\d+) (\w+)(?:\[(\d+)\])?;`).FindAllStringSubmatch(body, -1) {
		bits := width[m[1]]
		if at%bits != 0 {
			t.Errorf("%s is not aligned: the compiler would move it", m[2])
		}
		switch n := m[3]; {
		case n == "":
			got = append(got, field{m[2], at, bits})
		case m[2] == "reserved":
			bits *= number(t, n)
			got = append(got, field{m[2], at, bits})
		default:
			for i := range number(t, n) {
				got = append(got, field{m[2] + strconv.Itoa(i), at + i*bits, bits})
			}
			bits *= number(t, n)
		}
		at += bits
	}
	same(t, "the C header", inBytes(docsFields(t)), got)
}

// inBytes joins version and type.
func inBytes(fields []field) []field {
	return append([]field{{"version_type", 0, fields[0].bits + fields[1].bits}}, fields[2:]...)
}

func same(t *testing.T, what string, want, got []field) {
	t.Helper()
	if diff := gocmp.Diff(want, got, gocmp.AllowUnexported(field{})); diff != "" {
		t.Errorf("%s differs from the table in %s (-docs +%s):\n%s", what, docsFile, what, diff)
	}
}

// The constants wire.Off* are the table's offsets.
func TestGoOffsets(t *testing.T) {
	want := map[string]int{}
	for _, f := range inBytes(docsFields(t)) {
		name := strings.TrimRight(f.name, "01") // both tags have one constant, the first's
		if _, ok := want[name]; !ok {
			want[name] = f.at / 8
		}
	}
	f, err := parser.ParseFile(token.NewFileSet(), goFile, nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]int{}
	ast.Inspect(f, func(n ast.Node) bool {
		if v, ok := n.(*ast.ValueSpec); ok && strings.HasPrefix(v.Names[0].Name, "Off") {
			got[snake(v.Names[0].Name[len("Off"):])] = number(t, v.Values[0].(*ast.BasicLit).Value)
		}
		return true
	})
	if diff := gocmp.Diff(want, got); diff != "" {
		t.Errorf("wire.Off* differ from the table (-docs +Go):\n%s", diff)
	}
}

// The encoder writes each field of wire.Header to the table's bits and to no others.
func TestGoEncoder(t *testing.T) {
	docs := map[string]field{}
	for _, f := range docsFields(t) {
		docs[f.name] = f
	}
	var zero [wire.HeaderLen]byte
	wire.PutHeader(zero[:], &wire.Header{})
	written := map[string]bool{"version": true, "reserved": true} // no fields of wire.Header
	check := func(name string, h *wire.Header) {
		t.Helper()
		var b [wire.HeaderLen]byte
		wire.PutHeader(b[:], h)
		for bit := range 8 * wire.HeaderLen {
			changed := (b[bit/8]^zero[bit/8])>>(7-bit%8)&1 == 1
			if f := docs[name]; changed != (bit >= f.at && bit < f.at+f.bits) {
				t.Errorf("%s: bit %d is set: %v; the table says bits %d to %d", name, bit, changed, f.at, f.at+f.bits-1)
			}
		}
		written[name] = true
	}
	typ := reflect.TypeFor[wire.Header]()
	for i := range typ.NumField() {
		name := snake(typ.Field(i).Name)
		h := new(wire.Header)
		v := reflect.ValueOf(h).Elem().Field(i)
		switch {
		case v.Kind() == reflect.Array:
			for j := range v.Len() {
				v.SetZero()
				v.Index(j).SetUint(1<<v.Index(j).Type().Bits() - 1)
				check(name+strconv.Itoa(j), h)
			}
			continue
		case v.CanInt():
			v.SetInt(-1)
		default:
			v.SetUint(1<<v.Type().Bits() - 1)
		}
		check(name, h)
	}
	for name := range docs {
		if !written[name] {
			t.Errorf("%s: wire.Header has no such field", name)
		}
	}
	if v := zero[0] >> 4; v != wire.Version {
		t.Errorf("the encoder writes version %d", v)
	}
}

// snake spells a Go name as the other languages do: SpreadUs is spread_us.
func snake(name string) string {
	var b strings.Builder
	for i, r := range name {
		if unicode.IsUpper(r) && i > 0 {
			b.WriteByte('_')
		}
		b.WriteRune(unicode.ToLower(r))
	}
	return b.String()
}

// codes reads "1 GRAD, 2 PARTIAL (...), 4 ...": numbers with the word after each.
func codes(t *testing.T, text string) map[string]int {
	t.Helper()
	m := map[string]int{}
	for _, c := range regexp.MustCompile(`\b(\d+) ([A-Za-z_]+)`).FindAllStringSubmatch(text, -1) {
		if _, ok := m[c[2]]; ok {
			t.Fatalf("%q: %s has two numbers", text, c[2])
		}
		m[c[2]] = number(t, c[1])
	}
	return m
}

// p4Const returns the value of a constant, if the program has it.
func p4Const(t *testing.T, name string) (int, bool) {
	t.Helper()
	m := regexp.MustCompile(`(?m)^const bit<\d+> ` + name + ` = (\d+);`).FindStringSubmatch(source(t, p4File))
	if m == nil {
		return 0, false
	}
	return number(t, m[1]), true
}

// cEnum returns the enumerators with a prefix.
func cEnum(t *testing.T, prefix string) map[string]int {
	t.Helper()
	m := map[string]int{}
	for _, c := range regexp.MustCompile(`(?m)^\t`+prefix+`_(\w+) = (\d+),$`).FindAllStringSubmatch(source(t, cFile), -1) {
		m[c[1]] = number(t, c[2])
	}
	if len(m) == 0 {
		t.Fatalf("%s: no enumerators %s_", cFile, prefix)
	}
	return m
}

func TestTypes(t *testing.T) {
	_, _, meaning := row(t, "version, type")
	_, list, _ := strings.Cut(meaning, ";")
	want := codes(t, list)
	goTypes := map[string]int{}
	for i := range 16 {
		if v := wire.Type(i); v.Valid() {
			goTypes[v.String()] = i
		}
	}
	if diff := gocmp.Diff(want, goTypes); diff != "" {
		t.Errorf("types (-docs +Go):\n%s", diff)
	}
	if diff := gocmp.Diff(want, cEnum(t, "TYPE")); diff != "" {
		t.Errorf("types (-docs +C):\n%s", diff)
	}
	for name, code := range want {
		got, ok := p4Const(t, name)
		if !ok && name != "ACK" { // which a switch only passes on
			t.Errorf("P4 has no type %s", name)
		}
		if ok && got != code {
			t.Errorf("type %s is %d in P4, want %d", name, got, code)
		}
	}
}

func TestFlags(t *testing.T) {
	_, _, meaning := row(t, "flags")
	want := codes(t, meaning)
	goFlags := map[string]int{"LAST": int(wire.FlagLast), "RESEND": int(wire.FlagResend), "FORWARDED": int(wire.FlagForwarded),
		"SATURATED": int(wire.FlagSaturated), "MODULAR": int(wire.FlagModular), "LATE": int(wire.FlagLate),
		"SERVER": int(wire.FlagServer), "ASYNC": int(wire.FlagAsync)}
	if diff := gocmp.Diff(want, goFlags); diff != "" {
		t.Errorf("flags (-docs +Go):\n%s", diff)
	}
	if diff := gocmp.Diff(want, cEnum(t, "FLAG")); diff != "" {
		t.Errorf("flags (-docs +C):\n%s", diff)
	}
	for _, name := range []string{"LAST", "FORWARDED", "SATURATED", "MODULAR", "ASYNC"} { // P4 has no use for the others
		if got, ok := p4Const(t, name); !ok || got != want[name] {
			t.Errorf("flag %s is %d in P4, want %d", name, got, want[name])
		}
	}
	if got := find(t, p4File, `const bit<8> SHAPE_FLAGS = (.*);`)[0]; got != "LAST | MODULAR | ASYNC" {
		t.Errorf("SHAPE_FLAGS is %s in P4", got)
	}
	if wire.ShapeFlags != wire.FlagLast|wire.FlagModular|wire.FlagAsync || wire.StickyFlags != wire.FlagSaturated {
		t.Errorf("shape flags are %d and sticky flags %d in Go", wire.ShapeFlags, wire.StickyFlags)
	}
	if got := find(t, cFile, `#define SHAPE_FLAGS (.*)`)[0]; got != "(FLAG_LAST | FLAG_MODULAR | FLAG_ASYNC)" {
		t.Errorf("SHAPE_FLAGS is %s in C", got)
	}
	if got := find(t, cFile, `#define STICKY_FLAGS (.*)`)[0]; got != "FLAG_SATURATED" {
		t.Errorf("STICKY_FLAGS is %s in C", got)
	}
}

func TestReasons(t *testing.T) {
	want := codes(t, find(t, docsFile, `(?s)\*\*Reason codes\*\*[^:]*:(.*?)\n\n`)[0])
	goReasons := map[string]int{}
	for r := range wire.NumReasons {
		goReasons[wire.Reason(r).String()] = r
	}
	if diff := gocmp.Diff(want, goReasons); diff != "" {
		t.Errorf("reasons (-docs +Go):\n%s", diff)
	}
	c := cEnum(t, "REASON")
	c["SUMMED"] = c["NONE"]
	delete(c, "NONE")
	for name, code := range c { // only those that a server has
		if want, ok := want[strings.ToLower(name)]; !ok || want != code {
			t.Errorf("reason %s is %d in C, want %d", name, code, want)
		}
	}
	if n := number(t, find(t, cFile, `NUM_REASONS = (\d+)`)[0]); n != wire.NumReasons {
		t.Errorf("NUM_REASONS is %d in C, want %d", n, wire.NumReasons)
	}
	// P4 calls some by other names, since these are taken or say too little.
	alias := map[string]string{"forwarded": "PASSED_ON", "route": "NO_ROUTE", "ttl": "TTL_EXCEEDED"}
	for name, code := range want {
		if slices.Contains([]string{"overlap", "clock", "late", "held"}, name) {
			continue // of servers only: a switch asks for a single bit, and keeps no clocks
		}
		got, ok := p4Const(t, cmp.Or(alias[name], "BAD_"+strings.ToUpper(name)))
		if !ok {
			got, ok = p4Const(t, strings.ToUpper(name))
		}
		if !ok || got != code {
			t.Errorf("reason %s is %d in P4, want %d", name, got, code)
		}
	}
}

func TestConstants(t *testing.T) {
	_, _, version := row(t, "version, type")
	_, _, blocks := row(t, "blocks")
	for _, c := range []struct {
		name        string
		docs, p4, c string // patterns; "" where it is not spelt
		want        int
		docsIn      string // the text that docs searches; "" is the whole page
	}{
		{name: "UDP port", docs: `UDP port (\d+) is`, p4: `XAGG_PORT = (\d+);`, c: `#define XAGG_PORT (\d+)`, want: wire.Port},
		{name: "version", docs: `version (\d+);`, docsIn: version, p4: `const bit<4> VERSION = (\d+);`,
			c: `#define XAGG_VERSION (\d+)`, want: wire.Version},
		{name: "tag modulus", docs: `\*\*Tag\.\*\* p = ([\d,]+)\.`, p4: `TAG_MODULUS = (\d+);`, c: `#define XAGG_TAG_P (\d+)`, want: wire.P},
		{name: "header length", docs: `UDP length = 8 \+ (\d+) \+ 256 x blocks`, p4: `XAGG_LEN = (\d+);`,
			c: `sizeof\(struct xagg_header\) == (\d+)`, want: wire.HeaderLen},
		{name: "block length", docs: `UDP length = 8 \+ 56 \+ (\d+) x blocks`, want: wire.BlockLen},
		{name: "lanes of a block", docs: `number of (\d+)-lane blocks`, docsIn: blocks, c: `#define BLOCK_LANES (\d+)`, want: wire.BlockLanes},
		{name: "blocks", docs: `0\.\.(\d+)`, docsIn: blocks, c: `#define MAX_BLOCKS (\d+)`, want: wire.MaxBlocks},
		{name: "lanes", docs: `chunk\*: up to (\d+) int32`, c: `#define MAX_LANES (\d+)`, want: wire.MaxLanes},
		{name: "ranks", docs: `N <= (\d+) workers`, c: `#define MAX_RANKS (\d+)`, want: wire.MaxRanks},
	} {
		check := func(where, value string) {
			if number(t, value) != c.want {
				t.Errorf("%s is %s in %s, want %d", c.name, value, where, c.want)
			}
		}
		if c.docsIn == "" {
			check("docs", find(t, docsFile, c.docs)[0])
		} else if m := regexp.MustCompile(c.docs).FindStringSubmatch(c.docsIn); m == nil {
			t.Errorf("%s: %q has no %q", docsFile, c.docsIn, c.docs)
		} else {
			check("docs", m[1])
		}
		if c.p4 != "" {
			check("P4", find(t, p4File, c.p4)[0])
		}
		if c.c != "" {
			check("C", find(t, cFile, c.c)[0])
		}
	}
	if bits := number(t, find(t, p4File, `header block_h \{\s*bit<(\d+)> lanes;`)[0]); bits != 8*wire.BlockLen {
		t.Errorf("a block has %d bits in P4, want %d", bits, 8*wire.BlockLen)
	}
	// The masks that keep carries inside lanes: one top bit in every 32 bits.
	tops := fmt.Sprintf("2048w0x%s", strings.Repeat("80000000", wire.BlockLanes))
	rests := fmt.Sprintf("2048w0x%s", strings.Repeat("7fffffff", wire.BlockLanes))
	if got := find(t, p4File, `const bit<2048> TOPS = (\w+);`)[0]; got != tops {
		t.Errorf("TOPS is %s in P4", got)
	}
	if got := find(t, p4File, `const bit<2048> RESTS = (\w+);`)[0]; got != rests {
		t.Errorf("RESTS is %s in P4", got)
	}
}
