package fault

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"math/bits"
	"testing"
	"time"

	"xagg/wire"
)

// number makes a frame of the protocol that carries n.
func number(n int) []byte {
	a := wire.Addr{Port: wire.Port}
	return wire.AppendUDP(nil, a, a, binary.BigEndian.AppendUint32(nil, uint32(n)), true)
}

// numberOf reads what number has written.
func numberOf(frame []byte) int { return int(binary.BigEndian.Uint32(frame[wire.FrameOverhead:])) }

// arrival is a frame that came out of a link.
type arrival struct {
	at    time.Duration
	frame string
}

// pass sends frames, one per gap, and returns what comes out.
func pass(l *Link, frames [][]byte, gap time.Duration) (out []arrival) {
	now := time.Duration(0)
	emit := func(f []byte) { out = append(out, arrival{now, string(f)}) }
	for _, f := range frames {
		next := now + gap
		l.Pass(now, f, emit)
		for due, ok := l.Next(); ok && due <= next; due, ok = l.Next() {
			now = due
			l.Poll(now, emit)
		}
		now = next
	}
	for due, ok := l.Next(); ok; due, ok = l.Next() {
		now = max(now, due)
		l.Poll(now, emit)
	}
	return out
}

func numbers(n int) (frames [][]byte) {
	for i := range n {
		frames = append(frames, number(i))
	}
	return frames
}

