// Package transport is the part of a worker that needs no clock and no network: a state machine of all-reduces. Time
// and packets go in, packets and a deadline come out. Package worker drives it over sockets, package sim under
// simulated time through simulated networks.
//
// What is sent when is decided by agg.Window, what a value is on the wire by package scale. This package cuts vectors
// into rounds and rounds into chunks, and takes a RESULT only when it is the sum of what all ranks sent.
package transport
