package main

import (
	"context"
	"log/slog"
	"net"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"

	"xagg/internal/endpoint"
	"xagg/internal/metrics"
)

func metricsFlag(cmd *cobra.Command, address *string) {
	cmd.Flags().StringVar(address, "metrics", "",
		"address to serve metrics for Prometheus at, under "+metrics.Path+": HOST:PORT or unix:PATH; it is not authenticated (default: nowhere)")
}

// withMetrics runs a daemon and serves what the collector says beside it, if there is an address to do it at. An address that
// cannot be had is an error before the daemon begins.
func withMetrics(ctx context.Context, log *slog.Logger, address string, c prometheus.Collector, daemon func(context.Context) error) error {
	if address == "" {
		return daemon(ctx)
	}
	if err := endpoint.Check(address); err != nil {
		return usagef("--metrics %w", err)
	}
	lis, err := endpoint.Listen(address)
	if err != nil {
		return err
	}
	return besideMetrics(ctx, log, lis, c, daemon)
}

// besideMetrics runs a daemon and serves metrics on lis as long as it runs. Metrics that cannot be served any more are a line
// in the log, and no reason to end what jobs need.
func besideMetrics(ctx context.Context, log *slog.Logger, lis net.Listener, c prometheus.Collector, daemon func(context.Context) error) error {
	serving, cancel := context.WithCancel(ctx)
	var done sync.WaitGroup
	done.Go(func() {
		if err := metrics.Serve(serving, lis, log, c); err != nil {
			log.Error("metrics are not served any more; a restart serves them again", "err", err)
		}
	})
	defer done.Wait()
	defer cancel()
	return daemon(ctx)
}
