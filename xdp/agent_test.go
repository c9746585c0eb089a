package xdp

import (
	"errors"
	"fmt"
	"math"
	"net"
	"net/netip"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	"xagg/api"
	"xagg/wire"
)

func planRequest(job, epoch, chunks, rounds uint32) *api.ServerPlan {
	return &api.ServerPlan{Job: job, Epoch: epoch, Ranks: 0b11, Chunks: chunks, Rounds: rounds,
		ServiceIp: "10.77.255.254", ServiceMac: "02:78:61:00:ff:fe"}
}

func TestInstallRefuses(t *testing.T) {
	agent := NewAgent("s0", "", NewMemory(100))
	if _, err := agent.Install(t.Context(), planRequest(1, 1, 10, 4)); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name string
		edit func(*api.ServerPlan)
		code codes.Code
		want string
	}{
		{"job 0", func(p *api.ServerPlan) { p.Job = 0 }, codes.InvalidArgument, "job: is 0, want 1..65535"},
		{"job too big", func(p *api.ServerPlan) { p.Job = 65536 }, codes.InvalidArgument, "job: is 65536"},
		{"epoch 0", func(p *api.ServerPlan) { p.Epoch = 0 }, codes.InvalidArgument, "epoch: is 0"},
		{"epoch too big", func(p *api.ServerPlan) { p.Epoch = 70000 }, codes.InvalidArgument, "epoch: is 70000"},
		{"no ranks", func(p *api.ServerPlan) { p.Ranks = 0 }, codes.InvalidArgument, "ranks: is empty"},
		{"no chunks", func(p *api.ServerPlan) { p.Chunks = 0 }, codes.InvalidArgument, "chunks: is 0"},
		{"one round", func(p *api.ServerPlan) { p.Rounds = 1 }, codes.InvalidArgument, "rounds: is 1, want a power of two"},
		{"three rounds", func(p *api.ServerPlan) { p.Rounds = 3 }, codes.InvalidArgument, "rounds: is 3"},
		{"next epoch", func(p *api.ServerPlan) { p.NextEpoch = 65536 }, codes.InvalidArgument, "next_epoch: is 65536"},
		{"service address", func(p *api.ServerPlan) { p.ServiceIp = "::1" }, codes.InvalidArgument, `service_ip: is "::1"`},
		{"service MAC", func(p *api.ServerPlan) { p.ServiceMac = "02:78" }, codes.InvalidArgument, `service_mac: is "02:78"`},
		{"long service MAC", func(p *api.ServerPlan) { p.ServiceMac = "02:78:61:00:ff:fe:00:01" }, codes.InvalidArgument, "service_mac"},
		{"quorum of more than all", func(p *api.ServerPlan) { p.Quorum = 3 }, codes.InvalidArgument, "quorum: is 3, want at most the number of ranks, 2"},
		{"wait for all", func(p *api.ServerPlan) { p.WaitUs = 5 }, codes.InvalidArgument, "wait_us: is 5, but without a quorum"},
		{"staleness of a sync job", func(p *api.ServerPlan) { p.Staleness = 1 }, codes.InvalidArgument, "staleness: is 1, but the plan is not async"},
		{"async quorum", func(p *api.ServerPlan) { p.Async, p.Rounds, p.Quorum = true, 4, 1 }, codes.InvalidArgument, "quorum: is 1, but in an async plan"},
		{"async rounds", func(p *api.ServerPlan) { p.Async = true }, codes.InvalidArgument, "rounds: is 2, want 4 in an async plan"},
		{"no range for values", func(p *api.ServerPlan) { p.Async, p.Rounds, p.Staleness = true, 4, 1<<29 }, codes.InvalidArgument, "staleness: is 536870912, which leaves 2 ranks no range"},
		{"other chunks", func(p *api.ServerPlan) { p.Job, p.Chunks = 1, 11 }, codes.InvalidArgument, "chunks: is 11, but the lease of job 1 has 10"},
		{"other rounds", func(p *api.ServerPlan) { p.Job, p.Rounds = 1, 2 }, codes.InvalidArgument, "rounds: is 2, but the lease of job 1 has 4"},
		{"other consistency", func(p *api.ServerPlan) { p.Job, p.Epoch, p.Rounds, p.Async = 1, 2, 4, true }, codes.InvalidArgument, "async: is true, which another plan of job 1 is not"},
		{"too much", func(p *api.ServerPlan) { p.Chunks = 31 }, codes.ResourceExhausted, "62 slots to job 2: 60 of 100 are free, 60 in one piece"},
		{"far too much", func(p *api.ServerPlan) { p.Chunks, p.Rounds = 1<<31, 1<<31 }, codes.ResourceExhausted, "4611686018427387904 slots"},
	} {
		t.Run(c.name, func(t *testing.T) {
			req := planRequest(2, 1, 10, 2)
			c.edit(req)
			_, err := agent.Install(t.Context(), req)
			if status.Code(err) != c.code || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want %v with %q", err, c.code, c.want)
			}
			if info, _ := agent.Info(t.Context(), nil); info.SlotsFree != 60 {
				t.Errorf("%d slots are free after a refusal, want 60", info.SlotsFree)
			}
		})
	}
}

