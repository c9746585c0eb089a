// Package steer tests that a change of plan does not delay a round: on the reference models, where a hop takes always
// the same time and every round's duration is therefore exact.
package steer

import (
	"container/heap"
	"fmt"
	"math/bits"
	"testing"
	"time"

	"xagg/agg"
	"xagg/wire"
)

const (
	job    = 7
	ranks  = 4
	all    = 1<<ranks - 1
	pool   = 4
	chunks = 11 // of a round: more than two pools
	hop    = 100 * time.Microsecond
)

// event is something that happens at a time; those of one time in the order in which they were planned.
type event struct {
	at    time.Duration
	order int
	do    func()
}

type events []event

func (e events) Len() int { return len(e) }
func (e events) Less(i, j int) bool {
	return e[i].at < e[j].at || e[i].at == e[j].at && e[i].order < e[j].order
}
func (e events) Swap(i, j int) { e[i], e[j] = e[j], e[i] }
func (e *events) Push(x any)   { *e = append(*e, x.(event)) }
func (e *events) Pop() any {
	last := (*e)[len(*e)-1]
	*e = (*e)[:len(*e)-1]
	return last
}

// plan is who sums.
type plan struct {
	name    string
	cohort  uint64
	servers int
}

var plans = []plan{{"switch", all, 0}, {"one server", 0, 1}, {"hybrid", 0b0111, 1}, {"two servers", 0, 2}, {"other hybrid", 0b1010, 2}}

// done is a round of a rank that is over.
type done struct {
	epoch uint16
	took  time.Duration
}

// network is a running job in virtual time. Each of its workers begins the next round when the one before is done.
type network struct {
	t       *testing.T
	now     time.Duration
	queue   events
	planned int
	sw      *agg.Switch
	servers []*agg.Server
	workers []*agg.Window
	cohorts map[uint16]uint64 // by epoch: who gets a server's ACK of a PARTIAL
	epochs  [ranks]uint16     // of the round under way
	began   [ranks]time.Duration
	rounds  [ranks][]done
	limit   int // rounds
}

func newNetwork(t *testing.T, first plan, limit int) *network {
	n := &network{t: t, sw: agg.NewSwitch(4 * pool), limit: limit, cohorts: map[uint16]uint64{}}
	for range 2 {
		n.servers = append(n.servers, agg.NewServer(2*chunks))
	}
	n.install(first, 1)
	for r := range ranks {
		n.workers = append(n.workers, agg.NewWindow(agg.WindowConfig{Job: job, Epoch: 1, Rank: uint8(r), Ranks: all, Pool: pool}))
		n.begin(r)
	}
	return n
}

func (n *network) install(p plan, epoch uint16) {
	n.t.Helper()
	n.cohorts[epoch] = p.cohort
	members := map[uint8]agg.Member{}
	for r := range uint8(ranks) {
		members[r] = agg.Member{Port: uint16(r) + 1}
	}
	var ports []uint16
	for s := range p.servers {
		ports = append(ports, uint16(65+s))
		if err := n.servers[s].Install(agg.ServerPlan{Job: job, Epoch: epoch, Ranks: all, Chunks: chunks, Rounds: 2}); err != nil {
			n.t.Fatal(err)
		}
	}
	err := n.sw.Install(agg.SwitchPlan{Job: job, Epoch: epoch, Ranks: all, Cohort: p.cohort, Servers: p.servers,
		Base: uint32(epoch%2) * 2 * pool, Pool: pool}, members, ports)
	if err != nil {
		n.t.Fatal(err)
	}
}

func (n *network) arm(p plan, epoch, next uint16) {
	if p.servers == 0 {
		n.sw.Arm(job, epoch, next)
	} else {
		n.servers[0].Arm(job, epoch, next)
	}
}

func (n *network) remove(epoch uint16) {
	n.sw.Remove(job, epoch)
	for _, s := range n.servers {
		s.Remove(job, epoch)
	}
}

// after plans something.
func (n *network) after(d time.Duration, do func()) {
	n.planned++
	heap.Push(&n.queue, event{n.now + d, n.planned, do})
}

// run lets the time pass until nothing is left to do.
func (n *network) run() {
	for len(n.queue) > 0 {
		e := heap.Pop(&n.queue).(event)
		n.now = e.at
		e.do()
	}
	for r, w := range n.workers {
		if s := w.Stats(); len(n.rounds[r]) != n.limit || s.Resends != 0 || s.Nacks != 0 {
			n.t.Fatalf("rank %d: %d of %d rounds, %+v", r, len(n.rounds[r]), n.limit, s)
		}
	}
}

func (n *network) begin(r int) {
	if len(n.rounds[r]) == n.limit {
		return
	}
	_, n.epochs[r] = n.workers[r].Begin(n.now, chunks)
	n.began[r] = n.now
	n.send(r)
}

