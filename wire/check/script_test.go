package check

import (
	"encoding/binary"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"xagg/wire"
	"xagg/wire/internal/capturetest"
)

// The lab's addresses.
var service = wire.Addr{MAC: [6]byte{2, 0x78, 0x61, 0, 0xff, 0xfe}, IP: [4]byte{10, 77, 255, 254}, Port: wire.Port}

func workerAddr(rank uint8) wire.Addr {
	return wire.Addr{MAC: [6]byte{2, 0x78, 0x61, 0, 0, rank + 1}, IP: [4]byte{10, 77, 0, rank + 1}, Port: 40000 + uint16(rank)}
}

func serverAddr(s int) wire.Addr {
	return wire.Addr{MAC: [6]byte{2, 0x78, 0x61, 0, 1, byte(s + 1)}, IP: [4]byte{10, 77, 1, byte(s + 1)}, Port: wire.Port}
}

// item is a packet of a scripted capture.
type item struct {
	src, dst wire.Addr
	checksum bool
	p        wire.Packet
	raw      []byte // instead of p: a frame of another protocol
}

func (i *item) frame() []byte {
	if i.raw != nil {
		return i.raw
	}
	return wire.AppendFrame(nil, i.src, i.dst, &i.p, i.checksum)
}

// job is a small job whose capture is scripted: ranks in cohort are summed by the switch, the others by two servers.
type job struct {
	id, epoch uint16
	ranks     int
	cohort    uint64
	seq       uint32
	items     []item
	rng       *rand.Rand
}

func newJob(id uint16, ranks int, cohort uint64) *job {
	return &job{id: id, epoch: 1, ranks: ranks, cohort: cohort, rng: rand.New(rand.NewPCG(uint64(id), cohort))}
}

func (j *job) all() uint64 { return 1<<j.ranks - 1 }

func (j *job) add(src, dst wire.Addr, p wire.Packet) {
	checksum := p.Type == wire.TypeGrad || p.Type == wire.TypePartial
	j.items = append(j.items, item{src: src, dst: dst, checksum: checksum, p: p})
}

// round adds what all ports of a switch show of a round with chunks of the given numbers of valid lanes.
func (j *job) round(round uint32, elems ...int) {
	for n, e := range elems {
		j.chunk(round, uint32(n), e, n == len(elems)-1)
	}
}

func (j *job) chunk(round, number uint32, elems int, last bool) {
	var partial, result wire.Packet
	server := serverAddr(int(number) % 2)
	for r := range uint8(j.ranks) {
		p := wire.Packet{Header: wire.Header{
			Type: wire.TypeGrad, Job: j.id, Epoch: j.epoch, Rank: r, Blocks: wire.BlocksFor(elems), Seq: j.seq,
			Round: round, Chunk: number, Elems: uint16(elems), Exponent: 12, Amax: 100 + r, Contributors: 1 << r,
		}}
		if last {
			p.Flags |= wire.FlagLast
		}
		if r == 1 && number == 1 {
			p.Flags |= wire.FlagSaturated
		}
		for i := range p.Lanes[:elems] {
			p.Lanes[i] = int32(j.rng.Uint32()) >> 4
		}
		p.Seal()
		j.add(workerAddr(r), service, p)
		if j.cohort>>r&1 == 0 {
			j.add(workerAddr(r), server, forwarded(p))
			ack := short(wire.TypeAck, p)
			ack.Contributors = result.Contributors | p.Contributors
			j.add(server, workerAddr(r), ack)
			j.add(service, workerAddr(r), ack)
		} else {
			accumulate(&partial, &p, wire.TypePartial)
		}
		if accumulate(&result, &p, wire.TypeResult); number == 0 {
			result.NextEpoch = 2
		}
	}
	if j.cohort != 0 && j.cohort != j.all() {
		j.add(service, server, partial)
		ack := short(wire.TypeAck, partial)
		j.add(server, service, ack)
		for r := range uint8(j.ranks) {
			if j.cohort>>r&1 != 0 {
				j.add(service, workerAddr(r), ack)
			}
		}
	}
	if j.cohort != j.all() {
		result.Flags |= wire.FlagServer
		j.add(server, service, result)
	}
	for r := range uint8(j.ranks) {
		j.add(service, workerAddr(r), result)
	}
	j.seq++
}

