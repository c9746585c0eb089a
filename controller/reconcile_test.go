package controller

import (
	"flag"
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

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"xagg/controller/p4rt"
	"xagg/policy"
)

// one has plans begin with epoch 1, which tests can count on from there.
func one() uint16 { return 1 }

func fromEpochOne(c *Controller) { c.intent.firstEpoch = one }

// grace is how long ranks may take to come back, where a test does not want to wait.
var grace time.Duration

func impatient(c *Controller) {
	if grace != 0 {
		c.grace = grace
	}
}

func newIntent(t interface{ Fatal(...any) }, cfg Config) *intent {
	p, err := testProgram()
	if err != nil {
		t.Fatal(err)
	}
	return &intent{cfg: &cfg, slots: p.slots, sizes: p.TableSizes(), nextID: 7, firstEpoch: one, jobs: make(map[string]*job)}
}

type slottedProgram struct {
	*p4rt.Program
	slots int
}

var testProgram = sync.OnceValues(func() (slottedProgram, error) {
	program, slots, err := loadProgram()
	return slottedProgram{program, slots}, err
})

// join fills a job's members: rank r is on host r modulo the hosts.
func (in *intent) joinAll(j *job) {
	j.members = nil
	for rank := range j.spec.Ranks {
		j.members = append(j.members, member{in.cfg.Hosts[rank%len(in.cfg.Hosts)], uint16(19860 + rank)})
	}
}

func TestFirstFit(t *testing.T) {
	for _, tt := range []struct {
		taken        []span
		lo, hi, size int
		want         int // -1: none
	}{
		{nil, 0, 10, 10, 0},
		{nil, 0, 10, 11, -1},
		{nil, 2, 10, 3, 2},
		{[]span{{0, 4}}, 0, 10, 4, 4},
		{[]span{{4, 4}, {0, 2}}, 0, 10, 2, 2},
		{[]span{{4, 4}, {0, 2}}, 0, 10, 3, -1},
		{[]span{{4, 4}, {0, 2}}, 0, 11, 3, 8},
		{[]span{{0, 4}, {4, 6}}, 0, 10, 1, -1},
	} {
		got, ok := firstFit(tt.taken, tt.lo, tt.hi, tt.size)
		if ok != (tt.want >= 0) || ok && got != (span{tt.want, tt.size}) {
			t.Errorf("%+v: got %v, %v", tt, got, ok)
		}
	}
}

// TestReservations creates and removes jobs at random: what they hold never overlaps, and what is refused does not
// fit.
func TestReservations(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		in := newIntent(t, testConfig())
		seen := make(map[uint16]bool)
		for i := range rapid.IntRange(1, 60).Draw(t, "steps") {
			if len(in.jobs) > 0 && rapid.IntRange(0, 2).Draw(t, "remove") == 0 {
				names := slices.Sorted(maps.Keys(in.jobs))
				delete(in.jobs, rapid.SampledFrom(names).Draw(t, "name"))
				continue
			}
			pool := 1 << rapid.IntRange(0, 9).Draw(t, "pool")
			free := in.slotsFree()
			j, err := in.create(JobSpec{
				Name: fmt.Sprint("j", i), Ranks: rapid.IntRange(1, 64).Draw(t, "ranks"), MaxElems: 1, Policy: &policy.Static{Pool: pool},
			})
			if err != nil {
				largest := 0
				for size := free; size >= 1 && largest == 0; size-- {
					if _, ok := firstFit(in.taken(func(j *job) span { return j.lease }), 0, in.slots, size); ok {
						largest = size
					}
				}
				if largest >= 4*pool {
					t.Fatalf("refused a pool of %d with %d slots in a row free: %v", pool, largest, err)
				}
				continue
			}
			if seen[j.id] {
				t.Fatalf("job id %d was in use before", j.id)
			}
			seen[j.id] = true
		}
		for _, of := range []func(*job) span{
			func(j *job) span { return j.lease }, func(j *job) span { return j.rids }, func(j *job) span { return j.groups },
		} {
			owner := make(map[int]string)
			for _, j := range in.sorted() {
				s := of(j)
				for n := s.base; n < s.base+s.size; n++ {
					if other, taken := owner[n]; taken {
						t.Fatalf("%d belongs to %s and %s", n, other, j.spec.Name)
					}
					owner[n] = j.spec.Name
				}
			}
		}
	})
}

