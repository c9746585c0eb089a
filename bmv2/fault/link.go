package fault

import (
	"container/heap"
	"encoding/binary"
	"math/rand/v2"
	"slices"
	"time"

	"xagg/wire"
)

const (
	reorderBehind = 3                    // a frame is overtaken by at most so many
	reorderHold   = 5 * time.Millisecond // and waits at most so long for them
	corruptBits   = 3                    // bits of a frame that are flipped at most
)

// Counts are the frames that a link has seen, and what became of them. Frames that are spared because they are not the
// protocol's do not count.
type Counts struct {
	Frames     uint64 `json:"frames"`
	Dropped    uint64 `json:"dropped"`
	Duplicated uint64 `json:"duplicated"`
	Reordered  uint64 `json:"reordered"` // copies included, and so on
	Delayed    uint64 `json:"delayed"`
	Corrupted  uint64 `json:"corrupted"`
}

// Add adds o.
func (c *Counts) Add(o Counts) { c.each(o, func(a, b uint64) uint64 { return a + b }) }

// Sub subtracts o, of an earlier moment.
func (c *Counts) Sub(o Counts) { c.each(o, func(a, b uint64) uint64 { return a - b }) }

func (c *Counts) each(o Counts, f func(a, b uint64) uint64) {
	c.Frames, c.Dropped = f(c.Frames, o.Frames), f(c.Dropped, o.Dropped)
	c.Duplicated, c.Reordered = f(c.Duplicated, o.Duplicated), f(c.Reordered, o.Reordered)
	c.Delayed, c.Corrupted = f(c.Delayed, o.Delayed), f(c.Corrupted, o.Corrupted)
}

// Link is one direction of one port's link. What happens to a frame depends on the seed, the port, the direction and
// the number of frames before, so that the same frames in the same order fare alike. It is pure: time is a
// time.Duration since an origin of the caller's and must not run backwards.
type Link struct {
	spec    Spec
	rng     *rand.Rand
	held    []held  // to be overtaken, in the order in which they came
	late    backlog // delayed
	entered uint64  // frames in late so far
	free    [][]byte
	counts  Counts
}

// held is a frame that lets others pass.
type held struct {
	frame []byte
	pass  int           // frames to let pass
	until time.Duration // and then it goes anyway
	late  bool          // it will be delayed too
}

// NewLink returns the link of a port in a direction, In or Out, or nil when none of the specs is about it.
func NewLink(specs []Spec, port uint16, dir Direction) *Link {
	here := Spec{Port: port, Direction: dir}
	for _, s := range slices.Backward(specs) {
		if s.covers(&here) {
			return &Link{spec: s, rng: rand.New(rand.NewPCG(s.Seed, uint64(port)<<8|uint64(dir)))}
		}
	}
	return nil
}

// Counts returns the counts so far.
func (l *Link) Counts() Counts { return l.counts }

// fate is what is to happen to a frame or its copy.
type fate struct {
	corrupt, reorder, late bool
	pass                   int
	bits                   uint64 // seed of the damage
}

// fate draws the same number of random values for every frame.
func (l *Link) fate() (f fate) {
	f.corrupt = l.rng.Float64() < l.spec.Corrupt
	f.reorder = l.rng.Float64() < l.spec.Reorder
	f.late = l.rng.Float64() < l.spec.Delayed
	f.pass = 1 + l.rng.IntN(reorderBehind)
	f.bits = l.rng.Uint64()
	return f
}

// Pass takes a frame at time now and calls emit for every frame that leaves now, this one or others. Frames are not
// kept and are valid during the calls only.
func (l *Link) Pass(now time.Duration, frame []byte, emit func(frame []byte)) {
	l.Poll(now, emit)
	if !l.spec.All && !isProtocol(frame) {
		emit(frame)
		return
	}
	l.counts.Frames++
	drop, twice := l.rng.Float64() < l.spec.Drop, l.rng.Float64() < l.spec.Duplicate
	fates := [2]fate{l.fate(), l.fate()}
	if drop {
		l.counts.Dropped++
		return
	}
	copies := 1
	if twice {
		copies = 2
		l.counts.Duplicated++
	}
	waiting := len(l.held)
	for _, f := range fates[:copies] {
		this := frame
		if f.corrupt {
			l.counts.Corrupted++
			this = l.clone(frame)
			corrupt(this, f.bits)
		}
		if f.reorder {
			l.counts.Reordered++
			l.held = append(l.held, held{l.clone(this), f.pass, now + reorderHold, f.late})
		} else {
			l.forward(now, this, f.late, emit)
			waiting = l.overtaken(now, waiting, emit)
		}
		if f.corrupt {
			l.free = append(l.free, this)
		}
	}
}

