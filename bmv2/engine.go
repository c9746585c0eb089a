package bmv2

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	p4v1 "github.com/p4lang/p4runtime/go/p4/v1"
	"google.golang.org/grpc"

	"xagg/bmv2/capture"
	"xagg/bmv2/engine"
	"xagg/bmv2/fault"
	"xagg/bmv2/p4rt"
	"xagg/bmv2/port"
	"xagg/internal/endpoint"
)

const (
	// queueDepth is the number of frames that wait at a port; more are dropped. It is simple_switch's.
	queueDepth = 64
	// memoryDepth is the same for ports in memory. Nothing there limits the rate but when a port's goroutine gets a
	// processor, and what waits for that would, behind a network interface, wait in the receiver's socket buffer.
	memoryDepth = 1024
	maxPort     = DropPort - 1
)

// Engine is the embedded switch. Packets are processed one at a time, in the goroutine that brings them: that of a
// network interface's reader, or the caller of Inject. A switch that is busy so slows its senders down, as
// simple_switch's input buffer does. Behind it each port has a queue of 64 frames (in memory 1,024) that drops when it
// is full, so that a port whose reader stops does not stall the others.
//
// Ports are network interfaces (Config.Ports) or, for a switch in memory, functions (Attach and Inject).
type Engine struct {
	cfg    Config
	log    *slog.Logger
	server *p4rt.Server
	grpc   *grpc.Server
	start  time.Time
	addr   string
	pcap   *capture.Writer
	faults *fault.Injector // nil when there are none

	ingress sync.Mutex // one packet at a time, and time does not run backwards between them
	prog    atomic.Pointer[engine.Program]
	outputs [DropPort]atomic.Pointer[output]

	mu     sync.Mutex // guards what follows
	ports  []*port.Port
	closed bool
	done   chan struct{}
	group  sync.WaitGroup
}

// output is the queue of a port.
type output struct {
	queue   chan *[]byte
	dropped atomic.Uint64
	tap     int         // interface number in the capture, -1 = none
	in      *fault.Path // what frames pass on their way into the switch; nil = nothing
	out     *fault.Path // the same on their way out
}

// frames recycles the memory of frames in queues.
var frames = sync.Pool{New: func() any { b := make([]byte, 0, 2048); return &b }}

// NewEngine loads cfg.Program (if any), opens cfg.Ports and the capture file, and starts forwarding. It does not
// listen: call Serve, or use StartEngine. An error names the interface, file or program construct that is at fault;
// one of the machine's is an [EnvironmentError].
func NewEngine(cfg Config) (*Engine, error) {
	if err := cfg.check(); err != nil {
		return nil, fmt.Errorf("start switch: %w", err)
	}
	e := &Engine{cfg: cfg, log: cfg.Log, start: time.Now(), done: make(chan struct{})}
	if e.log == nil {
		e.log = slog.New(slog.DiscardHandler)
	}
	if err := e.setup(); err != nil {
		return nil, errors.Join(fmt.Errorf("start switch: %w", err), e.Close())
	}
	return e, nil
}

func (e *Engine) setup() error {
	if e.cfg.Program != nil {
		p, err := engine.Load(e.cfg.Program, engine.Options{DropPort: DropPort})
		if err != nil {
			return err
		}
		e.prog.Store(p)
	}
	rt := p4rt.Config{
		DeviceID: e.cfg.DeviceID, Options: engine.Options{DropPort: DropPort}, Log: e.log,
		Commit: func(p *engine.Program) { e.prog.Store(p) },
	}
	if e.cfg.CPUPort != 0 {
		rt.PacketOut = func(frame []byte) error { return e.process(e.cfg.CPUPort, frame) }
	}
	if len(e.cfg.Faults) != 0 {
		e.faults = fault.NewInjector(e.cfg.Faults)
	}
	e.server = p4rt.New(rt)
	e.grpc = grpc.NewServer(grpc.MaxRecvMsgSize(p4rt.MaxMessage), grpc.MaxSendMsgSize(p4rt.MaxMessage))
	p4v1.RegisterP4RuntimeServer(e.grpc, e.server)
	if e.cfg.PcapFile != "" {
		w, err := capture.Create(e.cfg.PcapFile)
		if err != nil {
			return environment(err, "choose a file that can be written")
		}
		e.pcap = w
	}
	if e.cfg.CPUPort != 0 {
		// Packet-ins have a header of their own in front of Ethernet and do not go into the capture.
		e.output(e.cfg.CPUPort, &output{tap: -1}, queueDepth, func(batch []*[]byte) {
			for _, f := range batch {
				e.server.PacketIn(*f)
			}
		})
	}
	for number, iface := range e.cfg.Ports {
		if err := e.open(number, iface); err != nil {
			return err
		}
	}
	return nil
}

