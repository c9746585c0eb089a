package train

import (
	"slices"

	"xagg/lab/scenario"
)

// Single is the single process: it computes the gradients of all ranks, one after the other, adds them in that order, and divides by their
// number. What a sync run comes to differs from it by rounding alone.
const Single scenario.Mode = "single"

// single trains in one process. Its parameters at checkpoints are given to take, and those at the end, with the time that they would take with a network that
// takes none: a step takes as long as the slowest rank computes.
func single(p Plan, take func(step int, seconds float64, params []float32)) {
	task, net := NewTask(p.Seed, p.Ranks, p.Skew), NewNetwork(p.Seed, Sizes)
	batch, sum := NewSamples(p.Batch), make([]float32, len(net.Params))
	gradient := make([]float32, len(net.Params))
	seconds := 0.0
	for i := range p.Rounds {
		if i%p.Every == 0 {
			take(i, seconds, slices.Clone(net.Params))
		}
		p.sum(sum, gradient, task, net, batch, i)
		net.Step(sum, p.Rate, float64(p.Ranks))
		slowest := p.compute(0, i)
		for rank := range p.Ranks {
			slowest = max(slowest, p.compute(rank, i))
		}
		seconds += slowest.Seconds()
	}
	take(p.Rounds, seconds, net.Params)
}

// sum sums all ranks' gradients of a step at the network's parameters, in the order of the ranks. gradient and batch are memory for one.
func (p *Plan) sum(sum, gradient []float32, task *Task, net *Network, batch Samples, step int) {
	clear(sum)
	for rank := range p.Ranks {
		task.Batch(batch, rank, step)
		net.Gradient(gradient, batch)
		for i, v := range gradient {
			sum[i] += v
		}
	}
}
