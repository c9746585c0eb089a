package sim

import (
	"slices"
)

// Shrink returns a schedule that fails like s, if not for the same reason, and is as small as at most tries runs can
// find, and its failure. It returns s and nil if s does not fail.
func Shrink(s *Schedule, tries int) (*Schedule, error) {
	_, err := Run(s, Options{})
	if err == nil {
		return s, nil
	}
	for smaller := true; smaller; {
		smaller = false
		for _, cut := range cuts(s) {
			if tries--; tries < 0 {
				return s, err
			}
			c := s.clone()
			cut(c)
			if c.check() != nil || c.String() == s.String() {
				continue
			}
			if _, e := Run(c, Options{}); e != nil {
				s, err, smaller = c, e, true
				break // the cuts of the smaller schedule
			}
		}
	}
	return s, err
}

func (s *Schedule) clone() *Schedule {
	c := *s
	c.Vectors, c.Plans, c.Links, c.Compute = slices.Clone(s.Vectors), slices.Clone(s.Plans), slices.Clone(s.Links), slices.Clone(s.Compute)
	c.Late, c.Losses, c.Deaths = slices.Clone(s.Late), slices.Clone(s.Losses), slices.Clone(s.Deaths)
	return &c
}

// cuts returns what makes s smaller, the largest steps first.
func cuts(s *Schedule) (cuts []func(*Schedule)) {
	add := func(f func(*Schedule)) { cuts = append(cuts, f) }
	add(func(c *Schedule) { c.Jobs = 1 })
	add(func(c *Schedule) { c.Crash = nil })
	add(func(c *Schedule) {
		c.Quorum, c.Deaths = nil, nil
		for i := range c.Plans {
			c.Plans[i].Quorum = nil
		}
	})
	for i := range s.Plans {
		add(func(c *Schedule) { c.Plans[i].Quorum = nil })
	}
	add(func(c *Schedule) { c.Async = nil })
	add(func(c *Schedule) {
		if c.Async != nil {
			c.Async = &Async{}
		}
	})
	add(func(c *Schedule) { c.Ahead = 0 })
	add(func(c *Schedule) { c.Late = nil })
	for i := range s.Losses {
		add(func(c *Schedule) { c.Losses = slices.Delete(c.Losses, i, i+1) })
	}
	for i := range s.Deaths {
		add(func(c *Schedule) { c.Deaths = slices.Delete(c.Deaths, i, i+1) })
	}
	for i := range s.Vectors {
		if len(s.Vectors) > 1 {
			add(func(c *Schedule) { c.Vectors = slices.Delete(c.Vectors, i, i+1) })
		}
	}
	for i := range s.Plans {
		if len(s.Plans) > 1 {
			add(func(c *Schedule) { c.Plans = slices.Delete(c.Plans, i, i+1) })
		}
	}
	if s.Workers > 1 && (s.Crash == nil || s.Crash.Rank < s.Workers-1) {
		add(func(c *Schedule) {
			c.Workers--
			c.Links = slices.Delete(c.Links, c.Workers, c.Workers+1)
			c.Compute = c.Compute[:c.Workers]
			c.Late = c.Late[:min(len(c.Late), c.Workers)]
			for i := range c.Plans {
				c.Plans[i].Cohort &= c.all()
			}
		})
	}
	for _, fault := range []func(*Link){
		func(l *Link) { l.Drop = 0 }, func(l *Link) { l.Duplicate = 0 }, func(l *Link) { l.Reorder = 0 },
		func(l *Link) { l.Corrupt = 0 },
	} {
		add(func(c *Schedule) {
			for i := range c.Links {
				fault(&c.Links[i])
			}
		})
	}
	for i := range s.Links {
		add(func(c *Schedule) {
			l := &c.Links[i]
			l.Drop, l.Duplicate, l.Reorder, l.Corrupt, l.Jitter = 0, 0, 0, 0, 0
		})
	}
	for i := range s.Vectors {
		add(func(c *Schedule) { c.Vectors[i].Lanes = (c.Vectors[i].Lanes + 1) / 2 })
		add(func(c *Schedule) { c.Vectors[i].Float = false })
	}
	for i := range s.Compute {
		add(func(c *Schedule) { c.Compute[i] = 0 })
	}
	return cuts
}
