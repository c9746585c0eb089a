package transport

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"math/bits"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"xagg/agg"
	"xagg/recovery"
	"xagg/wire"
	"xagg/worker/scale"
)

// mortal is a quorum job whose ranks die and come back. It all-reduces tensors of one length, whose order the seed
// decides, and follows by the masks alone what every rank has to give to each: only the number of an all-reduce tells a
// rank that comes back which one it is.
type mortal struct {
	*world
	steps, length int
	epoch         uint16
	old           []uint16      // epochs that are gone
	at, pace      time.Duration // when something happens next, and how long after that at most
	given         map[turn]gift
	residual      map[residualKey]gift // what sums lacked so far of what a rank gave
	results       map[uint32]*told     // by round
	deaths        int
	backs         int
	refusals      int // of ranks that could not be let in yet
	first         int // chunks of ranks' first all-reduces after they came back that have what they gave
	handed        int
}

// turn is a rank's part in an all-reduce.
type turn struct {
	number uint64
	rank   int
}

type residualKey struct {
	rank int
	key  tensorKey
}

// gift is values of one of two types.
type gift struct {
	ints   []int32
	floats []float32
}

// told is what ranks were told of a round.
type told struct {
	Round
	number uint64
	ranks  map[int]bool
}

// newMortal returns the job of a seed.
func newMortal(t testing.TB, seed uint64) *mortal {
	rng := rand.New(rand.NewPCG(seed, 4))
	cfg := worldConfig{
		seed: seed, ranks: 2 + rng.IntN(4), servers: 1 + rng.IntN(2), depth: 1 + rng.IntN(3), chunks: 1 + rng.IntN(3), pool: 1 << rng.IntN(5),
		loss: []float64{0, 0.02, 0.1}[rng.IntN(3)], dup: 0.05, jitter: []time.Duration{0, 200 * time.Microsecond, 3 * time.Millisecond}[rng.IntN(3)],
		steered: rng.Uint64(),
	}
	cfg.steered &= 1<<cfg.ranks - 1
	cfg.ahead = cfg.depth + rng.IntN(4)
	cfg.plan = agg.ServerPlan{Quorum: 1 + rng.Uint32N(uint32(cfg.ranks)), Rounds: 256, WaitUs: []uint32{0, 300, 5000}[rng.IntN(3)]}
	m := mortalOf(newWorld(t, cfg), 20, 1+rng.IntN(4*wire.MaxLanes))
	m.pace = []time.Duration{2 * time.Millisecond, 10 * time.Millisecond, 50 * time.Millisecond}[rng.IntN(3)]
	m.intrude = m.happen
	return m
}

// mortalOf returns a job of so many all-reduces of so many values, in a world to which nothing happens yet.
func mortalOf(w *world, steps, length int) *mortal {
	m := &mortal{
		world: w, steps: steps, length: length, epoch: 1,
		given: map[turn]gift{}, residual: map[residualKey]gift{}, results: map[uint32]*told{},
	}
	for _, k := range m.ranks {
		m.watch(k)
	}
	return m
}

// key returns the tensor of an all-reduce.
func (m *mortal) key(number uint64) tensorKey {
	n := m.mix(number, 99, 0) % 5
	return tensorKey{fmt.Sprint("tensor ", n), n >= 3}
}

func (m *mortal) mix(number uint64, rank, i int) uint64 {
	x := (m.seed<<40 ^ number<<24 ^ uint64(rank)<<16 ^ uint64(i)) * 0x9e3779b97f4a7c15
	x = (x ^ x>>32) * 0xd6e8feb86659fd93
	return x ^ x>>32
}

// input returns what a rank all-reduces.
func (m *mortal) input(t turn) (g gift) {
	for i := range m.length {
		x := int32(m.mix(t.number, t.rank, i))
		if m.key(t.number).modular {
			g.ints = append(g.ints, x>>12)
		} else {
			g.floats = append(g.floats, float32(x)/(1<<31))
		}
	}
	return g
}

func (m *mortal) begin(k *rank, step int) *Call {
	number := uint64(step)
	g := m.input(turn{number, k.id})
	key := m.key(number)
	if key.modular {
		return m.ints(k, key.key, g.ints)
	}
	return m.floats(k, key.key, g.floats)
}

