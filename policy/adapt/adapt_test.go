package adapt

import (
	"encoding/json"
	"math"
	"math/bits"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"xagg/policy/rules"
	"xagg/policy/telemetry"
)

func threshold(t testing.TB) Rule {
	t.Helper()
	r, err := rules.Compile(rules.Spec{
		Name: "lag", Score: "rank.lag_p50", Enter: rules.Enter{Above: 2, For: 3, Of: 5}, Leave: rules.Leave{Below: 1, For: 4, Of: 5},
	})
	if err != nil {
		t.Fatal(err)
	}
	return ByScore(r)
}

// world is a job whose plan is what its engine decided.
type world struct {
	engine  *Engine
	steered uint64
	round   float64
}

// step has a round pass in which ranks have the given scores, dt seconds after the one before.
func (w *world) step(now float64, scores ...float64) Decision {
	w.round++
	s := &telemetry.Snapshot{
		Time: now, Job: telemetry.Job{Size: float64(len(scores)), Round: w.round, Rounds: w.round},
		Servers: []telemetry.Server{{Name: "s0", Ready: true}},
	}
	for i, score := range scores {
		s.Ranks = append(s.Ranks, telemetry.Rank{Rank: float64(i), LagP50: score, Steered: w.steered>>i&1 != 0})
	}
	d := w.engine.Step(s)
	w.steered = d.Steered
	return d
}

// TestReacts: a rank that becomes slow is steered within the rounds that the rule counts, and comes back likewise.
func TestReacts(t *testing.T) {
	w := world{engine: New(4, threshold(t), DefaultLimits())}
	now := 0.0
	for range 20 {
		now++
		if d := w.step(now, 0, 0, 0, 0); len(d.Moves) > 0 {
			t.Fatalf("nobody is slow: %+v", d.Moves)
		}
	}
	rounds := func(to uint64, scores ...float64) (n int, last Decision) {
		for w.steered != to {
			now++
			if n++; n > 30 {
				t.Fatalf("steered %#x after %d rounds, want %#x", w.steered, n, to)
			}
			last = w.step(now, scores...)
		}
		return n, last
	}
	n, d := rounds(1<<3, 0, 0, 0, 4)
	if n != 3 || len(d.Moves) != 1 || d.Moves[0] != (Move{3, Server, "score 4 above 2 in 3 of 5 rounds"}) {
		t.Errorf("steered after %d rounds: %+v", n, d.Moves)
	}
	for range 20 { // between the thresholds it stays
		now++
		if d := w.step(now, 0, 0, 0, 1.5); len(d.Moves) > 0 {
			t.Fatalf("it stays: %+v", d.Moves)
		}
	}
	if n, d = rounds(0, 0, 0, 0, 0.5); n != 4 || d.Ranks[3].Place != Switch {
		t.Errorf("back after %d rounds: %+v", n, d)
	}
}

// TestFastRounds: where several rounds pass from one snapshot to the next they count as so many, and yet no snapshot moves a rank by itself.
func TestFastRounds(t *testing.T) {
	for _, tt := range []struct {
		rounds      float64 // from one snapshot to the next
		there, back int     // snapshots until a rank is steered, and until it is back
	}{{1, 3, 4}, {2, 2, 2}, {3, 2, 2}, {1000, 2, 2}, {-5, 3, 4}} { // numbers of rounds begin anew where a job recovers
		l := DefaultLimits()
		l.Dwell = 0
		w := world{engine: New(4, threshold(t), l), round: 1e4}
		now := 0.0
		until := func(to uint64, score float64) (n int) {
			for ; w.steered != to; n++ {
				now++
				w.round += tt.rounds - 1
				w.step(now, 0, 0, 0, score)
			}
			return n
		}
		now++
		w.step(now, 0, 0, 0, 0)
		if there := until(1<<3, 4); there != tt.there {
			t.Errorf("%g rounds between snapshots: steered after %d snapshots, want %d", tt.rounds, there, tt.there)
		}
		if back := until(0, 0); back != tt.back {
			t.Errorf("%g rounds between snapshots: back after %d snapshots, want %d", tt.rounds, back, tt.back)
		}
	}
}

