package wire

import (
	"math"
	"math/big"
	"math/rand/v2"
	"testing"
)

// The figures of these two tests were computed by another program from docs/protocol.md.

func TestCoefficients(t *testing.T) {
	for i, want := range map[int][2]uint32{0: {0x29df40f, 0x360afca}, 1: {0x2a645b3, 0x146c530}, 255: {0x3792733, 0x38e64ab}} {
		if got := [2]uint32{Coefficients[0][i], Coefficients[1][i]}; got != want {
			t.Errorf("coefficients of lane %d: %#x, want %#x", i, got, want)
		}
	}
	for s, want := range []uint64{8833687737, 8778308666} {
		var sum uint64
		for _, k := range Coefficients[s] {
			if k < 1 || k >= P {
				t.Errorf("coefficient %d is outside [1, P)", k)
			}
			sum += uint64(k)
		}
		if sum != want {
			t.Errorf("sum of coefficients %d: %d, want %d", s, sum, want)
		}
	}
	// The sequences are independent: a number that both had would be the mark of overlapping seeds.
	seen := map[uint32]bool{}
	for _, k := range Coefficients[0] {
		seen[k] = true
	}
	for i, k := range Coefficients[1] {
		if seen[k] {
			t.Errorf("coefficient %d of sequence 1 is in sequence 0 too", i)
		}
	}
	if !big.NewInt(P).ProbablyPrime(20) || 64*uint64(P-1) > math.MaxUint32 {
		t.Error("P is no prime of which 64 residues can be added in 32 bits")
	}
}

func TestTagValues(t *testing.T) {
	if got, want := TagPlace(0x1234, 7, 300, 5), [2]uint32{0x22e4529, 0x28078c7}; got != want {
		t.Errorf("place: %#x, want %#x", got, want)
	}
	if got, want := TagPlace(65535, math.MaxUint32, math.MaxUint32, 63), [2]uint32{0xdd3b2, 0xc43efe}; got != want {
		t.Errorf("place: %#x, want %#x", got, want)
	}
	p := Packet{Header: Header{Job: 0x1234, Round: 7, Chunk: 300, Rank: 5, Elems: 5}}
	copy(p.Lanes[:], []int32{1, -1, math.MaxInt32, math.MinInt32, 5})
	p.Seal()
	if want := [2]uint32{0x1fa4e09, 0x171fce9}; p.Tag != want {
		t.Errorf("tag: %#x, want %#x", p.Tag, want)
	}
	// The place in a running sum is nobody's own.
	p.Flags |= FlagAsync
	p.Seal()
	if want := [2]uint32{0x2773030, 0x3723ab5}; p.Tag != want {
		t.Errorf("tag for a running sum: %#x, want %#x", p.Tag, want)
	}
	before := p.Tag
	p.Round, p.Rank = 8, 63
	if p.Seal(); p.Tag != before {
		t.Errorf("tag for a running sum of another round and rank: %#x, want %#x", p.Tag, before)
	}
}

// TagLanes against big integers, for all lengths and the largest magnitudes.
func TestTagLanes(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	fill := map[string]func() int32{
		"random": func() int32 { return int32(rng.Uint32()) },
		"min":    func() int32 { return math.MinInt32 },
		"max":    func() int32 { return math.MaxInt32 },
		"minus":  func() int32 { return -1 },
	}
	for name, next := range fill {
		for n := 0; n <= MaxLanes; n++ {
			lanes := make([]int32, n)
			var want [2]uint32
			for s := range want {
				sum := new(big.Int)
				for i := range lanes {
					if s == 0 {
						lanes[i] = next()
					}
					sum.Add(sum, big.NewInt(int64(lanes[i])*int64(Coefficients[s][i])))
				}
				want[s] = uint32(sum.Mod(sum, big.NewInt(P)).Int64())
			}
			if got := TagLanes(lanes); got != want {
				t.Fatalf("%s, %d lanes: %v, want %v", name, n, got, want)
			}
		}
	}
}

func sumOf(ps ...*Packet) *Packet {
	sum := *ps[0]
	for _, p := range ps[1:] {
		addPacket(&sum, p)
	}
	return &sum
}