// gave returns what a rank gives to an all-reduce that it has begun: its input, and what sums of the tensor lacked before.
func (m *mortal) gave(t turn) gift {
	g, ok := m.given[t]
	if ok {
		return g
	}
	g = m.input(t)
	at := residualKey{t.rank, m.key(t.number)}
	rest := m.residual[at]
	for i, v := range rest.ints {
		g.ints[i] += v
	}
	for i, v := range rest.floats {
		g.floats[i] += v
	}
	m.residual[at] = gift{make([]int32, len(g.ints)), make([]float32, len(g.floats))}
	m.given[t] = g
	return g
}

// watch checks what a rank is told from now on.
func (m *mortal) watch(k *rank) {
	observe := k.cfg.Observe
	k.cfg.Observe = func(r Round) {
		observe(r)
		m.observe(k, k.done, &k.rounds[len(k.rounds)-1])
	}
}

// observe checks a round that a rank was told of.
func (m *mortal) observe(k *rank, number uint64, r *Round) {
	wrong := func(format string, args ...any) {
		m.Fatalf("seed %d: rank %d, round %d of all-reduce %d: %s", m.seed, k.id, r.Number, number, fmt.Sprintf(format, args...))
	}
	if key := m.key(number); r.Key != key.key {
		wrong("is of %q, want %q", r.Key, key.key)
	}
	if other, ok := m.results[r.Number]; !ok {
		m.results[r.Number] = &told{*r, number, map[int]bool{k.id: true}}
	} else if other.number != number || !slices.Equal(other.Sum, r.Sum) || !slices.Equal(other.Masks, r.Masks) || other.Exponent != r.Exponent {
		wrong("contributors %x, exponent %d; another was told of all-reduce %d, contributors %x, exponent %d, or other sums", r.Masks,
			r.Exponent, other.number, other.Masks, other.Exponent)
	} else {
		other.ranks[k.id] = true
	}
	if r.Scout {
		return
	}
	limit := scale.Limit(m.worldConfig.ranks)
	for i, got := range r.Sum {
		mask := r.Masks[i/wire.MaxLanes]
		want := int32(0)
		for ; mask != 0; mask &= mask - 1 {
			g := m.gave(turn{number, bits.TrailingZeros64(mask)})
			if r.Modular {
				want += g.ints[r.Offset+i]
				continue
			}
			lane := math.RoundToEven(math.Ldexp(float64(g.floats[r.Offset+i]), int(r.Exponent)))
			want += int32(max(-float64(limit), min(lane, float64(limit))))
		}
		if got != want {
			wrong("value %d is %d, want %d of contributors %#x", r.Offset+i, got, want, r.Masks[i/wire.MaxLanes])
		}
	}
	m.leaveOut(k, number, r, limit)
	if number == k.cfg.AllReduces && number > 0 {
		for _, mask := range r.Masks {
			m.first += int(mask >> k.id & 1)
		}
	}
}

// leaveOut notes what a round lacks of what a rank gave.
func (m *mortal) leaveOut(k *rank, number uint64, r *Round, limit int32) {
	g := m.gave(turn{number, k.id})
	rest := m.residual[residualKey{k.id, m.key(number)}]
	for i := range r.Sum {
		at := r.Offset + i
		switch in := r.Masks[i/wire.MaxLanes]>>k.id&1 != 0; {
		case r.Modular && !in:
			rest.ints[at] = g.ints[at]
		case !r.Modular && !in:
			rest.floats[at] = g.floats[at]
		case !r.Modular:
			scale.Clipped(g.floats[at:at+1], r.Exponent, limit, func(_ int, missing float32) { rest.floats[at] = missing })
		}
	}
}

// happen lets ranks die and come back, and devices lose their memory.
func (m *mortal) happen() time.Duration {
	for m.now >= m.at {
		m.at += time.Duration(1 + m.rng.Int64N(int64(m.pace)))
		switch k := m.ranks[m.rng.IntN(len(m.ranks))]; {
		case m.at > time.Second: // let them come to an end
			m.at = math.MaxInt64
			for _, k := range m.ranks {
				if !k.dead {
					continue
				}
				m.recover(false, k)
			}
			if m.recover(false) {
				return m.at
			}
		case k.dead:
			m.recover(m.rng.IntN(4) == 0, k)
		case m.rng.IntN(3) == 0:
			m.recover(m.rng.IntN(4) == 0)
		case m.mayDie(k):
			m.die(k)
		}
	}
	return m.at
}

