package xdp

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"xagg/wire"
)

// TestPitfall30 has several senders, each on a processor of its own, send every contribution over a link with several
// receive queues, so that contributions to one chunk come from several queues and processors at once. What comes back
// is judged as in TestPitfall31.
func TestPitfall30(t *testing.T) {
	for _, mode := range []Mode{Native, Generic} {
		for name, c := range contentions() {
			t.Run(string(mode)+"/"+name, func(t *testing.T) { sendOverQueues(t, mode, c) })
		}
	}
}

func sendOverQueues(t *testing.T, mode Mode, c *contention) {
	const senders, queues = 4, 4
	c.damage = true
	enterNamespace(t)
	vethPair(t, 1500, queues)
	server := load(t, c.plan.Lease.Slots())
	log, _ := testLog(t)
	if err := server.Attach("server", mode, log); err != nil {
		t.Fatal(err)
	}
	if err := server.Install(c.plan); err != nil {
		t.Fatal(err)
	}

	// One socket hears all answers.
	answers := packetSocket(t, "switch")
	if err := unix.SetsockoptInt(answers, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 64<<20); err != nil {
		t.Fatal(err)
	}
	quiet := make(chan struct{}, senders)
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		hear(c, answers, quiet, stop)
	}()

	var all sync.WaitGroup
	for sender := range senders {
		fd := packetSocket(t, "switch")
		all.Go(func() {
			runtime.LockOSThread() // and its processor ends with the goroutine
			var one unix.CPUSet
			one.Set(sender % runtime.NumCPU())
			if err := unix.SchedSetaffinity(0, &one); err != nil {
				t.Errorf("bind sender %d to a processor: %v", sender, err)
				return
			}
			rng := rand.New(rand.NewPCG(uint64(sender), 30))
			send := func(frame []byte) error {
				_, err := unix.Write(fd, frame)
				if errors.Is(err, unix.ENOBUFS) { // lost, like others
					return nil
				}
				return err
			}
			for more, err := true, error(nil); more; {
				if more, err = c.pass(rng, send); err != nil {
					t.Error(err)
					return
				}
				<-quiet
			}
		})
	}
	all.Wait()
	close(stop)
	<-stopped
	if c.wrong != nil {
		t.Error(c.wrong)
	}
	c.finish(t, server)

	if mode == Native {
		stats, used := ethtoolStats(t, "server"), 0
		for q := range queues {
			if stats[fmt.Sprintf("rx_queue_%d_xdp_packets", q)] != 0 {
				used++
			}
		}
		if used < 2 {
			t.Errorf("%d receive queues were used: %v", used, stats)
		}
	}
	var perCPU []uint64
	if err := server.objects.Reasons.Lookup(uint32(wire.ReasonNone), &perCPU); err != nil {
		t.Fatal(err)
	}
	processors := 0
	for _, n := range perCPU {
		if n != 0 {
			processors++
		}
	}
	if processors < min(2, runtime.NumCPU()) {
		t.Errorf("contributions were summed on %d processors: %v", processors, perCPU)
	}
}

// hear has answers judged until it is told to stop, and lets the senders go on when no more come.
func hear(c *contention, fd int, quiet chan<- struct{}, stop <-chan struct{}) {
	b := make([]byte, 2048)
	for {
		select {
		case <-stop:
			return
		default:
		}
		poll := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		if n, err := unix.Poll(poll, 1); n == 0 || err != nil {
			for len(quiet) < cap(quiet) {
				quiet <- struct{}{}
			}
			continue
		}
		n, from, err := unix.Recvfrom(fd, b, unix.MSG_DONTWAIT)
		if err != nil || from.(*unix.SockaddrLinklayer).Pkttype == unix.PACKET_OUTGOING {
			continue
		}
		if _, _, err := wire.ParseFrame(b[:n], new(wire.Packet)); errors.Is(err, wire.ErrNotXAgg) {
			continue // the stack's own
		}
		c.judge(b[:n])
	}
}
