package scenario

import (
	"math"
	"time"
)

// Compute returns how long a rank of a job computes in a round, counted from the first of the warm-up. It depends on the scenario, the
// seed and these numbers alone.
func (s *Scenario) Compute(seed uint64, job, rank, round int) time.Duration {
	c := &s.Jobs[job].Compute
	factor := 1.0
	if f, ok := c.Slow[rank]; ok {
		factor = f
	}
	if c.Jitter > 0 {
		z := normal(draw(seed, streamJitter, job, rank, round, 0), draw(seed, streamJitter, job, rank, round, 1))
		factor *= math.Exp(c.Jitter*z - c.Jitter*c.Jitter/2) // the mean of exp(sigma z) is exp(sigma^2 / 2)
	}
	if c.Moving != nil && s.Straggler(seed, job, round) == rank {
		factor *= c.Moving.Factor
	}
	for _, e := range c.Episodes {
		if measured := round - s.Warmup; e.Rank == rank && e.From <= measured && measured < e.To {
			factor *= e.Factor
		}
	}
	return time.Duration(factor * float64(c.Mean))
}

// Straggler returns the rank of a job that [Compute.Moving] slows down in a round, -1 if there is none.
func (s *Scenario) Straggler(seed uint64, job, round int) int {
	j := &s.Jobs[job]
	if j.Compute.Moving == nil {
		return -1
	}
	if j.Ranks == 1 {
		return 0
	}
	rank := int(draw(seed, streamMoving, job, 0) % uint64(j.Ranks))
	for turn := 1; turn <= round/j.Compute.Moving.Every; turn++ { // each is another one than before
		rank = (rank + 1 + int(draw(seed, streamMoving, job, turn)%uint64(j.Ranks-1))) % j.Ranks
	}
	return rank
}

// Ready returns how long after the beginning of a round's computation, which takes as long as compute, each bucket of a job is
// ready.
func (s *Scenario) Ready(job int, compute time.Duration) []time.Duration {
	j := &s.Jobs[job]
	buckets := j.Tensors.Buckets()
	ready := make([]time.Duration, len(buckets))
	begin, all, so := float64(compute)*(1-j.Compute.Backward), float64(j.Tensors.Values()), 0
	for i, n := range buckets {
		so += n
		ready[i] = min(compute, time.Duration(begin+(float64(compute)-begin)*float64(so)/all))
	}
	ready[len(ready)-1] = compute
	return ready
}

// Independent streams of random numbers.
const (
	streamJitter = 1 + iota
	streamMoving
	streamValues
)

// draw returns a random number that depends on its arguments alone: no draw depends on how many were made before.
func draw(seed uint64, counters ...int) uint64 {
	x := splitmix64(seed)
	for _, c := range counters {
		x = splitmix64(x ^ uint64(c))
	}
	return x
}

// splitmix64 is the output function of Steele, Lea and Flood's generator (OOPSLA 2014), here a mixing function.
func splitmix64(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// normal makes a number from the standard normal distribution of two uniform ones (Box and Muller, 1958).
func normal(a, b uint64) float64 {
	u := (float64(a>>11) + 1) / (1 << 53) // in (0, 1]: its logarithm is finite
	v := float64(b>>11) / (1 << 53)
	return math.Sqrt(-2*math.Log(u)) * math.Cos(2*math.Pi*v)
}
