package engine

import (
	"fmt"
	"math/big"
)

// machine is what compiled code works on: one packet's PHV and the scratch memory of the program.
type machine struct {
	phv     []uint64
	scratch []uint64 // intermediate wide values; every wide node of an expression has its own place
	args    []uint64 // action data of the table entry at work, laid out as action.params says
	exit    bool

	data   []byte // parser: the frame; later the payload behind the headers
	parsed int    // parser: bytes extracted
	errVal uint32 // parser: value of the error that stopped it, or NoError's

	length   uint64 // packet length as counters see it: the frame that came in
	register uint64 // simple_switch's packet length register: the frame's length, corrected by added and removed headers

	key    []uint64 // table key
	keyBuf []byte
	calc   []byte // input of a calculation
}

type (
	valueFn func(*machine) uint64   // a value modulo 2^64
	wideFn  func(*machine) []uint64 // a value as words; valid until the function is called again, not to be written
	boolFn  func(*machine) bool
)

type exprType int

const (
	typeData exprType = iota
	typeBool
	typeHeader
)

func (t exprType) String() string { return [...]string{"number", "bool", "header"}[t] }

// node is a node of a checked expression. A data node's value lies in [0, 2^bits), or in [-2^(bits-1), 2^(bits-1))
// where signed is set.
type node struct {
	op      string // "" = leaf
	l, r, c *node
	typ     exprType

	bits   int
	signed bool

	f     *field   // leaf: field
	k     *big.Int // leaf: constant
	b     bool     // leaf: bool constant
	h     *header  // leaf: header
	param *param   // leaf: action parameter
}

// unbounded is the width of a value that no static bound holds: a left shift by a variable amount. Such a value can
// be stored (its consumer says how many bits it needs) but not compared.
const unbounded = 1 << 24

// maxExact is the largest number of bits for which exact operands are computed.
const maxExact = 1 << 17

// maxDepth bounds the nesting of expressions, so that a hostile file cannot exhaust the stack.
const maxDepth = 1000

// signedBits is the number of bits of the node's value in two's complement.
func (n *node) signedBits() int {
	if n.signed {
		return n.bits
	}
	return n.bits + 1
}

func (n *node) isConst() bool { return n.op == "" && n.k != nil }

// exact64 reports whether the value modulo 2^64 is the value: as uint64 if not signed, as int64 if signed.
func (n *node) exact64() bool { return n.bits <= 64 }

func constNode(v *big.Int) *node {
	n := &node{typ: typeData, k: v, bits: v.BitLen()}
	if v.Sign() < 0 {
		n.signed = true
		// -2^(b-1) fits in b bits.
		n.bits = new(big.Int).Not(v).BitLen() + 1
	}
	return n
}

func fieldNode(f *field) *node { return &node{typ: typeData, f: f, bits: f.width, signed: f.signed} }

func paramNode(p *param) *node { return &node{typ: typeData, param: p, bits: p.width} }

// value turns a "type value object" into a node. locals are the parameters of the enclosing action, if any.
func (c *compiler) value(v *jsonValue, locals []*param) (*node, error) {
	return c.valueAt(v, locals, 0)
}

