package worker_test

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"xagg/lab/data"
	"xagg/worker"
	"xagg/worker/grads"
	"xagg/worker/npy"
	"xagg/worker/replay"
)

// TestReplay all-reduces the real gradients and checks what is written: the integers against the rule, the values
// against a float64 sum.
func TestReplay(t *testing.T) {
	set, err := grads.Open(data.Gradients)
	if err != nil {
		t.Fatal(err)
	}
	n := newTestnet(t, netConfig{ranks: set.Ranks(), chunks: uint32(set.MaxLen()/256 + 1), pool: 64})
	out, dir := make([]bytes.Buffer, n.ranks), t.TempDir()
	n.each(t, func(r int) error {
		return replay.Run(t.Context(), n.client, replay.Config{Worker: worker.Config{Job: "train", Rank: r, Link: n.links[r]}, Set: set},
			replay.Writer(&out[r], dir, set, r))
	})
	var first []replay.Line
	for r := range n.ranks {
		var lines []replay.Line
		for dec := json.NewDecoder(&out[r]); dec.More(); {
			var l replay.Line
			if err := dec.Decode(&l); err != nil {
				t.Fatal(err)
			}
			lines = append(lines, l)
		}
		if len(lines) != 9 {
			t.Fatalf("rank %d wrote %d lines, want 9", r, len(lines))
		}
		if r == 0 {
			first = lines
		}
		for i, l := range lines {
			if l.Index != i || l.Step != set.Steps()[i/3] || l.Elems != 85066 || l.Mask != "0xf" || l.Exponent != first[i].Exponent ||
				l.Seconds <= 0 || l.Packets != uint64(l.Chunks)+l.Resends || l.Saturated != 0 {
				t.Errorf("rank %d, line %d: %+v", r, i, l)
			}
		}
		if r > 0 {
			continue
		}
		if lines[0].Rounds != 2 || lines[1].Rounds != 1 || lines[1].Round != 2 || lines[1].Chunks != 333 {
			t.Errorf("lines %+v", lines[:2])
		}
	}
	for i, l := range first {
		var vectors [][]float32
		for r := range n.ranks {
			v, err := set.Vector(i/3, r)
			if err != nil {
				t.Fatal(err)
			}
			vectors = append(vectors, v)
		}
		want := wantSum(vectors, l.Exponent)
		var diff, norm float64
		for k, lane := range want {
			exact := 0.0
			for _, v := range vectors {
				exact += float64(v[k])
			}
			d := float64(float32(math.Ldexp(float64(lane), -int(l.Exponent)))) - exact
			diff, norm = diff+d*d, norm+exact*exact
		}
		if e := math.Sqrt(diff / norm); e > 1e-6 {
			t.Errorf("all-reduce %d (%s, exponent %d): relative L2 error %g, want at most 1e-6", i, l.Step, l.Exponent, e)
		} else if testing.Verbose() {
			t.Logf("all-reduce %d (%s, exponent %d): relative L2 error %.2g", i, l.Step, l.Exponent, e)
		}
		for r := range n.ranks {
			raw, err := os.ReadFile(filepath.Join(dir, replay.DumpName(i, 1, 0, r)))
			if err != nil {
				t.Fatal(err)
			}
			got := make([]int32, len(raw)/4)
			for k := range got {
				got[k] = int32(binary.LittleEndian.Uint32(raw[4*k:]))
			}
			if !slices.Equal(got, want) {
				t.Errorf("all-reduce %d: rank %d has other integers than the quantized inputs' sum", i, r)
			}
		}
	}
}

// TestReplayStraggler: a straggler delays everybody, and is named.
func TestReplayStraggler(t *testing.T) {
	set := grads.Synthetic(700, 2, 1)
	n := newTestnet(t, netConfig{ranks: 2})
	const delay = 150 * time.Millisecond
	n.each(t, func(r int) error {
		return replay.Run(t.Context(), n.client, replay.Config{
			Worker: worker.Config{Job: "train", Rank: r, Link: n.links[r]}, Set: set, Rounds: 2, Delay: time.Duration(r) * delay,
		}, func(d replay.Reduced) error {
			l := d.Line(set)
			if l.Last != 1 || l.BlockedUs < delay.Microseconds()/2 || l.SpreadUs < l.BlockedUs {
				return fmt.Errorf("all-reduce %d: %+v, want rank 1 as the last", d.Index, l)
			}
			return nil
		})
	})
}

