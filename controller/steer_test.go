package controller

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"xagg/api"
	"xagg/controller/p4rt"
	"xagg/policy"
)

// steered are the plans that tests change between: every mode, one and two servers, in both orders.
var steered = map[string]policy.Static{
	"switch":     {Mode: policy.ModeSwitch},
	"server":     {Mode: policy.ModeServer},
	"one server": {Mode: policy.ModeServer, Servers: []string{"s1"}},
	"hybrid":     {Mode: policy.ModeHybrid, Steer: []int{3}, Servers: []string{"s1", "s0"}},
	"other rank": {Mode: policy.ModeHybrid, Steer: []int{0, 2}, Servers: []string{"s0"}},
}

// quorums are plans of a job with a quorum that tests change between: who sums, how many are enough, how long chunks wait.
var quorums = map[string]policy.Static{
	"its own": {Mode: policy.ModeHybrid, Steer: []int{3}, Quorum: 2, Wait: new(10 * time.Millisecond)},
	"larger":  {Mode: policy.ModeHybrid, Steer: []int{3}, Quorum: 3, Wait: new(10 * time.Millisecond)},
	"longer":  {Mode: policy.ModeHybrid, Steer: []int{3}, Quorum: 2, Wait: new(time.Second)},
	"all":     {Mode: policy.ModeServer, Quorum: 4, Wait: new(time.Duration(0))},
}

// works returns what a plan lacks for a round to run under it.
func (w *world) works(in *intent, j *job, p plan) error {
	alone := *j
	alone.plan, alone.change = p, nil
	full := desiredJob(in, &alone)
	for key, e := range full.entities {
		if e.phase == phaseJob {
			continue // only says why a packet of no plan is refused
		}
		got, want := w.entities[key], e.entity
		if entry, ok := got.(p4rt.Entry); ok && entry.Table == tablePlan {
			got, want = withoutNext(got), withoutNext(want)
		}
		if !p4rt.Equal(got, want) {
			return fmt.Errorf("%s is %v, want %v", key, w.entities[key], e.entity)
		}
	}
	for key, s := range full.plans {
		got := w.plans[key]
		got.next = 0
		if got != s {
			return fmt.Errorf("plan %v is %+v, want %+v", key, got, s)
		}
	}
	return nil
}

// withoutNext returns a plan's entry as if it announced nothing.
func withoutNext(e p4rt.Entity) p4rt.Entity {
	entry := e.(p4rt.Entry)
	entry.Params = slices.Clone(entry.Params)
	for i := range entry.Params {
		if entry.Params[i].Name == "next_epoch" {
			entry.Params[i].Value = num(0)
		}
	}
	return entry
}

// has reports whether the switch sums under a plan.
func (w *world) has(id uint16, p plan) bool {
	_, ok := w.entities[planEntryKey(id, p)]
	return ok
}

func planEntryKey(id uint16, p plan) string {
	return p4rt.Entry{Table: tablePlan, Match: []p4rt.Match{
		{Field: fieldJob, Value: num(id)}, {Field: fieldEpoch, Value: num(p.epoch)},
	}}.Key()
}

// announces returns the epochs that anything in the world announces in chunk 0 of rounds under a plan, without repeats.
func (w *world) announces(p plan, id uint16) (epochs []uint64) {
	add := func(next uint64) {
		if next != 0 && !slices.Contains(epochs, next) {
			epochs = append(epochs, next)
		}
	}
	if len(p.decision.Servers) > 0 {
		add(uint64(w.plans[planKey{p.decision.Servers[0], id, p.epoch}].next))
		return epochs
	}
	if e, ok := w.entities[planEntryKey(id, p)].(p4rt.Entry); ok {
		for _, param := range e.Params {
			if param.Name == "next_epoch" {
				next, _ := param.Value.Uint()
				add(next)
			}
		}
	}
	return epochs
}

