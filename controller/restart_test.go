package controller

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"

	"xagg/api"
	"xagg/controller/p4rt"
	"xagg/policy"
	"xagg/policy/adapt"
	"xagg/wire"
)

// keptConfig is testConfig with a state file.
func keptConfig(t *testing.T) Config {
	cfg := testConfig()
	cfg.State = filepath.Join(t.TempDir(), "state")
	return cfg
}

// back has a rank that lost its stream come back.
func (r *room) back(job string, n, id uint32) *rank {
	r.t.Helper()
	ctx, cancel := context.WithCancel(r.context())
	stream, err := r.client.Join(ctx, &api.JoinRequest{
		Job: job, Rank: n, Ip: fmt.Sprintf("10.77.0.%d", n+1), UdpPort: wire.Port, Digest: "d", Id: id,
	})
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(cancel)
	return &rank{r, job, n, stream, cancel}
}

// allBack has all ranks come back.
func (r *room) allBack(job string, n, id uint32) []*rank {
	r.t.Helper()
	var ranks []*rank
	for i := range n {
		k := r.back(job, i, id)
		if got := k.ready(); got.Job != id {
			r.t.Errorf("rank %d came back to job %d and is in job %d", i, id, got.Job)
		}
		ranks = append(ranks, k)
	}
	return ranks
}

// leaveAll has all ranks leave.
func (r *room) leaveAll(ranks []*rank) {
	r.t.Helper()
	var wg sync.WaitGroup
	for _, k := range ranks {
		wg.Go(func() {
			if err := k.leave(); err != nil {
				r.t.Errorf("rank %d: leave: %v", k.n, err)
			}
		})
	}
	wg.Wait()
}

// nothingOf checks that the devices have no job.
func (r *room) nothingOfJobs() {
	r.t.Helper()
	if got := r.sw.Entities(); !maps.EqualFunc(got, entitiesOf(r.c.base), p4rt.Equal) {
		r.t.Errorf("the switch still has %v", got)
	}
	for name, a := range r.agents {
		if keys := a.planKeys(); len(keys) != 0 {
			r.t.Errorf("server %s still has %v", name, keys)
		}
	}
}

// TestRestartWritesNothing: a controller that is killed and started again finds its jobs, and the devices are not touched.
func TestRestartWritesNothing(t *testing.T) {
	r := newRoom(t, keptConfig(t), nil)
	r.ready()
	job := r.create("train", 4, hybridPolicy())
	r.create("waits", 2, &api.Policy{Mode: "server"})
	r.joinAll("train", 4)
	before := r.job("train")
	r.changes()

	for range 3 {
		r.restart()
		got := r.job("train")
		if got.Awaited != 0b1111 || got.Recovery != "" {
			t.Errorf("ranks %b are awaited, and the recovery is %q", got.Awaited, got.Recovery)
		}
		r.ready()
		ranks := r.allBack("train", 4, job.Id)
		got = r.job("train")
		if got.String() != before.String() {
			t.Errorf("after the restart the job is\n%v, it was\n%v", got, before)
		}
		r.installed()
		if changes := r.changes(); len(changes) != 0 {
			t.Errorf("the restart has changed %q", changes)
		}
		if err := ranks[1].report(job.Id, job.Epoch); err != nil {
			t.Errorf("report: %v", err)
		}
	}
	if got := r.sw.Pushes(); got != 1 {
		t.Errorf("%d pipelines were pushed, want 1", got)
	}
	r.leaveAll(r.allBack("train", 4, job.Id))
	r.restart()
	if j := r.job("train"); j.State != "finished" || j.Left != 0b1111 {
		t.Errorf("the finished job is %v", j)
	}
	if _, ready := r.joinAll("train", 4); ready.Job == job.Id {
		t.Errorf("the next incarnation has the id of the last one")
	}
	r.joinAll("waits", 2)
	for _, name := range []string{"train", "waits"} {
		if _, err := r.client.RemoveJob(r.context(), &api.RemoveJobRequest{Name: name}); err != nil {
			t.Fatal(err)
		}
	}
	r.nothingOfJobs()
	r.restart()
	r.ready()
	r.nothingOfJobs()
	if reply, err := r.client.Status(r.context(), &api.StatusRequest{}); err != nil || len(reply.Jobs) != 0 {
		t.Errorf("removed jobs are back: %v, %v", reply.GetJobs(), err)
	}
}

