// Package p4rttest is a P4Runtime server for tests of what talks to a switch. It keeps tables and multicast groups as
// simple_switch_grpc does, also where that is odd, and forwards no packets.
package p4rttest

import (
	"context"
	"fmt"
	"maps"
	"net"
	"slices"
	"sync"
	"testing"

	configv1 "github.com/p4lang/p4runtime/go/p4/config/v1"
	p4v1 "github.com/p4lang/p4runtime/go/p4/v1"
	rpcstatus "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	"xagg/controller/p4rt"
)

// Server is a fake switch. Set the hooks before the first client comes.
type Server struct {
	p4v1.UnimplementedP4RuntimeServer

	// OnUpdate, if set, is asked before each update of a write; an error refuses it. It runs with the server locked.
	OnUpdate func(p4rt.Update) error
	// OnWrite, if set, may replace the status of a whole write that failed.
	OnWrite func(error) error
	// OnPacketOut, if set, answers a packet-out with any number of packet-ins.
	OnPacketOut func(*p4v1.PacketOut) []*p4v1.PacketIn
	// OnRead, if set, may refuse a read. It runs with the server locked.
	OnRead func() error
	// OnPush, if set, may refuse a pipeline.
	OnPush func() error

	lis *bufconn.Listener

	mu       sync.Mutex
	grpc     *grpc.Server
	program  *p4rt.Program
	config   *p4v1.ForwardingPipelineConfig
	pushes   int
	entities map[string]p4rt.Entity // what P4Runtime knows
	copies   map[uint32]int         // what the switch has of each multicast group
	counters map[string][]p4rt.Count
	direct   map[string]uint64 // packets by entry's key
	log      []string
	streams  map[*stream]struct{}
}

type stream struct {
	election p4rt.ElectionID
	send     sync.Mutex
	server   p4v1.P4Runtime_StreamChannelServer
}

// New starts a server that knows entities by the names of program; it stops with the test.
func New(tb testing.TB, program *p4rt.Program) *Server {
	tb.Helper()
	s := &Server{
		program:  program,
		entities: make(map[string]p4rt.Entity),
		copies:   make(map[uint32]int),
		counters: make(map[string][]p4rt.Count),
		direct:   make(map[string]uint64),
	}
	s.Start()
	tb.Cleanup(func() {
		s.Stop()
		s.lis.Close()
	})
	return s
}

// Start serves again after Stop, as a switch that has lost everything.
func (s *Server) Start() {
	s.mu.Lock()
	s.config = nil
	clear(s.entities)
	clear(s.copies)
	s.mu.Unlock()
	s.Resume()
}

// Resume serves again after Stop, as a switch that could not be reached.
func (s *Server) Resume() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lis = bufconn.Listen(1 << 20)
	s.grpc = grpc.NewServer()
	s.streams = make(map[*stream]struct{})
	p4v1.RegisterP4RuntimeServer(s.grpc, s)
	srv, lis := s.grpc, s.lis
	go srv.Serve(lis)
}

// Stop ends every connection.
func (s *Server) Stop() {
	s.mu.Lock()
	srv := s.grpc
	s.mu.Unlock()
	srv.Stop()
}

// Dial connects to the server, whatever the address.
func (s *Server) Dial(ctx context.Context, _ string) (net.Conn, error) {
	s.mu.Lock()
	lis := s.lis
	s.mu.Unlock()
	return lis.DialContext(ctx)
}

// Entities returns what is installed, by key.
func (s *Server) Entities() map[string]p4rt.Entity {
	s.mu.Lock()
	defer s.mu.Unlock()
	return maps.Clone(s.entities)
}

// Copies returns how often the switch has a multicast group's replicas: 1 unless a pipeline was pushed over it.
func (s *Server) Copies(group uint32) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.copies[group]
}

// Pushes returns how many pipelines were pushed.
func (s *Server) Pushes() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.pushes
}

// Log returns the updates that were done, in order, as text, and forgets them.
func (s *Server) Log() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	log := s.log
	s.log = nil
	return log
}

// SetCounter sets the cells of an indirect counter; those that are not given are not answered.
func (s *Server) SetCounter(name string, cells []p4rt.Count) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.counters[name] = cells
}

// SetDirectCounter sets the packets that an entry has counted, by the entry's key; without that it is 1.
func (s *Server) SetDirectCounter(key string, packets uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.direct[key] = packets
}

