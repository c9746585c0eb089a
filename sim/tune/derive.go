package tune

import (
	"fmt"
	"slices"
	"time"

	"xagg/controller"
	"xagg/lab/scenario"
	"xagg/policy/adapt"
	"xagg/policy/telemetry"
	"xagg/policy/trace"
	"xagg/sim/timing"
	"xagg/wire"
)

// Derived is the scenario that a trace was probably recorded in, as far as its numbers tell.
type Derived struct {
	Case
	Rounds   int     // of which the trace knows how long every rank computed
	Recorded float64 // mean of what the trace has as the job's median time of a round, s
	// Simulated is the median time of a round in a simulation of the scenario with the trace's own policy, s.
	Simulated float64
}

// Derive makes a scenario of a trace: ranks that compute as long as they did, round by round and again from the first when there are no more, links as fast as ranks
// have sent, and tensors of as many chunks. It is simulated with the trace's policy, to see how far that is from what was recorded.
func Derive(t *trace.Trace, costs timing.Costs) (*Derived, error) {
	fail := func(format string, args ...any) (*Derived, error) {
		return nil, fmt.Errorf("derive a scenario from the trace of job %s: %w", t.Job.Job, fmt.Errorf(format, args...))
	}
	d := &Derived{}
	compute := make([][]time.Duration, t.Ranks) // by rank and round
	rates := make([][]float64, t.Ranks)
	round, looks := -1.0, 0
	mode, least, wait, chunks, servers := "", 0, 0.0, 0.0, 0
	for i := range t.Steps {
		s := &t.Steps[i].Snapshot
		if len(s.Ranks) != t.Ranks {
			return fail("a snapshot has %d ranks, the job %d", len(s.Ranks), t.Ranks)
		}
		if s.Job.Round == round || slices.ContainsFunc(s.Ranks, func(r telemetry.Rank) bool { return len(r.Ready) == 0 }) {
			continue
		}
		round = s.Job.Round
		mode, least, wait = s.Job.Mode, int(s.Job.Least), s.Job.Wait
		chunks, servers = max(chunks, s.Job.Chunks), max(servers, len(s.Servers))
		d.Recorded += s.Job.RoundP50
		looks++
		for k := range s.Ranks {
			r := &s.Ranks[k]
			compute[k] = append(compute[k], time.Duration(max(0, r.Ready[len(r.Ready)-1]-r.OwnP50)*float64(time.Second)))
			rates[k] = append(rates[k], r.Rate)
		}
	}
	if looks < 10 {
		return fail("it knows of %d rounds how long every rank computed; want 10 at least, recorded by a version that notes rank.ready", looks)
	}
	d.Rounds, d.Recorded = looks, d.Recorded/float64(looks)
	s := &scenario.Scenario{
		Name: t.Job.Job, About: "Derived from a trace.", Servers: max(servers, 1), Warmup: scenario.DefaultWarmup, Rounds: min(max(looks, 20), 200), Seed: 1,
		Jobs: []scenario.Job{{
			Name: t.Job.Job, Ranks: t.Ranks, Depth: 1, Tensors: scenario.Tensors{Sizes: []int{int(max(chunks, 1)) * wire.MaxLanes}},
			Compute: scenario.Compute{Mean: time.Millisecond}, Links: map[int]scenario.Rate{},
		}},
	}
	job := &s.Jobs[0]
	// A rank's rate is what its values came to; frames have headers and results come back on the same link, the other way.
	const bits = 8 * 1.1
	fastest := 0.0
	for k := range rates {
		slices.Sort(rates[k])
		fastest = max(fastest, rates[k][len(rates[k])/2])
	}
	if fastest <= 0 {
		return fail("it does not know how fast any rank sends")
	}
	s.Links.Worker = scenario.Rate(fastest * bits)
	for k := range rates {
		if rate := rates[k][len(rates[k])/2]; rate > 0 && rate < 0.8*fastest {
			job.Links[k] = scenario.Rate(rate * bits)
		}
	}
	m := scenario.Mode("auto")
	if mode == string(controller.ModeQuorum) {
		job.Quorum = &scenario.Quorum{Ranks: max(least, 1), Wait: time.Duration(wait * float64(time.Second)).Truncate(time.Microsecond), Rounds: controller.MaxRounds}
		m = "auto/quorum"
	}
	d.Scenario = s
	d.Compute = func(_, rank, round int) time.Duration { return compute[rank][round%len(compute[rank])] }
	cfg, err := adapt.Parse("policy of the trace", []byte(t.Policy))
	if err != nil {
		return fail("%w", err)
	}
	var report timing.Report
	if err := report.Add(s, timing.Options{Mode: m, Seed: 1, Costs: costs, Adapt: &cfg, Compute: d.Compute}); err != nil {
		return fail("%w", err)
	}
	d.Simulated = report.Rows[0].Round.P50
	return d, nil
}
