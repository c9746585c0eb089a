package p4rt

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strings"
	"sync"

	p4v1 "github.com/p4lang/p4runtime/go/p4/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"xagg/internal/endpoint"
)

// MaxMessage is the largest message in bytes that is accepted: bmv2 answers a read with a single message, however
// much there is.
const MaxMessage = 256 << 20

// Target says which switch a session is held with.
type Target struct {
	Address  string     // of the P4Runtime server, as Dial takes it
	DeviceID uint64     // the switch's own
	Election ElectionID // the controller with the highest one is primary
	// Dial opens a connection to Address.
	Dial endpoint.Dialer
	// Backup, if set, is called when another controller is primary and the session waits to become it.
	Backup func(primary ElectionID)
	Log    *slog.Logger // nil discards
}

// ElectionID decides between controllers: the highest is primary. Zero is not a valid one.
type ElectionID struct{ High, Low uint64 }

// String writes the id as it is usually written: the low half alone where the high one is zero.
func (e ElectionID) String() string {
	if e.High == 0 {
		return fmt.Sprint(e.Low)
	}
	return fmt.Sprintf("%d:%d", e.High, e.Low)
}

func (e ElectionID) proto() *p4v1.Uint128 { return &p4v1.Uint128{High: e.High, Low: e.Low} }

func electionID(u *p4v1.Uint128) ElectionID { return ElectionID{u.GetHigh(), u.GetLow()} }

// Reasons for which a session ends.
var (
	// ErrNotPrimary: another controller with a higher election id took over.
	ErrNotPrimary = errors.New("another controller is primary")
	// ErrStreamClosed: the switch closed the session's stream without an error.
	ErrStreamClosed = errors.New("the switch closed the stream")
)

// Session is what a handler does things with while channel, arbitration and pipeline are good. Its methods are safe
// for concurrent use.
type Session struct {
	program *Program
	target  Target
	log     *slog.Logger
	client  p4v1.P4RuntimeClient
	pushed  bool
	cookie  uint64 // of the pipeline that the switch runs

	send   sync.Mutex // serializes stream.Send
	stream p4v1.P4Runtime_StreamChannelClient

	mu   sync.Mutex
	subs []*subscription
}

type subscription struct {
	match func(Packet) bool
	ch    chan Packet
}

// Run holds one session: it connects, waits until this controller is primary, sees to it that the switch runs the
// program, and calls handle. The context of handle ends, with the reason as its cause, when the stream breaks, another
// controller becomes primary, or ctx ends. Run returns when handle has: handle's error, or the reason for which the
// session ended, whichever came first. It does not try again.
func Run(ctx context.Context, target Target, program *Program, handle func(context.Context, *Session) error) error {
	log := target.Log
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	conn, err := endpoint.DialBy(target.Dial, target.Address,
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(MaxMessage), grpc.MaxCallSendMsgSize(MaxMessage)))
	if err != nil {
		return err
	}
	defer conn.Close()

	ctx, cancel := context.WithCancelCause(ctx)
	var receiving sync.WaitGroup
	defer receiving.Wait()
	defer cancel(nil)

	s := &Session{program: program, target: target, log: log, client: p4v1.NewP4RuntimeClient(conn)}
	if s.stream, err = s.client.StreamChannel(ctx); err != nil {
		return fmt.Errorf("open stream: %w", cause(ctx, err))
	}
	if err := s.stream.Send(&p4v1.StreamMessageRequest{Update: &p4v1.StreamMessageRequest_Arbitration{
		Arbitration: &p4v1.MasterArbitrationUpdate{DeviceId: target.DeviceID, ElectionId: target.Election.proto()},
	}}); err != nil && !errors.Is(err, io.EOF) { // EOF: Recv has the reason
		return fmt.Errorf("ask for arbitration: %w", cause(ctx, err))
	}
	primary := make(chan struct{})
	receiving.Go(func() { cancel(s.receive(primary)) })

	select {
	case <-primary:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	if err := s.ensurePipeline(ctx); err != nil {
		return cause(ctx, err)
	}
	err = handle(ctx, s)
	if c := context.Cause(ctx); c != nil && (err == nil || errors.Is(err, context.Canceled) || status.Code(err) == codes.Canceled) {
		return c
	}
	return err
}

