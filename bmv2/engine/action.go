package engine

import "fmt"

// op is one compiled primitive: it returns the index of the next one.
type op func(m *machine, pc int) int

// step makes an op of a primitive that does not jump.
func step(f func(m *machine)) op {
	return func(m *machine, pc int) int {
		f(m)
		return pc + 1
	}
}

// param is a parameter of an action; its value lies in machine.args.
type param struct {
	name  string
	width int
	off   int
	words int
}

// Param describes a parameter of an action.
type Param struct {
	Name  string
	Width int // bits
}

// Action is an action of the program.
type Action struct {
	name   string
	id     int
	params []*param
	words  int // of all parameters together
	ops    []op
}

// Name is the action's fully qualified name. Several actions of a program may have the same name: p4c makes a copy of
// an action for every use it inlines.
func (a *Action) Name() string { return a.name }

// Params returns the action's parameters in order.
func (a *Action) Params() []Param {
	out := make([]Param, len(a.params))
	for i, p := range a.params {
		out[i] = Param{p.name, p.width}
	}
	return out
}

// maxOps bounds the primitives that one execution of an action runs: p4c's jumps go forward only, so a program that
// passes it would never end.
const maxOps = 1 << 20

func (a *Action) run(m *machine, args []uint64) {
	m.args = args
	for pc, n := 0, 0; pc < len(a.ops) && n < maxOps; n++ {
		pc = a.ops[pc](m, pc)
	}
}

func (c *compiler) loadActions(j *jsonProgram) error {
	for _, ja := range j.Actions {
		if _, dup := c.actions[ja.ID]; dup {
			return fmt.Errorf("action %s: id %d is not unique", ja.Name, ja.ID)
		}
		a := &Action{name: ja.Name, id: ja.ID}
		for _, jp := range ja.Params {
			if jp.Bitwidth < 1 || jp.Bitwidth > maxFieldBits {
				return fmt.Errorf("action %s: parameter %s: width %d is not between 1 and %d",
					ja.Name, jp.Name, jp.Bitwidth, maxFieldBits)
			}
			p := &param{name: jp.Name, width: jp.Bitwidth, off: a.words, words: numWords(jp.Bitwidth)}
			a.words += p.words
			a.params = append(a.params, p)
		}
		for i := range ja.Primitives {
			o, err := c.primitive(&ja.Primitives[i], a.params, len(ja.Primitives))
			if err != nil {
				return fmt.Errorf("action %s: primitive %q: %w", ja.Name, ja.Primitives[i].Op, err)
			}
			a.ops = append(a.ops, o)
		}
		c.actions[ja.ID] = a
	}
	return nil
}

// primitive compiles one primitive; count is the number of primitives of the action, where jumps may lead.
func (c *compiler) primitive(p *jsonPrimitive, locals []*param, count int) (op, error) {
	c.scratchTop = 0
	args := &primitiveArgs{c: c, p: p.Parameters, locals: locals}
	o, err := c.compilePrimitive(p.Op, args, count)
	if err != nil {
		return nil, err
	}
	if args.err != nil {
		return nil, args.err
	}
	if args.next != len(p.Parameters) {
		return nil, fmt.Errorf("%d parameters, want %d", len(p.Parameters), args.next)
	}
	return o, nil
}

// primitiveArgs hands out a primitive's parameters in order and remembers the first error.
type primitiveArgs struct {
	c      *compiler
	p      []jsonValue
	locals []*param
	next   int
	err    error
}

func (a *primitiveArgs) fail(err error) {
	if a.err == nil {
		a.err = fmt.Errorf("parameter %d: %w", a.next-1, err)
	}
}

func (a *primitiveArgs) take() *jsonValue {
	a.next++
	if a.next > len(a.p) {
		a.fail(fmt.Errorf("missing"))
		return &jsonValue{}
	}
	return &a.p[a.next-1]
}

