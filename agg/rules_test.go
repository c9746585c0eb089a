package agg

import (
	"encoding/binary"
	"fmt"
	"hash/maphash"
	"math/bits"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"xagg/wire"
)

// TestEveryRuleKeeper visits every state of small jobs as TestEverySchedule does, but its workers are no Windows: they do
// whatever the protocol's section "Workers" lets them do, at any depth, in sync and in quorum. Whether `wait` has passed
// is free too: every packet arrives before and after it.
//
// Checked in every state: a RESULT is the sum of its mask, which has at least k ranks; no two RESULTs of a chunk differ,
// wherever they are; whoever is in a mask has sent (and so a worker, who looks for its bit in the mask, never has a
// contribution counted and kept as well); nothing is refused but delayed packets; and all workers finish when nothing
// is lost any more.

type ruleJob struct {
	ranks   int
	quorum  int // 0: sync
	cohort  uint64
	servers int
	pool    uint32
	depth   uint32
	rounds  []uint32 // chunks of each
	keep    uint32   // rounds that a server keeps; 0: all
}

// ruleChunk is a chunk of the job, whose seq is its index.
type ruleChunk struct{ round, chunk, chunks uint32 }

func (j *ruleJob) all() uint64 { return 1<<j.ranks - 1 }

const maxRuleChunks, maxRuleRanks = 12, 4

// ruleWorker is a worker: plain comparable data.
type ruleWorker struct {
	next     uint32 // all before it were sent, or had their RESULT
	sent     uint16 // by seq
	answered uint16 // by seq: a RESULT, or an ACK that covers the worker
	masks    [maxRuleChunks]uint8
	behind   bool // more rounds than the servers keep: it has given up
}

// ruleState is one state. Switch and servers are shared with other states: whoever changes one replaces it first.
type ruleState struct {
	sw      *Switch
	servers []*Server
	workers [maxRuleRanks]ruleWorker
	flying  ruleSet
}

type ruleSet [16]uint64

func (s *ruleSet) add(i int)      { s[i/64] |= 1 << (i % 64) }
func (s *ruleSet) has(i int) bool { return s[i/64]>>(i%64)&1 != 0 }

type ruleExplorer struct {
	ruleJob
	chunks   []ruleChunk
	messages []message
	numbers  map[message]int
	seen     map[[2]uint64]struct{}
	finishes map[[2]uint64]struct{}
	todo     []*ruleState
	failure  error
	key      []byte
}

// start returns an explorer and the job's first state.
func (j ruleJob) start() (*ruleExplorer, *ruleState, error) {
	e := &ruleExplorer{ruleJob: j, numbers: make(map[message]int),
		seen: make(map[[2]uint64]struct{}), finishes: make(map[[2]uint64]struct{})}
	for r, n := range j.rounds {
		for c := range n {
			e.chunks = append(e.chunks, ruleChunk{uint32(r), c, n})
		}
	}
	s := &ruleState{sw: NewSwitch(2 * int(j.pool))}
	err := s.sw.Install(SwitchPlan{Job: modelJob, Epoch: 1, Ranks: j.all(), Cohort: j.cohort, Servers: j.servers, Pool: j.pool,
		Quorum: j.quorum > 0, WaitUs: 1}, modelMembers(j.ranks), modelServerPorts(j.servers))
	if err != nil {
		return nil, nil, err
	}
	keep := j.keep
	if keep == 0 {
		keep = 1 << max(1, bits.Len(uint(len(j.rounds)-1)))
	}
	chunks := slices.Max(j.rounds)
	for range j.servers {
		server := NewServer(int(keep * chunks))
		err := server.Install(ServerPlan{Job: modelJob, Epoch: 1, Ranks: j.all(), Chunks: chunks, Rounds: keep,
			Quorum: uint32(j.quorum), WaitUs: 1})
		if err != nil {
			return nil, nil, err
		}
		s.servers = append(s.servers, server)
	}
	return e, s, nil
}

