package controller

import (
	"context"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"xagg/api"
	"xagg/controller/p4rt"
	"xagg/recovery"
	"xagg/wire"
)

// resultOf returns the UDP payload of a RESULT whose single lane is its chunk's number.
func resultOf(job uint32, ranks uint64, round, chunk uint32) []byte {
	p := &wire.Packet{Header: wire.Header{
		Type: wire.TypeResult, Job: uint16(job), Epoch: 1, Round: round, Chunk: chunk, Blocks: 1, Elems: 1, Contributors: ranks,
	}}
	p.Lanes[0] = int32(chunk)
	p.Tag = wire.TagLanes(p.Lanes[:wire.BlockLanes])
	for rank := range uint8(wire.MaxRanks) {
		if ranks>>rank&1 != 0 {
			place := wire.TagPlace(p.Job, round, chunk, rank)
			p.Tag[0] += place[0]
			p.Tag[1] += place[1]
		}
	}
	b := make([]byte, p.Len())
	p.Encode(b)
	return b
}

// station is a rank that takes part in recoveries as a worker does.
type station struct {
	*rank
	id      uint32
	resumed chan *api.ResumeReply
	aborted chan *api.Abort

	mu      sync.Mutex
	req     api.FrozenRequest
	held    map[recovery.ChunkID][]byte
	freezes int
	damage  bool // of what it hands over
	deaf    bool // to a freeze
}

// serve has a rank that is ready answer the controller until its stream ends. state is what it says that it has.
func (k *rank) serve(id uint32, state func(s *station)) *station {
	s := &station{rank: k, id: id, held: make(map[recovery.ChunkID][]byte), resumed: make(chan *api.ResumeReply, 10), aborted: make(chan *api.Abort, 1)}
	if state != nil {
		state(s)
	}
	go func() {
		for {
			event, err := k.stream.Recv()
			switch {
			case err != nil:
				return
			case event.GetAbort() != nil:
				s.aborted <- event.GetAbort()
			case event.GetFreeze() != nil:
				go s.recover(event.GetFreeze().Recovery)
			}
		}
	}()
	return s
}

// hold gives a station a round of which it has the RESULTs of the given chunks.
func (s *station) hold(ranks uint64, round, chunks uint32, have ...uint32) {
	h := recovery.NewHeld(round, chunks)
	for _, c := range have {
		h.Set(c)
		s.held[recovery.ChunkID{Round: round, Chunk: c}] = resultOf(s.id, ranks, round, c)
	}
	s.req.Rounds = append(s.req.Rounds, &api.Held{Round: round, Chunks: chunks, Held: h.Bits})
}

func (s *station) recover(number uint64) {
	s.mu.Lock()
	s.freezes++
	deaf := s.deaf
	req := &api.FrozenRequest{
		Job: s.job, Rank: s.n, Id: s.id, Recovery: number, First: s.req.First, Next: s.req.Next, Boundary: s.req.Boundary,
		Seq: s.req.Seq, AllReduces: s.req.AllReduces, Returns: s.req.Returns, Rounds: s.req.Rounds,
	}
	damage := s.damage
	s.mu.Unlock()
	if deaf {
		return
	}
	ctx := s.stream.Context()
	frozen, err := s.room.client.Frozen(ctx, req)
	if err != nil {
		return
	}
	over := &api.HandOverRequest{Job: s.job, Rank: s.n, Id: s.id, Recovery: number}
	for _, id := range frozen.HandOver {
		b := slices.Clone(s.held[recovery.ChunkID{Round: id.Round, Chunk: id.Chunk}])
		if damage {
			b[wire.HeaderLen+3]++
		}
		over.Results = append(over.Results, b)
	}
	reply, err := s.room.client.HandOver(ctx, over)
	if err == nil {
		s.resumed <- reply
	}
}

// replies waits until all stations have resumed.
func (r *room) replies(stations []*station) (replies []*api.ResumeReply) {
	r.t.Helper()
	ctx := r.context()
	for _, s := range stations {
		select {
		case reply := <-s.resumed:
			replies = append(replies, reply)
		case a := <-s.aborted:
			r.t.Fatalf("rank %d: %v", s.n, a)
		case <-ctx.Done():
			r.t.Fatalf("rank %d has not resumed: %v", s.n, r.job(s.job))
		}
	}
	return replies
}

