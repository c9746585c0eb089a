package controller

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/goccy/go-yaml"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"xagg/api"
	"xagg/policy"
	"xagg/policy/adapt"
	"xagg/policy/rules"
)

// filedRoom is a room whose controller has a configuration file.
func filedRoom(t *testing.T, cfg Config) *room {
	cfg.Hosts, cfg.Jobs = slices.Clone(cfg.Hosts), slices.Clone(cfg.Jobs)
	r := newRoom(t, cfg, nil)
	r.c.mu.Lock()
	r.c.file = File{Path: filepath.Join(t.TempDir(), "c.yaml"), State: cfg.State}
	r.c.mu.Unlock()
	r.write(cfg)
	r.ready()
	return r
}

// write writes the configuration file.
func (r *room) write(cfg Config) {
	r.t.Helper()
	text, err := yaml.Marshal(cfg)
	if err != nil {
		r.t.Fatal(err)
	}
	r.writeText(string(text))
}

func (r *room) writeText(text string) {
	r.t.Helper()
	if err := os.WriteFile(r.c.file.Path, []byte(text), 0o600); err != nil {
		r.t.Fatal(err)
	}
}

func (r *room) status() *api.StatusReply {
	r.t.Helper()
	reply, err := r.client.Status(r.context(), &api.StatusRequest{})
	if err != nil {
		r.t.Fatal(err)
	}
	return reply
}

// reload has the file read again, and returns the changes as "field outcome"; it is to be taken.
func (r *room) reload(dry bool) (changes []string) {
	r.t.Helper()
	reply, err := r.client.ReloadConfig(r.context(), &api.ReloadConfigRequest{DryRun: dry})
	if err != nil || reply.Error != "" {
		r.t.Fatalf("reload: %v, %q", err, reply.GetError())
	}
	for _, c := range reply.Changes {
		if c.Note == "" {
			r.t.Errorf("%s %s without a reason", c.Field, c.Outcome)
		}
		changes = append(changes, c.Field+" "+c.Outcome)
	}
	return changes
}

func (r *room) reloads(want ...string) {
	r.t.Helper()
	if got := r.reload(true); !slices.Equal(got, want) {
		r.t.Errorf("dry, the changes are %q, want %q", got, want)
	}
	if got := r.reload(false); !slices.Equal(got, want) {
		r.t.Errorf("the changes are %q, want %q", got, want)
	}
}

func ruled(name string) *adapt.Config {
	a := adapt.DefaultConfig()
	a.Rule = name
	return &a
}

