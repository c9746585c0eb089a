package engine

import (
	"fmt"
	"slices"
	"sync"
)

// Options are what a program may ask of its target.
type Options struct {
	// DropPort is the egress port that drops; 0 means 511, v1model's.
	DropPort uint16
}

// Program is a loaded program with its tables, registers, counters and multicast groups. Its methods may be called
// from any goroutine; packets are processed one at a time.
type Program struct {
	mu sync.Mutex

	start                            *parseState
	noError, tooShort, parserTimeout uint32
	verify, update                   []*checksum
	ingress, egress                  flowNode
	order                            []*header // of the deparser

	tables    []*Table
	registers []*Register
	counters  []*Counter
	groups    map[uint16][]Replica

	std standardFields

	m     machine
	saved []uint64 // PHV behind the ingress, for the copies of a multicast
	out   []byte
	drop  uint64
}

// standardFields are the fields that simple_switch itself reads and writes. A program need not have them all.
type standardFields struct {
	ingressPort, egressSpec, egressPort, instanceType, packetLength *field
	ingressTS, egressTS, enqTS, enqDepth, deqDelta, deqDepth        *field
	group, rid, checksumError, parserError, priority                *field
}

// flowNode is a node of a control flow graph: a table or a conditional. It runs and returns what comes next.
type flowNode interface{ exec(m *machine) flowNode }

type conditional struct {
	name    string
	cond    boolFn
	yes, no flowNode
}

func (c *conditional) exec(m *machine) flowNode {
	if c.cond(m) {
		return c.yes
	}
	return c.no
}

type checksum struct {
	target *field
	calc   *calculation
	cond   boolFn // nil = always
}

// compiler holds what is known while a program is loaded.
type compiler struct {
	opt        Options
	prog       *Program
	headers    map[string]*header
	headerList []*header
	aliases    map[string]*field
	phvLen     int
	errors     map[string]uint32
	registers  map[string]*Register
	counters   map[string]*Counter
	calcs      map[string]*calculation
	actions    map[int]*Action
	scratchTop int
	scratchLen int
}

// Load compiles p4c's bmv2 JSON. An error names the construct that is wrong or not supported.
func Load(json []byte, opt Options) (*Program, error) {
	if opt.DropPort == 0 {
		opt.DropPort = 511
	}
	var j jsonProgram
	if err := decode(json, &j); err != nil {
		return nil, fmt.Errorf("read bmv2 JSON: %w", err)
	}
	p := &Program{groups: map[uint16][]Replica{}, drop: uint64(opt.DropPort)}
	c := &compiler{
		opt: opt, prog: p,
		headers: map[string]*header{}, aliases: map[string]*field{}, errors: map[string]uint32{},
		registers: map[string]*Register{}, counters: map[string]*Counter{}, calcs: map[string]*calculation{},
		actions: map[int]*Action{},
	}
	for _, f := range []func(*jsonProgram) error{
		c.refuse, c.loadHeaders, c.loadErrors, c.loadState, c.loadCalculations, c.loadActions, c.loadParser,
		c.loadDeparser, c.loadPipelines, c.loadChecksums, c.loadStandard,
	} {
		if err := f(&j); err != nil {
			return nil, fmt.Errorf("load bmv2 JSON: %w", err)
		}
	}
	p.m.phv = make([]uint64, c.phvLen)
	p.saved = make([]uint64, c.phvLen)
	p.m.scratch = make([]uint64, c.scratchLen)
	for _, t := range p.tables {
		p.m.key = slices.Grow(p.m.key, 2*t.words)
	}
	return p, nil
}

// refuse names what the engine does not know.
func (c *compiler) refuse(j *jsonProgram) error {
	if len(j.Meta.Version) != 2 || j.Meta.Version[0] != 2 {
		return fmt.Errorf("format version %v: want 2.x", j.Meta.Version)
	}
	for _, k := range []struct {
		kind string
		list []jsonNamed
	}{
		{"header stack", j.HeaderStacks}, {"header union type", j.HeaderUnionTypes}, {"header union", j.HeaderUnions},
		{"header union stack", j.HeaderUnionStacks}, {"parser value set", j.ParseVSets}, {"meter", j.MeterArrays},
		{"digest", j.LearnLists}, {"extern", j.Externs},
	} {
		if len(k.list) != 0 {
			return fmt.Errorf("%s %s is not supported", k.kind, k.list[0].Name)
		}
	}
	return nil
}

