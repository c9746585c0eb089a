package timing

import (
	"math/rand/v2"
	"testing"
	"time"
)

// TestLine: a bucket lets its bytes through at once, and then frames at the rate; what finds the queue full is lost, and a queue that
// has emptied takes frames again.
func TestLine(t *testing.T) {
	const frame = 1000
	l := newLine(80e6, 0) // 10 MB/s: a bucket of 10,000 bytes, a queue of 500,000 and those
	for i := range 510 {
		at, ok := l.send(0, frame, nil)
		if want := time.Duration(max(0, i-9)) * 100 * time.Microsecond; !ok || at != want {
			t.Fatalf("frame %d leaves at %v (%t), want %v", i, at, ok, want)
		}
	}
	for i := range 11 { // 500 wait
		if _, ok := l.send(0, frame, nil); ok != (i < 10) {
			t.Fatalf("frame %d after those is taken: %t", i, ok)
		}
	}
	if l.full != 1 {
		t.Errorf("%d frames found the queue full, want 1", l.full)
	}
	if at, ok := l.send(100*time.Millisecond, frame, nil); !ok || at != 100*time.Millisecond {
		t.Errorf("on a line that is idle a frame leaves at %v (%t)", at, ok)
	}
}

// TestLineRate: over any time, frames of any lengths leave no faster than the rate and the bucket allow, and not slower while there
// are some.
func TestLineRate(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	l := newLine(50e6, 0)
	type left struct {
		at    time.Duration
		bytes int
	}
	var all []left
	now := time.Duration(0)
	for range 3000 {
		n := 60 + rng.IntN(1400)
		if at, ok := l.send(now, n, rng); ok {
			if at < now || len(all) > 0 && at < all[len(all)-1].at {
				t.Fatalf("a frame that came at %v leaves at %v", now, at)
			}
			all = append(all, left{at, n})
		}
		now += time.Duration(rng.Int64N(int64(300 * time.Microsecond)))
	}
	for i := 0; i < len(all); i += 7 {
		sum := 0
		for k := i; k < len(all) && k < i+200; k++ {
			sum += all[k].bytes
			if allowed := float64(l.burst) + (all[k].at-all[i].at).Seconds()*l.rate; float64(sum) > allowed+1 {
				t.Fatalf("%d bytes leave within %v, the bucket allows %.0f", sum, all[k].at-all[i].at, allowed)
			}
		}
	}
}

func TestLoss(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	l := newLine(1e9, 0.1)
	for i := range 10000 {
		l.send(time.Duration(i)*time.Millisecond, 100, rng)
	}
	if l.lost < 900 || l.lost > 1100 || l.full != 0 {
		t.Errorf("%d of 10,000 frames are lost, and %d found the queue full", l.lost, l.full)
	}
}

// TestStation: packets are served in their order, one at a time, each as long as it and what comes of it cost.
func TestStation(t *testing.T) {
	var a agenda
	var ends []time.Duration
	s := station{agenda: &a, cost: 5}
	s.serve = func(f frame) time.Duration {
		if int(f.src) != len(ends)+1 {
			t.Errorf("packet %d is served after %d others", f.src, len(ends))
		}
		ends = append(ends, a.now)
		return a.now + 3
	}
	for i, at := range []time.Duration{0, 0, 4, 100} {
		a.at(at, func() { s.arrive(frame{src: address(i + 1)}) })
	}
	for a.next() {
	}
	if len(ends) != 4 || ends[0] != 5 || ends[1] != 13 || ends[2] != 21 || ends[3] != 105 {
		t.Errorf("served at %v, want 5, 13, 21, 105", ends)
	}
	if s.used != 32 {
		t.Errorf("busy for %d, want 32", s.used)
	}
}