func TestTagDetects(t *testing.T) {
	for _, n := range sizes {
		var g []*Packet
		for r := range uint8(4) {
			g = append(g, randomPacket(9, r, n))
		}
		if sum := sumOf(g...); !sum.TagOK() {
			t.Fatalf("%d lanes: the right sum does not fit", n)
		}
		// A contribution that belongs elsewhere, with its own right tag.
		elsewhere := func(edit func(*Header)) *Packet {
			p := *g[2]
			edit(&p.Header)
			p.Seal()
			p.Contributors = g[2].Contributors
			return sumOf(g[0], g[1], &p, g[3])
		}
		change := func(edit func(*Packet)) *Packet {
			p := sumOf(g...)
			edit(p)
			return p
		}
		faults := map[string]*Packet{
			"dropped":      change(func(p *Packet) { *p = *sumOf(g[0], g[1], g[3]); p.Contributors |= 1 << 2 }),
			"doubled":      sumOf(g[0], g[1], g[2], g[2], g[3]),
			"wrong job":    elsewhere(func(h *Header) { h.Job++ }),
			"wrong round":  elsewhere(func(h *Header) { h.Round ^= 1 }),
			"wrong chunk":  elsewhere(func(h *Header) { h.Chunk++ }),
			"wrong rank":   elsewhere(func(h *Header) { h.Rank = 7 }),
			"mask less":    change(func(p *Packet) { p.Contributors &^= 1 << 1 }),
			"mask more":    change(func(p *Packet) { p.Contributors |= 1 << 63 }),
			"mask swapped": change(func(p *Packet) { p.Contributors ^= 1<<3 | 1<<4 }),
			"tag 0":        change(func(p *Packet) { p.Tag[0] ^= 1 << 31 }),
			"tag 1":        change(func(p *Packet) { p.Tag[1]++ }),
		}
		if n > 0 {
			faults["lane altered"] = change(func(p *Packet) { p.Lanes[n-1] ^= math.MinInt32 })
			faults["lane by one"] = change(func(p *Packet) { p.Lanes[0]++ })
			faults["overflow"] = func() *Packet {
				a, b := *g[0], *g[1]
				a.Lanes[0], b.Lanes[0] = math.MaxInt32, 1
				a.Seal()
				b.Seal()
				return sumOf(&a, &b)
			}()
		}
		if n > 1 {
			faults["lanes swapped"] = change(func(p *Packet) { p.Lanes[0], p.Lanes[n-1] = p.Lanes[n-1], p.Lanes[0] })
			faults["lanes shifted"] = change(func(p *Packet) { copy(p.Lanes[1:n], p.Lanes[:n-1]) })
		}
		for name, p := range faults {
			if p.TagOK() {
				t.Errorf("%d lanes, %s: the tag fits", n, name)
			}
		}
	}
}

// Every single bit of the lanes, the mask and the tag counts.
func TestTagDetectsEveryBit(t *testing.T) {
	sum := sumOf(randomPacket(4, 0, 65), randomPacket(4, 1, 65), randomPacket(4, 2, 65))
	sum.Blocks = 2
	buf := make([]byte, sum.Len())
	sum.Encode(buf)
	check := func(from, to int) {
		for i := from; i < to; i++ {
			for bit := range 8 {
				buf[i] ^= 1 << bit
				var p Packet
				if err := p.Decode(buf); err != nil {
					t.Fatal(err)
				}
				if p.TagOK() {
					t.Errorf("byte %d, bit %d: the tag fits", i, bit)
				}
				buf[i] ^= 1 << bit
			}
		}
	}
	check(OffJob, OffJob+2)
	check(OffRound, OffElems)
	check(OffContributors, OffSpreadUs)
	check(HeaderLen, HeaderLen+65*4)
}

