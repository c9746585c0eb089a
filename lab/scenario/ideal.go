package scenario

import (
	"math/bits"
	"slices"
	"time"

	"xagg/controller"
)

// Timing is how a run of a job went, or would go. Times are by rank and round, warm-up rounds first.
type Timing struct {
	Compute [][]time.Duration // the rank's computation
	Comm    [][]time.Duration // how long a gradient of the rank was ready whose result was not usable
	Round   [][]time.Duration // from the beginning of the computation to the last result
	Begin   [][]time.Duration // of the computation, since the first of all began
	Skipped [][]bool          // the rank computed nothing, because it was behind
}

// Span returns the time from the first begin of round from to the last end of the last round.
func (t *Timing) Span(from int) time.Duration {
	begin, end := time.Duration(1<<63-1), time.Duration(0)
	for rank := range t.Begin {
		last := len(t.Begin[rank]) - 1
		begin = min(begin, t.Begin[rank][from])
		end = max(end, t.Begin[rank][last]+t.Round[rank][last])
	}
	return end - begin
}

// Busy returns the measure of the union of the intervals from ready[i] to done[i]. ready must ascend.
func Busy(ready, done []time.Duration) (sum time.Duration) {
	var until time.Duration
	for i := range ready {
		if i == 0 || ready[i] > until {
			until = ready[i]
		}
		if done[i] > until {
			sum += done[i] - until
			until = done[i]
		}
	}
	return sum
}

// Ideal returns how a run of a job would go if nothing cost anything but computation and the gradients' bytes on the workers'
// own links: no headers, no latency, nobody else there, and sums that leave the switch with the last value that they need.
//
// A rank's link carries buckets in their order, from when they are ready. In sync a bucket's sum can be had when the last
// rank's values are through, and by each rank not before its link has carried it, which begins when the last rank
// begins to send. In quorum it can be had, as aggregators close chunks, when enough ranks are through and the scenario's wait has passed since
// the first was, or when all are; who is not ready by then does not send, and who is to begin a round of which others have results
// skips its computation, with nothing to send. In async a rank waits for its own values, and where
// it is ahead of another by more than the staleness for that one's.
//
// What a rank waits for in this schedule is the floor that measurements are compared with. It is that of an aggregator in the network, which
// needs a rank's values before it sends the sum, and no bound of everything. A rank that adds its own values to the sum of the others itself, as in
// a ring, may be done as soon as it is ready. A token bucket that was idle lets some bytes through at once. And in quorum, which chunks are
// without which ranks, and so who skips which rounds, turns on less than measurements keep to.
func (s *Scenario) Ideal(seed uint64, job int, c controller.Mode) *Timing {
	return s.ideal(seed, job, c, 1).timing()
}

// ideal makes the schedule with so many times the bytes.
func (s *Scenario) ideal(seed uint64, job int, c controller.Mode, factor float64) *schedule {
	j := &s.Jobs[job]
	d := &schedule{s: s, j: j, buckets: j.Tensors.Buckets(), link: make([][]time.Duration, j.Ranks)}
	d.up, d.down = make([]time.Duration, j.Ranks), make([]time.Duration, j.Ranks)
	for rank := range j.Ranks {
		for _, n := range d.buckets {
			d.link[rank] = append(d.link[rank], time.Duration(factor*float64(s.LinkRate(job, rank).time(n))))
		}
	}
	now := make([]time.Duration, j.Ranks)
	for round := range s.Warmup + s.Rounds {
		r := make([]turn, j.Ranks)
		for rank := range r {
			compute := s.Compute(seed, job, rank, round)
			r[rank] = turn{begin: now[rank], compute: compute, ready: s.Ready(job, compute)}
			t := make([]time.Duration, 3*len(d.buckets))
			r[rank].done, r[rank].from, r[rank].to = t[:len(d.buckets)], t[len(d.buckets):2*len(d.buckets)], t[2*len(d.buckets):]
			for b := range d.buckets {
				r[rank].ready[b] += now[rank]
			}
		}
		d.turns = append(d.turns, r)
		if c == controller.ModeQuorum {
			d.skip(r)
		}
		for b := range d.buckets {
			switch c {
			case controller.ModeQuorum:
				d.quorum(r, b)
			case controller.ModeAsync:
				d.async(r, b)
			default:
				d.sync(r, b)
			}
		}
		for rank := range r {
			now[rank] = max(r[rank].begin+r[rank].compute, slices.Max(r[rank].done))
		}
	}
	return d
}

