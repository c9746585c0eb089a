// Package cost predicts, for every division of a job's ranks between switch and servers that is worth a thought, how long a round takes and
// how long switch slots are blocked in it, and says of each rank what it costs to have it on the switch rather than on a server. It is pure.
//
// It knows of each round when every rank was ready: how long its own computation and its own stream took ([telemetry.Rank.Ready]). A chunk is
// closed when all ranks are ready in a sync job, and in a quorum job when enough are and the wait is over; but never before the slowest rank of
// the switch's cohort, whose sum comes as one. So what a division would have taken follows from the same rounds, whatever the plan was that they
// ran under, and jitter counts as it is: the mean of the rounds' maxima, not the maximum of the ranks' means.
package cost

import (
	"cmp"
	"fmt"
	"math"
	"math/bits"
	"slices"

	"xagg/policy"
	"xagg/policy/rules"
	"xagg/policy/telemetry"
)

// Name is the rule's name.
const Name = "cost-model"

// About says in a sentence what it is for.
const About = "predicts how long rounds take for every cut of the ranks by how late they are, and takes the best"

// Params are what the model does not measure.
type Params struct {
	// Price is what a second is worth in which switch slots wait for a rank of the cohort, in seconds of the round, 0..10. With 0
	// a sync job's straggler stays on the switch, for its results wait for it wherever it is summed.
	Price float64 `yaml:"price"`
	// Hop is how much longer communication takes with servers in it, as a share of the time in which a rank communicates by itself, 0..10:
	// so much where they close chunks, and so much again when they sum all ranks (docs/reports has 11 % and 20 % on a Xeon, 21 % and 24 % on an EPYC).
	Hop float64 `yaml:"hop"`
	// Trust is for how many rounds no rank must have become late before ranks of a quorum job join the cohort, for each round that the
	// latest rank is late, 0..1000: what one has done another may do, and a rank of the cohort that is late keeps the others waiting.
	Trust float64 `yaml:"trust"`
	// Slack is what a larger quorum, and a longer wait, may add to a round, as a share of what it takes with the job's own quorum and without a
	// wait, 0..1. It counts where a policy may choose them.
	Slack float64 `yaml:"slack"`
	// Enter and Leave are the thresholds of a rank's score, in the same manner as those of other rules: by how much of the best
	// division's cost the best one with the rank on the switch is dearer than the best one with the rank on a server.
	Enter rules.Enter `yaml:"enter"`
	Leave rules.Leave `yaml:"leave"`
}

// DefaultParams returns what holds unless a policy says otherwise.
func DefaultParams() Params {
	return Params{Price: 0.1, Hop: 0.1, Trust: 16, Slack: 0.02, Enter: rules.Enter{Above: 0.02, For: 2, Of: 3}, Leave: rules.Leave{Below: 0.005, For: 2, Of: 2}}
}

// UnmarshalYAML reads parameters on top of those that are there, or else the defaults.
func (p *Params) UnmarshalYAML(read func(any) error) error {
	type plain Params
	q := plain(*p)
	if *p == (Params{}) {
		q = plain(DefaultParams())
	}
	if err := read(&q); err != nil {
		return err
	}
	*p = Params(q)
	return nil
}

// Validate checks parameters. Its errors are of type [*policy.FieldError].
func (p *Params) Validate() error {
	for _, f := range []struct {
		name       string
		value, max float64
	}{{"price", p.Price, 10}, {"hop", p.Hop, 10}, {"trust", p.Trust, 1000}, {"slack", p.Slack, 1}} {
		if !(f.value >= 0 && f.value <= f.max) {
			return &policy.FieldError{Field: f.name, Err: fmt.Errorf("%v: want 0 to %v", f.value, f.max)}
		}
	}
	return rules.ValidateThresholds(p.Enter, p.Leave)
}

