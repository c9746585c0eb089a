package engine

import (
	"fmt"
	"math/big"
	"sync/atomic"
)

// Register is a register array of the program.
type Register struct {
	name  string
	width int
	words int // per cell
	size  int
	data  []uint64
	prog  *Program
}

// Name is the array's fully qualified name.
func (r *Register) Name() string { return r.name }

// Size is the number of cells.
func (r *Register) Size() int { return r.size }

// Width is the number of bits of a cell.
func (r *Register) Width() int { return r.width }

// Read returns the value of a cell, 0 <= i < Size.
func (r *Register) Read(i int) *big.Int {
	r.prog.mu.Lock()
	defer r.prog.mu.Unlock()
	return wordsToBig(r.data[i*r.words:(i+1)*r.words], false)
}

// maxState bounds what a program's registers and counters may take together, in 64-bit words (2 GiB).
const maxState = 1 << 28

func (c *compiler) loadState(j *jsonProgram) error {
	total := 0
	for _, jr := range j.RegisterArrays {
		if jr.Bitwidth < 1 || jr.Bitwidth > maxFieldBits {
			return fmt.Errorf("register array %s: width %d is not between 1 and %d", jr.Name, jr.Bitwidth, maxFieldBits)
		}
		if c.registers[jr.Name] != nil {
			return fmt.Errorf("register array %s: defined twice", jr.Name)
		}
		r := &Register{name: jr.Name, width: jr.Bitwidth, words: numWords(jr.Bitwidth), size: jr.Size, prog: c.prog}
		if jr.Size < 0 || jr.Size > (maxState-total)/r.words {
			return fmt.Errorf("register array %s: size %d: all state together takes more than %d MiB",
				jr.Name, jr.Size, maxState>>17)
		}
		total += jr.Size * r.words
		r.data = make([]uint64, jr.Size*r.words)
		c.registers[jr.Name] = r
		c.prog.registers = append(c.prog.registers, r)
	}
	for _, jc := range j.CounterArrays {
		if c.counters[jc.Name] != nil {
			return fmt.Errorf("counter array %s: defined twice", jc.Name)
		}
		ctr := &Counter{name: jc.Name, direct: jc.Direct, binding: jc.Binding, prog: c.prog}
		if !jc.Direct {
			if jc.Size < 0 || jc.Size > (maxState-total)/2 {
				return fmt.Errorf("counter array %s: size %d: all state together takes more than %d MiB",
					jc.Name, jc.Size, maxState>>17)
			}
			total += 2 * jc.Size
			ctr.cells = make([]cell, jc.Size)
		}
		c.counters[jc.Name] = ctr
		c.prog.counters = append(c.prog.counters, ctr)
	}
	return nil
}

func (r *Register) compileRead(f *field, idx valueFn) func(*machine) {
	off, size := f.off, uint64(r.size)
	if r.words == 1 && f.words == 1 {
		if r.width <= f.width {
			return func(m *machine) {
				if i := idx(m); i < size {
					m.phv[off] = r.data[i]
				}
			}
		}
		mask := lowMask(f.width)
		return func(m *machine) {
			if i := idx(m); i < size {
				m.phv[off] = r.data[i] & mask
			}
		}
	}
	words, k := uint64(r.words), f.words
	return func(m *machine) {
		if i := idx(m); i < size {
			d := m.phv[off : off+k]
			n := copy(d, r.data[i*words:(i+1)*words])
			clear(d[n:])
			maskTop(d, f.width)
		}
	}
}

func (c *compiler) compileRegisterWrite(r *Register, idx valueFn, n *node) (func(*machine), error) {
	size := uint64(r.size)
	if r.words == 1 {
		u, err := c.compileU(n)
		if err != nil {
			return nil, err
		}
		mask := lowMask(r.width)
		return func(m *machine) {
			if i := idx(m); i < size {
				r.data[i] = u(m) & mask
			}
		}, nil
	}
	w, err := c.compileW(n, r.words)
	if err != nil {
		return nil, err
	}
	words := uint64(r.words)
	return func(m *machine) {
		if i := idx(m); i < size {
			d := r.data[i*words : (i+1)*words]
			copy(d, w(m))
			maskTop(d, r.width)
		}
	}, nil
}

// CounterValue is what a counter counted. Bytes are those of the frames as they came in, as bmv2 counts them.
type CounterValue struct{ Packets, Bytes uint64 }

// cell is one counter. It is written by the packet path and read by anybody, without a lock.
type cell struct{ packets, bytes atomic.Uint64 }

func (c *cell) count(length uint64) {
	c.packets.Store(c.packets.Load() + 1) // one writer
	c.bytes.Store(c.bytes.Load() + length)
}

func (c *cell) value() CounterValue { return CounterValue{c.packets.Load(), c.bytes.Load()} }

func (c *cell) set(v CounterValue) {
	c.packets.Store(v.Packets)
	c.bytes.Store(v.Bytes)
}

// Counter is a counter array of the program. A direct one has its cells in the entries of its table.
type Counter struct {
	name    string
	direct  bool
	binding string
	cells   []cell
	prog    *Program
}

// Name is the array's fully qualified name.
func (c *Counter) Name() string { return c.name }

// Direct reports whether the counter belongs to a table's entries.
func (c *Counter) Direct() bool { return c.direct }

// Binding is the table of a direct counter.
func (c *Counter) Binding() string { return c.binding }

// Size is the number of cells of an indirect counter.
func (c *Counter) Size() int { return len(c.cells) }

// Read returns the value of a cell of an indirect counter, 0 <= i < Size.
func (c *Counter) Read(i int) CounterValue { return c.cells[i].value() }

// Write sets a cell of an indirect counter, 0 <= i < Size.
func (c *Counter) Write(i int, v CounterValue) {
	c.prog.mu.Lock()
	defer c.prog.mu.Unlock()
	c.cells[i].set(v)
}
