package p4rt_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	configv1 "github.com/p4lang/p4runtime/go/p4/config/v1"
	p4v1 "github.com/p4lang/p4runtime/go/p4/v1"
	"go.uber.org/goleak"
	rpcstatus "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	"xagg/controller/p4rt"
	"xagg/controller/p4rt/p4rttest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func newProgram(tb testing.TB) *p4rt.Program {
	tb.Helper()
	p, err := p4rt.NewProgram(p4rttest.Program())
	if err != nil {
		tb.Fatal(err)
	}
	return p
}

func target(s *p4rttest.Server, election uint64) p4rt.Target {
	return p4rt.Target{Address: "switch", Election: p4rt.ElectionID{Low: election}, Dial: s.Dial}
}

// session runs f in a session with s.
func session(t *testing.T, s *p4rttest.Server, f func(context.Context, *p4rt.Session)) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := p4rt.Run(ctx, target(s, 1), newProgram(t), func(ctx context.Context, s *p4rt.Session) error {
		f(ctx, s)
		return nil
	}); err != nil {
		t.Fatal(err)
	}
}

func plan(job uint64) p4rt.Entry {
	return p4rt.Entry{
		Table:  "I.plan",
		Match:  []p4rt.Match{{Field: "job", Value: p4rt.Uint(job)}, {Field: "epoch", Value: p4rt.Uint(1)}},
		Action: "I.set",
		Params: []p4rt.Param{{Name: "mask", Value: p4rt.Uint(7)}, {Name: "group", Value: p4rt.Uint(2)}},
	}
}

func inserts(entries ...p4rt.Entity) []p4rt.Update {
	var updates []p4rt.Update
	for _, e := range entries {
		updates = append(updates, p4rt.Update{Op: p4rt.Insert, Entity: e})
	}
	return updates
}

func TestValue(t *testing.T) {
	for _, tt := range []struct {
		value p4rt.Value
		bytes string
		bits  int
		text  string
	}{
		{p4rt.Uint(0), "\x00", 0, "0"},
		{p4rt.Uint(1), "\x01", 1, "1"},
		{p4rt.Uint(255), "\xff", 8, "255"},
		{p4rt.Uint(256), "\x01\x00", 9, "256"},
		{p4rt.Uint(1<<64 - 1), "\xff\xff\xff\xff\xff\xff\xff\xff", 64, "0xffffffffffffffff"},
		{p4rt.Bytes(nil), "\x00", 0, "0"},
		{p4rt.Bytes([]byte{0, 0, 0, 0}), "\x00", 0, "0"},
		{p4rt.Bytes([]byte{0, 10, 0}), "\x0a\x00", 12, "2560"},
		{p4rt.Bytes([]byte{2, 0x78, 0x61, 0, 0, 1}), "\x02xa\x00\x00\x01", 42, "0x027861000001"},
	} {
		if string(tt.value) != tt.bytes || tt.value.Bits() != tt.bits || tt.value.String() != tt.text {
			t.Errorf("got %q, %d bits, %s; want %q, %d, %s", string(tt.value), tt.value.Bits(), tt.value, tt.bytes, tt.bits, tt.text)
		}
	}
	if _, ok := p4rt.Bytes(make([]byte, 9)).Uint(); !ok {
		t.Error("nine zero bytes are an integer")
	}
	if _, ok := p4rt.Bytes([]byte{1, 0, 0, 0, 0, 0, 0, 0, 0}).Uint(); ok {
		t.Error("2^64 does not fit an integer")
	}
}

