package main

import (
	"context"
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"xagg/api"
	"xagg/internal/endpoint"
	"xagg/internal/metrics"
	"xagg/xdp"
)

func newServerCommand(env *env) *cobra.Command {
	cfg := xdp.Config{Memory: 64 << 20, Mode: xdp.Auto}
	var noPin bool
	var metricsAddr string
	cmd := &cobra.Command{
		Use:         "server --interface NAME",
		Annotations: daemon,
		Short:       "Run an aggregation server: an XDP program on an interface, and its agent",
		Long: `Attaches the aggregation program to an interface and serves the agent through which a
controller leases its memory to jobs, until it is interrupted. Traffic that is not for
UDP port 19860 passes to the network stack as before.

Program and memory are pinned on the BPF file system: they go on summing when this
process is killed, and the next 'xagg server' for the interface takes them over. When it
is interrupted nothing is left, or with --keep all of it for the next. The next one needs
the same --memory and the same version of the program, or --replace.

The memory holds whole vectors: a job takes 1,088 bytes for every 256 lanes of its
largest vector, times the rounds that are kept: twice its depth, 8 or more with a quorum, 4 if async.

In native mode the program runs in the interface's driver. Where the driver cannot do
that, auto falls back to generic mode, which copies every frame, and warns. On a veth
pair in native mode the other end needs a native XDP program as well; if it is in the
same network namespace, the server attaches one that passes everything.`,
		Example: `  xagg server --interface eth0 --memory 1GiB --listen 10.77.1.1:19861`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if cfg.Interface == "" {
				return usagef("--interface is missing: the interface that the workers' packets arrive at")
			}
			if _, err := cfg.Memory.Slots(); err != nil {
				return usagef("--memory: %w", err)
			}
			if err := endpoint.Check(cfg.Listen); err != nil {
				return usagef("--listen %w", err)
			}
			switch {
			case noPin && (cfg.Keep || cfg.Replace || cmd.Flags().Changed("pin")):
				return usagef("--no-pin does not go together with --pin, --keep or --replace")
			case noPin:
				cfg.Pin = ""
			case cfg.Pin == "":
				return usagef("--pin is empty: want a directory on a BPF file system, auto, or --no-pin")
			}
			if cfg.Name == "" {
				name, err := os.Hostname()
				if err != nil {
					return fmt.Errorf("name the server after the host: %w; give a name with --name", err)
				}
				cfg.Name = name
			}
			if metricsAddr == "" {
				return xdp.Serve(cmd.Context(), cfg, env.log)
			}
			agent, err := endpoint.Dial(cfg.Listen) // its own: metrics show what a controller sees
			if err != nil {
				return err
			}
			defer agent.Close()
			return withMetrics(cmd.Context(), env.log, metricsAddr, metrics.NewAgent(api.NewAgentClient(agent)),
				func(ctx context.Context) error { return xdp.Serve(ctx, cfg, env.log) })
		},
	}
	metricsFlag(cmd, &metricsAddr)
	flags := cmd.Flags()
	flags.StringVar(&cfg.Interface, "interface", "", "interface that the workers' packets arrive at")
	flags.Var(&cfg.Memory, "memory", "memory for slots: a whole number with KiB, MiB or GiB")
	flags.StringVar(&cfg.Listen, "listen", "127.0.0.1:19861", "address of the agent: HOST:PORT or unix:PATH; it is not authenticated")
	flags.StringVar(&cfg.Name, "name", "", "what the controller calls the server (default: the host's name)")
	flags.Var(&cfg.Mode, "xdp-mode", "where the program runs: auto, native, generic")
	flags.StringVar(&cfg.Pin, "pin", xdp.PinAuto,
		"directory on a BPF file system that holds program and memory; auto is /sys/fs/bpf/xagg/INTERFACE")
	flags.BoolVar(&noPin, "no-pin", false, "pin nothing: program and memory end with this process, however it ends")
	flags.BoolVar(&cfg.Keep, "keep", false, "when interrupted, let the program run on for the next 'xagg server'")
	flags.BoolVar(&cfg.Replace, "replace", false, "remove the program that is pinned, and begin with empty memory")
	return cmd
}
