package transport

import (
	"errors"
	"math"
	"math/bits"
	"math/rand/v2"
	"reflect"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"xagg/agg"
	"xagg/wire"
)

// quorumWorld returns a random quorum job.
func quorumWorld(t testing.TB, seed uint64) *world {
	rng := rand.New(rand.NewPCG(seed, 1))
	cfg := worldConfig{
		seed: seed, ranks: 2 + rng.IntN(4), servers: 1 + rng.IntN(2), depth: 1 + rng.IntN(3), chunks: 3, pool: 2 << rng.IntN(4),
		loss: []float64{0, 0.02, 0.1}[rng.IntN(3)], dup: 0.05, jitter: []time.Duration{0, 200 * time.Microsecond, 5 * time.Millisecond}[rng.IntN(3)],
	}
	switch rng.IntN(3) {
	case 0:
		cfg.steered = 1<<cfg.ranks - 1
	case 1:
		cfg.steered = rng.Uint64() & (1<<cfg.ranks - 1)
	}
	cfg.plan = agg.ServerPlan{Quorum: 1 + rng.Uint32N(uint32(cfg.ranks)), Rounds: 64, WaitUs: []uint32{0, 300, 20_000}[rng.IntN(3)]}
	return newWorld(t, cfg)
}

// lateness is how long ranks think: mostly not, some for long, and all of them sleep now and then.
func (w *world) lateness(k *rank) time.Duration {
	switch w.rng.IntN(8) {
	case 0:
		return time.Duration(w.rng.Int64N(int64(100 * time.Millisecond)))
	case 1:
		k.awake = w.now + time.Duration(w.rng.Int64N(int64(50*time.Millisecond)))
	}
	return time.Duration(1 + w.rng.Int64N(int64(time.Millisecond)))
}

// sameRounds fails unless all ranks saw the same rounds.
func (w *world) sameRounds() {
	for _, k := range w.ranks[1:] {
		if !reflect.DeepEqual(w.ranks[0].rounds, k.rounds) {
			diff := cmp.Diff(w.ranks[0].rounds, k.rounds)
			w.Fatalf("seed %d: rank %d saw other rounds than rank 0:\n%s", w.seed, k.id, diff)
		}
	}
}

// TestQuorumInts: whoever is late when, all ranks have the same sums of the same ranks, chunk by chunk, and what every
// rank gave is in a sum once or still in its residual, exactly.
func TestQuorumInts(t *testing.T) {
	late, behind, early := 0, 0, uint64(0)
	for seed := range uint64(150) {
		w := quorumWorld(t, seed)
		const steps = 12
		keys := []string{"a", "b"}
		size := map[string]int{"a": 1 + int(seed%700), "b": 900}
		given := map[string][]int64{"a": make([]int64, size["a"]), "b": make([]int64, size["b"])}
		w.run(steps, func(k *rank, step int) *Call {
			key := keys[step%2]
			data := make([]int32, size[key])
			for i := range data {
				data[i] = int32(w.rng.Uint32()) >> 12
				given[key][i] += int64(data[i])
			}
			return w.ints(k, key, data)
		}, w.lateness)
		w.sameRounds()
		w.checkInfo(&late)
		for _, k := range w.ranks {
			early += k.Stats().Early
			for _, c := range k.calls {
				behind += c.Info().Behind
			}
		}
		got := map[string][]int64{"a": make([]int64, size["a"]), "b": make([]int64, size["b"])}
		for _, r := range w.ranks[0].rounds {
			for i, v := range r.Sum {
				got[r.Key][r.Offset+i] += int64(v)
			}
		}
		for _, key := range keys {
			for _, k := range w.ranks {
				for i, v := range k.Residual(key) {
					got[key][i] += int64(v)
				}
			}
			if !reflect.DeepEqual(given[key], got[key]) {
				diff := cmp.Diff(given[key], got[key])
				t.Fatalf("seed %d: tensor %s: given, and what was taken or kept, differ:\n%s", seed, key, diff)
			}
		}
	}
	if late < 100 || behind < 100 || early < 100 {
		t.Errorf("only %d chunks went without a rank, ranks were only %d rounds behind, and took only %d RESULTs early", late, behind, early)
	}
}

// checkInfo compares what calls say with what the observer saw.
func (w *world) checkInfo(late *int) {
	for _, k := range w.ranks {
		for i, c := range k.calls {
			info := c.Info()
			least, most, without, mask := wire.MaxRanks, 0, 0, w.all()
			for _, r := range k.rounds {
				if r.Scout || r.Number < info.Round || r.Number >= info.Round+uint32(info.Rounds) || r.Key != c.key {
					continue
				}
				for _, m := range r.Masks {
					least, most, mask = min(least, bits.OnesCount64(m)), max(most, bits.OnesCount64(m)), mask&m
					if m>>k.id&1 == 0 {
						without++
					}
				}
			}
			*late += without
			if info.Least != least || info.Most != most || info.Late != without || info.Mask != mask || info.Path != "server" ||
				least < int(w.plan.Quorum) {
				w.Fatalf("seed %d: rank %d, call %d: %+v, want %d to %d ranks, %d without this one, mask %#x", w.seed, k.id, i, info,
					least, most, without, mask)
			}
		}
	}
}

