package worker_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"xagg/wire"
	"xagg/worker"
	"xagg/worker/scale"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// modes are the three ways through the network, for any number of ranks.
func modes(ranks int) map[string]netConfig {
	all := ^uint64(0) >> (64 - ranks)
	m := map[string]netConfig{
		"switch": {ranks: ranks},
		"server": {ranks: ranks, servers: 2, steered: all},
	}
	if ranks > 1 {
		m["hybrid"] = netConfig{ranks: ranks, servers: 1, steered: 1 << (ranks - 1)}
	}
	return m
}

// recorder keeps the rounds that a worker saw.
type recorder struct {
	mu     sync.Mutex
	rounds []worker.Round
}

func (r *recorder) observe(round worker.Round) {
	r.mu.Lock()
	defer r.mu.Unlock()
	round.Sum = append([]int32{}, round.Sum...)
	round.Masks = slices.Clone(round.Masks)
	r.rounds = append(r.rounds, round)
}

// joinObserved joins all ranks with a recorder each.
func (n *testnet) joinObserved(t *testing.T, opts ...worker.Option) ([]*worker.Worker, []*recorder) {
	workers, recorders := make([]*worker.Worker, n.ranks), make([]*recorder, n.ranks)
	n.each(t, func(r int) (err error) {
		recorders[r] = &recorder{}
		workers[r], err = n.joinRank(t.Context(), r, append(opts, worker.WithObserver(recorders[r].observe))...)
		return err
	})
	for _, w := range workers {
		t.Cleanup(func() { w.Close() })
	}
	return workers, recorders
}

// values returns what rank contributes to an all-reduce, the same every time.
func values(n, rank int, seed uint64) []float32 {
	rng := rand.New(rand.NewPCG(uint64(rank), seed))
	v := make([]float32, n)
	for i := range v {
		v[i] = float32(rng.NormFloat64())
	}
	return v
}

// wantSum is the sum of all ranks' integers at an exponent, by the rule alone: round(x * 2^exponent), half to even.
func wantSum(vectors [][]float32, exponent int8) []int32 {
	sum := make([]int32, len(vectors[0]))
	for _, v := range vectors {
		for i, x := range v {
			sum[i] += int32(math.RoundToEven(math.Ldexp(float64(x), int(exponent))))
		}
	}
	return sum
}

var sizes = []int{0, 1, 63, 64, 65, 255, 256, 257, 1009}

// TestAllReduceSizes: every length, in every mode: the integers are the exact sum, the same on all ranks and in all
// modes, and so are the values.
func TestAllReduceSizes(t *testing.T) {
	for _, ranks := range []int{1, 2, 3, 8} {
		for mode, cfg := range modes(ranks) {
			t.Run(fmt.Sprintf("%d/%s", ranks, mode), func(t *testing.T) {
				t.Parallel()
				n := newTestnet(t, cfg)
				workers, recorders := n.joinObserved(t)
				n.each(t, func(r int) error {
					for _, size := range sizes {
						data := values(size, r, uint64(size))
						info, err := workers[r].AllReduce(t.Context(), fmt.Sprint(size), data)
						if err != nil {
							return err
						}
						if want := (size+255)/256 + 1; info.Rounds != 2 || info.Chunks != max(want, 2) {
							return fmt.Errorf("size %d: %d rounds, %d chunks", size, info.Rounds, info.Chunks)
						}
						seen := recorders[r].rounds[len(recorders[r].rounds)-1]
						var all [][]float32
						for i := range ranks {
							all = append(all, values(size, i, uint64(size)))
						}
						if diff := cmp.Diff(wantSum(all, info.Exponent), slices.Clone(seen.Sum)); diff != "" && size > 0 {
							return fmt.Errorf("size %d: integers (-want +got):\n%s", size, diff)
						}
						for i, x := range data {
							if want := float32(math.Ldexp(float64(seen.Sum[i]), -int(info.Exponent))); x != want {
								return fmt.Errorf("size %d: value %d is %g, want %g", size, i, x, want)
							}
						}
					}
					return workers[r].Leave(t.Context())
				})
				for r := 1; r < ranks; r++ {
					if diff := cmp.Diff(recorders[0].rounds, recorders[r].rounds); diff != "" {
						t.Errorf("rank %d saw other rounds than rank 0:\n%s", r, diff)
					}
				}
			})
		}
	}
}

