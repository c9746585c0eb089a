package aggregator

import (
	"encoding/binary"
	"fmt"
	"math/bits"
	"testing"

	"xagg/wire"
	"xagg/xdp"
)

func testLink() *link {
	return &link{host: hostFor(3, "a", 1, false)}
}

// TestAnswersAreSums feeds the questions, with their rounds and seqs rewritten as senders do, to the reference
// aggregator, and compares its RESULTs with the answers that the load's program compares with.
func TestAnswersAreSums(t *testing.T) {
	for _, lanes := range []int{64, 128, 256} {
		t.Run(fmt.Sprintf("%d lanes", lanes), func(t *testing.T) {
			l := testLink()
			tr := newTraffic(3, granularity, lanes, 1)
			questions, answers := tr.questions(l.source, l.server()), tr.answers()
			memory := xdp.NewMemory(uint32(leaseRounds * tr.chunks))
			if err := memory.Install(planFor(l, tr)); err != nil {
				t.Fatal(err)
			}
			results := 0
			for round := range uint32(4) {
				for rank := range tr.ranks {
					for chunk := range tr.chunks {
						frame := questions[(int(round&1)*tr.ranks+rank)*tr.chunks+chunk].Frame[:tr.frameLen()]
						setRound(frame[wire.FrameOverhead:], round)
						var p wire.Packet
						answer := memory.Handle(0, frame, nil)
						if _, _, err := wire.ParseFrame(answer, &p); err != nil {
							t.Fatalf("round %d rank %d chunk %d: answer: %v", round, rank, chunk, err)
						}
						if last := rank == tr.ranks-1; last != (p.Type == wire.TypeResult) {
							t.Fatalf("round %d rank %d chunk %d: %v", round, rank, chunk, p.Type)
						}
						if p.Type != wire.TypeResult {
							continue
						}
						results++
						want := &answers[int(round&1)*tr.chunks+chunk]
						for i, v := range p.Lanes[:lanes] {
							if w := want.Lanes[i/2] >> (i % 2 * 32); bits.ReverseBytes32(uint32(v)) != uint32(w) {
								t.Fatalf("round %d chunk %d: lane %d is %#x", round, chunk, i, v)
							}
						}
						for i, v := range p.Tag {
							if bits.ReverseBytes32(v) != want.Tag[i] {
								t.Fatalf("round %d chunk %d: tag %d is %#x", round, chunk, i, v)
							}
						}
					}
				}
			}
			if want := 4 * tr.chunks; results != want {
				t.Errorf("%d results, want %d", results, want)
			}
		})
	}
}

// TestRoundsDiffer: a server that answered a round with the sum of the one before would be found out.
func TestRoundsDiffer(t *testing.T) {
	tr := newTraffic(2, granularity, 64, 1)
	answers := tr.answers()
	for chunk := range tr.chunks {
		if answers[chunk].Lanes == answers[tr.chunks+chunk].Lanes {
			t.Errorf("chunk %d has the same sum in all rounds", chunk)
		}
	}
}

// TestQueuesHoldTraffic: two groups of a sender's ranks are under way, and never more than its queue holds.
func TestQueuesHoldTraffic(t *testing.T) {
	for ranks := 2; ranks <= maxWorkers; ranks++ {
		for senders := 1; senders <= 70; senders++ {
			for _, lanes := range Lanes {
				tr := newTraffic(ranks, granularity, lanes, senders)
				each := (ranks + tr.senders - 1) / tr.senders
				if tr.senders > ranks || tr.group < 1 || 2*tr.group*each > queueLength || tr.chunks%tr.group != 0 {
					t.Errorf("%d ranks, %d senders: %+v", ranks, senders, tr)
				}
			}
		}
	}
}

func TestVectors(t *testing.T) {
	of, sum := vectors(3, 1000)
	for i, got := range sum {
		if want := of[0][i] + of[1][i] + of[2][i]; got != want || got != float32(int(got)) {
			t.Errorf("value %d is %v, want %v", i, got, want)
		}
	}
}

func TestNetworkOrder(t *testing.T) {
	var b [4]byte
	binary.NativeEndian.PutUint32(b[:], networkOrder(0x01020304))
	if b != [4]byte{1, 2, 3, 4} {
		t.Errorf("bytes %v", b)
	}
}

func TestMask(t *testing.T) {
	for want, cpus := range map[string][]int{
		"00000001": {0}, "00000005": {2, 0}, "80000000": {31}, "00000001,00000000": {32}, "00000003,00000000,00000002": {1, 64, 65},
	} {
		if got := mask(cpus...); got != want {
			t.Errorf("processors %v: %s, want %s", cpus, got, want)
		}
	}
}
