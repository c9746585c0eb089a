package main

import (
	"context"
	"log/slog"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"xagg/internal/endpoint"
	"xagg/internal/metrics"
)

func metricsFlag(cmd *cobra.Command, address *string) {
	cmd.Flags().StringVar(address, "metrics", "",
		"address to serve metrics for Prometheus at, under "+metrics.Path+": HOST:PORT or unix:PATH; it is not authenticated (default: nowhere)")
}

// withMetrics runs a daemon and serves what the collector says beside it, if there is an address to do it at. Both end
// when one does.
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
	ctx, cancel := context.WithCancel(ctx)
	var group errgroup.Group
	group.Go(func() error {
		defer cancel()
		return metrics.Serve(ctx, lis, log, c)
	})
	group.Go(func() error {
		defer cancel()
		return daemon(ctx)
	})
	return group.Wait()
}