// oldest returns the oldest round that a rank has not finished.
func (k *rank) oldest() uint32 {
	if len(k.live) > 0 {
		return k.live[0].number
	}
	return k.window.NextRound()
}

// mayDie reports whether those that stay are enough: one that came back counts from its first round on.
func (m *mortal) mayDie(k *rank) bool {
	first := uint32(math.MaxUint32)
	for _, o := range m.ranks {
		if !o.dead && o != k {
			first = min(first, o.oldest())
		}
	}
	enough := 0
	for _, o := range m.ranks {
		if !o.dead && o != k && o.cfg.Round <= first {
			enough++
		}
	}
	return enough >= int(m.plan.Quorum) && enough > 0
}

// die takes a rank away with all that it alone had.
func (m *mortal) die(k *rank) {
	m.deaths++
	k.dead = true
	for i, c := range k.calls {
		if c.started {
			m.gave(turn{uint64(i), k.id})
		}
	}
	for number, r := range m.results {
		if delete(r.ranks, k.id); len(r.ranks) == 0 {
			delete(m.results, number)
		}
	}
	maps.DeleteFunc(m.residual, func(at residualKey, _ gift) bool { return at.rank == k.id })
}

// recover carries out a recovery, with which a rank may come back. Where it is cut short some are not told to go on.
func (m *mortal) recover(cut bool, back ...*rank) bool {
	states := map[int]recovery.State{}
	for _, k := range m.ranks {
		if !k.dead {
			states[k.id] = k.Freeze()
		}
	}
	plan, err := recovery.Make(states)
	if ahead, ok := errors.AsType[*recovery.AheadError](err); ok {
		m.die(m.ranks[ahead.Rank])
		return m.recover(cut, back...)
	}
	if err != nil {
		m.Fatalf("seed %d: %v", m.seed, err)
	}
	if len(back) > 0 && !plan.CanReturn(uint32(m.depth), m.plan.Rounds) {
		m.refusals++
		back = nil
	}
	if len(back) > 0 {
		plan.LetIn()
	}
	results := map[recovery.ChunkID][]byte{}
	for rank, ids := range plan.HandOver {
		m.handed += len(ids)
		payloads, err := m.ranks[rank].Results(ids)
		if err != nil {
			m.Fatal(err)
		}
		for i, id := range ids {
			results[id] = slices.Clone(payloads[i])
		}
	}
	m.old = append(m.old, m.epoch)
	m.epoch = after(m.epoch)
	m.install(m.epoch)
	m.sw.Remove(1, m.old[len(m.old)-1])
	for _, server := range m.servers {
		server.Remove(1, m.old[len(m.old)-1])
	}
	for _, k := range m.ranks {
		if k.dead || cut && m.rng.IntN(2) == 0 {
			continue
		}
		var lacked [][]byte
		for _, id := range plan.Lacks[k.id] {
			lacked = append(lacked, results[id])
		}
		if err := k.Resume(m.now, m.epoch, plan.Restart, lacked); err != nil {
			m.Fatalf("seed %d: rank %d: %v", m.seed, k.id, err)
		}
	}
	for _, k := range back {
		m.comeBack(k.id, &plan)
	}
	return true
}

// comeBack puts a rank without any memory into the place of one that died.
func (m *mortal) comeBack(id int, plan *recovery.Plan) {
	m.backs++
	maps.DeleteFunc(m.sent, func(p place, _ []int32) bool { return int(p.rank) == id && p.round >= plan.Return })
	maps.DeleteFunc(m.given, func(t turn, _ gift) bool { return t.rank == id && t.number >= plan.ReturnAllReduce })
	k := m.newRank(id, Config{Epoch: m.epoch, Round: plan.Return, Seq: plan.ReturnSeq, AllReduces: plan.ReturnAllReduce, Returns: plan.Returns})
	k.next = int(plan.ReturnAllReduce)
	for range k.next {
		k.calls = append(k.calls, &Call{done: true})
	}
	m.watch(k)
	m.ranks[id] = k
}

