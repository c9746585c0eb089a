package p4rt

import (
	"context"
	"fmt"
	"strings"

	p4v1 "github.com/p4lang/p4runtime/go/p4/v1"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// maxFailures is how many failed updates an error prints.
const maxFailures = 3

// WriteError says which updates of a write failed. bmv2 tries every update of a write, so the others were done.
type WriteError struct {
	Updates []Update
	Status  []*status.Status // one per update, OK ones included
}

// Error prints the first failures with their updates.
func (e *WriteError) Error() string {
	var b strings.Builder
	n := e.failures()
	fmt.Fprintf(&b, "%d of %d updates failed", n, len(e.Updates))
	shown := 0
	for i, st := range e.Status {
		if st.Code() == codes.OK {
			continue
		}
		if shown == maxFailures {
			fmt.Fprintf(&b, "; and %d more", n-shown)
			break
		}
		shown++
		fmt.Fprintf(&b, "; %s: %s", e.Updates[i], st.Code())
		if st.Message() != "" {
			fmt.Fprintf(&b, " (%s)", st.Message())
		}
	}
	return b.String()
}

func (e *WriteError) failures() (n int) {
	for _, st := range e.Status {
		if st.Code() != codes.OK {
			n++
		}
	}
	return n
}

// DetailsError says that a switch reported a failed write in a way that does not tell which updates failed: any of
// them may have been done.
type DetailsError struct {
	Updates int    // of the write
	Details int    // that came with the switch's status
	Problem string // what is wrong with them
	Err     error  // the switch's status
}

// Error has the problem and the switch's own words.
func (e *DetailsError) Error() string {
	return fmt.Sprintf("the switch does not tell which of %d updates failed: %s: %v", e.Updates, e.Problem, e.Err)
}

// Unwrap returns the switch's status.
func (e *DetailsError) Unwrap() error { return e.Err }

// Write sends updates as one write; the switch does them in their order and goes on after one that fails. The error is
// a [*WriteError] with a status per update, a [*DetailsError] where the switch does not tell which failed, or another
// one when nothing was done: an update that cannot be encoded, a refusal of the whole (not primary, no pipeline), or a
// broken connection, of which only the switch knows what it had done.
func (s *Session) Write(ctx context.Context, updates []Update) error {
	if len(updates) == 0 {
		return nil
	}
	req := &p4v1.WriteRequest{
		DeviceId:   s.target.DeviceID,
		ElectionId: s.target.Election.proto(),
		Atomicity:  p4v1.WriteRequest_CONTINUE_ON_ERROR,
	}
	for _, u := range updates {
		e, err := s.program.Encode(u.Entity)
		if err != nil {
			return err
		}
		op, err := u.proto()
		if err != nil {
			return err
		}
		req.Updates = append(req.Updates, &p4v1.Update{Type: op, Entity: e})
	}
	_, err := s.client.Write(ctx, req)
	return writeError(updates, err)
}

func (u Update) proto() (p4v1.Update_Type, error) {
	switch u.Op {
	case Insert, Modify:
		if e, ok := u.Entity.(Entry); ok && e.Action == "" {
			return 0, fmt.Errorf("encode %s: it has no action", e.Key())
		}
		if u.Op == Insert {
			return p4v1.Update_INSERT, nil
		}
		return p4v1.Update_MODIFY, nil
	case Delete:
		return p4v1.Update_DELETE, nil
	}
	return 0, fmt.Errorf("encode %s: %s is unknown", u.Entity.Key(), u.Op)
}

// writeError reads what a switch says about a write: by the specification UNKNOWN with one p4.v1.Error for each
// update, in their order, those that succeeded included.
func writeError(updates []Update, err error) error {
	if err == nil {
		return nil
	}
	st, ok := status.FromError(err)
	if !ok {
		return fmt.Errorf("write: %w", err)
	}
	details := st.Proto().GetDetails()
	mismatch := func(format string, args ...any) error {
		return fmt.Errorf("write: %w", &DetailsError{
			Updates: len(updates), Details: len(details), Problem: fmt.Sprintf(format, args...), Err: err,
		})
	}
	if len(details) == 0 {
		if st.Code() == codes.Unknown {
			return mismatch("its status has no details")
		}
		return fmt.Errorf("write: %w", err)
	}
	if len(details) != len(updates) {
		return mismatch("its status has %d details", len(details))
	}
	werr := &WriteError{Updates: updates, Status: make([]*status.Status, len(updates))}
	for i, d := range details {
		var p4err p4v1.Error
		if err := d.UnmarshalTo(&p4err); err != nil {
			return mismatch("detail %d is not a p4.v1.Error: %v", i, err)
		}
		werr.Status[i] = status.New(codes.Code(p4err.GetCanonicalCode()), p4err.GetMessage())
	}
	if werr.failures() == 0 {
		return mismatch("every detail is OK")
	}
	return fmt.Errorf("write: %w", werr)
}
