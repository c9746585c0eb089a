package controller

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/keepalive"

	"xagg/api"
	"xagg/controller/p4rt"
	"xagg/internal/endpoint"
)

const (
	// writeTimeout bounds one write to a switch or an agent.
	writeTimeout = 10 * time.Second
	// readTimeout bounds what a status reads from each device.
	readTimeout = 3 * time.Second
	// returnGrace is how long ranks of a running job may take to come back to a controller that was restarted.
	returnGrace = time.Minute
	// keepaliveTime is how long a client may be silent before it is asked, and then again until it is taken for gone.
	keepaliveTime = 20 * time.Second
)

// Controller is a running or about to run controller. See [New].
type Controller struct {
	cfg      Config
	log      *slog.Logger
	dial     endpoint.Dialer
	origin   time.Time       // of the telemetry's time
	election p4rt.ElectionID // the time of New: the controller that was started last is primary
	program  *p4rt.Program
	base     objects // wanted whether there are jobs or not

	mu     sync.Mutex
	intent intent
	meets  map[string]*rendezvous // by job
	// adaptations have plans follow what is measured, by job; of those that run.
	adaptations map[string]*adaptation
	errs        map[string]error // by job: what kept its objects from being installed last time
	// recoveries is the number of the last recovery. Those of a controller that is started later are larger.
	recoveries uint64
	earlier    uint64 // no recovery of this controller's has this number or a smaller one
	// What the memory of the devices is recognized by; 0 and none where there was no connection yet.
	pipeline uint64            // cookie of the switch's
	arenas   map[string]uint64 // instances of the servers', by name
	stopping bool              // streams end because the controller does
	reloaded reloaded

	file      File       // the configuration's; none if its path is empty
	reloading sync.Mutex // serializes reloads; it is never asked for while mu is held

	saving sync.Mutex // serializes writes of the state file; it is never asked for while mu is held
	saved  []byte     // the file as it is
	grace  time.Duration

	// applying serializes whatever is written to devices; it is never asked for while mu is held.
	applying sync.Mutex
	have     map[uint16]objects // installed, by owner: an incarnation's job id, or baseOwner

	links         links
	devices       devices
	questions     atomic.Uint32 // asked of slots
	looking       chan struct{} // held by whoever looks at a job
	changes       prometheus.Histogram
	recoveryTimes prometheus.Histogram
	running       sync.WaitGroup // what outlives the call that began it
}

// Option changes how a controller meets the world.
type Option func(*Controller)

// WithLogger has the controller log there; the default discards everything.
func WithLogger(log *slog.Logger) Option { return func(c *Controller) { c.log = log } }

// WithDialer replaces the way to the switch and to the servers' agents, for instance by in-memory connections. The
// addresses of the configuration then mean whatever dial makes of them.
func WithDialer(dial endpoint.Dialer) Option { return func(c *Controller) { c.dial = dial } }

// New checks the configuration and the embedded P4 program, takes up what an earlier controller has kept in the state file,
// and plans the configured jobs that are not there yet. It connects to nothing: see [Controller.Run]. A state file that
// cannot be used is a [*StateError].
func New(cfg Config, opts ...Option) (*Controller, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("check configuration: %w", err)
	}
	program, slots, err := loadProgram()
	if err != nil {
		return nil, err
	}
	c := &Controller{
		cfg:      cfg,
		log:      slog.New(slog.DiscardHandler),
		dial:     endpoint.Connect,
		election: p4rt.ElectionID{Low: uint64(time.Now().UnixNano())},
		program:  program,
		meets:    make(map[string]*rendezvous),
		origin:   time.Now(),

		adaptations:   make(map[string]*adaptation),
		errs:          make(map[string]error),
		recoveries:    uint64(time.Now().UnixNano()),
		have:          make(map[uint16]objects),
		looking:       make(chan struct{}, 1),
		changes:       newChanges(),
		recoveryTimes: newRecoveryTimes(),
		arenas:        make(map[string]uint64),
		grace:         returnGrace,
	}
	c.earlier = c.recoveries
	c.reloaded.success = time.Now()
	c.base = desiredBase(&c.cfg)
	c.intent = freshIntent(&c.cfg, slots, program.TableSizes())
	for _, opt := range opts {
		opt(c)
	}
	if err := c.load(); err != nil {
		return nil, err
	}
	if err := c.createConfigured(); err != nil {
		return nil, err
	}
	for _, j := range c.intent.sorted() {
		if note := c.intent.deviates(j); note != "" {
			c.log.Warn("job is not what the configuration would have", "job", j.spec.Name, "note", note)
		}
	}
	c.links.init(&c.cfg)
	c.devices.init(&c.cfg)
	return c, nil
}