// cause prefers the reason for which ctx ended to an error that merely says that it did.
func cause(ctx context.Context, err error) error {
	if c := context.Cause(ctx); c != nil {
		return c
	}
	return err
}

// receive takes what the switch sends until the stream ends or primacy is lost, and returns why.
func (s *Session) receive(primary chan<- struct{}) error {
	isPrimary := false
	for {
		msg, err := s.stream.Recv()
		if errors.Is(err, io.EOF) {
			return ErrStreamClosed
		}
		if err != nil {
			return fmt.Errorf("stream to the switch: %w", err)
		}
		switch m := msg.GetUpdate().(type) {
		case *p4v1.StreamMessageResponse_Arbitration:
			// The status alone says who is primary: PI promotes a backup with the election id of its own choice.
			code := codes.Code(m.Arbitration.GetStatus().GetCode())
			switch {
			case code == codes.OK && !isPrimary:
				isPrimary = true
				close(primary)
			case code != codes.OK && isPrimary:
				return fmt.Errorf("%w (election id %s)", ErrNotPrimary, electionID(m.Arbitration.GetElectionId()))
			case code != codes.OK:
				other := electionID(m.Arbitration.GetElectionId())
				s.log.Warn("another controller is primary, waiting", "election_id", other.String())
				if s.target.Backup != nil {
					s.target.Backup(other)
				}
			}
		case *p4v1.StreamMessageResponse_Packet:
			pkt, err := s.program.decodePacket(m.Packet)
			if err != nil {
				s.log.Warn("packet-in is not understood", "err", err)
				continue
			}
			s.deliver(pkt)
		case *p4v1.StreamMessageResponse_Error:
			s.log.Warn("the switch refused a stream message",
				"code", codes.Code(m.Error.GetCanonicalCode()).String(), "err", m.Error.GetMessage())
		default:
			s.log.Debug("stream message ignored", "type", fmt.Sprintf("%T", m))
		}
	}
}

// ensurePipeline pushes the program unless the switch says that it runs it already, whoever pushed it.
func (s *Session) ensurePipeline(ctx context.Context) error {
	reply, err := s.client.GetForwardingPipelineConfig(ctx, &p4v1.GetForwardingPipelineConfigRequest{
		DeviceId:     s.target.DeviceID,
		ResponseType: p4v1.GetForwardingPipelineConfigRequest_COOKIE_ONLY,
	})
	has := false
	switch status.Code(err) {
	case codes.OK:
		c := reply.GetConfig().GetCookie()
		if c != nil && s.program.runs(c.GetCookie()) {
			s.cookie = c.GetCookie()
			return nil
		}
		has = reply.GetConfig() != nil
	case codes.FailedPrecondition, codes.NotFound: // no pipeline yet
	default:
		return fmt.Errorf("read pipeline's cookie: %w", err)
	}
	if has {
		// The groups outlive the pipeline inside bmv2 while PI forgets them: created anew, they would copy twice.
		if err := s.deleteGroups(ctx); err != nil && status.Code(err) != codes.FailedPrecondition {
			return fmt.Errorf("push pipeline: %w", err)
		}
	}
	s.cookie = s.program.pushCookie()
	s.log.Info("pushing the pipeline", "cookie", fmt.Sprintf("%#x", s.cookie))
	if _, err := s.client.SetForwardingPipelineConfig(ctx, &p4v1.SetForwardingPipelineConfigRequest{
		DeviceId:   s.target.DeviceID,
		ElectionId: s.target.Election.proto(),
		Action:     p4v1.SetForwardingPipelineConfigRequest_VERIFY_AND_COMMIT,
		Config: &p4v1.ForwardingPipelineConfig{
			P4Info:         s.program.info,
			P4DeviceConfig: s.program.json,
			Cookie:         &p4v1.ForwardingPipelineConfig_Cookie{Cookie: s.cookie},
		},
	}); err != nil {
		return fmt.Errorf("push pipeline: %w", err)
	}
	s.pushed = true
	return nil
}

