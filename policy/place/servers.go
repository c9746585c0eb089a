package place

import (
	"cmp"
	"fmt"
	"math"
	"math/bits"
	"slices"
	"strings"

	"xagg/policy"
)

const (
	// packTries bounds the search for servers with memory for all jobs, exactTries that for the most even choice.
	packTries, exactTries = 50_000, 50_000
	// exactServers is how many servers a job may have at most where the most even choice is searched for: a job then has
	// 2^exactServers-1 choices.
	exactServers, exactJobs = 6, 12
	// maxPasses bounds how often jobs choose in turn. They need a few.
	maxPasses = 50
	// tiny is what sums of squares of loads may differ by without meaning it.
	tiny = 1e-9
)

// deals are the servers of jobs.
type deals struct {
	jobs []dealt
	even bool // no other choice is more even
}

// dealt are the servers of a job.
type dealt struct {
	names   []string      // in the order of its rule
	without []string      // that it may have but has not, each with the reason
	rule    policy.Static // with these servers
	useful  int           // the largest pool that is of use with them
}

// deal chooses servers, without regard to slots.
func (p *Problem) deal() (*deals, error) {
	if err := p.check(); err != nil {
		return nil, err
	}
	out := &deals{jobs: make([]dealt, len(p.Jobs))}
	all := make([]string, len(p.Servers))
	for i, s := range p.Servers {
		all[i] = s.Name
	}
	decide := func(i int, rule policy.Static) (policy.Decision, error) {
		in := p.Jobs[i].Input
		in.Servers, in.Slots = all, math.MaxInt
		d, err := rule.Decide(in)
		if err != nil {
			return d, &JobError{i, in.Job, err}
		}
		return d, nil
	}
	t := newTable(p)
	for i, j := range p.Jobs {
		d, err := decide(i, j.Rule)
		if err != nil {
			return nil, err
		}
		out.jobs[i] = dealt{rule: j.Rule, useful: d.Pool}
		may := d.Servers
		if len(may) == 0 && j.Steerable {
			may = all
		}
		guest := guest{index: i, name: j.Job, memory: int64(min(j.Memory, unlimited)), load: float64(d.Streams())}
		if j.Steerable {
			guest.load = float64(j.Ranks)
		}
		for _, name := range may {
			guest.may = append(guest.may, p.serverOf(name))
		}
		if len(may) > 0 {
			t.guests = append(t.guests, guest)
		}
	}
	// Those with the fewest choices are the first to choose, then the largest; never those that happen to be named first.
	slices.SortFunc(t.guests, func(a, b guest) int {
		return cmp.Or(cmp.Compare(len(a.may), len(b.may)), cmp.Compare(b.memory, a.memory), cmp.Compare(a.name, b.name))
	})
	if err := t.pack(); err != nil {
		return nil, err
	}
	out.even = t.spread()

	for g, guest := range t.guests {
		d := &out.jobs[guest.index]
		for _, s := range guest.may {
			switch name := p.Servers[s].Name; {
			case slices.Contains(t.at[g], s):
				d.names = append(d.names, name)
			case t.hosts[s].fits(&guest, false):
				d.without = append(d.without, name+", without which the load is more even")
			default:
				d.without = append(d.without, fmt.Sprintf("%s, which has no room for another %d slots", name, guest.memory))
			}
		}
	}
	for i, j := range p.Jobs {
		d := &out.jobs[i]
		if j.Rule.Mode != "" && j.Rule.Mode != policy.ModeSwitch {
			d.rule.Servers = d.names
			with, err := decide(i, d.rule)
			if err != nil {
				return nil, err
			}
			d.useful = with.Pool
		}
		if j.Steerable && j.Rule.Pool == 0 {
			d.useful = policy.SteerablePool(j.Ranks)
		}
	}
	return out, nil
}

// guest is a job that has memory at servers.
type guest struct {
	index  int // of Problem.Jobs
	name   string
	memory int64
	load   float64 // streams of packets that come to its servers, all together
	may    []int   // servers that it may have, in the order of its rule
}

// unlimited is more of anything than all jobs together ask for, and can be added to itself.
const unlimited = math.MaxInt64 / 4

// room is what a server has for guests.
type room struct{ memory, jobs int64 }

