package controller

import (
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"xagg/api"
	"xagg/controller/p4rt"
	"xagg/policy"
	"xagg/policy/adapt"
)

func TestConsistencyIsChecked(t *testing.T) {
	quorum := func(change func(*JobSpec)) JobSpec {
		s := JobSpec{Name: "q", Ranks: 4, MaxElems: 1000, Policy: &policy.Static{Mode: policy.ModeServer},
			Consistency: Consistency{Mode: ModeQuorum, Quorum: 3, Wait: 10 * time.Millisecond}}
		change(&s)
		return s
	}
	for _, tt := range []struct {
		change func(*JobSpec)
		want   string // empty = taken
	}{
		{func(s *JobSpec) {}, ""},
		{func(s *JobSpec) { s.Depth = 16 }, ""},
		{func(s *JobSpec) { s.Depth = 17 }, "depth: 17 is outside 1..16; it is how many rounds may be under way"},
		{func(s *JobSpec) { s.Depth = -1 }, "depth: -1 is outside 1..16; it is how many rounds may be under way"},
		{func(s *JobSpec) { s.Consistency.Mode = "most" }, `consistency.mode: "most" is not a mode; want "sync", "quorum" or "async"`},
		{func(s *JobSpec) { s.Consistency.Quorum = 0 }, "consistency.quorum: 0 is outside 1..4; it is the number of the 4 ranks that is enough"},
		{func(s *JobSpec) { s.Consistency.Quorum = 5 }, "consistency.quorum: 5 is outside 1..4; it is the number of the 4 ranks that is enough"},
		{func(s *JobSpec) { s.Consistency.Quorum = 1 }, ""},
		{func(s *JobSpec) { s.Consistency.Quorum = 4 }, ""},
		{func(s *JobSpec) { s.Consistency.Wait = 0 }, ""},
		{func(s *JobSpec) { s.Consistency.Wait = time.Hour }, ""},
		{func(s *JobSpec) { s.Consistency.Wait = time.Hour + 1 }, "consistency.wait: 1h0m0.000000001s is outside 0s..1h0m0s"},
		{func(s *JobSpec) { s.Consistency.Wait = -time.Second }, "consistency.wait: -1s is outside 0s..1h0m0s"},
		{func(s *JobSpec) { s.Consistency.Wait = 1500 }, "consistency.wait: 1.5µs is not a whole number of microseconds"},
		{func(s *JobSpec) { s.Consistency.Rounds = 2 }, ""},
		{func(s *JobSpec) { s.Consistency.Rounds, s.Depth = 4, 3 }, "consistency.rounds: 4 is not a power of two in 6..256, from twice the depth on"},
		{func(s *JobSpec) { s.Consistency.Rounds = 1 }, "consistency.rounds: 1 is not a power of two in 2..256, from twice the depth on"},
		{func(s *JobSpec) { s.Consistency.Rounds = 12 }, "consistency.rounds: 12 is not a power of two in 2..256, from twice the depth on"},
		{func(s *JobSpec) { s.Consistency.Rounds = 512 }, "consistency.rounds: 512 is not a power of two in 2..256, from twice the depth on"},
		{func(s *JobSpec) { s.Consistency.Staleness = 1 }, `consistency.staleness: belongs to mode "async", not to mode "quorum"; leave it out or set the mode`},
		{func(s *JobSpec) { s.Consistency = Consistency{Quorum: 3} }, `consistency.quorum: belongs to mode "quorum", not to mode "sync"; leave it out or set the mode`},
		{func(s *JobSpec) { s.Consistency = Consistency{Wait: 1000} }, `consistency.wait: belongs to mode "quorum", not to mode "sync"; leave it out or set the mode`},
		{func(s *JobSpec) { s.Consistency = Consistency{Mode: ModeAsync, Rounds: 8} }, `consistency.rounds: belongs to mode "quorum", not to mode "async"; leave it out or set the mode`},
		{func(s *JobSpec) { s.Consistency = Consistency{Mode: ModeAsync, Staleness: 1025} }, "consistency.staleness: 1025 is outside 0..1024"},
		{func(s *JobSpec) { s.Consistency = Consistency{Mode: ModeAsync, Staleness: 1024} }, ""},
		{func(s *JobSpec) { s.MaxElems, s.Consistency.Rounds = math.MaxUint32, 256 },
			"max_elems: 4294967295 lanes in each of the 256 rounds that servers keep are more than 2^32 slots"},
		// What needs servers does not get along with a plan that has none, or that sums elsewhere.
		{func(s *JobSpec) { s.Policy = nil },
			`policy.mode: a quorum job needs a server that closes chunks without the missing ranks; choose mode "server" or "hybrid"`},
		{func(s *JobSpec) { s.Policy = &hybrid }, ""},
		{func(s *JobSpec) { s.Consistency, s.Policy = Consistency{Mode: ModeAsync}, nil },
			`policy.mode: an async job has its sums on servers alone, but the switch would sum ranks 0-3; choose mode "server"`},
		{func(s *JobSpec) { s.Consistency, s.Policy = Consistency{Mode: ModeAsync}, &hybrid },
			`policy.mode: an async job has its sums on servers alone, but the switch would sum ranks 0-2; choose mode "server"`},
	} {
		spec := quorum(tt.change)
		_, err := newIntent(t, testConfig()).create(spec)
		if err == nil && tt.want != "" || err != nil && err.Error() != tt.want {
			t.Errorf("%+v\ngot  %v\nwant %s", spec, err, tt.want)
		}
		if err != nil && policy.FieldOf(err) == "" {
			t.Errorf("%v names no field", err)
		}
	}
}

