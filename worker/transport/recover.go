package transport

import (
	"bytes"
	"fmt"
	"slices"
	"time"

	"xagg/recovery"
	"xagg/wire"
)

// Freeze stops the endpoint: until [Endpoint.Resume] nothing is due, what arrives is not taken, and no round begins. It
// returns what the endpoint has. An endpoint that is frozen already stays so.
func (e *Endpoint) Freeze() recovery.State {
	e.frozen = true
	e.early, e.earlier = nil, 0 // whoever recovers is told anew
	s := recovery.State{
		Began: e.cfg.Round, Next: e.window.NextRound(), Seq: e.window.NextSeq(), AllReduces: e.done + uint64(e.begun), Returns: e.returns,
	}
	if e.begun < len(e.calls) && e.calls[e.begun].started {
		s.AllReduces++
	}
	s.First = s.Next
	if len(e.live) > 0 {
		s.First = e.live[0].number
	}
	for _, r := range e.kept {
		s.Rounds = append(s.Rounds, r.held())
	}
	for _, r := range e.live {
		s.Rounds = append(s.Rounds, r.held())
	}
	s.Boundary = s.Next
	for _, chunks := range e.ahead() {
		h := recovery.NewHeld(s.Boundary, chunks)
		if i := findHeld(e.finals, s.Boundary); i >= 0 && e.finals[i].Chunks == chunks {
			h = e.finals[i]
		}
		s.Rounds = append(s.Rounds, h)
		s.Boundary++
	}
	for _, h := range e.finals {
		if !wire.SerialLess(h.Round, s.Boundary) {
			s.Rounds = append(s.Rounds, h)
		}
	}
	return s
}

// held returns the chunks of the round that have their RESULT.
func (r *round) held() recovery.Held {
	h := recovery.NewHeld(r.number, r.chunks)
	for c := range r.chunks {
		if r.taken[c] {
			h.Set(c)
		}
	}
	return h
}

// ahead returns the chunks of each round that has not begun, though its call has.
func (e *Endpoint) ahead() (chunks []uint32) {
	if e.begun == len(e.calls) || !e.calls[e.begun].started {
		return nil
	}
	c := e.calls[e.begun]
	if c.scout && c.rounds == 0 {
		chunks = append(chunks, 1)
	}
	for next := c.next; ; {
		to := min(next+e.longest(), c.vec.len())
		chunks = append(chunks, chunksOf(to-next))
		if next = to; next == c.vec.len() {
			return chunks
		}
	}
}

// Results returns RESULTs that [Endpoint.Freeze] said the endpoint has, as they came. They are valid until the next call
// of a method.
func (e *Endpoint) Results(ids []recovery.ChunkID) ([][]byte, error) {
	payloads := make([][]byte, len(ids))
	for i, id := range ids {
		r := find(e.kept, id.Round)
		if r == nil {
			r = find(e.live, id.Round)
		}
		switch b, given := e.given[id]; {
		case r != nil && id.Chunk < r.chunks && r.taken[id.Chunk]:
			p := r.payload(id.Chunk)
			payloads[i] = p[:wire.HeaderLen+int(p[wire.OffBlocks])*wire.BlockLen]
		case given:
			payloads[i] = b
		default:
			return nil, fmt.Errorf("hand over the RESULT of round %d, chunk %d: it is not here", id.Round, id.Chunk)
		}
	}
	return payloads, nil
}

// Resume lets a frozen endpoint go on at time now, under an epoch: it takes the RESULTs that it lacked, and sends what is
// missing everywhere as if it had never been sent. RESULTs of rounds that it has not begun it keeps until it does. An
// error ends the all-reduces.
func (e *Endpoint) Resume(now time.Duration, epoch uint16, restart recovery.Restart, results [][]byte) error {
	next := e.window.NextRound()
	for _, b := range results {
		if err := e.receive(b, next); err != nil {
			return fmt.Errorf("resume after a recovery: %w", err)
		}
	}
	e.account(now)
	first := next
	if len(e.live) > 0 {
		first = e.live[0].number
	}
	missing := make([][]uint32, len(e.live))
	for i, r := range e.live {
		r.header.Epoch = epoch
		clear(r.server)
		clear(r.strikes)
		for c := range r.chunks {
			if final := restart.Final(recovery.ChunkID{Round: r.number, Chunk: c}); final != r.taken[c] {
				return fmt.Errorf("resume after a recovery: the RESULT of round %d, chunk %d is here: %t, it is final: %t",
					r.number, c, r.taken[c], final)
			}
			if !r.taken[c] {
				missing[i] = append(missing[i], c)
			}
		}
	}
	if err := e.foresee(next, restart); err != nil {
		return err
	}
	e.window.Restart(now, epoch, restart.Base(first), missing)
	e.returns = restart.Returns
	e.unknown = wire.ReasonNone
	e.frozen = false
	return e.advance(now)
}