// host is a server.
type host struct {
	free  room
	spare room // of that, what is not kept for jobs to come: beyond it nobody is spread over several servers; may be below 0
	load  float64
	wide  int // guests there that are at other servers too
}

// table is who is where.
type table struct {
	problem *Problem
	hosts   []host
	guests  []guest
	at      [][]int // servers of each guest, ascending
}

func newTable(p *Problem) *table {
	t := &table{problem: p, hosts: make([]host, len(p.Servers))}
	limit := func(n int64) (free, spare int64) {
		if n == 0 {
			return unlimited, unlimited
		}
		return n, int64(p.within(float64(n)))
	}
	for i, s := range p.Servers {
		h := &t.hosts[i]
		h.free.memory, h.spare.memory = limit(int64(min(s.Memory, unlimited)))
		h.free.jobs, h.spare.jobs = limit(int64(s.Jobs))
	}
	for _, held := range p.Held {
		for _, name := range held.Servers {
			t.hosts[p.serverOf(name)].take(int64(held.Memory), 1)
			t.hosts[p.serverOf(name)].load += float64(held.Streams) / float64(len(held.Servers))
		}
	}
	return t
}

func (h *host) take(memory, jobs int64) {
	h.free.memory -= memory
	h.spare.memory -= memory
	h.free.jobs -= jobs
	h.spare.jobs -= jobs
}

// fits reports whether a guest has room at a server: alone there, or as one of several of its servers.
func (h *host) fits(g *guest, alone bool) bool {
	r := h.spare
	if alone && h.wide == 0 {
		r = h.free
	}
	return g.memory <= r.memory && r.jobs > 0
}

// seat puts a guest at servers, where it fits.
func (t *table) seat(g int, at []int) {
	t.at[g] = at
	t.shift(g, 1)
}

// unseat takes a guest away, and returns where it was.
func (t *table) unseat(g int) []int {
	at := t.at[g]
	t.shift(g, -1)
	t.at[g] = nil
	return at
}

func (t *table) shift(g, sign int) {
	guest, at := &t.guests[g], t.at[g]
	for _, s := range at {
		h := &t.hosts[s]
		h.take(int64(sign)*guest.memory, int64(sign))
		h.load += float64(sign) * guest.load / float64(len(at))
		if len(at) > 1 {
			h.wide += sign
		}
	}
}

// pack finds a server for each guest: the one with the least load of those that have room, or, where that leads to nothing,
// one that is full enough to leave the others' memory whole. Packing is hard in general: where there is room for all by the sums
// and nothing is found in packTries, the error says so.
func (t *table) pack() error {
	t.at = make([][]int, len(t.guests))
	if err := t.tooMuch(); err != nil {
		return err
	}
	even := search{t: t, tries: len(t.guests), prefer: func(a, b *host) int { return cmp.Compare(a.load, b.load) }}
	if even.pack(0) {
		return nil
	}
	tight := search{t: t, tries: packTries, prefer: func(a, b *host) int {
		return cmp.Or(cmp.Compare(a.free.memory, b.free.memory), cmp.Compare(a.free.jobs, b.free.jobs))
	}}
	if tight.pack(0) {
		return nil
	}
	if tight.tries == 0 {
		tight.stuck.Hint = fmt.Sprintf("no way to put all jobs was found in %d tries; ", packTries) + tight.stuck.Hint
	}
	return tight.stuck
}

// tooMuch is the error that guests need more than there is in sum, or one of them more than any of its servers has.
func (t *table) tooMuch() error {
	const hint = "start a server with more --memory, add a server, or remove a job"
	var need, free room
	for i := range t.guests {
		g := &t.guests[i]
		most := int64(0)
		for _, s := range g.may {
			most = max(most, t.hosts[s].free.memory)
		}
		if g.memory > most {
			return short(fmt.Sprintf("slots of memory at %s for job %q", t.oneOf(g.may), g.name), g.memory, most, hint)
		}
		need.memory += g.memory
		need.jobs++
	}
	for _, h := range t.hosts {
		free.memory = min(unlimited, free.memory+max(0, h.free.memory))
		free.jobs = min(unlimited, free.jobs+max(0, h.free.jobs))
	}
	switch {
	case need.memory > free.memory:
		return short("slots of memory at servers", need.memory, free.memory, hint)
	case need.jobs > free.jobs:
		return short("places for jobs at servers", need.jobs, free.jobs, "add a server or remove a job")
	}
	return nil
}