func TestJobIDs(t *testing.T) {
	in := newIntent(t, testConfig())
	in.nextID = 65534
	var got []uint16
	for i := range 3 {
		j, err := in.create(JobSpec{Name: fmt.Sprint(i), Ranks: 2, MaxElems: 1, Policy: &policy.Static{Pool: 1}})
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, j.id)
	}
	if want := []uint16{65534, 65535, 1}; !slices.Equal(got, want) { // 0 is no id
		t.Errorf("got %v, want %v", got, want)
	}
	in.nextID = 65534 // as after 65,535 jobs
	in.renew(in.jobs["2"])
	if id := in.jobs["2"].id; id != 2 { // 65534, 65535 and 1 are alive
		t.Errorf("got %d, want 2", id)
	}
}

func TestCreateRefuses(t *testing.T) {
	cfg := testConfig()
	cfg.Policy.Pool = 512
	in := newIntent(t, cfg)
	spec := func(name string, change func(*JobSpec)) JobSpec {
		s := JobSpec{Name: name, Ranks: 4, MaxElems: 1000}
		if change != nil {
			change(&s)
		}
		return s
	}
	for _, s := range []JobSpec{spec("a", nil), spec("b", nil)} {
		if _, err := in.create(s); err != nil {
			t.Fatal(err)
		}
	}
	before := len(in.jobs)
	for _, tt := range []struct {
		spec JobSpec
		want string
	}{
		{spec("a", nil), `job "a" exists; remove it first, or choose another name`},
		{spec("c", nil), `2048 slots of the switch are needed and 0 are free, 2048 too few; choose a smaller pool than the 512 of job "c", or remove a job`},
		{spec("", nil), "name: is missing"},
		{spec("c", func(s *JobSpec) { s.Ranks = 0 }), "ranks: 0 is outside 1..64"},
		{spec("c", func(s *JobSpec) { s.MaxElems = 0 }), "max_elems: is missing; it is the number of lanes of the largest vector"},
		{spec("c", func(s *JobSpec) { s.Policy = &policy.Static{Mode: policy.ModeServer, Servers: []string{"s7"}} }),
			`servers[0]: no server "s7"; there are s0, s1`},
	} {
		if _, err := in.create(tt.spec); err == nil || err.Error() != tt.want {
			t.Errorf("got  %v\nwant %s", err, tt.want)
		}
	}
	if len(in.jobs) != before {
		t.Error("a refused job is there")
	}

	// Free slots that are scattered.
	in = newIntent(t, testConfig())
	for i, pool := range []int{256, 256, 256, 256} {
		if _, err := in.create(spec(fmt.Sprint(i), func(s *JobSpec) { s.Policy = &policy.Static{Pool: pool} })); err != nil {
			t.Fatal(err)
		}
	}
	delete(in.jobs, "0")
	delete(in.jobs, "2")
	_, err := in.create(spec("c", func(s *JobSpec) { s.Policy = &policy.Static{Pool: 512} }))
	if want := `2048 slots of the switch in a row are needed and 1024 are free, 1024 too few; the others that are free are scattered: ` +
		`choose a smaller pool than the 512 of job "c", or remove a job`; err == nil || err.Error() != want {
		t.Errorf("got  %v\nwant %s", err, want)
	}

	// Table sizes: the switch would say no more than UNKNOWN.
	in = newIntent(t, testConfig())
	in.sizes[tableMember] = 7
	if _, err := in.create(spec("a", nil)); err != nil {
		t.Fatal(err)
	}
	_, err = in.create(spec("b", nil))
	if want := "4 entries of table XaggIngress.member are needed and 3 are free; remove a job"; err == nil || err.Error() != want {
		t.Errorf("got  %v\nwant %s", err, want)
	}
}

func TestChunks(t *testing.T) {
	for elems, want := range map[uint32]uint32{1: 1, 255: 1, 256: 1, 257: 2, 512: 2, 513: 3, 1<<32 - 1: 1 << 24} {
		if got := (&job{spec: JobSpec{MaxElems: elems}}).chunks(); got != want {
			t.Errorf("%d lanes are %d chunks, want %d", elems, got, want)
		}
	}
}

// text writes objects for people, in their order.
func (o objects) text() string {
	var b strings.Builder
	for _, s := range diff(newObjects(), o) {
		if s.server != "" {
			fmt.Fprintf(&b, "server %s: job %d epoch %d ranks %#x chunks %d rounds %d\n", s.server, s.key.job, s.key.epoch,
				s.plan.ranks, s.plan.chunks, s.plan.rounds)
		}
		for _, e := range s.entities {
			fmt.Fprintln(&b, e)
		}
	}
	return b.String()
}

