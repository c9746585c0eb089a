package train

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"

	"google.golang.org/grpc"

	"xagg/api"
	"xagg/lab"
	"xagg/lab/netns"
	"xagg/lab/testbed"
)

// namespaces is a bed of one process per host, each in a network namespace of its own.
type namespaces struct {
	*testbed.Testbed
	topology lab.Topology
}

func startNetns(ctx context.Context, topology lab.Topology, opts *Options) (bed, error) {
	hosts, err := netns.Create(ctx, testbed.Spec(topology, nil))
	if err != nil {
		return nil, err
	}
	b, err := testbed.Start(ctx, hosts, testbed.Config{
		Topology: topology, Switch: opts.Switch, SimpleSwitch: opts.SimpleSwitch, Log: opts.Log,
	})
	if err != nil {
		return nil, err
	}
	return &namespaces{b, topology}, nil
}

func (b *namespaces) controller() grpc.ClientConnInterface { return b.Controller() }

func (b *namespaces) xdpMode(ctx context.Context) string {
	status, err := api.NewControllerClient(b.Controller()).Status(ctx, &api.StatusRequest{})
	if err != nil || len(status.Servers) == 0 {
		return ""
	}
	return status.Servers[0].GetInfo().GetMode()
}

func (b *namespaces) close() error { return b.Close() }

// tcpPort is where the parameter server listens.
const tcpPort = 19870

func (b *namespaces) work(ctx context.Context, p Plan, job string, take func(int, Step) error) error {
	if job != "" {
		return b.workers(ctx, p, []string{"--controller", b.ControllerAddr(), "--job", job}, take)
	}
	host := b.topology.Others[0]
	addr := netip.AddrPortFrom(host.IP, tcpPort).String()
	var lis net.Listener
	err := b.Hosts().Do(host.Name, func() (err error) {
		lis, err = net.Listen("tcp", addr)
		return err
	})
	if err != nil {
		return err
	}
	return serveTCP(ctx, p, lis, func(ctx context.Context) error {
		return b.workers(ctx, p, []string{"--server", addr}, take)
	})
}

// workers runs a worker process on every worker's host.
func (b *namespaces) workers(ctx context.Context, p Plan, args []string, take func(int, Step) error) error {
	plan, err := json.Marshal(p)
	if err != nil {
		return err
	}
	return errors.Join(eachRank(ctx, p.Ranks, func(ctx context.Context, rank int) error {
		host := b.topology.Workers[rank]
		program := testbed.Program{Name: host.Name, Host: host.Name, Args: append([]string{
			"--log-level", "warn", "bench", "train-worker", "--plan", string(plan), "--rank", strconv.Itoa(rank), "--ip", host.IP.String(),
		}, args...)}
		return b.Run(ctx, program, func(line []byte) error {
			var s Step
			if err := json.Unmarshal(line, &s); err != nil {
				return fmt.Errorf("read its output: %w: %s", err, line)
			}
			return take(rank, s)
		})
	}), b.Dead())
}
