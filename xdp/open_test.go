package xdp

import (
	"cmp"
	"slices"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/testing/protocmp"
	"pgregory.net/rapid"

	"xagg/api"
	"xagg/wire"
)

// contribution is a frame without lanes.
func contribution(job, epoch uint16, round, chunk uint32, rank uint8) []byte {
	p := wire.Packet{Header: wire.Header{
		Type: wire.TypeGrad, Job: job, Epoch: epoch, Round: round, Chunk: chunk, Rank: rank, Contributors: 1 << rank,
	}}
	p.Seal()
	return wire.AppendFrame(nil, workerAddr(rank), serverAddr, &p, true)
}

func TestOpenSlots(t *testing.T) {
	memory := NewMemory(100)
	agent := NewAgent("s0", "", memory)
	for _, key := range [][2]uint32{{5, 1}, {5, 2}, {6, 1}} {
		if _, err := agent.Install(t.Context(), planRequest(key[0], key[1], 4, 2)); err != nil {
			t.Fatal(err)
		}
	}
	at := func(now uint64, frame []byte) { memory.Handle(now, frame, nil) }
	at(1000, contribution(5, 1, 0, 3, 0))
	at(1100, contribution(5, 1, 0, 1, 1))
	at(1200, contribution(5, 1, 0, 1, 0)) // closes the chunk
	at(1300, contribution(6, 1, 0, 0, 0)) // another job's
	at(1400, contribution(5, 2, 1, 2, 1))
	at(1500, contribution(5, 1, 0, 3, 0)) // a duplicate
	for _, c := range []struct {
		job  uint32
		want []*api.OpenSlot
	}{
		{5, []*api.OpenSlot{
			{Epoch: 1, Round: 0, Chunk: 3, Contributors: 0b01, AgeUs: 500, IdleUs: 500},
			{Epoch: 2, Round: 1, Chunk: 2, Contributors: 0b10, AgeUs: 100, IdleUs: 100},
		}},
		{6, []*api.OpenSlot{{Epoch: 1, Contributors: 0b01, AgeUs: 200, IdleUs: 200}}},
		{7, nil},
	} {
		reply, err := agent.OpenSlots(t.Context(), &api.OpenSlotsRequest{Job: c.job})
		if diff := gocmp.Diff(&api.OpenSlotsReply{Slots: c.want}, reply, protocmp.Transform()); diff != "" || err != nil {
			t.Errorf("job %d: %v (-want +got):\n%s", c.job, err, diff)
		}
	}
	// Chunks grow older also while nobody sends.
	memory.Clock = func() uint64 { return 5000 }
	if reply, err := agent.OpenSlots(t.Context(), &api.OpenSlotsRequest{Job: 6}); err != nil || len(reply.Slots) != 1 || reply.Slots[0].AgeUs != 3700 {
		t.Errorf("later: %v %v", reply, err)
	}
	// What a plan that was removed left is not waited for.
	if _, err := agent.Remove(t.Context(), &api.RemoveRequest{Job: 5, Epoch: 1}); err != nil {
		t.Fatal(err)
	}
	if reply, err := agent.OpenSlots(t.Context(), &api.OpenSlotsRequest{Job: 5}); err != nil || len(reply.Slots) != 1 || reply.Slots[0].Epoch != 2 {
		t.Errorf("without epoch 1: %v %v", reply, err)
	}
	for _, job := range []uint32{0, 65536} {
		if _, err := agent.OpenSlots(t.Context(), &api.OpenSlotsRequest{Job: job}); status.Code(err) != codes.InvalidArgument {
			t.Errorf("job %d: %v", job, err)
		}
	}
}

