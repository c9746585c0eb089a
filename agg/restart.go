package agg

import (
	"fmt"
	"slices"
	"time"
)

// id returns the number in its round of the chunk with a seq.
func (r *span) id(seq uint32) uint32 {
	if r.ids == nil {
		return seq - r.seq
	}
	return r.ids[seq-r.seq]
}

// find returns the seq of a chunk of the round, unless it has none.
func (r *span) find(chunk uint32) (seq uint32, ok bool) {
	if r.ids == nil {
		return r.seq + chunk, chunk < r.chunks
	}
	i, ok := slices.BinarySearch(r.ids, chunk)
	return r.seq + uint32(i), ok
}

// NextRound returns the number of the round to begin next.
func (w *Window) NextRound() uint32 { return w.round + 1 }

// NextSeq returns the seq of that round's chunk 0.
func (w *Window) NextSeq() uint32 { return w.base + uint32(len(w.chunks)) }

// Restart goes on after a recovery (docs/protocol.md, "Recovery") under an epoch: of the newest rounds that have begun,
// at most Depth and in their order, missing has the chunks to send, ascending, as if they had never been sent; all others
// have their RESULT. seq is the first one's. What was announced before is forgotten.
func (w *Window) Restart(now time.Duration, epoch uint16, seq uint32, missing [][]uint32) {
	if len(missing) > w.cfg.Depth {
		panic(fmt.Sprintf("agg: restart window: %d rounds at depth %d", len(missing), w.cfg.Depth))
	}
	w.epoch, w.next, w.base = epoch, epoch, seq
	w.rounds, w.chunks, w.left = w.rounds[:0], w.chunks[:0], 0
	w.flight, w.delivered, w.undo = 0, 0, 0
	w.rest(now, seq)
	for _, ids := range missing {
		n := uint32(len(ids))
		// A round without a missing chunk stays: those that are Depth after it count from it.
		w.rounds = append(w.rounds, span{seq: w.NextSeq(), chunks: n, ids: ids, left: n, epoch: epoch})
		w.left += len(ids)
		w.chunks = append(w.chunks, make([]chunk, n)...)
	}
	// Every chunk before these was answered, if not under this epoch then for good.
	for c := range min(uint32(len(w.chunks)), w.cfg.Pool) {
		w.ready.push(seq + c)
	}
}