// open makes a network interface a port.
func (e *Engine) open(number uint16, iface string) error {
	p, err := port.Open(iface, port.Options{Down: func() {
		e.log.Warn("the port's interface is down or gone: frames pass again when it is up (ip link set "+iface+" up); "+
			"if it was deleted, make it again and restart the switch", "port", number, "interface", iface)
	}})
	if err != nil {
		return environment(fmt.Errorf("port %d: %w", number, err), "")
	}
	e.mu.Lock()
	e.ports = append(e.ports, p)
	e.mu.Unlock()
	o := e.link(number, fmt.Sprintf("port %d (%s)", number, iface))
	var views [][]byte
	e.output(number, o, queueDepth, func(batch []*[]byte) {
		views = views[:0]
		for _, f := range batch {
			views = append(views, *f)
		}
		if err := p.Send(views); err != nil && !errors.Is(err, os.ErrClosed) {
			e.log.Error("port stopped sending", "port", number, "err", err)
		}
	})
	e.group.Go(func() {
		err := p.Receive(func(frame []byte, _ port.Meta) { _ = e.receive(number, frame) })
		if c := p.Counts(); c.Partial != 0 {
			e.log.Warn("frames came with unfinished checksums: turn off the tx offload of the port's peer",
				"port", number, "interface", iface, "frames", c.Partial)
		}
		if err != nil {
			e.log.Error("port stopped receiving", "port", number, "err", err)
		}
	})
	return nil
}

// link prepares a port that is not the CPU's.
func (e *Engine) link(number uint16, name string) *output {
	o := &output{tap: e.tap(name)}
	if e.faults != nil {
		o.in = e.faults.Path(number, fault.In, func(frame []byte) { _ = e.process(number, frame) })
		o.out = e.faults.Path(number, fault.Out, func(frame []byte) { o.push(frame) })
	}
	return o
}

func (e *Engine) tap(name string) int {
	if e.pcap == nil {
		return -1
	}
	return e.pcap.AddInterface(name)
}

// output starts the queue of a port and gives its frames to send, several at a time where they have piled up.
func (e *Engine) output(number uint16, o *output, depth int, send func(batch []*[]byte)) {
	o.queue = make(chan *[]byte, depth)
	e.outputs[number].Store(o)
	e.group.Go(func() {
		var batch []*[]byte
		for {
			select {
			case f := <-o.queue:
				batch = append(batch[:0], f)
			case <-e.done:
				return
			}
		more:
			for len(batch) < port.Batch {
				select {
				case f := <-o.queue:
					batch = append(batch, f)
				default:
					break more
				}
			}
			send(batch)
			for _, f := range batch {
				frames.Put(f)
			}
		}
	})
}

// Attach makes recv the reader of a port in memory: it is called with every frame the switch sends out of the port,
// one at a time, in a goroutine of the port's own. The frame is valid only during the call. It is an error if the
// port is in use, is the CPU port or is above 510.
func (e *Engine) Attach(number uint16, recv func(frame []byte)) error {
	switch {
	case number > maxPort:
		return fmt.Errorf("attach port %d: the last port is %d", number, maxPort)
	case number == e.cfg.CPUPort && number != 0:
		return fmt.Errorf("attach port %d: it is the CPU port", number)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return fmt.Errorf("attach port %d: %w", number, ErrClosed)
	}
	if e.outputs[number].Load() != nil {
		return fmt.Errorf("attach port %d: it is in use", number)
	}
	e.output(number, e.link(number, fmt.Sprintf("port %d", number)), memoryDepth, func(batch []*[]byte) {
		for _, f := range batch {
			recv(*f)
		}
	})
	return nil
}

// Inject hands the switch a frame as received on a port, which need not be attached, and returns when its copies are
// in the queues of the ports they leave by (or, where Config.Faults hold, wait to come there). The frame is not kept.
// It returns ErrClosed once the switch is closed.
func (e *Engine) Inject(number uint16, frame []byte) error {
	if number > maxPort {
		return fmt.Errorf("inject at port %d: the last port is %d", number, maxPort)
	}
	return e.receive(number, frame)
}

// receive takes a frame that comes over the link of a port.
func (e *Engine) receive(number uint16, frame []byte) error {
	if e.faults != nil {
		if o := e.outputs[number].Load(); o != nil && o.in != nil {
			select {
			case <-e.done:
				return ErrClosed
			default:
			}
			o.in.Send(frame)
			return nil
		}
	}
	return e.process(number, frame)
}

