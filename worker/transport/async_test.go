package transport

import (
	"errors"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"xagg/agg"
	"xagg/wire"
	"xagg/worker/scale"
)

// running follows the running sums of an async job: what each chunk was after how many additions.
type running struct {
	*world
	sums   map[uint32][][]int64 // by chunk: [additions][lane]
	clocks map[uint32][]uint32  // by chunk and rank
	spread uint32               // the most that a rank was ahead of the slowest when it was added
}

// asyncWorld returns a random async job.
func asyncWorld(t testing.TB, seed uint64) *running {
	rng := rand.New(rand.NewPCG(seed, 3))
	cfg := worldConfig{
		seed: seed, ranks: 2 + rng.IntN(4), servers: 1 + rng.IntN(2), depth: 1 + rng.IntN(3), chunks: 8, pool: 2 << rng.IntN(4),
		loss: []float64{0, 0.02, 0.1}[rng.IntN(3)], dup: 0.05, jitter: []time.Duration{0, 200 * time.Microsecond, 5 * time.Millisecond}[rng.IntN(3)],
	}
	cfg.steered = 1<<cfg.ranks - 1
	cfg.plan = agg.ServerPlan{Async: true, Staleness: rng.Uint32N(4), Rounds: 4}
	w := &running{newWorld(t, cfg), map[uint32][][]int64{}, map[uint32][]uint32{}, 0}
	w.added = w.add
	return w
}

// add is a contribution that was added: in the order of a rank's own, and not too far ahead.
func (w *running) add(h *wire.Header) {
	clocks := w.clocks[h.Chunk]
	if clocks == nil {
		clocks = make([]uint32, w.worldConfig.ranks)
		w.clocks[h.Chunk], w.sums[h.Chunk] = clocks, [][]int64{make([]int64, wire.MaxLanes)}
	}
	least := uint32(math.MaxUint32)
	for _, c := range clocks {
		least = min(least, c)
	}
	if h.Round != clocks[h.Rank] || h.Round > least+w.plan.Staleness {
		w.Fatalf("seed %d: contribution %d of rank %d to chunk %d was added at clocks %v, staleness %d", w.seed, h.Round, h.Rank, h.Chunk,
			clocks, w.plan.Staleness)
	}
	w.spread = max(w.spread, h.Round-least)
	clocks[h.Rank]++
	history := w.sums[h.Chunk]
	sum := append([]int64{}, history[len(history)-1]...)
	for i, v := range w.sent[place{h.Rank, h.Round, h.Chunk, true}] {
		sum[i] += int64(v)
	}
	w.sums[h.Chunk] = append(history, sum)
}

// check compares all that ranks were told with the history of the sums, and that every contribution was added once. base
// has the first chunk of each tensor. It returns the largest number of contributions of a difference.
func (w *running) check(base map[string]uint32, steps map[string]uint32) (most int) {
	for chunk, clocks := range w.clocks {
		for rank, n := range clocks {
			want := steps["a"]
			if chunk >= base["b"] {
				want = steps["b"]
			}
			if n != want {
				w.Fatalf("seed %d: %d contributions of rank %d to chunk %d were added, want %d", w.seed, n, rank, chunk, want)
			}
		}
		if got := len(w.sums[chunk]) - 1; got != w.worldConfig.ranks*int(clocks[0]) {
			w.Fatalf("seed %d: %d additions to chunk %d at clocks %v", w.seed, got, chunk, clocks)
		}
	}
	for _, k := range w.ranks {
		seen := map[uint32]uint32{} // additions so far, by chunk
		for _, r := range k.rounds {
			if r.Scout {
				continue
			}
			for c, n := range r.Additions {
				chunk := base[r.Key] + uint32(c) + uint32(r.Offset/wire.MaxLanes)
				from, to := seen[chunk], seen[chunk]+n
				if int(n) > (w.worldConfig.ranks-1)*(2*int(w.plan.Staleness)+3)+1 || r.Masks[c]>>k.id&1 == 0 {
					w.Fatalf("seed %d: rank %d: %d additions to chunk %d, mask %#x", w.seed, k.id, n, chunk, r.Masks[c])
				}
				most = max(most, int(n))
				lanes := r.Sum[c*wire.MaxLanes : min((c+1)*wire.MaxLanes, len(r.Sum))]
				for i, v := range lanes {
					if want := w.sums[chunk][to][i] - w.sums[chunk][from][i]; int64(v) != want {
						w.Fatalf("seed %d: rank %d: lane %d of chunk %d is %d between additions %d and %d, want %d", w.seed, k.id, i, chunk,
							v, from, to, want)
					}
				}
				seen[chunk] = to
			}
		}
	}
	return most
}

