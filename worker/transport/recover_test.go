package transport

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"xagg/agg"
	"xagg/recovery"
	"xagg/wire"
)

// fragile is a whole job whose switch and server lose their memory: endpoints, a switch and a server, and a network
// between them that loses, doubles and holds back packets, also beyond a recovery.
type fragile struct {
	testing.TB
	*rand.Rand
	depth  int
	quorum int // 0 = sync
	sw     *agg.Switch
	server *agg.Server
	plan   agg.SwitchPlan
	next   *agg.SwitchPlan // that the plan is changing to
	armed  bool
	ends   []*Endpoint
	froze  []bool
	air    []packet
	now    time.Duration
	sums   map[uint32]Round // by number
	rounds int
	lost   int // recoveries
}

// packet is on its way to the switch, or beyond it.
type packet struct {
	wire.Packet
	in   agg.Ingress
	to   int // rank, or one of:
	back int // the rank that a server's answer goes to
}

const (
	toSwitch = -1
	toServer = -2 // in the name of rank back
	asServer = -3 // in the service's name
	service  = -4

	fragilePool   = 2
	fragileChunks = 3
	serverPort    = 99
	fragileWait   = 3 * time.Millisecond
)

func newFragile(t testing.TB, seed uint64) *fragile {
	r := rand.New(rand.NewPCG(seed, 0))
	f := &fragile{TB: t, Rand: r, depth: 1 + r.IntN(3), sums: map[uint32]Round{}}
	ranks := 2 + r.IntN(2)
	if r.IntN(2) == 0 {
		f.quorum = 1 + r.IntN(ranks)
	}
	f.sw, f.server = agg.NewSwitch(4*fragilePool), f.newServer()
	f.plan = f.somePlan(ranks, uint16([]int{1, 65534}[r.IntN(2)]))
	f.install(&f.plan)
	for rank := range ranks {
		f.ends = append(f.ends, New(Config{
			Job: 1, Epoch: f.plan.Epoch, Rank: rank, Ranks: ranks, Pool: fragilePool, Depth: f.depth, MaxChunks: fragileChunks,
			Quorum: f.quorum, Wait: fragileWait, Rounds: int(f.serverRounds()),
			Observe: func(r Round) { f.observe(rank, r) },
		}))
		f.froze = append(f.froze, false)
	}
	return f
}

// serverRounds is the least that depth allows; in quorum so many that nobody falls behind.
func (f *fragile) serverRounds() uint32 {
	if f.quorum > 0 {
		return 128
	}
	return []uint32{2, 2, 4, 8}[f.depth]
}

func (f *fragile) newServer() *agg.Server {
	return agg.NewServer(int(f.serverRounds()) * fragileChunks)
}

// somePlan draws a plan: switch, server or hybrid.
func (f *fragile) somePlan(ranks int, epoch uint16) agg.SwitchPlan {
	all := uint64(1)<<ranks - 1
	p := agg.SwitchPlan{Job: 1, Epoch: epoch, Ranks: all, Cohort: all, Base: uint32(epoch%2) * 2 * fragilePool, Pool: fragilePool}
	if p.Servers = f.IntN(2); p.Servers > 0 || f.quorum > 0 {
		p.Cohort, p.Servers = f.Uint64()&all, 1
	}
	p.Quorum, p.WaitUs = f.quorum > 0, uint32(fragileWait.Microseconds())
	return p
}

func (f *fragile) install(p *agg.SwitchPlan) {
	if p.Servers > 0 {
		err := f.server.Install(agg.ServerPlan{
			Job: 1, Epoch: p.Epoch, Ranks: p.Ranks, Chunks: fragileChunks, Rounds: f.serverRounds(),
			Quorum: uint32(f.quorum), WaitUs: p.WaitUs,
		})
		if err != nil {
			f.Fatal(err)
		}
	}
	members := map[uint8]agg.Member{}
	for r := range uint8(wire.MaxRanks) {
		if p.Ranks>>r&1 != 0 {
			members[r] = agg.Member{Port: uint16(r)}
		}
	}
	if err := f.sw.Install(*p, members, []uint16{serverPort}[:p.Servers]); err != nil {
		f.Fatal(err)
	}
}

func (f *fragile) remove(p *agg.SwitchPlan) {
	f.sw.Remove(1, p.Epoch)
	f.server.Remove(1, p.Epoch)
}

