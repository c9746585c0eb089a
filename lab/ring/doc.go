// Package ring is the ring all-reduce over TCP that in-network aggregation is compared with (Patarasuk and Yuan, JPDC 2009):
// every rank sends to its right neighbour and receives from its left one. A bucket is cut into as many segments as there are
// ranks, N. In the first N - 1 steps each rank passes on a segment with its own values added, so that it ends up with one
// segment of the sum; in the next N - 1 steps it passes on segments of the sum. Thus 2 (N - 1) / N of a bucket's bytes go
// over each link, which is the least that is possible without help from the network.
//
// It is as good as a plain one can be: values are passed on as they come and not when a segment is complete; any number of buckets
// are under way at the same time, the oldest first, so that one which waits for a neighbour leaves the link to another; reads and
// writes are large.
package ring
