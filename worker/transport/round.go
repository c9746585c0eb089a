package transport

import (
	"fmt"
	"math/bits"
	"time"

	"xagg/agg"
	"xagg/wire"
	"xagg/worker/scale"
)

// maxStrikes is the number of wrong answers for one chunk that end an all-reduce. Answers carry no UDP checksum, so one
// may be damaged on its way: it counts as lost, and a resend brings another.
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
// knows no clock and no link. Its memory is used again by the next round.
type round struct {
	window *agg.Window
	ranks  uint64 // all ranks of the job

	header wire.Header // what all chunks have in common
	vec    vector
	chunks uint32
	limit  int32
	clip   func(i int, rest float32) // lane i of the vector did not fit
	sum    []int32                   // the integers of the result; nil when nobody wants them

	packets []byte           // wire.MaxLen bytes per chunk
	taken   []bool           // chunks whose RESULT is in
	server  []bool           // chunks whose last word came from a server
	strikes map[uint32]uint8 // wrong answers per chunk
	answer  wire.Packet      // under examination
	total   tally            //
	stats   Stats            // since the endpoint was made, but for the window's own
}

// tally is what the RESULTs of a round said together.
type tally struct {
	amax      uint8
	saturated int // chunks in which a worker clipped
	clipped   int // lanes that this worker clipped
	last      uint8
	spread    uint32
	blocked   uint32
}

// begin starts a round at time now.
func (r *round) begin(now time.Duration, vec vector, exponent int8, amax uint8) {
	r.vec = vec
	r.chunks = uint32(max(1, (vec.len()+wire.MaxLanes-1)/wire.MaxLanes))
	r.header.Exponent, r.header.Amax = exponent, amax
	r.header.Round, r.header.Epoch = r.window.Begin(now, r.chunks)
	if n := int(r.chunks); n > len(r.taken) {
		r.packets = make([]byte, n*wire.MaxLen)
		r.taken, r.server = make([]bool, n), make([]bool, n)
	}
	clear(r.taken)
	clear(r.server)
	clear(r.strikes)
	r.total = tally{}
}

// bounds returns the elements of the vector that a chunk holds.
func (r *round) bounds(chunk uint32) (from, to int) {
	from = int(chunk) * wire.MaxLanes
	return from, min(from+wire.MaxLanes, r.vec.len())
}

// shape returns the header fields that all contributions to a chunk have in common.
func (r *round) shape(chunk uint32) (h wire.Header) {
	h = r.header
	h.Chunk = chunk
	from, to := r.bounds(chunk)
	h.Elems = uint16(to - from)
	h.Blocks = wire.BlocksFor(to - from)
	if chunk == r.chunks-1 {
		h.Flags |= wire.FlagLast
	}
	if r.vec.modular {
		h.Flags |= wire.FlagModular
	}
	return h
}

// packet returns the payload of a transmission. It is valid until the round ends, and encoded once: a resend is the
// same contribution.
func (r *round) packet(s agg.Send) []byte {
	p := r.packets[int(s.Chunk)*wire.MaxLen:][:wire.MaxLen]
	h := r.shape(s.Chunk)
	p = p[:h.Len()]
	if s.Resend {
		p[wire.OffFlags] |= byte(wire.FlagResend)
		return p
	}
	h.Seq = s.Seq
	from, to := r.bounds(s.Chunk)
	lanes := p[wire.HeaderLen:]
	var tag [2]uint32
	if r.vec.modular {
		tag = scale.EncodeInt32(lanes, r.vec.i32[from:to])
	} else {
		before := r.total.clipped
		tag = scale.Encode(lanes, r.vec.f32[from:to], h.Exponent, r.limit, func(i int, rest float32) {
			r.total.clipped++
			r.clip(from+i, rest)
		})
		if r.total.clipped > before {
			h.Flags |= wire.FlagSaturated
		}
	}
	place := wire.TagPlace(h.Job, h.Round, h.Chunk, h.Rank)
	for t := range h.Tag {
		h.Tag[t] = (place[t] + tag[t]) % wire.P
	}
	wire.PutHeader(p, &h)
	return p
}

