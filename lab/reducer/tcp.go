package reducer

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"

	"xagg/internal/endpoint"
	"xagg/lab/exchange"
	"xagg/lab/loop"
	"xagg/lab/ring"
	"xagg/lab/scenario"
	"xagg/lab/tcp"
)

// PlanTCP returns what the parameter servers and the workers of a job, or all ranks of a ring, agree on.
func PlanTCP(s *scenario.Scenario, job int) exchange.Plan {
	return exchange.Plan{Ranks: s.Jobs[job].Ranks, Buckets: s.Jobs[job].Tensors.Buckets()}
}

// overTCP makes a reducer of what sums over TCP.
type overTCP struct {
	worker interface {
		Start(bucket int, data []float32) error
		Wait(ctx context.Context, bucket int) (time.Time, error)
		Close() error
	}
	leave func() error
	parts float64
}

func (o *overTCP) Start(bucket int, values []float32) error { return o.worker.Start(bucket, values) }

func (o *overTCP) Wait(ctx context.Context, bucket int) (loop.Outcome, error) {
	at, err := o.worker.Wait(ctx, bucket)
	if err != nil {
		return loop.Outcome{}, err
	}
	return loop.Outcome{Done: loop.At(at), Parts: o.parts}, nil
}

func (o *overTCP) Leave(context.Context) error { return o.leave() }

func (o *overTCP) Close() error { return o.worker.Close() }

// NewTCP connects to the parameter servers of a job, in their order, from an address of this machine, and waits for those that do
// not listen yet until ctx is done. It does not wait for the other ranks.
func NewTCP(ctx context.Context, cfg loop.Config, local netip.Addr, servers []string) (loop.Reducer, error) {
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
	leave := func() error { return nil } // servers know what is under way
	return &overTCP{w, leave, float64(plan.Ranks)}, nil
}

// NewRing takes a rank's place in the ring of all ranks of a job, which have these addresses; the rank listens at its own one.
// It waits for its neighbours until ctx is done.
func NewRing(ctx context.Context, cfg loop.Config, peers []string) (loop.Reducer, error) {
	plan := PlanTCP(cfg.Scenario, cfg.Job)
	if len(peers) != plan.Ranks {
		return nil, fmt.Errorf("make a ring: %d addresses for %d ranks", len(peers), plan.Ranks)
	}
	var left, right net.Conn
	if plan.Ranks > 1 {
		own, err := netip.ParseAddrPort(peers[cfg.Rank])
		if err != nil {
			return nil, fmt.Errorf("make a ring: own address: %w", err)
		}
		lis, err := net.Listen("tcp", own.String())
		if err != nil {
			return nil, endpoint.NewListenError("tcp", own.String(), err)
		}
		defer lis.Close()
		group, ctx := errgroup.WithContext(ctx)
		defer context.AfterFunc(ctx, func() { lis.Close() })()
		group.Go(func() (err error) {
			if left, err = lis.Accept(); err != nil && ctx.Err() != nil {
				err = fmt.Errorf("wait for the left neighbour: %w", context.Cause(ctx))
			}
			return err
		})
		group.Go(func() (err error) {
			if right, err = dial(ctx, own.Addr(), peers[(cfg.Rank+1)%plan.Ranks]); err != nil {
				err = fmt.Errorf("connect to the right neighbour: %w", err)
			}
			return err
		})
		if err := group.Wait(); err != nil {
			for _, c := range []net.Conn{left, right} {
				if c != nil {
					c.Close()
				}
			}
			return nil, fmt.Errorf("make a ring: rank %d: %w", cfg.Rank, err)
		}
	}
	w, err := ring.Join(ctx, left, right, cfg.Rank, plan)
	if err != nil {
		return nil, err
	}
	return &overTCP{w, w.Leave, float64(plan.Ranks)}, nil
}

// redial is how long dial waits before it tries again.
const redial = 20 * time.Millisecond

// dial connects to an address as soon as somebody listens there.
func dial(ctx context.Context, local netip.Addr, addr string) (net.Conn, error) {
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: local.AsSlice()}}
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
