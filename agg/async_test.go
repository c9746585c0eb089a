package agg

import (
	"fmt"
	"math"
	"math/bits"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"xagg/wire"
)

// asyncGrad is a rank's contribution to a running sum: its value in the round is that of any other chunk.
func asyncGrad(rank uint8, round, chunk uint32) *wire.Packet {
	p := grad(1, rank, round, 0, chunk, 0)
	p.Flags = wire.FlagAsync
	p.Seal()
	return p
}

func asyncServer(t testing.TB, ranks uint64, staleness uint32) *Server {
	s := NewServer(asyncRounds)
	plan := ServerPlan{Job: modelJob, Epoch: 1, Ranks: ranks, Chunks: 1, Rounds: asyncRounds, Async: true, Staleness: staleness}
	if err := s.Install(plan); err != nil {
		t.Fatal(err)
	}
	return s
}

// A sum and its tag run as long as they like, through the ends of every counter.
func TestAsyncWraps(t *testing.T) {
	for name, start := range map[string]uint32{"from 0": 0, "signed": math.MaxInt32 - 50, "unsigned": math.MaxUint32 - 50} {
		t.Run(name, func(t *testing.T) {
			s := asyncServer(t, 3, 2)
			s.Handle(0, asyncGrad(0, 7, 0)) // of no rank's clock, so that it only claims
			// As if so many contributions had come before.
			s.slots[0].seq, s.slots[0].lanes[0] = 2*start, math.MaxInt32-20
			s.slots[1].lanes[0], s.slots[1].lanes[1] = int32(start), int32(start)
			lane, tag, additions := s.slots[0].lanes[0], s.slots[0].tag, s.slots[0].seq
			for i := range uint32(200) {
				for _, rank := range []uint8{uint8(i / 2 % 2), 1 - uint8(i/2%2)} { // each is the first at times
					p := asyncGrad(rank, start+i, 0)
					before, sent := tag, p.Lanes[0]
					if out := s.Handle(0, p); out.Reason != wire.ReasonNone || p.Type != wire.TypeResult {
						t.Fatalf("contribution %d of rank %d: %v, %+v", i, rank, out, p.Header)
					}
					additions++
					lane += sent
					if p.Lanes[0] != lane || p.Seq != additions || p.Contributors&bit(rank) == 0 {
						t.Fatalf("contribution %d of rank %d: sum %d, want %d, %+v", i, rank, p.Lanes[0], lane, p.Header)
					}
					if !wire.DifferenceOK(modelJob, 0, 1, before, p.Tag, []int32{sent}) {
						t.Fatalf("contribution %d of rank %d: the tag does not fit the difference", i, rank)
					}
					tag = p.Tag
				}
			}
			// Rank 0 alone gets as far as it may.
			for i := range uint32(4) {
				want := wire.ReasonNone
				if i == 3 {
					want = wire.ReasonHeld
				}
				if out := s.Handle(0, asyncGrad(0, start+200+i, 0)); out.Reason != want {
					t.Errorf("contribution %d of rank 0 alone: %v, want %v", i, out.Reason, want)
				}
			}
		})
	}
}

// asyncRun is a job that adds to one chunk, with an account of all additions of its own.
type asyncRun struct {
	fail      func(format string, args ...any)
	server    *Server
	ranks     int
	staleness uint32
	workers   [maxAsyncRanks]asyncWorker
	added     [maxAsyncRanks]uint32 // additions of each rank
	sum       int32                 // of them
	amax      uint8
}

const maxAsyncRanks = 4

// asyncWorker is a worker's view of the chunk.
type asyncWorker struct {
	round uint32 // that it waits for, or sends next
	last  int32
	tag   [2]uint32
	count uint32
	seen  [maxAsyncRanks]uint32 // additions of each rank when the last RESULT was made
}

// asyncPacket is a packet in flight.
type asyncPacket struct {
	head wire.Header
	lane int32
	to   int                   // a rank, or the server: -1
	seen [maxAsyncRanks]uint32 // of a RESULT: additions of each rank when it was made
}

func newAsyncRun(t testing.TB, ranks int, staleness uint32, fail func(format string, args ...any)) *asyncRun {
	return &asyncRun{fail: fail, server: asyncServer(t, 1<<ranks-1, staleness), ranks: ranks, staleness: staleness}
}

