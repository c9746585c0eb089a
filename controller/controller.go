package controller

import (
	"context"
	"log/slog"
	"net"
)

// Controller is a running or about to run controller. See [New].
type Controller struct {
	cfg  Config
	log  *slog.Logger
	dial Dialer
}

// Dialer connects to the gRPC server at an address of the configuration: host:port or unix:PATH, or whatever the
// caller of [New] means by it.
type Dialer func(ctx context.Context, address string) (net.Conn, error)

// Option changes how a controller meets the world.
type Option func(*Controller)

// WithLogger has the controller log there; the default discards everything.
func WithLogger(log *slog.Logger) Option { return func(c *Controller) { c.log = log } }

// WithDialer replaces the way to the switch and to the servers' agents, for instance by in-memory connections.
func WithDialer(dial Dialer) Option { return func(c *Controller) { c.dial = dial } }

// New checks the configuration and the embedded P4 program. It connects to nothing: see [Controller.Run].
func New(cfg Config, opts ...Option) (*Controller, error) {
	panic("not written")
}

// Listen opens a listener at an address of the configuration: host:port or unix:PATH. A socket that a dead process
// left behind is replaced.
func Listen(address string) (net.Listener, error) { panic("not written") }

// Run connects to the switch and to the servers' agents, keeps them programmed, creates the configured jobs and
// serves the API on lis, until ctx ends (it then returns nil) or something is wrong that trying again does not
// mend: a configured job that is refused, a switch that refuses the program, a listener that fails. It closes lis and
// every connection before it returns.
func (c *Controller) Run(ctx context.Context, lis net.Listener) error { panic("not written") }

// Ready waits until the switch and every server are programmed and the configured jobs exist, or until ctx ends; the
// error then says what was not ready and why.
func (c *Controller) Ready(ctx context.Context) error { panic("not written") }