// TestAllReduceSplit reduces a vector that needs several rounds of the job's longest.
func TestAllReduceSplit(t *testing.T) {
	n := newTestnet(t, netConfig{ranks: 2, chunks: 3})
	workers, recorders := n.joinObserved(t)
	const size = 2*3*256 + 300
	n.each(t, func(r int) error {
		data := make([]int32, size)
		for i := range data {
			data[i] = int32((r + 1) * i)
		}
		info, err := workers[r].AllReduceInt32(t.Context(), "long", data)
		if err != nil {
			return err
		}
		if info.Rounds != 3 || info.Chunks != 8 || info.Round != 0 || info.Exponent != 0 || info.Mask != 3 {
			return fmt.Errorf("info %+v", info)
		}
		for i, v := range data {
			if v != int32(3*i) {
				return fmt.Errorf("value %d is %d, want %d", i, v, 3*i)
			}
		}
		info, err = workers[r].AllReduce(t.Context(), "floats", values(size, r, 5))
		if err == nil && (info.Rounds != 4 || info.Round != 3) {
			err = fmt.Errorf("info %+v", info)
		}
		return err
	})
	var offsets []int
	for _, round := range recorders[1].rounds {
		offsets = append(offsets, round.Offset)
	}
	if want := []int{0, 768, 1536, 0, 0, 768, 1536}; !cmp.Equal(offsets, want) {
		t.Errorf("offsets of the rounds are %v, want %v", offsets, want)
	}
}

// TestAllReduceFaults: loss, duplication and reordering on every hop change nothing but the number of packets.
func TestAllReduceFaults(t *testing.T) {
	const size = 5*256 + 7
	for mode, cfg := range modes(4) {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			cfg.seed, cfg.loss, cfg.dup, cfg.delay = 11, 0.04, 0.05, 4
			type place struct {
				rank uint8
				seq  uint32
			}
			sent := map[place]wire.Packet{}
			cfg.watch = func(p *wire.Packet) {
				first, again := sent[place{p.Rank, p.Seq}]
				if !again {
					first = *p
					sent[place{p.Rank, p.Seq}] = first
				} else {
					first.Flags |= wire.FlagResend
				}
				if first != *p || !p.TagOK() {
					t.Errorf("rank %d sent %+v, want %+v", p.Rank, p.Header, first.Header)
				}
			}
			n := newTestnet(t, cfg)
			workers, recorders := n.joinObserved(t)
			var all [][]float32
			for i := range n.ranks {
				all = append(all, values(size, i, 1))
			}
			n.each(t, func(r int) error {
				for range 2 {
					if _, err := workers[r].AllReduce(t.Context(), "w", values(size, r, 1)); err != nil {
						return err
					}
				}
				return workers[r].Leave(t.Context())
			})
			resends := uint64(0)
			for r, w := range workers {
				resends += w.Stats().Resends
				if len(recorders[r].rounds) != 3 {
					t.Fatalf("rank %d saw %d rounds, want a scout and 2", r, len(recorders[r].rounds))
				}
				for _, round := range recorders[r].rounds[1:] {
					if diff := cmp.Diff(wantSum(all, round.Exponent), round.Sum); diff != "" {
						t.Fatalf("rank %d, round %d: integers (-want +got):\n%s", r, round.Number, diff)
					}
				}
			}
			if resends == 0 {
				t.Error("no packet was sent again: the network did not lose any")
			}
		})
	}
}