// TestEveryPrefixOfAChangeWorks stops a change of plan after every single update: rounds under the old plan work until
// it is retired, rounds under the new one from the moment at which anybody is told of it.
func TestEveryPrefixOfAChangeWorks(t *testing.T) {
	t.Run("sync", func(t *testing.T) { everyPrefixWorks(t, Consistency{}, steered) })
	t.Run("quorum", func(t *testing.T) {
		everyPrefixWorks(t, Consistency{Mode: ModeQuorum, Quorum: 2, Wait: 10 * time.Millisecond}, quorums)
	})
}

// everyPrefixWorks is about changes between any two plans of a job.
func everyPrefixWorks(t *testing.T, consistency Consistency, rules map[string]policy.Static) {
	for _, from := range slices.Sorted(maps.Keys(rules)) {
		for _, to := range slices.Sorted(maps.Keys(rules)) {
			if from == to {
				continue
			}
			for _, epoch := range []uint16{1, 65535} {
				name := fmt.Sprintf("%s to %s from epoch %d", from, to, epoch)
				in := newIntent(t, testConfig())
				rule := rules[from]
				j, err := in.create(JobSpec{Name: "train", Ranks: 4, MaxElems: 1000, Policy: &rule, Consistency: consistency})
				if err != nil {
					t.Fatal(err)
				}
				j.epoch = epoch
				in.joinAll(j)
				w := &world{make(map[string]p4rt.Entity), make(map[planKey]serverPlan)}
				have := newObjects()
				apply := func(check func() error) (updates int) {
					want := desiredJob(in, j)
					for _, s := range diff(have, want) {
						w.walk([]step{s}, func() {
							updates++
							if err := check(); err != nil {
								t.Errorf("%s, stage %v, update %d: %v", name, j.change.stage, updates, err)
							}
						})
						s.done(have, want)
					}
					return updates
				}
				apply(func() error { return nil })

				d, same, err := in.replan(j, rules[to], 4)
				if err != nil || same {
					t.Fatalf("%s: %v, %v", name, same, err)
				}
				ch, err := in.beginChange(j, d, 4)
				if err != nil {
					t.Fatal(err)
				}
				if ch.to.epoch == 0 || ch.to.epoch%2 == ch.from.epoch%2 {
					t.Errorf("%s: epochs %d and %d share a half of the lease", name, ch.from.epoch, ch.to.epoch)
				}
				apply(func() error {
					if told := w.announces(ch.from, j.id); len(told) != 0 {
						return fmt.Errorf("epoch %v is announced already", told)
					}
					return w.works(in, j, ch.from)
				})
				ch.stage = stageArmed
				if n := apply(func() error {
					return errors.Join(w.works(in, j, ch.from), w.works(in, j, ch.to))
				}); n != 1 {
					t.Errorf("%s: arming takes %d updates, want 1", name, n)
				}
				if told := w.announces(ch.from, j.id); !slices.Equal(told, []uint64{uint64(ch.to.epoch)}) {
					t.Errorf("%s: %v is announced, want %d", name, told, ch.to.epoch)
				}

				// A device that comes back empty in the middle gets both plans, and tells of the new one last.
				for _, lost := range []string{"switch", "s0", "s1"} {
					forget(w, have, lost)
					apply(func() error {
						told := len(w.announces(ch.from, j.id)) > 0 && w.has(j.id, ch.from)
						if !told || lost != "switch" && len(w.plans) < len(have.plans) { // a server still lacks a plan that it had
							return nil
						}
						return errors.Join(w.works(in, j, ch.from), w.works(in, j, ch.to))
					})
					if told := w.announces(ch.from, j.id); !slices.Equal(told, []uint64{uint64(ch.to.epoch)}) {
						t.Errorf("%s: after %s was lost %v is announced, want %d", name, lost, told, ch.to.epoch)
					}
				}

				j.retire()
				apply(func() error { return w.works(in, j, ch.to) })
				j.change = nil
				want := desiredJob(in, j)
				if !maps.EqualFunc(w.entities, entitiesOf(want), p4rt.Equal) || !maps.Equal(w.plans, want.plans) {
					t.Errorf("%s: at the end there is more or less than the new plan: %v %v", name, w.entities, w.plans)
				}
			}
		}
	}
}

