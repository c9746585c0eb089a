package check

import (
	"encoding/binary"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"xagg/wire"
	"xagg/wire/capture"
	"xagg/wire/internal/capturetest"
)

// contribution is a rank's GRAD.
func (j *job) contribution(rank uint8, round, number uint32, elems int, flags wire.Flags) wire.Packet {
	p := wire.Packet{Header: wire.Header{
		Type: wire.TypeGrad, Flags: flags, Job: j.id, Epoch: j.epoch, Rank: rank, Blocks: wire.BlocksFor(elems), Seq: j.seq,
		Round: round, Chunk: number, Elems: uint16(elems), Exponent: 12, Amax: 100 + rank, Contributors: 1 << rank,
	}}
	for i := range p.Lanes[:elems] {
		p.Lanes[i] = int32(j.rng.Uint32()) >> 6
	}
	p.Seal()
	return p
}

// quorumScript is a job of four ranks of which three are enough; the switch sums the first three and a server closes.
// Rank 1 is late, in chunk 1 of round 0 so late that its GRAD comes after the RESULT. Then the switch forgets chunk 1 of
// round 1 after all that, and the round is summed again under another epoch, where rank 0 is the late one.
func quorumScript() []item {
	j := newJob(7, 4, 0b0111)
	toAll := func(p wire.Packet) {
		for r := range uint8(4) {
			j.add(service, workerAddr(r), p)
		}
	}
	chunk := func(round, number uint32, grads [4]wire.Packet, late uint8) {
		server := serverAddr(int(number) % 2)
		var partial, result wire.Packet
		for r := range uint8(3) {
			if r != late {
				j.add(workerAddr(r), service, grads[r])
				accumulate(&partial, &grads[r], wire.TypePartial)
			}
		}
		wait := short(wire.TypeWait, grads[2])
		wait.Contributors = partial.Contributors
		j.add(workerAddr(2), service, resent(grads[2]))
		j.add(service, workerAddr(2), wait)
		j.add(workerAddr(2), service, resent(grads[2])) // flushes
		j.add(service, server, partial)
		result = partial
		result.Type = wire.TypeResult
		ack := short(wire.TypeAck, partial)
		j.add(server, service, ack)
		j.add(workerAddr(3), service, grads[3])
		j.add(workerAddr(3), server, forwarded(grads[3]))
		accumulate(&result, &grads[3], wire.TypeResult)
		result.Flags |= wire.FlagServer
		if number == 0 {
			result.NextEpoch = 2
		}
		j.add(server, service, result)
		toAll(result)
		j.add(workerAddr(late), service, grads[late])
		j.add(workerAddr(late), server, forwarded(grads[late]))
		result.Flags |= wire.FlagLate
		j.add(server, workerAddr(late), result)
		j.add(service, workerAddr(late), result)
		j.seq++
	}
	grads := func(round, number uint32, elems int) (g [4]wire.Packet) {
		for r := range g {
			g[r] = j.contribution(uint8(r), round, number, elems, 0)
		}
		return g
	}
	for number := range uint32(3) {
		chunk(0, number, grads(0, number, 256), 1)
	}
	chunk(1, 0, grads(1, 0, 65), 1)
	g := grads(1, 1, 256)
	chunk(1, 1, g, 1)
	j.epoch, j.seq = 2, 100
	for r := range g {
		g[r].Epoch, g[r].Seq = j.epoch, j.seq
	}
	chunk(1, 1, g, 0)
	return j.items
}

func TestQuorum(t *testing.T) {
	items := quorumScript()
	everyForm(t, items, func(t *testing.T, file []byte) {
		r := check(t, file)
		if r.Verdict != OK || r.Results != 6 || r.Partials != 6 || r.Chunks != 5 || r.Resummed != 1 || r.Rounds != 2 || r.Unfinished != 0 {
			t.Error(text(t, r))
		}
		if s := text(t, r); !strings.Contains(s, "1 chunk summed under more than one epoch\n") {
			t.Error(s)
		}
	})
	rng := rand.New(rand.NewPCG(1, 1))
	for range 20 {
		rng.Shuffle(len(items), func(i, j int) { items[i], items[j] = items[j], items[i] })
		if r := check(t, pcap(items)); r.Verdict != OK || r.Results != 6 {
			t.Fatal(text(t, r))
		}
	}
}

