package loop

import "testing"

// TestPace: when a rank that is late computes nothing.
func TestPace(t *testing.T) {
	type outcome struct {
		late   bool
		behind int
	}
	for _, c := range []struct {
		name     string
		outcomes []outcome
		skip     bool
	}{
		{"in time", []outcome{{}}, false},
		{"late once, nobody ahead", []outcome{{late: true}}, false},
		{"late twice", []outcome{{late: true}, {late: true}}, true},
		{"late, and others ahead", []outcome{{true, 2}}, true},
		{"in time, and others ahead", []outcome{{false, 2}}, false},
		{"catching up", []outcome{{true, 2}, {late: true}}, true},
		{"caught up", []outcome{{true, 2}, {late: true}, {}}, false},
		{"late with a pause", []outcome{{late: true}, {}, {late: true}}, false},
	} {
		var p Pace
		for _, o := range c.outcomes {
			p.Note(o.late, o.behind)
		}
		if p.Skip() != c.skip {
			t.Errorf("%s: skips: %v", c.name, p.Skip())
		}
	}
}
