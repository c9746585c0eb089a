package conformance

import (
	"encoding/binary"
	"math"
	"math/rand/v2"
	"slices"

	"xagg/wire"
)

// Bytes of a frame that the traces and the comparison touch; the header's own are wire.Off*.
const (
	offEtherType = 12
	offVersion   = 14
	offTOS       = 15
	offTotalLen  = 16
	offID        = 18
	offFragment  = 20
	offTTL       = 22
	offProtocol  = 23
	offIPSum     = 24
	offSrcIP     = 26
	offDstIP     = 30
	offUDP       = 34
	offUDPLen    = 38
	offUDPSum    = 40
	offX         = wire.FrameOverhead
)

// A tracer makes the inputs of one trace. The same scenario and seed give the same trace.
type tracer struct {
	*rand.Rand
	s    *scenario
	head []uint32 // by plan: the seq that its workers have come to
	late []input  // contributions to be sent again later
	live []int    // plans that are installed
	step int      // of the changes
}

// trace returns n inputs for the scenario.
func (s *scenario) trace(seed uint64, n int) []input {
	t := &tracer{Rand: rand.New(rand.NewPCG(seed, 0)), s: s}
	for i, pl := range s.plans {
		if !pl.later {
			t.live = append(t.live, i)
		}
		// Some traces cross the end of the numbers.
		t.head = append(t.head, []uint32{0, 1000, math.MaxUint32 - 10, math.MaxInt32 - 10}[t.IntN(4)])
	}
	inputs := make([]input, n)
	for i := range inputs {
		inputs[i] = t.next()
	}
	return inputs
}

func (t *tracer) next() input {
	if len(t.live) < len(t.s.plans) && t.IntN(20) == 0 {
		return input{change: t.change()}
	}
	switch n := t.IntN(100); {
	case n < 50:
		return t.contribution()
	case n < 56 && len(t.late) > 0:
		return t.late[t.IntN(len(t.late))]
	case n < 72:
		return t.damaged()
	case n < 82 && (t.s.servers > 0 || t.IntN(8) == 0):
		return t.fromServer()
	case n < 84:
		return t.misplaced()
	case n < 89:
		return t.arp()
	case n < 96:
		return t.ordinary()
	default:
		return t.packetOut()
	}
}

// grad returns rank's contribution to seq. Its shape depends on the seq alone, so all ranks agree.
func (t *tracer) grad(pl *plan, rank int, seq uint32) *wire.Packet {
	p := &wire.Packet{Header: wire.Header{
		Type: wire.TypeGrad, Job: pl.job, Epoch: pl.epoch, Rank: uint8(rank), Seq: seq, Round: seq / 3, Chunk: seq % 3,
		Elems:    []uint16{256, 0, 1, 63, 64, 65, 128, 129, 192, 193, 255}[seq%11],
		Exponent: int8(seq), Contributors: 1 << rank, Amax: uint8(t.Uint32()),
	}}
	p.Blocks = wire.BlocksFor(int(p.Elems))
	switch {
	case pl.async && seq%3 != 0, // the others are scouts
		!pl.async && seq%13 == 7: // which the cohort may not send
		p.Flags |= wire.FlagAsync
	case p.Chunk == 2:
		p.Flags |= wire.FlagLast
	}
	if seq%5 == 0 && p.Flags&wire.FlagAsync == 0 {
		p.Flags |= wire.FlagModular
	}
	if t.IntN(4) == 0 {
		p.Flags |= wire.FlagResend
	}
	if t.IntN(8) == 0 {
		p.Flags |= wire.FlagSaturated
	}
	t.fill(p.Lanes[:p.Elems])
	p.Seal()
	return p
}

// fill sets lanes: mostly to patterns, so that recordings compress.
func (t *tracer) fill(lanes []int32) {
	extremes := []int32{math.MaxInt32, math.MinInt32, -1, 1, 0}
	a, b := extremes[t.IntN(5)], extremes[t.IntN(5)]
	v := int32(t.Uint32())
	kind := t.IntN(8)
	for i := range lanes {
		switch kind {
		case 0:
			lanes[i] = int32(t.Uint32())
		case 1, 2:
			lanes[i] = v
		case 3, 4:
			lanes[i] = int32(i+1) * (v >> 24)
		default:
			if lanes[i] = a; i%2 == 1 {
				lanes[i] = b
			}
		}
	}
}

