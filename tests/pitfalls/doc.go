// Package pitfalls has the tests of those known faults of in-network aggregation that concern whole jobs, one test each,
// named after its row in docs/faults.md. They run in the lab in one process. The rows that concern one room are tested there.
package pitfalls
