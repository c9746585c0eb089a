package place

import (
	"errors"
	"fmt"
	"math"
	"math/bits"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"xagg/policy"
)

// problems draws small problems: their oracle tries everything.
func problems(t *rapid.T) *Problem {
	p := &Problem{Reserve: rapid.SampledFrom([]float64{0, 0, 0.25, 0.5}).Draw(t, "reserve")}
	for i := range rapid.IntRange(1, 2).Draw(t, "switches") {
		p.Switches = append(p.Switches, Switch{fmt.Sprint("sw", i), rapid.IntRange(0, 24).Draw(t, "units")*policy.SlotsPerPool + rapid.IntRange(0, 3).Draw(t, "rest")})
	}
	for i := range rapid.IntRange(0, 3).Draw(t, "servers") {
		p.Servers = append(p.Servers, Server{
			fmt.Sprint("s", i), rapid.SampledFrom([]uint64{0, 4, 7, 10, 16}).Draw(t, "memory"), rapid.IntRange(0, 3).Draw(t, "jobs"),
		})
	}
	for i := range rapid.IntRange(0, 2).Draw(t, "held") {
		sw := rapid.IntRange(0, len(p.Switches)-1).Draw(t, "switch")
		h := Held{Job: fmt.Sprint("held", i), Weight: rapid.IntRange(1, 4).Draw(t, "weight"), Streams: rapid.IntRange(1, 8).Draw(t, "streams"),
			Switch: p.Switches[sw].Name, Memory: uint64(rapid.IntRange(1, 5).Draw(t, "memory"))}
		h.Size = policy.SlotsPerPool << rapid.IntRange(0, 3).Draw(t, "pool")
		h.Base = rapid.IntRange(0, 80).Draw(t, "base")
		clash := func(o Held) bool { return o.Switch == h.Switch && h.Base < o.Base+o.Size && o.Base < h.Base+h.Size }
		if h.Base+h.Size > p.Switches[sw].Slots || slices.ContainsFunc(p.Held, clash) {
			h.Base, h.Size = 0, 0
		}
		for _, s := range p.Servers {
			if rapid.Bool().Draw(t, "at") {
				h.Servers = append(h.Servers, s.Name)
			}
		}
		p.Held = append(p.Held, h)
	}
	for i := range rapid.IntRange(1, 4).Draw(t, "number") {
		j := Job{Input: policy.Input{Job: string(rune('a' + i)), Ranks: rapid.IntRange(1, 8).Draw(t, "ranks")},
			Weight: rapid.SampledFrom([]int{1, 1, 2, 3, 5}).Draw(t, "weight"), Memory: uint64(rapid.IntRange(1, 6).Draw(t, "memory"))}
		if rapid.IntRange(0, 3).Draw(t, "asks") == 0 {
			j.Rule.Pool = 1 << rapid.IntRange(0, 4).Draw(t, "pool")
		}
		if len(p.Servers) > 0 && rapid.Bool().Draw(t, "served") {
			j.Rule.Mode = policy.ModeServer
			if rapid.IntRange(0, 2).Draw(t, "restricted") == 0 {
				j.Rule.Servers = []string{rapid.SampledFrom(p.Servers).Draw(t, "server").Name}
			}
		} else {
			j.Steerable = rapid.Bool().Draw(t, "steerable")
		}
		p.Jobs = append(p.Jobs, j)
	}
	return p
}

// usage is what placements take.
type usage struct {
	slots  []map[int]string // by switch: whose a slot is
	memory []uint64
	jobs   []int
	wide   []bool // somebody is there who is elsewhere too
	load   []float64
}

