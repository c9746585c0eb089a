package controller

import (
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"xagg/api"
	"xagg/controller/p4rt"
	"xagg/policy"
	"xagg/policy/adapt"
)

// wants checks what the devices have of a plan of the job of quorumOfThree: on the switch, and on both servers.
func (r *room) wants(job *api.Job, epoch uint16, quorum, waitUS uint32) {
	r.t.Helper()
	entry, _ := r.sw.Entities()[planEntryKey(uint16(job.Id), plan{epoch: epoch})].(p4rt.Entry)
	got := map[string]uint64{}
	for _, p := range entry.Params {
		got[p.Name], _ = p.Value.Uint()
	}
	if got["quorum"] != uint64(quorum) || got["wait_us"] != uint64(waitUS) {
		r.t.Errorf("epoch %d: the switch's plan is %v, want quorum %d and wait %d us", epoch, entry, quorum, waitUS)
	}
	for name, a := range r.agents {
		a.mu.Lock()
		if p := a.plans[planKey{name, uint16(job.Id), epoch}]; p.GetQuorum() != quorum || p.GetWaitUs() != waitUS {
			r.t.Errorf("epoch %d: the plan of %s is %v, want quorum %d and wait %d us", epoch, name, p, quorum, waitUS)
		}
		a.mu.Unlock()
	}
}

// changed has all ranks report that they have begun a round under an epoch, and waits for the end of the change.
func (r *room) changed(id, epoch uint32, stations []*station) {
	r.t.Helper()
	for _, s := range stations {
		if err := s.report(id, epoch); err != nil {
			r.t.Fatal(err)
		}
	}
	r.until("the change is over", func() bool { return r.job("q").Change == nil })
}

// TestQuorumOfAPlan: quorum and wait change with the plan. As long as both are installed each has its own; what is not said
// stays, and so does what ranks take for the least.
func TestQuorumOfAPlan(t *testing.T) {
	r := newRoom(t, testConfig(), nil)
	r.ready()
	job := r.quorumOfThree()
	stations := r.serveAll(job, nil)
	r.wants(job, 1, 2, 1000)

	j, err := r.steer("q", policy.Static{Quorum: 3})
	if err != nil {
		t.Fatal(err)
	}
	if j.Quorum != 2 || j.WaitUs != 1000 || j.Change.GetQuorum() != 3 || j.Change.GetWaitUs() != 1000 ||
		!strings.Contains(j.Change.GetExplanation(), "3 of them are enough for a result, 1ms after the first") {
		t.Errorf("job is %v", j)
	}
	r.wants(job, 1, 2, 1000)
	r.wants(job, 2, 3, 1000)
	if reply, err := r.client.Report(r.context(), &api.ReportRequest{Job: "q", Id: job.Id}); err != nil || reply.WaitUs == nil || *reply.WaitUs != 1000 {
		t.Errorf("report: %v, %v", reply, err)
	}
	r.changed(job.Id, 2, stations)
	if j := r.job("q"); j.Epoch != 2 || j.Quorum != 3 || j.WaitUs != 1000 || len(j.Servers) != 2 || j.Cohort != 0 || j.Consistency.Quorum != 2 {
		t.Errorf("job is %v", j)
	}
	if j, err := r.steer("q", policy.Static{Quorum: 3}); err != nil || j.Change != nil {
		t.Errorf("to the plan that it has: %v, %v", j, err)
	}

	if _, err := r.steer("q", policy.Static{Wait: new(5 * time.Millisecond)}); err != nil {
		t.Fatal(err)
	}
	r.wants(job, 3, 3, 5000)
	if reply, err := r.client.Report(r.context(), &api.ReportRequest{Job: "q", Id: job.Id}); err != nil || reply.GetWaitUs() != 5000 {
		t.Errorf("report: %v, %v", reply, err)
	}
	r.changed(job.Id, 3, stations)
	// Who sums changes, and the rest stays.
	if _, err := r.steer("q", policy.Static{Mode: policy.ModeServer, Servers: []string{"s1", "s0"}}); err != nil {
		t.Fatal(err)
	}
	r.wants(job, 4, 3, 5000)
	r.changed(job.Id, 4, stations)
	if _, err := r.steer("q", policy.Static{Quorum: 2, Wait: new(time.Duration(0))}); err != nil {
		t.Fatal(err)
	}
	r.wants(job, 5, 2, 0)
	r.changed(job.Id, 5, stations)
	if j := r.job("q"); j.Quorum != 2 || j.WaitUs != 0 || j.Servers[0] != "s1" {
		t.Errorf("job is %v", j)
	}
	r.installed()

	r.create("train", 2, &api.Policy{Pool: 16})
	for _, refused := range []struct {
		job  string
		rule policy.Static
		want string
	}{
		{"q", policy.Static{Quorum: 1}, "quorum: 1 is outside 2..3, from what the job was created with"},
		{"q", policy.Static{Quorum: 4}, "quorum: 4 is outside 2..3, from what the job was created with"},
		{"q", policy.Static{Wait: new(time.Hour + time.Microsecond)}, "wait: 1h0m0.000001s is outside 0s..1h0m0s"},
		{"train", policy.Static{Quorum: 2}, `quorum: 2, but the results of job "train" are not made by a quorum`},
		{"train", policy.Static{Wait: new(time.Second)}, `wait: 1s, but the results of job "train" are not made by a quorum`},
	} {
		if _, err := r.steer(refused.job, refused.rule); status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), refused.want) {
			t.Errorf("%+v: %v, want %s", refused.rule, err, refused.want)
		}
	}
}

