package train

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"math"
	"math/bits"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"xagg/lab/scenario"
	"xagg/lab/testbed"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// small are options of runs that take no time: nobody computes for longer than it takes.
func small(t *testing.T, modes ...scenario.Mode) Options {
	return Options{
		Plan:  Plan{Seed: 5, Ranks: 4, Rounds: 40, Batch: 16, Rate: 0.2, Skew: 0.5, Every: 1},
		Modes: modes, Stalenesses: []int{0, 2, 8}, Seeds: 1, Wait: 2 * time.Millisecond, Lab: LabMemory, Switch: testbed.SwitchEngine,
		Log: slog.New(slog.DiscardHandler), Progress: t.Logf,
	}
}

// quantized trains in one process with sums as the network makes them (docs/protocol.md, "Scale"): values are rounded to integers of a scale that the
// largest value of the step before gives. It returns the parameters before each step and at the end, and the exponents.
func quantized(p Plan) (params [][]float32, exponents []int) {
	task, net, batch := NewTask(p.Seed, p.Ranks, p.Skew), NewNetwork(p.Seed, Sizes), NewSamples(p.Batch)
	n := len(net.Params)
	gradients, rest := make([][]float32, p.Ranks), make([][]float32, p.Ranks)
	for rank := range gradients {
		gradients[rank], rest[rank] = make([]float32, n), make([]float32, n)
	}
	limit := float64(math.MaxInt32 / p.Ranks)
	before := 0.0 // the largest value of the step before
	for step := range p.Rounds {
		params = append(params, slices.Clone(net.Params))
		largest := 0.0
		for rank, g := range gradients {
			task.Batch(batch, rank, step)
			net.Gradient(g, batch)
			for i := range g {
				g[i] += rest[rank][i]
				rest[rank][i] = 0
				largest = max(largest, math.Abs(float64(g[i])))
			}
		}
		if step == 0 {
			before = largest // a scout has told it
		}
		_, e := math.Frexp(before) // before < 2^e
		exponent := 31 - e - bits.Len(uint(p.Ranks-1)) - 3
		exponents = append(exponents, exponent)
		sum := make([]float32, n)
		for i := range sum {
			total := int64(0)
			for rank, g := range gradients {
				v := math.Ldexp(float64(g[i]), exponent)
				lane := math.RoundToEven(v)
				if math.Abs(lane) > limit {
					lane = math.Copysign(limit, v)
					rest[rank][i] = float32(math.Ldexp(v-lane, -exponent))
				}
				total += int64(lane)
			}
			sum[i] = float32(math.Ldexp(float64(total), -exponent))
		}
		for i := range sum {
			net.Params[i] += sum[i] * float32(-p.Rate/float64(p.Ranks))
		}
		before = largest
	}
	return append(params, net.Params), exponents
}

