package tcp

import (
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"slices"
	"sync"

	"xagg/lab/exchange"
)

const (
	// readSize is how many values are read at a time at most: 256 KiB.
	readSize = 1 << 16
	// stripe is how many values are summed under one lock.
	stripe = 1 << 12
	// grain is how many values have to be summed before they are sent back, where their bucket does not end before: 8 KiB.
	grain = 1 << 11
)

// Server sums a job's values, or its share of them.
//
// The values of a round, one bucket's share after the other, are one sequence, and so are those of all rounds. A position in it is
// all that has to be known of a worker: it has sent everything before. What all have sent is summed.
type Server struct {
	plan            exchange.Plan
	server, servers int
	size            int   // values of a round
	bounds          []int // positions in a round up to which sums are sent back, ascending
	// sums are of a round and the next: nobody sends a value of round k + 2 before everybody has received that of round k. For
	// who sends it has the sum of round k + 1, for which everybody has sent, who thus had the sum of round k.
	sums    [2][]float32
	locks   [2][]lock
	mu      sync.Mutex // guards what follows
	changed sync.Cond
	lis     net.Listener
	conns   []net.Conn // by rank
	closed  bool
	at      []int64 // by rank
	sent    []int64 // by rank: its sums were given to the kernel up to here
	summed  int64   // what goes back: the last of bounds that all have reached
	end     int64   // where the first worker has left
	ended   bool    // nobody sends any more
}

// lock is a stripe of a sum.
type lock struct {
	sync.Mutex
	made  int // values of it that a worker, or more, has sent in this round
	added int // values of all workers that are in it
}

// NewServer returns the given one of a job's servers, from 0.
func NewServer(plan exchange.Plan, server, servers int) (*Server, error) {
	if err := plan.Check(); err != nil {
		return nil, fmt.Errorf("make TCP aggregator: %w", err)
	}
	if server < 0 || server >= servers {
		return nil, fmt.Errorf("make TCP aggregator: there is no server %d of %d", server, servers)
	}
	s := &Server{
		plan: plan, server: server, servers: servers, conns: make([]net.Conn, plan.Ranks), at: make([]int64, plan.Ranks), sent: make([]int64, plan.Ranks),
		end: math.MaxInt64,
	}
	s.changed.L = &s.mu
	for _, share := range share(plan, server, servers) {
		for n := share[1] - share[0]; n > 0; n -= grain {
			s.size += min(n, grain)
			s.bounds = append(s.bounds, s.size)
		}
	}
	for i := range s.sums {
		s.sums[i] = make([]float32, s.size)
		s.locks[i] = make([]lock, (s.size+stripe-1)/stripe)
	}
	return s, nil
}

// Serve takes the workers' connections from lis and serves until they have all closed theirs, one of them fails, or the
// server is closed. It closes lis when all are there.
func (s *Server) Serve(lis net.Listener) error {
	defer s.Close()
	s.mu.Lock()
	s.lis = lis
	closed := s.closed
	s.mu.Unlock()
	if closed {
		lis.Close()
		return fmt.Errorf("accept worker: %w", net.ErrClosed)
	}
	for range s.plan.Ranks {
		c, err := lis.Accept()
		if err != nil {
			return fmt.Errorf("accept worker: %w", err)
		}
		if err := s.welcome(c); err != nil {
			c.Close()
			return fmt.Errorf("worker at %s: %w", c.RemoteAddr(), err)
		}
	}
	lis.Close()

	errs := make(chan error, 2*s.plan.Ranks)
	var readers, writers sync.WaitGroup
	fail := func(rank int, err error) {
		if err != nil {
			errs <- fmt.Errorf("worker %d: %w", rank, err)
			s.Close() // nobody can go on
		}
	}
	for rank, c := range s.conns {
		readers.Go(func() { fail(rank, s.read(rank, c)) })
		writers.Go(func() { fail(rank, s.write(rank, c)) })
	}
	readers.Wait()
	s.mu.Lock()
	s.ended = true
	s.changed.Broadcast()
	s.mu.Unlock()
	writers.Wait()
	select {
	case err := <-errs: // the others are its consequences
		return err
	default:
		return nil
	}
}

// Close ends Serve, and the job with it.
func (s *Server) Close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	s.changed.Broadcast()
	if s.lis != nil {
		s.lis.Close()
	}
	for _, c := range s.conns {
		if c != nil {
			c.Close()
		}
	}
}

