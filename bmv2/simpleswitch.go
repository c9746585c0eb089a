package bmv2

import (
	"context"
	"errors"
	"os/exec"
)

// SimpleSwitchConfig is what a real simple_switch_grpc needs beside a Config.
type SimpleSwitchConfig struct {
	Config
	// Binary is the program to run; empty means simple_switch_grpc on the PATH.
	Binary string
	// Prepare, if set, is called with the command before it starts: a caller sets environment, process attributes
	// or a prefix that puts the switch into a network namespace.
	Prepare func(*exec.Cmd)
}

// SimpleSwitch is a running simple_switch_grpc process.
type SimpleSwitch struct{}

// StartSimpleSwitch starts simple_switch_grpc and waits until it answers P4Runtime or ctx ends. The process dies with
// the calling one. Errors say whether the binary is missing, an interface does not exist or the port is in use, and
// quote the end of the process's log. cfg.PcapFile is not for this target: use package capture on its interfaces.
func StartSimpleSwitch(ctx context.Context, cfg SimpleSwitchConfig) (*SimpleSwitch, error) {
	return nil, errors.New("not built yet")
}

// Name implements [Target].
func (s *SimpleSwitch) Name() string { return "simple_switch_grpc" }

// GRPCAddr implements [Target].
func (s *SimpleSwitch) GRPCAddr() string { return "" }

// Close implements [Target]: it ends the process and waits for it.
func (s *SimpleSwitch) Close() error { return nil }
