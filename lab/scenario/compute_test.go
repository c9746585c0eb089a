package scenario

import (
	"math"
	"testing"
	"time"
)

// one returns a scenario with one job that computes so.
func one(ranks int, c Compute) *Scenario {
	return &Scenario{
		Name: "test", About: "A test.", Servers: 1, Links: Links{Worker: 50_000_000}, Warmup: 2, Rounds: 20, Seed: 1,
		Jobs: []Job{{Name: "train", Ranks: ranks, Depth: 1, Tensors: Tensors{Sizes: []int{10_000}}, Compute: c}},
	}
}

func TestComputeSlow(t *testing.T) {
	s := one(3, Compute{Mean: 10 * time.Millisecond, Slow: map[int]float64{1: 2.5}})
	for round := range 5 {
		for rank, want := range []time.Duration{10 * time.Millisecond, 25 * time.Millisecond, 10 * time.Millisecond} {
			if got := s.Compute(7, 0, rank, round); got != want {
				t.Errorf("rank %d computes %v in round %d, want %v", rank, got, round, want)
			}
		}
	}
}

// TestComputeJitter: the factors have mean 1 and the deviation that was asked for, and are others by seed, job, rank and
// round, in whatever order they are asked for.
func TestComputeJitter(t *testing.T) {
	const sigma, n = 0.4, 20_000
	s := one(2, Compute{Mean: time.Second, Jitter: sigma})
	s.Jobs = append(s.Jobs, s.Jobs[0])
	var sum, logs, squares float64
	for round := range n {
		x := s.Compute(1, 0, 0, round).Seconds()
		sum += x
		logs += math.Log(x)
		squares += math.Log(x) * math.Log(x)
	}
	mean, deviation := sum/n, math.Sqrt(squares/n-logs/n*logs/n)
	// The standard error of the mean is sqrt(exp(sigma^2) - 1) / sqrt(n), 0.003, that of the deviation sigma / sqrt(2 n), 0.002.
	if math.Abs(mean-1) > 0.012 || math.Abs(deviation-sigma) > 0.008 {
		t.Errorf("mean %g, deviation of logarithms %g; want 1 and %g", mean, deviation, sigma)
	}
	base := s.Compute(1, 0, 0, 5)
	for what, other := range map[string]time.Duration{
		"seed": s.Compute(2, 0, 0, 5), "job": s.Compute(1, 1, 0, 5), "rank": s.Compute(1, 0, 1, 5), "round": s.Compute(1, 0, 0, 6),
	} {
		if other == base {
			t.Errorf("another %s computes as long, %v", what, base)
		}
	}
	if again := s.Compute(1, 0, 0, 5); again != base {
		t.Errorf("%v and then %v", base, again)
	}
}

// TestComputeMoving: one rank at a time is slow, another one after every turn, and all of them some time.
func TestComputeMoving(t *testing.T) {
	const every, turns = 3, 60
	s := one(4, Compute{Mean: 10 * time.Millisecond, Moving: &Moving{Every: every, Factor: 4}})
	seen := map[int]int{}
	last := -1
	for round := range every * turns {
		slow := -1
		for rank := range 4 {
			switch got := s.Compute(1, 0, rank, round); got {
			case 40 * time.Millisecond:
				if slow >= 0 {
					t.Fatalf("round %d: ranks %d and %d are slow", round, slow, rank)
				}
				slow = rank
			case 10 * time.Millisecond:
			default:
				t.Fatalf("rank %d computes %v", rank, got)
			}
		}
		if slow < 0 || slow != s.Straggler(1, 0, round) {
			t.Fatalf("round %d: rank %d is slow, want %d", round, slow, s.Straggler(1, 0, round))
		}
		if (round%every == 0) != (slow != last) {
			t.Errorf("round %d: rank %d is slow after rank %d", round, slow, last)
		}
		last = slow
		seen[slow]++
	}
	for rank := range 4 {
		if n := seen[rank] / every; n < 5 {
			t.Errorf("rank %d is slow in %d of %d turns", rank, n, turns)
		}
	}
	if got := one(1, s.Jobs[0].Compute).Straggler(1, 0, 100); got != 0 {
		t.Errorf("the only rank is slow, not rank %d", got)
	}
	if got := one(2, Compute{Mean: 1}).Straggler(1, 0, 100); got != -1 {
		t.Errorf("rank %d is slow where none is", got)
	}
}

// TestComputeEpisodes: a rank is slower in its episodes, whose rounds are counted after the warm-up, and at no other time.
func TestComputeEpisodes(t *testing.T) {
	s := one(3, Compute{Mean: 10 * time.Millisecond, Slow: map[int]float64{1: 2}, Episodes: []Episode{
		{Rank: 1, Factor: 3, From: 4, To: 6}, {Rank: 1, Factor: 4, From: 6, To: 7}, {Rank: 2, Factor: 1.5, From: 0, To: 20},
	}})
	for round := range s.Warmup + s.Rounds {
		want := []time.Duration{10 * time.Millisecond, 20 * time.Millisecond, 15 * time.Millisecond}
		switch measured := round - s.Warmup; measured {
		case -2, -1:
			want[2] = 10 * time.Millisecond
		case 4, 5:
			want[1] = 60 * time.Millisecond
		case 6:
			want[1] = 80 * time.Millisecond
		}
		for rank := range want {
			if got := s.Compute(7, 0, rank, round); got != want[rank] {
				t.Errorf("rank %d computes %v in round %d, %d of them warm-up, want %v", rank, got, round, s.Warmup, want[rank])
			}
		}
	}
	// The floor of the others has what they wait for the slow rank.
	if comm := s.Ideal(7, 0, "sync").Comm[0]; comm[s.Warmup+6]-comm[s.Warmup+7] != 60*time.Millisecond {
		t.Errorf("rank 0 waits for %v in the last round of an episode and for %v in the next, want 60ms less", comm[s.Warmup+6], comm[s.Warmup+7])
	}
}

func TestReady(t *testing.T) {
	s := one(1, Compute{Mean: time.Second, Backward: 0.6})
	s.Jobs[0].Tensors.Sizes = []int{100, 300, 200}
	ms := time.Millisecond
	for _, c := range []struct {
		backward float64
		want     []time.Duration
	}{
		{0, []time.Duration{1000 * ms, 1000 * ms, 1000 * ms}},
		{0.6, []time.Duration{500 * ms, 800 * ms, 1000 * ms}},
		{1, []time.Duration{1000 * ms / 6, 4000 * ms / 6, 1000 * ms}},
	} {
		s.Jobs[0].Compute.Backward = c.backward
		for i, got := range s.Ready(0, time.Second) {
			if d := got - c.want[i]; d < -1 || d > 1 {
				t.Errorf("backward %g: bucket %d is ready after %v, want %v", c.backward, i, got, c.want[i])
			}
		}
	}
}