// TestHeld: who may not move is told why.
func TestHeld(t *testing.T) {
	for _, tt := range []struct {
		name   string
		change func(*Limits)
		scores []float64
		want   uint64
		held   map[int]string
	}{
		{"cohort", func(l *Limits) {}, []float64{3, 4, 5}, 1 << 2, map[int]string{0: "the switch keeps at least 2 ranks", 1: "the switch keeps at least 2 ranks"}},
		{"servers", func(l *Limits) { l.Steered = 1 }, []float64{0, 3, 4, 0}, 1 << 2, map[int]string{1: "servers sum at most 1 ranks"}},
		{"moves", func(l *Limits) { l.Moves = 1 }, []float64{0, 3, 4, 0}, 1 << 2, map[int]string{1: "the job has used its 1 moves of a minute"}},
		{"frozen", func(l *Limits) { l.Freeze = true }, []float64{0, 0, 4}, 0, map[int]string{2: "the policy is frozen"}},
		{"pinned to the switch", func(l *Limits) { l.Pin = map[int]Place{2: Switch} }, []float64{0, 0, 4}, 0, map[int]string{2: "it is pinned"}},
		{"pinned to servers", func(l *Limits) { l.Pin = map[int]Place{0: Server}; l.Freeze = true }, []float64{0, 0, 0}, 1, map[int]string{0: "it is pinned"}},
		{"dry run", func(l *Limits) { l.DryRun = true }, []float64{0, 0, 4}, 0, nil},
	} {
		limits := DefaultLimits()
		tt.change(&limits)
		w := world{engine: New(len(tt.scores), threshold(t), limits)}
		var d Decision
		for i := range 4 {
			d = w.step(float64(i), tt.scores...)
		}
		if w.steered != tt.want {
			t.Errorf("%s: steered %b, want %b", tt.name, w.steered, tt.want)
		}
		for rank, held := range tt.held {
			if d.Ranks[rank].Held != held {
				t.Errorf("%s: rank %d: held %q, want %q", tt.name, rank, d.Ranks[rank].Held, held)
			}
		}
		if limits.DryRun && (len(d.Moves) != 1 || !d.DryRun) {
			t.Errorf("%s: it does not say what it would do: %+v", tt.name, d)
		}
	}
}

// TestBadSnapshots: what cannot be moves nobody, and is said.
func TestBadSnapshots(t *testing.T) {
	w := world{engine: New(2, threshold(t), DefaultLimits())}
	w.step(5, 0, 0)
	for want, d := range map[string]Decision{
		"time ran back":                  w.step(4, 9, 9),
		"rank.lag_p50 is NaN":            w.step(6, math.NaN(), 0),
		"snapshot of 3 ranks":            w.step(7, 0, 0, 0),
		"rank.lag_p50 is -1, want none":  w.step(8, -1, 0),
		"rank.lag_p50 is +Inf, want a f": w.step(9, math.Inf(1), 0),
	} {
		if !strings.Contains(d.Error, want) || len(d.Moves) > 0 || d.Steered != 0 {
			t.Errorf("got %+v, want %q", d, want)
		}
	}
}

// TestLimitsHold: whatever scores do, no limit is exceeded, and the same snapshots give the same decisions.
func TestLimitsHold(t *testing.T) {
	rule := threshold(t)
	rapid.Check(t, func(t *rapid.T) {
		ranks := rapid.IntRange(1, 8).Draw(t, "ranks")
		limits := Limits{
			Dwell: time.Duration(rapid.IntRange(0, 20).Draw(t, "dwell")) * time.Second, Moves: rapid.IntRange(1, 6).Draw(t, "moves"),
			MinCohort: 2, Steered: rapid.IntRange(0, 3).Draw(t, "steered"),
		}
		a, b := world{engine: New(ranks, rule, limits)}, world{engine: New(ranks, rule, limits)}
		seed := rapid.Uint64().Draw(t, "seed")
		random := rand.New(rand.NewPCG(seed, 0))
		noise := rapid.SampledFrom([]float64{1.5, 3, 10}).Draw(t, "noise")
		var moves []float64
		lastMove := map[int]float64{}
		now := 0.0
		for range 120 {
			now += random.Float64() * 2
			scores := make([]float64, ranks)
			for i := range scores {
				scores[i] = random.Float64() * noise
			}
			before := a.steered
			d := a.step(now, scores...)
			again := b.step(now, scores...)
			x, _ := json.Marshal(d)
			y, _ := json.Marshal(again)
			if string(x) != string(y) {
				t.Fatalf("two engines decide\n%s\n%s", x, y)
			}
			if d.Error != "" {
				t.Fatal(d.Error)
			}
			if bits.OnesCount64(before^d.Steered) != len(d.Moves) {
				t.Fatalf("from %b to %b by %+v", before, d.Steered, d.Moves)
			}
			for _, m := range d.Moves {
				moves = append(moves, now)
				if at, ok := lastMove[m.Rank]; ok && now-at < limits.Dwell.Seconds() {
					t.Fatalf("rank %d moves %v s after its last move", m.Rank, now-at)
				}
				lastMove[m.Rank] = now
			}
			if n := len(moves) - limits.Moves - 1; n >= 0 && now-moves[n] < 60 {
				t.Fatalf("%d moves within %v s", limits.Moves+1, now-moves[n])
			}
			if n := bits.OnesCount64(d.Steered); n > 0 && (ranks-n < 2 || limits.Steered > 0 && n > limits.Steered) {
				t.Fatalf("%d of %d ranks steered", n, ranks)
			}
		}
	})
}