// TestReconnectWritesNothing: a device that could not be reached for a while is not touched either, and what was wanted
// meanwhile is done when it is back.
func TestReconnectWritesNothing(t *testing.T) {
	r := newRoom(t, keptConfig(t), nil)
	r.ready()
	job := r.create("train", 4, hybridPolicy())
	gone := r.create("gone", 4, &api.Policy{Mode: "server"})
	ranks, _ := r.joinAll("train", 4)
	r.joinAll("gone", 4)
	r.changes()
	away := func() {
		r.sw.Stop()
		r.agents["s0"].stop()
		r.until("the devices are missed", func() bool {
			reply, err := r.client.Status(r.context(), &api.StatusRequest{})
			return err == nil && !reply.Switch.Ready && !reply.Servers[0].Ready
		})
	}
	back := func() {
		r.sw.Resume()
		r.agents["s0"].resume()
		r.ready()
	}
	away()
	back()
	r.installed()
	if changes := r.changes(); len(changes) != 0 {
		t.Errorf("the reconnection has changed %q", changes)
	}
	away()
	if _, err := r.client.RemoveJob(r.context(), &api.RemoveJobRequest{Name: "gone"}); err != nil {
		t.Fatal(err)
	}
	r.changes()
	back()
	r.installed()
	for _, change := range r.changes() {
		if !strings.HasPrefix(change, "delete ") && change != fmt.Sprintf("s0: remove job %d epoch 1", gone.Id) {
			t.Errorf("what a job left is removed, but also: %s", change)
		}
	}
	if got := r.sw.Pushes(); got != 1 {
		t.Errorf("%d pipelines were pushed, want 1", got)
	}
	if j := r.job("train"); j.State != "running" || j.Id != job.Id {
		t.Errorf("job is %v", j)
	}
	r.leaveAll(ranks)
}

// TestKilledAtEveryWriteOfAChange kills the controller before each write of a change of plan. Whenever that is, rounds under
// every plan that a rank may use go on, the next controller carries the change to its end, and a removal leaves nothing.
func TestKilledAtEveryWriteOfAChange(t *testing.T) {
	for _, tt := range [][2]string{{"hybrid", "switch"}, {"switch", "hybrid"}, {"one server", "other rank"}, {"hybrid", "server"}} {
		from, to := steered[tt[0]], steered[tt[1]]
		t.Run(tt[0]+" to "+tt[1], func(t *testing.T) {
			for n := 0; ; n++ {
				if !killAt(t, n, apiPolicy(from), apiPolicy(to)) {
					if n < 5 {
						t.Errorf("a change takes %d writes", n)
					}
					return
				}
			}
		})
	}
}

// killAt kills the controller before write n of a change. It reports whether the change had so many.
func killAt(t *testing.T, n int, from, to *api.Policy) bool {
	r := newRoom(t, keptConfig(t), nil)
	defer func() { r.life.end() }()
	r.ready()
	from.Pool = 16
	job := r.create("train", 4, from)
	ranks, _ := r.joinAll("train", 4)

	var mu sync.Mutex
	writes, armed := 0, true
	write := func() error {
		mu.Lock()
		defer mu.Unlock()
		if !armed {
			return nil
		}
		if writes++; writes > n {
			r.kill()
			return errors.New("nobody is there to hear this")
		}
		return nil
	}
	first := r.c // whose intent is only looked at when it is dead
	hook := func(on bool) {
		mu.Lock()
		armed = on
		mu.Unlock()
	}
	killed := func() bool {
		r.life.mu.Lock()
		defer r.life.mu.Unlock()
		return r.life.over
	}
	r.sw.OnUpdate = func(p4rt.Update) error { return write() }
	for _, a := range r.agents {
		a.mu.Lock()
		a.onCall = write
		a.mu.Unlock()
	}

	old := r.client
	steering := make(chan struct{})
	go func() {
		defer close(steering)
		old.Steer(r.context(), &api.SteerRequest{Job: "train", Policy: to})
	}()
	done := func() bool { // with the change
		first.mu.Lock()
		defer first.mu.Unlock()
		j := first.intent.jobs["train"]
		return j != nil && j.epoch == 2 && j.change == nil
	}
	told := func() bool {
		first.mu.Lock()
		defer first.mu.Unlock()
		ch := first.intent.jobs["train"].change
		return ch != nil && ch.stage == stageArmed
	}
	r.until("the plan is announced", func() bool { return killed() || told() || done() })
	if !killed() {
		<-steering
		for _, k := range ranks {
			k.report(job.Id, 2)
		}
	}
	r.until("the change is over", func() bool { return killed() || done() })
	hook(false)
	if !killed() {
		return false
	}
	r.restart()
	<-steering
	r.checkRounds()
	r.ready()
	ranks = r.allBack("train", 4, job.Id)
	// The change goes on as far as it can without the ranks.
	r.until("the plan is announced", func() bool {
		j := r.job("train")
		return j.Epoch == 2 || j.Change != nil && j.Change.WaitsFor != "the new plan to be installed"
	})
	r.checkRounds()
	for _, k := range ranks {
		if err := k.report(job.Id, 2); err != nil {
			t.Errorf("killed before write %d: report: %v", n, err)
		}
	}
	r.until("the change is over", func() bool { j := r.job("train"); return j.Epoch == 2 && j.Change == nil })
	r.installed()
	if j := r.job("train"); j.State != "running" || j.Id != job.Id {
		t.Errorf("killed before write %d: job is %v", n, j)
	}
	// The next change can be made, and the job removed, as if nothing had been.
	if _, err := r.client.Steer(r.context(), &api.SteerRequest{Job: "train", Policy: apiPolicy(steered["server"])}); err != nil {
		t.Errorf("killed before write %d: next change: %v", n, err)
	}
	if _, err := r.client.RemoveJob(r.context(), &api.RemoveJobRequest{Name: "train"}); err != nil {
		t.Fatal(err)
	}
	r.nothingOfJobs()
	return true
}