// TestReplayErrors: what is wrong with one rank's input ends the run of all, and says so.
func TestReplayErrors(t *testing.T) {
	vec := func(v ...float32) *fstest.MapFile { return &fstest.MapFile{Data: npy.Append(nil, v)} }
	good := fstest.MapFS{"rank0.npy": vec(1), "rank1.npy": vec(2)}
	for name, c := range map[string]struct {
		rank1 fstest.MapFS
		want  string // of rank 1
	}{
		"NaN":        {fstest.MapFS{"rank0.npy": vec(1), "rank1.npy": vec(float32(math.NaN()))}, "rank 1: value 0 is NaN"},
		"other plan": {fstest.MapFS{"rank0.npy": vec(1, 2), "rank1.npy": vec(3, 4)}, "plans"},
	} {
		n := newTestnet(t, netConfig{ranks: 2})
		errs := n.errors(func(r int) error {
			files := good
			if r == 1 {
				files = c.rank1
			}
			set, err := grads.Open(files)
			if err != nil {
				return err
			}
			return replay.Run(t.Context(), n.client, replay.Config{Worker: worker.Config{Job: "train", Rank: r, Link: n.links[r]}, Set: set},
				func(replay.Reduced) error { return nil })
		})
		// Rank 0 is told too.
		if errs[0] == nil || !strings.Contains(errs[0].Error(), c.want) || errs[1] == nil || !strings.Contains(errs[1].Error(), c.want) {
			t.Errorf("%s: %v, want %q for rank 1", name, errs, c.want)
		}
	}
	n := newTestnet(t, netConfig{ranks: 2})
	errs := n.errors(func(r int) error {
		return replay.Run(t.Context(), n.client, replay.Config{Worker: worker.Config{Job: "train", Rank: r, Link: n.links[r]},
			Set: grads.Synthetic(5, 1, 1)}, func(replay.Reduced) error { return nil })
	})
	if errs[0] == nil || !strings.Contains(errs[0].Error()+errs[1].Error(), "has 2 workers, the gradients have 1 ranks only") {
		t.Errorf("too few ranks: %v", errs)
	}
}

// TestReplayGoesOn: who comes back goes on with the all-reduce that nobody has begun, in the middle of a vector too.
func TestReplayGoesOn(t *testing.T) {
	set, err := grads.Parse("synthetic:600", 2)
	if err != nil {
		t.Fatal(err)
	}
	n := newTestnet(t, netConfig{ranks: 2, begun: 7})
	var places [2][]string
	n.each(t, func(r int) error {
		cfg := replay.Config{Worker: worker.Config{Job: "train", Rank: r, Link: n.links[r]}, Set: set, Rounds: 4, Buckets: 3}
		return replay.Run(t.Context(), n.client, cfg, func(x replay.Reduced) error {
			places[r] = append(places[r], fmt.Sprint(x.Index, "/", x.Bucket))
			from, _ := replay.Bucket(600, 3, x.Bucket)
			want := int32(0)
			for rank := range 2 {
				v, err := set.Vector(x.Step, rank)
				if err != nil {
					return err
				}
				want += int32(math.RoundToEven(math.Ldexp(float64(v[from]), int(x.Info.Exponent))))
			}
			if x.Sum[0] != want {
				return fmt.Errorf("vector %d, bucket %d: value 0 is %d, want %d", x.Index, x.Bucket, x.Sum[0], want)
			}
			return nil
		})
	})
	for r, got := range places {
		if want := []string{"2/1", "2/2", "3/0", "3/1", "3/2"}; !slices.Equal(got, want) {
			t.Errorf("rank %d all-reduces %v, want %v", r, got, want)
		}
	}
}