// TestDesired compares what jobs of each mode need with files in testdata, and has the real program encode it.
func TestDesired(t *testing.T) {
	program, _, err := loadProgram()
	if err != nil {
		t.Fatal(err)
	}
	for name, rule := range map[string]policy.Static{
		"switch": {Mode: policy.ModeSwitch, Pool: 16},
		"server": {Mode: policy.ModeServer, Pool: 16},
		"hybrid": hybrid,
	} {
		in := newIntent(t, testConfig())
		if _, err := in.create(JobSpec{Name: "first", Ranks: 2, MaxElems: 1}); err != nil {
			t.Fatal(err)
		}
		j, err := in.create(JobSpec{Name: "train", Ranks: 4, MaxElems: 1000, Policy: &rule})
		if err != nil {
			t.Fatal(err)
		}
		if before := desiredJob(in, j); len(before.entities) != 0 || len(before.plans) != len(j.decision.Servers) {
			t.Errorf("%s: before the ranks have joined the job needs %s", name, before.text())
		}
		in.joinAll(j)
		base, want := desiredBase(in.cfg), desiredJob(in, j)
		golden(t, "desired-"+name+".txt", want.text())
		golden(t, "desired-base.txt", base.text())
		for _, o := range []objects{base, want} {
			for _, e := range o.entities {
				if _, err := program.Encode(e.entity); err != nil {
					t.Errorf("%s: %v", name, err)
				}
			}
		}
		use := make(map[string]int)
		for _, e := range want.entities {
			if entry, ok := e.entity.(p4rt.Entry); ok {
				use[entry.Table]++
			}
		}
		need := tableUse(j)
		maps.DeleteFunc(need, func(_ string, n int) bool { return n == 0 })
		if d := cmp.Diff(need, use); d != "" {
			t.Errorf("%s: table use foretold and real (-foretold +real):\n%s", name, d)
		}
	}
}

// world is devices that do what they are told, one update at a time.
type world struct {
	entities map[string]p4rt.Entity
	plans    map[planKey]serverPlan
}

// walk carries out steps update by update and calls check after each.
func (w *world) walk(steps []step, check func()) {
	for _, s := range steps {
		switch {
		case s.server != "" && s.remove:
			delete(w.plans, s.key)
			check()
		case s.server != "":
			w.plans[s.key] = s.plan
			check()
		}
		for _, e := range s.entities {
			if s.remove {
				delete(w.entities, e.Key())
			} else {
				w.entities[e.Key()] = e
			}
			check()
		}
	}
}

// consistent returns what is wrong with the world: everything refers only to what is there.
func (w *world) consistent(in *intent, j *job) error {
	full := desiredJob(in, j)
	plan := p4rt.Entry{Table: tablePlan, Match: []p4rt.Match{{Field: fieldJob, Value: num(j.id)}, {Field: fieldEpoch, Value: num(j.epoch)}}}
	if _, ok := w.entities[plan.Key()]; ok {
		for key, e := range full.entities {
			if e.phase < phasePlan && !p4rt.Equal(w.entities[key], e.entity) {
				return fmt.Errorf("there is a plan, but %s is %v", key, w.entities[key])
			}
		}
	}
	admits := false
	for key, e := range w.entities {
		entry, ok := e.(p4rt.Entry)
		if !ok {
			continue
		}
		switch entry.Table {
		case tableMember, tableServer, tableReturning:
			admits = true
		case tableJob:
			if _, ok := w.entities[plan.Key()]; !ok {
				return fmt.Errorf("the job is known, but has no plan")
			}
		}
		for _, p := range entry.Params {
			if p.Name == "group" || p.Name == "all_" || p.Name == "cohort" {
				id, _ := p.Value.Uint()
				if g := (p4rt.Group{ID: uint32(id)}); id != 0 && w.entities[g.Key()] == nil {
					return fmt.Errorf("%s names multicast group %d, which is not there", key, id)
				}
			}
		}
	}
	for key := range full.plans {
		if _, ok := w.plans[key]; admits && !ok {
			return fmt.Errorf("the switch admits packets, but server %s has no plan", key.server)
		}
	}
	for _, e := range w.entities {
		g, ok := e.(p4rt.Group)
		if !ok || g.ID == floodGroup {
			continue
		}
		for _, r := range g.Replicas {
			rewrite := p4rt.Entry{Table: tableReplica, Match: []p4rt.Match{{Field: "standard_metadata.egress_rid", Value: num(r.Instance)}}}
			if w.entities[rewrite.Key()] == nil {
				return fmt.Errorf("%v copies with instance %d, which is rewritten nowhere", g, r.Instance)
			}
		}
	}
	return nil
}

