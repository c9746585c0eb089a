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

// read waits for the end, has every decision decided again, and notes in a job what was changed. round returns which round of a rank was under
// way.
func (d *decisions) read(j *results.Job, round func(rank int, at time.Duration) int) error {
	if err := <-d.ended; !errors.Is(err, io.EOF) {
		return fmt.Errorf("follow the policy of job %s: %s", j.Name, status.Convert(err).Message())
	}
	traces, err := trace.Read("trace of job "+j.Name, bytes.NewReader(d.trace.Bytes()))
	if err != nil {
		return err
	}
	for _, t := range traces {
		if err := t.Verify(); err != nil {
			return fmt.Errorf("policy of job %s: %w", j.Name, err)
		}
	}
	return d.note(j, round)
}

// note notes in a job what the decisions have changed.
func (d *decisions) note(j *results.Job, round func(rank int, at time.Duration) int) error {
	j.Moves = []results.Move{}
	enough, wait := 0, 0.0 // as the last decision has it
	for i, text := range bytes.SplitAfter(d.trace.Bytes(), []byte("\n"))[:len(d.heard)] {
		var line struct{ Decision adapt.Decision }
		if err := json.Unmarshal(text, &line); err != nil {
			return fmt.Errorf("read the trace of job %s: %w", j.Name, err)
		}
		for _, m := range line.Decision.Moves {
			j.Moves = append(j.Moves, results.Move{Round: round(m.Rank, d.heard[i]), Rank: m.Rank, To: string(m.To), Why: m.Why})
		}
		if x := &line.Decision; x.Quorum > 0 && (x.Quorum != enough || x.Wait != wait) {
			enough, wait = x.Quorum, x.Wait
			j.Quorums = append(j.Quorums, results.Quorum{Round: round(0, d.heard[i]), Ranks: enough, Wait: wait})
		}
	}
	return nil
}
