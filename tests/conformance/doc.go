// Package conformance holds the tests that three implementations of the switch's rules agree byte for byte: the real
// simple_switch_grpc running p4/xagg.p4, the embedded engine (package bmv2) running the same program, and the
// reference model (agg.Switch).
//
// A scenario is what a controller programs: hosts, jobs, plans. A trace is a seeded random list of frames and
// packet-outs for a scenario, ordinary and hostile. Every implementation is a target: it is programmed, given one
// input at a time, and hands back all the frames that the input made it send. The time fields of answers (spread_us,
// blocked_us) and with them the UDP checksum of a PARTIAL are blanked before a comparison; nothing else is.
//
// TestRecord writes what the real switch did to testdata, with -update; TestRecorded replays it where there is no real
// switch:
//
//	XAGG_REQUIRE=bmv2 go test ./tests/conformance -run TestRecord -update
package conformance
