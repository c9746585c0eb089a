package bench

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"sync"
	"time"

	"xagg/controller"
	"xagg/lab/loop"
	"xagg/lab/results"
	"xagg/lab/scenario"
)

// record is what the workers of a run have written.
type record struct {
	s    *scenario.Scenario
	mode scenario.Mode
	// begins is called when the first rank of all jobs has finished its warm-up, and ends when the last one has finished its last round:
	// the measured part is what lies between. Its first moment is the first rank's begin of the first measured round, but for the time that
	// the line took to be written, a few milliseconds; its last moment the last rank's end of the last one, likewise.
	begins, ends func()

	mu     sync.Mutex
	rounds [][][]loop.Round // by job, rank and round
	begun  bool
	left   int // rounds that nobody has told of
}

func newRecord(s *scenario.Scenario, mode scenario.Mode) *record {
	r := &record{s: s, mode: mode}
	for _, j := range s.Jobs {
		r.rounds = append(r.rounds, make([][]loop.Round, j.Ranks))
		r.left += j.Ranks * (s.Warmup + s.Rounds)
	}
	return r
}

// maxError is how far a sum may be from the exact one, relative to the norm, in modes that wait for all ranks.
const maxError = 1e-5

// take takes a line that a rank has written. It checks that the rank goes from round to round, and the sums.
func (r *record) take(job, rank int, line []byte) error {
	var round loop.Round
	if err := json.Unmarshal(line, &round); err != nil {
		return fmt.Errorf("read its output: %w: %s", err, line)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	j := &r.s.Jobs[job]
	buckets := len(j.Tensors.Buckets())
	switch want := len(r.rounds[job][rank]); {
	case round.Round != want || want == r.s.Warmup+r.s.Rounds:
		return fmt.Errorf("it tells of round %d after %d rounds of %d", round.Round, want, r.s.Warmup+r.s.Rounds)
	case len(round.Ready) != buckets || len(round.Done) != buckets:
		return fmt.Errorf("round %d: %d buckets ready and %d done of %d", round.Round, len(round.Ready), len(round.Done), buckets)
	case r.mode.Consistency() == controller.ModeSync && !(round.Error <= maxError):
		return fmt.Errorf("round %d: the error of its sums is %.2g of their norm, more than %g: they are wrong", round.Round, round.Error, maxError)
	}
	r.rounds[job][rank] = append(r.rounds[job][rank], round)
	if !r.begun && round.Round == r.s.Warmup-1 {
		r.begun = true
		r.begins()
	}
	if r.left--; r.left == 0 {
		r.ends()
	}
	return nil
}

// under returns which measured round of a rank was under way at a moment of the monotonic clock: negative ones are warm-up.
func (r *record) under(job, rank int, at time.Duration) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	n, _ := slices.BinarySearchFunc(r.rounds[job][rank], at, func(round loop.Round, at time.Duration) int {
		return cmp.Compare(time.Duration(round.Begin), at+1)
	})
	return max(n-1, 0) - r.s.Warmup
}

// jobs returns what the run came to.
func (r *record) jobs(seed uint64) ([]results.Job, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.left > 0 {
		return nil, fmt.Errorf("the workers have ended and %d rounds are missing", r.left)
	}
	var jobs []results.Job
	for i := range r.s.Jobs {
		jobs = append(jobs, summarize(r.s, i, r.rounds[i], r.s.Ideal(seed, i, r.mode.Consistency()), r.mode.Consistency()))
	}
	return jobs, nil
}

// bytes returns how many bytes of gradients ranks had summed between two moments of the monotonic clock: of a round that lies
// there only in part, that part of them, and nothing of one that a rank has skipped.
func (r *record) bytes(from, to time.Duration) uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	sum := 0.0
	for job, ranks := range r.rounds {
		values := r.s.Jobs[job].Tensors.Values()
		for _, rounds := range ranks {
			for i := range rounds {
				begin, took := time.Duration(rounds[i].Begin), rounds[i].Took()
				if inside := min(begin+took, to) - max(begin, from); inside > 0 && !rounds[i].Skipped {
					sum += 4 * float64(values) * float64(inside) / float64(took)
				}
			}
		}
	}
	return uint64(sum)
}

// summarize returns what a job came to from the rounds of its ranks, warm-up included, and the ideal schedule.
func summarize(s *scenario.Scenario, job int, ranks [][]loop.Round, ideal *scenario.Timing, consistency controller.Mode) results.Job {
	tensors := s.Jobs[job].Tensors
	j := results.Job{
		Name: s.Jobs[job].Name, Buckets: len(tensors.Buckets()), Values: tensors.Values(), IdealSpan: ideal.Span(s.Warmup).Seconds(),
	}
	begin, end := int64(0), int64(0)
	skipped, any := slices.Repeat([][]int{{}}, len(ranks)), false
	for rank, rounds := range ranks {
		rounds = rounds[s.Warmup:]
		var comm, took, compute, floor []float64
		for i := range rounds {
			r := &rounds[i]
			if r.Skipped {
				skipped[rank], any = append(skipped[rank], i), true
			}
			comm = append(comm, r.Comm().Seconds())
			took = append(took, r.Took().Seconds())
			compute = append(compute, time.Duration(slices.Max(r.Ready)).Seconds())
			floor = append(floor, ideal.Comm[rank][s.Warmup+i].Seconds())
			j.Packets += r.Packets
			j.Resends += r.Resends
			j.Chunks += uint64(r.Chunks)
			j.Late += uint64(r.Late)
			if consistency == controller.ModeSync {
				j.Error = max(j.Error, r.Error)
			}
		}
		last := &rounds[len(rounds)-1]
		if consistency != controller.ModeSync {
			j.Error = max(j.Error, last.Error)
		}
		if rank == 0 || rounds[0].Begin < begin {
			begin = rounds[0].Begin
		}
		end = max(end, last.Begin+last.Took().Nanoseconds())
		j.Comm, j.Round, j.Compute, j.Floor = append(j.Comm, comm), append(j.Round, took), append(j.Compute, compute), append(j.Floor, floor)
	}
	if any {
		j.Skipped = skipped
	}
	j.Span = time.Duration(end - begin).Seconds()
	return j
}