// TestManyRanks fills the whole contributors mask.
func TestManyRanks(t *testing.T) {
	n := newTestnet(t, netConfig{ranks: 64})
	workers := n.join(t)
	n.each(t, func(r int) error {
		data := []int32{1, int32(r), -int32(r) << 16}
		info, err := workers[r].AllReduceInt32(t.Context(), "k", data)
		if err != nil {
			return err
		}
		if want := []int32{64, 2016, -2016 << 16}; !slices.Equal(data, want) || info.Mask != math.MaxUint64 {
			return fmt.Errorf("sum %v of mask %#x, want %v", data, info.Mask, want)
		}
		return workers[r].Leave(t.Context())
	})
}

// TestScale follows one tensor through delayed scaling: scout, growth within the margin, growth beyond it with clipping
// and remainder, shrinking, zeros.
func TestScale(t *testing.T) {
	n := newTestnet(t, netConfig{ranks: 2})
	workers := n.join(t)
	// Exponents are 31 - (amax-126) - 1 - 3 with the amax of the step before. With exponent 26 and two ranks a lane is at
	// most 2^30-1, a value 16 - 2^-26.
	steps := []struct {
		x         [2]float32 // what each rank has
		want      float32    // the sum
		exponent  int8
		rounds    int
		clipped   [2]int
		saturated int
	}{
		{[2]float32{1, 0.5}, 1.5, 26, 2, [2]int{}, 0},         // after a scout
		{[2]float32{8, 4}, 12, 26, 1, [2]int{}, 0},            // grown, within the margin
		{[2]float32{1, 1}, 2, 23, 1, [2]int{}, 0},             // shrunk
		{[2]float32{-200, 1}, -15, 26, 1, [2]int{1, 0}, 1},    // grown beyond the margin
		{[2]float32{0, 0.5}, -183.5, 19, 1, [2]int{}, 0},      // brings the remainder
		{[2]float32{0, 0}, 0, 19, 1, [2]int{}, 0},             // all zero
		{[2]float32{0x1p-30, 0}, 0x1p-30, 56, 2, [2]int{}, 0}, // so nothing is known of the scale: a scout again
	}
	n.each(t, func(r int) error {
		for i, s := range steps {
			data := []float32{s.x[r]}
			info, err := workers[r].AllReduce(t.Context(), "w", data)
			if err != nil {
				return err
			}
			if data[0] != s.want || info.Exponent != s.exponent || info.Rounds != s.rounds ||
				info.Clipped != s.clipped[r] || info.Saturated != s.saturated {
				return fmt.Errorf("step %d: sum %v, info %+v; want %+v", i, data[0], info, s)
			}
		}
		return nil
	})
}

// TestScaleKeys: every tensor has a scale of its own.
func TestScaleKeys(t *testing.T) {
	n := newTestnet(t, netConfig{ranks: 2})
	workers := n.join(t)
	n.each(t, func(r int) error {
		for range 2 {
			for _, x := range []float32{0x1p100, 0x1p-100, 0} {
				data := []float32{x}
				info, err := workers[r].AllReduce(t.Context(), fmt.Sprint(x), data)
				if err != nil {
					return err
				}
				if data[0] != 2*x || info.Exponent != scale.Exponent(uint8(math.Float32bits(x)>>23), 2) {
					return fmt.Errorf("sum %g of %g, exponent %d", data[0], x, info.Exponent)
				}
			}
		}
		return nil
	})
}