// TestAdaptFromServers: where servers sum all ranks, a policy has a quorum job to change, and nothing in a sync job.
func TestAdaptFromServers(t *testing.T) {
	r := newRoom(t, testConfig(), nil)
	r.ready()
	follow := adapt.DefaultConfig()
	create := func(name string, c *api.Consistency, follow string) error {
		_, err := r.client.CreateJob(r.context(), &api.CreateJobRequest{
			Name: name, Ranks: 4, MaxElems: 10, Policy: &api.Policy{Mode: "server", Pool: 16}, Consistency: c, Adapt: follow,
		})
		return err
	}
	quorum := &api.Consistency{Mode: "quorum", Quorum: 2}
	if err := create("quorum", quorum, follow.YAML()); err != nil {
		t.Error(err)
	}
	if err := create("sync", nil, follow.YAML()); status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), "leaves nothing to move") {
		t.Errorf("sync: %v", err)
	}
	for name, c := range map[string]*api.Consistency{"later quorum": quorum, "later sync": nil} {
		if err := create(name, c, ""); err != nil {
			t.Fatal(err)
		}
		_, err := r.client.Adapt(r.context(), &api.AdaptRequest{Job: name, Adapt: follow.YAML()})
		if refused := status.Code(err) == codes.InvalidArgument; refused != (c == nil) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestServerRounds: a server keeps at least twice the rounds that may be under way, a power of two of them.
func TestServerRounds(t *testing.T) {
	for _, tt := range []struct {
		c     Consistency
		depth int
		want  int
	}{
		{Consistency{}, 1, 2}, {Consistency{}, 2, 4}, {Consistency{}, 3, 8}, {Consistency{Mode: ModeSync}, 5, 16}, {Consistency{}, 16, 32},
		{Consistency{Mode: ModeQuorum}, 1, 8}, {Consistency{Mode: ModeQuorum}, 4, 8}, {Consistency{Mode: ModeQuorum}, 5, 16},
		{Consistency{Mode: ModeQuorum, Rounds: 2}, 1, 2}, {Consistency{Mode: ModeQuorum, Rounds: 64}, 4, 64},
		{Consistency{Mode: ModeAsync}, 1, 4}, {Consistency{Mode: ModeAsync}, 16, 4},
	} {
		if got := tt.c.ServerRounds(tt.depth); got != tt.want {
			t.Errorf("%+v with depth %d: %d rounds, want %d", tt.c, tt.depth, got, tt.want)
		}
	}
}

// TestJobsOfEveryConsistency: servers and ranks get what the job is created with, with its defaults filled in.
func TestJobsOfEveryConsistency(t *testing.T) {
	server := &api.Policy{Mode: "server", Servers: []string{"s0"}}
	for name, tt := range map[string]struct {
		asked  *api.Consistency
		depth  uint32
		policy *api.Policy
		got    *api.Consistency
		plan   *api.ServerPlan
	}{
		"nothing": {nil, 0, server, &api.Consistency{Mode: "sync"}, &api.ServerPlan{Rounds: 2}},
		"sync":    {&api.Consistency{Mode: "sync"}, 3, server, &api.Consistency{Mode: "sync"}, &api.ServerPlan{Rounds: 8}},
		"quorum": {&api.Consistency{Mode: "quorum", Quorum: 3, WaitUs: 10000}, 2, hybridPolicy(),
			&api.Consistency{Mode: "quorum", Quorum: 3, WaitUs: 10000, Rounds: 8}, &api.ServerPlan{Rounds: 8, Quorum: 3, WaitUs: 10000}},
		"async": {&api.Consistency{Mode: "async", Staleness: 2}, 2, server,
			&api.Consistency{Mode: "async", Staleness: 2}, &api.ServerPlan{Rounds: 4, Async: true, Staleness: 2}},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRoom(t, testConfig(), nil)
			r.ready()
			job, err := r.client.CreateJob(r.context(), &api.CreateJobRequest{
				Name: "train", Ranks: 4, MaxElems: 1000, Policy: tt.policy, Consistency: tt.asked, Depth: tt.depth,
			})
			if err != nil {
				t.Fatal(err)
			}
			depth := max(tt.depth, 1)
			if !proto.Equal(job.Consistency, tt.got) || job.Depth != depth {
				t.Errorf("job has %v and depth %d, want %v and %d", job.Consistency, job.Depth, tt.got, depth)
			}
			_, ready := r.joinAll("train", 4)
			plan, _ := r.sw.Entities()[planEntryKey(uint16(job.Id), plan{epoch: 1})].(p4rt.Entry)
			for _, want := range []p4rt.Param{
				{Name: "quorum", Value: p4rt.Uint(uint64(tt.got.Quorum))}, {Name: "wait_us", Value: p4rt.Uint(uint64(tt.got.WaitUs))},
			} {
				if !slices.Contains(plan.Params, want) {
					t.Errorf("the switch's plan is %v, want %v", plan, want)
				}
			}
			if !proto.Equal(ready.Consistency, tt.got) || ready.Depth != depth {
				t.Errorf("ready has %v and depth %d, want %v and %d", ready.Consistency, ready.Depth, tt.got, depth)
			}
			a := r.agents["s0"]
			a.mu.Lock()
			defer a.mu.Unlock()
			p := a.plans[planKey{"s0", uint16(job.Id), 1}]
			if p.GetRounds() != tt.plan.Rounds || p.GetQuorum() != tt.plan.Quorum || p.GetWaitUs() != tt.plan.WaitUs ||
				p.GetAsync() != tt.plan.Async || p.GetStaleness() != tt.plan.Staleness {
				t.Errorf("the server's plan is %v, want %v", p, tt.plan)
			}
		})
	}
}