// Bounds are the divisions that may be: masks of ranks that have to be on the switch or on servers, and how many either has.
type Bounds struct {
	Switch, Server uint64
	Cohort         int // ranks of a cohort at least, if there is one
	Steered        int // ranks on servers at most; 0 = all
	Serving        int // ranks on servers at least
	// Quorum: how many ranks of a quorum job are enough, and how long chunks wait for more, may be chosen too.
	Quorum bool
}

// Alternative is a division of the ranks, and what is predicted of it.
type Alternative struct {
	Steered uint64  `json:"steered"`          // ranks that servers sum
	Quorum  int     `json:"quorum,omitempty"` // ranks that are enough; 0 in sync jobs
	Round   float64 `json:"round"`            // mean time of a round, s
	Blocked float64 `json:"blocked"`          // mean time of a round that switch slots wait for a rank of the cohort, s
	Cost    float64 `json:"cost"`             // what the rule minimises, s: Round, and Blocked at its price
}

// Judgement is what the model says of a job.
type Judgement struct {
	// Scores are by rank; none where too little has been measured.
	Scores []float64
	// Alternatives are the divisions that were compared, the cheapest first. It is one of the ways to cut the ranks in the order of their
	// lateness, or the present one.
	Alternatives []Alternative
	// Late are the ranks that are late by half a round or more in the mean, Steady is for how many rounds no rank must have become so
	// before ranks join the cohort of a quorum job.
	Late   uint64
	Steady int
	// Quorum and Wait are the most ranks, and the longest time in seconds, that results of a quorum job can wait for within the slack under the
	// cheapest division: the most ranks that are hardly ever waited for, and the time in which those that are not late are there in 95 % of
	// the rounds. 0 in sync jobs, and where they may not be chosen.
	Quorum int
	Wait   float64
}

// Least is the number of rounds that everybody has to have reported before anything is concluded.
const Least = 4

// Judge compares the divisions of a job's ranks. It is deterministic, and linear in rounds x ranks x ranks.
func (p *Params) Judge(s *telemetry.Snapshot, b Bounds) Judgement {
	m, ok := newModel(p, s)
	if !ok {
		return Judgement{}
	}
	present := m.present
	divisions := []uint64{present}
	for _, steered := range m.cuts(b) {
		if steered != present {
			divisions = append(divisions, steered)
		}
	}
	j := Judgement{Alternatives: make([]Alternative, 0, len(divisions))}
	for _, steered := range divisions {
		j.Alternatives = append(j.Alternatives, m.predict(steered))
	}
	j.Scores = m.scores(j.Alternatives)
	latest := 0.0
	for i, late := range m.late {
		late /= max(m.mean, 1e-9)
		latest = max(latest, late)
		if late >= 0.5 {
			j.Late |= 1 << i
		}
	}
	slices.SortStableFunc(j.Alternatives, func(a, b Alternative) int { return cmp.Compare(a.Cost, b.Cost) })
	if m.quorum > 0 {
		j.Steady = int(p.Trust * latest)
	}
	if m.quorum > 0 && b.Quorum {
		least := int(s.Job.Least)
		if least == 0 { // it is not known
			least = m.quorum
		}
		j.Quorum, j.Wait = m.choose(j.Alternatives[0].Steered, least, j.Late)
	}
	return j
}

// model is what is known of a job.
type model struct {
	*Params
	ranks   int
	present uint64      // ranks that servers sum
	there   uint64      // ranks that are not gone
	quorum  int         // 0 = sync
	rounds  [][]float64 // when ranks were ready, by round and rank
	sorted  [][]float64 // the same of those that are there, the earliest first
	closed  []float64   // by round: when chunks would be closed if there were no cohort
	mean    float64     // of these
	late    []float64   // by rank: its mean lateness behind the ranks that are enough, or the middle one in a sync job
	own     float64     // time of a round in which the quickest rank communicates by itself, on the switch alone
	packets float64     // time that servers' programs run for the packets of one rank in a round, dealt to all of them; 0 = not known
}

