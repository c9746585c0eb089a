package demo

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"xagg/internal/stats"
	"xagg/lab/exchange"
	"xagg/lab/tcp"
	"xagg/worker/grads"
	"xagg/worker/replay"
)

// ModeTCP sums over TCP, through the same switch and over the same links, at a parameter server on a host of its own. It is
// what the other modes are compared with.
const ModeTCP = "tcp"

// tcpPort is where the parameter server listens.
const tcpPort = 19870

// maxTCPError is how far, relative to the norm, a sum of float32 in any order may be from that in float64: 64 ranks
// lose less than log2(64) bits of 24.
const maxTCPError = 1e-5

// summed is what a worker holds after one all-reduce over TCP.
type summed struct {
	rank, index int
	values      []float32 // valid during the call that is given them
	took        time.Duration
}

// runTCP runs the parameter server and its workers.
func runTCP(ctx context.Context, bed stage, opts *Options) (Result, error) {
	steps := opts.Set.Schedule(opts.Rounds)
	run := Result{
		Mode: ModeTCP, Switch: opts.Switch, Lab: opts.Lab, Workers: opts.Workers, Servers: 1,
		Allreduces: len(steps), Lanes: opts.Set.MaxLen(), Exact: true,
	}
	opts.Progress("%s: a parameter server sums all ranks", ModeTCP)
	faults := bed.faults()
	var mu sync.Mutex
	first := make([][]float32, len(steps)) // what the first worker has, until all were compared with it
	takers := make([]int, len(steps))
	slowest := make([]float64, len(steps))
	err := bed.reduceTCP(ctx, steps, func(s summed) error {
		mu.Lock()
		defer mu.Unlock()
		slowest[s.index] = max(slowest[s.index], s.took.Seconds())
		wrong := func(format string, args ...any) {
			if run.Exact {
				run.Exact, run.Error = false, fmt.Sprintf(format, args...)
			}
		}
		if first[s.index] == nil {
			first[s.index] = append([]float32{}, s.values...)
			exact, err := plainSum(opts.Set, steps[s.index], opts.Workers)
			if err != nil {
				return err
			}
			maxAbs, relL2 := distance(func(i int) float64 { return float64(s.values[i]) }, exact)
			run.MaxAbsError, run.RelL2Error = max(run.MaxAbsError, maxAbs), max(run.RelL2Error, relL2)
			if relL2 > maxTCPError {
				wrong("all-reduce %d: the error of the sum is %.2g of its norm", s.index, relL2)
			}
		}
		for i, x := range s.values {
			if want := first[s.index][i]; math.Float32bits(x) != math.Float32bits(want) {
				wrong("all-reduce %d: rank %d has %g as value %d, another rank %g", s.index, s.rank, x, i, want)
				break
			}
		}
		if takers[s.index]++; takers[s.index] == opts.Workers {
			first[s.index] = first[s.index][:0:0] // every rank was checked
			opts.Progress("%s: all-reduce %d of %d: %s, %v", ModeTCP, s.index+1, len(steps), opts.Set.Steps()[steps[s.index]],
				seconds(slowest[s.index]))
		}
		return nil
	})
	if err != nil {
		return Result{}, err
	}
	run.Faults = since(faults, bed.faults())
	run.SecondsPerAllreduce, run.AllreduceSeconds = stats.Median(slowest), slowest
	return run, nil
}

// plainSum returns the sum of a step's vectors in float64.
func plainSum(set *grads.Set, step, ranks int) ([]float64, error) {
	sum := make([]float64, set.Len(step))
	for rank := range ranks {
		x, err := set.Vector(step, rank)
		if err != nil {
			return nil, err
		}
		for i := range x {
			sum[i] += float64(x[i])
		}
	}
	return sum, nil
}

// reduceTCP runs the server and the workers in this process, with their sockets in the hosts' namespaces.
func (n *namespaces) reduceTCP(ctx context.Context, steps []int, take func(summed) error) error {
	host, ranks := n.topology.Others[0], len(n.topology.Workers)
	server, err := tcp.NewServer(n.planTCP(), 0, 1)
	if err != nil {
		return err
	}
	addr := netip.AddrPortFrom(host.IP, tcpPort).String()
	var lis net.Listener
	if err := n.bed.Hosts().Do(host.Name, func() (err error) {
		lis, err = net.Listen("tcp", addr)
		return err
	}); err != nil {
		return err
	}
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return server.Serve(lis) })
	defer context.AfterFunc(ctx, server.Close)()
	for rank := range ranks {
		group.Go(func() error {
			if err := n.workerTCP(ctx, rank, addr, steps, take); err != nil {
				return fmt.Errorf("worker %d: %w", rank, err)
			}
			return nil
		})
	}
	return errors.Join(group.Wait(), n.bed.Dead())
}

// planTCP returns what the server and its workers sum: vectors of one length, one after the other.
func (n *namespaces) planTCP() exchange.Plan {
	return exchange.Plan{Ranks: len(n.topology.Workers), Buckets: []int{n.opts.Set.MaxLen()}}
}

func (n *namespaces) workerTCP(ctx context.Context, rank int, addr string, steps []int, take func(summed) error) error {
	set := n.opts.Set
	var conn net.Conn
	if err := n.bed.Hosts().Do(n.topology.Workers[rank].Name, func() (err error) {
		conn, err = (&net.Dialer{Timeout: n.opts.Timeout}).Dial("tcp", addr) // not by name: no other goroutine opens the socket
		return err
	}); err != nil {
		return err
	}
	w, err := tcp.NewWorker([]net.Conn{conn}, rank, n.planTCP())
	if err != nil {
		return err
	}
	defer w.Close()
	vector := make([]float32, set.MaxLen())
	for index, step := range steps {
		x, err := set.Vector(step, rank)
		if err != nil {
			return err
		}
		clear(vector[copy(vector, x):])
		if err := replay.Pause(ctx, n.opts.Straggler[rank]); err != nil {
			return err
		}
		round, cancel := context.WithTimeout(ctx, n.opts.Timeout)
		began := time.Now()
		err = w.AllReduce(round, vector)
		took := time.Since(began)
		cancel()
		if err != nil {
			return err
		}
		if err := take(summed{rank, index, vector[:len(x)], took}); err != nil {
			return err
		}
	}
	return nil
}