func short(what string, need, free int64, hint string) *ShortError {
	return &ShortError{what, uint64(need), uint64(max(0, free)), hint}
}

// oneOf names servers.
func (t *table) oneOf(servers []int) string {
	names := make([]string, len(servers))
	for i, s := range servers {
		names[i] = t.problem.Servers[s].Name
	}
	if len(names) == 1 {
		return "server " + names[0]
	}
	return "one of the servers " + strings.Join(names, ", ")
}

// search looks for a server for each guest.
type search struct {
	t      *table
	tries  int // that are left
	prefer func(a, b *host) int
	stuck  *ShortError // of the first guest that none was left for
}

// pack seats the guests from g on, each where is preferred, and goes back where that leads to nothing.
func (s *search) pack(g int) bool {
	t := s.t
	if g == len(t.guests) {
		return true
	}
	guest := &t.guests[g]
	var fit []int
	for _, k := range guest.may {
		if t.hosts[k].fits(guest, true) {
			fit = append(fit, k)
		}
	}
	slices.SortFunc(fit, func(a, b int) int {
		return cmp.Or(s.prefer(&t.hosts[a], &t.hosts[b]), cmp.Compare(a, b))
	})
	for _, k := range fit {
		if s.tries == 0 {
			return false
		}
		s.tries--
		t.seat(g, []int{k})
		if s.pack(g + 1) {
			return true
		}
		t.unseat(g)
	}
	if s.stuck == nil {
		most := int64(0)
		for _, k := range guest.may {
			if t.hosts[k].free.jobs > 0 {
				most = max(most, t.hosts[k].free.memory)
			}
		}
		what, hint := fmt.Sprintf("slots of memory at %s for job %q beside the other jobs", t.oneOf(guest.may), guest.name),
			"start a server with more --memory, add a server, or remove a job"
		if most == 0 {
			what, hint = fmt.Sprintf("slots of memory at %s for job %q, which have all the jobs that they can,", t.oneOf(guest.may), guest.name),
				"add a server or remove a job"
		}
		s.stuck = short(what, guest.memory, most, hint)
	}
	return false
}

// spread gives guests, who have a server each, more of them so that the load is even. It reports whether nothing is more even.
func (t *table) spread() bool {
	narrow := slices.Clone(t.at)
	t.descend()
	best, at := t.value(), slices.Clone(t.at)
	t.move(narrow)
	t.widen()
	t.descend()
	if v := t.value(); v.better(best) {
		best, at = v, slices.Clone(t.at)
	}
	t.move(at)

	widest, small := 0, len(t.guests) <= exactJobs
	for i := range t.guests {
		widest += len(t.guests[i].may)
		small = small && len(t.guests[i].may) <= exactServers
	}
	even := !t.level().better(best)
	if even && best.width == widest || !small {
		return even
	}
	e := exact{t: t, tries: exactTries, best: best, at: at, widest: widest}
	t.move(make([][]int, len(t.guests)))
	e.choose(0, 0)
	t.move(e.at)
	return even || e.tries > 0
}

// move puts all guests elsewhere.
func (t *table) move(at [][]int) {
	for g := range t.guests {
		t.unseat(g)
	}
	for g := range t.guests {
		t.seat(g, at[g])
	}
}

// widen puts each guest at all its servers that have room for it, one guest after the other.
func (t *table) widen() {
	for g := range t.guests {
		guest := &t.guests[g]
		at := t.unseat(g)
		var wide []int
		for _, s := range guest.may {
			if t.hosts[s].fits(guest, false) {
				wide = append(wide, s)
			}
		}
		if len(wide) > 1 {
			slices.Sort(wide)
			at = wide
		}
		t.seat(g, at)
	}
}

// descend has guests choose the servers that are best for the balance while the others stay, until none has a better choice.
func (t *table) descend() {
	for range maxPasses {
		changed := false
		for g := range t.guests {
			changed = t.choose(g) || changed
		}
		if !changed {
			return
		}
	}
}