// last returns the index of the last packet of a type with all of those flags in chunk (1, 1) of an epoch.
func last(items []item, typ wire.Type, epoch uint16, flags wire.Flags) int {
	for i := range slices.Backward(items) {
		p := &items[i].p
		if p.Type == typ && p.Epoch == epoch && p.Round == 1 && p.Chunk == 1 && p.Flags&flags == flags {
			return i
		}
	}
	panic("the script has no such packet")
}

func TestQuorumViolations(t *testing.T) {
	// rankOf returns the GRAD of a rank under an epoch.
	rankOf := func(items []item, epoch uint16, rank uint8) *wire.Packet {
		for i := range items {
			if p := &items[i].p; p.Type == wire.TypeGrad && p.Epoch == epoch && p.Round == 1 && p.Chunk == 1 && p.Rank == rank {
				return p
			}
		}
		panic("no such rank")
	}
	lateResult := func(epoch uint16, edit func(items []item, p *wire.Packet)) func([]item) ([]item, int) {
		return func(items []item) ([]item, int) {
			i := last(items, wire.TypeResult, epoch, wire.FlagLate)
			edit(items, &items[i].p)
			return items, i
		}
	}
	for name, c := range map[string]struct {
		edit   func([]item) ([]item, int)
		reason Reason
		detail string
	}{
		"LATE of a switch": {lateResult(1, func(_ []item, p *wire.Packet) { p.Flags &^= wire.FlagServer }), "field", "LATE without SERVER"},
		"LATE PARTIAL": {func(items []item) ([]item, int) {
			i := last(items, wire.TypePartial, 1, 0)
			items[i].p.Flags |= wire.FlagLate
			return items, i
		}, "field", "LATE without SERVER"},
		"one RESULT of a switch": {lateResult(1, func(_ []item, p *wire.Packet) { p.Flags &^= wire.FlagServer | wire.FlagLate }),
			"conflict", "SERVER was true and is false"},
		"who is late gets another mask": {lateResult(1, func(items []item, p *wire.Packet) {
			accumulate(p, rankOf(items, 1, 1), wire.TypeResult)
			p.Flags |= wire.FlagServer | wire.FlagLate
		}), "conflict", "the mask was 0xd and is 0xf"},
		"who is late is added": {lateResult(1, func(items []item, p *wire.Packet) {
			mask, rank := p.Contributors, p.Rank
			accumulate(p, rankOf(items, 1, 1), wire.TypeResult)
			p.Contributors, p.Rank = mask, rank
		}), "mask", "rank 1 is summed but not in the mask"},
		"RESULT of the mask under the other epoch": {lateResult(2, func(items []item, p *wire.Packet) {
			old := items[last(items, wire.TypeResult, 1, wire.FlagLate)].p
			p.Contributors, p.Lanes, p.Tag = old.Contributors, old.Lanes, old.Tag
		}), "conflict", "the mask was 0xe and is 0xd"},
		"a rank in the flushed PARTIAL and in another": {func(items []item) ([]item, int) {
			p := items[last(items, wire.TypePartial, 1, 0)]
			accumulate(&p.p, rankOf(items, 1, 1), wire.TypePartial)
			return append(items, p), len(items)
		}, "twice", "ranks 0,2 is in another PARTIAL too"},
		"another contribution under the next epoch": {func(items []item) ([]item, int) {
			first := -1
			for i := range items {
				if p := &items[i].p; p.Type == wire.TypeGrad && p.Epoch == 2 && p.Rank == 3 {
					p.Lanes[8]++
					if p.Seal(); first < 0 {
						first = i
					}
				}
			}
			return items, first
		}, "conflict", "rank 3 has contributed something else under epoch 1: lane 8 is +1 off"},
		"another shape under the next epoch": {func(items []item) ([]item, int) {
			first := -1
			for i := range items {
				if p := &items[i].p; p.Epoch == 2 {
					if p.Exponent++; first < 0 {
						first = i
					}
				}
			}
			return items, first
		}, "shape", "exponent 13, seq 100, but under epoch 1 rank 1 said 256 lanes, exponent 12, seq 4"},
	} {
		t.Run(name, func(t *testing.T) {
			items, blamed := c.edit(quorumScript())
			r := check(t, pcap(items))
			if r.Verdict != Violated {
				t.Fatal(text(t, r))
			}
			if v := r.Violations[0]; v.Number != blamed+1 || v.Reason != c.reason || !strings.Contains(v.Detail, c.detail) {
				t.Errorf("packet %d, want %d: %s, want %s: %s, want %q", v.Number, blamed+1, v.Reason, c.reason, v.Detail, c.detail)
			}
		})
	}
}

