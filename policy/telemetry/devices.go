package telemetry

import (
	"maps"
	"time"
)

const (
	// Readings is how many readings of a device its rates and percentiles are over.
	Readings = 8
	// Stale is how long after its last reading nothing more is known of a device.
	Stale = 5 * time.Second
	// LagBuckets is the number of buckets of a histogram of lags: bucket i counts [2^i, 2^(i+1)) microseconds, bucket 0 also 0.
	LagBuckets = 32
)

// Count is what a counter of packets says. Bytes are those of whole frames.
type Count struct{ Packets, Bytes uint64 }

// Member is a rank under a plan of a job.
type Member struct {
	Job, Epoch uint16
	Rank       int
}

// SwitchReading is what the counters of a switch say at a moment. They only grow while Instance stays, but for those of
// members, which go with their plan.
type SwitchReading struct {
	Instance   uint64           // of the counters: another one when they have begun anew
	Handled    Count            // every packet of the protocol that came
	Duplicates uint64           // of them, contributions that were summed before
	Refused    uint64           // of them, those that something was wrong with
	Members    map[Member]Count // contributions that came from ranks, summed or not
}

// ServerReading is what the counters of an aggregation server say at a moment. They only grow while Instance stays, but for
// those of ranks, which go with their job.
type ServerReading struct {
	Instance  uint64
	Slots     uint64 // of its memory
	SlotsUsed uint64 // of them, those that jobs have leased
	Packets   uint64 // every packet of the protocol that came
	Run       Run    // of its program
	Ranks     []Arrivals
}

// Run is how long a server's program has run while its agent had the kernel measure that; zero where it cannot.
type Run struct {
	Frames  uint64        // that it ran for, of any protocol
	Time    time.Duration // that these took, of one core
	Watched time.Duration // that it was measured for
}

// Arrivals are what a server has summed of a rank.
type Arrivals struct {
	Job      uint16
	Rank     int
	Packets  uint64             // contributions
	Partials uint64             // sums of the switch of which the rank was the last
	LagLog2  [LagBuckets]uint64 // contributions by how long they came after the first of their chunk
}

// Devices turns what the counters of switch and servers say into rates and percentiles, over the last [Readings] of each. It
// is pure: readings and the reader's time in, numbers out. Its zero value has read nothing.
type Devices struct {
	sw      switchMeter
	servers map[string]*serverMeter
	totals  map[seat]Count
}

// seat is a rank of a job.
type seat struct {
	job  uint16
	rank int
}

// switchMeter keeps how the counters of a switch have grown.
type switchMeter struct {
	meter[switchGrowth]
	last SwitchReading
}

type switchGrowth struct {
	handled             Count
	duplicates, refused uint64
	ranks               map[seat]Count
}

// serverMeter keeps how the counters of a server have grown.
type serverMeter struct {
	meter[serverGrowth]
	last  ServerReading
	ranks map[seat]Arrivals // of the last reading
}

type serverGrowth struct {
	packets uint64
	run     Run
	ranks   map[seat]Arrivals
}

// meter keeps the growths between a device's last readings, the newest last.
type meter[T any] struct {
	read    bool
	at      time.Duration // of the last reading
	growths []growth[T]
}

type growth[T any] struct {
	over time.Duration
	by   T
}

// next reports whether a reading at a time is one of the same counters as the last and says how they have grown since. One
// that says nothing new of time is not to be taken at all.
func (m *meter[T]) next(now time.Duration, same bool) (take, grows bool) {
	if m.read && now <= m.at {
		return false, false
	}
	grows = m.read && same
	if !grows || now-m.at > Stale { // what was before is of other times
		m.growths = m.growths[:0]
	}
	return true, grows
}

// add keeps a growth until a time.
func (m *meter[T]) add(now time.Duration, by T) {
	if len(m.growths) == Readings {
		m.growths = append(m.growths[:0], m.growths[1:]...)
	}
	m.growths = append(m.growths, growth[T]{now - m.at, by})
}

// known reports whether the growths say anything of the present.
func (m *meter[T]) known(now time.Duration) bool { return len(m.growths) > 0 && now-m.at <= Stale }