func (c *compiler) valueAt(v *jsonValue, locals []*param, depth int) (*node, error) {
	if depth > maxDepth {
		return nil, fmt.Errorf("expression is nested deeper than %d", maxDepth)
	}
	switch v.Type {
	case "expression":
		if m, ok := v.Value.(map[string]any); ok && m["op"] == nil { // p4c wraps expressions in expressions
			w, err := asValue(v.Value)
			if err != nil {
				return nil, fmt.Errorf("expression: %w", err)
			}
			return c.valueAt(w, locals, depth+1)
		}
		return c.operator(v.Value, locals, depth)
	case "field":
		f, err := c.fieldRef(v.Value)
		if err != nil {
			return nil, err
		}
		return fieldNode(f), nil
	case "hexstr":
		s, err := asString(v.Value)
		if err != nil {
			return nil, fmt.Errorf("hexstr: %w", err)
		}
		k, err := parseHex(s)
		if err != nil {
			return nil, err
		}
		if k.BitLen() > maxFieldBits {
			return nil, fmt.Errorf("hexstr of %d bits: more than %d", k.BitLen(), maxFieldBits)
		}
		return constNode(k), nil
	case "bool":
		b, err := asBool(v.Value)
		if err != nil {
			return nil, fmt.Errorf("bool: %w", err)
		}
		return &node{typ: typeBool, b: b}, nil
	case "local", "runtime_data":
		i, err := asInt(v.Value)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", v.Type, err)
		}
		if i < 0 || i >= len(locals) {
			return nil, fmt.Errorf("%s %d: the action has %d parameters", v.Type, i, len(locals))
		}
		return paramNode(locals[i]), nil
	case "header":
		h, err := c.headerRef(v.Value)
		if err != nil {
			return nil, err
		}
		return &node{typ: typeHeader, h: h}, nil
	}
	return nil, fmt.Errorf("value type %q is not supported", v.Type)
}

func (c *compiler) operator(raw any, locals []*param, depth int) (*node, error) {
	m, err := asObject(raw, "op", "left", "right", "cond")
	if err != nil {
		return nil, fmt.Errorf("expression: %w", err)
	}
	n := new(node)
	if n.op, err = asString(m["op"]); err != nil {
		return nil, fmt.Errorf("expression: op: %w", err)
	}
	for side, dst := range map[string]**node{"left": &n.l, "right": &n.r, "cond": &n.c} {
		if m[side] == nil {
			continue
		}
		v, err := asValue(m[side])
		if err != nil {
			return nil, fmt.Errorf("operator %q: %s: %w", n.op, side, err)
		}
		if *dst, err = c.valueAt(v, locals, depth+1); err != nil {
			return nil, fmt.Errorf("operator %q: %w", n.op, err)
		}
	}
	if n.r == nil {
		return nil, fmt.Errorf("operator %q: no right operand", n.op)
	}
	if (n.op == "+" || n.op == "-") && n.l == nil { // unary
		n.l = constNode(new(big.Int))
	}
	if err := n.check(); err != nil {
		return nil, fmt.Errorf("operator %q: %w", n.op, err)
	}
	return n, nil
}

// check finds the type and range of a node whose operands are checked.
func (n *node) check() error {
	operands := func(t exprType) error {
		for _, o := range []*node{n.l, n.r} {
			if o == nil {
				return fmt.Errorf("no left operand")
			}
			if o.typ != t {
				return fmt.Errorf("operand is a %v, want a %v", o.typ, t)
			}
		}
		return nil
	}
	unary := func(t exprType) error {
		if n.l != nil {
			return fmt.Errorf("has a left operand")
		}
		if n.r.typ != t {
			return fmt.Errorf("operand is a %v, want a %v", n.r.typ, t)
		}
		return nil
	}
	if (n.op == "?") != (n.c != nil) {
		return fmt.Errorf("condition missing or not expected")
	}
	n.typ = typeData
	switch n.op {
	case "+", "-", "*", "/", "%", "&", "|", "^", "<<", ">>", "two_comp_mod", "usat_cast", "sat_cast":
		if err := operands(typeData); err != nil {
			return err
		}
		return n.checkBinary()
	case "~":
		if err := unary(typeData); err != nil {
			return err
		}
		n.bits, n.signed = n.r.signedBits(), true
	case "==", "!=":
		if n.l == nil {
			return fmt.Errorf("no left operand")
		}
		if n.l.typ != n.r.typ {
			return fmt.Errorf("operands are a %v and a %v", n.l.typ, n.r.typ)
		}
		n.typ = typeBool
	case "<", "<=", ">", ">=":
		n.typ = typeBool
		return operands(typeData)
	case "and", "or":
		n.typ = typeBool
		return operands(typeBool)
	case "not":
		n.typ = typeBool
		return unary(typeBool)
	case "valid":
		n.typ = typeBool
		return unary(typeHeader)
	case "d2b":
		n.typ = typeBool
		return unary(typeData)
	case "b2d":
		n.bits = 1
		return unary(typeBool)
	case "?":
		if n.c.typ != typeBool {
			return fmt.Errorf("condition is a %v", n.c.typ)
		}
		if n.l == nil {
			return fmt.Errorf("no left operand")
		}
		if n.l.typ != n.r.typ || n.l.typ == typeHeader {
			return fmt.Errorf("branches are a %v and a %v", n.l.typ, n.r.typ)
		}
		n.typ = n.l.typ
		n.signed = n.l.signed || n.r.signed
		n.bits = max(n.l.bits, n.r.bits)
		if n.signed {
			n.bits = max(n.l.signedBits(), n.r.signedBits())
		}
	default:
		return fmt.Errorf("not supported")
	}
	return nil
}