// A rank that came back without its memory contributes something else to a chunk that is summed again. It is another
// process, which shows in its port.
func TestRankCameBack(t *testing.T) {
	items := quorumScript()
	for i := range items {
		it := &items[i]
		if p := &it.p; p.Type == wire.TypeGrad && p.Epoch == 2 && p.Rank == 0 { // in no mask: it is late
			it.src.Port = 50000
			p.Lanes[0] ^= 1
			p.Seal()
		}
	}
	if r := check(t, pcap(items)); r.Verdict != OK {
		t.Error(text(t, r))
	}
}

// asyncScript is a job of three ranks with two running sums after a scout.
func asyncScript() []item {
	j := newJob(9, 3, 0)
	j.chunk(0, 0, 0, true)
	j.epoch = 3
	sums := [2]wire.Packet{}
	clocks := [2][3]uint32{}
	answer := func(g *wire.Packet) {
		number := g.Chunk
		p := sums[number]
		p.Type, p.Round, p.Flags, p.Contributors = wire.TypeResult, g.Round, p.Flags|wire.FlagServer|wire.FlagAsync, 0
		for r, clock := range clocks[number] {
			if clock > g.Round {
				p.Contributors |= 1 << r
			}
		}
		if p.SpreadUs = 0; number == 0 {
			p.NextEpoch = 4
		}
		server := serverAddr(int(number) % 2)
		j.add(server, workerAddr(g.Rank), p)
		j.add(service, workerAddr(g.Rank), p)
	}
	ask := func(g wire.Packet) {
		j.add(workerAddr(g.Rank), service, g)
		j.add(workerAddr(g.Rank), serverAddr(int(g.Chunk)%2), forwarded(g))
	}
	var previous wire.Packet
	for i, rank := range []uint8{0, 1, 2, 0, 2, 2, 0, 1, 1, 0, 2, 1} {
		for number, elems := range []int{256, 65} {
			clock := &clocks[number][rank]
			j.seq = uint32(i)
			g := j.contribution(rank, *clock, uint32(number), elems, wire.FlagAsync)
			if i == 4 {
				g.Flags |= wire.FlagSaturated
			}
			ask(g)
			*clock++
			sum := &sums[number]
			accumulate(sum, &g, wire.TypeResult)
			for t := range sum.Tag {
				sum.Tag[t] %= wire.P
			}
			if sum.Seq++; i == 0 { // accumulate begins with the header of the contribution
				sum.Seq = 1
			}
			answer(&g)
			if i == 6 && number == 0 {
				previous = g
				wait := short(wire.TypeWait, g)
				wait.Contributors, wait.Round = 1<<rank, *clock
				j.add(serverAddr(0), workerAddr(rank), wait)
			}
		}
		if i == 8 { // a duplicate is told the sum of now, what is older nothing
			ask(resent(previous))
			answer(&previous)
		}
	}
	return j.items
}

func TestAsync(t *testing.T) {
	items := asyncScript()
	everyForm(t, items, func(t *testing.T, file []byte) {
		r := check(t, file)
		if r.Verdict != OK || r.RunningSums != 2 || r.Additions != 24 || r.Results != 1 || r.Chunks != 1 {
			t.Error(text(t, r))
		}
		if s := text(t, r); !strings.Contains(s, "2 running sums; checked: 24 additions\n") {
			t.Error(s)
		}
	})
	rng := rand.New(rand.NewPCG(1, 1))
	for range 20 {
		rng.Shuffle(len(items), func(i, j int) { items[i], items[j] = items[j], items[i] })
		if r := check(t, pcap(items)); r.Verdict != OK || r.Additions != 24 {
			t.Fatal(text(t, r))
		}
	}
}

