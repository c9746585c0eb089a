package timing

import (
	"math/rand/v2"
	"time"

	"xagg/wire"
)

// frame is a packet on its way.
type frame struct {
	src, dst address
	payload  []byte // is not changed once the frame is made: copies share it
}

// address is a host's: its port of the switch.
type address uint16

// service is the address that workers send to.
const service address = 0

func (f *frame) len() int { return wire.FrameOverhead + len(f.payload) }

// line is one direction of a link: a token bucket with a queue before it, as the lab's (tbf), and then the hop.
type line struct {
	rate   float64 // bytes a second
	burst  int     // bytes that the bucket holds
	limit  int     // bytes that may wait
	tokens float64 // bytes, at time at
	at     time.Duration
	// waiting are the frames that have not left, by when they do; bytes is their length.
	waiting []departure
	bytes   int
	loss    float64 // share of frames
	lost    uint64  // frames, and
	full    uint64  // those that found the queue full
}

type departure struct {
	at    time.Duration
	bytes int
}

// mtu is the lab's.
const mtu = 1500

// newLine returns a line of so many bits a second, with the queue that the lab gives it (lab/netns, limit): a bucket of a
// millisecond and at least two full frames, a queue of 50 ms and at least 256 KiB.
func newLine(bits float64, loss float64) *line {
	bytes := bits / 8
	burst := max(int(bytes/1000), 2*(mtu+14))
	return &line{
		rate: bytes, burst: burst, limit: burst + max(int(bytes/20), 256<<10), tokens: float64(burst), loss: loss,
	}
}

// send returns when a frame that is put on the line at t has left it; false if it is lost. Times do not run backwards.
func (l *line) send(t time.Duration, bytes int, rng *rand.Rand) (time.Duration, bool) {
	gone := 0
	for gone < len(l.waiting) && l.waiting[gone].at <= t {
		l.bytes -= l.waiting[gone].bytes
		gone++
	}
	l.waiting = l.waiting[:copy(l.waiting, l.waiting[gone:])]
	if l.bytes+bytes > l.limit {
		l.full++
		return 0, false
	}
	from := max(t, l.at)
	l.tokens = min(float64(l.burst), l.tokens+(from-l.at).Seconds()*l.rate)
	if l.tokens -= float64(bytes); l.tokens < 0 {
		from += time.Duration(-l.tokens / l.rate * float64(time.Second))
		l.tokens = 0
	}
	l.at = from
	l.waiting = append(l.waiting, departure{from, bytes})
	l.bytes += bytes
	if l.loss > 0 && rng.Float64() < l.loss {
		l.lost++
		return 0, false
	}
	return from, true
}

// station serves packets one at a time, in their order.
type station struct {
	agenda *agenda
	// serve carries out a packet whose service began before and would end now, and returns until when the station is busy with
	// what comes of it.
	serve func(f frame) (until time.Duration)
	cost  time.Duration // of a packet
	queue []frame
	busy  bool
	used  time.Duration // that it was busy
}

// arrive puts a packet in the station's queue.
func (s *station) arrive(f frame) {
	s.queue = append(s.queue, f)
	if !s.busy {
		s.begin()
	}
}

func (s *station) begin() {
	s.busy = true
	f := s.queue[0]
	s.queue = s.queue[1:]
	s.agenda.at(s.agenda.now+s.cost, func() {
		until := s.serve(f)
		s.used += s.cost + until - s.agenda.now
		s.agenda.at(until, func() {
			if s.busy = len(s.queue) > 0; s.busy {
				s.begin()
			}
		})
	})
}
