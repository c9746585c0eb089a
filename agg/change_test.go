package agg

import (
	"fmt"
	"math/bits"
	"testing"
	"time"

	"pgregory.net/rapid"

	"xagg/wire"
)

// TestChangeOfPlan runs a job of three ranks while its plan changes, over a network that loses, duplicates and delays
// packets without bound, with the controller's single steps somewhere between. Every result must be exact, everybody
// must change plans at the same round, and nobody may get stuck.
func TestChangeOfPlan(t *testing.T) {
	tests := []struct {
		name  string
		modes []SwitchPlan
	}{
		{"switch, hybrid, server, switch", []SwitchPlan{{Cohort: 7}, {Cohort: 3, Servers: 2}, {Servers: 1}, {Cohort: 7}}},
		{"server, switch, hybrid, server", []SwitchPlan{{Servers: 2}, {Cohort: 7}, {Cohort: 6, Servers: 1}, {Servers: 2}}},
		{"another straggler", []SwitchPlan{{Cohort: 3, Servers: 2}, {Cohort: 5, Servers: 1}, {Cohort: 6, Servers: 2}, {Cohort: 1, Servers: 1}}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			rapid.Check(t, func(t *rapid.T) {
				s := newChange(t, test.modes)
				act := rapid.SampledFrom([]func(){
					s.deliver, s.deliver, s.deliver, s.deliver, s.deliver, s.send, s.send, s.send, s.send,
					s.drop, s.duplicate, s.duplicate, s.tick, s.control,
				})
				for range rapid.SampledFrom([]int{4000, 2000, 1000, 500, 100}).Draw(t, "steps") {
					act.Draw(t, "act")()
				}
				s.finish()
			})
		})
	}
}

const changeRanks = 3

// change is the state of one run.
type change struct {
	t       *rapid.T
	now     time.Duration
	sw      *Switch
	servers []*Server
	workers []*Window
	net     []flying
	old     []flying // all that was ever sent
	plans   []SwitchPlan
	plan    int // the plan that the controller is changing from
	step    int // of the change
	seed    int
	depth   int
	last    uint32            // the round after the last one, once known
	known   bool              //
	epochs  map[uint32]uint16 // by round
	rank    int               // whose turn it is to send
}

// flying is a packet in flight: between switch and server in from's name, or back to it.
type flying struct {
	from, to end // to is a rank, a server, or theSwitch
	home     end // on its way from a server to the switch: whom it is for, a rank or theService
	p        *wire.Packet
}

func newChange(t *rapid.T, modes []SwitchPlan) *change {
	const ranks = 1<<changeRanks - 1
	s := &change{t: t, sw: NewSwitch(16), epochs: make(map[uint32]uint16)}
	s.depth = rapid.SampledFrom([]int{1, 1, 2, 3}).Draw(t, "depth")
	for range 2 {
		s.servers = append(s.servers, NewServer(int(s.serverRounds())*maxChangeChunks))
	}
	epoch := rapid.SampledFrom([]uint16{1, 65534}).Draw(t, "epoch")
	pools := rapid.SampledFrom([]uint32{2, 4})
	pool := uint32(4)
	for _, mode := range modes {
		mode.Job, mode.Epoch, mode.Ranks, mode.Pool = modelJob, epoch, ranks, pools.Draw(t, "pool")
		mode.Base = halfBase(epoch)
		pool = min(pool, mode.Pool)
		s.plans = append(s.plans, mode)
		if epoch++; epoch == 0 {
			epoch = 2 // 0 is no epoch, and 65535 and 1 are of one half
		}
	}
	s.install(&s.plans[0])
	s.seed = rapid.IntRange(0, 1<<16).Draw(t, "chunks")
	seq := rapid.SampledFrom([]uint32{0, 0xfffffff0}).Draw(t, "seq")
	round := rapid.SampledFrom([]uint32{0, 0xfffffffe}).Draw(t, "round")
	for r := range changeRanks {
		s.workers = append(s.workers, NewWindow(WindowConfig{Job: modelJob, Epoch: s.plans[0].Epoch, Rank: uint8(r),
			Ranks: ranks, Pool: pool, Depth: s.depth, Round: round, Seq: seq}))
	}
	return s
}

// halfBase is the lease: two halves of 8 slots.
func halfBase(epoch uint16) uint32 { return uint32(epoch%2) * 8 }