func use(t interface{ Fatalf(string, ...any) }, p *Problem, placed []Placement) usage {
	u := usage{memory: make([]uint64, len(p.Servers)), jobs: make([]int, len(p.Servers)), wide: make([]bool, len(p.Servers)), load: make([]float64, len(p.Servers))}
	take := func(job, sw string, base, size int) {
		k := p.switchOf(sw)
		for n := base; n < base+size; n++ {
			if owner := u.slots[k][n]; owner != "" || n >= p.Switches[k].Slots {
				t.Fatalf("slot %d of %s is %q's and %q's, of %d", n, sw, owner, job, p.Switches[k].Slots)
			}
			u.slots[k][n] = job
		}
	}
	at := func(names []string, memory uint64, ranks int, fixed bool) {
		for _, name := range names {
			k := p.serverOf(name)
			u.memory[k] += memory
			u.jobs[k]++
			u.load[k] += float64(ranks) / float64(len(names))
			u.wide[k] = u.wide[k] || len(names) > 1 && !fixed
		}
	}
	for range p.Switches {
		u.slots = append(u.slots, map[int]string{})
	}
	for _, h := range p.Held {
		take(h.Job, h.Switch, h.Base, h.Size)
		at(h.Servers, h.Memory, h.Streams, true)
	}
	for i, pl := range placed {
		take(pl.Job, pl.Switch, pl.Base, policy.SlotsPerPool*pl.Pool)
		at(pl.Homes, p.Jobs[i].Memory, p.Jobs[i].Ranks, false)
	}
	return u
}

// roomy reports whether servers have room for what is used, given what was used before the jobs came.
func (u *usage) roomy(p *Problem, before *usage) bool {
	for k, s := range p.Servers {
		if u.jobs[k] == before.jobs[k] {
			continue // a server that has too little for what is there gets nobody else
		}
		memory, jobs := s.Memory, s.Jobs
		if u.wide[k] {
			memory, jobs = uint64(p.within(float64(memory))), int(p.within(float64(jobs)))
		}
		if s.Memory != 0 && u.memory[k] > memory || s.Jobs != 0 && u.jobs[k] > jobs {
			return false
		}
	}
	return true
}

// check checks what holds for every solution.
func check(t *rapid.T, p *Problem, placed []Placement) {
	before, u := use(t, p, nil), use(t, p, placed)
	if !u.roomy(p, &before) {
		t.Fatalf("servers are oversubscribed: %+v", u)
	}
	for i, j := range p.Jobs {
		pl := placed[i]
		switch {
		case pl.Job != j.Job || pl.Pool < 1 || bits.OnesCount(uint(pl.Pool)) != 1 || j.Rule.Pool != 0 && pl.Pool != j.Rule.Pool:
			t.Fatalf("job %+v has %+v", j, pl)
		case j.Rule.Mode == policy.ModeServer && (len(pl.Servers) == 0 || !slices.Equal(pl.Servers, pl.Homes)):
			t.Fatalf("job %+v has %+v", j, pl)
		case len(j.Rule.Servers) > 0 && !slices.Equal(j.Rule.Servers, pl.Servers):
			t.Fatalf("job %+v has %+v", j, pl)
		case j.Steerable && len(p.Servers) > 0 && len(pl.Homes) == 0:
			t.Fatalf("job %+v has %+v", j, pl)
		}
	}
}

// oracle is the best that can be, found by trying everything.
type oracle struct {
	p              *Problem
	may            [][]int // servers of each job; none = it needs none
	runs           []run
	ratios         []float64 // of pools to weights of jobs that do not ask for one, ascending
	squares        float64
	width          int
	packed, served bool
}

func (o *oracle) serve(t *rapid.T, i int, placed []Placement, before *usage) {
	if i == len(o.p.Jobs) {
		u := use(t, o.p, placed)
		if !u.roomy(o.p, before) {
			return
		}
		squares, width := 0.0, 0
		for _, l := range u.load {
			squares += l * l
		}
		for _, pl := range placed {
			width += len(pl.Homes)
		}
		if !o.served || squares < o.squares-1e-6 || squares < o.squares+1e-6 && width > o.width {
			o.squares, o.width = squares, width
		}
		o.served = true
		return
	}
	if len(o.may[i]) == 0 {
		o.serve(t, i+1, placed, before)
		return
	}
	for mask := 1; mask < 1<<len(o.may[i]); mask++ {
		placed[i].Homes = nil
		for b, k := range o.may[i] {
			if mask>>b&1 != 0 {
				placed[i].Homes = append(placed[i].Homes, o.p.Servers[k].Name)
			}
		}
		o.serve(t, i+1, placed, before)
	}
	placed[i].Homes = nil
}