// TestOpenSlotsAsync waits for the slowest rank of each running sum, and for the ranks of a scout.
func TestOpenSlotsAsync(t *testing.T) {
	memory := NewMemory(100)
	agent := NewAgent("s0", "", memory)
	plan := planRequest(5, 1, 4, asyncRounds)
	plan.Ranks, plan.Async, plan.Staleness = 0b111, true, 2
	if _, err := agent.Install(t.Context(), plan); err != nil {
		t.Fatal(err)
	}
	at := func(now uint64, flags wire.Flags, round, chunk uint32, rank uint8) {
		p := wire.Packet{Header: wire.Header{
			Type: wire.TypeGrad, Job: 5, Epoch: 1, Flags: flags, Round: round, Chunk: chunk, Rank: rank, Contributors: 1 << rank,
		}}
		p.Seal()
		memory.Handle(now, wire.AppendFrame(nil, workerAddr(rank), serverAddr, &p, true), nil)
	}
	for rank := range uint8(3) { // everybody is as far as the others
		at(1000, wire.FlagAsync, 0, 2, rank)
	}
	at(2000, 0, 7, 0, 1) // a scout
	for round := range uint32(3) {
		at(3000, wire.FlagAsync, round, 1, 0)
	}
	at(3100, wire.FlagAsync, 3, 1, 0) // held
	at(3200, wire.FlagAsync, 0, 1, 1)
	at(3300, wire.FlagAsync, 0, 3, 2)
	reply, err := agent.OpenSlots(t.Context(), &api.OpenSlotsRequest{Job: 5})
	want := &api.OpenSlotsReply{Slots: []*api.OpenSlot{
		{Epoch: 1, Round: 7, Chunk: 0, Contributors: 0b010, AgeUs: 1300, IdleUs: 1300},
		{Epoch: 1, Round: 0, Chunk: 1, Contributors: 0b011, AgeUs: 100, IdleUs: 100},
		{Epoch: 1, Round: 0, Chunk: 3, Contributors: 0b100},
	}}
	if diff := gocmp.Diff(want, reply, protocmp.Transform()); diff != "" || err != nil {
		t.Fatalf("%v (-want +got):\n%s", err, diff)
	}
	at(4000, wire.FlagAsync, 0, 1, 2) // the slowest: now ranks 1 and 2 lack their second contribution
	reply, err = agent.OpenSlots(t.Context(), &api.OpenSlotsRequest{Job: 5})
	if err != nil || len(reply.Slots) != 3 || reply.Slots[2].Round != 1 || reply.Slots[2].Contributors != 0b001 {
		t.Errorf("after the slowest: %v %v", reply, err)
	}
}

func TestSlowest(t *testing.T) {
	for _, c := range []struct {
		ranks  uint64
		clocks [3]uint32
		least  uint32
		ahead  uint64
	}{
		{0b111, [3]uint32{4, 4, 4}, 4, 0},
		{0b111, [3]uint32{5, 4, 6}, 4, 0b101},
		{0b110, [3]uint32{0, 4, 4}, 4, 0},
		{0b111, [3]uint32{1, 1<<32 - 1, 0}, 1<<32 - 1, 0b101}, // clocks wrap
	} {
		var clocks [wire.MaxRanks]uint32
		copy(clocks[:], c.clocks[:])
		if least, ahead := slowest(c.ranks, &clocks); least != c.least || ahead != c.ahead {
			t.Errorf("%+v: least %d, ahead %b", c, least, ahead)
		}
	}
}

// TestOpenSlotsOldestFirst has more open chunks than fit into an answer, the oldest ones last in the arena.
func TestOpenSlotsOldestFirst(t *testing.T) {
	const chunks = maxOpenSlots + 10
	memory := NewMemory(2 * chunks)
	agent := NewAgent("s0", "", memory)
	if _, err := agent.Install(t.Context(), planRequest(5, 1, chunks, 2)); err != nil {
		t.Fatal(err)
	}
	for i := range uint32(chunks) {
		memory.Handle(uint64(i), contribution(5, 1, 0, chunks-1-i, 0), nil)
	}
	reply, err := agent.OpenSlots(t.Context(), &api.OpenSlotsRequest{Job: 5})
	if err != nil || len(reply.Slots) != maxOpenSlots {
		t.Fatalf("%d slots, %v, want %d", len(reply.GetSlots()), err, maxOpenSlots)
	}
	for i, s := range reply.Slots {
		if s.Chunk != uint32(chunks-1-i) || s.AgeUs != uint64(chunks-1-i) {
			t.Fatalf("slot %d: %v", i, s)
		}
	}
}