func TestErrors(t *testing.T) {
	for name, x := range map[string]float32{
		"NaN": float32(math.NaN()), "+Inf": float32(math.Inf(1)), "-Inf": float32(math.Inf(-1)),
	} {
		t.Run(name, func(t *testing.T) {
			n := newTestnet(t, netConfig{ranks: 3})
			workers := n.join(t)
			errs := n.errors(func(r int) error {
				data := values(700, r, 1)
				if r == 1 {
					data[600] = x
				}
				_, err := workers[r].AllReduce(t.Context(), "layer1", data)
				return err
			})
			bad, ok := errors.AsType[*worker.NonFiniteError](errs[1])
			if !ok || bad.Rank != 1 || bad.Index != 600 || bad.Key != "layer1" {
				t.Errorf("rank 1: %v, want the place of %s", errs[1], name)
			}
			if s := workers[1].Stats(); s.Sent != 0 {
				t.Errorf("rank 1 sent %d packets", s.Sent)
			}
			for _, r := range []int{0, 2} {
				abort, ok := errors.AsType[*worker.AbortError](errs[r])
				why := fmt.Sprintf("rank 1 gave up: tensor \"layer1\": value 600 is %v, want finite numbers", x)
				if !ok || !slices.Equal(abort.Ranks, []int{1}) || abort.Reason != why {
					t.Errorf("rank %d: %v, want an abort by rank 1: %s", r, errs[r], why)
				}
			}
			// The job is over, and every further call says why.
			if _, err := workers[1].AllReduce(t.Context(), "layer2", nil); !errors.As(err, &bad) {
				t.Errorf("next all-reduce of rank 1: %v", err)
			}
			if err := workers[0].Leave(t.Context()); !errors.As(err, new(*worker.AbortError)) {
				t.Errorf("leave of rank 0: %v", err)
			}
		})
	}
}

func TestDeadline(t *testing.T) {
	for mode, server := range map[string]bool{"switch": false, "server": true} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			cfg := modes(4)[mode]
			n := newTestnet(t, cfg)
			workers := n.join(t, worker.WithTimeout(700*time.Millisecond))
			errs := n.errors(func(r int) error {
				if r == 1 || r == 3 {
					return nil // these never come
				}
				_, err := workers[r].AllReduce(t.Context(), "w", values(600, r, 1))
				return err
			})
			// One worker's deadline ends the job for the other, so only one is sure to say it.
			var late *worker.DeadlineError
			if !errors.As(errs[0], &late) && !errors.As(errs[2], &late) {
				t.Fatalf("rank 0: %v; rank 2: %v; want a deadline", errs[0], errs[2])
			}
			if !slices.Equal(late.Missing, []int{1, 3}) || late.Server != server || late.Waited < 700*time.Millisecond ||
				!errors.Is(late, context.DeadlineExceeded) {
				t.Errorf("%+v", late)
			}
			where := map[bool]string{false: "in the switch", true: "on the aggregation server"}[server]
			if msg := late.Error(); !strings.Contains(msg, "ranks 1 and 3, missing "+where) {
				t.Errorf("message %q", msg)
			}
		})
	}
}

// TestDeadlineSilence: without any answer the error names the service address.
func TestDeadlineSilence(t *testing.T) {
	n := newTestnet(t, netConfig{ranks: 1, loss: 1})
	w := n.join(t, worker.WithTimeout(50*time.Millisecond))[0]
	_, err := w.AllReduceInt32(t.Context(), "k", []int32{1})
	var late *worker.DeadlineError
	if !errors.As(err, &late) || len(late.Missing) > 0 || !strings.Contains(err.Error(), "10.77.255.254:19860") {
		t.Errorf("%v, want a silent service", err)
	}
}

// TestCancel: a cancelled context ends an all-reduce that waits, at once.
func TestCancel(t *testing.T) {
	n := newTestnet(t, netConfig{ranks: 2})
	workers := n.join(t)
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(20*time.Millisecond, cancel)
	begin := time.Now()
	_, err := workers[0].AllReduce(ctx, "w", []float32{1})
	if !errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v, want context.Canceled", err)
	}
	if d := time.Since(begin); d > 5*time.Second {
		t.Errorf("it took %v", d)
	}
	if _, err := workers[1].AllReduce(t.Context(), "w", []float32{1}); !errors.As(err, new(*worker.AbortError)) {
		t.Errorf("rank 1: %v, want an abort", err)
	}
}

