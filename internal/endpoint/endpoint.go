// Package endpoint is where gRPC servers of the control plane listen, and how their clients reach them: without TLS,
// which the operator's network or ssh has to provide, at addresses of the form host:port or unix:PATH. Its errors are
// for the person who gave the address.
package endpoint

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// Check checks the form of an address: host:port with a port number in 0..65535, or unix:PATH. The host may be a name,
// or empty for all of the machine's addresses.
func Check(address string) error {
	if address == "" {
		return errors.New("is missing; want host:port or unix:PATH")
	}
	network, name := split(address)
	if network == "unix" {
		if name == "" {
			return fmt.Errorf("%q has no path", address)
		}
		return nil
	}
	_, port, err := net.SplitHostPort(name)
	if err != nil {
		return fmt.Errorf("%q is neither host:port nor unix:PATH", address)
	}
	if _, err := strconv.ParseUint(port, 10, 16); err != nil {
		return fmt.Errorf("%q has no valid port: want a number from 0 to 65535", address)
	}
	return nil
}

// split returns what package net calls an address. gRPC's own spelling unix:///PATH is known too.
func split(address string) (network, name string) {
	if path, ok := strings.CutPrefix(address, "unix:"); ok {
		return "unix", strings.TrimPrefix(path, "//")
	}
	return "tcp", address
}

// Listen opens a listener at an address, which must be as [Check] wants it. A unix socket that a dead process has left
// behind is replaced; one that answers is in use. What the machine refuses is a [*ListenError].
func Listen(address string) (net.Listener, error) {
	if err := Check(address); err != nil {
		return nil, fmt.Errorf("listen: address %w", err)
	}
	network, name := split(address)
	lis, err := net.Listen(network, name)
	if network == "unix" && errors.Is(err, syscall.EADDRINUSE) && dead(name) {
		if err := os.Remove(name); err != nil {
			return nil, fmt.Errorf("listen: replace the socket of a dead process: %w", err)
		}
		lis, err = net.Listen(network, name)
	}
	if err != nil {
		return nil, NewListenError(network, name, err)
	}
	return lis, nil
}

// dead reports whether a path is a socket that no process listens at.
func dead(path string) bool {
	if info, err := os.Lstat(path); err != nil || info.Mode().Type() != os.ModeSocket {
		return false
	}
	conn, err := net.DialTimeout("unix", path, time.Second)
	if err == nil {
		conn.Close()
	}
	return errors.Is(err, syscall.ECONNREFUSED)
}

// Connect opens a connection to an address. It is the [Dialer] of [Dial].
func Connect(ctx context.Context, address string) (net.Conn, error) {
	network, name := split(address)
	return new(net.Dialer).DialContext(ctx, network, name)
}

// ListenError says that the machine does not let a process listen at an address, why, and what to do about it.
type ListenError struct {
	Network string // "tcp", "udp" or "unix"
	Address string
	Err     error
}

// NewListenError returns the error for one of package net's.
func NewListenError(network, address string, err error) *ListenError {
	return &ListenError{network, address, cause(err)}
}

// Error names the address, the cause and the cure.
func (e *ListenError) Error() string {
	s := fmt.Sprintf("listen at %s: %v", e.Address, e.Err)
	if cure := e.cure(); cure != "" {
		s += "; " + cure
	}
	return s
}

// Unwrap returns the cause.
func (e *ListenError) Unwrap() error { return e.Err }

func (e *ListenError) cure() string {
	is := func(errno syscall.Errno) bool { return errors.Is(e.Err, errno) }
	switch {
	case is(syscall.EADDRINUSE) && e.Network == "unix":
		return "a process is serving there, or the path is no socket: choose another path"
	case is(syscall.EADDRINUSE) && e.Network == "udp":
		return "'ss -lunp' shows who has it: end that process, or choose another port; port 0 takes a free one"
	case is(syscall.EADDRINUSE):
		return "'ss -ltnp' shows who has it: end that process, or choose another address"
	case is(syscall.EADDRNOTAVAIL):
		return "it is none of this machine's addresses, which 'ip address' lists"
	case is(syscall.ENOENT) && e.Network == "unix":
		return "make its directory first"
	case is(syscall.EINVAL) && e.Network == "unix":
		return "the path of a socket has at most 107 bytes"
	case is(syscall.EACCES) && e.Network == "unix":
		return "choose a directory that this user may write"
	case is(syscall.EACCES):
		return "ports below 1024 need root: choose another port"
	}
	return ""
}

// cause strips what package net puts before the reason: operation, network and address, which our errors name
// themselves.
func cause(err error) error {
	if op, ok := errors.AsType[*net.OpError](err); ok {
		err = op.Err
	}
	if sys, ok := errors.AsType[*os.SyscallError](err); ok {
		err = sys.Err
	}
	return err
}