// checkRounds checks that rounds go on under every plan that a rank may use now: the one that all are sure to know, and the
// next one from the moment at which anything announces it.
func (r *room) checkRounds() {
	r.t.Helper()
	r.c.mu.Lock()
	defer r.c.mu.Unlock()
	w := &world{r.sw.Entities(), make(map[planKey]serverPlan)}
	for _, a := range r.agents {
		a.mu.Lock()
		for key, p := range a.plans {
			w.plans[key] = r.c.planOf(p)
		}
		a.mu.Unlock()
	}
	j := r.c.intent.jobs["train"]
	use := []plan{j.plan}
	if ch := j.change; ch != nil && ch.stage == stageArmed && len(w.announces(ch.from, j.id)) > 0 {
		use = append(use, ch.to)
	}
	for _, p := range use {
		if err := w.works(&r.c.intent, j, p); err != nil {
			r.t.Errorf("a round under epoch %d of %+v does not go on: %v", p.epoch, j.change, err)
		}
	}
}

// TestRankStaysAway: a rank that does not come back in time is gone, and so is one that was started anew meanwhile.
func TestRankStaysAway(t *testing.T) {
	t.Run("too long", func(t *testing.T) {
		r := newRoom(t, keptConfig(t), nil)
		r.ready()
		job := r.create("train", 3, nil)
		r.joinAll("train", 3)
		r.kill()
		grace = 50 * time.Millisecond
		defer func() { grace = 0 }()
		r.restart()
		ranks := []*rank{r.back("train", 0, job.Id), r.back("train", 2, job.Id)}
		for _, k := range ranks {
			k.ready()
			if a := k.aborted(); !slices.Equal(a.Ranks, []uint32{1}) ||
				a.Reason != "rank 1 on host w1 has not come back within 50ms after the controller was restarted" {
				t.Errorf("rank %d: %v", k.n, a)
			}
		}
		r.restart() // still
		if j := r.job("train"); j.State != "aborted" || !strings.Contains(j.Error, "rank 1 on host w1 has not come back") {
			t.Errorf("job is %v", j)
		}
	})
	t.Run("started anew", func(t *testing.T) {
		r := newRoom(t, keptConfig(t), nil)
		r.ready()
		job := r.create("train", 2, nil)
		r.joinAll("train", 2)
		r.restart()
		first := r.back("train", 0, job.Id)
		first.ready()
		again := r.join("train", 1, "d")
		if a := first.aborted(); a.Reason != "rank 1 on host w1 was started anew" {
			t.Errorf("rank 0: %v", a)
		}
		r.join("train", 0, "d").ready()
		if ready := again.ready(); ready.Job == job.Id {
			t.Error("the rank that was started anew is in the job that it was in before")
		}
	})
	t.Run("somebody else", func(t *testing.T) {
		r := newRoom(t, keptConfig(t), nil)
		r.ready()
		job := r.create("train", 2, nil)
		ranks, _ := r.joinAll("train", 2)
		for _, tt := range []struct {
			req  *api.JoinRequest
			code codes.Code
			want string
		}{
			{&api.JoinRequest{Rank: 0, Ip: "10.77.0.3", UdpPort: wire.Port, Digest: "d", Id: job.Id}, codes.FailedPrecondition, "rank 0 of job \"train\" is at 10.77.0.1 port 19860, not at 10.77.0.3"},
			{&api.JoinRequest{Rank: 0, Ip: "10.77.0.1", UdpPort: wire.Port, Digest: "e", Id: job.Id}, codes.FailedPrecondition, `has "d", not "e"`},
			{&api.JoinRequest{Rank: 0, Ip: "10.77.0.1", UdpPort: wire.Port, Digest: "d", Id: job.Id + 1}, codes.Aborted, "has begun anew without this rank"},
		} {
			tt.req.Job = "train"
			stream, err := r.client.Join(r.context(), tt.req)
			if err == nil {
				_, err = stream.Recv()
			}
			if status.Code(err) != tt.code || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("%v\ngot  %v\nwant %s: %s", tt.req, err, tt.code, tt.want)
			}
		}
		// A rank whose stream breaks may be back before anybody notices: the old stream no longer counts.
		again := r.back("train", 0, job.Id)
		again.ready()
		ranks[0].cancel()
		ranks[0].stream.Recv()
		r.leaveAll([]*rank{again, ranks[1]})
		if j := r.job("train"); j.State != "finished" {
			t.Errorf("job is %v", j)
		}
	})
}