// TestReloadBadFile: a file that is wrong in any way, or cannot be carried out, changes nothing at all; what it is is in the
// answer, the status, the log and the metrics, until a file is taken again.
func TestReloadBadFile(t *testing.T) {
	cfg := keptConfig(t)
	cfg.Jobs = []JobSpec{{Name: "train", Ranks: 4, MaxElems: 1000, Adapt: ruled("outlier")}, {Name: "waits", Ranks: 2, MaxElems: 10}}
	r := filedRoom(t, cfg)
	r.joinAll("train", 4)
	good, err := os.ReadFile(r.c.file.Path)
	if err != nil {
		t.Fatal(err)
	}
	r.changes()
	before, state := r.status(), r.stateFile()
	began := r.metric("xagg_config_last_reload_success_timestamp_seconds").GetGauge().GetValue()
	if before.Config.Error != "" || before.Config.SuccessTime != began || r.metric("xagg_config_last_reload_successful").GetGauge().GetValue() != 1 {
		t.Errorf("before any reload the status is %v, of %v", before.Config, began)
	}

	bad := map[string][2]string{ // text and what is said of it, behind the file's name
		"no slots": {strings.Replace(string(good), "jobs:\n", "jobs:\n- {name: huge, ranks: 2, max_elems: 10, policy: {pool: 1048576}}\n", 1), "slots"},
		"new server": {strings.NewReplacer("name: s1\n", "name: s9\n", "jobs:\n", "jobs:\n- {name: far, ranks: 2, max_elems: 10, policy: {mode: server, servers: [s9]}}\n").
			Replace(string(good)), "restart the controller"},
		"not YAML": {"jobs: [", ":1:"},
		"empty":    {"", "is missing"},
	}
	files, err := filepath.Glob("testdata/*.bad.yaml")
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	for _, file := range files {
		src, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		first, _, _ := strings.Cut(string(src), "\n")
		bad[filepath.Base(file)] = [2]string{string(src), strings.TrimPrefix(first, "# ")}
	}
	for name, b := range bad {
		if b[0] == string(good) {
			t.Fatalf("%s: the file is the good one", name)
		}
		r.writeText(b[0])
		was := r.status().Config.Error
		dry, err := r.client.ReloadConfig(r.context(), &api.ReloadConfigRequest{DryRun: true})
		if err != nil {
			t.Fatal(err)
		}
		if got := r.status().Config.Error; got != was {
			t.Errorf("%s: after a dry run the status is %q, was %q", name, got, was)
		}
		reply, err := r.client.ReloadConfig(r.context(), &api.ReloadConfigRequest{})
		if err != nil {
			t.Fatal(err)
		}
		if !strings.HasPrefix(reply.Error, r.c.file.Path) || !strings.Contains(reply.Error, b[1]) || dry.Error != reply.Error || len(reply.Changes) != 0 {
			t.Errorf("%s: the answer is %v, dry %v; want %s", name, reply, dry, b[1])
		}
		now := r.status()
		if now.Config.Error != reply.Error || now.Config.SuccessTime != began {
			t.Errorf("%s: the status is %v", name, now.Config)
		}
		if log := r.life.logged(); !strings.Contains(log[len(log)-1], "not taken") {
			t.Errorf("%s: the log ends with %s", name, log[len(log)-1])
		}
		for i, j := range before.Jobs {
			if now.Jobs[i].String() != j.String() {
				t.Errorf("%s: job is %v, was %v", name, now.Jobs[i], j)
			}
		}
		if len(now.Jobs) != len(before.Jobs) || r.stateFile() != state {
			t.Errorf("%s: jobs are %v; the state was\n%s\nis\n%s", name, now.Jobs, state, r.stateFile())
		}
	}
	if changes := r.changes(); len(changes) != 0 {
		t.Errorf("the devices have changed: %q", changes)
	}
	if m := r.metric("xagg_config_last_reload_successful"); m.GetGauge().GetValue() != 0 {
		t.Errorf("the file is bad, and the metric %v", m)
	}
	if err := os.Remove(r.c.file.Path); err != nil {
		t.Fatal(err)
	}
	if reply, err := r.client.ReloadConfig(r.context(), &api.ReloadConfigRequest{}); err != nil || !strings.Contains(reply.Error, "no such file") {
		t.Errorf("a file that is gone: %v, %v", reply, err)
	}
	r.writeText(string(good))
	r.reloads()
	if now := r.status().Config; now.Error != "" || now.SuccessTime <= began {
		t.Errorf("a good file was taken, and the status is %v", now)
	}
	if m := r.metric("xagg_config_last_reload_successful"); m.GetGauge().GetValue() != 1 {
		t.Errorf("the file is good, and the metric %v", m)
	}
	if changes := r.changes(); len(changes) != 0 {
		t.Errorf("nothing is otherwise, and the devices have changed: %q", changes)
	}
}

// stateFile returns the state as it is kept.
func (r *room) stateFile() string {
	r.t.Helper()
	src, err := os.ReadFile(r.c.cfg.State)
	if err != nil {
		r.t.Fatal(err)
	}
	return string(src)
}

// TestReloadWithoutFile: there is nothing to read again.
func TestReloadWithoutFile(t *testing.T) {
	r := newRoom(t, testConfig(), nil)
	if _, err := r.client.ReloadConfig(r.context(), &api.ReloadConfigRequest{}); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("got %v", err)
	}
	if got := r.status().Config; got.File != "" || got.Error != "" {
		t.Errorf("the status is %v", got)
	}
}

