package tcp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"xagg/lab/exchange"
)

// writeSize is how many bytes are written at a time at most.
const writeSize = 256 << 10

// Worker is a worker's end of a job. Its methods are called from one goroutine.
type Worker struct {
	plan  exchange.Plan
	next  int          // bucket to be started
	under []*reduction // by bucket; nil = not under way
	peers []*peer
	ended sync.WaitGroup

	mu     sync.Mutex
	err    error         // why the worker is of no use any more
	failed chan struct{} // closed when err is there
}

// reduction is an all-reduce of a bucket.
type reduction struct {
	values []float32
	left   int           // servers whose part is missing
	done   chan struct{} // closed when there are none
	at     time.Time     // when that was
}

// peer is a worker's connection to a server.
type peer struct {
	net.Conn
	shares   [][2]int
	out, in  chan *part // that are under way, for who writes and who reads
	mu       sync.Mutex
	progress sync.Cond
	sent     int64 // bytes
	ended    bool  // nothing more is sent
}

// part is a server's part of a reduction.
type part struct {
	*reduction
	memory []byte
}

var errClosed = errors.New("worker is closed")

// NewWorker introduces a worker to a job's servers, in their order, at the other ends of conns, which the worker owns from now
// on.
func NewWorker(conns []net.Conn, rank int, plan exchange.Plan) (*Worker, error) {
	w := &Worker{plan: plan, under: make([]*reduction, len(plan.Buckets)), failed: make(chan struct{})}
	for i, c := range conns {
		if _, err := c.Write(exchange.Bytes([]exchange.Hello{exchange.NewHello(plan, rank, uint32(i), uint32(len(conns)))})); err != nil {
			for _, c := range conns {
				c.Close()
			}
			return nil, fmt.Errorf("introduce worker %d to the TCP aggregator at %v: %w", rank, c.RemoteAddr(), err)
		}
		p := &peer{
			Conn: c, shares: share(plan, i, len(conns)),
			out: make(chan *part, len(plan.Buckets)), in: make(chan *part, len(plan.Buckets)),
		}
		p.progress.L = &p.mu
		w.peers = append(w.peers, p)
	}
	for _, p := range w.peers {
		w.ended.Go(func() { w.fail(p, p.write(w.failed)) })
		w.ended.Go(func() { w.fail(p, p.read(w)) })
	}
	return w, nil
}

// fail ends everything, unless err is nil. p is the server that it is about, or nil.
func (w *Worker) fail(p *peer, err error) {
	if err == nil {
		return
	}
	if p != nil {
		err = fmt.Errorf("TCP aggregator at %v: %w", p.RemoteAddr(), err)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.err != nil {
		return
	}
	w.err = err
	close(w.failed)
	for _, p := range w.peers {
		p.Close()
		p.mu.Lock()
		p.ended = true
		p.progress.Broadcast()
		p.mu.Unlock()
	}
}

// Start begins to replace data by the sum of all workers' data. Buckets are started in their order, over and over, each
// not before Wait has returned for its last all-reduce; any number may be under way. data must not be touched until
// then.
func (w *Worker) Start(bucket int, data []float32) error {
	switch {
	case bucket != w.next:
		return fmt.Errorf("all-reduce over TCP: bucket %d, but %d is next", bucket, w.next)
	case len(data) != w.plan.Buckets[bucket]:
		return fmt.Errorf("all-reduce over TCP: %d values, want %d", len(data), w.plan.Buckets[bucket])
	case w.under[bucket] != nil:
		return fmt.Errorf("all-reduce over TCP: bucket %d is under way", bucket)
	}
	w.next = (bucket + 1) % len(w.plan.Buckets)
	r := &reduction{values: data, done: make(chan struct{})}
	w.under[bucket] = r
	var parts []*part
	var peers []*peer
	for _, p := range w.peers {
		if s := p.shares[bucket]; s[0] < s[1] {
			parts, peers = append(parts, &part{r, exchange.Bytes(data[s[0]:s[1]])}), append(peers, p)
		}
	}
	if r.left = len(parts); r.left == 0 {
		r.end()
	}
	for i, p := range peers {
		p.out <- parts[i]
		p.in <- parts[i]
	}
	return nil
}

// end notes that all parts are there.
func (r *reduction) end() {
	r.at = time.Now()
	close(r.done)
}

// Wait waits for a bucket that was started. It returns when the result was there. An error, that of ctx too, ends the
// worker.
func (w *Worker) Wait(ctx context.Context, bucket int) (time.Time, error) {
	r := w.under[bucket]
	if r == nil {
		return time.Time{}, fmt.Errorf("all-reduce over TCP: bucket %d is not under way", bucket)
	}
	select {
	case <-r.done:
		w.under[bucket] = nil
		return r.at, nil
	case <-w.failed:
	case <-ctx.Done():
		w.fail(nil, context.Cause(ctx))
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	return time.Time{}, fmt.Errorf("all-reduce over TCP: %w", w.err)
}

// AllReduce replaces data by the sum of all workers' data, in a job with one bucket. After an error the worker is of no further
// use.
func (w *Worker) AllReduce(ctx context.Context, data []float32) error {
	if err := w.Start(0, data); err != nil {
		return err
	}
	_, err := w.Wait(ctx, 0)
	return err
}

// Close closes the connections, and with them the job unless all its all-reduces are done.
func (w *Worker) Close() error {
	w.fail(nil, errClosed)
	w.ended.Wait()
	return nil
}

// write sends parts in the order in which they were started.
func (p *peer) write(failed <-chan struct{}) error {
	for {
		select {
		case part := <-p.out:
			for rest := part.memory; len(rest) > 0; {
				n, err := p.Write(rest[:min(len(rest), writeSize)])
				if err != nil {
					return err
				}
				rest = rest[n:]
				p.mu.Lock()
				p.sent += int64(n)
				p.progress.Signal()
				p.mu.Unlock()
			}
		case <-failed:
			return nil
		}
	}
}

// read takes results, in the same order, to where the values were.
func (p *peer) read(w *Worker) error {
	var received int64
	for {
		var part *part
		select {
		case part = <-p.in:
		case <-w.failed:
			return nil
		}
		for rest := part.memory; len(rest) > 0; {
			// Nobody has the sum of a value before it is sent, and only then may it be overwritten.
			p.mu.Lock()
			for p.sent == received && !p.ended {
				p.progress.Wait()
			}
			sent := p.sent - received
			p.mu.Unlock()
			if sent == 0 {
				return nil // the worker has ended
			}
			n, err := p.Read(rest[:min(int64(len(rest)), sent)])
			if err != nil {
				return err
			}
			received += int64(n)
			rest = rest[n:]
		}
		w.mu.Lock()
		if part.left--; part.left == 0 {
			part.end()
		}
		w.mu.Unlock()
	}
}
