// Package agg states the aggregation rules of docs/protocol.md as pure state machines: [Switch] (the slots of a
// programmable switch), [Server] (the slots of an aggregation server) and [Window] (a worker's side). They take
// packets and time as values and return what to do; no clock, socket, goroutine or randomness is inside.
//
// The package is at once the oracle that the P4 program and the XDP program are compared with, and the user-space
// aggregator of the in-process lab.
package agg
