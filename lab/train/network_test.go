package train

import (
	"math"
	"slices"
	"testing"
)

// lossOf computes a network's mean loss in float64 by plain loops that know nothing of the network's own.
func lossOf(sizes []int, params []float64, s Samples) float64 {
	total := 0.0
	for i, label := range s.Labels {
		var x []float64
		for _, v := range s.X[i*sizes[0] : (i+1)*sizes[0]] {
			x = append(x, float64(v))
		}
		p := params
		for l := 1; l < len(sizes); l++ {
			y := make([]float64, sizes[l])
			biases := p[sizes[l]*sizes[l-1]:]
			for j := range y {
				y[j] = biases[j]
				for k, v := range x {
					y[j] += p[j*len(x)+k] * v
				}
				if l < len(sizes)-1 {
					y[j] = math.Max(y[j], 0)
				}
			}
			x, p = y, biases[sizes[l]:]
		}
		sum := 0.0
		for _, v := range x {
			sum += math.Exp(v)
		}
		total += math.Log(sum) - x[label]
	}
	return total / float64(len(s.Labels))
}

// TestGradient: backpropagation agrees with differences of the loss, for every parameter, at the start and after some steps.
func TestGradient(t *testing.T) {
	sizes := []int{Inputs, 7, 5, Classes}
	task := NewTask(3, 4, 0)
	batch := NewSamples(19)
	if got := len(NewNetwork(3, Sizes).Params); got != Parameters {
		t.Errorf("the network has %d parameters, want %d", got, Parameters)
	}
	n := NewNetwork(3, sizes)
	grad := make([]float32, len(n.Params))
	for round := range 40 {
		task.Batch(batch, 0, round)
		loss := n.Gradient(grad, batch)
		if round%13 == 0 {
			params := make([]float64, len(n.Params))
			for i, v := range n.Params {
				params[i] = float64(v)
			}
			if want := lossOf(sizes, params, batch); math.Abs(loss-want) > 1e-5*want {
				t.Errorf("round %d: loss %g, want %g", round, loss, want)
			}
			for i, got := range grad {
				const h = 1e-6
				at := params[i]
				params[i] = at + h
				up := lossOf(sizes, params, batch)
				params[i] = at - h
				down := lossOf(sizes, params, batch)
				params[i] = at
				if want := (up - down) / (2 * h); math.Abs(float64(got)-want) > 1e-5*(1+math.Abs(want)) {
					t.Errorf("round %d: derivative by parameter %d is %g, want %g", round, i, got, want)
				}
			}
		}
		n.Step(grad, 0.2, 1)
	}
}

// TestTask: the task is the same for the same seed and another for another, a rank's batches depend on rank and round alone,
// and the skew is what it says.
func TestTask(t *testing.T) {
	a, b, c := NewTask(1, 4, 0.5), NewTask(1, 4, 0.5), NewTask(2, 4, 0.5)
	if !slices.Equal(a.Train.X, b.Train.X) || !slices.Equal(a.HeldOut.X, b.HeldOut.X) || slices.Equal(a.Train.X, c.Train.X) {
		t.Error("a task is not its seed's")
	}
	if slices.Equal(a.Train.X[:Inputs*heldOut], a.HeldOut.X) {
		t.Error("what is held out is in the training set")
	}
	x, y := NewSamples(32), NewSamples(32)
	a.Batch(x, 1, 7)
	b.Batch(y, 1, 7)
	if !slices.Equal(x.X, y.X) || !slices.Equal(x.Labels, y.Labels) {
		t.Error("one rank and round have two batches")
	}
	for _, other := range [][2]int{{2, 7}, {1, 8}} {
		if b.Batch(y, other[0], other[1]); slices.Equal(x.X, y.X) {
			t.Errorf("rank %d, round %d has another's batch", other[0], other[1])
		}
	}
	for _, skew := range []float64{0, 0.5, 1} {
		task, batch, own, all := NewTask(1, 4, skew), NewSamples(64), 0, 0
		for round := range 100 {
			for rank := range 4 {
				task.Batch(batch, rank, round)
				for _, label := range batch.Labels {
					if all++; label%4 == rank {
						own++
					}
				}
			}
		}
		if got, want := float64(own)/float64(all), skew+(1-skew)/4; math.Abs(got-want) > 0.01 {
			t.Errorf("skew %g: %.3f of the samples are of a rank's own classes, want %.3f", skew, got, want)
		}
	}
}

// TestTaskIsHard: without hidden layers a network does much worse than with them, and no network gets everything right.
func TestTaskIsHard(t *testing.T) {
	accuracy := func(seed uint64, sizes []int) float64 {
		task, n, batch := NewTask(seed, 1, 0), NewNetwork(seed, sizes), NewSamples(64)
		grad := make([]float32, len(n.Params))
		for round := range 700 {
			task.Batch(batch, 0, round)
			n.Gradient(grad, batch)
			n.Step(grad, 0.1, 1)
		}
		_, accuracy := n.Evaluate(task.HeldOut)
		return accuracy
	}
	flat, deep := accuracy(1, []int{Inputs, Classes}), accuracy(1, Sizes)
	t.Logf("%.3f without hidden layers, %.3f with them", flat, deep)
	if deep < 0.75 || deep > 0.97 || flat > deep-0.15 || flat < 2./Classes {
		t.Errorf("accuracy %.3f without hidden layers, %.3f with them", flat, deep)
	}
}
