package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"

	"google.golang.org/grpc/status"

	"xagg/api"
	"xagg/lab/loop"
	"xagg/lab/results"
	"xagg/policy/adapt"
	"xagg/policy/trace"
)

// decisions is what the policy of a job decides, as the controller tells of it.
type decisions struct {
	trace bytes.Buffer
	heard []time.Duration // when each of its lines was, by the monotonic clock
	ended chan error      // receives why there are no more
}

// follow has the controller tell what the policy of a job decides, until the job is removed.
func follow(ctx context.Context, client api.ControllerClient, job string) (*decisions, error) {
	stream, err := client.Record(ctx, &api.RecordRequest{Job: job})
	if err != nil {
		return nil, fmt.Errorf("follow the policy of job %s: %s", job, status.Convert(err).Message())
	}
	d := &decisions{ended: make(chan error, 1)}
	go func() {
		for {
			line, err := stream.Recv()
			if err != nil {
				d.ended <- err
				return
			}
			d.heard = append(d.heard, loop.Now())
			d.trace.Write(append(line.Json, '\n'))
		}
	}()
	return d, nil
}

// moves waits for the end, has every decision decided again, and returns the moves. round returns which round of a rank was under way.
func (d *decisions) moves(job string, round func(rank int, at time.Duration) int) (moves []results.Move, err error) {
	if err := <-d.ended; !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("follow the policy of job %s: %s", job, status.Convert(err).Message())
	}
	traces, err := trace.Read("trace of job "+job, bytes.NewReader(d.trace.Bytes()))
	if err != nil {
		return nil, err
	}
	for _, t := range traces {
		if err := t.Verify(); err != nil {
			return nil, fmt.Errorf("policy of job %s: %w", job, err)
		}
	}
	moves = []results.Move{}
	for i, text := range bytes.SplitAfter(d.trace.Bytes(), []byte("\n"))[:len(d.heard)] {
		var line struct{ Decision adapt.Decision }
		if err := json.Unmarshal(text, &line); err != nil {
			return nil, fmt.Errorf("read the trace of job %s: %w", job, err)
		}
		for _, m := range line.Decision.Moves {
			moves = append(moves, results.Move{Round: round(m.Rank, d.heard[i]), Rank: m.Rank, To: string(m.To), Why: m.Why})
		}
	}
	return moves, nil
}
