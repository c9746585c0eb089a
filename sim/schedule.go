package sim

import (
	"bytes"
	"fmt"
	"math/bits"
	"math/rand/v2"
	"time"

	"github.com/goccy/go-yaml"

	"xagg/wire"
)

// Schedule is what a run simulates. Its text form is YAML.
type Schedule struct {
	Seed      uint64  `yaml:"seed"`            // of everything that happens by chance
	Workers   int     `yaml:"workers"`         // 1..64
	Servers   int     `yaml:"servers"`         // attached; a plan uses some of them
	Pool      uint32  `yaml:"pool"`            // the workers'; a power of two
	MaxChunks int     `yaml:"max_chunks"`      // of a round
	Depth     int     `yaml:"depth,omitempty"` // rounds that a worker may have under way; 0 = 1
	Ahead     int     `yaml:"ahead,omitempty"` // all-reduces that a worker may have under way; 0 = 1
	Epoch     uint16  `yaml:"epoch"`           // of the first plan
	Jobs      int     `yaml:"jobs"`            // one after the other, with the same plans on the same slots
	Vectors   []Work  `yaml:"vectors"`         // what a job all-reduces
	Plans     []Plan  `yaml:"plans"`           // of a job, in their order; the first is there when it begins
	Links     []Link  `yaml:"links"`           // of the workers, then of the servers, both directions alike
	Crash     *Crash  `yaml:"crash,omitempty"`
	Losses    []Loss  `yaml:"losses,omitempty"`
	Quorum    *Quorum `yaml:"quorum,omitempty"` // nil = every result is the sum of all ranks
	Async     *Async  `yaml:"async,omitempty"`  // nil = every all-reduce has a result of its own
	Deaths    []Death `yaml:"deaths,omitempty"` // with a quorum
	Damage    Damaged `yaml:"damage,omitempty"`

	Compute []time.Duration `yaml:"compute"`        // by rank: what it does before every all-reduce, at the most
	Late    []time.Duration `yaml:"late,omitempty"` // by rank: how long it has something else to do before every all-reduce
	Control time.Duration   `yaml:"control"`        // pause between two steps of the controller, at the most
	Timeout time.Duration   `yaml:"timeout"`        // of an all-reduce
}

// Damaged says which packets the links may damage.
type Damaged string

// The kinds of damage.
const (
	// Caught: only packets with a UDP checksum are damaged. That costs time and changes nothing.
	Caught Damaged = ""
	// Unprotected: workers send without checksums, and every packet may be damaged. An all-reduce may end with an error,
	// but not with a wrong sum. The trace is not checked, for it has the damaged packets.
	Unprotected Damaged = "unprotected"
)

// Work is one all-reduce.
type Work struct {
	Lanes int  `yaml:"lanes"`
	Float bool `yaml:"float,omitempty"` // float32, otherwise int32
	// Tensor tells tensors of one length apart.
	Tensor int `yaml:"tensor,omitempty"`
}

// Plan says who sums.
type Plan struct {
	Cohort  uint64 `yaml:"cohort"`            // ranks that the switch sums
	Servers []int  `yaml:"servers,omitempty"` // numbers of servers; without one the switch is the finalizer
	Pool    uint32 `yaml:"pool"`              // at least the workers'
	// Quorum is that of the plan, with at least as many ranks as the schedule's, which workers take; nil = the schedule's.
	Quorum *Quorum `yaml:"quorum,omitempty"`
}

// Link is a link between the switch and a host. Rates are probabilities per packet and direction.
type Link struct {
	Drop      float64       `yaml:"drop,omitempty"`
	Duplicate float64       `yaml:"duplicate,omitempty"` // both copies are delayed on their own
	Reorder   float64       `yaml:"reorder,omitempty"`   // takes longer, by Jitter on average and without bound
	Corrupt   float64       `yaml:"corrupt,omitempty"`   // see Damaged
	Delay     time.Duration `yaml:"delay"`               // of every packet
	Jitter    time.Duration `yaml:"jitter,omitempty"`
	Gap       time.Duration `yaml:"gap"`   // from the beginning of one packet to that of the next
	Queue     int           `yaml:"queue"` // packets that wait for their gap; more are lost
}