// forget empties a device, as far as the world and the controller know.
func forget(w *world, have objects, device string) {
	if device == "switch" {
		clear(w.entities)
		clear(have.entities)
	}
	for key, p := range have.plans {
		if key.server == device {
			delete(w.plans, key)
			p.doubt = true
			have.plans[key] = p
		}
	}
}

func TestNextEpoch(t *testing.T) {
	for epoch, want := range map[uint16]uint16{1: 2, 2: 3, 65534: 65535, 65535: 2} {
		if got := nextEpoch(epoch); got != want {
			t.Errorf("after epoch %d comes %d, want %d", epoch, got, want)
		}
	}
}

// report tells that a rank has begun a round under an epoch.
func (k *rank) report(id, epoch uint32) error {
	_, err := k.room.client.Report(k.room.context(), &api.ReportRequest{Job: k.job, Rank: k.n, Id: id, Epoch: epoch})
	return err
}

func apiPolicy(rule policy.Static) *api.Policy {
	p := &api.Policy{Rule: rule.Rule, Mode: string(rule.Mode), Servers: rule.Servers, Pool: uint32(rule.Pool)}
	for _, r := range rule.Steer {
		p.Steer = append(p.Steer, uint32(r))
	}
	p.Quorum = uint32(rule.Quorum)
	if rule.Wait != nil {
		p.WaitUs = new(microsOf(*rule.Wait))
	}
	return p
}

func (r *room) steer(name string, rule policy.Static) (*api.Job, error) {
	return r.client.Steer(r.context(), &api.SteerRequest{Job: name, Policy: apiPolicy(rule)})
}

// installed compares the devices with what the controller's intent says.
func (r *room) installed() {
	r.t.Helper()
	r.c.mu.Lock()
	want := entitiesOf(r.c.base)
	plans := make(map[planKey]serverPlan)
	for _, j := range r.c.intent.jobs {
		o := desiredJob(&r.c.intent, j)
		maps.Copy(want, entitiesOf(o))
		maps.Copy(plans, o.plans)
	}
	r.c.mu.Unlock()
	if got := r.sw.Entities(); !maps.EqualFunc(got, want, p4rt.Equal) {
		r.t.Errorf("the switch has %v, want %v", got, want)
	}
	got := make(map[planKey]serverPlan)
	for _, a := range r.agents {
		a.mu.Lock()
		for key, p := range a.plans {
			got[key] = serverPlan{
				ranks: p.Ranks, chunks: p.Chunks, rounds: p.Rounds, next: uint16(p.NextEpoch),
				quorum: p.Quorum, waitUS: p.WaitUs, async: p.Async, staleness: p.Staleness,
			}
		}
		a.mu.Unlock()
	}
	if !maps.Equal(got, plans) {
		r.t.Errorf("the servers have %v, want %v", got, plans)
	}
}