func TestValidate(t *testing.T) {
	for want, change := range map[string]func(*Limits){
		"dwell: -1s: want 0s to 24h":                                func(l *Limits) { l.Dwell = -time.Second },
		"moves: 0 a minute: want 1 to 600":                          func(l *Limits) { l.Moves = 0 },
		"min_cohort: 1: want 2 to 64":                               func(l *Limits) { l.MinCohort = 1 },
		"steered: 65: want 0 (no limit) to 64":                      func(l *Limits) { l.Steered = 65 },
		"pin: rank 4: ranks are 0 to 3":                             func(l *Limits) { l.Pin = map[int]Place{4: Switch} },
		`pin: rank 1: "moon" is no place`:                           func(l *Limits) { l.Pin = map[int]Place{1: "moon"} },
		"pin: 3 of 4 ranks are pinned to servers, which leaves the": func(l *Limits) { l.Pin = map[int]Place{0: Server, 1: Server, 2: Server} },
	} {
		l := DefaultLimits()
		change(&l)
		if err := l.Validate(4); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %s", err, want)
		}
	}
	l := DefaultLimits()
	if err := l.Validate(0); err != nil {
		t.Error(err)
	}
}

// BenchmarkThousandJobs decides for 1,000 jobs of 16 ranks each.
func BenchmarkThousandJobs(b *testing.B) {
	rule, err := rules.Shipped("outlier")
	if err != nil {
		b.Fatal(err)
	}
	engines := make([]*Engine, 1000)
	for i := range engines {
		engines[i] = New(16, ByScore(rule), DefaultLimits())
	}
	s := &telemetry.Snapshot{Job: telemetry.Job{Size: 16, Rounds: 1, RoundP50: 0.1}, Ranks: make([]telemetry.Rank, 16)}
	for b.Loop() {
		s.Time++
		s.Job.Round++
		for _, e := range engines {
			if d := e.Step(s); d.Error != "" {
				b.Fatal(d.Error)
			}
		}
	}
}

// TestFirstCohort: ranks that servers sum in the beginning come to the switch together, and no limit counts that; a cohort that is predicted to
// cost more than it brings is dissolved as a whole.
func TestFirstCohort(t *testing.T) {
	c := DefaultConfig()
	c.Moves = 3
	engine, err := c.New(8)
	if err != nil {
		t.Fatal(err)
	}
	steered := uint64(0xff)
	now := 0.0
	round := func(ready func(rank, round int) float64) Decision {
		now++
		s := &telemetry.Snapshot{Time: now, Job: telemetry.Job{Size: 8, Round: now, Rounds: now, Quorum: 5, Least: 5}, Servers: []telemetry.Server{{Name: "s0", Ready: true}}}
		for i := range 8 {
			r := telemetry.Rank{Rank: float64(i), Steered: steered>>i&1 != 0, OwnP50: 0.01}
			for k := range 8 {
				r.Ready = append(r.Ready, ready(i, int(now)+k))
			}
			s.Ranks = append(s.Ranks, r)
		}
		d := engine.Step(s)
		if n := 8 - bits.OnesCount64(d.Steered); n == 1 {
			t.Fatalf("a cohort of a single rank: %+v", d)
		}
		steered = d.Steered
		return d
	}
	var first Decision
	for range 4 {
		if d := round(func(rank, _ int) float64 { return 0.1 }); len(d.Moves) > 0 {
			first = d
		}
	}
	if len(first.Moves) != 7 || bits.OnesCount64(steered) != 1 {
		t.Fatalf("the first cohort: %+v", first.Moves)
	}
	// Seven ranks are more than three moves a minute.
	turns := func(rank, round int) float64 {
		if round%8 == rank || round%8 == (rank+4)%8 {
			return 1
		}
		return 0.1
	}
	var d Decision
	for range 20 {
		d = round(turns)
	}
	if bits.OnesCount64(steered) != 4 || !strings.Contains(d.Ranks[bits.TrailingZeros64(^steered)].Held, "3 moves of a minute") {
		t.Errorf("steered %b, %+v", steered, d.Ranks)
	}
	c.Moves = 600
	e, err := c.New(8)
	if err != nil {
		t.Fatal(err)
	}
	e.Restore(engine.State())
	engine, now = e, now+60
	for range 5 {
		round(turns)
	}
	if steered != 0xff {
		t.Errorf("servers had better sum all, and sum %b", steered)
	}
}