// 64 of the largest tags do not wrap, and the sum still tells.
func TestTagOf64Ranks(t *testing.T) {
	sum := randomPacket(5, 0, MaxLanes)
	var exact [2]uint64
	for s, v := range sum.Tag {
		exact[s] = uint64(v)
	}
	for r := uint8(1); r < MaxRanks; r++ {
		p := randomPacket(5, r, MaxLanes)
		addPacket(sum, p)
		for s, v := range p.Tag {
			if v >= P {
				t.Fatalf("tag %d of rank %d is not below P", v, r)
			}
			exact[s] += uint64(v)
		}
	}
	for s := range exact {
		if uint64(sum.Tag[s]) != exact[s] {
			t.Errorf("tag %d wrapped: %d, want %d", s, sum.Tag[s], exact[s])
		}
	}
	if sum.Contributors != math.MaxUint64 || !sum.TagOK() {
		t.Error("the sum of 64 ranks does not fit its tag")
	}
	sum.Lanes[255]++
	if sum.TagOK() {
		t.Error("an altered sum of 64 ranks fits its tag")
	}
}

// The difference of two running sums: lanes wrap on the way, however often, as long as the difference does not.
func TestDifference(t *testing.T) {
	const job, chunk = 0x1234, 300
	add := func(sum *Packet, p *Packet) {
		for i := range sum.Lanes {
			sum.Lanes[i] += p.Lanes[i]
		}
		for k := range sum.Tag {
			sum.Tag[k] = (sum.Tag[k] + p.Tag[k]) % P
		}
		sum.Seq++
	}
	contribution := func(i uint32, n int) *Packet {
		p := randomPacket(uint64(i), uint8(i%3), n)
		p.Job, p.Chunk, p.Round, p.Flags = job, chunk, i/3, FlagAsync
		p.Seal()
		return p
	}
	for _, n := range sizes {
		before := &Packet{Header: Header{Seq: math.MaxUint32 - 1}} // additions wrap too
		for i := range n {
			before.Lanes[i] = math.MaxInt32 - int32(i) // as if much had come before
		}
		add(before, contribution(0, n))
		after := *before
		for i := range uint32(20) {
			add(&after, contribution(1+i, n))
		}
		fits := func(job uint16, before, after *Packet) bool {
			lanes := make([]int32, n)
			for i := range lanes {
				lanes[i] = after.Lanes[i] - before.Lanes[i]
			}
			return DifferenceOK(job, chunk, after.Seq-before.Seq, before.Tag, after.Tag, lanes)
		}
		if !fits(job, before, &after) || !fits(job, before, before) {
			t.Fatalf("%d lanes: the right difference does not fit", n)
		}
		if fits(job+1, before, &after) {
			t.Errorf("%d lanes: the difference fits another job", n)
		}
		faults := map[string]func(b, a *Packet){
			"addition dropped": func(_, a *Packet) { a.Seq++ },
			"addition hidden":  func(_, a *Packet) { a.Seq-- },
			"contribution of another chunk": func(_, a *Packet) {
				p := contribution(99, n)
				p.Chunk++
				p.Seal()
				add(a, p)
			},
			"contribution of a round": func(_, a *Packet) {
				p := contribution(99, n)
				p.Flags = 0
				p.Seal()
				add(a, p)
			},
			"tag 0":        func(_, a *Packet) { a.Tag[0] ^= 1 },
			"tag 1":        func(_, a *Packet) { a.Tag[1] ^= 1 << 20 },
			"tag 0 before": func(b, _ *Packet) { b.Tag[0] ^= 1 },
			"sums swapped": func(b, a *Packet) { *a, *b = *b, *a },
		}
		if n > 0 {
			faults["lane"] = func(_, a *Packet) { a.Lanes[n-1]++ }
			faults["lane before"] = func(b, _ *Packet) { b.Lanes[0] ^= 1 << 30 }
			faults["lanes lost"] = func(_, a *Packet) {
				p := contribution(99, n)
				clear(p.Lanes[:])
				add(a, p)
			}
			faults["difference too large"] = func(_, a *Packet) {
				for range 3 {
					p := contribution(99, n)
					p.Lanes[0] = 1 << 30
					p.Seal()
					add(a, p)
				}
			}
		}
		for name, fault := range faults {
			b, a := *before, after
			if fault(&b, &a); fits(job, &b, &a) {
				t.Errorf("%d lanes, %s: the tag fits", n, name)
			}
		}
	}
}