// TestQuorumOfTheFirstPlan: a job may begin with a larger quorum than its ranks take, and keeps what was asked for last in
// its next incarnation.
func TestQuorumOfTheFirstPlan(t *testing.T) {
	r := newRoom(t, keptConfig(t), nil)
	r.ready()
	job, err := r.client.CreateJob(r.context(), &api.CreateJobRequest{
		Name: "q", Ranks: 3, MaxElems: 1000, Policy: &api.Policy{Mode: "server", Pool: 16, Quorum: 3, WaitUs: new(uint32(7))},
		Consistency: &api.Consistency{Mode: "quorum", Quorum: 1, WaitUs: 1000},
	})
	if err != nil {
		t.Fatal(err)
	}
	if job.Quorum != 3 || job.WaitUs != 7 {
		t.Errorf("job is %v", job)
	}
	r.restart()
	r.ready()
	if j := r.job("q"); j.Quorum != 3 || j.WaitUs != 7 || j.Id != job.Id || j.Note != "" {
		t.Errorf("after a restart the job is %v", j)
	}
	if _, err := r.steer("q", policy.Static{Quorum: 2}); err != nil { // nobody has seen the one before
		t.Fatal(err)
	}
	ranks, ready := r.joinAll("q", 3)
	if ready.Consistency.Quorum != 1 || ready.Consistency.WaitUs != 7 {
		t.Errorf("ready has %v", ready)
	}
	r.wants(job, 1, 2, 7)
	r.leaveAll(ranks)
	r.until("it is over", func() bool { return r.job("q").State == "finished" })
	r.joinAll("q", 3)
	r.wants(r.job("q"), 1, 2, 7)
}

// TestRecoveryKeepsQuorum: a recovery takes the job to the plan that it was changing to, with its quorum and wait.
func TestRecoveryKeepsQuorum(t *testing.T) {
	r := newRoom(t, testConfig(), nil)
	r.ready()
	job := r.quorumOfThree()
	stations := r.serveAll(job, nil)
	if _, err := r.steer("q", policy.Static{Quorum: 3, Wait: new(7 * time.Microsecond)}); err != nil {
		t.Fatal(err)
	}
	r.loseSwitch()
	for _, reply := range r.replies(stations) {
		if reply.Epoch != 3 {
			t.Errorf("resumes with %v", reply)
		}
	}
	r.ready()
	r.wants(job, 3, 3, 7)
	if j := r.job("q"); j.Quorum != 3 || j.WaitUs != 7 || j.Change != nil {
		t.Errorf("job is %v", j)
	}
}

// TestMoreThanAreThere: a plan that wants more ranks than are there would wait for ever, and no round under it could tell of
// another. The job recovers, with as many as are there, and again when the rank comes back.
func TestMoreThanAreThere(t *testing.T) {
	for name, begun := range map[string]bool{"the plan": true, "the plan that it changes to": false} {
		t.Run(name, func(t *testing.T) {
			r := newRoom(t, testConfig(), nil)
			r.ready()
			job := r.quorumOfThree()
			stations := r.serveAll(job, nil)
			if _, err := r.steer("q", policy.Static{Quorum: 3}); err != nil {
				t.Fatal(err)
			}
			if begun {
				r.changed(job.Id, 2, stations)
			}
			stations[2].cancel()
			for _, reply := range r.replies(stations[:2]) {
				if reply.Epoch != 3 {
					t.Errorf("resumes with %v", reply)
				}
			}
			r.wants(job, 3, 2, 1000)
			if j := r.job("q"); j.Quorum != 2 || !strings.HasSuffix(j.Explanation, "; only 2 are there, which are enough until more are") {
				t.Errorf("job is %v", j)
			}
			for _, s := range stations[:2] {
				s.mu.Lock()
				s.req.Next, s.req.Boundary, s.req.Seq, s.req.AllReduces = 1, 1, 1, 1
				s.hold(0b011, 0, 1, 0)
				s.mu.Unlock()
			}
			if ready := r.join("q", 2, "d").ready(); ready.Epoch != 4 {
				t.Errorf("rank 2 comes back with %v", ready)
			}
			r.replies(stations[:2])
			r.wants(job, 4, 3, 1000)
			if j := r.job("q"); j.Quorum != 3 || strings.Contains(j.Explanation, "only") {
				t.Errorf("job is %v", j)
			}
			r.installed()
		})
	}
}