func mustParse(t testing.TB, text string) Spec {
	t.Helper()
	s, err := Parse(text)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestSameSeedSameFate(t *testing.T) {
	const text = "drop=0.2,duplicate=0.2,reorder=0.2,delay=1ms,delayed=0.2,corrupt=0.2,seed="
	run := func(seed int, port uint16, dir Direction, gap time.Duration) string {
		l := NewLink([]Spec{mustParse(t, text+fmt.Sprint(seed))}, port, dir)
		out := pass(l, numbers(500), gap)
		return fmt.Sprintf("%v %+v", out, l.Counts())
	}
	first := run(7, 3, In, time.Microsecond)
	if again := run(7, 3, In, time.Microsecond); again != first {
		t.Error("the same frames at the same times fare differently")
	}
	for name, other := range map[string]string{
		"seed":      run(8, 3, In, time.Microsecond),
		"port":      run(7, 4, In, time.Microsecond),
		"direction": run(7, 3, Out, time.Microsecond),
	} {
		if other == first {
			t.Errorf("another %s changes nothing", name)
		}
	}
	// What is done to which frame does not depend on when it comes.
	slow := NewLink([]Spec{mustParse(t, text+"7")}, 3, In)
	fast := NewLink([]Spec{mustParse(t, text+"7")}, 3, In)
	contents := func(out []arrival) map[string]int {
		m := map[string]int{}
		for _, a := range out {
			m[a.frame]++
		}
		return m
	}
	a, b := contents(pass(slow, numbers(500), time.Second)), contents(pass(fast, numbers(500), 0))
	if fmt.Sprint(a) != fmt.Sprint(b) || slow.Counts() != fast.Counts() {
		t.Errorf("what becomes of frames depends on their times: %+v, %+v", slow.Counts(), fast.Counts())
	}
}

// TestRates counts what happens to many frames: every share is within five standard deviations of its rate.
func TestRates(t *testing.T) {
	const n = 20_000
	l := NewLink([]Spec{mustParse(t, "drop=0.2,duplicate=0.1,reorder=0.05,delay=1ms,delayed=0.15,corrupt=0.01")}, 1, In)
	out := pass(l, numbers(n), time.Microsecond)
	c := l.Counts()
	if want := c.Frames - c.Dropped + c.Duplicated; c.Frames != n || uint64(len(out)) != want {
		t.Fatalf("%d frames came out of %+v, want %d", len(out), c, want)
	}
	arrived := float64(len(out))
	for _, r := range []struct {
		name     string
		got      uint64
		of, rate float64
	}{
		{"dropped", c.Dropped, n, 0.2}, {"duplicated", c.Duplicated, float64(c.Frames - c.Dropped), 0.1},
		{"reordered", c.Reordered, arrived, 0.05}, {"delayed", c.Delayed, arrived, 0.15}, {"corrupted", c.Corrupted, arrived, 0.01},
	} {
		if sigma := math.Sqrt(r.of * r.rate * (1 - r.rate)); math.Abs(float64(r.got)-r.of*r.rate) > 5*sigma {
			t.Errorf("%s: %d of %.0f, want %.0f, give or take %.0f", r.name, r.got, r.of, r.of*r.rate, 5*sigma)
		}
	}
}

func TestExtremes(t *testing.T) {
	frames := numbers(100)
	for _, c := range []struct {
		spec string
		n    int
	}{{"drop=1", 0}, {"duplicate=1", 200}, {"reorder=1", 100}, {"delay=1s", 100}, {"corrupt=1", 100}, {"drop=1,port=2", 100}} {
		l := NewLink([]Spec{mustParse(t, c.spec)}, 1, Out)
		if c.spec == "drop=1,port=2" {
			if l != nil {
				t.Error("a fault of port 2 is about port 1")
			}
			continue
		}
		if out := pass(l, frames, time.Millisecond); len(out) != c.n {
			t.Errorf("%s: %d frames, want %d", c.spec, len(out), c.n)
		}
	}
}

func TestDelay(t *testing.T) {
	l := NewLink([]Spec{mustParse(t, "delay=7ms")}, 1, In)
	for i, a := range pass(l, numbers(50), time.Millisecond) {
		if want := time.Duration(i)*time.Millisecond + 7*time.Millisecond; a.at != want || numberOf([]byte(a.frame)) != i {
			t.Fatalf("frame %d came at %v, number %d in line, want %v", numberOf([]byte(a.frame)), a.at, i, want)
		}
	}
}

// TestReorder has frames overtaken by one to three others, all of them, and by none where none comes in time.
func TestReorder(t *testing.T) {
	const n = 10_000
	l := NewLink([]Spec{mustParse(t, "reorder=0.05")}, 1, In)
	seen, behind := map[int]bool{}, map[int]int{}
	for _, a := range pass(l, numbers(n), time.Microsecond) {
		got := numberOf([]byte(a.frame))
		over := 0
		for next := got + 1; next < got+20; next++ {
			if seen[next] {
				over++
			}
		}
		seen[got] = true
		behind[over]++
	}
	c := l.Counts()
	// A held frame may have to wait for held ones before it does not count those: the last of them come without.
	if moved := uint64(n - behind[0]); moved < c.Reordered-4 || moved > c.Reordered {
		t.Errorf("%d frames were overtaken, %d reordered: %v", moved, c.Reordered, behind)
	}
	for i := 1; i <= reorderBehind; i++ {
		if behind[i] < int(c.Reordered)/5 {
			t.Errorf("%d frames were overtaken by %d, of %d", behind[i], i, c.Reordered)
		}
	}
	l = NewLink([]Spec{mustParse(t, "reorder=1")}, 1, In)
	for i, a := range pass(l, numbers(50), time.Second) {
		if want := time.Duration(i)*time.Second + reorderHold; a.at != want || numberOf([]byte(a.frame)) != i {
			t.Fatalf("frame %d came at %v, number %d in line, want %v", numberOf([]byte(a.frame)), a.at, i, want)
		}
	}
}

// TestCorrupt flips bits everywhere, one to three, which the checksums of IPv4 and UDP do not miss.
func TestCorrupt(t *testing.T) {
	l := NewLink([]Spec{mustParse(t, "corrupt=1,all=true")}, 1, In)
	frame := number(0x12345678)
	original := bytes.Clone(frame)
	byBits, byByte := map[int]int{}, map[int]int{}
	for range 5000 {
		l.Pass(0, frame, func(f []byte) {
			n := 0
			for i := range f {
				if d := bits.OnesCount8(f[i] ^ original[i]); d != 0 {
					n += d
					byByte[i]++
				}
			}
			byBits[n]++
			const ethernet = 14
			if _, _, _, err := wire.ParseUDP(f); err == nil && bytes.Equal(f[:ethernet], original[:ethernet]) && n != 0 {
				t.Errorf("not detected: %x", f)
			}
		})
	}
	if !bytes.Equal(frame, original) {
		t.Fatal("the sender's frame was changed")
	}
	if len(byBits) != corruptBits || byBits[0] != 0 {
		t.Errorf("numbers of flipped bits: %v", byBits)
	}
	for i := range frame {
		if byByte[i] == 0 {
			t.Errorf("byte %d was never changed", i)
		}
	}
	// Whatever is too short to be anything passes too.
	for n := range 4 {
		l.Pass(0, make([]byte, n), func([]byte) {})
	}
}

// TestOthers are frames that are spared, unless asked otherwise.
func TestOthers(t *testing.T) {
	a, b := wire.Addr{Port: 7}, wire.Addr{Port: wire.Port}
	arp := append(make([]byte, 12), 0x08, 0x06, 0, 1)
	for _, c := range []struct {
		name  string
		frame []byte
		spare bool
	}{
		{"to the port", wire.AppendUDP(nil, a, b, nil, false), false},
		{"from the port", wire.AppendUDP(nil, b, a, nil, false), false},
		{"other ports", wire.AppendUDP(nil, a, a, nil, false), true},
		{"ARP", arp, true},
		{"nothing", nil, true},
	} {
		for _, all := range []bool{false, true} {
			l := NewLink([]Spec{{Drop: 1, All: all}}, 1, In)
			passed := false
			l.Pass(0, c.frame, func([]byte) { passed = true })
			if want := c.spare && !all; passed != want {
				t.Errorf("%s, all=%t: passed %t, want %t", c.name, all, passed, want)
			}
		}
	}
}

func TestLastHolds(t *testing.T) {
	specs := []Spec{{Drop: 0.1}, {Drop: 0.2, Port: 3}, {Drop: 0.3, Port: 3, Direction: Out}}
	for _, c := range []struct {
		port uint16
		dir  Direction
		want float64
	}{{1, In, 0.1}, {3, In, 0.2}, {3, Out, 0.3}} {
		if l := NewLink(specs, c.port, c.dir); l.spec.Drop != c.want {
			t.Errorf("port %d %v: drop %v, want %v", c.port, c.dir, l.spec.Drop, c.want)
		}
	}
}

func BenchmarkPass(b *testing.B) {
	l := NewLink([]Spec{{Drop: 0.1, Duplicate: 0.1, Reorder: 0.1, Delay: time.Microsecond, Delayed: 0.1, Corrupt: 0.1}}, 1, In)
	frame := append(number(1), make([]byte, 1000)...)
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		l.Pass(time.Duration(i)*100, frame, func([]byte) {})
	}
}
