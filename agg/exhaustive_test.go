package agg

import (
	"encoding/binary"
	"fmt"
	"hash/maphash"
	"math/bits"
	"slices"
	"testing"

	"xagg/wire"
)

// The exhaustive tests visit every state that a small job can get into over a network that loses, duplicates, delays and
// reorders packets as it likes. Packets in flight are a set that only grows: whatever was sent once can arrive at any
// later time, any number of times, or never. So no number of copies, losses or steps is bounded. A worker's resend
// needs no step of its own: it is another arrival of the same GRAD (RESEND is no part of any rule).
//
// What is bounded or left out: the job (its ranks, pool and rounds, given with each case; the switch has 2 x pool slots), one
// lane a chunk, no change of plan, and time, which stands still: no timer of a Window runs out. A server's answer and a
// steered GRAD pass the switch at once, which keeps no state for them; an answer's copies then go their own ways.
// Packets that no rule tells apart count as one, and so do states that differ in what nothing depends on: see hash.
//
// Checked in every state: each RESULT that anybody sends is exact; nothing is refused but a stale GRAD; every send keeps
// the window rule as the test itself keeps account of it; and from the state on, all workers finish when nothing is
// lost any more, with the packets that they send from then on only.

type smallJob struct {
	ranks   int
	cohort  uint64
	servers int
	pool    uint32   // the switch has twice as many slots
	depth   int      // 0 = 1
	rounds  []uint32 // chunks of each
}

// end is a place that packets are sent to: a rank, a server or the switch.
type end int8

const (
	theSwitch   end = -1
	theService  end = -2 // as a sender: the switch in its own name
	firstServer end = 64
)

// message is a packet in flight. Packets that no rule tells apart are one message.
type message struct {
	from, to end
	head     wire.Header
	lane     int32
}

type messageSet [4]uint64

func (s *messageSet) add(i int)      { s[i/64] |= 1 << (i % 64) }
func (s *messageSet) has(i int) bool { return s[i/64]>>(i%64)&1 != 0 }

// explorer visits a job's states.
type explorer struct {
	job      smallJob
	messages []message // every message that was ever sent, by number
	numbers  map[message]int
	seen     map[[2]uint64]struct{} // states
	finishes map[[2]uint64]struct{} // states without what is in flight that can finish
	todo     []*smallState
	failure  error
	key      []byte
}

// smallState is one state. Its parts are shared with other states: whoever changes one replaces it first.
type smallState struct {
	sw      *Switch
	servers []*Server
	workers []*smallWorker
	sent    messageSet
}

type smallWorker struct {
	*Window
	begun    int    // rounds
	answered uint64 // seqs answered by a RESULT or a covering ACK
}

func (j *smallJob) start() *smallState {
	s := &smallState{sw: NewSwitch(2 * int(j.pool))}
	all := uint64(1)<<j.ranks - 1
	err := s.sw.Install(SwitchPlan{Job: modelJob, Epoch: 1, Ranks: all, Cohort: j.cohort, Servers: j.servers,
		Pool: j.pool}, modelMembers(j.ranks), modelServerPorts(j.servers))
	if err != nil {
		panic(err)
	}
	chunks := slices.Max(j.rounds)
	for range j.servers {
		rounds := 2 * uint32(max(1, j.depth))
		server := NewServer(int(rounds * chunks))
		if err := server.Install(ServerPlan{Job: modelJob, Epoch: 1, Ranks: all, Chunks: chunks, Rounds: rounds}); err != nil {
			panic(err)
		}
		s.servers = append(s.servers, server)
	}
	for r := range j.ranks {
		cfg := WindowConfig{Job: modelJob, Epoch: 1, Rank: uint8(r), Ranks: all, Pool: j.pool, Depth: j.depth}
		s.workers = append(s.workers, &smallWorker{Window: NewWindow(cfg)})
	}
	return s
}

// clone returns a state that shares all parts with s.
func (s *smallState) clone() *smallState {
	return &smallState{s.sw, slices.Clone(s.servers), slices.Clone(s.workers), s.sent}
}

