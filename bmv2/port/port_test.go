package port_test

import (
	"bytes"
	"errors"
	"os"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"xagg/bmv2/internal/vethtest"
	"xagg/bmv2/port"
)

// patience is how long a test waits for what has to happen.
const patience = 10 * time.Second

func open(t *testing.T, s *vethtest.Space, name string, opts port.Options) *port.Port {
	t.Helper()
	opts.NetNS = s.Path
	p, err := port.Open(name, opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	return p
}

type received struct {
	frame []byte
	meta  port.Meta
}

func receive(t *testing.T, p *port.Port) <-chan received {
	t.Helper()
	c := make(chan received, 1000)
	go func() {
		defer close(c)
		if err := p.Receive(func(f []byte, m port.Meta) { c <- received{bytes.Clone(f), m} }); err != nil {
			t.Error(err)
		}
	}()
	return c
}

func next(t *testing.T, c <-chan received) received {
	t.Helper()
	select {
	case r, ok := <-c:
		if !ok {
			t.Fatal("port ended")
		}
		return r
	case <-time.After(patience):
		t.Fatal("no frame came")
	}
	return received{}
}

// frame has a destination that is nobody's, so that it takes a promiscuous interface to receive it.
func frame(typ uint16, n int) []byte {
	f := make([]byte, max(n, 14))
	copy(f, []byte{2, 9, 9, 9, 9, 9, 2, 1, 1, 1, 1, 1, byte(typ >> 8), byte(typ)})
	for i := 14; i < len(f); i++ {
		f[i] = byte(i)
	}
	return f
}

func TestFramesPass(t *testing.T) {
	s := vethtest.New(t, 1)
	a, b := open(t, s, "s0", port.Options{}), open(t, s, "h0", port.Options{})
	atA, atB := receive(t, a), receive(t, b)
	tagged := append(append(frame(0x8100, 14), 0x20, 0x05, 0x08, 0x00), make([]byte, 50)...)
	service := append(append(frame(0x88a8, 14), 0x00, 0x07, 0x08, 0x00), make([]byte, 50)...)
	sent := [][]byte{frame(0x88b5, 14), frame(0x88b5, 60), frame(0x88b5, 1514), tagged, service}
	for range 3 * port.Batch { // more than a batch
		sent = append(sent, frame(0x88b5, 100))
	}
	if err := a.Send(sent); err != nil {
		t.Fatal(err)
	}
	for i, want := range sent {
		if got := next(t, atB); !bytes.Equal(got.frame, want) {
			t.Fatalf("frame %d: got %x\nwant %x", i, got.frame, want)
		}
	}
	// Nothing comes back to the sender: the next thing it sees is what the other end sends.
	if err := b.Send([][]byte{frame(0x88b6, 64)}); err != nil {
		t.Fatal(err)
	}
	if got := next(t, atA); !bytes.Equal(got.frame, frame(0x88b6, 64)) {
		t.Errorf("the sender received %x", got.frame)
	}
}

func TestCapturedDirections(t *testing.T) {
	s := vethtest.New(t, 1)
	a, b := open(t, s, "s0", port.Options{}), open(t, s, "h0", port.Options{})
	tap := open(t, s, "s0", port.Options{Outgoing: true, Timestamps: true})
	seen := receive(t, tap)
	before := time.Now()
	if err := a.Send([][]byte{frame(0x88b5, 60)}); err != nil {
		t.Fatal(err)
	}
	out := next(t, seen)
	if err := b.Send([][]byte{frame(0x88b6, 60)}); err != nil {
		t.Fatal(err)
	}
	in := next(t, seen)
	if !out.meta.Outgoing || in.meta.Outgoing {
		t.Errorf("directions: the frame sent is outgoing=%v, the frame received is outgoing=%v",
			out.meta.Outgoing, in.meta.Outgoing)
	}
	// The kernel's clock and Go's are read a moment apart.
	if d := out.meta.Time.Sub(before); d < -time.Millisecond || d > patience {
		t.Errorf("time of the frame is %v after it was sent", d)
	}
}

func TestFrameTooLongForMTU(t *testing.T) {
	s := vethtest.New(t, 1)
	a, b := open(t, s, "s0", port.Options{}), open(t, s, "h0", port.Options{})
	atB := receive(t, b)
	if err := a.Send([][]byte{frame(0x88b5, 3000), frame(0x88b5, 60), frame(0x88b5, 5)}); err != nil {
		t.Fatal(err)
	}
	if got := next(t, atB); len(got.frame) != 60 {
		t.Errorf("got %d bytes, want the frame of 60", len(got.frame))
	}
	if n := a.Counts().Unsendable; n != 1 {
		t.Errorf("%d frames counted as not sendable, want 1", n)
	}
}

// An interface that is down when it is opened, goes down or is deleted is told each time, once.
func TestDown(t *testing.T) {
	s := vethtest.New(t, 1)
	link := func(do func(netlink.Link) error) {
		t.Helper()
		if err := s.Do(func() error {
			l, err := netlink.LinkByName("s0")
			if err != nil {
				return err
			}
			return do(l)
		}); err != nil {
			t.Fatal(err)
		}
	}
	told := make(chan struct{}, 10)
	tell := func(when string, p *port.Port) {
		t.Helper()
		select {
		case <-told:
		case <-time.After(patience):
			t.Fatalf("%s: not told", when)
		}
		for range 3 { // nor again by those who send all the same
			if err := p.Send([][]byte{frame(0x88b5, 60)}); err != nil {
				t.Fatalf("%s: %v", when, err)
			}
		}
		if len(told) != 0 {
			t.Fatalf("%s: told %d times more", when, len(told))
		}
	}
	link(netlink.LinkSetDown)
	a := open(t, s, "s0", port.Options{Down: func() { told <- struct{}{} }})
	b := open(t, s, "h0", port.Options{})
	atA := receive(t, a)
	tell("down when opened", a)
	for _, end := range []struct {
		name string
		do   func(netlink.Link) error
	}{{"down", netlink.LinkSetDown}, {"deleted", netlink.LinkDel}} {
		link(netlink.LinkSetUp)
		for got := false; !got; { // until the kernel has noticed that the link is up
			if err := b.Send([][]byte{frame(0x88b5, 60)}); err != nil {
				t.Fatal(err)
			}
			select {
			case <-atA:
				got = true
			case <-time.After(time.Millisecond):
			}
		}
		link(end.do)
		tell(end.name, a)
	}
}

func TestOpenErrors(t *testing.T) {
	s := vethtest.New(t, 0)
	if _, err := port.Open("s7", port.Options{NetNS: s.Path}); !errors.Is(err, port.ErrNoInterface) {
		t.Errorf("open an interface that is not there: %v", err)
	}
	if _, err := port.Open("lo", port.Options{NetNS: "/proc/self/no-such-namespace"}); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("open in a namespace that is not there: %v", err)
	}
}

