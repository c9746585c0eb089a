package hosts

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"xagg/tests/require"
	"xagg/wire"
	"xagg/worker/grads"
	"xagg/worker/replay"
	"xagg/worker/scale"
)

// lines returns what a worker has written, in order. The last line of one that was killed may be cut off.
func (p *process) lines(t *testing.T) (lines []replay.Line) {
	t.Helper()
	for text := range strings.Lines(p.stdout.String()) {
		if !strings.HasSuffix(text, "\n") {
			break
		}
		var l replay.Line
		if err := json.Unmarshal([]byte(text), &l); err != nil {
			t.Fatal(err)
		}
		lines = append(lines, l)
	}
	return lines
}

// TestRankReturns kills a rank of a quorum job, whose tensors have one length. The others go on without it; started again,
// it goes on with the all-reduce that they are at, and gives to it. All that anybody was told is the same, and is the sum
// of what the contributors of each chunk had to give to that very all-reduce.
func TestRankReturns(t *testing.T) {
	t.Run("engine", func(t *testing.T) { testRankReturns(t, newVictims(t, false)) })
	t.Run("simple_switch_grpc", func(t *testing.T) {
		require.Have(t, require.BMv2)
		testRankReturns(t, newVictims(t, true))
	})
}

func testRankReturns(t *testing.T, v *victims) {
	const buckets, rounds, spec = 4, 150, "synthetic:5000"
	for _, command := range []string{
		"job remove train",
		"job create train --ranks 3 --max-elems 1250 --mode hybrid --steer 1 --depth 2 --consistency quorum --quorum 2 --wait 20ms --rounds 64",
	} {
		if _, err := v.ask(strings.Fields(command)...); err != nil {
			t.Fatal(err)
		}
	}
	dump := t.TempDir()
	start := func(rank int) *process {
		return v.start(fmt.Sprintf("w%d", rank), "worker", "--controller", v.socket("controller"), "--job", "train", "--rank", fmt.Sprint(rank),
			"--ip", fmt.Sprintf("10.77.0.%d", rank+1), "--dump", dump, "--grads", spec, "--rounds", fmt.Sprint(rounds), "--buckets",
			fmt.Sprint(buckets), "--delay", "5ms")
	}
	for rank := range 3 {
		v.workers = append(v.workers, start(rank))
	}
	more := func(what string, p *process, n int) {
		t.Helper()
		then := len(p.lines(t))
		wait(t, fmt.Sprintf("%d all-reduces %s", n, what), func() error {
			if got := len(p.lines(t)) - then; got < n {
				return fmt.Errorf("%d; %s", got, v.recovery())
			}
			return nil
		})
	}
	more("with all", v.workers[2], 50)
	kill(t, v.workers[2])
	more("without rank 2", v.workers[0], 50)
	began := time.Now()
	back := start(2)
	more("with rank 2, which came back", back, 50)
	t.Logf("50 all-reduces of the rank that came back were done %v after its start", time.Since(began).Round(time.Millisecond))

	for rank, p := range []*process{v.workers[0], v.workers[1], back} {
		if err := p.Wait(); err != nil {
			t.Errorf("rank %d: %v", rank, err)
		}
	}
	first := back.lines(t)[0]
	returned := first.Index*buckets + first.Bucket
	told := [3]map[int]replay.Line{}
	for rank, p := range v.workers {
		told[rank] = map[int]replay.Line{}
		lines := p.lines(t)
		if rank == 2 {
			if n := len(lines); n >= returned {
				t.Errorf("rank 2 had finished %d all-reduces and went on with number %d", n, returned)
			}
			lines = append(lines, back.lines(t)...)
		} else if len(lines) != rounds*buckets {
			t.Errorf("rank %d has finished %d all-reduces, want %d", rank, len(lines), rounds*buckets)
		}
		for _, l := range lines {
			told[rank][l.Index*buckets+l.Bucket] = l
		}
	}
	if want := rounds*buckets - returned; len(back.lines(t)) != want {
		t.Errorf("rank 2 came back for number %d and has finished %d all-reduces, want %d", returned, len(back.lines(t)), want)
	}
	if t.Failed() {
		return
	}
	gave := checkSums(t, told, dump, spec, rounds, buckets, returned)
	if len(gave) == 0 || gave[0] > returned+5*buckets {
		t.Errorf("rank 2 came back for all-reduce %d and has given to %v", returned, gave)
	}
	t.Logf("rank 2 came back for all-reduce %d, and gave to %d of the %d from there on, the first is %d", returned, len(gave),
		rounds*buckets-returned, gave[0])
}