// createConfigured creates the configured jobs that are not there yet, together.
func (c *Controller) createConfigured() error {
	var specs []JobSpec
	var indexes []int
	for i, spec := range c.cfg.Jobs {
		if !c.keeps(spec) {
			specs, indexes = append(specs, spec), append(indexes, i)
		}
	}
	jobs, _, err := c.intent.createAll(specs)
	if err != nil {
		return plansError(indexes, err)
	}
	for _, j := range jobs {
		c.meets[j.spec.Name] = newRendezvous(j)
		if len(j.decision.Servers) > 0 {
			c.errs[j.spec.Name] = errNotInstalled
		}
	}
	return nil
}

// keeps reports whether a configured job is there already, with what an earlier controller has kept. One that the
// configuration would have otherwise since is planned anew, unless it runs.
func (c *Controller) keeps(spec JobSpec) bool {
	j := c.intent.jobs[spec.Name]
	if j == nil {
		return false
	}
	if c.intent.deviates(j) == "" || c.meets[spec.Name].state == stateRunning {
		if spec.Adapt != nil { // it may be changed at any time; what only Adapt was told stays
			j.spec.Adapt = spec.Adapt
		}
		return true
	}
	delete(c.intent.jobs, spec.Name)
	return false
}

var errNotInstalled = errors.New("its plan is not installed on the servers yet")

// baseOwner owns what the switch has whether there are jobs or not. No job has this id.
const baseOwner = 0

// Run connects to the switch and to the servers' agents, keeps them programmed and serves the API on lis, until ctx
// ends (it then returns nil), lis fails or the state cannot be kept. A switch or an agent that goes away is tried again until it is back. Run
// closes lis and every connection before it returns, and may be called once.
func (c *Controller) Run(ctx context.Context, lis net.Listener) error {
	if err := c.save(); err != nil { // rather now than when it matters
		lis.Close()
		return fmt.Errorf("%w; name another file with --state, or begin from nothing after each restart with --state %s", err, NoState)
	}
	// Streams end only after it is noted that the controller stops: that says nothing of the ranks.
	run, cancel := context.WithCancel(context.WithoutCancel(ctx))
	srv := grpc.NewServer(
		grpc.WaitForHandlers(true),
		grpc.MaxRecvMsgSize(math.MaxInt32), // a rank may have a whole vector to hand over
		// A worker's host that dies without a word is noticed too.
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: keepaliveTime, Timeout: keepaliveTime}))
	api.RegisterControllerServer(srv, &service{c: c, ctx: run})

	c.running.Go(func() { c.keepSwitch(run) })
	for _, s := range c.cfg.Servers {
		c.running.Go(func() { c.keepAgent(run, s) })
	}
	c.running.Go(func() { c.watchDevices(run) })
	c.resume(run)
	served := make(chan error, 1)
	c.log.Info("serving", "address", lis.Addr().String(), "switch", c.cfg.Switch.Name)
	go func() { served <- srv.Serve(lis) }()

	var err error
	select {
	case <-ctx.Done():
	case err = <-served:
		err = fmt.Errorf("serve API at %s: %w", lis.Addr(), err)
	}
	c.mu.Lock()
	c.stopping = true
	c.mu.Unlock()
	cancel()
	srv.Stop()
	c.running.Wait()
	return err
}

// Ready waits until the switch is programmed, every server is reachable, and every job's part on the servers is
// installed, or until ctx ends; the error then says what was not ready and why.
func (c *Controller) Ready(ctx context.Context) error {
	for {
		changed := c.links.changed()
		err := c.unready()
		if err == nil {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("controller is not ready: %w", err)
		}
	}
}

// unready returns what is not ready, or nil.
func (c *Controller) unready() error {
	errs := []error{c.links.unready()}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, j := range c.intent.sorted() {
		if err := c.errs[j.spec.Name]; err != nil {
			errs = append(errs, fmt.Errorf("job %q: %w", j.spec.Name, err))
		}
	}
	return errors.Join(errs...)
}

// wanted returns what an owner wants installed: nothing where no job has the id any more.
func (c *Controller) wanted(owner uint16) objects {
	want, _ := c.wants(owner)
	return want
}

