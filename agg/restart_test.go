package agg

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"xagg/wire"
)

// sends returns all that a window wants sent at a time: round/chunk as seq.
func sends(w *Window, now time.Duration) (list []string) {
	for {
		s, ok := w.Next(now)
		if !ok {
			return list
		}
		text := fmt.Sprintf("%d/%d as %d", s.Round, s.Chunk, s.Seq)
		if s.Resend {
			text += " again"
		}
		list = append(list, text)
	}
}

func expectSends(t *testing.T, w *Window, now time.Duration, want ...string) {
	t.Helper()
	if got := sends(w, now); !slices.Equal(got, want) {
		t.Errorf("sends %q, want %q", got, want)
	}
}

func resultFor(w *Window, now time.Duration, epoch uint16, round, chunk uint32, next uint16) Event {
	return w.Handle(now, &wire.Header{Type: wire.TypeResult, Job: 1, Epoch: epoch, Round: round, Chunk: chunk, Contributors: 3, NextEpoch: next})
}

// TestRestart: after a recovery the missing chunks alone are sent, under new numbers and the new epoch, as the window rule
// allows; rounds that begin later go on from there, and what was announced before counts no more.
func TestRestart(t *testing.T) {
	w := NewWindow(WindowConfig{Job: 1, Epoch: 5, Rank: 0, Ranks: 3, Pool: 2, Depth: 2})
	w.Begin(0, 4)
	w.Begin(0, 2)
	expectSends(t, w, 0, "0/0 as 0", "0/1 as 1")
	if e := resultFor(w, 1, 5, 0, 0, 6); e != EventResult { // announces epoch 6
		t.Fatal(e)
	}
	expectSends(t, w, 1, "0/2 as 2")
	if w.NextRound() != 2 || w.NextSeq() != 6 {
		t.Errorf("round %d and seq %d are next", w.NextRound(), w.NextSeq())
	}

	// Chunks 0 and 2 of round 0 are final, and chunk 0 of round 1, which somebody else had.
	w.Restart(2, 7, 20, [][]uint32{{1, 3}, {1}})
	if w.Done() || w.MayBegin() || w.Epoch() != 7 || w.NextRound() != 2 || w.NextSeq() != 23 {
		t.Errorf("done %v, may begin %v, epoch %d, round %d, seq %d", w.Done(), w.MayBegin(), w.Epoch(), w.NextRound(), w.NextSeq())
	}
	expectSends(t, w, 2, "0/1 as 20", "0/3 as 21")
	for what, e := range map[string]Event{
		"of the old epoch":         resultFor(w, 3, 5, 0, 1, 0),
		"of a chunk that is final": resultFor(w, 3, 7, 0, 0, 0),
		"beyond the round":         resultFor(w, 3, 7, 0, 4, 0),
		"of a chunk never sent":    resultFor(w, 3, 7, 1, 1, 0),
	} {
		if e != EventNone {
			t.Errorf("a RESULT %s is %v", what, e)
		}
	}
	if ranks, first, left := w.Missing(); ranks != 0 || first != 1 || left != 2 {
		t.Errorf("missing %#x, first %d, %d left", ranks, first, left)
	}
	resultFor(w, 4, 7, 0, 1, 0)
	expectSends(t, w, 4, "1/1 as 22")
	if _, first, left := w.Missing(); first != 3 || left != 1 {
		t.Errorf("first %d, %d left", first, left)
	}
	resultFor(w, 5, 7, 0, 3, 0)
	if !w.MayBegin() {
		t.Fatal("round 0 is over, and round 2 may not begin")
	}
	if round, epoch := w.Begin(5, 3); round != 2 || epoch != 7 {
		t.Errorf("round %d begins under epoch %d", round, epoch)
	}
	expectSends(t, w, 5, "2/0 as 23")
	resultFor(w, 6, 7, 1, 1, 0)
	expectSends(t, w, 6, "2/1 as 24")

	// Everything is final but the last chunk of a round, which then begins in part.
	w.Restart(7, 8, 40, [][]uint32{nil})
	if !w.Done() || !w.MayBegin() {
		t.Errorf("done %v, may begin %v", w.Done(), w.MayBegin())
	}
	if round, epoch := w.BeginPart(7, []uint32{2}); round != 3 || epoch != 8 {
		t.Errorf("round %d begins under epoch %d", round, epoch)
	}
	expectSends(t, w, 7, "3/2 as 40")
	if e := resultFor(w, 8, 8, 3, 2, 0); e != EventResult || !w.Done() {
		t.Errorf("%v, done %v", e, w.Done())
	}
	if round, _ := w.BeginPart(9, nil); round != 4 || !w.Done() {
		t.Errorf("round %d of nothing, done %v", round, w.Done())
	}
	w.Begin(9, 1)
	expectSends(t, w, 9, "5/0 as 41")
}

// TestForgotten: a window whose chunks nobody knew any more probes one of them at a time. In an async job, which goes on by itself
// when the switch has its plan again, it sends all others again as soon as one is known; others wait for their recovery.
func TestForgotten(t *testing.T) {
	const again = 3*time.Second + time.Millisecond
	for _, c := range []struct {
		name  string
		async bool
		known wire.Header
		event Event
		want  []string
	}{
		{"async", true, wire.Header{Type: wire.TypeResult, Contributors: 3}, EventResult, []string{"0/2 as 2 again", "0/3 as 3 again", "0/0 as 0 again"}},
		{"async, held", true, wire.Header{Type: wire.TypeWait, Contributors: 1}, EventDelivered, []string{"0/2 as 2 again", "0/3 as 3 again", "0/0 as 0 again"}},
		{"sync", false, wire.Header{Type: wire.TypeAck, Contributors: 1}, EventDelivered, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := NewWindow(WindowConfig{Job: 1, Epoch: 5, Rank: 0, Ranks: 3, Pool: 8, Async: c.async})
			w.Begin(0, 4)
			expectSends(t, w, 0, "0/0 as 0", "0/1 as 1", "0/2 as 2", "0/3 as 3")
			forgotten := func(now time.Duration, chunk uint32) {
				t.Helper()
				h := &wire.Header{Type: wire.TypeNack, Job: 1, Epoch: 5, Chunk: chunk, Contributors: 1, Reason: wire.ReasonUnknownJob}
				if e := w.Handle(now, h); e != EventForgotten {
					t.Errorf("chunk %d: %v", chunk, e)
				}
			}
			for chunk := range uint32(4) {
				forgotten(time.Millisecond, chunk)
			}
			expectSends(t, w, 2*time.Millisecond)
			expectSends(t, w, time.Second, "0/0 as 0 again")
			forgotten(time.Second, 0)
			expectSends(t, w, time.Second+time.Millisecond)
			expectSends(t, w, 3*time.Second, "0/1 as 1 again")
			h := c.known
			h.Job, h.Epoch, h.Chunk = 1, 5, 1
			if e := w.Handle(again, &h); e != c.event {
				t.Errorf("got %v, want %v", e, c.event)
			}
			expectSends(t, w, again, c.want...)
		})
	}
}
