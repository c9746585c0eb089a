package conformance

import (
	"fmt"
	"math"
	"slices"

	"xagg/wire"
)

const (
	cpuPort   = 510
	floodPort = 1 // multicast group of the table arp's default action
	slots     = 4096
)

// input is a frame at a port, or for cpuPort a packet-out to the port egress, or a change of the plans.
type input struct {
	port   uint16
	egress uint16
	frame  []byte
	change *change
}

// change is what a controller does to a plan while packets flow.
type change struct {
	op   string // "install", "remove" or "arm"
	plan int    // index in the scenario
	next uint16 // arm: the epoch to announce
}

func (c *change) String() string { return fmt.Sprintf("%s plan %d next %d", c.op, c.plan, c.next) }

// output is a frame that a switch sent out of a port; cpuPort stands for a packet-in.
type output struct {
	port  uint16
	frame []byte
}

// write is an insertion, modification or deletion.
type write struct {
	op    writeOp
	group *group // or
	entry *entry
}

type writeOp int

const (
	insert writeOp = iota
	modify
	remove
)

type group struct {
	id       uint16
	replicas []replica
}

type replica struct{ port, instance uint16 }

// entry has keys and parameters in the P4 program's order.
type entry struct {
	table  string
	key    []uint64
	action string
	params []uint64
}

// A host is a worker or a server at a port of the switch.
type host struct {
	addr wire.Addr
	port uint16
}

var service = wire.Addr{MAC: [6]byte{2, 0x78, 0x61, 0, 0xff, 0xfe}, IP: [4]byte{10, 77, 255, 254}, Port: wire.Port}

// worker returns worker w; odd ones use a UDP port of their own.
func worker(w int) host {
	h := host{port: uint16(w + 1), addr: wire.Addr{
		MAC: [6]byte{2, 0x78, 0x61, 0, 0, byte(w + 1)}, IP: [4]byte{10, 77, 0, byte(w + 1)}, Port: wire.Port}}
	if w%2 == 1 {
		h.addr.Port = uint16(40000 + w)
	}
	return h
}

// server returns server s.
func server(s int) host {
	return host{port: uint16(65 + s), addr: wire.Addr{
		MAC: [6]byte{2, 0x78, 0x61, 0, 1, byte(s + 1)}, IP: [4]byte{10, 77, 1, byte(s + 1)}, Port: wire.Port}}
}

// A plan is one epoch of a job.
type plan struct {
	job, epoch uint16
	workers    []int  // by rank
	cohort     uint64 // ranks
	servers    []int
	base, pool uint32
	nextEpoch  uint16
	quorum     bool
	wait       uint32 // microseconds
	async      bool   // contributions to running sums
	later      bool   // not installed at the beginning
}

// is reports whether q is the same epoch of the same job.
func (p plan) is(q plan) bool { return p.job == q.job && p.epoch == q.epoch }

func (p *plan) ranks() uint64 { return 1<<len(p.workers) - 1 }

// A scenario is a programmed switch.
type scenario struct {
	name             string
	workers, servers int
	plans            []plan
}

// tracePorts are the ports that frames of traces come in at: those of hosts, and some of nobody's.
var tracePorts = []uint16{1, 2, 3, 4, 5, 6, 7, 8, 65, 66, 67}

