package sim

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"xagg/wire"
)

var (
	flagSchedules = flag.Uint64("schedules", 0, "run this many random schedules, instead of as many as 10 seconds allow")
	flagFirst     = flag.Uint64("first", 0, "seed of the first random schedule; 0 = the date's")
	flagSeed      = flag.Uint64("seed", 0, "TestSeed runs the schedule of this seed and prints what happens")
	flagScript    = flag.String("script", "", "TestSeed runs the schedule in this file instead")
)

// TestSchedules runs random schedules.
func TestSchedules(t *testing.T) {
	limit, end := *flagSchedules, time.Now().Add(10*time.Second)
	if limit == 0 && testing.Short() {
		end = time.Now().Add(time.Second)
	}
	first := *flagFirst
	if first == 0 {
		first = uint64(time.Now().UnixNano()) >> 8
	}
	t.Logf("seeds from %d on", first)
	var (
		next, done, failed, frames atomic.Uint64
		group                      sync.WaitGroup
	)
	began := time.Now()
	for range runtime.GOMAXPROCS(0) {
		group.Go(func() {
			for failed.Load() < 5 {
				n := next.Add(1) - 1
				if limit > 0 && n >= limit || limit == 0 && time.Now().After(end) {
					return
				}
				s := Random(first + n)
				report, err := Run(s, Options{})
				if err != nil {
					failed.Add(1)
					t.Error(explain(s, err))
				}
				frames.Add(uint64(report.Frames))
				if n := done.Add(1); n%100_000 == 0 {
					fmt.Printf("%d schedules in %v\n", n, time.Since(began).Round(time.Second))
				}
			}
		})
	}
	group.Wait()
	took := time.Since(began)
	t.Logf("%d schedules, %d frames in %v: %.0f schedules a minute", done.Load(), frames.Load(), took.Round(time.Millisecond),
		float64(done.Load())/took.Minutes())
}

// explain is what is printed of a schedule that failed.
func explain(s *Schedule, err error) string {
	small, smallErr := Shrink(s, 500)
	return fmt.Sprintf("seed %d: %v\nto see it happen: go test ./sim -run TestSeed -v -seed %d\n"+
		"a smaller schedule, for sim/testdata, that fails as well (%v):\n%v", s.Seed, err, s.Seed, smallErr, small)
}

// TestSeed runs one schedule and prints what happens.
func TestSeed(t *testing.T) {
	s := Random(*flagSeed)
	switch {
	case *flagScript != "":
		s = readScript(t, *flagScript)
	case *flagSeed == 0:
		t.Skip("no -seed")
	}
	fmt.Println(s)
	if _, err := Run(s, Options{Trace: os.Stdout}); err != nil {
		t.Error(err)
	}
}

func readScript(t *testing.T, file string) *Schedule {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	s, err := Parse(text)
	if err != nil {
		t.Fatalf("%s: %v", file, err)
	}
	return s
}

// TestScripts runs the schedules that once failed.
func TestScripts(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatalf("no schedules: %v", err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			if _, err := Run(readScript(t, file), Options{}); err != nil {
				t.Errorf("%v\nto see it happen: go test ./sim -run TestSeed -v -script %s", err, file)
			}
		})
	}
}

// TestSame: a schedule survives its text form, and two runs of it are the same to the bit.
func TestSame(t *testing.T) {
	for seed := range uint64(50) {
		s := Random(seed)
		again, err := Parse([]byte(s.String()))
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(s, again); diff != "" {
			t.Fatalf("seed %d: the text form says something else:\n%s", seed, diff)
		}
		var traces [2]bytes.Buffer
		for i, s := range []*Schedule{s, again} {
			if _, err := Run(s, Options{Trace: &traces[i]}); err != nil {
				t.Fatal(explain(s, err))
			}
		}
		if !bytes.Equal(traces[0].Bytes(), traces[1].Bytes()) {
			t.Fatalf("seed %d: two runs differ", seed)
		}
	}
}