// process runs one frame through the switch.
func (e *Engine) process(number uint16, frame []byte) error {
	select {
	case <-e.done:
		return ErrClosed
	default:
	}
	e.ingress.Lock()
	defer e.ingress.Unlock()
	if e.pcap != nil {
		if o := e.outputs[number].Load(); o != nil && o.tap >= 0 {
			e.pcap.Write(o.tap, time.Now(), capture.In, frame)
		}
	}
	if p := e.prog.Load(); p != nil {
		p.Process(number, frame, uint64(time.Since(e.start).Microseconds()), e.emit)
	}
	return nil
}

// emit sends a frame out of its port.
func (e *Engine) emit(number uint16, frame []byte) {
	if number > maxPort {
		return
	}
	o := e.outputs[number].Load()
	if o == nil {
		return
	}
	if o.out != nil {
		o.out.Send(frame)
	} else if !o.push(frame) {
		return
	}
	if e.pcap != nil && o.tap >= 0 {
		e.pcap.Write(o.tap, time.Now(), capture.Out, frame)
	}
}

// push puts a copy of the frame in the queue and reports whether there was room.
func (o *output) push(frame []byte) bool {
	b := frames.Get().(*[]byte)
	*b = append((*b)[:0], frame...)
	select {
	case o.queue <- b:
		return true
	default:
		o.dropped.Add(1)
		frames.Put(b)
		return false
	}
}

// Faults returns what Config.Faults have done so far, for every port that was opened or attached and is faulty.
func (e *Engine) Faults() []fault.PathCounts {
	if e.faults == nil {
		return nil
	}
	return e.faults.Counts()
}

// Dropped returns the number of frames that found a port's queue full.
func (e *Engine) Dropped(number uint16) uint64 {
	if number > maxPort {
		return 0
	}
	if o := e.outputs[number].Load(); o != nil {
		return o.dropped.Load()
	}
	return 0
}

// StartEngine is NewEngine, and then Serve in the background at cfg.GRPCAddr.
func StartEngine(cfg Config) (*Engine, error) {
	addr := cfg.GRPCAddr
	if addr == "" {
		addr = DefaultGRPCAddr
	}
	lis, err := endpoint.Listen(addr)
	if err != nil {
		return nil, fmt.Errorf("start switch: %w", refusedAddress(err))
	}
	e, err := NewEngine(cfg)
	if err != nil {
		lis.Close()
		return nil, err
	}
	if e.addr = addr; !strings.HasPrefix(addr, "unix:") {
		e.addr = lis.Addr().String()
	}
	e.group.Go(func() {
		if err := e.Serve(lis); err != nil {
			e.log.Error("P4Runtime server stopped", "err", err)
		}
	})
	return e, nil
}

// Serve answers P4Runtime on lis (TCP, unix or an in-memory listener) until Close; it may be called for several
// listeners at once. It returns nil after Close, and the listener's error otherwise. It closes lis.
func (e *Engine) Serve(lis net.Listener) error {
	err := e.grpc.Serve(lis)
	select {
	case <-e.done:
		return nil
	default:
	}
	if err != nil {
		return fmt.Errorf("serve P4Runtime at %s: %w", lis.Addr(), err)
	}
	return nil
}

// Name implements [Target].
func (e *Engine) Name() string { return "engine" }

// GRPCAddr implements [Target]: the address StartEngine listens at, with the real port where port 0 was asked for.
func (e *Engine) GRPCAddr() string { return e.addr }

// Close implements [Target]. Frames that wait in queues are dropped.
func (e *Engine) Close() error {
	e.mu.Lock()
	if e.closed {
		e.mu.Unlock()
		return nil
	}
	e.closed = true
	close(e.done)
	ports := e.ports
	e.mu.Unlock()
	if e.grpc != nil {
		e.grpc.Stop()
	}
	if e.faults != nil {
		e.faults.Close()
	}
	var errs []error
	for _, p := range ports {
		errs = append(errs, p.Close())
	}
	e.group.Wait()
	for _, c := range e.Faults() {
		e.log.Info("frames passed a faulty link", "port", c.Port, "direction", c.Direction, "frames", c.Frames, "dropped", c.Dropped,
			"duplicated", c.Duplicated, "reordered", c.Reordered, "delayed", c.Delayed, "corrupted", c.Corrupted)
	}
	for number := range e.outputs {
		if n := e.Dropped(uint16(number)); n != 0 {
			e.log.Warn("frames were dropped at a full queue", "port", number, "frames", n)
		}
	}
	if e.pcap != nil {
		errs = append(errs, e.pcap.Close())
	}
	return errors.Join(errs...)
}