// asyncResults returns the indices of the two copies of the RESULT of so many additions to running sum 0.
func asyncResults(items []item, additions uint32) []int {
	var found []int
	for i := range items {
		p := &items[i].p
		if p.Type == wire.TypeResult && p.Flags&wire.FlagAsync != 0 && p.Chunk == 0 && p.Seq == additions {
			found = append(found, i)
		}
	}
	return found
}

func asyncGrads(items []item, rank uint8, round uint32) []int {
	var found []int
	for i := range items {
		p := &items[i].p
		if p.Type == wire.TypeGrad && p.Flags&wire.FlagAsync != 0 && p.Chunk == 0 && p.Rank == rank && p.Round == round {
			found = append(found, i)
		}
	}
	return found
}

func TestAsyncViolations(t *testing.T) {
	// from changes the sum from so many additions on, as an aggregator would that made a mistake there.
	from := func(additions uint32, edit func(items []item, p *wire.Packet)) func([]item) ([]item, int) {
		return func(items []item) ([]item, int) {
			first := asyncResults(items, additions)[0]
			for n := additions; n <= 12; n++ {
				for _, i := range asyncResults(items, n) {
					edit(items, &items[i].p)
				}
			}
			return items, first
		}
	}
	one := func(additions uint32, edit func(p *wire.Packet)) func([]item) ([]item, int) {
		return func(items []item) ([]item, int) {
			i := asyncResults(items, additions)
			edit(&items[i[len(i)-1]].p)
			return items, i[len(i)-1]
		}
	}
	plus := func(p *wire.Packet, g wire.Packet, sign int32) {
		for i, v := range g.Lanes {
			p.Lanes[i] += sign * v
		}
		for t, v := range g.Tag {
			if sign < 0 {
				v = wire.P - v
			}
			p.Tag[t] = (p.Tag[t] + v) % wire.P
		}
	}
	grad := func(items []item, rank uint8, round uint32) wire.Packet {
		return items[asyncGrads(items, rank, round)[0]].p
	}
	// The seventh addition is round 2 of rank 0.
	for name, c := range map[string]struct {
		edit   func([]item) ([]item, int)
		reason Reason
		detail string
	}{
		"GRAD's lane": {func(items []item) ([]item, int) {
			i := asyncGrads(items, 1, 1)[0]
			items[i].p.Lanes[3]++
			return items, i
		}, "tag", "does not fit"},
		"GRAD of a round": {func(items []item) ([]item, int) {
			i := asyncGrads(items, 1, 1)[0]
			p := items[i].p
			p.Flags &^= wire.FlagAsync
			p.Seal()
			items[i].p.Tag = p.Tag
			return items, i
		}, "tag", "does not fit"},
		"other GRAD": {func(items []item) ([]item, int) {
			i := asyncGrads(items, 1, 1)[1]
			items[i].p.Lanes[3]++
			items[i].p.Seal()
			return items, i
		}, "conflict", "something else as its round 1 before: lane 3 is +1 off"},
		"other shape":        {one(7, func(p *wire.Packet) { p.Exponent++ }), "shape", "running sum says 256 lanes, exponent 12, seq 0, ASYNC"},
		"PARTIAL":            {one(7, func(p *wire.Packet) { p.Type, p.Flags = wire.TypePartial, wire.FlagAsync }), "field", ""},
		"not of a server":    {one(7, func(p *wire.Packet) { p.Flags &^= wire.FlagServer }), "field", "want SERVER"},
		"late":               {one(7, func(p *wire.Packet) { p.Flags |= wire.FlagLate }), "field", "nobody is late"},
		"times":              {one(7, func(p *wire.Packet) { p.BlockedUs = 1 }), "field", "blocked time 1 us"},
		"tag too large":      {one(7, func(p *wire.Packet) { p.Tag[0] += wire.P }), "tag", "not below"},
		"no additions":       {one(1, func(p *wire.Packet) { p.Seq = 0 }), "sum", "no additions"},
		"a copy's lane":      {one(7, func(p *wire.Packet) { p.Lanes[3]++ }), "conflict", "7 additions says something else: lane 3 is +1 off"},
		"a copy's tag":       {one(7, func(p *wire.Packet) { p.Tag[0] ^= 1 }), "conflict", "tag 0"},
		"a copy's last rank": {one(7, func(p *wire.Packet) { p.Rank = 2 }), "conflict", "names rank 0 as the last contributor, this one rank 2"},
		"a copy's mask":      {one(7, func(p *wire.Packet) { p.Contributors ^= 2 }), "mask", "the mask 0x7, but the ranks that have come to round 2 are 0x5"},
		"a copy's additions": {one(7, func(p *wire.Packet) { p.Seq = 6 }), "conflict", "6 additions"},
		"mask":               {from(7, func(_ []item, p *wire.Packet) { p.Contributors = 7 }), "mask", "have come to round 2 are"},
		"mask empty":         {one(7, func(p *wire.Packet) { p.Contributors = 0 }), "mask", ""},
		"lane":               {from(7, func(_ []item, p *wire.Packet) { p.Lanes[3]++ }), "sum", "round 2 of rank 0: lane 3 is +1 off"},
		"lane, top bit":      {from(7, func(_ []item, p *wire.Packet) { p.Lanes[3] ^= -1 << 31 }), "sum", "lane 3 is"},
		"lane by p":          {from(7, func(_ []item, p *wire.Packet) { p.Lanes[255] += wire.P }), "sum", "lane 255 is +67108859 off"},
		"tag":                {from(7, func(_ []item, p *wire.Packet) { p.Tag[1] = (p.Tag[1] + 1) % wire.P }), "tag", "tag 1"},
		"amax":               {from(7, func(_ []item, p *wire.Packet) { p.Amax = 120 }), "sum", "amax is 120 instead of 102"},
		"SATURATED":          {from(7, func(_ []item, p *wire.Packet) { p.Flags &^= wire.FlagSaturated }), "sum", "SATURATED is false instead of true"},
		"added twice":        {from(7, func(items []item, p *wire.Packet) { plus(p, grad(items, 0, 2), 1) }), "twice", "round 2 of rank 0 is added twice"},
		"not added":          {from(7, func(items []item, p *wire.Packet) { plus(p, grad(items, 0, 2), -1) }), "mask", "its round 2 is not added"},
		"added again":        {from(7, func(items []item, p *wire.Packet) { plus(p, grad(items, 0, 2), -1); plus(p, grad(items, 0, 1), 1) }), "twice", "round 1 of rank 0 is added instead of round 2"},
		"added before its time": {func(items []item) ([]item, int) {
			next := grad(items, 1, 1)
			items, first := from(7, func(items []item, p *wire.Packet) { plus(p, grad(items, 0, 2), -1); plus(p, next, 1) })(items)
			return insert(items, 0, items[asyncGrads(items, 1, 1)[0]]), first + 1
		}, "clock", "round 1 of rank 1 is added instead of round 2 of rank 0"},
	} {
		t.Run(name, func(t *testing.T) {
			items, blamed := c.edit(asyncScript())
			frame := items[blamed].frame()
			r := check(t, pcap(items))
			if r.Verdict != Violated {
				t.Fatal(text(t, r))
			}
			v := r.Violations[0]
			if v.Number != blamed+1 || v.Reason != c.reason || !strings.Contains(v.Detail, c.detail) {
				t.Errorf("packet %d, want %d: %s, want %s: %s, want %q", v.Number, blamed+1, v.Reason, c.reason, v.Detail, c.detail)
			}
			if !slices.Equal(v.Frame, frame) {
				t.Errorf("frame\n% x\nwant\n% x", v.Frame, frame)
			}
		})
	}
}

