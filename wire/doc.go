// Package wire is the aggregation protocol's packet format, version 1: the header and lanes as plain Go values,
// their encoding to and from bytes, whole frames, the integrity tag, and the one enumeration of reasons for which a
// packet is not summed. docs/protocol.md has the layout as a table; p4/xagg.p4 and xdp/xagg.bpf.c spell the same one,
// and a test in ./tests compares the three.
//
// Nothing here allocates while packets pass. Package layer shows the packet to gopacket, package check reads captures.
package wire
