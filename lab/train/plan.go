package train

import (
	"fmt"
	"time"

	"xagg/controller"
	"xagg/lab/scenario"
	"xagg/worker"
)

// Plan is a run: what its ranks do, each in [Work]. It is plain data, which worker processes are given as JSON.
type Plan struct {
	Mode      scenario.Mode    `json:"mode"`
	Staleness int              `json:"staleness"` // of an async mode
	Seed      uint64           `json:"seed"`      // of the task, the first parameters, the batches and the compute times
	Ranks     int              `json:"ranks"`
	Rounds    int              `json:"rounds"` // steps of each rank
	Batch     int              `json:"batch"`  // samples of a rank's gradient
	Rate      float64          `json:"rate"`   // of learning
	Skew      float64          `json:"skew"`   // see NewTask
	Every     int              `json:"every"`  // steps between two checkpoints
	Compute   scenario.Compute `json:"compute"`
}

// Name spells the mode with its staleness.
func (p *Plan) Name() string { return name(p.Mode, p.Staleness) }

func name(mode scenario.Mode, staleness int) string {
	if mode != Single && mode.Consistency() == controller.ModeAsync {
		return fmt.Sprintf("%s s=%d", mode, staleness)
	}
	return string(mode)
}

// Observer is the rank whose parameters checkpoints have: the first that is not always slower, else rank 0.
func (p *Plan) Observer() int {
	for rank := range p.Ranks {
		if p.Compute.Slow[rank] <= 1 {
			return rank
		}
	}
	return 0
}

// Divisor is what a result of an all-reduce is divided by before a step. Every gradient is to count as much as it does in one process
// that takes the mean of all: 1/N. A sync all-reduce returns the sum of N. A quorum's is the mean of its contributors already, chunk by chunk. An async
// one's is the sum of whatever contributions were added since the last look, of which each counts 1/N: by dividing by their number instead, ranks
// that look at different times would move to different places.
func (p *Plan) Divisor() float64 {
	if p.Mode.Consistency() == controller.ModeQuorum {
		return 1
	}
	return float64(p.Ranks)
}

// settle is the number of all-reduces of zeros after the last step. In an async job the result of the last of staleness + 1 has told this rank of
// all contributions of all ranks; one more tells what was clipped of the last ones.
func (p *Plan) settle() int {
	if p.Mode.Consistency() == controller.ModeAsync {
		return p.Staleness + 2
	}
	return 0
}

// compute returns how long a rank computes in a round.
func (p *Plan) compute(rank, round int) time.Duration {
	s := scenario.Scenario{Jobs: []scenario.Job{{Ranks: p.Ranks, Compute: p.Compute}}}
	return s.Compute(p.Seed, 0, rank, round)
}

// timeout bounds an all-reduce, in which a rank may wait for one that has only begun to compute.
func (p *Plan) timeout() time.Duration {
	slowest := time.Duration(0)
	for rank := range p.Ranks {
		for i := range p.Rounds {
			slowest = max(slowest, p.compute(rank, i))
		}
	}
	return worker.DefaultTimeout + 2*slowest
}

// agreement is what workers of a job tell the controller, which refuses those that are to do different things.
func (p *Plan) agreement() string {
	return fmt.Sprintf("train seed=%d rounds=%d batch=%d rate=%g skew=%g", p.Seed, p.Rounds, p.Batch, p.Rate, p.Skew)
}