func TestEncodeRefuses(t *testing.T) {
	p := newProgram(t)
	with := func(change func(*p4rt.Entry)) p4rt.Entry {
		e := plan(5)
		change(&e)
		return e
	}
	route := func(prefix int) p4rt.Entry {
		return p4rt.Entry{
			Table: "I.ipv4", Match: []p4rt.Match{{Field: "dst", Value: p4rt.Uint(0x0a4d0001), Prefix: prefix}},
			Action: "I.forward", Params: []p4rt.Param{{Name: "port", Value: p4rt.Uint(1)}},
		}
	}
	for _, tt := range []struct {
		entity p4rt.Entity
		want   string
	}{
		{with(func(e *p4rt.Entry) { e.Table = "I.plans" }), "encode I.plans[epoch=1 job=5]: there is no such table; there are I.fixed, I.ipv4, I.plan"},
		{with(func(e *p4rt.Entry) { e.Table = "I.fixed" }), "encode I.fixed[epoch=1 job=5]: the table's entries are constant"},
		{with(func(e *p4rt.Entry) { e.Match = e.Match[:1] }), "encode I.plan[job=5]: key field epoch is missing"},
		{with(func(e *p4rt.Entry) { e.Match[1].Field = "age" }), "encode I.plan[age=1 job=5]: the table has no key field age; it has job, epoch"},
		{with(func(e *p4rt.Entry) { e.Match[0].Value = p4rt.Uint(1 << 16) }), "encode I.plan[epoch=1 job=65536]: key field job: 65536 does not fit 16 bits"},
		{with(func(e *p4rt.Entry) { e.Match[0].Prefix = 3 }), "encode I.plan[epoch=1 job=5/3]: key field job: exact match takes no prefix length"},
		{with(func(e *p4rt.Entry) { e.Match = append(e.Match, e.Match[0]) }), "encode I.plan[epoch=1 job=5 job=5]: 3 key fields given, the table has 2"},
		{with(func(e *p4rt.Entry) { e.Default = true }), "encode I.plan[default]: a default entry has no key fields"},
		{with(func(e *p4rt.Entry) { e.Action = "I.forward" }), "encode I.plan[epoch=1 job=5]: the table has no action I.forward"},
		{with(func(e *p4rt.Entry) { e.Params = e.Params[1:] }), "encode I.plan[epoch=1 job=5]: action I.set: parameter mask is missing"},
		{with(func(e *p4rt.Entry) { e.Params[1].Value = p4rt.Uint(1 << 20) }), "encode I.plan[epoch=1 job=5]: action I.set: parameter group: 1048576 does not fit 16 bits"},
		{with(func(e *p4rt.Entry) { e.Params[1].Name = "port" }), "encode I.plan[epoch=1 job=5]: action I.set: there is no parameter port; there are: mask, group"},
		{with(func(e *p4rt.Entry) { e.Action, e.Params = "NoAction", nil }), "encode I.plan[epoch=1 job=5]: action NoAction can only be the default"},
		{p4rt.Entry{Table: "I.ipv4", Default: true, Action: "I.drop"}, "encode I.ipv4[default]: action I.drop cannot be the default"},
		{route(0), "encode I.ipv4[dst=172818433]: key field dst: prefix length 0 is outside 1..32"},
		{route(33), "encode I.ipv4[dst=172818433/33]: key field dst: prefix length 33 is outside 1..32"},
		{p4rt.Group{ID: 0}, "encode multicast group 0: id is outside 1..32767"},
		{p4rt.Group{ID: 32768}, "encode multicast group 32768: id is outside 1..32767"},
		{p4rt.Group{ID: 1, Replicas: []p4rt.Replica{{Port: 511}}}, "encode multicast group 1: port 511 is outside 0..510"},
		{p4rt.Group{ID: 1, Replicas: []p4rt.Replica{{1, 1 << 16}}}, "encode multicast group 1: instance 65536 is outside 0..65535"},
		{p4rt.Group{ID: 1, Replicas: []p4rt.Replica{{1, 2}, {1, 2}}}, "encode multicast group 1: port 1 with instance 2 is there twice"},
	} {
		if _, err := p.Encode(tt.entity); err == nil || err.Error() != tt.want {
			t.Errorf("got  %v\nwant %s", err, tt.want)
		}
	}
}

