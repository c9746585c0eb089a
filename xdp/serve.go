package xdp

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"

	"xagg/api"
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
	listener, err := listen(cfg.Listen)
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

// listen opens the agent's address. A socket file that a crashed process has left behind is replaced.
func listen(address string) (net.Listener, error) {
	path, ok := strings.CutPrefix(address, "unix:")
	if !ok {
		l, err := net.Listen("tcp", address)
		if errors.Is(err, unix.EADDRINUSE) {
			err = fmt.Errorf("%w; give another address with --listen ('ss -ltnp' shows who has it)", err)
		}
		return l, err
	}
	l, err := net.Listen("unix", path)
	if !errors.Is(err, unix.EADDRINUSE) {
		return l, err
	}
	if conn, dialErr := net.Dial("unix", path); dialErr == nil {
		conn.Close()
		return nil, fmt.Errorf("%w; a process is serving there, give another path with --listen", err)
	} else if !errors.Is(dialErr, unix.ECONNREFUSED) {
		return nil, err // not a socket, or not ours to try
	}
	if err := os.Remove(path); err != nil {
		return nil, fmt.Errorf("remove the socket that a process left behind: %w", err)
	}
	return net.Listen("unix", path)
}
