package timing

import (
	"fmt"

	"xagg/lab/scenario"
	"xagg/wire"
)

// Resize returns a scenario whose jobs have n ranks each. Ranks that are unlike the others stay as many, and are the last ones as
// before: of the scenario's rank r, counted from the end, so is the new one's; those for whom there is no room are left out. A quorum
// goes without as many ranks as before. Rounds that servers keep are those of the scenario, or follow.
func Resize(s *scenario.Scenario, n int) (*scenario.Scenario, error) {
	if n < 2 || n > wire.MaxRanks {
		return nil, fmt.Errorf("resize scenario %s: %d ranks, want 2 to %d", s.Name, n, wire.MaxRanks)
	}
	out := *s
	out.Jobs = nil
	for _, j := range s.Jobs {
		by := n - j.Ranks
		j.Ranks = n
		j.Links, j.Loss, j.Compute.Slow = shift(j.Links, by), shift(j.Loss, by), shift(j.Compute.Slow, by)
		var episodes []scenario.Episode
		for _, e := range j.Compute.Episodes {
			if e.Rank += by; e.Rank >= 0 {
				episodes = append(episodes, e)
			}
		}
		j.Compute.Episodes = episodes
		var steer []int
		for _, r := range j.Steer {
			if r+by >= 0 {
				steer = append(steer, r+by)
			}
		}
		j.Steer = steer
		if j.Quorum != nil {
			q := *j.Quorum
			q.Ranks = max(1, q.Ranks+by)
			j.Quorum = &q
		}
		out.Jobs = append(out.Jobs, j)
	}
	return &out, out.Validate()
}

// shift returns what is said of ranks for ranks with other numbers.
func shift[V any](m map[int]V, by int) map[int]V {
	out := map[int]V{}
	for rank, v := range m {
		if rank+by >= 0 {
			out[rank+by] = v
		}
	}
	return out
}
