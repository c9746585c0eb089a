package loop

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"testing"
	"time"

	"xagg/controller"
	"xagg/lab/scenario"
)

func testScenario() *scenario.Scenario {
	return &scenario.Scenario{
		Name: "test", About: "A test.", Servers: 1, Links: scenario.Links{Worker: 1_000_000_000}, Warmup: 1, Rounds: 4, Jobs: []scenario.Job{{
			Name: "train", Ranks: 3, Depth: 1, Tensors: scenario.Tensors{Sizes: []int{100, 200}},
			Compute: scenario.Compute{Mean: 4 * time.Millisecond, Backward: 0.5},
			Quorum:  &scenario.Quorum{Ranks: 2}, Async: &scenario.Async{},
		}},
	}
}

// summer is a reducer that knows all ranks' values, sums them at once and spoils the sum.
type summer struct {
	t      *testing.T
	cfg    Config
	values *scenario.Values
	parts  float64
	spoil  func(round, bucket int, sum []float32)
	round  int
	began  []time.Duration // by bucket
	left   bool
	waits  int
	behind map[int]int // by round: what its last bucket tells
}

func newSummer(t *testing.T, cfg Config) *summer {
	values, err := cfg.Scenario.NewValues(cfg.Seed, cfg.Job)
	if err != nil {
		t.Fatal(err)
	}
	return &summer{t: t, cfg: cfg, values: values, parts: 3, spoil: func(int, int, []float32) {}}
}

func (s *summer) Start(bucket int, values []float32) error {
	if bucket != len(s.began)%2 || s.left {
		s.t.Errorf("bucket %d is started after %d, left: %v", bucket, len(s.began), s.left)
	}
	offset := 100 * bucket
	sum, one := make([]float64, len(values)), make([]float32, len(values))
	for rank := range 3 {
		s.values.Fill(one, rank, s.round, offset)
		if rank == s.cfg.Rank && s.behind[s.round-1] > 0 {
			clear(one)
		}
		if rank == s.cfg.Rank && !slices.Equal(one, values) {
			s.t.Errorf("round %d: bucket %d has other values", s.round, bucket)
		}
		for i, x := range one {
			sum[i] += float64(x)
		}
	}
	for i, x := range sum {
		values[i] = float32(x * s.parts / 3) // a mean where parts is 1
	}
	s.spoil(s.round, bucket, values)
	s.began = append(s.began, Now())
	return nil
}

func (s *summer) Wait(_ context.Context, bucket int) (Outcome, error) {
	outcome := Outcome{Done: s.began[s.waits] + time.Microsecond, Packets: 10, Resends: 1, Chunks: 5, Behind: 1, Parts: s.parts}
	if s.behind[s.round] > 0 {
		outcome.Late = 2
	}
	if s.waits++; bucket == 1 {
		outcome.Behind = s.behind[s.round]
		s.round++
	}
	return outcome, nil
}

func (s *summer) Leave(context.Context) error { s.left = true; return nil }
func (s *summer) Close() error                { return nil }

