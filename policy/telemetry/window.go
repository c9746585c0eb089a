package telemetry

import (
	"math"
	"slices"
	"time"

	"xagg/internal/stats"
)

// DefaultWindow is the number of rounds that percentiles are over unless a policy says otherwise: short, so that a median shows soon what has
// changed; rules look back over several rounds themselves.
const DefaultWindow = 8

// MaxWindow is the largest number of rounds that a window may have.
const MaxWindow = 4096

// kept is how many rounds behind the newest report a round is kept for those ranks that have not reported it yet.
const kept = 256

// Window keeps the last rounds of a job's ranks. It knows nothing of plans and devices: [Window.Fill] fills in of a snapshot
// what follows from reports.
type Window struct {
	size  int
	ranks []rankWindow
	// waits are the communication times of rounds that not all ranks have reported yet.
	waits   map[uint32]*waits
	begun   bool // newest and settled are known
	newest  uint32
	settled uint32 // every rank has reported all rounds before
	chunks  int
	gaps    uint64
	counted bool   // some round was
	present uint64 // ranks whose reports a round waits for
	// held and stuck are how long slots held incomplete chunks in a round, and how long for the last rank alone.
	held, stuck series
}

// rankWindow is what is kept of a rank.
type rankWindow struct {
	next    uint32 // number after that of its last round
	at      time.Duration
	seen    bool
	behind  int
	blocked series
	lag     series
	compute series
	comm    series
	last    series // share of chunks
	late    series
	packets series
	resends series
	round   series
	// parts are what Rank.Ready follows from. sent is how long it communicated, when nobody else was waited for, in rounds whose results have its
	// part: what its rate follows from. computed is how long it computed in rounds that it did not skip.
	parts          []part
	sent, computed series
}

// part is a rank's own part of a round, by its own clock.
type part struct {
	compute, own float64 // s
	late         bool    // most results lack it
	lost         bool    // some do
	skipped      bool    // the rank gave zeros instead of computing
}

// waits are how long ranks waited for the results of a round.
type waits struct {
	comm    []time.Duration
	compute []time.Duration
	late    []float64 // share of chunks, by rank
	have    uint64
	blocked []time.Duration // by the rank that was waited for, as the report said that saw most of it
	last    []int           // chunks by rank
	chunks  int
	held    time.Duration // as the report said that saw most of it
	stuck   time.Duration // likewise
}

// NewWindow returns an empty window of so many rounds for a job of so many ranks, 1..64.
func NewWindow(ranks, rounds int) *Window {
	w := &Window{size: rounds, ranks: make([]rankWindow, ranks), waits: map[uint32]*waits{}, present: allRanks(ranks)}
	w.held.size, w.stuck.size = rounds, rounds
	for i := range w.ranks {
		r := &w.ranks[i]
		for _, s := range r.all() {
			s.size = rounds
		}
	}
	return w
}

func (r *rankWindow) all() []*series {
	return []*series{&r.blocked, &r.lag, &r.compute, &r.comm, &r.last, &r.late, &r.packets, &r.resends, &r.round, &r.sent, &r.computed}
}

// Gaps returns how many rounds were left out because a rank never reported them, or did so too late.
func (w *Window) Gaps() uint64 { return w.gaps }

// Present says which ranks are there: nobody waits for the reports of those that are gone.
func (w *Window) Present(ranks uint64) {
	w.present = ranks & allRanks(len(w.ranks))
	for i := range w.ranks {
		if w.present>>i&1 == 0 {
			r := &w.ranks[i]
			r.parts = nil
			r.sent.reset()
			r.computed.reset()
		}
	}
}

// Forget leaves out what was measured before a change of plan: percentiles are of rounds under one plan only. What is a rank's own, how long it
// computed and sent and so when it was ready, no plan changes, and it is kept.
func (w *Window) Forget() {
	w.held.reset()
	w.stuck.reset()
	for i := range w.ranks {
		r := &w.ranks[i]
		for _, s := range r.all() {
			if s != &r.sent && s != &r.computed {
				s.reset()
			}
		}
	}
}

// Add takes a report that came at a time since the observation began. Rounds that were reported before are left out, a
// report that is not possible whole: see [Report.Check].
func (w *Window) Add(now time.Duration, report Report) error {
	if err := report.Check(len(w.ranks)); err != nil {
		return err
	}
	rank := &w.ranks[report.Rank]
	for i := range report.Rounds {
		round := &report.Rounds[i]
		if rank.seen && int32(round.Number-rank.next) < 0 {
			continue // told twice
		}
		rank.seen, rank.next, rank.at, rank.behind = true, round.Number+1, max(now, rank.at), round.Behind
		rank.compute.add(round.Compute.Seconds())
		rank.comm.add(round.Comm.Seconds())
		rank.round.add((round.Compute + round.Comm).Seconds())
		rank.late.add(share(float64(round.Late), float64(round.Chunks)))
		rank.packets.add(float64(round.Packets))
		rank.resends.add(float64(round.Resends))
		w.chunks = max(round.Chunks, 1)
		w.gather(report.Rank, round)
	}
	return nil
}

