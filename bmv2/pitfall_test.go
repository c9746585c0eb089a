package bmv2_test

import (
	"encoding/binary"
	"slices"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"xagg/bmv2"
	"xagg/bmv2/dataplane"
	"xagg/bmv2/internal/vethtest"
	"xagg/bmv2/port"
	"xagg/tests/require"
)

// The numbers are those of tests/conformance's pitfalls.

// ask is a frame for switch.p4 of a kind, with a multicast group.
func ask(kind byte, group uint16, mark byte) []byte {
	f := toPort(0, mark)
	f[14] = kind << 4
	binary.BigEndian.PutUint16(f[16:], group)
	return f
}

// A peer that does not read may fill the queue of its own port, but must not hold up the other copies of a multicast.
// TestStalledPort says the same of unicast.
func TestPitfall25DeadPeerOfAMulticast(t *testing.T) {
	t.Run("engine", func(t *testing.T) {
		e, _ := controlled(t, bmv2.Config{})
		stall := make(chan struct{})
		defer close(stall)
		got := make(chan byte, 2)
		for number, receive := range map[uint16]func([]byte){
			1: func([]byte) { <-stall },
			2: func(f []byte) { got <- f[len(f)-1] },
			3: func(f []byte) { got <- f[len(f)-1] },
		} {
			if err := e.Attach(number, receive); err != nil {
				t.Fatal(err)
			}
		}
		const frames, queue = 1500, 1024
		for i := range frames {
			if err := e.Inject(3, ask(3, 1, byte(i))); err != nil {
				t.Fatal(err)
			}
			for range 2 {
				select {
				case mark := <-got:
					if mark != byte(i) {
						t.Fatalf("copy %d, want %d", mark, byte(i))
					}
				case <-time.After(patience):
					t.Fatalf("a copy of frame %d waits for port 1", i)
				}
			}
		}
		if n := e.Dropped(1); n < frames-queue-port.Batch || n > frames-queue {
			t.Errorf("%d copies dropped at the stalled port", n)
		}
		if n := e.Dropped(2) + e.Dropped(3); n != 0 {
			t.Errorf("%d copies dropped at the other ports", n)
		}
	})

	// On links: nobody reads, then the link takes ten frames a second, and then it is down.
	onLinks := func(t *testing.T, stages []func(dead netlink.Link) error, start func(t *testing.T, s *vethtest.Space)) {
		s := vethtest.New(t, 3)
		start(t, s)
		got := make(chan byte, 2)
		var sender *port.Port
		for _, name := range []string{"h1", "h2"} {
			p, err := port.Open(name, port.Options{NetNS: s.Path})
			if err != nil {
				t.Fatal(err)
			}
			done := make(chan struct{})
			go func() {
				defer close(done)
				p.Receive(func(f []byte, _ port.Meta) { got <- f[len(f)-1] })
			}()
			t.Cleanup(func() {
				p.Close()
				<-done
			})
			sender = p // h2, at port 3
		}
		for n, stage := range stages {
			err := s.Do(func() error {
				dead, err := netlink.LinkByName("s0")
				if err != nil {
					return err
				}
				return stage(dead)
			})
			if err != nil {
				t.Fatalf("stage %d: %v", n, err)
			}
			for i := range 600 { // ten times what an egress queue of simple_switch holds, twice what a socket does
				if err := sender.Send([][]byte{ask(3, 1, byte(i))}); err != nil {
					t.Fatal(err)
				}
				for range 2 {
					select {
					case mark := <-got:
						if mark != byte(i) {
							t.Fatalf("stage %d: copy %d, want %d", n, mark, byte(i))
						}
					case <-time.After(patience):
						t.Fatalf("stage %d: a copy of frame %d is missing", n, i)
					}
				}
			}
		}
	}
	silent := func(netlink.Link) error { return nil }
	slow := func(dead netlink.Link) error {
		const rate, burst = 600, 2000 // bytes a second, bytes
		return netlink.QdiscReplace(&netlink.Tbf{
			QdiscAttrs: netlink.QdiscAttrs{LinkIndex: dead.Attrs().Index, Handle: netlink.MakeHandle(1, 0), Parent: netlink.HANDLE_ROOT},
			Rate:       rate, Limit: 1 << 20, Buffer: netlink.Xmittime(rate, burst),
		})
	}
	down := func(netlink.Link) error {
		peer, err := netlink.LinkByName("h0")
		if err != nil {
			return err
		}
		return netlink.LinkSetDown(peer)
	}
	t.Run("engine on links", func(t *testing.T) {
		onLinks(t, []func(netlink.Link) error{silent, slow, down}, func(t *testing.T, s *vethtest.Space) {
			if err := s.Do(func() error {
				controlled(t, bmv2.Config{Ports: map[uint16]string{1: "s0", 2: "s1", 3: "s2"}})
				return nil
			}); err != nil {
				t.Fatal(err)
			}
		})
	})
	// Not slow: simple_switch_grpc sends for all ports in one thread, which waits for a link that takes no more. With
	// the one above everything stopped after some 275 frames.
	t.Run("simple_switch_grpc on links", func(t *testing.T) {
		require.Have(t, require.BMv2)
		onLinks(t, []func(netlink.Link) error{silent, down}, func(t *testing.T, s *vethtest.Space) {
			switchOnLinks(t, s, map[uint16]string{1: "s0", 2: "s1", 3: "s2"})
		})
	})
}

// mark_to_drop clears mcast_grp as well: after the group is set it leaves nothing to send.
func TestPitfall26MarkToDropClearsTheGroup(t *testing.T) {
	bothRigs(t, func(t *testing.T, r *rig, n names) {
		programSwitch(t, r, n.info)
		for i, want := range [][]uint16{{1, 2, 3}, nil} { // of group 1, and of group 1 and then mark_to_drop
			out := r.exchange(t, []dataplane.Frame{{Port: 1, Bytes: ask([]byte{3, 12}[i], 1, 9)}})[0]
			sortFrames(out, nil)
			if got := ports(out); !slices.Equal(got, want) {
				t.Errorf("copies at ports %v, want %v", got, want)
			}
		}
	})
}