// TestReloadJobs: new jobs come, those that have not begun go or are as they are configured now, and those that run go on.
func TestReloadJobs(t *testing.T) {
	cfg := keptConfig(t)
	cfg.Jobs = []JobSpec{
		{Name: "runs", Ranks: 2, MaxElems: 10}, {Name: "gone-runs", Ranks: 1, MaxElems: 10}, {Name: "gone", Ranks: 2, MaxElems: 10, Policy: &hybrid},
		{Name: "waits", Ranks: 2, MaxElems: 10}, {Name: "over", Ranks: 1, MaxElems: 10}, {Name: "same", Ranks: 2, MaxElems: 10},
	}
	cfg.Jobs[2].Ranks = 4
	r := filedRoom(t, cfg)
	r.create("by-hand", 2, nil)
	r.joinAll("runs", 2)
	r.joinAll("gone-runs", 1)
	over, _ := r.joinAll("over", 1)
	r.leaveAll(over)
	lone := r.join("gone", 0, "d")
	ids := make(map[string]uint32)
	for _, j := range r.status().Jobs {
		ids[j.Name] = j.Id
	}
	r.changes()

	cfg.Jobs = []JobSpec{
		{Name: "runs", Ranks: 3, MaxElems: 20, Depth: 2, Consistency: Consistency{Mode: ModeQuorum, Quorum: 2}, Policy: &policy.Static{Mode: policy.ModeServer}},
		{Name: "waits", Ranks: 3, MaxElems: 10}, {Name: "over", Ranks: 2, MaxElems: 10}, {Name: "same", Ranks: 2, MaxElems: 10},
		{Name: "new", Ranks: 4, MaxElems: 10, Policy: &hybrid},
	}
	cfg.Listen = "127.0.0.1:19999"
	cfg.Hosts[0].Name = "other"
	r.write(cfg)
	r.reloads("listen restart", "hosts restart", "jobs.gone-runs kept", "jobs.gone removed",
		"jobs.runs.ranks restart", "jobs.runs.max_elems restart", "jobs.runs.consistency restart", "jobs.runs.depth restart", "jobs.runs.policy changed",
		"jobs.waits replanned", "jobs.over replanned", "jobs.new created")
	if abort := lone.aborted(); !strings.Contains(abort.Reason, "configuration no more") {
		t.Errorf("the rank of a job that was removed is told %q", abort.Reason)
	}
	r.until("the plan has changed", func() bool { return r.job("runs").Change.GetEpoch() == 2 })
	got := make(map[string]*api.Job)
	for _, j := range r.status().Jobs {
		got[j.Name] = j
	}
	for name, want := range map[string]struct {
		ranks uint32
		same  bool
		state string
	}{
		"runs": {2, true, "running"}, "gone-runs": {1, true, "running"}, "by-hand": {2, true, "waiting"}, "same": {2, true, "waiting"},
		"waits": {3, false, "waiting"}, "over": {2, false, "waiting"}, "new": {4, false, "waiting"},
	} {
		j := got[name]
		if j.GetRanks() != want.ranks || (j.GetId() == ids[name]) != want.same || j.GetState() != want.state || j.GetError() != "" {
			t.Errorf("job %s is %v, want %+v", name, j, want)
		}
	}
	if got["gone"] != nil || len(got) != 7 {
		t.Errorf("jobs are %v", got)
	}
	if !strings.Contains(got["runs"].Note, "reload the configuration") {
		t.Errorf("the note of a job that is configured otherwise is %q", got["runs"].Note)
	}
	var restart []string
	for _, c := range r.status().Config.Restart {
		restart = append(restart, c.Field)
	}
	if want := []string{"listen", "hosts", "jobs.runs.ranks", "jobs.runs.max_elems", "jobs.runs.consistency", "jobs.runs.depth"}; !slices.Equal(restart, want) {
		t.Errorf("a restart is needed for %q, want %q", restart, want)
	}
	r.joinAll("new", 4)
	if _, err := r.client.RemoveJob(r.context(), &api.RemoveJobRequest{Name: "runs"}); err != nil {
		t.Fatal(err)
	}
	cfg.Listen, cfg.Hosts[0].Name = DefaultListen, "w0"
	r.write(cfg)
	r.reloads("jobs.runs created")
	if j := r.job("runs"); j.Ranks != 3 || j.Note != "" {
		t.Errorf("the job is %v", j)
	}
}

