package controller

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/connectivity"

	"xagg/api"
	"xagg/controller/p4rt"
	"xagg/internal/endpoint"
)

const (
	minBackoff = 100 * time.Millisecond
	maxBackoff = time.Second
	// probeInterval is how often an agent is asked whether it is still there.
	probeInterval = 5 * time.Second
)

// errNotReady is wrapped by errors about a device that cannot be reached now.
var errNotReady = errors.New("not ready")

// Reasons for not being ready.
var (
	errNotTried    = errors.New("no connection has been made yet")
	errProgramming = errors.New("it is being programmed")
)

// links are the connections to the devices.
type links struct {
	mu     sync.Mutex
	notify chan struct{} // closed and replaced whenever something changes
	sw     switchLink
	order  []string // of the servers, as configured
	agents map[string]*agentLink
}

type switchLink struct {
	name    string
	address string
	session *p4rt.Session // nil: none
	ready   bool          // programmed
	err     error         // why it is not ready
}

type agentLink struct {
	server Server
	client api.AgentClient // nil: no connection
	ready  bool            // what is wanted there has been installed
	wiped  bool            // what an earlier controller left there was removed: of an agent that does not tell what it has
	info   *api.ServerInfo // as of the last connection
	err    error           // why it is not ready
}

func (l *links) init(cfg *Config) {
	l.notify = make(chan struct{})
	l.sw = switchLink{name: cfg.Switch.Name, address: cfg.Switch.Address, err: errNotTried}
	l.agents = make(map[string]*agentLink)
	for _, s := range cfg.Servers {
		l.order = append(l.order, s.Name)
		l.agents[s.Name] = &agentLink{server: s, err: errNotTried}
	}
}

// changed returns a channel that closes at the next change.
func (l *links) changed() <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.notify
}

func (l *links) announce() { l.update(func() {}) }

func (l *links) update(f func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	f()
	close(l.notify)
	l.notify = make(chan struct{})
}

// session returns the switch's session.
func (l *links) session() (*p4rt.Session, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.sw.session == nil {
		return nil, l.sw.notReady()
	}
	return l.sw.session, nil
}

func (s *switchLink) notReady() error {
	return fmt.Errorf("switch %s at %s is %w: %w", s.name, s.address, errNotReady, s.err)
}

// agent returns the client of a server's agent.
func (l *links) agent(name string) (api.AgentClient, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	a := l.agents[name]
	if a.client == nil {
		return nil, a.notReady()
	}
	return a.client, nil
}

func (a *agentLink) notReady() error {
	return fmt.Errorf("server %s with its agent at %s is %w: %w", a.server.Name, a.server.Agent, errNotReady, a.err)
}

// unready returns which devices are not ready and why, or nil.
func (l *links) unready() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	var errs []error
	if !l.sw.ready {
		errs = append(errs, l.sw.notReady())
	}
	for _, name := range l.order {
		if a := l.agents[name]; !a.ready {
			errs = append(errs, a.notReady())
		}
	}
	return errors.Join(errs...)
}

// retry calls attempt until ctx ends, with a growing pause between attempts that fail at once.
func retry(ctx context.Context, attempt func(context.Context)) {
	pause := minBackoff
	for ctx.Err() == nil {
		began := time.Now()
		attempt(ctx)
		if time.Since(began) > maxBackoff {
			pause = minBackoff
		}
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
		pause = min(2*pause, maxBackoff)
	}
}

// keepSwitch holds sessions with the switch, one after the other.
func (c *Controller) keepSwitch(ctx context.Context) {
	log := c.log.With("switch", c.cfg.Switch.Name, "address", c.cfg.Switch.Address)
	target := p4rt.Target{
		Address:  c.cfg.Switch.Address,
		DeviceID: c.cfg.Switch.DeviceID,
		Election: c.election,
		Dial:     c.dial,
		Log:      log,
		Backup: func(primary p4rt.ElectionID) {
			c.links.update(func() {
				c.links.sw.err = fmt.Errorf("%w (election id %s); stop it, or wait until it ends", p4rt.ErrNotPrimary, primary)
			})
		},
	}
	last := ""
	retry(ctx, func(ctx context.Context) {
		err := p4rt.Run(ctx, target, c.program, c.holdSwitch)
		if ctx.Err() != nil {
			return
		}
		c.links.update(func() { c.links.sw.err = err })
		if err.Error() != last { // the same failure again and again is one event
			log.Warn("no session with the switch", "err", err)
			last = err.Error()
		}
	})
}

// holdSwitch programs the switch and stays until the session ends.
func (c *Controller) holdSwitch(ctx context.Context, session *p4rt.Session) error {
	if err := c.takeSwitch(ctx, session); err != nil {
		return err
	}
	defer c.loseSwitch()
	if err := c.applyAll(ctx); err != nil {
		return err
	}
	c.links.update(func() { c.links.sw.ready, c.links.sw.err = true, nil })
	c.log.Info("switch is programmed", "switch", c.cfg.Switch.Name, "pushed", session.Pushed())
	<-ctx.Done()
	return context.Cause(ctx)
}

// loseSwitch forgets what the switch has: the next session begins with reading it.
func (c *Controller) loseSwitch() {
	c.applying.Lock()
	defer c.applying.Unlock()
	for _, have := range c.have {
		clear(have.entities)
	}
	c.links.update(func() {
		c.links.sw.session, c.links.sw.ready, c.links.sw.err = nil, false, errors.New("the session ended")
	})
}

// keepAgent keeps a connection with a server's agent.
func (c *Controller) keepAgent(ctx context.Context, s Server) {
	log := c.log.With("server", s.Name, "address", s.Agent)
	last := ""
	retry(ctx, func(ctx context.Context) {
		err := c.holdAgent(ctx, s)
		if ctx.Err() != nil {
			return
		}
		c.links.update(func() {
			a := c.links.agents[s.Name]
			a.client, a.ready, a.err = nil, false, err
		})
		if err.Error() != last {
			log.Warn("no connection with the server's agent", "err", err)
			last = err.Error()
		}
	})
}

// holdAgent connects to an agent, installs there what is wanted and stays until it no longer answers.
func (c *Controller) holdAgent(ctx context.Context, s Server) error {
	conn, err := endpoint.DialBy(c.dial, s.Agent, grpc.WithIdleTimeout(0))
	if err != nil {
		return err
	}
	defer conn.Close()
	client := api.NewAgentClient(conn)
	info, err := c.takeAgent(ctx, s, client)
	if err != nil {
		return err
	}
	c.log.Info("server's agent is there", "server", s.Name, "mode", info.GetMode(), "slots", info.GetSlots())
	if err := c.applyAll(ctx); err != nil {
		c.log.Warn("switch is not programmed", "err", err) // its own session takes care of that
	}
	c.links.update(func() { c.links.agents[s.Name].ready, c.links.agents[s.Name].err = true, nil })
	for {
		wait, cancel := context.WithTimeout(ctx, probeInterval)
		gone := conn.WaitForStateChange(wait, connectivity.Ready)
		cancel()
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if gone {
			return errors.New("the connection broke")
		}
		if _, err := probe(ctx, client); err != nil {
			return fmt.Errorf("it does not answer: %w", err)
		}
	}
}

func probe(ctx context.Context, client api.AgentClient) (*api.ServerInfo, error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	return client.Info(ctx, &api.InfoRequest{})
}
