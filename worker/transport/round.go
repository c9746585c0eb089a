package transport

import (
	"bytes"
	"cmp"
	"fmt"
	"math/bits"
	"slices"
	"time"

	"xagg/agg"
	"xagg/wire"
	"xagg/worker/scale"
)

// maxStrikes is the number of times that the same wrong answer for one chunk ends an all-reduce. Answers carry no UDP
// checksum, so one may be damaged on its way: it counts as lost, and a resend brings another.
const maxStrikes = 3

// vector is what a round sums: values of one of the two types, or none in a scout.
type vector struct {
	f32     []float32
	i32     []int32
	modular bool
	scout   bool
}

func (v *vector) len() int { return len(v.f32) + len(v.i32) }

// slice returns elements from..to.
func (v *vector) slice(from, to int) vector {
	s := vector{modular: v.modular, scout: v.scout}
	if v.modular {
		s.i32 = v.i32[from:to]
	} else {
		s.f32 = v.f32[from:to]
	}
	return s
}

// round is one round of one worker: it encodes contributions when the window asks for them, and takes the answers. It
// knows no clock and no link. Its memory is used again by a later round.
type round struct {
	e         *Endpoint
	call      *Call
	number    uint32      // the window's
	header    wire.Header // what all chunks have in common; Chunk is the first one's number
	vec       vector      // the part of the call's
	offset    int         // of it in the call's
	chunks    uint32
	left      uint32   // chunks without their RESULT
	sum       []int32  // the integers of the result; nil when nobody wants them
	masks     []uint64 // contributors by chunk; nil when nobody wants them, or they are always all ranks
	additions []uint32 // async: contributions in the result by chunk; nil when nobody wants them

	// payloads has wire.MaxLen bytes for each chunk, which have one owner at a time: from the chunk's first transmission
	// on they are its GRAD, and once its RESULT was taken they are that, as it came.
	payloads []byte
	taken    []bool            // chunks whose RESULT is in
	server   []bool            // chunks whose last word came from a server
	strikes  map[uint32]strike // wrong answers by chunk
	total    tally
	lasts    []Last // by rank: chunks of this round on which it was the last
}

// tally is what is counted in a round.
type tally struct {
	packets   uint64
	resends   uint64
	amax      uint8
	saturated int // chunks in which a worker clipped
	clipped   int // lanes that this worker clipped
	last      uint8
	spread    uint32
	blocked   uint32
	held      uint64 // sum of the chunks' spreads, microseconds
	alone     uint64 // likewise of their blocked times
	mask      uint64 // contributors to all chunks
	least     int    // contributors of a chunk
	most      int    // likewise
	late      int    // chunks without this worker
	server    int    // chunks that a server closed
	chunks    uint32 // of the round
	additions uint32 // async: contributions in the result of a chunk, at most
}

// begin starts a round at time now.
func (r *round) begin(now time.Duration, c *Call, vec vector, offset int) error {
	e := r.e
	r.call, r.vec, r.offset = c, vec, offset
	r.chunks = chunksOf(vec.len())
	r.left = r.chunks
	r.header = wire.Header{
		Type: wire.TypeGrad, Job: e.cfg.Job, Rank: uint8(e.cfg.Rank), Contributors: 1 << e.cfg.Rank,
		Exponent: c.info.Exponent, Amax: c.amax,
	}
	missing, some, err := e.foreseen(r.chunks)
	switch {
	case err != nil:
		return err
	case some:
		r.number, r.header.Epoch = e.window.BeginPart(now, missing)
	default:
		r.number, r.header.Epoch = e.window.Begin(now, r.chunks)
	}
	r.header.Round = r.number
	switch s := &c.tensor.sums; {
	case !e.cfg.Async:
	case vec.scout:
		r.header.Round = e.scouts
		e.scouts++
	default:
		r.header.Flags = wire.FlagAsync
		r.header.Round, r.header.Chunk = s.clock, s.base
		s.clock++
	}
	if n := int(r.chunks); n > len(r.taken) {
		r.payloads = make([]byte, n*wire.MaxLen)
		r.taken, r.server = make([]bool, n), make([]bool, n)
	}
	clear(r.taken)
	clear(r.server)
	clear(r.strikes)
	r.total = tally{mask: e.ranks, least: wire.MaxRanks, chunks: r.chunks}
	if r.lasts == nil {
		r.lasts = make([]Last, e.cfg.Ranks)
	}
	clear(r.lasts)
	if e.cfg.Observe != nil {
		r.sum = slices.Grow(r.sum[:0], vec.len())[:vec.len()]
		if e.cfg.Quorum > 0 || e.cfg.Async {
			r.masks = slices.Grow(r.masks[:0], int(r.chunks))[:r.chunks]
		}
		if e.cfg.Async {
			r.additions = slices.Grow(r.additions[:0], int(r.chunks))[:r.chunks]
		}
	}
	return nil
}

