package scenario

import (
	"fmt"
	"sync"

	"xagg/lab/data"
	"xagg/worker/grads"
)

// Values are what the ranks of a job all-reduce: the real gradients of one step of a training run, over and over until there are
// enough. From round to round they are scaled by a power of two, so that no round's sum passes for another's, and a
// tensor's scale is as steady as it is in training.
type Values struct {
	vectors [][]float32
	ranks   int
	sums    []float64
}

// gradients are the embedded vectors by step and rank.
var gradients = sync.OnceValues(func() ([][][]float32, error) {
	set, err := grads.Open(data.Gradients)
	if err != nil {
		return nil, err
	}
	steps := make([][][]float32, len(set.Steps()))
	for step := range steps {
		for rank := range set.Ranks() {
			v, err := set.Vector(step, rank)
			if err != nil {
				return nil, err
			}
			steps[step] = append(steps[step], v)
		}
	}
	return steps, nil
})

// NewValues returns the values of a job. The seed chooses the step.
func (s *Scenario) NewValues(seed uint64, job int) (*Values, error) {
	steps, err := gradients()
	if err != nil {
		return nil, fmt.Errorf("values of job %s: %w", s.Jobs[job].Name, err)
	}
	v := &Values{vectors: steps[draw(seed, streamValues, job)%uint64(len(steps))], ranks: s.Jobs[job].Ranks}
	v.sums = make([]float64, len(v.vectors[0]))
	for rank := range v.ranks {
		vector, at := v.of(rank)
		for i := range v.sums {
			v.sums[i] += float64(vector[(at+i)%len(vector)])
		}
	}
	return v, nil
}

// rankShift is by how many values the vectors of ranks are shifted that have the same.
const rankShift = 7919

// of returns the vector of a rank, which begins with its at-th value.
func (v *Values) of(rank int) (vector []float32, at int) {
	vector = v.vectors[rank%len(v.vectors)]
	return vector, rank / len(v.vectors) * rankShift % len(vector)
}

// ValuesPeriod is after how many rounds values come again.
const ValuesPeriod = 3

// scale returns what a round's values are multiplied by. A worker has room for three more bits than the round before had.
func scale(round int) float32 { return [ValuesPeriod]float32{1, 0.5, 0.25}[round%ValuesPeriod] }

// Fill sets dst to a rank's values of a round from offset on.
func (v *Values) Fill(dst []float32, rank, round, offset int) {
	vector, at := v.of(rank)
	factor := scale(round)
	for len(dst) > 0 {
		src := vector[(at+offset)%len(vector):]
		n := min(len(src), len(dst))
		for i, x := range src[:n] {
			dst[i] = factor * x
		}
		dst, offset = dst[n:], offset+n
	}
}

// Sums calls f for pieces of the exact sums over all ranks of a round's n values from offset on: the sums of those from at on
// are factor times the ones in sums.
func (v *Values) Sums(round, offset, n int, f func(at int, factor float64, sums []float64)) {
	factor := float64(scale(round))
	for at := 0; at < n; {
		sums := v.sums[(offset+at)%len(v.sums):]
		sums = sums[:min(len(sums), n-at)]
		f(at, factor, sums)
		at += len(sums)
	}
}
