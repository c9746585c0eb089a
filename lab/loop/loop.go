// Package loop is the training loop of experiments, without the training: compute, which is a sleep, hand over gradients bucket by
// bucket, wait for their sums. What sums them is a [Reducer]; all times are of the machine's monotonic clock
// (CLOCK_MONOTONIC), which all processes of an experiment share.
package loop

import (
	"context"
	"time"
)

// Reducer is a worker's end of a way of aggregating. Its methods are called from one goroutine.
type Reducer interface {
	// Start begins the all-reduce of a bucket; all ranks begin those of a round in the same order. values are neither read
	// nor changed by the caller until Wait has returned for the bucket.
	Start(bucket int, values []float32) error
	// Wait waits for the all-reduce of a bucket that was started, and leaves its result where its values were: the sum over all
	// ranks, or in a mode that does not wait for all of them whatever makes up for it in later rounds. Buckets are waited for in the
	// order in which they were started; done is when the result was usable, which may be long before Wait is called.
	Wait(ctx context.Context, bucket int) (Outcome, error)
	// Leave waits until no other rank needs this worker any more, and Close frees what the reducer holds.
	Leave(ctx context.Context) error
	Close() error
}

// Outcome is how an all-reduce went.
type Outcome struct {
	Done    time.Duration // of the monotonic clock: when the result was usable
	Packets uint64        // sent, resends included; 0 where that is the kernel's business
	Resends uint64
	Chunks  int
	Late    int // chunks without this worker
	Behind  int // all-reduces by which others are known to be ahead
	// Parts is by what the result is to be divided for a mean: by the number of ranks, or by 1 where it is one.
	Parts float64
}

// Round is what a worker writes about a round: one JSON object a line. Times are nanoseconds.
type Round struct {
	Round int   `json:"round"` // from 0; warm-up rounds are not left out
	Begin int64 `json:"begin"` // of the computation, on the monotonic clock
	// Ready and Done are, by bucket, when the gradient was computed and when the result was usable, since Begin.
	Ready   []int64 `json:"ready"`
	Done    []int64 `json:"done"`
	Packets uint64  `json:"packets"`
	Resends uint64  `json:"resends"`
	Chunks  int     `json:"chunks"`
	Late    int     `json:"late"` // chunks without the rank's own contribution
	// Skipped says that the rank was behind, computed nothing and contributed zeros, to catch up: what there is to be had of
	// a round that others are through with does not wait for a gradient.
	Skipped bool `json:"skipped,omitempty"`
	// Error is the L2 norm of what the results differ from the exact sums, relative to their norm. In modes that do not wait for
	// all ranks it is of all rounds so far, added up, and the exact sums are those of all gradients of all ranks: what came
	// late has made up for itself, and what remains is what has not come yet, what was skipped, and in quorum that the mean of
	// some ranks stands for that of all.
	Error float64 `json:"error"`
}
