package main

import (
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"xagg/bmv2"
	"xagg/internal/endpoint"
)

// newSwitchCommand returns the command that runs the embedded engine with simple_switch_grpc's command line.
func newSwitchCommand(env *env) *cobra.Command {
	var (
		noP4       bool
		interfaces []string
		cfg        bmv2.Config
		faults     faultFlags
	)
	cmd := &cobra.Command{
		Use:         "switch [PROGRAM.json] [flags] [-- --grpc-server-addr ADDR --cpu-port N]",
		Annotations: daemon,
		Short:       "Run the embedded P4 switch",
		Long: `Run the embedded P4 switch with the command line of simple_switch_grpc: it loads p4c's bmv2 JSON, forwards between
network interfaces and answers P4Runtime, until it is interrupted.

Behind -- follow the options that simple_switch_grpc calls the target's:
  --grpc-server-addr ADDR   where to answer P4Runtime: host:port, or unix:PATH (default ` + bmv2.DefaultGRPCAddr + `)
  --cpu-port N              port number of packet-in and packet-out (default: none)`,
		Example: `  xagg switch --no-p4 -i 1@veth1 -i 2@veth2 -- --grpc-server-addr 127.0.0.1:9559 --cpu-port 510`,
		RunE: func(cmd *cobra.Command, args []string) error {
			program, target := args, []string(nil)
			if n := cmd.ArgsLenAtDash(); n >= 0 {
				program, target = args[:n], args[n:]
			}
			if err := switchTarget(target, &cfg); err != nil {
				return err
			}
			switch {
			case len(program) > 1:
				return usagef("switch: one program, not %d: %s", len(program), strings.Join(program, " "))
			case len(program) == 1 && noP4:
				return usagef("switch: --no-p4 and a program (%s) exclude each other", program[0])
			case len(program) == 0 && !noP4:
				return usagef("switch: name the program's JSON file, or say --no-p4 and push it by P4Runtime")
			}
			var err error
			if cfg.Ports, err = switchPorts(interfaces); err != nil {
				return err
			}
			if cfg.Faults, err = faults.specs(); err != nil {
				return err
			}
			if len(program) == 1 {
				if cfg.Program, err = os.ReadFile(program[0]); err != nil {
					return fmt.Errorf("read program: %w", err)
				}
			}
			cfg.Log = env.log
			return runSwitch(cmd, env, cfg)
		},
	}
	flags := cmd.Flags()
	flags.BoolVar(&noP4, "no-p4", false, "start without a program and wait for a controller to push one")
	flags.StringArrayVarP(&interfaces, "interface", "i", nil, "make a network interface a port: `PORT@IFACE`; repeatable")
	flags.Uint64Var(&cfg.DeviceID, "device-id", 0, "P4Runtime device `id`")
	faults.add(flags)
	flags.StringVar(&cfg.PcapFile, "pcap", "", "write the frames of all ports to a pcapng `file`")
	return cmd
}

// switchTarget reads the options behind the separator.
func switchTarget(args []string, cfg *bmv2.Config) error {
	flags := pflag.NewFlagSet("switch --", pflag.ContinueOnError)
	flags.Usage = func() {}
	flags.StringVar(&cfg.GRPCAddr, "grpc-server-addr", bmv2.DefaultGRPCAddr, "")
	flags.Uint16Var(&cfg.CPUPort, "cpu-port", 0, "")
	if err := flags.Parse(args); err != nil {
		return usagef("switch: behind --: %w", err)
	}
	if flags.NArg() != 0 {
		return usagef("switch: behind --: unexpected %s", flags.Arg(0))
	}
	if err := endpoint.Check(cfg.GRPCAddr); err != nil {
		return usagef("switch: --grpc-server-addr %w", err)
	}
	if flags.Changed("cpu-port") && (cfg.CPUPort == 0 || cfg.CPUPort >= bmv2.DropPort) {
		return usagef("switch: --cpu-port %d: want 1 to %d", cfg.CPUPort, bmv2.DropPort-1)
	}
	return nil
}

func switchPorts(interfaces []string) (map[uint16]string, error) {
	ports := map[uint16]string{}
	for _, s := range interfaces {
		number, iface, ok := strings.Cut(s, "@")
		n, err := strconv.ParseUint(number, 10, 16)
		if !ok || err != nil || iface == "" {
			return nil, usagef("switch: --interface %q: want PORT@IFACE, as in 1@veth1", s)
		}
		if n >= bmv2.DropPort {
			return nil, usagef("switch: --interface %s: the last port is %d", s, bmv2.DropPort-1)
		}
		if other, dup := ports[uint16(n)]; dup {
			return nil, usagef("switch: --interface %s: port %d is %s already", s, n, other)
		}
		ports[uint16(n)] = iface
	}
	return ports, nil
}

func runSwitch(cmd *cobra.Command, env *env, cfg bmv2.Config) error {
	engine, err := bmv2.StartEngine(cfg)
	if err != nil {
		return err
	}
	env.log.Info("switch is running", "addr", engine.GRPCAddr(), "device", cfg.DeviceID, "ports", len(cfg.Ports))
	<-cmd.Context().Done()
	return engine.Close()
}