// pools tries all pools of the jobs, each in all runs.
func (o *oracle) pools(i int, useful []int, pools []int, budget int) {
	if i == len(pools) {
		if !o.fits(0, pools, slices.Clone(o.runs)) {
			return
		}
		o.packed = true
		var ratios []float64
		least, sum := 0, 0
		for k, j := range o.p.Jobs {
			sum += pools[k]
			least += max(1, j.Rule.Pool)
			if j.Rule.Pool == 0 {
				ratios = append(ratios, float64(pools[k])/float64(j.Weight))
			}
		}
		if sum > max(least, budget) {
			return
		}
		slices.Sort(ratios)
		if slices.Compare(ratios, o.ratios) > 0 {
			o.ratios = ratios
		}
		return
	}
	if asked := o.p.Jobs[i].Rule.Pool; asked != 0 {
		pools[i] = asked
		o.pools(i+1, useful, pools, budget)
		return
	}
	for pools[i] = 1; pools[i] <= useful[i]; pools[i] *= 2 {
		o.pools(i+1, useful, pools, budget)
	}
}

func (o *oracle) fits(i int, pools []int, runs []run) bool {
	if i == len(pools) {
		return true
	}
	for k := range runs {
		if size := policy.SlotsPerPool * pools[i]; runs[k].size >= size {
			runs[k].size -= size
			if o.fits(i+1, pools, runs) {
				return true
			}
			runs[k].size += size
		}
	}
	return false
}

// TestOracle compares small problems with the best that can be: what can be placed is; the lowest ratio of pool to weight, then the
// next one, and so on, is as large as it can be; no loads are more even, and of those that are as even none are on more servers.
func TestOracle(t *testing.T) {
	seen := map[string]int{}
	rapid.Check(t, func(t *rapid.T) {
		p := problems(t)
		placed, err := p.Solve()
		runs, rerr := p.runs()
		if rerr != nil {
			t.Fatal(rerr)
		}
		o := oracle{p: p, runs: runs, may: make([][]int, len(p.Jobs))}
		for i, j := range p.Jobs {
			for k, s := range p.Servers {
				if j.Steerable || j.Rule.Mode == policy.ModeServer && (len(j.Rule.Servers) == 0 || j.Rule.Servers[0] == s.Name) {
					o.may[i] = append(o.may[i], k)
				}
			}
		}
		before := use(t, p, nil)
		o.serve(t, 0, make([]Placement, len(p.Jobs)), &before)
		useful := make([]int, len(p.Jobs))
		if deals, derr := p.deal(); derr == nil {
			for i := range useful {
				useful[i] = deals.jobs[i].useful
			}
		}
		asking, all := p.weights()
		o.pools(0, useful, make([]int, len(p.Jobs)), min(QuotaSlots(p.slots(), p.Reserve, asking, all), int(p.within(float64(p.free()))))/policy.SlotsPerPool)
		if err != nil {
			if short, ok := errors.AsType[*ShortError](err); !ok || short.Need <= short.Free {
				t.Fatalf("%v", err)
			}
			if o.served && o.packed {
				t.Fatalf("there is a place for all, but: %v", err)
			}
			seen["short"]++
			return
		}
		check(t, p, placed)
		var ratios []float64
		squares, width := 0.0, 0
		for i, j := range p.Jobs {
			if j.Rule.Pool == 0 {
				ratios = append(ratios, float64(placed[i].Pool)/float64(j.Weight))
			}
			width += len(placed[i].Homes)
		}
		slices.Sort(ratios)
		if !slices.Equal(ratios, o.ratios) {
			t.Fatalf("pools to weights are %v, could be %v", ratios, o.ratios)
		}
		u := use(t, p, placed)
		for _, l := range u.load {
			squares += l * l
		}
		if math.Abs(squares-o.squares) > 1e-6 || width != o.width || !placed[0].Even {
			t.Fatalf("the loads %v have squares of %v on %d servers, could have %v on %d; even: %v", u.load, squares, width, o.squares, o.width, placed[0].Even)
		}
		seen["placed"]++
	})
	if seen["short"] == 0 || seen["placed"] == 0 {
		t.Errorf("problems were %v", seen)
	}
}