// Program returns the program that the switch runs.
func (s *Session) Program() *Program { return s.program }

// Pushed reports whether the session pushed the pipeline; otherwise the switch ran it already.
func (s *Session) Pushed() bool { return s.pushed }

// Cookie returns the cookie of the pipeline that the switch runs. It is another one after each push, and so says whether
// the switch may still have what it had.
func (s *Session) Cookie() uint64 { return s.cookie }

// Upsert inserts entities in their order, or modifies those that are there already; a default entry is always a
// modification. All are tried, and the error is the one of [Session.Write].
func (s *Session) Upsert(ctx context.Context, entities ...Entity) error {
	updates := make([]Update, len(entities))
	for i, e := range entities {
		updates[i] = Update{Insert, e}
		if entry, ok := e.(Entry); ok && entry.Default {
			updates[i].Op = Modify
		}
	}
	rest, err := except(s.Write(ctx, updates), codes.AlreadyExists)
	if len(rest) == 0 {
		return err
	}
	for i := range rest {
		rest[i].Op = Modify
	}
	return errors.Join(err, s.Write(ctx, rest))
}

// Delete deletes entities in their order. One that is not there is no error; of an entry only table and match matter.
func (s *Session) Delete(ctx context.Context, entities ...Entity) error {
	updates := make([]Update, len(entities))
	for i, e := range entities {
		updates[i] = Update{Delete, e}
	}
	_, err := except(s.Write(ctx, updates), codes.NotFound)
	return err
}

// except takes the updates that failed with code out of a write's error.
func except(err error, code codes.Code) (taken []Update, rest error) {
	var werr *WriteError
	if !errors.As(err, &werr) {
		return nil, err
	}
	left := &WriteError{Updates: werr.Updates, Status: slices.Clone(werr.Status)}
	for i, st := range left.Status {
		if st.Code() == code {
			taken = append(taken, left.Updates[i])
			left.Status[i] = status.New(codes.OK, "")
		}
	}
	if left.failures() == 0 {
		return taken, nil
	}
	return taken, left
}

// Read reads entities, all kinds of them. bmv2 ignores most of what narrows a request, so a caller filters.
func (s *Session) Read(ctx context.Context, wanted ...*p4v1.Entity) ([]*p4v1.Entity, error) {
	if len(wanted) == 0 {
		return nil, nil
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := s.client.Read(ctx, &p4v1.ReadRequest{DeviceId: s.target.DeviceID, Entities: wanted})
	if err != nil {
		return nil, err
	}
	var entities []*p4v1.Entity
	for {
		reply, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return entities, nil
		}
		if err != nil {
			return nil, err
		}
		entities = append(entities, reply.GetEntities()...)
	}
}

// Entries reads the entries of a table, without its default entry.
func (s *Session) Entries(ctx context.Context, tableName string) ([]Entry, error) {
	tab := s.program.tables[tableName]
	if tab == nil {
		return nil, fmt.Errorf("read entries of %s: there is no such table", tableName)
	}
	got, err := s.Read(ctx, &p4v1.Entity{Entity: &p4v1.Entity_TableEntry{TableEntry: &p4v1.TableEntry{TableId: tab.id}}})
	if err != nil {
		return nil, fmt.Errorf("read entries of %s: %w", tableName, err)
	}
	var entries []Entry
	for _, e := range got {
		te := e.GetTableEntry()
		if te == nil || te.GetTableId() != tab.id || te.GetIsDefaultAction() {
			continue
		}
		entry, err := s.program.decodeEntry(te)
		if err != nil {
			return nil, err
		}
		entries = append(entries, entry.(Entry))
	}
	return entries, nil
}

