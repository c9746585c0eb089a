package xdp

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/google/go-cmp/cmp"

	"xagg/tests/require"
	"xagg/wire"
)

var (
	serviceAddr = wire.Addr{MAC: [6]byte{2, 0x78, 0x61, 0, 0xff, 0xfe}, IP: [4]byte{10, 77, 255, 254}, Port: wire.Port}
	serverAddr  = wire.Addr{MAC: [6]byte{2, 0x78, 0x61, 0, 1, 1}, IP: [4]byte{10, 77, 1, 1}, Port: wire.Port}
)

func workerAddr(rank uint8) wire.Addr {
	return wire.Addr{MAC: [6]byte{2, 0x78, 0x61, 0, 0, rank + 1}, IP: [4]byte{10, 77, 0, rank + 1}, Port: 40000 + uint16(rank)}
}

// load loads the program for a test.
func load(t testing.TB, slots uint32) *Server {
	t.Helper()
	require.Have(t, require.XDP)
	s, err := Load(Size(slots) * SlotSize)
	var refused *ebpf.VerifierError
	if errors.As(err, &refused) {
		t.Fatalf("%+v", refused)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

// The verdicts of an XDP program.
const (
	verdictDrop = 1
	verdictPass = 2
	verdictTX   = 3
)

// testSlots are as many as the leases of testPlans need.
const testSlots = 29

// testPlans are jobs of every consistency side by side in the arena, some with two epochs. The variant, 0 to 3, says how
// many ranks make a quorum and how far ranks may be ahead.
func testPlans(variant uint32) []Plan {
	plan := func(job, epoch uint16, ranks uint64, lease Lease) Plan {
		return Plan{Job: job, Epoch: epoch, Ranks: ranks, Lease: lease,
			ServiceIP: netip.AddrFrom4(serviceAddr.IP), ServiceMAC: serviceAddr.MAC}
	}
	quorum := func(p Plan, waitUs uint32) Plan {
		p.Quorum, p.WaitUs = variant+1, waitUs
		return p
	}
	async := func(p Plan, next uint16) Plan {
		p.Async, p.Staleness, p.NextEpoch = true, variant, next
		return p
	}
	first := Lease{Base: 0, Chunks: 3, Rounds: 2, Index: 0}
	second := Lease{Base: 7, Chunks: 2, Rounds: 4, Index: 5}
	sums := Lease{Base: 21, Chunks: 2, Rounds: 4, Index: 8}
	armed := plan(5, 1, 0b111, first)
	armed.NextEpoch = 2
	return []Plan{
		armed,
		plan(5, 2, 0b111, first),
		plan(300, 65535, 1<<63|1<<40|1, second),
		plan(300, 1, 1<<63|1<<40|1, second), // newer than 65535
		quorum(plan(11, 1, 0b11111, Lease{Base: 15, Chunks: 1, Rounds: 4, Index: 6}), 0),
		quorum(plan(12, 1, 1<<62|0b1111, Lease{Base: 19, Chunks: 1, Rounds: 2, Index: 7}), math.MaxUint32),
		async(plan(13, 1, 1<<63|0b1111, sums), 0),
		async(plan(13, 2, 1<<63|0b1111, sums), 3),
	}
}

// trace makes frames that a server may see: contributions to a few rounds of the plans, some of them late, doubled,
// damaged or wrong in any of the ways that have a reason.
type trace struct {
	*rand.Rand
	plans  []Plan
	round  uint32
	shadow []shadow // what the slots hold by now
}

func newTrace(seed uint64, plans []Plan) *trace {
	return &trace{rand.New(rand.NewPCG(seed, 0x78616767)), plans, 0xfffffff0, // the round's number wraps soon
		make([]shadow, testSlots)}
}

// shapes are numbers of valid lanes for every number of blocks.
var shapes = []uint16{0, 1, 63, 64, 65, 128, 130, 192, 200, 256}

func (t *trace) next() []byte {
	if t.IntN(80) == 0 {
		t.round++
	}
	plan := t.plans[t.IntN(len(t.plans))]
	if plan.Async && plan.Epoch == 1 && t.IntN(30) != 0 {
		plan.Epoch = 2 // seldom the other one: each takes the running sums away from the other
	}
	p := t.contribution(plan)
	src := workerAddr(p.Rank)
	if p.Type == wire.TypePartial && t.IntN(2) == 0 {
		src = serviceAddr
	}
	frame := func() []byte {
		b := wire.AppendFrame(nil, src, serverAddr, p, true)
		if t.IntN(8) == 0 {
			binary.BigEndian.PutUint16(b[40:], 0) // no UDP checksum
		}
		return b
	}
	if t.IntN(100) < 75 {
		return frame()
	}
	switch t.IntN(23) {
	case 0:
		p.Job++
	case 1:
		p.Epoch += 1 + uint16(t.IntN(3))
	case 2:
		p.Rank = uint8(t.IntN(256))
	case 3:
		p.Contributors ^= 1 << t.IntN(64)
	case 4:
		p.Contributors = 0
	case 5:
		p.Tag[t.IntN(2)] = wire.P - 1 + uint32(t.IntN(3))
	case 6:
		p.Chunk = plan.Lease.Chunks + uint32(t.IntN(2))
	case 7:
		p.Exponent++
	case 8:
		p.Flags ^= wire.FlagLast
	case 9:
		p.Flags ^= wire.FlagModular
	case 10:
		p.Elems = shapes[t.IntN(len(shapes))]
		p.Blocks = wire.BlocksFor(int(p.Elems))
	case 11:
		p.Elems = uint16(t.IntN(400)) // may not fit the blocks
	case 12:
		p.Round += uint32(1)<<31 - 1 + uint32(t.IntN(3))
	case 13:
		p.Type = wire.Type(t.IntN(16))
	case 14:
		b := frame()
		return b[:14+t.IntN(len(b)-14)]
	case 15:
		return append(frame(), make([]byte, 1+t.IntN(100))...)
	case 16: // of another version, with right checksums
		b := frame()
		b[wire.FrameOverhead] += uint8(1+t.IntN(15)) << 4
		return wire.AppendUDP(nil, src, serverAddr, b[wire.FrameOverhead:], true)
	case 17: // reserved bytes, with right checksums
		b := frame()
		b[wire.FrameOverhead+wire.OffReserved+t.IntN(5)] = 1
		return wire.AppendUDP(nil, src, serverAddr, b[wire.FrameOverhead:], true)
	case 18: // any length of payload
		b := frame()
		return wire.AppendUDP(nil, src, serverAddr, append(b[wire.FrameOverhead:], make([]byte, t.IntN(300))...), true)
	case 19: // for another port
		other := serverAddr
		other.Port++
		return wire.AppendFrame(nil, src, other, p, true)
	case 20:
		p.Flags ^= wire.FlagAsync
	default: // one bit wrong somewhere
		b := frame()
		i := t.IntN(len(b))
		if t.IntN(2) == 0 {
			i = t.IntN(98) // in the headers
		}
		b[i] ^= 1 << t.IntN(8)
		return b
	}
	return frame()
}

// contribution returns a good one: what it adds is random, its shape follows from its place.
func (t *trace) contribution(plan Plan) *wire.Packet {
	p := &wire.Packet{}
	p.Type, p.Job, p.Epoch = wire.TypeGrad, plan.Job, plan.Epoch
	p.Round = t.round + uint32(t.IntN(3))
	p.Chunk = uint32(t.IntN(int(plan.Lease.Chunks)))
	p.Seq = t.Uint32()
	p.Elems = shapes[(p.Round*7+p.Chunk*3)%uint32(len(shapes))]
	p.Blocks = wire.BlocksFor(int(p.Elems))
	p.Exponent = int8(p.Round)
	if p.Chunk == plan.Lease.Chunks-1 {
		p.Flags |= wire.FlagLast
	}
	p.Flags |= []wire.Flags{0, wire.FlagResend, wire.FlagForwarded, wire.FlagSaturated, wire.FlagLate, wire.FlagServer}[t.IntN(6)]
	p.Amax = uint8(t.Uint32())
	p.SpreadUs, p.BlockedUs, p.NextEpoch = t.Uint32(), t.Uint32(), uint16(t.Uint32())
	for i := range p.Lanes[:p.Elems] {
		p.Lanes[i] = int32(t.Uint32())
	}
	for { // a rank of the plan
		if p.Rank = uint8(t.IntN(64)); plan.Ranks>>p.Rank&1 != 0 {
			break
		}
	}
	p.Contributors = 1 << p.Rank
	partials := 5 // one in so many
	if plan.Async && t.IntN(4) != 0 {
		p.Flags = p.Flags&^wire.ShapeFlags | wire.FlagAsync
		p.Elems = shapes[(uint32(plan.Epoch)*7+p.Chunk*3)%uint32(len(shapes))]
		p.Blocks = wire.BlocksFor(int(p.Elems))
		clear(p.Lanes[p.Elems:])
		p.Exponent = int8(plan.Epoch)
		p.Round = t.clock(plan, p.Chunk, p.Rank)
		if t.IntN(4) == 0 { // again, or too soon
			p.Round += uint32(t.IntN(6)) - 4
		}
		partials = 50
	}
	p.Seal()
	if t.IntN(partials) == 0 {
		p.Type = wire.TypePartial
		p.Contributors |= plan.Ranks & t.Uint64()
		p.Tag = [2]uint32{t.Uint32(), t.Uint32()}
	}
	return p
}

// shadow is what a slot must hold: the sum of what the reference counted as summed, or the clocks of a running sum.
type shadow struct {
	job, epoch, rank uint16
	round            uint32 // or the number of additions
	mask             uint64
	tag              [2]uint32
	amax, sticky     uint8
	lanes            [wire.MaxLanes]uint32
}

func (s *shadow) add(p *wire.Packet) {
	s.rank = uint16(p.Rank)
	s.tag[0] += p.Tag[0]
	s.tag[1] += p.Tag[1]
	s.amax = max(s.amax, p.Amax)
	s.sticky |= uint8(p.Flags & wire.FlagSaturated)
	for i, v := range p.Lanes[:int(p.Blocks)*wire.BlockLanes] {
		s.lanes[i] += uint32(v)
	}
}

// clock returns how many contributions of the rank are in the chunk's running sum.
func (t *trace) clock(plan Plan, chunk uint32, rank uint8) uint32 {
	sum := &t.shadow[plan.Lease.Base+chunk]
	if sum.job != plan.Job || sum.epoch != plan.Epoch {
		return 0
	}
	return t.shadow[plan.Lease.Base+plan.Lease.Chunks+chunk].lanes[rank]
}

// apply does to the shadow what a packet with that reason did to the slots.
func (t *trace) apply(plan Plan, p *wire.Packet, reason wire.Reason) {
	base, chunks := plan.Lease.Base+p.Chunk, plan.Lease.Chunks
	if p.Flags&wire.FlagAsync == 0 {
		round := p.Round % plan.Lease.Rounds
		if plan.Async {
			round = 2 + p.Round%2
		}
		if reason == wire.ReasonNone {
			s := &t.shadow[base+round*chunks]
			if s.job != p.Job || s.epoch != p.Epoch || s.round != p.Round {
				*s = shadow{job: p.Job, epoch: p.Epoch, round: p.Round}
			}
			s.mask |= p.Contributors
			s.add(p)
		}
		return
	}
	switch reason {
	case wire.ReasonNone, wire.ReasonDuplicate, wire.ReasonStale, wire.ReasonClock:
	default: // nothing that takes a running sum over
		return
	}
	sum, clocks := &t.shadow[base], &t.shadow[base+chunks]
	if sum.job != p.Job || sum.epoch != p.Epoch {
		*sum, *clocks = shadow{job: p.Job, epoch: p.Epoch}, shadow{}
	}
	if reason == wire.ReasonNone {
		sum.add(p)
		sum.tag[0] %= wire.P
		sum.tag[1] %= wire.P
		sum.round++
		clocks.lanes[p.Rank]++
	}
}

// TestAgainstReference feeds the same frames to the XDP program and to the reference, and compares every verdict and
// answer, and then the slots, the reasons and the statistics.
func TestAgainstReference(t *testing.T) {
	for seed := range uint64(4) {
		t.Run(fmt.Sprintf("seed %d", seed), func(t *testing.T) { compareWithReference(t, seed, 16000) })
	}
}

func compareWithReference(t *testing.T, seed uint64, frames int) {
	server, memory := load(t, testSlots), NewMemory(testSlots)
	plans := testPlans(uint32(seed) % 4)
	for _, plan := range plans {
		for _, store := range []Store{server, memory} {
			if err := store.Install(plan); err != nil {
				t.Fatal(err)
			}
		}
	}
	start, tr := time.Now(), newTrace(seed, slices.Clone(plans))
	for i := range frames {
		if i%200 == 199 { // arm another epoch
			next, plan := uint16(tr.IntN(4)), tr.plans[[]int{1, 4, 7}[tr.IntN(3)]]
			for _, store := range []Store{server, memory} {
				if err := store.Arm(plan.Job, plan.Epoch, next); err != nil {
					t.Fatal(err)
				}
			}
		}
		if i == frames/2 { // another job gets the lease of the first, and an epoch of the second ends
			for _, store := range []Store{server, memory} {
				if err := errors.Join(store.Remove(5, 1), store.Remove(5, 2), store.Remove(300, 65535)); err != nil {
					t.Fatal(err)
				}
				for _, plan := range plans[:2] {
					plan.Job = 7
					if err := store.Install(plan); err != nil {
						t.Fatal(err)
					}
				}
			}
			tr.plans[0].Job, tr.plans[1].Job = 7, 7
		}
		frame := tr.next()
		before := memory.reasons
		answer := memory.Handle(uint64(time.Since(start).Microseconds()), frame, nil)
		var p wire.Packet
		if _, _, err := wire.ParseFrame(frame, &p); err == nil {
			if plan, ok := memory.plans[planKey{p.Job, p.Epoch}]; ok {
				tr.apply(plan, &p, countedAs(before, memory.reasons))
			}
		}
		verdict, got, err := server.objects.Xagg.Test(frame)
		if err != nil {
			t.Fatal(err)
		}
		expect(t, i, frame, verdict, got, answer)
		if t.Failed() {
			return
		}
	}
	for i := range tr.shadow {
		compareSlot(t, server, uint32(i), &tr.shadow[i])
	}
	compareCounts(t, server, memory)
}

// countedAs returns the reason under which a packet was counted in between.
func countedAs(before, after [wire.NumReasons]uint64) wire.Reason {
	for r := range before {
		if before[r] != after[r] {
			return wire.Reason(r)
		}
	}
	return wire.NumReasons
}

// expect compares one verdict and answer with the reference's.
func expect(t *testing.T, n int, frame []byte, verdict uint32, got, answer []byte) {
	t.Helper()
	switch {
	case answer == nil:
		// Where the reference has no answer the frame must stay as it was, dropped or passed on.
		want := uint32(verdictPass)
		if _, dst, _ := wire.ParseFrame(frame, new(wire.Packet)); dst.Port == wire.Port {
			want = verdictDrop
		}
		if verdict != want || !bytes.Equal(got, frame) {
			t.Errorf("frame %d: verdict %d, want %d\n%s", n, verdict, want, hex.Dump(frame))
		}
	case verdict != verdictTX:
		t.Errorf("frame %d: verdict %d, want an answer\n%s", n, verdict, hex.Dump(frame))
	default:
		times := func(b []byte) (spread, blocked uint32) {
			x := b[wire.FrameOverhead:]
			spread, blocked = binary.BigEndian.Uint32(x[wire.OffSpreadUs:]), binary.BigEndian.Uint32(x[wire.OffBlockedUs:])
			clear(x[wire.OffSpreadUs:wire.OffNextEpoch])
			return spread, blocked
		}
		spread, blocked := times(got)
		times(answer)
		if spread > 60e6 || blocked > spread {
			t.Errorf("frame %d: spread %d us, blocked %d us", n, spread, blocked)
		}
		if !bytes.Equal(got, answer) {
			t.Errorf("frame %d: answer differs (-reference +program)\n%s\nquestion\n%s", n,
				cmp.Diff(hex.Dump(answer), hex.Dump(got)), hex.Dump(frame))
		}
	}
}

// laneOf returns a lane of a chunk or of a running sum, whose slot has them swapped in pairs.
func laneOf(s *xaggSlot, i int) uint32 { return s.Lanes[i^1] }

func compareSlot(t *testing.T, server *Server, index uint32, want *shadow) {
	t.Helper()
	var s xaggSlot
	if err := server.objects.Arena.Lookup(index, &s); err != nil {
		t.Fatal(err)
	}
	got := shadow{s.Job, s.Epoch, uint16(s.Rank), s.Round, s.Mask, s.Tag, s.Amax, s.Sticky, s.Lanes}
	if s.Epoch != 0 { // else clocks, or never used
		for i := range got.lanes {
			got.lanes[i] = laneOf(&s, i)
		}
		clear(got.lanes[int(s.Blocks)*wire.BlockLanes:]) // of an earlier owner
	}
	if got != *want {
		t.Errorf("slot %d: (-want +got)\n%s", index, cmp.Diff(*want, got, cmp.AllowUnexported(shadow{})))
	}
	if s.FirstNs > s.PreviousNs || s.PreviousNs > s.LastNs {
		t.Errorf("slot %d: arrivals at %d, %d, %d", index, s.FirstNs, s.PreviousNs, s.LastNs)
	}
}

// compareCounts compares reasons and statistics, and checks that the trace had every reason in it that a server has.
func compareCounts(t *testing.T, server *Server, memory *Memory) {
	t.Helper()
	want, got := memory.reasons, [wire.NumReasons]uint64{}
	got, err := server.Reasons()
	if err != nil {
		t.Fatal(err)
	}
	if got != want {
		t.Errorf("reasons: (-reference +program)\n%s", cmp.Diff(reasonMap(want), reasonMap(got)))
	}
	for r, n := range want {
		switch reason := wire.Reason(r); reason {
		case wire.ReasonPort, wire.ReasonSource, wire.ReasonSteered, wire.ReasonForwarded, wire.ReasonRoute, wire.ReasonTTL,
			wire.ReasonReturned: // a switch's
		default:
			if n == 0 {
				t.Errorf("reason %v never occurred: the trace does not cover it", reason)
			}
		}
	}
	partials := uint64(0)
	for index := range uint32(MaxJobs) {
		got, err := server.Ranks(index)
		if err != nil {
			t.Fatal(err)
		}
		for rank := range got {
			g, w := got[rank], memory.ranks[index][rank]
			partials += w.Partials
			// Lags differ from the reference's, but must fit each other.
			var inBuckets, most uint64
			for i, n := range g.LagLog2 {
				if inBuckets += n; n != 0 {
					most = 1<<(i+1) - 1
				}
			}
			if g.Packets != w.Packets || g.Partials != w.Partials || inBuckets != g.Packets || g.LagMaxUs > g.LagSumUs ||
				g.LagMaxUs > most || most > 1 && g.LagMaxUs <= most/2 {
				t.Errorf("job index %d rank %d: %+v, reference %+v", index, rank, g, w)
			}
		}
	}
	if partials == 0 {
		t.Error("no PARTIAL was summed: the trace does not cover it")
	}
}