// TestProperties: the order of jobs, switches apart, changes nothing; what is there stays; more of anything makes nothing worse.
func TestProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := problems(t)
		placed, err := p.Solve()
		again := *p
		order := rapid.Permutation(p.Jobs).Draw(t, "order")
		again.Jobs = order
		shuffled, serr := again.Solve()
		if (err == nil) != (serr == nil) {
			t.Fatalf("%v; in another order: %v", err, serr)
		}
		if err != nil {
			return
		}
		byName := map[string]Placement{}
		for _, pl := range shuffled {
			byName[pl.Job] = pl
		}
		for _, pl := range placed {
			if fmt.Sprintf("%+v", pl) != fmt.Sprintf("%+v", byName[pl.Job]) {
				t.Fatalf("%+v, in another order %+v", pl, byName[pl.Job])
			}
		}

		more := *p
		more.Switches = slices.Clone(p.Switches)
		more.Switches[len(more.Switches)-1].Slots += rapid.IntRange(1, 50).Draw(t, "more")
		larger, err := more.Solve()
		if err != nil {
			t.Fatalf("with more slots: %v", err)
		}
		if a, b := ratios(p, placed), ratios(p, larger); slices.Compare(a, b) > 0 {
			t.Fatalf("pools to weights were %v and are %v with more slots", a, b)
		}
		more = *p
		more.Servers = slices.Clone(p.Servers)
		for i := range more.Servers {
			if s := &more.Servers[i]; s.Memory != 0 {
				s.Memory += uint64(rapid.IntRange(0, 5).Draw(t, "more memory"))
			}
		}
		if larger, err = more.Solve(); err != nil {
			t.Fatalf("with more memory: %v", err)
		}
		if a, b := squares(t, p, placed), squares(t, &more, larger); b > a+1e-6 {
			t.Fatalf("loads had squares of %v and have %v with more memory", a, b)
		}
	})
}

// ratios returns the ratios of pool to weight of jobs that ask for no pool, ascending.
func ratios(p *Problem, placed []Placement) (out []float64) {
	for i, j := range p.Jobs {
		if j.Rule.Pool == 0 {
			out = append(out, float64(placed[i].Pool)/float64(j.Weight))
		}
	}
	slices.Sort(out)
	return out
}

func squares(t *rapid.T, p *Problem, placed []Placement) (sum float64) {
	for _, l := range use(t, p, placed).load {
		sum += l * l
	}
	return sum
}

// many is a problem of many jobs, of which the switch has a pool of 4 for each, and servers memory for each job at a few.
func many(jobs, servers int) *Problem {
	rng := rand.New(rand.NewPCG(1, 2))
	p := &Problem{Switches: []Switch{{"sw0", 10 * jobs * policy.SlotsPerPool}, {"sw1", 6 * jobs * policy.SlotsPerPool}}, Reserve: 0.25}
	for i := range servers {
		p.Servers = append(p.Servers, Server{fmt.Sprint("s", i), uint64(4 * 1000 * jobs / servers), 0})
	}
	for i := range jobs {
		j := Job{Input: policy.Input{Job: fmt.Sprintf("job%04d", i), Ranks: 2 + rng.IntN(15)}, Weight: 1 + rng.IntN(8), Memory: 1 + rng.Uint64N(2000)}
		if i%2 == 0 {
			j.Rule.Mode = policy.ModeServer
		}
		j.Steerable = i%4 == 1
		p.Jobs = append(p.Jobs, j)
	}
	return p
}

