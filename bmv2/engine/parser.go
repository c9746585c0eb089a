package engine

import (
	"fmt"
	"math/big"
)

// parserErrors are the errors of P4's core library that the parser itself raises, by the values the program gives
// them. bmv2 numbers those that the JSON lacks behind the others, in this order.
var coreErrors = []string{
	"NoError", "PacketTooShort", "NoMatch", "StackOutOfBounds", "HeaderTooShort", "ParserTimeout", "ParserInvalidArgument",
}

func (c *compiler) loadErrors(j *jsonProgram) error {
	next := uint32(0)
	for _, e := range j.Errors {
		name, ok := e[0].(string)
		v, ok2 := e[1].(float64)
		if !ok || !ok2 || v < 0 || v >= 1<<31-1 || v != float64(uint32(v)) {
			return fmt.Errorf("errors: %v: want [name, number]", e)
		}
		if _, dup := c.errors[name]; dup {
			return fmt.Errorf("errors: %s: defined twice", name)
		}
		c.errors[name] = uint32(v)
		next = max(next, uint32(v)+1)
	}
	for _, name := range coreErrors {
		if _, ok := c.errors[name]; !ok {
			c.errors[name] = next
			next++
		}
	}
	return nil
}

// parseOp does its work and reports whether the parser goes on; if not, machine.errVal says why.
type parseOp func(m *machine) bool

type parseState struct {
	name  string
	ops   []parseOp
	key   []keyPart
	cases []parseCase
	next  *parseState // default; nil = accept
}

// keyPart is a field of a transition's key, or a lookahead.
type keyPart struct {
	f     *field
	off   uint // lookahead: bits from here
	width int
}

// parseCase matches when every part of the key, under its mask, is the value.
type parseCase struct {
	value, mask []uint64
	next        *parseState
}

// maxParseStates is the number of states after which a parser is stopped.
const maxParseStates = 1 << 16

func (c *compiler) loadParser(j *jsonProgram) error {
	if len(j.Parsers) != 1 {
		return fmt.Errorf("%d parsers: want one", len(j.Parsers))
	}
	jp := &j.Parsers[0]
	if jp.Name != "parser" {
		return fmt.Errorf("parser %q: simple_switch wants one named \"parser\"", jp.Name)
	}
	states := map[string]*parseState{}
	for i := range jp.States {
		name := jp.States[i].Name
		if states[name] != nil {
			return fmt.Errorf("parser state %s: defined twice", name)
		}
		states[name] = &parseState{name: name}
	}
	for i := range jp.States {
		if err := c.loadState1(&jp.States[i], states); err != nil {
			return fmt.Errorf("parser state %s: %w", jp.States[i].Name, err)
		}
	}
	if c.prog.start = states[jp.Init]; c.prog.start == nil {
		return fmt.Errorf("parser: no state %q to begin with", jp.Init)
	}
	c.prog.parserTimeout = c.errors["ParserTimeout"]
	c.prog.noError = c.errors["NoError"]
	c.prog.tooShort = c.errors["PacketTooShort"]
	return nil
}

func (c *compiler) loadState1(js *jsonParseState, states map[string]*parseState) error {
	s := states[js.Name]
	for i := range js.Ops {
		o, err := c.parserOp(&js.Ops[i])
		if err != nil {
			return fmt.Errorf("operation %q: %w", js.Ops[i].Op, err)
		}
		s.ops = append(s.ops, o)
	}
	bytes := 0
	for i := range js.Key {
		k, err := c.keyPart(&js.Key[i])
		if err != nil {
			return fmt.Errorf("transition key: %w", err)
		}
		s.key = append(s.key, k)
		bytes += (k.width + 7) / 8
	}
	for _, t := range js.Transitions {
		var next *parseState
		if t.Next != nil {
			if next = states[*t.Next]; next == nil {
				return fmt.Errorf("transition: no state %q", *t.Next)
			}
		}
		switch t.Type {
		case "default":
			s.next = next
		case "hexstr":
			if t.Value == nil {
				return fmt.Errorf("transition: no value")
			}
			v, err := s.split(*t.Value, bytes)
			if err != nil {
				return fmt.Errorf("transition value: %w", err)
			}
			mask := make([]uint64, len(s.key))
			for i := range mask {
				mask[i] = ^uint64(0)
			}
			if t.Mask != nil {
				if mask, err = s.split(*t.Mask, bytes); err != nil {
					return fmt.Errorf("transition mask: %w", err)
				}
			}
			for i := range v {
				v[i] &= mask[i]
			}
			s.cases = append(s.cases, parseCase{v, mask, next})
		default:
			return fmt.Errorf("transition type %q is not supported", t.Type)
		}
	}
	if len(s.key) == 0 {
		// bmv2 looks at the cases only where there is a key.
		s.cases = nil
	}
	return nil
}