// train runs a worker with a summer.
func train(t *testing.T, mode scenario.Mode, change func(*summer)) []Round {
	t.Helper()
	cfg := Config{Scenario: testScenario(), Seed: 2, Rank: 1, Mode: mode, Timeout: time.Minute}
	s := newSummer(t, cfg)
	if mode.Consistency() == controller.ModeQuorum {
		s.parts = 1
	}
	change(s)
	var rounds []Round
	if err := Run(t.Context(), cfg, s, func(r Round) error {
		rounds = append(rounds, r)
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if len(rounds) != 5 || !s.left {
		t.Fatalf("%d rounds, left: %v", len(rounds), s.left)
	}
	return rounds
}

// TestRun: rounds come one after the other, buckets when they are ready, and not before.
func TestRun(t *testing.T) {
	const ms = int64(time.Millisecond)
	var end int64
	for i, r := range train(t, "switch", func(*summer) {}) {
		if r.Round != i || r.Begin < end {
			t.Errorf("round %d is number %d, it begins at %d after %d", r.Round, i, r.Begin, end)
		}
		// 100 and 200 values in the second half of 4 ms; later only where a check took longer than that.
		if first := r.Ready[0] - 2666666; first < -1 || r.Ready[1]-r.Ready[0] < 4*ms-2666667-1 {
			t.Errorf("round %d: buckets are ready at %v", i, r.Ready)
		}
		for b := range r.Done {
			if r.Done[b] < r.Ready[b] {
				t.Errorf("round %d: bucket %d is ready at %d and started before, at %d", i, b, r.Ready[b], r.Done[b]-1000)
			}
		}
		if r.Packets != 20 || r.Resends != 2 || r.Chunks != 10 || r.Late != 0 || r.Error > 1e-7 {
			t.Errorf("round %d: %+v", i, r)
		}
		if r.Took() != time.Duration(r.Done[1]) || r.Comm() > r.Took() || r.Comm() < 2*time.Microsecond {
			t.Errorf("round %d: took %v, communication %v", i, r.Took(), r.Comm())
		}
		end = r.Begin + int64(r.Took())
	}
}

// TestSkip: a rank that is late, and behind after the last bucket of a round, computes nothing in the next ones and gives zeros, until one is in
// time. One that is behind after another bucket is not: others are through with a part of the round only.
func TestSkip(t *testing.T) {
	for i, r := range train(t, "server/quorum", func(s *summer) { s.behind = map[int]int{1: 2, 2: 7} }) {
		want := i == 2 || i == 3
		if r.Skipped != want || (r.Ready[0] == r.Ready[1]) != want {
			t.Errorf("round %d: skipped: %v, ready at %v", i, r.Skipped, r.Ready)
		}
		// What a rank gives does not count where it skips, so that the sums lack something from then on.
		if (r.Error > 0.01) != (i >= 2) {
			t.Errorf("round %d: error %g", i, r.Error)
		}
	}
}

// TestError: a wrong value is in the error of its round; in modes that do not wait for all, errors of rounds make up for each
// other.
func TestError(t *testing.T) {
	norm := func(rounds ...int) float64 {
		cfg := Config{Scenario: testScenario(), Seed: 2}
		v, err := cfg.Scenario.NewValues(2, 0)
		if err != nil {
			t.Fatal(err)
		}
		sums := make([]float64, 300)
		for _, round := range rounds {
			v.Sums(round, 0, 300, func(at int, factor float64, x []float64) {
				for i := range x {
					sums[at+i] += factor * x[i]
				}
			})
		}
		squares := 0.0
		for _, x := range sums {
			squares += x * x
		}
		return math.Sqrt(squares)
	}
	// Value 7 of the second bucket is wrong by that in round 2, and by the opposite in round 3.
	const off = 0.5
	spoil := func(s *summer) {
		s.spoil = func(round, bucket int, sum []float32) {
			if bucket == 1 && round == 2 {
				sum[7] += off * float32(s.parts) / 3
			} else if bucket == 1 && round == 3 {
				sum[7] -= off * float32(s.parts) / 3
			}
		}
	}
	for mode, want := range map[scenario.Mode][]float64{
		"switch":        {0, 0, off / norm(2), off / norm(3), 0},
		"server/quorum": {0, 0, off / norm(0, 1, 2), 0, 0},
		"server/async":  {0, 0, off / norm(0, 1, 2), 0, 0},
	} {
		for i, r := range train(t, mode, spoil) {
			if math.Abs(r.Error-want[i]) > 1e-6*(1+want[i]) {
				t.Errorf("%s, round %d: error %g, want %g", mode, i, r.Error, want[i])
			}
		}
	}
}

// TestStale: the sum of another round is noticed, whatever round it is.
func TestStale(t *testing.T) {
	var last []float32
	for i, r := range train(t, "tcp", func(s *summer) {
		s.spoil = func(round, bucket int, sum []float32) {
			if bucket == 0 {
				this := slices.Clone(sum)
				if last != nil {
					copy(sum, last)
				}
				last = this
			}
		}
	}) {
		if (r.Error > 0.1) != (i > 0) {
			t.Errorf("round %d: error %g", i, r.Error)
		}
	}
}

// TestRunFails: errors say where, and end the run.
func TestRunFails(t *testing.T) {
	cfg := Config{Scenario: testScenario(), Seed: 2, Rank: 1, Mode: "tcp", Timeout: 10 * time.Millisecond}
	ctx, cancel := context.WithCancelCause(t.Context())
	for at, want := range map[string]string{
		"start":   "round 0: bucket 0: cannot start",
		"wait":    "round 0: bucket 1: cannot wait",
		"silence": "round 0: bucket 1: context deadline exceeded",
		"leave":   "leave: cannot leave",
		"take":    "round 1: cannot take",
	} {
		err := Run(ctx, cfg, &failer{newSummer(t, cfg), at}, func(Round) error {
			if at == "take" {
				return errors.New("cannot take")
			}
			return nil
		})
		if err == nil || err.Error() != want {
			t.Errorf("%s: %v, want %s", at, err, want)
		}
	}
	why := errors.New("enough")
	cancel(why)
	if err := Run(ctx, cfg, newSummer(t, cfg), func(Round) error { return nil }); !errors.Is(err, why) {
		t.Errorf("%v, want %v", err, why)
	}
}

// failer is a summer that fails in one of its methods.
type failer struct {
	*summer
	at string
}

func (f *failer) Start(bucket int, values []float32) error {
	if f.at == "start" {
		return errors.New("cannot start")
	}
	return f.summer.Start(bucket, values)
}

func (f *failer) Wait(ctx context.Context, bucket int) (Outcome, error) {
	switch {
	case f.at == "wait" && bucket == 1:
		return Outcome{}, errors.New("cannot wait")
	case f.at == "silence" && bucket == 1:
		<-ctx.Done()
		return Outcome{}, ctx.Err()
	}
	return f.summer.Wait(ctx, bucket)
}

func (f *failer) Leave(ctx context.Context) error {
	if f.at == "leave" {
		return errors.New("cannot leave")
	}
	return f.summer.Leave(ctx)
}

// TestClock: the clock is the one that time.Now has, and sleeping ends when it should, not before.
func TestClock(t *testing.T) {
	before := Now()
	now := time.Now()
	after := Now()
	if at := At(now); at < before-time.Microsecond || at > after+time.Microsecond {
		t.Errorf("%v is not between %v and %v", at, before, after)
	}
	for _, d := range []time.Duration{-time.Second, 0, 100 * time.Microsecond, 5 * time.Millisecond} {
		until := Now() + d
		if err := sleep(t.Context(), until); err != nil || Now() < until {
			t.Errorf("slept for %v: %v, too short by %v", d, err, until-Now())
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if err := sleep(ctx, Now()+time.Hour); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("slept until %v", err)
	}
}

func ExampleRound_Comm() {
	r := Round{Ready: []int64{10, 20, 50}, Done: []int64{15, 40, 45}} // the third result was there before it was needed
	fmt.Println(r.Comm().Nanoseconds(), r.Took().Nanoseconds())
	// Output: 25 50
}
