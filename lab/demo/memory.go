package demo

import (
	"context"
	"errors"

	"google.golang.org/grpc"

	"xagg/api"
	"xagg/bmv2/fault"
	"xagg/lab"
	"xagg/lab/memory"
	"xagg/wire"
	"xagg/worker"
	"xagg/worker/replay"
)

// process is a stage in this process.
type process struct {
	lab  *memory.Lab
	opts *Options
}

func startMemory(ctx context.Context, topology lab.Topology, opts *Options) (stage, error) {
	l, err := memory.New(ctx, memory.Config{
		Topology: topology, Faults: opts.Faults, NoChecksum: opts.NoChecksum, PcapFile: opts.Pcap, Log: opts.Log,
	})
	if err != nil {
		return nil, err
	}
	return &process{lab: l, opts: opts}, nil
}

func (p *process) controller() grpc.ClientConnInterface { return p.lab.Controller() }

func (p *process) faults() []fault.PathCounts { return p.lab.Faults() }

func (p *process) reduceTCP(context.Context, []int, func(summed) error) error {
	return errors.New("the lab in memory has no TCP") // the options are refused before
}

func (p *process) restart(context.Context, func(), []string) error {
	return errors.New("the lab in memory has no processes to kill") // the options are refused before
}

func (p *process) ready(context.Context) error { return nil }

func (p *process) close() error { return p.lab.Close() }

func (p *process) run(ctx context.Context, job string, take func(reduced) error) error {
	return eachRank(ctx, p.opts.Workers, func(ctx context.Context, rank int) error {
		return p.worker(ctx, job, rank, take)
	})
}

func (p *process) worker(ctx context.Context, job string, rank int, take func(reduced) error) error {
	return replay.Run(ctx, api.NewControllerClient(p.lab.Controller()), replay.Config{
		Worker:  worker.Config{Job: job, Rank: rank, Link: p.lab.Link(rank, wire.Port)},
		Set:     p.opts.Set,
		Rounds:  p.opts.Rounds,
		Buckets: p.opts.Buckets,
		Settle:  p.opts.settle(),
		Delay:   p.opts.Straggler[rank],
	}, func(r replay.Reduced) error {
		return take(reduced{rank: rank, sums: r.Sum, masks: r.Masks, line: r.Line(p.opts.Set)})
	}, worker.WithTimeout(p.opts.Timeout), worker.WithLogger(p.opts.Log))
}