func (n *node) checkBinary() error {
	l, r := n.l, n.r
	signed := l.signed || r.signed
	wider := max(l.bits, r.bits)
	if signed {
		wider = max(l.signedBits(), r.signedBits())
	}
	width := func() (int, error) {
		if !r.isConst() || r.k.Sign() <= 0 || !r.k.IsInt64() || r.k.Int64() > maxFieldBits {
			return 0, fmt.Errorf("width is not a constant between 1 and %d", maxFieldBits)
		}
		return int(r.k.Int64()), nil
	}
	var err error
	switch n.op {
	case "+":
		n.bits, n.signed = wider+1, signed
	case "-":
		n.bits, n.signed = max(l.signedBits(), r.signedBits())+1, true
	case "*":
		n.bits, n.signed = l.bits+r.bits, signed
		if signed {
			n.bits = l.signedBits() + r.signedBits()
		}
	case "/", "%":
		// bmv2 demands a dividend >= 0 and a divisor > 0; P4 allows no others.
		if signed {
			return fmt.Errorf("operand may be negative")
		}
		n.bits = l.bits
		if n.op == "%" {
			n.bits = min(l.bits, r.bits)
		}
	case "&":
		switch {
		case !l.signed && !r.signed:
			n.bits = min(l.bits, r.bits)
		case !l.signed:
			n.bits = l.bits
		case !r.signed:
			n.bits = r.bits
		default:
			n.bits, n.signed = wider, true
		}
	case "|", "^":
		n.bits, n.signed = wider, signed
	case "<<", ">>":
		if r.signed {
			return fmt.Errorf("shift amount may be negative")
		}
		n.bits, n.signed = l.bits, l.signed
		if n.op == "<<" {
			n.bits = unbounded
			if r.isConst() && r.k.IsInt64() && r.k.Int64() < unbounded {
				n.bits = l.bits + int(r.k.Int64())
			}
		}
	case "two_comp_mod", "sat_cast":
		n.bits, err = width()
		n.signed = true
	case "usat_cast":
		n.bits, err = width()
	}
	n.bits = min(n.bits, unbounded)
	return err
}

// exactWords is the number of words that hold the node's value in two's complement.
func (n *node) exactWords() (int, error) {
	if n.signedBits() > maxExact {
		return 0, fmt.Errorf("operand of %q may have more than %d bits", n.op, maxExact)
	}
	return numWords(n.signedBits()), nil
}