// StreamChannel implements P4Runtime.
func (s *Server) StreamChannel(srv p4v1.P4Runtime_StreamChannelServer) error {
	var me *stream
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if me != nil {
			delete(s.streams, me)
			s.announce()
		}
	}()
	for {
		msg, err := srv.Recv()
		if err != nil {
			return nil
		}
		switch m := msg.GetUpdate().(type) {
		case *p4v1.StreamMessageRequest_Arbitration:
			id := p4rt.ElectionID{High: m.Arbitration.GetElectionId().GetHigh(), Low: m.Arbitration.GetElectionId().GetLow()}
			s.mu.Lock()
			for other := range s.streams {
				if other != me && other.election == id {
					s.mu.Unlock()
					return status.Error(codes.InvalidArgument, "Election id already exists")
				}
			}
			if me == nil {
				me = &stream{server: srv}
			}
			me.election = id
			s.streams[me] = struct{}{}
			s.announce()
			s.mu.Unlock()
		case *p4v1.StreamMessageRequest_Packet:
			s.mu.Lock()
			answer := s.OnPacketOut
			ok := s.config != nil && s.primary() == me
			s.mu.Unlock()
			if !ok || answer == nil {
				continue // vanishes, as with PI
			}
			for _, in := range answer(m.Packet) {
				me.reply(&p4v1.StreamMessageResponse{Update: &p4v1.StreamMessageResponse_Packet{Packet: in}})
			}
		}
	}
}

func (st *stream) reply(msg *p4v1.StreamMessageResponse) {
	st.send.Lock()
	defer st.send.Unlock()
	st.server.Send(msg)
}

func less(a, b p4rt.ElectionID) bool { return a.High < b.High || a.High == b.High && a.Low < b.Low }

// primary returns the stream with the highest election id; s is locked.
func (s *Server) primary() *stream {
	var best *stream
	for st := range s.streams {
		if best == nil || less(best.election, st.election) {
			best = st
		}
	}
	return best
}

// announce tells every stream who is primary; s is locked.
func (s *Server) announce() {
	best := s.primary()
	for st := range s.streams {
		code := codes.AlreadyExists
		if st == best {
			code = codes.OK
		}
		st.reply(&p4v1.StreamMessageResponse{Update: &p4v1.StreamMessageResponse_Arbitration{
			Arbitration: &p4v1.MasterArbitrationUpdate{
				ElectionId: &p4v1.Uint128{High: best.election.High, Low: best.election.Low},
				Status:     &rpcstatus.Status{Code: int32(code)},
			},
		}})
	}
}

func (s *Server) checkPrimary(id *p4v1.Uint128) error {
	best := s.primary()
	if best == nil || best.election != (p4rt.ElectionID{High: id.GetHigh(), Low: id.GetLow()}) {
		return status.Error(codes.PermissionDenied, "Not primary")
	}
	return nil
}

func noPipeline() error {
	return status.Error(codes.FailedPrecondition, "No forwarding pipeline config set for this device")
}

// GetForwardingPipelineConfig implements P4Runtime.
func (s *Server) GetForwardingPipelineConfig(_ context.Context, req *p4v1.GetForwardingPipelineConfigRequest) (
	*p4v1.GetForwardingPipelineConfigResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.config == nil {
		return nil, noPipeline()
	}
	return &p4v1.GetForwardingPipelineConfigResponse{
		Config: &p4v1.ForwardingPipelineConfig{Cookie: s.config.GetCookie()},
	}, nil
}

// SetForwardingPipelineConfig implements P4Runtime. Groups stay in the switch while they are forgotten here.
func (s *Server) SetForwardingPipelineConfig(_ context.Context, req *p4v1.SetForwardingPipelineConfigRequest) (
	*p4v1.SetForwardingPipelineConfigResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.checkPrimary(req.GetElectionId()); err != nil {
		return nil, err
	}
	if req.GetAction() != p4v1.SetForwardingPipelineConfigRequest_VERIFY_AND_COMMIT {
		return nil, status.Errorf(codes.Unimplemented, "%s", req.GetAction())
	}
	if s.OnPush != nil {
		if err := s.OnPush(); err != nil {
			return nil, err
		}
	}
	s.pushes++
	s.config = proto.CloneOf(req.GetConfig())
	clear(s.entities)
	return &p4v1.SetForwardingPipelineConfigResponse{}, nil
}

