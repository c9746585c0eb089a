package worker

import (
	"errors"
	"fmt"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"xagg/worker/transport"
)

// ErrLeft is what calls return after [Worker.Leave] or [Worker.Close].
var ErrLeft = errors.New("worker has left the job")

// The errors of an all-reduce that the packets, or their absence, bring about.
type (
	// NonFiniteError is a NaN or an Inf in a vector. Nothing of the vector was sent.
	NonFiniteError = transport.NonFiniteError
	// DeadlineError is an all-reduce that was not finished in time. It wraps context.DeadlineExceeded.
	DeadlineError = transport.DeadlineError
	// RefusedError is a contribution that an aggregator refuses, several times.
	RefusedError = transport.RefusedError
	// IntegrityError is a result that does not fit this worker's contribution, several times.
	IntegrityError = transport.IntegrityError
)

// AbortError is the end of the job for a reason that lies with other workers, or with the operator.
type AbortError struct {
	Reason string // the controller's sentence
	Ranks  []int  // that caused it; may be empty
}

func (e *AbortError) Error() string {
	if len(e.Ranks) == 0 {
		return fmt.Sprintf("job was aborted: %s", e.Reason)
	}
	return fmt.Sprintf("job was aborted by %s: %s", transport.Spell(e.Ranks), e.Reason)
}

// rpcError is the error of a call to the controller, in the controller's words. It keeps its gRPC status.
type rpcError struct{ err error }

func (e *rpcError) Error() string {
	words := status.Convert(e.err).Message()
	if status.Code(e.err) == codes.Unavailable {
		return fmt.Sprintf("controller cannot be reached, is 'xagg controller' running there? %s", words)
	}
	return "controller: " + words
}

// Unwrap returns gRPC's error, which has the status.
func (e *rpcError) Unwrap() error { return e.err }