// gather takes a rank's report of a round together with those of the other ranks, and has the round counted when it is
// complete.
func (w *Window) gather(rank int, round *Round) {
	n := round.Number
	if !w.begun {
		w.begun, w.newest, w.settled = true, n, n
	}
	if int32(n-w.newest) > 0 {
		w.newest = n
	}
	if int32(n-w.settled) < 0 {
		w.gaps++ // the others' were given up
		return
	}
	x := w.waits[n]
	if x == nil {
		ranks := len(w.ranks)
		x = &waits{comm: make([]time.Duration, ranks), compute: make([]time.Duration, ranks), late: make([]float64, ranks),
			blocked: make([]time.Duration, ranks), last: make([]int, ranks)}
		w.waits[n] = x
	}
	x.comm[rank], x.compute[rank], x.have = round.Comm, round.Compute, x.have|1<<rank
	x.late[rank] = share(float64(round.Late), float64(round.Chunks))
	x.chunks = max(x.chunks, round.Chunks)
	x.held, x.stuck = max(x.held, round.Held), max(x.stuck, round.Blocked)
	for _, l := range round.Last { // all ranks received the same results; who has seen them all says most
		x.blocked[l.Rank], x.last[l.Rank] = max(x.blocked[l.Rank], l.Blocked), max(x.last[l.Rank], l.Chunks)
	}
	if x.have&w.present == w.present {
		w.count(n, x)
	}
	for old, x := range w.waits {
		if int32(w.newest-old) > kept {
			w.gaps++
			w.count(old, x) // without those who did not say anything
		}
	}
}

func allRanks(n int) uint64 { return 1<<uint(n) - 1 }

// count puts a round into the windows of the ranks that have reported it.
func (w *Window) count(n uint32, x *waits) {
	delete(w.waits, n)
	w.counted = true
	if int32(n+1-w.settled) > 0 {
		w.settled = n + 1
	}
	w.held.add(x.held.Seconds())
	w.stuck.add(x.stuck.Seconds())
	longest := time.Duration(0)
	var computed []float64
	for rank := range x.comm {
		if x.have>>rank&1 != 0 {
			longest = max(longest, x.comm[rank])
			computed = append(computed, x.compute[rank].Seconds())
		}
	}
	usual := stats.Median(computed)
	for rank := range w.ranks {
		if x.have>>rank&1 == 0 {
			continue
		}
		r := &w.ranks[rank]
		r.blocked.add(x.blocked[rank].Seconds())
		r.last.add(share(float64(x.last[rank]), float64(x.chunks)))
		r.lag.add((longest - x.comm[rank]).Seconds())
		// What the last one of all waited was for nobody but itself.
		waited := time.Duration(0)
		for other, blocked := range x.blocked {
			if other != rank {
				waited = max(waited, blocked)
			}
		}
		if waited >= x.comm[rank] {
			waited = 0 // others did: it had not begun, or is one of the cohort that came last
		}
		p := part{compute: x.compute[rank].Seconds(), own: (x.comm[rank] - waited).Seconds(), late: x.late[rank] > 0.5, lost: x.late[rank] > 0}
		p.skipped = p.compute < usual/skips && r.computed.len() > 0
		if !p.skipped && p.compute > 0 { // it is not known before the first all-reduce of all, nor while others are under way
			r.computed.add(p.compute)
		}
		if !p.skipped && !p.late {
			r.sent.add(p.own)
		}
		if x.have&w.present == w.present {
			if len(r.parts) == w.size {
				r.parts = slices.Delete(r.parts, 0, 1)
			}
			r.parts = append(r.parts, p)
		}
	}
}

// ready returns Rank.Ready. Where a rank's part was not waited for, it is filled in by what is known of its other rounds.
func (w *Window) ready(rank int) []float64 {
	r := &w.ranks[rank]
	stream, computed := w.stream(rank), r.computed.quantile(0.5)
	out := make([]float64, 0, len(r.parts))
	for _, p := range r.parts {
		switch {
		case p.skipped: // it would not have been there so early; and what it communicated was waiting for those that computed
			p.compute, p.own = computed, stream
		case p.late:
			// It may have been late by a moment, for having begun after the others. What it saw of its own stream is by how much it got the results later
			// than late ranks do, whose links bring them twice: to all, and in answer to their parts.
			p.own = stream + max(0, p.own-2*stream)
		case p.lost: // when the rest would have been there nobody can tell: not before it was sent again
			p.own += stream
		}
		out = append(out, p.compute+p.own)
	}
	return out
}

// stream returns how long a rank's stream takes: the median of the rounds whose results have its part. While there is none, nobody can tell, and it is
// twice the quickest rank's: as if it began anew when others are through. It is 0 when nothing is known.
func (w *Window) stream(rank int) float64 {
	if sent := &w.ranks[rank].sent; sent.len() > 0 {
		return sent.quantile(0.5)
	}
	quickest := math.Inf(1)
	for i := range w.ranks {
		r := &w.ranks[i]
		if r.sent.len() > 0 {
			quickest = min(quickest, r.sent.quantile(0.5))
		}
	}
	if math.IsInf(quickest, 1) {
		return 0
	}
	return 2 * quickest
}