// compileU compiles a data node to its value modulo 2^64.
func (c *compiler) compileU(n *node) (valueFn, error) {
	switch {
	case n.f != nil:
		off := n.f.off
		if n.f.signed && n.f.width < 64 {
			s := uint(64 - n.f.width)
			return func(m *machine) uint64 { return uint64(int64(m.phv[off]<<s) >> s) }, nil
		}
		return func(m *machine) uint64 { return m.phv[off] }, nil
	case n.param != nil:
		off := n.param.off
		return func(m *machine) uint64 { return m.args[off] }, nil
	case n.k != nil:
		v := bigToWords(n.k, 1)[0]
		return func(*machine) uint64 { return v }, nil
	}
	switch n.op {
	case "+", "-", "*", "&", "|", "^":
		return c.compileArithU(n)
	case "~":
		r, err := c.compileU(n.r)
		if err != nil {
			return nil, err
		}
		return func(m *machine) uint64 { return ^r(m) }, nil
	case "<<":
		l, err := c.compileU(n.l)
		if err != nil {
			return nil, err
		}
		s, err := c.compileShift(n.r)
		if err != nil {
			return nil, err
		}
		// A shift by 64 or more is zero in Go too.
		return func(m *machine) uint64 { return l(m) << s(m) }, nil
	case ">>":
		return c.compileShrU(n)
	case "/", "%":
		return c.compileDivU(n)
	case "two_comp_mod":
		if n.bits > 64 {
			break
		}
		l, err := c.compileU(n.l)
		if err != nil {
			return nil, err
		}
		s := uint(64 - n.bits)
		return func(m *machine) uint64 { return uint64(int64(l(m)<<s) >> s) }, nil
	case "usat_cast", "sat_cast":
		if n.bits <= 62 && n.l.signedBits() <= 64 {
			l, err := c.compileU(n.l)
			if err != nil {
				return nil, err
			}
			lo, hi := int64(0), int64(lowMask(n.bits))
			if n.signed {
				lo, hi = -1<<(n.bits-1), 1<<(n.bits-1)-1
			}
			return func(m *machine) uint64 { return uint64(min(max(int64(l(m)), lo), hi)) }, nil
		}
	case "b2d":
		r, err := c.compileB(n.r)
		if err != nil {
			return nil, err
		}
		return func(m *machine) uint64 {
			if r(m) {
				return 1
			}
			return 0
		}, nil
	case "?":
		return compileChoice(c, n, c.compileU)
	}
	return c.lowWord(n)
}

// words is compileW for values of k words.
func (c *compiler) words(k int) func(*node) (wideFn, error) {
	return func(n *node) (wideFn, error) { return c.compileW(n, k) }
}

// compileBoth compiles two operands in the same way.
func compileBoth[F any](compile func(*node) (F, error), ln, rn *node) (l, r F, err error) {
	if l, err = compile(ln); err != nil {
		return l, r, err
	}
	r, err = compile(rn)
	return l, r, err
}

// compileChoice compiles a conditional expression whose branches are compiled by compile.
func compileChoice[T any, F ~func(*machine) T](c *compiler, n *node, compile func(*node) (F, error)) (F, error) {
	cond, err := c.compileB(n.c)
	if err != nil {
		return nil, err
	}
	l, r, err := compileBoth(compile, n.l, n.r)
	if err != nil {
		return nil, err
	}
	return func(m *machine) T {
		if cond(m) {
			return l(m)
		}
		return r(m)
	}, nil
}

// lowWord computes a node whose operands need more than a word, and keeps its lowest.
func (c *compiler) lowWord(n *node) (valueFn, error) {
	w, err := c.compileWords(n, 1)
	if err != nil {
		return nil, err
	}
	return func(m *machine) uint64 { return w(m)[0] }, nil
}