// loseSwitch replaces the switch by an empty one.
func (r *room) loseSwitch() {
	r.sw.Stop()
	r.until("the switch is missed", func() bool {
		reply, err := r.client.Status(r.context(), &api.StatusRequest{})
		return err == nil && !reply.Switch.Ready
	})
	r.sw.Start()
}

// serveAll joins all ranks, with the same state.
func (r *room) serveAll(job *api.Job, state func(s *station)) []*station {
	ranks, _ := r.joinAll(job.Name, job.Ranks)
	stations := make([]*station, len(ranks))
	for i, k := range ranks {
		stations[i] = k.serve(job.Id, state)
	}
	return stations
}

// serveRanks has ranks take part in recoveries which have nothing yet.
func serveRanks(ranks []*rank, id uint32) []*station {
	stations := make([]*station, len(ranks))
	for i, k := range ranks {
		stations[i] = k.serve(id, nil)
	}
	return stations
}

// TestRecovery: the switch loses its memory; what a rank has is handed to those who lack it, the rest is numbered anew,
// and the switch has the next plan and no older one.
func TestRecovery(t *testing.T) {
	r := newRoom(t, testConfig(), nil)
	r.ready()
	job := r.create("train", 4, hybridPolicy())
	stations := r.serveAll(job, nil)
	for i, have := range [][]uint32{{0, 1}, {0, 2}, {0, 1, 2}, {}} {
		s := stations[i]
		s.mu.Lock()
		s.req.First, s.req.Next, s.req.Boundary, s.req.Seq = 5, 6, 6, 40
		s.hold(0b1111, 5, 4, have...)
		s.mu.Unlock()
	}
	r.loseSwitch()
	lacked := [][]recovery.ChunkID{{{Round: 5, Chunk: 2}}, {{Round: 5, Chunk: 1}}, nil, {{Round: 5, Chunk: 0}, {Round: 5, Chunk: 1}, {Round: 5, Chunk: 2}}}
	for i, reply := range r.replies(stations) {
		if reply.Epoch != 2 || reply.Round != 5 || reply.Seq != 40 || len(reply.Finals) != 1 || reply.Finals[0].Held[0] != 0b111 {
			t.Errorf("rank %d resumes with %v", i, reply)
		}
		var got []recovery.ChunkID
		for _, b := range reply.Results {
			var p wire.Packet
			if err := p.Decode(b); err != nil {
				t.Fatal(err)
			}
			if !p.TagOK() || p.Lanes[0] != int32(p.Chunk) {
				t.Errorf("rank %d: RESULT %+v", i, p.Header)
			}
			got = append(got, recovery.ChunkID{Round: p.Round, Chunk: p.Chunk})
		}
		if !slices.Equal(got, lacked[i]) {
			t.Errorf("rank %d is given %v, want %v", i, got, lacked[i])
		}
	}
	if j := r.job("train"); j.Epoch != 2 || j.State != "running" || j.Recovery != "" {
		t.Errorf("job is %v", j)
	}
	r.installed()
	// A change of plan does not wait for anybody who has resumed to tell so.
	if _, err := r.steer("train", steered["switch"]); err != nil {
		t.Fatal(err)
	}
	if ch := r.job("train").Change; ch.GetBehind() != 0b1111 || ch.GetEpoch() != 3 {
		t.Errorf("change is %v", ch)
	}
	for _, s := range stations {
		if err := s.report(job.Id, 3); err != nil {
			t.Fatal(err)
		}
	}
	r.until("the change is over", func() bool { return r.job("train").Change == nil })
}

