package bmv2

import (
	"errors"
	"net"
)

// Engine is the embedded switch. It has simple_switch's structure: one ingress loop fed by a bounded queue of 1,024
// frames that blocks its senders, and for each port an output queue of 64 frames that drops when it is full, so a
// port whose reader stops does not stall the others.
//
// Ports are network interfaces (Config.Ports) or, for a switch in memory, functions (Attach and Inject).
type Engine struct{}

// NewEngine loads cfg.Program (if any), opens cfg.Ports and the capture file, and starts forwarding. It does not
// listen: call Serve, or use StartEngine. An error names the interface, file or program construct that is at fault.
func NewEngine(cfg Config) (*Engine, error) { return nil, errors.New("not built yet") }

// StartEngine is NewEngine, and then Serve in the background at cfg.GRPCAddr.
func StartEngine(cfg Config) (*Engine, error) { return nil, errors.New("not built yet") }

// Serve answers P4Runtime on lis (TCP, unix or an in-memory listener) until Close; it may be called for several
// listeners at once. It returns nil after Close, and the listener's error otherwise. It closes lis.
func (e *Engine) Serve(lis net.Listener) error { return nil }

// Attach makes recv the reader of a port in memory: it is called with every frame the switch sends out of the port,
// one at a time, in a goroutine of the port's own. The frame is valid only during the call. It is an error if the
// port is in use, is the CPU port or is above 510.
func (e *Engine) Attach(port uint16, recv func(frame []byte)) error { return nil }

// Inject hands the switch a frame as received on a port, which need not be attached. The frame is copied. Inject
// blocks while the input queue is full, and returns ErrClosed once the switch is closed.
func (e *Engine) Inject(port uint16, frame []byte) error { return nil }

// Name implements [Target].
func (e *Engine) Name() string { return "engine" }

// GRPCAddr implements [Target]: the address StartEngine listens at, with the real port where port 0 was asked for.
func (e *Engine) GRPCAddr() string { return "" }

// Close implements [Target].
func (e *Engine) Close() error { return nil }