func (c *compiler) compileArithU(n *node) (valueFn, error) {
	l, err := c.compileU(n.l)
	if err != nil {
		return nil, err
	}
	// A constant on the right is by far the most frequent: p4c masks nearly everything.
	if n.r.isConst() {
		k := bigToWords(n.r.k, 1)[0]
		switch n.op {
		case "+":
			return func(m *machine) uint64 { return l(m) + k }, nil
		case "-":
			return func(m *machine) uint64 { return l(m) - k }, nil
		case "*":
			return func(m *machine) uint64 { return l(m) * k }, nil
		case "&":
			return func(m *machine) uint64 { return l(m) & k }, nil
		case "|":
			return func(m *machine) uint64 { return l(m) | k }, nil
		default:
			return func(m *machine) uint64 { return l(m) ^ k }, nil
		}
	}
	r, err := c.compileU(n.r)
	if err != nil {
		return nil, err
	}
	switch n.op {
	case "+":
		return func(m *machine) uint64 { return l(m) + r(m) }, nil
	case "-":
		return func(m *machine) uint64 { return l(m) - r(m) }, nil
	case "*":
		return func(m *machine) uint64 { return l(m) * r(m) }, nil
	case "&":
		return func(m *machine) uint64 { return l(m) & r(m) }, nil
	case "|":
		return func(m *machine) uint64 { return l(m) | r(m) }, nil
	default:
		return func(m *machine) uint64 { return l(m) ^ r(m) }, nil
	}
}

// compileShift compiles a shift amount; everything from 2^32 on counts as 2^32-1, which shifts everything out.
func (c *compiler) compileShift(n *node) (func(*machine) uint, error) {
	if n.exact64() {
		v, err := c.compileU(n)
		if err != nil {
			return nil, err
		}
		return func(m *machine) uint { return uint(min(v(m), 1<<32-1)) }, nil
	}
	k, err := n.exactWords()
	if err != nil {
		return nil, err
	}
	w, err := c.compileW(n, k)
	if err != nil {
		return nil, err
	}
	return func(m *machine) uint {
		v := w(m)
		for _, hi := range v[1:] {
			if hi != 0 {
				return 1<<32 - 1
			}
		}
		return uint(min(v[0], 1<<32-1))
	}, nil
}

func (c *compiler) compileShrU(n *node) (valueFn, error) {
	if n.l.exact64() {
		l, err := c.compileU(n.l)
		if err != nil {
			return nil, err
		}
		s, err := c.compileShift(n.r)
		if err != nil {
			return nil, err
		}
		if n.l.signed {
			return func(m *machine) uint64 { return uint64(int64(l(m)) >> s(m)) }, nil
		}
		return func(m *machine) uint64 { return l(m) >> s(m) }, nil
	}
	// A slice of a wide field needs one or two of its words.
	if n.l.f != nil && !n.l.signed && n.r.isConst() && n.r.k.IsInt64() {
		k := n.r.k.Int64()
		if k >= int64(n.l.f.width) {
			return func(*machine) uint64 { return 0 }, nil
		}
		i, s := n.l.f.off+int(k/64), uint(k%64)
		if s == 0 {
			return func(m *machine) uint64 { return m.phv[i] }, nil
		}
		if int(k/64)+1 == n.l.f.words {
			return func(m *machine) uint64 { return m.phv[i] >> s }, nil
		}
		return func(m *machine) uint64 { return m.phv[i]>>s | m.phv[i+1]<<(64-s) }, nil
	}
	return c.lowWord(n)
}

func (c *compiler) compileDivU(n *node) (valueFn, error) {
	if !n.l.exact64() || !n.r.exact64() {
		return c.lowWord(n)
	}
	l, r, err := compileBoth(c.compileU, n.l, n.r)
	if err != nil {
		return nil, err
	}
	mod := n.op == "%"
	return func(m *machine) uint64 {
		a, b := l(m), r(m)
		switch {
		case b == 0:
			return 0
		case mod:
			return a % b
		}
		return a / b
	}, nil
}

// place reserves k words of scratch memory.
func (c *compiler) place(k int) int {
	off := c.scratchTop
	c.scratchTop += k
	c.scratchLen = max(c.scratchLen, c.scratchTop)
	return off
}

