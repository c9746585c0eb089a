package engine

import (
	"errors"
	"fmt"
	"slices"
)

// Replica is one copy that a multicast group makes.
type Replica struct {
	Port     uint16
	Instance uint16 // the copy's egress_rid
}

// Errors of the multicast groups.
var (
	ErrGroupExists   = errors.New("multicast group already exists")
	ErrGroupNotFound = errors.New("multicast group does not exist")
	ErrDuplicate     = errors.New("duplicate replica in multicast group")
)

// MaxReplicationPort is the highest port that the replication engine copies to; replicas beyond are accepted and make
// no copy, as in bmv2.
const MaxReplicationPort = 511

// AddGroup makes a multicast group. Errors: ErrGroupExists, ErrDuplicate.
func (p *Program) AddGroup(id uint16, replicas []Replica) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, ok := p.groups[id]; ok {
		return ErrGroupExists
	}
	return p.setGroup(id, replicas)
}

// ModifyGroup replaces the replicas of a group. Errors: ErrGroupNotFound, ErrDuplicate.
func (p *Program) ModifyGroup(id uint16, replicas []Replica) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, ok := p.groups[id]; !ok {
		return ErrGroupNotFound
	}
	return p.setGroup(id, replicas)
}

func (p *Program) setGroup(id uint16, replicas []Replica) error {
	r := slices.Clone(replicas)
	// simple_switch copies by instance, then by port.
	slices.SortStableFunc(r, func(a, b Replica) int {
		if a.Instance != b.Instance {
			return int(a.Instance) - int(b.Instance)
		}
		return int(a.Port) - int(b.Port)
	})
	for i := 1; i < len(r); i++ {
		if r[i] == r[i-1] {
			return fmt.Errorf("%w: port %d, instance %d", ErrDuplicate, r[i].Port, r[i].Instance)
		}
	}
	p.groups[id] = r
	return nil
}

// DeleteGroup removes a group. Errors: ErrGroupNotFound.
func (p *Program) DeleteGroup(id uint16) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, ok := p.groups[id]; !ok {
		return ErrGroupNotFound
	}
	delete(p.groups, id)
	return nil
}

// Group returns the replicas of a group, ordered by instance and port.
func (p *Program) Group(id uint16) ([]Replica, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	r, ok := p.groups[id]
	return slices.Clone(r), ok
}

// Groups returns the ids of all groups in ascending order.
func (p *Program) Groups() []uint16 {
	p.mu.Lock()
	defer p.mu.Unlock()
	ids := make([]uint16, 0, len(p.groups))
	for id := range p.groups {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	return ids
}