// explore visits every state and returns their number.
func (j ruleJob) explore(maxStates int) (int, error) {
	e, s, err := j.start()
	if err != nil {
		return 0, err
	}
	e.visit(s)
	for len(e.todo) > 0 && e.failure == nil {
		s := e.todo[len(e.todo)-1]
		e.todo = e.todo[:len(e.todo)-1]
		for r := range j.ranks {
			c := s.clone()
			if e.send(c, r) {
				e.visit(c)
			}
		}
		for i := range e.messages {
			if !s.flying.has(i) {
				continue
			}
			for now := range uint64(2) {
				if now == 0 || j.quorum > 0 && (e.messages[i].to < 0 || e.messages[i].to >= firstServer) {
					c := s.clone()
					e.deliver(c, now, e.messages[i])
					e.visit(c)
				}
			}
		}
		if len(e.seen) > maxStates {
			return len(e.seen), fmt.Errorf("more than %d states", maxStates)
		}
	}
	return len(e.seen), e.failure
}

func (s *ruleState) clone() *ruleState {
	c := *s
	c.servers = slices.Clone(s.servers)
	return &c
}

func (e *ruleExplorer) fail(format string, args ...any) {
	if e.failure == nil {
		e.failure = fmt.Errorf(format, args...)
	}
}

// hash returns fingerprints of what the state's future depends on: without what is in flight, and with it.
func (e *ruleExplorer) hash(s *ruleState) (parts, whole [2]uint64) {
	k := e.key[:0]
	slots := func(slots []slot) {
		for i := range slots {
			x := &slots[i]
			k = append(k, byte(x.epoch), byte(x.seq), byte(x.round), byte(x.mask))
			if x.closed {
				k = append(k, 0xff)
			}
			k = binary.LittleEndian.AppendUint32(k, x.tag[0])
		}
	}
	slots(s.sw.slots)
	for _, server := range s.servers {
		slots(server.slots)
	}
	for r := range e.ranks {
		w := &s.workers[r]
		k = append(k, byte(w.next), byte(w.sent), byte(w.sent>>8), byte(w.answered), byte(w.answered>>8))
		k = append(k, w.masks[:len(e.chunks)]...)
		if w.behind {
			k = append(k, 0xff)
		}
	}
	parts = [2]uint64{maphash.Bytes(seeds[0], k), maphash.Bytes(seeds[1], k)}
	for _, x := range s.flying {
		k = binary.LittleEndian.AppendUint64(k, x)
	}
	e.key = k
	return parts, [2]uint64{maphash.Bytes(seeds[0], k), maphash.Bytes(seeds[1], k)}
}

func (e *ruleExplorer) visit(s *ruleState) {
	parts, whole := e.hash(s)
	if _, ok := e.seen[whole]; ok || e.failure != nil {
		return
	}
	e.seen[whole] = struct{}{}
	e.todo = append(e.todo, s)
	if _, ok := e.finishes[parts]; !ok {
		e.finishes[parts] = struct{}{}
		e.finish(s.clone())
	}
}

// finish runs the job to its end without losses: every worker sends what it may and resends what is unfinished.
func (e *ruleExplorer) finish(s *ruleState) {
	for range 64 {
		if e.failure != nil || e.done(s) {
			return
		}
		s.flying = ruleSet{}
		for r := range e.ranks {
			for e.send(s, r) {
			}
			w := &s.workers[r]
			for seq := range e.chunks {
				if w.sent>>seq&1 != 0 && w.masks[seq] == 0 && !w.behind {
					e.resend(s, r, uint32(seq))
				}
			}
		}
		var delivered ruleSet
		for again := true; again; {
			again = false
			for i := 0; i < len(e.messages); i++ {
				if s.flying.has(i) && !delivered.has(i) {
					delivered.add(i)
					e.deliver(s, 1, e.messages[i]) // by now `wait` is over
					again = true
				}
			}
		}
	}
	e.fail("the job does not finish any more: %+v", s.workers)
}

func (e *ruleExplorer) done(s *ruleState) bool {
	for r := range e.ranks {
		if !s.workers[r].behind && slices.Contains(s.workers[r].masks[:len(e.chunks)], 0) {
			return false
		}
	}
	return true
}

// send lets a worker send its next chunk, or returns false.
func (e *ruleExplorer) send(s *ruleState, rank int) bool {
	w := &s.workers[rank]
	for w.next < uint32(len(e.chunks)) && w.masks[w.next] != 0 {
		w.next++ // it has the RESULT, and never sends it
	}
	if w.behind || w.next == uint32(len(e.chunks)) || w.next >= e.pool && w.answered>>(w.next-e.pool)&1 == 0 {
		return false
	}
	for seq, c := range e.chunks {
		if c.round+e.depth <= e.chunks[w.next].round && w.masks[seq] == 0 {
			return false
		}
	}
	w.sent |= 1 << w.next
	w.next++
	e.resend(s, rank, w.next-1)
	return true
}

