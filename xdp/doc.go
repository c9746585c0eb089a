// Package xdp is the aggregation server: slots for whole gradients in one arena of memory, filled and answered by the
// XDP program xagg.bpf.c before a packet reaches the network stack, and the [Agent] through which a controller leases
// them to jobs. docs/protocol.md has the rules under "Server slots".
//
// The agent drives a [Store]. [Server] is the one of the XDP program; [Memory] is the same server in user space, built
// on [agg.Server], which takes and returns frames as values and needs no privileges.
package xdp
