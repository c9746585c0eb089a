package telemetry

import (
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
)

const ms = time.Millisecond

// reportRound has all ranks report a round: computations, and communications such that all end when the last one has come
// and a transfer has passed.
func reportRound(t *testing.T, w *Window, n uint32, at time.Duration, compute []time.Duration, transfer time.Duration) {
	t.Helper()
	slowest, second := -1, time.Duration(0)
	for r, c := range compute {
		if slowest < 0 || c > compute[slowest] {
			slowest = r
		}
	}
	for r, c := range compute {
		if r != slowest {
			second = max(second, c)
		}
	}
	last := []Last{{Rank: slowest, Chunks: 10, Blocked: compute[slowest] - second}}
	for r, c := range compute {
		round := Round{Number: n, Compute: c, Comm: compute[slowest] - c + transfer, Chunks: 10, Packets: 10, Last: last}
		if err := w.Add(at, Report{Rank: r, Rounds: []Round{round}}); err != nil {
			t.Fatal(err)
		}
	}
}

// TestWindow: what follows from reports of a job in which one rank computes longer.
func TestWindow(t *testing.T) {
	w := NewWindow(4, 8)
	for n := range uint32(20) {
		compute := []time.Duration{50 * ms, 50 * ms, 60 * ms, 120 * ms}
		reportRound(t, w, n, time.Duration(n)*time.Second, compute, 20*ms)
	}
	s := Snapshot{Job: Job{Size: 4}}
	w.Fill(&s, 21*time.Second, 1e6)
	if err := s.Check(); err != nil {
		t.Fatal(err)
	}
	near := func(name string, got, want float64) {
		t.Helper()
		if math.Abs(got-want) > 1e-9 {
			t.Errorf("%s is %v, want %v", name, got, want)
		}
	}
	near("round", s.Job.Round, 19)
	near("rounds", s.Job.Rounds, 8)
	near("job.round_p50", s.Job.RoundP50, 0.14)
	near("lag of rank 3", s.Ranks[3].LagP50, 0.07)
	near("lag of rank 2", s.Ranks[2].LagP95, 0.01)
	near("lag of rank 0", s.Ranks[0].LagP50, 0)
	near("blocked by rank 3", s.Ranks[3].BlockedP99, 0.06)
	near("blocked by rank 0", s.Ranks[0].BlockedP50, 0)
	near("last share of rank 3", s.Ranks[3].LastShare, 1)
	near("median lag", s.Job.LagMedian, 0.005)
	near("age", s.Ranks[0].Age, 2)
	near("rate of rank 3", s.Ranks[3].Rate, 1e6/0.02)
	near("computation of rank 3", s.Ranks[3].ComputeP50, 0.12)
}

// TestGaps: ranks that report late, never, twice or what cannot be do not stop the others' numbers.
func TestGaps(t *testing.T) {
	w := NewWindow(2, 8)
	for n := range uint32(1000) { // rank 1 is gone
		if err := w.Add(0, Report{Rank: 0, Rounds: []Round{{Number: n, Comm: ms, Chunks: 1}}}); err != nil {
			t.Fatal(err)
		}
	}
	if len(w.waits) > kept+1 {
		t.Errorf("%d rounds wait for a rank that is gone", len(w.waits))
	}
	s := Snapshot{Job: Job{Size: 2}}
	w.Fill(&s, time.Second, 0)
	if s.Ranks[1].Rounds != 0 || s.Ranks[0].Rounds != 8 || w.Gaps() == 0 {
		t.Errorf("%v rounds of the job, %v of rank 0, %d gaps", s.Job.Rounds, s.Ranks[0].Rounds, w.Gaps())
	}
	w.Present(1) // and known to be gone
	for n := uint32(1000); n < 1010; n++ {
		if err := w.Add(0, Report{Rank: 0, Rounds: []Round{{Number: n, Comm: ms, Chunks: 1}}}); err != nil {
			t.Fatal(err)
		}
		if w.Fill(&s, time.Second, 0); s.Job.Round != float64(n) {
			t.Fatalf("newest round %v, want %v", s.Job.Round, n)
		}
	}
	if err := w.Add(0, Report{Rank: 0, Rounds: []Round{{Number: 3, Comm: time.Hour}}}); err != nil { // told twice
		t.Fatal(err)
	}
	w.Fill(&s, time.Second, 0)
	if s.Ranks[0].CommP50 != 0.001 {
		t.Errorf("a round that was told twice counts: %v", s.Ranks[0].CommP50)
	}
	for want, bad := range map[string]Report{
		"rank 2, want 0..1":         {Rank: 2},
		"computation of -1ms":       {Rounds: []Round{{Compute: -ms}}},
		"has a clock been set":      {Rounds: []Round{{Comm: 25 * time.Hour}}},
		"2 of 1 chunks late":        {Rounds: []Round{{Chunks: 1, Late: 2}}},
		"rank 7 last in 0 of 1 chu": {Rounds: []Round{{Chunks: 1, Last: []Last{{Rank: 7}}}}},
	} {
		if err := w.Add(0, bad); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %s", err, want)
		}
	}
}