// TestQuorumOfLaterRounds: a rank that comes back for a later round is in none of those before, which are under the same plan. When they
// are over, the plan changes by itself to what was decided.
func TestQuorumOfLaterRounds(t *testing.T) {
	r := newRoom(t, testConfig(), nil)
	r.ready()
	job := r.quorumOfThree()
	stations := r.serveAll(job, nil)
	if _, err := r.steer("q", policy.Static{Quorum: 3}); err != nil {
		t.Fatal(err)
	}
	r.changed(job.Id, 2, stations)
	stations[2].cancel()
	r.replies(stations[:2])
	for _, s := range stations[:2] { // they are in round 0, of which chunk 1 is missing
		s.mu.Lock()
		s.req.Next, s.req.Boundary, s.req.Seq, s.req.AllReduces = 1, 1, 2, 1
		s.hold(0b011, 0, 2, 0)
		s.mu.Unlock()
	}
	back := r.join("q", 2, "d")
	if ready := back.ready(); ready.Epoch != 4 || ready.Round != 1 {
		t.Errorf("rank 2 comes back with %v", ready)
	}
	stations[2] = back.serve(job.Id, nil)
	r.replies(stations[:2])
	r.wants(job, 4, 2, 1000)
	for _, s := range stations[:2] {
		if _, err := r.client.Report(r.context(), &api.ReportRequest{Job: "q", Rank: s.n, Id: job.Id, Progress: &api.Progress{Round: 1}}); err != nil {
			t.Fatal(err)
		}
	}
	r.until("the plan changes", func() bool { return r.job("q").Change.GetQuorum() == 3 })
	r.changed(job.Id, 5, stations)
	r.wants(job, 5, 3, 1000)
	if j := r.job("q"); j.Epoch != 5 || j.Quorum != 3 || j.Recovery != "" {
		t.Errorf("job is %v", j)
	}
	r.installed()
}

// TestSteerWithoutARank: a plan that wants all is taken with those that are there, and changes once more are.
func TestSteerWithoutARank(t *testing.T) {
	r := newRoom(t, testConfig(), nil)
	r.ready()
	job := r.quorumOfThree()
	stations := r.serveAll(job, nil)
	r.losesStream(stations[2])
	if j, err := r.steer("q", policy.Static{Quorum: 3}); err != nil || j.Change.GetQuorum() != 2 {
		t.Fatalf("%v, %v", j, err)
	}
	r.changed(job.Id, 2, stations) // rank 2 too, whose packets get through
	stations[2] = r.back("q", 2, job.Id).serve(job.Id, nil)
	r.until("rank 2 is back", func() bool { return r.job("q").Gone == 0 })
	r.until("the plan changes", func() bool { return r.job("q").Change.GetQuorum() == 3 })
	r.changed(job.Id, 3, stations)
	r.wants(job, 3, 3, 1000)
}

// TestRestartKeepsQuorum: a restarted controller has the quorum and the wait of every plan, the one that holds while a rank is
// gone, and takes a job on that waits for more ranks than there are.
func TestRestartKeepsQuorum(t *testing.T) {
	r := newRoom(t, keptConfig(t), nil)
	r.ready()
	job := r.quorumOfThree()
	stations := r.serveAll(job, nil)
	if _, err := r.steer("q", policy.Static{Quorum: 3, Wait: new(7 * time.Microsecond)}); err != nil {
		t.Fatal(err)
	}
	again := func() {
		t.Helper()
		r.restart()
		r.ready()
		stations = serveRanks(r.allBack("q", 3, job.Id), job.Id)
	}
	again()
	if j := r.job("q"); j.Quorum != 2 || j.WaitUs != 1000 || j.Change.GetQuorum() != 3 || j.Change.GetWaitUs() != 7 {
		t.Errorf("job is %v", j)
	}
	r.wants(job, 1, 2, 1000)
	r.wants(job, 2, 3, 7)
	r.changed(job.Id, 2, stations)
	again()
	if j := r.job("q"); j.Quorum != 3 || j.WaitUs != 7 || j.Recovery != "" {
		t.Errorf("job is %v", j)
	}

	for _, s := range stations {
		s.mu.Lock()
		s.deaf = true // the recovery does not end in the life of this controller
		s.mu.Unlock()
	}
	stations[2].cancel()
	r.until("it recovers", func() bool {
		return strings.Contains(r.job("q").Recovery, "rank 2 is gone, and the plan wants 3 ranks")
	})
	r.restart()
	for n := range uint32(2) {
		k := r.back("q", n, job.Id)
		k.ready()
		stations[n] = k.serve(job.Id, nil)
	}
	r.replies(stations[:2])
	r.ready()
	r.wants(job, 3, 2, 7)
	again2 := func() *api.Job {
		r.restart()
		r.ready()
		return r.job("q")
	}
	if j := again2(); j.Quorum != 2 || !strings.Contains(j.Explanation, "3 of them are enough") {
		t.Errorf("job is %v", j)
	}
}