// TestReloadPlans: another policy, of a job or of all, has plans change while jobs run; another adapt has them follow something
// else. What was told by hand stays unless the file has changed.
func TestReloadPlans(t *testing.T) {
	cfg := keptConfig(t)
	cfg.Jobs = []JobSpec{
		{Name: "own", Ranks: 4, MaxElems: 1000, Policy: &policy.Static{Pool: 16}}, {Name: "all", Ranks: 4, MaxElems: 1000},
		{Name: "follows", Ranks: 4, MaxElems: 1000, Adapt: ruled("outlier")}, {Name: "joined", Ranks: 3, MaxElems: 10},
	}
	r := filedRoom(t, cfg)
	r.create("by-hand", 2, nil)
	for _, name := range []string{"own", "all", "follows"} {
		r.joinAll(name, 4)
	}
	waiting := r.join("joined", 0, "d")
	adapts := func(job string) string {
		t.Helper()
		reply, err := r.client.Explain(r.context(), &api.ExplainRequest{Job: job})
		if err != nil {
			t.Fatal(err)
		}
		rule, _, _ := strings.Cut(reply.GetAdapt(), "\n")
		return rule
	}
	if _, err := r.client.Adapt(r.context(), &api.AdaptRequest{Job: "own", Adapt: "rule: bandwidth\n"}); err != nil {
		t.Fatal(err)
	}
	r.reloads()
	if got := adapts("own"); got != "rule: bandwidth" {
		t.Errorf("nothing has changed in the file, and the job follows %q", got)
	}

	cfg.Policy = policy.Static{Mode: policy.ModeHybrid, Steer: []int{1}}
	cfg.Jobs = slices.Clone(cfg.Jobs)
	cfg.Jobs[0].Policy = &policy.Static{Mode: policy.ModeHybrid, Steer: []int{3}, Pool: 8}
	cfg.Jobs[2].Adapt = ruled("loss")
	r.write(cfg)
	r.reloads("policy changed", "jobs.own.policy.pool restart", "jobs.own.policy changed", "jobs.all.policy changed", "jobs.follows.policy changed",
		"jobs.follows.adapt changed", "jobs.joined.policy changed")
	for name, cohort := range map[string]uint64{"own": 0b0111, "all": 0b1101, "follows": 0b1101} {
		if j := r.job(name); j.State != "running" || j.Change.GetCohort() != cohort {
			t.Errorf("job is %v, want a change to %b", j, cohort)
		}
	}
	if j := r.job("joined"); j.Cohort != 0b101 || j.Joined != 0b01 || j.Change != nil {
		t.Errorf("a job that a rank waits in is %v", j)
	}
	if j := r.job("by-hand"); j.Cohort != 0b11 || !strings.Contains(j.Note, "another policy") {
		t.Errorf("a job that was created by hand is %v", j)
	}
	if own, follows := adapts("own"), adapts("follows"); own != "rule: bandwidth" || follows != "rule: loss" {
		t.Errorf("jobs follow %q and %q", own, follows)
	}

	// While plans change others cannot be taken: they are told, and the status says so until a reload that can.
	cfg.Jobs[0].Policy = &policy.Static{Mode: policy.ModeServer, Pool: 16}
	cfg.Jobs[2].Adapt = nil
	r.write(cfg)
	r.reloads("jobs.own.policy failed", "jobs.follows.adapt changed")
	if j := r.job("own"); j.Change.GetCohort() != 0b0111 || !strings.Contains(j.Note, "another policy") {
		t.Errorf("job is %v", j)
	}
	if got := adapts("follows"); got != "" {
		t.Errorf("the job follows %q, want nothing", got)
	}
	for n := range uint32(4) {
		own := r.job("own")
		if _, err := r.client.Report(r.context(), &api.ReportRequest{Job: "own", Rank: n, Id: own.Id, Epoch: own.Change.GetEpoch()}); err != nil {
			t.Fatal(err)
		}
	}
	r.until("the plan has changed", func() bool { return r.job("own").Change == nil })
	r.reloads("jobs.own.policy changed")
	if j := r.job("own"); j.Change.GetCohort() != 0 {
		t.Errorf("job is %v, want a change to servers alone", j)
	}

	// What does not fit a job that runs is refused as a whole.
	for _, bad := range []func(){
		func() { cfg.Jobs[1].Policy = &policy.Static{Mode: policy.ModeHybrid, Steer: []int{7}} },
		func() {
			cfg.Jobs[1].Policy, cfg.Jobs[1].Adapt = nil, ruled("outlier")
			cfg.Jobs[1].Adapt.Pin = map[int]adapt.Place{9: adapt.Server}
		},
		func() { cfg.Jobs[1].Adapt = nil; cfg.Jobs[0].Adapt = ruled("outlier") },
	} {
		bad()
		cfg.Jobs[3].Name = "elsewhere"
		r.write(cfg)
		reply, err := r.client.ReloadConfig(r.context(), &api.ReloadConfigRequest{})
		if err != nil || !strings.Contains(reply.Error, ": jobs[") || r.status().Config.Error != reply.Error {
			t.Errorf("got %v, %v", reply, err)
		}
		if j := r.job("joined"); j.Joined != 0b01 {
			t.Errorf("a bad file has changed another job, which is %v", j)
		}
	}
	waiting.cancel()
}