// schedule is how an ideal run goes, as far as it is known.
type schedule struct {
	s        *Scenario
	j        *Job
	buckets  []int
	link     [][]time.Duration // by rank and bucket: how long its values take through the link
	up, down []time.Duration   // by rank: until when its link carries what came before
	turns    [][]turn          // by round and rank
}

// turn is a round of a rank. Times are since the run began.
type turn struct {
	begin       time.Duration
	compute     time.Duration
	ready, done []time.Duration // by bucket
	skipped     bool
	from, to    []time.Duration // by bucket: when the first and the last of its values were added; async
}

// send lets a rank's link carry a bucket, and returns when that begins and ends.
func (d *schedule) send(r []turn, rank, bucket int) (begin, end time.Duration) {
	begin = max(r[rank].ready[bucket], d.up[rank])
	return begin, begin + d.link[rank][bucket]
}

// receive lets a rank's link carry a bucket's sum, of which the first value can be had at begin and the last at end.
func (d *schedule) receive(r []turn, rank, bucket int, begin, end time.Duration) {
	d.down[rank] = max(end, max(begin, d.down[rank])+d.link[rank][bucket])
	r[rank].done[bucket] = max(r[rank].ready[bucket], d.down[rank])
}

func (d *schedule) sync(r []turn, bucket int) {
	var first, last time.Duration // values of the slowest
	for rank := range r {
		begin, end := d.send(r, rank, bucket)
		d.up[rank] = end
		first, last = max(first, begin), max(last, end)
	}
	for rank := range r {
		d.receive(r, rank, bucket, first, last)
	}
}

// close returns when the first and the last chunk of a bucket close in a job with a quorum.
func (d *schedule) close(r []turn, bucket int) (first, last time.Duration) {
	q := d.j.Quorum
	begins, ends := make([]time.Duration, len(r)), make([]time.Duration, len(r))
	for rank := range r {
		begins[rank], ends[rank] = d.send(r, rank, bucket)
	}
	// of is when a chunk closes whose contributions arrive at these times.
	of := func(arrivals []time.Duration) time.Duration {
		slices.Sort(arrivals)
		return min(arrivals[len(arrivals)-1], max(arrivals[q.Ranks-1], arrivals[0]+q.Wait))
	}
	return of(begins), of(ends)
}

// skip has ranks skip a round that others are through with when they would begin it: the first bucket's sum is there. It is there
// without them, so that they change nothing of it.
func (d *schedule) skip(r []turn) {
	_, last := d.close(r, 0)
	for rank := range r {
		if t := &r[rank]; t.begin >= last {
			t.skipped, t.compute = true, 0
			for b := range t.ready {
				t.ready[b] = t.begin
			}
		}
	}
}

func (d *schedule) quorum(r []turn, bucket int) {
	first, last := d.close(r, bucket)
	for rank := range r {
		if begin, end := d.send(r, rank, bucket); begin < last { // else it has the sum before it would send
			d.up[rank] = min(end, last)
		}
		d.receive(r, rank, bucket, first, last)
	}
}

// async adds a rank's values when its link has carried them, and every other rank has added its own of the round that is
// staleness + 1 before. The first all-reduce of a bucket has a scout, for which all wait for each other.
func (d *schedule) async(r []turn, bucket int) {
	var from, to time.Duration // of those that the slowest rank adds before
	if before := len(d.turns) - 1 - d.j.Async.Staleness - 1; before >= 0 {
		for _, t := range d.turns[before] {
			from, to = max(from, t.from[bucket]), max(to, t.to[bucket])
		}
	}
	var scout time.Duration
	if len(d.turns) == 1 {
		for rank := range r {
			scout = max(scout, r[rank].ready[bucket])
		}
	}
	for rank := range r {
		begin, end := d.send(r, rank, bucket)
		begin, end = max(begin, scout), max(end, scout+d.link[rank][bucket])
		d.up[rank] = end
		begin, end = max(begin, from), max(end, to)
		r[rank].from[bucket], r[rank].to[bucket] = begin, end
		d.receive(r, rank, bucket, begin, end)
	}
}