// TestServerLosesMemory: only the jobs that use it recover.
func TestServerLosesMemory(t *testing.T) {
	r := newRoom(t, testConfig(), nil)
	r.ready()
	one := r.create("one", 2, &api.Policy{Mode: "server", Servers: []string{"s0"}, Pool: 16})
	stations := r.serveAll(one, nil)
	r.agents["s0"].stop()
	r.agents["s0"].start()
	for _, reply := range r.replies(stations) {
		if reply.Epoch != 2 || reply.Round != 0 || reply.Seq != 0 || len(reply.Finals)+len(reply.Results) != 0 {
			t.Errorf("resumes with %v", reply)
		}
	}
	r.installed()

	// The other server: nothing is lost that the job needs. Nor is it when an agent alone starts again.
	r.agents["s1"].stop()
	r.agents["s1"].start()
	r.agents["s0"].stop()
	r.agents["s0"].resume()
	r.until("both are missed and come back", func() bool { return r.agents["s0"].visited() && r.agents["s1"].visited() })
	r.ready()
	if j := r.job("one"); j.Epoch != 2 || j.Recovery != "" {
		t.Errorf("job is %v", j)
	}
}

// TestRecoveryBeginsAnew: the switch is lost again before all ranks have stopped, and a change of plan that was under way
// is taken to its end.
func TestRecoveryBeginsAnew(t *testing.T) {
	r := newRoom(t, testConfig(), nil)
	r.ready()
	job := r.create("train", 4, &api.Policy{Pool: 16})
	stations := r.serveAll(job, nil)
	if _, err := r.steer("train", steered["hybrid"]); err != nil {
		t.Fatal(err)
	}
	s := stations[2]
	s.mu.Lock()
	s.deaf = true
	s.mu.Unlock()
	r.loseSwitch()
	r.until("the recovery waits for rank 2, which knows of it", func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.freezes == 1 && r.job("train").Recovery == "rank 2 to stop and say what they have (the switch has lost its memory)"
	})
	if _, err := r.steer("train", steered["server"]); status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "recovers") {
		t.Errorf("steered while it recovers: %v", err)
	}
	if _, err := r.client.HandOver(r.context(), &api.HandOverRequest{Job: "train", Id: job.Id, Recovery: r.number("train")}); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("handed over before it was asked: %v", err)
	}
	s.mu.Lock()
	s.deaf = false
	s.mu.Unlock()
	r.loseSwitch()
	for _, reply := range r.replies(stations) {
		if reply.Epoch != 3 {
			t.Errorf("resumes with %v", reply)
		}
	}
	j := r.job("train")
	if j.Epoch != 3 || j.Change != nil || j.Cohort != 0b0111 || !slices.Equal(j.Servers, []string{"s1", "s0"}) {
		t.Errorf("job is %v", j)
	}
	r.ready()
	r.installed()
	if _, err := r.client.Frozen(r.context(), &api.FrozenRequest{Job: "train", Id: job.Id, Recovery: 7}); status.Code(err) != codes.Aborted {
		t.Errorf("of a recovery that never was: %v", err)
	}
	for _, reply := range r.replies(stations) { // a rank that was frozen by nobody is let go
		if reply.Epoch != 4 {
			t.Errorf("resumes with %v", reply)
		}
	}
}

// number returns the number of a job's last recovery.
func (r *room) number(job string) uint64 {
	r.c.mu.Lock()
	defer r.c.mu.Unlock()
	return r.c.meets[job].recovery.number
}

// TestRecoveryEndsWithARank: in a sync job a rank that dies or breaks the rules during a recovery ends the job, by name.
func TestRecoveryEndsWithARank(t *testing.T) {
	for name, c := range map[string]struct {
		before func(s *station)
		during func(s *station)
		want   string
	}{
		"dies": {func(s *station) { s.deaf = true }, func(s *station) { s.cancel() }, "rank 1 on host w1 went away without leaving"},
		"damaged result": {
			func(s *station) { s.damage = true }, nil,
			"rank 1 on host w1 it hands over a RESULT of job",
		},
		"no state": {func(s *station) { s.req.Next = 9 }, nil, "rank 1 on host w1 cannot take part any more: state of rank 1: first, next and boundary"},
		"another length": {
			func(s *station) { s.req.Rounds[0].Chunks = 3 }, nil,
			"round 0 has 2 chunks at rank 0 and 3 at rank 1",
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRoom(t, testConfig(), nil)
			r.ready()
			job := r.create("train", 2, &api.Policy{Pool: 16})
			stations := r.serveAll(job, nil)
			for i, s := range stations {
				s.mu.Lock()
				s.req.Next, s.req.Boundary, s.req.Seq = 1, 1, 2
				s.hold(0b11, 0, 2, []uint32{0, 1}[i:]...)
				if i == 1 {
					c.before(s)
				}
				s.mu.Unlock()
			}
			stations[0].req.Rounds[0].Held[0] = 0 // so that it lacks what rank 1 has
			r.loseSwitch()
			if c.during != nil {
				r.until("it recovers", func() bool { return r.job("train").Recovery != "" })
				c.during(stations[1])
			}
			select {
			case a := <-stations[0].aborted:
				if !strings.Contains(a.Reason, c.want) {
					t.Errorf("aborted with %q, want %q", a.Reason, c.want)
				}
			case <-r.context().Done():
				t.Fatalf("not aborted: %v", r.job("train"))
			}
			if j := r.job("train"); j.State != "aborted" || j.Recovery != "" {
				t.Errorf("job is %v", j)
			}
		})
	}
}

