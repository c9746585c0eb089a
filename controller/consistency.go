package controller

import (
	"fmt"
	"math/bits"
	"time"

	"xagg/api"
	"xagg/policy"
)

// Mode says what a result of a job is the sum of (docs/protocol.md, "Words").
type Mode string

const (
	ModeSync   Mode = "sync"   // every result is the sum of all ranks
	ModeQuorum Mode = "quorum" // of at least so many, and of who came in time
	ModeAsync  Mode = "async"  // a running sum, which ranks read when they add to it
)

// Limits of a job.
const (
	// MaxDepth is how many rounds of a job may be under way at most.
	MaxDepth = 16
	// MaxStaleness is the largest staleness of an async job. A lane has the less room the more contributions come between
	// two results of a rank (docs/protocol.md, "Async"): with 64 ranks and this staleness it keeps 14 bits.
	MaxStaleness = 1024
	// MaxRounds is the largest number of rounds that servers keep for stragglers of a quorum job.
	MaxRounds = 256
	// quorumRounds is how many they keep at least where nothing else is asked for.
	quorumRounds = 8
	// asyncRounds is what an async job needs of a server: a running sum, clocks, and two rounds of scouts.
	asyncRounds = 4
)

// Consistency says what the results of a job are, for its whole life. Its zero value is that of a sync job. What Quorum and
// Wait say is where a quorum job begins: a plan may have others, but no smaller quorum (policy.Plan).
type Consistency struct {
	Mode      Mode          `yaml:"mode"`      // empty = sync
	Quorum    int           `yaml:"quorum"`    // ModeQuorum: ranks that are enough, 1..ranks
	Wait      time.Duration `yaml:"wait"`      // ModeQuorum: how long a chunk is kept open for more from its first arrival, up to policy.MaxWait, in whole microseconds
	Staleness int           `yaml:"staleness"` // ModeAsync: contributions that a rank may be ahead of the slowest, up to MaxStaleness
	Rounds    int           `yaml:"rounds"`    // ModeQuorum: rounds that servers keep for stragglers, a power of two up to MaxRounds; 0 = max(8, 2 x depth)
}

// mode returns the mode with its default.
func (c Consistency) mode() Mode {
	if c.Mode == "" {
		return ModeSync
	}
	return c.Mode
}

// Validate checks a consistency for a job with so many ranks and so many rounds under way, at least 1 each. Errors are of
// type [*policy.FieldError].
func (c Consistency) Validate(ranks, depth int) error {
	switch c.mode() {
	case ModeSync, ModeQuorum, ModeAsync:
	default:
		return fieldf("mode", "%q is not a mode; want %q, %q or %q", c.Mode, ModeSync, ModeQuorum, ModeAsync)
	}
	for _, f := range []struct {
		name string
		of   Mode
		set  bool
	}{
		{"quorum", ModeQuorum, c.Quorum != 0}, {"wait", ModeQuorum, c.Wait != 0}, {"rounds", ModeQuorum, c.Rounds != 0},
		{"staleness", ModeAsync, c.Staleness != 0},
	} {
		if f.set && f.of != c.mode() {
			return fieldf(f.name, "belongs to mode %q, not to mode %q; leave it out or set the mode", f.of, c.mode())
		}
	}
	if c.Staleness < 0 || c.Staleness > MaxStaleness {
		return fieldf("staleness", "%d is outside 0..%d", c.Staleness, MaxStaleness)
	}
	if c.mode() != ModeQuorum {
		return nil
	}
	if c.Quorum < 1 || c.Quorum > ranks {
		return fieldf("quorum", "%d is outside 1..%d; it is the number of the %d ranks that is enough", c.Quorum, ranks, ranks)
	}
	if err := policy.CheckWait("wait", c.Wait); err != nil {
		return err
	}
	if c.Rounds != 0 && (c.Rounds < 2*depth || c.Rounds > MaxRounds || bits.OnesCount(uint(c.Rounds)) != 1) {
		return fieldf("rounds", "%d is not a power of two in %d..%d, from twice the depth on", c.Rounds, 2*depth, MaxRounds)
	}
	return nil
}