// TestRefused: workers that do not agree on lengths or types are told what is wrong.
func TestRefused(t *testing.T) {
	for name, call := range map[string]func(r int, w *worker.Worker) error{
		"length": func(r int, w *worker.Worker) error {
			_, err := w.AllReduce(context.Background(), "w", make([]float32, 100+r))
			return err
		},
		"chunks": func(r int, w *worker.Worker) error {
			_, err := w.AllReduceInt32(context.Background(), "w", make([]int32, 256*(r+1)))
			return err
		},
		"type": func(r int, w *worker.Worker) error {
			if r == 0 {
				_, err := w.AllReduceInt32(context.Background(), "w", nil)
				return err
			}
			_, err := w.AllReduce(context.Background(), "w", nil)
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newTestnet(t, netConfig{ranks: 2})
			workers := n.join(t)
			errs := n.errors(func(r int) error { return call(r, workers[r]) })
			var refused *worker.RefusedError
			if !errors.As(errors.Join(errs...), &refused) || refused.Reason != wire.ReasonShape {
				t.Fatalf("errors %v, want a refusal for the shape", errs)
			}
			if errs[0] == nil || errs[1] == nil {
				t.Errorf("errors %v, want one on both ranks", errs)
			}
			if msg := refused.Error(); !strings.Contains(msg, "length, type or scale") {
				t.Errorf("message %q", msg)
			}
		})
	}
}

// TestOverflow: a sum of integers beyond int32 does not fit its tag.
func TestOverflow(t *testing.T) {
	n := newTestnet(t, netConfig{ranks: 2})
	workers := n.join(t)
	errs := n.errors(func(r int) error {
		data := make([]int32, 300)
		data[280] = math.MaxInt32 - int32(r) // 2^31-1 + 2^31-2
		_, err := workers[r].AllReduceInt32(t.Context(), "k", data)
		return err
	})
	var integrity *worker.IntegrityError
	if !errors.As(errors.Join(errs...), &integrity) || integrity.Chunk != 1 || integrity.Round != 0 || integrity.Shape != "" {
		t.Fatalf("errors %v, want an overflow in round 0, chunk 1", errs)
	}
	if msg := integrity.Error(); !strings.Contains(msg, "overflow or corruption") {
		t.Errorf("message %q", msg)
	}
}

// TestTamperedOnce: damaged answers count as lost; another copy is asked for.
func TestTamperedOnce(t *testing.T) {
	for name, damage := range map[string]func(p *wire.Packet){
		"lane":     func(p *wire.Packet) { p.Lanes[3] ^= 1 << 9 },
		"tag":      func(p *wire.Packet) { p.Tag[1]++ },
		"mask":     func(p *wire.Packet) { p.Contributors = 1 },
		"elems":    func(p *wire.Packet) { p.Elems-- },
		"exponent": func(p *wire.Packet) { p.Exponent++ },
		"flags":    func(p *wire.Packet) { p.Flags ^= wire.FlagLast },
		"epoch":    func(p *wire.Packet) { p.Epoch++ },
		"NACK":     func(p *wire.Packet) { p.Type, p.Blocks, p.Reason = wire.TypeNack, 0, wire.ReasonRank },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			damaged := 0
			n := newTestnet(t, netConfig{ranks: 2, tamper: func(p *wire.Packet) {
				if p.Type == wire.TypeResult && p.Chunk == 1 && damaged < 2 {
					damaged++
					damage(p)
				}
			}})
			workers := n.join(t)
			n.each(t, func(r int) error {
				data := make([]int32, 600)
				data[300] = int32(r + 1)
				if _, err := workers[r].AllReduceInt32(t.Context(), "k", data); err != nil {
					return err
				}
				if data[300] != 3 {
					return fmt.Errorf("sum %d, want 3", data[300])
				}
				return nil
			})
			wrong := workers[0].Stats().Wrong + workers[1].Stats().Wrong
			if damaged != 2 || wrong != 2 {
				t.Errorf("%d answers damaged, %d found wrong, want 2 of 2", damaged, wrong)
			}
		})
	}
}