// TestSteer changes the plan of a running job through every mode. Each change waits for the slowest rank.
func TestSteer(t *testing.T) {
	r := newRoom(t, testConfig(), nil)
	r.ready()
	job := r.create("train", 4, hybridPolicy())
	ranks, _ := r.joinAll("train", 4)
	epoch := uint32(1)
	for _, name := range []string{"switch", "server", "one server", "other rank", "hybrid", "switch"} {
		rule := steered[name]
		got, err := r.steer("train", rule)
		if err != nil {
			t.Fatalf("to %s: %v", name, err)
		}
		ch := got.Change
		if got.Epoch != epoch || ch == nil || ch.Epoch != epoch+1 || ch.Behind != 0b1111 ||
			ch.WaitsFor != fmt.Sprintf("ranks 0-3 to finish the last round of epoch %d", epoch) {
			t.Errorf("to %s: job is %v", name, got)
		}
		r.installed()
		if _, err := r.steer("train", steered["server"]); status.Code(err) != codes.FailedPrecondition ||
			!strings.Contains(err.Error(), "its plan is changing from epoch") {
			t.Errorf("second change during the first: %v", err)
		}
		for _, k := range ranks[1:] {
			if err := k.report(job.Id, epoch+1); err != nil {
				t.Fatal(err)
			}
		}
		if j := r.job("train"); j.Change == nil || j.Change.Behind != 1 || j.Change.WaitsFor != fmt.Sprintf("rank 0 to finish the last round of epoch %d", epoch) {
			t.Errorf("to %s: with rank 0 behind the job is %v", name, j)
		}
		if err := ranks[0].report(job.Id, epoch+1); err != nil {
			t.Fatal(err)
		}
		if err := ranks[2].report(job.Id, epoch); err != nil && status.Code(err) != codes.InvalidArgument { // late, repeated
			t.Fatal(err)
		}
		r.until("the change is over", func() bool { return r.job("train").Change == nil })
		epoch++
		if j := r.job("train"); j.Epoch != epoch || j.State != "running" || j.Pool != 16 || j.Explanation != ch.Explanation ||
			!slices.Equal(j.Servers, ch.Servers) || j.Cohort != ch.Cohort {
			t.Errorf("to %s: job is %v, want what was announced: %v", name, j, ch)
		}
		r.installed()
	}
	if got, err := r.steer("train", steered["switch"]); err != nil || got.Change != nil || got.Epoch != epoch {
		t.Errorf("to the plan that it has: %v, %v", got, err)
	}

	// Who leaves has finished.
	if _, err := r.steer("train", steered["hybrid"]); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := ranks[0].leave(); err != nil {
			t.Error(err)
		}
	})
	for _, k := range ranks[1:3] {
		if err := k.report(job.Id, epoch+1); err != nil {
			t.Fatal(err)
		}
	}
	r.until("rank 3 alone is behind", func() bool { return r.job("train").Change.GetBehind() == 0b1000 })
	for _, k := range ranks[1:] {
		wg.Go(func() {
			if err := k.leave(); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	r.until("the change is over", func() bool { return r.job("train").Change == nil })
	r.installed()
	if _, err := r.steer("train", steered["server"]); status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "it is finished") {
		t.Errorf("of a finished job: %v", err)
	}
	// The next incarnation has the plan that was asked for last.
	if _, ready := r.joinAll("train", 4); ready.Epoch != 1 || ready.Job == job.Id {
		t.Errorf("ready is %v", ready)
	}
	if j := r.job("train"); j.Cohort != 0b0111 || !slices.Equal(j.Servers, []string{"s1", "s0"}) {
		t.Errorf("the next incarnation is %v", j)
	}
	r.installed()
}

func TestSteerRefuses(t *testing.T) {
	r := newRoom(t, testConfig(), nil)
	r.ready()
	job := r.create("train", 4, hybridPolicy())
	ranks, _ := r.joinAll("train", 4)
	for _, tt := range []struct {
		req  *api.SteerRequest
		code codes.Code
		want string
	}{
		{&api.SteerRequest{Job: "other", Policy: &api.Policy{}}, codes.NotFound, `there is no job "other"`},
		{&api.SteerRequest{Job: "train"}, codes.InvalidArgument, "policy: is missing"},
		{&api.SteerRequest{Job: "train", Policy: &api.Policy{Mode: "fast"}}, codes.InvalidArgument, `mode: "fast" is not a mode`},
		{&api.SteerRequest{Job: "train", Policy: &api.Policy{Mode: "hybrid", Steer: []uint32{4}}}, codes.InvalidArgument, "rank 4 is beyond"},
		{&api.SteerRequest{Job: "train", Policy: &api.Policy{Pool: 8}}, codes.InvalidArgument, "pool: 8, but the job was created with a pool of 16"},
	} {
		_, err := r.client.Steer(r.context(), tt.req)
		if words := status.Convert(err).Message(); status.Code(err) != tt.code || !strings.Contains(words, tt.want) || strings.Contains(words, "rpc error") {
			t.Errorf("%v\ngot  %v\nwant %s: %s", tt.req, err, tt.code, tt.want)
		}
	}
	for _, tt := range []struct {
		req  *api.ReportRequest
		code codes.Code
	}{
		{&api.ReportRequest{Job: "other", Id: job.Id, Epoch: 1}, codes.NotFound},
		{&api.ReportRequest{Job: "train", Id: job.Id + 1, Epoch: 1}, codes.FailedPrecondition},
		{&api.ReportRequest{Job: "train", Id: job.Id, Rank: 4, Epoch: 1}, codes.InvalidArgument},
		{&api.ReportRequest{Job: "train", Id: job.Id, Epoch: 2}, codes.InvalidArgument},
		{&api.ReportRequest{Job: "train", Id: job.Id, Epoch: 1}, codes.OK},
	} {
		if _, err := r.client.Report(r.context(), tt.req); status.Code(err) != tt.code {
			t.Errorf("%v: %v, want %s", tt.req, err, tt.code)
		}
	}

	// A server that cannot be reached: the job keeps its plan, and nothing of the other one stays.
	r.agents["s1"].stop()
	r.until("the server is missed", func() bool {
		reply, err := r.client.Status(r.context(), &api.StatusRequest{})
		return err == nil && !reply.Servers[1].Ready
	})
	if _, err := r.steer("train", steered["server"]); status.Code(err) != codes.Unavailable {
		t.Errorf("to a server that is gone: %v", err)
	}
	if j := r.job("train"); j.Change != nil || j.Epoch != 1 {
		t.Errorf("job is %v", j)
	}
	for key := range r.sw.Entities() {
		if strings.Contains(key, "hdr.x.epoch=2") {
			t.Errorf("the switch keeps %s", key)
		}
	}
	// Away from it works as far as the switch is concerned; the server forgets its plan when it is back.
	if _, err := r.steer("train", steered["other rank"]); err != nil {
		t.Fatal(err)
	}
	for _, k := range ranks {
		if err := k.report(job.Id, 2); err != nil {
			t.Fatal(err)
		}
	}
	r.until("the change is over", func() bool { return r.job("train").Change == nil })
	r.agents["s1"].start()
	r.ready()
	r.until("all is as wanted", func() bool { return len(r.agents["s1"].planKeys()) == 0 })
	r.installed()
}

// TestSteerBeforeTheStart: a job that waits for its ranks simply has another plan.
func TestSteerBeforeTheStart(t *testing.T) {
	r := newRoom(t, testConfig(), nil)
	r.ready()
	r.create("train", 4, hybridPolicy())
	for _, name := range []string{"one server", "switch", "server"} {
		job, err := r.steer("train", steered[name])
		if err != nil || job.Epoch != 1 || job.Change != nil || job.Pool != 16 {
			t.Errorf("to %s: %v, %v", name, job, err)
		}
		r.installed()
	}
	r.agents["s0"].mu.Lock()
	r.agents["s0"].slots = 0
	r.agents["s0"].mu.Unlock()
	if _, err := r.steer("train", steered["switch"]); err != nil {
		t.Fatal(err)
	}
	if _, err := r.steer("train", steered["hybrid"]); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("to a server without room: %v", err)
	}
	if j := r.job("train"); j.Error != "" || len(j.Servers) != 0 {
		t.Errorf("job is %v", j)
	}
	r.installed()
	if _, ready := r.joinAll("train", 4); ready.Epoch != 1 || ready.Pool != 16 {
		t.Errorf("ready is %v", ready)
	}
	r.installed()
}