func (e *ruleExplorer) resend(s *ruleState, rank int, seq uint32) {
	c := e.chunks[seq]
	p := grad(1, uint8(rank), c.round, seq, c.chunk, c.chunks)
	m := message{from: end(rank), to: theSwitch, head: p.Header, lane: p.Lanes[0]}
	if e.cohort&bit(uint8(rank)) == 0 {
		e.deliver(s, 0, m) // a steered GRAD passes the switch at once, which keeps no state for it
	} else {
		e.put(s, m)
	}
}

func (e *ruleExplorer) put(s *ruleState, m message) {
	i, ok := e.numbers[m]
	if !ok {
		i = len(e.messages)
		if i == 64*len(s.flying) {
			panic("too many different messages")
		}
		e.messages = append(e.messages, m)
		e.numbers[m] = i
	}
	s.flying.add(i)
}

// deliver lets a message arrive and sends what comes of it. Slots have no times: now is 0 before `wait` and 1 after it.
func (e *ruleExplorer) deliver(s *ruleState, now uint64, m message) {
	p := &wire.Packet{Header: m.head}
	p.Lanes[0] = m.lane
	switch {
	case m.to == theSwitch:
		s.sw = &Switch{slots: cloneSlots(s.sw.slots), plans: s.sw.plans}
		member := modelMember(uint8(m.from))
		out := s.sw.Handle(now, Ingress{Port: member.Port, Src: member.Src}, p)
		forgetTimes(s.sw.slots)
		e.check(s, p, out)
		switch out.Dest {
		case Nowhere:
		case ToSender:
			e.toWorkers(s, p, bit(uint8(m.from)))
		case ToAll:
			e.toWorkers(s, p, e.all())
		case ToServer:
			e.toServer(s, m.from, out.Server, p)
		case ToServerAsService:
			e.toServer(s, theService, out.Server, p)
		default:
			e.fail("the switch sends %v to %d", p.Type, out.Dest)
		}
	case m.to >= firstServer:
		i := m.to - firstServer
		s.servers[i] = &Server{slots: cloneSlots(s.servers[i].slots), plans: s.servers[i].plans}
		out := s.servers[i].Handle(now, p)
		forgetTimes(s.servers[i].slots)
		e.check(s, p, out)
		in := Ingress{Port: 65 + uint16(i), ToService: out.Dest == ToService || m.from == theService}
		switch out := s.sw.Handle(0, in, p); out.Dest {
		case ToAll:
			e.toWorkers(s, p, e.all())
		case ToCohort:
			e.toWorkers(s, p, e.cohort)
		case ToAddress:
			e.toWorkers(s, p, bit(uint8(m.from)))
		default:
			e.fail("the switch passes %v on to %d", p.Type, out.Dest)
		}
	default:
		e.take(s, int(m.to), &m.head)
	}
}

func forgetTimes(slots []slot) {
	for i := range slots {
		slots[i].firstAt, slots[i].prevAt, slots[i].lastAt = 0, 0, 0
	}
}

// take lets an answer reach a worker.
func (e *ruleExplorer) take(s *ruleState, rank int, h *wire.Header) {
	w, seq := &s.workers[rank], e.seq(h)
	if w.masks[seq] != 0 || w.behind {
		return
	}
	switch h.Type {
	case wire.TypeResult:
		if h.Contributors>>rank&1 != 0 && w.sent>>seq&1 == 0 {
			e.fail("rank %d is in the RESULT of seq %d and has not sent", rank, seq)
		}
		w.masks[seq] = uint8(h.Contributors)
		w.answered |= 1 << seq
	case wire.TypeAck:
		w.answered |= 1 << seq // only the worker's own bit is kept: see toWorkers
	case wire.TypeNack:
		if w.behind = e.quorum > 0 && e.keep != 0 && h.Reason == wire.ReasonStale; !w.behind {
			e.fail("rank %d is refused seq %d: %v", rank, seq, h.Reason)
		}
	}
	e.forget(s, rank)
}

