package bench

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"xagg/api"
	"xagg/controller"
	"xagg/lab/loop"
	"xagg/lab/scenario"
	"xagg/xdp"
)

// line is what a rank of the scenario of parse writes about a round: it began at begin, its buckets were ready after 9 and 10 ms, and done
// after so many milliseconds.
func line(round int, begin, done0, done1 time.Duration, wrong float64) []byte {
	text, err := json.Marshal(loop.Round{
		Round: round, Begin: int64(begin), Ready: []int64{9e6, 10e6}, Done: []int64{int64(done0), int64(done1)},
		Packets: 5, Resends: 1, Chunks: 3, Late: 2, Error: wrong,
	})
	if err != nil {
		panic(err)
	}
	return text
}

const ms = time.Millisecond

// TestRecord: a run of three ranks, of which the last is later.
func TestRecord(t *testing.T) {
	s := parse(t, "one", "")
	r := newRecord(s, "switch")
	var moments []string
	r.begins = func() { moments = append(moments, fmt.Sprintf("begins with %d left", r.left)) }
	r.ends = func() { moments = append(moments, "ends") }
	take := func(rank int, text []byte) {
		t.Helper()
		if err := r.take(0, rank, text); err != nil {
			t.Error(err)
		}
	}
	if _, err := r.jobs(7); err == nil || !strings.Contains(err.Error(), "9 rounds are missing") {
		t.Errorf("%v, want that rounds are missing", err)
	}
	take(1, line(0, 0, 12*ms, 15*ms, 0))
	for rank := range 3 {
		if rank != 1 {
			take(rank, line(0, 0, 12*ms, 15*ms, 1e-7))
		}
	}
	for round := 1; round < 3; round++ {
		for rank := range 3 {
			begin := time.Duration(round)*20*ms + time.Duration(rank)*ms
			text := line(round, begin, 12*ms, 15*ms+time.Duration(rank)*ms, 1e-7)
			if rank == 2 && round == 2 {
				text = bytes.Replace(text, []byte("{"), []byte(`{"skipped":true,`), 1)
			}
			take(rank, text)
		}
	}
	if want := []string{"begins with 9 left", "ends"}; !slices.Equal(moments, want) {
		t.Errorf("moments %q, want %q", moments, want)
	}
	// Rank 1 began its rounds at 0, 21 and 41 ms; the first is warm-up.
	for at, want := range map[time.Duration]int{-1: -1, 0: -1, 20 * ms: -1, 21 * ms: 0, 40 * ms: 0, 41 * ms: 1, time.Hour: 1} {
		if got := r.under(0, 1, at); got != want {
			t.Errorf("after %v round %d is under way, want %d", at, got, want)
		}
	}
	jobs, err := r.jobs(7)
	if err != nil || len(jobs) != 1 {
		t.Fatalf("%d jobs, %v", len(jobs), err)
	}
	j := jobs[0]
	// Ready at 9, done at 12, the other from 10 to 15: busy from 9 to 15 ms.
	for rank, want := range [][]float64{{0.006, 0.006}, {0.007, 0.007}, {0.008, 0.008}} {
		if !slices.EqualFunc(j.Comm[rank], want, near) || !near(j.Round[rank][0], want[0]+0.009) || !near(j.Compute[rank][0], 0.010) {
			t.Errorf("rank %d: communication %v, round %v, computation %v; want %v of communication", rank, j.Comm[rank], j.Round[rank], j.Compute[rank], want)
		}
		// 400 values at 10 Mbit/s.
		if !near(j.Floor[rank][1], 400*32/10e6) {
			t.Errorf("rank %d: floor %v", rank, j.Floor[rank])
		}
	}
	// From 20 ms to 2 x 20 + 2 + 17 ms.
	if j.Name != "train" || j.Buckets != 2 || j.Values != 400 || !near(j.Span, 0.039) || !near(j.IdealSpan, 2*(0.010+400*32/10e6)) {
		t.Errorf("%+v", j)
	}
	if j.Packets != 30 || j.Resends != 6 || j.Chunks != 18 || j.Late != 12 || j.Error != 1e-7 {
		t.Errorf("counts %+v", j)
	}
	// Nobody but rank 0 is at work from 20 ms on for a millisecond, which is a fifteenth of its round.
	if got := r.bytes(20*ms, 21*ms); got != 1600/15 {
		t.Errorf("%d bytes in a millisecond of one rank, want a fifteenth of a round's", got)
	}
	if got := r.bytes(0, time.Second); got < 8*1600-9 || got > 8*1600 {
		t.Errorf("%d bytes in all, want 8 rounds of 1,600: one was skipped", got)
	}
	if want := [][]int{{}, {}, {1}}; !slices.EqualFunc(j.Skipped, want, slices.Equal) {
		t.Errorf("skipped %v, want %v", j.Skipped, want)
	}
}

func near(a, b float64) bool { return math.Abs(a-b) < 1e-6 }