// async reports whether the round's contributions are added to running sums.
func (r *round) async() bool { return r.header.Flags&wire.FlagAsync != 0 }

// payload returns the bytes of a chunk.
func (r *round) payload(chunk uint32) []byte {
	return r.payloads[int(chunk)*wire.MaxLen:][:wire.MaxLen]
}

// bounds returns the elements of the round's vector that a chunk holds.
func (r *round) bounds(chunk uint32) (from, to int) {
	from = int(chunk) * wire.MaxLanes
	return from, min(from+wire.MaxLanes, r.vec.len())
}

// shape returns the header fields that all contributions to a chunk have in common.
func (r *round) shape(chunk uint32) (h wire.Header) {
	h = r.header
	h.Chunk += chunk
	from, to := r.bounds(chunk)
	h.Elems = uint16(to - from)
	h.Blocks = wire.BlocksFor(to - from)
	if r.async() {
		return h // a round's number is a clock, and lanes always wrap
	}
	if chunk == r.chunks-1 {
		h.Flags |= wire.FlagLast
	}
	if r.vec.modular {
		h.Flags |= wire.FlagModular
	}
	return h
}

// packet returns the payload of a transmission. It is encoded once: a resend is the same contribution.
func (r *round) packet(s agg.Send) []byte {
	r.total.packets++
	p := r.payload(s.Chunk)
	h := r.shape(s.Chunk)
	p = p[:h.Len()]
	if s.Resend {
		r.total.resends++
		p[wire.OffFlags] |= byte(wire.FlagResend)
		return p
	}
	h.Seq = s.Seq
	from, to := r.bounds(s.Chunk)
	lanes := p[wire.HeaderLen:]
	var tag [2]uint32
	var clipped bool
	if r.vec.modular {
		values := r.vec.i32[from:to]
		if r.async() {
			values, clipped = r.e.clip(values)
		}
		tag = scale.EncodeInt32(lanes, values)
	} else {
		tag, clipped = scale.Encode(lanes, r.vec.f32[from:to], h.Exponent, r.e.limit)
	}
	if clipped {
		h.Flags |= wire.FlagSaturated
	}
	place := wire.TagPlace(h.Job, h.Round, h.Chunk, h.Rank)
	if r.async() {
		place = wire.TagPlace(h.Job, 0, h.Chunk, 0)
	}
	for t := range h.Tag {
		h.Tag[t] = (place[t] + tag[t]) % wire.P
	}
	wire.PutHeader(p, &h)
	return p
}

// clip returns integers of a chunk, or where any exceeds the limit a copy of them without what exceeds it.
func (e *Endpoint) clip(values []int32) (within []int32, clipped bool) {
	for i, v := range values {
		if v >= -e.limit && v <= e.limit {
			continue
		}
		if !clipped {
			clipped = true
			e.clipped = append(e.clipped[:0], values...)
		}
		e.clipped[i] = max(-e.limit, min(v, e.limit))
	}
	if clipped {
		return e.clipped, true
	}
	return values, false
}

// handle tells the window of the answer under examination, in its own numbers.
func (r *round) handle(now time.Duration) agg.Event {
	h := r.e.answer.Header
	h.Round = r.number
	h.Chunk -= r.header.Chunk
	if r.e.cfg.Async {
		h.NextEpoch = 0 // an async job's plan is changed otherwise
	}
	return r.e.window.Handle(now, &h)
}

