package conformance

import (
	"context"
	"fmt"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/test/bufconn"

	"xagg/bmv2"
	"xagg/bmv2/engine"
	"xagg/wire"
)

// served is the whole engine: programmed over P4Runtime, with packet-outs and packet-ins on its stream, and ports in
// memory.
type served struct {
	*session
	*controller
	ctx    context.Context
	engine *bmv2.Engine
	hosts  []host

	mu      sync.Mutex
	outs    []output
	flushed chan uint16 // ports whose flush frame came out
}

func startServed(t *testing.T, sc *scenario) *served {
	t.Helper()
	e, err := bmv2.NewEngine(bmv2.Config{CPUPort: cpuPort})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { e.Close() })
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	t.Cleanup(cancel)
	s := &served{ctx: ctx, controller: newController(sc), engine: e, hosts: sc.hosts(), flushed: make(chan uint16, 16)}
	for _, port := range tracePorts {
		if err := e.Attach(port, func(frame []byte) { s.receive(port, frame) }); err != nil {
			t.Fatal(err)
		}
	}
	lis := bufconn.Listen(1 << 20)
	go e.Serve(lis)
	conn, err := grpc.NewClient("passthrough:engine", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return lis.DialContext(ctx) }))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	if s.session, err = openSession(ctx, conn); err != nil {
		t.Fatal(err)
	}
	if err := s.write(ctx, s.begin()); err != nil {
		t.Fatal(err)
	}
	return s
}

func (s *served) name() string { return "engine over P4Runtime" }

func (s *served) reasons() ([]int64, error) { return s.counter(s.ctx, "reasons") }

func (s *served) counters() (map[string]engine.CounterValue, error) { return s.session.counters(s.ctx) }

var nobody = [4]byte{192, 0, 2, 1}

// flush is an ordinary frame to h from nobody: behind it in the queue of h's port there is nothing of an input before.
func flush(h host) []byte {
	h.addr.Port = 9 // no packet of the protocol
	return wire.AppendUDP(nil, wire.Addr{IP: nobody}, h.addr, nil, false)
}

func (s *served) receive(port uint16, frame []byte) {
	if len(frame) >= offUDP && [4]byte(frame[offSrcIP:]) == nobody {
		s.flushed <- port
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.outs = append(s.outs, output{port, slices.Clone(frame)})
}

func (s *served) send(in input) (outs []output, err error) {
	if in.change != nil {
		return nil, s.write(s.ctx, s.change(in.change))
	}
	if in.port == cpuPort {
		if outs, err = s.packetOuts(in); err != nil {
			return nil, err
		}
	} else if err := s.engine.Inject(in.port, in.frame); err != nil {
		return nil, err
	}
	flushes := len(s.hosts)
	for _, h := range s.hosts {
		if err := s.engine.Inject(h.port, flush(h)); err != nil {
			return nil, err
		}
	}
	// Nothing else leaves by a port without a host than an answer to what came in there.
	if in.port != cpuPort && !slices.ContainsFunc(s.hosts, func(h host) bool { return h.port == in.port }) {
		flushes++
		if err := s.packetOut(in.port, flush(host{})); err != nil {
			return nil, err
		}
	}
	for range flushes {
		select {
		case <-s.flushed:
		case <-s.ctx.Done():
			return nil, fmt.Errorf("wait for the ports: %w", s.ctx.Err())
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	outs = append(outs, s.outs...)
	s.outs = nil
	return outs, nil
}