// TestCoverage: what random schedules are for happens in them.
func TestCoverage(t *testing.T) {
	var (
		reasons                                               [wire.NumReasons]int
		losses, overflows, damaged, errors, changes, restarts int
		recoveries, handed, partial, quorumLost, lowered      int
		raises, lowers                                        int
		deaths, returns, rejoined, together                   int
		additions, sumsLost                                   int
	)
	for seed := range uint64(300) {
		s := Random(seed)
		r, err := Run(s, Options{})
		if err != nil {
			t.Fatal(explain(s, err))
		}
		for why, n := range r.Reasons {
			reasons[why] += n
		}
		losses, overflows, damaged = losses+r.Losses, overflows+r.Overflows, damaged+r.Damaged
		errors += len(r.Errors)
		if len(s.Losses) == 0 { // a recovery has another epoch too
			changes += len(r.Epochs) - 1
		}
		recoveries, handed = recoveries+r.Recoveries, handed+r.HandedOver
		partial, together = partial+r.Partial, together+r.Together
		deaths, returns, rejoined = deaths+r.Deaths, returns+r.Returns, rejoined+r.Rejoined
		additions, sumsLost = max(additions, r.Additions), sumsLost+r.SumsLost
		if s.Quorum != nil {
			quorumLost += r.Recoveries
		}
		raises, lowers, lowered = raises+r.Raises, lowers+r.Lowers, lowered+r.Lowered
		if s.Crash != nil && len(r.Errors) > 0 {
			restarts++
		}
	}
	for name, n := range map[string]int{
		"losses": losses, "full queues": overflows, "damaged packets": damaged, "errors": errors, "changes of plan": changes,
		"jobs after a crash": restarts, "recoveries": recoveries, "results handed over": handed,
		"chunks without all ranks": partial, "recoveries of quorum jobs": quorumLost,
		"changes to a larger quorum": raises, "changes to a smaller quorum": lowers, "plans that wanted more than were there": lowered,
		"several all-reduces of a worker": together, "deaths in quorum jobs": deaths, "workers that came back": returns, "chunks that they gave to at once": rejoined, "late contributions": reasons[wire.ReasonLate],
		"summed": reasons[wire.ReasonNone], "duplicates": reasons[wire.ReasonDuplicate],
		"steered": reasons[wire.ReasonSteered], "forwarded": reasons[wire.ReasonForwarded],
		"held back in async": reasons[wire.ReasonHeld], "async jobs whose sums were lost": sumsLost,
		"contributions in a difference, beyond 10": max(0, additions-10), "stale": reasons[wire.ReasonStale], "late for their epoch": reasons[wire.ReasonEpoch],
		"late for their job": reasons[wire.ReasonUnknownJob], "wrong checksums": reasons[wire.ReasonChecksum],
	} {
		if n == 0 {
			t.Errorf("%s: none in 300 schedules", name)
		}
		t.Logf("%s: %d", name, n)
	}
}