// change is the next step of a controller that goes through the plans in their order, again and again.
func (t *tracer) change() *change {
	from, n := t.step/3, len(t.s.plans)
	old, new := from%n, (from+1)%n
	sameJob := t.s.plans[old].job == t.s.plans[new].job
	if sameJob && t.step%3 == 0 { // the new one beside the old one
		t.step++
		t.live = append(t.live, new)
		return &change{op: "install", plan: new}
	}
	if sameJob && t.step%3 == 1 {
		t.step++
		return &change{op: "arm", plan: old, next: t.s.plans[new].epoch}
	}
	if i := slices.Index(t.live, old); i >= 0 {
		t.live = slices.Delete(t.live, i, i+1)
		if sameJob {
			t.step++
		}
		return &change{op: "remove", plan: old}
	}
	t.step += 3 // another job: the old one had to go first
	t.live = append(t.live, new)
	return &change{op: "install", plan: new}
}

// plan chooses a plan, now and then one that is not installed.
func (t *tracer) plan() (int, *plan) {
	i := t.IntN(len(t.s.plans))
	if len(t.live) > 0 && t.IntN(8) != 0 {
		i = t.live[t.IntN(len(t.live))]
	}
	return i, &t.s.plans[i]
}

// sent is a packet of worker w to the service.
func (t *tracer) sent(w int, p *wire.Packet) input {
	h := worker(w)
	switch t.IntN(8) {
	case 0: // fields that a GRAD leaves alone
		p.SpreadUs, p.BlockedUs, p.NextEpoch, p.Reason = t.Uint32(), t.Uint32(), uint16(t.Uint32()), wire.Reason(t.Uint32())
	case 1: // a tag chosen so that the checksum is zero, which is written as its complement
		p.Tag[1] = zeroChecksum(h.addr, service, *p)
	case 2: // after the switch has passed it on
		q := *p
		q.Flags |= wire.FlagForwarded
		p.Tag[1] = zeroChecksum(h.addr, server(0).addr, q)
	case 3: // as a PARTIAL of its own
		q := *p
		q.Type, q.Flags = wire.TypePartial, q.Flags&(wire.ShapeFlags|wire.StickyFlags)
		p.Tag[1] = zeroChecksum(service, server(0).addr, q)
	}
	frame := wire.AppendFrame(nil, h.addr, service, p, t.IntN(8) != 0)
	if t.IntN(8) == 0 { // header fields that an answer takes over
		frame[offTOS] = uint8(t.Uint32())
		frame[offID] = uint8(t.Uint32())
		frame[offTTL] = uint8(t.Uint32())
		frame[offFragment] &= uint8(t.Uint32()) | 0x1f
		sumIPv4(frame)
	}
	return input{port: h.port, frame: frame}
}

// zeroChecksum returns the second tag with which the UDP checksum comes to zero.
func zeroChecksum(src, dst wire.Addr, p wire.Packet) uint32 {
	p.Tag[1] = 0
	f := wire.AppendFrame(nil, src, dst, &p, true)
	return uint32(binary.BigEndian.Uint16(f[offUDPSum:]))
}

// contribution is a GRAD that is right, of a chunk near to where the plan has come.
func (t *tracer) contribution() input {
	i, pl := t.plan()
	seq := t.head[i]
	switch t.IntN(8) {
	case 0:
		seq -= t.Uint32N(3 * max(pl.pool, 1)) // behind
	case 1:
		seq += t.Uint32N(2 * max(pl.pool, 1)) // ahead
	}
	if t.IntN(2*len(pl.workers)+2) == 0 {
		t.head[i]++
	}
	r := t.IntN(len(pl.workers))
	in := t.sent(pl.workers[r], t.grad(pl, r, seq))
	if t.IntN(6) == 0 {
		t.late = append(t.late, in)
	}
	return in
}

