package controller

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	"xagg/controller/p4rt"
)

// step is one write to one device.
type step struct {
	server   string // a server's name; empty = the switch
	remove   bool   // otherwise install, or change to what is wanted
	arm      bool   // of a server: only have the plan announce another
	entities []p4rt.Entity
	key      planKey    // of a server
	plan     serverPlan // of a server, when it is installed
}

// String names the step for logs and errors.
func (s step) String() string {
	verb := "install"
	if s.remove {
		verb = "remove"
	}
	if s.arm {
		return fmt.Sprintf("announce epoch %d in plan of job %d epoch %d on server %s", s.plan.next, s.key.job, s.key.epoch, s.server)
	}
	if s.server != "" {
		return fmt.Sprintf("%s plan of job %d epoch %d on server %s", verb, s.key.job, s.key.epoch, s.server)
	}
	return fmt.Sprintf("%s %d entities on the switch", verb, len(s.entities))
}

// diff returns the steps that turn have into want, make before break: plans on servers first, then the switch from
// what nothing depends on to what admits packets; then, since the next plan is complete, what announces it; only then,
// in the reverse order, what is no longer wanted. Whoever stops after any step, or within one, leaves nothing that refers
// to what is not there.
func diff(have, want objects) []step {
	var steps []step
	byPlan := func(a, b planKey) int {
		return cmp.Or(cmp.Compare(a.server, b.server), cmp.Compare(a.job, b.job), cmp.Compare(a.epoch, b.epoch))
	}
	for _, k := range slices.SortedFunc(maps.Keys(want.plans), byPlan) {
		p, w := have.plans[k], want.plans[k]
		if p.next = w.next; p != w {
			// It announces nothing until the rest is there. One that did so before may pause: what a slot has announced it
			// remembers, and who has heard it does not forget.
			w.next = 0
			steps = append(steps, step{server: k.server, key: k, plan: w})
		}
	}
	var install, remove [numPhases][]p4rt.Entity
	for _, k := range slices.Sorted(maps.Keys(want.entities)) {
		w := want.entities[k]
		if h, ok := have.entities[k]; !ok || h.doubt || !p4rt.Equal(h.entity, w.entity) {
			install[w.phase] = append(install[w.phase], w.entity)
		}
	}
	for _, k := range slices.Sorted(maps.Keys(have.entities)) {
		h := have.entities[k]
		if _, ok := want.entities[k]; !ok && !isDefault(h.entity) {
			remove[h.phase] = append(remove[h.phase], h.entity)
		}
	}
	for _, entities := range install {
		if len(entities) > 0 {
			steps = append(steps, step{entities: entities})
		}
	}
	for _, k := range slices.SortedFunc(maps.Keys(want.plans), byPlan) {
		p, w := have.plans[k], want.plans[k]
		announces := p.next
		if p.next = w.next; p != w {
			announces = 0 // installed anew above
		}
		if announces != w.next {
			steps = append(steps, step{server: k.server, key: k, plan: w, arm: true})
		}
	}
	for _, entities := range slices.Backward(remove[:]) {
		if len(entities) > 0 {
			steps = append(steps, step{entities: entities, remove: true})
		}
	}
	for _, k := range slices.SortedFunc(maps.Keys(have.plans), byPlan) {
		if _, ok := want.plans[k]; !ok {
			steps = append(steps, step{server: k.server, key: k, remove: true})
		}
	}
	return steps
}

// breakFirst returns the steps of a diff in another order: what is no longer wanted on the switch is removed before
// anything is installed there, so that its tables need not have room for both. Servers keep the job's lease.
func breakFirst(steps []step) []step {
	order := func(s step) int {
		switch {
		case s.server != "" && !s.remove && !s.arm:
			return 0
		case s.server == "" && s.remove:
			return 1
		default:
			return 2
		}
	}
	slices.SortStableFunc(steps, func(a, b step) int { return cmp.Compare(order(a), order(b)) })
	return steps
}

// isDefault reports whether an entity is a table's default action, which can be changed but not removed.
func isDefault(e p4rt.Entity) bool {
	entry, ok := e.(p4rt.Entry)
	return ok && entry.Default
}

// done records in have that a step was done.
func (s step) done(have objects, want objects) {
	switch {
	case s.server != "" && s.remove:
		delete(have.plans, s.key)
	case s.server != "":
		have.plans[s.key] = s.plan
	case s.remove:
		for _, e := range s.entities {
			delete(have.entities, e.Key())
		}
	default:
		for _, e := range s.entities {
			have.entities[e.Key()] = want.entities[e.Key()]
		}
	}
}

// doubted records in have that nobody knows what a step has done: it is installed again if it is wanted, and removed
// if it is not.
func (s step) doubted(have objects, want objects) {
	if s.server != "" {
		p := have.plans[s.key]
		p.doubt = true
		have.plans[s.key] = p
		return
	}
	for _, e := range s.entities {
		p, ok := have.entities[e.Key()]
		if !ok {
			p = want.entities[e.Key()]
		}
		p.doubt = true
		have.entities[e.Key()] = p
	}
}