// Groups reads all multicast groups.
func (s *Session) Groups(ctx context.Context) ([]Group, error) {
	got, err := s.Read(ctx, groupEntity(&p4v1.MulticastGroupEntry{}))
	if err != nil {
		return nil, fmt.Errorf("read multicast groups: %w", err)
	}
	var groups []Group
	for _, e := range got {
		g := e.GetPacketReplicationEngineEntry().GetMulticastGroupEntry()
		if g == nil {
			continue
		}
		group, err := decodeGroup(g)
		if err != nil {
			return nil, err
		}
		groups = append(groups, group.(Group))
	}
	return groups, nil
}

func (s *Session) deleteGroups(ctx context.Context) error {
	groups, err := s.Groups(ctx)
	if err != nil {
		return err
	}
	entities := make([]Entity, len(groups))
	for i, g := range groups {
		entities[i] = g
	}
	return s.Delete(ctx, entities...)
}

// defaultEntry reads the default entry of a table; ok is false where the switch tells of none.
func (s *Session) defaultEntry(ctx context.Context, tab *table) (e Entry, ok bool, err error) {
	got, err := s.Read(ctx, &p4v1.Entity{Entity: &p4v1.Entity_TableEntry{
		TableEntry: &p4v1.TableEntry{TableId: tab.id, IsDefaultAction: true},
	}})
	if err != nil {
		return Entry{}, false, fmt.Errorf("read default entry of %s: %w", tab.name, err)
	}
	for _, entity := range got {
		te := entity.GetTableEntry()
		if te == nil || te.GetTableId() != tab.id || !te.GetIsDefaultAction() || te.GetAction() == nil {
			continue
		}
		entry, err := s.program.decodeEntry(te)
		if err != nil {
			return Entry{}, false, err
		}
		return entry.(Entry), true, nil
	}
	return Entry{}, false, nil
}

// Entities reads what the switch has: the entries of every table that is not constant, default entries included (those of
// the program itself too), and every multicast group.
func (s *Session) Entities(ctx context.Context) ([]Entity, error) {
	var entities []Entity
	for _, t := range s.program.info.GetTables() {
		tab := s.program.tables[t.GetPreamble().GetName()]
		if tab.isConst {
			continue
		}
		entries, err := s.Entries(ctx, tab.name)
		if err != nil {
			return nil, err
		}
		for _, e := range entries {
			entities = append(entities, e)
		}
		e, ok, err := s.defaultEntry(ctx, tab)
		if err != nil {
			return nil, err
		}
		if ok {
			entities = append(entities, e)
		}
	}
	groups, err := s.Groups(ctx)
	if err != nil {
		return nil, err
	}
	for _, g := range groups {
		entities = append(entities, g)
	}
	return entities, nil
}

// Wipe deletes every entry of every table that is not constant, and every multicast group: first the entries of the
// tables named in order, then those of the others, then the groups. Default entries stay.
func (s *Session) Wipe(ctx context.Context, order ...string) error {
	for _, tab := range s.program.info.GetTables() {
		if name := tab.GetPreamble().GetName(); !tab.GetIsConstTable() && !slices.Contains(order, name) {
			order = append(order, name)
		}
	}
	for _, name := range order {
		entries, err := s.Entries(ctx, name)
		if err != nil {
			return fmt.Errorf("wipe: %w", err)
		}
		entities := make([]Entity, len(entries))
		for i, e := range entries {
			entities[i] = e
		}
		if err := s.Delete(ctx, entities...); err != nil {
			return fmt.Errorf("wipe: %w", err)
		}
	}
	if err := s.deleteGroups(ctx); err != nil {
		return fmt.Errorf("wipe: %w", err)
	}
	return nil
}

// Count is a counter's cell. Bytes are those of whole frames.
type Count struct{ Packets, Bytes uint64 }

// Counts are what the counters of a switch say at a moment.
type Counts struct {
	Counters map[string][]Count      // of indirect counters, by name: all cells, by index
	Direct   map[string][]EntryCount // of tables' direct counters, by the table's name: in no order
}