// TestQuorumGoesOn: a rank of a quorum job that goes away ends nothing as long as enough are there, and comes back through a
// recovery.
func TestQuorumGoesOn(t *testing.T) {
	r := newRoom(t, testConfig(), nil)
	r.ready()
	job, err := r.client.CreateJob(r.context(), &api.CreateJobRequest{
		Name: "q", Ranks: 3, MaxElems: 1000, Policy: &api.Policy{Mode: "server", Pool: 16},
		Consistency: &api.Consistency{Mode: "quorum", Quorum: 2, WaitUs: 1000},
	})
	if err != nil {
		t.Fatal(err)
	}
	stations := r.serveAll(job, nil)
	stations[2].cancel()
	r.until("rank 2 is gone", func() bool { return r.job("q").Gone == 0b100 })
	if j := r.job("q"); j.State != "running" || j.Joined != 0b011 {
		t.Errorf("job is %v", j)
	}
	// A change of plan does not wait for it.
	if _, err := r.steer("q", steered["one server"]); err != nil {
		t.Fatal(err)
	}
	if ch := r.job("q").Change; ch.GetBehind() != 0b011 {
		t.Errorf("change is %v", ch)
	}
	for _, s := range stations[:2] {
		if err := s.report(job.Id, 2); err != nil {
			t.Fatal(err)
		}
	}
	r.until("the change is over", func() bool { return r.job("q").Change == nil })

	for i, s := range stations[:2] {
		s.mu.Lock()
		s.req.First, s.req.Next, s.req.Boundary, s.req.Seq = 3, uint32(3+i), uint32(4+i), uint32(10+i)
		s.req.AllReduces, s.req.Returns = uint64(2+i), []uint64{uint64(7 * i)} // all have begun number 0
		s.hold(0b11, 2, 1, 0)
		s.hold(0b11, 3, 1)
		if i == 1 {
			s.hold(0b11, 4, 2)
		}
		s.mu.Unlock()
	}
	if _, err := r.client.Join(r.context(), &api.JoinRequest{Job: "q", Rank: 0, Ip: "10.77.0.1", UdpPort: wire.Port, Digest: "d"}); err != nil {
		t.Fatal(err)
	}
	back := r.join("q", 2, "d")
	ready := back.ready()
	if ready.Epoch != 3 || ready.Round != 5 || ready.Seq != 14 || ready.Job != job.Id || ready.AllReduces != 3 ||
		!slices.Equal(ready.Returns, []uint64{3, 7}) {
		t.Errorf("rank 2 comes back with %v", ready)
	}
	for _, reply := range r.replies(stations[:2]) {
		if reply.Epoch != 3 || reply.Round != 3 || reply.Seq != 11 || len(reply.Finals) != 2 || !slices.Equal(reply.Returns, []uint64{3, 7}) {
			t.Errorf("resumes with %v", reply)
		}
	}
	if j := r.job("q"); j.Gone != 0 || j.Joined != 0b111 || j.Recovery != "" {
		t.Errorf("job is %v", j)
	}
	r.installed()
	// It would not hear of a plan that the others are told of in rounds that it misses.
	progress := func(rank, round uint32) {
		_, err := r.client.Report(r.context(), &api.ReportRequest{Job: "q", Rank: rank, Id: job.Id, Progress: &api.Progress{Round: round}})
		if err != nil {
			t.Fatal(err)
		}
	}
	progress(2, 5)
	progress(1, 4)
	if _, err := r.steer("q", steered["server"]); status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "rank 2 has come back") {
		t.Errorf("steered before rank 2 takes part: %v", err)
	}
	progress(1, 5)
	if _, err := r.steer("q", steered["server"]); err != nil {
		t.Error(err)
	}

	// Another one goes, and then there are too few.
	stations[0].cancel()
	r.until("rank 0 is gone", func() bool { return r.job("q").Gone == 0b001 })
	stations[1].cancel()
	if a := back.aborted(); !strings.Contains(a.Reason, "rank 1 on host w1 went away without leaving, and without it and rank 0 fewer than 2") ||
		!slices.Equal(a.Ranks, []uint32{0, 1}) {
		t.Errorf("aborted with %v", a)
	}
}

