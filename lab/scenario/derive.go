package scenario

import (
	"cmp"
	"math"
	"slices"
	"time"

	"xagg/controller"
	"xagg/wire"
)

// LinkRate returns the rate of a rank's link.
func (s *Scenario) LinkRate(job, rank int) Rate {
	if rate, ok := s.Jobs[job].Links[rank]; ok {
		return rate
	}
	return s.Links.Worker
}

// ServerRate returns the rate of each server's link.
func (s *Scenario) ServerRate() Rate {
	if s.Links.Server != 0 {
		return s.Links.Server
	}
	var largest Rate
	for job := range s.Jobs {
		var sum Rate
		for rank := range s.Jobs[job].Ranks {
			sum += s.LinkRate(job, rank)
		}
		largest = max(largest, sum)
	}
	return largest
}

// time returns how long so many values take through a link, without anything around them.
func (r Rate) time(values int) time.Duration {
	return time.Duration(math.Ceil(32 * float64(values) / float64(r) * float64(time.Second)))
}

// Host returns which of the workers' hosts a rank has: jobs have theirs one after the other.
func (s *Scenario) Host(job, rank int) int {
	for _, j := range s.Jobs[:job] {
		rank += j.Ranks
	}
	return rank
}

// Steered returns the ranks of a job that the static hybrid mode has servers sum: Job.Steer, or those that are known to be slow,
// the slowest first and at most as many as leave two ranks for the switch; the last rank if there are none.
func (s *Scenario) Steered(job int) []int {
	j := &s.Jobs[job]
	if len(j.Steer) > 0 {
		return j.Steer
	}
	values := j.Tensors.Values()
	// slowness is how much longer a rank takes for a round, on average, than an ordinary one; what losses cost is not known, but more than
	// nothing.
	slowness := func(rank int) float64 {
		link := s.LinkRate(job, rank).time(values) - s.Links.Worker.time(values)
		slow := max(j.Compute.Slow[rank], 1)
		for _, e := range j.Compute.Episodes {
			if e.Rank == rank {
				slow += (e.Factor - 1) * float64(e.To-e.From) / float64(s.Rounds)
			}
		}
		return (slow-1)*j.Compute.Mean.Seconds() + link.Seconds() + float64(j.Loss[rank])
	}
	var ranks []int
	for rank := range j.Ranks {
		if slowness(rank) > 0 {
			ranks = append(ranks, rank)
		}
	}
	if len(ranks) == 0 {
		return []int{j.Ranks - 1}
	}
	slices.SortStableFunc(ranks, func(a, b int) int { return cmp.Compare(slowness(b), slowness(a)) })
	return ranks[:min(len(ranks), max(j.Ranks-2, 1))]
}

// Heterogeneous reports whether some rank's computation, link or losses differ from the others'.
func (s *Scenario) Heterogeneous() bool {
	for job := range s.Jobs {
		j := &s.Jobs[job]
		slower := func(e Episode) bool { return e.Factor > 1 }
		if j.Compute.Jitter > 0 || j.Compute.Moving != nil || slices.ContainsFunc(j.Compute.Episodes, slower) {
			return true
		}
		for rank := range j.Ranks {
			if max(j.Compute.Slow[rank], 1) != max(j.Compute.Slow[0], 1) || s.LinkRate(job, rank) != s.LinkRate(job, 0) ||
				j.Loss[rank] != j.Loss[0] {
				return true
			}
		}
	}
	return false
}

// Consistency returns what the controller is told of a job in a mode.
func (s *Scenario) Consistency(job int, m Mode) controller.Consistency {
	j, c := &s.Jobs[job], controller.Consistency{Mode: m.Consistency()}
	switch c.Mode {
	case controller.ModeQuorum:
		c.Quorum, c.Wait, c.Rounds = j.Quorum.Ranks, j.Quorum.Wait, s.QuorumRounds(job)
	case controller.ModeAsync:
		c.Staleness = j.Async.Staleness
	}
	return c
}

// MaxElems returns how many lanes a job must have room for in a mode: those of its largest bucket, in an async job those of the
// chunks of all of them.
func (s *Scenario) MaxElems(job int, m Mode) int {
	buckets := s.Jobs[job].Tensors.Buckets()
	if m.Consistency() != controller.ModeAsync {
		return slices.Max(buckets)
	}
	chunks := 0
	for _, n := range buckets {
		chunks += (n + wire.MaxLanes - 1) / wire.MaxLanes
	}
	return chunks * wire.MaxLanes
}