const maxChangeChunks = 5

// serverRounds is the number of rounds that a server needs: twice the depth, in powers of two.
func (s *change) serverRounds() uint32 { return uint32(1) << bits.Len(uint(2*s.depth-1)) }

// chunks is a round's size.
func (s *change) chunks(round uint32) uint32 {
	return 1 + (uint32(s.seed)*2654435761+round*40503)>>7%maxChangeChunks
}

func (s *change) install(plan *SwitchPlan) {
	for i := range plan.Servers {
		s.installServer(plan, i)
	}
	s.installSwitch(plan)
}

func (s *change) installServer(plan *SwitchPlan, i int) {
	err := s.servers[i].Install(ServerPlan{Job: modelJob, Epoch: plan.Epoch, Ranks: plan.Ranks, Chunks: maxChangeChunks, Rounds: s.serverRounds()})
	if err != nil {
		s.t.Fatal(err)
	}
}

func (s *change) installSwitch(plan *SwitchPlan) {
	if err := s.sw.Install(*plan, modelMembers(changeRanks), modelServerPorts(plan.Servers)); err != nil {
		s.t.Fatal(err)
	}
}

// control takes the controller's next step of the change from one plan to the next.
func (s *change) control() {
	if s.plan == len(s.plans)-1 {
		return
	}
	old, next := &s.plans[s.plan], &s.plans[s.plan+1]
	step := s.step
	s.step++
	if step < next.Servers { // servers first,
		s.installServer(next, step)
		return
	}
	step -= next.Servers
	switch step {
	case 0: // then the switch;
		s.installSwitch(next)
	case 1: // arm the finalizer of chunk 0;
		if old.Servers == 0 {
			s.sw.Arm(modelJob, old.Epoch, next.Epoch)
		} else {
			s.servers[0].Arm(modelJob, old.Epoch, next.Epoch)
		}
	case 2: // when all have finished the old epoch's last round,
		if !s.finished(next.Epoch) {
			s.step--
		}
	case 3: // remove it
		s.sw.Remove(modelJob, old.Epoch)
	case 4, 5:
		s.servers[step-4].Remove(modelJob, old.Epoch)
	default:
		s.plan++
		s.step = 0
	}
}

// finished reports whether every rank has finished the last round before the epoch.
func (s *change) finished(epoch uint16) bool {
	for _, w := range s.workers {
		if wire.SerialLess16(w.Epoch(), epoch) {
			return false
		}
	}
	return true
}

// send lets the next worker begin a round or send what is due.
func (s *change) send() {
	s.rank = (s.rank + 1) % changeRanks
	s.sendAs(s.rank)
}

func (s *change) sendAs(rank int) bool {
	w := s.workers[rank]
	if w.MayBegin() && (!s.known || w.round+1 != s.last) {
		round, epoch := w.Begin(s.now, s.chunks(w.round+1))
		if e, ok := s.epochs[round]; ok && e != epoch {
			s.t.Fatalf("rank %d runs round %d under epoch %d, others under %d", rank, round, epoch, e)
		}
		s.epochs[round] = epoch
		if epoch == s.plans[len(s.plans)-1].Epoch && !s.known {
			s.known, s.last = true, round+2*uint32(s.depth)
		}
	}
	send, ok := w.Next(s.now)
	if !ok {
		return false
	}
	p := grad(s.epochs[send.Round], uint8(rank), send.Round, send.Seq, send.Chunk, s.chunks(send.Round))
	if send.Resend {
		p.Flags |= wire.FlagResend
	}
	s.put(flying{from: end(rank), to: theSwitch, p: p})
	return true
}

func (s *change) put(f flying) {
	p := *f.p
	f.p = &p
	s.net = append(s.net, f)
	q := p // an aggregator turns the packet that it gets into its answer
	f.p = &q
	s.old = append(s.old, f)
}

// take takes a packet out of flight.
func (s *change) take() (flying, bool) {
	if len(s.net) == 0 {
		return flying{}, false
	}
	i := rapid.IntRange(0, len(s.net)-1).Draw(s.t, "packet")
	f := s.net[i]
	s.net[i] = s.net[len(s.net)-1]
	s.net = s.net[:len(s.net)-1]
	return f, true
}

func (s *change) drop() { s.take() }