// TestTamperedAlways: what is always wrong is no accident.
func TestTamperedAlways(t *testing.T) {
	for name, c := range map[string]struct {
		damage func(p *wire.Packet)
		want   string
	}{
		"lane":     {func(p *wire.Packet) { p.Lanes[3]++ }, "overflow or corruption"},
		"mask":     {func(p *wire.Packet) { p.Contributors = 2 }, "1 ranks (mask 0x2) instead of 2"},
		"exponent": {func(p *wire.Packet) { p.Exponent = 9 }, "exponent 9 instead of 0"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newTestnet(t, netConfig{ranks: 2, tamper: func(p *wire.Packet) {
				if p.Type == wire.TypeResult {
					c.damage(p)
				}
			}})
			workers := n.join(t)
			err := errors.Join(n.errors(func(r int) error {
				_, err := workers[r].AllReduceInt32(t.Context(), "k", make([]int32, 10))
				return err
			})...)
			if !errors.As(err, new(*worker.IntegrityError)) || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%v, want %q", err, c.want)
			}
		})
	}
}

// TestResidualPlace: what is clipped anywhere in a long vector comes back at its own place.
func TestResidualPlace(t *testing.T) {
	n := newTestnet(t, netConfig{ranks: 2, chunks: 2})
	workers := n.join(t)
	const size = 3*512 + 40
	places := []int{0, 255, 256, 511, 512, 1000, size - 1}
	n.each(t, func(r int) error {
		data := make([]float32, size)
		for i := range data {
			data[i] = 1
		}
		if _, err := workers[r].AllReduce(t.Context(), "w", data); err != nil {
			return err
		}
		clear(data)
		for k, p := range places {
			data[p] = float32(1000 + k)
		}
		info, err := workers[r].AllReduce(t.Context(), "w", data)
		if err != nil {
			return err
		}
		if info.Clipped != len(places) || info.Saturated != 5 {
			return fmt.Errorf("%d values clipped, %d chunks saturated", info.Clipped, info.Saturated)
		}
		rest := make([]float32, size)
		if _, err := workers[r].AllReduce(t.Context(), "w", rest); err != nil {
			return err
		}
		want := make([]float32, size)
		for k, p := range places {
			want[p] = float32(2 * (1000 + k))
			data[p] += rest[p] // 2*(16-2^-26) and what was missing
			if math.Abs(float64(data[p]-want[p])) > 1e-3 {
				return fmt.Errorf("value %d is %v and then %v, together want %v", p, data[p]-rest[p], rest[p], want[p])
			}
			rest[p] = 0
		}
		if i := slices.IndexFunc(rest, func(x float32) bool { return x != 0 }); i >= 0 {
			return fmt.Errorf("a remainder of %v came at %d", rest[i], i)
		}
		return nil
	})
}

// TestTensorErrors: mistakes in the use of keys.
func TestTensorErrors(t *testing.T) {
	n := newTestnet(t, netConfig{ranks: 1})
	w := n.join(t)[0]
	for _, x := range []float32{1, math.MaxFloat32} { // the second is clipped nearly whole
		if _, err := w.AllReduce(t.Context(), "w", []float32{x}); err != nil {
			t.Fatal(err)
		}
	}
	_, err := w.AllReduce(t.Context(), "w", []float32{math.MaxFloat32})
	bad, ok := errors.AsType[*worker.NonFiniteError](err)
	if !ok || !bad.Residual || !strings.Contains(err.Error(), "diverges") {
		t.Errorf("%v, want a remainder that overflows", err)
	}

	n = newTestnet(t, netConfig{ranks: 1})
	w = n.join(t)[0]
	if _, err := w.AllReduce(t.Context(), "w", make([]float32, 5)); err != nil {
		t.Fatal(err)
	}
	if _, err := w.AllReduce(t.Context(), "w", make([]float32, 6)); err == nil || !strings.Contains(err.Error(), "one key per tensor") {
		t.Errorf("other length: %v", err)
	}
}