// TestAsyncInts: each result is the difference of two running sums, which every contribution is in once, and no rank is
// further ahead than it may be, whatever the network does.
func TestAsyncInts(t *testing.T) {
	ahead, most := uint32(0), 0
	for seed := range uint64(120) {
		w := asyncWorld(t, seed)
		size := map[string]int{"a": 1 + int(seed*37%600), "b": 900}
		base := map[string]uint32{"b": chunksOf(size["a"])}
		w.run(14, func(k *rank, step int) *Call {
			key := []string{"a", "b"}[step%2]
			data := make([]int32, size[key])
			for i := range data {
				data[i] = int32(w.rng.Uint32()) >> 12
			}
			return w.ints(k, key, data)
		}, w.lateness)
		most = max(most, w.check(base, map[string]uint32{"a": 7, "b": 7}))
		ahead = max(ahead, w.spread)
		for _, k := range w.ranks {
			for i, c := range k.calls {
				if info := c.Info(); info.Path != "server" || info.Late != 0 || info.Additions < 1 {
					t.Fatalf("seed %d: rank %d, call %d: %+v", seed, k.id, i, info)
				}
			}
		}
	}
	if ahead != 3 || most < 10 {
		t.Errorf("ranks were at most %d contributions ahead, and %d in a difference, which shows little", ahead, most)
	}
}

// TestAsyncFloats: a tensor's scale comes from a scout and stays; what does not fit is not lost.
func TestAsyncFloats(t *testing.T) {
	clipped := 0
	for seed := range uint64(60) {
		w := asyncWorld(t, seed)
		size := map[string]int{"a": 300, "b": 700}
		base := map[string]uint32{"b": chunksOf(size["a"])}
		given := map[string][]float64{"a": make([]float64, size["a"]), "b": make([]float64, size["b"])}
		w.run(12, func(k *rank, step int) *Call {
			key := []string{"a", "b"}[step%2]
			data := make([]float32, size[key])
			for i := range data {
				data[i] = float32(w.rng.NormFloat64())
				if step > 6 && i%50 == 0 {
					data[i] *= 20 // more than the margin of the scale
				}
				given[key][i] += float64(data[i])
			}
			return w.floats(k, key, data)
		}, w.lateness)
		w.check(base, map[string]uint32{"a": 6, "b": 6})
		for key, want := range given {
			exponent := w.ranks[0].rounds[len(w.ranks[0].rounds)-1].Exponent
			for _, k := range w.ranks {
				for _, r := range k.rounds {
					if r.Key == key && r.Async {
						exponent = r.Exponent
					}
				}
			}
			got := make([]float64, len(want))
			for c := range chunksOf(len(want)) {
				history := w.sums[base[key]+c]
				for i := range got[c*wire.MaxLanes : min(int(c+1)*wire.MaxLanes, len(got))] {
					got[int(c)*wire.MaxLanes+i] = math.Ldexp(float64(history[len(history)-1][i]), -int(exponent))
				}
			}
			for _, k := range w.ranks {
				for _, r := range k.tensors[tensorKey{key: key}].floats {
					got[r.index] += float64(r.value)
				}
				for _, c := range k.calls {
					clipped += c.Info().Clipped
				}
			}
			// Each contribution is rounded once.
			limit := float64(6*w.worldConfig.ranks) * math.Ldexp(1, -int(exponent)) * 2
			for i := range want {
				if math.Abs(got[i]-want[i]) > limit+1e-4 {
					t.Fatalf("seed %d: tensor %s, value %d: given %g, taken or kept %g", seed, key, i, want[i], got[i])
				}
			}
		}
	}
	if clipped == 0 {
		t.Error("nothing was clipped")
	}
}

