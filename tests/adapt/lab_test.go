package adapt

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"

	"xagg/api"
	"xagg/lab"
	"xagg/lab/bench"
	"xagg/lab/memory"
	"xagg/lab/netns"
	"xagg/lab/scenario"
	"xagg/lab/testbed"
	"xagg/policy"
	"xagg/policy/adapt"
	"xagg/policy/trace"
	"xagg/tests/require"
	"xagg/wire"
	"xagg/worker"
)

// place is where a job runs.
type place struct {
	controller grpc.ClientConnInterface
	link       func(rank int) (worker.Link, error)
}

// inMemory makes a lab in this process, whose links take no time.
func inMemory(t *testing.T, s *scenario.Scenario) place {
	topology, err := lab.Star(s.Jobs[0].Ranks, s.Servers)
	if err != nil {
		t.Fatal(err)
	}
	l, err := memory.New(t.Context(), memory.Config{Topology: topology})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
	return place{l.Controller(), func(rank int) (worker.Link, error) { return l.Link(rank, wire.Port), nil }}
}

// inNamespaces makes a lab of network namespaces with the links of the scenario, XDP servers, and processes of switch (the engine), servers and
// controller; the workers are of this process, with sockets in their hosts.
func inNamespaces(t *testing.T, s *scenario.Scenario) place {
	return withSwitch(t, s, testbed.SwitchEngine)
}

// withSwitch makes the same lab with a switch of some kind.
func withSwitch(t *testing.T, s *scenario.Scenario, kind string) place {
	require.Have(t, require.Netns, require.XDP)
	xagg := filepath.Join(t.TempDir(), "xagg")
	if out, err := exec.Command("go", "build", "-o", xagg, "xagg/cmd/xagg").CombinedOutput(); err != nil {
		t.Fatalf("build xagg: %v\n%s", err, out)
	}
	topology, err := lab.Star(s.Jobs[0].Ranks, s.Servers)
	if err != nil {
		t.Fatal(err)
	}
	spec := bench.Spec(s, topology)
	spec.RunDir = t.TempDir()
	hosts, err := netns.Create(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	b, err := testbed.Start(t.Context(), hosts, testbed.Config{Topology: topology, Switch: kind, XAgg: xagg})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(b.Dead(), b.Close()); err != nil {
			t.Error(err)
		}
	})
	return place{b.Controller(), func(rank int) (link worker.Link, err error) {
		host := topology.Workers[rank]
		err = b.Hosts().Do(host.Name, func() error {
			link, err = worker.ListenUDP(netip.AddrPortFrom(host.IP, wire.Port), true)
			return err
		})
		return link, err
	}}
}

// run is what was seen of a job.
type run struct {
	first  uint32   // number of its first round
	epochs []uint16 // by round: of the plan that it ran under
	traces []*trace.Trace
}

// moves returns the moves that were decided, with the last round that was known of, counted from the job's first.
func (r *run) moves() (moves []adapt.Move, after []int) {
	for _, x := range r.traces {
		for _, s := range x.Steps {
			for _, m := range s.Decision.Moves {
				moves, after = append(moves, m), append(after, int(s.Decision.Round)-int(r.first))
			}
		}
	}
	return moves, after
}

// changed returns the first round from n on that ran under another plan than the one before; the number of all rounds if there is none.
func (r *run) changed(n int) int {
	for n = max(n, 1); n < len(r.epochs) && r.epochs[n] == r.epochs[n-1]; n++ {
	}
	return n
}

// runs has a sync job of so many rounds follow what is measured by a policy, from the switch on, while each rank computes for as long as compute
// says. Every sum of every rank is compared with the exact one, and every decision that was recorded is decided again.
func runs(t *testing.T, p place, ranks, lanes, rounds int, c adapt.Config, compute func(rank, round int) time.Duration) *run {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	client := api.NewControllerClient(p.controller)
	if _, err := client.CreateJob(ctx, &api.CreateJobRequest{
		Name: "train", Ranks: uint32(ranks), MaxElems: uint32(lanes), Adapt: c.YAML(),
		Policy: &api.Policy{Rule: policy.RuleStatic, Mode: string(policy.ModeSwitch)},
	}); err != nil {
		t.Fatal(err)
	}
	stream, err := client.Record(ctx, &api.RecordRequest{Job: "train"})
	if err != nil {
		t.Fatal(err)
	}
	var lines bytes.Buffer
	recorded := make(chan error, 1)
	go func() {
		for {
			line, err := stream.Recv()
			if err != nil {
				recorded <- err
				return
			}
			lines.Write(append(line.Json, '\n'))
		}
	}()
	r := &run{}
	group, working := errgroup.WithContext(ctx)
	for rank := range ranks {
		group.Go(func() error {
			if err := work(working, client, p, rank, ranks, lanes, rounds, compute, r); err != nil {
				return fmt.Errorf("rank %d: %w", rank, err)
			}
			return nil
		})
	}
	failed := group.Wait()
	if failed == nil {
		_, failed = client.RemoveJob(ctx, &api.RemoveJobRequest{Name: "train"}) // which ends the trace
	}
	if failed != nil {
		cancel()
	}
	if err := <-recorded; failed != nil || !errors.Is(err, io.EOF) {
		t.Fatal(errors.Join(failed, err))
	}
	if r.traces, err = trace.Read("recorded", &lines); err != nil {
		t.Fatal(err)
	}
	for _, x := range r.traces {
		if err := x.Verify(); err != nil {
			t.Error(err)
		}
		for _, s := range x.Steps {
			if s.Decision == nil || s.Decision.Error != "" {
				t.Errorf("a snapshot of round %v is followed by %+v, want a decision", s.Snapshot.Job.Round, s.Decision)
			}
		}
	}
	if t.Failed() {
		t.FailNow()
	}
	return r
}

