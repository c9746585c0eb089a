package fault

import (
	"math"
	"sync"
	"sync/atomic"
	"time"
)

// Injector runs links by the clock: one goroutine sends what waits when it is due. Its methods may be called from
// several goroutines.
type Injector struct {
	specs []Spec
	start time.Time
	alarm atomic.Int64 // what the goroutine waits for, as a time.Duration since start; the last there is: it does not
	wake  chan struct{}
	done  chan struct{}
	group sync.WaitGroup

	mu     sync.Mutex
	paths  []*Path
	closed bool
}

// never is later than any frame is due.
const never = time.Duration(math.MaxInt64)

// Path is one direction of one port, as an injector runs it.
type Path struct {
	injector  *Injector
	port      uint16
	direction Direction
	emit      func(frame []byte)

	mu   sync.Mutex // guards link, and is held during emit, so that frames do not overtake each other after the link
	link *Link
	due  atomic.Int64 // when the link wants to be asked
}

// NewInjector returns an injector for the specs, of which the last one that is about a port and direction holds there.
func NewInjector(specs []Spec) *Injector {
	j := &Injector{specs: specs, start: time.Now(), wake: make(chan struct{}, 1), done: make(chan struct{})}
	j.alarm.Store(int64(never))
	j.group.Go(j.run)
	return j
}

// Path returns the path of a port in a direction, In or Out, or nil when no spec is about it. What leaves the path is
// given to emit, in the goroutine of a sender or of the injector, one frame at a time; emit must not send on the same
// path.
func (j *Injector) Path(port uint16, dir Direction, emit func(frame []byte)) *Path {
	link := NewLink(j.specs, port, dir)
	if link == nil {
		return nil
	}
	p := &Path{injector: j, port: port, direction: dir, emit: emit, link: link}
	p.due.Store(int64(never))
	j.mu.Lock()
	defer j.mu.Unlock()
	j.paths = append(j.paths, p)
	return p
}

// Send puts a frame on the path. It is not kept.
func (p *Path) Send(frame []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.link.Pass(time.Since(p.injector.start), frame, p.emit)
	if due := p.schedule(); due < time.Duration(p.injector.alarm.Load()) {
		select {
		case p.injector.wake <- struct{}{}:
		default:
		}
	}
}

// poll sends what is due.
func (p *Path) poll() time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.link.Poll(time.Since(p.injector.start), p.emit)
	return p.schedule()
}

// schedule notes when the link wants to be asked again.
func (p *Path) schedule() time.Duration {
	due, ok := p.link.Next()
	if !ok {
		due = never
	}
	p.due.Store(int64(due))
	return due
}

func (j *Injector) run() {
	timer := time.NewTimer(never)
	defer timer.Stop()
	for {
		// A path whose time comes up while the others are looked at leaves a token in wake.
		j.alarm.Store(int64(never))
		j.mu.Lock()
		paths := j.paths
		j.mu.Unlock()
		next := never
		for _, p := range paths {
			due := time.Duration(p.due.Load())
			if due <= time.Since(j.start) {
				due = p.poll()
			}
			next = min(next, due)
		}
		j.alarm.Store(int64(next))
		timer.Reset(next - time.Since(j.start))
		select {
		case <-timer.C:
		case <-j.wake:
		case <-j.done:
			return
		}
	}
}

// PathCounts are the counts of a port in a direction.
type PathCounts struct {
	Port      uint16    `json:"port"`
	Direction Direction `json:"direction"`
	Counts
}

// Counts returns the counts of all paths, in the order in which they were made.
func (j *Injector) Counts() []PathCounts {
	j.mu.Lock()
	defer j.mu.Unlock()
	counts := make([]PathCounts, len(j.paths))
	for i, p := range j.paths {
		p.mu.Lock()
		counts[i] = PathCounts{p.port, p.direction, p.link.Counts()}
		p.mu.Unlock()
	}
	return counts
}

// Close ends the injector. Frames that wait are lost. It may be called more than once.
func (j *Injector) Close() {
	j.mu.Lock()
	if !j.closed {
		j.closed = true
		close(j.done)
	}
	j.mu.Unlock()
	j.group.Wait()
}