// due appends the payloads that are to be sent at time now to batch, up to its capacity.
func (r *round) due(now time.Duration, batch [][]byte) [][]byte {
	for len(batch) < cap(batch) {
		s, ok := r.window.Next(now)
		if !ok {
			break
		}
		batch = append(batch, r.packet(s))
	}
	return batch
}

// take handles a payload that arrived at time now. Errors end the round.
func (r *round) take(now time.Duration, b []byte) error {
	p := &r.answer
	if err := wire.DecodeHeader(b, &p.Header); err != nil {
		r.stats.Malformed++
		return nil
	}
	if p.Job != r.header.Job || p.Round != r.header.Round || p.Chunk >= r.chunks || r.taken[p.Chunk] {
		r.stats.Late++
		return nil
	}
	switch p.Type {
	case wire.TypeResult:
		return r.result(now, b)
	case wire.TypeNack:
		if r.window.Handle(now, &p.Header) == agg.EventRefused {
			return r.strike(&RefusedError{Round: p.Round, Chunk: p.Chunk, Reason: p.Reason})
		}
	case wire.TypeWait, wire.TypeAck:
		r.server[p.Chunk] = p.Type == wire.TypeAck
		r.window.Handle(now, &p.Header)
	default:
		r.stats.Malformed++ // not for a worker
	}
	return nil
}

// result takes a RESULT of a chunk that has none yet, if it is the sum of what all ranks sent.
func (r *round) result(now time.Duration, b []byte) error {
	p := &r.answer
	if err := p.Decode(b); err != nil { // not possible: the header was decoded before
		return fmt.Errorf("decode result: %w", err)
	}
	want := r.shape(p.Chunk)
	if diff := shapeDiff(&p.Header, &want, r.ranks); diff != "" {
		return r.strike(&IntegrityError{Round: p.Round, Chunk: p.Chunk, Shape: diff})
	}
	if !p.TagOK() {
		return r.strike(&IntegrityError{Round: p.Round, Chunk: p.Chunk})
	}
	if r.window.Handle(now, &p.Header) != agg.EventResult {
		r.stats.Late++ // for a chunk that was not sent: nobody who keeps the rules does that
		return nil
	}
	r.taken[p.Chunk] = true
	from, to := r.bounds(p.Chunk)
	lanes := p.Lanes[:to-from]
	if r.sum != nil {
		copy(r.sum[from:to], lanes)
	}
	if r.vec.modular {
		copy(r.vec.i32[from:to], lanes)
	} else {
		scale.Decode(r.vec.f32[from:to], lanes, p.Exponent)
	}
	t := &r.total
	t.amax = max(t.amax, p.Amax)
	if p.Flags&wire.FlagSaturated != 0 {
		t.saturated++
	}
	t.spread = max(t.spread, p.SpreadUs)
	if p.BlockedUs >= t.blocked {
		t.last, t.blocked = p.Rank, p.BlockedUs
	}
	return nil
}

// shapeDiff says in what a RESULT differs from the worker's own contribution, or nothing.
func shapeDiff(got, want *wire.Header, ranks uint64) string {
	switch {
	case got.Contributors != ranks:
		return fmt.Sprintf("the contributions of %d ranks (mask %#x) instead of %d", bits.OnesCount64(got.Contributors),
			got.Contributors, bits.OnesCount64(ranks))
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

// strike counts a wrong answer for the chunk under examination. It returns err when there have been too many.
func (r *round) strike(err error) error {
	r.stats.Wrong++
	if r.strikes == nil {
		r.strikes = map[uint32]uint8{}
	}
	r.strikes[r.answer.Chunk]++
	if r.strikes[r.answer.Chunk] < maxStrikes {
		return nil
	}
	return err
}