// overtaken lets go of those among the first n held frames that enough others have passed. It returns how many of them
// are left.
func (l *Link) overtaken(now time.Duration, n int, emit func([]byte)) int {
	for i := range l.held[:n] {
		l.held[i].pass--
	}
	return n - l.release(now, n, emit, func(h *held) bool { return h.pass <= 0 })
}

// release lets go of those among the first n held frames that go tells, and returns their number.
func (l *Link) release(now time.Duration, n int, emit func([]byte), gone func(*held) bool) int {
	rest := l.held[:0]
	for i := range l.held {
		h := l.held[i]
		if i >= n || !gone(&h) {
			rest = append(rest, h)
			continue
		}
		l.forward(now, h.frame, h.late, emit)
		l.free = append(l.free, h.frame)
	}
	released := len(l.held) - len(rest)
	clear(l.held[len(rest):])
	l.held = rest
	return released
}

// forward sends a frame on, now or after the delay.
func (l *Link) forward(now time.Duration, frame []byte, late bool, emit func([]byte)) {
	if !late {
		emit(frame)
		return
	}
	l.counts.Delayed++
	l.entered++
	heap.Push(&l.late, pending{l.clone(frame), now + l.spec.Delay, l.entered})
}

// Poll calls emit for the frames that are due at time now, in the order of their times.
func (l *Link) Poll(now time.Duration, emit func(frame []byte)) {
	l.release(now, len(l.held), emit, func(h *held) bool { return h.until <= now })
	for len(l.late) > 0 && l.late[0].due <= now {
		p := heap.Pop(&l.late).(pending)
		emit(p.frame)
		l.free = append(l.free, p.frame)
	}
}

// Next returns when Poll is to be called next if no frame comes before, or false when nothing waits.
func (l *Link) Next() (due time.Duration, ok bool) {
	if len(l.late) > 0 {
		due, ok = l.late[0].due, true
	}
	if len(l.held) > 0 && (!ok || l.held[0].until < due) {
		due, ok = l.held[0].until, true
	}
	return due, ok
}

// clone copies a frame into memory of the link's.
func (l *Link) clone(frame []byte) []byte {
	var b []byte
	if n := len(l.free); n > 0 {
		b, l.free = l.free[n-1], l.free[:n-1]
	}
	return append(b[:0], frame...)
}

// corrupt flips one to three different bits of one of the frame's 16-bit words, as a short burst of noise does. The
// checksums of IPv4 and UDP detect every such change; of two flips in different words they miss one in 32, and the
// frame check sequence, which would not, is gone before a frame gets here.
func corrupt(frame []byte, seed uint64) {
	if len(frame) == 0 {
		return
	}
	rng := rand.New(rand.NewPCG(seed, 0))
	at := 2 * rng.IntN((len(frame)+1)/2)
	word := frame[at:min(at+2, len(frame))]
	var flipped [corruptBits]int
	n := 1 + rng.IntN(corruptBits)
	for i := 0; i < n; {
		bit := rng.IntN(8 * len(word))
		if slices.Contains(flipped[:i], bit) {
			continue
		}
		flipped[i] = bit
		word[bit/8] ^= 1 << (bit % 8)
		i++
	}
}

// isProtocol reports whether the frame is IPv4 and UDP from or to the protocol's port.
func isProtocol(frame []byte) bool {
	const ports = wire.FrameOverhead - 8
	return len(frame) >= wire.FrameOverhead && frame[12] == 0x08 && frame[13] == 0x00 && frame[14] == 0x45 && frame[23] == 17 &&
		(binary.BigEndian.Uint16(frame[ports:]) == wire.Port || binary.BigEndian.Uint16(frame[ports+2:]) == wire.Port)
}

// pending is a delayed frame.
type pending struct {
	frame []byte
	due   time.Duration
	order uint64
}

// backlog is a heap of frames by due time and, of one time, by their order.
type backlog []pending

func (b backlog) Len() int { return len(b) }
func (b backlog) Less(i, j int) bool {
	return b[i].due < b[j].due || b[i].due == b[j].due && b[i].order < b[j].order
}
func (b backlog) Swap(i, j int) { b[i], b[j] = b[j], b[i] }

// Push implements [heap.Interface].
func (b *backlog) Push(x any) { *b = append(*b, x.(pending)) }

// Pop implements [heap.Interface].
func (b *backlog) Pop() any {
	last := len(*b) - 1
	p := (*b)[last]
	(*b)[last] = pending{}
	*b = (*b)[:last]
	return p
}
