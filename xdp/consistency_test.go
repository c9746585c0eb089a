package xdp

import (
	"math"
	"net/netip"
	"testing"
	"time"

	"xagg/wire"
)

// ask gives a frame to the program and returns its answer, or nil.
func ask(t *testing.T, server *Server, p *wire.Packet) (answer *wire.Packet, dst wire.Addr) {
	t.Helper()
	verdict, out, err := server.objects.Xagg.Test(wire.AppendFrame(nil, workerAddr(p.Rank), serverAddr, p, true))
	if err != nil {
		t.Fatal(err)
	}
	if verdict == verdictDrop {
		return nil, dst
	}
	answer = new(wire.Packet)
	if _, dst, err = wire.ParseFrame(out, answer); err != nil || verdict != verdictTX {
		t.Fatalf("verdict %d, answer: %v", verdict, err)
	}
	return answer, dst
}

// TestQuorumWaits measures the wait of a quorum: a chunk with enough ranks is closed by the first packet that comes when
// its first arrival is so long ago, and by none before.
func TestQuorumWaits(t *testing.T) {
	const wait = 20 * time.Millisecond
	server := load(t, 4)
	plan := Plan{Job: 5, Epoch: 1, Ranks: 0b111, Lease: Lease{Chunks: 2, Rounds: 2}, Quorum: 2,
		WaitUs: uint32(wait.Microseconds()), ServiceIP: netip.AddrFrom4(serviceAddr.IP), ServiceMAC: serviceAddr.MAC}
	if err := server.Install(plan); err != nil {
		t.Fatal(err)
	}
	ask(t, server, grad(0, 64))
	latest := time.Now()
	for time.Since(latest) <= wait { // one rank is not enough, however long it waits
		if p, _ := ask(t, server, grad(0, 64)); p.Type != wire.TypeAck {
			t.Fatalf("one rank alone: %+v", p.Header)
		}
	}
	if p, dst := ask(t, server, grad(1, 64)); p.Type != wire.TypeResult || dst != serviceAddr || p.Contributors != 0b11 {
		t.Fatalf("second rank after the wait: %+v to %v", p.Header, dst)
	}
	p, dst := ask(t, server, grad(2, 64))
	if p.Type != wire.TypeResult || dst != workerAddr(2) || p.Contributors != 0b11 || p.Flags&wire.FlagLate == 0 {
		t.Fatalf("third rank after the close: %+v to %v", p.Header, dst)
	}

	other := func(rank uint8) *wire.Packet {
		p := grad(rank, 64)
		p.Chunk = 1
		p.Seal()
		return p
	}
	earliest := time.Now()
	ask(t, server, other(0))
	latest = time.Now()
	for {
		asked := time.Now()
		p, dst := ask(t, server, other(1)) // the first is an addition, the others are not
		answered := time.Now()
		if p.Type == wire.TypeResult {
			if age := answered.Sub(earliest); age < wait || dst != serviceAddr || p.SpreadUs >= uint32(wait.Microseconds()) {
				t.Errorf("closed after at most %v: %+v to %v", age, p.Header, dst)
			}
			return
		}
		if age := asked.Sub(latest); age >= wait || p.Type != wire.TypeAck || dst != workerAddr(1) {
			t.Fatalf("after at least %v: %+v to %v", age, p.Header, dst)
		}
	}
}

// TestQuorumOfEachEpoch: two plans of a job that are installed together close chunks by their own quorums and waits.
func TestQuorumOfEachEpoch(t *testing.T) {
	server := load(t, 4)
	for _, plan := range []Plan{{Epoch: 1, Quorum: 2}, {Epoch: 2, Quorum: 3}, {Epoch: 3, Quorum: 2, WaitUs: uint32(time.Hour.Microseconds())}} {
		plan.Job, plan.Ranks, plan.Lease = 5, 0b1111, Lease{Chunks: 1, Rounds: 4}
		plan.ServiceIP, plan.ServiceMAC = netip.AddrFrom4(serviceAddr.IP), serviceAddr.MAC
		if err := server.Install(plan); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		epoch uint16
		rank  uint8
		want  wire.Type
	}{
		{1, 0, wire.TypeAck}, {2, 0, wire.TypeAck}, {3, 0, wire.TypeAck},
		{3, 1, wire.TypeAck}, {2, 1, wire.TypeAck}, {1, 1, wire.TypeResult},
		{3, 2, wire.TypeAck}, {2, 2, wire.TypeResult}, {3, 3, wire.TypeResult},
	} {
		p := grad(c.rank, 64)
		p.Epoch, p.Round = c.epoch, uint32(c.epoch)
		p.Seal()
		if p, _ := ask(t, server, p); p.Type != c.want {
			t.Errorf("epoch %d, rank %d: %+v, want type %v", c.epoch, c.rank, p.Header, c.want)
		}
	}
}

