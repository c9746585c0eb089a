package conformance

import (
	"cmp"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"slices"

	p4config "github.com/p4lang/p4runtime/go/p4/config/v1"
	p4v1 "github.com/p4lang/p4runtime/go/p4/v1"
	"google.golang.org/grpc"

	"xagg/bmv2/engine"
	"xagg/p4"
)

// A session is a P4Runtime client that is primary and has pushed the program. It is deliberately not the controller's:
// what is tested here is the switch.
type session struct {
	client p4v1.P4RuntimeClient
	info   *p4config.P4Info
	stream p4v1.P4Runtime_StreamChannelClient
}

var electionID = &p4v1.Uint128{Low: 1}

// openSession becomes primary of the switch behind conn and pushes xagg.p4. The session ends with ctx.
func openSession(ctx context.Context, conn *grpc.ClientConn) (*session, error) {
	info, err := p4.P4Info()
	if err != nil {
		return nil, err
	}
	s := &session{client: p4v1.NewP4RuntimeClient(conn), info: info}
	if s.stream, err = s.client.StreamChannel(ctx, grpc.WaitForReady(true)); err != nil {
		return nil, fmt.Errorf("open stream: %w", err)
	}
	err = s.stream.Send(&p4v1.StreamMessageRequest{Update: &p4v1.StreamMessageRequest_Arbitration{
		Arbitration: &p4v1.MasterArbitrationUpdate{ElectionId: electionID}}})
	if err != nil {
		return nil, fmt.Errorf("send arbitration: %w", err)
	}
	answer, err := s.stream.Recv()
	if err != nil {
		return nil, fmt.Errorf("arbitrate: %w", err)
	}
	if code := answer.GetArbitration().GetStatus().GetCode(); answer.GetArbitration() == nil || code != 0 {
		return nil, fmt.Errorf("arbitrate: %v", answer)
	}
	_, err = s.client.SetForwardingPipelineConfig(ctx, &p4v1.SetForwardingPipelineConfigRequest{
		ElectionId: electionID,
		Action:     p4v1.SetForwardingPipelineConfigRequest_VERIFY_AND_COMMIT,
		Config:     &p4v1.ForwardingPipelineConfig{P4Info: info, P4DeviceConfig: p4.JSON},
	})
	if err != nil {
		return nil, fmt.Errorf("push the program: %w", err)
	}
	return s, nil
}

// write carries out what a controller writes.
func (s *session) write(ctx context.Context, writes []write) error {
	var updates []*p4v1.Update
	for _, w := range writes {
		typ := []p4v1.Update_Type{insert: p4v1.Update_INSERT, modify: p4v1.Update_MODIFY, remove: p4v1.Update_DELETE}[w.op]
		entity := &p4v1.Entity{}
		if w.group != nil {
			m := &p4v1.MulticastGroupEntry{MulticastGroupId: uint32(w.group.id)}
			for _, r := range w.group.replicas {
				m.Replicas = append(m.Replicas, &p4v1.Replica{
					PortKind: &p4v1.Replica_EgressPort{EgressPort: uint32(r.port)}, Instance: uint32(r.instance)})
			}
			entity.Entity = &p4v1.Entity_PacketReplicationEngineEntry{
				PacketReplicationEngineEntry: &p4v1.PacketReplicationEngineEntry{
					Type: &p4v1.PacketReplicationEngineEntry_MulticastGroupEntry{MulticastGroupEntry: m}}}
		} else {
			t, err := s.tableEntry(w.entry)
			if err != nil {
				return err
			}
			entity.Entity = &p4v1.Entity_TableEntry{TableEntry: t}
		}
		updates = append(updates, &p4v1.Update{Type: typ, Entity: entity})
	}
	_, err := s.client.Write(ctx, &p4v1.WriteRequest{ElectionId: electionID, Updates: updates})
	if err != nil {
		return fmt.Errorf("write %d updates: %w", len(updates), err)
	}
	return nil
}

// tableEntry spells e in P4Runtime's terms. Key fields and parameters are in the program's order.
func (s *session) tableEntry(e *entry) (*p4v1.TableEntry, error) {
	ti := slices.IndexFunc(s.info.Tables, func(t *p4config.Table) bool { return t.Preamble.Alias == e.table })
	ai := slices.IndexFunc(s.info.Actions, func(a *p4config.Action) bool { return a.Preamble.Alias == e.action })
	if ti < 0 || ai < 0 {
		return nil, fmt.Errorf("entry %v: the program has no such table or action", e)
	}
	table, action := s.info.Tables[ti], s.info.Actions[ai]
	if len(table.MatchFields) != len(e.key) || len(action.Params) != len(e.params) {
		return nil, fmt.Errorf("entry %v: the program has %d key fields and %d parameters", e,
			len(table.MatchFields), len(action.Params))
	}
	t := &p4v1.TableEntry{TableId: table.Preamble.Id}
	for i, f := range table.MatchFields {
		m := &p4v1.FieldMatch{FieldId: f.Id}
		if f.GetMatchType() == p4config.MatchField_LPM {
			m.FieldMatchType = &p4v1.FieldMatch_Lpm{Lpm: &p4v1.FieldMatch_LPM{Value: canonical(e.key[i]), PrefixLen: f.Bitwidth}}
		} else {
			m.FieldMatchType = &p4v1.FieldMatch_Exact_{Exact: &p4v1.FieldMatch_Exact{Value: canonical(e.key[i])}}
		}
		t.Match = append(t.Match, m)
	}
	a := &p4v1.Action{ActionId: action.Preamble.Id}
	for i, p := range action.Params {
		a.Params = append(a.Params, &p4v1.Action_Param{ParamId: p.Id, Value: canonical(e.params[i])})
	}
	t.Action = &p4v1.TableAction{Type: &p4v1.TableAction_Action{Action: a}}
	return t, nil
}

