package train

import (
	"context"
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"math"
	"slices"
	"time"

	"xagg/lab/loop"
)

// Reducer sums a rank's gradients with the others'.
type Reducer interface {
	// Reduce replaces data by the result of an all-reduce, which is to be divided by [Plan.Divisor].
	Reduce(ctx context.Context, data []float32) (Outcome, error)
	// Leave returns when no other rank needs this one any more. Abort ends the run for all ranks instead, and says why.
	Leave(ctx context.Context) error
	Abort(reason error)
	Close() error
}

// Outcome is how an all-reduce went.
type Outcome struct {
	Chunks    int    `json:"chunks,omitempty"`    // of the result; 0 over TCP
	Late      int    `json:"late,omitempty"`      // chunks without this rank: its values go into its next all-reduce
	Behind    int    `json:"behind,omitempty"`    // all-reduces by which others were known to be ahead
	Additions int    `json:"additions,omitempty"` // async: contributions in the result
	Exponent  int8   `json:"exponent,omitempty"`  // values were rounded to multiples of 2^-Exponent
	Clipped   int    `json:"clipped,omitempty"`   // values that did not fit: the rest goes into the next all-reduce
	Packets   uint64 `json:"packets,omitempty"`
	Resends   uint64 `json:"resends,omitempty"`
}

// Step is what a rank tells of one of its steps. Times are nanoseconds of the machine's monotonic clock, which all ranks share.
type Step struct {
	Step    int   `json:"step"`  // from 0
	Begin   int64 `json:"begin"` // of the computation
	Ready   int64 `json:"ready"` // when the gradient was computed
	Done    int64 `json:"done"`  // when the parameters were changed
	Skipped bool  `json:"skipped,omitempty"`
	Outcome
	Digest uint64 `json:"digest"` // of the parameters after it
	// At a checkpoint: the parameters before the step, and what they were moved by over the rate of learning. After the
	// last step there is a Step without one, with the parameters after everything.
	Params Floats `json:"params,omitempty"`
	Mean   Floats `json:"mean,omitempty"`
}

// Work is a rank's training: compute a gradient, all-reduce it, step. It computes for as long as the plan says: it really computes the gradient,
// and then sleeps for the rest of the time. emit is called after every step, in their order.
func Work(ctx context.Context, p Plan, rank int, reducer Reducer, emit func(Step) error) (err error) {
	defer func() {
		if err != nil {
			reducer.Abort(err)
		}
	}()
	task, net := NewTask(p.Seed, p.Ranks, p.Skew), NewNetwork(p.Seed, Sizes)
	batch, data := NewSamples(p.Batch), make([]float32, len(net.Params))
	divisor := p.Divisor()
	var pace loop.Pace
	for i := range p.Rounds {
		s := Step{Step: i, Begin: now(), Skipped: pace.Skip()}
		checkpoint := rank == p.Observer() && i%p.Every == 0
		if checkpoint {
			s.Params = slices.Clone(net.Params)
		}
		if s.Skipped {
			clear(data)
		} else {
			task.Batch(batch, rank, i)
			net.Gradient(data, batch)
			if err := sleepUntil(ctx, s.Begin+int64(p.compute(rank, i))); err != nil {
				return err
			}
		}
		s.Ready = now()
		if s.Outcome, err = reducer.Reduce(ctx, data); err != nil {
			return fmt.Errorf("step %d: %w", i, err)
		}
		net.Step(data, p.Rate, divisor)
		s.Done, s.Digest = now(), digest(net.Params)
		pace.Note(s.Outcome.Late > 0, s.Outcome.Behind)
		if checkpoint {
			for j := range data {
				data[j] /= float32(divisor)
			}
			s.Mean = slices.Clone(data)
		}
		if err := emit(s); err != nil {
			return err
		}
	}
	for range p.settle() {
		clear(data)
		if _, err := reducer.Reduce(ctx, data); err != nil {
			return fmt.Errorf("hear of the last steps: %w", err)
		}
		net.Step(data, p.Rate, divisor)
	}
	last := now()
	err = emit(Step{Step: p.Rounds, Begin: last, Ready: last, Done: last, Digest: digest(net.Params), Params: net.Params})
	if err != nil {
		return err
	}
	return reducer.Leave(ctx)
}

func sleepUntil(ctx context.Context, t int64) error {
	d := time.Duration(t - now())
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

// now returns the time of the machine's monotonic clock in nanoseconds.
func now() int64 { return int64(loop.Now()) }

// digest tells parameters apart.
func digest(params []float32) uint64 {
	h := fnv.New64a()
	b := Floats(params).bytes()
	h.Write(b)
	return h.Sum64()
}

// Floats are float32 values that JSON has as base64 of their bits, little-endian.
type Floats []float32

func (f Floats) bytes() []byte {
	b := make([]byte, 0, 4*len(f))
	for _, v := range f {
		b = binary.LittleEndian.AppendUint32(b, math.Float32bits(v))
	}
	return b
}

// MarshalText writes the values.
func (f Floats) MarshalText() ([]byte, error) {
	return base64.StdEncoding.AppendEncode(nil, f.bytes()), nil
}

// UnmarshalText reads what MarshalText has written.
func (f *Floats) UnmarshalText(text []byte) error {
	b, err := base64.StdEncoding.AppendDecode(nil, text)
	if err != nil || len(b)%4 != 0 {
		return fmt.Errorf("read values: %d bytes of base64, want whole float32: %w", len(text), err)
	}
	*f = make(Floats, len(b)/4)
	for i := range *f {
		(*f)[i] = math.Float32frombits(binary.LittleEndian.Uint32(b[4*i:]))
	}
	return nil
}
