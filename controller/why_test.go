package controller

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"xagg/api"
)

// TestExplain is a table of what was read and what is said.
func TestExplain(t *testing.T) {
	const s = time.Second
	running := func(edit func(*api.Job)) *api.Job {
		j := &api.Job{Name: "train", Ranks: 4, Epoch: 7, Joined: 0b1111, Cohort: 0b1111, State: "running"}
		if edit != nil {
			edit(j)
		}
		return j
	}
	hybrid := func(j *api.Job) { j.Cohort, j.Servers = 0b0111, []string{"s0"} }
	at := func(name string, round, chunk uint32, have uint64, age time.Duration) sight {
		return sight{at: name, epoch: 7, place: spot{round, chunk}, have: have, age: age}
	}
	closed := func(c sight) sight { c.closed = true; return c }
	next := func(c sight) sight { c.epoch++; return c }
	said := func(rank int, p *api.Progress) []report {
		reports := make([]report, 4)
		reports[rank] = report{p, s / 2}
		return reports
	}
	computing := make([]report, 4)
	for i := range computing {
		computing[i] = report{&api.Progress{Round: 3, ForUs: 100_000}, s}
	}
	none := make([]traffic, 4)
	var pool []sight // as many as a rank has sent that stopped with the last of them
	for c := range uint32(3) {
		pool = append(pool, at("switch", 7, 12+c, 0b0111, 4200*time.Millisecond))
	}

	for _, tt := range []struct {
		name         string
		e            evidence
		summary      string
		blockers     []int
		explanations []string // of the blockers
		waiting      []string
	}{
		{
			name:     "a straggler",
			e:        evidence{job: running(nil), chunks: pool, traffic: []traffic{{}, {}, {}, {90, 5 * s}}, reports: said(3, &api.Progress{ForUs: 4_300_000})},
			summary:  "3 of 4 ranks wait for rank 3 on host w3: 3 chunks lack rank 3, the oldest for 4.2 s",
			blockers: []int{3},
			explanations: []string{"rank 3 on host w3 has not sent its part of chunks 12-14 of round 7 to the switch for 4.2 s; " +
				"the switch has seen none of its packets for at least 5.0 s; it last reported 0.5 s ago that it has been computing for 4.3 s"},
			waiting: []string{"switch round 7 chunks 12-14 have 7 missing 8"},
		},
		{
			name: "who waits tells since when",
			e: evidence{job: running(nil), chunks: pool[:1], traffic: none,
				reports: said(0, &api.Progress{Waiting: true, Round: 7, ChunksLeft: 9, Chunk: 12, ForUs: 30_000_000})},
			summary:      "3 of 4 ranks wait for rank 3 on host w3: 1 chunk lacks rank 3, the oldest for 4.2 s; rank 0 has waited for round 7 for 30.5 s",
			blockers:     []int{3},
			explanations: []string{"rank 3 on host w3 has not sent its part of chunk 12 of round 7 to the switch for 4.2 s; the switch has not seen a single packet of it; it has reported nothing"},
			waiting:      []string{"switch round 7 chunks 12-12 have 7 missing 8"},
		},
		{
			name: "who waits for an earlier chunk is not to blame",
			e: evidence{job: running(nil), traffic: none, reports: make([]report, 4), chunks: []sight{
				at("switch", 7, 14, 0b0001, 3*s), at("switch", 7, 12, 0b0111, 3*s), at("switch", 7, 13, 0b0011, 3*s), at("switch", 8, 0, 0b0001, s),
			}},
			summary:      "3 of 4 ranks wait for rank 3 on host w3: 4 chunks lack rank 3, the oldest for 3.0 s",
			blockers:     []int{3},
			explanations: []string{"rank 3 on host w3 has not sent its part of chunks 12-14 of round 7 and chunk 0 of round 8 to the switch for 3.0 s; the switch has not seen a single packet of it; it has reported nothing"},
			waiting: []string{"switch round 7 chunks 12-12 have 7 missing 8", "switch round 7 chunks 13-13 have 3 missing c",
				"switch round 7 chunks 14-14 have 1 missing e", "switch round 8 chunks 0-0 have 1 missing e"},
		},
		{
			name: "what it sends is lost",
			e: evidence{job: running(nil), chunks: []sight{at("switch", 7, 0, 7, s), at("switch", 7, 2, 7, s), at("switch", 7, 4, 7, s),
				at("switch", 7, 6, 7, s), at("switch", 7, 8, 7, s), at("switch", 7, 9, 7, s)}, traffic: []traffic{{}, {}, {}, {90, 2 * s}},
				reports: said(3, &api.Progress{Waiting: true, Round: 7, ChunksLeft: 6, ForUs: 3_000_000})},
			summary:  "3 of 4 ranks wait for rank 3 on host w3: 6 chunks lack rank 3, the oldest for 1.0 s",
			blockers: []int{3},
			explanations: []string{"rank 3 on host w3 has not sent its part of 6 chunks of round 7 from chunk 0 on to the switch for 1.0 s; " +
				"the switch has seen none of its packets for at least 2.0 s, though it sends: they are lost on the way; " +
				"it last reported 0.5 s ago that it has waited for 3.0 s for 6 chunks of round 7, from chunk 0 on"},
			waiting: []string{"switch round 7 chunks 0-0 have 7 missing 8", "switch round 7 chunks 2-2 have 7 missing 8",
				"switch round 7 chunks 4-4 have 7 missing 8", "switch round 7 chunks 6-6 have 7 missing 8", "switch round 7 chunks 8-9 have 7 missing 8"},
		},
		{
			name: "what it told before it fell silent says nothing",
			e: evidence{job: running(nil), chunks: pool[:1], traffic: []traffic{{}, {}, {}, {90, s / 5}},
				reports: said(3, &api.Progress{Waiting: true, Round: 7, ChunksLeft: 6, ForUs: 3_000_000})},
			summary:  "3 of 4 ranks wait for rank 3 on host w3: 1 chunk lacks rank 3, the oldest for 4.2 s",
			blockers: []int{3},
			explanations: []string{"rank 3 on host w3 has not sent its part of chunk 12 of round 7 to the switch for 4.2 s; " +
				"the switch has seen none of its packets for at least 0.2 s; " +
				"it last reported 0.5 s ago that it has waited for 3.0 s for 6 chunks of round 7, from chunk 0 on"},
			waiting: []string{"switch round 7 chunks 12-12 have 7 missing 8"},
		},
		{
			name: "nor does what it told of an earlier round",
			e: evidence{job: running(nil), chunks: pool[:1], traffic: []traffic{{}, {}, {}, {90, 2 * s}},
				reports: said(3, &api.Progress{Waiting: true, Round: 6, ChunksLeft: 6, ForUs: 3_000_000})},
			summary:  "3 of 4 ranks wait for rank 3 on host w3: 1 chunk lacks rank 3, the oldest for 4.2 s",
			blockers: []int{3},
			explanations: []string{"rank 3 on host w3 has not sent its part of chunk 12 of round 7 to the switch for 4.2 s; " +
				"the switch has seen none of its packets for at least 2.0 s; " +
				"it last reported 0.5 s ago that it has waited for 3.0 s for 6 chunks of round 6, from chunk 0 on"},
			waiting: []string{"switch round 7 chunks 12-12 have 7 missing 8"},
		},
		{
			name: "who is dead reports no more",
			e: evidence{job: running(nil), chunks: pool[:1], traffic: []traffic{{}, {}, {}, {90, 2 * s}},
				reports: []report{{}, {}, {}, {&api.Progress{Round: 6}, 4 * s}}},
			summary:  "3 of 4 ranks wait for rank 3 on host w3: 1 chunk lacks rank 3, the oldest for 4.2 s",
			blockers: []int{3},
			explanations: []string{"rank 3 on host w3 has not sent its part of chunk 12 of round 7 to the switch for 4.2 s; " +
				"the switch has seen none of its packets for at least 2.0 s; " +
				"it has reported nothing for 4.0 s: its process is stopped, or cut off from the controller"},
			waiting: []string{"switch round 7 chunks 12-12 have 7 missing 8"},
		},
		{
			name: "rounds go round",
			e: evidence{job: running(nil), traffic: none, reports: make([]report, 4),
				chunks: []sight{at("switch", 0, 0, 0b0001, s), at("switch", 1<<32-1, 5, 0b0111, s)}},
			summary:      "3 of 4 ranks wait for rank 3 on host w3: 2 chunks lack rank 3, the oldest for 1.0 s",
			blockers:     []int{3},
			explanations: []string{"rank 3 on host w3 has not sent its part of chunk 5 of round 4294967295 and chunk 0 of round 0 to the switch for 1.0 s; the switch has not seen a single packet of it; it has reported nothing"},
			waiting:      []string{"switch round 4294967295 chunks 5-5 have 7 missing 8", "switch round 0 chunks 0-0 have 1 missing e"},
		},
		{
			name: "the switch knows of its cohort",
			e: evidence{job: running(hybrid), traffic: none, reports: make([]report, 4), chunks: []sight{
				at("switch", 7, 2, 0b0101, s), at("s0", 7, 2, 0b1000, 2*s),
			}},
			summary:      "3 of 4 ranks wait for rank 1 on host w1: 1 chunk lacks rank 1, the oldest for 1.0 s",
			blockers:     []int{1},
			explanations: []string{"rank 1 on host w1 has not sent its part of chunk 2 of round 7 to the switch for 1.0 s; the switch has not seen a single packet of it; it has reported nothing"},
			waiting:      []string{"s0 round 7 chunks 2-2 have 8 missing 7", "switch round 7 chunks 2-2 have 5 missing 2"},
		},
		{
			name: "a PARTIAL is lost",
			e: evidence{job: running(hybrid), traffic: none, reports: make([]report, 4), chunks: []sight{
				closed(at("switch", 7, 2, 0b0111, 0)), at("s0", 7, 2, 0b1000, 2*s),
			}},
			summary: "the switch has summed its cohort's part of chunk 2 of round 7, which has not reached server s0: packets between the two are lost",
			waiting: []string{"s0 round 7 chunks 2-2 have 8 missing 7"},
		},
		{
			name: "of two servers each has every other chunk",
			e: evidence{job: running(func(j *api.Job) { j.Cohort, j.Servers = 0, []string{"s0", "s1"} }), reports: make([]report, 4), chunks: []sight{
				at("s0", 1, 2, 0b1011, s), at("s1", 1, 3, 0b1011, s), at("s0", 1, 4, 0b1011, 2*s), at("s0", 1, 8, 0b1011, s),
			}, blind: map[string]string{"switch": "no session"}},
			summary:  "3 of 4 ranks wait for rank 2 on host w2: 4 chunks lack rank 2, the oldest for 2.0 s; not wholly asked: switch",
			blockers: []int{2},
			explanations: []string{
				"rank 2 on host w2 has not sent its part of chunks 2-4 and 8 of round 1 to server s0 and server s1 for 2.0 s; it has reported nothing"},
			waiting: []string{"s0 round 1 chunks 2-4 have b missing 4", "s1 round 1 chunks 3-3 have b missing 4", "s0 round 1 chunks 8-8 have b missing 4"},
		},
		{
			name:     "who has left cannot send",
			e:        evidence{job: running(func(j *api.Job) { j.Left = 0b1000 }), chunks: pool[:1], traffic: none, reports: make([]report, 4)},
			summary:  "3 of 4 ranks wait for rank 3 on host w3: 1 chunk lacks rank 3, the oldest for 4.2 s; rank 3 has finished and waits for ranks 0-2 to leave",
			blockers: []int{3},
			explanations: []string{"rank 3 on host w3 has left and will not send its part of chunk 12 of round 7 to the switch: " +
				"the ranks do not all-reduce the same number of times"},
			waiting: []string{"switch round 7 chunks 12-12 have 7 missing 8"},
		},
		{
			name:    "all compute",
			e:       evidence{job: running(nil), traffic: none, reports: computing},
			summary: "nothing waits: all ranks compute",
		},
		{
			name: "a round under way",
			e: evidence{job: running(nil), traffic: none, reports: said(0, &api.Progress{Waiting: true, ForUs: 20_000}),
				chunks: []sight{at("switch", 7, 1, 1, 10*time.Millisecond), closed(at("switch", 7, 0, 0b1111, s))}},
			summary: "nothing waits: 1 chunk is under way, none of them for 0.2 s",
		},
		{
			name: "answers are lost",
			e:    evidence{job: running(nil), traffic: none, reports: said(2, &api.Progress{Waiting: true, Round: 5, ChunksLeft: 3, ForUs: 8_000_000})},
			summary: "no aggregator waits for anybody, but rank 2 on host w2 has waited for 8.0 s for 3 chunks of round 5: " +
				"either the round is long, or the answers to it are lost",
		},
		{
			name: "a quorum is there",
			e: evidence{job: running(func(j *api.Job) {
				j.Gone, j.Quorum, j.WaitUs = 0b1000, 3, 100_000
			}), chunks: pool, traffic: none, reports: make([]report, 4)},
			summary: "nothing waits: 3 chunks are under way, none of them for want of ranks; 3 of 4 ranks are enough, 0.1 s after the first, and nobody waits for rank 3, which is gone",
		},
		{
			name: "too few for a quorum",
			e: evidence{job: running(func(j *api.Job) {
				hybrid(j)
				j.Gone, j.Quorum, j.WaitUs = 0b1000, 3, 100_000
			}), chunks: []sight{at("switch", 7, 1, 0b0101, s)}, traffic: none, reports: make([]report, 4)},
			summary: "2 of 4 ranks wait for rank 1 on host w1: 1 chunk lacks rank 1, the oldest for 1.0 s; " +
				"3 of 4 ranks are enough, 0.1 s after the first, and nobody waits for rank 3, which is gone",
			blockers:     []int{1},
			explanations: []string{"rank 1 on host w1 has not sent its part of chunk 1 of round 7 to the switch for 1.0 s; the switch has not seen a single packet of it; it has reported nothing"},
			waiting:      []string{"switch round 7 chunks 1-1 have 5 missing 2"},
		},
		{
			name: "a flush left one out, and too few are there",
			e: evidence{job: running(func(j *api.Job) {
				hybrid(j)
				j.Quorum, j.WaitUs = 4, 100_000
			}), chunks: []sight{closed(at("switch", 7, 1, 0b0101, s)), at("s0", 7, 1, 0b1101, s)}, traffic: none, reports: make([]report, 4)},
			summary:      "3 of 4 ranks wait for rank 1 on host w1: 1 chunk lacks rank 1, the oldest for 1.0 s; 4 of 4 ranks are enough, 0.1 s after the first",
			blockers:     []int{1},
			explanations: []string{"rank 1 on host w1 has not sent its part of chunk 1 of round 7 to the switch for 1.0 s; the switch has not seen a single packet of it; it has reported nothing"},
			waiting:      []string{"s0 round 7 chunks 1-1 have d missing 2"},
		},
		{
			name: "each plan has its own quorum",
			e: evidence{job: running(func(j *api.Job) {
				hybrid(j)
				j.Quorum = 2
				j.Change = &api.Change{Epoch: 8, Servers: []string{"s0"}, Quorum: 4, WaitsFor: "rank 1 to finish the last round of epoch 7"}
			}), chunks: []sight{at("s0", 7, 1, 0b0101, s), next(at("s0", 8, 1, 0b0111, s))}, traffic: none, reports: make([]report, 4)},
			summary: "3 of 4 ranks wait for rank 3 on host w3: 1 chunk lacks rank 3, the oldest for 1.0 s; " +
				"its change of plan to epoch 8 waits for rank 1 to finish the last round of epoch 7; 2 of 4 ranks are enough, 0.0 s after the first",
			blockers:     []int{3},
			explanations: []string{"rank 3 on host w3 has not sent its part of chunk 1 of round 8 to server s0 for 1.0 s; the switch has not seen a single packet of it; it has reported nothing"},
			waiting:      []string{"s0 round 8 chunks 1-1 have 7 missing 8"},
		},
		{
			name: "recovery and change",
			e: evidence{job: running(func(j *api.Job) {
				j.Recovery = "rank 2 to stop"
				j.Change = &api.Change{Epoch: 8, WaitsFor: "rank 1 to finish the last round of epoch 7"}
			}), traffic: none, reports: make([]report, 4)},
			summary: "the job is being recovered; that waits for rank 2 to stop; its change of plan to epoch 8 waits for rank 1 to finish the last round of epoch 7",
		},
		{
			name: "who stands still in a recovery is not to blame",
			e: evidence{job: running(func(j *api.Job) {
				j.Recovery = "rank 2 to stop and say what they have (the switch has lost its memory)"
			}),
				chunks: pool, reports: make([]report, 4), recovery: &recoveryEvidence{0b0100, "stop and say what they have", 3 * s}},
			summary:      "the job is being recovered; that waits for rank 2 to stop and say what they have (the switch has lost its memory)",
			blockers:     []int{2},
			explanations: []string{"rank 2 on host w2 was asked 3.0 s ago to stop and say what they have, for the recovery, and has not; it has reported nothing"},
		},
		{
			name: "who has not come back yet holds up a recovery",
			e: evidence{job: running(func(j *api.Job) { j.Recovery, j.Awaited = "rank 2 to stop (for a reason)", 0b0110 }),
				traffic: none, reports: make([]report, 4), recovery: &recoveryEvidence{0b0100, "stop", 3 * s}},
			summary:      "the job is being recovered; that waits for rank 2 to stop (for a reason)",
			blockers:     []int{2},
			explanations: []string{"rank 2 on host w2 has not come back yet to the controller, which was restarted; the recovery needs it"},
		},
		{
			name:    "the controller was restarted",
			e:       evidence{job: running(func(j *api.Job) { j.Awaited = 0b0001 }), traffic: none, reports: computing},
			summary: "nothing waits: all ranks compute; rank 0 has not come back yet to the controller, which was restarted; the job goes on meanwhile",
		},
		{
			name: "nothing can be asked, and the ranks were told",
			e: evidence{job: running(hybrid), blind: map[string]string{"switch": "gone", "s0": "gone too"},
				reports: said(0, &api.Progress{Waiting: true, Round: 7, Chunk: 4, ChunksLeft: 2, Missing: 0b1000, AtServer: true, ForUs: 2_000_000})},
			summary: "3 of 4 ranks wait for rank 3 on host w3: 1 chunk lacks rank 3, the oldest for 2.5 s; rank 0 has waited for round 7 for 2.5 s; " +
				"not wholly asked: s0, switch",
			blockers:     []int{3},
			explanations: []string{"rank 3 on host w3 has not sent its part of chunk 4 of round 7 to server s0 for 2.5 s; it has reported nothing"},
			waiting:      []string{"s0 round 7 chunks 4-4 have 7 missing 8"},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for i := range 4 {
				tt.e.hosts = append(tt.e.hosts, fmt.Sprintf("w%d", i))
			}
			got := explain(&tt.e)
			if got.Summary != tt.summary {
				t.Errorf("summary\ngot  %s\nwant %s", got.Summary, tt.summary)
			}
			var blockers []int
			var explanations, waiting []string
			for _, b := range got.Blockers {
				blockers = append(blockers, int(b.Rank))
				explanations = append(explanations, b.Explanation)
			}
			for _, w := range got.Waiting {
				waiting = append(waiting, fmt.Sprintf("%s round %d chunks %d-%d have %x missing %x", w.At, w.Round, w.First, w.Last, w.Have, w.Missing))
			}
			if !slices.Equal(blockers, tt.blockers) || !slices.Equal(explanations, tt.explanations) {
				t.Errorf("blockers\ngot  %v %q\nwant %v %q", blockers, explanations, tt.blockers, tt.explanations)
			}
			if got.Recovery != tt.e.job.Recovery {
				t.Errorf("recovery is %q, want %q", got.Recovery, tt.e.job.Recovery)
			}
			if !slices.Equal(waiting, tt.waiting) {
				t.Errorf("waiting\ngot  %q\nwant %q", waiting, tt.waiting)
			}
			if len(got.Unreachable) != len(tt.e.blind) {
				t.Errorf("unreachable: %q", got.Unreachable)
			}
		})
	}
}
