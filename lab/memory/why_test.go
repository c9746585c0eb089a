package memory_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"xagg/api"
	"xagg/wire"
	"xagg/worker"
)

// cutLink is a worker's link that loses everything from some payload on, until it is mended.
type cutLink struct {
	worker.Link
	mu    sync.Mutex
	left  int             // payloads that still go out
	sent  map[uint32]bool // chunks of round 1 of which a contribution went out
	first chan struct{}   // closed when the first payload is lost
}

func (l *cutLink) Send(payloads [][]byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := max(0, min(l.left, len(payloads)))
	for _, payload := range payloads[:n] {
		var h wire.Header
		if err := wire.DecodeHeader(payload, &h); err != nil {
			return 0, err
		}
		if h.Type == wire.TypeGrad && h.Round == 1 {
			l.sent[h.Chunk] = true
		}
	}
	if n < len(payloads) && l.left >= 0 {
		close(l.first)
		l.left = -1
	} else if l.left > 0 {
		l.left -= n
	}
	if _, err := l.Link.Send(payloads[:n]); err != nil {
		return 0, err
	}
	return len(payloads), nil
}

func (l *cutLink) mend() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.left = 1 << 40
}

// contributed returns whether the rank's part of a chunk of round 1 went out.
func (l *cutLink) contributed(chunk uint32) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.sent[chunk]
}

// TestWhyNamesWhoStopped runs a job on every kind of path and stops a rank at a random moment of its second round: by a link that
// loses all that it sends, or by not beginning the round at all. It alone is named, with the chunks that lack it and the
// place, and once it goes on the job ends well.
func TestWhyNamesWhoStopped(t *testing.T) {
	const ranks, chunks = 4, 60
	for seed := range uint64(9) {
		mode := []string{"switch", "server", "hybrid"}[seed%3]
		t.Run(fmt.Sprintf("%s/seed=%d", mode, seed), func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 7))
			straggler := rng.IntN(ranks)
			l := newLab(t, ranks, 2)
			policy := &api.Policy{Rule: "static", Mode: mode, Pool: 16}
			if mode == "hybrid" {
				policy.Steer = []uint32{uint32(rng.IntN(ranks))}
			}
			job := createJob(t, l, &api.CreateJobRequest{Name: "train", Ranks: ranks, MaxElems: chunks * wire.MaxLanes, Policy: policy})
			client := api.NewControllerClient(l.Controller())
			cut := &cutLink{Link: l.Link(straggler, wire.Port), left: chunks + rng.IntN(chunks), sent: make(map[uint32]bool), first: make(chan struct{})}
			computing := seed >= 6
			begun, goOn := make(chan struct{}), make(chan struct{})

			group, ctx := errgroup.WithContext(t.Context())
			for rank := range ranks {
				group.Go(func() error {
					link := worker.Link(cut)
					if rank != straggler {
						link = l.Link(rank, wire.Port)
					} else if computing {
						cut.mend()
					}
					w, err := worker.Join(ctx, client, worker.Config{Job: "train", Rank: rank, Link: link})
					if err != nil {
						return err
					}
					defer w.Close()
					for round := range 2 {
						if round == 1 && rank == straggler && computing {
							close(begun)
							select {
							case <-goOn:
							case <-ctx.Done():
								return ctx.Err()
							}
						}
						data := slices.Repeat([]int32{int32(rank + round)}, chunks*wire.MaxLanes)
						if _, err := w.AllReduceInt32(ctx, "x", data); err != nil {
							return err
						}
						if want := int32(6 + 4*round); slices.ContainsFunc(data, func(v int32) bool { return v != want }) {
							return fmt.Errorf("rank %d round %d: a lane is not %d", rank, round, want)
						}
					}
					return w.Leave(ctx)
				})
			}

			stopped := cut.first
			if computing {
				stopped = begun
			}
			select {
			case <-stopped:
			case <-ctx.Done():
				t.Fatal(group.Wait())
			}
			// On a busy machine the others may take their time until they wait for nobody else, and have sent what they may.
			chunksBefore := uint32(0)
			reply := waitWhy(t, ctx, client, func(r *api.WhyReply) bool {
				if len(r.Blockers) != 1 || r.Blockers[0].Rank != uint32(straggler) {
					return false
				}
				before := chunksBefore
				chunksBefore = r.Blockers[0].Chunks
				return before == chunksBefore
			})
			b := reply.Blockers[0]
			path, at := "switch", []string{"switch"}
			if job.Cohort&(1<<straggler) == 0 {
				path, at = "s0,s1", []string{"s0", "s1"}
			}
			if len(reply.Unreachable) != 0 || !b.Joined || b.Path != path || b.Host != fmt.Sprintf("w%d", straggler) ||
				b.OldestUs < 200_000 || b.Packets == 0 || b.Chunks == 0 {
				t.Errorf("got %v", reply)
			}
			lacking := make(map[uint32]bool)
			for _, w := range reply.Waiting {
				if w.Missing&(1<<straggler) == 0 || !slices.Contains(at, w.At) {
					continue
				}
				stride := uint32(1)
				if w.At != "switch" {
					stride = uint32(len(job.Servers))
				}
				for c := w.First; c <= w.Last; c += stride {
					lacking[c] = true
				}
			}
			if len(lacking) == 0 {
				t.Errorf("nothing waits at %s: %v", path, reply.Waiting)
			}
			first := uint32(0)
			for cut.contributed(first) && !computing {
				first++
			}
			if !lacking[first] {
				t.Errorf("chunk %d, the first that lacks rank %d, is not named: %v", first, straggler, reply.Waiting)
			}
			for c := range lacking {
				if !computing && cut.contributed(c) {
					t.Errorf("chunk %d has what it is said to lack of rank %d", c, straggler)
				}
			}
			if !strings.Contains(b.Explanation, "of round 1 ") {
				t.Errorf("explanation: %s", b.Explanation)
			}
			t.Log(b.Explanation)

			cut.mend()
			close(goOn)
			if err := group.Wait(); err != nil {
				t.Fatal(err)
			}
			if reply, err := client.Why(t.Context(), &api.WhyRequest{Job: "train"}); err != nil || reply.Summary != "nothing waits: the job has finished" {
				t.Errorf("at the end: %v, %v", reply, err)
			}
		})
	}
}