// TestPitfall23 loses the memory of a device while the controller is away: that is noticed, and told to whoever recovers;
// a device that only was away is not.
func TestPitfall23(t *testing.T) {
	for name, tt := range map[string]struct {
		lose func(r *room)
		want string // part of what is told; empty = nothing is
	}{
		"nothing":   {func(*room) {}, ""},
		"switch":    {func(r *room) { r.sw.Stop(); r.sw.Start() }, "device=sw reason=\"it has another pipeline than before\""},
		"unreached": {func(r *room) { r.sw.Stop(); r.sw.Resume(); r.agents["s0"].stop(); r.agents["s0"].resume() }, ""},
		"arena":     {func(r *room) { r.agents["s1"].stop(); r.agents["s1"].start() }, "device=s1 reason=\"it has other memory than before\""},
		"plan": {func(r *room) {
			a := r.agents["s0"]
			a.mu.Lock()
			clear(a.plans)
			a.mu.Unlock()
		}, "device=s0 reason=\"somebody has removed the plan of job train from it\""},
	} {
		for _, restart := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, restart %v", name, restart), func(t *testing.T) {
				r := newRoom(t, keptConfig(t), nil)
				r.ready()
				job := r.create("train", 4, hybridPolicy())
				ranks, _ := r.joinAll("train", 4)
				stations := serveRanks(ranks, job.Id)
				if restart {
					r.kill()
					tt.lose(r)
					r.restart()
				} else {
					tt.lose(r)
					r.sw.Stop()
					r.agents["s0"].stop()
					r.until("the devices are missed", func() bool {
						reply, err := r.client.Status(r.context(), &api.StatusRequest{})
						return err == nil && !reply.Switch.Ready && !reply.Servers[0].Ready
					})
					r.sw.Resume()
					r.agents["s0"].resume()
				}
				r.ready()
				if restart {
					stations = serveRanks(r.allBack("train", 4, job.Id), job.Id)
				}
				if tt.want != "" {
					r.replies(stations)
				}
				r.installed()
				if told := strings.Join(r.life.logged(), "\n"); tt.want == "" && strings.Contains(told, "lost its memory") || !strings.Contains(told, tt.want) {
					t.Errorf("told %q, want %q", told, tt.want)
				}
				if j := r.job("train"); j.State != "running" || j.Id != job.Id {
					t.Errorf("job is %v", j)
				}
			})
		}
	}
}

// TestPitfall24 has two controllers race: only the primary's writes land, and when the first one is primary again it
// notices that the other one was there.
func TestPitfall24(t *testing.T) {
	r := newRoom(t, keptConfig(t), nil)
	r.ready()
	job := r.create("train", 4, hybridPolicy())
	ranks, _ := r.joinAll("train", 4)
	first := *r
	for _, k := range ranks {
		k.room = &first // whatever there is beside it
	}
	stations := serveRanks(ranks, job.Id)

	r.live(keptConfig(t)) // knows nothing of the first one
	r.ready()
	r.create("other", 2, nil)
	r.joinAll("other", 2)
	have := r.sw.Entities()
	r.installedOnSwitch()
	first.until("the first one knows", func() bool {
		reply, err := first.client.Status(first.context(), &api.StatusRequest{})
		return err == nil && !reply.Switch.Ready && strings.Contains(reply.Switch.Error, "another controller is primary")
	})
	// What the first one is asked for does not reach the switch.
	if _, err := first.steer("train", steered["switch"]); status.Code(err) != codes.Unavailable {
		t.Errorf("a change by a controller that is not primary: %v", err)
	}
	if got := r.sw.Entities(); !maps.EqualFunc(got, have, p4rt.Equal) {
		t.Errorf("a controller that is not primary has written: %v", got)
	}
	r.life.end()
	first.ready()
	if told := strings.Join(first.life.logged(), "\n"); !strings.Contains(told, "reason=\"another controller has removed job train from it\"") {
		t.Errorf("told %q", told)
	}
	first.replies(stations)
	first.installedOnSwitch()
	if j := first.job("train"); j.State != "running" || j.Id != job.Id {
		t.Errorf("job is %v", j)
	}
	if got := r.sw.Pushes(); got != 1 {
		t.Errorf("%d pipelines were pushed, want 1", got)
	}
}

