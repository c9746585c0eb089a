package timing

import (
	"fmt"
	"slices"
	"time"

	"xagg/controller"
	"xagg/lab/loop"
	"xagg/lab/scenario"
	"xagg/worker/transport"
)

// batch is how many packets a worker moves between two looks at what has come, as the real one does (worker.batchSize).
const batch = 64

// rank is a worker of a job: the loop of package lab/loop around the transport of real workers.
type rank struct {
	world    *world
	job      *job
	number   int
	address  address
	endpoint *transport.Endpoint

	inbox [][]byte
	ready []int         // buckets whose all-reduces are to begin
	busy  bool          // until it says so
	wake  time.Duration // planned; zero = never
	due   [][]byte

	buckets [][]float32
	round   int
	pace    loop.Pace
	turn    turn             // the round under way
	pending []bucketCall     // all-reduces under way, in their order
	turns   []turn           // the rounds that are over
	idle    time.Duration    // when the last all-reduce ended
	report  func(bucketCall) // of each all-reduce that ends; nil: to nobody
}

// turn is a round of a rank. Times are since the run began.
type turn struct {
	begin       time.Duration
	compute     time.Duration
	skipped     bool            // it computes nothing and contributes zeros, see loop.Pace
	late        bool            // its part is missing in some result
	ready, done []time.Duration // by bucket
	left        int             // buckets
	packets     uint64
	resends     uint64
}

// bucketCall is the all-reduce of a bucket.
type bucketCall struct {
	*transport.Call
	bucket  int
	compute time.Duration // before it; 0 where others were under way
}

// start begins the first round.
func (k *rank) start() {
	w, j := k.world, k.job
	j.left++
	c := &j.consistency
	k.endpoint = transport.New(transport.Config{
		Job: j.id, Epoch: j.epoch, Rank: k.number, Ranks: len(j.ranks), Pool: uint32(j.plan.Pool), Depth: j.spec.Depth, MaxChunks: int(j.chunks),
		Quorum: c.Quorum, Wait: j.plan.Wait, Rounds: int(j.rounds), Async: c.Mode == controller.ModeAsync, Staleness: c.Staleness,
	})
	for _, n := range j.spec.Tensors.Buckets() {
		k.buckets = append(k.buckets, make([]float32, n))
	}
	k.due = make([][]byte, 0, batch)
	w.agenda.at(0, k.begin)
}

// begin begins a round.
func (k *rank) begin() {
	w, now := k.world, k.world.agenda.now
	var compute time.Duration
	if !k.pace.Skip() {
		compute = w.compute(k.job.number, k.number, k.round)
	}
	ready := w.s.Ready(k.job.number, compute)
	k.turn = turn{begin: now, compute: compute, skipped: k.pace.Skip(), ready: ready, done: make([]time.Duration, len(ready)), left: len(ready)}
	for b := range ready {
		ready[b] += now
		w.agenda.at(ready[b]+w.costs.Call, func() {
			k.ready = append(k.ready, b)
			k.look()
		})
	}
}

func (w *world) compute(job, rank, round int) time.Duration {
	if w.opts.Compute != nil {
		return w.opts.Compute(job, rank, round)
	}
	return w.s.Compute(w.opts.Seed, job, rank, round)
}

// receive is a frame's arrival.
func (k *rank) receive(f frame) {
	k.inbox = append(k.inbox, f.payload)
	k.look()
}

// look lets the worker do what there is to do, unless it is busy: it will look when it is not. While no all-reduce is under way it
// takes nothing, as the real one.
func (k *rank) look() {
	for !k.busy && (len(k.ready) > 0 || len(k.pending) > 0) && k.world.failure == nil {
		now := k.world.agenda.now
		if until := k.step(); until > now {
			k.busy = true
			k.world.agenda.at(until, func() {
				k.busy = false
				k.look()
			})
		} else if len(k.inbox) == 0 {
			k.plan()
			return
		}
	}
}

// plan plans the next look.
func (k *rank) plan() {
	at, ok := k.endpoint.Deadline()
	if !ok || at == k.wake {
		return
	}
	at = max(at, k.world.agenda.now+1)
	k.wake = at
	k.world.agenda.at(at, func() {
		if k.wake == at {
			k.wake = 0
			k.look()
		}
	})
}

// step begins the all-reduces that are to begin, or if there are none takes what has come, and sends what is due. It returns until
// when that keeps the worker busy.
func (k *rank) step() (until time.Duration) {
	w, now := k.world, k.world.agenda.now
	n := 0
	if len(k.ready) == 0 {
		n = min(len(k.inbox), batch)
	}
	for _, b := range k.ready {
		if !k.call(now, b) {
			return now
		}
	}
	k.ready = k.ready[:0]
	now += time.Duration(n) * w.costs.WorkerReceive
	for _, payload := range k.inbox[:n] {
		if err := k.endpoint.Take(now, payload); err != nil {
			w.failf("rank %d of job %s: round %d: %v", k.number, k.job.spec.Name, k.round, err)
			return now
		}
	}
	k.inbox = k.inbox[:copy(k.inbox, k.inbox[n:])]
	k.finish(now)
	until = now
	for {
		k.due = k.endpoint.Due(now, k.due[:0])
		for _, payload := range k.due {
			until += w.costs.WorkerSend
			// The payload is the endpoint's, which changes it.
			w.send(k.address, until, frame{k.address, service, slices.Clone(payload)})
		}
		if len(k.due) < batch {
			return until
		}
	}
}

// call begins the all-reduce of a bucket.
func (k *rank) call(now time.Duration, bucket int) bool {
	values := k.buckets[bucket]
	clear(values)
	for i := 0; i < len(values) && !k.turn.skipped; i++ {
		values[i] = 1 // not 0, of which nobody learns the scale: each round would begin with a round that finds it
	}
	c := bucketCall{bucket: bucket}
	if len(k.pending) == 0 && k.round > 0 {
		c.compute = now - k.idle
	}
	var err error
	if c.Call, err = k.endpoint.Begin(now, fmt.Sprintf("bucket %d", bucket), values); err != nil {
		k.world.failf("rank %d of job %s: bucket %d: %v", k.number, k.job.spec.Name, bucket, err)
		return false
	}
	k.pending = append(k.pending, c)
	return true
}

// finish takes note of the all-reduces that have ended by now, and of the end of the round.
func (k *rank) finish(now time.Duration) {
	w := k.world
	for len(k.pending) > 0 && k.pending[0].Done() {
		c := k.pending[0]
		k.pending = k.pending[:copy(k.pending, k.pending[1:])]
		k.idle = now
		if k.report != nil {
			k.report(c)
		}
		t := &k.turn
		t.done[c.bucket] = now
		info := c.Info()
		t.packets += info.Packets
		t.resends += info.Resends
		t.late = t.late || info.Late > 0
		if t.left--; t.left > 0 {
			continue
		}
		k.pace.Note(t.late, k.endpoint.Behind(c.Call)) // of the last bucket: by a round at least
		k.turns = append(k.turns, *t)
		if k.round++; k.round == w.s.Warmup+w.s.Rounds {
			k.job.left--
			return
		}
		w.agenda.at(now, k.begin)
	}
}

// comm returns the round's communication time.
func (t *turn) comm() time.Duration { return scenario.Busy(t.ready, t.done) }

// took returns the time from the beginning of the computation to the last result.
func (t *turn) took() time.Duration {
	return max(t.begin+t.compute, slices.Max(t.done)) - t.begin
}