// TestInstallConsistency checks that a plan's consistency reaches the store.
func TestInstallConsistency(t *testing.T) {
	for name, want := range map[string]Plan{
		"sync":   {},
		"quorum": {Quorum: 2, WaitUs: math.MaxUint32},
		"async":  {Async: true, Staleness: 1<<29 - 2},
	} {
		store := NewMemory(100)
		req := planRequest(2, 1, 10, 4)
		req.Quorum, req.WaitUs, req.Async, req.Staleness = want.Quorum, want.WaitUs, want.Async, want.Staleness
		if _, err := NewAgent("s0", "", store).Install(t.Context(), req); err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		got := store.plans[planKey{2, 1}]
		if got.Quorum != want.Quorum || got.WaitUs != want.WaitUs || got.Async != want.Async || got.Staleness != want.Staleness {
			t.Errorf("%s: installed %+v", name, got)
		}
	}
}

func TestLeaseOfAJob(t *testing.T) {
	memory := NewMemory(100)
	agent := NewAgent("s0", "eth0", memory)
	install := func(job, epoch, chunks, base uint32) {
		t.Helper()
		reply, err := agent.Install(t.Context(), planRequest(job, epoch, chunks, 2))
		if err != nil || reply.Base != base {
			t.Fatalf("install job %d epoch %d: %v %v, want base %d", job, epoch, reply, err, base)
		}
	}
	free := func(want uint32) {
		t.Helper()
		info, err := agent.Info(t.Context(), nil)
		if err != nil || info.SlotsFree != want {
			t.Fatalf("info: %v %v, want %d free slots", info, err, want)
		}
	}
	remove := func(job, epoch uint32) {
		t.Helper()
		if _, err := agent.Remove(t.Context(), &api.RemoveRequest{Job: job, Epoch: epoch}); err != nil {
			t.Fatal(err)
		}
	}
	install(1, 1, 20, 0)
	install(2, 1, 10, 40)
	install(1, 2, 20, 0) // the same lease for all epochs
	install(1, 1, 20, 0) // once more
	free(40)
	remove(1, 1)
	remove(1, 1) // once more
	free(40)     // epoch 2 is still there
	remove(1, 2)
	free(80)
	install(3, 1, 15, 0) // first fit
	install(4, 1, 16, 60)
	free(18)
	install(5, 1, 5, 30)

	if _, err := agent.Arm(t.Context(), &api.ArmRequest{Job: 5, Epoch: 2, NextEpoch: 3}); status.Code(err) != codes.NotFound {
		t.Errorf("arm a plan that is not there: %v", err)
	}
	if _, err := agent.Arm(t.Context(), &api.ArmRequest{Job: 5, Epoch: 1, NextEpoch: 2}); err != nil {
		t.Error(err)
	}
	info, _ := agent.Info(t.Context(), nil)
	want := &api.ServerInfo{Name: "s0", Interface: "eth0", Mode: "memory", MemoryBytes: 108800, Slots: 100, SlotsFree: 8,
		Instance: memory.Instance()}
	if !proto.Equal(info, want) {
		t.Errorf("info: %v, want %v", info, want)
	}

	remove(0, 0) // everything
	free(100)
	install(9, 1, 50, 0)
}

