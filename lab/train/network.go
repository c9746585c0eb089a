package train

import (
	"fmt"
	"math"
	"math/rand/v2"
)

// Network is a multilayer perceptron: rectified linear units, and a softmax with cross entropy at the end. It computes in float32,
// in an order that depends on nothing, so that the same parameters and samples give the same gradient to the bit on one kind of machine.
type Network struct {
	// Params are the parameters, layer by layer: a row of weights for each unit, then the biases of all.
	Params []float32

	sizes  []int
	values [][]float32 // by layer: a row for each sample of a batch
	deltas [][]float32 // what the loss changes with them
}

// NewNetwork returns a network of layers of so many units, the input first, with random weights (He et al. 2015) and biases of 0.
func NewNetwork(seed uint64, sizes []int) *Network {
	n := &Network{sizes: sizes, values: make([][]float32, len(sizes)), deltas: make([][]float32, len(sizes))}
	random := rand.New(rand.NewPCG(seed, streamNetwork))
	for l := 1; l < len(sizes); l++ {
		deviation := math.Sqrt(2 / float64(sizes[l-1]))
		for range sizes[l] * sizes[l-1] {
			n.Params = append(n.Params, float32(deviation*random.NormFloat64()))
		}
		n.Params = append(n.Params, make([]float32, sizes[l])...)
	}
	return n
}

// layer returns the part of p, which is laid out like the parameters, that belongs to a layer.
func (n *Network) layer(p []float32, l int) (weights, biases []float32) {
	for k := 1; k < l; k++ {
		p = p[n.sizes[k]*(n.sizes[k-1]+1):]
	}
	edge := n.sizes[l] * n.sizes[l-1]
	return p[:edge:edge], p[edge : edge+n.sizes[l]]
}

// rows makes room for a batch in every layer.
func (n *Network) rows(batch int) {
	for l, size := range n.sizes {
		if cap(n.values[l]) < batch*size {
			n.values[l], n.deltas[l] = make([]float32, batch*size), make([]float32, batch*size)
		}
		n.values[l], n.deltas[l] = n.values[l][:batch*size], n.deltas[l][:batch*size]
	}
}

// forward computes all layers' values, and turns those of the last into probabilities. It returns the sum of the
// samples' losses, and how many have their own class as the most probable one.
func (n *Network) forward(s Samples) (loss float64, right int) {
	n.rows(len(s.Labels))
	copy(n.values[0], s.X)
	last := len(n.sizes) - 1
	for l := 1; l <= last; l++ {
		weights, biases := n.layer(n.Params, l)
		in, out := n.sizes[l-1], n.sizes[l]
		for i := range s.Labels {
			x, y := n.values[l-1][i*in:(i+1)*in], n.values[l][i*out:(i+1)*out]
			for j := range y {
				v := biases[j] + dot(weights[j*in:(j+1)*in], x)
				if l < last {
					v = max(v, 0)
				}
				y[j] = v
			}
		}
	}
	for i, label := range s.Labels {
		sample, guess := softmax(n.values[last][i*n.sizes[last]:(i+1)*n.sizes[last]], label)
		loss += sample
		if guess == label {
			right++
		}
	}
	return loss, right
}

// softmax replaces logits by probabilities and returns the cross entropy with a label, and the most probable class.
func softmax(y []float32, label int) (loss float64, guess int) {
	for j := range y {
		if y[j] > y[guess] {
			guess = j
		}
	}
	top, own := float64(y[guess]), float64(y[label])
	sum := 0.0
	for j := range y {
		e := math.Exp(float64(y[j]) - top)
		y[j] = float32(e)
		sum += e
	}
	for j := range y {
		y[j] = float32(float64(y[j]) / sum)
	}
	return math.Log(sum) + top - own, guess
}

// Gradient writes the gradient of the mean loss over the samples to grad, which is as long as Params, and returns that loss.
func (n *Network) Gradient(grad []float32, s Samples) float64 {
	batch := len(s.Labels)
	loss, _ := n.forward(s)
	clear(grad)
	last := len(n.sizes) - 1
	for i, label := range s.Labels {
		p, d := n.values[last][i*n.sizes[last]:], n.deltas[last][i*n.sizes[last]:(i+1)*n.sizes[last]]
		for j := range d {
			d[j] = p[j] / float32(batch)
		}
		d[label] -= 1 / float32(batch)
	}
	for l := last; l > 0; l-- {
		weights, _ := n.layer(n.Params, l)
		dWeights, dBiases := n.layer(grad, l)
		in, out := n.sizes[l-1], n.sizes[l]
		clear(n.deltas[l-1])
		for i := range batch {
			x, dx := n.values[l-1][i*in:(i+1)*in], n.deltas[l-1][i*in:(i+1)*in]
			for j, d := range n.deltas[l][i*out : (i+1)*out] {
				if d == 0 {
					continue
				}
				dBiases[j] += d
				addScaled(dWeights[j*in:(j+1)*in], x, d)
				if l > 1 {
					addScaled(dx, weights[j*in:(j+1)*in], d)
				}
			}
			for k, v := range x {
				if v <= 0 { // a unit that is off passes nothing on
					dx[k] = 0
				}
			}
		}
	}
	return loss / float64(batch)
}

// evaluated is how many samples are evaluated at a time.
const evaluated = 128

// Evaluate returns the mean loss over samples, and the share of them that are classified rightly.
func (n *Network) Evaluate(s Samples) (loss, accuracy float64) {
	right := 0
	for from := 0; from < len(s.Labels); from += evaluated {
		l, r := n.forward(s.slice(from, min(from+evaluated, len(s.Labels))))
		loss += l
		right += r
	}
	count := float64(len(s.Labels))
	return loss / count, float64(right) / count
}

// Step moves the parameters against a sum of gradients: each of them counts rate / divisor. It is one step of stochastic gradient
// descent where divisor is the number of gradients in the sum.
func (n *Network) Step(sum []float32, rate, divisor float64) {
	if len(sum) != len(n.Params) {
		panic(fmt.Sprintf("train: step of %d values for %d parameters", len(sum), len(n.Params)))
	}
	addScaled(n.Params, sum, float32(-rate/divisor))
}

// dot returns the scalar product of two vectors of the same length. Four sums hide the latency of the additions.
func dot(a, b []float32) float32 {
	var s0, s1, s2, s3 float32
	for len(a) >= 4 && len(b) >= 4 {
		x, y := (*[4]float32)(a), (*[4]float32)(b)
		s0 += x[0] * y[0]
		s1 += x[1] * y[1]
		s2 += x[2] * y[2]
		s3 += x[3] * y[3]
		a, b = a[4:], b[4:]
	}
	for i := range a {
		s0 += a[i] * b[i]
	}
	return (s0 + s1) + (s2 + s3)
}

// addScaled adds f times x to y, of the same length.
func addScaled(y, x []float32, f float32) {
	x = x[:len(y)]
	for i := range y {
		y[i] += f * x[i]
	}
}