// waitWhy asks until the answer is as it is to be.
func waitWhy(t *testing.T, ctx context.Context, client api.ControllerClient, cond func(*api.WhyReply) bool) *api.WhyReply {
	t.Helper()
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	var last *api.WhyReply
	for {
		reply, err := client.Why(ctx, &api.WhyRequest{Job: "train"})
		if err != nil {
			t.Fatalf("%v; the last answer was %v", err, last)
		}
		if cond(reply) {
			return reply
		}
		last = reply
	}
}

// BenchmarkWhy measures all-reduces of 64 chunks by four workers while somebody asks why all the time, and while nobody
// does, in turns of 300; the ratio of the two times is what asking costs the job.
func BenchmarkWhy(b *testing.B) {
	const ranks, lanes, turn = 4, 64 * wire.MaxLanes, 300
	l := newLab(b, ranks, 1)
	createJob(b, l, &api.CreateJobRequest{Name: "train", Ranks: ranks, MaxElems: lanes, Policy: &api.Policy{
		Rule: "static", Mode: "hybrid", Steer: []uint32{0}}})
	client := api.NewControllerClient(l.Controller())
	workers := make([]*worker.Worker, ranks)
	var joining errgroup.Group
	for rank := range ranks {
		joining.Go(func() (err error) {
			workers[rank], err = worker.Join(b.Context(), client, worker.Config{Job: "train", Rank: rank, Link: l.Link(rank, wire.Port)})
			return err
		})
	}
	if err := joining.Wait(); err != nil {
		b.Fatal(err)
	}
	rounds := func(n int) time.Duration {
		begin := time.Now()
		var group errgroup.Group
		for _, w := range workers {
			group.Go(func() error {
				data := make([]int32, lanes)
				for range n {
					if _, err := w.AllReduceInt32(b.Context(), "x", data); err != nil {
						return err
					}
				}
				return nil
			})
		}
		if err := group.Wait(); err != nil {
			b.Fatal(err)
		}
		return time.Since(begin)
	}
	rounds(10)
	var alone, asked time.Duration
	asks := 0
	for b.Loop() {
		alone += rounds(turn)
		ctx, cancel := context.WithCancel(b.Context())
		var asking sync.WaitGroup
		asking.Go(func() {
			for ctx.Err() == nil {
				if _, err := client.Why(ctx, &api.WhyRequest{Job: "train"}); err == nil {
					asks++
				}
			}
		})
		asked += rounds(turn)
		cancel()
		asking.Wait()
	}
	b.ReportMetric(float64(asked)/float64(alone), "asked/alone")
	b.ReportMetric(float64(alone.Milliseconds())/float64(b.N*turn), "ms/round-alone")
	b.ReportMetric(float64(asks)/asked.Seconds(), "whys/s")
	var leaving errgroup.Group
	for _, w := range workers {
		leaving.Go(func() error {
			defer w.Close()
			return w.Leave(b.Context())
		})
	}
	if err := leaving.Wait(); err != nil {
		b.Fatal(err)
	}
}