// compileW compiles a data node to its value modulo 2^(64k) in k words.
func (c *compiler) compileW(n *node, k int) (wideFn, error) {
	// What fits in a word is computed in one, then extended.
	if n.exact64() && n.k == nil {
		u, err := c.compileU(n)
		if err != nil {
			return nil, err
		}
		at := c.place(k)
		signed := n.signed
		return func(m *machine) []uint64 {
			d := m.scratch[at : at+k : at+k]
			v := u(m)
			var fill uint64
			if signed {
				fill = uint64(int64(v) >> 63)
			}
			d[0] = v
			for i := 1; i < len(d); i++ {
				d[i] = fill
			}
			return d
		}, nil
	}
	// A value of fewer words than wanted is computed in those it needs.
	if kn := numWords(n.bits); kn < k && n.k == nil {
		return c.extend(n, kn, k)
	}
	return c.compileWords(n, k)
}

// compileWords is compileW without its shortcuts for values of few bits.
func (c *compiler) compileWords(n *node, k int) (wideFn, error) {
	if c.scratchTop+k > maxPHVWords {
		return nil, fmt.Errorf("expression needs too much scratch memory")
	}
	switch {
	case n.f != nil:
		off := n.f.off
		if !n.f.signed || n.f.width%64 == 0 || k < n.f.words {
			return func(m *machine) []uint64 { return m.phv[off : off+k : off+k] }, nil
		}
		at, s := c.place(k), uint(64-n.f.width%64)
		return func(m *machine) []uint64 {
			d := m.scratch[at : at+k : at+k]
			copy(d, m.phv[off:off+k])
			d[k-1] = uint64(int64(d[k-1]<<s) >> s)
			return d
		}, nil
	case n.param != nil:
		off := n.param.off
		return func(m *machine) []uint64 { return m.args[off : off+k : off+k] }, nil
	case n.k != nil:
		v := bigToWords(n.k, k)
		return func(*machine) []uint64 { return v }, nil
	}
	switch n.op {
	case "+", "-", "*", "&", "|", "^":
		l, r, err := compileBoth(c.words(k), n.l, n.r)
		if err != nil {
			return nil, err
		}
		at := c.place(k)
		f := map[string]func(d, a, b []uint64){
			"+": addWords, "-": subWords, "*": mulWords, "&": andWords, "|": orWords, "^": xorWords,
		}[n.op]
		return func(m *machine) []uint64 {
			a := l(m)
			b := r(m)
			d := m.scratch[at : at+k : at+k]
			f(d, a, b)
			return d
		}, nil
	case "~":
		r, err := c.compileW(n.r, k)
		if err != nil {
			return nil, err
		}
		at := c.place(k)
		return func(m *machine) []uint64 {
			d := m.scratch[at : at+k : at+k]
			notWords(d, r(m))
			return d
		}, nil
	case "<<":
		l, err := c.compileW(n.l, k)
		if err != nil {
			return nil, err
		}
		s, err := c.compileShift(n.r)
		if err != nil {
			return nil, err
		}
		at := c.place(k)
		return func(m *machine) []uint64 {
			d := m.scratch[at : at+k : at+k]
			a := l(m)
			shlWords(d, a, s(m))
			return d
		}, nil
	case ">>":
		return c.compileShrW(n, k)
	case "/", "%", "usat_cast", "sat_cast":
		return c.compileBig(n, k)
	case "two_comp_mod":
		w := numWords(n.bits)
		l, err := c.compileW(n.l, w)
		if err != nil {
			return nil, err
		}
		at, s := c.place(max(k, w)), uint(64*w-n.bits)
		return func(m *machine) []uint64 {
			d := m.scratch[at : at+max(k, w)]
			copy(d, l(m))
			d[w-1] = uint64(int64(d[w-1]<<s) >> s)
			for i := w; i < len(d); i++ {
				d[i] = uint64(int64(d[w-1]) >> 63)
			}
			return d[:k:k]
		}, nil
	case "?":
		return compileChoice(c, n, c.words(k))
	}
	return nil, fmt.Errorf("operator %q is not a number", n.op)
}