// take handles the answer under examination, which is for a chunk of the round that has no RESULT yet. Errors end the
// round.
func (r *round) take(now time.Duration, b []byte) error {
	e := r.e
	p := &e.answer
	switch p.Type {
	case wire.TypeResult:
		return r.result(now, b)
	case wire.TypeNack:
		switch r.handle(now) {
		case agg.EventRefused:
			return r.strike(b, &RefusedError{Round: p.Round, Chunk: p.Chunk, Reason: p.Reason})
		case agg.EventForgotten:
			e.unknown = p.Reason
		}
	case wire.TypeWait, wire.TypeAck:
		r.server[p.Chunk-r.header.Chunk] = p.Type == wire.TypeAck || e.cfg.Async
		e.unknown = wire.ReasonNone
		r.handle(now)
	default:
		e.stats.Malformed++ // not for a worker
	}
	return nil
}

// result takes a RESULT of a chunk that has none yet, if it is the sum of what all ranks sent, or enough of them.
func (r *round) result(now time.Duration, b []byte) error {
	e := r.e
	p := &e.answer
	if err := p.Decode(b); err != nil { // not possible: the header was decoded before
		return fmt.Errorf("decode result: %w", err)
	}
	want := r.shape(p.Chunk - r.header.Chunk)
	if diff := r.shapeDiff(&p.Header, &want); diff != "" {
		return r.strike(b, &IntegrityError{Round: p.Round, Chunk: p.Chunk, Shape: diff})
	}
	if !r.tagOK() {
		return r.strike(b, &IntegrityError{Round: p.Round, Chunk: p.Chunk})
	}
	if r.handle(now) != agg.EventResult {
		e.stats.Late++ // for a chunk that was not sent: nobody who keeps the rules does that
		return nil
	}
	e.unknown = wire.ReasonNone
	if wire.SerialLess(e.newest, r.number) {
		e.newest = r.number
	}
	r.settle(b)
	e.forget(r.number)
	return nil
}

// tagOK reports whether the RESULT under examination is what its tag says. That of a running sum is turned into the
// difference to the last one: its lanes are what was added since then.
func (r *round) tagOK() bool {
	p := &r.e.answer
	if !r.async() {
		return p.TagOK()
	}
	s, chunk := &r.call.tensor.sums, p.Chunk-r.header.Chunk
	from, to := r.bounds(chunk)
	for i, v := range s.lanes[from:to] {
		p.Lanes[i] -= v
	}
	last := s.chunks[chunk]
	return wire.DifferenceOK(p.Job, p.Chunk, p.Seq-last.additions, last.tag, p.Tag, p.Lanes[:to-from])
}

// advance makes the RESULT under examination, of which the lanes are a difference, a chunk's last running sum. It
// returns the number of contributions in the difference.
func (s *sums) advance(p *wire.Packet, chunk uint32, from, to int) (additions uint32) {
	for i := range s.lanes[from:to] {
		s.lanes[from+i] += p.Lanes[i]
	}
	last := &s.chunks[chunk]
	additions = p.Seq - last.additions
	last.tag, last.additions, last.saturated = p.Tag, p.Seq, p.Flags&wire.FlagSaturated != 0
	return additions
}

