// Package sim runs whole jobs in one goroutine under simulated time: workers with the transport that real workers use,
// the switch and the servers as package agg states them, a controller that changes plans the way docs/protocol.md
// says, and links between them that lose, double, delay, reorder and damage packets.
//
// A [Schedule] says what is simulated, and two runs of a schedule are the same to the bit: whatever happens by chance
// follows from its seed. [Random] makes a schedule of a number, [Run] runs it and checks
//
//   - that every all-reduce ends, and with the sums that a plain loop over the inputs gives, the same on all ranks;
//   - that all ranks run a round under the same plan;
//   - that nobody sends a chunk before the window rule allows it;
//   - that aggregators refuse nothing but what is late or damaged;
//   - that the packets seen at the switch's ports pass the trace checker of package wire/check: each contribution is in
//     each result once, wherever on its way it was summed;
//   - that at the end of a job with a quorum all that ranks gave is in results or kept by them for the next, and at the end of
//     an async job every rank was told of every contribution once;
//   - that survivors of a crash end with an error that names the dead as far as an aggregator has told, and that the
//     next job on the same slots works.
//
// [Shrink] makes a failing schedule smaller.
package sim