// extend computes a node in kn words and extends it by its sign to k.
func (c *compiler) extend(n *node, kn, k int) (wideFn, error) {
	w, err := c.compileW(n, kn)
	if err != nil {
		return nil, err
	}
	at := c.place(k)
	signed := n.signed
	return func(m *machine) []uint64 {
		d := m.scratch[at : at+k : at+k]
		copy(d, w(m))
		var fill uint64
		if signed {
			fill = uint64(int64(d[kn-1]) >> 63)
		}
		for i := kn; i < len(d); i++ {
			d[i] = fill
		}
		return d
	}, nil
}

func (c *compiler) compileShrW(n *node, k int) (wideFn, error) {
	s, err := c.compileShift(n.r)
	if err != nil {
		return nil, err
	}
	need := n.l.signedBits()
	if n.r.isConst() && n.r.k.IsInt64() && n.r.k.Int64() < unbounded {
		need = min(need, 64*k+int(n.r.k.Int64()))
	}
	if need > maxExact {
		return nil, fmt.Errorf("left operand of \">>\" may have more than %d bits", maxExact)
	}
	kl := numWords(need)
	l, err := c.compileW(n.l, kl)
	if err != nil {
		return nil, err
	}
	at := c.place(k)
	signed := n.l.signed
	return func(m *machine) []uint64 {
		d := m.scratch[at : at+k : at+k]
		a := l(m)
		var fill uint64
		if signed {
			fill = uint64(int64(a[kl-1]) >> 63)
		}
		shrWords(d, a, s(m), fill)
		return d
	}, nil
}

// compileBig compiles the operators that are rare at large widths, through math/big.
func (c *compiler) compileBig(n *node, k int) (wideFn, error) {
	kl, err := n.l.exactWords()
	if err != nil {
		return nil, err
	}
	kr, err := n.r.exactWords()
	if err != nil {
		return nil, err
	}
	l, err := c.compileW(n.l, kl)
	if err != nil {
		return nil, err
	}
	r, err := c.compileW(n.r, kr)
	if err != nil {
		return nil, err
	}
	lo, hi := new(big.Int), new(big.Int)
	if n.op == "usat_cast" || n.op == "sat_cast" {
		one := big.NewInt(1)
		if n.signed {
			hi.Lsh(one, uint(n.bits-1))
			lo.Neg(hi)
		} else {
			hi.Lsh(one, uint(n.bits))
		}
		hi.Sub(hi, one)
	}
	op := n.op
	return func(m *machine) []uint64 {
		a := wordsToBig(l(m), true)
		switch op {
		case "/", "%":
			b := wordsToBig(r(m), true)
			switch {
			case b.Sign() == 0:
				a.SetInt64(0)
			case op == "/":
				a.Quo(a, b)
			default:
				a.Rem(a, b)
			}
		default:
			if a.Cmp(lo) < 0 {
				a.Set(lo)
			} else if a.Cmp(hi) > 0 {
				a.Set(hi)
			}
		}
		return bigToWords(a, k)
	}, nil
}

// compileB compiles a bool node.
func (c *compiler) compileB(n *node) (boolFn, error) {
	if n.op == "" {
		b := n.b
		return func(*machine) bool { return b }, nil
	}
	switch n.op {
	case "and", "or":
		l, r, err := compileBoth(c.compileB, n.l, n.r)
		if err != nil {
			return nil, err
		}
		if n.op == "and" {
			return func(m *machine) bool { return l(m) && r(m) }, nil
		}
		return func(m *machine) bool { return l(m) || r(m) }, nil
	case "not":
		r, err := c.compileB(n.r)
		if err != nil {
			return nil, err
		}
		return func(m *machine) bool { return !r(m) }, nil
	case "valid":
		h := n.r.h
		return func(m *machine) bool { return h.isValid(m.phv) }, nil
	case "d2b":
		if n.r.exact64() {
			r, err := c.compileU(n.r)
			if err != nil {
				return nil, err
			}
			return func(m *machine) bool { return r(m) != 0 }, nil
		}
		return c.compileCompare("!=", n.r, constNode(new(big.Int)))
	case "?":
		return compileChoice(c, n, c.compileB)
	case "==", "!=":
		switch n.l.typ {
		case typeBool:
			l, r, err := compileBoth(c.compileB, n.l, n.r)
			if err != nil {
				return nil, err
			}
			if n.op == "==" {
				return func(m *machine) bool { return l(m) == r(m) }, nil
			}
			return func(m *machine) bool { return l(m) != r(m) }, nil
		case typeHeader:
			l, r, want := n.l.h, n.r.h, n.op == "=="
			return func(m *machine) bool { return headersEqual(m.phv, l, r) == want }, nil
		}
		return c.compileCompare(n.op, n.l, n.r)
	case "<", "<=", ">", ">=":
		return c.compileCompare(n.op, n.l, n.r)
	}
	return nil, fmt.Errorf("operator %q is not a bool", n.op)
}

