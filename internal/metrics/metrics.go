// Package metrics serves what Prometheus collects of a controller and of an aggregation server, and has the collector of
// the server, which asks its agent. docs/why.md lists all metrics.
package metrics

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// Path is where metrics are served.
const Path = "/metrics"

// Timeout bounds what a collector asks of others for one scrape.
const Timeout = 5 * time.Second

// Desc describes a metric of this program, with its labels: name is without the prefix that all have.
func Desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("xagg_"+name, help, labels, nil)
}

// Handler answers a scrape with what the collectors say, and with nothing else.
func Handler(log *slog.Logger, collectors ...prometheus.Collector) (http.Handler, error) {
	registry := prometheus.NewRegistry()
	for _, c := range collectors {
		if err := registry.Register(c); err != nil {
			return nil, fmt.Errorf("register metrics: %w", err)
		}
	}
	mux := http.NewServeMux()
	mux.Handle("GET "+Path, promhttp.HandlerFor(registry, promhttp.HandlerOpts{
		ErrorLog:            slog.NewLogLogger(log.Handler(), slog.LevelWarn),
		ErrorHandling:       promhttp.ContinueOnError, // a broken metric does not hide the others
		MaxRequestsInFlight: 2,                        // every scrape asks devices
	}))
	return mux, nil
}

// Serve serves metrics on lis until ctx ends, and then returns nil. It closes lis.
func Serve(ctx context.Context, lis net.Listener, log *slog.Logger, collectors ...prometheus.Collector) error {
	handler, err := Handler(log, collectors...)
	if err != nil {
		lis.Close()
		return err
	}
	srv := &http.Server{Handler: handler, ReadHeaderTimeout: Timeout}
	defer context.AfterFunc(ctx, func() { srv.Close() })()
	log.Info("serving metrics", "address", lis.Addr().String(), "path", Path)
	if err := srv.Serve(lis); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve metrics at %s: %w", lis.Addr(), err)
	}
	return nil
}
