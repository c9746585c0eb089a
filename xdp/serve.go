package xdp

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"google.golang.org/grpc"

	"xagg/api"
	"xagg/internal/endpoint"
)

// PinAuto as [Config.Pin] is a directory that is named after the interface, below the place where the BPF file system is
// by convention. Where there is none and none can be mounted, nothing is pinned.
const PinAuto = "auto"

// Config says what [Serve] serves.
type Config struct {
	Name      string // what the controller calls the server
	Interface string // that the frames come in at
	Memory    Size   // of the arena
	Mode      Mode
	Listen    string // "unix:PATH" or "HOST:PORT", of the agent

	// Pin is a directory on a BPF file system, which is made and holds nothing else, or [PinAuto]. Program and memory
	// are pinned there, so that they outlive an agent that is killed. Empty: they end with it.
	Pin     string
	Replace bool // remove what is pinned there, and begin with empty memory
	Keep    bool // let the program run on when ctx ends, for the next agent
}

// Serve loads the program, attaches it and serves its agent until ctx ends. Where an earlier agent has pinned them it
// takes program and memory over instead, as they run. When it is ready it logs so in one line. It returns nil when ctx
// has ended.
//
// When ctx ends nothing is left, unless Keep is set. When it fails nothing that it made is left, until it was ready: from
// then on jobs rely on the program, which then stays for the next agent if it is pinned.
func Serve(ctx context.Context, cfg Config, log *slog.Logger) (err error) {
	// Whatever needs no privileges is found out first.
	if _, err := interfaceByName(cfg.Interface); err != nil {
		return err
	}
	listener, err := endpoint.Listen(cfg.Listen)
	if err != nil {
		return err
	}
	defer listener.Close()
	p, err := pinsFor(cfg, log)
	if err != nil {
		return err
	}
	server, err := start(cfg, p, log)
	if err != nil {
		return err
	}
	keep := false
	defer func() { err = errors.Join(err, end(server, p, keep)) }()

	rpc := grpc.NewServer(grpc.WaitForHandlers(true)) // they use what is closed after them
	agent := NewAgent(cfg.Name, cfg.Interface, server)
	defer agent.Close()
	api.RegisterAgentServer(rpc, agent)
	served := make(chan error, 1)
	go func() { served <- rpc.Serve(listener) }()
	log.Info("server ready", "name", cfg.Name, "listen", cfg.Listen, "interface", cfg.Interface,
		"mode", server.Mode(), "slots", server.Slots(), "memory", cfg.Memory.String(), "pins", p.String())

	select {
	case err := <-served:
		keep = true
		return fmt.Errorf("serve agent at %s: %w", cfg.Listen, err)
	case <-ctx.Done():
		keep = cfg.Keep
	}
	stuck := time.AfterFunc(time.Second, rpc.Stop) // a client that does not hang up must not hold the program
	defer stuck.Stop()
	rpc.GracefulStop()
	<-served
	return nil
}

// pinsFor takes the directory that is to hold the pins; it returns nil where there is to be none.
func pinsFor(cfg Config, log *slog.Logger) (*pins, error) {
	switch cfg.Pin {
	case "":
		return nil, nil
	case PinAuto:
	default:
		return openPins(cfg.Pin)
	}
	if err := mountBPFFS(); err != nil {
		if cfg.Keep || cfg.Replace {
			return nil, err
		}
		log.Warn("nothing is pinned: the program and its memory end with this process", "err", err)
		return nil, nil
	}
	dir, err := defaultPins(cfg.Interface)
	if err != nil {
		return nil, err
	}
	return openPins(dir)
}

// start takes over the server that is pinned, or makes one. When it fails the pins are let go, and what another agent
// pinned is left there.
func start(cfg Config, p *pins, log *slog.Logger) (*Server, error) {
	if p == nil {
		return attached(cfg, log)
	}
	server, err := replaceOrTakeOver(cfg, p, log)
	if err != nil {
		return nil, errors.Join(err, p.close())
	}
	if server != nil {
		log.Info("took over a running XDP program", "interface", cfg.Interface, "mode", server.Mode(), "plans", len(server.plans), "pins", p.dir)
		return server, nil
	}
	if server, err = attached(cfg, log); err != nil {
		return nil, errors.Join(err, p.remove())
	}
	if err := server.pin(p); err != nil {
		return nil, errors.Join(err, end(server, p, false))
	}
	return server, nil
}

func replaceOrTakeOver(cfg Config, p *pins, log *slog.Logger) (*Server, error) {
	if !cfg.Replace {
		return p.takeOver(cfg, log)
	}
	_, there, err := p.read()
	if err != nil || !there {
		return nil, err
	}
	log.Warn("removing the server that was pinned", "pins", p.dir)
	return nil, p.clear()
}

// attached loads the program and attaches it.
func attached(cfg Config, log *slog.Logger) (*Server, error) {
	server, err := Load(cfg.Memory)
	if err != nil {
		return nil, err
	}
	if err := server.Attach(cfg.Interface, cfg.Mode, log); err != nil {
		return nil, errors.Join(err, server.Close())
	}
	return server, nil
}

// end lets go of a server, which is then gone unless its pins are to stay. The pins' lock goes last: whoever gets it
// finds the interface free.
func end(server *Server, p *pins, keep bool) error {
	switch {
	case p == nil:
		return server.Close()
	case keep:
		return errors.Join(server.Close(), p.close())
	}
	err := p.clear()
	return errors.Join(err, server.Close(), p.remove())
}