// TestOpenSlotsAlike gives program and memory the same contributions. Their times differ, all else must not; those of the
// program lie between the test's.
func TestOpenSlotsAlike(t *testing.T) {
	server := load(t, 64)
	rapid.Check(t, func(t *rapid.T) {
		memory := NewMemory(64)
		mode := rapid.SampledFrom([]string{"sync", "quorum", "async"}).Draw(t, "mode")
		stores := []*Agent{NewAgent("", "", memory), NewAgent("", "", server)}
		for _, a := range stores {
			for epoch := range uint32(2) {
				plan := planRequest(5, epoch+1, 4, 2)
				plan.Ranks = 0b111
				switch mode {
				case "quorum":
					plan.Quorum = 2
				case "async":
					plan.Async, plan.Staleness, plan.Rounds = true, 1, asyncRounds
				}
				if _, err := a.Install(t.Context(), plan); err != nil {
					t.Fatal(err)
				}
			}
		}
		for range rapid.IntRange(0, 40).Draw(t, "packets") {
			p := wire.Packet{Header: wire.Header{
				Type: wire.TypeGrad, Job: 5, Epoch: rapid.Uint16Range(1, 2).Draw(t, "epoch"), Round: rapid.Uint32Range(0, 3).Draw(t, "round"),
				Chunk: rapid.Uint32Range(0, 3).Draw(t, "chunk"), Rank: rapid.Uint8Range(0, 2).Draw(t, "rank"),
			}}
			p.Contributors = 1 << p.Rank
			if mode == "async" && rapid.IntRange(0, 3).Draw(t, "scout") > 0 {
				p.Flags = wire.FlagAsync
			}
			p.Seal()
			frame := wire.AppendFrame(nil, workerAddr(p.Rank), serverAddr, &p, true)
			memory.Handle(0, frame, nil)
			if _, _, err := server.objects.Xagg.Test(frame); err != nil {
				t.Fatal(err)
			}
		}
		var got [2][]*api.OpenSlot
		for i, a := range stores {
			reply, err := a.OpenSlots(t.Context(), &api.OpenSlotsRequest{Job: 5})
			if err != nil {
				t.Fatal(err)
			}
			for _, s := range reply.Slots {
				if s.IdleUs > s.AgeUs || s.AgeUs > 60e6 {
					t.Errorf("slot %v is older than the test", s)
				}
				s.AgeUs, s.IdleUs = 0, 0
			}
			got[i] = reply.Slots
			slices.SortFunc(got[i], func(x, y *api.OpenSlot) int {
				return cmp.Or(cmp.Compare(x.Round, y.Round), cmp.Compare(x.Chunk, y.Chunk), cmp.Compare(x.Epoch, y.Epoch),
					cmp.Compare(x.Contributors, y.Contributors))
			})
			if _, err := a.Remove(t.Context(), &api.RemoveRequest{}); err != nil {
				t.Fatal(err)
			}
		}
		if diff := gocmp.Diff(got[0], got[1], protocmp.Transform()); diff != "" {
			t.Fatalf("open slots (-memory +program):\n%s", diff)
		}
	})
}

// BenchmarkOpenSlots reads the lease of a job, 10,000 slots, all of them open.
func BenchmarkOpenSlots(b *testing.B) {
	const slots = 10_000
	server := load(b, slots)
	plan := planRequest(5, 1, slots/2, 2)
	if _, err := NewAgent("", "", server).Install(b.Context(), plan); err != nil {
		b.Fatal(err)
	}
	for i := range uint32(slots) {
		if _, _, err := server.objects.Xagg.Test(contribution(5, 1, i/(slots/2), i%(slots/2), 0)); err != nil {
			b.Fatal(err)
		}
	}
	for b.Loop() {
		if open, err := server.OpenSlots(server.Plans()); err != nil || len(open) != slots {
			b.Fatalf("%d open slots, %v", len(open), err)
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/slots, "ns/slot")
}