// wants is wanted, and says how far a recovery of the job is.
func (c *Controller) wants(owner uint16) (objects, recoveringState) {
	if owner == baseOwner {
		return c.base, recoverNot
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if j := c.intent.byID(owner); j != nil {
		return desiredJob(&c.intent, j), j.recovering
	}
	return newObjects(), recoverNot
}

// apply makes the devices have what an owner wants, after what is left of owners that are no more is gone from the
// switch: the owner may have been given their slots, groups and replica numbers.
func (c *Controller) apply(ctx context.Context, owner uint16) error {
	err := c.save()
	c.applying.Lock()
	defer c.applying.Unlock()
	if err == nil {
		err = c.bury(ctx)
	}
	if err == nil {
		err = c.applyOne(ctx, owner)
	}
	c.mu.Lock()
	news := false
	if j := c.intent.byID(owner); j != nil {
		news = fmt.Sprint(err) != fmt.Sprint(c.errs[j.spec.Name])
		c.errs[j.spec.Name] = err
	}
	c.mu.Unlock()
	if news { // and only then: who waits for a change tries again
		c.links.announce()
	}
	return err
}

// bury removes what is installed of incarnations that are no more. A server that cannot be reached keeps its part until
// it is back, which harms nobody; only what is left on the switch is an error. c.applying is held.
func (c *Controller) bury(ctx context.Context) error {
	var errs []error
	for _, owner := range slices.Sorted(maps.Keys(c.have)) {
		c.mu.Lock()
		alive := owner == baseOwner || c.intent.byID(owner) != nil
		c.mu.Unlock()
		if alive {
			continue
		}
		if err := c.applyOne(ctx, owner); err != nil {
			if len(c.have[owner].entities) > 0 {
				errs = append(errs, fmt.Errorf("remove what is left of job %d: %w", owner, err))
			} else {
				c.log.Warn("a server still has the plan of a job that is no more", "job", owner, "err", err)
			}
		}
	}
	return errors.Join(errs...)
}

// applyOne carries out the steps from what an owner has to what it wants. It stops at the first that fails, but tries
// every removal from a server: nothing depends on those. Of a job whose ranks are being stopped it leaves everything as
// it is. c.applying is held.
func (c *Controller) applyOne(ctx context.Context, owner uint16) error {
	want, recovers := c.wants(owner)
	if recovers == recoverHeld {
		return nil
	}
	have, ok := c.have[owner]
	if !ok {
		have = newObjects()
		c.have[owner] = have
	}
	var errs []error
	steps := diff(have, want)
	if recovers == recoverInstalling {
		steps = breakFirst(steps)
	}
	for _, s := range steps {
		sent, err := c.do(ctx, s)
		if err == nil {
			s.done(have, want)
			continue
		}
		if sent {
			s.doubted(have, want)
		}
		errs = append(errs, fmt.Errorf("%s: %w", s, err))
		if !s.remove || s.server == "" {
			break
		}
	}
	if have.empty() {
		delete(c.have, owner)
	}
	return errors.Join(errs...)
}

// do carries out a step. sent is false when nothing left for the device.
func (c *Controller) do(ctx context.Context, s step) (sent bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	if s.server != "" {
		return c.doServer(ctx, s)
	}
	session, err := c.links.session()
	if err != nil {
		return false, err
	}
	if s.remove {
		return true, session.Delete(ctx, s.entities...)
	}
	return true, session.Upsert(ctx, s.entities...)
}

func (c *Controller) doServer(ctx context.Context, s step) (sent bool, err error) {
	client, err := c.links.agent(s.server)
	if err != nil {
		return false, err
	}
	if s.remove {
		_, err = client.Remove(ctx, &api.RemoveRequest{Job: uint32(s.key.job), Epoch: uint32(s.key.epoch)})
		return true, err
	}
	if s.arm {
		_, err = client.Arm(ctx, &api.ArmRequest{
			Job: uint32(s.key.job), Epoch: uint32(s.key.epoch), NextEpoch: uint32(s.plan.next),
		})
		return true, err
	}
	_, err = client.Install(ctx, &api.ServerPlan{
		Job:        uint32(s.key.job),
		Epoch:      uint32(s.key.epoch),
		Ranks:      s.plan.ranks,
		Chunks:     s.plan.chunks,
		Rounds:     s.plan.rounds,
		Quorum:     s.plan.quorum,
		WaitUs:     s.plan.waitUS,
		Async:      s.plan.async,
		Staleness:  s.plan.staleness,
		ServiceIp:  c.cfg.Service.IP.String(),
		ServiceMac: c.cfg.Service.MAC.String(),
	})
	return true, err
}

// applyAll applies the base, then every job. What fails is logged and tried again when a device comes back; the base's
// failure alone is returned, since nothing works without it.
func (c *Controller) applyAll(ctx context.Context) error {
	if err := c.apply(ctx, baseOwner); err != nil && !errors.Is(err, errNotReady) {
		return err
	}
	c.mu.Lock()
	var ids []uint16
	for _, j := range c.intent.sorted() {
		ids = append(ids, j.id)
	}
	c.mu.Unlock()
	for _, id := range ids {
		if err := c.apply(ctx, id); err != nil {
			c.log.Warn("job is not installed yet", "job", id, "err", err)
		}
	}
	return nil
}