// TestReturns: whoever dies and comes back when, with several tensors of one length: all that take part have the same sums
// of the same ranks, of what these gave to that all-reduce, and a rank that came back gives at once.
func TestReturns(t *testing.T) {
	seeds := uint64(150)
	if testing.Short() {
		seeds = 30
	}
	var deaths, backs, first, handed int
	for seed := range seeds {
		m := newMortal(t, seed)
		m.run(m.steps, m.begin, m.lateness)
		for _, k := range m.ranks {
			if !k.dead && k.done != uint64(m.steps) {
				t.Fatalf("seed %d: rank %d counts %d all-reduces, want %d", seed, k.id, k.done, m.steps)
			}
		}
		deaths, backs, first, handed = deaths+m.deaths, backs+m.backs, first+m.first, handed+m.handed
	}
	t.Logf("%d deaths, %d came back and were in %d chunks of their first all-reduce; %d RESULTs were handed over", deaths, backs, first, handed)
	if deaths < int(seeds) || backs < int(seeds) || first < int(seeds) || handed < int(seeds) {
		t.Error("which is too little")
	}
}

// TestReturnCompletesQuorum: a rank that came back is as good as any other, from its first all-reduce on: with it the chunks
// close when another is gone, and what it did not hear it asks for.
func TestReturnCompletesQuorum(t *testing.T) {
	m := mortalOf(newWorld(t, worldConfig{seed: 1, ranks: 3, servers: 1, steered: 7, depth: 1, chunks: 3, pool: 8,
		plan: agg.ServerPlan{Quorum: 2, WaitUs: 1000, Rounds: 8}}), 20, 200)
	lost := map[uint32]bool{} // rounds of which the first RESULT to the rank that came back was lost
	m.lose = func(to int, p *wire.Packet) bool {
		first := m.backs > 0 && to == 2 && p.Type == wire.TypeResult && !lost[p.Round]
		if first {
			lost[p.Round] = true
		}
		return first
	}
	m.intrude = func() time.Duration {
		switch k := m.ranks[0]; {
		case m.deaths == 0 && k.done == 3:
			m.die(m.ranks[2])
		case m.backs == 0 && k.done == 8:
			m.recover(false, m.ranks[2])
		case m.deaths == 1 && k.oldest() >= m.ranks[2].cfg.Round && m.backs == 1: // the others are there too
			m.die(m.ranks[1])
		}
		return math.MaxInt64
	}
	m.run(m.steps, m.begin, func(*rank) time.Duration { return time.Microsecond })
	if m.deaths != 2 || m.backs != 1 || len(lost) < 10 || m.first == 0 {
		t.Errorf("%d deaths, %d came back, %d RESULTs were lost; in the first all-reduce it was in %d chunks", m.deaths, m.backs, len(lost), m.first)
	}
	for _, k := range []*rank{m.ranks[0], m.ranks[2]} {
		if k.done != uint64(m.steps) {
			t.Errorf("rank %d has finished %d all-reduces", k.id, k.done)
		}
	}
	if m.now > time.Second {
		t.Errorf("it took %v: something waited for a timeout", m.now)
	}
}

// TestReturnWaits: while the all-reduce under way has more rounds to come than servers keep, nobody comes back: that rank's
// rounds would take the memory of those.
func TestReturnWaits(t *testing.T) {
	m := mortalOf(newWorld(t, worldConfig{seed: 1, ranks: 3, servers: 1, steered: 7, depth: 2, chunks: 1, pool: 8,
		plan: agg.ServerPlan{Quorum: 2, WaitUs: 100, Rounds: 4}}), 40, 12*wire.MaxLanes)
	m.intrude = func() time.Duration {
		if m.deaths == 0 && m.ranks[0].done == 2 {
			m.die(m.ranks[2])
		}
		if !m.ranks[2].dead {
			return math.MaxInt64
		}
		if m.now >= m.at {
			m.recover(false, m.ranks[2])
			m.at = m.now + time.Duration(m.rng.Int64N(int64(40*time.Millisecond)))
		}
		return m.at
	}
	m.run(m.steps, m.begin, func(*rank) time.Duration { return time.Microsecond })
	if m.backs != 1 || m.refusals == 0 || m.ranks[2].done != uint64(m.steps) || m.first == 0 {
		t.Errorf("it came back %d times after %d refusals, finished %d all-reduces and was in %d chunks of its first", m.backs, m.refusals,
			m.ranks[2].done, m.first)
	}
}