// TestMany places more jobs than can be searched through: nothing is oversubscribed, and the load is even all the same.
func TestMany(t *testing.T) {
	for _, n := range []int{20, 300, 1000} {
		p := many(n, 16)
		placed, err := p.Solve()
		if err != nil {
			t.Fatal(err)
		}
		before, u := use(t, p, nil), use(t, p, placed)
		if !u.roomy(p, &before) {
			t.Errorf("%d jobs: %+v", n, u)
		}
		sum, squares := 0.0, 0.0
		for _, l := range u.load {
			sum, squares = sum+l, squares+l*l
		}
		if even := sum * sum / float64(len(u.load)); squares > 1.02*even {
			t.Errorf("%d jobs: loads have squares of %.0f, %.0f would be even: %.1f", n, squares, even, u.load)
		}
		// Nothing is left that would be of use.
		deals, err := p.deal()
		if err != nil {
			t.Fatal(err)
		}
		left := int(p.within(float64(p.slots()))) / policy.SlotsPerPool
		for _, pl := range placed {
			left -= pl.Pool
		}
		for i, pl := range placed {
			if pl.Pool < deals.jobs[i].useful && pl.Pool <= left {
				t.Errorf("%d jobs: job %s has a pool of %d, though %d would be of use and %d are left", n, pl.Job, pl.Pool, deals.jobs[i].useful, left)
			}
		}
	}
}

// TestPacking has jobs that leave the server to others which may have no other one.
func TestPacking(t *testing.T) {
	p := &Problem{Switches: []Switch{{"sw", 4096}}, Servers: []Server{{"s0", 1000, 30}, {"s1", 1001, 30}}}
	for i := range 60 {
		j := Job{Input: policy.Input{Job: fmt.Sprintf("j%02d", i), Ranks: 2}, Weight: 1, Memory: 2, Rule: policy.Static{Mode: policy.ModeServer}}
		if i >= 30 { // smaller, and at s0 alone
			j.Memory, j.Rule.Servers = 1, []string{"s0"}
		}
		p.Jobs = append(p.Jobs, j)
	}
	placed, err := p.Solve()
	if err != nil {
		t.Fatal(err)
	}
	for i, pl := range placed {
		if want := []string{"s1", "s0"}[i/30]; !slices.Equal(pl.Servers, []string{want}) {
			t.Errorf("job %s is at %v, want %s", pl.Job, pl.Servers, want)
		}
	}
}

// TestPackingGivesUp: of jobs that there is memory for in sum, but that no packing can hold, it is said that the search was bounded.
func TestPackingGivesUp(t *testing.T) {
	p := &Problem{Switches: []Switch{{"sw", 4096}}}
	for i := range 20 { // two jobs of 34 each have room in 100
		p.Servers = append(p.Servers, Server{fmt.Sprintf("s%02d", i), 100, 0})
	}
	for i := range 58 {
		p.Jobs = append(p.Jobs, Job{Input: policy.Input{Job: fmt.Sprintf("j%02d", i), Ranks: 2}, Weight: 1, Memory: 34, Rule: policy.Static{Mode: policy.ModeServer}})
	}
	_, err := p.Solve()
	if short, ok := errors.AsType[*ShortError](err); !ok || short.Need != 34 || short.Free != 32 ||
		!strings.HasPrefix(short.Hint, fmt.Sprintf("no way to put all jobs was found in %d tries; start a server", packTries)) {
		t.Errorf("got %v", err)
	}
}