// duplicate puts a copy of any packet that was ever sent in flight.
func (s *change) duplicate() {
	if len(s.old) > 0 && len(s.net) < 64 {
		f := s.old[rapid.Uint32().Draw(s.t, "old")%uint32(len(s.old))]
		p := *f.p
		f.p = &p
		s.net = append(s.net, f)
	}
}

func (s *change) tick() {
	s.now += time.Duration(rapid.IntRange(0, 100).Draw(s.t, "ms")) * time.Millisecond
}

func (s *change) deliver() {
	if f, ok := s.take(); ok {
		s.arrive(f)
	}
}

func (s *change) arrive(f flying) {
	us := uint64(s.now / time.Microsecond)
	switch {
	case f.to == theSwitch:
		m := modelMember(uint8(f.from))
		in := Ingress{Port: m.Port, Src: m.Src}
		if f.from >= firstServer {
			in = Ingress{Port: modelServerPorts(2)[f.from-firstServer], ToService: f.home == theService}
		}
		epoch := f.p.Epoch
		out := s.sw.Handle(us, in, f.p)
		s.check(f.p, out)
		switch out.Dest {
		case ToSender:
			s.put(flying{from: theService, to: f.from, p: f.p})
		case ToAddress:
			s.put(flying{from: theService, to: f.home, p: f.p})
		case ToAll:
			s.multicast(1<<changeRanks-1, f.p)
		case ToCohort:
			for _, plan := range s.plans {
				if plan.Epoch == epoch {
					s.multicast(plan.Cohort, f.p)
				}
			}
		case ToServer:
			s.put(flying{from: f.from, to: firstServer + end(out.Server), p: f.p})
		case ToServerAsService:
			s.put(flying{from: theService, to: firstServer + end(out.Server), p: f.p})
		}
	case f.to >= firstServer:
		out := s.servers[f.to-firstServer].Handle(us, f.p)
		s.check(f.p, out)
		home := f.from
		if out.Dest == ToService {
			home = theService
		}
		if out.Dest != Nowhere {
			s.put(flying{from: f.to, to: theSwitch, home: home, p: f.p})
		}
	default:
		w := s.workers[f.to]
		switch w.Handle(s.now, &f.p.Header) {
		case EventRefused:
			s.t.Fatalf("rank %d is refused: %v", f.to, f.p.Header)
		case EventResult:
			if err := checkResult(f.p, changeRanks); err != nil {
				s.t.Fatal(err)
			}
		}
	}
}

func (s *change) multicast(ranks uint64, p *wire.Packet) {
	for ; ranks != 0; ranks &= ranks - 1 {
		s.put(flying{from: theService, to: end(bits.TrailingZeros64(ranks)), p: p})
	}
}

func (s *change) check(p *wire.Packet, out Outcome) {
	switch out.Reason {
	case wire.ReasonStale, wire.ReasonEpoch: // delayed packets
	case wire.ReasonUnknownJob: // a server that no plan uses any more: even the worker must have finished
	default:
		if out.Reason.Fault() {
			s.t.Fatalf("%v: %+v", out.Reason, p.Header)
		}
	}
	if p.Type == wire.TypeResult {
		if err := checkResult(p, changeRanks); err != nil {
			s.t.Fatal(err)
		}
	}
}

// finish runs the job to its end without losses. Packets of before still arrive, sooner or later.
func (s *change) finish() {
	for range 2000 {
		s.control()
		sent := false
		for r := range s.workers {
			for s.sendAs(r) {
				sent = true
			}
		}
		for len(s.net) > 0 {
			f := s.net[0]
			s.net = s.net[1:]
			s.arrive(f)
		}
		if s.done() {
			return
		}
		if !sent {
			next := time.Duration(1<<63 - 1)
			for _, w := range s.workers {
				if at, ok := w.Deadline(); ok {
					next = min(next, at)
				}
			}
			if next > s.now && next != 1<<63-1 {
				s.now = next
			}
		}
	}
	s.t.Fatalf("stuck with plan %d, step %d: %s", s.plan, s.step, s.where())
}

func (s *change) done() bool {
	for _, w := range s.workers {
		if !s.known || w.round+1 != s.last || !w.Done() {
			return false
		}
	}
	return true
}

func (s *change) where() (at string) {
	for r, w := range s.workers {
		at += fmt.Sprintf(" rank %d in round %d (epoch %d) with %d chunks to go;", r, w.round, w.epoch, w.left)
	}
	return at
}
