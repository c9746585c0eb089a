package transport

import (
	"bytes"
	"container/heap"
	"fmt"
	"testing"
	"time"

	"xagg/agg"
	"xagg/wire"
)

// line is two endpoints and a switch whose links take time.
type line struct {
	testing.TB
	delay  time.Duration // of a link, one way
	sw     *agg.Switch
	ends   [2]*Endpoint
	now    time.Duration
	events events
	tamper func(rank int, answer []byte)
}

type event struct {
	at    time.Duration
	order int
	rank  int // whose link
	up    bool
	b     []byte
}

type events struct {
	list []event
	n    int
}

func (e *events) Len() int { return len(e.list) }
func (e *events) Less(i, j int) bool {
	a, b := &e.list[i], &e.list[j]
	return a.at < b.at || a.at == b.at && a.order < b.order
}
func (e *events) Swap(i, j int) { e.list[i], e.list[j] = e.list[j], e.list[i] }
func (e *events) Push(x any)    { e.list = append(e.list, x.(event)) }
func (e *events) Pop() any {
	x := e.list[len(e.list)-1]
	e.list = e.list[:len(e.list)-1]
	return x
}

func newLine(t testing.TB, delay time.Duration, cfg Config) *line {
	l := &line{TB: t, delay: delay, sw: agg.NewSwitch(4 * int(cfg.Pool))}
	cfg.Job, cfg.Epoch, cfg.Ranks = 1, 1, 2
	members := map[uint8]agg.Member{0: {Port: 1}, 1: {Port: 2}}
	if err := l.sw.Install(agg.SwitchPlan{Job: 1, Epoch: 1, Ranks: 3, Cohort: 3, Pool: cfg.Pool}, members, nil); err != nil {
		t.Fatal(err)
	}
	for r := range l.ends {
		cfg.Rank = r
		l.ends[r] = New(cfg)
	}
	return l
}

func (l *line) put(rank int, up bool, b []byte) {
	l.events.n++
	heap.Push(&l.events, event{l.now + l.delay, l.events.n, rank, up, bytes.Clone(b)})
}

// run carries packets until no all-reduce is under way, or one has ended with an error.
func (l *line) run() error {
	batch := make([][]byte, 0, 1)
	for {
		for r, e := range l.ends {
			for b := e.Due(l.now, batch); len(b) > 0; b = e.Due(l.now, batch) {
				l.put(r, true, b[0])
			}
		}
		if l.ends[0].Done() && l.ends[1].Done() {
			return nil
		}
		next := time.Duration(1<<63 - 1)
		for _, e := range l.ends {
			if at, ok := e.Deadline(); ok {
				next = min(next, at)
			}
		}
		if l.events.Len() == 0 || l.events.list[0].at > next {
			l.now = next
			continue
		}
		ev := heap.Pop(&l.events).(event)
		l.now = ev.at
		if !ev.up {
			if err := l.ends[ev.rank].Take(l.now, ev.b); err != nil {
				return err
			}
			continue
		}
		var p wire.Packet
		if err := p.Decode(ev.b); err != nil {
			l.Fatal(err)
		}
		out := l.sw.Handle(uint64(l.now.Microseconds()), agg.Ingress{Port: uint16(ev.rank + 1)}, &p)
		for r := range l.ends {
			if out.Dest == agg.ToAll || out.Dest == agg.ToSender && r == ev.rank {
				b := make([]byte, p.Len())
				p.Encode(b)
				if l.tamper != nil {
					l.tamper(r, b)
				}
				l.put(r, false, b)
			}
		}
	}
}

// reduce begins n all-reduces of 100 values of one key each on both ranks and lets them end.
func (l *line) reduce(n int) {
	for r, e := range l.ends {
		for i := range n {
			data := make([]int32, 100)
			data[0] = int32(r + i)
			if _, err := e.BeginInt32(l.now, fmt.Sprint(i), data); err != nil {
				l.Fatal(err)
			}
		}
	}
	if err := l.run(); err != nil {
		l.Fatal(err)
	}
}

// TestDepthHidesLatency: with depth D small all-reduces take a round trip for every D of them.
func TestDepthHidesLatency(t *testing.T) {
	for _, depth := range []int{1, 2, 4, 8} {
		l := newLine(t, 500*time.Microsecond, Config{Pool: 64, MaxChunks: 4, Depth: depth})
		l.reduce(64)
		if want := time.Duration(64/depth) * time.Millisecond; l.now != want {
			t.Errorf("depth %d: 64 all-reduces took %v, want %v", depth, l.now, want)
		}
	}
}