// damaged is a GRAD with a fault.
func (t *tracer) damaged() input {
	i, pl := t.plan()
	r := t.IntN(len(pl.workers))
	w := pl.workers[r]
	p := t.grad(pl, r, t.head[i])

	// Faults of the packet, in a frame that is right.
	switch t.IntN(30) {
	case 0:
		p.Job = uint16(t.Uint32()) | 0x4000
	case 1:
		p.Epoch += uint16(t.IntN(5)) - 2
	case 2:
		p.Rank = uint8(t.IntN(70))
	case 3:
		p.Contributors = t.Uint64()
	case 4:
		p.Contributors = 0
	case 5:
		p.Contributors |= 1 << t.IntN(64)
	case 6:
		p.Tag[t.IntN(2)] = wire.P + t.Uint32N(2)
	case 7:
		p.Tag = [2]uint32{t.Uint32(), t.Uint32()}
	case 8:
		p.Round++
	case 9:
		p.Chunk++
	case 10:
		p.Exponent++
	case 11:
		p.Flags ^= 1 << t.IntN(8)
	case 12: // another shape, right in itself
		p.Elems = uint16(t.IntN(257))
		p.Blocks = wire.BlocksFor(int(p.Elems))
	case 13: // one that is wrong in itself
		p.Elems = uint16(t.Uint32N(400))
	case 14:
		p.Elems = uint16(t.Uint32())
	case 15: // of a running sum, in a plan that has none, or the other way round
		p.Flags ^= wire.FlagAsync
	}
	in := t.sent(w, p)

	// Faults of the frame.
	f := in.frame
	switch t.IntN(24) {
	case 0, 1:
		in.port = uint16(t.IntN(8) + 1)
	case 2:
		in.port = uint16(65 + t.IntN(2))
	case 3:
		f[offSrcIP+3]++
		sumAll(f)
	case 4:
		f[offX+wire.OffVersionType] = uint8(t.Uint32())
		sumAll(f)
	case 5:
		f[offX+wire.OffVersionType] = wire.Version<<4 | uint8(t.IntN(16))
		sumAll(f)
	case 6:
		f[offX+wire.OffBlocks] = uint8(t.IntN(8))
		sumAll(f)
	case 7:
		f[offX+wire.OffReserved+t.IntN(5)] |= 1 << t.IntN(8)
		sumAll(f)
	case 8:
		f[offUDPSum+t.IntN(2)] ^= 1 << t.IntN(8)
	case 9:
		f[offIPSum+t.IntN(2)] ^= 1 << t.IntN(8)
	case 10, 11: // any bit behind the addresses
		f[offSrcIP+t.IntN(len(f)-offSrcIP)] ^= 1 << t.IntN(8)
	case 12: // the frame is longer than IPv4 says
		in.frame = append(f, make([]byte, 1+t.IntN(20))...)
	case 13: // IPv4 is longer than UDP says
		in.frame = append(f, make([]byte, 1+t.IntN(20))...)
		add16(in.frame[offTotalLen:], len(in.frame)-len(f))
		sumIPv4(in.frame)
	case 14: // UDP is longer than the blocks
		in.frame = append(f, make([]byte, 1+t.IntN(300))...)
		add16(in.frame[offTotalLen:], len(in.frame)-len(f))
		add16(in.frame[offUDPLen:], len(in.frame)-len(f))
		sumAll(in.frame)
	case 15: // the frame ends early
		in.frame = f[:1+t.IntN(len(f)-1)] // a frame of no bytes is none
	case 16: // and its lengths say so
		in.frame = f[:offX+t.IntN(len(f)-offX)]
		add16(in.frame[offTotalLen:], len(in.frame)-len(f))
		add16(in.frame[offUDPLen:], len(in.frame)-len(f))
		sumAll(in.frame)
	case 17:
		add16(f[offTotalLen:], t.IntN(5)-2)
		sumIPv4(f)
	case 18:
		add16(f[offUDPLen:], t.IntN(5)-2)
		sumAll(f)
	}
	return in
}

