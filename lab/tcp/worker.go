package tcp

import (
	"context"
	"fmt"
	"io"
	"net"
	"time"
)

// Worker is a worker's end of a job.
type Worker struct {
	conn  net.Conn
	elems int
}

// NewWorker introduces a worker to the server at the other end of conn, which the worker owns from now on.
func NewWorker(conn net.Conn, rank, ranks, elems int) (*Worker, error) {
	h := []hello{{magic, uint32(rank), uint32(ranks), uint32(elems)}}
	if _, err := conn.Write(bytesOf(h)); err != nil {
		conn.Close()
		return nil, fmt.Errorf("introduce worker %d to the TCP aggregator: %w", rank, err)
	}
	return &Worker{conn: conn, elems: elems}, nil
}

// AllReduce replaces data by the sum of all workers' data. After an error the worker is of no further use.
func (w *Worker) AllReduce(ctx context.Context, data []float32) error {
	if len(data) != w.elems {
		return fmt.Errorf("all-reduce over TCP: %d values, want %d", len(data), w.elems)
	}
	// A deadline in the past ends reads and writes at once.
	defer context.AfterFunc(ctx, func() { w.conn.SetDeadline(time.Unix(1, 0)) })()
	parts := (len(data) + part - 1) / part
	sent := make(chan error, parts) // a result per part
	go func() {
		defer close(sent)
		for rest := data; len(rest) > 0; rest = rest[min(part, len(rest)):] {
			_, err := w.conn.Write(bytesOf(rest[:min(part, len(rest))]))
			if sent <- err; err != nil {
				return
			}
		}
	}()
	var err error
	for rest := data; len(rest) > 0 && err == nil; rest = rest[min(part, len(rest)):] {
		if err = <-sent; err == nil { // nobody has its sum before it is sent, and only then may it be overwritten
			_, err = io.ReadFull(w.conn, bytesOf(rest[:min(part, len(rest))]))
		}
	}
	if err != nil {
		w.conn.Close() // ends the writer
	}
	for range sent {
	}
	if ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		return fmt.Errorf("all-reduce over TCP: %w", err)
	}
	return nil
}

// Close closes the connection.
func (w *Worker) Close() error { return w.conn.Close() }
