package place

import (
	"cmp"
	"container/heap"
	"fmt"
	"math/bits"
	"slices"

	"xagg/policy"
)

// share is what a job gets of the switches.
type share struct {
	asked  int // for a pool; 0 = as large a one as is of use
	useful int // the largest pool that is of use
	quota  int // the pool that its weight entitles it to
	pool   int // that it gets; 0 = it has its slots already
	run    run // where its slots are
}

// run is a row of free slots.
type run struct {
	sw, base, size int
}

// runs returns the free slots of the switches, in their order.
func (p *Problem) runs() ([]run, error) {
	var out []run
	for i, s := range p.Switches {
		var held []Held
		for _, h := range p.Held {
			if h.Switch == s.Name && h.Size > 0 {
				held = append(held, h)
			}
		}
		slices.SortFunc(held, func(a, b Held) int { return cmp.Compare(a.Base, b.Base) })
		at := 0
		for _, h := range held {
			if h.Base < at {
				return nil, &policy.FieldError{Field: "held", Err: fmt.Errorf("job %q has slots of another one at switch %q", h.Job, s.Name)}
			}
			out = append(out, run{i, at, h.Base - at})
			at = h.Base + h.Size
		}
		out = append(out, run{i, at, s.Slots - at})
	}
	return slices.DeleteFunc(out, func(r run) bool { return r.size < policy.SlotsPerPool }), nil
}

// levels counts, for each power of two s, how many pools of s have room in the free runs, and how much of that pools of s
// and more take.
//
// A pool's slots are in a row. Sizes are powers of two: one divides the next larger one. Whatever run a large pool is put
// into, as many smaller ones have room in what is left of all runs together, so that pools can be put somewhere, the
// largest first, if and only if, for every s, those of at least s take no more than there are runs of s (Coffman, Garey and
// Johnson, Bin packing with divisible item sizes, 1987).
type levels struct {
	room, taken [bits.UintSize]int
	budget      int // that level 0 may have taken after a pool was doubled
}

func newLevels(runs []run) *levels {
	l := &levels{}
	for i := range l.room {
		for _, r := range runs {
			l.room[i] += r.size / policy.SlotsPerPool >> i
		}
	}
	return l
}

// add takes a pool, whether there is room or not.
func (l *levels) add(pool int) {
	for i := 0; pool>>i > 0; i++ {
		l.taken[i] += pool >> i
	}
}

// scarce returns the largest size of pools that there are too many of, as its level; or -1.
func (l *levels) scarce() int {
	for i := len(l.room) - 1; i >= 0; i-- {
		if l.taken[i] > l.room[i] {
			return i
		}
	}
	return -1
}

// double makes a pool twice as large, if there is room for that.
func (l *levels) double(pool int) bool {
	if l.taken[0]+pool > l.budget {
		return false
	}
	top := bits.Len(uint(pool)) // level of twice the pool
	for i := range top {
		if l.taken[i]+pool>>i > l.room[i] {
			return false
		}
	}
	if l.taken[top]+1 > l.room[top] {
		return false
	}
	for i := range top {
		l.taken[i] += pool >> i
	}
	l.taken[top]++
	return true
}

// divide gives every job its pool and its slots.
func (p *Problem) divide(deals *deals) ([]share, error) {
	runs, err := p.runs()
	if err != nil {
		return nil, err
	}
	asking, all := p.weights()
	shares := make([]share, len(p.Jobs))
	levels := newLevels(runs)
	for i, j := range p.Jobs {
		s := &shares[i]
		s.quota = quotaPool(QuotaSlots(p.slots(), p.Reserve, j.Weight, all))
		if j.Pool != 0 {
			continue
		}
		if s.asked = j.Rule.Pool; s.asked != 0 {
			s.useful, s.pool = s.asked, s.asked
		} else {
			s.useful, s.pool = deals.jobs[i].useful, 1
		}
		levels.add(s.pool)
	}
	if err := p.short(levels, runs, shares); err != nil {
		return nil, err
	}
	levels.budget = min(QuotaSlots(p.slots(), p.Reserve, asking, all), int(p.within(float64(p.free())))) / policy.SlotsPerPool

	lowest := &byRatio{p.Jobs, shares, nil}
	for i := range shares {
		if shares[i].pool != 0 && shares[i].asked == 0 {
			lowest.order = append(lowest.order, i)
		}
	}
	heap.Init(lowest)
	for lowest.Len() > 0 {
		s := &shares[lowest.order[0]]
		if 2*s.pool <= s.useful && levels.double(s.pool) {
			s.pool *= 2
			heap.Fix(lowest, 0)
			continue
		}
		heap.Pop(lowest) // room never grows: it stays
	}
	p.settle(runs, shares)
	return shares, nil
}

