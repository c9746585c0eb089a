package adapt

import (
	"slices"
	"testing"

	"xagg/lab/scenario"
	"xagg/policy/adapt"
	"xagg/policy/telemetry"
)

// What is promised of a rank that computes 4 times as long as the others for a while, in rounds.
const (
	steeredWithin = 10 // after it has become slow
	backWithin    = 20 // after it has recovered
)

// policies are those that the promises are made of: the one that holds where nobody says otherwise, and the best of those
// that do not predict.
func policies() []adapt.Config {
	var all []adapt.Config
	for _, rule := range slices.Compact([]string{adapt.DefaultConfig().Rule, "outlier"}) {
		c := adapt.DefaultConfig()
		c.Rule = rule
		all = append(all, c)
	}
	return all
}

// episode is the scenario in which a rank is slow for a while. It returns that as well.
func episode(t *testing.T) (*scenario.Scenario, scenario.Episode) {
	t.Helper()
	s, err := scenario.Load("../../scenarios/episode.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if len(s.Jobs) != 1 || len(s.Jobs[0].Compute.Episodes) != 1 {
		t.Fatalf("the scenario has jobs %+v, want one with one episode", s.Jobs)
	}
	e := s.Jobs[0].Compute.Episodes[0]
	if e.Factor != 4 || e.From < 2*telemetry.DefaultWindow || e.To-e.From < 2*steeredWithin || s.Rounds-e.To <= backWithin {
		t.Fatalf("episode %+v of %d rounds is not one that the promises are about", e, s.Rounds)
	}
	return s, e
}
