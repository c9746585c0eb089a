// Package tcp is the parameter server over TCP that in-network aggregation is compared with: every worker streams its
// buckets to one server, or their parts to several, which sum the streams and stream the sums back to all. It is as good as a
// plain one can be: one thread per direction and worker, large reads, sums that are on their way back while later values
// are still on theirs, any number of buckets under way, no allocation per round, and no copy but a worker's first in a
// sum.
//
// The numbers are float32 in the machine's own byte order; both ends check that they have the same. Sums are made in the order
// in which the workers' values arrive, so that the last bits of a result vary, as they do with any such server; all
// workers get the same ones.
package tcp
