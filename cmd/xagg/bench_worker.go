package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"xagg/api"
	"xagg/internal/endpoint"
	"xagg/lab/loop"
	"xagg/lab/reducer"
	"xagg/lab/scenario"
	"xagg/lab/tcp"
	"xagg/wire"
	"xagg/worker"
)

// newBenchWorkerCommand returns what a rank of an experiment runs as. It is for the experiments' own use.
func newBenchWorkerCommand(env *env) *cobra.Command {
	var (
		file, job, mode, ip, controller string
		peers                           []string
		rank                            int
		seed                            uint64
		timeout                         time.Duration
	)
	cmd := &cobra.Command{
		Use:    "worker --scenario FILE --seed N --job NAME --rank R --mode MODE --ip ADDRESS",
		Short:  "Run one rank of an experiment",
		Hidden: true,
		Long: `Run one rank of a scenario's job in one mode: all rounds, warm-up included. Writes a JSON object a round to stdout.

--controller is for the modes of this project, in which a job NAME has to be there. --peers are the parameter servers in mode
tcp, and in the modes in which ranks talk to each other the addresses of all of them, in their order.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := needFlags(cmd, "scenario", "job", "rank", "mode", "ip"); err != nil {
				return err
			}
			s, err := scenario.Load(file)
			if err != nil {
				return err
			}
			m, err := scenario.ParseMode(mode)
			if err != nil {
				return usagef("--%w", err)
			}
			number := slices.IndexFunc(s.Jobs, func(j scenario.Job) bool { return j.Name == job })
			if number < 0 {
				return usagef("--job %q: scenario %s has no such job", job, s.Name)
			}
			if ranks := s.Jobs[number].Ranks; rank < 0 || rank >= ranks {
				return usagef("--rank %d: want 0 to %d", rank, ranks-1)
			}
			addr, err := netip.ParseAddr(ip)
			if err != nil || !addr.Is4() || addr.IsUnspecified() {
				return usagef("--ip %q: want the IPv4 address that this worker sends from", ip)
			}
			if reason := s.Skip(m); reason != "" {
				return usagef("--mode %s: %s", m, reason)
			}
			cfg := loop.Config{Scenario: s, Seed: seed, Job: number, Rank: rank, Mode: m, Timeout: timeout}
			r, err := connect(cmd.Context(), env, cfg, job, addr, controller, peers)
			if err != nil {
				return err
			}
			defer r.Close()
			out := json.NewEncoder(env.stdout) // which is not buffered
			return loop.Run(cmd.Context(), cfg, r, func(r loop.Round) error {
				if err := out.Encode(r); err != nil {
					return fmt.Errorf("write round: %w", err)
				}
				return nil
			})
		},
	}
	f := cmd.Flags()
	f.StringVar(&file, "scenario", "", "file of the scenario")
	f.Uint64Var(&seed, "seed", 1, "of computation times and values")
	f.StringVar(&job, "job", "", "name of the job, in the scenario and at the controller")
	f.IntVar(&rank, "rank", 0, "this worker's rank in the job, from 0")
	f.StringVar(&mode, "mode", "", "way of aggregating")
	f.StringVar(&ip, "ip", "", "IPv4 address of this machine that packets are sent from")
	f.StringVar(&controller, "controller", "", "address of the controller: unix:PATH or HOST:PORT")
	f.StringSliceVar(&peers, "peers", nil, "addresses (IP:PORT) of the parameter servers, or of all ranks")
	f.DurationVar(&timeout, "timeout", worker.DefaultTimeout, "how long an all-reduce may take")
	return cmd
}

// needFlags returns an error if a flag was not given.
func needFlags(cmd *cobra.Command, names ...string) error {
	for _, name := range names {
		if !cmd.Flags().Changed(name) {
			return usagef("--%s is missing; see '%s --help'", name, cmd.CommandPath())
		}
	}
	return nil
}

// connect returns the reducer of a mode.
func connect(ctx context.Context, env *env, cfg loop.Config, job string, addr netip.Addr, controller string, peers []string) (loop.Reducer, error) {
	switch kind := cfg.Mode.Reducer(); kind {
	case scenario.XAgg:
		if err := endpoint.Check(controller); err != nil {
			return nil, usagef("--controller %w", err)
		}
		conn, err := endpoint.Dial(controller)
		if err != nil {
			return nil, err
		}
		link, err := worker.ListenUDP(netip.AddrPortFrom(addr, wire.Port), true)
		if err != nil {
			conn.Close()
			return nil, err
		}
		r, err := reducer.NewXAgg(ctx, api.NewControllerClient(conn), cfg, job, link, worker.WithTimeout(cfg.Timeout), worker.WithLogger(env.log))
		if err != nil {
			conn.Close()
			return nil, err
		}
		return closing{r, conn}, nil
	case scenario.ParameterServer:
		if len(peers) == 0 {
			return nil, usagef("--peers is missing: the addresses of the parameter servers")
		}
		ctx, cancel := context.WithTimeout(ctx, cfg.Timeout)
		defer cancel()
		return reducer.NewTCP(ctx, cfg, addr, peers)
	case scenario.Ring:
		if want := cfg.Scenario.Jobs[cfg.Job].Ranks; len(peers) != want {
			return nil, usagef("--peers: %d addresses, want those of all %d ranks", len(peers), want)
		}
		ctx, cancel := context.WithTimeout(ctx, cfg.Timeout)
		defer cancel()
		return reducer.NewRing(ctx, cfg, peers)
	default:
		return nil, usagef("--mode %s: this program has no workers for %s", cfg.Mode, kind)
	}
}

// closing closes a connection after the reducer that used it.
type closing struct {
	loop.Reducer
	conn *endpoint.Conn
}

func (c closing) Close() error {
	err := c.Reducer.Close()
	c.conn.Close()
	return err
}

// newBenchParameterServerCommand returns what a parameter server of an experiment runs as.
func newBenchParameterServerCommand(*env) *cobra.Command {
	var (
		file, job, listen string
		server, servers   int
	)
	cmd := &cobra.Command{
		Use:    "parameter-server --scenario FILE --job NAME --listen ADDRESS",
		Short:  "Sum the gradients of a job over TCP",
		Hidden: true,
		Long: `Sum the gradients of a scenario's job over TCP, or the given one of several servers its share of them. Ends when all workers
have left.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := needFlags(cmd, "scenario", "job", "listen"); err != nil {
				return err
			}
			s, err := scenario.Load(file)
			if err != nil {
				return err
			}
			number := slices.IndexFunc(s.Jobs, func(j scenario.Job) bool { return j.Name == job })
			if number < 0 {
				return usagef("--job %q: scenario %s has no such job", job, s.Name)
			}
			sum, err := tcp.NewServer(reducer.PlanTCP(s, number), server, servers)
			if err != nil {
				return usagef("%w", err)
			}
			lis, err := net.Listen("tcp", listen)
			if err != nil {
				return endpoint.NewListenError("tcp", listen, err)
			}
			defer context.AfterFunc(cmd.Context(), sum.Close)()
			if err = sum.Serve(lis); cmd.Context().Err() != nil {
				return context.Cause(cmd.Context())
			}
			return err
		},
	}
	f := cmd.Flags()
	f.StringVar(&file, "scenario", "", "file of the scenario")
	f.StringVar(&job, "job", "", "name of the job in the scenario")
	f.StringVar(&listen, "listen", "", "address (IP:PORT) where workers connect")
	f.IntVar(&server, "server", 0, "which of the job's servers this is, from 0")
	f.IntVar(&servers, "servers", 1, "number of the job's servers")
	return cmd
}