var scenarios = []scenario{
	{"switch", 3, 0, []plan{{job: 7, epoch: 1, workers: []int{0, 1, 2}, cohort: 7, base: 8, pool: 2}}},
	{"switch, armed", 2, 0, []plan{{job: 0xfffe, epoch: 0xffff, workers: []int{0, 1}, cohort: 3, base: 0, pool: 4, nextEpoch: 1}}},
	{"one rank", 1, 0, []plan{{job: 1, epoch: 2, workers: []int{0}, cohort: 1, base: 4088, pool: 2, nextEpoch: 3}}},
	{"hybrid", 4, 1, []plan{{job: 300, epoch: 1, workers: []int{0, 1, 2, 3}, cohort: 7, servers: []int{0}, base: 16, pool: 2}}},
	{"hybrid, two servers", 4, 2, []plan{{job: 301, epoch: 2, workers: []int{3, 2, 1, 0}, cohort: 0b1010, servers: []int{1, 0}, base: 32, pool: 4, nextEpoch: 3}}},
	{"hybrid, a cohort of one", 2, 1, []plan{{job: 302, epoch: 1, workers: []int{0, 1}, cohort: 2, servers: []int{0}, base: 16, pool: 2}}},
	{"server", 3, 1, []plan{{job: 9, epoch: 5, workers: []int{0, 1, 2}, servers: []int{0}}}},
	{"two jobs", 4, 1, []plan{
		{job: 20, epoch: 1, workers: []int{0, 1}, cohort: 3, base: 0, pool: 2},
		{job: 21, epoch: 1, workers: []int{2, 3, 0}, cohort: 3, servers: []int{0}, base: 8, pool: 2}}},
	{"two epochs", 3, 1, []plan{
		{job: 5, epoch: 4, workers: []int{0, 1, 2}, cohort: 7, base: 8, pool: 2, nextEpoch: 5},
		{job: 5, epoch: 5, workers: []int{0, 1, 2}, cohort: 5, servers: []int{0}, base: 12, pool: 2}}},
	// One lease under changing plans: epochs of one job, the third in the first one's slots, then another job in them.
	{"changes", 3, 1, []plan{
		{job: 6, epoch: 1, workers: []int{0, 1, 2}, cohort: 7, base: 8, pool: 2},
		{job: 6, epoch: 2, workers: []int{0, 1, 2}, cohort: 3, servers: []int{0}, base: 12, pool: 2, later: true},
		{job: 6, epoch: 3, workers: []int{0, 1, 2}, cohort: 7, base: 8, pool: 2, later: true},
		{job: 7, epoch: 1, workers: []int{2, 0}, cohort: 3, base: 8, pool: 4, later: true}}},
	{"quorum, at once", 4, 2, []plan{{job: 400, epoch: 1, workers: []int{0, 1, 2, 3}, cohort: 15, servers: []int{0, 1}, base: 16,
		pool: 2, nextEpoch: 2, quorum: true}}},
	{"quorum, at once, a steered rank", 4, 1, []plan{{job: 401, epoch: 3, workers: []int{3, 1, 0, 2}, cohort: 0b1101,
		servers: []int{0}, base: 32, pool: 4, quorum: true}}},
	{"quorum, not within an hour", 3, 1, []plan{{job: 402, epoch: 2, workers: []int{0, 1, 2}, cohort: 7, servers: []int{0}, base: 4080,
		pool: 4, quorum: true, wait: math.MaxUint32}}},
	{"quorum, sometimes", 3, 1, []plan{{job: 403, epoch: 2, workers: []int{0, 1, 2}, cohort: 7, servers: []int{0}, base: 8,
		pool: 4, quorum: true, wait: 300_000}}},
	// A lease's halves: a flushed slot of one epoch, and others in it or beside it that know no quorum.
	{"quorum, changes", 3, 1, []plan{
		{job: 404, epoch: 1, workers: []int{0, 1, 2}, cohort: 7, servers: []int{0}, base: 8, pool: 2, quorum: true},
		{job: 404, epoch: 2, workers: []int{0, 1, 2}, cohort: 7, servers: []int{0}, base: 12, pool: 2, later: true},
		{job: 404, epoch: 3, workers: []int{0, 1, 2}, cohort: 6, servers: []int{0}, base: 8, pool: 2, quorum: true, later: true},
		{job: 404, epoch: 4, workers: []int{0, 1, 2}, cohort: 7, base: 12, pool: 2, later: true}}},
	{"async", 3, 2, []plan{{job: 500, epoch: 5, workers: []int{0, 1, 2}, servers: []int{0, 1}, async: true}}},
}

// untimed are the scenarios in which nothing depends on the clock of a switch: it flushes at once or never.
func untimed() []scenario {
	timed := func(pl plan) bool { return pl.wait != 0 && pl.wait != math.MaxUint32 }
	return slices.DeleteFunc(slices.Clone(scenarios), func(s scenario) bool { return slices.ContainsFunc(s.plans, timed) })
}

// A controller knows which plans of a scenario are installed, and what to write where. Package p4 documents the tables.
type controller struct {
	s         *scenario
	installed []bool
}

func newController(s *scenario) *controller {
	return &controller{s, make([]bool, len(s.plans))}
}

func newEntry(table string, key []uint64, action string, params ...uint64) *entry {
	return &entry{table, key, action, params}
}

// groups are the multicast groups of a plan: all ranks, and the cohort.
func (c *controller) groups(i int) (all, cohort uint16) {
	if all = uint16(2 + 2*i); c.s.plans[i].cohort != 0 {
		cohort = all + 1
	}
	return all, cohort
}