// TestQuorumFloats: the mean of float32 values, of those that were in time, is the same everywhere; scouts and clipping
// work as ever, and nothing that was given is lost.
func TestQuorumFloats(t *testing.T) {
	clipped, late := 0, 0
	for seed := range uint64(150) {
		w := quorumWorld(t, seed)
		const steps, size = 10, 600
		given := make([]float64, size)
		results := make([][][]float32, len(w.ranks))
		w.run(steps, func(k *rank, step int) *Call {
			data := make([]float32, size)
			for i := range data {
				data[i] = float32(w.rng.NormFloat64())
				if w.rng.IntN(500) == 0 {
					data[i] *= 1000 // will not fit
				}
				given[i] += float64(data[i])
			}
			results[k.id] = append(results[k.id], data)
			return w.floats(k, "w", data)
		}, w.lateness)
		w.sameRounds()
		w.checkInfo(&late)
		got := make([]float64, size)
		var means [][]float32
		for _, r := range w.ranks[0].rounds {
			if r.Scout {
				continue
			}
			if r.Offset == 0 {
				means = append(means, make([]float32, size))
			}
			for i, v := range r.Sum {
				x := math.Ldexp(float64(v), -int(r.Exponent))
				got[r.Offset+i] += x
				means[len(means)-1][r.Offset+i] = float32(x / float64(bits.OnesCount64(r.Masks[i/wire.MaxLanes])))
			}
		}
		for r, k := range w.ranks {
			if !reflect.DeepEqual(means, results[r]) {
				diff := cmp.Diff(means, results[r])
				t.Fatalf("seed %d: rank %d has other means:\n%s", seed, r, diff)
			}
			for _, rest := range k.tensors[tensorKey{key: "w"}].floats {
				got[rest.index] += float64(rest.value)
			}
			for _, c := range k.calls {
				clipped += c.Info().Clipped
			}
		}
		for i := range given {
			if math.Abs(given[i]-got[i]) > 1e-3 {
				t.Fatalf("seed %d: %g was given for value %d, %g was taken or kept", seed, given[i], i, got[i])
			}
		}
	}
	if clipped < 100 || late < 100 {
		t.Errorf("only %d values were clipped and %d chunks went without a rank", clipped, late)
	}
}

// TestQuorumGoesOn: a rank that is dead, or that sleeps, does not hold up the others longer than `wait` for a chunk's
// window.
func TestQuorumGoesOn(t *testing.T) {
	for _, steered := range []uint64{0, 4, 7} {
		w := newWorld(t, worldConfig{seed: 1, ranks: 3, servers: 1, steered: steered, depth: 2, chunks: 64, pool: 64,
			plan: agg.ServerPlan{Quorum: 2, WaitUs: 5000, Rounds: 64}})
		const steps = 10
		w.ranks[2].next = steps // it never does anything
		w.run(steps, func(k *rank, step int) *Call {
			return w.ints(k, "k", make([]int32, 64*wire.MaxLanes))
		}, func(*rank) time.Duration { return time.Microsecond })
		if limit := steps * 100 * time.Millisecond; w.now > limit {
			t.Errorf("steered %#x: %d steps took %v, want at most %v", steered, steps, w.now, limit)
		}
		for _, k := range w.ranks[:2] {
			for _, c := range k.calls {
				if i := c.Info(); i.Mask != 3 || i.Most != 2 || i.Late != 0 {
					t.Errorf("steered %#x: rank %d: %+v", steered, k.id, i)
				}
			}
		}
	}
}

// TestQuorumBehind: a rank that has fallen more rounds behind than servers keep is told so, and what to do.
func TestQuorumBehind(t *testing.T) {
	w := newWorld(t, worldConfig{seed: 1, ranks: 3, servers: 1, depth: 1, chunks: 2, pool: 4,
		plan: agg.ServerPlan{Quorum: 2, WaitUs: 100, Rounds: 4}})
	w.ranks[1].awake = 2 * time.Second
	w.try(12, func(k *rank, step int) *Call {
		return w.ints(k, "k", []int32{1})
	}, func(*rank) time.Duration { return time.Microsecond })
	var refused *RefusedError
	if !errors.As(w.err, &refused) || refused.Reason != wire.ReasonStale || w.errRank != 1 {
		t.Fatalf("rank %d: %v, want rank 1 refused as stale", w.errRank, w.err)
	}
}
