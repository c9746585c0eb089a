package train

import (
	"fmt"
	"math"
	"slices"

	"xagg/controller"
	"xagg/internal/stats"
	"xagg/lab/scenario"
)

// maxSyncError is how far the mean of a sync step may be from the exact one, relative to its norm. Quantization leaves less than a hundredth of
// it, sums of float32 in any order too.
const maxSyncError = 1e-5

// reference is what the single process comes to with a seed, and what it takes to evaluate other runs.
type reference struct {
	plan   Plan
	task   *Task
	net    *Network          // to evaluate with
	params map[int][]float32 // by step: at checkpoints and at the end
	points []Point
}

// newReference trains the single process. p is a plan of the seed in any mode. It is an error of its options where that does not converge at all.
func newReference(p Plan) (*reference, error) {
	p.Mode, p.Staleness = Single, 0
	r := &reference{
		plan: p, task: NewTask(p.Seed, p.Ranks, p.Skew), net: NewNetwork(p.Seed, Sizes), params: map[int][]float32{},
	}
	single(p, func(step int, seconds float64, params []float32) {
		r.params[step] = params
		r.points = append(r.points, r.point(step, seconds, params))
	})
	for _, point := range r.points {
		if !point.finite() {
			return nil, usagef("rate of learning %g: training diverges in a single process already: after %d steps the loss is no number; choose a smaller rate",
				p.Rate, point.Step)
		}
	}
	return r, nil
}

// point evaluates parameters.
func (r *reference) point(step int, seconds float64, params []float32) Point {
	copy(r.net.Params, params)
	p := Point{Step: step, Seconds: seconds}
	p.TrainLoss, _ = r.net.Evaluate(r.task.Train.slice(0, heldOut)) // as many are enough
	p.Loss, p.Accuracy = r.net.Evaluate(r.task.HeldOut)
	return p
}

// result is that of the single process.
func (r *reference) result() Result {
	res := Result{Mode: Single, Name: string(Single), Seed: r.plan.Seed, Gradients: r.plan.Rounds * r.plan.Ranks, Points: r.points}
	res.end()
	return res
}

// target returns the loss on held-out samples after two thirds of the steps, rounded up to hundredths: the runs that do the same but for rounding
// are to reach it at the same step.
func (r *reference) target() float64 {
	return math.Ceil(100*smooth(r.points, 2*(len(r.points)-1)/3)) / 100
}

// reach returns the first point of a curve at which the loss is at most target, nil if there is none.
func reach(points []Point, target float64) *Point {
	for i := range points {
		if smooth(points, i) <= target {
			return &points[i]
		}
	}
	return nil
}