// TestSabotage: what the simulator looks for it finds.
func TestSabotage(t *testing.T) {
	base := func() *Schedule {
		s := &Schedule{
			Seed: 1, Workers: 3, Servers: 1, Pool: 4, MaxChunks: 12, Epoch: 1, Jobs: 1, Timeout: time.Minute,
			Vectors: []Work{{Lanes: 2000}, {Lanes: 2000}, {Lanes: 2000}, {Lanes: 2000}},
			Plans:   []Plan{{Cohort: 7, Pool: 4}, {Cohort: 3, Servers: []int{0}, Pool: 4}},
			Compute: make([]time.Duration, 3), Control: 10 * time.Microsecond,
		}
		for range 4 {
			s.Links = append(s.Links, Link{Delay: 50 * time.Microsecond, Gap: time.Microsecond, Queue: 64})
		}
		return s
	}
	if r, err := Run(base(), Options{}); err != nil || len(r.Epochs) != 2 {
		t.Fatalf("without sabotage: %v, epochs %v", err, r.Epochs)
	}
	for name, c := range map[string]struct {
		change   func(*Schedule)
		sabotage func(w *world, node int, arrival kind, p *wire.Packet) bool
		want     string
	}{
		"a result that is wrong at all workers": {
			// A rank's contribution is replaced by another one, of the right form.
			sabotage: func(w *world, node int, arrival kind, p *wire.Packet) bool {
				if arrival != atSwitch || p.Type != wire.TypeGrad || p.Rank != 1 {
					return false
				}
				p.Lanes[0]++
				p.Seal()
				return true
			},
			want: "lane 0 of vector 0 is",
		},
		"a contribution that changes": {
			change: func(s *Schedule) { s.Links[1].Drop = 0.5 },
			sabotage: func(w *world, node int, arrival kind, p *wire.Packet) bool {
				if arrival != atSwitch || p.Type != wire.TypeGrad || p.Flags&wire.FlagResend == 0 || p.Amax == 9 {
					return false
				}
				p.Amax = 9
				return true
			},
			want: "trace checker: ",
		},
		"a rank that learns of an epoch late": {
			sabotage: func(w *world, node int, arrival kind, p *wire.Packet) bool {
				late := arrival == atHost && node == 2 && p.NextEpoch != 0
				if late {
					p.NextEpoch = 0
				}
				return late
			},
			want: "under epoch",
		},
		"a residual that is lost": {
			// What rank 2 sends in the first all-reduce gets nowhere, and its second contribution is the input alone.
			change: func(s *Schedule) {
				s.Plans, s.Vectors = []Plan{{Servers: []int{0}, Pool: 4}}, s.Vectors[:2]
				s.Quorum = &Quorum{Ranks: 2, Wait: 100 * time.Millisecond}
			},
			sabotage: func(w *world, node int, arrival kind, p *wire.Packet) bool {
				if arrival != atSwitch || p.Type != wire.TypeGrad || p.Rank != 2 {
					return false
				}
				if p.Round == 0 {
					p.Epoch = 9 // there is no such plan
					return true
				}
				for i := range p.Lanes[:p.Elems] {
					p.Lanes[i] = w.int(1, 2, int(p.Chunk)*wire.MaxLanes+i)
				}
				p.Seal()
				return true
			},
			want: "of mask",
		},
		"another value than was given, with a quorum": {
			change: func(s *Schedule) { s.Plans = s.Plans[1:]; s.Quorum = &Quorum{Ranks: 2} },
			sabotage: func(w *world, node int, arrival kind, p *wire.Packet) bool {
				if arrival != atSwitch || p.Type != wire.TypeGrad || p.Rank != 1 {
					return false
				}
				p.Lanes[0]++
				p.Seal()
				return true
			},
			want: "of mask",
		},
		"another value than was given, in async": {
			change: func(s *Schedule) { s.Plans = []Plan{{Servers: []int{0}, Pool: 4}}; s.Async = &Async{Staleness: 1} },
			sabotage: func(w *world, node int, arrival kind, p *wire.Packet) bool {
				if arrival != atSwitch || p.Type != wire.TypeGrad || p.Rank != 1 || p.Round != 2 {
					return false
				}
				p.Lanes[0]++
				p.Seal()
				return true
			},
			want: "of additions",
		},
		"a contribution that is counted as the rank's next one": {
			change: func(s *Schedule) { s.Plans = []Plan{{Servers: []int{0}, Pool: 4}}; s.Async = &Async{Staleness: 1} },
			sabotage: func(w *world, node int, arrival kind, p *wire.Packet) bool {
				again := arrival == atSwitch && p.Type == wire.TypeGrad && p.Flags&wire.FlagAsync != 0 && p.Rank == 1 && p.Round == 3 && p.Chunk == 2
				if again { // what is added is the one before it
					for i := range p.Lanes[:p.Elems] {
						p.Lanes[i] = w.int(2, 1, 2*wire.MaxLanes+i)
					}
					p.Seal()
				}
				return again
			},
			want: "of additions",
		},
		"a pool that the switch does not have": {
			change: func(s *Schedule) { s.Plans = s.Plans[:1]; s.Plans[0].Pool = 2; s.Links[0].Drop = 0.3 },
			want:   "waited",
		},
	} {
		s := base()
		if c.change != nil {
			c.change(s)
		}
		_, err := run(s, Options{sabotage: c.sabotage})
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		} else {
			t.Logf("%s: %v", name, err)
		}
	}
}