// TestRunningSumWraps lets the clocks and the number of additions of a running sum, which have 32 bits, begin anew.
func TestRunningSumWraps(t *testing.T) {
	server := load(t, 4)
	plan := Plan{Job: 5, Epoch: 1, Ranks: 0b11, Lease: Lease{Chunks: 1, Rounds: 4}, Async: true, Staleness: 1,
		ServiceIP: netip.AddrFrom4(serviceAddr.IP), ServiceMAC: serviceAddr.MAC}
	if err := server.Install(plan); err != nil {
		t.Fatal(err)
	}
	contribution := func(rank uint8, round uint32) *wire.Packet {
		p := grad(rank, 64)
		p.Flags, p.Round = wire.FlagAsync, round
		p.Seal()
		return p
	}
	ask(t, server, contribution(0, 1)) // claims the slot, although it is refused
	var sum, clocks xaggSlot
	for i, slot := range []*xaggSlot{&sum, &clocks} {
		if err := server.objects.Arena.Lookup(uint32(i), slot); err != nil {
			t.Fatal(err)
		}
	}
	sum.Round, clocks.Lanes[0], clocks.Lanes[1] = math.MaxUint32-1, math.MaxUint32, math.MaxUint32
	for i, slot := range []*xaggSlot{&sum, &clocks} {
		if err := server.objects.Arena.Put(uint32(i), slot); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		rank         uint8
		round        uint32
		answer       wire.Type // 0: none
		reason       wire.Reason
		contributors uint64
		additions    uint32
	}{
		{0, math.MaxUint32, wire.TypeResult, 0, 0b01, math.MaxUint32},
		{0, 0, wire.TypeResult, 0, 0b01, 0},
		{0, 1, wire.TypeWait, 0, 0b01, 0},
		{1, 0, wire.TypeNack, wire.ReasonClock, 0b10, 0},
		{1, math.MaxUint32, wire.TypeResult, 0, 0b11, 1},
		{0, 1, wire.TypeResult, 0, 0b01, 2},
		{0, math.MaxUint32, 0, 0, 0, 0},
		{0, 1, wire.TypeResult, 0, 0b01, 2},
		{1, 0, wire.TypeResult, 0, 0b11, 3},
	} {
		p, dst := ask(t, server, contribution(c.rank, c.round))
		if c.answer == 0 {
			if p != nil {
				t.Errorf("rank %d round %d: answered: %+v", c.rank, c.round, p.Header)
			}
			continue
		}
		if p == nil || p.Type != c.answer || p.Reason != c.reason || p.Contributors != c.contributors || p.Round != c.round ||
			p.Type == wire.TypeResult && p.Seq != c.additions || dst != workerAddr(c.rank) {
			t.Errorf("rank %d round %d: %+v to %v, want %+v", c.rank, c.round, p, dst, c)
		}
	}
}

// TestArrivalsStayInOrder has a slot whose arrivals are later than the clock that the next packets read: processors may
// take a slot's lock in another order than they read the clock. No time between arrivals is negative, and no wait over.
func TestArrivalsStayInOrder(t *testing.T) {
	server := load(t, 2)
	plan := Plan{Job: 5, Epoch: 1, Ranks: 0b111, Lease: Lease{Chunks: 1, Rounds: 2}, Quorum: 2, WaitUs: 1e6,
		ServiceIP: netip.AddrFrom4(serviceAddr.IP), ServiceMAC: serviceAddr.MAC}
	if err := server.Install(plan); err != nil {
		t.Fatal(err)
	}
	ask(t, server, grad(0, 64))
	var s xaggSlot
	if err := server.objects.Arena.Lookup(uint32(0), &s); err != nil {
		t.Fatal(err)
	}
	later := s.FirstNs + uint64(time.Hour)
	s.FirstNs, s.PreviousNs, s.LastNs = later, later, later
	if err := server.objects.Arena.Put(uint32(0), s); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		rank uint8
		want wire.Type
	}{{1, wire.TypeAck}, {1, wire.TypeAck}, {2, wire.TypeResult}} {
		if p, _ := ask(t, server, grad(c.rank, 64)); p.Type != c.want || p.SpreadUs != 0 || p.BlockedUs != 0 {
			t.Errorf("rank %d: %+v, want type %v and no time", c.rank, p.Header, c.want)
		}
	}
	if err := server.objects.Arena.Lookup(uint32(0), &s); err != nil {
		t.Fatal(err)
	}
	if s.FirstNs != later || s.PreviousNs != later || s.LastNs != later {
		t.Errorf("arrivals at %d, %d and %d, want %d", s.FirstNs, s.PreviousNs, s.LastNs, later)
	}
}
