package netns

import (
	"errors"
	"fmt"
	"sync"

	"xagg/bmv2/fault"
	"xagg/bmv2/port"
)

// relay carries frames over the middle of a faulty link, in user space: what a bridge would do, and the faults.
type relay struct {
	up, down *port.Port
	group    sync.WaitGroup

	mu  sync.Mutex
	err error
}

// relay joins the two interfaces in the middle of the link of a switch port. The lab holds it until it is closed.
func (l *Lab) relay(middle *space, number uint16) error {
	r := &relay{}
	err := onThread(func() error {
		return middle.enter(func() (err error) {
			if r.up, err = port.Open(middleUp, port.Options{}); err != nil {
				return err
			}
			if r.down, err = port.Open(middleDown, port.Options{}); err != nil {
				r.up.Close()
			}
			return err
		})
	})
	if err != nil {
		return fmt.Errorf("join the interfaces of %s by a relay: %w", middle.name, err)
	}
	l.closers = append(l.closers, r)
	r.carry(l.injector, number, fault.In, r.down, r.up)
	r.carry(l.injector, number, fault.Out, r.up, r.down)
	return nil
}

// carry starts one direction.
func (r *relay) carry(injector *fault.Injector, number uint16, dir fault.Direction, from, to *port.Port) {
	// A closed port means that the lab is being closed; a frame that an interface does not take is lost, as on a wire.
	// A path has one frame at a time, so that to has one sender.
	send := func(frame []byte) { _ = to.Send([][]byte{frame}) }
	if path := injector.Path(number, dir, send); path != nil {
		send = path.Send
	}
	r.group.Go(func() {
		if err := from.Receive(func(frame []byte, _ port.Meta) { send(frame) }); err != nil {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.err = errors.Join(r.err, fmt.Errorf("relay at port %d, direction %v: %w", number, dir, err))
		}
	})
}

// Close implements [io.Closer]. It returns what has ended the relay before.
func (r *relay) Close() error {
	err := errors.Join(r.up.Close(), r.down.Close())
	r.group.Wait()
	return errors.Join(err, r.err)
}

// Faults returns what Spec.Faults have done so far.
func (l *Lab) Faults() []fault.PathCounts { return l.injector.Counts() }