// welcome reads a worker's first words.
func (s *Server) welcome(c net.Conn) error {
	rank, err := exchange.ReadHello(c, s.plan, uint32(s.server), uint32(s.servers))
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.conns[rank] != nil:
		return fmt.Errorf("rank %d is there already", rank)
	case s.closed:
		return net.ErrClosed
	}
	s.conns[rank] = c
	return nil
}

var (
	// errAhead is of a worker that does not wait for results.
	errAhead = errors.New("it sends values before it can have the sums of those before")
	// errLeft is of a worker that leaves before others, or that goes on when another has left.
	errLeft = errors.New("workers have left after different rounds")
)

// read takes a worker's values until it closes the connection between two rounds.
func (s *Server) read(rank int, c net.Conn) error {
	buf := make([]float32, readSize)
	b := exchange.Bytes(buf)
	for at, have := int64(0), 0; ; {
		n, err := c.Read(b[have:])
		have += n
		values := buf[:have/4]
		if len(values) > 0 && s.size == 0 {
			return errAhead
		}
		for len(values) > 0 {
			round, from := int(at/int64(s.size)%2), int(at%int64(s.size))
			n := min(len(values), s.size-from)
			if err := s.mayAdd(at + int64(n)); err != nil {
				return err
			}
			s.add(round, from, values[:n])
			at += int64(n)
			values = values[n:]
		}
		s.reached(rank, at)
		have = copy(b, b[have&^3:have]) // of a value that is there in part
		switch {
		case errors.Is(err, io.EOF) && have == 0 && (s.size == 0 || at%int64(s.size) == 0):
			return s.leave(at)
		case errors.Is(err, io.EOF):
			return fmt.Errorf("it ended in the middle of a round: %w", io.ErrUnexpectedEOF)
		case err != nil:
			return err
		}
	}
}

// mayAdd returns an error if a worker cannot have sent everything before a position: the sums of the round before are made up
// to there. Where they have come to their workers, so have those of the round before that, whose memory is used again; it waits until
// the goroutines that have sent them know.
func (s *Server) mayAdd(to int64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case to > s.end:
		return errLeft
	case to-int64(s.size) > s.summed:
		return errAhead
	}
	for to-2*int64(s.size) > slices.Min(s.sent) && !s.closed {
		s.changed.Wait()
	}
	return nil
}

// leave notes that a worker has left at a position, after which nobody has a sum any more.
func (s *Server) leave(at int64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.end = min(s.end, at)
	if slices.Max(s.at) > s.end {
		return errLeft
	}
	return nil
}

// add adds values of a worker to those of a round from a position on.
func (s *Server) add(round, from int, values []float32) {
	for len(values) > 0 {
		l, at := &s.locks[round][from/stripe], from%stripe
		sum := s.sums[round][from:min(from-at+stripe, s.size)]
		n := min(len(sum), len(values))
		size := at + len(sum)
		l.Lock()
		// Each worker's values come in their order, so that those that nobody has sent yet are at the end.
		old := min(l.made-at, n)
		exchange.Add(sum[:old], values[:old])
		copy(sum[old:n], values[old:n])
		l.made = max(l.made, at+n)
		if l.added += n; l.added == size*s.plan.Ranks {
			l.made, l.added = 0, 0
		}
		l.Unlock()
		from, values = from+n, values[n:]
	}
}

// reached notes that a worker's values up to a position are summed.
func (s *Server) reached(rank int, at int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.at[rank] = at
	least := slices.Min(s.at)
	if least == s.summed {
		return
	}
	round := least - least%int64(s.size)
	i, exact := slices.BinarySearch(s.bounds, int(least-round))
	if exact {
		i++
	}
	bound := round
	if i > 0 {
		bound += int64(s.bounds[i-1])
	}
	if bound > s.summed {
		s.summed = bound
		s.changed.Broadcast()
	}
}

// wrote notes up to where a worker's sums were given to the kernel.
func (s *Server) wrote(rank int, to int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sent[rank] = to
	s.changed.Broadcast()
}

// write sends sums to a worker until there will be no more.
func (s *Server) write(rank int, c net.Conn) error {
	defer s.wrote(rank, math.MaxInt64)
	for sent := int64(0); ; {
		s.mu.Lock()
		for sent == s.summed && !s.ended {
			s.changed.Wait()
		}
		to := s.summed
		s.mu.Unlock()
		if sent == to {
			return nil
		}
		for sent < to {
			round, from := sent/int64(s.size)%2, sent%int64(s.size)
			n := min(to-sent, int64(s.size)-from)
			if _, err := c.Write(exchange.Bytes(s.sums[round][from : from+n])); err != nil {
				return err
			}
			sent += n
			s.wrote(rank, sent)
		}
	}
}
