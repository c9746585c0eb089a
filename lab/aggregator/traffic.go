package aggregator

import (
	"encoding/binary"
	"math/rand/v2"

	"xagg/wire"
)

// queueLength is how many frames a queue of a veth holds. What is under way never exceeds it: a full queue drops.
const queueLength = 256

// maxGroup is the most chunks that a rank sends in a row; every vector is a multiple of it.
const maxGroup = 64

// granularity is what the number of values must be a multiple of: whole groups of chunks of the most lanes.
const granularity = maxGroup * wire.MaxLanes

// maxWorkers is how many ranks a queue can hold two groups of, of one chunk each; more than a mask has.
const maxWorkers = wire.MaxRanks

// job and epoch of all contributions.
const (
	job   = 1
	epoch = 1
)

// traffic is what the ranks of a job contribute, in chunks of so many lanes: the same values in every round of the same
// parity. It is also what must come back.
type traffic struct {
	ranks, lanes, chunks int
	group                int // chunks that a rank sends in a row
	senders              int
}

// newTraffic cuts vectors of that many values into chunks and divides the ranks among the senders.
func newTraffic(ranks, values, lanes, senders int) traffic {
	senders = min(senders, ranks)
	each := (ranks + senders - 1) / senders
	group := maxGroup
	for 2*group*each > queueLength { // two groups are under way
		group /= 2
	}
	return traffic{ranks: ranks, lanes: lanes, chunks: values / lanes, group: group, senders: senders}
}

// frameLen returns the length of a contribution's frame in bytes.
func (t traffic) frameLen() int { return wire.MinFrameLen + 4*t.lanes }

// each calls f with every contribution to the rounds of both parities, rank by rank. The values are random and have all
// 32 bits.
func (t traffic) each(f func(parity int, p *wire.Packet) error) error {
	for parity := range 2 {
		for rank := range t.ranks {
			random := rand.New(rand.NewPCG(uint64(parity), uint64(rank)))
			for chunk := range t.chunks {
				p := &wire.Packet{Header: wire.Header{
					Type: wire.TypeGrad, Job: job, Epoch: epoch, Rank: uint8(rank), Contributors: 1 << rank,
					Round: uint32(parity), Seq: ^uint32(parity), Chunk: uint32(chunk),
					Elems: uint16(t.lanes), Blocks: wire.BlocksFor(t.lanes),
				}}
				for i := range p.Lanes[:t.lanes] {
					p.Lanes[i] = int32(random.Uint32())
				}
				p.Seal()
				if err := f(parity, p); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// questions returns the frames of all contributions, which go from src of their rank to dst: by
// (parity x ranks + rank) x chunks + chunk.
func (t traffic) questions(src func(rank int) wire.Addr, dst wire.Addr) []loadQuestion {
	frames := make([]loadQuestion, 0, 2*t.ranks*t.chunks)
	t.each(func(_ int, p *wire.Packet) error {
		frames = append(frames, loadQuestion{})
		wire.AppendFrame(frames[len(frames)-1].Frame[:0], src(int(p.Rank)), dst, p, true)
		return nil
	})
	return frames
}

// setRound makes a question's payload that of another round of the same parity. Its checksum stays as it is.
func setRound(payload []byte, round uint32) {
	binary.BigEndian.PutUint32(payload[wire.OffRound:], round)
	binary.BigEndian.PutUint32(payload[wire.OffSeq:], ^round)
}

// answers returns the plain sums of all contributions, by parity x chunks + chunk.
func (t traffic) answers() []loadAnswer {
	type sum struct {
		tag   [2]uint32
		lanes [wire.MaxLanes]uint32
	}
	sums := make([]sum, 2*t.chunks)
	t.each(func(parity int, p *wire.Packet) error {
		s := &sums[parity*t.chunks+int(p.Chunk)]
		for i, v := range p.Lanes[:t.lanes] {
			s.lanes[i] += uint32(v)
		}
		for i, v := range p.Tag {
			s.tag[i] += v
		}
		return nil
	})
	answers := make([]loadAnswer, len(sums))
	for i := range sums {
		for j, v := range sums[i].tag {
			answers[i].Tag[j] = networkOrder(v)
		}
		for j := range answers[i].Lanes {
			answers[i].Lanes[j] = uint64(networkOrder(sums[i].lanes[2*j])) | uint64(networkOrder(sums[i].lanes[2*j+1]))<<32
		}
	}
	return answers
}

// networkOrder returns the number whose bytes in memory are v's in network order.
func networkOrder(v uint32) uint32 {
	var b [4]byte
	binary.BigEndian.PutUint32(b[:], v)
	return binary.LittleEndian.Uint32(b[:]) // the only order that the objects are built for
}

// vectors returns what the ranks send over TCP in every round, and their sum: small integers, so that the sum is exact in
// whatever order.
func vectors(ranks, values int) (of [][]float32, sum []float32) {
	sum = make([]float32, values)
	for rank := range ranks {
		random := rand.New(rand.NewPCG(2, uint64(rank)))
		v := make([]float32, values)
		for i := range v {
			v[i] = float32(random.IntN(2001) - 1000)
			sum[i] += v[i]
		}
		of = append(of, v)
	}
	return of, sum
}