// skips is how many times shorter than usual a rank's computation is that has not computed: a rank of a quorum job that was late gives zeros
// until it has caught up.
const skips = 8

// Fill fills in what reports tell of a job: of Ranks all but Steered and what [Devices] know, and of Job what is measured.
// Job.Size must be the window's.
func (w *Window) Fill(s *Snapshot, now time.Duration, bytes float64) {
	s.Time = now.Seconds()
	s.Ranks = slices.Grow(s.Ranks[:0], len(w.ranks))
	var round, comm, compute, blocked, lag, rate, late []float64
	j := &s.Job
	j.Rounds, j.Round, j.Chunks = 0, 0, float64(w.chunks)
	for i := range w.ranks {
		r := &w.ranks[i]
		out := Rank{
			Rank: float64(i), Rounds: float64(r.lag.len()), Age: now.Seconds() - r.at.Seconds(), Behind: float64(r.behind),
			BlockedMean: r.blocked.mean(), BlockedEWMA: r.blocked.ewma, BlockedDev: r.blocked.dev,
			LagEWMA: r.lag.ewma, LagDev: r.lag.dev,
			LastShare: r.last.mean(), LateShare: r.late.mean(),
			ComputeP50: r.compute.quantile(0.5), CommP50: r.comm.quantile(0.5),
			ResendShare: share(r.resends.mean(), r.packets.mean()),
		}
		b, l := r.blocked.sorted(), r.lag.sorted()
		out.BlockedP50, out.BlockedP95, out.BlockedP99 = stats.Quantile(b, 0.5), stats.Quantile(b, 0.95), stats.Quantile(b, 0.99)
		out.LagP50, out.LagP95, out.LagP99 = stats.Quantile(l, 0.5), stats.Quantile(l, 0.95), stats.Quantile(l, 0.99)
		out.OwnP50, out.Ready = w.stream(i), w.ready(i)
		out.Rate = share(bytes, out.OwnP50)
		s.Ranks = append(s.Ranks, out)
		j.Rounds = max(j.Rounds, out.Rounds)
		round, comm = append(round, r.round.values...), append(comm, r.comm.values...)
		compute, late = append(compute, r.compute.values...), append(late, r.late.values...)
		blocked, lag, rate = append(blocked, out.BlockedP50), append(lag, out.LagP50), append(rate, out.Rate)
	}
	if w.counted {
		j.Round = float64(w.settled - 1)
	}
	j.RoundP50, j.CommP50, j.ComputeP50 = stats.Median(round), stats.Median(comm), stats.Median(compute)
	j.BlockedMedian, j.LagMedian, j.RateMedian = stats.Median(blocked), stats.Median(lag), stats.Median(rate)
	j.BlockedMAD, j.LagMAD = mad(blocked, j.BlockedMedian), mad(lag, j.LagMedian)
	sum := 0.0
	for _, x := range late {
		sum += x
	}
	j.LateShare = share(sum, float64(len(late)))
	lasted := 0.0
	for _, x := range round {
		lasted += x
	}
	j.BusySlots = share(w.held.mean(), share(lasted, float64(len(round))))
	j.SlotOccupancy = share(j.BusySlots, j.Pool)
	j.BlockedSlotTime, j.BlockedShare = w.stuck.mean(), share(w.stuck.mean(), w.held.mean())
}

// series are the last values of something, at most size.
type series struct {
	size      int
	values    []float64
	at        int // of the oldest, once there are size
	n         uint64
	ewma, dev float64
}

func (s *series) len() int { return len(s.values) }

func (s *series) reset() { *s = series{size: s.size, values: s.values[:0]} }

// add takes a value. The weights are those of RFC 6298, section 2.
func (s *series) add(x float64) {
	if s.n == 0 {
		s.ewma, s.dev = x, x/2
	} else {
		s.dev += (math.Abs(x-s.ewma) - s.dev) / 4
		s.ewma += (x - s.ewma) / 8
	}
	s.n++
	if len(s.values) < s.size {
		s.values = append(s.values, x)
		return
	}
	s.values[s.at] = x
	s.at = (s.at + 1) % s.size
}

func (s *series) mean() float64 { return stats.Mean(s.values) }

func (s *series) sorted() []float64 { return slices.Sorted(slices.Values(s.values)) }

func (s *series) quantile(q float64) float64 { return stats.Quantile(s.sorted(), q) }

// mad returns the median distance from the middle.
func mad(x []float64, middle float64) float64 {
	d := make([]float64, len(x))
	for i := range x {
		d[i] = math.Abs(x[i] - middle)
	}
	return stats.Median(d)
}

// share returns a / b, and 0 where b is not positive.
func share(a, b float64) float64 {
	if b <= 0 {
		return 0
	}
	return a / b
}
