package worker_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"xagg/agg"
	"xagg/api"
	"xagg/wire"
	"xagg/worker"
)

// loopback returns an address that only this test process uses.
func loopback(host byte) netip.Addr {
	pid := os.Getpid()
	return netip.AddrFrom4([4]byte{127, byte(pid>>8)&0x7f + 1, byte(pid), host})
}

// udpSwitch is the switch model behind a UDP socket: it answers at the service's address.
type udpSwitch struct {
	addr     netip.Addr
	client   api.ControllerClient
	checksum bool // of the workers' packets
}

func startUDPSwitch(t testing.TB, ranks int) *udpSwitch {
	s := &udpSwitch{addr: loopback(254), checksum: true}
	conn, err := net.ListenUDP("udp4", net.UDPAddrFromAddrPort(netip.AddrPortFrom(s.addr, wire.Port)))
	if err != nil {
		t.Fatal(err)
	}
	const pool, chunks = 32, 512
	all := ^uint64(0) >> (64 - ranks)
	members := map[uint8]agg.Member{}
	for r := range ranks {
		members[uint8(r)] = agg.Member{Port: uint16(r), Src: ipNumber(loopback(byte(r + 1)).As4())}
	}
	sw := agg.NewSwitch(4 * pool)
	plan := agg.SwitchPlan{Job: testJob, Epoch: testEpoch, Ranks: all, Cohort: all, Base: 2 * pool, Pool: pool}
	if err := sw.Install(plan, members, nil); err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		start, buf, peers := time.Now(), make([]byte, 2048), map[uint8]netip.AddrPort{}
		var p wire.Packet
		for {
			n, from, err := conn.ReadFromUDPAddrPort(buf)
			if err != nil {
				return
			}
			if p.Decode(buf[:n]) != nil {
				continue
			}
			rank := p.Rank
			peers[rank] = from
			in := agg.Ingress{Port: uint16(rank), Src: ipNumber(from.Addr().As4()), ToService: true}
			out := sw.Handle(uint64(time.Since(start).Microseconds()), in, &p)
			answer := buf[:p.Encode(buf)]
			switch out.Dest {
			case agg.ToSender:
				conn.WriteToUDPAddrPort(answer, from)
			case agg.ToAll:
				for _, peer := range peers {
					conn.WriteToUDPAddrPort(answer, peer)
				}
			}
		}
	}()
	t.Cleanup(func() { conn.Close(); <-done })
	s.client = serve(t, newTestController(&api.Ready{Job: testJob, Epoch: testEpoch, Ranks: uint32(ranks), Pool: pool,
		MaxChunks: chunks, ServiceIp: s.addr.String(), ServiceMac: "02:78:61:00:ff:fe"}))
	return s
}

// join lets a rank join from an address of its own.
func (s *udpSwitch) join(ctx context.Context, r int) (*worker.Worker, error) {
	link, err := worker.ListenUDP(netip.AddrPortFrom(loopback(byte(r+1)), uint16(r%2)*wire.Port), s.checksum)
	if err != nil {
		return nil, err
	}
	return worker.Join(ctx, s.client, worker.Config{Job: "train", Rank: r, Link: link})
}

func TestUDP(t *testing.T) {
	for _, checksum := range []bool{true, false} {
		t.Run(fmt.Sprintf("checksum=%v", checksum), func(t *testing.T) {
			const ranks, size = 3, 70*256 + 5
			s := startUDPSwitch(t, ranks)
			s.checksum = checksum
			n := &testnet{netConfig: netConfig{ranks: ranks}}
			n.each(t, func(r int) error {
				w, err := s.join(t.Context(), r)
				if err != nil {
					return err
				}
				defer w.Close()
				for range 3 {
					data := make([]int32, size)
					for i := range data {
						data[i] = int32(i * (r + 1))
					}
					if _, err := w.AllReduceInt32(t.Context(), "k", data); err != nil {
						return err
					}
					for i, v := range data {
						if v != int32(6*i) {
							return fmt.Errorf("value %d is %d, want %d", i, v, 6*i)
						}
					}
				}
				return w.Leave(t.Context())
			})
		})
	}
}

func TestListenUDPErrors(t *testing.T) {
	taken, err := worker.ListenUDP(netip.AddrPortFrom(loopback(77), 0), true)
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	if _, err := worker.ListenUDP(taken.LocalAddr(), true); !errors.Is(err, unix.EADDRINUSE) ||
		!strings.Contains(err.Error(), "port 0 takes a free one") {
		t.Errorf("port in use: %v", err)
	}
	if _, err := worker.ListenUDP(netip.MustParseAddrPort("192.0.2.1:0"), true); !errors.Is(err, unix.EADDRNOTAVAIL) ||
		!strings.Contains(err.Error(), "none of this machine's addresses") {
		t.Errorf("address of another machine: %v", err)
	}
	for _, addr := range []string{"[::1]:0", "0.0.0.0:0"} {
		if _, err := worker.ListenUDP(netip.MustParseAddrPort(addr), true); err == nil {
			t.Errorf("%s: no error", addr)
		}
	}
}