// TestReturnWaits: a rank is not let in while the all-reduce under way has more rounds to come than servers keep.
func TestReturnWaits(t *testing.T) {
	r := newRoom(t, testConfig(), nil)
	r.ready()
	job := r.quorumOfThree()
	stations := r.serveAll(job, nil)
	boundary := func(rounds uint32) {
		for _, s := range stations[:2] {
			s.mu.Lock()
			s.req.Next, s.req.Boundary, s.req.Seq, s.req.AllReduces, s.req.Rounds = 1, rounds, 1, 1, nil
			for round := range rounds {
				s.hold(0b011, round, 1)
			}
			s.mu.Unlock()
		}
	}
	boundary(8) // and one more that the rank would begin
	stations[2].cancel()
	r.until("rank 2 is gone", func() bool { return r.job("q").Gone == 0b100 })
	back := r.join("q", 2, "d")
	for _, reply := range r.replies(stations[:2]) {
		if reply.Epoch != 2 || len(reply.Returns) != 0 {
			t.Errorf("resumes with %v", reply)
		}
	}
	boundary(7)
	if ready := back.ready(); ready.Epoch != 3 || ready.Round != 7 || ready.AllReduces != 1 {
		t.Errorf("rank 2 comes back with %v", ready)
	}
	for _, reply := range r.replies(stations[:2]) {
		if reply.Epoch != 3 || !slices.Equal(reply.Returns, []uint64{1}) {
			t.Errorf("resumes with %v", reply)
		}
	}
}

// TestQuorumRecoversWithoutTheDead: a rank that dies during a recovery is left out of it.
func TestQuorumRecoversWithoutTheDead(t *testing.T) {
	r := newRoom(t, testConfig(), nil)
	r.ready()
	job, err := r.client.CreateJob(r.context(), &api.CreateJobRequest{
		Name: "q", Ranks: 3, MaxElems: 1000, Policy: &api.Policy{Mode: "server", Pool: 16},
		Consistency: &api.Consistency{Mode: "quorum", Quorum: 2, WaitUs: 1000},
	})
	if err != nil {
		t.Fatal(err)
	}
	stations := r.serveAll(job, nil)
	stations[1].mu.Lock()
	stations[1].deaf = true
	stations[1].mu.Unlock()
	r.loseSwitch()
	r.until("it waits for rank 1", func() bool { return strings.Contains(r.job("q").Recovery, "rank 1 to stop") })
	stations[1].cancel()
	r.replies([]*station{stations[0], stations[2]})
	if j := r.job("q"); j.State != "running" || j.Gone != 0b010 {
		t.Errorf("job is %v", j)
	}
}