// receive takes a RESULT that was handed over.
func (e *Endpoint) receive(payload []byte, next uint32) error {
	p := &e.answer
	if err := p.Decode(payload); err != nil {
		return fmt.Errorf("take a RESULT: %w", err)
	}
	if p.Type != wire.TypeResult || p.Job != e.cfg.Job || !e.window.Enough(p.Contributors) || !p.TagOK() {
		return &IntegrityError{Round: p.Round, Chunk: p.Chunk}
	}
	if !wire.SerialLess(p.Round, next) {
		e.given[recovery.ChunkID{Round: p.Round, Chunk: p.Chunk}] = bytes.Clone(payload)
		return nil
	}
	r := e.round(p.Round)
	if r == nil || p.Chunk >= r.chunks || r.taken[p.Chunk] {
		return fmt.Errorf("take a RESULT: round %d, chunk %d is not missing", p.Round, p.Chunk)
	}
	return r.receive(payload)
}

// receive takes the RESULT under examination, whose payload is b and which was handed over.
func (r *round) receive(b []byte) error {
	p := &r.e.answer
	want := r.shape(p.Chunk)
	want.Epoch = p.Epoch // the one that it was summed under
	if diff := r.shapeDiff(&p.Header, &want); diff != "" {
		return &IntegrityError{Round: p.Round, Chunk: p.Chunk, Shape: diff}
	}
	r.settle(b)
	return nil
}

// foresee notes which chunks of the rounds that have not begun are final. Their RESULTs are here.
func (e *Endpoint) foresee(next uint32, restart recovery.Restart) error {
	e.finals = nil
	for r := next; wire.SerialLess(r, restart.Round); r++ { // all of it is final, and was handed over
		h := recovery.NewHeld(r, 0)
		for e.given[recovery.ChunkID{Round: r, Chunk: h.Chunks}] != nil {
			h.Chunks++
		}
		if h.Chunks == 0 {
			return fmt.Errorf("resume after a recovery: round %d is over, but no RESULT of it is here", r)
		}
		h = recovery.NewHeld(r, h.Chunks)
		for c := range h.Chunks {
			h.Set(c)
		}
		e.finals = append(e.finals, h)
	}
	for _, h := range restart.Finals {
		if wire.SerialLess(h.Round, next) || h.Missing() == h.Chunks {
			continue
		}
		for c := range h.Chunks {
			if id := (recovery.ChunkID{Round: h.Round, Chunk: c}); h.Has(c) && e.given[id] == nil {
				return fmt.Errorf("resume after a recovery: the RESULT of round %d, chunk %d is final, but it is not here", h.Round, c)
			}
		}
		e.finals = append(e.finals, h)
	}
	return nil
}

// foreseen returns the chunks of the next round that have no RESULT, when it is one of those of which others were handed
// over, and nil when all have none.
func (e *Endpoint) foreseen(chunks uint32) (missing []uint32, some bool, err error) {
	i := findHeld(e.finals, e.window.NextRound())
	if i < 0 {
		return nil, false, nil
	}
	h := e.finals[i]
	if h.Chunks != chunks {
		return nil, false, fmt.Errorf("round %d has %d chunks here and %d at others: all ranks must reduce the same tensors in the same order",
			h.Round, chunks, h.Chunks)
	}
	for c := range chunks {
		if !h.Has(c) {
			missing = append(missing, c)
		}
	}
	return missing, true, nil
}

// receiveGiven takes the RESULTs of a round that has just begun which were handed over before.
func (e *Endpoint) receiveGiven(r *round) error {
	i := findHeld(e.finals, r.number)
	if i < 0 {
		return nil
	}
	e.finals = slices.Delete(e.finals, i, i+1)
	for c := range r.chunks {
		id := recovery.ChunkID{Round: r.number, Chunk: c}
		b, ok := e.given[id]
		if !ok {
			continue
		}
		delete(e.given, id)
		if err := e.answer.Decode(b); err != nil {
			return err
		}
		if err := r.receive(b); err != nil {
			return err
		}
	}
	return nil
}

func findHeld(rounds []recovery.Held, number uint32) int {
	return slices.IndexFunc(rounds, func(h recovery.Held) bool { return h.Round == number })
}

// find returns the round with a number, or nil.
func find(rounds []*round, number uint32) *round {
	i := slices.IndexFunc(rounds, func(r *round) bool { return r.number == number })
	if i < 0 {
		return nil
	}
	return rounds[i]
}

// Progress is how far an endpoint is.
type Progress struct {
	Key     string        // of the oldest all-reduce under way; empty = there is none
	Round   uint32        // its oldest unfinished round, or the next one
	Chunk   uint32        // the first unfinished chunk of it
	Left    int           // unfinished chunks of it
	Missing uint64        // the ranks that they are known to wait for, 0 = no aggregator has said anything
	Server  bool          // a server said so; else the switch, if anybody did
	For     time.Duration // how long the all-reduce has been under way, or none
}

// Progress returns how far the endpoint is at time now.
func (e *Endpoint) Progress(now time.Duration) Progress {
	p := Progress{Round: e.window.NextRound(), For: now - e.idle}
	if len(e.calls) > 0 {
		p.Key, p.For = e.calls[0].key, now-e.calls[0].began
	}
	if len(e.live) > 0 {
		p.Round = e.live[0].number
		p.Missing, p.Chunk, p.Left = e.window.Missing()
		p.Server = p.Chunk < e.live[0].chunks && e.live[0].server[p.Chunk] // after an error the window may be at another round
	}
	return p
}