func TestErrors(t *testing.T) {
	server := func(memory uint64, servers ...string) Job {
		return Job{Input: policy.Input{Job: "x", Ranks: 4}, Weight: 1, Memory: memory, Rule: policy.Static{Mode: policy.ModeServer, Servers: servers}}
	}
	pool := func(name string, n int) Job {
		return Job{Input: policy.Input{Job: name, Ranks: 4}, Weight: 1, Rule: policy.Static{Pool: n}}
	}
	named := func(name string, j Job) Job { j.Job = name; return j }
	base := func(jobs ...Job) *Problem {
		return &Problem{Switches: []Switch{{"sw", 1024}}, Servers: []Server{{"s0", 100, 2}, {"s1", 60, 2}}, Jobs: jobs}
	}
	for name, tt := range map[string]struct {
		p    *Problem
		want string
	}{
		"slots": {base(pool("x", 256), pool("y", 1)),
			`1028 slots of the switch are needed and 1024 are free, 4 too few; choose a smaller pool than the 256 of job "x", or remove a job`},
		"in a row": {&Problem{
			Switches: []Switch{{"sw", 1024}}, Jobs: []Job{pool("x", 128)},
			Held: []Held{{Job: "h", Weight: 1, Switch: "sw", Base: 700, Size: 4}, {Job: "i", Weight: 1, Switch: "sw", Base: 400, Size: 4}}},
			`512 slots of the switch in a row are needed and 400 are free, 112 too few; the others that are free are scattered: ` +
				`choose a smaller pool than the 128 of job "x", or remove a job`},
		"rows": {&Problem{
			Switches: []Switch{{"sw", 1540}}, Held: []Held{{Job: "h", Weight: 1, Switch: "sw", Base: 400, Size: 4}},
			Jobs: []Job{pool("x", 128), pool("y", 128), pool("z", 64), pool("w", 64)}},
			`6 rows of 256 slots of the switch are needed and 5 are free, 1 too few; the free slots are scattered: ` +
				`choose a smaller pool than the 128 of job "x", or remove a job`},
		"memory of one": {base(server(101)),
			`101 slots of memory at one of the servers s0, s1 for job "x" are needed and 100 are free, 1 too few; start a server with more --memory, add a server, or remove a job`},
		"memory of its server": {base(server(61, "s1")),
			`61 slots of memory at server s1 for job "x" are needed and 60 are free, 1 too few; start a server with more --memory, add a server, or remove a job`},
		"memory": {base(server(60), named("y", server(60)), named("z", server(60))),
			`180 slots of memory at servers are needed and 160 are free, 20 too few; start a server with more --memory, add a server, or remove a job`},
		"packing": {base(server(55), named("y", server(55)), named("z", server(50))),
			`50 slots of memory at one of the servers s0, s1 for job "z" beside the other jobs are needed and 45 are free, 5 too few; start a server with more --memory, add a server, or remove a job`},
		"places": {base(server(1), named("a", server(1)), named("b", server(1)), named("c", server(1)), named("d", server(1))),
			`5 places for jobs at servers are needed and 4 are free, 1 too few; add a server or remove a job`},
		"places at one": {base(server(1, "s0"), named("a", server(1, "s0")), named("b", server(1, "s0"))),
			`1 slots of memory at server s0 for job "x", which have all the jobs that they can, are needed and 0 are free, 1 too few; add a server or remove a job`},
		"no server": {base(server(1, "s7")), `job "x": servers[0]: no server "s7"; there are s0, s1`},
		"bad rule":  {base(Job{Input: policy.Input{Job: "x", Ranks: 4}, Weight: 1, Rule: policy.Static{Pool: 3}}), `job "x": pool: 3 is not a power of two`},
		"no weight": {base(Job{Input: policy.Input{Job: "x", Ranks: 4}}), `job "x": weight: 0 is less than 1`},
		"twice":     {base(pool("x", 1), pool("x", 1)), `job "x": name: another job has it`},
		"reserve":   {&Problem{Switches: []Switch{{"sw", 1024}}, Reserve: math.NaN()}, `reserve: NaN is not a share of at least 0 and below 1`},
		"no switch": {&Problem{}, `switches: there is none`},
		"held twice": {&Problem{Switches: []Switch{{"sw", 64}}, Held: []Held{{Job: "h", Weight: 1, Switch: "sw", Size: 8}, {Job: "i", Weight: 1, Switch: "sw", Base: 4, Size: 8}}},
			`held: job "i" has slots of another one at switch "sw"`},
		"held elsewhere": {&Problem{Switches: []Switch{{"sw", 64}}, Held: []Held{{Job: "h", Weight: 1, Switch: "sx", Size: 8}}},
			`held[0]: job "h" has slots of switch "sx", which there is not`},
		"held beyond": {&Problem{Switches: []Switch{{"sw", 64}}, Held: []Held{{Job: "h", Weight: 1, Switch: "sw", Base: 60, Size: 8}}},
			`held[0]: job "h" has the slots 60 to 67 of switch "sw", which has 64`},
	} {
		if _, err := tt.p.Solve(); err == nil || err.Error() != tt.want {
			t.Errorf("%s:\ngot  %v\nwant %s", name, err, tt.want)
		}
	}
}

