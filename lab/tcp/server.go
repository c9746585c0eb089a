package tcp

import (
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"unsafe"
)

// part is how many values are read, summed and sent at a time: 64 KiB.
const part = 16384

// hello is what a worker says first.
type hello struct {
	magic, rank, ranks, elems uint32
}

// magic is "xagg" if both ends have the same byte order.
const magic = 0x78616767

// maxElems bounds the length of a vector: 4 GiB.
const maxElems = 1 << 30

// Server sums the vectors of one job.
type Server struct {
	ranks, elems int
	rounds       [2][]sum // a worker is at most one round ahead of another: see take
	conns        []*conn  // by rank
}

// sum is a part of a round's sum.
type sum struct {
	mu     sync.Mutex
	values []float32
	have   int // contributions
}

// conn is the connection of a worker.
type conn struct {
	net.Conn
	out chan []float32 // complete parts
}

// NewServer returns a server for a job of so many workers, whose vectors have so many values.
func NewServer(ranks, elems int) (*Server, error) {
	if ranks < 1 || elems < 0 || elems > maxElems {
		return nil, fmt.Errorf("make TCP aggregator: %d ranks with %d values each: want at least 1 rank and at most %d values",
			ranks, elems, maxElems)
	}
	s := &Server{ranks: ranks, elems: elems, conns: make([]*conn, ranks)}
	for r := range s.rounds {
		s.rounds[r] = make([]sum, (elems+part-1)/part)
		for i := range s.rounds[r] {
			s.rounds[r][i].values = make([]float32, min(part, elems-i*part))
		}
	}
	return s, nil
}

// Serve takes the workers' connections from lis and serves until they have all closed theirs, or one of them fails. It
// closes lis when all are there.
func (s *Server) Serve(lis net.Listener) error {
	defer s.close()
	for range s.ranks {
		c, err := lis.Accept()
		if err != nil {
			return fmt.Errorf("accept worker: %w", err)
		}
		if err := s.welcome(c); err != nil {
			c.Close()
			lis.Close()
			return fmt.Errorf("worker at %s: %w", c.RemoteAddr(), err)
		}
	}
	lis.Close()

	errs := make(chan error, 2*s.ranks)
	var readers, writers sync.WaitGroup
	fail := func(rank int, err error) {
		if err != nil {
			errs <- fmt.Errorf("worker %d: %w", rank, err)
			s.close() // nobody can go on
		}
	}
	for rank, c := range s.conns {
		readers.Go(func() { fail(rank, s.read(c)) })
		writers.Go(func() { fail(rank, c.write()) })
	}
	readers.Wait()
	for _, c := range s.conns {
		close(c.out)
	}
	writers.Wait()
	select {
	case err := <-errs: // the others are its consequences
		return err
	default:
		return nil
	}
}

func (s *Server) close() {
	for _, c := range s.conns {
		if c != nil {
			c.Close()
		}
	}
}

// welcome reads a worker's first words.
func (s *Server) welcome(c net.Conn) error {
	var h [1]hello
	if _, err := io.ReadFull(c, bytesOf(h[:])); err != nil {
		return err
	}
	switch h := h[0]; {
	case h.magic != magic:
		return fmt.Errorf("it begins with %#x instead of %#x: no worker, or of another byte order", h.magic, magic)
	case h.ranks != uint32(s.ranks) || h.elems != uint32(s.elems) || h.rank >= h.ranks:
		return fmt.Errorf("it is rank %d of %d with %d values, but this job has %d ranks with %d values", h.rank, h.ranks, h.elems,
			s.ranks, s.elems)
	case s.conns[h.rank] != nil:
		return fmt.Errorf("rank %d is there already", h.rank)
	default:
		// No more than two rounds' parts wait to be sent.
		s.conns[h.rank] = &conn{Conn: c, out: make(chan []float32, 2*len(s.rounds[0]))}
	}
	return nil
}

// read takes a worker's rounds until it closes the connection between two of them.
func (s *Server) read(c *conn) error {
	buf := make([]float32, part)
	for round := 0; ; round++ {
		for i := range s.rounds[round%2] {
			p := &s.rounds[round%2][i]
			values := buf[:len(p.values)]
			switch _, err := io.ReadFull(c, bytesOf(values)); {
			case i == 0 && errors.Is(err, io.EOF):
				return nil
			case err != nil:
				return err
			}
			if s.take(p, values) {
				for _, c := range s.conns {
					c.out <- p.values
				}
			}
		}
		if s.elems == 0 { // there is nothing to wait for
			_, err := io.ReadFull(c, make([]byte, 1))
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		}
	}
}

// take adds a worker's values to a part of a round, and reports whether they were the last. Nobody sums round k + 2
// before everybody has received round k: who sends it has the sum of round k + 1, for which everybody has sent, who
// thus has the sum of round k.
func (s *Server) take(p *sum, values []float32) (last bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.have == 0 {
		copy(p.values, values)
	} else {
		add(p.values, values)
	}
	p.have++
	if p.have < s.ranks {
		return false
	}
	p.have = 0
	return true
}

// add adds y to x, of the same length.
func add(x, y []float32) {
	for len(x) >= 8 && len(y) >= 8 {
		a, b := (*[8]float32)(x), (*[8]float32)(y)
		a[0] += b[0]
		a[1] += b[1]
		a[2] += b[2]
		a[3] += b[3]
		a[4] += b[4]
		a[5] += b[5]
		a[6] += b[6]
		a[7] += b[7]
		x, y = x[8:], y[8:]
	}
	for i := range x {
		x[i] += y[i]
	}
}

// write sends complete parts until there will be no more.
func (c *conn) write() error {
	for p := range c.out {
		if _, err := c.Write(bytesOf(p)); err != nil {
			for range c.out { // nobody has to wait for this worker
			}
			return err
		}
	}
	return nil
}

// bytesOf returns the memory of x.
func bytesOf[T float32 | hello](x []T) []byte {
	if len(x) == 0 {
		return nil
	}
	return unsafe.Slice((*byte)(unsafe.Pointer(&x[0])), len(x)*int(unsafe.Sizeof(x[0])))
}
