// Package chaos runs jobs in the lab in memory while the links drop, duplicate, reorder, delay and corrupt frames, and
// compares every integer with a plain sum. A failure prints the seed that makes the same job on the same links again.
//
// `go test` takes about ten seconds of it. `make chaos` takes an hour, or what the variable XAGG_CHAOS says;
// XAGG_CHAOS_SEED names the first seed.
package chaos
