// Package tcp is the parameter server over TCP that in-network aggregation is compared with: every worker streams its
// vector to one server, which sums the streams and streams the sum back to all. It is as good as a plain one can be:
// one thread per direction and worker, large reads straight into the summand's memory, sums that are sent while later parts
// are still on their way, no copy and no allocation per round.
//
// The numbers are float32 in the machine's own byte order; both ends check that they have the same. The sum of a part is
// made in the order in which the workers' parts arrive, so that the last bits of a result vary, as they do with any
// such server.
package tcp