// TestNextEpoch: a round announces the epoch of the rounds after it.
func TestNextEpoch(t *testing.T) {
	n := newTestnet(t, netConfig{ranks: 2})
	workers := n.join(t)
	reduce := func(want uint16) {
		n.each(t, func(r int) error {
			data := []int32{int32(r), 1}
			info, err := workers[r].AllReduceInt32(t.Context(), "k", data)
			if err == nil && (info.Epoch != want || data[1] != 2) {
				err = fmt.Errorf("epoch %d, sum %v, want epoch %d", info.Epoch, data, want)
			}
			return err
		})
	}
	reduce(testEpoch)
	n.install(testEpoch + 1)
	n.sw.Arm(testJob, testEpoch, testEpoch+1)
	reduce(testEpoch) // its RESULT announces
	reduce(testEpoch + 1)
	n.sw.Remove(testJob, testEpoch)
	reduce(testEpoch + 1)
	n.sw.Remove(testJob, testEpoch+1)
	err := errors.Join(n.errors(func(r int) error {
		ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
		defer cancel()
		_, err := workers[r].AllReduceInt32(ctx, "k", []int32{1, 1})
		return err
	})...)
	var late *worker.DeadlineError
	if !errors.As(err, &late) || late.Unknown != wire.ReasonUnknownJob || !strings.Contains(err.Error(), "job was removed") {
		t.Errorf("%v, want a deadline while nobody knows the job", err)
	}
}

// TestStrangePackets: what is not an answer to this round is counted and does no harm.
func TestStrangePackets(t *testing.T) {
	n := newTestnet(t, netConfig{ranks: 1})
	w := n.join(t)[0]
	in := func(payload []byte) { n.links[0].In(wire.AppendUDP(nil, service, workerAddr(0), payload, true)) }
	send := func(change func(p *wire.Packet)) {
		p := &wire.Packet{Header: wire.Header{Type: wire.TypeResult, Flags: wire.FlagLast | wire.FlagModular, Job: testJob,
			Epoch: testEpoch, Blocks: 1, Elems: 2, Contributors: 1}}
		change(p)
		p.Seal()
		b := make([]byte, p.Len())
		p.Encode(b)
		in(b)
	}
	for _, b := range [][]byte{{}, {1, 2, 3}, make([]byte, wire.HeaderLen), make([]byte, 1400)} {
		in(b)
	}
	send(func(p *wire.Packet) { p.Type = wire.TypeGrad })
	send(func(p *wire.Packet) { p.Type = wire.TypePartial })
	const malformed = 6
	send(func(p *wire.Packet) { p.Job++ })
	send(func(p *wire.Packet) { p.Round++ })
	send(func(p *wire.Packet) { p.Round-- })
	send(func(p *wire.Packet) { p.Chunk++ })
	const late = 4
	data := []int32{40, 2}
	if _, err := w.AllReduceInt32(t.Context(), "k", data); err != nil || !slices.Equal(data, []int32{40, 2}) {
		t.Fatalf("sum %v, %v", data, err)
	}
	if s := w.Stats(); s.Malformed != malformed || s.Late != late || s.Wrong != 0 || s.Results != 1 {
		t.Errorf("stats %+v, want %d malformed, %d late", s, malformed, late)
	}
}

// TestStrikesPerRound: wrong answers of one round do not count against the next.
func TestStrikesPerRound(t *testing.T) {
	damaged := map[uint32]int{}
	n := newTestnet(t, netConfig{ranks: 1, tamper: func(p *wire.Packet) {
		if damaged[p.Round]++; damaged[p.Round] <= 2 {
			p.Lanes[0]++
		}
	}})
	w := n.join(t)[0]
	for range 2 {
		if _, err := w.AllReduceInt32(t.Context(), "k", []int32{1}); err != nil {
			t.Fatal(err)
		}
	}
	if s := w.Stats(); s.Wrong != 4 {
		t.Errorf("%d answers found wrong, want 4", s.Wrong)
	}
}
