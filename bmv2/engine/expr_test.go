package engine

import (
	"encoding/json"
	"fmt"
	"math/big"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// exprCase is a random program of one assignment, with its value by unlimited integers.
type exprCase struct {
	c      *compiler
	m      *machine
	fields []*field
	params []*param
	values map[string]*big.Int
}

func newExprCase(t *rapid.T) *exprCase {
	x := &exprCase{c: &compiler{headers: map[string]*header{}}, values: map[string]*big.Int{}}
	width := rapid.OneOf(rapid.IntRange(1, 70),
		rapid.SampledFrom([]int{1, 8, 16, 31, 32, 33, 63, 64, 65, 127, 128, 129, 2047, 2048}))
	h := &header{name: "h", typ: "h", meta: true, byName: map[string]*field{}}
	x.c.headers["h"] = h
	for i := range 5 {
		w := width.Draw(t, "width")
		f := &field{name: fmt.Sprintf("h.f%d", i), off: x.c.phvLen, words: numWords(w), width: w,
			signed: w > 1 && rapid.Bool().Draw(t, "signed"), hdr: h}
		x.c.phvLen += f.words
		h.byName[fmt.Sprintf("f%d", i)] = f
		x.fields = append(x.fields, f)
	}
	words := 0
	for i := range 3 {
		w := width.Draw(t, "param width")
		x.params = append(x.params, &param{name: fmt.Sprintf("p%d", i), width: w, off: words, words: numWords(w)})
		words += numWords(w)
	}
	x.m = &machine{phv: make([]uint64, x.c.phvLen), args: make([]uint64, words)}
	for i, f := range x.fields {
		v := drawBits(t, f.width)
		copy(x.m.phv[f.off:f.off+f.words], bigToWords(v, f.words))
		if f.signed && v.Bit(f.width-1) == 1 {
			v = new(big.Int).Sub(v, new(big.Int).Lsh(big.NewInt(1), uint(f.width)))
		}
		x.values[fmt.Sprintf("f%d", i)] = v
	}
	for i, p := range x.params {
		v := drawBits(t, p.width)
		copy(x.m.args[p.off:p.off+p.words], bigToWords(v, p.words))
		x.values[fmt.Sprintf("p%d", i)] = v
	}
	return x
}

// drawBits draws a value of width bits, often at the borders.
func drawBits(t *rapid.T, width int) *big.Int {
	one := big.NewInt(1)
	switch rapid.IntRange(0, 4).Draw(t, "kind") {
	case 0:
		return new(big.Int)
	case 1:
		return new(big.Int).Sub(new(big.Int).Lsh(one, uint(width)), one)
	case 2:
		return new(big.Int).Lsh(one, uint(width-1))
	case 3:
		return big.NewInt(int64(rapid.IntRange(0, 1).Draw(t, "bit")))
	}
	b := rapid.SliceOfN(rapid.Byte(), (width+7)/8, (width+7)/8).Draw(t, "bits")
	v := new(big.Int).SetBytes(b)
	return v.Mod(v, new(big.Int).Lsh(one, uint(width)))
}

// number draws an expression and returns it as JSON with its value.
func (x *exprCase) number(t *rapid.T, depth int) (string, *big.Int) {
	if depth == 0 {
		switch rapid.IntRange(0, 2).Draw(t, "leaf") {
		case 0:
			i := rapid.IntRange(0, len(x.fields)-1).Draw(t, "field")
			return fmt.Sprintf(`{"type":"field","value":["h","f%d"]}`, i), x.values[fmt.Sprintf("f%d", i)]
		case 1:
			i := rapid.IntRange(0, len(x.params)-1).Draw(t, "param")
			return fmt.Sprintf(`{"type":"local","value":%d}`, i), x.values[fmt.Sprintf("p%d", i)]
		}
		v := drawBits(t, rapid.IntRange(1, 200).Draw(t, "const width"))
		s := "0x" + v.Text(16)
		if rapid.IntRange(0, 3).Draw(t, "negative") == 0 && v.Sign() > 0 {
			v, s = new(big.Int).Neg(v), "-0x"+v.Text(16)
		}
		return fmt.Sprintf(`{"type":"hexstr","value":%q}`, s), v
	}
	op := rapid.SampledFrom([]string{
		"+", "-", "*", "&", "|", "^", "~", "<<", ">>", "two_comp_mod", "usat_cast", "sat_cast", "b2d", "?",
	}).
		Draw(t, "op")
	v := new(big.Int)
	width := func() (string, uint) {
		w := rapid.SampledFrom([]int{1, 7, 8, 32, 33, 62, 63, 64, 65, 128, 2048}).Draw(t, "cast width")
		return fmt.Sprintf(`{"type":"hexstr","value":"0x%x"}`, w), uint(w)
	}
	expr := func(op, l, r string) string {
		return fmt.Sprintf(`{"type":"expression","value":{"op":%q,"left":%s,"right":%s}}`, op, l, r)
	}
	one := big.NewInt(1)
	switch op {
	case "~":
		s, a := x.number(t, depth-1)
		return expr(op, "null", s), v.Not(a)
	case "b2d":
		s, b := x.condition(t, depth-1)
		if b {
			v.SetInt64(1)
		}
		return expr(op, "null", s), v
	case "?":
		c, b := x.condition(t, depth-1)
		l, lv := x.number(t, depth-1)
		r, rv := x.number(t, depth-1)
		s := fmt.Sprintf(`{"type":"expression","value":{"op":"?","left":%s,"right":%s,"cond":%s}}`, l, r, c)
		if b {
			return s, lv
		}
		return s, rv
	case "two_comp_mod":
		l, a := x.number(t, depth-1)
		r, w := width()
		v.Mod(a, new(big.Int).Lsh(one, w))
		if v.Bit(int(w)-1) == 1 {
			v.Sub(v, new(big.Int).Lsh(one, w))
		}
		return expr(op, l, r), v
	case "usat_cast", "sat_cast":
		l, a := x.number(t, depth-1)
		r, w := width()
		lo, hi := new(big.Int), new(big.Int).Lsh(one, w)
		if op == "sat_cast" {
			hi.Lsh(one, w-1)
			lo.Neg(hi)
		}
		hi.Sub(hi, one)
		v.Set(a)
		if v.Cmp(lo) < 0 {
			v.Set(lo)
		} else if v.Cmp(hi) > 0 {
			v.Set(hi)
		}
		return expr(op, l, r), v
	case "<<", ">>":
		l, a := x.number(t, depth-1)
		n := rapid.IntRange(0, 300).Draw(t, "shift")
		r := fmt.Sprintf(`{"type":"hexstr","value":"0x%x"}`, n)
		if i := rapid.IntRange(0, len(x.fields)-1).Draw(t, "shift field"); x.fields[i].width <= 9 && !x.fields[i].signed {
			r, n = fmt.Sprintf(`{"type":"field","value":["h","f%d"]}`, i), int(x.values[fmt.Sprintf("f%d", i)].Int64())
		}
		if op == "<<" {
			return expr(op, l, r), v.Lsh(a, uint(n))
		}
		return expr(op, l, r), v.Rsh(a, uint(n)) // rounds down, as an arithmetic shift
	}
	l, a := x.number(t, depth-1)
	r, b := x.number(t, depth-1)
	switch op {
	case "+":
		v.Add(a, b)
	case "-":
		v.Sub(a, b)
	case "*":
		v.Mul(a, b)
	case "&":
		v.And(a, b)
	case "|":
		v.Or(a, b)
	case "^":
		v.Xor(a, b)
	}
	return expr(op, l, r), v
}

func (x *exprCase) condition(t *rapid.T, depth int) (string, bool) {
	op := rapid.SampledFrom([]string{"==", "!=", "<", "<=", ">", ">=", "d2b", "not", "and", "or"}).Draw(t, "test")
	expr := func(l, r string) string {
		return fmt.Sprintf(`{"type":"expression","value":{"op":%q,"left":%s,"right":%s}}`, op, l, r)
	}
	depth = max(depth-1, 0)
	if depth == 0 && (op == "not" || op == "and" || op == "or") {
		op = "<"
	}
	switch op {
	case "d2b":
		s, v := x.number(t, depth)
		return expr("null", s), v.Sign() != 0
	case "not":
		s, b := x.condition(t, depth)
		return expr("null", s), !b
	case "and", "or":
		l, a := x.condition(t, depth)
		r, b := x.condition(t, depth)
		return expr(l, r), op == "and" && a && b || op == "or" && (a || b)
	}
	l, a := x.number(t, depth)
	r, b := x.number(t, depth)
	if rapid.IntRange(0, 3).Draw(t, "same") == 0 {
		r, b = l, a
	}
	n := a.Cmp(b)
	return expr(l, r), map[string]bool{"==": n == 0, "!=": n != 0, "<": n < 0, "<=": n <= 0, ">": n > 0, ">=": n >= 0}[op]
}

// TestExpressionsAreExact assigns random expressions to fields of random width and compares with unlimited integers.
func TestExpressionsAreExact(t *testing.T) {
	compiled := 0
	rapid.Check(t, func(t *rapid.T) {
		x := newExprCase(t)
		s, want := x.number(t, rapid.IntRange(0, 4).Draw(t, "depth"))
		var v jsonValue
		if err := json.Unmarshal([]byte(s), &v); err != nil {
			t.Fatal(err)
		}
		n, err := x.c.value(&v, x.params)
		if err != nil {
			t.Fatalf("%s: %v", s, err)
		}
		dst := x.fields[rapid.IntRange(0, len(x.fields)-1).Draw(t, "destination")]
		assign, err := x.c.compileAssign(dst, n)
		if err != nil {
			// A shift by a variable has no bound, and so cannot be compared.
			if strings.Contains(err.Error(), "may have more than") {
				return
			}
			t.Fatalf("%s: %v", s, err)
		}
		compiled++
		x.m.scratch = make([]uint64, x.c.scratchLen)
		assign(x.m)
		mod := new(big.Int).Lsh(big.NewInt(1), uint(dst.width))
		got := wordsToBig(x.m.phv[dst.off:dst.off+dst.words], false)
		if w := new(big.Int).Mod(want, mod); got.Cmp(w) != 0 {
			t.Fatalf("%v = %s\ngot  %x\nwant %x", dst, s, got, w)
		}
	})
	t.Logf("%d expressions compared", compiled)
	if compiled == 0 {
		t.Error("no expression was compiled")
	}
}

func TestBitsRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		width := uint(rapid.IntRange(1, 300).Draw(t, "width"))
		off := uint(rapid.IntRange(0, 40).Draw(t, "offset"))
		b := rapid.SliceOfN(rapid.Byte(), int(off+width+7)/8, int(off+width+7)/8+9).Draw(t, "bytes")
		want := new(big.Int).SetBytes(b)
		want.Rsh(want, uint(8*len(b))-off-width)
		want.Mod(want, new(big.Int).Lsh(big.NewInt(1), width))
		w := make([]uint64, numWords(int(width)))
		loadWords(w, b, off, width)
		if got := wordsToBig(w, false); got.Cmp(want) != 0 {
			t.Fatalf("load %d bits at %d of %x: %x, want %x", width, off, b, got, want)
		}
		if width <= 64 && loadBits(b, off, width) != w[0] {
			t.Fatalf("load %d bits at %d of %x: %x, want %x", width, off, b, loadBits(b, off, width), w[0])
		}
		// Storing what was loaded into inverted bytes restores these bits and leaves the others inverted.
		inv := make([]byte, len(b))
		for i := range b {
			inv[i] = ^b[i]
		}
		storeWords(inv, off, width, w)
		for i := range 8 * len(b) {
			inside := uint(i) >= off && uint(i) < off+width
			if same := b[i/8]>>(7-i%8)&1 == inv[i/8]>>(7-i%8)&1; same != inside {
				t.Fatalf("store %d bits at %d of %x: bit %d is wrong: %x", width, off, b, i, inv)
			}
		}
	})
}