// choose gives a guest its best choice. Of so many servers, the best are those with the least load.
func (t *table) choose(g int) (changed bool) {
	guest := &t.guests[g]
	was := t.unseat(g)
	added := func(at []int) value {
		sum, k := 0.0, float64(len(at))
		for _, s := range at {
			sum += t.hosts[s].load
		}
		return value{2*guest.load/k*sum + guest.load*guest.load/k, len(at)}
	}
	best, at := added(was), was
	byLoad := slices.Clone(guest.may)
	slices.SortFunc(byLoad, func(a, b int) int {
		return cmp.Or(cmp.Compare(t.hosts[a].load, t.hosts[b].load), cmp.Compare(a, b))
	})
	var wide []int
	for _, s := range byLoad {
		if t.hosts[s].fits(guest, true) {
			if v := added([]int{s}); v.better(best) {
				best, at = v, []int{s}
			}
		}
		if t.hosts[s].fits(guest, false) {
			wide = append(wide, s)
			if v := added(wide); len(wide) > 1 && v.better(best) {
				best, at = v, slices.Clone(wide)
			}
		}
	}
	slices.Sort(at)
	t.seat(g, at)
	return !slices.Equal(at, was)
}

// value is how good a choice of servers is.
type value struct {
	squares float64 // sum of the squares of the loads, or of what guests add to it
	width   int     // number of servers that guests have, all together
}

func (v value) better(w value) bool {
	switch d := v.squares - w.squares; {
	case d < -tiny*(1+w.squares):
		return true
	case d > tiny*(1+w.squares):
		return false
	}
	return v.width > w.width
}

func (t *table) value() (v value) {
	for _, h := range t.hosts {
		v.squares += h.load * h.load
	}
	for _, at := range t.at {
		v.width += len(at)
	}
	return v
}

// level is the value of a choice that nothing could be more even than: the guests' loads are poured onto those of held jobs.
func (t *table) level() value {
	poured := 0.0
	loads := make([]float64, len(t.hosts))
	for i, h := range t.hosts {
		loads[i] = h.load
	}
	for g, at := range t.at {
		for _, s := range at {
			loads[s] -= t.guests[g].load / float64(len(at))
		}
		poured += t.guests[g].load
	}
	return value{squares: pour(loads, poured)}
}

// pour returns the least sum of squares that loads come to which an amount is added to. It sorts them.
func pour(loads []float64, amount float64) (squares float64) {
	slices.Sort(loads)
	n := 0 // loads that some is added to: all these come to the same level
	for n < len(loads) && (n == 0 || amount > loads[n]*float64(n)) {
		amount += loads[n]
		n++
	}
	if n > 0 {
		squares = amount * amount / float64(n)
	}
	for _, l := range loads[n:] {
		squares += l * l
	}
	return squares
}

// exact searches for the best choice.
type exact struct {
	t      *table
	tries  int // that are left
	best   value
	at     [][]int // the best choice
	widest int     // servers that guests may have, all together
}

// choose tries all choices of the guests from g on, of whom those before have so many servers.
func (e *exact) choose(g, width int) {
	t := e.t
	if g == len(t.guests) {
		if v := t.value(); v.better(e.best) {
			e.best, e.at = v, slices.Clone(t.at)
		}
		return
	}
	left, wide := 0.0, width
	for i := g; i < len(t.guests); i++ {
		left += t.guests[i].load
		wide += len(t.guests[i].may)
	}
	loads := make([]float64, len(t.hosts))
	for i, h := range t.hosts {
		loads[i] = h.load
	}
	if !(value{pour(loads, left), wide}).better(e.best) {
		return
	}
	guest := &t.guests[g]
	for mask := uint(1)<<len(guest.may) - 1; mask > 0; mask-- {
		if e.tries == 0 {
			return
		}
		e.tries--
		alone := bits.OnesCount(mask) == 1
		at := make([]int, 0, len(guest.may))
		for i, s := range guest.may {
			if mask>>i&1 != 0 && t.hosts[s].fits(guest, alone) {
				at = append(at, s)
			}
		}
		if len(at) < bits.OnesCount(mask) {
			continue
		}
		slices.Sort(at)
		t.seat(g, at)
		e.choose(g+1, width+len(at))
		t.unseat(g)
	}
}
