package xdp

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/testing/protocmp"
	"pgregory.net/rapid"

	"xagg/api"
	"xagg/tests/require"
	"xagg/wire"
)

// bpfDir returns a directory on a BPF file system of the test's own, which does not exist yet.
func bpfDir(t *testing.T) string {
	t.Helper()
	require.Have(t, require.XDP, require.Netns)
	root := t.TempDir()
	if err := unix.Mount("bpf", root, "bpf", 0, ""); err != nil {
		t.Fatalf("mount a BPF file system: %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(root, unix.MNT_DETACH); err != nil { // a test that failed may hold it open
			t.Error(err)
		}
	})
	return filepath.Join(root, "xagg", "server")
}

// pinned begins a server at the link "server" as an agent does, with pins.
func pinned(t *testing.T, cfg Config) (*Server, *pins, error) {
	t.Helper()
	p, err := openPins(cfg.Pin)
	if err != nil {
		return nil, nil, err
	}
	log, _ := testLog(t)
	s, err := start(cfg, p, log)
	return s, p, err
}

func mustPin(t *testing.T, cfg Config) (*Server, *pins) {
	t.Helper()
	s, p, err := pinned(t, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return s, p
}

// die does what the kernel does for an agent that is killed.
func die(t *testing.T, s *Server, p *pins) {
	t.Helper()
	if err := errors.Join(s.Close(), p.close()); err != nil {
		t.Fatal(err)
	}
}

// finish ends a server as an agent does that is interrupted, and looks whether anything is left.
func finish(t *testing.T, s *Server, p *pins) {
	t.Helper()
	if err := end(s, p, false); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(p.dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%s is still there: %v", p.dir, err)
	}
	for _, name := range []string{"server", "switch"} {
		if xdp := linkByName(t, name).Attrs().Xdp; xdp != nil && xdp.Attached {
			t.Errorf("a program is still attached to %s", name)
		}
	}
}

// TestTakeOver kills an agent while a chunk is open. The program closes it without one, and the next agent knows
// everything that the first did.
func TestTakeOver(t *testing.T) {
	for _, mode := range []Mode{Native, Generic} {
		t.Run(string(mode), func(t *testing.T) {
			enterNamespace(t)
			vethPair(t, 1500, 1)
			cfg := Config{Interface: "server", Memory: 100 * SlotSize, Mode: mode, Pin: bpfDir(t)}
			server, p := mustPin(t, cfg)
			agent := NewAgent("s0", "server", server)
			install := func(job, epoch uint32, base uint32) {
				t.Helper()
				plan := planRequest(job, epoch, 2, 2)
				plan.NextEpoch = 9
				if reply, err := agent.Install(t.Context(), plan); err != nil || reply.Base != base {
					t.Fatalf("install job %d: %v %v, want base %d", job, reply, err, base)
				}
			}
			install(4, 1, 0)
			install(5, 1, 4)
			install(5, 2, 4)
			install(6, 1, 8)
			if _, err := agent.Remove(t.Context(), &api.RemoveRequest{Job: 4, Epoch: 1}); err != nil {
				t.Fatal(err)
			}
			if _, err := agent.Arm(t.Context(), &api.ArmRequest{Job: 6, Epoch: 1, NextEpoch: 2}); err != nil {
				t.Fatal(err)
			}
			socket := packetSocket(t, "switch")
			ask := func(rank uint8) (answer wire.Packet) {
				t.Helper()
				b := answerTo(t, socket, wire.AppendFrame(nil, workerAddr(rank), serverAddr, grad(rank, 256), true))
				if _, _, err := wire.ParseFrame(b, &answer); err != nil {
					t.Fatal(err)
				}
				return answer
			}
			ask(0)
			before, err := agent.Info(t.Context(), nil)
			if err != nil {
				t.Fatal(err)
			}
			plans, err := agent.List(t.Context(), nil)
			if err != nil || len(plans.Plans) != 3 {
				t.Fatalf("list: %v %v, want 3 plans", plans, err)
			}
			die(t, server, p)

			if a := ask(1); a.Type != wire.TypeResult || a.Contributors != 3 || !a.TagOK() {
				t.Fatalf("without an agent: %+v", a.Header)
			}

			server, p = mustPin(t, cfg)
			for job, seen := range map[uint16]bool{4: true, 5: true, 8: false} { // 4 was removed
				if server.Seen(job) != seen {
					t.Errorf("job %d was seen: %v, want %v", job, !seen, seen)
				}
			}
			agent = NewAgent("s0", "server", server)
			after, err := agent.Info(t.Context(), nil)
			if diff := cmp.Diff(before, after, protocmp.Transform()); diff != "" || err != nil || after.Instance == 0 {
				t.Errorf("info %v, %v (-before +after):\n%s", after, err, diff)
			}
			again, err := agent.List(t.Context(), nil)
			if diff := cmp.Diff(plans, again, protocmp.Transform()); diff != "" || err != nil {
				t.Errorf("list: %v (-before +after):\n%s", err, diff)
			}
			stats, err := agent.Stats(t.Context(), &api.StatsRequest{Job: 5})
			if err != nil || stats.Reasons["summed"] != 2 || len(stats.Ranks) != 2 {
				t.Errorf("stats: %v %v, want both contributions", stats, err)
			}
			install(5, 2, 4) // what a controller does when it is back
			install(4, 1, 0)
			install(7, 1, 12)
			if a := ask(1); a.Type != wire.TypeResult || a.NextEpoch != 9 {
				t.Errorf("the closed chunk: %+v", a.Header)
			}
			// What a job id left under an earlier agent is nothing to a job that gets it again.
			if _, err := agent.Remove(t.Context(), &api.RemoveRequest{Job: 5, Epoch: 1}); err != nil {
				t.Fatal(err)
			}
			if _, err := agent.Remove(t.Context(), &api.RemoveRequest{Job: 5, Epoch: 2}); err != nil {
				t.Fatal(err)
			}
			install(5, 1, 4)
			if a := ask(1); a.Type != wire.TypeAck || a.Contributors != 0b10 {
				t.Errorf("the first contribution to a job with an old id: %+v", a.Header)
			}
			finish(t, server, p)
		})
	}
}

// TestTakeOverLosesNothing sends one frame after the other while agents die and take over. Every one is answered at once.
func TestTakeOverLosesNothing(t *testing.T) {
	enterNamespace(t)
	vethPair(t, 1500, 1)
	cfg := Config{Interface: "server", Memory: 100 * SlotSize, Mode: Native, Pin: bpfDir(t)}
	server, p := mustPin(t, cfg)
	plan := planRequest(5, 1, 2, 2)
	if _, err := NewAgent("s0", "server", server).Install(t.Context(), plan); err != nil {
		t.Fatal(err)
	}
	socket := packetSocket(t, "switch")
	stop, done := make(chan struct{}), make(chan error, 1)
	frames := uint32(0)
	go func() {
		for {
			select {
			case <-stop:
				done <- nil
				return
			default:
			}
			b, err := sendAndReceive(socket, contribution(5, 1, frames, 0, 0))
			var answer wire.Packet
			if err == nil {
				_, _, err = wire.ParseFrame(b, &answer)
			}
			if err == nil && (answer.Type != wire.TypeAck || answer.Round != frames) {
				err = fmt.Errorf("frame %d: answer %+v", frames, answer.Header)
			}
			if err != nil {
				done <- err
				return
			}
			frames++
		}
	}()
	const agents = 20
	var longest time.Duration
	for range agents {
		die(t, server, p)
		begin := time.Now()
		server, p = mustPin(t, cfg)
		longest = max(longest, time.Since(begin))
		if _, err := NewAgent("s0", "server", server).Install(t.Context(), plan); err != nil {
			t.Error(err)
		}
	}
	close(stop)
	if err := <-done; err != nil {
		t.Errorf("after %d frames: %v", frames, err)
	}
	counts, err := server.Reasons()
	if err != nil || counts[wire.ReasonNone] != uint64(frames) {
		t.Errorf("%d contributions were summed, %v, want %d", counts[wire.ReasonNone], err, frames)
	}
	t.Logf("%d frames during %d agents, of which the slowest took over in %v", frames, agents, longest)
	finish(t, server, p)
}

func TestKeep(t *testing.T) {
	enterNamespace(t)
	vethPair(t, 1500, 1)
	cfg := Config{Interface: "server", Memory: 10 * SlotSize, Mode: Auto, Pin: bpfDir(t)}
	server, p := mustPin(t, cfg)
	instance := server.Instance()
	if err := end(server, p, true); err != nil {
		t.Fatal(err)
	}
	server, p = mustPin(t, cfg)
	if server.Instance() != instance {
		t.Errorf("instance %d, want %d", server.Instance(), instance)
	}
	finish(t, server, p)
}

func TestOneAgentOnly(t *testing.T) {
	enterNamespace(t)
	vethPair(t, 1500, 1)
	cfg := Config{Interface: "server", Memory: 10 * SlotSize, Mode: Auto, Pin: bpfDir(t)}
	server, p := mustPin(t, cfg)
	if _, _, err := pinned(t, cfg); !errors.Is(err, ErrAgentRuns) || !strings.Contains(err.Error(), "stop it first") {
		t.Errorf("a second agent: %v, want %v", err, ErrAgentRuns)
	}
	if err := RemovePins(cfg.Pin); !errors.Is(err, ErrAgentRuns) {
		t.Errorf("remove the pins of an agent that runs: %v", err)
	}
	other := cfg
	other.Pin += "2"
	if _, _, err := pinned(t, other); err == nil || !strings.Contains(err.Error(), "another XDP program") {
		t.Errorf("a second agent with pins elsewhere: %v", err)
	}
	if _, err := os.Stat(other.Pin); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("it left its directory: %v", err)
	}
	finish(t, server, p)
}

