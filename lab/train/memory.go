package train

import (
	"context"
	"net"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"

	"xagg/api"
	"xagg/lab"
	"xagg/lab/memory"
	"xagg/lab/tcp"
	"xagg/wire"
	"xagg/worker"
)

// process is a bed in this process. Its parameter server is reached over the loopback interface.
type process struct{ lab *memory.Lab }

func startMemory(ctx context.Context, topology lab.Topology, opts *Options) (bed, error) {
	l, err := memory.New(ctx, memory.Config{Topology: topology, Log: opts.Log})
	if err != nil {
		return nil, err
	}
	return &process{l}, nil
}

func (b *process) controller() grpc.ClientConnInterface { return b.lab.Controller() }

func (b *process) xdpMode(context.Context) string { return "" }

func (b *process) close() error { return b.lab.Close() }

func (b *process) work(ctx context.Context, p Plan, job string, take func(int, Step) error) error {
	if job == "" {
		return b.workTCP(ctx, p, take)
	}
	return eachRank(ctx, p.Ranks, func(ctx context.Context, rank int) error {
		reducer, err := Join(ctx, api.NewControllerClient(b.lab.Controller()), job, p, rank, b.lab.Link(rank, wire.Port))
		if err != nil {
			return err
		}
		defer reducer.Close()
		return Work(ctx, p, rank, reducer, func(s Step) error { return take(rank, s) })
	})
}

func (b *process) workTCP(ctx context.Context, p Plan, take func(int, Step) error) error {
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	return serveTCP(ctx, p, lis, func(ctx context.Context) error {
		return eachRank(ctx, p.Ranks, func(ctx context.Context, rank int) error {
			conn, err := (&net.Dialer{Timeout: worker.DefaultTimeout}).DialContext(ctx, "tcp", lis.Addr().String())
			if err != nil {
				return err
			}
			reducer, err := Connect(ctx, conn, p, rank)
			if err != nil {
				return err
			}
			defer reducer.Close()
			return Work(ctx, p, rank, reducer, func(s Step) error { return take(rank, s) })
		})
	})
}

// serveTCP runs a parameter server beside its workers.
func serveTCP(ctx context.Context, p Plan, lis net.Listener, work func(context.Context) error) error {
	defer lis.Close()
	s, err := tcp.NewServer(p.tcp(), 0, 1)
	if err != nil {
		return err
	}
	group, ctx := errgroup.WithContext(ctx)
	defer context.AfterFunc(ctx, func() { lis.Close() })()
	group.Go(func() error { return work(ctx) })
	group.Go(func() error { return s.Serve(lis) })
	return group.Wait()
}
