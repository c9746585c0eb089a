package transport

import (
	"container/heap"
	"fmt"
	"math/bits"
	"math/rand/v2"
	"testing"
	"time"

	"xagg/agg"
	"xagg/wire"
)

// world is a job with all that belongs to it, under simulated time: endpoints, a switch, servers, links that lose, repeat
// and delay. Everything follows from the seed.
type world struct {
	testing.TB
	worldConfig
	rng     *rand.Rand
	now     time.Duration
	queue   flights
	sw      *agg.Switch
	servers []*agg.Server
	ranks   []*rank
	sent    map[place][]int32                 // lanes of every GRAD
	added   func(*wire.Header)                // is told of every contribution that a running sum takes
	intrude func() (next time.Duration)       // does what happens beside the all-reduces, and says when it is to be asked again
	lose    func(to int, p *wire.Packet) bool // has more packets lost
	err     error                             // the first
	errRank int
}

type worldConfig struct {
	seed    uint64
	ranks   int
	steered uint64
	servers int
	plan    agg.ServerPlan // its quorum, wait, async, staleness and rounds
	depth   int
	ahead   int // all-reduces that a rank has begun at once; 0 = depth
	chunks  int
	pool    uint32
	loss    float64
	dup     float64
	jitter  time.Duration
}

type place struct {
	rank         uint8
	round, chunk uint32
	async        bool
}

// rank is a worker: what it does, and what it has seen.
type rank struct {
	*Endpoint
	id     int
	next   int           // index of the step to begin next
	think  time.Duration // when it may begin it
	calls  []*Call
	awake  time.Duration // until then it neither sends nor hears
	dead   bool
	rounds []Round
}

// flight is a packet on its way to a node: ranks are 0.., the switch -1, servers 64.. home is whom a server's answer is
// for, a rank or the service.
type flight struct {
	at             time.Duration
	order          int
	from, to, home int
	p              wire.Packet
}

const nodeSwitch, homeService, nodeServer = -1, -2, 64

type flights struct {
	list []*flight
	n    int
}

func (q *flights) Len() int { return len(q.list) }
func (q *flights) Less(i, j int) bool {
	a, b := q.list[i], q.list[j]
	return a.at < b.at || a.at == b.at && a.order < b.order
}
func (q *flights) Swap(i, j int) { q.list[i], q.list[j] = q.list[j], q.list[i] }
func (q *flights) Push(x any)    { q.list = append(q.list, x.(*flight)) }
func (q *flights) Pop() any {
	f := q.list[len(q.list)-1]
	q.list = q.list[:len(q.list)-1]
	return f
}

func newWorld(t testing.TB, cfg worldConfig) *world {
	cfg.ahead = max(cfg.ahead, cfg.depth)
	w := &world{TB: t, worldConfig: cfg, rng: rand.New(rand.NewPCG(cfg.seed, 7)), sent: map[place][]int32{}}
	w.sw = agg.NewSwitch(4 * int(cfg.pool))
	for range cfg.servers {
		w.servers = append(w.servers, agg.NewServer(int(cfg.plan.Rounds)*cfg.chunks))
	}
	w.install(1)
	for r := range cfg.ranks {
		w.ranks = append(w.ranks, w.newRank(r, Config{Epoch: 1}))
	}
	return w
}

// newRank returns a worker of the job. The configuration says what is not the job's.
func (w *world) newRank(id int, cfg Config) *rank {
	k := &rank{id: id}
	cfg.Job, cfg.Rank, cfg.Ranks, cfg.Pool, cfg.Depth, cfg.MaxChunks = 1, id, w.worldConfig.ranks, w.pool, w.depth, w.chunks
	cfg.Quorum, cfg.Wait, cfg.Rounds = int(w.plan.Quorum), time.Duration(w.plan.WaitUs)*time.Microsecond, int(w.plan.Rounds)
	cfg.Async, cfg.Staleness = w.plan.Async, int(w.plan.Staleness)
	cfg.Observe = func(r Round) {
		r.Additions = append([]uint32{}, r.Additions...)
		r.Sum = append([]int32{}, r.Sum...)
		r.Masks = append([]uint64{}, r.Masks...)
		k.rounds = append(k.rounds, r)
		w.observed(&r)
	}
	k.Endpoint = New(cfg)
	return k
}

func (w *world) all() uint64 { return 1<<w.worldConfig.ranks - 1 }