// TestSyncIsTheSingleProcess: a gradient counts 1/N, once. Training through every sync mode is, bit by bit, what one process does that quantizes and sums by plain
// loops and divides by N; and it is what one process does that does not quantize, up to what quantization may change: each value of the mean of a
// step is within half of 2^-exponent, and float32's own rounding, of the exact mean of the same gradients. So training follows the
// single process.
func TestSyncIsTheSingleProcess(t *testing.T) {
	opts := small(t, "switch", "server", "hybrid", "tcp")
	opts.Rounds = 16
	if err := opts.validate(); err != nil {
		t.Fatal(err)
	}
	b := start(t, &opts)
	ref, err := newReference(opts.Plan)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range opts.plans(0) {
		t.Run(p.Name(), func(t *testing.T) {
			steps, err := workers(t.Context(), b, &opts, p)
			if err != nil {
				t.Fatal(err)
			}
			want, exponents := quantized(p)
			task, net, batch, gradient := NewTask(p.Seed, p.Ranks, p.Skew), NewNetwork(p.Seed, Sizes), NewSamples(p.Batch), make([]float32, len(want[0]))
			for i, s := range steps[0] {
				if p.Mode != "tcp" && !slices.Equal(s.Params, want[i]) {
					t.Fatalf("after %d steps the parameters are not those of the process that quantizes", i)
				}
				for rank := range steps {
					if steps[rank][i].Digest != s.Digest {
						t.Fatalf("rank %d has other parameters than rank 0 after step %d", rank, i)
					}
				}
				if i == p.Rounds {
					continue
				}
				half := 0.0
				if p.Mode != "tcp" {
					if int(s.Exponent) != exponents[i] || s.Clipped > 0 && i == 0 {
						t.Errorf("step %d: exponent %d with %d values clipped, want %d", i, s.Exponent, s.Clipped, exponents[i])
					}
					half = math.Ldexp(0.5, -int(s.Exponent))
				}
				exact, size := make([]float64, len(gradient)), make([]float64, len(gradient))
				copy(net.Params, s.Params)
				for rank := range p.Ranks {
					task.Batch(batch, rank, i)
					net.Gradient(gradient, batch)
					for j, v := range gradient {
						exact[j] += float64(v) / float64(p.Ranks)
						size[j] += math.Abs(float64(v)) / float64(p.Ranks)
					}
				}
				for j := range exact {
					if off := math.Abs(float64(s.Mean[j]) - exact[j]); off > half+size[j]*float64(p.Ranks+1)*0x1p-24 {
						t.Fatalf("step %d: value %d of the mean is %g, %g off the exact one; half of 2^-exponent is %g", i, j, s.Mean[j], off, half)
					}
				}
			}
			res, err := ref.evaluate(p, steps)
			if err != nil {
				t.Fatal(err)
			}
			t.Logf("parameters within %.2g of the single process's, losses within %.2g, mean of a step within %.2g", res.Distance, res.LossDistance, res.MeanError)
			if res.Distance == 0 || res.Distance > 1e-5 || res.LossDistance > 1e-5 || res.MeanError > 1e-6 {
				t.Error("that is not the training of the single process")
			}
		})
	}
}

func start(t *testing.T, opts *Options) bed {
	t.Helper()
	b, err := startLab(t.Context(), opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := b.close(); err != nil {
			t.Error(err)
		}
	})
	return b
}

// TestPitfall40: training converges with a straggler in all modes: in the end the loss is a small part of the one at the start, and not far above that
// of the single process, and ranks that do not get the same results have the same parameters once they have been told everything.
func TestPitfall40(t *testing.T) {
	opts := small(t, "hybrid", "server/quorum", "hybrid/quorum", "server/async")
	opts.Rounds, opts.Every = 60, 10
	opts.Compute = scenario.Compute{Mean: 2 * time.Millisecond, Slow: map[int]float64{3: 3}, Jitter: 0.1}
	opts.Wait = time.Millisecond
	report, err := Run(t.Context(), opts)
	if err != nil {
		t.Fatal(err)
	}
	single := report.Runs[0]
	if single.Mode != Single || single.Points[0].Loss < 2*single.Loss || single.Accuracy < 0.6 {
		t.Fatalf("the single process does not learn: %+v", single)
	}
	if n := len(report.Runs); n != 7 || !report.Complete {
		t.Fatalf("%d runs, complete: %v; want the single process and 6 others", n, report.Complete)
	}
	for _, run := range report.Runs[1:] {
		t.Logf("%s: loss %.3f of %.3f, accuracy %.3f of %.3f, late %.3f, skipped %.3f, mean off by %.2g, ranks apart by %.2g", run.Name, run.Loss, single.Loss,
			run.Accuracy, single.Accuracy, run.Late, run.Skipped, run.MeanError, run.Disagreement)
		quorum := strings.Contains(run.Name, "quorum")
		switch {
		case run.Failed != "":
			t.Errorf("%s: %s", run.Name, run.Failed)
		case run.Loss > 1.5*single.Loss || run.Accuracy < single.Accuracy-0.12:
			t.Errorf("%s: loss %.3f and accuracy %.3f, the single process has %.3f and %.3f", run.Name, run.Loss, run.Accuracy, single.Loss, single.Accuracy)
		case run.Mode == "hybrid" && run.Distance > 1e-5:
			t.Errorf("%s: parameters are %g of their norm off those of the single process", run.Name, run.Distance)
		case run.Disagreement > 1e-5:
			t.Errorf("%s: the ranks' parameters are %g of their norm apart", run.Name, run.Disagreement)
		case quorum != (run.Late > 0) || quorum != (run.Skipped > 0) || quorum != (run.Gradients < opts.Rounds*opts.Ranks):
			t.Errorf("%s: %.2f late, %.2f skipped, %d gradients", run.Name, run.Late, run.Skipped, run.Gradients)
		case run.Skipped > 0.5: // the straggler's own steps are a quarter
			t.Errorf("%s: %.2f of all steps were skipped", run.Name, run.Skipped)
		}
	}
}