// next is what a rank sends: the contribution that has no RESULT yet.
func (a *asyncRun) next(rank int) asyncPacket {
	p := asyncGrad(uint8(rank), a.workers[rank].round, 0)
	return asyncPacket{head: p.Header, lane: p.Lanes[0], to: -1}
}

// deliver lets a packet arrive and returns the answer, if there is one.
func (a *asyncRun) deliver(m asyncPacket) (answer asyncPacket, ok bool) {
	if m.to >= 0 {
		a.take(&a.workers[m.to], &m)
		return m, false
	}
	p := &wire.Packet{Header: m.head}
	p.Lanes[0] = m.lane
	rank, round := p.Rank, p.Round
	out := a.server.Handle(0, p)
	near, come := uint64(0), uint64(0) // before and after
	for r, n := range a.added[:a.ranks] {
		if n+a.staleness >= round {
			near |= bit(uint8(r))
		}
	}
	switch out.Reason {
	case wire.ReasonNone:
		if round != a.added[rank] || bits.OnesCount64(near) != a.ranks {
			a.fail("round %d of rank %d is added after %v", round, rank, a.added)
		}
		a.added[rank]++
		a.sum += m.lane
		a.amax = max(a.amax, rank+1)
	case wire.ReasonDuplicate:
		if round+1 != a.added[rank] {
			a.fail("round %d of rank %d is a duplicate after %v", round, rank, a.added)
		}
	case wire.ReasonHeld:
		if p.Type != wire.TypeWait || round != a.added[rank] || p.Contributors != near || bits.OnesCount64(near) == a.ranks {
			a.fail("round %d of rank %d is held after %v: %+v", round, rank, a.added, p.Header)
		}
		return m, false // it tells a worker nothing that its rules look at
	case wire.ReasonStale:
		if round+1 >= a.added[rank] || out.Dest != Nowhere {
			a.fail("round %d of rank %d is stale after %v", round, rank, a.added)
		}
		return m, false
	default:
		a.fail("round %d of rank %d: %v", round, rank, out.Reason)
	}
	total := uint32(0)
	for r, n := range a.added[:a.ranks] {
		total += n
		if n > round {
			come |= bit(uint8(r))
		}
	}
	if p.Type != wire.TypeResult || p.Round != round || p.Lanes[0] != a.sum || p.Seq != total || p.Contributors != come || p.Amax != a.amax {
		a.fail("sum %d, want %d of %v: %+v", p.Lanes[0], a.sum, a.added, p.Header)
	}
	return asyncPacket{p.Header, p.Lanes[0], int(rank), a.added}, true
}

// take is what a worker does with an answer. Its result must be what was added between, by whoever, and not too much.
func (a *asyncRun) take(w *asyncWorker, m *asyncPacket) {
	if m.head.Round != w.round {
		return
	}
	var want int32
	for r, n := range m.seen[:a.ranks] {
		for k := w.seen[r]; k < n; k++ {
			want += value(uint8(r), k, 0)
		}
		if r != m.to && n-w.seen[r] > 2*a.staleness+3 {
			a.fail("rank %d gets %d additions of rank %d at once", m.to, n-w.seen[r], r)
		}
		if r == m.to && n-w.seen[r] != 1 {
			a.fail("rank %d gets %d additions of its own", r, n-w.seen[r])
		}
	}
	got := m.lane - w.last
	if got != want || !wire.DifferenceOK(modelJob, 0, m.head.Seq-w.count, w.tag, m.head.Tag, []int32{got}) {
		a.fail("rank %d gets %d of round %d, want %d, or the tag does not fit", m.to, got, m.head.Round, want)
	}
	*w = asyncWorker{w.round + 1, m.lane, m.head.Tag, m.head.Seq, m.seen}
}

