package controller

import (
	"math/bits"
	"net/netip"

	"xagg/controller/p4rt"
)

// phase orders what is installed on the switch: something refers only to what has an earlier phase. It is removed in
// the reverse order.
type phase uint8

const (
	phaseReplica phase = iota // how a multicast copy is rewritten to its rank
	phaseGroup                // who gets copies
	phaseMember               // who may send, and the way to and from the servers
	phasePlan                 // from here on the switch sums
	phaseArmed                // a plan that announces another one, here or on a server
	phaseJob                  // from here on the switch knows the job
	numPhases
)

// placed is an entity of the switch with its phase.
type placed struct {
	phase  phase
	entity p4rt.Entity
	doubt  bool // installed or not: the write that would have told failed
}

// planKey names a plan on a server.
type planKey struct {
	server     string
	job, epoch uint16
}

// serverPlan is a job's plan on a server.
type serverPlan struct {
	ranks          uint64
	chunks, rounds uint32
	quorum         uint32 // ranks that are enough, 0 = all
	waitUS         uint32 // quorum: how long it waits for more
	async          bool
	staleness      uint32
	next           uint16 // epoch that it announces, 0 = none
	doubt          bool   // installed or not
}

// objects is what is installed somewhere, or is to be: plain data.
type objects struct {
	entities map[string]placed // by key
	plans    map[planKey]serverPlan
}

func newObjects() objects {
	return objects{entities: make(map[string]placed), plans: make(map[planKey]serverPlan)}
}

func (o objects) empty() bool { return len(o.entities) == 0 && len(o.plans) == 0 }

func (o objects) add(p phase, e p4rt.Entity) { o.entities[e.Key()] = placed{phase: p, entity: e} }

func num[T ~int | ~uint8 | ~uint16 | ~uint32 | ~uint64](v T) p4rt.Value { return p4rt.Uint(uint64(v)) }

func ipv4(a netip.Addr) p4rt.Value {
	b := a.As4()
	return p4rt.Bytes(b[:])
}

func mac(m MAC) p4rt.Value { return p4rt.Bytes(m[:]) }

// desiredBase returns what the switch has whether there are jobs or not: ordinary forwarding and ARP.
func desiredBase(cfg *Config) objects {
	out := newObjects()
	flood := p4rt.Group{ID: floodGroup}
	link := func(ip netip.Addr, hw MAC, port uint16) {
		flood.Replicas = append(flood.Replicas, p4rt.Replica{Port: uint32(port)})
		out.add(phaseMember, p4rt.Entry{
			Table:  tableIPv4,
			Match:  []p4rt.Match{{Field: "hdr.ipv4.dst", Value: ipv4(ip), Prefix: 32}},
			Action: actionForward,
			Params: []p4rt.Param{{Name: "port", Value: num(port)}, {Name: "mac", Value: mac(hw)}},
		})
	}
	for _, h := range cfg.Hosts {
		link(h.IP, h.MAC, h.Port)
	}
	for _, s := range cfg.Servers {
		link(s.IP, s.MAC, s.Port)
	}
	out.add(phaseGroup, flood)
	out.add(phaseMember, p4rt.Entry{
		Table: tableARP, Default: true, Action: actionFlood,
		Params: []p4rt.Param{{Name: "group", Value: num(floodGroup)}},
	})
	out.add(phaseMember, p4rt.Entry{
		Table:  tableARP,
		Match:  []p4rt.Match{{Field: "hdr.arp.tpa", Value: ipv4(cfg.Service.IP)}},
		Action: actionARPReply,
		Params: []p4rt.Param{{Name: "mac", Value: mac(cfg.Service.MAC)}},
	})
	return out
}

// desiredJob returns what a job needs: its plans on the servers from its creation on, and on the switch once all its
// ranks have joined.
func desiredJob(in *intent, j *job) objects {
	out := newObjects()
	for _, p := range j.plans() {
		next := j.announced(p)
		for i, name := range p.decision.Servers {
			s := j.serverPlan(p)
			if i == 0 {
				// Chunk 0 of every round, which alone announces, belongs to the first server (chunk mod number of servers).
				s.next = next
			}
			out.plans[planKey{name, j.id, p.epoch}] = s
		}
		if j.members != nil {
			desiredPlan(out, in, j, p, next)
		}
	}
	if j.members != nil {
		out.add(phaseJob, p4rt.Entry{
			Table:  tableJob,
			Match:  []p4rt.Match{{Field: fieldJob, Value: num(j.id)}},
			Action: actionKnown,
		})
	}
	return out
}