// plain sums by hand: all ranks meet, and each gets the sum.
type plain struct {
	mu    sync.Mutex
	ranks int
	given [][]float32
	open  chan struct{}
	sum   []float32
}

// at is a rank's end of it.
type at struct {
	*plain
	rank int
}

func (r at) Reduce(_ context.Context, data []float32) (Outcome, error) {
	r.mu.Lock()
	if r.given == nil {
		r.given, r.open = make([][]float32, r.ranks), make(chan struct{})
	}
	r.given[r.rank] = slices.Clone(data)
	open, all := r.open, true
	for _, g := range r.given {
		all = all && g != nil
	}
	if all {
		r.sum = make([]float32, len(data))
		for _, g := range r.given {
			for i, v := range g {
				r.sum[i] += v
			}
		}
		r.given = nil
		close(open)
	}
	r.mu.Unlock()
	<-open
	copy(data, r.sum) // nobody closes the next one before this rank has given for it
	return Outcome{}, nil
}

func (r at) Leave(context.Context) error { return nil }
func (r at) Abort(error)                 {}
func (r at) Close() error                { return nil }

// TestWork: with plain sums all ranks come to the parameters of the single process to the bit, at every checkpoint, and compute for as long as they are
// to.
func TestWork(t *testing.T) {
	p := small(t).Plan
	p.Mode, p.Rounds, p.Every = "tcp", 12, 5
	p.Compute = scenario.Compute{Mean: 3 * time.Millisecond, Slow: map[int]float64{0: 2}}
	want := map[int][]float32{}
	single(p, func(step int, seconds float64, params []float32) {
		want[step] = slices.Clone(params)
		if math.Abs(seconds-0.006*float64(step)) > 1e-9 {
			t.Errorf("%d steps take %g s, want 6 ms each", step, seconds)
		}
	})
	if len(want) != 4 { // 0, 5, 10, 12
		t.Errorf("%d checkpoints", len(want))
	}
	sums := &plain{ranks: p.Ranks}
	steps := make([][]Step, p.Ranks)
	err := eachRank(t.Context(), p.Ranks, func(ctx context.Context, rank int) error {
		return Work(ctx, p, rank, at{sums, rank}, func(s Step) error {
			steps[rank] = append(steps[rank], s)
			return nil
		})
	})
	if err != nil {
		t.Fatal(err)
	}
	for rank, own := range steps {
		if len(own) != p.Rounds+1 {
			t.Fatalf("rank %d: %d steps", rank, len(own))
		}
		for i, s := range own {
			if i < p.Rounds && s.Ready-s.Begin < int64(p.compute(rank, i)) {
				t.Errorf("rank %d computes for %v, want %v", rank, time.Duration(s.Ready-s.Begin), p.compute(rank, i))
			}
			if checkpoint := i == p.Rounds || rank == p.Observer() && i%p.Every == 0; checkpoint != (s.Params != nil) {
				t.Errorf("rank %d, step %d: parameters %v", rank, i, s.Params != nil)
			}
			if s.Params != nil && !slices.Equal(s.Params, want[i]) {
				t.Errorf("rank %d has other parameters after %d steps than the single process", rank, i)
			}
		}
	}
	ref, err := newReference(p)
	if err != nil {
		t.Fatal(err)
	}
	res, err := ref.evaluate(p, steps)
	if err != nil || res.Distance != 0 || len(res.Points) != 4 || res.Points[3].Loss != ref.points[3].Loss || res.Seconds < 0.072 {
		t.Errorf("%+v, %v: want the curve of the single process", res, err)
	}
	// What cannot be is an error.
	steps[2][7].Digest++
	if _, err := ref.evaluate(p, steps); err == nil || !strings.Contains(err.Error(), "rank 2 has other parameters than rank 1 after step 7") {
		t.Errorf("a rank with other parameters: %v", err)
	}
	steps[2][7].Digest--
	steps[1][5].Mean[100] += 1e-3
	if _, err := ref.evaluate(p, steps); err == nil || !strings.Contains(err.Error(), "step 5: the mean") {
		t.Errorf("a mean that is none: %v", err)
	}
	steps[1][5].Mean[100] -= 1e-3
	steps[1][5].Params[0] = float32(math.NaN())
	if _, err := ref.evaluate(p, steps); err == nil || !strings.Contains(err.Error(), "diverges") {
		t.Errorf("parameters that are no numbers: %v", err)
	}
}

