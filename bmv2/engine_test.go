package bmv2_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/gopacket/pcapgo"
	p4v1 "github.com/p4lang/p4runtime/go/p4/v1"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/proto"

	"xagg/bmv2"
	"xagg/bmv2/fault"
	"xagg/bmv2/internal/vethtest"
	"xagg/bmv2/port"
	"xagg/tests/require"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const patience = 10 * time.Second

// controlled is an engine with a controller that has pushed switch.p4 and programmed it.
func controlled(t *testing.T, cfg bmv2.Config) (*bmv2.Engine, *rig) {
	t.Helper()
	cfg.GRPCAddr = "unix:" + filepath.Join(t.TempDir(), "p4rt.sock")
	cfg.CPUPort = cpuPort
	e, err := bmv2.StartEngine(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { e.Close() })
	conn, err := grpc.NewClient(e.GRPCAddr(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	r := &rig{name: "engine", client: p4v1.NewP4RuntimeClient(conn)}
	programSwitch(t, r, r.start(t, switchJSON, switchInfo))
	return e, r
}

// toPort is a frame for switch.p4 that leaves by a port (0 to 511).
func toPort(port uint16, mark byte) []byte {
	f := append(make([]byte, 12), 0x12, 0x34, 0, 0, 0, 0, 9, 9, 9, 9, 0, byte(port>>8), byte(port))
	return append(f, bytes.Repeat([]byte{mark}, 40)...)
}

func TestEngineInMemory(t *testing.T) {
	capture := filepath.Join(t.TempDir(), "all.pcapng")
	e, _ := controlled(t, bmv2.Config{PcapFile: capture})
	got := make(chan []byte, 10)
	if err := e.Attach(1, func([]byte) {}); err != nil {
		t.Fatal(err)
	}
	if err := e.Attach(2, func(f []byte) { got <- bytes.Clone(f) }); err != nil {
		t.Fatal(err)
	}
	for name, number := range map[string]uint16{"a port in use": 2, "the CPU port": cpuPort, "the drop port": bmv2.DropPort} {
		if err := e.Attach(number, func([]byte) {}); err == nil {
			t.Errorf("attached %s", name)
		}
	}
	in := toPort(2, 7)
	if err := e.Inject(1, in); err != nil {
		t.Fatal(err)
	}
	select {
	case f := <-got:
		if !bytes.Contains(f, in[14:]) {
			t.Errorf("port 2 received %x", f)
		}
	case <-time.After(patience):
		t.Fatal("no frame at port 2")
	}
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
	if err := e.Close(); err != nil {
		t.Errorf("second close: %v", err)
	}
	if err := e.Inject(1, in); !errors.Is(err, bmv2.ErrClosed) {
		t.Errorf("inject after close: %v", err)
	}
	if err := e.Attach(3, func([]byte) {}); !errors.Is(err, bmv2.ErrClosed) {
		t.Errorf("attach after close: %v", err)
	}
	// One frame in at port 1, one out at port 2.
	f, err := os.Open(capture)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	ng, err := pcapgo.NewNgReader(f, pcapgo.NgReaderOptions{WantMixedLinkType: true})
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range []string{"port 1", "port 2"} {
		data, ci, err := ng.ReadPacketData()
		if err != nil {
			t.Fatalf("capture, packet %d: %v", i, err)
		}
		iface, err := ng.Interface(ci.InterfaceIndex)
		if err != nil || iface.Name != want || !bytes.Contains(data, in[14:]) {
			t.Errorf("capture, packet %d: %v %v %x", i, iface.Name, err, data)
		}
	}
}

// TestStalledPort has a port whose reader stops: the others go on, and its queue is bounded.
func TestStalledPort(t *testing.T) {
	e, _ := controlled(t, bmv2.Config{})
	stall := make(chan struct{})
	defer close(stall)
	if err := e.Attach(2, func([]byte) { <-stall }); err != nil {
		t.Fatal(err)
	}
	got := make(chan struct{}, 1)
	if err := e.Attach(3, func([]byte) { got <- struct{}{} }); err != nil {
		t.Fatal(err)
	}
	const frames, queue = 1500, 1024
	for range frames {
		if err := e.Inject(1, toPort(2, 1)); err != nil {
			t.Fatal(err)
		}
		if err := e.Inject(1, toPort(3, 1)); err != nil {
			t.Fatal(err)
		}
		select {
		case <-got:
		case <-time.After(patience):
			t.Fatal("port 3 waits for port 2")
		}
	}
	// At most a batch is with the reader, and the queue is full.
	if n := e.Dropped(2); n < frames-queue-port.Batch || n > frames-queue {
		t.Errorf("%d frames dropped at the stalled port", n)
	}
	if n := e.Dropped(3); n != 0 {
		t.Errorf("%d frames dropped at the other port", n)
	}
}

// TestEngineFaults has two ports' links damage frames, on the way in and on the way out. The capture shows what the
// switch has seen and sent.
func TestEngineFaults(t *testing.T) {
	file := filepath.Join(t.TempDir(), "all.pcapng")
	e, _ := controlled(t, bmv2.Config{PcapFile: file, Faults: []fault.Spec{
		{Drop: 1, Port: 1, All: true},
		{Duplicate: 1, Port: 2, Direction: fault.In, All: true},
		{Delay: time.Millisecond, Delayed: 1, Port: 3, Direction: fault.Out, All: true},
	}})
	got := make(chan byte, 100)
	for port := uint16(1); port <= 4; port++ {
		if err := e.Attach(port, func(f []byte) { got <- f[len(f)-1] }); err != nil {
			t.Fatal(err)
		}
	}
	for _, f := range []struct{ from, to uint16 }{{1, 4}, {4, 1}, {2, 4}, {4, 3}, {2, 3}} {
		if err := e.Inject(f.from, toPort(f.to, byte(16*f.from+f.to))); err != nil {
			t.Fatal(err)
		}
	}
	want := map[byte]int{0x24: 2, 0x43: 1, 0x23: 2}
	for range 5 {
		select {
		case mark := <-got:
			want[mark]--
		case <-time.After(patience):
			t.Fatalf("frames are missing: %v", want)
		}
	}
	for mark, n := range want {
		if n != 0 {
			t.Errorf("%d more frames %#x wanted", n, mark)
		}
	}
	one := fault.Counts{Frames: 1, Dropped: 1}
	counts := map[string]fault.Counts{"1 in": one, "1 out": one, "2 in": {Frames: 2, Duplicated: 2}, "3 out": {Frames: 3, Delayed: 3}}
	for _, c := range e.Faults() {
		if name := fmt.Sprint(c.Port, " ", c.Direction); c.Counts != counts[name] {
			t.Errorf("port %s: %+v, want %+v", name, c.Counts, counts[name])
		} else {
			delete(counts, name)
		}
	}
	if len(counts) != 0 {
		t.Errorf("no counts of %v", counts)
	}
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	ng, err := pcapgo.NewNgReader(f, pcapgo.NgReaderOptions{WantMixedLinkType: true})
	if err != nil {
		t.Fatal(err)
	}
	seen := map[byte]int{}
	for data, _, err := ng.ReadPacketData(); err == nil; data, _, err = ng.ReadPacketData() {
		seen[data[len(data)-1]]++
	}
	if diff := cmp.Diff(map[byte]int{0x41: 2, 0x24: 4, 0x43: 2, 0x23: 4}, seen); diff != "" {
		t.Errorf("frames in the capture (-want +got):\n%s", diff)
	}
	if _, err := bmv2.NewEngine(bmv2.Config{Faults: []fault.Spec{{Drop: 1}, {Drop: 0.5}}}); err == nil {
		t.Error("an engine with a fault in vain")
	}
}

// BenchmarkInject is what a frame costs beside its processing: nothing for a link without faults, and with those of
// other ports.
func BenchmarkInject(b *testing.B) {
	for _, c := range []struct {
		name   string
		faults []fault.Spec
	}{
		{"no faults", nil},
		{"another port", []fault.Spec{{Drop: 0.1, Port: 2}}},
		{"drop", []fault.Spec{{Drop: 0.1, Port: 1, All: true}}},
	} {
		b.Run(c.name, func(b *testing.B) {
			e, err := bmv2.NewEngine(bmv2.Config{Faults: c.faults})
			if err != nil {
				b.Fatal(err)
			}
			defer e.Close()
			if err := e.Attach(1, func([]byte) {}); err != nil {
				b.Fatal(err)
			}
			frame := toPort(2, 1)
			b.ReportAllocs()
			for b.Loop() {
				if err := e.Inject(1, frame); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func TestEngineWithoutProgramDropsAll(t *testing.T) {
	e, err := bmv2.NewEngine(bmv2.Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	if err := e.Inject(1, toPort(2, 1)); err != nil {
		t.Error(err)
	}
}

func TestEngineWithProgram(t *testing.T) {
	program, err := os.ReadFile(switchJSON)
	if err != nil {
		t.Fatal(err)
	}
	e, err := bmv2.NewEngine(bmv2.Config{Program: program})
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	got := make(chan struct{}, 1)
	if err := e.Attach(2, func([]byte) { got <- struct{}{} }); err != nil {
		t.Fatal(err)
	}
	if err := e.Inject(1, toPort(2, 1)); err != nil {
		t.Fatal(err)
	}
	select {
	case <-got:
	case <-time.After(patience):
		t.Error("no frame")
	}
}

// TestEngineOnInterfaces sends a frame over a real link into the engine and receives it on another.
func TestEngineOnInterfaces(t *testing.T) {
	s := vethtest.New(t, 3)
	var e *bmv2.Engine
	capture := filepath.Join(t.TempDir(), "ports.pcapng")
	err := s.Do(func() error {
		e, _ = controlled(t, bmv2.Config{Ports: map[uint16]string{1: "s0", 2: "s1", 3: "s2"}, PcapFile: capture})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	hosts := [3]*port.Port{}
	for i, name := range []string{"h0", "h1", "h2"} {
		if hosts[i], err = port.Open(name, port.Options{NetNS: s.Path}); err != nil {
			t.Fatal(err)
		}
		defer hosts[i].Close()
	}
	var wg sync.WaitGroup
	received := make([]chan []byte, 3)
	for i, h := range hosts {
		received[i] = make(chan []byte, 100)
		wg.Go(func() { h.Receive(func(f []byte, _ port.Meta) { received[i] <- bytes.Clone(f) }) })
	}
	defer wg.Wait()
	defer func() {
		for _, h := range hosts {
			h.Close()
		}
	}()
	const frames = 50
	for i := range frames {
		if err := hosts[0].Send([][]byte{toPort(2, byte(i)), toPort(3, byte(i))}); err != nil {
			t.Fatal(err)
		}
		for h := 1; h < 3; h++ {
			select {
			case f := <-received[h]:
				if f[len(f)-1] != byte(i) {
					t.Fatalf("host %d: frame %d is %x", h, i, f)
				}
			case <-time.After(patience):
				t.Fatalf("host %d: no frame %d", h, i)
			}
		}
	}
	if err := e.Close(); err != nil {
		t.Error(err)
	}
	if st, err := os.Stat(capture); err != nil || st.Size() < frames*4*60 {
		t.Errorf("capture: %v %v", st, err)
	}
}

func TestConfigErrors(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	for _, c := range []struct {
		name    string
		cfg     bmv2.Config
		machine bool
		want    string
	}{
		{"interface that is not there", bmv2.Config{Ports: map[uint16]string{4: "xt-none"}}, true, "xt-none"},
		{"address in use", bmv2.Config{GRPCAddr: taken.Addr().String()}, true, "in use"},
		{"address of another machine", bmv2.Config{GRPCAddr: "192.0.2.1:9559"}, true, "192.0.2.1"},
		{"no folder for the capture", bmv2.Config{PcapFile: "/no/such/folder/f", GRPCAddr: "127.0.0.1:0"}, true, "/no/such/folder/f"},
		{"port number", bmv2.Config{Ports: map[uint16]string{511: "lo"}, GRPCAddr: "127.0.0.1:0"}, false, "511"},
		{"CPU port number", bmv2.Config{CPUPort: 511, GRPCAddr: "127.0.0.1:0"}, false, "511"},
		{"CPU port as port", bmv2.Config{CPUPort: 4, Ports: map[uint16]string{4: "lo"}, GRPCAddr: "127.0.0.1:0"}, false, "CPU port"},
		{"one interface twice", bmv2.Config{Ports: map[uint16]string{4: "lo", 5: "lo"}, GRPCAddr: "127.0.0.1:0"}, false, "lo"},
		{"program", bmv2.Config{Program: []byte("{}"), GRPCAddr: "127.0.0.1:0"}, false, "version"},
	} {
		if c.cfg.GRPCAddr == "" {
			c.cfg.GRPCAddr = "127.0.0.1:0"
		}
		e, err := bmv2.StartEngine(c.cfg)
		if err == nil {
			e.Close()
			t.Errorf("%s: started", c.name)
			continue
		}
		var machine *bmv2.EnvironmentError
		if errors.As(err, &machine) != c.machine || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", c.name, err)
		}
	}
}

func TestPushRefusals(t *testing.T) {
	r := engineRig(t)
	info := r.start(t, switchJSON, switchInfo)
	program, err := os.ReadFile(switchJSON)
	if err != nil {
		t.Fatal(err)
	}
	other, err := os.ReadFile("engine/testdata/expr.json")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name   string
		json   []byte
		change func(n names)
		want   string
	}{
		{"another program", other, func(names) {}, "table I.exact_t"},
		{"match field width", program, func(n names) { n.table("I.lpm_t").MatchFields[1].Bitwidth = 31 }, "I.lpm_t: match field hdr.ask.addr"},
		{"match kind", program, func(n names) { n.table("I.lpm_t").MatchFields[1].Match = nil }, "hdr.ask.addr"},
		{"match fields", program, func(n names) {
			n.table("I.lpm_t").MatchFields = n.table("I.lpm_t").MatchFields[:1]
		}, "I.lpm_t: 1 match fields"},
		{"parameter", program, func(n names) { n.action("I.lpm_hit").Params[0].Bitwidth = 8 }, "I.lpm_hit: parameter v:8"},
		{"action", program, func(n names) { n.action("I.lpm_hit").Preamble.Name = "I.lpm_miss" }, "I.lpm_miss"},
		{"counter size", program, func(n names) { n.info.Counters[0].Size = 15 }, "I.kinds: 15 cells"},
		{"table missing", program, func(n names) { n.info.Tables = n.info.Tables[1:] }, "I.exact_t"},
	} {
		changed := proto.CloneOf(info)
		c.change(names{t, changed})
		_, err := r.client.SetForwardingPipelineConfig(t.Context(), &p4v1.SetForwardingPipelineConfigRequest{
			ElectionId: election, Action: p4v1.SetForwardingPipelineConfigRequest_VERIFY_AND_COMMIT,
			Config: &p4v1.ForwardingPipelineConfig{P4Info: changed, P4DeviceConfig: c.json}})
		if err == nil || !strings.Contains(err.Error(), "InvalidArgument") || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", c.name, err)
		}
	}
	// The program that was there goes on.
	programSwitch(t, r, info)
}

func TestSimpleSwitchErrors(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	var machine *bmv2.EnvironmentError
	_, err := bmv2.StartSimpleSwitch(ctx, bmv2.SimpleSwitchConfig{Binary: "/no/such/simple_switch_grpc"})
	if !errors.Is(err, bmv2.ErrNoSimpleSwitch) || !errors.As(err, &machine) || !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no binary: %v", err)
	}
	// A program that ends at once.
	fake := filepath.Join(t.TempDir(), "fake")
	if err := os.WriteFile(fake, []byte("#!/bin/sh\necho Address already in use >&2\nexit 3\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	_, err = bmv2.StartSimpleSwitch(ctx, bmv2.SimpleSwitchConfig{Binary: fake, Config: bmv2.Config{
		GRPCAddr: "unix:" + filepath.Join(t.TempDir(), "s.sock")}})
	if !errors.As(err, &machine) || !strings.Contains(err.Error(), "exit status 3") || !strings.Contains(machine.Cure, "another program") {
		t.Errorf("early exit: %v", err)
	}
	_, err = bmv2.StartSimpleSwitch(ctx, bmv2.SimpleSwitchConfig{Binary: fake, Config: bmv2.Config{
		GRPCAddr: "127.0.0.1:0", Ports: map[uint16]string{1: "xt-none"}}})
	if !errors.As(err, &machine) || !errors.Is(err, port.ErrNoInterface) {
		t.Errorf("no interface: %v", err)
	}
	// One that never answers, until the caller has had enough of it.
	started := filepath.Join(t.TempDir(), "started")
	if err := os.WriteFile(fake, fmt.Appendf(nil, "#!/bin/sh\necho starting\ntouch %s\nexec sleep 60\n", started), 0o755); err != nil {
		t.Fatal(err)
	}
	enough, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		for ctx.Err() == nil {
			if _, err := os.Stat(started); err == nil {
				break
			}
			time.Sleep(10 * time.Millisecond)
		}
		time.Sleep(100 * time.Millisecond) // for what it has written to be read
		cancel()
	}()
	_, err = bmv2.StartSimpleSwitch(enough, bmv2.SimpleSwitchConfig{Binary: fake, Config: bmv2.Config{
		GRPCAddr: "unix:" + filepath.Join(t.TempDir(), "s.sock")}})
	if !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "starting") {
		t.Errorf("no answer: %v", err)
	}
}

// switchOnLinks is the real switch with interfaces of a namespace as its ports, programmed with switch.p4.
func switchOnLinks(t *testing.T, s *vethtest.Space, ports map[uint16]string) *bmv2.SimpleSwitch {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	sw, err := bmv2.StartSimpleSwitch(ctx, bmv2.SimpleSwitchConfig{
		Config: bmv2.Config{GRPCAddr: "unix:" + filepath.Join(t.TempDir(), "p4rt.sock"), CPUPort: cpuPort, Ports: ports},
		NetNS:  s.Path,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { sw.Close() })
	conn, err := grpc.NewClient(sw.GRPCAddr(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	r := &rig{name: sw.Name(), client: p4v1.NewP4RuntimeClient(conn)}
	programSwitch(t, r, r.start(t, switchJSON, switchInfo))
	return sw
}

func TestSimpleSwitchOnInterfaces(t *testing.T) {
	require.Have(t, require.BMv2)
	s := vethtest.New(t, 2)
	sw := switchOnLinks(t, s, map[uint16]string{1: "s0", 2: "s1"})
	a, err := port.Open("h0", port.Options{NetNS: s.Path})
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	b, err := port.Open("h1", port.Options{NetNS: s.Path})
	if err != nil {
		t.Fatal(err)
	}
	got := make(chan []byte, 10)
	done := make(chan struct{})
	go func() {
		defer close(done)
		b.Receive(func(f []byte, _ port.Meta) { got <- bytes.Clone(f) })
	}()
	defer func() {
		b.Close()
		<-done
	}()
	if err := a.Send([][]byte{toPort(2, 5)}); err != nil {
		t.Fatal(err)
	}
	select {
	case f := <-got:
		if f[len(f)-1] != 5 {
			t.Errorf("received %x", f)
		}
	case <-time.After(patience):
		t.Errorf("no frame; log:\n%s", sw.Log())
	}
	sw.Close()
	select {
	case <-sw.Done():
	default:
		t.Error("the process is still there after Close")
	}
}
