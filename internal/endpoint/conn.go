package endpoint

import (
	"context"
	"fmt"
	"net"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
)

// Dialer opens a connection to an address.
type Dialer func(ctx context.Context, address string) (net.Conn, error)

// Conn is a gRPC connection whose errors a person can read. The error of a call that never reached the other side is a
// [*ConnectError] with the reason; another that the other side, or gRPC itself, gave is a [*CallError].
type Conn struct {
	*grpc.ClientConn
	address string

	mu  sync.Mutex
	err error // of the last attempt to connect
}

// connectParams has a connection tried again soon, but for the pauses that gRPC makes otherwise, which grow to two minutes:
// the other side is on the same network, and often it was only started again.
var connectParams = grpc.ConnectParams{
	Backoff:           backoff.Config{BaseDelay: 50 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: time.Second},
	MinConnectTimeout: 5 * time.Second,
}

// Dial returns a connection to an address. It connects with the first call.
func Dial(address string, opts ...grpc.DialOption) (*Conn, error) {
	return DialBy(Connect, address, opts...)
}

// DialBy is [Dial] by another way than the ordinary one; the address is whatever dial makes of it.
func DialBy(dial Dialer, address string, opts ...grpc.DialOption) (*Conn, error) {
	c := &Conn{address: address}
	conn, err := grpc.NewClient("passthrough:///"+address, append([]grpc.DialOption{
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithAuthority("localhost"), // a unix path is none
		grpc.WithNoProxy(),
		grpc.WithConnectParams(connectParams),
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

// Invoke makes a call.
func (c *Conn) Invoke(ctx context.Context, method string, args, reply any, opts ...grpc.CallOption) error {
	return c.explain(c.ClientConn.Invoke(ctx, method, args, reply, opts...))
}

// NewStream begins a call with streams.
func (c *Conn) NewStream(ctx context.Context, desc *grpc.StreamDesc, method string, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	s, err := c.ClientConn.NewStream(ctx, desc, method, opts...)
	if err != nil {
		return nil, c.explain(err)
	}
	return &stream{s, c}, nil
}

type stream struct {
	grpc.ClientStream
	conn *Conn
}

// RecvMsg receives a message. The end of the stream is io.EOF, as ever.
func (s *stream) RecvMsg(m any) error { return s.conn.explain(s.ClientStream.RecvMsg(m)) }

func (c *Conn) explain(err error) error {
	if _, ok := status.FromError(err); !ok || err == nil {
		return err
	}
	if status.Code(err) == codes.Unavailable {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.err != nil {
			return &ConnectError{c.address, c.err}
		}
	}
	return &CallError{err}
}

// ConnectError says that nobody could be reached at an address.
type ConnectError struct {
	Address string
	Err     error
}

// Error names the address and the cause.
func (e *ConnectError) Error() string { return fmt.Sprintf("connect to %s: %v", e.Address, e.Reason()) }

// Reason returns the cause without what package net says of operation and address.
func (e *ConnectError) Reason() error { return cause(e.Err) }

// Unwrap returns the cause.
func (e *ConnectError) Unwrap() error { return e.Err }

// GRPCStatus makes the error UNAVAILABLE.
func (e *ConnectError) GRPCStatus() *status.Status { return status.New(codes.Unavailable, e.Error()) }

// CallError is the error of a call, told in the words of whoever gave it and without gRPC's own.
type CallError struct{ err error }

// Error returns the status message.
func (e *CallError) Error() string { return status.Convert(e.err).Message() }

// Unwrap returns gRPC's error. Its status, code and details are found by [status.FromError] as before.
func (e *CallError) Unwrap() error { return e.err }