// begin returns what is written before the first packet. Groups and replicas of all plans are there from the beginning.
func (c *controller) begin() []write {
	var w []write
	add := func(e *entry) { w = append(w, write{entry: e}) }
	everyone := &group{id: floodPort}
	for _, h := range c.s.hosts() {
		everyone.replicas = append(everyone.replicas, replica{h.port, 0})
		add(newEntry("ipv4", []uint64{num(h.addr.IP[:])}, "forward", uint64(h.port), num(h.addr.MAC[:])))
	}
	w = append(w, write{group: everyone})
	add(newEntry("arp", []uint64{num(service.IP[:])}, "arp_reply", num(service.MAC[:])))
	for i, pl := range c.s.plans {
		var all, cohort group
		all.id, cohort.id = c.groups(i)
		for r, n := range pl.workers {
			h := worker(n)
			instance := uint16(1 + i*wire.MaxRanks + r) // names the rank of the plan
			add(newEntry("replica", []uint64{uint64(instance)}, "to_rank", num(h.addr.MAC[:]), num(h.addr.IP[:]), uint64(h.addr.Port)))
			all.replicas = append(all.replicas, replica{h.port, instance})
			if pl.cohort>>r&1 != 0 {
				cohort.replicas = append(cohort.replicas, replica{h.port, instance})
			}
		}
		w = append(w, write{group: &all})
		if cohort.id != 0 {
			w = append(w, write{group: &cohort})
		}
		if !pl.later {
			w = append(w, c.change(&change{op: "install", plan: i})...)
		}
	}
	return w
}

// change returns what is written to change a plan, in an order that is safe while packets flow: what is asked first is
// the last to come and the first to go.
func (c *controller) change(ch *change) []write {
	pl := &c.s.plans[ch.plan]
	key := []uint64{uint64(pl.job), uint64(pl.epoch)}
	all, cohort := c.groups(ch.plan)
	set := func(next uint16) *entry {
		var final uint64
		if len(pl.servers) == 0 {
			final = 1
		}
		var quorum uint64
		if pl.quorum {
			quorum = 1
		}
		return newEntry("plan", key, "set_plan", pl.cohort, final, uint64(len(pl.servers)), uint64(all), uint64(next),
			quorum, uint64(pl.wait))
	}
	if ch.op == "arm" {
		return []write{{op: modify, entry: set(ch.next)}}
	}
	var w []write
	add := func(table string, key []uint64, action string, params ...uint64) {
		w = append(w, write{entry: newEntry(table, key, action, params...)})
	}
	for r, n := range pl.workers {
		h, bit := worker(n), uint64(1)<<r
		if key := append(key[:2:2], uint64(r)); pl.cohort&bit != 0 {
			add("member", key, "summed", uint64(h.port), num(h.addr.IP[:]), bit, uint64(pl.base), uint64(2*pl.pool-1))
		} else {
			add("member", key, "steered", uint64(h.port), num(h.addr.IP[:]), bit)
		}
	}
	for n, sv := range pl.servers {
		h := server(sv)
		add("server", append(key[:2:2], uint64(n)), "to_server", uint64(h.port), num(h.addr.MAC[:]), num(h.addr.IP[:]))
		add("returning", append([]uint64{uint64(h.port)}, key...), "from_server", num(service.MAC[:]), num(service.IP[:]),
			uint64(all), uint64(cohort))
	}
	w = append(w, write{entry: set(pl.nextEpoch)})
	c.installed[ch.plan] = false
	known := slices.ContainsFunc(c.s.plans, func(other plan) bool {
		return other.job == pl.job && c.installed[slices.IndexFunc(c.s.plans, other.is)]
	})
	if !known {
		add("job", key[:1], "known")
	}
	if c.installed[ch.plan] = ch.op == "install"; !c.installed[ch.plan] {
		slices.Reverse(w)
		for i := range w {
			w[i].op = remove
		}
	}
	return w
}

// hosts returns every host of the scenario.
func (s *scenario) hosts() []host {
	var hosts []host
	for w := range s.workers {
		hosts = append(hosts, worker(w))
	}
	for n := range s.servers {
		hosts = append(hosts, server(n))
	}
	return hosts
}

// num reads a big-endian number of up to eight bytes.
func num(b []byte) uint64 {
	var v uint64
	for _, c := range b {
		v = v<<8 | uint64(c)
	}
	return v
}

// marker is a packet-out that is always answered: the question for slot 0, from a UDP port that nothing else uses.
var marker = func() []byte {
	p := &wire.Packet{Header: wire.Header{Type: wire.TypeCtrl}}
	return wire.AppendFrame(nil, wire.Addr{Port: 1}, service, p, false)
}()

func isMarker(frame []byte) bool {
	src, _, _, _ := wire.ParseUDP(frame)
	return src.Port == 1
}