// seq returns the seq of a packet, which a server's answer may not have.
func (e *ruleExplorer) seq(h *wire.Header) int {
	return slices.IndexFunc(e.chunks, func(c ruleChunk) bool { return c.round == h.Round && c.chunk == h.Chunk })
}

// check checks an aggregator's answer.
func (e *ruleExplorer) check(s *ruleState, p *wire.Packet, out Outcome) {
	if out.Reason.Fault() && out.Reason != wire.ReasonStale {
		e.fail("%v: %+v", out.Reason, p.Header)
	}
	if p.Type != wire.TypeResult {
		return
	}
	var sum int32
	for m := p.Contributors; m != 0; m &= m - 1 {
		sum += value(uint8(bits.TrailingZeros64(m)), p.Round, p.Chunk)
	}
	enough := p.Contributors == e.all() || e.quorum > 0 && bits.OnesCount64(p.Contributors) >= e.quorum
	if p.Lanes[0] != sum || !p.TagOK() || !enough {
		e.fail("RESULT of round %d chunk %d: sum %d, want %d, %+v", p.Round, p.Chunk, p.Lanes[0], sum, p.Header)
	}
	seq := e.seq(&p.Header)
	for r := range e.ranks {
		if m := s.workers[r].masks[seq]; m != 0 && m != uint8(p.Contributors) {
			e.fail("round %d chunk %d: a RESULT of %#x after one of %#x", p.Round, p.Chunk, p.Contributors, m)
		}
	}
	for i, m := range e.messages {
		if s.flying.has(i) && m.head.Type == wire.TypeResult && m.head.Round == p.Round && m.head.Chunk == p.Chunk &&
			m.head.Contributors != p.Contributors {
			e.fail("round %d chunk %d: RESULTs of %#x and of %#x", p.Round, p.Chunk, p.Contributors, m.head.Contributors)
		}
	}
}

func (e *ruleExplorer) toServer(s *ruleState, from end, server int, p *wire.Packet) {
	if p.Type == wire.TypePartial {
		p.Rank = uint8(bits.TrailingZeros64(p.Contributors)) // tells who was last; a rule needs only that it is a rank
	}
	e.put(s, message{from, firstServer + end(server), p.Header, p.Lanes[0]})
}

func (e *ruleExplorer) toWorkers(s *ruleState, p *wire.Packet, ranks uint64) {
	for ; ranks != 0; ranks &= ranks - 1 {
		rank := end(bits.TrailingZeros64(ranks))
		// A worker's rules look at these fields only.
		head := wire.Header{Type: p.Type, Round: p.Round, Chunk: p.Chunk, Contributors: p.Contributors, Reason: p.Reason}
		if p.Type != wire.TypeResult {
			head.Contributors &= bit(uint8(rank))
		}
		if p.Type == wire.TypeWait || head.Contributors == 0 && p.Type != wire.TypeResult {
			continue // tells a worker nothing that its rules look at
		}
		e.put(s, message{from: theService, to: rank, head: head})
		e.forget(s, int(rank))
	}
}

// forget takes out of flight what a worker ignores for good.
func (e *ruleExplorer) forget(s *ruleState, rank int) {
	w := &s.workers[rank]
	for i := range e.messages {
		if m := &e.messages[i]; s.flying.has(i) && m.to == end(rank) {
			seq := e.seq(&m.head)
			if w.behind || w.masks[seq] != 0 || m.head.Type == wire.TypeAck && w.answered>>seq&1 != 0 {
				s.flying[i/64] &^= 1 << (i % 64)
			}
		}
	}
}