func TestEncodeAndDecode(t *testing.T) {
	p := newProgram(t)
	for _, e := range []p4rt.Entity{
		plan(0),
		plan(65535),
		p4rt.Entry{Table: "I.ipv4", Match: []p4rt.Match{{Field: "dst", Value: p4rt.Uint(0x0a4d0000), Prefix: 16}},
			Action: "I.forward", Params: []p4rt.Param{{Name: "port", Value: p4rt.Uint(0)}}},
		p4rt.Entry{Table: "I.ipv4", Default: true, Action: "I.forward", Params: []p4rt.Param{{Name: "port", Value: p4rt.Uint(9)}}},
		p4rt.Group{ID: 3, Replicas: []p4rt.Replica{{1, 0}, {2, 65535}}},
	} {
		wire, err := p.Encode(e)
		if err != nil {
			t.Fatal(err)
		}
		back, err := p.Decode(wire)
		if err != nil {
			t.Fatal(err)
		}
		if !p4rt.Equal(e, back) || e.String() != back.String() {
			t.Errorf("%v came back as %v", e, back)
		}
	}
	// What a switch pads comes back canonical.
	wire, _ := p.Encode(plan(5))
	wire.GetTableEntry().Match[0].GetExact().Value = []byte{0, 5}
	if back, err := p.Decode(wire); err != nil || !p4rt.Equal(back, plan(5)) {
		t.Errorf("padded key: %v, %v", back, err)
	}
}

func TestProgramMismatch(t *testing.T) {
	info, json := p4rttest.Program()
	if _, err := p4rt.NewProgram(info, []byte("{")); err == nil {
		t.Error("broken JSON is taken")
	}
	for _, name := range []string{"I.ipv4", "I.set", "I.reasons", "I.slots"} {
		_, err := p4rt.NewProgram(info, []byte(strings.ReplaceAll(string(json), name, "I.other")))
		if !errors.Is(err, p4rt.ErrProgramMismatch) || !strings.Contains(err.Error(), name) {
			t.Errorf("without %s: %v", name, err)
		}
	}
	other := proto.CloneOf(info)
	other.Tables[0].Size++
	p, q := newProgram(t), mustProgram(t, other, json)
	if p.Cookie() == q.Cookie() || p.Cookie() == mustProgram(t, info, append(json, '\n')).Cookie() || p.Cookie() == 0 {
		t.Error("the cookie does not depend on both P4Info and JSON")
	}
	if p.Cookie() != newProgram(t).Cookie() {
		t.Error("the cookie is not the same twice")
	}
}

func mustProgram(t *testing.T, info *configv1.P4Info, json []byte) *p4rt.Program {
	t.Helper()
	p, err := p4rt.NewProgram(info, json)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestContract(t *testing.T) {
	p := newProgram(t)
	good := p4rt.Contract{
		Tables: []p4rt.TableContract{{
			Name: "I.plan", Match: map[string]int{"job": 16, "epoch": 16},
			Actions: map[string]map[string]int{"I.set": {"mask": 64, "group": 16}},
		}},
		Counters: map[string]int{"I.reasons": 4},
		Direct:   []string{"I.plan"},
		In:       map[string]int{"ingress_port": 16},
		Out:      map[string]int{"egress_port": 16},
	}
	if err := p.Check(good); err != nil {
		t.Error(err)
	}
	bad := p4rt.Contract{
		Tables: []p4rt.TableContract{
			{Name: "I.plans"},
			{Name: "I.plan", Match: map[string]int{"job": 32, "age": 8},
				Actions: map[string]map[string]int{"I.set": {"mask": 64}, "I.unset": {}}},
		},
		Counters: map[string]int{"I.reasons": 5, "I.sent": 1},
		Direct:   []string{"I.ipv4"},
		In:       map[string]int{"port": 16},
	}
	err := p.Check(bad)
	if !errors.Is(err, p4rt.ErrProgramMismatch) {
		t.Fatalf("got %v", err)
	}
	for _, want := range []string{
		"there is no table I.plans",
		"table I.plan: key field job has 16 bits, want 32",
		"table I.plan has no key field age",
		"table I.plan has an unknown key field epoch",
		"action I.set has an unknown parameter group",
		"table I.plan has no action I.unset",
		"counter I.reasons has 4 cells, want at least 5",
		"there is no counter I.sent",
		"table I.ipv4 has no direct counter",
		"controller header packet_in has no field port",
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("the error lacks %q:\n%v", want, err)
		}
	}
}