func (a *primitiveArgs) typed(want string) *jsonValue {
	v := a.take()
	if a.err == nil && v.Type != want {
		a.fail(fmt.Errorf("type %q is not supported, want %q", v.Type, want))
	}
	return v
}

// lvalue is a field to be written.
func (a *primitiveArgs) lvalue() *field {
	v := a.typed("field")
	if a.err != nil {
		return nil
	}
	f, err := a.c.fieldRef(v.Value)
	if err != nil {
		a.fail(err)
		return nil
	}
	if f.hidden {
		a.fail(fmt.Errorf("%s cannot be written", f.name))
		return nil
	}
	return f
}

func (a *primitiveArgs) header() *header {
	v := a.typed("header")
	if a.err != nil {
		return nil
	}
	h, err := a.c.headerRef(v.Value)
	if err != nil {
		a.fail(err)
	}
	return h
}

func (a *primitiveArgs) data() *node {
	v := a.take()
	if a.err != nil {
		return nil
	}
	n, err := a.c.value(v, a.locals)
	if err == nil && n.typ != typeData {
		err = fmt.Errorf("is a %v, want a number", n.typ)
	}
	if err != nil {
		a.fail(err)
		return nil
	}
	return n
}

// number compiles a parameter that is used as an unsigned 64-bit number.
func (a *primitiveArgs) number() valueFn {
	n := a.data()
	if n == nil {
		return nil
	}
	f, err := a.c.compileU(n)
	if err != nil {
		a.fail(err)
	}
	return f
}

func (a *primitiveArgs) name(typ string) string {
	v := a.typed(typ)
	if a.err != nil {
		return ""
	}
	s, err := asString(v.Value)
	if err != nil {
		a.fail(err)
	}
	return s
}

func (a *primitiveArgs) registers() *Register {
	name := a.name("register_array")
	r := a.c.registers[name]
	if r == nil {
		a.fail(fmt.Errorf("no register array %q", name))
	}
	return r
}

// jump is the constant target of a jump.
func (a *primitiveArgs) jump(count int) int {
	n := a.data()
	if n == nil {
		return 0
	}
	if !n.isConst() || !n.k.IsInt64() || n.k.Int64() < 0 || n.k.Int64() > int64(count) {
		a.fail(fmt.Errorf("jump target is not a constant between 0 and %d", count))
		return 0
	}
	return int(n.k.Int64())
}