// TestExplanations has all that an explanation can say.
func TestExplanations(t *testing.T) {
	p := &Problem{
		Switches: []Switch{{"sw", 256}}, Servers: []Server{{"s0", 100, 0}, {"s1", 40, 0}}, Reserve: 0.25,
		Jobs: []Job{
			{Input: policy.Input{Job: "heavy", Ranks: 4}, Weight: 3, Memory: 10},
			{Input: policy.Input{Job: "asks", Ranks: 2}, Weight: 1, Rule: policy.Static{Pool: 16}},
			{Input: policy.Input{Job: "served", Ranks: 4}, Weight: 1, Memory: 50, Rule: policy.Static{Mode: policy.ModeServer}},
			{Input: policy.Input{Job: "moves", Ranks: 4}, Weight: 1, Memory: 10, Steerable: true},
		},
	}
	placed, err := p.Solve()
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range []string{
		`rule static, mode switch: of the 4 ranks of job "heavy" the switch sums all (0-3); pool 16 takes 64 of 256 free slots; ` +
			`more would be of use, up to 32; its quota is a pool of 16, by its weight of 3 in 6 and with 25 % of the slots kept for jobs to come`,
		`rule static, mode switch: of the 2 ranks of job "asks" the switch sums all (0-1); pool 16 takes 64 of 256 free slots; ` +
			`it asked for more than its quota, a pool of 8, by its weight of 1 in 6 and with 25 % of the slots kept for jobs to come`,
		`rule static, mode server: of the 4 ranks of job "served" all (0-3) are steered to server s0; pool 8 takes 32 of 256 free slots; ` +
			`more would be of use, up to 16; its quota is a pool of 8, by its weight of 1 in 6 and with 25 % of the slots kept for jobs to come; ` +
			`not at s1, which has no room for another 50 slots`,
		`rule static, mode switch: of the 4 ranks of job "moves" the switch sums all (0-3); pool 8 takes 32 of 256 free slots; ` +
			`more would be of use, up to 16; its quota is a pool of 8, by its weight of 1 in 6 and with 25 % of the slots kept for jobs to come; ` +
			`10 slots are kept at s1 for ranks that come to be steered; not at s0, without which the load is more even`,
	} {
		if got := placed[i].Explanation; got != want {
			t.Errorf("got  %s\nwant %s", got, want)
		}
	}
}

// TestServersAlone: a job that has its slots gets other servers, and keeps its pool.
func TestServersAlone(t *testing.T) {
	p := &Problem{
		Switches: []Switch{{"sw", 0}}, Servers: []Server{{"s0", 100, 0}, {"s1", 100, 0}, {"s2", 5, 0}},
		Held: []Held{{Job: "h", Weight: 1, Switch: "sw", Servers: []string{"s0"}, Memory: 10}},
		Jobs: []Job{{Input: policy.Input{Job: "x", Ranks: 8, Pool: 64}, Weight: 1, Memory: 10, Rule: policy.Static{Mode: policy.ModeServer}}},
	}
	for streams, want := range map[int]string{8: "[s1]", 2: "[s0 s1]"} {
		p.Held[0].Streams = streams
		got, err := p.Solve()
		if err != nil || fmt.Sprint(got[0].Servers) != want || got[0].Pool != 64 || got[0].Switch != "" ||
			!strings.Contains(got[0].Explanation, "pool 64 stays") || !strings.Contains(got[0].Explanation, "not at s2, which has no room for another 10 slots") {
			t.Errorf("got %+v, %v", got, err)
		}
	}
}

// BenchmarkSolve places 1,000 jobs at two switches and 16 servers.
func BenchmarkSolve(b *testing.B) {
	p := many(1000, 16)
	for b.Loop() {
		if _, err := p.Solve(); err != nil {
			b.Fatal(err)
		}
	}
}
