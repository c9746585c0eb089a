package controller

import (
	"fmt"
	"math/bits"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	p4v1 "github.com/p4lang/p4runtime/go/p4/v1"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"xagg/agg"
	"xagg/api"
	"xagg/controller/p4rt"
	"xagg/policy"
	"xagg/wire"
)

// stalledJob is a job in which one rank has stopped and all others have sent what the protocol lets them: the switch is
// agg's, and the servers say what they must have.
type stalledJob struct {
	cohort  uint64
	servers []string
	ranks   int
	chunks  int
	pool    int
	sent    []int // by rank: chunks 0..n-1
	round   uint32
	epoch   uint16
	ago     uint64 // microseconds since it stopped

	mu sync.Mutex
	sw *agg.Switch
}

// now is the time in microseconds, as the switch has it.
func (s *stalledJob) now() uint64 { return uint64(time.Since(epoch).Microseconds()) }

var epoch = time.Now().Add(-time.Hour)

// covered reports whether a rank may send the chunk that is a pool after c: it has a RESULT or an ACK.
func (s *stalledJob) covered(rank, c int) bool {
	if c < 0 {
		return true
	}
	if s.cohort&(1<<rank) == 0 {
		return s.sent[rank] > c // its server said so
	}
	for r := range s.ranks {
		if s.cohort&(1<<r) != 0 && s.sent[r] <= c {
			return false
		}
	}
	return true
}

// run has all ranks send in random order until nobody may any more; rank stops before chunk stop.
func (s *stalledJob) run(rng *rand.Rand, id uint16, rank, stop int) {
	for {
		var able []int
		for r := range s.ranks {
			if c := s.sent[r]; c < s.chunks && (r != rank || c < stop) && s.covered(r, c-s.pool) {
				able = append(able, r)
			}
		}
		if len(able) == 0 {
			return
		}
		r := able[rng.IntN(len(able))]
		c := s.sent[r]
		s.sent[r]++
		p := &wire.Packet{Header: wire.Header{
			Type: wire.TypeGrad, Job: id, Epoch: s.epoch, Rank: uint8(r), Blocks: 1, Elems: 1,
			Seq: uint32(c), Round: s.round, Chunk: uint32(c), Contributors: 1 << r,
		}}
		if out := s.sw.Handle(s.now()-s.ago, agg.Ingress{Port: uint16(r) + 1, Src: 1}, p); out.Reason != wire.ReasonNone && out.Reason != wire.ReasonSteered {
			panic(fmt.Sprintf("rank %d chunk %d: %v", r, c, out.Reason))
		}
	}
}

// open returns what server i of n has open.
func (s *stalledJob) open(i int) (slots []*api.OpenSlot) {
	for c := i; c < s.chunks; c += len(s.servers) {
		var have uint64
		for r := range s.ranks {
			if s.sent[r] > c {
				have |= 1 << r
			}
		}
		if have&s.cohort != s.cohort {
			have &^= s.cohort // no PARTIAL has been sent
		}
		if have != 0 && have != 1<<s.ranks-1 {
			slots = append(slots, &api.OpenSlot{
				Epoch: uint32(s.epoch), Round: s.round, Chunk: uint32(c), Contributors: have, AgeUs: 4_200_000,
			})
		}
	}
	return slots
}

