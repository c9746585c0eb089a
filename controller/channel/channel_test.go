package channel

import (
	"context"
	"errors"
	"io/fs"
	"net"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
)

func TestExplain(t *testing.T) {
	address := "unix:" + t.TempDir() + "/s"
	c, err := New(address, Dial)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	client := healthpb.NewHealthClient(c)
	call := func() error {
		_, err := client.Check(t.Context(), &healthpb.HealthCheckRequest{})
		return c.Explain(err)
	}
	err = call()
	var cerr *ConnectError
	if !errors.As(err, &cerr) || cerr.Address != address || !errors.Is(err, fs.ErrNotExist) || status.Code(err) != codes.Unavailable {
		t.Errorf("nobody there: %v", err)
	}

	// An error of the other side stays what it is, also when it is UNAVAILABLE.
	lis, err := net.Listen("unix", address[len("unix:"):])
	if err != nil {
		t.Fatal(err)
	}
	srv := grpc.NewServer(grpc.UnaryInterceptor(func(context.Context, any, *grpc.UnaryServerInfo, grpc.UnaryHandler) (any, error) {
		return nil, status.Error(codes.Unavailable, "a server is not ready")
	}))
	healthpb.RegisterHealthServer(srv, health.NewServer())
	done := make(chan error, 1)
	go func() { done <- srv.Serve(lis) }()
	c.ResetConnectBackoff()
	_, err = client.Check(t.Context(), &healthpb.HealthCheckRequest{}, grpc.WaitForReady(true))
	if err = c.Explain(err); errors.As(err, &cerr) || status.Convert(err).Message() != "a server is not ready" {
		t.Errorf("the other side's error became %v", err)
	}
	if c.Explain(nil) != nil {
		t.Error("no error is explained")
	}
	srv.Stop()
	if err := <-done; err != nil {
		t.Error(err)
	}
}
