package xdp

import (
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// The kernel reads its clock twice for each frame while it measures running times, which is not for nothing: so it does
// that for a part of the time only.
const (
	watchFor   = 20 * time.Millisecond
	watchEvery = 400 * time.Millisecond // at most, and only when somebody has asked
)

// program is a [Store] whose running time can be measured.
type program interface {
	// measure has the running time counted until what it returns is closed.
	measure() (io.Closer, error)
	// ran returns for how many frames the program has run while that was counted, by whomever, and for how long.
	ran() (frames uint64, d time.Duration, err error)
}

// watch measures the running time of a program now and then. Its zero value has measured nothing.
type watch struct {
	mu      sync.Mutex
	begun   time.Time // when it last began to; zero: never
	counter io.Closer // nil: it does not at present
	timer   *time.Timer
	base    running // what the program said then
	seen    running // measured until it last ended
}

// running is how long a program has run while that was measured.
type running struct {
	frames        uint64
	time, watched time.Duration
}

// read returns what was measured so far, and begins to measure if that is asked for and was not done just now. What cannot be
// measured stays zero: the kernel asks for CAP_SYS_ADMIN, which a server can do without.
func (w *watch) read(p program, measure bool) running {
	w.mu.Lock()
	defer w.mu.Unlock()
	if measure && w.counter == nil && (w.begun.IsZero() || time.Since(w.begun) >= watchEvery) {
		w.begun = time.Now()
		w.begin(p)
	}
	return w.seen
}

// begin measures for a while. w is locked.
func (w *watch) begin(p program) {
	frames, ran, err := p.ran()
	if err != nil {
		return
	}
	counter, err := p.measure()
	if err != nil {
		return
	}
	w.begun, w.counter, w.base = time.Now(), counter, running{frames: frames, time: ran}
	w.timer = time.AfterFunc(watchFor, func() { w.end(p) })
}

// end adds what was counted since begin, unless it was added before.
func (w *watch) end(p program) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.counter == nil {
		return
	}
	w.timer.Stop()
	watched := time.Since(w.begun)
	frames, ran, err := p.ran()
	w.counter.Close()
	w.counter = nil
	if err != nil {
		return
	}
	w.seen.frames += frames - w.base.frames
	w.seen.time += ran - w.base.time
	w.seen.watched += watched
}

// measure implements [program].
func (s *Server) measure() (io.Closer, error) {
	c, err := ebpf.EnableStats(uint32(unix.BPF_STATS_RUN_TIME))
	if err != nil {
		return nil, fmt.Errorf("have the kernel measure it: %w", explain(err))
	}
	return c, nil
}

// ran implements [program].
func (s *Server) ran() (uint64, time.Duration, error) {
	if s.objects.Xagg == nil { // it was taken over by one who may not open it
		return 0, 0, ErrPrivileges
	}
	stats, err := s.objects.Xagg.Stats()
	if err != nil {
		return 0, 0, err
	}
	return stats.RunCount, stats.Runtime, nil
}
