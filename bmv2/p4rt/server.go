package p4rt

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"sync"

	p4v1 "github.com/p4lang/p4runtime/go/p4/v1"
	spb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/anypb"

	"xagg/bmv2/engine"
)

// APIVersion is the version of P4Runtime that Capabilities names.
const APIVersion = "1.5.0"

// MaxMessage is the size in bytes of the largest message that a server should accept, as simple_switch_grpc does.
const MaxMessage = 256 << 20

// maxStreams is the number of controllers that may be connected at a time.
const maxStreams = 16

// Config is what a server needs.
type Config struct {
	// DeviceID is the only device that the server has.
	DeviceID uint64
	// Options are given to the engine when a pipeline is loaded.
	Options engine.Options
	// Commit makes a loaded program the one that forwards.
	Commit func(*engine.Program)
	// PacketOut injects a frame at the CPU port. Without one there is no packet I/O.
	PacketOut func(frame []byte) error
	// Log receives sessions and refused messages; nil discards it.
	Log *slog.Logger
}

// Server implements the P4Runtime service for one switch.
type Server struct {
	p4v1.UnimplementedP4RuntimeServer
	cfg Config
	log *slog.Logger

	mu      sync.RWMutex // guards pipe and config, and makes writes and pushes one at a time
	pipe    *pipeline    // nil before the first push
	config  *p4v1.ForwardingPipelineConfig
	streams struct {
		sync.Mutex
		list []*stream // the primary has the highest election id
	}
}

// New returns a server without a pipeline.
func New(cfg Config) *Server {
	s := &Server{cfg: cfg, log: cfg.Log}
	if s.log == nil {
		s.log = slog.New(slog.DiscardHandler)
	}
	return s
}

// electionID orders controllers; the zero value is what a message without one has.
type electionID struct{ high, low uint64 }

func (a electionID) less(b electionID) bool {
	return a.high < b.high || a.high == b.high && a.low < b.low
}

func idOf(u *p4v1.Uint128) electionID { return electionID{u.GetHigh(), u.GetLow()} }

func (s *Server) checkDevice(id uint64) error {
	if id != s.cfg.DeviceID {
		return errorf(codes.NotFound, "no device %d here, this is device %d", id, s.cfg.DeviceID)
	}
	return nil
}

// mayWrite allows the primary, and anyone without an election id while no controller is connected.
func (s *Server) mayWrite(device uint64, id *p4v1.Uint128) error {
	if err := s.checkDevice(device); err != nil {
		return err
	}
	s.streams.Lock()
	defer s.streams.Unlock()
	if p := s.primary(); p == nil && id == nil || p != nil && p.id == idOf(id) {
		return nil
	}
	return errorf(codes.PermissionDenied, "not primary")
}

// primary needs the lock of the streams.
func (s *Server) primary() *stream {
	var best *stream
	for _, c := range s.streams.list {
		if best == nil || best.id.less(c.id) {
			best = c
		}
	}
	return best
}

var errNoPipeline = status.Error(codes.FailedPrecondition, "no forwarding pipeline config set for this device")

// Capabilities implements p4v1.P4RuntimeServer.
func (s *Server) Capabilities(context.Context, *p4v1.CapabilitiesRequest) (*p4v1.CapabilitiesResponse, error) {
	return &p4v1.CapabilitiesResponse{P4RuntimeApiVersion: APIVersion}, nil
}