// TestEveryPrefixIsConsistent stops an installation and a removal after every single update.
func TestEveryPrefixIsConsistent(t *testing.T) {
	for name, rule := range map[string]policy.Static{
		"switch": {Pool: 16}, "server": {Mode: policy.ModeServer, Pool: 16}, "hybrid": hybrid,
	} {
		in := newIntent(t, testConfig())
		j, err := in.create(JobSpec{Name: "train", Ranks: 4, MaxElems: 1000, Policy: &rule})
		if err != nil {
			t.Fatal(err)
		}
		in.joinAll(j)
		want := desiredJob(in, j)
		w := &world{make(map[string]p4rt.Entity), make(map[planKey]serverPlan)}
		updates := 0
		check := func() {
			updates++
			if err := w.consistent(in, j); err != nil {
				t.Errorf("%s: after update %d: %v", name, updates, err)
			}
		}
		w.walk(diff(newObjects(), want), check)
		if len(w.entities) != len(want.entities) || len(w.plans) != len(want.plans) {
			t.Errorf("%s: installed %d entities and %d plans, want %d and %d", name, len(w.entities), len(w.plans),
				len(want.entities), len(want.plans))
		}
		w.walk(diff(want, newObjects()), check)
		if len(w.entities) != 0 || len(w.plans) != 0 {
			t.Errorf("%s: left over: %v %v", name, w.entities, w.plans)
		}
		if n := 2 * (len(want.entities) + len(want.plans)); updates != n {
			t.Errorf("%s: %d updates, want %d", name, updates, n)
		}
	}
}

func TestDiff(t *testing.T) {
	in := newIntent(t, testConfig())
	j, err := in.create(JobSpec{Name: "train", Ranks: 2, MaxElems: 1, Policy: &policy.Static{Mode: policy.ModeServer, Servers: []string{"s0"}}})
	if err != nil {
		t.Fatal(err)
	}
	in.joinAll(j)
	want := desiredJob(in, j)
	if steps := diff(want, want); len(steps) != 0 {
		t.Errorf("nothing differs, but there are steps: %v", steps)
	}

	// A rank has moved: its entries change in place, nothing else is touched.
	moved := *j
	moved.members = slices.Clone(j.members)
	moved.members[1] = member{Host{Name: "w3", IP: netip.MustParseAddr("10.77.0.4"), MAC: MAC{2, 0, 0, 0, 0, 4}, Port: 4}, 5}
	steps := diff(want, desiredJob(in, &moved))
	var got []string
	for _, s := range steps {
		if s.remove || s.server != "" {
			t.Errorf("step %v", s)
		}
		for _, e := range s.entities {
			got = append(got, e.Key())
		}
	}
	if want := []string{
		"XaggEgress.replica[standard_metadata.egress_rid=2]", "multicast group 2",
		"XaggIngress.member[hdr.x.epoch=1 hdr.x.job=7 hdr.x.rank=1]",
	}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}

	// What is doubted is installed again where it is wanted and removed where it is not.
	have := newObjects()
	for _, s := range diff(newObjects(), want) {
		s.doubted(have, want)
	}
	if a, b := len(flat(diff(have, want))), len(want.entities)+1; a != b {
		t.Errorf("%d updates install what is doubted, want %d", a, b)
	}
	if a, b := len(flat(diff(have, newObjects()))), len(want.entities)+1; a != b {
		t.Errorf("%d updates remove what is doubted, want %d", a, b)
	}
	for _, s := range diff(have, want) {
		s.done(have, want)
	}
	if steps := diff(have, want); len(steps) != 0 {
		t.Errorf("all was done, but there are steps: %v", steps)
	}

	// A default action cannot be removed.
	for _, u := range flat(diff(desiredBase(in.cfg), newObjects())) {
		if strings.Contains(u, "default") {
			t.Errorf("update %s", u)
		}
	}
}

func flat(steps []step) (updates []string) {
	for _, s := range steps {
		if s.server != "" {
			updates = append(updates, s.String())
		}
		for _, e := range s.entities {
			updates = append(updates, e.Key())
		}
	}
	return updates
}

var update = flag.Bool("update", false, "rewrite the golden files in testdata")

// golden compares got with a file in testdata.
func golden(t *testing.T, name, got string) {
	t.Helper()
	file := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(strings.Split(string(want), "\n"), strings.Split(got, "\n")); d != "" {
		t.Errorf("%s (-want +got; -update rewrites it):\n%s", file, d)
	}
}

// TestFirstEpoch: incarnations of controllers of one switch hardly ever begin with the same job id and epoch, and
// epoch 0 is never drawn.
func TestFirstEpoch(t *testing.T) {
	seen := make(map[[2]uint16]bool)
	for range 50 {
		c, err := New(testConfig())
		if err != nil {
			t.Fatal(err)
		}
		j, err := c.intent.create(JobSpec{Name: "a", Ranks: 2, MaxElems: 1})
		if err != nil {
			t.Fatal(err)
		}
		for range 50 {
			owner := [2]uint16{j.id, j.epoch}
			if j.id == 0 || j.epoch == 0 || seen[owner] {
				t.Fatalf("job id and epoch %v are none or not new", owner)
			}
			seen[owner] = true
			c.intent.renew(j)
		}
	}
}