// TestChoosesQuorum: where a policy lets it, a rule that predicts has all ranks waited for while they keep step, and no longer for one that does not.
func TestChoosesQuorum(t *testing.T) {
	for _, allowed := range []bool{true, false} {
		c := DefaultConfig()
		c.Quorum = allowed
		engine, err := c.New(4)
		if err != nil {
			t.Fatal(err)
		}
		now, steered, quorum, wait := 0.0, uint64(1), 3, 0.0
		rounds := func(n int, last float64) (changes int) {
			for range n {
				now++
				s := &telemetry.Snapshot{Time: now, Job: telemetry.Job{Size: 4, Round: now, Rounds: now, Quorum: float64(quorum), Least: 3, Wait: wait},
					Servers: []telemetry.Server{{Name: "s0", Ready: true}}}
				for i := range 4 {
					x := 0.1
					if i == 0 {
						x = last
					}
					s.Ranks = append(s.Ranks, telemetry.Rank{Rank: float64(i), Steered: steered>>i&1 != 0, OwnP50: 0.01, Ready: slices.Repeat([]float64{x}, 8)})
				}
				d := engine.Step(s)
				steered = d.Steered
				if d.Quorum != 0 {
					quorum, wait = d.Quorum, d.Wait
					changes++
				}
			}
			return changes
		}
		for _, step := range []struct {
			last float64
			want int
		}{{0.1, 4}, {0.4, 3}, {0.1, 4}} {
			changes, want := rounds(10, step.last), 1
			if !allowed {
				want, step.want = 0, 3
			}
			if quorum != step.want || changes != want || wait != 0 {
				t.Errorf("allowed %v, the last after %v: %d within %v after %d changes, want %d", allowed, step.last, quorum, wait, changes, step.want)
			}
		}
	}
}

// BenchmarkDecide is a decision for each of 1,000 jobs of 16 ranks, by each rule.
func BenchmarkDecide(b *testing.B) {
	for _, name := range Names() {
		b.Run(name, func(b *testing.B) {
			c := DefaultConfig()
			c.Rule = name
			const jobs, ranks = 1000, 16
			random := rand.New(rand.NewPCG(1, 1))
			var engines []*Engine
			var snapshots []*telemetry.Snapshot
			for range jobs {
				e, err := c.New(ranks)
				if err != nil {
					b.Fatal(err)
				}
				w := telemetry.NewWindow(ranks, c.Window)
				for round := range uint32(c.Window) {
					for rank := range ranks {
						if err := w.Add(time.Duration(round)*time.Millisecond, telemetry.Report{Rank: rank, Rounds: []telemetry.Round{{
							Number: round, Compute: time.Duration(random.IntN(1e8)), Comm: time.Duration(random.IntN(1e8)), Chunks: 64, Packets: 64,
						}}}); err != nil {
							b.Fatal(err)
						}
					}
				}
				s := &telemetry.Snapshot{Job: telemetry.Job{Size: ranks}, Servers: []telemetry.Server{{Name: "s0", Ready: true}}}
				w.Fill(s, time.Second, 1e6)
				engines, snapshots = append(engines, e), append(snapshots, s)
			}
			for b.Loop() {
				for i, e := range engines {
					snapshots[i].Time++
					snapshots[i].Job.Round++
					if d := e.Step(snapshots[i]); d.Error != "" {
						b.Fatal(d.Error)
					}
				}
			}
			b.ReportMetric(float64(b.Elapsed().Milliseconds())/float64(b.N), "ms/1000jobs")
		})
	}
}
