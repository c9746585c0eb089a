package demo

import (
	"math/bits"
	"slices"
	"time"

	"xagg/api"
	"xagg/controller"
	"xagg/policy"
)

// LenientModes are the modes of the demo in which a chunk may be closed without all ranks: a server closes it.
var LenientModes = []string{string(policy.ModeServer), string(policy.ModeHybrid)}

// isQuorum reports whether results may lack ranks.
func (o *Options) isQuorum() bool { return o.Consistency.Mode == controller.ModeQuorum }

// quorum returns the number of ranks that a result has at least.
func (o *Options) quorum() int {
	if o.isQuorum() {
		return o.Consistency.Quorum
	}
	return o.Workers
}

// consistency returns what a job is created with.
func (o *Options) consistency() *api.Consistency {
	c := &o.Consistency
	return &api.Consistency{
		Mode: string(c.Mode), Quorum: uint32(c.Quorum), WaitUs: uint32(c.Wait / time.Microsecond), Rounds: uint32(c.Rounds),
	}
}

// checkConsistency checks the consistency and fills in what was left open.
func (o *Options) checkConsistency() error {
	c := &o.Consistency
	if c.Mode == "" {
		c.Mode = controller.ModeSync
	}
	switch c.Mode {
	case controller.ModeSync:
		if c.Quorum != 0 || c.Wait != 0 || c.Rounds != 0 {
			return usagef("a quorum, how long to wait for more, and rounds to keep belong to the consistency %q", controller.ModeQuorum)
		}
		return nil
	case controller.ModeQuorum:
	default:
		return usagef("consistency %q: want %q or %q", c.Mode, controller.ModeSync, controller.ModeQuorum)
	}
	for _, mode := range o.Modes {
		if !slices.Contains(LenientModes, mode) {
			return usagef("mode %q with consistency %q: want %q or %q, whose servers close chunks without all ranks", mode, c.Mode,
				LenientModes[0], LenientModes[1])
		}
	}
	switch {
	case c.Quorum < 1 || c.Quorum > o.Workers:
		return usagef("quorum %d: want 1 to %d, the number of the %d ranks that is enough", c.Quorum, o.Workers, o.Workers)
	case c.Wait < 0 || c.Wait > controller.MaxWait || c.Wait%time.Microsecond != 0:
		return usagef("wait %v: want whole microseconds from 0s to %v", c.Wait, controller.MaxWait)
	case c.Rounds == 0:
		c.Rounds = min(max(powerOfTwo(o.allRounds()), powerOfTwo(2*o.Depth)), controller.MaxRounds)
	case c.Rounds < 2*o.Depth || c.Rounds > controller.MaxRounds || c.Rounds != powerOfTwo(c.Rounds):
		return usagef("%d rounds to keep: want a power of two from twice the depth, %d, to %d", c.Rounds, 2*o.Depth, controller.MaxRounds)
	}
	return nil
}

// allRounds returns the number of rounds of a run: one for each bucket of each vector, and a scout for each tensor.
func (o *Options) allRounds() int {
	steps := o.Set.Schedule(o.Rounds)
	lengths := map[int]bool{}
	for _, step := range steps {
		lengths[o.Set.Len(step)] = true
	}
	return (len(steps) + len(lengths)) * o.Buckets
}

// rounds returns the number of rounds that a job's lease on a server has room for.
func (o *Options) rounds() int {
	if o.Consistency.Rounds != 0 {
		return o.Consistency.Rounds
	}
	return powerOfTwo(2 * o.Depth)
}

// powerOfTwo returns the smallest power of two that is at least n, which is positive.
func powerOfTwo(n int) int { return 1 << bits.Len(uint(n-1)) }
