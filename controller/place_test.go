package controller

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"pgregory.net/rapid"

	"xagg/api"
	"xagg/policy"
	"xagg/policy/adapt"
	"xagg/policy/place"
	"xagg/xdp"
)

// tight is a configuration whose jobs want more than there is: 40 jobs of which each could use a pool of 32, where the switch
// has 1,024, and servers with memory for a few.
func tight() Config {
	cfg := testConfig()
	for i := range cfg.Servers {
		cfg.Servers[i].Memory = 200 * xdp.SlotSize
	}
	for i := range 40 {
		spec := JobSpec{Name: fmt.Sprintf("job%02d", i), Ranks: 4, MaxElems: 2000, Weight: 1 + i%3}
		if i%4 == 0 {
			spec.Policy = &policy.Static{Mode: policy.ModeServer}
		}
		cfg.Jobs = append(cfg.Jobs, spec)
	}
	return cfg
}

// TestConfiguredTogether: all configured jobs get a place, by their weights, and their order does not matter.
func TestConfiguredTogether(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		cfg := tight()
		want, got := newIntent(t, cfg), newIntent(t, cfg)
		if _, _, err := want.createAll(cfg.Jobs); err != nil {
			t.Fatal(err)
		}
		if _, _, err := got.createAll(rapid.Permutation(cfg.Jobs).Draw(t, "jobs")); err != nil {
			t.Fatal(err)
		}
		slots := 0
		for name, w := range want.jobs {
			g := got.jobs[name]
			if !g.decision.Plan.Equal(w.decision.Plan) || g.decision.Explanation != w.decision.Explanation || g.lease != w.lease || g.rids != w.rids ||
				g.groups != w.groups || !slices.Equal(g.homes, w.homes) {
				t.Fatalf("in another order job %s has %+v, it had %+v", name, g, w)
			}
			slots += g.lease.size
		}
		if most := got.slots * 3 / 4; slots > most {
			t.Fatalf("the jobs have %d slots, and a quarter of %d was to be kept", slots, got.slots)
		}
		for _, a := range got.jobs {
			for _, b := range got.jobs {
				if (a.decision.Cohort == 0) == (b.decision.Cohort == 0) && a.spec.Weight > b.spec.Weight && a.decision.Pool < b.decision.Pool {
					t.Fatalf("job %s of weight %d has a pool of %d, and %s of weight %d has %d", a.spec.Name, a.spec.Weight, a.decision.Pool, b.spec.Name,
						b.spec.Weight, b.decision.Pool)
				}
			}
		}
	})
}