// fromServer is an answer of a server, mostly from where it may come.
func (t *tracer) fromServer() input {
	i, pl := t.plan()
	w := t.IntN(len(pl.workers))
	p := t.grad(pl, w, t.head[i])
	p.Type = []wire.Type{wire.TypeResult, wire.TypeResult, wire.TypeAck, wire.TypeWait, wire.TypeNack}[t.IntN(5)]
	p.Contributors = t.Uint64() & pl.ranks()
	p.SpreadUs, p.BlockedUs, p.NextEpoch, p.Reason = t.Uint32(), t.Uint32(), uint16(t.IntN(3)), wire.Reason(t.IntN(wire.NumReasons))
	if p.Type == wire.TypeResult {
		p.Flags |= wire.Flags(t.Uint32()) & (wire.FlagServer | wire.FlagLate)
	}
	if p.Type != wire.TypeResult {
		p.Blocks = 0
	}
	h := server(0)
	if len(pl.servers) > 0 {
		h = server(pl.servers[t.IntN(len(pl.servers))])
	}
	switch t.IntN(12) {
	case 0:
		p.Job ^= 0x5000
	case 1:
		p.Epoch++
	case 2:
		h.port = uint16(1 + t.IntN(6))
	case 3:
		h.port = uint16(65 + t.IntN(3))
	}
	to := service
	if t.IntN(2) == 0 {
		to = worker(w).addr
	}
	f := wire.AppendFrame(nil, h.addr, to, p, t.IntN(2) == 0)
	if p.Type != wire.TypeResult && t.IntN(4) == 0 { // with blocks, which it need not have, but may
		payload := make([]byte, wire.HeaderLen+t.IntN(6)*wire.BlockLen)
		p.Blocks = uint8((len(payload) - wire.HeaderLen) / wire.BlockLen)
		wire.PutHeader(payload, &p.Header)
		f = wire.AppendUDP(nil, h.addr, to, payload, true)
	}
	switch t.IntN(12) {
	case 0:
		f[offTTL] = uint8(t.IntN(3))
		sumIPv4(f)
	case 1:
		f[offDstIP+3] = 99 // to nobody, if it was to a worker
		sumAll(f)
	case 2:
		f[offX+wire.OffVersionType+t.IntN(wire.HeaderLen)] ^= 1 << t.IntN(8)
	}
	return input{port: h.port, frame: f}
}

// misplaced is a packet that nobody sends to a switch.
func (t *tracer) misplaced() input {
	i, pl := t.plan()
	p := t.grad(pl, 0, t.head[i])
	if p.Type = wire.TypePartial; t.IntN(2) == 0 {
		p.Type = wire.TypeCtrl
	}
	in := t.sent(pl.workers[0], p)
	if t.IntN(2) == 0 {
		in.port = server(0).port
	}
	return in
}

func (t *tracer) someHost() host {
	hosts := t.s.hosts()
	return hosts[t.IntN(len(hosts))]
}

// arp is a request or a reply.
func (t *tracer) arp() input {
	from, to := t.someHost(), t.someHost().addr
	if t.IntN(2) == 0 {
		to = service
	}
	f := arpFrame(from, to, byte(1+t.IntN(2)))
	switch t.IntN(6) {
	case 0:
		f = f[:1+t.IntN(len(f)-1)]
	case 1, 2:
		f = append(f, make([]byte, 18)...) // as Ethernet pads
	case 3:
		f[38] = 11 // for an address that nobody has
	}
	return input{port: from.port, frame: f}
}

// arpFrame is a request (op 1) for to's address or a reply (op 2) to to.
func arpFrame(from host, to wire.Addr, op byte) []byte {
	f := make([]byte, 42)
	if op == 1 {
		copy(f, "\xff\xff\xff\xff\xff\xff")
	} else {
		copy(f, to.MAC[:])
		copy(f[32:], to.MAC[:])
	}
	copy(f[6:], from.addr.MAC[:])
	copy(f[offEtherType:], []byte{8, 6, 0, 1, 8, 0, 6, 4, 0, op})
	copy(f[22:], from.addr.MAC[:])
	copy(f[28:], from.addr.IP[:])
	copy(f[38:], to.IP[:])
	return f
}

