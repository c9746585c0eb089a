// Package timing predicts how long rounds of a job take: a discrete-event model of computation, links, the switch, servers and
// workers, each with a time per packet. What passes between them are real packets of the code that runs on real machines: the
// workers' transport with its window and timers, the switch and the servers as package agg states them, the plans of package
// policy and, in mode auto, its telemetry and its rules. So what is modelled is time alone.
//
// Everything that happens by chance follows from the seed: two runs are the same to the nanosecond. Values are the same constant
// everywhere, since times do not depend on them; package sim, which has faults and no rates, checks sums.
package timing