// split cuts a hexstr, the concatenation of the key's parts each filled up to whole bytes, into the parts.
func (s *parseState) split(hex string, bytes int) ([]uint64, error) {
	v, err := parseHex(hex)
	if err != nil {
		return nil, err
	}
	if v.Sign() < 0 || v.BitLen() > 8*bytes {
		return nil, fmt.Errorf("%s does not fit the key's %d bytes", hex, bytes)
	}
	out := make([]uint64, len(s.key))
	for i := len(s.key) - 1; i >= 0; i-- {
		n := uint(s.key[i].width+7) / 8 * 8
		out[i] = bigToWords(v, 1)[0] & lowMask(int(n))
		v = new(big.Int).Rsh(v, n)
	}
	return out, nil
}

func (c *compiler) keyPart(v *jsonValue) (keyPart, error) {
	var k keyPart
	switch v.Type {
	case "field":
		f, err := c.fieldRef(v.Value)
		if err != nil {
			return k, err
		}
		k = keyPart{f: f, width: f.width}
	case "lookahead":
		off, width, err := lookahead(v.Value)
		if err != nil {
			return k, err
		}
		k = keyPart{off: off, width: width}
	default:
		return k, fmt.Errorf("type %q is not supported", v.Type)
	}
	if k.width > 64 {
		return k, fmt.Errorf("a part of %d bits is not supported, the limit is 64", k.width)
	}
	return k, nil
}

func lookahead(v any) (off uint, width int, err error) {
	a, b, err := asPair(v)
	if err != nil {
		return 0, 0, fmt.Errorf("lookahead: %w", err)
	}
	o, errO := asInt(a)
	w, errW := asInt(b)
	if errO != nil || errW != nil || o < 0 || o > maxFieldBits || w < 1 || w > maxFieldBits {
		return 0, 0, fmt.Errorf("lookahead of %v bits at %v", b, a)
	}
	return uint(o), w, nil
}

