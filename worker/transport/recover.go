package transport

import (
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
	s := recovery.State{Next: e.window.NextRound(), Seq: e.window.NextSeq()}
	s.First = s.Next
	if len(e.live) > 0 {
		s.First = e.live[0].header.Round
	}
	for _, r := range e.kept {
		s.Rounds = append(s.Rounds, r.held())
	}
	for _, r := range e.live {
		s.Rounds = append(s.Rounds, r.held())
	}
	s.Boundary = s.Next
	for _, chunks := range e.ahead() {
		s.Rounds = append(s.Rounds, recovery.NewHeld(s.Boundary, chunks))
		s.Boundary++
	}
	return s
}

// held returns the chunks of the round that have their RESULT.
func (r *round) held() recovery.Held {
	h := recovery.NewHeld(r.header.Round, r.chunks)
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
		if r == nil || id.Chunk >= r.chunks || !r.taken[id.Chunk] {
			return nil, fmt.Errorf("hand over the RESULT of round %d, chunk %d: it is not here", id.Round, id.Chunk)
		}
		p := r.payload(id.Chunk)
		payloads[i] = p[:wire.HeaderLen+int(p[wire.OffBlocks])*wire.BlockLen]
	}
	return payloads, nil
}

// Resume lets a frozen endpoint go on at time now, under an epoch: it takes the RESULTs that it lacked, and sends what is
// missing everywhere as if it had never been sent. An error ends the all-reduces.
func (e *Endpoint) Resume(now time.Duration, epoch uint16, restart recovery.Restart, results [][]byte) error {
	for _, b := range results {
		if err := e.given(b); err != nil {
			return err
		}
	}
	for len(e.live) > 0 && e.live[0].left == 0 {
		e.finishRound(now)
	}
	first := e.window.NextRound()
	if len(e.live) > 0 {
		first = e.live[0].header.Round
	}
	missing := make([][]uint32, len(e.live))
	for i, r := range e.live {
		r.header.Epoch = epoch
		clear(r.server)
		clear(r.strikes)
		for c := range r.chunks {
			if final := restart.Final(recovery.ChunkID{Round: r.header.Round, Chunk: c}); final != r.taken[c] {
				return fmt.Errorf("resume after a recovery: the RESULT of round %d, chunk %d is here: %t, it is final: %t",
					r.header.Round, c, r.taken[c], final)
			}
			if !r.taken[c] {
				missing[i] = append(missing[i], c)
			}
		}
	}
	e.window.Restart(now, epoch, restart.Base(first), missing)
	e.unknown = wire.ReasonNone
	e.frozen = false
	return e.advance(now)
}

// given takes a RESULT that was handed over. It does not keep it.
func (e *Endpoint) given(payload []byte) error {
	p := &e.answer
	if err := p.Decode(payload); err != nil {
		return fmt.Errorf("take a RESULT that was handed over: %w", err)
	}
	r := e.round(p.Round)
	if r == nil || p.Type != wire.TypeResult || p.Job != e.cfg.Job || p.Chunk >= r.chunks || r.taken[p.Chunk] {
		return fmt.Errorf("take a RESULT that was handed over: round %d, chunk %d of job %d is not missing", p.Round, p.Chunk, p.Job)
	}
	want := r.shape(p.Chunk)
	want.Epoch = p.Epoch // the one that it was summed under
	if diff := shapeDiff(&p.Header, &want, e.ranks); diff != "" || !p.TagOK() {
		return &IntegrityError{Round: p.Round, Chunk: p.Chunk, Shape: diff}
	}
	r.settle(payload)
	return nil
}

// find returns the round with a number, or nil.
func find(rounds []*round, number uint32) *round {
	i := slices.IndexFunc(rounds, func(r *round) bool { return r.header.Round == number })
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
		p.Round = e.live[0].header.Round
		p.Missing, p.Chunk, p.Left = e.window.Missing()
		p.Server = e.live[0].server[p.Chunk]
	}
	return p
}