// send sends what a worker's window allows.
func (n *network) send(r int) {
	for {
		s, ok := n.workers[r].Next(n.now)
		if !ok {
			return
		}
		p := &wire.Packet{Header: wire.Header{
			Type: wire.TypeGrad, Job: job, Epoch: n.epochs[r], Rank: uint8(r), Seq: s.Seq, Round: uint32(len(n.rounds[r])),
			Chunk: s.Chunk, Contributors: 1 << r,
		}}
		if s.Chunk == chunks-1 {
			p.Flags = wire.FlagLast
		}
		n.after(hop, func() { n.atSwitch(agg.Ingress{Port: uint16(r) + 1}, r, p) })
	}
}

// atSwitch takes a packet whose other end is a rank, or -1 for the service.
func (n *network) atSwitch(in agg.Ingress, r int, p *wire.Packet) {
	out := n.sw.Handle(uint64(n.now.Microseconds()), in, p)
	switch out.Dest {
	case agg.ToSender, agg.ToAddress:
		n.toRanks(1<<r, p)
	case agg.ToAll:
		n.toRanks(all, p)
	case agg.ToCohort:
		n.toRanks(n.cohorts[p.Epoch], p)
	case agg.ToServer:
		n.after(hop, func() { n.atServer(out.Server, r, p) })
	case agg.ToServerAsService:
		n.after(hop, func() { n.atServer(out.Server, -1, p) })
	}
}

func (n *network) atServer(s, r int, p *wire.Packet) {
	out := n.servers[s].Handle(uint64(n.now.Microseconds()), p)
	if out.Dest == agg.Nowhere {
		return
	}
	toService := out.Dest == agg.ToService || r < 0
	n.after(hop, func() { n.atSwitch(agg.Ingress{Port: uint16(65 + s), ToService: toService}, r, p) })
}

func (n *network) toRanks(mask uint64, p *wire.Packet) {
	for ; mask != 0; mask &= mask - 1 {
		r, q := bits.TrailingZeros64(mask), *p
		n.after(hop, func() { n.atWorker(r, &q) })
	}
}

func (n *network) atWorker(r int, p *wire.Packet) {
	w := n.workers[r]
	if w.Done() && len(n.rounds[r]) == n.limit {
		return
	}
	w.Handle(n.now, &p.Header)
	if !w.Done() {
		n.send(r)
		return
	}
	n.rounds[r] = append(n.rounds[r], done{n.epochs[r], n.now - n.began[r]})
	n.begin(r)
}

// ordinary returns how long a round takes under a plan that does not change.
func ordinary(t *testing.T, p plan) time.Duration {
	n := newNetwork(t, p, 5)
	n.run()
	for r := range ranks {
		for i, d := range n.rounds[r] {
			if d.took != n.rounds[0][0].took {
				t.Fatalf("%s: round %d of rank %d takes %v, the first one of rank 0 %v", p.name, i, r, d.took, n.rounds[0][0].took)
			}
		}
	}
	return n.rounds[0][0].took
}

// TestNoRoundIsDelayed changes the plan at every moment of a round, between any two plans: a round takes exactly as long
// as under its plan alone, the one before the change, the first one after it and all others, nothing is sent twice, and
// all ranks change at the same round.
func TestNoRoundIsDelayed(t *testing.T) {
	for _, from := range plans {
		for _, to := range plans {
			took := map[uint16]time.Duration{1: ordinary(t, from), 2: ordinary(t, to)}
			for offset := 2 * took[1]; offset <= 3*took[1]; offset += hop / 2 {
				n := newNetwork(t, from, 8)
				n.after(offset/2, func() { n.install(to, 2) })
				n.after(offset, func() { n.arm(from, 1, 2) })
				removed := false
				for len(n.queue) > 0 && !removed { // until every rank has begun a round under the new plan
					e := heap.Pop(&n.queue).(event)
					n.now = e.at
					e.do()
					removed = n.epochs == [ranks]uint16{2, 2, 2, 2}
				}
				n.remove(1)
				n.run()
				at := -1
				for r := range ranks {
					for i, d := range n.rounds[r] {
						where := fmt.Sprintf("%s to %s, armed after %v: round %d of rank %d, epoch %d", from.name, to.name, offset, i, r, d.epoch)
						if d.took != took[d.epoch] {
							t.Fatalf("%s takes %v, want %v", where, d.took, took[d.epoch])
						}
						if d.epoch != n.rounds[0][i].epoch {
							t.Fatalf("%s: rank 0 has epoch %d", where, n.rounds[0][i].epoch)
						}
						if d.epoch == 2 && at < 0 {
							at = i
						}
					}
				}
				// Announced in the round under way, or in the next one when its chunk 0 was closed already.
				if at < 3 || at > 4 {
					t.Fatalf("%s to %s, armed after %v in round 2: the plan changes at round %d", from.name, to.name, offset, at)
				}
			}
		}
	}
}
