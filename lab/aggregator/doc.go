// Package aggregator measures how much processor time a server needs to sum gradients: the XDP server beside the TCP
// aggregator of package tcp, with the same bytes on the same processors, in turn. It needs root, and a lab of network
// namespaces that it makes and removes.
//
//	load (namespace "switch")                     aggregator (a namespace of its own)
//	┌─────────────────────────────────┐   veth   ┌────────────────────────────────────┐
//	│ live frames, UDP or TCP sockets ├──────────┤ XDP server, or TCP aggregator      │
//	│ XDP program that compares all   │          │                                    │
//	└─────────────────────────────────┘          └────────────────────────────────────┘
//
// # What is fed
//
// Frames: BPF_PROG_RUN with BPF_F_TEST_XDP_LIVE_FRAMES has the kernel run a program of the load (load.bpf.c) on frames of a
// page pool; the program writes the next contribution into each and sends it with XDP_TX, as which the kernel redirects
// it to the aggregator's end of the link. There a NAPI poll takes it from a ring, runs the server's program and
// sends the answer by XDP_TX, as a driver with native XDP does. No socket buffer exists anywhere.
//
// Sockets: the same contributions from UDP sockets, a group in a system call (sendmmsg). The veth copies them into frames
// for the program.
//
// TCP: every worker streams its vector over a connection of its own, in pieces of 64 KiB, and sends a piece of the next
// round when it has the sum of this one's. Its links carry no XDP program. One kind has TSO, GSO and GRO on at both
// ends, the other none of them.
//
// # What is counted
//
// The processor time of the aggregator's whole receive path and of sending results; not the load's. An XDP server is
// all in the threads that serve its queues (threaded NAPI), whose time the scheduler knows in nanoseconds. The TCP
// aggregator is its process, and the softirqs that receive for it: tracepoints at their begin and end and at every packet
// tell how long they took, for whom, and whether the process's own time has them in it already. Packet steering (RPS) keeps these softirqs on the aggregator's processors.
// The idle time of the processors, by /proc/stat, is the cross-check: on a quiet machine the aggregator's time
// cannot be more than they were busy.
//
// # What is checked
//
// Every lane and tag of every RESULT is compared with the plain sum when it comes back, and that there is exactly one
// per chunk and round; at the end the server must have counted every contribution as summed, and nothing else. Over
// TCP every value of every sum is compared by every worker. Anything else is an error, not a number.
package aggregator