func (c *compiler) condition(v *jsonValue) (boolFn, error) {
	c.scratchTop = 0
	n, err := c.value(v, nil)
	if err != nil {
		return nil, err
	}
	if n.typ != typeBool {
		return nil, fmt.Errorf("condition is a %v", n.typ)
	}
	return c.compileB(n)
}

func (c *compiler) loadDeparser(j *jsonProgram) error {
	if len(j.Deparsers) != 1 || j.Deparsers[0].Name != "deparser" {
		return fmt.Errorf("%d deparsers: simple_switch wants one, named \"deparser\"", len(j.Deparsers))
	}
	d := &j.Deparsers[0]
	if len(d.Primitives) != 0 {
		return fmt.Errorf("deparser: primitives are not supported")
	}
	for _, name := range d.Order {
		h, err := c.header(name)
		if err != nil {
			return fmt.Errorf("deparser: %w", err)
		}
		c.prog.order = append(c.prog.order, h)
	}
	return nil
}

func (c *compiler) loadPipelines(j *jsonProgram) error {
	var in, out bool
	for i := range j.Pipelines {
		jp := &j.Pipelines[i]
		first, err := c.loadPipeline(jp)
		if err != nil {
			return fmt.Errorf("pipeline %s: %w", jp.Name, err)
		}
		switch {
		case jp.Name == "ingress" && !in:
			c.prog.ingress, in = first, true
		case jp.Name == "egress" && !out:
			c.prog.egress, out = first, true
		default:
			return fmt.Errorf("pipeline %s: simple_switch has one ingress and one egress", jp.Name)
		}
	}
	if !in || !out {
		return fmt.Errorf("pipelines: simple_switch wants ingress and egress")
	}
	return nil
}

func (c *compiler) loadPipeline(jp *jsonPipeline) (flowNode, error) {
	if len(jp.Profiles) != 0 {
		return nil, fmt.Errorf("action profile %s is not supported", jp.Profiles[0].Name)
	}
	if len(jp.ActionCalls) != 0 {
		return nil, fmt.Errorf("action call %s is not supported", jp.ActionCalls[0].Name)
	}
	nodes := map[string]flowNode{}
	add := func(name string, n flowNode) error {
		if nodes[name] != nil {
			return fmt.Errorf("%s: defined twice", name)
		}
		nodes[name] = n
		return nil
	}
	var tables []*Table
	for i := range jp.Tables {
		t, err := c.loadTable(&jp.Tables[i])
		if err != nil {
			return nil, fmt.Errorf("table %s: %w", jp.Tables[i].Name, err)
		}
		if err := add(t.name, t); err != nil {
			return nil, err
		}
		if slices.ContainsFunc(c.prog.tables, func(o *Table) bool { return o.name == t.name }) {
			return nil, fmt.Errorf("table %s: defined twice", t.name)
		}
		tables = append(tables, t)
		c.prog.tables = append(c.prog.tables, t)
	}
	var conds []*conditional
	for i := range jp.Conditionals {
		jc := &jp.Conditionals[i]
		cond, err := c.condition(&jc.Expression)
		if err != nil {
			return nil, fmt.Errorf("conditional %s: %w", jc.Name, err)
		}
		n := &conditional{cond: cond, name: jc.Name}
		if err := add(jc.Name, n); err != nil {
			return nil, err
		}
		conds = append(conds, n)
	}
	find := func(name *string) (flowNode, error) {
		if name == nil {
			return nil, nil
		}
		n, ok := nodes[*name]
		if !ok {
			return nil, fmt.Errorf("no table or conditional %q", *name)
		}
		return n, nil
	}
	for i, t := range tables {
		if err := c.linkTable(t, &jp.Tables[i], find); err != nil {
			return nil, fmt.Errorf("table %s: %w", t.name, err)
		}
	}
	for i, n := range conds {
		var err error
		if n.yes, err = find(jp.Conditionals[i].True); err != nil {
			return nil, fmt.Errorf("conditional %s: %w", n.name, err)
		}
		if n.no, err = find(jp.Conditionals[i].False); err != nil {
			return nil, fmt.Errorf("conditional %s: %w", n.name, err)
		}
	}
	first, err := find(jp.Init)
	if err != nil {
		return nil, err
	}
	return first, acyclic(nodes)
}