// TestLaterJobs: a job that comes later gets its quota of the switch, as far as that is free, and what is there keeps what it has.
func TestLaterJobs(t *testing.T) {
	in := newIntent(t, testConfig())
	in.slots = 256
	for _, tt := range []struct {
		name         string
		weight, pool int
		rule         *policy.Static
		why          string // the end of the explanation, or the error
	}{
		{"first", 1, 32, nil, "pool 32 takes 128 of 256 free slots"},
		{"second", 1, 16, nil,
			"pool 16 takes 64 of 128 free slots; more would be of use, up to 32; its quota is a pool of 16, by its weight of 1 in 2 and with 25 % of the slots kept for jobs to come"},
		{"third", 1, 8, nil,
			"pool 8 takes 32 of 64 free slots; more would be of use, up to 32, but what is free beside what is kept for jobs to come is too little or scattered; " +
				"its quota is a pool of 16, by its weight of 1 in 3 and with 25 % of the slots kept for jobs to come"},
		{"light", 1, 4, nil,
			"pool 4 takes 16 of 32 free slots; more would be of use, up to 32, but what is free beside what is kept for jobs to come is too little or scattered; " +
				"its quota is a pool of 8, by its weight of 1 in 4 and with 25 % of the slots kept for jobs to come"},
		{"asks for more", 1, 0, &policy.Static{Pool: 8},
			`32 slots of the switch are needed and 16 are free, 16 too few; choose a smaller pool than the 8 of job "asks for more", or remove a job`},
		{"heavy", 96, 2, nil,
			"pool 2 takes 8 of 16 free slots; more would be of use, up to 32, but what is free beside what is kept for jobs to come is too little or scattered; " +
				"its quota is a pool of 32, by its weight of 96 in 100 and with 25 % of the slots kept for jobs to come"},
		{"asks", 1, 2, &policy.Static{Pool: 2},
			"pool 2 takes 8 of 8 free slots; it asked for more than its quota, a pool of 1, by its weight of 1 in 101 and with 25 % of the slots kept for jobs to come"},
		{"last", 1, 0, nil, "4 slots of the switch are needed and 0 are free, 4 too few; remove a job"},
	} {
		j, err := in.create(JobSpec{Name: tt.name, Ranks: 4, MaxElems: 1000, Weight: tt.weight, Policy: tt.rule})
		switch {
		case tt.pool == 0:
			if short, ok := errors.AsType[*place.ShortError](err); !ok || short.Error() != tt.why {
				t.Errorf("%s: got %v, want %s", tt.name, err, tt.why)
			}
		case err != nil:
			t.Errorf("%s: %v", tt.name, err)
		case j.decision.Pool != tt.pool || !strings.HasSuffix(j.decision.Explanation, tt.why):
			t.Errorf("%s:\ngot  %d, %s\nwant %d, %s", tt.name, j.decision.Pool, j.decision.Explanation, tt.pool, tt.why)
		}
	}
	for name, want := range map[string]int{"first": 1, "heavy": 182} { // of 192 slots, by weights of 101 in all
		if got := in.quota(in.jobs[name]); got != want {
			t.Errorf("job %s has a quota of %d slots, want %d", name, got, want)
		}
	}
}

// asksMemory returns a request for a job of so many chunks, each of which takes two slots of each of its servers.
func asksMemory(name string, chunks uint32, p *api.Policy, a string) *api.CreateJobRequest {
	return &api.CreateJobRequest{Name: name, Ranks: 4, MaxElems: chunks * 256, Policy: p, Adapt: a}
}