// installedOnSwitch compares the switch with what the controller's intent says.
func (r *room) installedOnSwitch() {
	r.t.Helper()
	r.c.mu.Lock()
	want := entitiesOf(r.c.base)
	for _, j := range r.c.intent.jobs {
		maps.Copy(want, entitiesOf(desiredJob(&r.c.intent, j)))
	}
	r.c.mu.Unlock()
	if got := r.sw.Entities(); !maps.EqualFunc(got, want, p4rt.Equal) {
		r.t.Errorf("the switch has %v, want %v", got, want)
	}
}

// TestStateIsRefused: a file that cannot be used is an error that says so, and stays as it is.
func TestStateIsRefused(t *testing.T) {
	r := newRoom(t, keptConfig(t), nil)
	r.ready()
	r.create("train", 4, hybridPolicy())
	r.joinAll("train", 4)
	r.kill()
	good := r.life.state
	_, body, _ := strings.Cut(string(good), "\n")
	signed := func(change func(string) string) []byte {
		return sign([]byte(change(body)))
	}
	replace := func(old, new string) func(string) string {
		return func(s string) string {
			if !strings.Contains(s, old) {
				t.Fatalf("the state has no %q:\n%s", old, s)
			}
			return strings.Replace(s, old, new, 1)
		}
	}
	other := func(change func(*Config)) Config {
		cfg := testConfig()
		change(&cfg)
		return cfg
	}
	for name, tt := range map[string]struct {
		text []byte
		cfg  Config
		want string
	}{
		"empty":    {nil, testConfig(), "it is empty"},
		"foreign":  {[]byte("hosts: []\n"), testConfig(), "it is not a controller's state"},
		"cut":      {good[:len(good)-10], testConfig(), "it is damaged: its checksum does not fit"},
		"flipped":  {[]byte(strings.Replace(string(good), "id: ", "id:  ", 1)), testConfig(), "it is damaged: its checksum does not fit"},
		"newer":    {signed(replace("schema_version: 1", "schema_version: 2\nnews: 1")), testConfig(), "it has schema version 2, and this program knows version 1 alone"},
		"field":    {signed(replace("next_id:", "last_id: 1\nnext_id:")), testConfig(), `unknown field "last_id"`},
		"switch":   {good, other(func(c *Config) { c.Switch.Name = "s2" }), `it is of switch "sw", and the configuration has switch "s2"`},
		"server":   {good, other(func(c *Config) { c.Servers = c.Servers[:1] }), `job "train": its plan of epoch 1 needs server "s1", which the configuration does not have`},
		"host":     {good, other(func(c *Config) { c.Hosts = c.Hosts[:3] }), `job "train": its rank 3 is at 10.77.0.4, which is none of the configured hosts`},
		"no id":    {signed(replace("  id: ", "  id: 0 #")), testConfig(), `job "train": its id 0 is none or another job's`},
		"slots":    {signed(replace("base: 0", "base: 4095")), testConfig(), `job "train": it has the 64 slots from 4095 on, and there are 0..4095`},
		"state":    {signed(replace("state: running", "state: walking")), testConfig(), `job "train": it is in the unknown state "walking"`},
		"no ranks": {signed(replace("ranks: 4", "ranks: 0")), testConfig(), `job "train": ranks: 0 is outside 1..64`},
	} {
		t.Run(name, func(t *testing.T) {
			tt.cfg.State = filepath.Join(t.TempDir(), "state")
			if err := os.WriteFile(tt.cfg.State, tt.text, 0o600); err != nil {
				t.Fatal(err)
			}
			_, err := New(tt.cfg)
			var serr *StateError
			if !errors.As(err, &serr) || !strings.Contains(err.Error(), tt.want) || !strings.Contains(err.Error(), "nothing was changed") {
				t.Errorf("got  %v\nwant %s", err, tt.want)
			}
			if now, err := os.ReadFile(tt.cfg.State); err != nil || string(now) != string(tt.text) {
				t.Errorf("the file is %q, %v", now, err)
			}
		})
	}
}