// TestSwitchRestartsDuringAChange: the recovery takes the change to its end, under an epoch after it, whether or not
// ranks are in it already.
func TestSwitchRestartsDuringAChange(t *testing.T) {
	r := newRoom(t, testConfig(), nil)
	r.ready()
	job := r.create("train", 4, &api.Policy{Pool: 16})
	stations := r.serveAll(job, nil)
	for i, reported := range []int{0, 2, 4} {
		epoch := uint32(1 + 2*i)
		ch, err := r.steer("train", []policy.Static{steered["hybrid"], steered["server"], steered["switch"]}[i])
		if err != nil {
			t.Fatal(err)
		}
		restart := func() {
			r.sw.Stop()
			r.until("the switch is missed", func() bool {
				reply, err := r.client.Status(r.context(), &api.StatusRequest{})
				return err == nil && !reply.Switch.Ready
			})
		}
		restart()
		for _, s := range stations[:reported] {
			if err := s.report(job.Id, epoch+1); err != nil {
				t.Fatal(err)
			}
		}
		r.sw.Start()
		r.replies(stations)
		r.ready()
		r.until("the change is over", func() bool { return r.job("train").Change == nil })
		r.installed()
		if j := r.job("train"); j.Epoch != epoch+2 || j.State != "running" || j.Cohort != ch.Change.Cohort || !slices.Equal(j.Servers, ch.Change.Servers) {
			t.Errorf("job is %v, want what was announced: %v", j, ch)
		}
	}
}

