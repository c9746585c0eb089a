package train

import (
	"math/rand/v2"
	"slices"
)

// The task: what a sample is, and how many there are.
const (
	Inputs  = 16
	Classes = 8

	clusters   = 4    // of each class
	separation = 1.25 // standard deviation of the clusters' centres, in those of the samples around them
	trainSize  = 2048
	heldOut    = 1024
)

// Sizes are the widths of the layers of the network that is trained, input first.
var Sizes = []int{Inputs, 48, 32, Classes}

// Parameters is how many that network has.
const Parameters = 48*(Inputs+1) + 32*(48+1) + Classes*(32+1)

// Task is a classification task that is generated from a seed: each class is a mixture of Gaussian clusters whose centres are drawn at
// random, so that no plane separates the classes and no network can tell all samples apart.
type Task struct {
	Train, HeldOut Samples

	seed  uint64
	ranks int
	skew  float64
	own   [][]int // by rank: training samples of its own classes
}

// Samples are labelled samples.
type Samples struct {
	X      []float32 // Inputs of each
	Labels []int     // 0..Classes-1
}

// at returns the inputs of a sample.
func (s *Samples) at(i int) []float32 { return s.X[i*Inputs : (i+1)*Inputs] }

// Streams of random numbers that are drawn from one seed.
const (
	streamTask = iota << 56
	streamBatch
	streamNetwork
)

// NewTask generates the task of a seed for so many ranks. Every class is the own one of one rank; skew, 0..1, is the share of a rank's samples
// that are from its own classes alone, the others are from all: with 0 all ranks see the same, with 1 what a rank has seen is known to nobody else.
func NewTask(seed uint64, ranks int, skew float64) *Task {
	random := rand.New(rand.NewPCG(seed, streamTask))
	centres := make([]float32, Classes*clusters*Inputs)
	for i := range centres {
		centres[i] = float32(separation * random.NormFloat64())
	}
	draw := func(n int) Samples {
		s := Samples{X: make([]float32, n*Inputs), Labels: make([]int, n)}
		for i := range n {
			class, cluster := i%Classes, random.IntN(clusters)
			s.Labels[i] = class
			for j, x := range s.at(i) {
				s.at(i)[j] = x + centres[(class*clusters+cluster)*Inputs+j] + float32(random.NormFloat64())
			}
		}
		return s
	}
	t := &Task{Train: draw(trainSize), HeldOut: draw(heldOut), seed: seed, ranks: ranks, skew: skew, own: make([][]int, ranks)}
	for i, class := range t.Train.Labels {
		t.own[class%ranks] = append(t.own[class%ranks], i)
	}
	return t
}

// Batch replaces the samples of b by those that a rank computes its gradient of a round from, as many as b has. It depends on nothing else.
func (t *Task) Batch(b Samples, rank, round int) {
	random := rand.New(rand.NewPCG(t.seed, streamBatch|uint64(rank)<<32|uint64(round)))
	for i := range b.Labels {
		k := random.IntN(trainSize)
		if own := t.own[rank]; len(own) > 0 && random.Float64() < t.skew {
			k = own[random.IntN(len(own))]
		}
		copy(b.at(i), t.Train.at(k))
		b.Labels[i] = t.Train.Labels[k]
	}
}

// NewSamples returns room for n samples.
func NewSamples(n int) Samples { return Samples{X: make([]float32, n*Inputs), Labels: make([]int, n)} }

// slice returns the samples from..to.
func (s *Samples) slice(from, to int) Samples {
	return Samples{X: s.X[from*Inputs : to*Inputs], Labels: slices.Clip(s.Labels[from:to])}
}
