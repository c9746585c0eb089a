package scenario

import (
	"fmt"
	"time"
)

// Slow returns the scenario for a switch that is n² times slower: times are n times longer, and n times fewer values go through links that are
// n² times slower, so that shares of times stay as they are. Pools do too: on such a switch as many packets are under way. Name and About
// say so.
func (s *Scenario) Slow(n int) *Scenario {
	if n <= 1 {
		return s
	}
	d := *s
	by := Rate(n * n)
	d.Name = fmt.Sprintf("%s-by-%d", s.Name, n*n)
	d.About = fmt.Sprintf("%s Times are multiplied by %d, sizes divided by %[2]d, and rates divided by %d.", s.About, n, n*n)
	d.Links.Worker /= by
	d.Links.Server /= by
	d.Jobs = nil
	for _, j := range s.Jobs {
		links := map[int]Rate{}
		for rank, rate := range j.Links {
			links[rank] = rate / by
		}
		j.Links = links
		j.Tensors.Divide = max(j.Tensors.Divide, 1) * n
		j.Tensors.Bucket = (j.Tensors.Bucket + n - 1) / n
		j.Compute.Mean *= time.Duration(n)
		if j.Quorum != nil {
			q := *j.Quorum
			q.Wait *= time.Duration(n)
			j.Quorum = &q
		}
		d.Jobs = append(d.Jobs, j)
	}
	return &d
}