// Crash is a worker that dies in the first job, without a word.
type Crash struct {
	Rank int           `yaml:"rank"`
	At   time.Duration `yaml:"at"`
}

// Parse reads a schedule's text form. Unknown fields are errors.
func Parse(text []byte) (*Schedule, error) {
	s := new(Schedule)
	if err := yaml.NewDecoder(bytes.NewReader(text), yaml.Strict()).Decode(s); err != nil {
		return nil, fmt.Errorf("parse schedule: %w", err)
	}
	if err := s.check(); err != nil {
		return nil, fmt.Errorf("parse schedule: %w", err)
	}
	return s, nil
}

// String returns the schedule's text form.
func (s *Schedule) String() string {
	text, err := yaml.Marshal(s)
	if err != nil {
		panic(err) // the type has nothing that cannot be written
	}
	return string(text)
}

func (s *Schedule) check() error {
	switch {
	case s.Workers < 1 || s.Workers > wire.MaxRanks:
		return fmt.Errorf("%d workers, want 1..%d", s.Workers, wire.MaxRanks)
	case bits.OnesCount32(s.Pool) != 1:
		return fmt.Errorf("pool %d, want a power of two", s.Pool)
	case s.MaxChunks < 1 || s.Epoch == 0 || s.Jobs < 1 || len(s.Plans) == 0 || s.Timeout <= 0:
		return fmt.Errorf("max_chunks, epoch, jobs, plans and timeout are needed")
	case len(s.Links) != s.Workers+s.Servers:
		return fmt.Errorf("%d links, want one for each of %d workers and %d servers", len(s.Links), s.Workers, s.Servers)
	case len(s.Compute) != s.Workers:
		return fmt.Errorf("%d compute times, want one for each of %d workers", len(s.Compute), s.Workers)
	case len(s.Late) != 0 && len(s.Late) != s.Workers:
		return fmt.Errorf("%d late times, want none or one for each of %d workers", len(s.Late), s.Workers)
	case s.Crash != nil && (s.Crash.Rank < 0 || s.Crash.Rank >= s.Workers):
		return fmt.Errorf("rank %d crashes, but there are %d workers", s.Crash.Rank, s.Workers)
	}
	if q := s.Quorum; q != nil {
		if err := q.check(1, s.Workers); err != nil {
			return err
		}
		switch {
		case s.Crash != nil || s.Damage == Unprotected:
			return fmt.Errorf("a quorum together with a crash, or without checksums: nobody can say what has to come of it")
		}
		for i, d := range s.Deaths {
			if d.Rank < 0 || d.Rank >= s.Workers || d.Back < d.At {
				return fmt.Errorf("death %d: rank %d of %d, from %v to %v", i, d.Rank, s.Workers, d.At, d.Back)
			}
		}
		for i, v := range s.Vectors {
			if v.Float {
				return fmt.Errorf("vector %d: a quorum's are integers here: a mean of float32 has no oracle", i)
			}
		}
	}
	if err := s.checkAsync(); err != nil {
		return err
	}
	if len(s.Deaths) > 0 && s.Quorum == nil {
		return fmt.Errorf("deaths without a quorum: see crash")
	}
	for i := range s.Losses {
		if l := &s.Losses[i]; !l.valid(s.Servers) || s.Crash != nil || s.Damage == Unprotected {
			return fmt.Errorf("loss %d: servers %v of %d; together with a crash, or without checksums, nobody can say what has to come of it",
				i, l.Servers, s.Servers)
		}
	}
	for i, p := range s.Plans {
		if s.Quorum != nil && len(p.Servers) == 0 {
			return fmt.Errorf("plan %d: a quorum needs a server", i)
		}
		if p.Quorum != nil && s.Quorum == nil {
			return fmt.Errorf("plan %d: a quorum in a job without one", i)
		}
		if p.Quorum != nil {
			if err := p.Quorum.check(s.Quorum.Ranks, s.Workers); err != nil {
				return fmt.Errorf("plan %d: %w", i, err)
			}
		}
		if p.Pool < s.Pool {
			return fmt.Errorf("plan %d: pool %d, want at least the workers' %d", i, p.Pool, s.Pool)
		}
		for _, server := range p.Servers {
			if server < 0 || server >= s.Servers {
				return fmt.Errorf("plan %d: server %d, but there are %d", i, server, s.Servers)
			}
		}
	}
	return nil
}