func TestWriteStatusPerUpdate(t *testing.T) {
	s := p4rttest.New(t, newProgram(t))
	s.OnUpdate = func(u p4rt.Update) error {
		if strings.Contains(u.String(), "job=2 ") || strings.Contains(u.String(), "job=2]") || strings.Contains(u.String(), "job=4]") {
			return status.Error(codes.Unknown, "table is full")
		}
		return nil
	}
	session(t, s, func(ctx context.Context, sess *p4rt.Session) {
		err := sess.Write(ctx, inserts(plan(1), plan(2), plan(3), plan(4)))
		var werr *p4rt.WriteError
		if !errors.As(err, &werr) {
			t.Fatalf("got %v, want a WriteError", err)
		}
		var got []codes.Code
		for _, st := range werr.Status {
			got = append(got, st.Code())
		}
		if want := []codes.Code{codes.OK, codes.Unknown, codes.OK, codes.Unknown}; !slices.Equal(got, want) {
			t.Errorf("statuses %v, want %v", got, want)
		}
		want := "write: 2 of 4 updates failed; " +
			"insert I.plan[epoch=1 job=2] -> I.set(mask=7 group=2): Unknown (table is full); " +
			"insert I.plan[epoch=1 job=4] -> I.set(mask=7 group=2): Unknown (table is full)"
		if err.Error() != want {
			t.Errorf("got  %v\nwant %s", err, want)
		}
		entries, err := sess.Entries(ctx, "I.plan")
		if err != nil || len(entries) != 2 {
			t.Errorf("the switch has %v, %v", entries, err)
		}
	})
}

func TestWriteErrorShowsTheFirstFailures(t *testing.T) {
	s := p4rttest.New(t, newProgram(t))
	s.OnUpdate = func(p4rt.Update) error { return status.Error(codes.Unknown, "") }
	session(t, s, func(ctx context.Context, sess *p4rt.Session) {
		err := sess.Write(ctx, inserts(plan(1), plan(2), plan(3), plan(4), plan(5)))
		if err == nil || strings.Count(err.Error(), "insert ") != 3 || !strings.HasSuffix(err.Error(), "; and 2 more") {
			t.Errorf("got %v", err)
		}
	})
}

func TestWriteDetailsMismatch(t *testing.T) {
	ok, _ := anypb.New(&p4v1.Error{})
	bad, _ := anypb.New(&p4v1.Error{CanonicalCode: int32(codes.NotFound)})
	foreign, _ := anypb.New(&p4v1.Update{})
	for _, tt := range []struct {
		name    string
		code    codes.Code
		details []*anypb.Any
		want    string // the problem; empty: no DetailsError
	}{
		{"zero details", codes.Unknown, nil, "its status has no details"},
		{"too few", codes.Unknown, []*anypb.Any{bad}, "its status has 1 details"},
		{"too many", codes.Unknown, []*anypb.Any{ok, ok, bad}, "its status has 3 details"},
		{"another type", codes.Unknown, []*anypb.Any{ok, foreign}, "detail 1 is not a p4.v1.Error"},
		{"all OK", codes.Unknown, []*anypb.Any{ok, ok}, "every detail is OK"},
		{"refused as a whole", codes.PermissionDenied, nil, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := p4rttest.New(t, newProgram(t))
			s.OnUpdate = func(p4rt.Update) error { return status.Error(codes.Unknown, "") }
			s.OnWrite = func(error) error {
				return status.FromProto(&rpcstatus.Status{Code: int32(tt.code), Message: "no", Details: tt.details}).Err()
			}
			session(t, s, func(ctx context.Context, sess *p4rt.Session) {
				err := sess.Write(ctx, inserts(plan(1), plan(2)))
				var derr *p4rt.DetailsError
				switch {
				case tt.want == "":
					if errors.As(err, &derr) || status.Code(err) != tt.code {
						t.Errorf("got %v", err)
					}
				case !errors.As(err, &derr):
					t.Errorf("got %v, want a DetailsError", err)
				case !strings.HasPrefix(derr.Problem, tt.want) || derr.Updates != 2 || derr.Details != len(tt.details):
					t.Errorf("got %+v", derr)
				}
			})
		})
	}
}