// ServerRounds returns how many rounds a server's lease has room for (docs/protocol.md, "Server slots").
func (c Consistency) ServerRounds(depth int) int {
	if c.Rounds != 0 {
		return c.Rounds
	}
	least := 2 * depth
	switch c.mode() {
	case ModeQuorum:
		least = max(least, quorumRounds)
	case ModeAsync:
		// Whatever the depth: each tensor has chunks of its own, and scouts are under way one at a time.
		return asyncRounds
	}
	return 1 << bits.Len(uint(least-1))
}

// complete returns the consistency with its defaults filled in.
func (c Consistency) complete(depth int) Consistency {
	c.Mode = c.mode()
	if c.Mode == ModeQuorum {
		c.Rounds = c.ServerRounds(depth)
	}
	return c
}

// allows refuses a plan under which the job could not be what it is. Errors are of type [*policy.FieldError].
func (c Consistency) allows(p policy.Plan) error {
	switch {
	case c.mode() == ModeQuorum && len(p.Servers) == 0:
		return fieldf("policy.mode", "a quorum job needs a server that closes chunks without the missing ranks; choose mode %q or %q",
			policy.ModeServer, policy.ModeHybrid)
	case c.mode() == ModeAsync && p.Cohort != 0:
		return fieldf("policy.mode", "an async job has its sums on servers alone, but the switch would sum ranks %s; choose mode %q",
			policy.FormatMask(p.Cohort), policy.ModeServer)
	}
	return nil
}

// proto returns the consistency as the API has it.
func (c Consistency) proto() *api.Consistency {
	return &api.Consistency{
		Mode: string(c.Mode), Quorum: uint32(c.Quorum), WaitUs: microsOf(c.Wait),
		Staleness: uint32(c.Staleness), Rounds: uint32(c.Rounds),
	}
}

// microsOf returns a wait as messages and tables have it.
func microsOf(wait time.Duration) uint32 { return uint32(wait / time.Microsecond) }

// consistencyOf returns the consistency that a request asks for.
func consistencyOf(c *api.Consistency) Consistency {
	return Consistency{
		Mode: Mode(c.GetMode()), Quorum: int(c.GetQuorum()), Wait: time.Duration(c.GetWaitUs()) * time.Microsecond,
		Staleness: int(c.GetStaleness()), Rounds: int(c.GetRounds()),
	}
}

// complete returns the job with the defaults of its weight, its depth and its consistency filled in.
func (j JobSpec) complete() JobSpec {
	j.Depth, j.Weight = max(j.Depth, 1), j.weight()
	j.Consistency = j.Consistency.complete(j.Depth)
	return j
}

// equal reports whether two jobs are the same with their defaults filled in, but for Adapt, which says nothing of what
// they are.
func (j JobSpec) equal(k JobSpec) bool {
	j, k = j.complete(), k.complete()
	j.Adapt, k.Adapt = nil, nil
	p, q := j.Policy, k.Policy
	if j.Policy, k.Policy = nil, nil; j != k || p == nil || q == nil {
		return j == k && p == q
	}
	return p.Complete(nil).Equal(q.Complete(nil))
}

// validateRounds checks depth and consistency, and that servers can count the slots that they take. Errors are of type
// [*policy.FieldError].
func (j JobSpec) validateRounds() error {
	if j.Depth < 0 || j.Depth > MaxDepth {
		return fieldf("depth", "%d is outside 1..%d; it is how many rounds may be under way", j.Depth, MaxDepth)
	}
	j.Depth = max(j.Depth, 1)
	if err := j.Consistency.Validate(j.Ranks, j.Depth); err != nil {
		return under("consistency", err)
	}
	if rounds := j.Consistency.ServerRounds(j.Depth); uint64(rounds)*uint64(chunksOf(j.MaxElems)) >= 1<<32 {
		return fieldf("max_elems", "%d lanes in each of the %d rounds that servers keep are more than 2^32 slots", j.MaxElems, rounds)
	}
	return nil
}

// String says in words what a job's results are, for error messages and logs.
func (c Consistency) String() string {
	switch c.mode() {
	case ModeQuorum:
		return fmt.Sprintf("quorum of %d within %s", c.Quorum, c.Wait)
	case ModeAsync:
		return fmt.Sprintf("async with staleness %d", c.Staleness)
	}
	return string(ModeSync)
}