// newModel reads a snapshot, unless it says too little.
func newModel(p *Params, s *telemetry.Snapshot) (*model, bool) {
	m := &model{Params: p, ranks: len(s.Ranks), quorum: int(s.Job.Quorum), own: math.Inf(1)}
	rounds := math.MaxInt
	for i := range s.Ranks {
		r := &s.Ranks[i]
		if r.Steered {
			m.present |= 1 << i
		}
		if len(r.Ready) > 0 {
			m.there |= 1 << i
			rounds = min(rounds, len(r.Ready))
			m.own = min(m.own, r.OwnP50)
		}
	}
	there := bits.OnesCount64(m.there)
	if there == 0 || rounds < Least || max(m.quorum, int(s.Job.Least)) > there || m.quorum == 0 && there < m.ranks {
		return nil, false
	}
	m.own /= 1 + p.Hop*m.hops(m.present)
	ready := 0.0
	for i := range s.Servers {
		if v := &s.Servers[i]; v.Ready {
			ready++
			m.packets = max(m.packets, v.NsPerPacket*1e-9*s.Job.Chunks)
		}
	}
	m.packets /= max(ready, 1)
	middle := (there - 1) / 2
	if m.quorum > 0 {
		middle = m.quorum - 1
	}
	m.late = make([]float64, m.ranks)
	worst := make([]float64, m.ranks)
	for i := range s.Ranks {
		worst[i] = math.Inf(1)
		if !s.Ranks[i].Steered {
			worst[i] = second(s.Ranks[i].Ready, rounds)
		}
	}
	all := make([]float64, 2*rounds*m.ranks)
	m.rounds, m.sorted, m.closed = make([][]float64, 0, rounds), make([][]float64, 0, rounds), make([]float64, 0, rounds)
	for t := range rounds {
		ready, sorted := all[2*t*m.ranks:][:m.ranks], all[(2*t+1)*m.ranks:][:0]
		for i := range s.Ranks {
			if r := s.Ranks[i].Ready; len(r) > 0 {
				ready[i] = min(r[len(r)-rounds+t], worst[i])
				sorted = append(sorted, ready[i])
			}
		}
		slices.Sort(sorted)
		closed := sorted[there-1]
		if m.quorum > 0 {
			closed = closes(sorted, m.quorum, s.Job.Wait)
		}
		m.rounds, m.sorted, m.closed = append(m.rounds, ready), append(m.sorted, sorted), append(m.closed, closed)
		m.mean += closed / float64(rounds)
		for i := range ready {
			m.late[i] += max(0, ready[i]-sorted[middle]) / float64(rounds)
		}
	}
	return m, true
}

// second returns the second largest of the last n values. A worst round is counted as the second worst of a rank that the switch sums: a hiccup is no
// straggler. Of one that would come there it counts as it is: being late in the cohort costs more than a place in it brings.
func second(values []float64, n int) float64 {
	first, second := 0.0, 0.0
	for _, x := range values[max(0, len(values)-n):] {
		first, second = max(first, x), max(second, min(first, x))
	}
	return second
}

// hops returns how many times the share Hop a division adds to communication.
func (m *model) hops(steered uint64) float64 {
	if steered == 0 {
		return 0
	}
	return 1 + float64(bits.OnesCount64(steered))/float64(m.ranks)
}

// serving returns how much longer communication takes with a division than with the switch alone: for the way over servers, and for what their
// programs take longer for the packets than a rank takes to send its own.
func (m *model) serving(steered uint64) float64 {
	flows := bits.OnesCount64(steered)
	if flows > 0 && flows < m.ranks {
		flows++ // the cohort's sums
	}
	return m.own*m.Hop*m.hops(steered) + max(0, float64(flows)*m.packets-m.own)
}

