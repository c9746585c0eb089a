package train

import (
	"context"
	"net"

	"xagg/api"
	"xagg/lab/exchange"
	"xagg/lab/tcp"
	"xagg/worker"
)

// tensor is the name of the vector that is all-reduced: the gradient of all parameters.
const tensor = "gradient"

// network sums by the network's aggregators.
type network struct{ *worker.Worker }

// Join takes a rank's place in a job. It returns when all ranks are there.
func Join(ctx context.Context, client api.ControllerClient, job string, p Plan, rank int, link worker.Link, opts ...worker.Option) (Reducer, error) {
	w, err := worker.Join(ctx, client, worker.Config{Job: job, Rank: rank, Link: link, Plan: p.agreement()},
		append(opts, worker.WithTimeout(p.timeout()))...)
	if err != nil {
		return nil, err
	}
	return network{w}, nil
}

func (n network) Reduce(ctx context.Context, data []float32) (Outcome, error) {
	i, err := n.AllReduce(ctx, tensor, data)
	return Outcome{
		Chunks: i.Chunks, Late: i.Late, Behind: i.Behind, Additions: i.Additions, Exponent: i.Exponent, Clipped: i.Clipped,
		Packets: i.Packets, Resends: i.Resends,
	}, err
}

// tcp returns what a parameter server and its workers agree on.
func (p *Plan) tcp() exchange.Plan { return exchange.Plan{Ranks: p.Ranks, Buckets: []int{Parameters}} }

// server sums by a parameter server over TCP.
type server struct{ *tcp.Worker }

// Connect takes a rank's place at the parameter server at the other end of conn. It returns when all ranks have.
func Connect(ctx context.Context, conn net.Conn, p Plan, rank int) (Reducer, error) {
	plan := p.tcp()
	w, err := tcp.NewWorker([]net.Conn{conn}, rank, plan)
	if err != nil {
		return nil, err
	}
	if err := w.AllReduce(ctx, make([]float32, plan.Buckets[0])); err != nil {
		w.Close()
		return nil, err
	}
	return server{w}, nil
}

func (s server) Reduce(ctx context.Context, data []float32) (Outcome, error) {
	return Outcome{}, s.AllReduce(ctx, data)
}

// Leave does not wait: what the others need is at the server.
func (s server) Leave(context.Context) error { return nil }

// Abort ends the server's work, and with it that of all.
func (s server) Abort(error) { s.Close() }