func TestUpsertAndDelete(t *testing.T) {
	s := p4rttest.New(t, newProgram(t))
	session(t, s, func(ctx context.Context, sess *p4rt.Session) {
		group := p4rt.Group{ID: 2, Replicas: []p4rt.Replica{{1, 1}}}
		def := p4rt.Entry{Table: "I.ipv4", Default: true, Action: "I.forward", Params: []p4rt.Param{{Name: "port", Value: p4rt.Uint(9)}}}
		if err := sess.Upsert(ctx, group, plan(1), def); err != nil {
			t.Fatal(err)
		}
		changed := plan(1)
		changed.Params[0].Value = p4rt.Uint(3)
		group.Replicas = append(group.Replicas, p4rt.Replica{Port: 2, Instance: 2})
		if err := sess.Upsert(ctx, plan(2), group, changed); err != nil {
			t.Fatal(err)
		}
		got := s.Entities()
		if len(got) != 4 || !p4rt.Equal(got[changed.Key()], changed) || !p4rt.Equal(got[group.Key()], group) {
			t.Errorf("the switch has %v", got)
		}
		if entries, err := sess.Entries(ctx, "I.ipv4"); err != nil || len(entries) != 0 {
			t.Errorf("a default entry counts as an entry: %v, %v", entries, err)
		}
		if err := sess.Delete(ctx, plan(1), plan(7), group); err != nil {
			t.Errorf("delete of what is not there: %v", err)
		}
		s.OnUpdate = func(p4rt.Update) error { return status.Error(codes.InvalidArgument, "") }
		if err := sess.Upsert(ctx, plan(1)); err == nil {
			t.Error("a refused upsert is no error")
		}
		if err := sess.Delete(ctx, plan(2)); err == nil {
			t.Error("a refused delete is no error")
		}
		if err := sess.Write(ctx, inserts(p4rt.Entry{Table: "I.plan", Match: plan(1).Match})); err == nil {
			t.Error("an insert without action is sent")
		}
	})
}

func TestWipe(t *testing.T) {
	s := p4rttest.New(t, newProgram(t))
	session(t, s, func(ctx context.Context, sess *p4rt.Session) {
		route := p4rt.Entry{Table: "I.ipv4", Match: []p4rt.Match{{Field: "dst", Value: p4rt.Uint(1), Prefix: 32}},
			Action: "I.forward", Params: []p4rt.Param{{Name: "port", Value: p4rt.Uint(1)}}}
		if err := sess.Upsert(ctx, p4rt.Group{ID: 2}, route, plan(1), plan(2)); err != nil {
			t.Fatal(err)
		}
		s.Log()
		if err := sess.Wipe(ctx, "I.plan"); err != nil {
			t.Fatal(err)
		}
		want := []string{"delete I.plan[epoch=1 job=1]", "delete I.plan[epoch=1 job=2]", "delete I.ipv4[dst=1/32]", "delete multicast group 2"}
		if got := s.Log(); !slices.Equal(got, want) {
			t.Errorf("wiped %q, want %q", got, want)
		}
	})
}

func TestEntities(t *testing.T) {
	s := p4rttest.New(t, newProgram(t))
	session(t, s, func(ctx context.Context, sess *p4rt.Session) {
		def := p4rt.Entry{Table: "I.ipv4", Default: true, Action: "I.forward", Params: []p4rt.Param{{Name: "port", Value: p4rt.Uint(9)}}}
		want := []p4rt.Entity{plan(1), plan(2), def, p4rt.Group{ID: 2, Replicas: []p4rt.Replica{{1, 1}, {2, 2}}}}
		if err := sess.Upsert(ctx, want...); err != nil {
			t.Fatal(err)
		}
		got, err := sess.Entities(ctx)
		if err != nil {
			t.Fatal(err)
		}
		for _, w := range want {
			if !slices.ContainsFunc(got, func(e p4rt.Entity) bool { return p4rt.Equal(e, w) }) {
				t.Errorf("%v is missing in %v", w, got)
			}
		}
		if len(got) != len(want) {
			t.Errorf("got %v, want %v", got, want)
		}
	})
}