// TestOrder: reports of one rank come late, as they do when the rank is a round behind; the order in which ranks report
// does not matter.
func TestOrder(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 1))
	var want Snapshot
	for try := range 20 {
		w := NewWindow(3, 16)
		next := [3]uint32{}
		for done := 0; done < 3*40; {
			r := random.IntN(3)
			if next[r] == 40 || next[r] > min(next[0], next[1], next[2])+5 {
				continue
			}
			n := next[r]
			comm := time.Duration(10+r*3+int(n)%5) * ms
			if err := w.Add(0, Report{Rank: r, Rounds: []Round{{Number: n, Comm: comm, Chunks: 1}}}); err != nil {
				t.Fatal(err)
			}
			next[r]++
			done++
		}
		s := Snapshot{Job: Job{Size: 3}}
		w.Fill(&s, 0, 1e3)
		if try == 0 {
			want = s
			continue
		}
		for r := range s.Ranks {
			if !reflect.DeepEqual(s.Ranks[r], want.Ranks[r]) {
				t.Fatalf("try %d: rank %d: %+v, want %+v", try, r, s.Ranks[r], want.Ranks[r])
			}
		}
	}
}

func TestFields(t *testing.T) {
	for _, f := range Fields {
		if f.Name == "" || f.Doc == "" || strings.HasSuffix(f.Name, ".") {
			t.Errorf("field %+v lacks its name or meaning", f)
		}
	}
	if f, ok := Find("rank.blocked_p95"); !ok || f.Unit != "s" || f.Type != "double" {
		t.Errorf("rank.blocked_p95 is %+v, %v", f, ok)
	}
	if _, ok := Find("rank.speed"); ok {
		t.Error("there is a field rank.speed")
	}
}

func TestWrap(t *testing.T) {
	w := NewWindow(2, 4)
	for i := range uint32(10) {
		reportRound(t, w, math.MaxUint32-4+i, 0, []time.Duration{ms, 2 * ms}, ms)
	}
	s := Snapshot{Job: Job{Size: 2}}
	w.Fill(&s, 0, 0)
	if s.Job.Rounds != 4 || s.Job.Round != 4 || w.Gaps() != 0 {
		t.Errorf("%v rounds, the newest %v, %d gaps", s.Job.Rounds, s.Job.Round, w.Gaps())
	}
}

func BenchmarkFill(b *testing.B) {
	w := NewWindow(16, DefaultWindow)
	for n := range uint32(64) {
		for r := range 16 {
			if err := w.Add(0, Report{Rank: r, Rounds: []Round{{Number: n, Comm: time.Duration(r) * ms, Chunks: 1}}}); err != nil {
				b.Fatal(err)
			}
		}
	}
	s := Snapshot{Job: Job{Size: 16}}
	for b.Loop() {
		w.Fill(&s, 0, 1e6)
	}
}