// TestAsyncSchedules runs jobs over a network that loses, duplicates and delays without bound.
func TestAsyncSchedules(t *testing.T) {
	outer := t
	rapid.Check(t, func(t *rapid.T) {
		ranks := rapid.IntRange(1, maxAsyncRanks).Draw(t, "ranks")
		a := newAsyncRun(outer, ranks, rapid.Uint32Range(0, 3).Draw(t, "staleness"), t.Fatalf)
		var flying []asyncPacket
		deliver := func(m asyncPacket) {
			if answer, ok := a.deliver(m); ok {
				flying = append(flying, answer)
			}
		}
		for range rapid.SampledFrom([]int{300, 100, 30}).Draw(t, "steps") {
			if len(flying) == 0 || rapid.IntRange(0, 3).Draw(t, "send") == 0 {
				// The first ranks are the quicker ones.
				r := min(rapid.IntRange(0, ranks-1).Draw(t, "rank"), rapid.IntRange(0, ranks-1).Draw(t, "other rank"))
				flying = append(flying, a.next(r))
				continue
			}
			i := len(flying) - 1 - rapid.IntRange(0, len(flying)-1).Draw(t, "packet")
			m := flying[i]
			if rapid.IntRange(0, 2).Draw(t, "keep") != 0 {
				flying = append(flying[:i], flying[i+1:]...)
			}
			if rapid.IntRange(0, 9).Draw(t, "lose") != 0 {
				deliver(m)
			}
		}
		// Nothing is lost any more: everybody gets as far as the last one, and some more.
		target := slices.Max(a.added[:]) + 2
		for range 100 {
			done := true
			for r := range ranks {
				if a.workers[r].round < target {
					done = false
					flying = append(flying, a.next(r))
					for len(flying) > 0 {
						m := flying[0]
						flying = flying[1:]
						deliver(m)
					}
				}
			}
			if done {
				return
			}
		}
		t.Fatalf("stuck at %v of %d", a.added, target)
	})
}

// TestEveryAsyncSchedule visits every state of small jobs; packets in flight are a set that only grows, see
// TestEverySchedule.
func TestEveryAsyncSchedule(t *testing.T) {
	for _, test := range []struct {
		ranks     int
		staleness uint32
		rounds    uint32
	}{{2, 0, 3}, {2, 1, 3}, {2, 2, 3}, {3, 0, 1}} {
		t.Run(fmt.Sprintf("%d ranks/staleness %d/%d rounds", test.ranks, test.staleness, test.rounds), func(t *testing.T) {
			type state struct {
				run    asyncRun
				flying string // the numbers of the packets in flight, one byte each
			}
			type key struct {
				workers [maxAsyncRanks]asyncWorker
				added   [maxAsyncRanks]uint32
				flying  string
			}
			var packets []asyncPacket
			numbers := make(map[asyncPacket]byte)
			seen := make(map[key]bool)
			start := newAsyncRun(t, test.ranks, test.staleness, t.Fatalf)
			todo := []state{{run: *start}}
			ends := 0
			visit := func(s state) {
				if k := (key{s.run.workers, s.run.added, s.flying}); !seen[k] {
					seen[k] = true
					todo = append(todo, s)
				}
			}
			put := func(s *state, m asyncPacket) {
				if m.to >= 0 && m.head.Round < s.run.workers[m.to].round {
					return // ignored for good
				}
				n, ok := numbers[m]
				if !ok {
					if len(packets) == 256 {
						t.Fatal("too many different packets")
					}
					n = byte(len(packets))
					numbers[m], packets = n, append(packets, m)
				}
				if i, found := slices.BinarySearch([]byte(s.flying), n); !found {
					s.flying = s.flying[:i] + string([]byte{n}) + s.flying[i:]
				}
			}
			for len(todo) > 0 {
				s := todo[len(todo)-1]
				todo = todo[:len(todo)-1]
				moves := false
				for r := range test.ranks {
					if s.run.workers[r].round < test.rounds {
						c := s
						put(&c, s.run.next(r))
						visit(c)
						moves = true
					}
				}
				for i := range len(s.flying) {
					c := s
					c.run.server = &Server{slots: cloneSlots(s.run.server.slots), plans: s.run.server.plans}
					m := packets[s.flying[i]]
					answer, ok := c.run.deliver(m)
					if m.to >= 0 { // a worker ignores further ones
						c.flying = c.flying[:i] + c.flying[i+1:]
					}
					if ok {
						put(&c, answer)
					}
					visit(c)
				}
				if !moves {
					ends++
				}
			}
			if t.Logf("%d states", len(seen)); ends == 0 {
				t.Error("no state is the end of the job")
			}
		})
	}
}