// TestStateCannotBeKept: a controller says so before it does anything, and when it happens later what was asked for is
// refused, and nothing reaches a device.
func TestStateCannotBeKept(t *testing.T) {
	cfg := testConfig()
	cfg.State = filepath.Join(t.TempDir(), "missing", "state")
	c, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	lis := bufconn.Listen(1)
	if err := c.Run(t.Context(), lis); err == nil || !strings.Contains(err.Error(), "keep state: ") || !strings.Contains(err.Error(), "--state") {
		t.Errorf("got %v", err)
	}

	r := newRoom(t, keptConfig(t), nil)
	r.ready()
	r.changes()
	if err := os.RemoveAll(filepath.Dir(r.c.cfg.State)); err != nil {
		t.Fatal(err)
	}
	if _, err := r.client.CreateJob(r.context(), &api.CreateJobRequest{Name: "train", Ranks: 4, MaxElems: 1, Policy: hybridPolicy()}); err == nil ||
		!strings.Contains(err.Error(), "keep state: ") {
		t.Errorf("create: %v", err)
	}
	if changes := r.changes(); len(changes) != 0 {
		t.Errorf("what is not kept has reached a device: %q", changes)
	}
	if reply, err := r.client.Status(r.context(), &api.StatusRequest{}); err != nil || len(reply.Jobs) != 0 {
		t.Errorf("jobs: %v, %v", reply.GetJobs(), err)
	}
}

// TestConfiguredJobsAndState: a configured job is the one that is there already; configured otherwise it is planned anew,
// unless it runs.
func TestConfiguredJobsAndState(t *testing.T) {
	cfg := keptConfig(t)
	cfg.Jobs = []JobSpec{{Name: "runs", Ranks: 2, MaxElems: 10}, {Name: "waits", Ranks: 2, MaxElems: 10}, {Name: "same", Ranks: 2, MaxElems: 10}}
	r := newRoom(t, cfg, nil)
	r.ready()
	ids := make(map[string]uint32)
	for _, spec := range cfg.Jobs {
		ids[spec.Name] = r.job(spec.Name).Id
	}
	r.joinAll("runs", 2)
	r.kill()
	r.c.cfg.Jobs = []JobSpec{{Name: "runs", Ranks: 3, MaxElems: 10}, {Name: "waits", Ranks: 3, MaxElems: 10}, {Name: "same", Ranks: 2, MaxElems: 10}}
	r.restart()
	r.ready()
	for name, want := range map[string]struct {
		ranks uint32
		same  bool
	}{"runs": {2, true}, "waits": {3, false}, "same": {2, true}} {
		if j := r.job(name); j.Ranks != want.ranks || (j.Id == ids[name]) != want.same {
			t.Errorf("job is %v, want %+v", j, want)
		}
	}
	r.allBack("runs", 2, ids["runs"])
}

// TestAdaptAndState: by which policy a plan follows what is measured is kept over a restart, unless the configuration has
// another one by then.
func TestAdaptAndState(t *testing.T) {
	cfg := keptConfig(t)
	loss := adapt.DefaultConfig()
	loss.Rule = "loss"
	cfg.Jobs = []JobSpec{{Name: "told", Ranks: 4, MaxElems: 10}, {Name: "configured", Ranks: 4, MaxElems: 10, Adapt: &loss}}
	r := newRoom(t, cfg, nil)
	r.ready()
	check := func(job, rule string) {
		t.Helper()
		reply, err := r.client.Explain(t.Context(), &api.ExplainRequest{Job: job})
		if err != nil || !strings.HasPrefix(reply.GetAdapt(), "rule: "+rule+"\n") {
			t.Errorf("job %s has the policy %q, %v; want rule %s", job, reply.GetAdapt(), err, rule)
		}
	}
	if _, err := r.client.Adapt(t.Context(), &api.AdaptRequest{Job: "told", Adapt: "rule: bandwidth\n"}); err != nil {
		t.Fatal(err)
	}
	_, err := r.client.Adapt(t.Context(), &api.AdaptRequest{Job: "told", Adapt: "rule: moon\n"})
	if status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), "find rule \"moon\"") {
		t.Errorf("a policy that is none: %v", err)
	}
	check("told", "bandwidth")
	check("configured", "loss")
	r.kill()
	outlier := adapt.DefaultConfig()
	outlier.Rule = "outlier"
	r.c.cfg.Jobs = []JobSpec{{Name: "told", Ranks: 4, MaxElems: 10}, {Name: "configured", Ranks: 4, MaxElems: 10, Adapt: &outlier}}
	r.restart()
	r.ready()
	check("told", "bandwidth")
	check("configured", "outlier")
}