// over returns how many seconds the growths are over.
func (m *meter[T]) over() float64 {
	sum := time.Duration(0)
	for i := range m.growths {
		sum += m.growths[i].over
	}
	return sum.Seconds()
}

// grown returns by how much a counter has grown at least. One that says less than before has begun anew.
func grown(before, now uint64) uint64 {
	if now < before {
		return now
	}
	return now - before
}

func (c Count) grown(before Count) Count {
	if c.Packets < before.Packets {
		return c
	}
	return Count{c.Packets - before.Packets, grown(before.Bytes, c.Bytes)}
}

func (c Count) plus(d Count) Count { return Count{c.Packets + d.Packets, c.Bytes + d.Bytes} }

// AddSwitch takes a reading of the switch. One that is not newer than the last is left out.
func (d *Devices) AddSwitch(now time.Duration, r SwitchReading) {
	m := &d.sw
	take, grows := m.next(now, r.Instance == m.last.Instance)
	if !take {
		return
	}
	by := switchGrowth{ranks: make(map[seat]Count)}
	for member, count := range r.Members {
		if grows { // a plan that was not there before has counted from 0 since then
			count = count.grown(m.last.Members[member])
		}
		s := seat{member.Job, member.Rank}
		by.ranks[s] = by.ranks[s].plus(count)
	}
	if d.totals == nil {
		d.totals = make(map[seat]Count)
	}
	for s, count := range by.ranks {
		d.totals[s] = d.totals[s].plus(count)
	}
	if grows {
		by.handled = r.Handled.grown(m.last.Handled)
		by.duplicates, by.refused = grown(m.last.Duplicates, r.Duplicates), grown(m.last.Refused, r.Refused)
		m.add(now, by)
	}
	m.last, m.at, m.read = r, now, true
}

// AddServer takes a reading of a server. One that is not newer than the last is left out.
func (d *Devices) AddServer(now time.Duration, name string, r ServerReading) {
	if d.servers == nil {
		d.servers = make(map[string]*serverMeter)
	}
	m := d.servers[name]
	if m == nil {
		m = &serverMeter{}
		d.servers[name] = m
	}
	take, grows := m.next(now, r.Instance == m.last.Instance)
	if !take {
		return
	}
	ranks := make(map[seat]Arrivals, len(r.Ranks))
	by := serverGrowth{ranks: make(map[seat]Arrivals, len(r.Ranks))}
	for _, a := range r.Ranks {
		s := seat{a.Job, a.Rank}
		ranks[s] = a
		by.ranks[s] = a.grown(m.ranks[s])
	}
	if grows {
		by.packets = grown(m.last.Packets, r.Packets)
		by.run = r.Run.grown(m.last.Run)
		m.add(now, by)
	}
	m.last, m.ranks, m.at, m.read = r, ranks, now, true
}

func (a Arrivals) grown(before Arrivals) Arrivals {
	if a.Packets < before.Packets || a.Partials < before.Partials {
		return a
	}
	a.Packets -= before.Packets
	a.Partials -= before.Partials
	for i := range a.LagLog2 {
		a.LagLog2[i] = grown(before.LagLog2[i], a.LagLog2[i])
	}
	return a
}

// grown is nothing where an agent has begun to measure anew: its program may have run on, and its time is not that.
func (r Run) grown(before Run) Run {
	if r.Frames < before.Frames || r.Time < before.Time || r.Watched < before.Watched {
		return Run{}
	}
	return Run{r.Frames - before.Frames, r.Time - before.Time, r.Watched - before.Watched}
}

// Total returns what was counted of a rank's contributions at the switch since the first reading and before it: it never falls,
// also when a plan is removed or the switch is restarted. What came between the last reading of a plan and its end is missing.
func (d *Devices) Total(job uint16, rank int) Count { return d.totals[seat{job, rank}] }

// Forget forgets the totals of jobs that are no more.
func (d *Devices) Forget(alive func(job uint16) bool) {
	maps.DeleteFunc(d.totals, func(s seat, _ Count) bool { return !alive(s.job) })
}