// work is a rank. What rank 0 sees is noted in r.
func work(ctx context.Context, client api.ControllerClient, p place, rank, ranks, lanes, rounds int, compute func(rank, round int) time.Duration, r *run) error {
	link, err := p.link(rank)
	if err != nil {
		return err
	}
	w, err := worker.Join(ctx, client, worker.Config{Job: "train", Rank: rank, Link: link})
	if err != nil {
		return err
	}
	defer w.Close()
	data, want := make([]int32, lanes), make([]int32, lanes)
	value := func(rank, round, i int) int32 { return int32(round<<16 + i*(rank+1)) }
	for round := range rounds {
		began := time.Now()
		for i := range data {
			data[i], want[i] = value(rank, round, i), 0
			for other := range ranks {
				want[i] += value(other, round, i)
			}
		}
		select {
		case <-time.After(compute(rank, round) - time.Since(began)):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		info, err := w.AllReduceInt32(ctx, "g", data)
		if err != nil {
			return fmt.Errorf("round %d: %w", round, err)
		}
		if !slices.Equal(data, want) {
			return fmt.Errorf("round %d: its sums are not the exact ones", round)
		}
		if rank != 0 {
			continue
		}
		if round == 0 {
			r.first = info.Round
		}
		if info.Rounds != 1 || info.Round != r.first+uint32(round) {
			return fmt.Errorf("all-reduce %d took %d rounds from %d on, want round %d alone", round, info.Rounds, info.Round, r.first+uint32(round))
		}
		r.epochs = append(r.epochs, info.Epoch)
	}
	return w.Leave(ctx)
}

// TestReactsInLab: in a lab with a real clock a rank that becomes 4 times slower is steered in time, and comes back in time when it has
// recovered, while every sum is exact. How soon is judged again, up to three times, where it comes out otherwise: machines that are busy with
// something else slow ranks down too.
func TestReactsInLab(t *testing.T) {
	for name, open := range map[string]func(*testing.T, *scenario.Scenario) place{"memory": inMemory, "netns": inNamespaces} {
		for _, c := range policies() {
			t.Run(name+" "+c.Rule, func(t *testing.T) {
				t.Parallel() // they sleep for most of the time
				s, e := episode(t)
				j, p := &s.Jobs[0], open(t, s)
				for attempt := 1; ; attempt++ {
					r := runs(t, p, j.Ranks, j.Tensors.Values(), s.Warmup+s.Rounds, c, func(rank, round int) time.Duration {
						return s.Compute(s.Seed, 0, rank, round)
					})
					err := r.inTime(t, e.Rank, s.Warmup+e.From, s.Warmup+e.To)
					if err == nil {
						return
					}
					if attempt == 3 {
						t.Fatal(err)
					}
					t.Logf("attempt %d: %v", attempt, err)
				}
			})
		}
	}
}

// inTime reports whether a rank that is slow from one round to another is steered and back as soon as was promised.
func (r *run) inTime(t *testing.T, rank, slow, fast int) error {
	moves, after := r.moves()
	var of []int // of moves: the rank's
	for i, m := range moves {
		if m.Rank == rank {
			of = append(of, i)
		}
	}
	if len(of) != 2 || moves[of[0]].To != adapt.Server || moves[of[1]].To != adapt.Switch {
		return fmt.Errorf("moves %+v after rounds %d; want rank %d to the server and back", moves, after, rank)
	}
	steered, returned := after[of[0]], after[of[1]]
	there, back := r.changed(steered+1), r.changed(returned+1)
	t.Logf("slow from round %d: decided after %d, servers sum it from %d on; fast from round %d: decided after %d, the switch sums it from %d on; %d moves of others",
		slow, steered, there, fast, returned, back, len(moves)-2)
	switch n, m := steered+1-slow, returned+1-fast; {
	case n < 1 || n > steeredWithin:
		return fmt.Errorf("steered after %d slow rounds, want at most %d", n, steeredWithin)
	case m < 1 || m > backWithin:
		return fmt.Errorf("back after %d rounds as fast as the others, want at most %d", m, backWithin)
	// The round that is under way when it is decided, and the one after which all know of it, are the last under the old plan. A report that
	// comes late is two short rounds more.
	case there-steered > 5 || back-returned > 5:
		return fmt.Errorf("plans follow %d and %d rounds after what they follow from, want at most 5", there-steered, back-returned)
	}
	return nil
}

// TestNeverFlapsInLab: a rank that becomes slow and fast again as often as it is moved is moved as often as the policy allows, and no more.
func TestNeverFlapsInLab(t *testing.T) {
	for _, c := range policies() {
		t.Run(c.Rule, func(t *testing.T) {
			t.Parallel()
			c.Moves, c.Dwell = 4, 0
			s, _ := episode(t)
			a := square(15, 25)
			r := runs(t, inMemory(t, s), len(a[0]), 4096, 12*len(a), c, func(rank, round int) time.Duration {
				return time.Duration(10 * a[round%len(a)][rank] * float64(time.Millisecond))
			})
			held := 0
			for _, x := range r.traces {
				for _, s := range x.Steps {
					for _, w := range s.Decision.Ranks {
						if strings.Contains(w.Held, "has used its 4 moves") {
							held++
						}
					}
				}
			}
			// All of it takes less than a minute.
			if moves, after := r.moves(); len(moves) != c.Moves || held == 0 {
				t.Errorf("%d moves after rounds %d, and %d more were held; want %d and some", len(moves), after, held, c.Moves)
			}
		})
	}
}
