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
	"strconv"
	"strings"
	"time"

	"xagg/api"
	"xagg/wire"
	"xagg/worker"
	"xagg/worker/grads"
)

// Config says what one worker does.
type Config struct {
	Worker worker.Config // its Plan is set by Run
	Set    *grads.Set
	Rounds int // vectors to all-reduce; 0 = what grads.Set.Schedule makes of it
	// Buckets, 1..MaxBuckets or 0 for one, is the number of pieces that each vector is cut into, see Bucket. They are
	// tensors of their own whose all-reduces are under way at the same time.
	Buckets int
	Delay   time.Duration // how much longer than the others it computes before each vector: a straggler
}

// MaxBuckets is the largest number of buckets of a vector.
const MaxBuckets = 256

// Bucket returns the lanes from..to of one of so many buckets of a vector. Their lengths differ by one at most.
func Bucket(lanes, buckets, bucket int) (from, to int) {
	return lanes * bucket / buckets, lanes * (bucket + 1) / buckets
}

// Reduced is an all-reduce that was done.
type Reduced struct {
	Index   int // of the vector, from 0
	Step    int // of the set
	Bucket  int // of the Buckets of the vector, from 0
	Buckets int
	Elems   int     // length of the bucket
	Sum     []int32 // the integers that the network summed; valid during the call that is given them
	// Masks are the contributors by chunk, valid like Sum; nil in a job that has all of them in every chunk.
	Masks []uint64
	Info  worker.Info
}

// tensor is what the network has made of a key's last all-reduce.
type tensor struct {
	sum   []int32
	masks []uint64
}