// observe compares a round with what other ranks have of it.
func (f *fragile) observe(rank int, r Round) {
	f.rounds++
	if other, ok := f.sums[r.Number]; !ok {
		r.Sum, r.Masks = slices.Clone(r.Sum), slices.Clone(r.Masks)
		f.sums[r.Number] = r
	} else if !slices.Equal(other.Sum, r.Sum) || !slices.Equal(other.Masks, r.Masks) {
		f.Fatalf("round %d of rank %d is not what others have: contributors %x, not %x", r.Number, rank, r.Masks, other.Masks)
	}
}

// put sends a packet, which may be lost or doubled.
func (f *fragile) put(p packet) {
	for range []int{0, 1, 1, 1, 1, 1, 1, 1, 1, 2}[f.IntN(10)] {
		f.air = append(f.air, p)
	}
}

// deliver carries one packet.
func (f *fragile) deliver(i int) {
	p := f.air[i]
	f.air = slices.Delete(f.air, i, i+1)
	us := uint64(f.now.Microseconds())
	if p.to >= 0 {
		b := make([]byte, p.Len())
		p.Encode(b)
		if err := f.ends[p.to].Take(f.now, b); err != nil {
			f.Fatalf("rank %d: %v", p.to, err)
		}
		return
	}
	if p.to == toServer || p.to == asServer {
		out := f.server.Handle(us, &p.Packet)
		p.in = agg.Ingress{Port: serverPort}
		switch {
		case out.Dest == agg.Nowhere:
			return
		case out.Dest == agg.ToService || p.to == asServer:
			p.in.ToService = true
		}
		p.to = toSwitch
		f.put(p)
		return
	}
	out := f.sw.Handle(us, p.in, &p.Packet)
	switch out.Dest {
	case agg.ToSender:
		p.to = int(p.in.Port)
		f.put(p)
	case agg.ToAddress:
		p.to = p.back
		f.put(p)
	case agg.ToServer:
		p.back, p.to = int(p.in.Port), toServer
		f.put(p)
	case agg.ToServerAsService:
		p.to = asServer
		f.put(p)
	case agg.ToAll, agg.ToCohort:
		for r := range f.ends {
			p.to = r
			f.put(p)
		}
	}
}

// step does something.
func (f *fragile) step() {
	f.now += time.Duration(f.IntN(2000)) * time.Microsecond
	switch n := f.IntN(400); {
	case n == 0:
		f.recover()
	case n == 1:
		f.change()
	case n < 150:
		e := f.ends[f.IntN(len(f.ends))]
		for _, b := range e.Due(f.now, make([][]byte, 0, 4)) {
			p := packet{in: agg.Ingress{Port: uint16(e.cfg.Rank)}, to: toSwitch}
			if err := p.Decode(b); err != nil {
				f.Fatal(err)
			}
			f.put(p)
		}
	case len(f.air) > 0:
		f.deliver(f.IntN(len(f.air)))
	}
	if f.armed && !slices.ContainsFunc(f.ends, func(e *Endpoint) bool { return wire.SerialLess16(e.Epoch(), f.next.Epoch) }) {
		f.remove(&f.plan)
		f.plan, f.next, f.armed = *f.next, nil, false
	}
}

func after(epoch uint16) uint16 {
	if epoch == 65535 {
		return 2
	}
	return epoch + 1
}

// change begins a change of plan, or arms it.
func (f *fragile) change() {
	switch {
	case f.next == nil:
		next := f.somePlan(len(f.ends), after(f.plan.Epoch))
		f.next = &next
		f.install(f.next)
	case f.plan.Servers > 0:
		f.server.Arm(1, f.plan.Epoch, f.next.Epoch)
		f.armed = true
	default:
		f.sw.Arm(1, f.plan.Epoch, f.next.Epoch)
		f.armed = true
	}
}