// TestRecordRefuses: what a worker cannot have done ends the run.
func TestRecordRefuses(t *testing.T) {
	s := parse(t, "one", ", async: {staleness: 1}")
	for name, c := range map[string]struct {
		mode scenario.Mode
		text string
		want string
	}{
		"text":   {"tcp", "Killed", "read its output"},
		"order":  {"tcp", string(line(1, 0, 0, 0, 0)), "round 1 after 0 rounds of 3"},
		"bucket": {"tcp", `{"round":0,"ready":[1],"done":[1]}`, "1 buckets ready and 1 done of 2"},
		"wrong":  {"switch", string(line(0, 0, 12*ms, 15*ms, 1e-3)), "they are wrong"},
		"NaN":    {"switch", strings.Replace(string(line(0, 0, 12*ms, 15*ms, 1)), `"error":1`, `"error":1e999`, 1), "read its output"},
		"async":  {"server/async", string(line(0, 0, 12*ms, 15*ms, 1e-3)), ""},
	} {
		r := newRecord(s, c.mode)
		r.begins = func() {}
		err := r.take(0, 2, []byte(c.text))
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}
	r := newRecord(s, "tcp")
	r.begins = func() {}
	for round := range 3 {
		if err := r.take(0, 0, line(round, 0, 1, 1, 0)); err != nil {
			t.Error(err)
		}
	}
	if err := r.take(0, 0, line(3, 0, 1, 1, 0)); err == nil {
		t.Error("a round too many is taken")
	}
}

func TestUsage(t *testing.T) {
	status := func(partials, summed, server uint64) *api.StatusReply {
		return &api.StatusReply{
			Switch:  &api.SwitchStatus{Sent: map[string]uint64{"PARTIAL": partials}, Reasons: map[string]uint64{"summed": summed, "stale": 3}},
			Servers: []*api.ServerStatus{{Name: "s0", Reasons: map[string]uint64{"late": server}}},
		}
	}
	before := &look{
		at: time.Second, cores: []core{{0, 0, 0}, {0, 0, 0}}, cpu: map[string]time.Duration{"switch": time.Second, "server": 0},
		bpf: time.Second, frames: map[string]uint64{"w0": 5}, status: status(1, 2, 3),
	}
	after := &look{
		at: 3 * time.Second, cores: []core{{1500 * ms, 0, 2 * time.Second}, {1000 * ms, 200 * ms, 2 * time.Second}},
		cpu: map[string]time.Duration{"switch": 1500 * ms, "server": 200 * ms},
		bpf: 1100 * ms, frames: map[string]uint64{"w0": 15}, status: status(11, 22, 33),
	}
	u := usage(before, after, 300*ms, 100*ms)
	want := map[string]float64{"switch": 0.5, "server": 0.3, "workers": 0.3, "kernel": 1.4}
	for role, seconds := range want {
		if !near(u.CPU[role], seconds) {
			t.Errorf("%s: %g s, want %g", role, u.CPU[role], seconds)
		}
	}
	if !near(u.Seconds, 2) || !near(u.BPF, 0.1) || !near(u.Busiest, 0.75) || !near(u.Stolen, 0.05) || u.Frames["w0"] != 10 || u.Partials != 10 {
		t.Errorf("%+v", u)
	}
	if r := u.Reasons; r["switch"]["summed"] != 20 || r["s0"]["late"] != 30 || len(r["switch"]) != 1 {
		t.Errorf("reasons %v", r)
	}
}

// TestWorkerTime: the CPU time of a process between two moments, also when it ends before the second.
func TestWorkerTime(t *testing.T) {
	w := &worker{before: time.Second, pid: 0}
	w.over(3 * time.Second)
	w.end()
	if got := w.used(); got != 2*time.Second {
		t.Errorf("%v of one that ended before, want all that it used but the beginning", got)
	}
	w = &worker{before: time.Second, after: 2 * time.Second}
	w.over(3 * time.Second)
	if got := w.used(); got != time.Second {
		t.Errorf("%v of one that ended after, want what it used until then", got)
	}
}

func TestMemory(t *testing.T) {
	s := parse(t, "one", ", depth: 3, quorum: {ranks: 2, rounds: 16}, async: {staleness: 1}")
	for _, c := range []struct {
		modes []scenario.Mode
		slots int // 100 and 300 values are 1 and 2 chunks
	}{{[]scenario.Mode{"tcp"}, 0}, {[]scenario.Mode{"tcp", "server"}, 8 * 2}, {[]scenario.Mode{"server", "hybrid/quorum"}, 16 * 2}, {[]scenario.Mode{"server/async"}, 4 * 3}} {
		want := xdp.Size(2 * c.slots * xdp.SlotSize)
		if got := memory(s, c.modes); got < want || got > want+1<<20 {
			t.Errorf("%v: %v, want %d bytes, rounded up to MiB", c.modes, got, want)
		}
	}
	for c, want := range map[controller.Consistency]int{{}: 2, {Mode: controller.ModeQuorum, Rounds: 32}: 32, {Mode: controller.ModeAsync}: 4} {
		if got := leaseRounds(c, 1); got != want {
			t.Errorf("%v: %d rounds, want %d", c, got, want)
		}
	}
}