func (s *smallState) ownSwitch() *Switch {
	s.sw = &Switch{slots: cloneSlots(s.sw.slots), plans: s.sw.plans}
	return s.sw
}

func (s *smallState) ownServer(i int) *Server {
	s.servers[i] = &Server{slots: cloneSlots(s.servers[i].slots), plans: s.servers[i].plans}
	return s.servers[i]
}

func (s *smallState) ownWorker(rank int) *smallWorker {
	old := s.workers[rank]
	w := *old.Window
	w.chunks, w.rounds = slices.Clone(w.chunks), slices.Clone(w.rounds)
	w.ready.items = slices.Clone(w.ready.items)
	w.timers, w.polls, w.probes = schedule{}, schedule{}, schedule{} // nothing is ever due
	s.workers[rank] = &smallWorker{&w, old.begun, old.answered}
	return s.workers[rank]
}

// hash returns fingerprints of what the state's future depends on: without what is in flight, and with it.
func (e *explorer) hash(s *smallState) (parts, whole [2]uint64) {
	k := e.key[:0]
	slots := func(slots []slot) {
		for i := range slots {
			x := &slots[i]
			k = append(k, byte(x.epoch), byte(x.seq), byte(x.round), byte(x.mask), byte(x.shape), x.amax)
			k = binary.LittleEndian.AppendUint32(k, x.tag[0])
			if len(x.lanes) > 0 {
				k = binary.LittleEndian.AppendUint32(k, uint32(x.lanes[0]))
			}
		}
	}
	slots(s.sw.slots)
	for _, server := range s.servers {
		slots(server.slots)
	}
	for _, w := range s.workers {
		k = append(k, byte(w.begun), byte(w.answered))
		for i := range w.chunks {
			b := byte(w.chunks[i].state)
			if w.chunks[i].state == delivered {
				b = byte(inFlight) // they differ for timers only
			}
			if w.chunks[i].open {
				b |= 16
			}
			k = append(k, b)
		}
		for _, c := range w.ready.items[w.ready.head:] {
			k = append(k, byte(c))
		}
		k = append(k, 0xff)
	}
	parts = [2]uint64{maphash.Bytes(seeds[0], k), maphash.Bytes(seeds[1], k)}
	for _, x := range s.sent {
		k = binary.LittleEndian.AppendUint64(k, x)
	}
	e.key = k
	return parts, [2]uint64{maphash.Bytes(seeds[0], k), maphash.Bytes(seeds[1], k)}
}

var seeds = [2]maphash.Seed{maphash.MakeSeed(), maphash.MakeSeed()}

// explore visits every state and returns their number.
func (j smallJob) explore(maxStates int) (int, error) {
	e := &explorer{
		job:      j,
		numbers:  make(map[message]int),
		seen:     make(map[[2]uint64]struct{}),
		finishes: make(map[[2]uint64]struct{}),
	}
	e.visit(j.start())
	for len(e.todo) > 0 && e.failure == nil {
		s := e.todo[len(e.todo)-1]
		e.todo = e.todo[:len(e.todo)-1]
		for r := range s.workers {
			c := s.clone()
			if e.send(c, r) {
				e.visit(c)
			}
		}
		for i := range e.messages {
			if s.sent.has(i) {
				c := s.clone()
				e.deliver(c, e.messages[i])
				e.visit(c)
			}
		}
		if len(e.seen) > maxStates {
			return len(e.seen), fmt.Errorf("more than %d states", maxStates)
		}
	}
	return len(e.seen), e.failure
}