// TestEachUpdateOfAChangeFails has the switch refuse each update of a change in turn. Before the new plan is announced
// the job keeps the old one; from then on the change goes on until it is done.
func TestEachUpdateOfAChangeFails(t *testing.T) {
	r := newRoom(t, testConfig(), nil)
	r.ready()
	job := r.create("train", 4, &api.Policy{Pool: 16})
	ranks, _ := r.joinAll("train", 4)
	var mu sync.Mutex
	fail, n := 0, 0
	r.sw.OnUpdate = func(u p4rt.Update) error {
		mu.Lock()
		defer mu.Unlock()
		if n++; n == fail {
			return status.Error(codes.Unknown, "no")
		}
		return nil
	}
	epoch := uint32(1)
	refused := 0
	for k := 1; ; k++ {
		mu.Lock()
		fail, n = k, 0
		mu.Unlock()
		rule := steered["hybrid"]
		if epoch%2 == 0 {
			rule = steered["switch"]
		}
		if _, err := r.steer("train", rule); err != nil {
			if j := r.job("train"); j.Change != nil || j.Epoch != epoch || j.Error != "" {
				t.Errorf("update %d refused: job is %v", k, j)
			}
			r.installed()
			refused++
			continue
		}
		for _, rank := range ranks {
			if err := rank.report(job.Id, epoch+1); err != nil {
				t.Fatal(err)
			}
		}
		mu.Lock()
		reached := n >= fail
		mu.Unlock()
		r.until("the change is over", func() bool {
			r.c.links.announce() // as any news of a device does
			return r.job("train").Change == nil
		})
		r.installed()
		epoch++
		mu.Lock()
		reached = reached || n >= fail
		mu.Unlock()
		if !reached {
			break // a whole change has fewer updates
		}
	}
	if refused < 8 || epoch < 6 {
		t.Errorf("%d changes were refused and %d done: too few to have met every update", refused, epoch)
	}
}

// TestChangeNeedsRoom: while a plan changes both plans must fit the switch's tables.
func TestChangeNeedsRoom(t *testing.T) {
	in := newIntent(t, testConfig())
	in.sizes[tableMember] = 7
	rule := steered["switch"]
	j, err := in.create(JobSpec{Name: "train", Ranks: 4, MaxElems: 1, Policy: &rule})
	if err != nil {
		t.Fatal(err)
	}
	d, _, err := in.replan(j, steered["hybrid"], 4)
	if err != nil {
		t.Fatal(err)
	}
	_, err = in.beginChange(j, d, 4)
	if want := "8 entries of table XaggIngress.member are needed and 7 are free; remove a job"; err == nil || err.Error() != want {
		t.Errorf("got  %v\nwant %s", err, want)
	}
	if j.change != nil || j.epoch != 1 {
		t.Errorf("the job changes nevertheless: %+v", j)
	}
	in.sizes[tableMember] = 8
	if _, err := in.beginChange(j, d, 4); err != nil {
		t.Error(err)
	}
}
