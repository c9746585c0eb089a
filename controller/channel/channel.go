// Package channel makes the gRPC connections of the control plane: without TLS, which the operator's network or ssh
// has to provide, to addresses of the form host:port or unix:PATH.
package channel

import (
	"context"
	"fmt"
	"net"
	"strings"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
)

// Dialer opens a connection to an address.
type Dialer func(ctx context.Context, address string) (net.Conn, error)

// Dial is the ordinary [Dialer]: it connects to host:port or unix:PATH.
func Dial(ctx context.Context, address string) (net.Conn, error) {
	var d net.Dialer
	if path, ok := strings.CutPrefix(address, "unix:"); ok {
		return d.DialContext(ctx, "unix", path)
	}
	return d.DialContext(ctx, "tcp", address)
}

// Channel is a gRPC connection that knows why it is not there.
type Channel struct {
	*grpc.ClientConn
	address string

	mu  sync.Mutex
	err error // of the last attempt to connect
}

// New returns a channel to address. It connects with the first call.
func New(address string, dial Dialer, opts ...grpc.DialOption) (*Channel, error) {
	c := &Channel{address: address}
	conn, err := grpc.NewClient("passthrough:///"+address, append([]grpc.DialOption{
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithAuthority("localhost"), // a unix path is none
		grpc.WithNoProxy(),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			conn, err := dial(ctx, address)
			c.mu.Lock()
			c.err = err
			c.mu.Unlock()
			return conn, err
		}),
	}, opts...)...)
	if err != nil {
		return nil, fmt.Errorf("connect to %s: %w", address, err)
	}
	c.ClientConn = conn
	return c, nil
}

// ConnectError says that nobody could be reached at an address.
type ConnectError struct {
	Address string
	Err     error
}

// Error names the address and the cause.
func (e *ConnectError) Error() string { return fmt.Sprintf("connect to %s: %v", e.Address, e.Err) }

// Unwrap returns the cause.
func (e *ConnectError) Unwrap() error { return e.Err }

// GRPCStatus makes the error UNAVAILABLE.
func (e *ConnectError) GRPCStatus() *status.Status { return status.New(codes.Unavailable, e.Error()) }

// Explain returns a [*ConnectError] for the error of a call that never reached the other side, and err for others.
func (c *Channel) Explain(err error) error {
	if status.Code(err) != codes.Unavailable {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err == nil {
		return err
	}
	return &ConnectError{c.address, c.err}
}
