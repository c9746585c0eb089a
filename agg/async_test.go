package agg

import (
	"math"
	"math/bits"
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

// TestAsyncSchedules runs workers that add to one chunk over a network that loses, duplicates and delays without bound,
// and keeps account of all additions itself.
func TestAsyncSchedules(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		a := &asyncRun{t: t, ranks: rapid.IntRange(1, 4).Draw(t, "ranks"), staleness: rapid.Uint32Range(0, 3).Draw(t, "staleness")}
		a.workers = make([]asyncWorker, a.ranks)
		a.added = make([]uint32, a.ranks)
		a.server = NewServer(asyncRounds)
		plan := ServerPlan{Job: modelJob, Epoch: 1, Ranks: 1<<a.ranks - 1, Chunks: 1, Rounds: asyncRounds, Async: true, Staleness: a.staleness}
		if err := a.server.Install(plan); err != nil {
			t.Fatal(err)
		}
		for range rapid.SampledFrom([]int{300, 100, 30}).Draw(t, "steps") {
			if len(a.flying) == 0 || rapid.IntRange(0, 3).Draw(t, "send") == 0 {
				// The first ranks are the quicker ones.
				r := min(rapid.IntRange(0, a.ranks-1).Draw(t, "rank"), rapid.IntRange(0, a.ranks-1).Draw(t, "other rank"))
				a.send(uint8(r))
				continue
			}
			i := len(a.flying) - 1 - rapid.IntRange(0, len(a.flying)-1).Draw(t, "packet")
			m := a.flying[i]
			if rapid.IntRange(0, 2).Draw(t, "keep") != 0 {
				a.flying = append(a.flying[:i], a.flying[i+1:]...)
			}
			if rapid.IntRange(0, 9).Draw(t, "lose") != 0 {
				a.deliver(m)
			}
		}
		// Nothing is lost any more: everybody gets as far as the last one, and some more.
		target := uint32(0)
		for _, n := range a.added {
			target = max(target, n+2)
		}
		for range 100 {
			done := true
			for r := range a.workers {
				if a.workers[r].round < target {
					done = false
					a.send(uint8(r))
					for len(a.flying) > 0 {
						m := a.flying[0]
						a.flying = a.flying[1:]
						a.deliver(m)
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

type asyncRun struct {
	t         *rapid.T
	server    *Server
	ranks     int
	staleness uint32
	workers   []asyncWorker
	flying    []asyncPacket
	added     []uint32 // additions of each rank
	sum       int32    // of them
	amax      uint8
}

// asyncWorker is a worker's view of the one chunk.
type asyncWorker struct {
	round uint32 // that it waits for, or sends next
	last  int32
	tag   [2]uint32
	count uint32
	seen  []uint32 // additions of each rank when the last RESULT was made
}

type asyncPacket struct {
	p    wire.Packet
	to   int      // a rank, or the server: -1
	seen []uint32 // of a RESULT: additions of each rank when it was made
}

func (a *asyncRun) send(rank uint8) {
	a.flying = append(a.flying, asyncPacket{p: *asyncGrad(rank, a.workers[rank].round, 0), to: -1})
}

func (a *asyncRun) deliver(m asyncPacket) {
	if m.to >= 0 {
		a.take(&a.workers[m.to], &m)
		return
	}
	p, rank, round := &m.p, m.p.Rank, m.p.Round
	sent := p.Lanes[0]
	out := a.server.Handle(0, p)
	if out.Dest != Nowhere {
		defer func() { a.flying = append(a.flying, m) }()
	}
	m.to = int(rank)
	near, come := uint64(0), uint64(0) // before and after
	for r, n := range a.added {
		if n+a.staleness >= round {
			near |= bit(uint8(r))
		}
	}
	switch out.Reason {
	case wire.ReasonNone:
		if round != a.added[rank] || bits.OnesCount64(near) != a.ranks {
			a.t.Fatalf("round %d of rank %d is added after %v", round, rank, a.added)
		}
		a.added[rank]++
		a.sum += sent
		a.amax = max(a.amax, rank+1)
	case wire.ReasonDuplicate:
		if round+1 != a.added[rank] {
			a.t.Fatalf("round %d of rank %d is a duplicate after %v", round, rank, a.added)
		}
	case wire.ReasonHeld:
		if p.Type != wire.TypeWait || round != a.added[rank] || p.Contributors != near || bits.OnesCount64(near) == a.ranks {
			a.t.Fatalf("round %d of rank %d is held after %v: %+v", round, rank, a.added, p.Header)
		}
		return
	case wire.ReasonStale:
		if round+1 >= a.added[rank] {
			a.t.Fatalf("round %d of rank %d is stale after %v", round, rank, a.added)
		}
		return
	default:
		a.t.Fatalf("round %d of rank %d: %v", round, rank, out.Reason)
	}
	total := uint32(0)
	for r, n := range a.added {
		total += n
		if n > round {
			come |= bit(uint8(r))
		}
	}
	if p.Type != wire.TypeResult || p.Round != round || p.Lanes[0] != a.sum || p.Seq != total || p.Contributors != come || p.Amax != a.amax {
		a.t.Fatalf("sum %d, want %d of %v: %+v", p.Lanes[0], a.sum, a.added, p.Header)
	}
	m.seen = append([]uint32(nil), a.added...)
}

// take is what a worker does with an answer. Its result must be what was added between, by whoever, and not too much.
func (a *asyncRun) take(w *asyncWorker, m *asyncPacket) {
	p := &m.p
	if p.Type != wire.TypeResult || p.Round != w.round {
		return
	}
	if w.seen == nil {
		w.seen = make([]uint32, a.ranks)
	}
	var want int32
	for r, n := range m.seen {
		for k := w.seen[r]; k < n; k++ {
			want += value(uint8(r), k, 0)
		}
		if r != m.to && n-w.seen[r] > 2*a.staleness+3 {
			a.t.Fatalf("rank %d gets %d additions of rank %d at once", m.to, n-w.seen[r], r)
		}
		if r == m.to && n-w.seen[r] != 1 {
			a.t.Fatalf("rank %d gets %d additions of its own", r, n-w.seen[r])
		}
	}
	got := p.Lanes[0] - w.last
	if got != want || !wire.DifferenceOK(modelJob, 0, p.Seq-w.count, w.tag, p.Tag, []int32{got}) {
		a.t.Fatalf("rank %d gets %d of round %d, want %d, or the tag does not fit", m.to, got, p.Round, want)
	}
	*w = asyncWorker{w.round + 1, p.Lanes[0], p.Tag, p.Seq, m.seen}
}