// TestSteerKeepsConsistency: a plan under which the job could not be what it is is refused, and the job keeps its own.
func TestSteerKeepsConsistency(t *testing.T) {
	r := newRoom(t, testConfig(), nil)
	r.ready()
	create := func(name string, c *api.Consistency) *api.Job {
		job, err := r.client.CreateJob(r.context(), &api.CreateJobRequest{
			Name: name, Ranks: 2, MaxElems: 1000, Policy: &api.Policy{Mode: "server"}, Consistency: c,
		})
		if err != nil {
			t.Fatal(err)
		}
		return job
	}
	create("quorum", &api.Consistency{Mode: "quorum", Quorum: 1})
	create("async", &api.Consistency{Mode: "async"})
	before := r.job("quorum")
	refused := func(job string, p *api.Policy, code codes.Code, want string) {
		t.Helper()
		_, err := r.client.Steer(r.context(), &api.SteerRequest{Job: job, Policy: p})
		if status.Code(err) != code || !strings.Contains(err.Error(), want) {
			t.Errorf("steer %s to %v: %v, want %s: %s", job, p, err, code, want)
		}
	}
	refused("quorum", &api.Policy{Mode: "switch"}, codes.InvalidArgument, "policy.mode: a quorum job needs a server")
	refused("async", &api.Policy{Mode: "switch"}, codes.InvalidArgument, "policy.mode: an async job has its sums on servers alone")
	if got := r.job("quorum"); !proto.Equal(got, before) {
		t.Errorf("after a refusal the job is %v, was %v", got, before)
	}
	one := &api.Policy{Mode: "server", Servers: []string{"s1"}}
	if _, err := r.client.Steer(r.context(), &api.SteerRequest{Job: "async", Policy: one}); err != nil {
		t.Errorf("steer an async job before it runs: %v", err)
	}
	r.joinAll("async", 2)
	refused("async", &api.Policy{Mode: "server"}, codes.FailedPrecondition, "it is async and runs")
}
