package reducer

import (
	"context"
	"errors"
	"fmt"
	"net"
	"syscall"
	"time"

	"xagg/lab/loop"
	"xagg/lab/scenario"
	"xagg/lab/tcp"
)

// PlanTCP returns what the parameter servers and the workers of a job agree on.
func PlanTCP(s *scenario.Scenario, job int) tcp.Plan {
	return tcp.Plan{Ranks: s.Jobs[job].Ranks, Buckets: s.Jobs[job].Tensors.Buckets()}
}

// parameterServer sums at parameter servers.
type parameterServer struct {
	worker *tcp.Worker
	parts  float64
}

// NewTCP connects to the parameter servers of a job, in their order, from an address of this machine, and waits until ctx is done
// for those that do not listen yet. It does not wait for the other ranks.
func NewTCP(ctx context.Context, cfg loop.Config, local net.IP, servers []string) (loop.Reducer, error) {
	plan := PlanTCP(cfg.Scenario, cfg.Job)
	var conns []net.Conn
	for _, addr := range servers {
		c, err := dial(ctx, local, addr)
		if err != nil {
			for _, c := range conns {
				c.Close()
			}
			return nil, fmt.Errorf("connect to parameter server: %w", err)
		}
		conns = append(conns, c)
	}
	w, err := tcp.NewWorker(conns, cfg.Rank, plan)
	if err != nil {
		return nil, err
	}
	return &parameterServer{w, float64(plan.Ranks)}, nil
}

// redial is how long dial waits before it tries again.
const redial = 20 * time.Millisecond

// dial connects to an address as soon as somebody listens there.
func dial(ctx context.Context, local net.IP, addr string) (net.Conn, error) {
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: local}}
	for {
		c, err := d.DialContext(ctx, "tcp", addr)
		if err == nil || !errors.Is(err, syscall.ECONNREFUSED) {
			return c, err
		}
		select {
		case <-time.After(redial):
		case <-ctx.Done():
			return nil, fmt.Errorf("%w: %w", context.Cause(ctx), err)
		}
	}
}

func (p *parameterServer) Start(bucket int, values []float32) error {
	return p.worker.Start(bucket, values)
}

func (p *parameterServer) Wait(ctx context.Context, bucket int) (loop.Outcome, error) {
	at, err := p.worker.Wait(ctx, bucket)
	if err != nil {
		return loop.Outcome{}, err
	}
	return loop.Outcome{Done: loop.At(at), Parts: p.parts}, nil
}

func (p *parameterServer) Leave(context.Context) error { return nil } // servers know what is under way

func (p *parameterServer) Close() error { return p.worker.Close() }