// TestCannotTakeOver changes what an agent left, or what the next one wants. The program goes on in any case, and
// --replace begins anew.
func TestCannotTakeOver(t *testing.T) {
	for _, c := range []struct {
		name string
		edit func(t *testing.T, s *Server, next *Config)
		want string
	}{
		{"other version", func(t *testing.T, s *Server, _ *Config) {
			s.record.Object[3]++
			if err := s.writeRecord(); err != nil {
				t.Fatal(err)
			}
		}, "another version of the program"},
		{"other memory", func(_ *testing.T, _ *Server, next *Config) { next.Memory = 1 << 20 }, "its memory has 10880B; --memory 10880B takes it over"},
		{"other mode", func(_ *testing.T, _ *Server, next *Config) { next.Mode = Generic }, "native mode; --xdp-mode native or auto takes it over"},
		{"other interface", func(_ *testing.T, _ *Server, next *Config) { next.Interface = "switch" }, "not the one at switch but at an interface that was called server"},
		{"overlapping leases", func(t *testing.T, s *Server, _ *Config) {
			for job := range uint16(2) {
				p := Plan{Job: 1 + job, Epoch: 1, Ranks: 1, Lease: Lease{Chunks: 2, Rounds: 2, Index: uint32(job)}, ServiceIP: netip.AddrFrom4([4]byte{})}
				if err := s.Install(p); err != nil {
					t.Fatal(err)
				}
			}
		}, "overlaps another"},
	} {
		t.Run(c.name, func(t *testing.T) {
			enterNamespace(t)
			vethPair(t, 1500, 1)
			cfg := Config{Interface: "server", Memory: 10 * SlotSize, Mode: Native, Pin: bpfDir(t)}
			server, p := mustPin(t, cfg)
			first := server.Instance()
			next := cfg
			c.edit(t, server, &next)
			die(t, server, p)
			var refused *PinnedError
			if _, _, err := pinned(t, next); !errors.As(err, &refused) || !strings.Contains(err.Error(), c.want) ||
				!strings.Contains(err.Error(), "--replace") {
				t.Errorf("take over: %v, want %q", err, c.want)
			}
			if xdp := linkByName(t, "server").Attrs().Xdp; xdp == nil || !xdp.Attached {
				t.Error("the program is not attached any more")
			}
			next.Replace = true
			next.Interface = cfg.Interface
			server, p = mustPin(t, next)
			if server.Instance() == first || len(server.Plans()) != 0 {
				t.Errorf("instance %d with plans %v after %d, want another and none", server.Instance(), server.Plans(), first)
			}
			finish(t, server, p)
		})
	}
}

