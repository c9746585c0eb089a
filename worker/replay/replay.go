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
	"slices"
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
	// Settle is the number of vectors of zeros that are all-reduced after the last of each length. In an async job of
	// staleness s the result of the last of s + 1 has told this rank of all contributions of all vectors.
	Settle int
	Delay  time.Duration // how much longer than the others it computes before each vector: a straggler
}

// MaxBuckets is the largest number of buckets of a vector.
const MaxBuckets = 256

// Bucket returns the lanes from..to of one of so many buckets of a vector. Their lengths differ by one at most.
func Bucket(lanes, buckets, bucket int) (from, to int) {
	return lanes * bucket / buckets, lanes * (bucket + 1) / buckets
}

// Vector is what is all-reduced in a place of a run.
type Vector struct {
	Step  int  // of the set
	Zeros bool // of the step's length, instead of its values
}

// Vectors returns the vectors of a run in their order.
func Vectors(set *grads.Set, rounds, settle int) []Vector {
	var vectors, zeros []Vector
	lengths := map[int]bool{}
	for _, step := range set.Schedule(rounds) {
		vectors = append(vectors, Vector{Step: step})
		if n := set.Len(step); !lengths[n] {
			lengths[n] = true
			zeros = append(zeros, slices.Repeat([]Vector{{Step: step, Zeros: true}}, settle)...)
		}
	}
	return append(vectors, zeros...)
}

// values returns a rank's values of a vector.
func (v Vector) values(set *grads.Set, rank int) ([]float32, error) {
	if v.Zeros {
		return make([]float32, set.Len(v.Step)), nil
	}
	return set.Vector(v.Step, rank)
}

// Reduced is an all-reduce that was done.
type Reduced struct {
	Index int // of the vector, from 0
	Vector
	Bucket  int // of the Buckets of the vector, from 0
	Buckets int
	Elems   int     // length of the bucket
	Sum     []int32 // the integers that the network summed; valid during the call that is given them
	// Masks are the contributors by chunk, valid like Sum; nil in a job that has all of them in every chunk.
	Masks []uint64
	Info  worker.Info
	Began time.Time // when the vector's first bucket was given to the worker, and
	Ended time.Time // when this one's result was back
}

// tensor is what the network has made of a key's last all-reduce.
type tensor struct {
	sum   []int32
	masks []uint64
}

// Run joins the job, all-reduces the rank's vectors and leaves. take is called after every all-reduce, in their order;
// its error ends the run. Vectors of one length, or their buckets, are one tensor, whose scale goes from step to step as
// it does in training. A rank that comes back goes on with what the others have not begun.
func Run(ctx context.Context, client api.ControllerClient, cfg Config, take func(Reduced) error, opts ...worker.Option) (err error) {
	set, rank := cfg.Set, cfg.Worker.Rank
	vectors := Vectors(set, cfg.Rounds, cfg.Settle)
	buckets := max(cfg.Buckets, 1)
	cfg.Worker.Plan = plan(set, vectors, buckets)
	tensors := map[string]*tensor{} // not changed any more once the worker has joined
	for _, v := range vectors {
		for b := range buckets {
			tensors[key(set.Len(v.Step), buckets, b)] = &tensor{}
		}
	}
	w, err := worker.Join(ctx, client, cfg.Worker, append(opts, worker.WithObserver(func(r worker.Round) {
		if r.Scout {
			return
		}
		t := tensors[r.Key]
		t.sum = append(t.sum[:r.Offset], r.Sum...)
		if r.Masks != nil && !r.Async {
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
	begun := w.Begun()
	for i := begun / buckets; i < len(vectors); i++ {
		first := max(0, begun-i*buckets) // bucket
		v := vectors[i]
		vector, err := v.values(set, rank)
		if err != nil {
			return err
		}
		if err := Pause(ctx, cfg.Delay); err != nil {
			return err
		}
		began := time.Now()
		for b := first; b < buckets; b++ {
			from, to := Bucket(len(vector), buckets, b)
			if pending[b], err = w.Start(key(len(vector), buckets, b), vector[from:to]); err != nil {
				return err
			}
		}
		for b := first; b < buckets; b++ {
			info, err := pending[b].Wait(ctx)
			if err != nil {
				return err
			}
			t := tensors[key(len(vector), buckets, b)]
			if err := take(Reduced{
				Index: i, Vector: v, Bucket: b, Buckets: buckets, Elems: len(t.sum), Sum: t.sum, Masks: t.masks, Info: info,
				Began: began, Ended: time.Now(),
			}); err != nil {
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
func plan(set *grads.Set, vectors []Vector, buckets int) string {
	var b strings.Builder
	b.WriteString("float32")
	if buckets > 1 {
		fmt.Fprintf(&b, " buckets=%d", buckets)
	}
	for i := 0; i < len(vectors); {
		n := 1
		for i+n < len(vectors) && set.Len(vectors[i+n].Step) == set.Len(vectors[i].Step) {
			n++
		}
		fmt.Fprintf(&b, " %dx%d", n, set.Len(vectors[i].Step))
		i += n
	}
	return b.String()
}

// Pause waits for d, or until ctx is done.
func Pause(ctx context.Context, d time.Duration) error {
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
	Step      string  `json:"step"`       // name, or "zeros"
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
	// Began and Ended are when by this machine's clock the vector's first bucket was given to the worker, and this one's result back.
	Began time.Time `json:"began"`
	Ended time.Time `json:"ended"`
	// Masks are the contributors by chunk where Mask does not say it all, hexadecimal.
	Masks []string `json:"masks,omitempty"`
	Late  int      `json:"late,omitempty"` // chunks without this worker
	// Additions are the contributions in the result of the chunk that had the most, in an async job.
	Additions int `json:"additions,omitempty"`
}

// Line returns what is written about r, an all-reduce of set.
func (r *Reduced) Line(set *grads.Set) Line {
	i := &r.Info
	step := set.Steps()[r.Step]
	if r.Zeros {
		step = "zeros"
	}
	var masks []string
	for _, m := range r.Masks {
		masks = append(masks, fmt.Sprintf("%#x", m))
	}
	return Line{
		Masks: masks, Late: i.Late, Additions: i.Additions,
		Index: r.Index, Step: step, Bucket: r.Bucket, Elems: r.Elems, Round: i.Round, Rounds: i.Rounds, Epoch: i.Epoch,
		Exponent: i.Exponent, Mask: fmt.Sprintf("%#x", i.Mask), Chunks: i.Chunks, Packets: i.Packets, Resends: i.Resends,
		Saturated: uint64(i.Clipped), Last: i.Last, SpreadUs: i.Spread.Microseconds(), BlockedUs: i.Blocked.Microseconds(),
		Seconds: i.Duration.Seconds(), Began: r.Began, Ended: r.Ended,
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
