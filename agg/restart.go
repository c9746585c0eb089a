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

// BeginPart is [Window.Begin] of a round of which some chunks have their RESULT already: missing are the numbers of the
// others, ascending, perhaps none.
func (w *Window) BeginPart(now time.Duration, missing []uint32) (round uint32, epoch uint16) {
	return w.start(now, uint32(len(missing)), append([]uint32{}, missing...))
}

// Restart goes on after a recovery (docs/protocol.md, "Recovery") under an epoch. missing has, for each of the newest rounds
// that have begun, at most Depth and in their order, the chunks without a RESULT, ascending: they are to be sent as if they
// had never been. seq is the first one's. What was announced before is forgotten.
func (w *Window) Restart(now time.Duration, epoch uint16, seq uint32, missing [][]uint32) {
	if len(missing) > w.cfg.Depth {
		panic(fmt.Sprintf("agg: restart window: %d rounds at depth %d", len(missing), w.cfg.Depth))
	}
	w.epoch, w.next, w.base = epoch, epoch, seq
	w.rounds, w.chunks, w.left = w.rounds[:0], w.chunks[:0], 0
	w.flight, w.delivered, w.undo = 0, 0, 0
	w.rest(now, seq)
	for _, ids := range missing {
		// A round without a missing chunk stays: those that are Depth after it count from it.
		w.add(uint32(len(ids)), append([]uint32{}, ids...))
	}
}