// TestStateWithoutQuorum: a file of a controller whose plans had no quorum of their own has the job's.
func TestStateWithoutQuorum(t *testing.T) {
	own := Consistency{Mode: ModeQuorum, Quorum: 2, Wait: time.Second}
	old := savedPlan{Epoch: 5, Steered: 0b111, Servers: []string{"s0"}, Pool: 16}
	if p := old.restore(own); p.quorum != 2 || p.decision.Quorum != 2 || p.decision.Wait != time.Second {
		t.Errorf("plan is %+v", p)
	}
	if p := old.restore(Consistency{Mode: ModeSync}); p.quorum != 0 || p.decision.Quorum != 0 || p.decision.Wait != 0 {
		t.Errorf("plan of a sync job is %+v", p)
	}
	for _, bad := range []savedPlan{{Quorum: 1}, {Quorum: 4}, {Quorum: 3, Enough: 1}, {Quorum: 2, Enough: 3}, {Quorum: 2, Wait: -1}} {
		j := &job{spec: JobSpec{Ranks: 3, Consistency: own}}
		if p := bad.restore(own); j.checkQuorum(p) {
			t.Errorf("%+v is taken", p)
		}
	}
}

// TestDecided: what a policy decides of quorum and wait becomes the plan's, also where no rank moves, and what it does not say
// stays.
func TestDecided(t *testing.T) {
	in := newIntent(t, testConfig())
	j, err := in.create(JobSpec{
		Name: "q", Ranks: 4, MaxElems: 1000, Policy: &policy.Static{Mode: policy.ModeHybrid, Steer: []int{3}, Servers: []string{"s1"}},
		Consistency: Consistency{Mode: ModeQuorum, Quorum: 2, Wait: time.Millisecond},
	})
	if err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct {
		d    adapt.Decision
		same bool
		want policy.Plan
	}{
		"nothing":           {adapt.Decision{Steered: 0b1000}, true, j.decision.Plan},
		"what it has":       {adapt.Decision{Steered: 0b1000, Quorum: 2, Wait: 0.001}, true, j.decision.Plan},
		"a rank":            {adapt.Decision{Steered: 0b1100}, false, policy.Plan{Cohort: 0b0011, Steered: 0b1100, Quorum: 2, Wait: time.Millisecond}},
		"a quorum":          {adapt.Decision{Steered: 0b1000, Quorum: 3}, false, policy.Plan{Cohort: 0b0111, Steered: 0b1000, Quorum: 3}},
		"a wait":            {adapt.Decision{Steered: 0b1000, Quorum: 2, Wait: 0.0025}, false, policy.Plan{Cohort: 0b0111, Steered: 0b1000, Quorum: 2, Wait: 2500 * time.Microsecond}},
		"all to servers":    {adapt.Decision{Steered: 0b1111, Quorum: 4}, false, policy.Plan{Steered: 0b1111, Quorum: 4}},
		"nothing, dry runs": {adapt.Decision{Steered: 0b1000, Quorum: 4, DryRun: true}, true, j.decision.Plan},
	} {
		rule, same := j.decided(tt.d.Apply(j.decision.Plan))
		if same != tt.same {
			t.Errorf("%s: the same is %v, want %v", name, same, tt.same)
		}
		tt.want.Servers, tt.want.Pool = []string{"s1"}, j.decision.Pool
		d, _, err := in.replan(j, rule, 4)
		if err != nil || !d.Plan.Equal(tt.want) {
			t.Errorf("%s: plan %+v, %v\nwant %+v", name, d.Plan, err, tt.want)
		}
	}
}
