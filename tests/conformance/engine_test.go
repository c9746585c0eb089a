package conformance

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"

	"xagg/bmv2/engine"
	"xagg/p4"
	"xagg/wire"
)

// embedded is the engine's core with the compiled program: no sockets, one packet at a time.
type embedded struct {
	*controller
	prog *engine.Program
	clock
}

func newEmbedded(sc *scenario) (*embedded, error) {
	prog, err := engine.Load(p4.JSON, engine.Options{})
	if err != nil {
		return nil, err
	}
	e := &embedded{controller: newController(sc), prog: prog}
	return e, e.write(e.begin())
}

func (e *embedded) name() string { return "engine" }

// write carries out what a controller writes.
func (e *embedded) write(writes []write) error {
	for _, w := range writes {
		if w.group != nil {
			var replicas []engine.Replica
			for _, r := range w.group.replicas {
				replicas = append(replicas, engine.Replica{Port: r.port, Instance: r.instance})
			}
			if err := e.prog.AddGroup(w.group.id, replicas); err != nil {
				return fmt.Errorf("add group %d: %w", w.group.id, err)
			}
			continue
		}
		table, entry, err := e.tableEntry(w.entry)
		if err == nil {
			err = []func(*engine.Entry) error{insert: table.Insert, modify: table.Modify, remove: table.Delete}[w.op](entry)
		}
		if err != nil {
			return fmt.Errorf("entry %v: %w", w.entry, err)
		}
	}
	return nil
}

func (e *embedded) tableEntry(en *entry) (*engine.Table, *engine.Entry, error) {
	tables := e.prog.Tables()
	i := slices.IndexFunc(tables, func(t *engine.Table) bool { return strings.HasSuffix(t.Name(), "."+en.table) })
	if i < 0 {
		return nil, nil, errors.New("no such table")
	}
	t := tables[i]
	entry := &engine.Entry{}
	for i, k := range t.Keys() {
		m := engine.Match{Value: fixed(en.key[i], k.Width)}
		if k.Kind == engine.LPM {
			m.Prefix = k.Width
		}
		entry.Match = append(entry.Match, m)
	}
	actions := t.Actions()
	i = slices.IndexFunc(actions, func(a *engine.Action) bool { return strings.HasSuffix(a.Name(), "."+en.action) })
	if i < 0 {
		return nil, nil, errors.New("no such action")
	}
	entry.Action = actions[i]
	for i, p := range entry.Action.Params() {
		entry.Args = append(entry.Args, fixed(en.params[i], p.Width))
	}
	return t, entry, nil
}

// fixed is a number in the bytes of a field of so many bits.
func fixed(v uint64, bits int) []byte {
	return binary.BigEndian.AppendUint64(nil, v)[8-(bits+7)/8:]
}

func (e *embedded) send(in input) (outs []output, err error) {
	if in.change != nil {
		return nil, e.write(e.change(in.change))
	}
	frame := in.frame
	if in.port == cpuPort {
		frame = append(binary.BigEndian.AppendUint16(nil, in.egress), frame...)
	}
	e.prog.Process(in.port, frame, e.tick(), func(port uint16, f []byte) {
		if port == cpuPort {
			f = f[2:] // the header of packet-ins
		}
		outs = append(outs, output{port, slices.Clone(f)})
	})
	return outs, nil
}

func (e *embedded) reasons() ([]int64, error) {
	c := e.prog.Counter("XaggIngress.reasons")
	if c == nil {
		return nil, fmt.Errorf("counter XaggIngress.reasons: the program has none")
	}
	packets := make([]int64, wire.NumReasons)
	for i := range packets {
		packets[i] = int64(c.Read(i).Packets)
	}
	return packets, nil
}

func (e *embedded) counters() (map[string]engine.CounterValue, error) {
	out := make(map[string]engine.CounterValue)
	for _, c := range e.prog.Counters() {
		name := c.Name()[strings.LastIndexByte(c.Name(), '.')+1:]
		if !c.Direct() {
			for i := range c.Size() {
				out[fmt.Sprintf("%s %d", name, i)] = c.Read(i)
			}
			continue
		}
		tables := e.prog.Tables()
		i := slices.IndexFunc(tables, func(t *engine.Table) bool { return t.Name() == c.Binding() })
		if i < 0 {
			return nil, fmt.Errorf("counter %s: the program has no table %s", c.Name(), c.Binding())
		}
		for _, entry := range tables[i].Entries() {
			cell := name
			for _, m := range entry.Match {
				cell += fmt.Sprintf(" %d", bigEndian(m.Value))
			}
			out[cell] = entry.Counter()
		}
	}
	return out, nil
}