func TestAsyncIncomplete(t *testing.T) {
	without := func(items []item, gone ...int) (rest []item) {
		for i := range items {
			if !slices.Contains(gone, i) {
				rest = append(rest, items[i])
			}
		}
		return rest
	}
	for name, c := range map[string]struct {
		edit      func([]item) []item
		want      []Incomplete
		additions int
	}{
		"a GRAD": {func(items []item) []item { return without(items, asyncGrads(items, 2, 1)...) },
			[]Incomplete{{Job: 9, Epoch: 3, Round: 1, Ranks: []int{2}}}, 23},
		"two states": {func(items []item) []item {
			return without(items, append(asyncResults(items, 5), asyncResults(items, 6)...)...)
		}, []Incomplete{{Job: 9, Epoch: 3, Ranks: []int{}, Additions: 3}}, 21},
		"the beginning": {func(items []item) []item { return items[asyncResults(items, 4)[1]+1:] },
			[]Incomplete{{Job: 9, Epoch: 3, Chunk: 1, Ranks: []int{}, Additions: 4}, {Job: 9, Epoch: 3, Ranks: []int{}, Additions: 5}}, 15},
	} {
		t.Run(name, func(t *testing.T) {
			items := c.edit(asyncScript())
			r := check(t, pcap(items))
			equal := slices.EqualFunc(r.Incomplete, c.want, func(a, b Incomplete) bool {
				return a.Job == b.Job && a.Epoch == b.Epoch && a.Round == b.Round && a.Chunk == b.Chunk && slices.Equal(a.Ranks, b.Ranks) && a.Additions == b.Additions
			})
			if r.Verdict != Lacking || !equal || r.Additions != c.additions {
				t.Errorf("%d additions, %+v\n%s", r.Additions, r.Incomplete, text(t, r))
			}
			// What comes after the gap is checked all the same.
			for _, i := range asyncResults(items, 10) {
				items[i].p.Lanes[77] += 3
			}
			if r := check(t, pcap(items)); r.Verdict == OK || name == "a GRAD" && r.Verdict != Violated {
				t.Error(text(t, r))
			}
		})
	}
}

