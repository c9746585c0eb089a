// Package train asks whether training still converges when the network sums gradients: a small network is trained
// data-parallel, with real gradients, through every mode of aggregation while one rank computes slower than the others, and
// beside it by a single process that sums the ranks' gradients itself. docs/training.md says what is measured and how to read it.
//
// [Task] and [Network] are the training, pure and from a seed; [Work] is a rank's loop; [Run] makes a lab, runs all modes
// in it and evaluates what came of them.
package train