// Write implements P4Runtime: every update is tried, and a failure has a p4.v1.Error for each of them.
func (s *Server) Write(_ context.Context, req *p4v1.WriteRequest) (*p4v1.WriteResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.checkPrimary(req.GetElectionId()); err != nil {
		return nil, err
	}
	if s.config == nil {
		return nil, noPipeline()
	}
	st := &rpcstatus.Status{Code: int32(codes.Unknown)}
	failed := false
	for _, u := range req.GetUpdates() {
		err := s.update(u)
		failed = failed || err != nil
		detail, merr := anypb.New(&p4v1.Error{
			CanonicalCode: int32(status.Code(err)), Message: status.Convert(err).Message(), Space: "ALL-sswitch-p4org",
		})
		if merr != nil {
			return nil, merr
		}
		st.Details = append(st.Details, detail)
	}
	if !failed {
		return &p4v1.WriteResponse{}, nil
	}
	err := status.FromProto(st).Err()
	if s.OnWrite != nil {
		err = s.OnWrite(err)
	}
	return nil, err
}

func (s *Server) update(u *p4v1.Update) error {
	e, err := s.program.Decode(u.GetEntity())
	if err != nil {
		return status.Error(codes.InvalidArgument, err.Error())
	}
	op := map[p4v1.Update_Type]p4rt.Op{
		p4v1.Update_INSERT: p4rt.Insert, p4v1.Update_MODIFY: p4rt.Modify, p4v1.Update_DELETE: p4rt.Delete,
	}[u.GetType()]
	up := p4rt.Update{Op: op, Entity: e}
	if s.OnUpdate != nil {
		if err := s.OnUpdate(up); err != nil {
			return err
		}
	}
	_, exists := s.entities[e.Key()]
	entry, _ := e.(p4rt.Entry)
	group, isGroup := e.(p4rt.Group)
	switch {
	case entry.Default && op != p4rt.Modify:
		return status.Error(codes.InvalidArgument, "default entries can only be modified")
	case op == p4rt.Insert && exists:
		return status.Error(codes.AlreadyExists, "")
	case op != p4rt.Insert && !exists && !entry.Default:
		return status.Error(codes.NotFound, "")
	}
	switch {
	case op == p4rt.Delete:
		delete(s.entities, e.Key())
		if isGroup {
			delete(s.copies, group.ID)
		}
	default:
		s.entities[e.Key()] = e
		if isGroup && op == p4rt.Insert {
			s.copies[group.ID]++
		}
	}
	s.log = append(s.log, up.String())
	return nil
}

// Read implements P4Runtime with PI's habits: one message, and defaults among the entries.
func (s *Server) Read(req *p4v1.ReadRequest, srv p4v1.P4Runtime_ReadServer) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.config == nil {
		return noPipeline()
	}
	if s.OnRead != nil {
		if err := s.OnRead(); err != nil {
			return err
		}
	}
	reply := &p4v1.ReadResponse{}
	for _, want := range req.GetEntities() {
		switch want := want.GetEntity().(type) {
		case *p4v1.Entity_TableEntry:
			for _, key := range slices.Sorted(maps.Keys(s.entities)) {
				e, err := s.program.Encode(s.entities[key])
				if err != nil {
					return err
				}
				if te := e.GetTableEntry(); te.GetTableId() == want.TableEntry.GetTableId() {
					reply.Entities = append(reply.Entities, e)
				}
			}
		case *p4v1.Entity_PacketReplicationEngineEntry:
			for _, key := range slices.Sorted(maps.Keys(s.entities)) {
				if g, ok := s.entities[key].(p4rt.Group); ok {
					e, err := s.program.Encode(g)
					if err != nil {
						return err
					}
					reply.Entities = append(reply.Entities, e)
				}
			}
		case *p4v1.Entity_CounterEntry:
			name, _ := s.program.CounterName(want.CounterEntry.GetCounterId())
			for i, c := range s.counters[name] {
				reply.Entities = append(reply.Entities, &p4v1.Entity{Entity: &p4v1.Entity_CounterEntry{
					CounterEntry: &p4v1.CounterEntry{
						CounterId: want.CounterEntry.GetCounterId(),
						Index:     &p4v1.Index{Index: int64(i)},
						Data:      &p4v1.CounterData{PacketCount: int64(c.Packets), ByteCount: int64(c.Bytes)},
					},
				}})
			}
		case *p4v1.Entity_DirectCounterEntry:
			for _, key := range slices.Sorted(maps.Keys(s.entities)) {
				e, err := s.program.Encode(s.entities[key])
				if err != nil {
					return err
				}
				te := e.GetTableEntry()
				if te.GetTableId() != want.DirectCounterEntry.GetTableEntry().GetTableId() {
					continue
				}
				packets, counted := s.direct[key]
				if !counted {
					packets = 1
				}
				reply.Entities = append(reply.Entities, &p4v1.Entity{Entity: &p4v1.Entity_DirectCounterEntry{
					DirectCounterEntry: &p4v1.DirectCounterEntry{
						TableEntry: &p4v1.TableEntry{TableId: te.GetTableId(), Match: te.GetMatch()},
						Data:       &p4v1.CounterData{PacketCount: int64(packets), ByteCount: 1},
					},
				}})
			}
		default:
			return status.Errorf(codes.Unimplemented, "read of %T", want)
		}
	}
	return srv.Send(reply)
}