// recover is the controller's part after a loss. Some ranks may not hear of its end before the next loss.
func (f *fragile) recover() {
	f.lost++
	lost := f.IntN(3)
	if lost != 0 {
		f.sw = agg.NewSwitch(4 * fragilePool)
	}
	if lost != 1 {
		f.server = f.newServer()
	}
	states := map[int]recovery.State{}
	for r, e := range f.ends {
		states[r] = e.Freeze()
		f.froze[r] = true
	}
	plan, err := recovery.Make(states)
	if err != nil {
		f.Fatalf("states %+v: %v", states, err)
	}
	results := map[recovery.ChunkID][]byte{}
	for r, ids := range plan.HandOver {
		payloads, err := f.ends[r].Results(ids)
		if err != nil {
			f.Fatal(err)
		}
		for i, id := range ids {
			results[id] = bytes.Clone(payloads[i])
		}
	}
	old := []agg.SwitchPlan{f.plan}
	if f.next != nil {
		old = append(old, *f.next)
		f.plan, f.next, f.armed = *f.next, nil, false
	}
	f.plan.Epoch = after(f.plan.Epoch)
	f.plan.Base = uint32(f.plan.Epoch%2) * 2 * fragilePool
	f.install(&f.plan)
	for i := range old {
		f.remove(&old[i])
	}
	all := f.IntN(3) > 0
	for r, e := range f.ends {
		if !all && f.IntN(2) == 0 {
			continue
		}
		var lacked [][]byte
		for _, id := range plan.Lacks[r] {
			lacked = append(lacked, results[id])
		}
		if err := e.Resume(f.now, f.plan.Epoch, plan.Restart, lacked); err != nil {
			f.Fatalf("rank %d: %v", r, err)
		}
		f.froze[r] = false
	}
}

// TestRecover: whatever is lost whenever, every all-reduce is exact.
func TestRecover(t *testing.T) {
	lost := 0
	for seed := range uint64(300) {
		lost += runFragile(t, seed)
	}
	t.Logf("%d recoveries", lost)
	if lost < 300 {
		t.Errorf("%d recoveries, want more", lost)
	}
}

func runFragile(t *testing.T, seed uint64) int {
	f := newFragile(t, seed)
	defer func() {
		if t.Failed() {
			t.Logf("seed %d: depth %d, %d ranks, after %d recoveries", seed, f.depth, len(f.ends), f.lost)
		}
	}()
	type reduced struct {
		ints   []int32
		floats []float32
		calls  []*Call
	}
	const n = 12
	jobs := make([][]reduced, len(f.ends))
	begun := make([]int, len(f.ends))
	length := func(k int) int { return 1 + (k*577)%(5*wire.MaxLanes) } // up to two rounds
	for steps := 0; ; steps++ {
		if steps > 2_000_000 {
			for _, e := range f.ends {
				t.Logf("%+v", e.Overdue(f.now))
			}
			t.Fatal("it does not end")
		}
		done := true
		for r, e := range f.ends {
			if begun[r] < n {
				done = false
				if f.IntN(20) == 0 {
					k := begun[r]
					begun[r]++
					x := reduced{ints: make([]int32, length(k%2)), floats: make([]float32, length(k+1))}
					for i := range x.ints {
						x.ints[i] = int32((k+1)*(r+1)*1000 + i)
					}
					for i := range x.floats {
						x.floats[i] = float32(r+1) * float32(i%7)
					}
					a, err := e.BeginInt32(f.now, fmt.Sprint("i", k%2), x.ints)
					if err != nil {
						t.Fatal(err)
					}
					key := fmt.Sprint("f", k%3, "/", len(x.floats))
					b, err := e.Begin(f.now, key, x.floats)
					if err != nil {
						t.Fatal(err)
					}
					x.calls = []*Call{a, b}
					jobs[r] = append(jobs[r], x)
				}
			}
			done = done && e.Done()
		}
		if done {
			break
		}
		f.step()
		for r := range f.froze {
			if f.froze[r] && f.IntN(200) == 0 { // what was lost in the middle of a recovery begins it anew
				f.recover()
			}
		}
	}
	for r := range f.ends {
		for k, x := range jobs[r] {
			if f.quorum > 0 {
				break // what a sum has is decided by chance; that all have the same is checked above
			}
			for i, v := range x.ints {
				want := int32(0)
				for s := range f.ends {
					want += int32((k+1)*(s+1)*1000 + i)
				}
				if v != want {
					t.Fatalf("rank %d, all-reduce %d, value %d: %d, want %d", r, k, i, v, want)
				}
			}
			for i, v := range x.floats {
				want := float32(0)
				for s := range f.ends {
					want += float32(s+1) * float32(i%7)
				}
				if d := v - want; d > 1e-4 || d < -1e-4 {
					t.Fatalf("rank %d, all-reduce %d, value %d: %g, want %g", r, k, i, v, want)
				}
			}
		}
	}
	return f.lost
}
