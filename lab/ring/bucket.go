package ring

import "xagg/lab/exchange"

// bucket is an all-reduce of a bucket as a rank sees it. It is pure: values in, what may be sent out.
//
// In step s of 2 (N - 1) a rank sends segment rank - s and receives segment rank - s - 1, both modulo N: what it receives in one
// step it sends in the next. In the first half of the steps it adds what it receives, in the second half it takes it.
// How far the two are is all there is to know.
type bucket struct {
	rank, ranks int
	values      []float32
	in, out     cursor
}

// cursor is a place in the segments that are received, or sent, one after the other.
type cursor struct {
	step int
	at   int // values of its segment that are done
}

func newBucket(rank, ranks int, values []float32) bucket {
	b := bucket{rank: rank, ranks: ranks, values: values}
	b.settle()
	return b
}

// steps returns the number of steps.
func (b *bucket) steps() int { return 2 * (b.ranks - 1) }

// segment returns the segment that is sent in a step, which is received in the one before.
func (b *bucket) segment(step int) []float32 {
	i, n := (b.rank-step+2*b.ranks)%b.ranks, len(b.values)
	return b.values[n*i/b.ranks : n*(i+1)/b.ranks]
}

// settle goes on to the next segment where one is done.
func (b *bucket) settle() {
	for b.in.step < b.steps() && b.in.at == len(b.segment(b.in.step+1)) {
		b.in = cursor{step: b.in.step + 1}
	}
	for b.out.step < b.steps() && b.out.at == len(b.segment(b.out.step)) {
		b.out = cursor{step: b.out.step + 1}
	}
}

// received and passed report whether all was received, and sent.
func (b *bucket) received() bool { return b.in.step == b.steps() }
func (b *bucket) passed() bool   { return b.out.step == b.steps() }

// take receives values and returns those that come after its last.
func (b *bucket) take(values []float32) (rest []float32) {
	for len(values) > 0 && !b.received() {
		to := b.segment(b.in.step + 1)[b.in.at:]
		n := min(len(to), len(values))
		if b.in.step < b.ranks-1 {
			exchange.Add(to[:n], values[:n])
		} else {
			copy(to, values[:n])
		}
		b.in.at += n
		values = values[n:]
		b.settle()
	}
	return values
}

// sendable returns values of one segment that may be sent, and whether they are the rest of it.
func (b *bucket) sendable() (values []float32, last bool) {
	switch {
	case b.passed() || b.out.step > b.in.step+1:
		return nil, false
	case b.out.step > 0 && b.out.step == b.in.step+1: // is being received
		return b.segment(b.out.step)[b.out.at:b.in.at], false
	default:
		return b.segment(b.out.step)[b.out.at:], true
	}
}

// pass notes that the first n values that are sendable were sent.
func (b *bucket) pass(n int) {
	b.out.at += n
	b.settle()
}
