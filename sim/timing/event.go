package timing

import (
	"container/heap"
	"time"
)

// event is something that will happen.
type event struct {
	at     time.Duration
	order  uint64 // of two at the same time the one that was planned first happens first
	happen func()
}

// agenda is what will happen. It implements [heap.Interface].
type agenda struct {
	events []event
	now    time.Duration
	order  uint64
}

func (a *agenda) Len() int { return len(a.events) }

func (a *agenda) Less(i, j int) bool {
	x, y := &a.events[i], &a.events[j]
	return x.at < y.at || x.at == y.at && x.order < y.order
}

func (a *agenda) Swap(i, j int) { a.events[i], a.events[j] = a.events[j], a.events[i] }

func (a *agenda) Push(x any) { a.events = append(a.events, x.(event)) }

func (a *agenda) Pop() any {
	n := len(a.events) - 1
	e := a.events[n]
	a.events[n] = event{}
	a.events = a.events[:n]
	return e
}

// at plans what happens at a time that is not past.
func (a *agenda) at(t time.Duration, happen func()) {
	a.order++
	heap.Push(a, event{t, a.order, happen})
}

// next lets the next thing happen, and reports whether there was one.
func (a *agenda) next() bool {
	if len(a.events) == 0 {
		return false
	}
	e := heap.Pop(a).(event)
	a.now = e.at
	e.happen()
	return true
}