// acyclic checks that the control flow ends: P4 has no loops, and simple_switch would not survive one.
func acyclic(nodes map[string]flowNode) error {
	state := map[flowNode]int{} // 1 = on the way, 2 = done
	var visit func(n flowNode) error
	visit = func(n flowNode) error {
		if n == nil || state[n] == 2 {
			return nil
		}
		if state[n] == 1 {
			return fmt.Errorf("control flow has a loop")
		}
		state[n] = 1
		var next []flowNode
		switch n := n.(type) {
		case *conditional:
			next = []flowNode{n.yes, n.no}
		case *Table:
			next = []flowNode{n.nextHit, n.nextMiss}
			for _, x := range n.next {
				next = append(next, x)
			}
		}
		for _, x := range next {
			if err := visit(x); err != nil {
				return err
			}
		}
		state[n] = 2
		return nil
	}
	for _, n := range nodes {
		if err := visit(n); err != nil {
			return err
		}
	}
	return nil
}

func (c *compiler) loadChecksums(j *jsonProgram) error {
	for i := range j.Checksums {
		jc := &j.Checksums[i]
		fail := func(err error) error { return fmt.Errorf("checksum %s: %w", jc.Name, err) }
		if jc.Type != "generic" {
			return fail(fmt.Errorf("type %q is not supported", jc.Type))
		}
		f, err := c.field(jc.Target[0], jc.Target[1])
		if err != nil {
			return fail(err)
		}
		if f.hidden {
			return fail(fmt.Errorf("%s cannot be written", f.name))
		}
		calc := c.calcs[jc.Calculation]
		if calc == nil {
			return fail(fmt.Errorf("no calculation %q", jc.Calculation))
		}
		s := &checksum{target: f, calc: calc}
		if jc.Cond != nil {
			if s.cond, err = c.condition(jc.Cond); err != nil {
				return fail(err)
			}
		}
		if jc.Update == nil || *jc.Update {
			c.prog.update = append(c.prog.update, s)
		}
		if jc.Verify == nil || *jc.Verify {
			c.prog.verify = append(c.prog.verify, s)
		}
	}
	return nil
}

func (c *compiler) loadStandard(*jsonProgram) error {
	std := &c.prog.std
	for _, f := range []struct {
		dst       **field
		hdr, name string
		required  bool
	}{
		{&std.ingressPort, "standard_metadata", "ingress_port", true},
		{&std.packetLength, "standard_metadata", "packet_length", true},
		{&std.instanceType, "standard_metadata", "instance_type", true},
		{&std.egressSpec, "standard_metadata", "egress_spec", true},
		{&std.egressPort, "standard_metadata", "egress_port", true},
		{&std.parserError, "standard_metadata", "parser_error", false},
		{&std.checksumError, "standard_metadata", "checksum_error", false},
		{&std.ingressTS, "intrinsic_metadata", "ingress_global_timestamp", false},
		{&std.egressTS, "intrinsic_metadata", "egress_global_timestamp", false},
		{&std.group, "intrinsic_metadata", "mcast_grp", false},
		{&std.rid, "intrinsic_metadata", "egress_rid", false},
		{&std.priority, "intrinsic_metadata", "priority", false},
		{&std.enqTS, "queueing_metadata", "enq_timestamp", false},
		{&std.enqDepth, "queueing_metadata", "enq_qdepth", false},
		{&std.deqDelta, "queueing_metadata", "deq_timedelta", false},
		{&std.deqDepth, "queueing_metadata", "deq_qdepth", false},
	} {
		*f.dst = c.known(f.hdr, f.name)
		if f.required && *f.dst == nil {
			return fmt.Errorf("field %s.%s, which simple_switch needs, is not there", f.hdr, f.name)
		}
	}
	return nil
}

// Tables returns the program's tables, those that p4c made for itself included.
func (p *Program) Tables() []*Table { return slices.Clone(p.tables) }

// Table returns the table of that fully qualified name, or nil.
func (p *Program) Table(name string) *Table {
	for _, t := range p.tables {
		if t.name == name {
			return t
		}
	}
	return nil
}

// Counters returns the program's counter arrays, direct ones included.
func (p *Program) Counters() []*Counter { return slices.Clone(p.counters) }

// Counter returns the counter array of that fully qualified name, or nil.
func (p *Program) Counter(name string) *Counter {
	for _, c := range p.counters {
		if c.name == name {
			return c
		}
	}
	return nil
}

// Register returns the register array of that fully qualified name, or nil.
func (p *Program) Register(name string) *Register {
	for _, r := range p.registers {
		if r.name == name {
			return r
		}
	}
	return nil
}