// TestJobIDAgain: a job id that was used before finds nothing of the old job in its slots, neither a result of the same
// round nor a round that is newer than its own.
func TestJobIDAgain(t *testing.T) {
	memory := NewMemory(8)
	t.Run("memory", func(t *testing.T) {
		testJobIDAgain(t, memory, func(frame []byte) []byte { return memory.Handle(0, frame, nil) })
	})
	t.Run("xdp", func(t *testing.T) {
		server := load(t, 8)
		testJobIDAgain(t, server, func(frame []byte) []byte {
			_, answer, err := server.objects.Xagg.Test(frame)
			if err != nil {
				t.Fatal(err)
			}
			return answer
		})
	})
}

func testJobIDAgain(t *testing.T, store Store, handle func([]byte) []byte) {
	agent := NewAgent("s0", "", store)
	ask := func(job uint16, round uint32, rank uint8) wire.Packet {
		p := wire.Packet{Header: wire.Header{
			Type: wire.TypeGrad, Job: job, Epoch: 1, Round: round, Rank: rank, Contributors: 1 << rank,
		}}
		var answer wire.Packet
		if _, _, err := wire.ParseFrame(handle(wire.AppendFrame(nil, workerAddr(rank), serverAddr, &p, true)), &answer); err != nil {
			t.Fatal(err)
		}
		return answer
	}
	for _, again := range []bool{false, true, true} {
		plan := planRequest(5, 1, 1, 2)
		plan.Ranks = 0b11
		if _, err := agent.Install(t.Context(), plan); err != nil {
			t.Fatal(err)
		}
		for _, round := range []uint32{0, 1, 6, 7} {
			for rank, want := range []wire.Type{wire.TypeAck, wire.TypeResult} {
				if a := ask(5, round, uint8(rank)); a.Type != want {
					t.Errorf("again %v, round %d: rank %d has %v (%v), want %v", again, round, rank, a.Type, a.Reason, want)
				}
			}
		}
		if _, err := agent.Remove(t.Context(), &api.RemoveRequest{}); err != nil { // as a controller does that begins
			t.Fatal(err)
		}
	}
}

// failing is a store that refuses plans.
type failing struct {
	*Memory
	err error
}

func (f failing) Install(Plan) error { return f.err }

func TestFailedInstallGivesLeaseBack(t *testing.T) {
	for _, c := range []struct {
		err  error
		code codes.Code
	}{{fmt.Errorf("install: %w", ErrNoPlanRoom), codes.ResourceExhausted}, {errors.New("broken"), codes.Internal}} {
		agent := NewAgent("s0", "", failing{NewMemory(100), c.err})
		if _, err := agent.Install(t.Context(), planRequest(1, 1, 50, 2)); status.Code(err) != c.code {
			t.Errorf("install: %v, want %v", err, c.code)
		}
		if info, _ := agent.Info(t.Context(), nil); info.SlotsFree != 100 {
			t.Errorf("%d slots are free, want 100", info.SlotsFree)
		}
	}
}

// TestLeasesNeverOverlap grants and releases leases at random, and compares with a map of every slot.
func TestLeasesNeverOverlap(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		slots := rapid.Uint32Range(1, 200).Draw(t, "slots")
		l := newLeases(slots)
		owner := make([]uint16, slots)
		fits := func(n uint32) bool {
			run := uint32(0)
			for _, o := range owner {
				if run++; o != 0 {
					run = 0
				}
				if run >= n {
					return true
				}
			}
			return false
		}
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			job := rapid.Uint16Range(1, 12).Draw(t, "job")
			if lease, ok := l.byJob[job]; ok {
				l.release(job)
				for i := range lease.Slots() {
					if owner[lease.Base+i] != job {
						t.Fatalf("slot %d belongs to job %d, not %d", lease.Base+i, owner[lease.Base+i], job)
					}
					owner[lease.Base+i] = 0
				}
				continue
			}
			chunks, rounds := rapid.Uint32Range(1, 40).Draw(t, "chunks"), uint32(1)<<rapid.IntRange(1, 3).Draw(t, "rounds")
			can := fits(chunks * rounds)
			lease, err := l.grant(job, chunks, rounds)
			if (err == nil) != can {
				t.Fatalf("grant %d x %d: %v, but room is %v", chunks, rounds, err, can)
			}
			var noRoom *NoRoomError
			if err != nil && !errors.As(err, &noRoom) {
				t.Fatalf("grant: %v", err)
			}
			if err != nil {
				continue
			}
			for i := range lease.Slots() {
				if owner[lease.Base+i] != 0 {
					t.Fatalf("slot %d is given to jobs %d and %d", lease.Base+i, owner[lease.Base+i], job)
				}
				owner[lease.Base+i] = job
			}
			for other, o := range l.byJob {
				if other != job && o.Index == lease.Index {
					t.Fatalf("jobs %d and %d have index %d", other, job, o.Index)
				}
			}
		}
		free := uint32(0)
		for _, o := range owner {
			if o == 0 {
				free++
			}
		}
		if l.free() != free {
			t.Fatalf("%d slots are free, want %d", l.free(), free)
		}
	})
}