// cuts returns the divisions that put the latest ranks on servers, as far as they may be. Of ranks that are hardly later than one that is on a
// server, that one stays.
func (m *model) cuts(b Bounds) (steered []uint64) {
	late := func(i int) float64 {
		switch {
		case m.there>>i&1 == 0:
			return math.Inf(1)
		case m.present>>i&1 != 0:
			return m.late[i] + m.Enter.Above*m.mean
		}
		return m.late[i]
	}
	var free []int // ranks that may be here or there
	for i := range m.ranks {
		if (b.Switch|b.Server)>>i&1 == 0 {
			free = append(free, i)
		}
	}
	slices.SortStableFunc(free, func(i, j int) int { return cmp.Compare(late(j), late(i)) })
	mask := b.Server
	for cut := 0; ; cut++ {
		n := bits.OnesCount64(mask)
		if n >= b.Serving && (b.Steered == 0 || n <= b.Steered) && (m.ranks-n >= max(b.Cohort, 2) || n == m.ranks) {
			steered = append(steered, mask)
		}
		if cut == len(free) {
			return steered
		}
		mask |= 1 << free[cut]
	}
}

// predict says what a division would have cost in the rounds that were measured.
func (m *model) predict(steered uint64) Alternative {
	a := Alternative{Steered: steered, Quorum: m.quorum}
	cohort := m.there &^ steered
	for t, ready := range m.rounds {
		first, last := math.Inf(1), 0.0
		for c := cohort; c != 0; c &= c - 1 {
			x := ready[bits.TrailingZeros64(c)]
			first, last = min(first, x), max(last, x)
		}
		a.Round += max(m.closed[t], last)
		if cohort != 0 {
			a.Blocked += last - first
		}
	}
	n := float64(len(m.rounds))
	a.Round, a.Blocked = a.Round/n+m.serving(steered)-m.serving(m.present), a.Blocked/n
	if gone := (uint64(1)<<m.ranks - 1) &^ m.there &^ steered; gone != 0 {
		a.Round += m.mean // they are waited for until timers run out: for as long again, say
	}
	a.Cost = a.Round + m.Price*a.Blocked
	return a
}

// closes returns when servers close chunks for which so many ranks are enough, when ranks are ready at these times, the earliest first.
func closes(ready []float64, quorum int, wait float64) float64 {
	return min(ready[len(ready)-1], max(ready[quorum-1], ready[0]+wait))
}

// choose returns the quorum, from least on, and the wait of [Judgement].
func (m *model) choose(steered uint64, least int, late uint64) (quorum int, wait float64) {
	round := func(quorum int, wait float64) (mean float64) {
		for t, ready := range m.rounds {
			last := closes(m.sorted[t], quorum, wait)
			for c := m.there &^ steered; c != 0; c &= c - 1 {
				last = max(last, ready[bits.TrailingZeros64(c)])
			}
			mean += last / float64(len(m.rounds))
		}
		return mean
	}
	most := (1 + m.Slack) * round(least, 0)
	quorum = least
	for quorum < bits.OnesCount64(m.there) && round(quorum+1, 0) <= most {
		quorum++
	}
	var spreads []float64
	for t, ready := range m.rounds {
		last := 0.0
		for c := m.there &^ late; c != 0; c &= c - 1 {
			last = max(last, ready[bits.TrailingZeros64(c)])
		}
		spreads = append(spreads, max(0, last-m.sorted[t][0]))
	}
	slices.Sort(spreads)
	wait = spreads[max(0, int(math.Ceil(0.95*float64(len(spreads))))-1)]
	if round(quorum, wait) > most {
		wait = 0
	}
	return quorum, wait
}

// scores returns of each rank by how much of the cheapest alternative's cost it is dearer to have it on the switch: 1 where it cannot be
// there, -1 where it can only be there.
func (m *model) scores(alternatives []Alternative) []float64 {
	scores := make([]float64, m.ranks)
	best := math.Inf(1)
	for _, a := range alternatives {
		best = min(best, a.Cost)
	}
	for i := range scores {
		here, there := math.Inf(1), math.Inf(1)
		for _, a := range alternatives {
			if a.Steered>>i&1 == 0 {
				here = min(here, a.Cost)
			} else {
				there = min(there, a.Cost)
			}
		}
		switch {
		case math.IsInf(here, 1):
			scores[i] = 1
		case math.IsInf(there, 1):
			scores[i] = -1
		default:
			scores[i] = (here - there) / max(best, 1e-9)
		}
	}
	return scores
}