// TestRemains begins where an agent left what nobody can use: also one that was killed while it removed its pins, before any
// of them, and of whatever version.
func TestRemains(t *testing.T) {
	type remains struct {
		name string
		edit func(t *testing.T, s *Server, p *pins)
	}
	cases := []remains{
		{"not complete", func(t *testing.T, s *Server, _ *pins) {
			s.record.Complete = 0
			if err := s.writeRecord(); err != nil {
				t.Fatal(err)
			}
		}},
		{"interface gone", func(t *testing.T, _ *Server, _ *pins) {
			if err := netlink.LinkDel(linkByName(t, "server")); err != nil {
				t.Fatal(err)
			}
			vethPair(t, 1500, 1)
		}},
	}
	for removed, name := range pinNames {
		cases = append(cases, remains{"killed before it removed " + name, func(t *testing.T, s *Server, p *pins) {
			if removed%2 == 0 {
				s.record.Object[3]++
				if err := s.writeRecord(); err != nil {
					t.Fatal(err)
				}
			}
			for _, name := range []string{pinLink, pinPeer} {
				if err := detach(p.path(name)); err != nil {
					t.Fatal(err)
				}
			}
			for _, name := range pinNames[:removed] {
				if err := os.Remove(p.path(name)); err != nil {
					t.Fatal(err)
				}
			}
		}})
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			enterNamespace(t)
			vethPair(t, 1500, 1)
			cfg := Config{Interface: "server", Memory: 10 * SlotSize, Mode: Native, Pin: bpfDir(t)}
			server, p := mustPin(t, cfg)
			first := server.Instance()
			c.edit(t, server, p)
			die(t, server, p)
			server, p = mustPin(t, cfg)
			if server.Instance() == first {
				t.Error("memory that nobody could use was taken over")
			}
			finish(t, server, p)
		})
	}
}

