package xdp

import (
	"errors"
	"io"
	"testing"
	"testing/synctest"
	"time"

	"xagg/api"
	"xagg/wire"
)

// plausible are the times that the program may take for a frame, on any machine.
const leastRun, mostRun = 20 * time.Nanosecond, 100 * time.Microsecond

// TestRunningTime: the kernel counts exactly the frames that the program has run for while it was to, and a time that can be.
func TestRunningTime(t *testing.T) {
	server := load(t, 100)
	if _, err := NewAgent("s0", "", server).Install(t.Context(), onePlan); err != nil {
		t.Fatal(err)
	}
	const frames = 1000
	send := func() {
		t.Helper()
		frame := wire.AppendFrame(nil, workerAddr(0), serverAddr, grad(0, 256), true)
		for range frames {
			if _, _, err := server.objects.Xagg.Test(frame); err != nil {
				t.Fatal(err)
			}
		}
	}
	ran := func() (uint64, time.Duration) {
		t.Helper()
		frames, d, err := server.ran()
		if err != nil {
			t.Fatal(err)
		}
		return frames, d
	}
	counter, err := server.measure()
	if err != nil {
		t.Fatal(err)
	}
	n, d := ran()
	send()
	m, e := ran()
	if m-n != frames {
		t.Errorf("%d frames, %d were sent", m-n, frames)
	}
	if per := (e - d) / frames; per < leastRun || per > mostRun {
		t.Errorf("%v for a frame, want %v to %v", per, leastRun, mostRun)
	}
	if err := counter.Close(); err != nil {
		t.Error(err)
	}
	counts, err := server.Reasons()
	if err != nil || counts[wire.ReasonNone]+counts[wire.ReasonDuplicate] != frames {
		t.Errorf("the program has counted %v, %v", counts, err)
	}
}

// TestAgentMeasures: an agent that is asked to says how long the program runs for frames that come over a veth pair; nobody
// who is not asked measures anything.
func TestAgentMeasures(t *testing.T) {
	enterNamespace(t)
	vethPair(t, 1500, 1)
	server := load(t, 100)
	log, _ := testLog(t)
	if err := server.Attach("server", Native, log); err != nil {
		t.Fatal(err)
	}
	agent := NewAgent("s0", "server", server)
	defer agent.Close()
	if _, err := agent.Install(t.Context(), onePlan); err != nil {
		t.Fatal(err)
	}
	fd := packetSocket(t, "switch")
	frame := wire.AppendFrame(nil, workerAddr(0), serverAddr, grad(0, 256), true)
	var first, got *api.StatsReply
	sent, began := uint64(0), time.Now()
	for deadline := began.Add(30 * time.Second); got.GetRunFrames() < 100; {
		if time.Now().After(deadline) {
			t.Fatalf("after %d frames: %v", sent, got)
		}
		answerTo(t, fd, frame)
		sent++
		var err error
		if got, err = agent.Stats(t.Context(), &api.StatsRequest{Measure: sent > 1}); err != nil {
			t.Fatal(err)
		}
		if first == nil {
			first = got
		}
	}
	took := time.Since(began)
	if first.WatchedNs != 0 || first.RunFrames != 0 {
		t.Errorf("nobody asked for it, and it was measured: %v", first)
	}
	if got.RunFrames > sent || got.Reasons["summed"]+got.Reasons["duplicate"] < sent-1 {
		t.Errorf("the program ran for %d of %d frames: %v", got.RunFrames, sent, got)
	}
	if per := time.Duration(got.RunNs / got.RunFrames); per < leastRun || per > mostRun {
		t.Errorf("%v for a frame, want %v to %v", per, leastRun, mostRun)
	}
	if got.RunNs > got.WatchedNs || got.WatchedNs > uint64(took) {
		t.Errorf("the program ran for %d ns of %d, in a test of %v", got.RunNs, got.WatchedNs, took)
	}
	t.Logf("%d of %d frames, %d ns for each, %.2f %% of a core", got.RunFrames, sent, got.RunNs/got.RunFrames,
		100*float64(got.RunNs)/float64(got.WatchedNs))
}

// steady is a program that runs for a frame a millisecond, 1 us each, and counts it while it is to.
type steady struct {
	began, since time.Time
	frames       uint64
	on           bool
	refuses      error
}

func (s *steady) Close() error {
	s.frames += uint64(time.Since(s.since) / time.Millisecond)
	s.on = false
	return nil
}

func (s *steady) measure() (io.Closer, error) {
	s.since, s.on = time.Now(), true
	return s, s.refuses
}

func (s *steady) ran() (uint64, time.Duration, error) {
	n := s.frames
	if s.on {
		n += uint64(time.Since(s.since) / time.Millisecond)
	}
	return n, time.Duration(n) * time.Microsecond, nil
}

// TestWatch: running time is measured for a part of the time, and only while somebody asks.
func TestWatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var w watch
		p := &steady{began: time.Now()}
		for i := range 100 {
			got := w.read(p, true)
			want := running{frames: 20, time: 20 * time.Microsecond, watched: watchFor}
			n := time.Duration((i + 3) / 4) // 100 ms apart, and measured in every fourth
			if i == 0 {
				n = 0
			}
			if want = (running{uint64(n) * want.frames, n * want.time, n * want.watched}); got != want {
				t.Fatalf("reading %d: %+v, want %+v", i, got, want)
			}
			time.Sleep(100 * time.Millisecond)
		}
		before := w.read(p, false)
		time.Sleep(time.Hour)
		if got := w.read(p, false); got != before || p.on {
			t.Errorf("nobody asked, and it went from %+v to %+v", before, got)
		}
		w.read(p, true)
		time.Sleep(watchFor / 2)
		w.end(p)
		w.end(p)
		if got := w.read(p, false); got.watched != before.watched+watchFor/2 || p.on {
			t.Errorf("ended in between: %+v after %+v", got, before)
		}
		time.Sleep(time.Hour)

		p.refuses = errors.New("needs CAP_SYS_ADMIN")
		var other watch
		for range 3 {
			if got := other.read(p, true); got != (running{}) {
				t.Errorf("it may not be measured, and was: %+v", got)
			}
			time.Sleep(time.Second)
		}
	})
}