// checkSums adds by plain loops, from what ranks were told of the contributors of chunks, what these had to give. It returns
// the all-reduces from one on that rank 2 has given to, for which it came back without what had been left out before.
func checkSums(t *testing.T, told [3]map[int]replay.Line, dump, spec string, rounds, buckets, returned int) (gave []int) {
	t.Helper()
	set, err := grads.Parse(spec, 3)
	if err != nil {
		t.Fatal(err)
	}
	limit := scale.Limit(3)
	vectors := replay.Vectors(set, rounds, 0)
	for bucket := range buckets {
		var rest [3][]float32 // what sums lacked so far
		forgotten := false
		for i, v := range vectors {
			number := i*buckets + bucket
			if number >= returned && !forgotten {
				rest[2], forgotten = nil, true
			}
			line := told[0][number]
			masks, err := line.Contributors()
			if err != nil || len(masks) == 0 {
				t.Fatalf("all-reduce %d: contributors %v, %v", number, masks, err)
			}
			sums := sumsOf(t, dump, i, buckets, bucket, 0)
			for rank := 1; rank < 3; rank++ {
				other, ok := told[rank][number]
				if !ok {
					continue // it was not there
				}
				if !slices.Equal(other.Masks, line.Masks) || other.Exponent != line.Exponent || other.Round != line.Round ||
					!slices.Equal(sumsOf(t, dump, i, buckets, bucket, rank), sums) {
					t.Fatalf("all-reduce %d: rank %d was told something else than rank 0: contributors %v and %v", number, rank, other.Masks, line.Masks)
				}
			}
			want := make([]int32, len(sums))
			for rank := range 3 {
				x, err := set.Vector(v.Step, rank)
				if err != nil {
					t.Fatal(err)
				}
				from, to := replay.Bucket(len(x), buckets, bucket)
				given := slices.Clone(x[from:to])
				for lane, r := range rest[rank] {
					given[lane] += r
				}
				rest[rank] = make([]float32, len(given))
				for lane, x := range given {
					if masks[lane/wire.MaxLanes]>>rank&1 == 0 {
						rest[rank][lane] = x
						continue
					}
					scaled := math.RoundToEven(math.Ldexp(float64(x), int(line.Exponent)))
					want[lane] += int32(max(-float64(limit), min(scaled, float64(limit))))
					scale.Clipped(given[lane:lane+1], line.Exponent, limit, func(_ int, missing float32) { rest[rank][lane] = missing })
				}
			}
			if len(sums) != len(want) {
				t.Fatalf("all-reduce %d has %d lanes, want %d", number, len(sums), len(want))
			}
			for lane := range want {
				if sums[lane] != want[lane] {
					t.Fatalf("all-reduce %d (vector %d, bucket %d): lane %d is %d, want %d of contributors %v", number, i, bucket, lane,
						sums[lane], want[lane], line.Masks)
				}
			}
			if number >= returned && slices.ContainsFunc(masks, func(m uint64) bool { return m>>2&1 != 0 }) {
				gave = append(gave, number)
			}
		}
	}
	slices.Sort(gave)
	return gave
}

// sumsOf reads the integers that a rank was told.
func sumsOf(t *testing.T, dump string, index, buckets, bucket, rank int) (sums []int32) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(dump, replay.DumpName(index, buckets, bucket, rank)))
	if err != nil {
		t.Fatal(err)
	}
	for ; len(b) >= 4; b = b[4:] {
		sums = append(sums, int32(binary.LittleEndian.Uint32(b)))
	}
	return sums
}