// evaluate makes a result of the steps of all ranks. An error says what cannot be: ranks that should have the same parameters and do not, or
// a sync mean that is not the mean.
func (r *reference) evaluate(p Plan, steps [][]Step) (Result, error) {
	res := Result{Mode: p.Mode, Name: p.Name(), Staleness: p.Staleness, Seed: p.Seed}
	async := p.Mode.Consistency() == controller.ModeAsync
	observer := steps[p.Observer()]
	begin := observer[0].Begin
	chunks, late, skipped := 0, 0, 0
	for rank, own := range steps {
		begin = min(begin, own[0].Begin)
		for i, s := range own {
			if !async && s.Digest != observer[i].Digest {
				return res, fmt.Errorf("rank %d has other parameters than rank %d after step %d", rank, p.Observer(), i)
			}
			chunks += s.Chunks
			late += s.Late
			if s.Skipped {
				skipped++
			}
			res.Packets += s.Packets
			res.Resends += s.Resends
			res.Clipped += s.Clipped
		}
	}
	if chunks > 0 {
		res.Late = float64(late) / float64(chunks)
	}
	res.Skipped = float64(skipped) / float64(p.Rounds*p.Ranks)
	res.Gradients = p.Rounds*p.Ranks - skipped

	sum, gradient, batch := make([]float32, len(r.net.Params)), make([]float32, len(r.net.Params)), NewSamples(p.Batch)
	var errors []float64
	for i, s := range observer {
		if s.Params == nil {
			continue
		}
		point := r.point(i, seconds(begin, p.reached(steps, i)), s.Params)
		if !point.finite() {
			return res, fmt.Errorf("training diverges: after %d steps the loss is no number", i)
		}
		res.Points = append(res.Points, point)
		res.Distance = max(res.Distance, distance(s.Params, r.params[i], 1))
		res.LossDistance = max(res.LossDistance, math.Abs(point.Loss-r.points[len(res.Points)-1].Loss))
		if s.Mean == nil {
			continue
		}
		copy(r.net.Params, s.Params)
		p.sum(sum, gradient, r.task, r.net, batch, i)
		e := distance(s.Mean, sum, 1/float64(p.Ranks))
		if p.Mode.Consistency() == controller.ModeSync && e > maxSyncError {
			return res, fmt.Errorf("step %d: the mean that the ranks were given is %.2g of its norm off", i, e)
		}
		errors = append(errors, e)
	}
	res.MeanError = stats.Mean(errors)
	for _, own := range steps {
		last := own[len(own)-1].Params
		if last != nil {
			res.Disagreement = max(res.Disagreement, distance(last, observer[len(observer)-1].Params, 1))
		}
	}
	res.end()
	return res, nil
}

// reached returns when the parameters after so many steps were there: where all ranks have the same, at the first of them; in an async job at the
// observer, and those at the end when the last rank has added its last gradient.
func (p *Plan) reached(steps [][]Step, n int) int64 {
	if n == 0 {
		return math.MinInt64
	}
	if p.Mode.Consistency() == controller.ModeAsync && n < p.Rounds {
		return steps[p.Observer()][n-1].Done
	}
	var done []int64
	for _, own := range steps {
		done = append(done, own[n-1].Done)
	}
	if p.Mode.Consistency() == controller.ModeAsync {
		return slices.Max(done)
	}
	return slices.Min(done)
}

func seconds(from, to int64) float64 { return float64(max(to, from)-from) / 1e9 }

// tail is the number of points of a curve, the one that is asked for and those before it, whose mean is what is said of that point: batches are small, and
// losses jump from one point to the next.
const tail = 5

// smooth returns the loss at a point of a curve.
func smooth(points []Point, i int) float64 {
	return meanOf(points[max(0, i+1-tail):i+1], func(p Point) float64 { return p.Loss })
}

// end fills in what the last points say.
func (r *Result) end() {
	last := r.Points[max(0, len(r.Points)-tail):]
	r.Seconds = last[len(last)-1].Seconds
	r.Loss = meanOf(last, func(p Point) float64 { return p.Loss })
	r.TrainLoss = meanOf(last, func(p Point) float64 { return p.TrainLoss })
	r.Accuracy = meanOf(last, func(p Point) float64 { return p.Accuracy })
}

func meanOf[T any](all []T, f func(T) float64) float64 {
	var x []float64
	for _, v := range all {
		x = append(x, f(v))
	}
	return stats.Mean(x)
}

// distance returns the L2 norm of x - factor y, relative to that of factor y; 0 if there is no difference.
func distance(x, y []float32, factor float64) float64 {
	off, norm := 0.0, 0.0
	for i := range x {
		v := factor * float64(y[i])
		off += (float64(x[i]) - v) * (float64(x[i]) - v)
		norm += v * v
	}
	if off == 0 {
		return 0
	}
	return math.Sqrt(off / norm)
}

// finite reports whether the losses are numbers.
func (p *Point) finite() bool {
	sum := p.Loss + p.TrainLoss
	return !math.IsNaN(sum) && !math.IsInf(sum, 0)
}

// isSync reports whether a mode is to come to what the single process does.
func isSync(m scenario.Mode) bool { return m != Single && m.Consistency() == controller.ModeSync }
