package demo

import (
	"math/bits"
	"slices"
	"strings"
	"time"

	"xagg/api"
	"xagg/controller"
	"xagg/policy"
	"xagg/wire"
	"xagg/worker/replay"
)

// ModesOf returns those of [Modes] in which jobs of a consistency can run. Chunks that need not wait for all ranks are a
// server's, and running sums are on servers alone.
func ModesOf(c controller.Mode) []string {
	switch c {
	case controller.ModeQuorum:
		return []string{string(policy.ModeServer), string(policy.ModeHybrid)}
	case controller.ModeAsync:
		return []string{string(policy.ModeServer)}
	}
	return Modes
}

// isAsync reports whether results are differences of running sums.
func (o *Options) isAsync() bool { return o.Consistency.Mode == controller.ModeAsync }

// settle returns how many vectors of zeros follow the last of each length. A rank adds the last of staleness + 1 only when
// all have added what comes before the first; one more lets what was clipped of the last vector be told too.
func (o *Options) settle() int {
	if o.isAsync() {
		return o.Consistency.Staleness + 2
	}
	return 0
}

// maxElems returns the lanes that a job must have room for: those of its longest buckets, at least 1; in an async job those
// of the chunks of all tensors.
func (o *Options) maxElems() int {
	if !o.isAsync() {
		return max((o.Set.MaxLen()+o.Buckets-1)/o.Buckets, 1)
	}
	lengths, all := map[int]bool{}, 0
	for _, step := range o.Set.Schedule(o.Rounds) {
		lanes := o.Set.Len(step)
		for b := range o.Buckets {
			if from, to := replay.Bucket(lanes, o.Buckets, b); !lengths[lanes] {
				all += max(chunks(to-from), 1) * wire.MaxLanes
			}
		}
		lengths[lanes] = true
	}
	return all
}

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
		Mode: string(c.Mode), Quorum: uint32(c.Quorum), WaitUs: uint32(c.Wait / time.Microsecond),
		Rounds: uint32(c.Rounds), Staleness: uint32(c.Staleness),
	}
}

// checkConsistency checks the consistency and fills in what was left open.
func (o *Options) checkConsistency() error {
	c := &o.Consistency
	if c.Mode == "" {
		c.Mode = controller.ModeSync
	}
	if err := c.Validate(o.Workers, max(o.Depth, 1)); err != nil {
		return usagef("consistency.%v", err)
	}
	able := ModesOf(c.Mode)
	for _, mode := range o.Modes {
		if c.Mode != controller.ModeSync && !slices.Contains(able, mode) && !(o.isQuorum() && mode == ModeSteered) {
			return usagef("mode %q with consistency %q, which needs servers: want %s", mode, c.Mode, strings.Join(able, " or "))
		}
	}
	if o.isQuorum() && c.Rounds == 0 {
		c.Rounds = min(max(powerOfTwo(o.allRounds()), powerOfTwo(2*o.Depth)), controller.MaxRounds)
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
	if o.isAsync() {
		return 4 // docs/protocol.md, "Async"
	}
	if o.Consistency.Rounds != 0 {
		return o.Consistency.Rounds
	}
	return powerOfTwo(2 * o.Depth)
}

// powerOfTwo returns the smallest power of two that is at least n, which is positive.
func powerOfTwo(n int) int { return 1 << bits.Len(uint(n-1)) }