// visit notes a state that is new, and checks that it can finish.
func (e *explorer) visit(s *smallState) {
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
func (e *explorer) finish(s *smallState) {
	for range 64 {
		if e.failure != nil || s.done(e.job.rounds) {
			return
		}
		s.sent = messageSet{}
		for r := range s.workers {
			for e.send(s, r) {
			}
			for c := range s.workers[r].chunks {
				if st := s.workers[r].chunks[c].state; st != unsent && st != finished {
					e.resend(s, r, s.workers[r].base+uint32(c))
				}
			}
		}
		// Every message is delivered once, those that come of it too; the first are the GRADs.
		var delivered messageSet
		for again := true; again; {
			again = false
			for i := 0; i < len(e.messages); i++ {
				if s.sent.has(i) && !delivered.has(i) {
					delivered.add(i)
					e.deliver(s, e.messages[i])
					again = true
				}
			}
		}
	}
	e.fail(fmt.Errorf("the job does not finish any more"))
}

func (s *smallState) done(rounds []uint32) bool {
	for _, w := range s.workers {
		if w.begun < len(rounds) || !w.Done() {
			return false
		}
	}
	return true
}

func (e *explorer) fail(err error) {
	if e.failure == nil {
		e.failure = err
	}
}

// send lets a worker send its next chunk, or begin its next round, or returns false.
func (e *explorer) send(s *smallState, rank int) bool {
	w := s.ownWorker(rank)
	if w.MayBegin() && w.begun < len(e.job.rounds) {
		w.Begin(0, e.job.rounds[w.begun])
		w.begun++
		s.forget(e, rank)
		return true
	}
	send, ok := w.Next(0)
	if !ok {
		return false
	}
	if send.Seq >= e.job.pool && w.answered>>(send.Seq-e.job.pool)&1 == 0 {
		e.fail(fmt.Errorf("rank %d sends seq %d, seq %d is not answered", rank, send.Seq, send.Seq-e.job.pool))
	}
	e.resend(s, rank, send.Seq)
	return true
}

// resend puts a worker's GRAD in flight.
func (e *explorer) resend(s *smallState, rank int, seq uint32) {
	w := s.workers[rank]
	round, r := w.span(seq)
	p := grad(r.epoch, uint8(rank), round, seq, seq-r.seq, r.chunks)
	m := message{from: end(rank), to: theSwitch, head: p.Header, lane: p.Lanes[0]}
	if e.job.cohort&bit(uint8(rank)) == 0 {
		e.deliver(s, m) // a steered GRAD passes the switch at once, which keeps no state for it either
	} else {
		e.put(s, m)
	}
}

// put adds a message to those in flight.
func (e *explorer) put(s *smallState, m message) {
	i, ok := e.numbers[m]
	if !ok {
		i = len(e.messages)
		if i == 64*len(s.sent) {
			panic("too many different messages")
		}
		e.messages = append(e.messages, m)
		e.numbers[m] = i
	}
	s.sent.add(i)
}

// deliver lets a message arrive and sends what comes of it.
func (e *explorer) deliver(s *smallState, m message) {
	p := &wire.Packet{Header: m.head}
	p.Lanes[0] = m.lane
	switch {
	case m.to == theSwitch:
		member := modelMember(uint8(m.from))
		out := s.ownSwitch().Handle(0, Ingress{Port: member.Port, Src: member.Src}, p)
		e.check(p, out)
		switch out.Dest {
		case Nowhere:
		case ToSender:
			e.toWorkers(s, p, bit(uint8(m.from)))
		case ToAll:
			e.toWorkers(s, p, 1<<e.job.ranks-1)
		case ToServer:
			e.toServer(s, m.from, out.Server, p)
		case ToServerAsService:
			e.toServer(s, theService, out.Server, p)
		default:
			e.fail(fmt.Errorf("the switch sends %v to %d", p.Type, out.Dest))
		}
	case m.to >= firstServer:
		out := s.ownServer(int(m.to-firstServer)).Handle(0, p)
		e.check(p, out)
		in := Ingress{Port: 65 + uint16(m.to-firstServer), ToService: out.Dest == ToService || m.from == theService}
		switch out := s.sw.Handle(0, in, p); out.Dest {
		case ToAll:
			e.toWorkers(s, p, 1<<e.job.ranks-1)
		case ToCohort:
			e.toWorkers(s, p, e.job.cohort)
		case ToAddress:
			e.toWorkers(s, p, bit(uint8(m.from)))
		default:
			e.fail(fmt.Errorf("the switch passes %v on to %d", p.Type, out.Dest))
		}
	default:
		w := s.ownWorker(int(m.to))
		seq, known := w.seq(&m.head)
		switch event := w.Handle(0, &m.head); {
		case event == EventRefused:
			e.fail(fmt.Errorf("rank %d is refused: %v", m.to, m.head.Reason))
		case !known:
			if event != EventNone {
				e.fail(fmt.Errorf("rank %d takes %v of round %d in round %d", m.to, m.head.Type, m.head.Round, w.round))
			}
		case m.head.Type == wire.TypeResult, m.head.Type == wire.TypeAck && m.head.Contributors>>m.to&1 != 0:
			w.answered |= 1 << seq
		}
		s.forget(e, int(m.to))
	}
}

// seq returns the seq of the chunk that an answer is for, unless its round is not under way.
func (w *smallWorker) seq(h *wire.Header) (seq uint32, known bool) {
	for i := range w.rounds {
		if r := &w.rounds[i]; w.round-h.Round == uint32(len(w.rounds)-1-i) {
			return r.seq + h.Chunk, r.left > 0
		}
	}
	return 0, false
}

// check checks an aggregator's answer.
func (e *explorer) check(p *wire.Packet, out Outcome) {
	if p.Type == wire.TypeResult {
		if err := checkResult(p, e.job.ranks); err != nil {
			e.fail(err)
		}
	}
	if out.Reason.Fault() && out.Reason != wire.ReasonStale {
		e.fail(fmt.Errorf("%v: %+v", out.Reason, p.Header))
	}
}

// forget takes out of flight what a worker ignores for good: answers to former rounds, to finished chunks, and those
// that say what an earlier answer said. That the window ignores them is shown by testdata/window_old.txt.
func (s *smallState) forget(e *explorer, rank int) {
	w := s.workers[rank]
	for i := range e.messages {
		m := &e.messages[i]
		if !s.sent.has(i) || m.to != end(rank) {
			continue
		}
		seq, known := w.seq(&m.head)
		old := !known && m.head.Round <= w.round
		if known {
			c := w.at(seq)
			old = c.state == finished || c.open && m.head.Type != wire.TypeResult ||
				c.state == delivered && m.head.Type == wire.TypeWait
		}
		if old {
			s.sent[i/64] &^= 1 << (i % 64)
		}
	}
}

func (e *explorer) toServer(s *smallState, from end, server int, p *wire.Packet) {
	if p.Type == wire.TypePartial {
		p.Rank = uint8(bits.TrailingZeros64(p.Contributors)) // tells who was last; a rule needs only that it is a rank
	}
	e.put(s, message{from, firstServer + end(server), p.Header, p.Lanes[0]})
}

func (e *explorer) toWorkers(s *smallState, p *wire.Packet, ranks uint64) {
	for ; ranks != 0; ranks &= ranks - 1 {
		rank := end(bits.TrailingZeros64(ranks))
		// A window's rules look at these fields only.
		head := wire.Header{Type: p.Type, Job: p.Job, Epoch: p.Epoch, Round: p.Round, Chunk: p.Chunk, Reason: p.Reason}
		if head.Contributors = p.Contributors; p.Type != wire.TypeResult {
			head.Contributors &= bit(uint8(rank))
		}
		e.put(s, message{from: theService, to: rank, head: head})
		s.forget(e, int(rank))
	}
}

// Two ranks, two slots and four chunks are visited in every mode, whichever of the two the slots are: those of the
// window (pool 2, of which the switch has 4 slots) or those of the switch (pool 1). What is marked long is skipped by
// go test -short: it takes seconds.
func TestEverySchedule(t *testing.T) {
	tests := []struct {
		name string
		job  smallJob
		long bool // in time
	}{
		{"switch/pool 1/4 chunks", smallJob{ranks: 2, cohort: 3, pool: 1, rounds: []uint32{4}}, false},
		{"switch/pool 1/2 rounds of 2", smallJob{ranks: 2, cohort: 3, pool: 1, rounds: []uint32{2, 2}}, false},
		{"switch/pool 1/4 rounds of 1", smallJob{ranks: 2, cohort: 3, pool: 1, rounds: []uint32{1, 1, 1, 1}}, false},
		{"switch/pool 2/4 chunks", smallJob{ranks: 2, cohort: 3, pool: 2, rounds: []uint32{4}}, false},
		{"switch/pool 2/6 chunks", smallJob{ranks: 2, cohort: 3, pool: 2, rounds: []uint32{6}}, false},
		{"switch/pool 2/rounds of 2 and 3", smallJob{ranks: 2, cohort: 3, pool: 2, rounds: []uint32{2, 3}}, false},
		{"server/pool 1/4 chunks", smallJob{ranks: 2, servers: 2, pool: 1, rounds: []uint32{4}}, false},
		{"server/pool 1/2 rounds of 2", smallJob{ranks: 2, servers: 2, pool: 1, rounds: []uint32{2, 2}}, false},
		{"server/pool 1/4 rounds of 1", smallJob{ranks: 2, servers: 1, pool: 1, rounds: []uint32{1, 1, 1, 1}}, false},
		{"server/pool 2/4 chunks", smallJob{ranks: 2, servers: 2, pool: 2, rounds: []uint32{4}}, false},
		{"hybrid/pool 1/4 chunks", smallJob{ranks: 2, cohort: 1, servers: 2, pool: 1, rounds: []uint32{4}}, true},
		{"hybrid/pool 1/2 rounds of 2", smallJob{ranks: 2, cohort: 1, servers: 2, pool: 1, rounds: []uint32{2, 2}}, false},
		{"hybrid/pool 1/4 rounds of 1", smallJob{ranks: 2, cohort: 1, servers: 1, pool: 1, rounds: []uint32{1, 1, 1, 1}}, false},
		{"hybrid/pool 2/3 chunks", smallJob{ranks: 2, cohort: 1, servers: 2, pool: 2, rounds: []uint32{3}}, false},
		{"hybrid/pool 2/4 chunks", smallJob{ranks: 2, cohort: 1, servers: 2, pool: 2, rounds: []uint32{4}}, true},
		// The switch sums both ranks, the server only finalizes.
		{"partial/pool 1/4 chunks", smallJob{ranks: 2, cohort: 3, servers: 1, pool: 1, rounds: []uint32{4}}, true},
		{"partial/pool 1/3 rounds of 1", smallJob{ranks: 2, cohort: 3, servers: 1, pool: 1, rounds: []uint32{1, 1, 1}}, false},
		// Several rounds under way.
		{"switch/pool 1/depth 2/4 rounds of 1", smallJob{ranks: 2, cohort: 3, pool: 1, depth: 2, rounds: []uint32{1, 1, 1, 1}}, false},
		{"switch/pool 2/depth 2/rounds of 2, 1 and 2", smallJob{ranks: 2, cohort: 3, pool: 2, depth: 2, rounds: []uint32{2, 1, 2}}, false},
		{"switch/pool 2/depth 3/4 rounds of 1", smallJob{ranks: 2, cohort: 3, pool: 2, depth: 3, rounds: []uint32{1, 1, 1, 1}}, false},
		{"server/pool 2/depth 2/3 rounds of 1", smallJob{ranks: 2, servers: 1, pool: 2, depth: 2, rounds: []uint32{1, 1, 1}}, false},
		{"hybrid/pool 2/depth 2/3 rounds of 1", smallJob{ranks: 2, cohort: 1, servers: 1, pool: 2, depth: 2, rounds: []uint32{1, 1, 1}}, false},
		{"hybrid of 3/pool 1/2 chunks", smallJob{ranks: 3, cohort: 3, servers: 1, pool: 1, rounds: []uint32{2}}, false},
		{"hybrid of 3/pool 1/2 rounds of 1", smallJob{ranks: 3, cohort: 3, servers: 1, pool: 1, rounds: []uint32{1, 1}}, false},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			if test.long && testing.Short() {
				t.Skip("takes seconds")
			}
			states, err := test.job.explore(400_000)
			t.Logf("%d states", states)
			if err != nil {
				t.Error(err)
			}
		})
	}
}