// TestInterrupted: when its context ends a run ends soon, and the report has what was finished before.
func TestInterrupted(t *testing.T) {
	opts := small(t, "switch", "server", "hybrid")
	opts.Every = 20
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	opts.Progress = func(format string, args ...any) {
		if line := fmt.Sprintf(format, args...); strings.Contains(line, "run 1 of 3") {
			cancel()
		}
	}
	report, err := Run(ctx, opts)
	if err != nil {
		t.Fatal(err)
	}
	if len(report.Runs) != 2 || report.Runs[1].Mode != "switch" || report.Complete || len(report.Modes) != 2 {
		t.Errorf("%d runs, complete: %v; want the single process and one more", len(report.Runs), report.Complete)
	}
	var text strings.Builder
	if err := report.WriteTable(&text); err != nil || !strings.Contains(text.String(), "Interrupted") {
		t.Errorf("%v:\n%s", err, &text)
	}
}

// TestReport: the summary is the mean over seeds, failed runs are left out, and a difference is resolved where seeds agree about it.
func TestReport(t *testing.T) {
	opts := small(t)
	r := newReport(&opts)
	curve := func(losses ...float64) (points []Point) {
		for i, l := range losses {
			points = append(points, Point{Step: 10 * i, Seconds: float64(i), Loss: l, Accuracy: 1 - l/10})
		}
		return points
	}
	add := func(mode scenario.Mode, seed uint64, failed string, losses ...float64) {
		res := Result{Mode: mode, Name: string(mode), Seed: seed, Failed: failed, Points: curve(losses...)}
		if failed == "" {
			res.end()
		}
		r.add(res, 2)
	}
	for seed := range uint64(2) {
		add(Single, seed, "", 4, 3, 1, 1, 1, 1, 1)
		add("switch", seed, "", 4, 3, 1, 1, 1, 1, 1)
		add("server/quorum", seed, "", 4, 3, 2, 1.5, 1.5, 1.5, 1.5+float64(seed))
	}
	add("hybrid/quorum", 0, "", 4, 3, 2.5, 2.5, 2.5, 2.5, 2.5)
	add("hybrid/quorum", 1, "a worker died")
	r.Complete = true
	r.summarize()
	for _, c := range []struct {
		got, want any
	}{
		{len(r.Modes), 4}, {r.Modes[0].Mode, Single}, {r.Modes[2].Reached, 2}, {r.Modes[2].StepsToTarget.Mean, 50.}, {r.Modes[2].SecondsToTarget.Mean, 5.},
		{r.Modes[2].Resolved, false}, {r.Modes[1].Resolved, false}, {r.Modes[3].Resolved, false}, {math.Round(100 * r.Modes[2].StepsRatio.Ratio), 125.},
		{r.Modes[2].TimeRatio.Resolved, true}, {r.Modes[2].TimeRatio.To, "switch"}, {r.Modes[1].TimeRatio, (*Ratio)(nil)}, {r.Modes[3].StepsRatio, (*Ratio)(nil)}, {r.Modes[3].Runs, 1}, {r.Modes[3].Failed, 1}, {r.Modes[3].Reached, 0}, {r.Failed(), true},
	} {
		if c.got != c.want {
			t.Errorf("got %v, want %v", c.got, c.want)
		}
	}
	if w := r.Modes[2].Worse; math.Abs(w.Mean-0.7) > 1e-9 || math.Abs(w.SD-0.2/math.Sqrt2) > 1e-9 {
		t.Errorf("loss is larger by %+v, want 0.7 with a deviation of 0.1414", w)
	}
	var text, raw strings.Builder
	if err := r.WriteTable(&text); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"server/quorum: in the end a loss +0.700 ± 1.271 beside the single process (95 % confidence): no difference is resolved",
		"steps to target 1.25 times that of single (1.25 to 1.25)", "hybrid/quorum: in the end a loss +1.500 beside the single process: one seed says nothing", "hybrid/quorum, seed 1: failed: a worker died", "- (0 of 1)",
		"switch: the same training as in one process"} {
		if !strings.Contains(text.String(), want) {
			t.Errorf("no %q in\n%s", want, &text)
		}
	}
	worse := Summary{Mode: "server/async", Runs: 3, Worse: Spread{Mean: 0.2}, Interval: 0.1, Resolved: true}
	if said := worse.verdict(); said != "converges worse: in the end a loss +0.200 ± 0.100 beside the single process (95 % confidence)" {
		t.Errorf("%q", said)
	}
	if err := r.WriteJSON(&raw); err != nil {
		t.Fatal(err)
	}
	var back Report
	if err := json.Unmarshal([]byte(raw.String()), &back); err != nil || back.SchemaVersion != SchemaVersion || len(back.Runs) != 8 || len(back.Runs[2].Points) != 7 {
		t.Errorf("%v: %s", err, raw.String())
	}
}

