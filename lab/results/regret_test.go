package results

import (
	"math"
	"testing"
)

// took is a run whose rounds take so long on average.
func took(scenario, mode string, repetition int, round float64) Run {
	r := steady(scenario, mode, repetition, 0.1, 0.1)
	r.Jobs[0].Span = round * float64(len(r.Jobs[0].Comm[0]))
	return r
}

// TestRegret: the bound is the worst of those against each static choice of the same consistency, and no other.
func TestRegret(t *testing.T) {
	modes := []string{"tcp", "switch", "server", "auto", "hybrid", "server/quorum", "auto/quorum"}
	var runs []Run
	for rep, noise := range []float64{1, 1.1, 0.9, 1.05, 0.95} {
		wobble := 1 + 0.01*float64(rep%2) // of the ratio to server
		for mode, round := range map[string]float64{
			"tcp": 0.01, "switch": 0.2, "server": 0.1 * wobble, "auto": 0.102, "hybrid": 0.11, "server/quorum": 0.05, "auto/quorum": 0.06,
		} {
			runs = append(runs, took("slow", mode, rep, round*noise))
		}
	}
	job := analyze(t, &File{Name: "a", Sessions: []Session{{header(modes...), runs}}}).Scenarios[0].Jobs[0]
	if len(job.Regrets) != 2 {
		t.Fatalf("%+v, want one of auto and one of auto/quorum", job.Regrets)
	}
	auto, quorum := job.Regrets[0], job.Regrets[1]
	if auto.Mode != 3 || len(auto.Of) != 3 || auto.Of[1].Pairs != 5 || auto.Of[2].Pairs != 5 || auto.Of[4].Pairs != 5 {
		t.Fatalf("auto: %+v, want it held against switch, server and hybrid", auto)
	}
	near(t, "of switch", auto.Of[1].Ratio, 0.51)
	near(t, "of server", auto.Of[2].Ratio, 1.02/math.Pow(1.01, 2.0/5))
	near(t, "of hybrid", auto.Of[4].High, 0.102/0.11)
	near(t, "worst", auto.Worst(), auto.Of[2].High)
	if auto.Worst() <= 1.02 || auto.Worst() > 1.03 {
		t.Errorf("the worst upper bound is %g, want it above the 1.02 against the quickest, and not far", auto.Worst())
	}
	for bound, want := range map[float64]Verdict{1.05: Yes, 1.02: NotResolved, 1.01: NotResolved, 1: No} {
		if got := auto.AtMost(bound); got != want {
			t.Errorf("at most %g of the best: %v, want %v; %+v", bound, got, want, auto.Of[2])
		}
	}
	if quorum.Mode != 6 || len(quorum.Of) != 1 || quorum.AtMost(1.05) != No {
		t.Errorf("auto/quorum: %+v, want it held against server/quorum alone, which is quicker", quorum)
	}
	near(t, "quorum", quorum.Worst(), 1.2)

	// A choice of which there is a single run leaves it open.
	runs = append(runs, took("even", "auto", 0, 0.1), took("even", "auto", 1, 0.1), took("even", "switch", 0, 0.1), took("even", "switch", 1, 0.1),
		took("even", "hybrid", 1, 0.5))
	for _, sc := range analyze(t, &File{Name: "a", Sessions: []Session{{header(modes...), runs}}}).Scenarios {
		if sc.Name == "even" {
			if r := sc.Jobs[0].Regrets[0]; r.AtMost(1.05) != NotResolved || !math.IsInf(r.Worst(), 1) {
				t.Errorf("%+v says %v, at most %g", r, r.AtMost(1.05), r.Worst())
			}
		}
	}
	if job := analyze(t, &File{Name: "a", Sessions: []Session{{header("switch"), []Run{took("slow", "switch", 0, 0.1)}}}}).Scenarios[0].Jobs[0]; len(job.Regrets) != 0 {
		t.Errorf("%+v where no plan follows anything", job.Regrets)
	}
}