// Fill fills in what counters tell: everything of Switch but its slots, of Servers (by their names) but Ready and MemoryFree, of
// Ranks what switch and servers have seen of them, and the job's PartialShare. What is not known is 0, and says so.
func (d *Devices) Fill(s *Snapshot, now time.Duration, job uint16) {
	d.sw.fill(s, now, job)
	arrivals := make([]Arrivals, len(s.Ranks))
	for i := range s.Servers {
		if m := d.servers[s.Servers[i].Name]; m != nil {
			m.fill(&s.Servers[i], now)
			m.gather(arrivals, now, job)
		}
	}
	partials, summed := uint64(0), uint64(0)
	for rank := range s.Ranks {
		r, a := &s.Ranks[rank], &arrivals[rank]
		r.Arrivals = float64(a.Packets)
		r.ArrivalP50, r.ArrivalP95, r.ArrivalP99 = lagQuantile(&a.LagLog2, 0.5), lagQuantile(&a.LagLog2, 0.95), lagQuantile(&a.LagLog2, 0.99)
		partials += a.Partials
		summed += a.Packets + a.Partials
	}
	s.Job.PartialShare = share(float64(partials), float64(summed))
}

func (m *switchMeter) fill(s *Snapshot, now time.Duration, job uint16) {
	w := &s.Switch
	w.Known = m.known(now)
	var sum switchGrowth
	ranks := make([]Count, len(s.Ranks))
	if w.Known {
		for i := range m.growths {
			g := &m.growths[i].by
			sum.handled = sum.handled.plus(g.handled)
			sum.duplicates += g.duplicates
			sum.refused += g.refused
			for rank := range ranks {
				ranks[rank] = ranks[rank].plus(g.ranks[seat{job, rank}])
			}
		}
	}
	over, handled := m.over(), float64(sum.handled.Packets)
	w.PacketsPerSecond, w.BytesPerSecond = share(handled, over), share(float64(sum.handled.Bytes), over)
	w.DuplicateShare, w.RefusedShare = share(float64(sum.duplicates), handled), share(float64(sum.refused), handled)
	for rank := range s.Ranks {
		r := &s.Ranks[rank]
		r.SwitchPackets, r.SwitchBytes = share(float64(ranks[rank].Packets), over), share(float64(ranks[rank].Bytes), over)
	}
}

func (m *serverMeter) fill(s *Server, now time.Duration) {
	s.Known = m.known(now)
	var packets uint64
	var run Run
	if s.Known {
		for i := range m.growths {
			g := &m.growths[i].by
			packets += g.packets
			run = Run{run.Frames + g.run.Frames, run.Time + g.run.Time, run.Watched + g.run.Watched}
		}
		s.Slots, s.SlotsUsed = float64(m.last.Slots), float64(m.last.SlotsUsed)
	} else {
		s.Slots, s.SlotsUsed = 0, 0
	}
	s.PacketsPerSecond = share(float64(packets), m.over())
	s.Timed = run.Watched > 0
	s.NsPerPacket, s.CPU = share(float64(run.Time), float64(run.Frames)), share(run.Time.Seconds(), run.Watched.Seconds())
}

// gather adds what the server has summed of a job's ranks.
func (m *serverMeter) gather(to []Arrivals, now time.Duration, job uint16) {
	if !m.known(now) {
		return
	}
	for i := range m.growths {
		for rank := range to {
			a, ok := m.growths[i].by.ranks[seat{job, rank}]
			if !ok {
				continue
			}
			to[rank].Packets += a.Packets
			to[rank].Partials += a.Partials
			for b, n := range a.LagLog2 {
				to[rank].LagLog2[b] += n
			}
		}
	}
}

// lagQuantile returns the lag in seconds that a share q of those in a histogram do not exceed, interpolated within its bucket;
// 0 of none.
func lagQuantile(buckets *[LagBuckets]uint64, q float64) float64 {
	all := uint64(0)
	for _, n := range buckets {
		all += n
	}
	want, below := q*float64(all), 0.0
	for i, n := range buckets {
		if n == 0 || below+float64(n) < want {
			below += float64(n)
			continue
		}
		from, to := float64(uint64(1)<<i), float64(uint64(2)<<i)
		if i == 0 {
			from = 0
		}
		return (from + (to-from)*(want-below)/float64(n)) / 1e6
	}
	return 0
}