// key names the tensor of an all-reduce.
func (v *Work) key() string { return fmt.Sprintf("tensor %d of %d", v.Tensor, v.Lanes) }

// allReduce is one of a job.
type allReduce struct {
	Work
	zeros bool // of all ranks
}

// all is the mask of all ranks.
func (s *Schedule) all() uint64 { return ^uint64(0) >> (wire.MaxRanks - s.Workers) }

// MaxRate is the highest rate of each fault on each link that [Random] uses: docs/testing.md promises to cope with it.
const MaxRate = 0.2

// Random returns the schedule of a seed: a small job with anything that may happen to it.
func Random(seed uint64) *Schedule {
	r := draw{rand.New(rand.NewPCG(seed, 0x5c4ed))}
	s := &Schedule{
		Seed:      seed,
		Workers:   2 + r.IntN(7),
		Servers:   r.IntN(4),
		Pool:      1 << r.IntN(4),
		MaxChunks: 1 + r.IntN(12),
		Epoch:     []uint16{1, 2, 65533, 65534}[r.IntN(4)],
		Jobs:      1 + r.IntN(2),
		Control:   []time.Duration{100 * time.Microsecond, 5 * time.Millisecond, 200 * time.Millisecond}[r.IntN(3)],
		Timeout:   time.Minute,
	}
	// Small in sum: what makes a run long are lanes, not events.
	for range 1 + r.IntN(6) {
		w := Work{Lanes: 1 + r.IntN(64), Float: r.chance(0.3)}
		if r.chance(0.6) {
			w.Lanes += wire.MaxLanes * r.IntN(12)
		}
		s.Vectors = append(s.Vectors, w)
	}
	plans := 1
	if s.Servers > 0 {
		plans += r.IntN(5)
	}
	for range plans {
		p := Plan{Cohort: s.all(), Pool: s.Pool << r.IntN(2)}
		if s.Servers > 0 && r.chance(0.75) {
			p.Servers = r.Perm(s.Servers)[:1+r.IntN(s.Servers)]
			switch r.IntN(4) {
			case 0:
				p.Cohort = 0
			case 1: // one straggler
				p.Cohort &^= 1 << r.IntN(s.Workers)
			case 2:
				p.Cohort &= r.Uint64()
			}
		}
		s.Plans = append(s.Plans, p)
	}
	usual := r.link()
	for range s.Workers + s.Servers {
		l := usual
		if r.chance(0.3) {
			l = r.link()
		}
		s.Links = append(s.Links, l)
		if l.Jitter == time.Second {
			s.Timeout = 10 * time.Minute // such a job makes little of its way in a minute
		}
	}
	for range s.Workers {
		d := r.upTo(time.Millisecond)
		if r.chance(0.15) {
			d = r.upTo(2 * time.Second)
		}
		s.Compute = append(s.Compute, d)
	}
	if r.chance(0.1) {
		s.Crash = &Crash{Rank: r.IntN(s.Workers), At: r.upTo([]time.Duration{time.Millisecond, 100 * time.Millisecond}[r.IntN(2)])}
		s.Jobs = 2
	}
	if r.chance(0.1) {
		s.Damage = Unprotected
		for i := range s.Vectors {
			s.Vectors[i].Float = false // a damaged amax would only change the scale, which is not what is looked for
		}
	}
	s.Depth = 1 + r.IntN(4)
	if s.Crash == nil && s.Damage == Caught && r.chance(0.4) {
		within := []time.Duration{2 * time.Millisecond, 50 * time.Millisecond, time.Second}[r.IntN(3)]
		for range 1 + r.IntN(4) {
			l := Loss{At: r.upTo(within), Switch: r.chance(0.6)}
			for server := range s.Servers {
				if r.chance(0.5) {
					l.Servers = append(l.Servers, server)
				}
			}
			s.Losses = append(s.Losses, l)
		}
	}
	if s.Servers > 0 && s.Crash == nil && s.Damage == Caught && r.chance(0.3) {
		r.quorum(s)
	}
	s.Ahead = 1 + r.IntN(4)
	if s.Servers > 0 && s.Quorum == nil && r.chance(0.3) {
		r.async(s)
	}
	if s.Quorum != nil && r.chance(0.7) {
		r.quorumsOfPlans(s)
	}
	return s
}