// headersEqual is bmv2's comparison of headers: same type, both valid, same values. Two invalid headers are not equal.
func headersEqual(phv []uint64, l, r *header) bool {
	if l.typ != r.typ || !l.isValid(phv) || !r.isValid(phv) {
		return false
	}
	for i := l.first; i < l.end; i++ {
		if phv[i] != phv[r.first+i-l.first] {
			return false
		}
	}
	return true
}

func (c *compiler) compileCompare(op string, ln, rn *node) (boolFn, error) {
	unsigned := !ln.signed && !rn.signed && ln.bits <= 64 && rn.bits <= 64
	if unsigned || ln.signedBits() <= 64 && rn.signedBits() <= 64 {
		l, err := c.compileU(ln)
		if err != nil {
			return nil, err
		}
		if rn.isConst() && (op == "==" || op == "!=") {
			k := bigToWords(rn.k, 1)[0]
			if op == "==" {
				return func(m *machine) bool { return l(m) == k }, nil
			}
			return func(m *machine) bool { return l(m) != k }, nil
		}
		r, err := c.compileU(rn)
		if err != nil {
			return nil, err
		}
		switch op {
		case "==":
			return func(m *machine) bool { return l(m) == r(m) }, nil
		case "!=":
			return func(m *machine) bool { return l(m) != r(m) }, nil
		}
		if unsigned {
			switch op {
			case "<":
				return func(m *machine) bool { return l(m) < r(m) }, nil
			case "<=":
				return func(m *machine) bool { return l(m) <= r(m) }, nil
			case ">":
				return func(m *machine) bool { return l(m) > r(m) }, nil
			default:
				return func(m *machine) bool { return l(m) >= r(m) }, nil
			}
		}
		switch op {
		case "<":
			return func(m *machine) bool { return int64(l(m)) < int64(r(m)) }, nil
		case "<=":
			return func(m *machine) bool { return int64(l(m)) <= int64(r(m)) }, nil
		case ">":
			return func(m *machine) bool { return int64(l(m)) > int64(r(m)) }, nil
		default:
			return func(m *machine) bool { return int64(l(m)) >= int64(r(m)) }, nil
		}
	}
	kl, err := ln.exactWords()
	if err != nil {
		return nil, err
	}
	kr, err := rn.exactWords()
	if err != nil {
		return nil, err
	}
	k := max(kl, kr)
	l, r, err := compileBoth(c.words(k), ln, rn)
	if err != nil {
		return nil, err
	}
	switch op {
	case "==":
		return func(m *machine) bool { return cmpWords(l(m), r(m)) == 0 }, nil
	case "!=":
		return func(m *machine) bool { return cmpWords(l(m), r(m)) != 0 }, nil
	case "<":
		return func(m *machine) bool { return cmpWords(l(m), r(m)) < 0 }, nil
	case "<=":
		return func(m *machine) bool { return cmpWords(l(m), r(m)) <= 0 }, nil
	case ">":
		return func(m *machine) bool { return cmpWords(l(m), r(m)) > 0 }, nil
	default:
		return func(m *machine) bool { return cmpWords(l(m), r(m)) >= 0 }, nil
	}
}
