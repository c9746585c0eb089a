// Package replay is a training loop without the training: it all-reduces recorded gradients. `xagg worker` is its
// command.
package replay

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"xagg/api"
	"xagg/worker"
	"xagg/worker/grads"
)

// Config says what one worker does.
type Config struct {
	Worker worker.Config // its Plan is set by Run
	Set    *grads.Set
	Rounds int           // all-reduces; 0 = what grads.Set.Schedule makes of it
	Delay  time.Duration // how much longer than the others it computes before each of them: a straggler
}

// Reduced is an all-reduce that was done.
type Reduced struct {
	Index int     // of the all-reduce, from 0
	Step  int     // of the set
	Elems int     // length of the vector
	Sum   []int32 // the integers that the network summed; valid during the call that is given them
	Info  worker.Info
}

// Run joins the job, all-reduces the rank's vectors and leaves. take is called after every all-reduce; its error ends
// the run. Vectors of one length are one tensor, whose scale goes from step to step as it does in training.
func Run(ctx context.Context, client api.ControllerClient, cfg Config, take func(Reduced) error, opts ...worker.Option) (err error) {
	set, rank := cfg.Set, cfg.Worker.Rank
	schedule := set.Schedule(cfg.Rounds)
	cfg.Worker.Plan = plan(set, schedule)
	var sum []int32
	w, err := worker.Join(ctx, client, cfg.Worker, append(opts, worker.WithObserver(func(r worker.Round) {
		if !r.Scout {
			sum = append(sum[:r.Offset], r.Sum...)
		}
	}))...)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			w.Abort(err)
		}
		w.Close()
	}()
	if set.Ranks() < w.Ranks() {
		return fmt.Errorf("job %q has %d workers, the gradients have %d ranks only", cfg.Worker.Job, w.Ranks(), set.Ranks())
	}
	for i, step := range schedule {
		vector, err := set.Vector(step, rank)
		if err != nil {
			return err
		}
		if err := pause(ctx, cfg.Delay); err != nil {
			return err
		}
		info, err := w.AllReduce(ctx, fmt.Sprintf("gradient of %d", len(vector)), vector)
		if err != nil {
			return err
		}
		if err := take(Reduced{Index: i, Step: step, Elems: len(vector), Sum: sum, Info: info}); err != nil {
			return err
		}
	}
	return w.Leave(ctx)
}

// plan spells what all ranks must agree on: the lengths of the vectors in their order.
func plan(set *grads.Set, schedule []int) string {
	var b strings.Builder
	b.WriteString("float32")
	for i := 0; i < len(schedule); {
		n := 1
		for i+n < len(schedule) && set.Len(schedule[i+n]) == set.Len(schedule[i]) {
			n++
		}
		fmt.Fprintf(&b, " %dx%d", n, set.Len(schedule[i]))
		i += n
	}
	return b.String()
}

// pause waits for d, or until ctx is done.
func pause(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return nil
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Line is what is written about an all-reduce: one JSON object a line.
type Line struct {
	Index     int     `json:"index"`      // of the all-reduce, from 0
	Step      string  `json:"step"`       // name
	Elems     int     `json:"elems"`      // length of the vector
	Round     uint32  `json:"round"`      // number of its first round in the job
	Rounds    int     `json:"rounds"`     // rounds that it took
	Epoch     uint16  `json:"epoch"`      // of its last round
	Exponent  int8    `json:"exponent"`   // value = integer * 2^-exponent
	Mask      string  `json:"mask"`       // contributors, hexadecimal
	Chunks    int     `json:"chunks"`     // of all its rounds
	Packets   uint64  `json:"packets"`    // sent, resends included
	Resends   uint64  `json:"resends"`    //
	Saturated uint64  `json:"saturated"`  // values that this worker clipped
	Last      int     `json:"last"`       // rank that came last where the others waited longest for it
	SpreadUs  int64   `json:"spread_us"`  // longest from a chunk's first to its last arrival
	BlockedUs int64   `json:"blocked_us"` // the part of such a time that the last rank alone took, at most
	Seconds   float64 `json:"seconds"`
}

// Line returns what is written about r, an all-reduce of set.
func (r *Reduced) Line(set *grads.Set) Line {
	i := &r.Info
	return Line{
		Index: r.Index, Step: set.Steps()[r.Step], Elems: r.Elems, Round: i.Round, Rounds: i.Rounds, Epoch: i.Epoch,
		Exponent: i.Exponent, Mask: fmt.Sprintf("%#x", i.Mask), Chunks: i.Chunks, Packets: i.Packets, Resends: i.Resends,
		Saturated: uint64(i.Clipped), Last: i.Last, SpreadUs: i.Spread.Microseconds(), BlockedUs: i.Blocked.Microseconds(),
		Seconds: i.Duration.Seconds(),
	}
}

// DumpName is the name of the file that holds the integers of a rank's all-reduce, as little-endian int32.
func DumpName(index, rank int) string { return fmt.Sprintf("round%03d-rank%d.i32", index, rank) }

// Writer returns a function for Run that writes a [Line] to out for every all-reduce, after the file [DumpName] in dir
// unless dir is empty.
func Writer(out io.Writer, dir string, set *grads.Set, rank int) func(Reduced) error {
	var raw []byte
	enc := json.NewEncoder(out)
	return func(r Reduced) error {
		if dir != "" {
			raw = raw[:0]
			for _, v := range r.Sum {
				raw = binary.LittleEndian.AppendUint32(raw, uint32(v))
			}
			if err := os.WriteFile(filepath.Join(dir, DumpName(r.Index, rank)), raw, 0o644); err != nil {
				return fmt.Errorf("dump integers: %w", err)
			}
		}
		if err := enc.Encode(r.Line(set)); err != nil {
			return fmt.Errorf("write result: %w", err)
		}
		return nil
	}
}