func TestEveryRuleKeeper(t *testing.T) {
	tests := []struct {
		name string
		job  ruleJob
		long bool // in time
	}{
		{"sync/switch/depth 2", ruleJob{ranks: 2, cohort: 3, pool: 1, depth: 2, rounds: []uint32{1, 1, 1, 1}}, false},
		{"sync/hybrid/depth 2", ruleJob{ranks: 2, cohort: 1, servers: 1, pool: 1, depth: 2, rounds: []uint32{1, 1, 1, 1}, keep: 4}, false},
		{"sync/server/depth 2", ruleJob{ranks: 2, servers: 1, pool: 2, depth: 2, rounds: []uint32{1, 1, 1, 1}, keep: 4}, false},

		{"1 of 2/server/2 chunks", ruleJob{ranks: 2, quorum: 1, servers: 2, pool: 1, depth: 1, rounds: []uint32{2}}, false},
		{"1 of 2/server/rounds fall behind", ruleJob{ranks: 2, quorum: 1, servers: 1, pool: 1, depth: 1, rounds: []uint32{1, 1, 1}, keep: 2}, false},
		{"1 of 2/partial/2 chunks", ruleJob{ranks: 2, quorum: 1, cohort: 3, servers: 1, pool: 1, depth: 1, rounds: []uint32{2}}, false},
		{"1 of 2/hybrid/3 chunks", ruleJob{ranks: 2, quorum: 1, cohort: 1, servers: 1, pool: 1, depth: 1, rounds: []uint32{3}}, true},
		{"2 of 2/partial/3 chunks", ruleJob{ranks: 2, quorum: 2, cohort: 3, servers: 1, pool: 1, depth: 1, rounds: []uint32{3}}, true},
		{"2 of 3/partial/1 chunk", ruleJob{ranks: 3, quorum: 2, cohort: 7, servers: 1, pool: 1, depth: 1, rounds: []uint32{1}}, false},
		{"2 of 3/hybrid/1 chunk", ruleJob{ranks: 3, quorum: 2, cohort: 3, servers: 1, pool: 1, depth: 1, rounds: []uint32{1}}, false},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			if test.long && testing.Short() {
				t.Skip("takes seconds")
			}
			states, err := test.job.explore(600_000)
			t.Logf("%d states, %d ranks", states, test.job.ranks)
			if err != nil {
				t.Error(err)
			}
		})
	}
}

// TestManySchedules takes random ways through jobs that are too large to visit all of their states.
func TestManySchedules(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		j := ruleJob{
			ranks:   rapid.IntRange(2, maxRuleRanks).Draw(t, "ranks"),
			servers: rapid.IntRange(1, 2).Draw(t, "servers"),
			pool:    uint32(rapid.SampledFrom([]int{1, 2}).Draw(t, "pool")),
			depth:   uint32(rapid.IntRange(1, 2).Draw(t, "depth")),
			keep:    4,
		}
		j.quorum = rapid.IntRange(0, j.ranks).Draw(t, "quorum")
		j.cohort = rapid.Uint64Range(0, j.all()).Draw(t, "cohort")
		for left := uint32(maxRuleChunks); left > 0; {
			n := min(left, rapid.Uint32Range(1, 6).Draw(t, "chunks"))
			j.rounds = append(j.rounds, n)
			left -= n
		}
		e, s, err := j.start()
		if err != nil {
			t.Fatal(err)
		}
		for range rapid.SampledFrom([]int{400, 200, 50}).Draw(t, "steps") {
			// The first ranks are the quicker ones.
			if r := rapid.IntRange(0, 3*j.ranks).Draw(t, "rank"); r < j.ranks {
				r = min(r, rapid.IntRange(0, j.ranks-1).Draw(t, "other rank"))
				w, seq := &s.workers[r], rapid.Uint32Range(0, maxRuleChunks-1).Draw(t, "seq")
				switch {
				case seq%2 == 0 && e.send(s, r):
				case w.sent>>seq&1 != 0 && w.masks[seq] == 0 && !w.behind:
					e.resend(s, r, seq)
				default:
					e.send(s, r)
				}
				continue
			}
			// What was put in flight last arrives first, as a rule: the rest is resent or delayed.
			var flying []int
			for i := range e.messages {
				if s.flying.has(i) {
					flying = append(flying, i)
				}
			}
			if len(flying) == 0 {
				continue
			}
			i := flying[len(flying)-1-rapid.IntRange(0, len(flying)-1).Draw(t, "message")]
			if rapid.IntRange(0, 3).Draw(t, "keep") != 0 {
				s.flying[i/64] &^= 1 << (i % 64)
			}
			e.deliver(s, rapid.Uint64Range(0, 1).Draw(t, "now"), e.messages[i])
			if e.failure != nil {
				t.Fatal(e.failure)
			}
		}
		if e.finish(s); e.failure != nil {
			t.Fatal(e.failure)
		}
	})
}