// Program returns a program with one table of each kind that tests use, and its P4Info and JSON.
func Program() (*configv1.P4Info, []byte) {
	pre := func(id uint32, name string) *configv1.Preamble { return &configv1.Preamble{Id: id, Name: name} }
	info := &configv1.P4Info{
		Tables: []*configv1.Table{
			{
				Preamble: pre(0x02000001, "I.plan"), Size: 8,
				MatchFields: []*configv1.MatchField{
					{Id: 1, Name: "job", Bitwidth: 16, Match: &configv1.MatchField_MatchType_{MatchType: configv1.MatchField_EXACT}},
					{Id: 2, Name: "epoch", Bitwidth: 16, Match: &configv1.MatchField_MatchType_{MatchType: configv1.MatchField_EXACT}},
				},
				ActionRefs: []*configv1.ActionRef{{Id: 0x01000001}, {Id: 0x01000003, Scope: configv1.ActionRef_DEFAULT_ONLY}},
			},
			{
				Preamble: pre(0x02000002, "I.ipv4"), Size: 8,
				MatchFields: []*configv1.MatchField{
					{Id: 1, Name: "dst", Bitwidth: 32, Match: &configv1.MatchField_MatchType_{MatchType: configv1.MatchField_LPM}},
				},
				ActionRefs: []*configv1.ActionRef{{Id: 0x01000002}, {Id: 0x01000004, Scope: configv1.ActionRef_TABLE_ONLY}},
			},
			{
				Preamble: pre(0x02000003, "I.fixed"), Size: 8, IsConstTable: true,
				MatchFields: []*configv1.MatchField{
					{Id: 1, Name: "dst", Bitwidth: 32, Match: &configv1.MatchField_MatchType_{MatchType: configv1.MatchField_EXACT}},
				},
				ActionRefs: []*configv1.ActionRef{{Id: 0x01000002}},
			},
		},
		Actions: []*configv1.Action{
			{Preamble: pre(0x01000001, "I.set"), Params: []*configv1.Action_Param{{Id: 1, Name: "mask", Bitwidth: 64}, {Id: 2, Name: "group", Bitwidth: 16}}},
			{Preamble: pre(0x01000002, "I.forward"), Params: []*configv1.Action_Param{{Id: 1, Name: "port", Bitwidth: 9}}},
			{Preamble: pre(0x01000003, "NoAction")},
			{Preamble: pre(0x01000004, "I.drop")},
		},
		Counters:       []*configv1.Counter{{Preamble: pre(0x12000001, "I.reasons"), Size: 4}},
		DirectCounters: []*configv1.DirectCounter{{Preamble: pre(0x13000001, "I.traffic"), DirectTableId: 0x02000001}},
		Registers:      []*configv1.Register{{Preamble: pre(0x16000001, "I.slots"), Size: 64}},
		ControllerPacketMetadata: []*configv1.ControllerPacketMetadata{
			{Preamble: pre(0x04000001, "packet_in"), Metadata: []*configv1.ControllerPacketMetadata_Metadata{{Id: 1, Name: "ingress_port", Bitwidth: 16}}},
			{Preamble: pre(0x04000002, "packet_out"), Metadata: []*configv1.ControllerPacketMetadata_Metadata{{Id: 1, Name: "egress_port", Bitwidth: 16}}},
		},
	}
	var names string
	for _, t := range info.GetTables() {
		names += fmt.Sprintf(`{"name":%q},`, t.GetPreamble().GetName())
	}
	json := fmt.Sprintf(`{"pipelines":[{"tables":[%s]}],"actions":[{"name":"I.set"},{"name":"I.forward"},{"name":"NoAction"},{"name":"I.drop"}],
		"counter_arrays":[{"name":"I.reasons"}],"register_arrays":[{"name":"I.slots"}]}`, names[:len(names)-1])
	return info, []byte(json)
}
