// Package policy decides how a job's ranks are divided between the switch and the aggregation servers. It is pure:
// what is known goes in as values, a plan and the sentence that explains it come out. The controller turns a plan
// into table entries and server leases.
package policy

import (
	"errors"
	"fmt"
	"math/bits"
	"slices"
	"strings"
	"time"
)

const (
	// MaxRanks is the largest number of ranks in a job: a plan's masks have 64 bits.
	MaxRanks = 64
	// MaxDefaultPool is the largest number of slots per version where nothing else is asked for: a worker has at most so
	// many chunks under way.
	MaxDefaultPool = 32
	// portQueue is how many packets a simple_switch port holds before it drops the next one.
	portQueue = 64
	// MaxWait is the longest that a chunk of a job with a quorum is kept open.
	MaxWait = time.Hour
	// SlotsPerPool is the number of switch slots that a job leases per slot of its pool: two versions for each of the
	// two epochs that are installed while a plan changes.
	SlotsPerPool = 4
)

// Input is what a rule decides from: one job and the place it is to run in.
type Input struct {
	Job     string   // the job's name, for the explanation
	Ranks   int      // number of workers, 1..64
	Servers []string // names of the aggregation servers there are
	Slots   int      // slots of the switch that no job has leased
	// MaxPool is the largest pool that the job gets where the rule asks for none, a power of two: its share of the switch. 0 = any.
	MaxPool int
	// Pool is what a job that runs already has leased: the slots per version of whatever plan it gets. 0 = it has none.
	Pool int
	// Quorum is how many ranks are enough for a result by what a job with a quorum was created with: its ranks take nothing
	// less, whatever its plan is. Wait is how long its chunks are kept open for more unless a plan says otherwise. 0 and 0 =
	// the job has no quorum.
	Quorum int
	Wait   time.Duration
}

// Plan says where each rank of a job is summed. Cohort and Steered are disjoint and cover the ranks.
type Plan struct {
	Cohort  uint64   // mask of the ranks that the switch sums
	Steered uint64   // mask of the ranks that the switch passes to a server
	Servers []string // names, in the order in which chunks are dealt to them; none = the switch closes chunks
	Pool    int      // slots per version, a power of two
	// Quorum is how many ranks are enough for a result, of a job with a quorum: from the job's own, the least that its ranks
	// take, to all; Wait is how long a chunk is kept open for more. 0 and 0 in other jobs.
	Quorum int
	Wait   time.Duration
}

// Equal reports whether two plans are the same.
func (p Plan) Equal(q Plan) bool {
	return p.Cohort == q.Cohort && p.Steered == q.Steered && p.Pool == q.Pool && p.Quorum == q.Quorum && p.Wait == q.Wait &&
		slices.Equal(p.Servers, q.Servers)
}

// Streams returns how many streams of packets come to the plan's servers, all together: that of each steered rank, and the
// cohort's partial sums.
func (p Plan) Streams() int {
	n := bits.OnesCount64(p.Steered)
	if len(p.Servers) > 0 && p.Cohort != 0 {
		n++
	}
	return n
}

// defaultPool returns the largest pool with which no port of the switch has to queue more packets than it holds, at
// least 1 and at most MaxDefaultPool. Per slot of the pool, a worker's port carries a RESULT and, where servers close
// chunks, an ACK; a server's port carries the packet of every steered rank and the cohort's PARTIAL, divided by the
// number of servers.
func defaultPool(p Plan) int {
	packets := 1
	if n := len(p.Servers); n > 0 {
		packets = max(2, (p.Streams()+n-1)/n)
	}
	pool := MaxDefaultPool
	for pool > 1 && pool*packets > portQueue {
		pool /= 2
	}
	return pool
}

// SteerablePool returns the default pool of the plan with the longest queues that a job of so many ranks may get: all of
// them steered to one server. A job keeps its pool when its plan changes.
func SteerablePool(ranks int) int {
	return defaultPool(Plan{Steered: allRanks(ranks), Servers: make([]string, 1)})
}

// Decision is a plan with the reason for it.
type Decision struct {
	Plan
	Explanation string // a sentence for an operator: rule, inputs, result
}

// FieldError is a mistake in a rule or in what it was given.
type FieldError struct {
	Field string // path of the field as the configuration spells it, such as "steer[1]"
	Err   error
}

// Error names the field and what is wrong with it.
func (e *FieldError) Error() string { return e.Field + ": " + e.Err.Error() }

// Unwrap returns the error without the field.
func (e *FieldError) Unwrap() error { return e.Err }

// FieldOf returns the field that an error is about, or "" where none is named.
func FieldOf(err error) string {
	var field *FieldError
	if !errors.As(err, &field) {
		return ""
	}
	return field.Field
}

func fieldf(field, format string, args ...any) error {
	return &FieldError{Field: field, Err: fmt.Errorf(format, args...)}
}

// allRanks returns the mask of ranks 0..n-1, 0 <= n <= 64.
func allRanks(n int) uint64 { return 1<<uint(n) - 1 }

// FormatMask writes a mask of ranks for people: "0-2,5", or "none".
func FormatMask(mask uint64) string {
	if mask == 0 {
		return "none"
	}
	var parts []string
	for mask != 0 {
		first := bits.TrailingZeros64(mask)
		run := bits.TrailingZeros64(^(mask >> first))
		last := first + run - 1
		switch {
		case run == 1:
			parts = append(parts, fmt.Sprint(first))
		default:
			parts = append(parts, fmt.Sprintf("%d-%d", first, last))
		}
		mask &^= allRanks(run) << first
	}
	return strings.Join(parts, ",")
}
