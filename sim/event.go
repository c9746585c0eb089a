package sim

import "time"

// event is something that will happen.
type event struct {
	at     time.Duration
	order  uint64 // of two at the same time the one that was planned first happens first
	kind   kind
	node   int    // a host: workers first, then servers
	job    int    // wake, control: they mean nothing to later jobs
	number int    // of a recovery, or begin: of a rank's process. What is planned for an earlier one means nothing
	frame  []byte // arrivals
}

type kind uint8

const (
	atSwitch kind = iota // a frame from a host
	atHost               // a frame for a host
	wake                 // a worker looks what is due
	begin                // a worker begins its next all-reduce
	control              // the controller takes its next step
	crash                // a worker dies
	start                // the next job begins
	lose                 // devices lose their memory
	freeze               // a worker stops for a recovery
	decide               // the controller knows what all have
	resume               // a worker goes on
	enter                // a worker that came back begins
	die                  // a worker dies that will come back
	comeBack             // it is there again
	restore              // the switch has its plan again, in async
)

func (e *event) before(f *event) bool { return e.at < f.at || e.at == f.at && e.order < f.order }

// queue is a binary heap of events.
type queue struct {
	heap  []event
	order uint64
}

func (q *queue) add(e event) {
	q.order++
	e.order = q.order
	h := append(q.heap, e)
	i := len(h) - 1
	for i > 0 && e.before(&h[(i-1)/2]) {
		h[i] = h[(i-1)/2]
		i = (i - 1) / 2
	}
	h[i] = e
	q.heap = h
}

func (q *queue) pop() (e event, ok bool) {
	n := len(q.heap) - 1
	if n < 0 {
		return event{}, false
	}
	h := q.heap
	e, last := h[0], h[n]
	h[n] = event{}
	h = h[:n]
	i := 0
	for {
		child := 2*i + 1
		if child >= n {
			break
		}
		if child+1 < n && h[child+1].before(&h[child]) {
			child++
		}
		if !h[child].before(&last) {
			break
		}
		h[i] = h[child]
		i = child
	}
	if n > 0 {
		h[i] = last
	}
	q.heap = h
	return e, true
}
