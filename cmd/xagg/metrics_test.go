package main

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"xagg/internal/endpoint"
)

// brokenListener accepts nobody, and tells when it was closed.
type brokenListener struct {
	net.Listener
	closed chan struct{}
}

func (l *brokenListener) Accept() (net.Conn, error) { return nil, errors.New("too many open files") }

func (l *brokenListener) Close() error {
	close(l.closed)
	return l.Listener.Close()
}

// TestDaemonOutlivesMetrics: a daemon goes on when its metrics cannot be served any more, and what it returns counts.
func TestDaemonOutlivesMetrics(t *testing.T) {
	lis, err := endpoint.Listen("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var log bytes.Buffer
	broken := &brokenListener{lis, make(chan struct{})}
	over := errors.New("the daemon's own end")
	err = besideMetrics(t.Context(), slog.New(slog.NewTextHandler(&log, nil)), broken, prometheus.NewGoCollector(), func(ctx context.Context) error {
		<-broken.closed
		if ctx.Err() != nil {
			t.Error("the daemon is told to end")
		}
		return over
	})
	if err != over {
		t.Errorf("got %v, want %v", err, over)
	}
	if !strings.Contains(log.String(), "metrics are not served any more") || !strings.Contains(log.String(), "too many open files") {
		t.Errorf("log has %s", log.String())
	}
}

// TestMetricsAddressIsTaken: that is said before the daemon begins.
func TestMetricsAddressIsTaken(t *testing.T) {
	lis, err := endpoint.Listen("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer lis.Close()
	err = withMetrics(t.Context(), slog.New(slog.DiscardHandler), lis.Addr().String(), prometheus.NewGoCollector(), func(context.Context) error {
		t.Error("the daemon has begun")
		return nil
	})
	if err == nil || !strings.Contains(err.Error(), "address already in use") {
		t.Errorf("got %v", err)
	}
}