// TestAsyncTooLong: tensors that do not fit beside those before them are refused before anything is sent.
func TestAsyncTooLong(t *testing.T) {
	e := New(Config{Job: 1, Epoch: 1, Rank: 0, Ranks: 2, Pool: 2, MaxChunks: 3, Async: true, Staleness: 1})
	if _, err := e.BeginInt32(0, "a", make([]int32, 512)); err != nil {
		t.Fatal(err)
	}
	if _, err := e.BeginInt32(0, "b", make([]int32, 257)); err == nil {
		t.Error("four chunks fit into three")
	}
	if _, err := e.BeginInt32(0, "c", make([]int32, 256)); err != nil {
		t.Error(err)
	}
}

// TestAsyncLimit: integers beyond the share of a lane that a contribution has are clipped, and the rest comes next.
func TestAsyncLimit(t *testing.T) {
	w := asyncWorld(t, 1)
	w.loss, w.dup = 0, 0
	limit := scale.Limit(w.worldConfig.ranks * (2*int(w.plan.Staleness) + 3))
	w.run(3, func(k *rank, step int) *Call {
		data := []int32{0, 5}
		if step == 0 && k.id == 0 {
			data[0] = limit + 1000
		}
		return w.ints(k, "a", data)
	}, func(*rank) time.Duration { return 1 })
	history := w.sums[0]
	if got := history[len(history)-1][0]; got != int64(limit)+1000 {
		t.Errorf("the sum is %d, want %d", got, int64(limit)+1000)
	}
	if got := w.sent[place{0, 0, 0, true}][0]; got != limit {
		t.Errorf("the first contribution is %d, want the limit %d", got, limit)
	}
	if info := w.ranks[0].calls[0].Info(); info.Clipped != 1 || info.Saturated != 1 {
		t.Errorf("%+v, want one value clipped", info)
	}
	// The running sum stays marked, and says nothing of what came later.
	for _, k := range w.ranks {
		saturated := 0
		for _, c := range k.calls {
			saturated += c.Info().Saturated
		}
		if last := k.calls[len(k.calls)-1].Info(); saturated != 1 || last.Saturated != 0 {
			t.Errorf("rank %d: %d chunks in which somebody clipped, %d in the last all-reduce, want 1 and 0", k.id, saturated, last.Saturated)
		}
	}
}

// TestAsyncDamage: a running sum whose tag does not fit what was added is never taken.
func TestAsyncDamage(t *testing.T) {
	w := asyncWorld(t, 2)
	w.loss, w.dup, w.depth = 0, 0, 1
	e := New(Config{Job: 1, Epoch: 1, Rank: 0, Ranks: 2, Pool: 2, MaxChunks: 3, Async: true})
	if _, err := e.BeginInt32(0, "a", []int32{7, 8}); err != nil {
		t.Fatal(err)
	}
	b := e.Due(0, make([][]byte, 0, 1))[0]
	var p wire.Packet
	if err := p.Decode(b); err != nil {
		t.Fatal(err)
	}
	server := agg.NewServer(16)
	if err := server.Install(agg.ServerPlan{Job: 1, Epoch: 1, Ranks: 3, Chunks: 3, Rounds: 4, Async: true}); err != nil {
		t.Fatal(err)
	}
	server.Handle(0, &p)
	p.Lanes[1]++
	answer := make([]byte, p.Len())
	p.Encode(answer)
	var err error
	for range maxStrikes {
		if err != nil {
			t.Fatalf("given up early: %v", err)
		}
		err = e.Take(0, answer)
	}
	if _, ok := errors.AsType[*IntegrityError](err); !ok || e.Done() {
		t.Errorf("%v, want an integrity error", err)
	}
}

// TestAsyncZeros: a tensor that is zero everywhere at first keeps its precision for what comes.
func TestAsyncZeros(t *testing.T) {
	w := asyncWorld(t, 1)
	w.loss, w.dup = 0, 0
	w.run(2, func(k *rank, step int) *Call {
		return w.floats(k, "a", []float32{0.01 * float32(step)})
	}, func(*rank) time.Duration { return 1 })
	history := w.sums[0]
	exponent := w.ranks[0].calls[1].Info().Exponent
	want := 0.01 * float64(w.worldConfig.ranks)
	if got := math.Ldexp(float64(history[len(history)-1][0]), -int(exponent)); math.Abs(got-want) > 1e-5 {
		t.Errorf("the sum is %g, want %g", got, want)
	}
}