func TestCloseAndFinish(t *testing.T) {
	s := vethtest.New(t, 1)
	a, b := open(t, s, "s0", port.Options{}), open(t, s, "h0", port.Options{})
	// Finish delivers what has come already: the frames are in the socket before Receive begins.
	var sent [][]byte
	for range 100 {
		sent = append(sent, frame(0x88b5, 60))
	}
	if err := a.Send(sent); err != nil {
		t.Fatal(err)
	}
	if err := b.Finish(); err != nil {
		t.Fatal(err)
	}
	n := 0
	if err := b.Receive(func([]byte, port.Meta) { n++ }); err != nil || n != len(sent) {
		t.Errorf("received %d of %d frames before the end: %v", n, len(sent), err)
	}
	atA := receive(t, a)
	a.Close()
	select {
	case _, ok := <-atA:
		if ok {
			t.Error("a frame came")
		}
	case <-time.After(patience):
		t.Error("Receive does not end with Close")
	}
}

func BenchmarkSend(b *testing.B) {
	s := vethtest.New(b, 1)
	p, err := port.Open("s0", port.Options{NetNS: s.Path})
	if err != nil {
		b.Fatal(err)
	}
	defer p.Close()
	batch := make([][]byte, port.Batch)
	for i := range batch {
		batch[i] = frame(0x88b5, 1122)
	}
	b.ReportAllocs()
	for b.Loop() {
		if err := p.Send(batch); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/port.Batch, "ns/frame")
}
