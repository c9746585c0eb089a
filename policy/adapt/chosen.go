package adapt

import "slices"

// Chosen returns the index in Alternatives of what was decided, -1 where nothing is predicted of it.
func (d *Decision) Chosen() int { return d.Find(d.Alternatives) }

// Find returns the index of what was decided among alternatives, -1 if it is none of them. Those of another decision from the same snapshot
// say what its rule predicts of this one.
func (d *Decision) Find(alternatives []Alternative) int {
	return slices.IndexFunc(alternatives, func(a Alternative) bool {
		return a.Steered == d.Steered && (d.Quorum == 0 || a.Quorum == d.Quorum)
	})
}