func forwarded(p wire.Packet) wire.Packet {
	p.Flags |= wire.FlagForwarded
	return p
}

func resent(p wire.Packet) wire.Packet {
	p.Flags |= wire.FlagResend
	return p
}

// short is an answer without lanes to p.
func short(typ wire.Type, p wire.Packet) wire.Packet {
	return wire.Packet{Header: wire.Header{
		Type: typ, Flags: p.Flags & wire.ShapeFlags, Job: p.Job, Epoch: p.Epoch, Rank: p.Rank, Seq: p.Seq, Round: p.Round,
		Chunk: p.Chunk, Elems: p.Elems, Exponent: p.Exponent, Amax: p.Amax, Contributors: p.Contributors,
	}}
}

// accumulate is a plain loop's sum.
func accumulate(sum, p *wire.Packet, typ wire.Type) {
	if sum.Contributors == 0 {
		sum.Header = p.Header
		sum.Flags &= wire.ShapeFlags
		sum.Contributors, sum.Tag, sum.Amax = 0, [2]uint32{}, 0
	}
	sum.Type, sum.Rank = typ, p.Rank
	sum.Contributors |= p.Contributors
	sum.Flags |= p.Flags & wire.FlagSaturated
	sum.Amax = max(sum.Amax, p.Amax)
	sum.SpreadUs += 10
	for t, v := range p.Tag {
		sum.Tag[t] += v
	}
	for i, v := range p.Lanes {
		sum.Lanes[i] += v
	}
}

// The three modes of a job of four ranks, three rounds of three chunks after a scout.
func script(mode string) []item {
	cohort := map[string]uint64{"switch": 0b1111, "server": 0, "hybrid": 0b0111}[mode]
	j := newJob(7, 4, cohort)
	j.round(0, 0)
	j.round(1, 256, 256, 65)
	j.round(2, 256, 1, 64)
	j.epoch = 2
	j.round(3, 256, 63, 255)
	return j.items
}

var modes = []string{"switch", "server", "hybrid"}

// find returns the indices of the packets of a type in chunk (1, 1), which has 256 lanes.
func find(items []item, typ wire.Type) []int {
	var found []int
	for i := range items {
		if p := &items[i].p; p.Type == typ && p.Round == 1 && p.Chunk == 1 {
			found = append(found, i)
		}
	}
	if found == nil {
		panic("the script has no such packet")
	}
	return found
}

// grad returns the first GRAD of the rank in chunk (1, 1).
func grad(items []item, rank uint8) int {
	for _, i := range find(items, wire.TypeGrad) {
		if items[i].p.Rank == rank {
			return i
		}
	}
	panic("the script has no such rank")
}

// dropRank removes all GRADs of the rank in chunk (1, 1).
func dropRank(items []item, rank uint8) []item {
	return slices.DeleteFunc(items, func(i item) bool {
		return i.p.Type == wire.TypeGrad && i.p.Round == 1 && i.p.Chunk == 1 && i.p.Rank == rank
	})
}

func insert(items []item, at int, more ...item) []item { return slices.Insert(items, at, more...) }

// packets gives the items times a microsecond apart.
func packets(items []item) []capturetest.Packet {
	start := time.Unix(1_700_000_000, 0)
	ps := make([]capturetest.Packet, len(items))
	for i := range items {
		ps[i] = capturetest.Packet{Time: start.Add(time.Duration(i) * time.Microsecond), Frame: items[i].frame()}
	}
	return ps
}

// foreign are frames that have nothing to do with the protocol.
func foreign() []item {
	arp := append(make([]byte, 12), 0x08, 0x06)
	tcp := wire.AppendUDP(nil, workerAddr(0), service, make([]byte, 20), false)
	tcp[14+9] = 6
	dns := wire.AppendUDP(nil, workerAddr(0), wire.Addr{Port: 53}, make([]byte, 20), true)
	dns[len(dns)-1] ^= 1 // even a damaged one is none of our business
	fragment := wire.AppendFrame(nil, workerAddr(0), service, &wire.Packet{}, true)
	binary.BigEndian.PutUint16(fragment[14+6:], 0x2000)
	return []item{{raw: append(arp, make([]byte, 46)...)}, {raw: tcp}, {raw: dns}, {raw: fragment}, {raw: arp}}
}

func check(t *testing.T, files ...[]byte) *Report {
	t.Helper()
	return checkWith(t, Options{}, files...)
}