func (c *compiler) compilePrimitive(name string, a *primitiveArgs, count int) (op, error) {
	switch name {
	case "assign":
		f, n := a.lvalue(), a.data()
		if a.err != nil {
			return nil, nil
		}
		s, err := c.compileAssign(f, n)
		if err != nil {
			return nil, err
		}
		return step(s), nil

	case "assign_header":
		dst, src := a.header(), a.header()
		if a.err != nil {
			return nil, nil
		}
		if dst.typ != src.typ {
			return nil, fmt.Errorf("headers %s and %s are of different types", dst.name, src.name)
		}
		return step(func(m *machine) {
			if !src.isValid(m.phv) {
				m.phv[dst.valid] = 0
				return
			}
			m.phv[dst.valid] = 1
			copy(m.phv[dst.first:dst.end], m.phv[src.first:src.end])
		}), nil

	case "add_header":
		h := a.header()
		if a.err != nil {
			return nil, nil
		}
		return step(func(m *machine) {
			if !h.isValid(m.phv) {
				clear(m.phv[h.first:h.end])
				m.phv[h.valid] = 1
				m.register += uint64(h.nbytes)
			}
		}), nil

	case "remove_header":
		h := a.header()
		if a.err != nil {
			return nil, nil
		}
		return step(func(m *machine) {
			if h.isValid(m.phv) {
				m.phv[h.valid] = 0
				m.register -= uint64(h.nbytes)
			}
		}), nil

	case "mark_to_drop":
		h := a.header()
		if a.err != nil {
			return nil, nil
		}
		spec, group := h.byName["egress_spec"], h.byName["mcast_grp"]
		if spec == nil {
			return nil, fmt.Errorf("header %s has no field egress_spec", h.name)
		}
		drop := uint64(c.opt.DropPort)
		return step(func(m *machine) {
			spec.set(m.phv, drop)
			group.set(m.phv, 0)
		}), nil

	case "exit":
		return step(func(m *machine) { m.exit = true }), nil

	case "no_op":
		return step(func(*machine) {}), nil

	case "count":
		name := a.name("counter_array")
		idx := a.number()
		if a.err != nil {
			return nil, nil
		}
		ctr := c.counters[name]
		if ctr == nil {
			return nil, fmt.Errorf("no counter array %q", name)
		}
		return step(func(m *machine) {
			if i := idx(m); i < uint64(len(ctr.cells)) {
				ctr.cells[i].count(m.length)
			}
		}), nil

	case "register_read":
		f, r, idx := a.lvalue(), a.registers(), a.number()
		if a.err != nil {
			return nil, nil
		}
		return step(r.compileRead(f, idx)), nil

	case "register_write":
		r, idx, n := a.registers(), a.number(), a.data()
		if a.err != nil {
			return nil, nil
		}
		s, err := c.compileRegisterWrite(r, idx, n)
		if err != nil {
			return nil, err
		}
		return step(s), nil

	case "modify_field_with_hash_based_offset":
		f, base := a.lvalue(), a.number()
		name := a.name("calculation")
		size := a.number()
		if a.err != nil {
			return nil, nil
		}
		calc := c.calcs[name]
		if calc == nil {
			return nil, fmt.Errorf("no calculation %q", name)
		}
		return step(func(m *machine) {
			f.set(m.phv, calc.output(m)%max(size(m), 1)+base(m))
		}), nil

	case "_jump":
		to := a.jump(count)
		return func(*machine, int) int { return to }, nil

	case "_jump_if_zero":
		v := a.take()
		if a.err != nil {
			return nil, nil
		}
		n, err := c.value(v, a.locals)
		if err != nil {
			return nil, fmt.Errorf("condition: %w", err)
		}
		if n.typ == typeData && n.op == "b2d" {
			n = n.r
		} else if n.typ == typeData {
			n = &node{op: "d2b", typ: typeBool, r: n}
		}
		if n.typ != typeBool {
			return nil, fmt.Errorf("condition is a %v", n.typ)
		}
		cond, err := c.compileB(n)
		if err != nil {
			return nil, fmt.Errorf("condition: %w", err)
		}
		to := a.jump(count)
		return func(m *machine, pc int) int {
			if cond(m) {
				return pc + 1
			}
			return to
		}, nil
	}
	return nil, fmt.Errorf("not supported")
}

// compileAssign compiles a store to a field.
func (c *compiler) compileAssign(f *field, n *node) (func(*machine), error) {
	off, mask := f.off, lowMask(f.width)
	if f.words == 1 {
		switch {
		case n.isConst():
			v := bigToWords(n.k, 1)[0] & mask
			return func(m *machine) { m.phv[off] = v }, nil
		case n.f != nil && n.f.words == 1 && !n.f.signed && n.f.width <= f.width:
			src := n.f.off
			return func(m *machine) { m.phv[off] = m.phv[src] }, nil
		}
		u, err := c.compileU(n)
		if err != nil {
			return nil, err
		}
		return func(m *machine) { m.phv[off] = u(m) & mask }, nil
	}
	k, width := f.words, f.width
	w, err := c.compileW(n, k)
	if err != nil {
		return nil, err
	}
	if width%64 == 0 || !n.signed && n.bits <= width {
		return func(m *machine) { copy(m.phv[off:off+k], w(m)) }, nil
	}
	return func(m *machine) {
		d := m.phv[off : off+k]
		copy(d, w(m))
		maskTop(d, width)
	}, nil
}
