package scenario

import "fmt"

// Divide returns the scenario with n times fewer values on links that are n times slower, and slots as many as that needs, so that a switch
// has n times fewer packets to forward in the same time. Name and About say so. What is smaller than n becomes 1.
func (s *Scenario) Divide(n int) *Scenario {
	if n <= 1 {
		return s
	}
	d := *s
	by := Rate(n)
	d.Name = fmt.Sprintf("%s-by-%d", s.Name, n)
	d.About = fmt.Sprintf("%s Rates and sizes are divided by %d.", s.About, n)
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
		j.Pool = (j.Pool + n - 1) / n
		j.Tensors.Bucket = (j.Tensors.Bucket + n - 1) / n
		d.Jobs = append(d.Jobs, j)
	}
	return &d
}
