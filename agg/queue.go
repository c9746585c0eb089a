package agg

import (
	"time"

	"xagg/wire"
)

// fifo is a queue of chunks, by seq. Its zero value is empty.
type fifo struct {
	items []uint32
	head  int
}

func (q *fifo) reset() { q.items, q.head = q.items[:0], 0 }

func (q *fifo) push(c uint32) {
	if q.head > len(q.items)/2 && len(q.items) == cap(q.items) {
		q.items, q.head = q.items[:copy(q.items, q.items[q.head:])], 0
	}
	q.items = append(q.items, c)
}

func (q *fifo) pop() (uint32, bool) {
	if q.head == len(q.items) {
		q.reset()
		return 0, false
	}
	c := q.items[q.head]
	q.head++
	return c, true
}

// any reports whether a chunk of the queue is still in a state.
func (q *fifo) any(w *Window, state chunkState) bool {
	for q.head < len(q.items) && !w.in(q.items[q.head], state) {
		q.head++
	}
	return q.head < len(q.items)
}

// schedule orders chunks by the time at which they are due: a binary heap whose entries are not removed when a chunk
// goes on, but skipped once they come up. An entry counts while its chunk is in the schedule's state with that due time.
type schedule struct {
	heap []entry
}

type entry struct {
	due   time.Duration
	chunk uint32 // seq
}

func (e entry) before(f entry) bool {
	return e.due < f.due || e.due == f.due && wire.SerialLess(e.chunk, f.chunk)
}

func (s *schedule) reset() { s.heap = s.heap[:0] }

func (s *schedule) add(due time.Duration, chunk uint32) {
	h := append(s.heap, entry{due, chunk})
	i := len(h) - 1
	for i > 0 && h[i].before(h[(i-1)/2]) {
		h[i], h[(i-1)/2] = h[(i-1)/2], h[i]
		i = (i - 1) / 2
	}
	s.heap = h
}

// first returns the earliest due time.
func (s *schedule) first(w *Window, state chunkState) (time.Duration, bool) {
	for len(s.heap) > 0 {
		e := s.heap[0]
		if w.in(e.chunk, state) && w.at(e.chunk).due == e.due {
			return e.due, true
		}
		s.removeFirst()
	}
	return 0, false
}

// due removes and returns the chunk that is due first, if it is due at time now.
func (s *schedule) due(now time.Duration, w *Window, state chunkState) (uint32, bool) {
	if t, ok := s.first(w, state); !ok || t > now {
		return 0, false
	}
	c := s.heap[0].chunk
	s.removeFirst()
	return c, true
}

func (s *schedule) removeFirst() {
	h := s.heap
	n := len(h) - 1
	h[0], h = h[n], h[:n]
	for i := 0; ; {
		least := i
		for _, child := range [2]int{2*i + 1, 2*i + 2} {
			if child < n && h[child].before(h[least]) {
				least = child
			}
		}
		if least == i {
			break
		}
		h[i], h[least] = h[least], h[i]
		i = least
	}
	s.heap = h
}