func TestPipelineIsPushedWhenItDiffers(t *testing.T) {
	s := p4rttest.New(t, newProgram(t))
	group := p4rt.Group{ID: 2, Replicas: []p4rt.Replica{{1, 1}}}
	var cookies []uint64
	election := uint64(0) // grows, since the switch may not have noticed the last session's end
	run := func(p *p4rt.Program) {
		t.Helper()
		election++
		err := p4rt.Run(t.Context(), target(s, election), p, func(ctx context.Context, sess *p4rt.Session) error {
			cookies = append(cookies, sess.Cookie())
			return sess.Upsert(ctx, group)
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	run(newProgram(t))
	run(newProgram(t))
	if got := s.Pushes(); got != 1 {
		t.Errorf("%d pushes of the same program, want 1", got)
	}
	info, json := p4rttest.Program()
	run(mustProgram(t, info, append(json, ' ')))
	if got := s.Pushes(); got != 2 {
		t.Errorf("%d pushes after the program changed, want 2", got)
	}
	if got := s.Copies(2); got != 1 {
		t.Errorf("the switch has %d copies of a group that was there before the push: delete groups first", got)
	}
	if len(cookies) != 3 || cookies[0] != cookies[1] || cookies[1] == cookies[2] || slices.Contains(cookies, 0) {
		t.Errorf("cookies %#x: want the same one until the next push", cookies)
	}
	s.Stop()
	s.Start() // and the same program is another pipeline
	run(mustProgram(t, info, append(json, ' ')))
	if cookies[2] == cookies[3] {
		t.Errorf("a switch that has lost everything has the cookie %#x again", cookies[3])
	}
	s.OnPush = func() error { return status.Error(codes.Unknown, "Error in first phase of device update") }
	err := p4rt.Run(t.Context(), target(s, election+1), newProgram(t), func(context.Context, *p4rt.Session) error {
		t.Error("the handler runs on a switch without pipeline")
		return nil
	})
	if err == nil || !strings.HasPrefix(err.Error(), "push pipeline: ") {
		t.Errorf("got %v", err)
	}
}

// TestPrimacy has a second controller take over and give up again: one handler at a time, and the first one's context
// ends with the reason.
func TestPrimacy(t *testing.T) {
	s := p4rttest.New(t, newProgram(t))
	started := make(chan string, 8)
	run := func(ctx context.Context, name string, election uint64, backup func(p4rt.ElectionID)) <-chan error {
		done := make(chan error, 1)
		tg := target(s, election)
		tg.Backup = backup
		go func() {
			done <- p4rt.Run(ctx, tg, newProgram(t), func(ctx context.Context, sess *p4rt.Session) error {
				started <- name
				<-ctx.Done()
				if err := sess.Write(context.Background(), inserts(plan(election))); err == nil && name == "old" {
					t.Error("a write of a controller that is no longer primary landed")
				}
				return ctx.Err()
			})
		}()
		return done
	}
	want := func(name string) {
		t.Helper()
		select {
		case got := <-started:
			if got != name {
				t.Fatalf("handler %q started, want %q", got, name)
			}
		case <-time.After(time.Minute):
			t.Fatalf("handler %q did not start", name)
		}
	}
	old := run(t.Context(), "old", 1, nil)
	want("old")
	ctx, cancel := context.WithCancel(t.Context())
	young := run(ctx, "young", 2, nil)
	want("young")
	if err := <-old; !errors.Is(err, p4rt.ErrNotPrimary) || !strings.Contains(err.Error(), "2") {
		t.Errorf("the old session ended with %v", err)
	}

	waiting := make(chan p4rt.ElectionID, 1)
	ctx3, cancel3 := context.WithCancel(t.Context())
	again := run(ctx3, "again", 1, func(id p4rt.ElectionID) { waiting <- id })
	if id := <-waiting; id.Low != 2 {
		t.Errorf("backup of %v, want 2", id)
	}
	// Two sessions with the same election id: the later one is refused.
	if err := <-run(t.Context(), "twin", 1, nil); status.Code(err) != codes.InvalidArgument {
		t.Errorf("equal election id: %v", err)
	}
	cancel()
	if err := <-young; !errors.Is(err, context.Canceled) {
		t.Errorf("the cancelled session ended with %v", err)
	}
	want("again") // promoted although its election id is lower than what was seen
	cancel3()
	<-again
}

func TestSessionEndsWithTheStream(t *testing.T) {
	s := p4rttest.New(t, newProgram(t))
	err := p4rt.Run(t.Context(), target(s, 1), newProgram(t), func(ctx context.Context, sess *p4rt.Session) error {
		s.Stop()
		<-ctx.Done()
		if sess.Write(ctx, inserts(plan(1))) == nil {
			t.Error("a write without a switch succeeds")
		}
		return ctx.Err()
	})
	if err == nil || errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want what happened to the stream", err)
	}
	if err := p4rt.Run(t.Context(), target(s, 1), newProgram(t), nil); status.Code(err) != codes.Unavailable {
		t.Errorf("no switch: %v", err)
	}
	s.Start()
	sentinel := errors.New("handler")
	if err := p4rt.Run(t.Context(), target(s, 1), newProgram(t), func(context.Context, *p4rt.Session) error { return sentinel }); err != sentinel {
		t.Errorf("the handler's error became %v", err)
	}
}

func TestPackets(t *testing.T) {
	s := p4rttest.New(t, newProgram(t))
	s.OnPacketOut = func(out *p4v1.PacketOut) []*p4v1.PacketIn {
		return []*p4v1.PacketIn{
			{Payload: []byte("noise"), Metadata: []*p4v1.PacketMetadata{{MetadataId: 9, Value: []byte{1}}}},
			{Payload: append([]byte("re: "), out.Payload...), Metadata: []*p4v1.PacketMetadata{{MetadataId: 1, Value: []byte{0, 7}}}},
		}
	}
	session(t, s, func(ctx context.Context, sess *p4rt.Session) {
		mine, stop := sess.Packets(func(p p4rt.Packet) bool { return strings.HasSuffix(string(p.Payload), "mine") })
		port := []p4rt.Param{{Name: "egress_port", Value: p4rt.Uint(3)}}
		for _, payload := range []string{"yours", "mine"} {
			if err := sess.SendPacket(p4rt.Packet{Payload: []byte(payload), Metadata: port}); err != nil {
				t.Fatal(err)
			}
		}
		select {
		case got := <-mine:
			if string(got.Payload) != "re: mine" || len(got.Metadata) != 1 || got.Metadata[0] != (p4rt.Param{Name: "ingress_port", Value: p4rt.Uint(7)}) {
				t.Errorf("got %+v", got)
			}
		case <-ctx.Done():
			t.Fatal("no packet-in")
		}
		stop()
		for _, meta := range [][]p4rt.Param{nil, {{Name: "egress_port", Value: p4rt.Uint(1 << 16)}}, {{Name: "port", Value: p4rt.Uint(1)}}} {
			if err := sess.SendPacket(p4rt.Packet{Metadata: meta}); err == nil {
				t.Errorf("a packet-out with metadata %v is sent", meta)
			}
		}
	})
}

func TestCounters(t *testing.T) {
	s := p4rttest.New(t, newProgram(t))
	s.SetCounter("I.reasons", []p4rt.Count{{1, 10}, {2, 20}, {3, 30}, {4, 40}})
	reads := 0
	s.OnRead = func() error { reads++; return nil }
	session(t, s, func(ctx context.Context, sess *p4rt.Session) {
		if err := sess.Upsert(ctx, plan(1), plan(2)); err != nil {
			t.Fatal(err)
		}
		reads = 0
		got, err := sess.Counts(ctx, []string{"I.reasons"}, []string{"I.plan"})
		if err != nil || fmt.Sprint(got.Counters) != "map[I.reasons:[{1 10} {2 20} {3 30} {4 40}]]" {
			t.Errorf("got %v, %v", got, err)
		}
		if reads != 1 {
			t.Errorf("%d requests", reads)
		}
		direct := make(map[string]p4rt.Count)
		for _, e := range got.Direct["I.plan"] {
			direct[e.Entry.Key()] = e.Count
		}
		if len(direct) != 2 || direct[plan(2).Key()] != (p4rt.Count{Packets: 1, Bytes: 1}) {
			t.Errorf("got %v, %v", direct, err)
		}
		if _, err := sess.Counts(ctx, []string{"I.sent"}, nil); err == nil {
			t.Error("a counter that does not exist is read")
		}
		if _, err := sess.Counts(ctx, nil, []string{"I.plans"}); err == nil {
			t.Error("a table that does not exist is read")
		}
	})
}