// FuzzState: whatever a file has, it is refused or is what it says.
func FuzzState(f *testing.F) {
	for _, name := range []string{"running", "changing", "aborted"} {
		body, err := os.ReadFile(filepath.Join("testdata", "state-"+name+".yaml"))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(body)
	}
	program, err := testProgram()
	if err != nil {
		f.Fatal(err)
	}
	cfg := testConfig()
	f.Fuzz(func(t *testing.T, body []byte) {
		s, err := decodeState("state", sign(body))
		if err != nil {
			return
		}
		in := intent{cfg: &cfg, slots: program.slots, sizes: program.TableSizes(), firstEpoch: one, jobs: make(map[string]*job)}
		meets, err := s.restore(&in)
		if err != nil {
			return
		}
		c := &Controller{cfg: cfg, intent: in, meets: meets, pipeline: s.Pipeline, arenas: make(map[string]uint64)}
		for _, a := range s.Servers {
			c.arenas[a.Name] = a.Instance
		}
		for _, j := range in.jobs {
			for _, e := range desiredJob(&in, j).entities {
				if _, err := program.Encode(e.entity); err != nil {
					t.Errorf("job %s: %v", j.spec.Name, err)
				}
			}
		}
		text, err := c.snapshot().encode()
		if err != nil {
			t.Fatal(err)
		}
		again, err := decodeState("state", text)
		if err != nil {
			t.Fatalf("what is written is not read: %v\n%s", err, text)
		}
		once, err := again.encode()
		if err != nil || string(once) != string(text) {
			t.Errorf("written, read and written it is\n%s\nwas\n%s", once, text)
		}
	})
}

// TestRestartKnowsWhoIsGone: a restarted controller waits for nobody who was gone, lets nobody go on whom the job has
// recovered without, and knows who came back and does not take part yet, and who was away while the plan changed.
func TestRestartKnowsWhoIsGone(t *testing.T) {
	t.Run("lost", func(t *testing.T) {
		r := newRoom(t, keptConfig(t), nil)
		r.ready()
		job := r.quorumOfThree()
		stations := r.serveAll(job, nil)
		r.losesStream(stations[2])
		r.loseSwitch()
		r.replies(stations[:2])
		r.restart()
		if j := r.job("q"); j.Awaited != 0b011 || j.Gone != 0b100 {
			t.Errorf("job is %v", j)
		}
		lost := r.back("q", 2, job.Id)
		if a := lost.aborted(); a.Reason != "the job has recovered without rank 2 meanwhile; join anew" {
			t.Errorf("rank 2: %v", a)
		}
		for n := range uint32(2) {
			k := r.back("q", n, job.Id)
			k.ready()
			stations[n] = k.serve(job.Id, func(s *station) { // it is in round 0
				s.req.Next, s.req.Boundary, s.req.Seq, s.req.AllReduces = 1, 1, 1, 1
				s.hold(0b011, 0, 1)
			})
		}
		if ready := r.join("q", 2, "d").ready(); ready.Job != job.Id || ready.Epoch != 3 || ready.Round != 1 {
			t.Errorf("rank 2 comes back with %v", ready)
		}
		// It misses what the others are told of a change, until it takes part; a controller that is restarted knows.
		r.replies(stations[:2])
		r.until("it is kept that rank 2 came back", func() bool {
			state, err := os.ReadFile(r.c.cfg.State)
			return err == nil && strings.Contains(string(state), "fresh: true")
		})
		r.restart()
		r.ready()
		if _, err := r.steer("q", steered["one server"]); status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "rank 2 has come back") {
			t.Errorf("steered before rank 2 takes part: %v", err)
		}
	})
	t.Run("missed a change", func(t *testing.T) {
		r := newRoom(t, keptConfig(t), nil)
		r.ready()
		job := r.quorumOfThree()
		stations := r.serveAll(job, nil)
		r.losesStream(stations[2])
		if _, err := r.steer("q", steered["one server"]); err != nil {
			t.Fatal(err)
		}
		for _, s := range stations[:2] {
			if err := s.report(job.Id, 2); err != nil {
				t.Fatal(err)
			}
		}
		r.until("the change is over", func() bool { return r.job("q").Change == nil })
		r.restart()
		r.ready()
		stations = serveRanks(r.allBack("q", 3, job.Id), job.Id)
		for _, reply := range r.replies(stations) {
			if reply.Epoch != 3 {
				t.Errorf("resumes with %v", reply)
			}
		}
	})
}