// TestOneOfAKey: an all-reduce waits for the one before it of the same tensor, and its data for its scout.
func TestOneOfAKey(t *testing.T) {
	l := newLine(t, 500*time.Microsecond, Config{Pool: 64, MaxChunks: 4, Depth: 8})
	var calls []*Call
	data := make([][2][]float32, 3)
	for i := range data {
		for r, e := range l.ends {
			data[i][r] = []float32{float32(i + 1), 2}
			c, err := e.Begin(l.now, "k", data[i][r])
			if err != nil {
				t.Fatal(err)
			}
			calls = append(calls, c)
		}
	}
	if err := l.run(); err != nil {
		t.Fatal(err)
	}
	if want := 4 * time.Millisecond; l.now != want { // a scout and three rounds
		t.Errorf("it took %v, want %v", l.now, want)
	}
	for i, c := range calls {
		d := data[i/2][i%2]
		if !c.Done() || d[0] != 2*float32(i/2+1) || d[1] != 4 {
			t.Errorf("call %d: done %v, sum %v", i, c.Done(), d)
		}
	}
}

// TestRetention: an endpoint keeps the RESULTs of a round, as they came, until every rank is sure to have finished it.
func TestRetention(t *testing.T) {
	l := newLine(t, time.Millisecond, Config{Pool: 64, MaxChunks: 4, Depth: 2})
	var seen [2][][]byte
	l.tamper = func(rank int, answer []byte) { seen[rank] = append(seen[rank], bytes.Clone(answer)) }
	l.reduce(7)
	for r, e := range l.ends {
		if len(e.kept) != 2 || e.kept[0].header.Round != 5 || e.kept[1].header.Round != 6 {
			t.Fatalf("rank %d keeps %d rounds, want 5 and 6", r, len(e.kept))
		}
		for _, k := range e.kept {
			want := seen[r][k.header.Round]
			if got := k.payload(0)[:len(want)]; !k.taken[0] || !bytes.Equal(got, want) {
				t.Errorf("rank %d does not have the RESULT of round %d as it came", r, k.header.Round)
			}
		}
		if len(e.kept)+len(e.free) > 4 {
			t.Errorf("rank %d has memory for %d rounds", r, len(e.kept)+len(e.free))
		}
	}
}

// TestNoiseIsNoFault: wrong RESULTs that differ are noise, the same one again and again is not.
func TestNoiseIsNoFault(t *testing.T) {
	n := 0
	noise := func(same bool) func(int, []byte) {
		n = 0
		return func(rank int, b []byte) {
			if n++; rank == 0 && n < 20 && len(b) > wire.HeaderLen {
				b[wire.HeaderLen+n%7]++
				if same {
					b[wire.HeaderLen+n%7]--
					b[wire.HeaderLen]++
				}
			}
		}
	}
	l := newLine(t, time.Millisecond, Config{Pool: 4, MaxChunks: 4})
	l.tamper = noise(false)
	l.reduce(1)
	if s := l.ends[0].Stats(); s.Wrong < 5 {
		t.Errorf("only %d answers were wrong", s.Wrong)
	}
	l.tamper = noise(true)
	if _, err := l.ends[0].BeginInt32(l.now, "k", []int32{1}); err != nil {
		t.Fatal(err)
	}
	if _, err := l.ends[1].BeginInt32(l.now, "k", []int32{1}); err != nil {
		t.Fatal(err)
	}
	before := l.ends[0].Stats().Wrong
	if err := l.run(); err == nil {
		t.Error("a RESULT that is always wrong in the same way was no error")
	} else if s := l.ends[0].Stats(); s.Wrong != before+maxStrikes {
		t.Errorf("%d wrong answers, want %d", s.Wrong-before, maxStrikes)
	}
}

// TestOldEpoch: an answer of an older plan than its round's is none.
func TestOldEpoch(t *testing.T) {
	n := 0
	l := newLine(t, time.Millisecond, Config{Pool: 4, MaxChunks: 4})
	l.tamper = func(rank int, b []byte) {
		if n++; n < 20 {
			b[wire.OffEpoch+1] = 0xff // 65535 comes before 1
			b[wire.OffEpoch] = 0xff
		}
	}
	l.reduce(1)
	if s := l.ends[0].Stats(); s.Wrong != 0 || s.Late+l.ends[1].Stats().Late < 19 {
		t.Errorf("stats %+v", s)
	}
}

// BenchmarkDepth is a bucket of 100 values of many over links with a round trip of 1 ms of simulated time: the figure is
// ms-simulated/op. The real time is that of two endpoints and the switch model.
func BenchmarkDepth(b *testing.B) {
	for _, depth := range []int{1, 2, 4, 8} {
		b.Run(fmt.Sprint(depth), func(b *testing.B) {
			l := newLine(b, 500*time.Microsecond, Config{Pool: 64, MaxChunks: 4, Depth: depth})
			l.reduce(b.N)
			b.ReportMetric(float64(l.now)/float64(time.Millisecond)/float64(b.N), "ms-simulated/op")
		})
	}
}