// TestReloadShares: weights and the reserve count for quotas from the reload on, and a job that runs keeps its pool.
func TestReloadShares(t *testing.T) {
	cfg := keptConfig(t)
	cfg.Reserve = 0.5
	cfg.Jobs = []JobSpec{{Name: "one", Ranks: 4, MaxElems: 1000}, {Name: "other", Ranks: 4, MaxElems: 1000}}
	r := filedRoom(t, cfg)
	r.joinAll("one", 4)
	before := r.job("one")
	slots := r.status().Switch.Slots
	quotas := func(one, other float64) {
		t.Helper()
		for name, share := range map[string]float64{"one": one, "other": other} {
			if j := r.job(name); j.QuotaSlots != uint32(share*float64(slots)) || j.Pool != before.Pool {
				t.Errorf("job is %v, want a quota of %v of %d slots and the pool %d", j, share, slots, before.Pool)
			}
		}
	}
	quotas(0.25, 0.25)
	cfg.Jobs[0].Weight = 3
	r.write(cfg)
	r.reloads("jobs.one.weight changed")
	quotas(0.375, 0.125)
	cfg.Reserve = 0
	r.write(cfg)
	r.reloads("reserve changed")
	quotas(0.75, 0.25)
	if j := r.job("one"); j.Id != before.Id || j.State != "running" || j.Weight != 3 || j.Change != nil {
		t.Errorf("job is %v, was %v", j, before)
	}
	r.reloads()
}