// TestStrangersPins leaves alone what it did not make.
func TestStrangersPins(t *testing.T) {
	enterNamespace(t)
	vethPair(t, 1500, 1)
	cfg := Config{Interface: "server", Memory: 10 * SlotSize, Mode: Native, Pin: bpfDir(t)}
	for _, name := range []string{pinRecord, xaggMapArena} {
		if err := os.MkdirAll(cfg.Pin, 0o700); err != nil {
			t.Fatal(err)
		}
		m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1})
		if err != nil {
			t.Fatal(err)
		}
		defer m.Close()
		path := filepath.Join(cfg.Pin, name)
		if err := m.Pin(path); err != nil {
			t.Fatal(err)
		}
		for _, replace := range []bool{false, true} {
			cfg.Replace = replace
			if _, _, err := pinned(t, cfg); err == nil || !strings.Contains(err.Error(), "choose another directory with --pin") {
				t.Errorf("a pin called %s, replace %v: %v", name, replace, err)
			}
		}
		if err := RemovePins(cfg.Pin); err == nil {
			t.Errorf("a pin called %s was removed", name)
		}
		if servers, err := pinnedBelow(filepath.Dir(cfg.Pin)); err != nil || len(servers) != 0 {
			t.Errorf("pinned servers: %v %v, want none", servers, err)
		}
		if err := os.Remove(path); err != nil {
			t.Errorf("the pin called %s: %v", name, err)
		}
	}
	cfg.Pin = t.TempDir()
	if _, _, err := pinned(t, cfg); err == nil || !strings.Contains(err.Error(), "mount -t bpf bpf /sys/fs/bpf") {
		t.Errorf("pins on no BPF file system: %v", err)
	}
}

func TestPinnedServers(t *testing.T) {
	enterNamespace(t)
	vethPair(t, 1500, 1)
	cfg := Config{Interface: "server", Memory: 10 * SlotSize, Mode: Auto, Pin: bpfDir(t)}
	want := func(want ...PinnedServer) {
		t.Helper()
		got, err := PinnedServers()
		if err != nil {
			t.Fatal(err)
		}
		got = slices.DeleteFunc(got, func(s PinnedServer) bool { return s.Dir != cfg.Pin }) // others' are none of ours
		if diff := cmp.Diff(want, got, cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("pinned servers (-want +got):\n%s", diff)
		}
	}
	server, p := mustPin(t, cfg)
	want(PinnedServer{Dir: cfg.Pin, Interface: "server", Agent: true, Attached: true})
	die(t, server, p)
	want(PinnedServer{Dir: cfg.Pin, Interface: "server", Attached: true})
	if err := netlink.LinkDel(linkByName(t, "server")); err != nil {
		t.Fatal(err)
	}
	want(PinnedServer{Dir: cfg.Pin, Interface: "server"})
	if err := RemovePins(cfg.Pin); err != nil {
		t.Error(err)
	}
	want()
}