func (d *schedule) timing() *Timing {
	t := &Timing{}
	for _, field := range []*[][]time.Duration{&t.Compute, &t.Comm, &t.Round, &t.Begin} {
		*field = make([][]time.Duration, d.j.Ranks)
	}
	t.Skipped = make([][]bool, d.j.Ranks)
	for _, ranks := range d.turns {
		for rank, r := range ranks {
			t.Skipped[rank] = append(t.Skipped[rank], r.skipped)
			t.Compute[rank] = append(t.Compute[rank], r.compute)
			t.Comm[rank] = append(t.Comm[rank], Busy(r.ready, r.done))
			t.Round[rank] = append(t.Round[rank], max(r.compute, slices.Max(r.done)-r.begin))
			t.Begin[rank] = append(t.Begin[rank], r.begin)
		}
	}
	return t
}

// lag returns by how many all-reduces a rank comes behind another at most, and which rank.
func (d *schedule) lag() (most, rank int) {
	all := len(d.turns) * len(d.buckets)
	ready := func(rank, n int) time.Duration { return d.turns[n/len(d.buckets)][rank].ready[n%len(d.buckets)] }
	for late := range d.j.Ranks {
		begun := make([]int, d.j.Ranks) // all-reduces that each has begun when the late one begins its own
		for n := range all {
			for other := range begun {
				for begun[other] < all && ready(other, begun[other]) <= ready(late, n) {
					begun[other]++
				}
				if by := begun[other] - 1 - n; by > most {
					most, rank = by, late
				}
			}
		}
	}
	return most, rank
}

// QuorumRounds returns how many rounds servers keep for the stragglers of a job with a quorum: what the scenario says, or twice as many as
// the ideal schedule needs, and as many as there are buckets.
func (s *Scenario) QuorumRounds(job int) int {
	j := &s.Jobs[job]
	if j.Quorum.Rounds != 0 {
		return j.Quorum.Rounds
	}
	lag, _ := s.ideal(s.Seed, job, controller.ModeQuorum, 1).lag()
	want := max(2*lag+len(j.Tensors.Buckets()), 8, 2*j.Depth)
	return min(1<<bits.Len(uint(want-1)), controller.MaxRounds) // the next power of two
}

// checkLag checks that servers can keep what a straggler of a job with a quorum asks for.
func (s *Scenario) checkLag(job int, field string) error {
	if s.Jobs[job].Quorum == nil {
		return nil
	}
	lag, rank := s.ideal(s.Seed, job, controller.ModeQuorum, 1).lag()
	if kept := s.QuorumRounds(job); lag >= kept {
		return fieldf(field+".quorum.rounds", "rank %d comes %d all-reduces behind others and servers keep %d; want fewer rounds, larger buckets or up to %d rounds kept",
			rank, lag, kept, controller.MaxRounds)
	}
	return nil
}

// What the modes need beside the gradients' bytes, for [Scenario.Estimate]. Measured in a lab of network namespaces on two
// cores; nothing depends on them but what people are told to expect.
const (
	startTime  = 700 * time.Millisecond // of a run: processes, joining, leaving
	torchTime  = 3 * time.Second        // that four workers with Gloo take longer for it, to load PyTorch
	roundTime  = 10 * time.Millisecond  // of a round
	bucketTime = 400 * time.Microsecond // of an all-reduce
	headers    = 1.1                    // what is sent, in multiples of the gradients
)

// Estimate returns about how long a run in a mode takes, warm-up included.
func (s *Scenario) Estimate(seed uint64, m Mode) (longest time.Duration) {
	for job := range s.Jobs {
		factor := headers
		if m.Reducer() != XAgg && m.Reducer() != ParameterServer {
			factor *= max(1, 2*float64(s.Jobs[job].Ranks-1)/float64(s.Jobs[job].Ranks))
		}
		d := s.ideal(seed, job, m.Consistency(), factor)
		rounds := time.Duration(len(d.turns))
		longest = max(longest, d.timing().Span(0)+rounds*(roundTime+time.Duration(len(d.buckets))*bucketTime))
	}
	if m.Reducer() == Gloo {
		longest += torchTime
	}
	return startTime + longest
}
