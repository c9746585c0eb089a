package chaos

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sync/errgroup"

	"xagg/api"
	"xagg/bmv2/fault"
	"xagg/lab"
	"xagg/lab/memory"
	"xagg/wire"
	"xagg/worker"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// timeout of one all-reduce: what the protocol promises at the worst rates.
const timeout = time.Minute

// scenario is a job and the links that it runs on.
type scenario struct {
	servers    int
	mode       string
	ranks      int
	steer      []uint32
	pool       uint32
	lanes      []int // of each all-reduce
	faults     []fault.Spec
	noChecksum bool
	seed       uint64 // of the vectors
}

// String says what it takes to see what is special.
func (s scenario) String() string {
	var faults []string
	for _, f := range s.faults {
		faults = append(faults, f.String())
	}
	return fmt.Sprintf("mode %s, %d ranks, steered %v, %d servers, pool %d, lanes %v, checksums %t, faults %s",
		s.mode, s.ranks, s.steer, s.servers, s.pool, s.lanes, !s.noChecksum, strings.Join(faults, " "))
}

// outcome is what a scenario came to.
type outcome struct {
	errs    []error // of the workers
	faults  fault.Counts
	reasons map[string]uint64 // of the switch
}

// run runs a scenario. Its error is that of a wrong sum, or of a lab that did not work.
func (s scenario) run(ctx context.Context) (out outcome, err error) {
	topology, err := lab.Star(s.ranks, s.servers)
	if err != nil {
		return out, err
	}
	l, err := memory.New(ctx, memory.Config{Topology: topology, Faults: s.faults, NoChecksum: s.noChecksum})
	if err != nil {
		return out, err
	}
	defer func() { err = errors.Join(err, l.Close()) }()
	client := api.NewControllerClient(l.Controller())
	_, err = client.CreateJob(ctx, &api.CreateJobRequest{
		Name: "chaos", Ranks: uint32(s.ranks), MaxElems: uint32(slices.Max(s.lanes)),
		Policy: &api.Policy{Rule: "static", Mode: s.mode, Steer: s.steer, Pool: s.pool},
	})
	if err != nil {
		return out, err
	}
	out.errs = make([]error, s.ranks)
	wrong := make([]error, s.ranks)
	var group sync.WaitGroup
	for rank := range s.ranks {
		group.Go(func() { out.errs[rank], wrong[rank] = s.work(ctx, client, l, rank) })
	}
	group.Wait()
	for _, c := range l.Faults() {
		out.faults.Add(c.Counts)
	}
	status, err := client.Status(ctx, &api.StatusRequest{})
	if err != nil {
		return out, err
	}
	out.reasons = status.GetSwitch().GetReasons()
	return out, errors.Join(wrong...)
}

// work is one worker. It tells an error of the network from a sum that is wrong.
func (s scenario) work(ctx context.Context, client api.ControllerClient, l *memory.Lab, rank int) (failed, wrong error) {
	w, err := worker.Join(ctx, client, worker.Config{Job: "chaos", Rank: rank, Link: l.Link(rank, wire.Port)}, worker.WithTimeout(timeout))
	if err != nil {
		return err, nil
	}
	defer w.Close()
	for i, n := range s.lanes {
		vector, sum := s.vector(i, rank, n), make([]int32, n)
		for r := range s.ranks {
			for lane, v := range s.vector(i, r, n) {
				sum[lane] += v
			}
		}
		if _, err := w.AllReduceInt32(ctx, "", vector); err != nil {
			return err, nil
		}
		for lane := range sum {
			if vector[lane] != sum[lane] {
				return nil, fmt.Errorf("all-reduce %d: rank %d has %d in lane %d, the sum is %d", i, rank, vector[lane], lane, sum[lane])
			}
		}
	}
	return w.Leave(ctx), nil
}

// vector returns the input of a rank to an all-reduce.
func (s scenario) vector(index, rank, lanes int) []int32 {
	rng := rand.New(rand.NewPCG(s.seed, uint64(index)<<8|uint64(rank)))
	v := make([]int32, lanes)
	for i := range v {
		v[i] = rng.Int32N(1<<24) - 1<<23
	}
	return v
}