// TestRestore reads random plans back from the maps that they were written to.
func TestRestore(t *testing.T) {
	server := load(t, 1000)
	rapid.Check(t, func(t *rapid.T) {
		books := newLeases(1000)
		for _, job := range rapid.SliceOfNDistinct(rapid.Uint16Range(1, 65535), 0, 3, rapid.ID).Draw(t, "jobs") {
			async := rapid.Bool().Draw(t, "async")
			rounds := uint32(1) << rapid.IntRange(1, 2).Draw(t, "rounds")
			if async {
				rounds = asyncRounds
			}
			lease, err := books.grant(job, rapid.Uint32Range(1, 25).Draw(t, "chunks"), rounds)
			if err != nil {
				t.Fatal(err)
			}
			for _, epoch := range rapid.SliceOfNDistinct(rapid.Uint16Range(1, 65535), 1, 2, rapid.ID).Draw(t, "epochs") {
				plan := Plan{
					Job: job, Epoch: epoch, Lease: lease, Ranks: rapid.Uint64Min(1).Draw(t, "ranks"),
					NextEpoch: rapid.Uint16().Draw(t, "next"),
					Async:     async,
					Quorum:    rapid.Uint32().Draw(t, "quorum"),
					WaitUs:    rapid.Uint32().Draw(t, "wait"),
					Staleness: rapid.Uint32().Draw(t, "staleness"),
					ServiceIP: netip.AddrFrom4([4]byte(rapid.SliceOfN(rapid.Byte(), 4, 4).Draw(t, "ip"))),
				}
				copy(plan.ServiceMAC[:], rapid.SliceOfN(rapid.Byte(), 6, 6).Draw(t, "mac"))
				if err := server.Install(plan); err != nil {
					t.Fatal(err)
				}
			}
		}
		// An agent that dies between the two steps of a removal or an installation leaves a job without a plan.
		if err := server.objects.Jobs.Put(uint32(65536), uint8(1)); err != nil {
			t.Fatal(err)
		}
		want := server.plans
		server.plans = make(map[planKey]Plan)
		if err := server.restore(); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, server.plans, cmp.AllowUnexported(planKey{}), cmpopts.EquateComparable(netip.Addr{})); diff != "" {
			t.Fatalf("plans (-want +got):\n%s", diff)
		}
		if err := server.objects.Jobs.Lookup(uint32(65536), new(uint8)); !errors.Is(err, ebpf.ErrKeyNotExist) {
			t.Fatalf("the job without a plan: %v", err)
		}
		agent := NewAgent("s0", "", server)
		if diff := cmp.Diff(books.byJob, agent.leases.byJob, cmpopts.EquateEmpty()); diff != "" {
			t.Fatalf("leases (-want +got):\n%s", diff)
		}
		if _, err := agent.Remove(t.Context(), &api.RemoveRequest{}); err != nil {
			t.Fatal(err)
		}
		if server.objects.Jobs.Iterate().Next(new(uint32), new(uint8)) {
			t.Fatal("a job is left")
		}
	})
}

func TestCheckLeases(t *testing.T) {
	plan := func(job uint16, base, chunks, rounds, index uint32) Plan {
		return Plan{Job: job, Lease: Lease{base, chunks, rounds, index}}
	}
	for _, c := range []struct {
		want  string
		plans []Plan
	}{
		{"", nil},
		{"", []Plan{plan(1, 0, 2, 2, 0), plan(1, 0, 2, 2, 0), plan(2, 4, 3, 2, 1)}},
		{"different leases", []Plan{plan(1, 0, 2, 2, 0), plan(1, 4, 2, 2, 0)}},
		{"overlaps", []Plan{plan(1, 0, 2, 2, 0), plan(2, 3, 2, 2, 1)}},
		{"empty", []Plan{plan(1, 0, 0, 2, 0)}},
		{"empty", []Plan{plan(1, 0, 1, 0, 0)}},
		{"beyond", []Plan{plan(1, 8, 2, 2, 0)}},
		{"beyond", []Plan{plan(1, 0, 1<<31, 1<<31, 0)}},
		{"index", []Plan{plan(1, 0, 2, 2, 0), plan(2, 4, 2, 2, 0)}},
		{"index", []Plan{plan(1, 0, 2, 2, MaxJobs)}},
	} {
		err := checkLeases(10, c.plans)
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v: %v, want %q", c.plans, err, c.want)
		}
	}
}
