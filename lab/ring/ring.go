package ring

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"xagg/lab/exchange"
)

const (
	// bufferSize is how many bytes are read or written at a time at most.
	bufferSize = 64 << 10
	// unsent is how many bytes that are not sent yet the kernel takes: what is in its hands cannot be overtaken any more by an older
	// bucket's.
	unsent = 32 << 10
	// grain is how many values of a segment are sent at a time at least, where it does not end before.
	grain = 1 << 10
	// headerSize is the length of a frame's header: bucket and number of values.
	headerSize = 8
)

// goodbye is what a rank tells its left neighbour when it leaves.
const goodbye = 'x'

// Worker is a rank's place in a ring. Its methods are called from one goroutine.
type Worker struct {
	plan        exchange.Plan
	rank        int
	left, right net.Conn // nil in a ring of one
	next        int      // bucket to be started
	ended       sync.WaitGroup

	mu      sync.Mutex
	changed sync.Cond
	slots   []slot  // by bucket
	queue   []*slot // of which not everything was passed on, the oldest first
	written bool    // what was passed on is in the kernel's hands
	gone    bool    // the left neighbour has left
	err     error   // why the worker is of no use any more
}

// slot is where a bucket is all-reduced.
type slot struct {
	number  int
	running bool // from Start until Wait
	bucket  bucket
	done    chan struct{} // closed when all was received and passed on
	at      time.Time     // when all was received
	early   []float32     // was received before the bucket was started
}

var errClosed = errors.New("worker is closed")

// Join takes a rank's place between its neighbours, at the other ends of left and right, which the worker owns from now on. In a
// ring of one they are nil. ctx bounds the wait for the left neighbour's first words.
func Join(ctx context.Context, left, right net.Conn, rank int, plan exchange.Plan) (*Worker, error) {
	w := &Worker{plan: plan, rank: rank, left: left, right: right, written: true}
	w.changed.L = &w.mu
	for i := range plan.Buckets {
		w.slots = append(w.slots, slot{number: i})
	}
	err := plan.Check()
	if err == nil && (rank < 0 || rank >= plan.Ranks) {
		err = fmt.Errorf("there is no rank %d in a ring of %d", rank, plan.Ranks)
	}
	if err == nil && plan.Ranks > 1 {
		err = w.meet(ctx)
	}
	if err != nil {
		w.closeConns()
		return nil, fmt.Errorf("join the ring as rank %d: %w", rank, err)
	}
	if plan.Ranks > 1 {
		for _, f := range []func() error{w.read, w.write, w.listen} {
			w.ended.Go(func() { w.fail(f()) })
		}
	}
	return w, nil
}

// neighbour returns the rank so many places to the right.
func (w *Worker) neighbour(by int) int { return (w.rank + by + w.plan.Ranks) % w.plan.Ranks }

func (w *Worker) leftError(err error) error {
	return fmt.Errorf("left neighbour, rank %d at %v: %w", w.neighbour(-1), w.left.RemoteAddr(), err)
}

func (w *Worker) rightError(err error) error {
	return fmt.Errorf("right neighbour, rank %d at %v: %w", w.neighbour(1), w.right.RemoteAddr(), err)
}

// meet exchanges first words with the neighbours.
func (w *Worker) meet(ctx context.Context) error {
	if c, ok := w.right.(syscall.Conn); ok {
		if err := setUnsent(c); err != nil {
			return w.rightError(err)
		}
	}
	if _, err := w.right.Write(exchange.Bytes([]exchange.Hello{exchange.NewHello(w.plan, w.rank)})); err != nil {
		return w.rightError(err)
	}
	stop := context.AfterFunc(ctx, func() { w.left.SetReadDeadline(time.Unix(1, 0)) })
	rank, err := exchange.ReadHello(w.left, w.plan)
	switch {
	case !stop():
		return w.leftError(context.Cause(ctx))
	case err != nil:
		return w.leftError(err)
	case rank != w.neighbour(-1):
		return w.leftError(fmt.Errorf("it is rank %d", rank))
	}
	return nil
}