// TestValidate: what does not fit is refused in words.
func TestValidate(t *testing.T) {
	for want, change := range map[string]func(*Options){
		"2 workers: want 3 to 64":              func(o *Options) { o.Ranks = 2 },
		"1 rounds: want 2":                     func(o *Options) { o.Rounds = 1 },
		"batch of 0: want 1":                   func(o *Options) { o.Batch = 0 },
		"rate of learning 0":                   func(o *Options) { o.Rate = 0 },
		"diverges in a single process":         func(o *Options) { o.Rate = 100 },
		"skew 1.5":                             func(o *Options) { o.Skew = 1.5 },
		"checkpoint every 41 rounds: want 1":   func(o *Options) { o.Every = 41 },
		"0 seeds":                              func(o *Options) { o.Seeds = 0 },
		"target loss -1":                       func(o *Options) { o.Target = -1 },
		"computation of -1s":                   func(o *Options) { o.Compute.Mean = -time.Second },
		"jitter 3":                             func(o *Options) { o.Compute.Jitter = 3 },
		"rank 4 computes slower by 2":          func(o *Options) { o.Compute.Slow = map[int]float64{4: 2} },
		"rank 0 computes slower by NaN":        func(o *Options) { o.Compute.Slow = map[int]float64{0: math.NaN()} },
		"moves every 0 rounds":                 func(o *Options) { o.Compute.Moving = &scenario.Moving{Factor: 2} },
		"quorum 5: want 1 to 4":                func(o *Options) { o.Quorum = 5 },
		"wait 1ns":                             func(o *Options) { o.Wait = 1 },
		`switch "moon"`:                        func(o *Options) { o.Switch = "moon" },
		"simple_switch_grpc needs --lab netns": func(o *Options) { o.Switch = testbed.SwitchSimpleSwitch },
		`lab "moon"`:                           func(o *Options) { o.Lab = "moon" },
		"mode ring: training runs through":     func(o *Options) { o.Modes = []scenario.Mode{"ring"} },
		"staleness -1":                         func(o *Options) { o.Stalenesses = []int{-1} },
	} {
		opts := small(t, "switch")
		opts.Every = 20
		change(&opts)
		if _, err := Run(t.Context(), opts); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}

// TestFloats: parameters are the same to the bit after their way through JSON.
func TestFloats(t *testing.T) {
	want := Floats{0, float32(math.Copysign(0, -1)), math.SmallestNonzeroFloat32, -math.MaxFloat32, 0.1, float32(math.Inf(1))}
	text, err := json.Marshal(Step{Params: want})
	if err != nil {
		t.Fatal(err)
	}
	var s Step
	if err := json.Unmarshal(text, &s); err != nil || digest(s.Params) != digest(want) || s.Mean != nil {
		t.Errorf("%v, %v: want %v", s.Params, err, want)
	}
	for _, bad := range []string{`{"params":"AAAA"}`, `{"params":"*"}`} {
		if err := json.Unmarshal([]byte(bad), &s); err == nil {
			t.Errorf("%s is taken", bad)
		}
	}
}
