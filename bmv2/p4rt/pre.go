package p4rt

import (
	"encoding/binary"
	"errors"

	p4v1 "github.com/p4lang/p4runtime/go/p4/v1"
	"google.golang.org/grpc/codes"

	"xagg/bmv2/engine"
)

// firstReservedGroup and above are PI's own group ids.
const firstReservedGroup = 1 << 15

func (p *pipeline) writePRE(typ p4v1.Update_Type, pe *p4v1.PacketReplicationEngineEntry) error {
	switch e := pe.GetType().(type) {
	case *p4v1.PacketReplicationEngineEntry_MulticastGroupEntry:
		return p.writeGroup(typ, e.MulticastGroupEntry)
	case *p4v1.PacketReplicationEngineEntry_CloneSessionEntry:
		return errorf(codes.Unimplemented, "clone sessions are not supported")
	}
	return invalid("invalid PRE operation")
}

func (p *pipeline) writeGroup(typ p4v1.Update_Type, g *p4v1.MulticastGroupEntry) error {
	id := g.GetMulticastGroupId()
	switch {
	case id == 0:
		return invalid("0 is not a valid multicast group id")
	case id >= firstReservedGroup:
		return errorf(codes.OutOfRange, "multicast group id %d is too high, the last is %d", id, firstReservedGroup-1)
	case len(g.GetMetadata()) != 0:
		return errorf(codes.Unimplemented, "multicast group %d: metadata is not supported", id)
	}
	if typ == p4v1.Update_DELETE {
		delete(p.replicas, uint16(id))
		return groupError(id, p.prog.DeleteGroup(uint16(id)))
	}
	var replicas []engine.Replica
	forms := map[engine.Replica]*p4v1.Replica{}
	for _, r := range g.GetReplicas() {
		port, err := replicaPort(r)
		if err != nil {
			return err
		}
		switch {
		case len(r.GetBackupReplicas()) != 0:
			return errorf(codes.Unimplemented, "multicast group %d: backup replicas are not supported", id)
		case r.GetInstance() > 0xffff:
			return invalid("multicast group %d: instance %d is above 65535", id, r.GetInstance())
		}
		er := engine.Replica{Port: port, Instance: uint16(r.GetInstance())}
		replicas = append(replicas, er)
		forms[er] = r
	}
	var err error
	switch typ {
	case p4v1.Update_INSERT:
		err = p.prog.AddGroup(uint16(id), replicas)
	case p4v1.Update_MODIFY:
		err = p.prog.ModifyGroup(uint16(id), replicas)
	default:
		return updateType(typ)
	}
	if err == nil {
		p.replicas[uint16(id)] = forms
	}
	return groupError(id, err)
}

// replicaPort reads either form of a replica's port. Ports that no switch has are kept as the highest number.
func replicaPort(r *p4v1.Replica) (uint16, error) {
	var v uint32
	switch p := r.GetPortKind().(type) {
	case *p4v1.Replica_EgressPort:
		v = p.EgressPort
	case *p4v1.Replica_Port:
		switch {
		case len(p.Port) == 0:
			return 0, invalid("replica port must not be the empty string")
		case len(p.Port) > 4:
			return 0, errorf(codes.Unimplemented, "replica port of %d bytes, 4 are supported", len(p.Port))
		}
		var b [4]byte
		copy(b[4-len(p.Port):], p.Port)
		v = binary.BigEndian.Uint32(b[:])
		if int32(v) <= 0 {
			return 0, invalid("replica port %d is not positive", int32(v))
		}
	default:
		return 0, invalid("missing port in multicast group replica")
	}
	return uint16(min(v, 0xffff)), nil
}

func groupError(id uint32, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, engine.ErrGroupExists):
		return errorf(codes.AlreadyExists, "multicast group %d already exists", id)
	case errors.Is(err, engine.ErrGroupNotFound):
		return errorf(codes.NotFound, "multicast group %d does not exist", id)
	}
	return invalid("multicast group %d: %v", id, err)
}

func (p *pipeline) readPRE(pe *p4v1.PacketReplicationEngineEntry, out reply) error {
	switch e := pe.GetType().(type) {
	case *p4v1.PacketReplicationEngineEntry_MulticastGroupEntry:
		id := e.MulticastGroupEntry.GetMulticastGroupId()
		if id >= firstReservedGroup {
			return errorf(codes.OutOfRange, "multicast group id %d is too high, the last is %d", id, firstReservedGroup-1)
		}
		if id == 0 {
			for _, g := range p.prog.Groups() {
				p.readGroup(g, out)
			}
			return nil
		}
		if !p.readGroup(uint16(id), out) {
			return errorf(codes.NotFound, "multicast group %d does not exist", id)
		}
		return nil
	case *p4v1.PacketReplicationEngineEntry_CloneSessionEntry:
		return errorf(codes.Unimplemented, "clone sessions are not supported")
	}
	return invalid("invalid PRE operation")
}

func (p *pipeline) readGroup(id uint16, out reply) bool {
	replicas, ok := p.prog.Group(id)
	if !ok {
		return false
	}
	g := &p4v1.MulticastGroupEntry{MulticastGroupId: uint32(id)}
	for _, r := range replicas {
		g.Replicas = append(g.Replicas, p.replicas[id][r]) // as it was written: the port has two forms
	}
	out(&p4v1.Entity{Entity: &p4v1.Entity_PacketReplicationEngineEntry{
		PacketReplicationEngineEntry: &p4v1.PacketReplicationEngineEntry{
			Type: &p4v1.PacketReplicationEngineEntry_MulticastGroupEntry{MulticastGroupEntry: g}}}})
	return true
}