// TestUDPSilence: nobody at the service address is not the end of a link but a deadline that says what was met.
func TestUDPSilence(t *testing.T) {
	link, err := worker.ListenUDP(netip.AddrPortFrom(loopback(1), 0), true)
	if err != nil {
		t.Fatal(err)
	}
	client := serve(t, newTestController(&api.Ready{Job: testJob, Epoch: testEpoch, Ranks: 1, Pool: 4, MaxChunks: 1,
		ServiceIp: loopback(253).String(), ServiceMac: "02:78:61:00:ff:fe"}))
	w, err := worker.Join(t.Context(), client, worker.Config{Job: "train", Link: link}, worker.WithTimeout(700*time.Millisecond))
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	_, err = w.AllReduceInt32(t.Context(), "k", []int32{1})
	if !errors.As(err, new(*worker.DeadlineError)) || !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("%v, want a deadline and a refused connection", err)
	}
	if w.Stats().Resends == 0 {
		t.Errorf("stats %+v: not tried again", w.Stats())
	}
}

// testLink checks what every Link promises: deadlines, waking, order and sizes, and whom it listens to. peer sends a
// payload to the link from the service's address, stranger from another.
func testLink(t *testing.T, link worker.Link, peer, stranger func(payload []byte)) {
	bufs, sizes := [][]byte{make([]byte, 100), make([]byte, 100), make([]byte, 100)}, make([]int, 3)
	soon := func() time.Time { return time.Now().Add(20 * time.Millisecond) }
	late := time.Now().Add(time.Minute)
	if n, err := link.Recv(bufs, sizes, soon()); n != 0 || err != nil {
		t.Errorf("nothing sent: received %d, %v", n, err)
	}
	link.Wake()
	if n, err := link.Recv(bufs, sizes, late); n != 0 || err != nil {
		t.Errorf("woken before: received %d, %v", n, err)
	}
	timer := time.AfterFunc(20*time.Millisecond, link.Wake)
	defer timer.Stop()
	if n, err := link.Recv(bufs, sizes, late); n != 0 || err != nil {
		t.Errorf("woken: received %d, %v", n, err)
	}
	stranger([]byte("who is that"))
	peer([]byte("one"))
	peer(slices.Repeat([]byte("long"), 100))
	peer([]byte("three"))
	var got []string
	for len(got) < 3 {
		n, err := link.Recv(bufs[:2], sizes[:2], late)
		if err != nil {
			t.Fatal(err)
		}
		for i, b := range bufs[:n] {
			got = append(got, string(b[:sizes[i]]))
		}
	}
	if want := []string{"one", strings.Repeat("long", 25), "three"}; !slices.Equal(got, want) {
		t.Errorf("received %q, want %q", got, want)
	}
	if n, err := link.Recv(bufs, sizes, soon()); n != 0 || err != nil {
		t.Errorf("all received: received %d, %v", n, err)
	}
	if err := link.Close(); err != nil {
		t.Error(err)
	}
	if n, err := link.Recv(bufs, sizes, late); n != 0 || err == nil {
		t.Errorf("closed: received %d, %v", n, err)
	}
	link.Wake() // must not fail
}

func TestUDPLink(t *testing.T) {
	link, err := worker.ListenUDP(netip.AddrPortFrom(loopback(1), 0), true)
	if err != nil {
		t.Fatal(err)
	}
	defer link.Close()
	sender := func(host byte, port uint16) func([]byte) {
		conn, err := net.ListenUDP("udp4", net.UDPAddrFromAddrPort(netip.AddrPortFrom(loopback(host), port)))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		return func(b []byte) {
			if _, err := conn.WriteToUDPAddrPort(b, link.LocalAddr()); err != nil {
				t.Error(err)
			}
		}
	}
	peer, stranger := sender(2, 4711), sender(3, 4711)
	if err := link.Connect(wire.Addr{IP: loopback(2).As4(), Port: 4711}); err != nil {
		t.Fatal(err)
	}
	testLink(t, link, peer, stranger)
}

func TestFrameLink(t *testing.T) {
	var sent [][]byte
	link := worker.NewFrameLink(workerAddr(0), true, func(frame []byte) { sent = append(sent, frame) })
	if got := link.LocalAddr().String(); got != "10.77.0.1:19860" {
		t.Errorf("local address %s", got)
	}
	if err := link.Connect(service); err != nil {
		t.Fatal(err)
	}
	if n, err := link.Send([][]byte{[]byte("a"), []byte("bc")}); n != 2 || err != nil {
		t.Errorf("sent %d, %v", n, err)
	}
	for i, want := range []string{"a", "bc"} {
		src, dst, payload, err := wire.ParseUDP(sent[i])
		if src != workerAddr(0) || dst != service || string(payload) != want || err != nil {
			t.Errorf("frame %d: %v to %v, %q, %v", i, src, dst, payload, err)
		}
	}
	link.In(wire.AppendUDP(nil, service, workerAddr(1), []byte("to another"), true))
	link.In([]byte("no frame"))
	testLink(t, link,
		func(b []byte) { link.In(wire.AppendUDP(nil, service, workerAddr(0), b, false)) },
		func(b []byte) { link.In(wire.AppendUDP(nil, workerAddr(3), workerAddr(0), b, true)) })
	if n := link.Dropped(); n != 3 {
		t.Errorf("%d frames dropped, want 3", n)
	}
}
