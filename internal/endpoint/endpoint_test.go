package endpoint

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"net"
	"os"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
)

func TestCheck(t *testing.T) {
	for address, want := range map[string]string{
		"":                   "is missing; want host:port or unix:PATH",
		"unix:":              `"unix:" has no path`,
		"unix://":            `"unix://" has no path`,
		"nowhere":            `"nowhere" is neither host:port nor unix:PATH`,
		"::1:80":             `"::1:80" is neither host:port nor unix:PATH`,
		"127.0.0.1:99999":    `"127.0.0.1:99999" has no valid port: want a number from 0 to 65535`,
		"127.0.0.1:-1":       `"127.0.0.1:-1" has no valid port: want a number from 0 to 65535`,
		"127.0.0.1:":         `"127.0.0.1:" has no valid port: want a number from 0 to 65535`,
		"127.0.0.1:65535":    "",
		":0":                 "",
		"[::1]:19860":        "",
		"somehost:19860":     "",
		"unix:relative":      "",
		"unix:/run/a b.sock": "",
		"unix:///run/x.sock": "",
	} {
		if got := Check(address); got == nil && want != "" || got != nil && got.Error() != want {
			t.Errorf("Check(%q) = %v, want %q", address, got, want)
		}
	}
}

func TestListenUnix(t *testing.T) {
	dir := t.TempDir()
	for _, address := range []string{"unix:" + dir + "/s", "unix://" + dir + "/t"} {
		first, err := Listen(address)
		if err != nil {
			t.Fatal(err)
		}
		refused(t, address, syscall.EADDRINUSE, "a process is serving there")
		first.(*net.UnixListener).SetUnlinkOnClose(false) // as when its process is killed
		first.Close()
		second, err := Listen(address)
		if err != nil {
			t.Fatalf("a dead process's socket: %v", err)
		}
		second.Close()
	}
	if err := os.WriteFile(dir+"/file", []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	refused(t, "unix:"+dir+"/file", syscall.EADDRINUSE, "or the path is no socket")
	if b, err := os.ReadFile(dir + "/file"); string(b) != "precious" {
		t.Errorf("the file holds %q now (%v)", b, err)
	}
	refused(t, "unix:"+dir+"/none/s", syscall.ENOENT, "make its directory first")
	refused(t, "unix:"+dir+"/"+strings.Repeat("x", 120), syscall.EINVAL, "at most 107 bytes")
}

func TestListenTCP(t *testing.T) {
	lis, err := Listen("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer lis.Close()
	refused(t, lis.Addr().String(), syscall.EADDRINUSE, "'ss -ltnp' shows who has it")
	refused(t, "192.0.2.1:0", syscall.EADDRNOTAVAIL, "none of this machine's addresses") // RFC 5737: nobody's
	var le *ListenError
	if _, err := Listen("127.0.0.1:99999"); err == nil || errors.As(err, &le) || !strings.Contains(err.Error(), "no valid port") {
		t.Errorf("an invalid port: %v", err)
	}
}

// refused checks that listening fails with an error that names the address once, the cause and the cure.
func refused(t *testing.T, address string, errno syscall.Errno, cure string) {
	t.Helper()
	lis, err := Listen(address)
	if err == nil {
		lis.Close()
		t.Errorf("%s: is taken", address)
		return
	}
	_, name := split(address)
	want := "listen at " + name + ": " + errno.Error() + "; "
	var le *ListenError
	if !errors.As(err, &le) || !errors.Is(err, errno) || !strings.HasPrefix(err.Error(), want) || !strings.Contains(err.Error(), cure) {
		t.Errorf("%s: %v\nwant %s... %s", address, err, want, cure)
	}
}

func TestConnErrors(t *testing.T) {
	address := "unix:" + t.TempDir() + "/s"
	conn, err := Dial(address)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	client := healthpb.NewHealthClient(conn)
	calls := map[string]func(...grpc.CallOption) error{
		"call": func(opts ...grpc.CallOption) error {
			_, err := client.Check(t.Context(), &healthpb.HealthCheckRequest{}, opts...)
			return err
		},
		"stream": func(opts ...grpc.CallOption) error {
			s, err := client.Watch(t.Context(), &healthpb.HealthCheckRequest{}, opts...)
			if err == nil {
				_, err = s.Recv()
			}
			return err
		},
	}
	for name, call := range calls {
		err := call()
		var ce *ConnectError
		if !errors.As(err, &ce) || ce.Address != address || !errors.Is(err, fs.ErrNotExist) ||
			status.Code(err) != codes.Unavailable || err.Error() != "connect to "+address+": no such file or directory" {
			t.Errorf("%s, nobody there: %v", name, err)
		}
	}

	// An error of the other side stays what it is, also when it is UNAVAILABLE, but for gRPC's words.
	lis, err := Listen(address)
	if err != nil {
		t.Fatal(err)
	}
	refusal := status.Error(codes.Unavailable, "a server is not ready")
	var ends atomic.Bool // streams, without an error
	srv := grpc.NewServer(
		grpc.UnaryInterceptor(func(context.Context, any, *grpc.UnaryServerInfo, grpc.UnaryHandler) (any, error) {
			return nil, refusal
		}),
		grpc.StreamInterceptor(func(any, grpc.ServerStream, *grpc.StreamServerInfo, grpc.StreamHandler) error {
			if ends.Load() {
				return nil
			}
			return refusal
		}))
	healthpb.RegisterHealthServer(srv, health.NewServer())
	done := make(chan error, 1)
	go func() { done <- srv.Serve(lis) }()
	conn.ResetConnectBackoff()
	for name, call := range calls {
		err := call(grpc.WaitForReady(true))
		var ce *CallError
		if !errors.As(err, &ce) || err.Error() != "a server is not ready" || status.Code(err) != codes.Unavailable ||
			status.Convert(err).Message() != "a server is not ready" {
			t.Errorf("%s: the other side's error became %v", name, err)
		}
	}
	ends.Store(true)
	if err := calls["stream"](); err != io.EOF {
		t.Errorf("the end of a stream became %v", err)
	}
	srv.Stop()
	if err := <-done; err != nil {
		t.Error(err)
	}
}