// answerCtrl has the fake switch answer for the slots of sw.
func (s *stalledJob) answerCtrl(out *p4v1.PacketOut) []*p4v1.PacketIn {
	var p wire.Packet
	src, dst, err := wire.ParseFrame(out.Payload, &p)
	if err != nil {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.sw == nil || !s.sw.Slot(s.now(), p.Seq, &p) {
		return nil
	}
	return []*p4v1.PacketIn{{
		Payload: wire.AppendFrame(nil, src, dst, &p, false), Metadata: []*p4v1.PacketMetadata{{MetadataId: 1, Value: []byte{0}}},
	}}
}

// TestWhyNamesTheStraggler stops a random rank before a random chunk: it alone is named, with the chunks that lack it and the
// place.
func TestWhyNamesTheStraggler(t *testing.T) {
	t.Parallel()
	for seed := range uint64(12) {
		mode := []string{"switch", "server", "hybrid"}[seed%3]
		t.Run(fmt.Sprintf("%s/seed=%d", mode, seed), func(t *testing.T) {
			t.Parallel()
			rng := rand.New(rand.NewPCG(seed, 1))
			s := &stalledJob{ranks: 4, chunks: 40, pool: 4 << rng.IntN(3), sent: make([]int, 4), round: rng.Uint32()}
			r := newRoom(t, testConfig(), func(r *room) { r.sw.OnPacketOut = s.answerCtrl })
			r.ready()
			p := &api.Policy{Rule: "static", Mode: mode, Pool: uint32(s.pool)}
			if mode == "hybrid" {
				p.Steer = []uint32{uint32(rng.IntN(4))}
			}
			if _, err := r.client.CreateJob(r.context(), &api.CreateJobRequest{Name: "train", Ranks: 4, MaxElems: 40 * 256, Policy: p}); err != nil {
				t.Fatal(err)
			}
			_, ready := r.joinAll("train", 4)
			job := r.job("train")
			s.cohort, s.servers, s.epoch = job.Cohort, job.Servers, uint16(ready.Epoch)
			straggler, stop := rng.IntN(4), rng.IntN(s.chunks)

			r.c.mu.Lock()
			j := r.c.intent.jobs["train"]
			plan := agg.SwitchPlan{
				Job: j.id, Epoch: j.epoch, Ranks: 0b1111, Cohort: s.cohort, Servers: len(s.servers),
				Base: uint32(j.half(j.plan)), Pool: uint32(s.pool),
			}
			r.c.mu.Unlock()
			sw := agg.NewSwitch(4096)
			members := make(map[uint8]agg.Member)
			for i := range uint8(4) {
				members[i] = agg.Member{Port: uint16(i) + 1, Src: 1}
			}
			if err := sw.Install(plan, members, []uint16{65, 66}[:len(s.servers)]); err != nil {
				t.Fatal(err)
			}
			s.mu.Lock()
			s.sw = sw
			s.run(rng, plan.Job, straggler, stop)
			s.mu.Unlock()
			for i, name := range s.servers {
				a := r.agents[name]
				a.mu.Lock()
				a.open = func(req *api.OpenSlotsRequest) []*api.OpenSlot {
					if req.Job != uint32(plan.Job) {
						t.Errorf("server %s is asked for job %d", name, req.Job)
					}
					return s.open(i)
				}
				a.mu.Unlock()
			}
			if _, err := r.client.Report(r.context(), &api.ReportRequest{
				Job: "train", Rank: uint32(straggler), Id: ready.Job, Progress: &api.Progress{Round: s.round, ForUs: 1_300_000},
			}); err != nil {
				t.Fatal(err)
			}

			reply, err := r.client.Why(r.context(), &api.WhyRequest{Job: "train"})
			if err != nil {
				t.Fatal(err)
			}
			if len(reply.Blockers) != 1 || reply.Blockers[0].Rank != uint32(straggler) || len(reply.Unreachable) != 0 {
				t.Fatalf("rank %d stopped before chunk %d: %v", straggler, stop, reply)
			}
			b := reply.Blockers[0]
			most := slices.Max(s.sent)
			if !b.Joined || b.Host != fmt.Sprintf("w%d", straggler) || b.Chunks != uint32(most-stop) || b.OldestUs < 200_000 ||
				b.Packets != 1 || b.SilentUs < 200_000 || b.Progress.GetForUs() != 1_300_000 || b.ReportedUs == 0 {
				t.Errorf("of chunks %d to %d: %v", stop, most-1, b)
			}
			at := "switch"
			if s.cohort&(1<<straggler) == 0 {
				at = s.servers[stop%len(s.servers)]
			}
			first := slices.IndexFunc(reply.Waiting, func(w *api.Waiting) bool { return w.At == at })
			if first < 0 || reply.Waiting[first].First != uint32(stop) || reply.Waiting[first].Missing != 1<<straggler ||
				reply.Waiting[first].Round != s.round {
				t.Errorf("chunk %d at %s: waiting %v", stop, at, reply.Waiting)
			}
			chunks := fmt.Sprintf("chunks %d-%d of round %d", stop, most-1, s.round)
			if stop == most-1 {
				chunks = fmt.Sprintf("chunk %d of round %d", stop, s.round)
			}
			want := fmt.Sprintf("rank %d on host w%d has not sent its part of %s to ", straggler, straggler, chunks)
			if !strings.HasPrefix(b.Explanation, want) || !strings.Contains(b.Explanation, "ago that it has been computing for 1.3 s") {
				t.Errorf("got  %s\nwant %s...", b.Explanation, want)
			}
			if waiting := bits.OnesCount64(reply.Waiting[first].Have); waiting == 0 || !strings.Contains(reply.Summary, fmt.Sprintf("rank %d on host w%d", straggler, straggler)) {
				t.Errorf("summary: %s", reply.Summary)
			}
		})
	}
}

// TestWhyGrowsOlder: the first look tells how old an incomplete chunk is, the next ones that it grows older; and a count that
// grows is no silence.
func TestWhyGrowsOlder(t *testing.T) {
	s := &stalledJob{ranks: 2, chunks: 4, pool: 8, sent: make([]int, 2), ago: 4_000_000}
	r := newRoom(t, testConfig(), func(r *room) { r.sw.OnPacketOut = s.answerCtrl })
	r.ready()
	r.create("train", 2, &api.Policy{Mode: "switch", Pool: 8})
	_, ready := r.joinAll("train", 2)
	r.c.mu.Lock()
	j := r.c.intent.jobs["train"]
	plan := agg.SwitchPlan{Job: j.id, Epoch: j.epoch, Ranks: 0b11, Cohort: 0b11, Base: uint32(j.half(j.plan)), Pool: 8}
	r.c.mu.Unlock()
	s.cohort, s.epoch = 0b11, plan.Epoch
	s.sw = agg.NewSwitch(4096)
	if err := s.sw.Install(plan, map[uint8]agg.Member{0: {Port: 1, Src: 1}, 1: {Port: 2, Src: 1}}, nil); err != nil {
		t.Fatal(err)
	}
	why := func() *api.WhyReply {
		t.Helper()
		reply, err := r.client.Why(r.context(), &api.WhyRequest{Job: "train"})
		if err != nil {
			t.Fatal(err)
		}
		return reply
	}
	if reply := why(); reply.Summary != "nothing waits: no chunk is incomplete" || len(reply.Waiting) != 0 {
		t.Errorf("before anybody sends: %v", reply)
	}
	s.mu.Lock()
	s.run(rand.New(rand.NewPCG(1, 1)), plan.Job, 1, 2)
	s.mu.Unlock()
	key := p4rt.Entry{Table: tableMember, Match: []p4rt.Match{
		{Field: fieldJob, Value: num(plan.Job)}, {Field: fieldEpoch, Value: num(plan.Epoch)}, {Field: fieldRank, Value: num(1)},
	}}.Key()
	r.sw.SetDirectCounter(key, 2)
	first := why()
	second := why()
	if len(first.Blockers) != 1 || len(second.Blockers) != 1 {
		t.Fatalf("got %v and %v", first, second)
	}
	a, b := first.Blockers[0], second.Blockers[0]
	if a.OldestUs < 4_200_000 || a.OldestUs > 14_000_000 || b.OldestUs < a.OldestUs+200_000 || b.SilentUs < a.SilentUs+200_000 || a.Packets != 2 {
		t.Errorf("first %v\nthen  %v", a, b)
	}
	r.sw.SetDirectCounter(key, 3)
	if b := why().Blockers[0]; b.Packets != 3 || b.SilentUs >= second.Blockers[0].SilentUs || b.OldestUs < second.Blockers[0].OldestUs+200_000 {
		t.Errorf("after another packet: %v", b)
	}

	r.sw.Stop()
	r.until("the switch is missed", func() bool { return len(why().Unreachable) == 1 })
	if reply := why(); len(reply.Blockers) != 0 || !strings.Contains(reply.Summary, "nothing is known to wait") ||
		!strings.Contains(reply.Unreachable[0], "switch sw") {
		t.Errorf("without a switch: %v", reply)
	}
	for _, rank := range []uint32{0, 1} {
		p := &api.Progress{Round: s.round, ForUs: 3_000_000}
		if rank == 0 {
			p = &api.Progress{Waiting: true, ChunksLeft: 2, Chunk: 2, Missing: 0b10, ForUs: 3_000_000}
		}
		if _, err := r.client.Report(r.context(), &api.ReportRequest{Job: "train", Rank: rank, Id: ready.Job, Progress: p}); err != nil {
			t.Fatal(err)
		}
	}
	reply := why()
	if len(reply.Blockers) != 1 || reply.Blockers[0].Rank != 1 || reply.Blockers[0].OldestUs < 3_000_000 ||
		len(reply.Waiting) != 1 || reply.Waiting[0].First != 2 || reply.Waiting[0].At != "switch" {
		t.Errorf("by what the ranks were told: %v", reply)
	}
}

// TestWhyBeforeAndAfter is about jobs that do not run.
func TestWhyBeforeAndAfter(t *testing.T) {
	r := newRoom(t, testConfig(), nil)
	r.ready()
	if _, err := r.client.Why(r.context(), &api.WhyRequest{Job: "train"}); status.Code(err) != codes.NotFound {
		t.Errorf("of no job: %v", err)
	}
	r.create("train", 4, hybridPolicy())
	why := func() *api.WhyReply {
		t.Helper()
		reply, err := r.client.Why(r.context(), &api.WhyRequest{Job: "train"})
		if err != nil {
			t.Fatal(err)
		}
		return reply
	}
	if got := why(); got.Summary != "none of the 4 ranks has joined yet" || len(got.Blockers) != 4 {
		t.Errorf("got %v", got)
	}
	ranks := []*rank{r.join("train", 0, "d"), r.join("train", 1, "d"), r.join("train", 3, "d")}
	r.until("three have joined", func() bool { return r.job("train").Joined == 0b1011 })
	if got := why(); got.Summary != "rank 2 has not joined; 3 of 4 ranks wait for it" || len(got.Blockers) != 1 || got.Blockers[0].Joined {
		t.Errorf("got %v", got)
	}
	r.create("later", 1, nil)
	r.sw.Stop()
	r.until("the switch is missed", func() bool {
		reply, err := r.client.Status(r.context(), &api.StatusRequest{})
		return err == nil && !reply.Switch.Ready
	})
	r.join("later", 0, "d")
	r.until("a job waits for the switch", func() bool { return r.job("later").State == "installing" && r.job("later").Error != "" })
	later, err := r.client.Why(r.context(), &api.WhyRequest{Job: "later"})
	if err != nil || len(later.Unreachable) != 1 || !strings.HasPrefix(later.Summary, "all ranks have joined; the job waits for the switch to be programmed: ") {
		t.Errorf("got %v, %v", later, err)
	}
	ranks = append(ranks, r.join("train", 2, "e"))
	for _, k := range ranks {
		k.aborted()
	}
	if got := why(); !strings.HasPrefix(got.Summary, "nothing waits: the job was aborted: the ranks disagree") || len(got.Blockers) != 0 {
		t.Errorf("got %v", got)
	}
}

// TestProgressIsNoEpoch: a report of progress alone does not tell that old rounds are over.
func TestProgressIsNoEpoch(t *testing.T) {
	r := newRoom(t, testConfig(), nil)
	r.ready()
	r.create("train", 2, nil)
	_, ready := r.joinAll("train", 2)
	for _, tt := range []struct {
		req  *api.ReportRequest
		code codes.Code
	}{
		{&api.ReportRequest{Job: "train", Id: ready.Job, Progress: &api.Progress{}}, codes.OK},
		{&api.ReportRequest{Job: "train", Id: ready.Job, Rank: 2, Progress: &api.Progress{}}, codes.InvalidArgument},
		{&api.ReportRequest{Job: "train", Id: ready.Job + 1, Progress: &api.Progress{}}, codes.FailedPrecondition},
	} {
		if _, err := r.client.Report(r.context(), tt.req); status.Code(err) != tt.code {
			t.Errorf("%v: %v, want %s", tt.req, err, tt.code)
		}
	}
	r.c.mu.Lock()
	defer r.c.mu.Unlock()
	if s := r.c.meets["train"].seats[0]; s.epoch != 0 || s.heard.progress == nil || time.Since(s.heard.at) > time.Minute {
		t.Errorf("seat is %+v", s)
	}
}

// TestPitfall42: however many slots a job has, each is asked for once, a few at a time and no more than so many a second.
func TestPitfall42(t *testing.T) {
	var mu sync.Mutex
	asked := make(map[uint32]int)
	s := &stalledJob{sw: agg.NewSwitch(4096)}
	r := newRoom(t, testConfig(), func(r *room) {
		r.sw.OnPacketOut = func(out *p4v1.PacketOut) []*p4v1.PacketIn {
			var p wire.Packet
			if _, _, err := wire.ParseFrame(out.Payload, &p); err != nil {
				t.Error(err)
			}
			mu.Lock()
			asked[p.Seq]++
			mu.Unlock()
			return s.answerCtrl(out)
		}
	})
	r.ready()
	r.create("train", 2, &api.Policy{Rule: policy.RuleStatic, Mode: "switch", Pool: 1024})
	r.joinAll("train", 2)
	began := time.Now()
	reply, err := r.client.Why(r.context(), &api.WhyRequest{Job: "train"})
	took := time.Since(began)
	if err != nil {
		t.Fatal(err)
	}
	mu.Lock()
	defer mu.Unlock()
	if len(asked) != 2048 || len(reply.Unreachable) != 0 {
		t.Errorf("%d slots were asked for: %v", len(asked), reply)
	}
	for slot, n := range asked {
		if n != 1 {
			t.Errorf("slot %d was asked for %d times", slot, n)
		}
	}
	if least := 2048 / slotsAtOnce * slotsPause; took < least {
		t.Errorf("2048 slots were asked for within %v, which should take %v at least", took, least)
	}
}

// TestSwitchFallsSilent: a switch that is connected and answers no question is not all right, and nobody waits for it twice.
func TestSwitchFallsSilent(t *testing.T) {
	var silent atomic.Bool
	reads := 0
	r := newRoom(t, testConfig(), func(r *room) {
		r.sw.OnPacketOut = (&stalledJob{sw: agg.NewSwitch(4096)}).answerCtrl
		r.sw.OnRead = func() error {
			if !silent.Load() {
				return nil
			}
			reads++
			return status.Error(codes.Internal, "no")
		}
	})
	r.ready()
	r.create("train", 2, &api.Policy{Mode: "switch"})
	r.joinAll("train", 2)
	silent.Store(true)
	reply, err := r.client.Why(r.context(), &api.WhyRequest{Job: "train"})
	if err != nil || len(reply.Unreachable) != 1 || reads != 1 || !strings.HasPrefix(reply.Unreachable[0], "switch: read counters of ") {
		t.Errorf("after %d reads: %v, %v", reads, reply, err)
	}
	status, err := r.client.Status(r.context(), &api.StatusRequest{})
	if err != nil || !status.Switch.Ready || !strings.HasPrefix(status.Switch.Error, "it was programmed, but does not tell its counters: ") {
		t.Errorf("status is %v, %v", status, err)
	}
}

// TestWhyWhileRecovering: the reply says that the job recovers, why, and whom that waits for; the devices are not asked.
func TestWhyWhileRecovering(t *testing.T) {
	r := newRoom(t, testConfig(), nil)
	r.ready()
	job := r.create("train", 2, &api.Policy{Pool: 16})
	stations := r.serveAll(job, func(s *station) { s.deaf = s.n == 1 })
	r.loseSwitch()
	r.until("it waits for rank 1", func() bool { return strings.Contains(r.job("train").Recovery, "rank 1 to stop") })
	r.ready()
	const recovery = "rank 1 to stop and say what they have (the switch has lost its memory)"
	reply, err := r.client.Why(r.context(), &api.WhyRequest{Job: "train"})
	if err != nil || reply.Recovery != recovery || reply.Summary != "the job is being recovered; that waits for "+recovery ||
		len(reply.Blockers) != 1 || reply.Blockers[0].Rank != 1 || len(reply.Waiting)+len(reply.Unreachable) != 0 {
		t.Errorf("got %v, %v", reply, err)
	}
	s := stations[1]
	s.mu.Lock()
	s.deaf = false
	s.mu.Unlock()
	go s.recover(r.number("train"))
	r.replies(stations)
	r.sw.OnPacketOut = (&stalledJob{sw: agg.NewSwitch(4096)}).answerCtrl
	if reply, err := r.client.Why(r.context(), &api.WhyRequest{Job: "train"}); err != nil || reply.Recovery != "" || len(reply.Blockers) != 0 {
		t.Errorf("after the recovery: %v, %v", reply, err)
	}
}
