// Package bmv2 runs the P4 switch: the embedded engine, which is a P4Runtime switch in this process, or a real
// simple_switch_grpc. Both load what p4c-bm2-ss makes of a v1model program, both answer P4Runtime at a gRPC address
// with the same status codes, and both forward the same bytes; a caller holds either of them as a [Target].
//
// The pieces: package engine is the pure core (program, tables, packets; no sockets, no goroutines), package p4rt
// the P4Runtime server on top of it, package port the frame input and output on network interfaces, package capture
// a pcapng writer for any number of interfaces, package dataplane the way to give a real switch frames without
// interfaces.
package bmv2

import (
	"errors"
	"fmt"
	"log/slog"

	"xagg/bmv2/fault"
	"xagg/internal/endpoint"
)

// Target is a running switch.
type Target interface {
	// Name is the kind of switch: "engine" or "simple_switch_grpc".
	Name() string
	// GRPCAddr is the address at which the switch answers P4Runtime, as grpc.NewClient takes it:
	// host:port, or unix:PATH. It is empty for an engine that serves a listener of its caller's.
	GRPCAddr() string
	// Close stops the switch and frees its ports and its address. It may be called more than once.
	Close() error
}

// DefaultGRPCAddr is where a switch answers when nothing else is asked for. simple_switch_grpc's own default listens
// on every address of the host without TLS; this one does not.
const DefaultGRPCAddr = "127.0.0.1:9559"

// DropPort is v1model's port for packets that are to be dropped; it is never a port of the switch.
const DropPort = 511

// Config says what a switch is to be. The zero value is a switch without a program, ports and CPU port.
type Config struct {
	// Program is p4c's bmv2 JSON. Without one the switch drops everything until a controller sets a pipeline.
	Program []byte
	// Ports maps port numbers (0..510) to the network interfaces behind them.
	Ports map[uint16]string
	// DeviceID is the P4Runtime device id that a controller has to name.
	DeviceID uint64
	// CPUPort is the port number of packet-in and packet-out, 1..510 and none of Ports; 0 = no packet I/O.
	CPUPort uint16
	// GRPCAddr is the address to answer P4Runtime at: host:port, or unix:PATH. Empty means [DefaultGRPCAddr].
	GRPCAddr string
	// PcapFile, if set, is a pcapng file that all frames of all ports are written to, both directions.
	PcapFile string
	// Faults damage the links of the ports, but not the CPU port's: frames before they enter the switch, and after they
	// have left it. The capture has what the switch itself sees. Only for the engine.
	Faults []fault.Spec
	// Log receives what the switch has to say; nil discards it.
	Log *slog.Logger
}

// ErrClosed is returned by the methods of a switch that was closed.
var ErrClosed = errors.New("switch is closed")

func (c *Config) check() error {
	if c.CPUPort > maxPort {
		return fmt.Errorf("CPU port %d: the last port is %d", c.CPUPort, maxPort)
	}
	if err := fault.Check(c.Faults); err != nil {
		return err
	}
	seen := map[string]uint16{}
	for number, iface := range c.Ports {
		if number > maxPort {
			return fmt.Errorf("port %d (%s): the last port is %d", number, iface, maxPort)
		}
		if number == c.CPUPort && number != 0 {
			return fmt.Errorf("port %d (%s): it is the CPU port", number, iface)
		}
		if other, dup := seen[iface]; dup {
			return fmt.Errorf("interface %s: is port %d and port %d", iface, min(number, other), max(number, other))
		}
		seen[iface] = number
	}
	return nil
}

// EnvironmentError is an error of the machine: an interface that is not there, an address in use, a missing program or
// privilege.
type EnvironmentError struct {
	Err  error
	Cure string // what to do, if Err does not say so itself
}

func (e *EnvironmentError) Error() string {
	if e.Cure == "" {
		return e.Err.Error()
	}
	return fmt.Sprintf("%v (%s)", e.Err, e.Cure)
}

// Unwrap returns the cause.
func (e *EnvironmentError) Unwrap() error { return e.Err }

func environment(err error, cure string) error { return &EnvironmentError{err, cure} }

// refusedAddress makes an error of the machine of what it refuses to listen at.
func refusedAddress(err error) error {
	if refused, ok := errors.AsType[*endpoint.ListenError](err); ok {
		return environment(refused, "")
	}
	return err
}
