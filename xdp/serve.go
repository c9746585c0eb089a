package xdp

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"time"

	"google.golang.org/grpc"

	"xagg/api"
	"xagg/internal/endpoint"
)

// Config says what [Serve] serves. All fields are needed.
type Config struct {
	Name      string // what the controller calls the server
	Interface string // that the frames come in at
	Memory    Size   // of the arena
	Mode      Mode
	Listen    string // "unix:PATH" or "HOST:PORT", of the agent
}

// Serve loads the program, attaches it and serves its agent until ctx ends. Then, or when it fails, nothing of it is
// left. When it is ready it logs so in one line. It returns nil when ctx has ended.
func Serve(ctx context.Context, cfg Config, log *slog.Logger) (err error) {
	// Whatever needs no privileges is found out first.
	if _, err := net.InterfaceByName(cfg.Interface); err != nil {
		return &NoInterfaceError{cfg.Interface, err}
	}
	listener, err := endpoint.Listen(cfg.Listen)
	if err != nil {
		return err
	}
	defer listener.Close()
	server, err := Load(cfg.Memory)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, server.Close()) }()
	if err := server.Attach(cfg.Interface, cfg.Mode, log); err != nil {
		return err
	}

	rpc := grpc.NewServer()
	api.RegisterAgentServer(rpc, NewAgent(cfg.Name, cfg.Interface, server))
	served := make(chan error, 1)
	go func() { served <- rpc.Serve(listener) }()
	log.Info("server ready", "name", cfg.Name, "listen", cfg.Listen, "interface", cfg.Interface,
		"mode", server.Mode(), "slots", server.Slots(), "memory", cfg.Memory.String())

	select {
	case err := <-served:
		return fmt.Errorf("serve agent at %s: %w", cfg.Listen, err)
	case <-ctx.Done():
	}
	stuck := time.AfterFunc(time.Second, rpc.Stop) // a client that does not hang up must not hold the program
	defer stuck.Stop()
	rpc.GracefulStop()
	<-served
	return nil
}