// TestMemory: jobs get servers that have room for them, as the agents say, and keep them; also across a restart.
func TestMemory(t *testing.T) {
	r := newRoom(t, keptConfig(t), nil)
	r.ready()
	create := func(req *api.CreateJobRequest, want ...string) {
		t.Helper()
		job, err := r.client.CreateJob(r.context(), req)
		if err != nil || req.Adapt == "" && !slices.Equal(job.Servers, want) {
			t.Errorf("job %s has %v, %v; want servers %v", req.Name, job, err, want)
			return
		}
		r.c.mu.Lock()
		defer r.c.mu.Unlock()
		if got := r.c.intent.jobs[req.Name].hosts(); !slices.Equal(got, want) {
			t.Errorf("job %s has memory at %v, want %v", req.Name, got, want)
		}
	}
	refused := func(err error, want string) {
		t.Helper()
		if status.Code(err) != codes.ResourceExhausted || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %s", err, want)
		}
	}
	server := &api.Policy{Mode: "server"}
	create(asksMemory("wide", 200, server, ""), "s0", "s1")         // 400 of 1,000 at each
	create(asksMemory("alone", 200, server, ""), "s0")              // 350 are left without the reserve
	create(asksMemory("alone too", 200, server, ""), "s1")          // with it
	create(asksMemory("moves", 90, nil, "rule: outlier"), "s0")     // it sums at the switch, and may come to s0
	create(asksMemory("at the switch", 90, nil, ""), []string{}...) // needs none
	_, err := r.client.CreateJob(r.context(), asksMemory("none left", 150, server, ""))
	refused(err, `300 slots of memory at one of the servers s0, s1 for job "none left" are needed and 200 are free, 100 too few`)

	check := func() {
		t.Helper()
		r.c.mu.Lock()
		for name, want := range map[string]float64{"s0": 0.02, "s1": 0.2} { // s0: 400, 400 and 180 of 1,000
			if got := r.c.intent.memoryFree(name); math.Abs(got-want) > 1e-9 {
				t.Errorf("%v of the memory of %s is free, want %v", got, name, want)
			}
		}
		r.c.mu.Unlock()
		// Another policy for a job that has none needs memory that it may come to need; so does a change of plan.
		if _, err := r.client.Adapt(r.context(), &api.AdaptRequest{Job: "at the switch", Adapt: "rule: outlier"}); err != nil {
			t.Error(err)
		}
		r.c.mu.Lock()
		at := r.c.intent.jobs["at the switch"].hosts()
		r.c.mu.Unlock()
		if !slices.Equal(at, []string{"s1"}) {
			t.Errorf("memory for plans to come is at %v", at)
		}
		_, err := r.client.CreateJob(r.context(), asksMemory("none left", 50, server, ""))
		refused(err, `100 slots of memory at one of the servers s0, s1 for job "none left" are needed and 20 are free, 80 too few`)
		if _, err := r.client.Adapt(r.context(), &api.AdaptRequest{Job: "at the switch"}); err != nil {
			t.Error(err)
		}
	}
	check()
	r.c.mu.Lock()
	before := maps.Clone(r.c.intent.jobs)
	r.c.mu.Unlock()
	r.restart() // before any agent has said anything, it is known what they have
	r.c.mu.Lock()
	for name, j := range before {
		if got := r.c.intent.jobs[name].hosts(); !slices.Equal(got, j.hosts()) {
			t.Errorf("after a restart job %s has memory at %v, it had %v", name, got, j.hosts())
		}
	}
	_, err = r.c.intent.create(JobSpec{Name: "none left", Ranks: 4, MaxElems: 150 * 256, Policy: &policy.Static{Mode: policy.ModeServer}})
	r.c.mu.Unlock()
	if err == nil || !strings.Contains(err.Error(), "100 too few") {
		t.Errorf("after a restart: %v", err)
	}
	r.ready()
	check()

	// A change of plan that names no servers gets those that have room; one that names some gets those.
	if _, err := r.client.RemoveJob(r.context(), &api.RemoveJobRequest{Name: "alone too"}); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		rule policy.Static
		want []string
	}{
		{policy.Static{Mode: policy.ModeServer}, []string{"s1"}}, {policy.Static{Mode: policy.ModeServer, Servers: []string{"s0", "s1"}}, []string{"s0", "s1"}},
		{policy.Static{}, nil},
	} {
		job, err := r.steer("at the switch", tt.rule)
		if err != nil || !slices.Equal(job.Servers, tt.want) {
			t.Errorf("steered to %+v: %v, %v; want %v", tt.rule, job, err, tt.want)
		}
		r.c.mu.Lock()
		if at := r.c.intent.jobs["at the switch"].hosts(); !slices.Equal(at, tt.want) {
			t.Errorf("steered to %+v it has memory at %v", tt.rule, at)
		}
		r.c.mu.Unlock()
	}
}

// TestPlace: what is said beforehand is what a controller does.
func TestPlace(t *testing.T) {
	cfg := tight()
	placed, err := Place(cfg)
	if err != nil {
		t.Fatal(err)
	}
	c, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	for i, p := range placed {
		j := c.intent.jobs[cfg.Jobs[i].Name]
		if !p.Plan.Equal(j.decision.Plan) || p.Base != j.lease.base || !slices.Equal(p.Homes, j.homes) {
			t.Errorf("job %s has %+v, and %+v was said", j.spec.Name, j, p)
		}
	}
	cfg.Jobs[7].Policy = &policy.Static{Mode: policy.ModeServer, Servers: []string{"s1"}}
	cfg.Jobs[7].MaxElems = 500 * 256
	if _, err := Place(cfg); err == nil || err.Error() !=
		`plan jobs: 1000 slots of memory at server s1 for job "job07" are needed and 200 are free, 800 too few; start a server with more --memory, add a server, or remove a job` {
		t.Errorf("got %v", err)
	}
	cfg.Jobs[7].Adapt = new(adapt.DefaultConfig())
	if _, err := Place(cfg); err == nil || !strings.HasPrefix(err.Error(), `plan job "job07": jobs[7].policy.mode: mode "server" leaves nothing to move`) {
		t.Errorf("got %v", err)
	}
}