func (c *compiler) parserOp(jo *jsonParserOp) (parseOp, error) {
	c.scratchTop = 0
	params := func(n int) error {
		if len(jo.Parameters) != n {
			return fmt.Errorf("%d parameters, want %d", len(jo.Parameters), n)
		}
		return nil
	}
	value := func(i int) (*jsonValue, error) {
		v, err := asValue(jo.Parameters[i])
		if err != nil {
			return nil, fmt.Errorf("parameter %d: %w", i, err)
		}
		return v, nil
	}
	tooShort := c.errors["PacketTooShort"]
	switch jo.Op {
	case "extract":
		if err := params(1); err != nil {
			return nil, err
		}
		v, err := value(0)
		if err != nil {
			return nil, err
		}
		if v.Type != "regular" {
			return nil, fmt.Errorf("parameter of type %q is not supported", v.Type)
		}
		h, err := c.headerRef(v.Value)
		if err != nil {
			return nil, err
		}
		return func(m *machine) bool {
			if len(m.data)-m.parsed < h.nbytes {
				m.errVal = tooShort
				return false
			}
			h.extract(m.phv, m.data[m.parsed:m.parsed+h.nbytes])
			m.parsed += h.nbytes
			return true
		}, nil

	case "set":
		if err := params(2); err != nil {
			return nil, err
		}
		dst, err := value(0)
		if err != nil {
			return nil, err
		}
		src, err := value(1)
		if err != nil {
			return nil, err
		}
		if dst.Type != "field" {
			return nil, fmt.Errorf("destination of type %q is not supported", dst.Type)
		}
		f, err := c.fieldRef(dst.Value)
		if err != nil {
			return nil, err
		}
		if f.hidden {
			return nil, fmt.Errorf("%s cannot be written", f.name)
		}
		if src.Type == "lookahead" {
			off, width, err := lookahead(src.Value)
			if err != nil {
				return nil, err
			}
			return setLookahead(f, off, width, tooShort), nil
		}
		n, err := c.value(src, nil)
		if err != nil {
			return nil, err
		}
		if n.typ != typeData {
			return nil, fmt.Errorf("source is a %v", n.typ)
		}
		assign, err := c.compileAssign(f, n)
		if err != nil {
			return nil, err
		}
		return func(m *machine) bool { assign(m); return true }, nil

	case "verify":
		if err := params(2); err != nil {
			return nil, err
		}
		cv, err := value(0)
		if err != nil {
			return nil, err
		}
		ev, err := value(1)
		if err != nil {
			return nil, err
		}
		cond, err := c.condition(cv)
		if err != nil {
			return nil, err
		}
		n, err := c.value(ev, nil)
		if err != nil {
			return nil, err
		}
		if n.typ != typeData {
			return nil, fmt.Errorf("error is a %v", n.typ)
		}
		code, err := c.compileU(n)
		if err != nil {
			return nil, err
		}
		return func(m *machine) bool {
			if cond(m) {
				return true
			}
			m.errVal = uint32(code(m))
			return false
		}, nil

	case "advance":
		if err := params(1); err != nil {
			return nil, err
		}
		v, err := value(0)
		if err != nil {
			return nil, err
		}
		n, err := c.value(v, nil)
		if err != nil {
			return nil, err
		}
		if n.typ != typeData {
			return nil, fmt.Errorf("length is a %v", n.typ)
		}
		length, err := c.compileU(n)
		if err != nil {
			return nil, err
		}
		invalid := c.errors["ParserInvalidArgument"]
		return func(m *machine) bool {
			l := length(m)
			switch {
			case l%8 != 0:
				m.errVal = invalid
				return false
			case uint64(len(m.data)-m.parsed) < l/8:
				m.errVal = tooShort
				return false
			}
			m.parsed += int(l / 8)
			return true
		}, nil

	case "primitive":
		if err := params(1); err != nil {
			return nil, err
		}
		p, err := asPrimitive(jo.Parameters[0])
		if err != nil {
			return nil, err
		}
		if p.Op == "_jump" || p.Op == "_jump_if_zero" || p.Op == "exit" {
			return nil, fmt.Errorf("primitive %q is not supported in a parser", p.Op)
		}
		o, err := c.primitive(p, nil, 0)
		if err != nil {
			return nil, fmt.Errorf("primitive %q: %w", p.Op, err)
		}
		return func(m *machine) bool { o(m, 0); return true }, nil
	}
	return nil, fmt.Errorf("not supported")
}

// setLookahead sets a field from bits that lie ahead, without extracting them.
func setLookahead(f *field, off uint, width int, tooShort uint32) parseOp {
	tmp := make([]uint64, max(f.words, numWords(width)))
	return func(m *machine) bool {
		if uint(len(m.data)-m.parsed)*8 < off+uint(width) {
			m.errVal = tooShort
			return false
		}
		loadWords(tmp, m.data[m.parsed:], off, uint(width))
		d := m.phv[f.off : f.off+f.words]
		copy(d, tmp)
		maskTop(d, f.width)
		return true
	}
}

// parse runs the parser over the machine's data. It returns the parser error; the bytes extracted so far are gone
// from the data either way.
func (p *Program) parse(m *machine) uint32 {
	m.parsed, m.errVal = 0, p.noError
	p.walk(m)
	m.data = m.data[m.parsed:]
	return m.errVal
}

func (p *Program) walk(m *machine) {
	s := p.start
	for n := 0; s != nil; n++ {
		if n == maxParseStates {
			m.errVal = p.parserTimeout
			return
		}
		for _, o := range s.ops {
			if !o(m) {
				return
			}
		}
		next, ok := s.transition(m)
		if !ok {
			m.errVal = p.tooShort
			return
		}
		s = next
	}
}

func (s *parseState) transition(m *machine) (next *parseState, ok bool) {
	if len(s.cases) == 0 {
		return s.next, true
	}
	key := m.key[:0]
	for i := range s.key {
		k := &s.key[i]
		if k.f != nil {
			key = append(key, m.phv[k.f.off])
			continue
		}
		if uint(len(m.data)-m.parsed)*8 < k.off+uint(k.width) {
			return nil, false
		}
		key = append(key, loadBits(m.data[m.parsed:], k.off, uint(k.width)))
	}
	m.key = key
cases:
	for i := range s.cases {
		c := &s.cases[i]
		for j, v := range c.value {
			if key[j]&c.mask[j] != v {
				continue cases
			}
		}
		return c.next, true
	}
	return s.next, true
}
