package conformance

import (
	"math/bits"

	"xagg/wire"
)

const (
	cpuPort   = 510
	floodPort = 1 // multicast group of the table arp's default action
	slots     = 4096
)

// input is a frame at a port, or for cpuPort a packet-out to the port egress.
type input struct {
	port   uint16
	egress uint16
	frame  []byte
}

// output is a frame that a switch sent out of a port; cpuPort stands for a packet-in.
type output struct {
	port  uint16
	frame []byte
}

// program is what a controller writes: entries whose keys and parameters are in the P4 program's order.
type program struct {
	groups  []group
	entries []entry
}

type group struct {
	id       uint16
	replicas []replica
}

type replica struct{ port, instance uint16 }

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
}

func (p *plan) ranks() uint64 { return 1<<len(p.workers) - 1 }

// A scenario is a programmed switch.
type scenario struct {
	name             string
	workers, servers int
	plans            []plan
}

var scenarios = []scenario{
	{"switch", 3, 0, []plan{{job: 7, epoch: 1, workers: []int{0, 1, 2}, cohort: 7, base: 8, pool: 2}}},
	{"switch, armed", 2, 0, []plan{{job: 0xfffe, epoch: 0xffff, workers: []int{0, 1}, cohort: 3, base: 0, pool: 4, nextEpoch: 1}}},
	{"one rank", 1, 0, []plan{{job: 1, epoch: 2, workers: []int{0}, cohort: 1, base: 4088, pool: 2, nextEpoch: 3}}},
	{"hybrid", 4, 1, []plan{{job: 300, epoch: 1, workers: []int{0, 1, 2, 3}, cohort: 7, servers: []int{0}, base: 16, pool: 2}}},
	{"hybrid, two servers", 4, 2, []plan{{job: 301, epoch: 2, workers: []int{3, 2, 1, 0}, cohort: 0b1010, servers: []int{1, 0}, base: 32, pool: 4}}},
	{"server", 3, 1, []plan{{job: 9, epoch: 5, workers: []int{0, 1, 2}, servers: []int{0}}}},
	{"two jobs", 4, 1, []plan{
		{job: 20, epoch: 1, workers: []int{0, 1}, cohort: 3, base: 0, pool: 2},
		{job: 21, epoch: 1, workers: []int{2, 3, 0}, cohort: 3, servers: []int{0}, base: 8, pool: 2}}},
	{"two epochs", 3, 1, []plan{
		{job: 5, epoch: 4, workers: []int{0, 1, 2}, cohort: 7, base: 8, pool: 2, nextEpoch: 5},
		{job: 5, epoch: 5, workers: []int{0, 1, 2}, cohort: 5, servers: []int{0}, base: 12, pool: 2}}},
}

// program is the scenario as docs of package p4 say that a controller programs it.
func (s *scenario) program() program {
	var p program
	add := func(table string, key []uint64, action string, params ...uint64) {
		p.entries = append(p.entries, entry{table, key, action, params})
	}
	everyone := group{id: floodPort}
	for _, h := range s.hosts() {
		everyone.replicas = append(everyone.replicas, replica{h.port, 0})
		add("ipv4", []uint64{num(h.addr.IP[:])}, "forward", uint64(h.port), num(h.addr.MAC[:]))
	}
	p.groups = append(p.groups, everyone)
	add("arp", []uint64{num(service.IP[:])}, "arp_reply", num(service.MAC[:]))

	seen := map[uint16]bool{}
	for i, pl := range s.plans {
		job, epoch := uint64(pl.job), uint64(pl.epoch)
		all, cohort := group{id: uint16(2 + 2*i)}, group{id: uint16(3 + 2*i)}
		for r, w := range pl.workers {
			h := worker(w)
			bit := uint64(1) << r
			// The instance names the rank of the plan.
			instance := uint16(1 + i*wire.MaxRanks + r)
			add("replica", []uint64{uint64(instance)}, "to_rank", num(h.addr.MAC[:]), num(h.addr.IP[:]), uint64(h.addr.Port))
			all.replicas = append(all.replicas, replica{h.port, instance})
			key := []uint64{job, epoch, uint64(r)}
			if pl.cohort&bit != 0 {
				cohort.replicas = append(cohort.replicas, replica{h.port, instance})
				add("member", key, "summed", uint64(h.port), num(h.addr.IP[:]), bit, uint64(pl.base), uint64(2*pl.pool-1))
			} else {
				add("member", key, "steered", uint64(h.port), num(h.addr.IP[:]), bit)
			}
		}
		p.groups = append(p.groups, all)
		if pl.cohort == 0 {
			cohort.id = 0
		} else {
			p.groups = append(p.groups, cohort)
		}
		if !seen[pl.job] {
			seen[pl.job] = true
			add("job", []uint64{job}, "known")
		}
		var final uint64
		if bits.OnesCount64(pl.cohort) == len(pl.workers) {
			final = 1
		}
		add("plan", []uint64{job, epoch}, "set_plan", pl.cohort, final, uint64(len(pl.servers)), uint64(all.id), uint64(pl.nextEpoch))
		for n, sv := range pl.servers {
			h := server(sv)
			add("server", []uint64{job, epoch, uint64(n)}, "to_server", uint64(h.port), num(h.addr.MAC[:]), num(h.addr.IP[:]))
			add("returning", []uint64{uint64(h.port), job, epoch}, "from_server",
				num(service.MAC[:]), num(service.IP[:]), uint64(all.id), uint64(cohort.id))
		}
	}
	return p
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
