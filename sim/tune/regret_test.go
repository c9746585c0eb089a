package tune

import (
	"path/filepath"
	"strings"
	"testing"

	"xagg/lab/scenario"
	"xagg/sim/timing"
)

// TestRegret: in every scenario of the suite the default policy comes within 5 % of the best plan that stays, chosen with knowledge of who is slow; and
// costs no more than 2 % where nobody is.
func TestRegret(t *testing.T) {
	files, err := filepath.Glob("../../scenarios/*.yaml")
	if err != nil || len(files) < 17 {
		t.Fatalf("%d scenarios, %v", len(files), err)
	}
	for _, file := range files {
		s, err := scenario.Load(file)
		if err != nil {
			t.Fatal(err)
		}
		if s.Name == "resnet50" {
			// Many all-reduces a round: in its quorum job a slow rank falls behind what servers keep, also in the modes whose plan stays.
			s.Jobs[0].Quorum = nil
		}
		if (s.Name == "large" || s.Name == "transformer" || s.Name == "resnet50") && testing.Short() {
			continue
		}
		t.Run(s.Name, func(t *testing.T) {
			t.Parallel()
			report := &RegretReport{Rows: Regrets(s, timing.Options{Costs: timing.Lab()}, []uint64{1})}
			if len(report.Rows) == 0 {
				t.Fatal("nothing was compared")
			}
			for _, x := range report.Rows {
				if x.Adaptive == 0 || x.Best == "" {
					t.Errorf("%s: %v", x.Consistency, x.Failed)
				}
				one := RegretReport{Rows: []Regret{x}}
				for _, why := range one.Exceeding(0.05, 0.02) {
					t.Error(why)
				}
			}
		})
	}
}

// TestRegretSays: of what is compared with what, and of what cannot be.
func TestRegretSays(t *testing.T) {
	s, err := scenario.Load("../../scenarios/slow-2.yaml")
	if err != nil {
		t.Fatal(err)
	}
	s.Rounds = 5
	rows := Regrets(s, timing.Options{Costs: timing.Lab(), Slots: 2}, []uint64{1})
	if len(rows) != 2 || rows[0].Adaptive != 0 || len(rows[0].Failed) == 0 {
		t.Fatalf("a switch that is too small: %+v", rows)
	}
	r := RegretReport{Rows: rows}
	var none strings.Builder
	if err := r.WriteText(&none); err != nil || !strings.Contains(none.String(), "not simulated: ") || len(r.Exceeding(0, 0)) != 0 {
		t.Errorf("nothing is known: %s %v", &none, err)
	}
	r.Rows = Regrets(s, timing.Options{Costs: timing.Lab()}, []uint64{1, 2})
	if x := r.Rows[0]; len(r.Rows) != 2 || x.Consistency != "sync" || len(x.Static) != 3 || x.Static[x.Best] <= 0 || x.Alike ||
		x.Regret != x.Adaptive/x.Static[x.Best]-1 {
		t.Errorf("%+v", r.Rows)
	}
	for _, x := range r.Rows {
		for mode, round := range x.Static {
			if round < x.Static[x.Best] {
				t.Errorf("%s takes %v, the best, %s, %v", mode, round, x.Best, x.Static[x.Best])
			}
		}
	}
	r.Rows[0].Regret, r.Rows[1].Regret = 0.06, 0.04
	if why := r.Exceeding(0.05, 0.02); len(why) != 1 || !strings.Contains(why[0], "6.0 % longer than in mode") {
		t.Errorf("%q", why)
	}
	var text strings.Builder
	if err := r.WriteText(&text); err != nil || !strings.Contains(text.String(), "+6.0 %") {
		t.Errorf("%s %v", &text, err)
	}
}
