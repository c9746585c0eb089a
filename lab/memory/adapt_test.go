package memory_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"sync"
	"testing"
	"time"

	"xagg/api"
	"xagg/lab/memory"
	"xagg/policy/trace"
	"xagg/wire"
	"xagg/worker"
)

// TestAdapt: a rank that becomes slow is steered to the server while the job runs, and comes back when it is as fast as the
// others again; every sum is right; what the policy was told and decided is recorded, and a replay decides the same.
func TestAdapt(t *testing.T) {
	const ranks, lanes = 4, 4096
	l := newLab(t, ranks, 1)
	client := api.NewControllerClient(l.Controller())
	policy := `
define: {name: lag, score: rank.lag_p50, enter: {above: 0.015, for: 2, of: 3}, leave: {below: 0.008, for: 3, of: 4}}
window: 4
dwell: 0s
moves: 600
`
	createJob(t, l, &api.CreateJobRequest{Name: "train", Ranks: ranks, MaxElems: lanes, Adapt: policy,
		Policy: &api.Policy{Rule: "static", Mode: "switch"}})

	var lines bytes.Buffer
	lines.Grow(1 << 20)
	recorded := make(chan error, 1)
	stream, err := client.Record(t.Context(), &api.RecordRequest{Job: "train"})
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		for {
			line, err := stream.Recv()
			if errors.Is(err, io.EOF) {
				recorded <- nil
				return
			}
			if err != nil {
				recorded <- err
				return
			}
			lines.Write(append(line.Json, '\n'))
		}
	}()

	// Rank 3 is slow from the beginning until it is steered, then fast until it is back.
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var mu sync.Mutex
	steered, done := false, false // what has been seen of the plan
	var round int
	state := func() (slow, stop bool) {
		mu.Lock()
		defer mu.Unlock()
		return !steered, done
	}
	var watching sync.WaitGroup
	watching.Go(func() {
		for ctx.Err() == nil {
			reply, err := client.Status(ctx, &api.StatusRequest{})
			if err == nil && len(reply.Jobs) == 1 && reply.Jobs[0].Change == nil {
				cohort := reply.Jobs[0].Cohort
				mu.Lock()
				steered = steered || cohort == 0b0111
				done = done || steered && cohort == 0b1111
				mu.Unlock()
			}
			time.Sleep(5 * time.Millisecond)
		}
	})
	// All ranks have to make the same number of all-reduces: they sum up who wants to stop.
	var group sync.WaitGroup
	for rank := range ranks {
		group.Go(func() {
			if err := adaptWorker(ctx, l, client, rank, lanes, state, func(n int) {
				mu.Lock()
				defer mu.Unlock()
				round = max(round, n)
			}); err != nil {
				t.Errorf("rank %d: %v", rank, err)
				cancel()
			}
		})
	}
	group.Wait()
	cancel()
	watching.Wait()
	if t.Failed() {
		reply, err := client.Explain(t.Context(), &api.ExplainRequest{Job: "train"})
		t.Fatalf("%s\n%s\n%v", reply.GetSnapshot(), reply.GetDecision(), err)
	}
	if !steered || !done {
		t.Fatalf("steered %v, back %v after %d rounds", steered, done, round)
	}
	reply, err := client.Explain(t.Context(), &api.ExplainRequest{Job: "train"})
	if err != nil || len(reply.Decision) == 0 || len(reply.Snapshot) == 0 {
		t.Errorf("explain: %v, %v", reply, err)
	}
	if _, err := client.RemoveJob(t.Context(), &api.RemoveJobRequest{Name: "train"}); err != nil {
		t.Fatal(err)
	}
	if err := <-recorded; err != nil {
		t.Fatal(err)
	}
	traces, err := trace.Read("recorded", &lines)
	if err != nil {
		t.Fatal(err)
	}
	moves := 0
	for _, x := range traces {
		if err := x.Verify(); err != nil {
			t.Error(err)
		}
		for _, s := range x.Steps {
			moves += len(s.Decision.Moves)
		}
	}
	if moves < 2 {
		t.Errorf("%d moves were recorded", moves)
	}
	t.Logf("%d rounds, %d moves", round, moves)
}

// adaptWorker all-reduces until all ranks have seen that they may stop.
func adaptWorker(ctx context.Context, l *memory.Lab, client api.ControllerClient, rank, lanes int, state func() (slow, stop bool), done func(int)) error {
	w, err := worker.Join(ctx, client, worker.Config{Job: "train", Rank: rank, Link: l.Link(rank, wire.Port)})
	if err != nil {
		return err
	}
	defer w.Close()
	data := make([]int32, lanes)
	for n := 1; ; n++ {
		slow, stop := state()
		pause := 2 * time.Millisecond
		if rank == 3 && slow {
			pause = 40 * time.Millisecond
		}
		time.Sleep(pause) // the ranks compute
		for i := range data {
			data[i] = int32(i + rank)
		}
		data[0] = 0
		if stop {
			data[0] = 1
		}
		if _, err := w.AllReduceInt32(ctx, "g", data); err != nil {
			return err
		}
		for i := 1; i < lanes; i++ {
			if want := int32(4*i + 6); data[i] != want {
				return errors.New("a sum is wrong")
			}
		}
		done(n)
		if data[0] == 4 || ctx.Err() != nil {
			return w.Leave(ctx)
		}
	}
}
