package transport

import (
	"context"
	"fmt"
	"math/bits"
	"strconv"
	"strings"
	"time"

	"xagg/wire"
)

// NonFiniteError is a NaN or an Inf in a vector. Nothing of the vector was sent.
type NonFiniteError struct {
	Rank  int
	Key   string
	Index int
	Value float32
	// Residual is set when the value was finite and only what earlier rounds had left over made it infinite.
	Residual bool
}

func (e *NonFiniteError) Error() string { return fmt.Sprintf("rank %d, %s", e.Rank, e.What()) }

// What is the error without the rank.
func (e *NonFiniteError) What() string {
	if e.Residual {
		return fmt.Sprintf("tensor %q: value %d becomes %v with the remainder of earlier rounds: the gradient diverges",
			e.Key, e.Index, e.Value)
	}
	return fmt.Sprintf("tensor %q: value %d is %v, want finite numbers", e.Key, e.Index, e.Value)
}

// DeadlineError is an all-reduce that was not finished in time. It wraps context.DeadlineExceeded.
type DeadlineError struct {
	Rank    int
	Round   uint32
	Chunk   uint32 // first unfinished
	Left    int    // unfinished chunks
	Chunks  int    // all chunks of the round
	Missing []int  // ranks that unfinished chunks are known to wait for; empty when no aggregator has answered
	// Server is set when the first unfinished chunk is known to be at an aggregation server, otherwise it waits in the
	// switch (or nowhere, when Missing is empty).
	Server bool
	// Unknown is why an aggregator refused the last contribution that was answered, if that was because it does not have
	// the job's plan: ReasonUnknownJob or ReasonEpoch.
	Unknown wire.Reason
	// Recovering is why the job recovers, if it does.
	Recovering string
	Service    string        // the service address
	Waited     time.Duration // since the all-reduce began
	Err        error         // last error of the link, if any
}

func (e *DeadlineError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "rank %d waited %v ", e.Rank, e.Waited.Round(time.Millisecond))
	switch {
	case e.Recovering != "":
		fmt.Fprintf(&b, "for the job to recover: %s; see with 'xagg status' what that waits for", e.Recovering)
	case e.Unknown != wire.ReasonNone:
		fmt.Fprintf(&b, "for the switch or a server to get the job's plan back (%v): it was restarted, or the job was removed; "+
			"see with 'xagg status'", e.Unknown)
	case len(e.Missing) == 0:
		fmt.Fprintf(&b, "for an answer from the service address %s, which is silent: "+
			"see with 'xagg status' whether switch and servers are up", e.Service)
	case e.Server:
		fmt.Fprintf(&b, "for %s, missing on the aggregation server", Spell(e.Missing))
	default:
		fmt.Fprintf(&b, "for %s, missing in the switch", Spell(e.Missing))
	}
	fmt.Fprintf(&b, " (round %d, %d of %d chunks unfinished, the first is %d)", e.Round, e.Left, e.Chunks, e.Chunk)
	if e.Err != nil {
		fmt.Fprintf(&b, "; last error of the link: %v", e.Err)
	}
	return b.String()
}

// Unwrap returns context.DeadlineExceeded and the link's last error.
func (e *DeadlineError) Unwrap() []error {
	if e.Err == nil {
		return []error{context.DeadlineExceeded}
	}
	return []error{context.DeadlineExceeded, e.Err}
}

// RefusedError is a contribution that an aggregator refuses, several times.
type RefusedError struct {
	Round, Chunk uint32
	Reason       wire.Reason
}

func (e *RefusedError) Error() string {
	s := fmt.Sprintf("round %d, chunk %d was refused (%v)", e.Round, e.Chunk, e.Reason)
	if advice, ok := refusals[e.Reason]; ok {
		s += ": " + advice
	}
	return s
}

// refusals says for a NACK's reason what is behind it and what to do.
var refusals = map[wire.Reason]string{
	wire.ReasonRank: "the rank is not one of the job's; compare the worker's rank with the job's number of ranks",
	wire.ReasonMask: "the packet claims other ranks than its own: a fault of this worker or damage on the way",
	wire.ReasonTag:  "the packet's tag is out of range: a fault of this worker or damage on the way",
	wire.ReasonShape: "other ranks sent another length, type or scale; " +
		"all ranks must reduce the same tensors in the same order",
	wire.ReasonStale: "this worker has fallen more rounds behind than the servers keep; " +
		"join again, or create the job with more rounds (consistency.rounds)",
	wire.ReasonOverlap: "some of its ranks were counted and others not: a fault of the switch",
	wire.ReasonRange:   "the vector has more chunks than the job was created for",
}

// IntegrityError is a result that does not fit this worker's contribution, several times.
type IntegrityError struct {
	Round, Chunk uint32
	// Shape says in what the result differs from the contribution. It is empty when only the tag does not fit.
	Shape string
}

func (e *IntegrityError) Error() string {
	if e.Shape != "" {
		return fmt.Sprintf("round %d, chunk %d: result has %s: corruption, or a fault of an aggregator",
			e.Round, e.Chunk, e.Shape)
	}
	return fmt.Sprintf("round %d, chunk %d: result's tag does not fit its lanes: overflow or corruption", e.Round, e.Chunk)
}

// Spell returns a list of ranks in words: "rank 3" or "ranks 1, 2 and 3".
func Spell(list []int) string {
	words := make([]string, len(list))
	for i, r := range list {
		words[i] = strconv.Itoa(r)
	}
	n := len(words)
	if n == 1 {
		return "rank " + words[0]
	}
	return "ranks " + strings.Join(words[:n-1], ", ") + " and " + words[n-1]
}

// maskRanks returns the ranks of a mask in their order.
func maskRanks(mask uint64) []int {
	list := make([]int, 0, bits.OnesCount64(mask))
	for ; mask != 0; mask &= mask - 1 {
		list = append(list, bits.TrailingZeros64(mask))
	}
	return list
}
