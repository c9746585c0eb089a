package demo

import (
	"slices"
	"sync"
)

// witness keeps what workers report of a job in which workers die. With which all-reduce one has come back it reports too
// late for the others' to be checked as they come: what it has given to that one must not have what was left out before.
type witness struct {
	mu      sync.Mutex
	reports []report
}

// report is what a rank holds after an all-reduce.
type report struct {
	number int
	reduced
}

// take keeps a report.
func (w *witness) take(number int, r reduced) error {
	r.sums, r.masks = slices.Clone(r.sums), slices.Clone(r.masks)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.reports = append(w.reports, report{number, r})
	return nil
}

// testify has the verifier check all reports.
func (w *witness) testify(v *verifier) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	firsts := map[int][]int{} // ranks, by the number with which they begin without memory
	for rank := range v.away {
		next, lives := 0, -1
		for _, r := range w.reports { // those of one rank are in their order
			if r.rank != rank {
				continue
			}
			if r.life > max(lives, 0) {
				v.leave(rank, absence{next, r.number})
				firsts[r.number] = append(firsts[r.number], rank)
			}
			next, lives = r.number+1, r.life
		}
		if next < len(v.wanted) {
			v.leave(rank, absence{next, len(v.wanted)})
			firsts[len(v.wanted)] = append(firsts[len(v.wanted)], rank)
		}
	}
	slices.SortStableFunc(w.reports, func(a, b report) int { return a.number - b.number })
	reports := w.reports
	for number := range len(v.wanted) + 1 {
		for _, rank := range firsts[number] {
			v.forget(rank)
		}
		for len(reports) > 0 && reports[0].number == number {
			if err := v.take(number, reports[0].reduced); err != nil {
				return err
			}
			reports = reports[1:]
		}
	}
	return v.complete()
}