// setUnsent bounds what the kernel takes of a connection.
func setUnsent(c syscall.Conn) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var bad error
	if err := raw.Control(func(fd uintptr) { bad = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_NOTSENT_LOWAT, unsent) }); err != nil {
		return err
	}
	return bad
}

func (w *Worker) closeConns() {
	for _, c := range []net.Conn{w.left, w.right} {
		if c != nil {
			c.Close()
		}
	}
}

// fail ends everything, unless err is nil.
func (w *Worker) fail(err error) {
	if err == nil {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.err != nil {
		return
	}
	w.err = err
	w.closeConns()
	for i := range w.slots {
		if s := &w.slots[i]; s.running && !s.finished() {
			close(s.done)
		}
	}
	w.changed.Broadcast()
}

// finished reports whether all of a bucket was received and passed on.
func (s *slot) finished() bool { return s.bucket.received() && s.bucket.passed() }

// Start begins to replace data by the sum of all ranks' data. Buckets are started in their order, over and over, each not
// before Wait has returned for its last all-reduce; any number may be under way. data must not be touched until then.
func (w *Worker) Start(bucket int, data []float32) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case w.err != nil:
		return fmt.Errorf("ring all-reduce: %w", w.err)
	case bucket != w.next:
		return fmt.Errorf("ring all-reduce: bucket %d, but %d is next", bucket, w.next)
	case len(data) != w.plan.Buckets[bucket]:
		return fmt.Errorf("ring all-reduce: %d values, want %d", len(data), w.plan.Buckets[bucket])
	case w.slots[bucket].running:
		return fmt.Errorf("ring all-reduce: bucket %d is under way", bucket)
	case w.gone && len(data) > 0: // nothing can come any more
		return fmt.Errorf("ring all-reduce: %w", w.leftError(errGone))
	}
	w.next = (bucket + 1) % len(w.plan.Buckets)
	s := &w.slots[bucket]
	s.running, s.done, s.bucket = true, make(chan struct{}), newBucket(w.rank, w.plan.Ranks, data)
	s.bucket.take(s.early)
	s.early = s.early[:0]
	w.queue = append(w.queue, s)
	if s.bucket.received() {
		s.at = time.Now()
	}
	w.settle(s)
	w.changed.Broadcast()
	return nil
}

// settle ends a bucket that is finished.
func (w *Worker) settle(s *slot) {
	if !s.bucket.passed() {
		return
	}
	if i := slices.Index(w.queue, s); i >= 0 {
		w.queue = slices.Delete(w.queue, i, i+1)
	}
	if s.finished() && w.err == nil {
		close(s.done)
	}
}