func (w *world) install(epoch uint16) {
	members, ports := map[uint8]agg.Member{}, []uint16{}
	for r := range w.worldConfig.ranks {
		members[uint8(r)] = agg.Member{Port: uint16(r)}
	}
	for s, server := range w.servers {
		ports = append(ports, uint16(nodeServer+s))
		plan := w.plan
		plan.Job, plan.Epoch, plan.Ranks, plan.Chunks = 1, epoch, w.all(), uint32(w.chunks)
		if err := server.Install(plan); err != nil {
			w.Fatal(err)
		}
	}
	err := w.sw.Install(agg.SwitchPlan{Job: 1, Epoch: epoch, Ranks: w.all(), Cohort: w.all() &^ w.steered, Servers: len(w.servers),
		Base: uint32(epoch) % 2 * 2 * w.pool, Pool: w.pool, Quorum: w.plan.Quorum > 0, WaitUs: w.plan.WaitUs}, members, ports)
	if err != nil {
		w.Fatal(err)
	}
}

// observed checks that a round's integers are the sum of what the ranks in its masks have sent.
func (w *world) observed(r *Round) {
	if r.Scout || r.Async {
		return
	}
	for c := 0; c*wire.MaxLanes < len(r.Sum); c++ {
		mask := r.Mask
		if len(r.Masks) > 0 {
			mask = r.Masks[c]
		}
		got := r.Sum[c*wire.MaxLanes : min((c+1)*wire.MaxLanes, len(r.Sum))]
		want := make([]int32, len(got))
		for m := mask; m != 0; m &= m - 1 {
			lanes, ok := w.sent[place{uint8(bits.TrailingZeros64(m)), r.Number, uint32(c), false}]
			if !ok {
				w.Fatalf("seed %d: round %d, chunk %d has mask %#x, and rank %d has sent nothing", w.seed, r.Number, c, mask,
					bits.TrailingZeros64(m))
			}
			for i, v := range lanes {
				want[i] += v
			}
		}
		for i := range got {
			if got[i] != want[i] {
				w.Fatalf("seed %d: round %d, chunk %d, lane %d is %d, want %d of mask %#x", w.seed, r.Number, c, i, got[i], want[i], mask)
			}
		}
	}
}

func (w *world) put(from, to, home int, p *wire.Packet) {
	copies := 1
	if w.rng.Float64() < w.loss || w.lose != nil && w.lose(to, p) {
		copies = 0
	} else if w.rng.Float64() < w.dup {
		copies = 2
	}
	for range copies {
		w.queue.n++
		at := w.now + 50*time.Microsecond + time.Duration(w.rng.Int64N(int64(w.jitter)+1))
		heap.Push(&w.queue, &flight{at, w.queue.n, from, to, home, *p})
	}
}

// ints begins an all-reduce of a rank.
func (w *world) ints(k *rank, key string, data []int32) *Call {
	c, err := k.BeginInt32(w.now, key, data)
	if err != nil {
		w.Fatalf("seed %d: rank %d: %v", w.seed, k.id, err)
	}
	return c
}

// floats begins an all-reduce of a rank.
func (w *world) floats(k *rank, key string, data []float32) *Call {
	c, err := k.Begin(w.now, key, data)
	if err != nil {
		w.Fatalf("seed %d: rank %d: %v", w.seed, k.id, err)
	}
	return c
}

// run is try where nothing may go wrong.
func (w *world) run(steps int, begin func(k *rank, step int) *Call, pause func(k *rank) time.Duration) {
	w.Helper()
	if w.try(steps, begin, pause); w.err != nil {
		w.Fatalf("seed %d: rank %d: %v", w.seed, w.errRank, w.err)
	}
}

