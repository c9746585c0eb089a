package worker

import (
	"net/netip"
	"time"

	"xagg/wire"
)

// Link carries UDP payloads between a worker and its job's service address. Send and Recv are called by one goroutine
// at a time, Wake by any.
type Link interface {
	// LocalAddr is where the link sends from and receives at.
	LocalAddr() netip.AddrPort
	// Connect sets the peer; the link receives from nobody else. It is called once, before Send and Recv.
	Connect(service wire.Addr) error
	// Send sends payloads in their order and returns how many went out. It does not keep them. An error that another
	// attempt may not meet is one for which [Transient] holds; the rest of the payloads then counts as lost.
	Send(payloads [][]byte) (int, error)
	// Recv waits until something is there, deadline has come or Wake was called, and fills bufs with up to len(bufs)
	// payloads of the given sizes. None and no error means that nothing came. A payload longer than its buffer is cut.
	Recv(bufs [][]byte, sizes []int, deadline time.Time) (int, error)
	// Wake lets the Recv under way, or the next one, return early.
	Wake()
	// Close frees the link. No method may be called after it but Wake and Close.
	Close() error
}