// Wait waits for a bucket that was started. It returns when the result was there. An error, that of ctx too, ends the worker.
func (w *Worker) Wait(ctx context.Context, bucket int) (time.Time, error) {
	s := &w.slots[bucket]
	if !s.running {
		return time.Time{}, fmt.Errorf("ring all-reduce: bucket %d is not under way", bucket)
	}
	select {
	case <-s.done:
	case <-ctx.Done():
		w.fail(context.Cause(ctx))
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if !s.finished() {
		return time.Time{}, fmt.Errorf("ring all-reduce: %w", w.err)
	}
	s.running = false
	return s.at, nil
}

// Leave says goodbye to the neighbours: no all-reduce may be under way.
func (w *Worker) Leave() error {
	if w.plan.Ranks == 1 {
		return nil
	}
	w.mu.Lock()
	for !w.written && w.err == nil {
		w.changed.Wait()
	}
	err := w.err
	w.mu.Unlock()
	if err == nil {
		if _, err = w.left.Write([]byte{goodbye}); err != nil {
			// It needs no goodbye if it has left before.
			if w.mu.Lock(); w.gone {
				err = nil
			}
			w.mu.Unlock()
		}
	}
	if err != nil {
		return fmt.Errorf("leave the ring: %w", err)
	}
	return nil
}

// Close closes the connections. Neighbours whom this worker has not left are told that it is dead.
func (w *Worker) Close() error {
	w.fail(errClosed)
	w.ended.Wait()
	return nil
}

var (
	errGone  = errors.New("it has left while others go on")
	errFrame = errors.New("it sends what nobody has asked for")
)

// read takes what the left neighbour sends.
func (w *Worker) read() error {
	in := bufio.NewReaderSize(w.left, bufferSize)
	for {
		header, err := in.Peek(headerSize)
		if errors.Is(err, io.EOF) && len(header) == 0 && w.bye() {
			return nil
		}
		if err != nil {
			return w.leftError(noEOF(err))
		}
		number, n := int(binary.NativeEndian.Uint32(header)), int(binary.NativeEndian.Uint32(header[4:]))
		in.Discard(headerSize)
		if number >= len(w.slots) {
			return w.leftError(errFrame)
		}
		for n > 0 {
			if _, err := in.Peek(4); err != nil {
				return w.leftError(noEOF(err))
			}
			// What is there of the frame. Everything is a multiple of four bytes long, and so are places in the buffer.
			b, _ := in.Peek(min(4*n, in.Buffered()&^3))
			if err := w.receive(&w.slots[number], exchange.Floats(b)); err != nil {
				return w.leftError(err)
			}
			in.Discard(len(b))
			n -= len(b) / 4
		}
	}
}

// noEOF makes an error of the end of a connection.
func noEOF(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// bye notes that the left neighbour sends nothing any more, and reports whether nothing of it is missing.
func (w *Worker) bye() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.gone = true
	return !slices.ContainsFunc(w.slots, func(s slot) bool { return s.running && !s.bucket.received() })
}

// receive takes values of a bucket.
func (w *Worker) receive(s *slot, values []float32) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if s.running && !s.bucket.received() {
		if values = s.bucket.take(values); s.bucket.received() {
			s.at = time.Now()
			w.settle(s)
		}
		w.changed.Broadcast()
	}
	// The neighbour may have started the bucket, or the next round's, before.
	if len(s.early)+len(values) > w.plan.Buckets[s.number] {
		return errFrame
	}
	s.early = append(s.early, values...)
	return nil
}

// write passes on what may be.
func (w *Worker) write() error {
	batch := make([]byte, 0, bufferSize)
	for {
		w.mu.Lock()
		for batch = w.collect(batch[:0]); len(batch) == 0; batch = w.collect(batch) {
			w.written = true
			w.changed.Broadcast()
			if w.err != nil {
				w.mu.Unlock()
				return nil
			}
			w.changed.Wait()
		}
		w.written = false
		w.mu.Unlock()
		if _, err := w.right.Write(batch); err != nil {
			return w.rightError(err)
		}
	}
}

// collect appends frames to a batch until it is full: whatever may be sent, of the oldest buckets first.
func (w *Worker) collect(batch []byte) []byte {
	for i := 0; i < len(w.queue); {
		s := w.queue[i]
		values, last := s.bucket.sendable()
		room := (cap(batch) - len(batch) - headerSize) / 4
		if len(values) > room {
			values, last = values[:max(0, room)], false
		}
		if len(values) < grain && !last {
			if room < grain {
				return batch
			}
			i++ // has to wait
			continue
		}
		batch = binary.NativeEndian.AppendUint32(batch, uint32(s.number))
		batch = binary.NativeEndian.AppendUint32(batch, uint32(len(values)))
		batch = append(batch, exchange.Bytes(values)...)
		s.bucket.pass(len(values))
		if s.bucket.passed() {
			w.settle(s) // the next one takes its place in the queue
		}
	}
	return batch
}

// listen waits for the right neighbour's goodbye.
func (w *Worker) listen() error {
	var b [1]byte
	switch _, err := io.ReadFull(w.right, b[:]); {
	case err != nil:
		return w.rightError(noEOF(err))
	case b[0] != goodbye:
		return w.rightError(errFrame)
	}
	return nil
}