// TestReady: of the rounds in which a rank's part was not waited for, it is told when it would have been ready by its other rounds.
func TestReady(t *testing.T) {
	type round struct {
		compute, comm time.Duration
		late          int // of 4 chunks
		last          int // rank that came last, for blocked before it
		blocked       time.Duration
	}
	const others = 51 * ms // rank 0 and 1: 40 ms and 11 ms
	for _, tt := range []struct {
		name   string
		rounds []round // of rank 2
		want   []time.Duration
	}{
		{"it waits for nobody", []round{{compute: 40 * ms, comm: 12 * ms, last: 2}}, []time.Duration{52 * ms}},
		{"what it waits for others is not its own", []round{{compute: 20 * ms, comm: 31 * ms, last: 0, blocked: 20 * ms}}, []time.Duration{31 * ms}},
		{"others waited from before it began", []round{{compute: 40 * ms, comm: 11 * ms, last: 0, blocked: 36 * ms}}, []time.Duration{51 * ms}},
		{"late by a moment, and the results were there: its stream takes as long as ever", []round{
			{compute: 40 * ms, comm: 12 * ms, last: 2}, {compute: 40 * ms, comm: ms, late: 4}, {compute: 40 * ms, comm: 22 * ms, late: 4},
		}, []time.Duration{52 * ms, 52 * ms, 52 * ms}},
		{"late, and the results came later than twice", []round{
			{compute: 40 * ms, comm: 12 * ms, last: 2}, {compute: 40 * ms, comm: 44 * ms, late: 4},
		}, []time.Duration{52 * ms, 40*ms + 12*ms + 20*ms}},
		{"it skips a round", []round{
			{compute: 40 * ms, comm: 12 * ms, last: 2}, {compute: ms, comm: 60 * ms, last: 0, blocked: 5 * ms},
		}, []time.Duration{52 * ms, 52 * ms}},
		{"never in time: as if it began when the others are through", []round{{compute: 40 * ms, comm: ms, late: 4}, {compute: 40 * ms, comm: 9 * ms, late: 4}},
			[]time.Duration{62 * ms, 62 * ms}},
		{"until it is", []round{{compute: 40 * ms, comm: ms, late: 4}, {compute: 40 * ms, comm: 12 * ms, last: 2}}, []time.Duration{52 * ms, 52 * ms}},
		{"a part was lost", []round{{compute: 40 * ms, comm: 12 * ms, last: 2}, {compute: 40 * ms, comm: 12 * ms, late: 1, last: 2}},
			[]time.Duration{52 * ms, 64 * ms}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := NewWindow(3, 8)
			for n, r := range tt.rounds {
				last := []Last{{Rank: r.last, Chunks: 4, Blocked: r.blocked}}
				for rank := range 2 {
					mine := Round{Number: uint32(n), Compute: 40 * ms, Comm: others - 40*ms, Chunks: 4, Last: last}
					if err := w.Add(0, Report{Rank: rank, Rounds: []Round{mine}}); err != nil {
						t.Fatal(err)
					}
				}
				mine := Round{Number: uint32(n), Compute: r.compute, Comm: r.comm, Chunks: 4, Late: r.late, Last: last}
				if err := w.Add(0, Report{Rank: 2, Rounds: []Round{mine}}); err != nil {
					t.Fatal(err)
				}
			}
			check := func(when string) {
				s := Snapshot{Job: Job{Size: 3}}
				w.Fill(&s, 0, 0)
				var got []time.Duration
				for _, seconds := range s.Ranks[2].Ready {
					got = append(got, time.Duration(math.Round(seconds*1e6))*time.Microsecond)
				}
				if !slices.Equal(got, tt.want) {
					t.Errorf("%s: ready after %v, want %v", when, got, tt.want)
				}
			}
			check("then")
			w.Forget()
			check("under another plan")
			w.Present(0b011)
			s := Snapshot{Job: Job{Size: 3}}
			if w.Fill(&s, 0, 0); len(s.Ranks[2].Ready) > 0 {
				t.Errorf("it is gone, and ready after %v", s.Ranks[2].Ready)
			}
		})
	}
}
