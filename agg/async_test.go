package agg

import (
	"math"
	"testing"

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
