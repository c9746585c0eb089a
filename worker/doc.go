// Package worker is the library that a training process uses: it joins a job, and sums vectors of float32 or int32
// over all workers of the job through the aggregators in the network (docs/protocol.md).
//
// A process opens a [Link], calls [Join], then [Worker.AllReduce] for one tensor after the other, or [Worker.Start] for
// several at a time, in the same order on all ranks, and at its end [Worker.Leave]. The integers that the network sums are the same on all ranks, and so are
// the results. An error of an all-reduce ends the job for all of its workers: whoever fails says so to the controller
// by going away, and the others' calls return an [AbortError] that names it.
//
// Packages transport and scale are what of it needs no network: which packets to send when, and what a value is on the
// wire. This package does the input and output around them, and the talk with the controller.
package worker
