package adapt

import (
	"testing"
	"time"

	"xagg/policy"
	"xagg/policy/telemetry"
)

// TestFollower: it decides once a round, when all have reported it, and what ranks measured under another plan counts for no percentile.
func TestFollower(t *testing.T) {
	const ms = time.Millisecond
	c := DefaultConfig()
	f, err := c.Follow(2, 1)
	if err != nil {
		t.Fatal(err)
	}
	plan := policy.Plan{Cohort: 0b01, Steered: 0b10, Servers: []string{"s0"}}
	report := func(rank int, epoch uint16, round uint32) (Decision, bool) {
		t.Helper()
		r := telemetry.Round{Number: round, Compute: 10 * ms, Comm: ms, Chunks: 1}
		if err := f.Report(time.Second, epoch, 0b11, telemetry.Report{Rank: rank, Rounds: []telemetry.Round{r}}); err != nil {
			t.Fatal(err)
		}
		f.Snapshot.Job.Size = 2
		f.Measure(time.Second, 1000)
		d, next, ok := f.Decide(plan)
		if d.Error != "" || !next.Equal(plan) {
			t.Fatalf("plan %+v, %s", next, d.Error)
		}
		return d, ok
	}
	for round := range uint32(3) {
		if _, ok := report(0, 1, round); ok {
			t.Errorf("round %d is decided on before rank 1 has told of it", round)
		}
		if d, ok := report(1, 1, round); !ok || d.Round != float64(round) || d.Steered != plan.Steered {
			t.Errorf("round %d: %+v, %v", round, d, ok)
		}
	}
	report(0, 2, 3)
	report(1, 2, 3)
	if r := &f.Snapshot.Ranks[1]; r.Rounds != 1 || len(r.Ready) != 4 || !r.Steered {
		t.Errorf("under another plan: %v rounds, %v ready, steered %v; want 1, and 4 of before and now", r.Rounds, len(r.Ready), r.Steered)
	}
}
