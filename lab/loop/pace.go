package loop

// Pace says when a rank of a quorum job computes nothing. One that is slower than the others for good would fall behind further
// and further. So once others are ahead of it, or it was late twice in a row, it goes through the rounds that it has missed with zeros, and on
// until one was in time: that one has what was left over of its late gradients, which otherwise would be late again with the next one, for ever.
type Pace struct {
	late bool // the round before was
	skip bool
}

// Skip reports whether the rank computes nothing in the next round.
func (p *Pace) Skip() bool { return p.skip }

// Note takes how a round went: whether any of its results lacks this rank, and by how many all-reduces others are known to be
// ahead after it.
func (p *Pace) Note(late bool, behind int) {
	p.skip = late && (p.skip || p.late || behind > 0)
	p.late = late
}