// draw is what a schedule is drawn with. The order of its draws is part of what a seed means.
type draw struct{ *rand.Rand }

func (r draw) chance(p float64) bool { return r.Float64() < p }

func (r draw) upTo(d time.Duration) time.Duration { return time.Duration(r.Int64N(int64(d) + 1)) }

func (r draw) link() Link {
	l := Link{
		Delay: 5*time.Microsecond + r.upTo(200*time.Microsecond),
		Gap:   100*time.Nanosecond + r.upTo(20*time.Microsecond),
		Queue: 4 << r.IntN(5),
	}
	rate := func() float64 { return 0 }
	switch r.IntN(4) {
	case 1, 2:
		rate = func() float64 { return max(0, MaxRate*(2*r.Float64()-1)) }
	case 3:
		rate = func() float64 { return MaxRate }
	}
	l.Drop, l.Duplicate, l.Reorder, l.Corrupt = rate(), rate(), rate(), rate()
	if l.Reorder > 0 {
		l.Jitter = []time.Duration{50 * time.Microsecond, time.Millisecond, 30 * time.Millisecond, time.Second}[r.IntN(4)]
	}
	return l
}

// quorum makes the schedule one of a quorum job, some of whose ranks may die and come back.
func (r draw) quorum(s *Schedule) {
	s.Quorum = &Quorum{Ranks: 1 + r.IntN(s.Workers), Wait: []time.Duration{0, 300 * time.Microsecond, 20 * time.Millisecond}[r.IntN(3)]}
	for i := range s.Vectors {
		s.Vectors[i].Float = false
		s.Vectors[i].Lanes = s.Vectors[r.IntN(min(2, len(s.Vectors)))].Lanes // what was left out of one is in the next
	}
	for i := range s.Plans {
		if len(s.Plans[i].Servers) == 0 {
			s.Plans[i].Servers = r.Perm(s.Servers)[:1+r.IntN(s.Servers)]
		}
	}
	if r.chance(0.5) {
		for range r.IntN(8) {
			s.Vectors = append(s.Vectors, s.Vectors[r.IntN(len(s.Vectors))])
		}
	}
	for i := range s.Vectors {
		s.Vectors[i].Tensor = r.IntN(3)
	}
	if r.chance(0.6) {
		within := []time.Duration{5 * time.Millisecond, 50 * time.Millisecond, time.Second}[r.IntN(3)]
		for range 1 + r.IntN(5) {
			d := Death{Rank: r.IntN(s.Workers), At: r.upTo(within)}
			d.Back = d.At + r.upTo(within)
			s.Deaths = append(s.Deaths, d)
		}
	}
}

// async makes the schedule one of an async job, which has one plan.
func (r draw) async(s *Schedule) {
	s.Async = &Async{Staleness: r.IntN(4)}
	s.Plans = s.Plans[:1]
	if s.Plans[0].Cohort = 0; len(s.Plans[0].Servers) == 0 {
		s.Plans[0].Servers = r.Perm(s.Servers)[:1+r.IntN(s.Servers)]
	}
	s.Vectors = s.Vectors[:min(3, len(s.Vectors))]
	for range r.IntN(6) {
		s.Vectors = append(s.Vectors, s.Vectors[r.IntN(len(s.Vectors))])
	}
	s.MaxChunks = max(s.MaxChunks, int(s.tensorChunks()))
	if r.chance(0.5) {
		for i := range s.Losses {
			s.Losses[i].Servers = nil
		}
	}
}

// quorumsOfPlans has plans of a quorum job with quorums and waits of their own.
func (r draw) quorumsOfPlans(s *Schedule) {
	for i := range s.Plans {
		if r.chance(0.6) {
			s.Plans[i].Quorum = &Quorum{
				Ranks: s.Quorum.Ranks + r.IntN(s.Workers-s.Quorum.Ranks+1),
				Wait:  []time.Duration{0, 300 * time.Microsecond, 20 * time.Millisecond, 200 * time.Millisecond}[r.IntN(4)],
			}
		}
	}
}