// judge runs a scenario and returns an error unless it ends well, or, with damaged ones among its frames, by a worker
// that says which chunk it could not trust.
func (s scenario) judge(ctx context.Context) (outcome, error) {
	out, err := s.run(ctx)
	if err != nil {
		return out, fmt.Errorf("%w\n%v", err, s)
	}
	var cause error
	for _, err := range out.errs {
		if _, ok := errors.AsType[*worker.AbortError](err); err != nil && !ok {
			cause = err
		}
	}
	if cause == nil && errors.Join(out.errs...) != nil {
		return out, fmt.Errorf("workers were told to end and none says why: %v\n%v", out.errs, s)
	}
	_, integrity := errors.AsType[*worker.IntegrityError](cause)
	_, refused := errors.AsType[*worker.RefusedError](cause)
	if cause != nil && (out.faults.Corrupted == 0 || !integrity && !refused) {
		return out, fmt.Errorf("%w\n%v\n%+v", errors.Join(out.errs...), s, out.faults)
	}
	return out, nil
}

// check is judge for a test that goes on only if all is well.
func (s scenario) check(t *testing.T) outcome {
	t.Helper()
	out, err := s.judge(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// random returns the scenario of a seed.
func random(seed uint64) scenario {
	rng := rand.New(rand.NewPCG(seed, 0))
	s := scenario{seed: seed, ranks: 1 + rng.IntN(6), servers: 1 + rng.IntN(2), pool: 1 << rng.IntN(6)}
	s.mode = []string{"switch", "server", "hybrid"}[rng.IntN(3)]
	if s.mode == "hybrid" {
		s.ranks = max(s.ranks, 3)
		for _, r := range rng.Perm(s.ranks)[:1+rng.IntN(s.ranks-2)] {
			s.steer = append(s.steer, uint32(r))
		}
		slices.Sort(s.steer)
	}
	for range 1 + rng.IntN(4) {
		s.lanes = append(s.lanes, 1+rng.IntN(10*wire.MaxLanes))
	}
	rate := func() float64 { return float64(rng.IntN(5)) / 20 } // 0 to 20 %
	faults := func(port int, dir fault.Direction) {
		f := fault.Spec{Drop: rate(), Duplicate: rate(), Reorder: rate(), Seed: seed, Port: uint16(port), Direction: dir}
		if delayed := rate(); delayed > 0 {
			f.Delay, f.Delayed = time.Duration(1+rng.IntN(5000))*time.Microsecond, delayed
		}
		if f.Drop+f.Duplicate+f.Reorder+f.Delayed > 0 {
			s.faults = append(s.faults, f)
		}
	}
	switch rng.IntN(3) {
	case 0: // everywhere the same
		faults(0, fault.Both)
	case 1: // one way
		faults(0, fault.Direction(1+rng.IntN(2)))
	case 2: // every link another
		for r := range s.ranks {
			faults(1+r, fault.In)
			faults(1+r, fault.Out)
		}
		for i := range s.servers {
			faults(lab.MaxWorkers+1+i, fault.Both)
		}
	}
	if rng.IntN(4) == 0 {
		for i := range s.faults {
			s.faults[i].Corrupt = 0.01
		}
		s.noChecksum = rng.IntN(2) == 0
	}
	return s
}

// TestChaos runs scenarios of consecutive seeds until its time is over.
func TestChaos(t *testing.T) {
	limit, seed, once := 8*time.Second, uint64(1), false
	if text := os.Getenv("XAGG_CHAOS"); text != "" {
		var err error
		if limit, err = time.ParseDuration(text); err != nil {
			t.Fatalf("XAGG_CHAOS: %v", err)
		}
		seed = uint64(time.Now().UnixNano())
	}
	if text := os.Getenv("XAGG_CHAOS_SEED"); text != "" {
		var err error
		if seed, err = strconv.ParseUint(text, 10, 64); err != nil {
			t.Fatalf("XAGG_CHAOS_SEED: %v", err)
		}
		once = os.Getenv("XAGG_CHAOS") == ""
	}
	if once {
		if out, err := random(seed).judge(t.Context()); err != nil {
			t.Errorf("%v\n%+v", err, out.faults)
		}
		return
	}
	// The end comes by cancelling, not by a deadline: gRPC hands a deadline on, and whoever it was handed to may find it
	// over a moment before ctx does. A scenario that was cut short would then be judged.
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	defer time.AfterFunc(limit, cancel).Stop()
	var next atomic.Uint64
	next.Store(seed)
	var mu sync.Mutex
	var all fault.Counts
	jobs, failed := 0, 0
	group, ctx := errgroup.WithContext(ctx)
	for range parallel {
		group.Go(func() error {
			for {
				seed := next.Add(1) - 1
				out, err := random(seed).judge(ctx)
				if ctx.Err() != nil {
					return nil // too late to be judged
				}
				if err != nil {
					return fmt.Errorf("seed %d: %w\nXAGG_CHAOS_SEED=%[1]d runs it again", seed, err)
				}
				mu.Lock()
				jobs++
				all.Add(out.faults)
				if errors.Join(out.errs...) != nil {
					failed++
				}
				mu.Unlock()
			}
		})
	}
	if err := group.Wait(); err != nil {
		t.Fatal(err)
	}
	t.Logf("%d jobs, of which %d ended because of damaged packets; %+v", jobs, failed, all)
	if jobs == 0 {
		t.Error("no job came to its end")
	}
}

// parallel is the number of scenarios that TestChaos runs at a time: they spend most of their time waiting for packets
// that were lost.
const parallel = 6

// TestPitfall1 has copies of packets come when their slot has long been given to the next chunks: with a pool of one
// slot per version every third chunk is there again.
func TestPitfall1(t *testing.T) {
	s := scenario{mode: "switch", ranks: 3, pool: 1, lanes: []int{20 * wire.MaxLanes, 20 * wire.MaxLanes},
		faults: []fault.Spec{{Duplicate: 0.5, Delay: 5 * time.Millisecond, Delayed: 0.3, Direction: fault.In}}}
	for s.seed = range uint64(3) {
		s.faults[0].Seed = s.seed
		out := s.check(t)
		if out.reasons["stale"] == 0 {
			t.Errorf("seed %d: no copy came late: %v", s.seed, out.reasons)
		}
	}
}

// TestPitfall3 keeps results from one worker. The others must not overwrite what it lacks.
func TestPitfall3(t *testing.T) {
	for _, mode := range []string{"switch", "server", "hybrid"} {
		s := scenario{mode: mode, ranks: 3, servers: 1, pool: 2, lanes: []int{8 * wire.MaxLanes, 8 * wire.MaxLanes},
			faults: []fault.Spec{{Drop: 0.3, Port: 1, Direction: fault.Out}}}
		if mode == "hybrid" {
			s.steer = []uint32{2}
		}
		out := s.check(t)
		if out.faults.Dropped == 0 {
			t.Errorf("mode %s: no frame was dropped", mode)
		}
	}
}

// TestCorruption damages packets. With checksums the switch counts them; without, whatever it sums, no worker takes a
// sum that is wrong: it takes the right one, or names round and chunk.
func TestCorruption(t *testing.T) {
	for _, mode := range []string{"switch", "server"} {
		base := scenario{mode: mode, ranks: 3, servers: 1, pool: 16, lanes: []int{30 * wire.MaxLanes, 30 * wire.MaxLanes}}
		caught := 0
		for seed := range uint64(3) {
			s := base
			s.seed = seed
			s.faults = []fault.Spec{{Corrupt: 0.02, Direction: fault.In, Seed: seed}}
			for port := range 3 { // but the server's answers
				f := s.faults[0]
				f.Port = uint16(1 + port)
				s.faults = append(s.faults, f)
			}
			s.faults = s.faults[1:]
			out := s.check(t)
			if err := errors.Join(out.errs...); err != nil {
				t.Fatalf("with checksums: %v", err)
			}
			if out.reasons["checksum"] == 0 {
				t.Errorf("mode %s, seed %d: the switch found nothing of %d damaged packets: %v", mode, seed, out.faults.Corrupted, out.reasons)
			}
			s.noChecksum = true
			out = s.check(t)
			if errors.Join(out.errs...) != nil {
				caught++
			}
		}
		if caught == 0 {
			t.Errorf("mode %s: no damage was found by its tag", mode)
		}
	}
}