// A long running sum takes no more memory than a short one.
func TestAsyncMemoryIsBounded(t *testing.T) {
	j := newJob(1, 2, 0)
	j.epoch = 1
	c := New(Options{})
	number := 0
	packet := func(p wire.Packet, src, dst wire.Addr) {
		number++
		f := wire.AppendFrame(nil, src, dst, &p, p.Type == wire.TypeGrad)
		c.Packet(Ref{0, number}, &capture.Packet{Link: capture.LinkEthernet, Len: len(f), Data: f})
	}
	var sum wire.Packet
	for round := range uint32(2000) {
		for rank := range uint8(2) {
			g := j.contribution(rank, round, 0, 3, wire.FlagAsync)
			g.Lanes[0] = 1 << 24 // so that the sum wraps
			g.Seal()
			packet(g, workerAddr(rank), service)
			n := sum.Seq
			accumulate(&sum, &g, wire.TypeResult)
			sum.Seq = n + 1
			for t := range sum.Tag {
				sum.Tag[t] %= wire.P
			}
			p := sum
			p.Round, p.SpreadUs, p.Contributors = round, 0, 1<<(rank+1)-1
			p.Flags |= wire.FlagServer | wire.FlagAsync
			packet(p, service, workerAddr(rank))
		}
	}
	for _, r := range c.sums {
		if len(r.grads) > 200 || len(r.known) > 200 || len(r.pending) > 0 {
			t.Errorf("%d contributions, %d states and %d waiting ones are held", len(r.grads), len(r.known), len(r.pending))
		}
	}
	if r := c.Finish(); r.Verdict != OK || r.Additions != 4000 || c.held != 0 {
		t.Errorf("%d bytes held, %s", c.held, text(t, r))
	}
}

// States that wait for others are given up when there are too many, and what comes after them is checked.
func TestAsyncStatesWait(t *testing.T) {
	items := asyncScript()
	gone := asyncResults(items, 1)
	items = slices.Delete(items, gone[0], gone[1]+1)
	ps := packets(items)
	file := capturetest.Pcap(binary.LittleEndian, false, capture.LinkEthernet, ps)
	for _, held := range []int{1, 1 << 20} {
		r := checkWith(t, Options{Held: held}, file)
		if r.Verdict != Lacking || r.IncompleteCount != 1 || r.Incomplete[0].Additions != 2 || r.Additions != 22 {
			t.Errorf("%d bytes: %s", held, text(t, r))
		}
	}
}