// ordinary is traffic that is no concern of the protocol's.
func (t *tracer) ordinary() input {
	from, to := t.someHost(), t.someHost().addr
	from.addr.Port, to.Port = uint16(t.IntN(9000)), uint16(t.IntN(9000))
	payload := make([]byte, t.IntN(200))
	t.fillBytes(payload)
	f := wire.AppendUDP(nil, from.addr, to, payload, true)
	f[offTOS], f[offTTL] = uint8(t.Uint32()), uint8(t.IntN(255)+1)
	switch t.IntN(16) {
	case 0:
		f[offProtocol] = 6
	case 1:
		f[offProtocol] = 1
	case 2:
		f[offProtocol] = uint8(t.Uint32())
	case 3:
		f[offTTL] = uint8(t.IntN(3))
	case 4:
		f[offDstIP+2] = 200 // no such host
	case 5: // another ethertype
		binary.BigEndian.PutUint16(f[offEtherType:], []uint16{0x86dd, 0x8100, 0x88cc, uint16(t.Uint32())}[t.IntN(4)])
	case 6: // options, or a header that is too short
		f[offVersion] = 4<<4 | uint8(t.IntN(16))
	case 7: // not version 4
		f[offVersion] = uint8(t.IntN(16))<<4 | 5
	case 8: // a fragment of the protocol's packet, which cannot be told
		in := t.contribution()
		f = in.frame
		binary.BigEndian.PutUint16(f[offFragment:], []uint16{0x2000, 0x2001, 1, 0x100, 0x6000}[t.IntN(5)])
		copy(f[offDstIP:], to.IP[:])
	case 9: // the protocol's packet in something else than UDP and IPv4 without options
		in := t.contribution()
		f = in.frame
		switch t.IntN(3) {
		case 0:
			f[offProtocol] = 6
		case 1:
			f[offVersion] = 4<<4 | 6
		case 2:
			f[offVersion] = 6<<4 | 5
		}
		copy(f[offDstIP:], to.IP[:])
	case 10: // the protocol's port, and something else behind it
		f[offUDP] = wire.Port >> 8
		f[offUDP+1] = wire.Port & 0xff
	case 11:
		f = f[:1+t.IntN(len(f)-1)]
	case 12: // padded
		f = append(f, make([]byte, t.IntN(20))...)
	case 13:
		payload := make([]byte, t.IntN(70))
		t.fillBytes(payload)
		return input{port: from.port, frame: append([]byte{2}, payload...)}
	case 14: // a checksum that one step of the time to live takes to the border where RFC 1141 errs
		clear(f[offID : offID+2])
		clear(f[offIPSum : offIPSum+2])
		const sum = 0xffff - 0xfeff
		binary.BigEndian.PutUint16(f[offID:], uint16((0xffff+sum-uint32(onesSum(f[offVersion:offUDP])))%0xffff))
	}
	if len(f) >= offUDP {
		sumIPv4(f)
		if t.IntN(12) == 0 {
			f[offIPSum] ^= 4
		}
	}
	return input{port: from.port, frame: f}
}

func (t *tracer) fillBytes(b []byte) {
	for i := range b {
		b[i] = uint8(t.Uint32())
	}
}

// packetOut is a frame from the controller: a question for a slot, or a frame that leaves as it is.
func (t *tracer) packetOut() input {
	h := t.someHost()
	in := input{port: cpuPort, egress: h.port}
	switch t.IntN(5) {
	case 0:
		in.frame = t.arp().frame
	case 1:
		in.frame = t.ordinary().frame
	case 2:
		in.frame = t.contribution().frame
		if t.IntN(2) == 0 {
			in.frame[offIPSum] ^= 1 // none of the switch's business
		}
	default:
		i, pl := t.plan()
		p := t.grad(pl, 0, t.head[i])
		p.Type = wire.TypeCtrl
		p.Seq = pl.base + t.Uint32N(2*max(pl.pool, 1))
		if t.IntN(3) == 0 {
			p.Seq = 4095 + t.Uint32N(3)
		}
		from := h.addr
		from.Port = uint16(50000 + t.IntN(1000))
		in.frame = wire.AppendFrame(nil, from, service, p, t.IntN(2) == 0)
		if t.IntN(8) == 0 { // a question of another version is none
			in.frame[offX+wire.OffVersionType] ^= 0x30
		}
	}
	return in
}

// sumIPv4 writes the checksum of an IPv4 header without options.
func sumIPv4(f []byte) {
	f[offIPSum], f[offIPSum+1] = 0, 0
	binary.BigEndian.PutUint16(f[offIPSum:], ^onesSum(f[offVersion:offUDP]))
}

// sumAll writes the checksums of IPv4 and UDP, the latter over what the frame holds behind the IPv4 header.
func sumAll(f []byte) {
	sumIPv4(f)
	f[offUDPSum], f[offUDPSum+1] = 0, 0
	pseudo := append([]byte{}, f[offSrcIP:offUDP]...)
	pseudo = append(pseudo, 0, f[offProtocol], f[offUDPLen], f[offUDPLen+1])
	sum := ^onesSum(append(pseudo, f[offUDP:]...))
	if sum == 0 {
		sum = 0xffff
	}
	binary.BigEndian.PutUint16(f[offUDPSum:], sum)
}

// onesSum is RFC 1071, word by word: a second opinion on wire's.
func onesSum(b []byte) uint16 {
	var sum uint32
	for i, c := range b {
		if i%2 == 0 {
			sum += uint32(c) << 8
		} else {
			sum += uint32(c)
		}
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return uint16(sum)
}

func add16(b []byte, n int) {
	binary.BigEndian.PutUint16(b, uint16(int(binary.BigEndian.Uint16(b))+n))
}
