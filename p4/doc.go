// Package p4 holds the switch program xagg.p4 for v1model with what the P4 compiler made of it.
//
// What the controller programs (names as in P4Info; every match is exact but where said; widths in bits):
//
//	table XaggIngress.job       hdr.x.job:16                        known()
//	table XaggIngress.plan      hdr.x.job:16 hdr.x.epoch:16         set_plan(expected:64, final:8, servers:16, group:16, next_epoch:16,
//	                                                            quorum:8, wait_us:32)
//	table XaggIngress.member    hdr.x.job:16 hdr.x.epoch:16 hdr.x.rank:8
//	                                                            summed(port:16, ip:32, bit_:64, base:32, mask:32)
//	                                                            steered(port:16, ip:32, bit_:64)
//	table XaggIngress.server    hdr.x.job:16 hdr.x.epoch:16 meta.server:16
//	                                                            to_server(port:9, mac:48, ip:32)
//	table XaggIngress.returning standard_metadata.ingress_port:9 hdr.x.job:16 hdr.x.epoch:16
//	                                                            from_server(mac:48, ip:32, all_:16, cohort:16)
//	table XaggIngress.ipv4      hdr.ipv4.dst:32 lpm                 forward(port:9, mac:48)
//	table XaggIngress.arp       hdr.arp.tpa:32                      arp_reply(mac:48)
//	                                                            default flood(group:16)
//	table XaggEgress.replica    standard_metadata.egress_rid:16     to_rank(mac:48, ip:32, port:16)
//
// set_plan: expected is the cohort's mask, final is 1 where the switch closes chunks itself, group is the multicast
// group of all ranks, next_epoch is the epoch that is armed or 0, and quorum is 0 or lets a duplicate close a slot whose
// first arrival is wait_us microseconds or longer ago (not where final is 1). summed: base is the first slot of the
// epoch's half, mask is 2*pool-1. from_server: mac and ip are the service address, all_ and cohort are multicast groups.
// A multicast group's replica has the rank's egress port and an instance (egress_rid) that is unique per job and rank;
// flood's group has instance 0 for every port.
//
// Counters: XaggIngress.reasons[64] by reason code, XaggIngress.sent[16] by packet type (both packets and bytes, indirect),
// XaggIngress.member_traffic (direct, on XaggIngress.member).
// Controller headers: packet_out {egress_port:16}, packet_in {ingress_port:16}; egress_port is the port that a
// frame leaves by; a frame of type CTRL comes back as packet_in with the slot it asked for.
package p4
