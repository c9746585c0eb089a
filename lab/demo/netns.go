package demo

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"

	"google.golang.org/grpc"

	"xagg/bmv2/fault"
	"xagg/lab"
	"xagg/lab/netns"
	"xagg/lab/testbed"
	"xagg/worker/replay"
	"xagg/xdp"
)

// namespaces is a stage of one process per host, each in a network namespace of its own.
type namespaces struct {
	bed      *testbed.Testbed
	topology lab.Topology
	opts     *Options

	mu      sync.Mutex
	deaths  map[int]int                     // of a rank's processes, in the job that runs
	running int                             // ranks of the job that runs
	waiting map[int]context.CancelCauseFunc // of them that were started again and have reported nothing yet
}

func startNetns(ctx context.Context, topology lab.Topology, opts *Options) (stage, error) {
	spec := testbed.Spec(topology, nil)
	spec.Faults = opts.Faults
	hosts, err := netns.Create(ctx, spec)
	if err != nil {
		return nil, err
	}
	b, err := testbed.Start(ctx, hosts, testbed.Config{
		Topology: topology, Switch: opts.Switch, SimpleSwitch: opts.SimpleSwitch, Memory: opts.memory(), Pcap: opts.Pcap,
		Restarts: len(opts.Kills) > 0, Log: opts.Log,
	})
	if err != nil {
		return nil, err
	}
	return &namespaces{bed: b, topology: topology, opts: opts}, nil
}

func (n *namespaces) controller() grpc.ClientConnInterface { return n.bed.Controller() }

// memory returns the memory of a server: twice what one of the demo's jobs needs.
func (o *Options) memory() xdp.Size {
	size := xdp.Size(2*o.rounds()) * xdp.SlotSize * xdp.Size(chunks(o.maxElems()))
	const mib = 1 << 20
	return (size + mib - 1) / mib * mib
}

func (n *namespaces) run(ctx context.Context, job string, take func(reduced) error) error {
	n.deaths, n.running, n.waiting = map[int]int{}, len(n.topology.Workers), map[int]context.CancelCauseFunc{}
	return errors.Join(eachRank(ctx, len(n.topology.Workers), func(ctx context.Context, rank int) error {
		return n.rank(ctx, job, rank, take)
	}), n.bed.Dead())
}

// errOver ends a worker that was started again and is not let in, because the job is over.
var errOver = errors.New("the job is over")

// rank runs a rank's worker, and when that is killed another one.
func (n *namespaces) rank(ctx context.Context, job string, rank int, take func(reduced) error) error {
	defer func() {
		n.mu.Lock()
		defer n.mu.Unlock()
		n.running--
		n.overIfAlone()
	}()
	for life := 0; ; life++ {
		err := n.life(ctx, job, rank, life, take)
		n.mu.Lock()
		dead := n.deaths[rank] > life
		n.mu.Unlock()
		switch {
		case errors.Is(err, errOver):
			return nil
		case err == nil || !dead:
			return err
		}
	}
}

// overIfAlone ends those who wait to be let in, if nobody is left who could. The caller holds the lock.
func (n *namespaces) overIfAlone() {
	if n.running > len(n.waiting) {
		return
	}
	for _, cancel := range n.waiting {
		cancel(errOver)
	}
}

// life runs one of a rank's workers.
func (n *namespaces) life(ctx context.Context, job string, rank, life int, take func(reduced) error) error {
	if life == 0 {
		return n.worker(ctx, job, rank, take)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	n.mu.Lock()
	n.waiting[rank] = cancel
	n.overIfAlone()
	n.mu.Unlock()
	here := func() {
		n.mu.Lock()
		defer n.mu.Unlock()
		delete(n.waiting, rank)
	}
	defer here()
	return n.worker(ctx, job, rank, func(r reduced) error {
		here()
		r.life = life
		return take(r)
	})
}

// worker runs one worker process and takes what it writes: a JSON object per all-reduce on stdout, and its integers in
// a file.
func (n *namespaces) worker(ctx context.Context, job string, rank int, take func(reduced) error) error {
	host := n.topology.Workers[rank]
	dir, err := os.MkdirTemp(n.bed.Hosts().Dir(), host.Name+"-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	args := []string{"worker", "--controller", n.bed.ControllerAddr(), "--job", job, "--rank", strconv.Itoa(rank),
		"--ip", host.IP.String(), "--rounds", strconv.Itoa(n.opts.Rounds), "--buckets", strconv.Itoa(n.opts.Buckets),
		"--settle", strconv.Itoa(n.opts.settle()),
		"--dump", dir, "--timeout", n.opts.Timeout.String()}
	if n.opts.Grads != "" {
		args = append(args, "--grads", n.opts.Grads)
	}
	if n.opts.NoChecksum {
		args = append(args, "--no-checksum")
	}
	if delay := n.opts.Straggler[rank]; delay > 0 {
		args = append(args, "--delay", delay.String())
	}
	return n.bed.Run(ctx, testbed.Program{Name: host.Name, Host: host.Name, Args: args}, func(line []byte) error {
		r, err := n.read(line, dir, rank)
		if err != nil {
			return err
		}
		return take(r)
	})
}

// read makes an all-reduce of the line that a worker wrote of it, and of the file that it left.
func (n *namespaces) read(text []byte, dir string, rank int) (reduced, error) {
	var line replay.Line
	if err := json.Unmarshal(text, &line); err != nil {
		return reduced{}, fmt.Errorf("read its output: %w: %s", err, text)
	}
	file := filepath.Join(dir, replay.DumpName(line.Index, n.opts.Buckets, line.Bucket, rank))
	data, err := os.ReadFile(file)
	if err != nil {
		return reduced{}, err
	}
	if err := os.Remove(file); err != nil {
		return reduced{}, err
	}
	masks, err := line.Contributors()
	if err != nil {
		return reduced{}, fmt.Errorf("read its output: %w", err)
	}
	r := reduced{rank: rank, sums: make([]int32, len(data)/4), masks: masks, line: line}
	for i := range r.sums {
		r.sums[i] = int32(binary.LittleEndian.Uint32(data[4*i:]))
	}
	return r, nil
}

// restart kills parts of the testbed, and starts them again but for workers: those rank starts.
func (n *namespaces) restart(ctx context.Context, killed func(), parts []string) error {
	names := slices.Clone(parts)
	for i, part := range names {
		if part == PartServer {
			names[i] = n.topology.Servers[0].Name
		}
		if rank, ok := n.opts.worker(part); ok {
			names[i] = n.topology.Workers[rank].Name
			n.mu.Lock()
			n.deaths[rank]++
			n.mu.Unlock()
		}
	}
	return n.bed.Restart(ctx, killed, names...)
}

func (n *namespaces) ready(ctx context.Context) error { return n.bed.Ready(ctx) }

func (n *namespaces) faults() []fault.PathCounts { return n.bed.Hosts().Faults() }

func (n *namespaces) close() error { return n.bed.Close() }