// serverPlan returns what a plan of a job is on every one of its servers.
func (j *job) serverPlan(p plan) serverPlan {
	return serverPlan{
		ranks: j.ranks(), chunks: j.chunks(), rounds: j.rounds(),
		quorum: uint32(p.quorum), waitUS: microsOf(p.decision.Wait), async: j.async(), staleness: uint32(j.spec.Consistency.Staleness),
	}
}

// desiredPlan adds what a plan needs on the switch. What two plans of a job have in common is added twice, and equal.
func desiredPlan(out objects, in *intent, j *job, p plan, next uint16) {
	key := func(more ...p4rt.Match) []p4rt.Match {
		return append([]p4rt.Match{
			{Field: fieldJob, Value: num(j.id)}, {Field: fieldEpoch, Value: num(p.epoch)},
		}, more...)
	}
	all, cohort := p4rt.Group{ID: uint32(j.groupAll())}, p4rt.Group{ID: uint32(j.groupCohort(p))}
	for rank, m := range j.members {
		rid := j.rids.base + rank
		bit := uint64(1) << rank
		copyTo := p4rt.Replica{Port: uint32(m.host.Port), Instance: uint32(rid)}
		all.Replicas = append(all.Replicas, copyTo)

		admit := p4rt.Entry{
			Table:  tableMember,
			Match:  key(p4rt.Match{Field: fieldRank, Value: num(rank)}),
			Action: actionSteered,
			Params: []p4rt.Param{
				{Name: "port", Value: num(m.host.Port)},
				{Name: "ip", Value: ipv4(m.host.IP)},
				{Name: "bit_", Value: num(bit)},
			},
		}
		if p.decision.Cohort&bit != 0 {
			cohort.Replicas = append(cohort.Replicas, copyTo)
			admit.Action = actionSummed
			admit.Params = append(admit.Params,
				p4rt.Param{Name: "base", Value: num(j.half(p))},
				p4rt.Param{Name: "mask", Value: num(2*p.decision.Pool - 1)})
		}
		out.add(phaseMember, admit)
		out.add(phaseReplica, p4rt.Entry{
			Table:  tableReplica,
			Match:  []p4rt.Match{{Field: fieldRID, Value: num(rid)}},
			Action: actionToRank,
			Params: []p4rt.Param{
				{Name: "mac", Value: mac(m.host.MAC)},
				{Name: "ip", Value: ipv4(m.host.IP)},
				{Name: "port", Value: num(m.udpPort)},
			},
		})
	}
	out.add(phaseGroup, all)

	// Only a server answers the cohort as such: with an ACK of a PARTIAL.
	cohortGroup := 0
	if len(p.decision.Servers) > 0 && bits.OnesCount64(p.decision.Cohort) > 0 {
		cohortGroup = j.groupCohort(p)
		out.add(phaseGroup, cohort)
	}
	for i, name := range p.decision.Servers {
		s := in.server(name)
		out.add(phaseMember, p4rt.Entry{
			Table:  tableServer,
			Match:  key(p4rt.Match{Field: "meta.server", Value: num(i)}),
			Action: actionToServer,
			Params: []p4rt.Param{
				{Name: "port", Value: num(s.Port)}, {Name: "mac", Value: mac(s.MAC)}, {Name: "ip", Value: ipv4(s.IP)},
			},
		})
		out.add(phaseMember, p4rt.Entry{
			Table:  tableReturning,
			Match:  key(p4rt.Match{Field: "standard_metadata.ingress_port", Value: num(s.Port)}),
			Action: actionFromServer,
			Params: []p4rt.Param{
				{Name: "mac", Value: mac(in.cfg.Service.MAC)}, {Name: "ip", Value: ipv4(in.cfg.Service.IP)},
				{Name: "all_", Value: num(j.groupAll())}, {Name: "cohort", Value: num(cohortGroup)},
			},
		})
	}
	final, phase := 0, phasePlan
	if next != 0 {
		phase = phaseArmed
	}
	if len(p.decision.Servers) == 0 {
		final = 1
	} else {
		next = 0 // the server's to announce
	}
	out.add(phase, p4rt.Entry{
		Table:  tablePlan,
		Match:  key(),
		Action: actionSetPlan,
		Params: []p4rt.Param{
			{Name: "expected", Value: num(p.decision.Cohort)},
			{Name: "final", Value: num(final)},
			{Name: "servers", Value: num(len(p.decision.Servers))},
			{Name: "group", Value: num(j.groupAll())},
			{Name: "next_epoch", Value: num(next)},
			{Name: "quorum", Value: num(p.quorum)},
			{Name: "wait_us", Value: num(microsOf(p.decision.Wait))},
		},
	})
}