// EntryCount is what a table's direct counter says of an entry.
type EntryCount struct {
	Entry Entry
	Count
}

// Counts reads all cells of indirect counters, and the counts of all entries of the tables that are named, by one request.
// Cells that the switch does not tell of are zero.
func (s *Session) Counts(ctx context.Context, counters, tables []string) (Counts, error) {
	out := Counts{Counters: make(map[string][]Count), Direct: make(map[string][]EntryCount)}
	var wanted []*p4v1.Entity
	cells := make(map[uint32][]Count) // of a counter's id
	for _, name := range counters {
		c := s.program.counters[name]
		if c == nil {
			return Counts{}, fmt.Errorf("read counter %s: there is no such counter", name)
		}
		id := c.GetPreamble().GetId()
		wanted = append(wanted, &p4v1.Entity{Entity: &p4v1.Entity_CounterEntry{CounterEntry: &p4v1.CounterEntry{CounterId: id}}})
		cells[id] = make([]Count, c.GetSize())
		out.Counters[name] = cells[id]
	}
	for _, name := range tables {
		tab := s.program.tables[name]
		if tab == nil {
			return Counts{}, fmt.Errorf("read direct counter of %s: there is no such table", name)
		}
		wanted = append(wanted, &p4v1.Entity{Entity: &p4v1.Entity_DirectCounterEntry{
			DirectCounterEntry: &p4v1.DirectCounterEntry{TableEntry: &p4v1.TableEntry{TableId: tab.id}},
		}})
	}
	got, err := s.Read(ctx, wanted...)
	if err != nil {
		return Counts{}, fmt.Errorf("read counters of %s: %w", strings.Join(slices.Concat(counters, tables), ", "), err)
	}
	for _, e := range got {
		if ce := e.GetCounterEntry(); ce != nil {
			list, i := cells[ce.GetCounterId()], ce.GetIndex().GetIndex()
			if 0 <= i && i < int64(len(list)) {
				list[i] = countOf(ce.GetData())
			}
		}
		dc := e.GetDirectCounterEntry()
		tab := s.program.tableIDs[dc.GetTableEntry().GetTableId()]
		if tab == nil || !slices.Contains(tables, tab.name) || dc.GetTableEntry().GetIsDefaultAction() {
			continue
		}
		entry, err := s.program.decodeEntry(dc.GetTableEntry())
		if err != nil {
			return Counts{}, err
		}
		out.Direct[tab.name] = append(out.Direct[tab.name], EntryCount{entry.(Entry), countOf(dc.GetData())})
	}
	return out, nil
}

func countOf(d *p4v1.CounterData) Count {
	return Count{uint64(max(0, d.GetPacketCount())), uint64(max(0, d.GetByteCount()))}
}

// SendPacket sends a packet-out. A switch says nothing about one that it drops.
func (s *Session) SendPacket(pkt Packet) error {
	out, err := s.program.encodePacket(pkt)
	if err != nil {
		return err
	}
	s.send.Lock()
	defer s.send.Unlock()
	err = s.stream.Send(&p4v1.StreamMessageRequest{Update: &p4v1.StreamMessageRequest_Packet{Packet: out}})
	if err != nil {
		return fmt.Errorf("send packet-out: %w", err)
	}
	return nil
}

// Packets returns a channel with the packet-ins that match, until stop is called. One that finds the channel's 64
// places taken is dropped, as a switch would.
func (s *Session) Packets(match func(Packet) bool) (packets <-chan Packet, stop func()) {
	sub := &subscription{match, make(chan Packet, 64)}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.subs = append(s.subs, sub)
	return sub.ch, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.subs = slices.DeleteFunc(s.subs, func(other *subscription) bool { return other == sub })
	}
}

func (s *Session) deliver(pkt Packet) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, sub := range s.subs {
		if !sub.match(pkt) {
			continue
		}
		select {
		case sub.ch <- pkt:
		default:
			s.log.Warn("packet-in dropped: its reader does not keep up")
		}
	}
}
