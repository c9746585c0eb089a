package xdp

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
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
		if diff := cmp.Diff(&api.OpenSlotsReply{Slots: c.want}, reply, protocmp.Transform()); diff != "" || err != nil {
			t.Errorf("job %d: %v (-want +got):\n%s", c.job, err, diff)
		}
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
		stores := []*Agent{NewAgent("", "", memory), NewAgent("", "", server)}
		for _, a := range stores {
			for epoch := range uint32(2) {
				if _, err := a.Install(t.Context(), planRequest(5, epoch+1, 4, 2)); err != nil {
					t.Fatal(err)
				}
			}
		}
		for range rapid.IntRange(0, 40).Draw(t, "packets") {
			frame := contribution(5, rapid.Uint16Range(1, 2).Draw(t, "epoch"), rapid.Uint32Range(0, 3).Draw(t, "round"),
				rapid.Uint32Range(0, 3).Draw(t, "chunk"), rapid.Uint8Range(0, 1).Draw(t, "rank"))
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
			slices.SortFunc(got[i], func(x, y *api.OpenSlot) int { return int(x.Round*4+x.Chunk) - int(y.Round*4+y.Chunk) })
			if _, err := a.Remove(t.Context(), &api.RemoveRequest{}); err != nil {
				t.Fatal(err)
			}
		}
		if diff := cmp.Diff(got[0], got[1], protocmp.Transform()); diff != "" {
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