// modes are the three ways through the network for four workers.
var modes = map[string]Plan{
	"switch": {Cohort: 0xf, Pool: 64},
	"server": {Cohort: 0, Servers: []int{0, 1}, Pool: 64},
	"hybrid": {Cohort: 0x7, Servers: []int{0}, Pool: 64},
}

// demo is the demo's job: three all-reduces of 333 chunks by four workers.
func demo(seed uint64, plan Plan, link Link) *Schedule {
	s := &Schedule{
		Seed: seed, Workers: 4, Servers: 2, Pool: 64, MaxChunks: 333, Epoch: 1, Jobs: 1, Timeout: time.Minute,
		Vectors: []Work{{Lanes: 85066}, {Lanes: 85066}, {Lanes: 85066}},
		Plans:   []Plan{plan}, Compute: make([]time.Duration, 4), Control: time.Millisecond,
	}
	link.Delay, link.Gap, link.Queue = 50*time.Microsecond, 2*time.Microsecond, 64
	for range s.Workers + s.Servers {
		s.Links = append(s.Links, link)
	}
	return s
}

// TestDemoVector: with 20 % of every fault on every link each all-reduce of the demo's vector is done within a minute.
func TestDemoVector(t *testing.T) {
	for name, plan := range modes {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for _, rate := range []float64{0, 0.01, 0.05, MaxRate} {
				link := Link{Drop: rate, Duplicate: rate, Reorder: rate, Corrupt: rate, Jitter: time.Millisecond}
				r, err := Run(demo(7, plan, link), Options{NoCheck: true})
				if err != nil {
					t.Fatal(err)
				}
				t.Logf("%s, %2.0f %% of everything: %v; %d packets sent, %.1f %% of them again", name, 100*rate, r.Rounds, r.Packets,
					100*float64(r.Resends)/float64(r.Packets))
			}
		})
	}
}

// TestStraggler: for a worker that is a second late hardly anything is sent again.
func TestStraggler(t *testing.T) {
	for name, plan := range modes {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for rank := range 4 {
				s := demo(7, plan, Link{})
				s.Late = make([]time.Duration, 4)
				s.Late[rank] = time.Second
				r, err := Run(s, Options{NoCheck: true})
				if err != nil {
					t.Fatal(err)
				}
				if 100*r.Resends > r.Packets {
					t.Errorf("rank %d: %d of %d packets were sent again, want at most 1 %%", rank, r.Resends, r.Packets)
				}
				t.Logf("rank %d: %v; %d of %d packets sent again", rank, r.Rounds, r.Resends, r.Packets)
			}
		})
	}
}

// TestChangeDelay: a change of plan delays no all-reduce by more than a round trip, whatever it changes.
func TestChangeDelay(t *testing.T) {
	run := func(plans ...Plan) *Report {
		s := demo(1, plans[0], Link{})
		s.Plans, s.Vectors = plans, nil
		for range 12 {
			s.Vectors = append(s.Vectors, Work{Lanes: 10_000})
		}
		r, err := Run(s, Options{})
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	// Four links of 50 us, there and back through a server.
	const roundTrip = 4 * 52 * time.Microsecond
	for from, old := range modes {
		for to, next := range modes {
			if from == to {
				continue
			}
			before, after, change := run(old), run(next), run(old, next)
			if len(change.Epochs) != 2 {
				t.Errorf("%s to %s: epochs %v, want a change", from, to, change.Epochs)
			}
			for i, d := range change.Rounds {
				if most := max(before.Rounds[i], after.Rounds[i]) + roundTrip; d > most {
					t.Errorf("%s to %s: all-reduce %d took %v, want at most %v", from, to, i, d, most)
				}
			}
			t.Logf("%s to %s: %v", from, to, change.Rounds)
		}
	}
}