// TestListenAgain: a rank that only lost its stream takes its seat again, and is told of a recovery that is under way.
func TestListenAgain(t *testing.T) {
	r := newRoom(t, testConfig(), nil)
	r.ready()
	job := r.create("train", 2, &api.Policy{Pool: 16})
	stations := r.serveAll(job, func(s *station) { s.deaf = s.n == 1 })
	again := func(n, id, port uint32) (*rank, error) {
		ctx, cancel := context.WithCancel(r.context())
		stream, err := r.client.Join(ctx, &api.JoinRequest{Job: "train", Rank: n, Ip: fmt.Sprintf("10.77.0.%d", n+1), UdpPort: port, Digest: "d", Id: id})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(cancel)
		k := &rank{r, "train", n, stream, cancel}
		event, err := stream.Recv()
		if err == nil && event.GetReady().GetJob() != job.Id {
			t.Errorf("got %v, want ready", event)
		}
		return k, err
	}
	if _, err := again(1, job.Id+1, wire.Port); status.Code(err) != codes.Aborted {
		t.Errorf("of another incarnation: %v", err)
	}
	if _, err := again(1, job.Id, 7); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("from another port: %v", err)
	}
	r.loseSwitch()
	r.until("it waits for rank 1", func() bool { return strings.Contains(r.job("train").Recovery, "rank 1 to stop") })
	k, err := again(1, job.Id, wire.Port)
	if err != nil {
		t.Fatal(err)
	}
	stations[1].cancel() // the old stream; the new one counts
	stations[1] = k.serve(job.Id, nil)
	r.replies(stations)
	if j := r.job("train"); j.State != "running" {
		t.Errorf("job is %v", j)
	}
}

// TestRecoveryWaitsForADevice says whom it waits for, and goes on when the device is back.
func TestRecoveryWaitsForADevice(t *testing.T) {
	r := newRoom(t, testConfig(), nil)
	r.ready()
	job := r.create("train", 4, hybridPolicy())
	stations := r.serveAll(job, nil)
	r.agents["s1"].stop()
	r.until("s1 is missed", func() bool {
		reply, err := r.client.Status(r.context(), &api.StatusRequest{})
		return err == nil && !reply.Servers[1].Ready
	})
	r.loseSwitch()
	r.until("it waits for s1", func() bool {
		return strings.Contains(r.job("train").Recovery, "epoch 2 to be installed, which does not succeed: install plan of job") && strings.Contains(r.job("train").Recovery, "server s1")
	})
	r.agents["s1"].resume()
	r.replies(stations)
	r.installed()
}

// TestBreakFirst: a recovery needs room for one plan on the switch, and its servers never lose the lease.
func TestBreakFirst(t *testing.T) {
	for _, from := range slices.Sorted(maps.Keys(steered)) {
		in := newIntent(t, testConfig())
		rule := steered[from]
		j, err := in.create(JobSpec{Name: "train", Ranks: 4, MaxElems: 1000, Policy: &rule})
		if err != nil {
			t.Fatal(err)
		}
		in.joinAll(j)
		have := desiredJob(in, j)
		w := &world{entitiesOf(have), maps.Clone(have.plans)}
		most := len(w.entities)
		j.epoch = nextEpoch(nextEpoch(j.epoch))
		want := desiredJob(in, j)
		for _, s := range breakFirst(diff(have, want)) {
			w.walk([]step{s}, func() {
				if len(w.entities) > most {
					t.Fatalf("%s: %d entities on the switch, there is room for %d", from, len(w.entities), most)
				}
				if len(w.plans) < len(want.plans) {
					t.Fatalf("%s: a server has no plan of the job", from)
				}
			})
		}
		if !maps.EqualFunc(w.entities, entitiesOf(want), p4rt.Equal) || !maps.Equal(w.plans, want.plans) {
			t.Errorf("%s: at the end there is %v %v", from, w.entities, w.plans)
		}
	}
}

// quorumOfThree creates a quorum job of three ranks, of which two are enough.
func (r *room) quorumOfThree() *api.Job {
	r.t.Helper()
	job, err := r.client.CreateJob(r.context(), &api.CreateJobRequest{
		Name: "q", Ranks: 3, MaxElems: 1000, Policy: &api.Policy{Mode: "server", Pool: 16},
		Consistency: &api.Consistency{Mode: "quorum", Quorum: 2, WaitUs: 1000},
	})
	if err != nil {
		r.t.Fatal(err)
	}
	return job
}

// losesStream has a rank's stream break.
func (r *room) losesStream(s *station) {
	r.t.Helper()
	s.cancel()
	r.until("a rank is missed", func() bool { return r.job(s.job).Gone>>s.n&1 != 0 })
}

