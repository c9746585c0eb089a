package loop

import (
	"context"
	"fmt"
	"math"
	"slices"
	"time"

	"xagg/controller"
	"xagg/lab/scenario"
)

// Config says which worker of an experiment this is.
type Config struct {
	Scenario *scenario.Scenario
	Seed     uint64
	Job      int // of Scenario.Jobs
	Rank     int
	Mode     scenario.Mode
	Timeout  time.Duration // of waiting for a bucket; 0 = none
}

// Run trains: for all rounds it computes, has buckets summed, and hands what came of it to take, which keeps nothing of it.
// Then it leaves. A rank that is late for good skips rounds, see [Pace] and [Round.Skipped]. All ranks must have come together before, so that their first computations begin at the same time.
//
// What a round's sums are worth is looked at while the next round computes, so that it is not measured. Only where the
// computation is shorter than that it begins later by the rest.
func Run(ctx context.Context, cfg Config, reducer Reducer, take func(Round) error) error {
	l, err := newLoop(cfg, reducer)
	if err != nil {
		return err
	}
	var last *Round // not taken yet
	for round := range cfg.Scenario.Warmup + cfg.Scenario.Rounds {
		r, err := l.round(ctx, round, func() error {
			return l.check(last, take)
		})
		if err != nil {
			return fmt.Errorf("round %d: %w", round, err)
		}
		last = r
	}
	if err := l.check(last, take); err != nil {
		return err
	}
	if err := reducer.Leave(ctx); err != nil {
		return fmt.Errorf("leave: %w", err)
	}
	return nil
}

// loop is a worker under way.
type loop struct {
	Config
	reducer Reducer
	values  *scenario.Values
	buckets [][]float32
	offsets []int // of the buckets in the round's values
	parts   []float64
	pace    Pace
	// sums are all results so far, added up, and exact what they would be if all had waited for everybody: of modes that do
	// not wait.
	sums, exact []float64
}

func newLoop(cfg Config, reducer Reducer) (*loop, error) {
	l := &loop{Config: cfg, reducer: reducer}
	var err error
	if l.values, err = cfg.Scenario.NewValues(cfg.Seed, cfg.Job); err != nil {
		return nil, err
	}
	all := 0
	for _, n := range cfg.Scenario.Jobs[cfg.Job].Tensors.Buckets() {
		l.buckets = append(l.buckets, make([]float32, n))
		l.offsets = append(l.offsets, all)
		all += n
	}
	l.parts = make([]float64, len(l.buckets))
	if cfg.Mode.Consistency() != controller.ModeSync {
		l.sums, l.exact = make([]float64, all), make([]float64, all)
	}
	return l, nil
}

// round carries out a round. meanwhile is what is to be done while it computes, before it touches its values.
func (l *loop) round(ctx context.Context, number int, meanwhile func() error) (*Round, error) {
	begin := Now()
	if err := meanwhile(); err != nil {
		return nil, err
	}
	var compute time.Duration
	for b, values := range l.buckets {
		if l.pace.Skip() {
			clear(values)
		} else {
			l.values.Fill(values, l.Rank, number, l.offsets[b])
		}
	}
	if !l.pace.Skip() {
		compute = l.Scenario.Compute(l.Seed, l.Job, l.Rank, number)
	}
	ready := l.Scenario.Ready(l.Job, compute)
	late := max(0, Now()-begin-ready[0])
	r := &Round{
		Round: number, Begin: int64(begin), Ready: make([]int64, len(ready)), Done: make([]int64, len(ready)), Skipped: l.pace.Skip(),
	}
	for b, values := range l.buckets {
		at := ready[b] + late
		if err := sleep(ctx, begin+at); err != nil {
			return nil, err
		}
		r.Ready[b] = int64(at)
		if err := l.reducer.Start(b, values); err != nil {
			return nil, fmt.Errorf("bucket %d: %w", b, err)
		}
	}
	behind := 0
	for b := range l.buckets {
		outcome, err := l.wait(ctx, b)
		if err != nil {
			return nil, fmt.Errorf("bucket %d: %w", b, err)
		}
		r.Done[b] = int64(outcome.Done - begin)
		r.Packets += outcome.Packets
		r.Resends += outcome.Resends
		r.Chunks += outcome.Chunks
		r.Late += outcome.Late
		l.parts[b] = outcome.Parts
		behind = outcome.Behind // of the last bucket: by a round at least
	}
	l.pace.Note(r.Late > 0, behind)
	return r, nil
}

func (l *loop) wait(ctx context.Context, bucket int) (Outcome, error) {
	if l.Timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, l.Timeout)
		defer cancel()
	}
	return l.reducer.Wait(ctx, bucket)
}

// check finds out how far the results of the round are from exact ones, and hands the round on.
func (l *loop) check(r *Round, take func(Round) error) error {
	if r == nil {
		return nil
	}
	ranks := float64(l.Scenario.Jobs[l.Job].Ranks)
	var off, norm float64 // squares
	for b, values := range l.buckets {
		// The mean of those that were in time is taken for what all of them would have summed.
		unit := ranks / l.parts[b]
		l.values.Sums(r.Round, l.offsets[b], len(values), func(at int, factor float64, sums []float64) {
			for i, x := range sums {
				got, want := float64(values[at+i])*unit, factor*x
				if l.sums != nil {
					to := l.offsets[b] + at + i
					l.sums[to] += got
					l.exact[to] += want
					got, want = l.sums[to], l.exact[to]
				}
				off += (got - want) * (got - want)
				norm += want * want
			}
		})
	}
	if norm > 0 {
		r.Error = math.Sqrt(off / norm)
	}
	return take(*r)
}

// Comm returns the round's communication time: how long at least one gradient was ready whose result was not usable.
func (r *Round) Comm() time.Duration { return scenario.Busy(durations(r.Ready), durations(r.Done)) }

// Took returns the time from the beginning of the computation to the last result.
func (r *Round) Took() time.Duration {
	return time.Duration(max(slices.Max(r.Ready), slices.Max(r.Done)))
}

func durations(ns []int64) []time.Duration {
	d := make([]time.Duration, len(ns))
	for i := range ns {
		d[i] = time.Duration(ns[i])
	}
	return d
}