// canonical is P4Runtime's form of a number: the shortest that holds it.
func canonical(v uint64) []byte {
	b := binary.BigEndian.AppendUint64(nil, v)
	for len(b) > 1 && b[0] == 0 {
		b = b[1:]
	}
	return b
}

// packetOut sends a frame from the CPU port out of port.
func (s *session) packetOut(port uint16, frame []byte) error {
	return s.stream.Send(&p4v1.StreamMessageRequest{Update: &p4v1.StreamMessageRequest_Packet{Packet: &p4v1.PacketOut{
		Payload:  frame,
		Metadata: []*p4v1.PacketMetadata{{MetadataId: 1, Value: canonical(uint64(port))}},
	}}})
}

// packetIn waits for the next packet-in.
func (s *session) packetIn() ([]byte, error) {
	for {
		m, err := s.stream.Recv()
		if err != nil {
			return nil, err
		}
		if p := m.GetPacket(); p != nil {
			return p.Payload, nil
		}
		if m.GetError() != nil {
			return nil, fmt.Errorf("the switch reports: %v", m.GetError())
		}
	}
}

// counter reads a counter array, in packets.
func (s *session) counter(ctx context.Context, alias string) ([]int64, error) {
	i := slices.IndexFunc(s.info.Counters, func(c *p4config.Counter) bool { return c.Preamble.Alias == alias })
	if i < 0 {
		return nil, fmt.Errorf("counter %s: the program has none", alias)
	}
	stream, err := s.client.Read(ctx, &p4v1.ReadRequest{Entities: []*p4v1.Entity{{
		Entity: &p4v1.Entity_CounterEntry{CounterEntry: &p4v1.CounterEntry{CounterId: s.info.Counters[i].Preamble.Id}}}}})
	if err != nil {
		return nil, fmt.Errorf("read counter %s: %w", alias, err)
	}
	answer, err := stream.Recv()
	if err != nil {
		return nil, fmt.Errorf("read counter %s: %w", alias, err)
	}
	packets := make([]int64, s.info.Counters[i].Size)
	for _, e := range answer.Entities {
		c := e.GetCounterEntry()
		packets[c.Index.GetIndex()] = c.Data.GetPacketCount()
	}
	return packets, nil
}

// counters reads all of the program's counters.
func (s *session) counters(ctx context.Context) (map[string]engine.CounterValue, error) {
	names := make(map[uint32]string)
	var wanted []*p4v1.Entity
	for _, c := range s.info.Counters {
		names[c.Preamble.Id] = c.Preamble.Alias
		wanted = append(wanted, &p4v1.Entity{Entity: &p4v1.Entity_CounterEntry{CounterEntry: &p4v1.CounterEntry{CounterId: c.Preamble.Id}}})
	}
	for _, c := range s.info.DirectCounters {
		names[c.DirectTableId] = c.Preamble.Alias
		wanted = append(wanted, &p4v1.Entity{Entity: &p4v1.Entity_DirectCounterEntry{
			DirectCounterEntry: &p4v1.DirectCounterEntry{TableEntry: &p4v1.TableEntry{TableId: c.DirectTableId}}}})
	}
	stream, err := s.client.Read(ctx, &p4v1.ReadRequest{Entities: wanted})
	if err != nil {
		return nil, fmt.Errorf("read counters: %w", err)
	}
	out := make(map[string]engine.CounterValue)
	for {
		answer, err := stream.Recv()
		if err == io.EOF {
			return out, nil
		}
		if err != nil {
			return nil, fmt.Errorf("read counters: %w", err)
		}
		for _, e := range answer.Entities {
			if c := e.GetCounterEntry(); c != nil {
				cell := fmt.Sprintf("%s %d", names[c.CounterId], c.Index.GetIndex())
				out[cell] = engine.CounterValue{Packets: uint64(c.Data.GetPacketCount()), Bytes: uint64(c.Data.GetByteCount())}
			}
			if c := e.GetDirectCounterEntry(); c != nil {
				slices.SortFunc(c.TableEntry.Match, func(a, b *p4v1.FieldMatch) int { return cmp.Compare(a.FieldId, b.FieldId) })
				cell := names[c.TableEntry.TableId]
				for _, m := range c.TableEntry.Match {
					cell += fmt.Sprintf(" %d", bigEndian(m.GetExact().GetValue()))
				}
				out[cell] = engine.CounterValue{Packets: uint64(c.Data.GetPacketCount()), Bytes: uint64(c.Data.GetByteCount())}
			}
		}
	}
}

// bigEndian is the number in up to eight bytes.
func bigEndian(b []byte) uint64 {
	var n uint64
	for _, x := range b {
		n = n<<8 | uint64(x)
	}
	return n
}
