package capture

import (
	"errors"
	"sync"
	"time"

	"xagg/bmv2/port"
)

// Interface is a network interface to capture on.
type Interface struct {
	Name string
	// Label is the interface's name in the file; empty means Name.
	Label string
}

// Capture copies all frames of some network interfaces to a file until it is closed. Directions are the host's: In
// is what came in by the interface.
type Capture struct {
	w     *Writer
	ports []*port.Port
	group sync.WaitGroup
	once  sync.Once
	mu    sync.Mutex
	err   error
}

// Start begins to capture. netns is the path of the network namespace that the interfaces are in, empty for the
// caller's. When it returns, every frame that passes an interface from then on is in the file.
func Start(file, netns string, interfaces []Interface) (*Capture, error) {
	c := &Capture{}
	var err error
	for _, i := range interfaces {
		var p *port.Port
		if p, err = port.Open(i.Name, port.Options{NetNS: netns, Outgoing: true, Timestamps: true}); err != nil {
			break
		}
		c.ports = append(c.ports, p)
	}
	if err == nil {
		c.w, err = Create(file)
	}
	if err != nil {
		for _, p := range c.ports {
			p.Close()
		}
		return nil, err
	}
	for i, p := range c.ports {
		label := interfaces[i].Label
		if label == "" {
			label = interfaces[i].Name
		}
		id := c.w.AddInterface(label)
		c.group.Go(func() {
			err := p.Receive(func(frame []byte, m port.Meta) {
				d := In
				if m.Outgoing {
					d = Out
				}
				if m.Time.IsZero() {
					m.Time = time.Now()
				}
				c.w.Write(id, m.Time, d, frame)
			})
			c.mu.Lock()
			c.err = errors.Join(c.err, err)
			c.mu.Unlock()
		})
	}
	return c, nil
}

// Close ends the capture, once everything that passed until now is written, and returns what went wrong meanwhile. It
// may be called more than once.
func (c *Capture) Close() error {
	c.once.Do(func() {
		var errs []error
		for _, p := range c.ports {
			errs = append(errs, p.Finish())
		}
		c.group.Wait()
		for _, p := range c.ports {
			errs = append(errs, p.Close())
		}
		c.err = errors.Join(c.err, errors.Join(errs...), c.w.Close())
	})
	return c.err
}