// try lets every rank carry out steps, as far ahead as the depth allows, with a pause before each. begin begins one.
func (w *world) try(steps int, begin func(k *rank, step int) *Call, pause func(k *rank) time.Duration) {
	batch := make([][]byte, 0, 1)
	for n := 0; w.err == nil; n++ {
		if n > 3_000_000 {
			w.Fatalf("seed %d: no end: %s", w.seed, w.where())
		}
		done, wake := true, time.Duration(1<<63-1)
		if w.intrude != nil {
			wake = w.intrude()
		}
		for _, k := range w.ranks {
			if k.dead {
				continue
			}
			if w.now < k.awake {
				done, wake = false, min(wake, k.awake)
				continue
			}
			for k.next < steps && (k.next < w.ahead || k.calls[k.next-w.ahead].Done()) {
				if k.think == 0 {
					k.think = w.now + pause(k)
				}
				if k.think > w.now {
					wake = min(wake, k.think)
					break
				}
				k.calls = append(k.calls, begin(k, k.next))
				k.next++
				k.think = 0
			}
			for b := k.Due(w.now, batch); len(b) > 0; b = k.Due(w.now, batch) {
				w.send(k, b[0])
			}
			if at, ok := k.Deadline(); ok {
				wake = min(wake, at)
			}
			done = done && k.next == steps && k.Done()
		}
		if done {
			return
		}
		if len(w.queue.list) == 0 || w.queue.list[0].at > wake {
			if wake == 1<<63-1 {
				w.Fatalf("seed %d: nothing happens any more: %s", w.seed, w.where())
			}
			w.now = max(w.now, wake)
			continue
		}
		f := heap.Pop(&w.queue).(*flight)
		w.now = max(w.now, f.at)
		w.arrive(f)
	}
}

func (w *world) where() (s string) {
	for _, k := range w.ranks {
		s += fmt.Sprintf(" rank %d: step %d, done %v;", k.id, k.next, k.Done())
		if !k.Done() {
			s += fmt.Sprintf(" %v;", k.Overdue(w.now))
		}
	}
	return s
}

func (w *world) send(k *rank, b []byte) {
	var p wire.Packet
	if err := p.Decode(b); err != nil {
		w.Fatal(err)
	}
	at := place{p.Rank, p.Round, p.Chunk, p.Flags&wire.FlagAsync != 0}
	lanes := append([]int32{}, p.Lanes[:p.Elems]...)
	if old, ok := w.sent[at]; ok && fmt.Sprint(old) != fmt.Sprint(lanes) {
		w.Fatalf("seed %d: %+v was sent with other lanes before", w.seed, at)
	}
	w.sent[at] = lanes
	w.put(k.id, nodeSwitch, 0, &p)
}

func (w *world) arrive(f *flight) {
	us := uint64(w.now.Microseconds())
	p := &f.p
	switch {
	case f.to == nodeSwitch:
		out := w.sw.Handle(us, agg.Ingress{Port: uint16(f.from), ToService: f.home == homeService}, p)
		w.refused(p, out.Reason)
		switch out.Dest {
		case agg.ToSender:
			w.put(nodeSwitch, f.from, 0, p)
		case agg.ToAddress:
			w.put(nodeSwitch, f.home, 0, p)
		case agg.ToAll:
			w.multicast(w.all(), p)
		case agg.ToCohort:
			w.multicast(w.all()&^w.steered, p)
		case agg.ToServer:
			w.put(f.from, nodeServer+out.Server, 0, p)
		case agg.ToServerAsService:
			w.put(homeService, nodeServer+out.Server, 0, p)
		}
	case f.to >= nodeServer:
		question := p.Header
		out := w.servers[f.to-nodeServer].Handle(us, p)
		w.refused(p, out.Reason)
		if w.added != nil && out.Reason == wire.ReasonNone && question.Flags&wire.FlagAsync != 0 {
			w.added(&question)
		}
		switch out.Dest {
		case agg.ToSender:
			w.put(f.to, nodeSwitch, f.from, p)
		case agg.ToService:
			w.put(f.to, nodeSwitch, homeService, p)
		}
	default:
		k := w.ranks[f.to]
		if w.now < k.awake || k.dead {
			return
		}
		b := make([]byte, p.Len())
		p.Encode(b)
		if err := k.Take(w.now, b); err != nil && w.err == nil {
			w.err, w.errRank = err, k.id
		}
	}
}

func (w *world) multicast(ranks uint64, p *wire.Packet) {
	for ; ranks != 0; ranks &= ranks - 1 {
		w.put(nodeSwitch, bits.TrailingZeros64(ranks), 0, p)
	}
}

// refused fails for what cannot happen while all keep the rules.
func (w *world) refused(p *wire.Packet, why wire.Reason) {
	switch why {
	case wire.ReasonStale, wire.ReasonEpoch, wire.ReasonClock:
		return
	}
	if why.Fault() {
		w.Fatalf("seed %d: %v: %+v", w.seed, why, p.Header)
	}
}