// SetForwardingPipelineConfig implements p4v1.P4RuntimeServer: VERIFY and VERIFY_AND_COMMIT. The other actions are
// UNIMPLEMENTED; simple_switch_grpc accepts them and then misbehaves.
func (s *Server) SetForwardingPipelineConfig(
	_ context.Context, r *p4v1.SetForwardingPipelineConfigRequest,
) (*p4v1.SetForwardingPipelineConfigResponse, error) {
	if err := s.mayWrite(r.GetDeviceId(), r.GetElectionId()); err != nil {
		return nil, err
	}
	switch r.GetAction() {
	case p4v1.SetForwardingPipelineConfigRequest_UNSPECIFIED:
		return nil, invalid("pipeline action is not set")
	case p4v1.SetForwardingPipelineConfigRequest_VERIFY, p4v1.SetForwardingPipelineConfigRequest_VERIFY_AND_COMMIT:
	default:
		return nil, errorf(codes.Unimplemented, "pipeline action %v is not supported", r.GetAction())
	}
	prog, err := engine.Load(r.GetConfig().GetP4DeviceConfig(), s.cfg.Options)
	if err != nil {
		return nil, invalid("%v", err)
	}
	if r.GetConfig().GetP4Info() == nil {
		return nil, invalid("config has no P4Info")
	}
	p, err := bind(prog, r.GetConfig().GetP4Info())
	if err != nil {
		return nil, invalid("P4Info does not belong to the program: %v", err)
	}
	if r.GetAction() == p4v1.SetForwardingPipelineConfigRequest_VERIFY {
		return &p4v1.SetForwardingPipelineConfigResponse{}, nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.pipe, s.config = p, r.GetConfig()
	s.cfg.Commit(prog)
	s.log.Info("pipeline set", "device", s.cfg.DeviceID, "cookie", r.GetConfig().GetCookie().GetCookie())
	return &p4v1.SetForwardingPipelineConfigResponse{}, nil
}

// GetForwardingPipelineConfig implements p4v1.P4RuntimeServer.
func (s *Server) GetForwardingPipelineConfig(
	_ context.Context, r *p4v1.GetForwardingPipelineConfigRequest,
) (*p4v1.GetForwardingPipelineConfigResponse, error) {
	if err := s.checkDevice(r.GetDeviceId()); err != nil {
		return nil, err
	}
	s.mu.RLock()
	defer s.mu.RUnlock()
	if s.pipe == nil {
		return nil, errNoPipeline
	}
	c := &p4v1.ForwardingPipelineConfig{Cookie: s.config.GetCookie()}
	info, device := false, false
	switch r.GetResponseType() {
	case p4v1.GetForwardingPipelineConfigRequest_ALL:
		info, device = true, true
	case p4v1.GetForwardingPipelineConfigRequest_COOKIE_ONLY:
	case p4v1.GetForwardingPipelineConfigRequest_P4INFO_AND_COOKIE:
		info = true
	case p4v1.GetForwardingPipelineConfigRequest_DEVICE_CONFIG_AND_COOKIE:
		device = true
	default:
		return nil, invalid("response type %d", r.GetResponseType())
	}
	if info {
		c.P4Info = s.config.GetP4Info()
	}
	if device {
		c.P4DeviceConfig = s.config.GetP4DeviceConfig()
	}
	return &p4v1.GetForwardingPipelineConfigResponse{Config: c}, nil
}

// Write implements p4v1.P4RuntimeServer. Every update is tried; if one fails the call is UNKNOWN and its details are
// one p4.v1.Error for each update in order, also for those that succeeded.
func (s *Server) Write(_ context.Context, r *p4v1.WriteRequest) (*p4v1.WriteResponse, error) {
	if err := s.mayWrite(r.GetDeviceId(), r.GetElectionId()); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.pipe == nil {
		return nil, errNoPipeline
	}
	if r.GetAtomicity() != p4v1.WriteRequest_CONTINUE_ON_ERROR {
		return nil, errorf(codes.Unimplemented, "atomicity %v is not supported", r.GetAtomicity())
	}
	failed := false
	details := make([]*p4v1.Error, len(r.GetUpdates()))
	for i, u := range r.GetUpdates() {
		st := status.Convert(s.pipe.write(u))
		details[i] = &p4v1.Error{CanonicalCode: int32(st.Code()), Message: st.Message(), Space: errorSpace}
		failed = failed || st.Code() != codes.OK
	}
	if !failed {
		return &p4v1.WriteResponse{}, nil
	}
	st := &spb.Status{Code: int32(codes.Unknown), Message: "write failed for some updates, see details"}
	for _, d := range details {
		a, err := anypb.New(d)
		if err != nil {
			return nil, errorf(codes.Internal, "pack error details: %v", err)
		}
		st.Details = append(st.Details, a)
	}
	return nil, status.ErrorProto(st)
}

func (p *pipeline) write(u *p4v1.Update) error {
	switch e := u.GetEntity().GetEntity().(type) {
	case *p4v1.Entity_TableEntry:
		return p.writeTable(u.GetType(), e.TableEntry)
	case *p4v1.Entity_CounterEntry:
		return p.writeCounter(u.GetType(), e.CounterEntry)
	case *p4v1.Entity_DirectCounterEntry:
		return p.writeDirectCounter(u.GetType(), e.DirectCounterEntry)
	case *p4v1.Entity_PacketReplicationEngineEntry:
		return p.writePRE(u.GetType(), e.PacketReplicationEngineEntry)
	case nil:
		return errorf(codes.Unknown, "update has no entity")
	}
	return unsupported(u.GetEntity())
}

// unsupported is the answer for entities that no program the engine loads has: like PI, an unknown id for those that
// have ids in the P4Info, UNIMPLEMENTED for those that simple_switch_grpc does not do either.
func unsupported(e *p4v1.Entity) error {
	switch e.GetEntity().(type) {
	case *p4v1.Entity_ActionProfileMember:
		return invalid("invalid P4 id: no action profile %#x", e.GetActionProfileMember().GetActionProfileId())
	case *p4v1.Entity_ActionProfileGroup:
		return invalid("invalid P4 id: no action profile %#x", e.GetActionProfileGroup().GetActionProfileId())
	case *p4v1.Entity_MeterEntry:
		return invalid("invalid P4 id: no meter %#x", e.GetMeterEntry().GetMeterId())
	case *p4v1.Entity_DirectMeterEntry:
		return invalid("table %#x has no direct meters", e.GetDirectMeterEntry().GetTableEntry().GetTableId())
	}
	name := "entity"
	if f := e.ProtoReflect().WhichOneof(e.ProtoReflect().Descriptor().Oneofs().ByName("entity")); f != nil {
		name = string(f.Name())
	}
	return errorf(codes.Unimplemented, "%s is not supported", name)
}

// Read implements p4v1.P4RuntimeServer. Everything asked for comes in one response, also what was read before an
// entity failed.
func (s *Server) Read(r *p4v1.ReadRequest, out p4v1.P4Runtime_ReadServer) error {
	if err := s.checkDevice(r.GetDeviceId()); err != nil {
		return err
	}
	resp := new(p4v1.ReadResponse)
	err := s.read(r, func(e *p4v1.Entity) { resp.Entities = append(resp.Entities, e) })
	if errors.Is(err, errNoPipeline) {
		return err
	}
	if sendErr := out.Send(resp); sendErr != nil {
		return sendErr
	}
	return err
}

func (s *Server) read(r *p4v1.ReadRequest, out reply) error {
	s.mu.RLock()
	defer s.mu.RUnlock()
	if s.pipe == nil {
		return errNoPipeline
	}
	for _, e := range r.GetEntities() {
		var err error
		switch e := e.GetEntity().(type) {
		case *p4v1.Entity_TableEntry:
			err = s.pipe.readTables(e.TableEntry, out)
		case *p4v1.Entity_CounterEntry:
			err = s.pipe.readCounters(e.CounterEntry, out)
		case *p4v1.Entity_DirectCounterEntry:
			err = s.pipe.readDirectCounters(e.DirectCounterEntry, out)
		case *p4v1.Entity_PacketReplicationEngineEntry:
			err = s.pipe.readPRE(e.PacketReplicationEngineEntry, out)
		case *p4v1.Entity_ActionProfileMember:
			if e.ActionProfileMember.GetActionProfileId() != 0 {
				err = unsupported(&p4v1.Entity{Entity: e})
			}
		case *p4v1.Entity_ActionProfileGroup:
			if e.ActionProfileGroup.GetActionProfileId() != 0 {
				err = unsupported(&p4v1.Entity{Entity: e})
			}
		case *p4v1.Entity_MeterEntry:
			if e.MeterEntry.GetMeterId() != 0 {
				err = unsupported(&p4v1.Entity{Entity: e})
			}
		case nil:
			err = errorf(codes.Unknown, "request has no entity")
		default:
			err = unsupported(&p4v1.Entity{Entity: e})
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// stream is a controller's stream channel.
type stream struct {
	id  electionID
	out chan *p4v1.StreamMessageResponse
	ctx context.Context
}

// streamQueue is the number of messages that wait for a controller. Packet-ins beyond are dropped, other messages wait.
const streamQueue = 1024

func (c *stream) send(m *p4v1.StreamMessageResponse) {
	if m.GetPacket() != nil {
		select {
		case c.out <- m:
		default:
		}
		return
	}
	select {
	case c.out <- m:
	case <-c.ctx.Done():
	}
}

// StreamChannel implements p4v1.P4RuntimeServer: arbitration, packet-out and packet-in.
func (s *Server) StreamChannel(ss p4v1.P4Runtime_StreamChannelServer) error {
	ctx, cancel := context.WithCancel(ss.Context())
	c := &stream{out: make(chan *p4v1.StreamMessageResponse, streamQueue), ctx: ctx}
	var writer sync.WaitGroup
	writer.Go(func() {
		for {
			select {
			case m := <-c.out:
				if ss.Send(m) != nil {
					cancel() // unblocks whoever waits to send; Recv fails with the stream
					return
				}
			case <-ctx.Done():
				return
			}
		}
	})
	defer writer.Wait()
	defer cancel()
	joined := false
	defer func() {
		if joined {
			s.leave(c)
		}
	}()
	for {
		m, err := ss.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		switch u := m.GetUpdate().(type) {
		case *p4v1.StreamMessageRequest_Arbitration:
			if err := s.checkDevice(u.Arbitration.GetDeviceId()); err != nil {
				if joined {
					return errorf(codes.FailedPrecondition, "device id changed to %d", u.Arbitration.GetDeviceId())
				}
				return err
			}
			if err := s.arbitrate(c, idOf(u.Arbitration.GetElectionId()), joined); err != nil {
				return err
			}
			joined = true
		case *p4v1.StreamMessageRequest_Packet:
			if err := s.packetOut(c, u.Packet); err != nil {
				st := status.Convert(err)
				s.log.Warn("packet-out refused", "err", st.Message())
				c.send(streamError(st, &p4v1.StreamError{Details: &p4v1.StreamError_PacketOut{
					PacketOut: &p4v1.PacketOutError{PacketOut: u.Packet}}}))
			}
		default:
			name := "message without content"
			if f := m.ProtoReflect().WhichOneof(m.ProtoReflect().Descriptor().Oneofs().ByName("update")); f != nil {
				name = string(f.Name())
			}
			st := status.Newf(codes.Unimplemented, "%s is not supported", name)
			other, _ := anypb.New(m) // fails only for messages without a name
			c.send(streamError(st, &p4v1.StreamError{Details: &p4v1.StreamError_Other{
				Other: &p4v1.StreamOtherError{Other: other}}}))
		}
	}
}

// errorSpace is simple_switch_grpc's name for its own error codes.
const errorSpace = "ALL-sswitch-p4org"

func streamError(st *status.Status, e *p4v1.StreamError) *p4v1.StreamMessageResponse {
	e.CanonicalCode, e.Message, e.Space = int32(st.Code()), st.Message(), errorSpace
	return &p4v1.StreamMessageResponse{Update: &p4v1.StreamMessageResponse_Error{Error: e}}
}

// arbitrate lets a controller join or change its election id, and tells those whom it concerns: all, if there is
// another primary now, else the controller alone.
func (s *Server) arbitrate(c *stream, id electionID, joined bool) error {
	s.streams.Lock()
	defer s.streams.Unlock()
	if joined && c.id == id {
		return nil // as PI: no answer to a repetition
	}
	for _, o := range s.streams.list {
		if o != c && o.id == id {
			return invalid("election id already exists")
		}
	}
	before := s.primary()
	if !joined {
		if len(s.streams.list) >= maxStreams {
			return errorf(codes.ResourceExhausted, "too many connections: %d", maxStreams)
		}
		s.streams.list = append(s.streams.list, c)
	}
	c.id = id
	primary := s.primary()
	s.log.Info("controller joined", "device", s.cfg.DeviceID, "election_id", id.low, "primary", primary == c)
	if before != primary {
		s.notifyAll(primary)
	} else {
		s.notify(c, primary)
	}
	return nil
}

func (s *Server) leave(c *stream) {
	s.streams.Lock()
	defer s.streams.Unlock()
	was := s.primary()
	for i, o := range s.streams.list {
		if o == c {
			s.streams.list = append(s.streams.list[:i], s.streams.list[i+1:]...)
			break
		}
	}
	if was == c {
		s.notifyAll(s.primary())
	}
}

func (s *Server) notifyAll(primary *stream) {
	for _, o := range s.streams.list {
		s.notify(o, primary)
	}
}

func (s *Server) notify(c, primary *stream) {
	st := &spb.Status{Code: int32(codes.OK), Message: "Is primary"}
	if c != primary {
		st = &spb.Status{Code: int32(codes.AlreadyExists), Message: "Is backup"}
	}
	m := &p4v1.StreamMessageResponse{Update: &p4v1.StreamMessageResponse_Arbitration{
		Arbitration: &p4v1.MasterArbitrationUpdate{
			DeviceId:   s.cfg.DeviceID,
			ElectionId: &p4v1.Uint128{High: primary.id.high, Low: primary.id.low},
			Status:     st,
		}}}
	// Never wait for a controller that does not read while holding the streams' lock: one that lets a thousand
	// messages pile up learns of its role from its next refused write.
	select {
	case c.out <- m:
	default:
	}
}

func (s *Server) packetOut(c *stream, po *p4v1.PacketOut) error {
	s.streams.Lock()
	primary := s.primary()
	s.streams.Unlock()
	if primary != c {
		return errorf(codes.PermissionDenied, "not primary")
	}
	s.mu.RLock()
	p := s.pipe
	s.mu.RUnlock()
	if p == nil {
		return errNoPipeline
	}
	frame, err := p.encodeOut(po)
	if err != nil {
		return err
	}
	if s.cfg.PacketOut == nil {
		return errorf(codes.Unknown, "the switch has no CPU port")
	}
	if err := s.cfg.PacketOut(frame); err != nil {
		return errorf(codes.Unknown, "packet-out: %v", err)
	}
	return nil
}

// PacketIn gives a frame that left by the CPU port to the primary, if there is one. The frame is not kept.
func (s *Server) PacketIn(frame []byte) {
	s.mu.RLock()
	p := s.pipe
	s.mu.RUnlock()
	if p == nil {
		return
	}
	s.streams.Lock()
	primary := s.primary()
	s.streams.Unlock()
	if primary == nil {
		return
	}
	pi := p.decodeIn(frame)
	if pi == nil {
		s.log.Warn("packet-in is shorter than the packet_in header", "bytes", len(frame))
		return
	}
	primary.send(&p4v1.StreamMessageResponse{Update: &p4v1.StreamMessageResponse_Packet{Packet: pi}})
}