// TestPolicyAndState: a configured job is the one that is there also when it has a policy of its own. What a configuration
// that was changed would have otherwise is planned anew, unless the job runs; then it is said, until somebody steers it.
func TestPolicyAndState(t *testing.T) {
	cfg := keptConfig(t)
	cfg.Jobs = []JobSpec{
		{Name: "own", Ranks: 4, MaxElems: 10, Policy: &policy.Static{Mode: policy.ModeHybrid, Steer: []int{3}}},
		{Name: "all", Ranks: 2, MaxElems: 10, Policy: &policy.Static{Mode: policy.ModeServer}, Depth: 1},
		{Name: "waits", Ranks: 2, MaxElems: 10},
		{Name: "runs", Ranks: 2, MaxElems: 10},
	}
	r := newRoom(t, cfg, nil)
	r.ready()
	r.joinAll("runs", 2)
	ids := make(map[string]uint32)
	for _, spec := range cfg.Jobs {
		ids[spec.Name] = r.job(spec.Name).Id
	}
	check := func(what string, anew ...string) {
		t.Helper()
		r.ready()
		for name, id := range ids {
			switch j := r.job(name); {
			case slices.Contains(anew, name) == (j.Id == id):
				t.Errorf("%s: job %s has id %d, it had %d", what, name, j.Id, id)
			default:
				ids[name] = j.Id
			}
		}
	}
	r.restart()
	check("nothing is changed")
	if j := r.job("runs"); j.Note != "" {
		t.Errorf("nothing is changed: job runs has the note %q", j.Note)
	}

	r.kill()
	r.life.end() // nobody looks at the configuration any more
	r.c.cfg.Policy = policy.Static{Mode: policy.ModeServer, Servers: []string{"s0"}}
	r.restart()
	check("another policy", "waits")
	if j := r.job("waits"); !slices.Equal(j.Servers, []string{"s0"}) || j.Note != "" {
		t.Errorf("job is %v", j)
	}
	note := "its plan was decided when the configuration had another policy or other servers; 'xagg job steer runs' gives it another"
	if j := r.job("runs"); j.Note != note || len(j.Servers) != 0 {
		t.Errorf("job is %v", j)
	}
	if told := strings.Join(r.life.logged(), "\n"); !strings.Contains(told, note) {
		t.Errorf("told %q", told)
	}
	r.allBack("runs", 2, ids["runs"])
	if _, err := r.steer("runs", policy.Static{Mode: policy.ModeServer, Servers: []string{"s1"}}); err != nil {
		t.Fatal(err)
	}
	if j := r.job("runs"); j.Note != "" {
		t.Errorf("steered, the job has the note %q", j.Note)
	}

	r.kill()
	r.life.end() // nobody looks at the configuration any more
	r.c.cfg.Servers = append(slices.Clone(r.c.cfg.Servers), Server{
		Name: "s2", Agent: "s2:1", IP: netip.MustParseAddr("10.77.1.3"), MAC: MAC{2, 0x78, 0x61, 0, 1, 3}, Port: 67,
	})
	r.agents["s2"] = newFakeAgent(t, "s2", 1000)
	r.restart()
	check("another server", "own", "all")
}

// TestServerComesLateToARecovery: a server that the controller sees again only after it has decided a job's next plan cannot
// have that plan yet, and has lost nothing.
func TestServerComesLateToARecovery(t *testing.T) {
	r := newRoom(t, keptConfig(t), nil)
	r.ready()
	job := r.quorumOfThree()
	stations := r.serveAll(job, nil)
	r.losesStream(stations[2])
	r.kill()
	r.agents["s0"].stop()
	r.restart()
	for n := range uint32(2) {
		k := r.back("q", n, job.Id)
		k.ready()
		stations[n] = k.serve(job.Id, nil)
	}
	back := r.join("q", 2, "d")
	r.until("the recovery waits for s0", func() bool { return strings.Contains(r.job("q").Recovery, "epoch 2 to be installed") })
	r.agents["s0"].resume()
	r.ready()
	r.replies(stations[:2])
	if ready := back.ready(); ready.Epoch != 2 {
		t.Errorf("rank 2 comes back with %v", ready)
	}
	if told := strings.Join(r.life.logged(), "\n"); strings.Contains(told, "lost its memory") {
		t.Errorf("told %s", told)
	}
	r.installed()
}