// Run joins the job, all-reduces the rank's vectors and leaves. take is called after every all-reduce, in their order;
// its error ends the run. Vectors of one length, or their buckets, are one tensor, whose scale goes from step to step as
// it does in training.
func Run(ctx context.Context, client api.ControllerClient, cfg Config, take func(Reduced) error, opts ...worker.Option) (err error) {
	set, rank := cfg.Set, cfg.Worker.Rank
	schedule := set.Schedule(cfg.Rounds)
	buckets := max(cfg.Buckets, 1)
	cfg.Worker.Plan = plan(set, schedule, buckets)
	tensors := map[string]*tensor{} // not changed any more once the worker has joined
	for _, step := range schedule {
		for b := range buckets {
			tensors[key(set.Len(step), buckets, b)] = &tensor{}
		}
	}
	w, err := worker.Join(ctx, client, cfg.Worker, append(opts, worker.WithObserver(func(r worker.Round) {
		if r.Scout {
			return
		}
		t := tensors[r.Key]
		t.sum = append(t.sum[:r.Offset], r.Sum...)
		if r.Masks != nil {
			t.masks = append(t.masks[:r.Offset/wire.MaxLanes], r.Masks...)
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
	pending := make([]*worker.Pending, buckets)
	for i, step := range schedule {
		vector, err := set.Vector(step, rank)
		if err != nil {
			return err
		}
		if err := pause(ctx, cfg.Delay); err != nil {
			return err
		}
		for b := range pending {
			from, to := Bucket(len(vector), buckets, b)
			if pending[b], err = w.Start(key(len(vector), buckets, b), vector[from:to]); err != nil {
				return err
			}
		}
		for b, p := range pending {
			info, err := p.Wait(ctx)
			if err != nil {
				return err
			}
			t := tensors[key(len(vector), buckets, b)]
			if err := take(Reduced{Index: i, Step: step, Bucket: b, Buckets: buckets, Elems: len(t.sum), Sum: t.sum, Masks: t.masks, Info: info}); err != nil {
				return err
			}
		}
	}
	return w.Leave(ctx)
}

// key names the tensor that a bucket of a vector is.
func key(lanes, buckets, bucket int) string {
	if buckets == 1 {
		return fmt.Sprintf("gradient of %d", lanes)
	}
	return fmt.Sprintf("bucket %d of gradient of %d", bucket, lanes)
}

// plan spells what all ranks must agree on: the lengths of the vectors in their order, and into how many buckets each is
// cut.
func plan(set *grads.Set, schedule []int, buckets int) string {
	var b strings.Builder
	b.WriteString("float32")
	if buckets > 1 {
		fmt.Fprintf(&b, " buckets=%d", buckets)
	}
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
	Index     int     `json:"index"`      // of the vector, from 0
	Step      string  `json:"step"`       // name
	Bucket    int     `json:"bucket"`     // of the vector, from 0
	Elems     int     `json:"elems"`      // length of the bucket
	Round     uint32  `json:"round"`      // number of its first round in the job
	Rounds    int     `json:"rounds"`     // rounds that it took
	Epoch     uint16  `json:"epoch"`      // of its last round
	Exponent  int8    `json:"exponent"`   // value = integer * 2^-exponent
	Mask      string  `json:"mask"`       // contributors to every chunk, hexadecimal
	Chunks    int     `json:"chunks"`     // of all its rounds
	Packets   uint64  `json:"packets"`    // sent, resends included
	Resends   uint64  `json:"resends"`    //
	Saturated uint64  `json:"saturated"`  // values that this worker clipped
	Last      int     `json:"last"`       // rank that came last where the others waited longest for it
	SpreadUs  int64   `json:"spread_us"`  // longest from a chunk's first to its last arrival
	BlockedUs int64   `json:"blocked_us"` // the part of such a time that the last rank alone took, at most
	Seconds   float64 `json:"seconds"`
	// Masks are the contributors by chunk where Mask does not say it all, hexadecimal.
	Masks []string `json:"masks,omitempty"`
	Late  int      `json:"late,omitempty"` // chunks without this worker
}

// Line returns what is written about r, an all-reduce of set.
func (r *Reduced) Line(set *grads.Set) Line {
	i := &r.Info
	var masks []string
	for _, m := range r.Masks {
		masks = append(masks, fmt.Sprintf("%#x", m))
	}
	return Line{
		Masks: masks, Late: i.Late,
		Index: r.Index, Step: set.Steps()[r.Step], Bucket: r.Bucket, Elems: r.Elems, Round: i.Round, Rounds: i.Rounds, Epoch: i.Epoch,
		Exponent: i.Exponent, Mask: fmt.Sprintf("%#x", i.Mask), Chunks: i.Chunks, Packets: i.Packets, Resends: i.Resends,
		Saturated: uint64(i.Clipped), Last: i.Last, SpreadUs: i.Spread.Microseconds(), BlockedUs: i.Blocked.Microseconds(),
		Seconds: i.Duration.Seconds(),
	}
}

// Contributors returns the contributors by chunk that the line tells; nil where it does not, because they are all ranks.
func (l *Line) Contributors() ([]uint64, error) {
	var masks []uint64
	for _, s := range l.Masks {
		m, err := strconv.ParseUint(s, 0, wire.MaxRanks)
		if err != nil {
			return nil, fmt.Errorf("contributors %q: want a mask of %d bits: %w", s, wire.MaxRanks, err)
		}
		masks = append(masks, m)
	}
	return masks, nil
}

// DumpName is the name of the file that holds the integers of an all-reduce of a rank, as little-endian int32: of a vector,
// or of one of its buckets where there are several.
func DumpName(index, buckets, bucket, rank int) string {
	if buckets <= 1 {
		return fmt.Sprintf("round%03d-rank%d.i32", index, rank)
	}
	return fmt.Sprintf("round%03d-bucket%d-rank%d.i32", index, bucket, rank)
}

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
			if err := os.WriteFile(filepath.Join(dir, DumpName(r.Index, r.Buckets, r.Bucket, rank)), raw, 0o644); err != nil {
				return fmt.Errorf("dump integers: %w", err)
			}
		}
		if err := enc.Encode(r.Line(set)); err != nil {
			return fmt.Errorf("write result: %w", err)
		}
		return nil
	}
}