// TestRankMissesAChange: a rank whose stream was broken while the plan changed, and the old one was removed, is brought to
// the plan that the others have; not one that had changed too.
func TestRankMissesAChange(t *testing.T) {
	r := newRoom(t, testConfig(), nil)
	r.ready()
	job := r.quorumOfThree()
	stations := r.serveAll(job, nil)
	change := func(to string, epoch uint32, told ...*station) {
		t.Helper()
		if _, err := r.steer("q", steered[to]); err != nil {
			t.Fatal(err)
		}
		for _, s := range told {
			if err := s.report(job.Id, epoch); err != nil {
				t.Fatal(err)
			}
		}
		r.until("the change is over", func() bool { return r.job("q").Change == nil })
	}
	r.losesStream(stations[2])
	change("one server", 2, stations...)
	stations[2] = r.back("q", 2, job.Id).serve(job.Id, nil)
	r.until("rank 2 is back", func() bool { return r.job("q").Gone == 0 })
	if j := r.job("q"); j.Epoch != 2 || j.Recovery != "" {
		t.Errorf("rank 2 has the plan, and the job is %v", j)
	}

	r.losesStream(stations[2])
	change("server", 3, stations[:2]...)
	stations[2] = r.back("q", 2, job.Id).serve(job.Id, nil)
	for _, reply := range r.replies(stations) {
		if reply.Epoch != 4 {
			t.Errorf("resumes with %v", reply)
		}
	}
	if j := r.job("q"); j.Epoch != 4 || j.Gone != 0 || j.Recovery != "" {
		t.Errorf("job is %v", j)
	}
	r.installed()
}

// TestLeftIsNotLost: a rank that has finished and waits for the others is not told that the job has recovered without it
// while its stream was broken.
func TestLeftIsNotLost(t *testing.T) {
	r := newRoom(t, testConfig(), nil)
	r.ready()
	job := r.quorumOfThree()
	stations := r.serveAll(job, nil)
	left := make(chan error, 1)
	go func() { left <- stations[2].leave() }()
	r.until("rank 2 has left", func() bool { return r.job("q").Left == 0b100 })
	stations[2].cancel()
	r.until("its stream is missed", func() bool {
		r.c.mu.Lock()
		defer r.c.mu.Unlock()
		return r.c.meets["q"].seats[2].deaf
	})
	r.loseSwitch()
	r.replies(stations[:2])
	again := r.back("q", 2, job.Id)
	again.ready()
	r.leaveAll([]*rank{stations[0].rank, stations[1].rank})
	if err := <-left; err != nil {
		t.Errorf("leave: %v", err)
	}
	if event, err := again.stream.Recv(); err != io.EOF {
		t.Errorf("got %v, %v, want the end of the stream", event, err)
	}
}

// TestLateCallsAreNoLoss: a call of a recovery that is over, or was given up, which comes late begins no other.
func TestLateCallsAreNoLoss(t *testing.T) {
	r := newRoom(t, testConfig(), nil)
	r.ready()
	job := r.create("train", 2, &api.Policy{Pool: 16})
	stations := r.serveAll(job, func(s *station) { s.deaf = s.n == 1 })
	r.loseSwitch()
	r.until("it waits for rank 1", func() bool { return strings.Contains(r.job("train").Recovery, "rank 1 to stop") })
	given := r.number("train")
	stations[1].mu.Lock()
	stations[1].deaf = false
	stations[1].mu.Unlock()
	r.loseSwitch()
	r.replies(stations)
	over := r.number("train")
	for _, number := range []uint64{given, over - 1} {
		if _, err := r.client.Frozen(r.context(), &api.FrozenRequest{Job: "train", Id: job.Id, Recovery: number}); status.Code(err) != codes.Aborted {
			t.Errorf("frozen by recovery %d: %v", number, err)
		}
		if _, err := r.client.HandOver(r.context(), &api.HandOverRequest{Job: "train", Id: job.Id, Recovery: number}); status.Code(err) != codes.Aborted {
			t.Errorf("handed over to recovery %d: %v", number, err)
		}
	}
	if now := r.number("train"); now != over || r.job("train").Recovery != "" {
		t.Errorf("recovery %d has begun after %d: %v", now, over, r.job("train"))
	}
}