func TestNoMoreJobs(t *testing.T) {
	l := newLeases(1000)
	for job := range uint16(MaxJobs) {
		if _, err := l.grant(job+1, 1, 2); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := l.grant(1000, 1, 2); err == nil || !strings.Contains(err.Error(), "64 jobs have leases, no more can") {
		t.Errorf("grant: %v", err)
	}
	l.release(17)
	if lease, err := l.grant(1000, 1, 2); err != nil || lease.Base != 32 || lease.Index != 16 {
		t.Errorf("grant: %+v %v", lease, err)
	}
}

func TestStats(t *testing.T) {
	memory := NewMemory(100)
	agent := NewAgent("s0", "", memory)
	for job := uint32(5); job <= 6; job++ {
		if _, err := agent.Install(t.Context(), planRequest(job, 1, 2, 2)); err != nil {
			t.Fatal(err)
		}
	}
	send := func(now uint64, rank uint8) {
		memory.Handle(now, wire.AppendFrame(nil, workerAddr(rank), serverAddr, grad(rank, 10), true), nil)
	}
	send(1000, 1)
	send(1000, 1)
	send(1009, 0)
	got, err := agent.Stats(t.Context(), &api.StatsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	buckets := func(i int) []uint64 {
		b := make([]uint64, LagBuckets)
		b[i] = 1
		return b
	}
	want := &api.StatsReply{
		Reasons: map[string]uint64{"summed": 2, "duplicate": 1}, Instance: memory.Instance(), Slots: 100, SlotsFree: 92,
		Ranks: []*api.RankStats{
			{Job: 5, Rank: 0, Packets: 1, LagSumUs: 9, LagMaxUs: 9, LagLog2: buckets(3)},
			{Job: 5, Rank: 1, Packets: 1, LagLog2: buckets(0)},
		},
	}
	if !proto.Equal(got, want) {
		t.Errorf("stats: %v\nwant %v", got, want)
	}
	if other, err := agent.Stats(t.Context(), &api.StatsRequest{Job: 6}); err != nil || len(other.Ranks) != 0 {
		t.Errorf("stats of job 6: %v %v", other, err)
	}
	// A job that comes after, with the same index, starts from nothing.
	if _, err := agent.Remove(t.Context(), &api.RemoveRequest{Job: 5, Epoch: 1}); err != nil {
		t.Fatal(err)
	}
	if _, err := agent.Install(t.Context(), planRequest(7, 1, 2, 2)); err != nil {
		t.Fatal(err)
	}
	if fresh, err := agent.Stats(t.Context(), &api.StatsRequest{Job: 7}); err != nil || len(fresh.Ranks) != 0 {
		t.Errorf("stats of a fresh job: %v %v", fresh, err)
	}
}

func TestRankStatsBuckets(t *testing.T) {
	for lag, bucket := range map[uint32]int{0: 0, 1: 0, 2: 1, 3: 1, 4: 2, 1023: 9, 1024: 10, 1<<32 - 1: 31} {
		var s RankStats
		s.Add(lag)
		if s.LagLog2[bucket] != 1 || s.Packets != 1 || s.LagMaxUs != uint64(lag) {
			t.Errorf("lag %d: %+v, want bucket %d", lag, s, bucket)
		}
	}
}

func TestParseSize(t *testing.T) {
	for text, want := range map[string]Size{"64MiB": 64 << 20, "1GiB": 1 << 30, "512KiB": 512 << 10, "1088B": 1088, "0B": 0} {
		got, err := ParseSize(text)
		if err != nil || got != want {
			t.Errorf("%s: %d %v, want %d", text, got, err, want)
		}
		if got.String() != text && text != "1GiB" {
			t.Errorf("%s is printed as %s", text, got)
		}
	}
	for _, text := range []string{"", "64", "MiB", "-1MiB", "1.5GiB", "64 MiB", "64MB", "99999999999999999999B", "99999999999GiB"} {
		if got, err := ParseSize(text); err == nil || !strings.Contains(err.Error(), "64MiB") {
			t.Errorf("%q: %d %v, want an error with an example", text, got, err)
		}
	}
	for size, want := range map[Size]string{0: "too small", SlotSize - 1: "too small", 1 << 50: "too big"} {
		if _, err := size.Slots(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("slots of %v: %v, want %s", size, err, want)
		}
	}
	if n, err := Size(64 << 20).Slots(); err != nil || n != 61680 {
		t.Errorf("slots of 64MiB: %d %v", n, err)
	}
}

// FuzzRequests asks an agent to install, arm, count and remove any plan: it is installed if and only if every one of its
// fields is in range, and removed with nothing left.
func FuzzRequests(f *testing.F) {
	seed := func(edits ...func(*api.ServerPlan)) {
		p := planRequest(1, 1, 10, 2)
		for _, edit := range edits {
			edit(p)
		}
		f.Add(p.Job, p.Epoch, p.Ranks, p.Chunks, p.Rounds, p.NextEpoch, p.ServiceIp, p.ServiceMac)
	}
	seed()
	seed(func(p *api.ServerPlan) { p.Job, p.Epoch, p.NextEpoch = 65535, 65535, 65535 })
	seed(func(p *api.ServerPlan) { p.Job = 0 })
	seed(func(p *api.ServerPlan) { p.Epoch, p.NextEpoch = 65536, 65536 })
	seed(func(p *api.ServerPlan) { p.Chunks, p.Rounds = 1<<31, 1<<31 })
	seed(func(p *api.ServerPlan) { p.Ranks, p.Rounds = 0, 3 })
	seed(func(p *api.ServerPlan) { p.ServiceIp, p.ServiceMac = "::ffff:1.2.3.4", "02-78-61-00-ff-fe-00-01" })
	f.Fuzz(func(t *testing.T, job, epoch uint32, ranks uint64, chunks, rounds, next uint32, ip, mac string) {
		const slots = 1000
		agent := NewAgent("s0", "", NewMemory(slots))
		req := &api.ServerPlan{
			Job: job, Epoch: epoch, Ranks: ranks, Chunks: chunks, Rounds: rounds, NextEpoch: next, ServiceIp: ip, ServiceMac: mac,
		}
		free := func() uint64 {
			info, err := agent.Info(t.Context(), nil)
			if err != nil {
				t.Fatal(err)
			}
			return uint64(info.SlotsFree)
		}
		_, err := agent.Install(t.Context(), req)
		valid := job-1 < 65535 && epoch-1 < 65535 && next < 65536 && ranks != 0 && chunks > 0 && rounds > 1 &&
			rounds&(rounds-1) == 0 && uint64(chunks)*uint64(rounds) <= slots
		if err == nil != valid {
			addr, ipErr := netip.ParseAddr(ip)
			hw, macErr := net.ParseMAC(mac)
			if err == nil || ipErr == nil && addr.Is4() && macErr == nil && len(hw) == 6 {
				t.Fatalf("install %v: %v", req, err)
			}
		}
		used := uint64(0)
		if err == nil {
			used = uint64(chunks) * uint64(rounds)
		}
		if free() != slots-used {
			t.Errorf("%d slots are free after %v", free(), req)
		}
		_, armErr := agent.Arm(t.Context(), &api.ArmRequest{Job: job, Epoch: epoch, NextEpoch: next})
		if (armErr == nil) != (err == nil) {
			t.Errorf("arm %v: %v after install: %v", req, armErr, err)
		}
		if _, statsErr := agent.Stats(t.Context(), &api.StatsRequest{Job: job}); (statsErr == nil) != (job < 65536) {
			t.Errorf("statistics of job %d: %v", job, statsErr)
		}
		if _, err := agent.Remove(t.Context(), &api.RemoveRequest{Job: job, Epoch: epoch}); err != nil && used > 0 {
			t.Errorf("remove %v: %v", req, err)
		}
		if free() != slots {
			t.Errorf("%d slots are free after the end", free())
		}
	})
}