// settle takes the RESULT under examination, whose payload is b, as its chunk's. What the chunk's sum does not have of
// this worker's values is kept for the tensor's next all-reduce: all of them where its bit is not in the mask.
func (r *round) settle(b []byte) {
	p := &r.e.answer
	chunk := p.Chunk - r.header.Chunk
	copy(r.payload(chunk), b)
	r.taken[chunk] = true
	r.left--
	from, to := r.bounds(chunk)
	lanes := p.Lanes[:to-from]
	if r.sum != nil {
		copy(r.sum[from:to], lanes)
	}
	t := &r.total
	if p.Flags&wire.FlagSaturated != 0 && !(r.async() && r.call.tensor.sums.chunks[chunk].saturated) {
		t.saturated++
	}
	own := r.vec.slice(from, to)
	ranks := bits.OnesCount64(p.Contributors)
	switch {
	case p.Contributors>>r.header.Rank&1 == 0:
		t.late++
		r.call.tensor.keep(own, r.offset+from)
	case p.Flags&wire.FlagSaturated != 0:
		r.keepRest(own, from)
	}
	if r.async() {
		n := r.call.tensor.sums.advance(p, chunk, from, to)
		t.additions = max(t.additions, n)
		if r.additions != nil {
			r.additions[chunk] = n
		}
	}
	switch {
	case r.vec.modular:
		copy(own.i32, lanes)
	case r.e.cfg.Quorum > 0:
		scale.DecodeMean(own.f32, lanes, p.Exponent, ranks)
	default:
		scale.Decode(own.f32, lanes, p.Exponent)
	}
	t.mask &= p.Contributors
	t.least, t.most = min(t.least, ranks), max(t.most, ranks)
	if p.Flags&wire.FlagServer != 0 {
		t.server++
	}
	if r.masks != nil {
		r.masks[chunk] = p.Contributors
	}
	t.amax = max(t.amax, p.Amax)
	t.spread = max(t.spread, p.SpreadUs)
	t.held += uint64(p.SpreadUs)
	t.alone += uint64(min(p.BlockedUs, p.SpreadUs))
	if p.BlockedUs >= t.blocked {
		t.last, t.blocked = p.Rank, p.BlockedUs
	}
	if int(p.Rank) < len(r.lasts) {
		r.lasts[p.Rank].add(Last{1, microseconds(p.BlockedUs)})
	}
}

// keepRest keeps for the tensor's next all-reduce what did not fit the lanes of some values, which begin at an element of
// the round's vector.
func (r *round) keepRest(values vector, from int) {
	t := r.call.tensor
	for i, v := range values.i32 {
		if r.async() && (v < -r.e.limit || v > r.e.limit) {
			r.total.clipped++
			t.ints = append(t.ints, rest[int32]{r.offset + from + i, v - max(-r.e.limit, min(v, r.e.limit))})
		}
	}
	scale.Clipped(values.f32, r.header.Exponent, r.e.limit, func(i int, value float32) {
		r.total.clipped++
		t.floats = append(t.floats, rest[float32]{r.offset + from + i, value})
	})
}

// shapeDiff says in what a RESULT differs from the worker's own contribution, or nothing.
func (r *round) shapeDiff(got, want *wire.Header) string {
	switch {
	case !r.enough(got.Contributors):
		return fmt.Sprintf("the contributions of %d ranks (mask %#x) instead of %d", bits.OnesCount64(got.Contributors),
			got.Contributors, cmp.Or(r.e.cfg.Quorum, r.e.cfg.Ranks))
	case got.Elems != want.Elems || got.Blocks != want.Blocks:
		return fmt.Sprintf("%d lanes instead of %d", got.Elems, want.Elems)
	case got.Exponent != want.Exponent:
		return fmt.Sprintf("exponent %d instead of %d", got.Exponent, want.Exponent)
	case got.Epoch != want.Epoch:
		return fmt.Sprintf("epoch %d instead of %d", got.Epoch, want.Epoch)
	case (got.Flags^want.Flags)&wire.ShapeFlags != 0:
		return fmt.Sprintf("flags %#x instead of %#x", got.Flags&wire.ShapeFlags, want.Flags&wire.ShapeFlags)
	}
	return ""
}

// enough reports whether a RESULT of the round may have these contributors.
func (r *round) enough(mask uint64) bool {
	if r.e.cfg.Async && r.vec.scout {
		return mask == r.e.ranks
	}
	return r.e.window.Enough(mask)
}

// strike is what is known of the wrong answers for a chunk.
type strike struct {
	answer []byte // the last
	count  int    // so many times in a row
}

// strike counts a wrong answer for the chunk under examination. It returns err when the same has come too often: what
// noise on the way has done to an answer differs from one time to the next.
func (r *round) strike(b []byte, err error) error {
	r.e.stats.Wrong++
	if r.strikes == nil {
		r.strikes = map[uint32]strike{}
	}
	s := r.strikes[r.e.answer.Chunk]
	if bytes.Equal(s.answer, b) {
		s.count++
	} else {
		s = strike{append(s.answer[:0], b...), 1}
	}
	r.strikes[r.e.answer.Chunk] = s
	if s.count < maxStrikes {
		return nil
	}
	return err
}
