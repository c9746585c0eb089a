// Package engine executes a v1model program as simple_switch does: it loads p4c's bmv2 JSON, compiles it to closures
// and turns one frame on a port into the frames that leave the switch. It is pure: no sockets, no goroutines, no
// clock; time is an argument.
//
// # What it knows
//
// Headers with fields of any width, metadata, one parser, verify and update of checksums, deparser, actions with
// jumps, expressions at any width, exact, LPM, ternary and range tables with their own entries, direct and indirect
// counters, registers, conditionals, multicast. Everything else a program may contain (header stacks and unions,
// variable-length fields, meters, action profiles, value sets, digests, clones, resubmission, externs) is refused by
// name when the program is loaded; nothing is ignored.
//
// # Arithmetic
//
// bmv2 computes with integers of unlimited size and cuts a value only where it is stored; p4c writes masks and casts
// where the language wants them. Here every expression has a static range. A value whose consumer needs 64 bits at
// most is computed modulo 2^64 in one machine word, since addition, subtraction, multiplication, left shift and the
// bitwise operators need only the low bits of their operands for the low bits of their result. Comparisons, right
// shifts, divisions and saturating casts need exact operands and get as many words as the range takes. Wider values
// are little-endian slices of words in a scratch area whose layout is fixed at load, so nothing is allocated.
//
// # Where it differs from bmv2
//
// Only where bmv2's behaviour is undefined: a field of an invalid header that was never written in this packet reads
// zero (bmv2: what an earlier packet left there), a register index out of range reads nothing and writes nothing, a
// lookahead beyond the packet is the parser error PacketTooShort, a division by zero is zero, a packet that grows by
// more than 512 bytes is dropped, and a parser that visits 65,536 states is stopped with ParserTimeout. The queues of
// an egress port are always empty (enq_qdepth, deq_qdepth and deq_timedelta are 0), since egress runs at once.
//
// And where simple_switch_grpc is plainly wrong: an LPM field whose width is not whole bytes is matched by its own
// bits (there PI and bmv2 count the padding as part of the prefix and refuse most entries), and a replica with a port above 511 makes no copy (there it
// also moves the other ports of its instance).
package engine

//go:generate ./testdata/generate.sh
