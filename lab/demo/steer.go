package demo

import (
	"context"
	"errors"
	"fmt"
	"math/bits"
	"math/rand/v2"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"xagg/api"
	"xagg/policy"
	"xagg/wire"
)

// ModeSteered is a mode beside [Modes]: the plan of the job changes at random while it runs, from mode to mode and from
// server to server, and with a quorum from one to another and from wait to wait, as often as one change can follow the other.
const ModeSteered = "steered"

// steeredServers is the number of servers of a demo that steers.
const steeredServers = 2

// pollInterval is how often the controller is asked how far a change is.
const pollInterval = 10 * time.Millisecond

// steerer changes the plan of a running job.
type steerer struct {
	client   api.ControllerClient
	job      string
	ranks    int
	modes    []string // to draw from; the last needs three ranks
	least    int      // ranks that are enough in any plan of a job with a quorum; 0 = it has none
	servers  []string
	random   *rand.Rand
	progress func(format string, args ...any)
	quorums  map[uint16]int // of the plans by epoch, with a quorum
}

// waits are what plans of a job with a quorum wait for.
var waits = []time.Duration{0, time.Millisecond, 20 * time.Millisecond}

// plan draws a plan that the job may get.
func (s *steerer) plan() *api.Policy {
	modes := len(s.modes)
	if s.ranks < 3 {
		modes--
	}
	rule := &api.Policy{Rule: policy.RuleStatic, Mode: s.modes[s.random.IntN(modes)]}
	if s.least > 0 {
		rule.Quorum = uint32(s.least + s.random.IntN(s.ranks-s.least+1))
		rule.WaitUs = new(uint32(waits[s.random.IntN(len(waits))].Microseconds()))
	}
	if rule.Mode == string(policy.ModeSwitch) {
		return rule
	}
	order := s.random.Perm(len(s.servers))
	for _, i := range order[:1+s.random.IntN(len(order))] {
		rule.Servers = append(rule.Servers, s.servers[i])
	}
	if rule.Mode == string(policy.ModeHybrid) {
		steered := s.random.Perm(s.ranks)
		for _, r := range steered[:1+s.random.IntN(s.ranks-2)] {
			rule.Steer = append(rule.Steer, uint32(r))
		}
	}
	return rule
}

// run changes the plan again and again until the job is over or ctx ends.
func (s *steerer) run(ctx context.Context) error {
	for {
		if running, err := s.settled(ctx); err != nil || !running {
			return err
		}
		job, err := s.client.Steer(ctx, &api.SteerRequest{Job: s.job, Policy: s.plan()})
		switch {
		case ctx.Err() != nil || status.Code(err) == codes.FailedPrecondition: // it has finished in the meantime
			return nil
		case err != nil:
			return fmt.Errorf("change the plan: %w", err)
		case job.Change != nil:
			s.quorums[uint16(job.Change.Epoch)] = int(job.Change.Quorum)
			s.progress("%s: to epoch %d: %s", ModeSteered, job.Change.Epoch, job.Change.Explanation)
		}
	}
}

// settled waits until no change is under way, and reports whether the job still runs. A job that has not begun is
// waited for.
func (s *steerer) settled(ctx context.Context) (running bool, err error) {
	tick := time.NewTicker(pollInterval)
	defer tick.Stop()
	for {
		job, err := s.look(ctx)
		switch {
		case ctx.Err() != nil:
			return false, nil
		case err != nil:
			return false, err
		case job.Change == nil && job.State != "waiting" && job.State != "installing":
			return job.State == "running", nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return false, nil
		}
	}
}

func (s *steerer) look(ctx context.Context) (*api.Job, error) {
	reply, err := s.client.Status(ctx, &api.StatusRequest{})
	if err != nil {
		return nil, fmt.Errorf("ask the controller for its status: %w", err)
	}
	for _, j := range reply.Jobs {
		if j.Name == s.job {
			return j, nil
		}
	}
	return nil, fmt.Errorf("the controller has no job %q", s.job)
}

// leftOver waits for the last change to end, and returns an error when a server that the last plan does not use still
// keeps memory for the job.
func (s *steerer) leftOver(ctx context.Context) error {
	if _, err := s.settled(ctx); err != nil {
		return err
	}
	reply, err := s.client.Status(ctx, &api.StatusRequest{})
	if err != nil {
		return fmt.Errorf("ask the controller for its status: %w", err)
	}
	job, err := s.look(ctx)
	if err != nil {
		return err
	}
	used := map[string]bool{}
	for _, name := range job.Servers {
		used[name] = true
	}
	var errs []error
	for _, server := range reply.Servers {
		taken := server.GetInfo().GetSlots() - server.GetInfo().GetSlotsFree()
		if taken > 0 != used[server.Name] {
			errs = append(errs, fmt.Errorf("server %s has leased %d slots at the end, which does not fit the plan: %s",
				server.Name, taken, job.Explanation))
		}
	}
	return errors.Join(errs...)
}

// epochs are the epochs of the all-reduces of a job.
type epochs struct {
	mu    sync.Mutex
	of    []uint16 // by all-reduce, 0 = not known yet
	least []int    // by all-reduce: contributors of the chunk that had the fewest
}

func newEpochs(allReduces int) *epochs {
	return &epochs{of: make([]uint16, allReduces), least: make([]int, allReduces)}
}

// agree returns an error when a rank ran an all-reduce, whose chunks have these contributors, under another plan than the
// others.
func (e *epochs) agree(index, rank int, epoch uint16, masks []uint64) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	switch {
	case e.of[index] == 0:
		e.of[index], e.least[index] = epoch, wire.MaxRanks
		for _, m := range masks {
			e.least[index] = min(e.least[index], bits.OnesCount64(m))
		}
	case e.of[index] != epoch:
		return fmt.Errorf("all-reduce %d: rank %d ended it under epoch %d, another rank under %d", index, rank, epoch, e.of[index])
	}
	return nil
}

// enough returns an error where a chunk had fewer contributors than the plan of its epoch wants.
func (e *epochs) enough(quorums map[uint16]int) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	for i, epoch := range e.of {
		if want, known := quorums[epoch]; !known || e.least[i] < want {
			return fmt.Errorf("all-reduce %d: a chunk has %d contributors, and the plan of epoch %d wants %d", i, e.least[i], epoch, want)
		}
	}
	return nil
}

// changes returns how often the plan changed from one all-reduce to the next.
func (e *epochs) changes() (n int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for i := 1; i < len(e.of); i++ {
		if e.of[i] != e.of[i-1] {
			n++
		}
	}
	return n
}