// TestReloadAdapt: what policies leave out is as in the configuration's, for jobs of the file at once and for those that are created
// from then on.
func TestReloadAdapt(t *testing.T) {
	cfg := keptConfig(t)
	r := filedRoom(t, cfg)
	text, err := yaml.Marshal(cfg)
	if err != nil {
		t.Fatal(err)
	}
	head, _, _ := strings.Cut(string(text), "\njobs:")
	head, _, _ = strings.Cut(head, "\nadapt:")
	write := func(adapt string) {
		t.Helper()
		r.writeText(head + `
jobs:
- {name: all, ranks: 4, max_elems: 100, policy: {mode: switch}, adapt: {}}
- {name: own, ranks: 4, max_elems: 100, policy: {mode: switch}, adapt: {rule: loss, window: 4}}
- {name: stays, ranks: 4, max_elems: 100, policy: {mode: switch}}
adapt: ` + adapt)
	}
	follow := func(job string, want ...string) {
		t.Helper()
		reply, err := r.client.Explain(r.context(), &api.ExplainRequest{Job: job})
		if err != nil {
			t.Fatal(err)
		}
		for _, line := range want {
			if !strings.Contains("\n"+reply.Adapt, "\n"+line+"\n") {
				t.Errorf("job %s follows\n%swant %s", job, reply.Adapt, line)
			}
		}
		if len(want) == 0 && reply.Adapt != "" {
			t.Errorf("job %s follows\n%s", job, reply.Adapt)
		}
	}
	write("{rule: outlier, window: 16, dwell: 3s}\n")
	r.reloads("adapt changed", "jobs.all created", "jobs.own created", "jobs.stays created")
	follow("all", "rule: outlier", "window: 16", "dwell: 3s")
	follow("own", "rule: loss", "window: 4", "dwell: 3s")
	follow("stays")
	made := func(name, adapt string) {
		t.Helper()
		if _, err := r.client.CreateJob(r.context(), &api.CreateJobRequest{Name: name, Ranks: 4, MaxElems: 100, Adapt: adapt}); err != nil {
			t.Fatal(err)
		}
	}
	made("made", "dwell: 2s")
	follow("made", "rule: outlier", "window: 16", "dwell: 2s")

	write("{rule: late, moves: 5}\n")
	r.reloads("adapt changed", "jobs.all.adapt changed", "jobs.own.adapt changed")
	follow("all", "rule: late", "window: 8", "moves: 5", "dwell: 1s")
	follow("own", "rule: loss", "window: 4", "moves: 5", "dwell: 1s")
	follow("stays")
	follow("made", "rule: outlier", "window: 16", "dwell: 2s") // by hand, it keeps what it was told
	if _, err := r.client.Adapt(r.context(), &api.AdaptRequest{Job: "made", Adapt: "{}"}); err != nil {
		t.Fatal(err)
	}
	follow("made", "rule: late", "moves: 5", "dwell: 1s")

	write("{rule: late, moves: 5000}\n")
	reply, err := r.client.ReloadConfig(r.context(), &api.ReloadConfigRequest{})
	if err != nil || !strings.Contains(reply.Error, "adapt.moves: 5000 a minute") {
		t.Errorf("got %v, %v", reply, err)
	}
	follow("all", "rule: late", "moves: 5")
	made("later", "{}")
	follow("later", "rule: late", "moves: 5")
}

// TestPolicyCannotDecide: a rule that cannot be evaluated over what ranks report leaves the plan as it is, and the status says
// why; reports with gaps, and of ranks that are silent, decide nothing.
func TestPolicyCannotDecide(t *testing.T) {
	cfg := keptConfig(t)
	own := adapt.DefaultConfig()
	own.Rule, own.Define = "", &rules.Spec{
		Name: "beyond", Score: "servers[7].memory_free", Enter: rules.Enter{Above: 0.5, For: 1, Of: 1}, Leave: rules.Leave{Below: 0.5, For: 1, Of: 1},
	}
	cfg.Jobs = []JobSpec{{Name: "train", Ranks: 4, MaxElems: 1000, Adapt: &own}}
	r := filedRoom(t, cfg)
	r.joinAll("train", 4)
	job := r.job("train")
	report := func(rank, round uint32) {
		t.Helper()
		_, err := r.client.Report(r.context(), &api.ReportRequest{Job: "train", Rank: rank, Id: job.Id, Rounds: []*api.Round{{
			Round: round, ComputeUs: 1000, CommUs: 1000, Chunks: 4, Packets: 4,
		}}})
		if err != nil {
			t.Fatal(err)
		}
	}
	for round := range uint32(8) { // rank 3 is silent
		for rank := range uint32(3) {
			report(rank, round)
		}
	}
	if j := r.job("train"); j.Note != "" || j.Change != nil {
		t.Errorf("a rank has reported nothing, and the job is %v", j)
	}
	for _, round := range []uint32{8, 9, 17, 16} { // a gap, and back
		for rank := range uint32(4) {
			report(rank, round)
		}
	}
	j := r.job("train")
	if !strings.Contains(j.Note, "its policy cannot decide, and the plan stays: ") || j.Cohort != 0b1111 || j.Change != nil || j.State != "running" {
		t.Errorf("job is %v", j)
	}

	// A rule that can is taken at the next reload, and the note is gone with the one that could not.
	cfg.Jobs[0].Adapt = ruled("outlier")
	r.write(cfg)
	r.reloads("jobs.train.adapt changed")
	if j := r.job("train"); j.Note != "" {
		t.Errorf("the note is still %q", j.Note)
	}
}