// short is the error that there is no room for what jobs need at least, or nil.
func (p *Problem) short(l *levels, runs []run, shares []share) error {
	level := l.scarce()
	if level < 0 {
		return nil
	}
	largest := 0
	for i := range shares {
		if shares[i].pool > shares[largest].pool {
			largest = i
		}
	}
	hint := "remove a job"
	if shares[largest].asked > 1 {
		hint = fmt.Sprintf("choose a smaller pool than the %d of job %q, or remove a job", shares[largest].asked, p.Jobs[largest].Job)
	}
	longest := 0
	for _, r := range runs {
		longest = max(longest, r.size)
	}
	need, free := policy.SlotsPerPool*l.taken[0], p.free()
	row := policy.SlotsPerPool * shares[largest].pool
	switch {
	case need > free:
		return &ShortError{"slots of the switch", uint64(need), uint64(free), hint}
	case row > longest:
		return &ShortError{"slots of the switch in a row", uint64(row), uint64(longest), "the others that are free are scattered: " + hint}
	}
	return &ShortError{
		fmt.Sprintf("rows of %d slots of the switch", policy.SlotsPerPool<<level), uint64(l.taken[level]), uint64(l.room[level]),
		"the free slots are scattered: " + hint,
	}
}

// byRatio is a heap of jobs: the lowest ratio of pool to weight is on top, of equal ones the smallest pool, which costs the
// least to double.
type byRatio struct {
	jobs   []Job
	shares []share
	order  []int
}

func (h *byRatio) Len() int { return len(h.order) }
func (h *byRatio) Less(a, b int) bool {
	i, k := h.order[a], h.order[b]
	return cmp.Or(
		cmp.Compare(h.shares[i].pool*h.jobs[k].Weight, h.shares[k].pool*h.jobs[i].Weight),
		cmp.Compare(h.shares[i].pool, h.shares[k].pool),
		cmp.Compare(h.jobs[i].Job, h.jobs[k].Job)) < 0
}
func (h *byRatio) Swap(a, b int) { h.order[a], h.order[b] = h.order[b], h.order[a] }
func (h *byRatio) Push(x any)    { h.order = append(h.order, x.(int)) }
func (h *byRatio) Pop() any {
	last := h.order[len(h.order)-1]
	h.order = h.order[:len(h.order)-1]
	return last
}

// settle puts pools for which there is room into runs, the largest first: to the switch with the fewest ranks among those
// that have room, and the lowest slots there.
func (p *Problem) settle(runs []run, shares []share) {
	ranks := make([]int, len(p.Switches))
	for _, h := range p.Held {
		ranks[p.switchOf(h.Switch)] += h.Ranks
	}
	var order []int
	for i := range shares {
		if shares[i].pool != 0 {
			order = append(order, i)
		}
	}
	slices.SortFunc(order, func(a, b int) int {
		return cmp.Or(cmp.Compare(shares[b].pool, shares[a].pool), cmp.Compare(p.Jobs[a].Job, p.Jobs[b].Job))
	})
	for _, i := range order {
		size := policy.SlotsPerPool * shares[i].pool
		best := -1
		for k, r := range runs {
			if r.size >= size && (best < 0 || ranks[r.sw] < ranks[runs[best].sw]) {
				best = k
			}
		}
		r := &runs[best] // there is one: see levels
		shares[i].run = run{r.sw, r.base, size}
		ranks[r.sw] += p.Jobs[i].Ranks
		r.base, r.size = r.base+size, r.size-size
	}
}
