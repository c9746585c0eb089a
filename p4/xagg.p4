// SPDX-License-Identifier: Apache-2.0
//
// xagg.p4: gradient aggregation in a v1model switch.
//
// The switch sums the contributions of the ranks that keep step (the cohort) in a small pool of slots that clean
// themselves, passes the others' contributions to aggregation servers, and brings the servers' answers back. All other
// traffic is forwarded as IPv4. docs/protocol.md is the specification; agg.Switch is the reference model; doc.go lists
// what a controller programs.
//
// What bmv2 asks for: a slot's whole update is one action, since one action is what bmv2 runs atomically. A block of
// 64 lanes is one 2,048-bit number, the widest field p4c accepts: adding 64 lanes is one wide addition in which no carry
// crosses a lane's border.

#include <core.p4>
#include <v1model.p4>

const bit<9> CPU_PORT = 510;
const bit<32> SLOTS = 4096;
const bit<16> XAGG_PORT = 19860;
const bit<32> TAG_MODULUS = 67108859;

const bit<16> ETHERTYPE_IPV4 = 0x0800;
const bit<16> ETHERTYPE_ARP = 0x0806;
const bit<8> PROTO_UDP = 17;
const bit<16> ARP_REQUEST = 1;
const bit<16> ARP_REPLY = 2;

// Header lengths in bytes.
const bit<16> ETHERNET_LEN = 14;
const bit<16> IPV4_LEN = 20;
const bit<16> UDP_LEN = 8;
const bit<16> XAGG_LEN = 56;

const bit<4> VERSION = 1;
const bit<4> GRAD = 1;
const bit<4> PARTIAL = 2;
const bit<4> RESULT = 3;
const bit<4> WAIT = 5;
const bit<4> NACK = 6;
const bit<4> CTRL = 7;

const bit<8> LAST = 1;
const bit<8> FORWARDED = 4;
const bit<8> SATURATED = 8;
const bit<8> MODULAR = 16;
const bit<8> ASYNC = 128;
const bit<8> SHAPE_FLAGS = LAST | MODULAR | ASYNC;

// Why a packet is not summed. The numbers are wire.Reason's; those that only servers count are left out.
const bit<8> SUMMED = 0;
const bit<8> SHORT = 1;
const bit<8> LENGTH = 2;
const bit<8> BAD_VERSION = 3;
const bit<8> BAD_TYPE = 4;
const bit<8> CHECKSUM = 5;
const bit<8> UNKNOWN_JOB = 6;
const bit<8> BAD_EPOCH = 7;
const bit<8> BAD_RANK = 8;
const bit<8> BAD_PORT = 9;
const bit<8> BAD_SOURCE = 10;
const bit<8> BAD_MASK = 11;
const bit<8> BAD_SHAPE = 12;
const bit<8> STALE = 13;
const bit<8> RANGE = 15;
const bit<8> BAD_TAG = 16;
const bit<8> DUPLICATE = 17;
const bit<8> STEERED = 18;
const bit<8> PASSED_ON = 19; // wire.ReasonForwarded
const bit<8> NO_ROUTE = 20;
const bit<8> TTL_EXCEEDED = 21;
const bit<8> RETURNED = 22;
const bit<8> UNCOUNTED = 255; // ordinary traffic that is forwarded

// Where a packet goes.
const bit<4> NOWHERE = 0;
const bit<4> TO_SENDER = 1;
const bit<4> TO_ALL = 2;
const bit<4> TO_COHORT = 3;
const bit<4> TO_SERVER = 4;            // in the sender's name
const bit<4> TO_SERVER_AS_SERVICE = 5; // with the service address as source
const bit<4> TO_ADDRESS = 6;           // routed
const bit<4> TO_CPU = 7;
const bit<4> TO_PORT = 8;              // as the controller said
const bit<4> TO_EVERYONE = 9;          // flooded: ARP requests

// The top bit of every lane, and all the others.
const bit<2048> TOPS = 2048w0x80000000800000008000000080000000800000008000000080000000800000008000000080000000800000008000000080000000800000008000000080000000800000008000000080000000800000008000000080000000800000008000000080000000800000008000000080000000800000008000000080000000800000008000000080000000800000008000000080000000800000008000000080000000800000008000000080000000800000008000000080000000800000008000000080000000800000008000000080000000800000008000000080000000800000008000000080000000800000008000000080000000800000008000000080000000;
const bit<2048> RESTS = 2048w0x7fffffff7fffffff7fffffff7fffffff7fffffff7fffffff7fffffff7fffffff7fffffff7fffffff7fffffff7fffffff7fffffff7fffffff7fffffff7fffffff7fffffff7fffffff7fffffff7fffffff7fffffff7fffffff7fffffff7fffffff7fffffff7fffffff7fffffff7fffffff7fffffff7fffffff7fffffff7fffffff7fffffff7fffffff7fffffff7fffffff7fffffff7fffffff7fffffff7fffffff7fffffff7fffffff7fffffff7fffffff7fffffff7fffffff7fffffff7fffffff7fffffff7fffffff7fffffff7fffffff7fffffff7fffffff7fffffff7fffffff7fffffff7fffffff7fffffff7fffffff7fffffff7fffffff7fffffff7fffffff;

@controller_header("packet_out")
header packet_out_h {
    bit<16> egress_port;
}

@controller_header("packet_in")
header packet_in_h {
    bit<16> ingress_port;
}

header ethernet_h {
    bit<48> dst;
    bit<48> src;
    bit<16> type;
}

// ARP for IPv4 over Ethernet.
header arp_h {
    bit<16> htype;
    bit<16> ptype;
    bit<8>  hlen;
    bit<8>  plen;
    bit<16> op;
    bit<48> sha;
    bit<32> spa;
    bit<48> tha;
    bit<32> tpa;
}

header ipv4_h {
    bit<4>  version;
    bit<4>  ihl;
    bit<8>  tos;
    bit<16> len;
    bit<16> id;
    bit<3>  flags;
    bit<13> offset;
    bit<8>  ttl;
    bit<8>  protocol;
    bit<16> checksum;
    bit<32> src;
    bit<32> dst;
}

header udp_h {
    bit<16> src;
    bit<16> dst;
    bit<16> len;
    bit<16> checksum;
}

header xagg_h {
    bit<4>  version;
    bit<4>  type;
    bit<8>  flags;
    bit<16> job;
    bit<16> epoch;
    bit<8>  rank;
    bit<8>  blocks;
    bit<32> seq;
    bit<32> round;
    bit<32> chunk;
    bit<16> elems;
    bit<8>  exponent;
    bit<8>  amax;
    bit<64> contributors;
    bit<32> tag0;
    bit<32> tag1;
    bit<32> spread_us;
    bit<32> blocked_us;
    bit<16> next_epoch;
    bit<8>  reason;
    bit<40> reserved;
}

header block_h {
    bit<2048> lanes;
}

struct headers_t {
    packet_out_h packet_out;
    packet_in_h  packet_in;
    ethernet_h   ethernet;
    arp_h        arp;
    ipv4_h       ipv4;
    udp_h        udp;
    xagg_h       x;
    block_h      b0;
    block_h      b1;
    block_h      b2;
    block_h      b3;
}

struct metadata_t {
    bit<16> zero;          // what a checksum over itself must come to
    bit<8>  reason;        // under which the packet is counted
    bit<4>  dest;
    bit<16> old_word;      // version, type and flags as they came in

    // The plan.
    bit<64> expected;      // the cohort's mask
    bit<8>  final;         // 1: the switch closes chunks itself
    bit<16> servers;
    bit<16> group;         // multicast group of all ranks
    bit<16> cohort_group;
    bit<16> next_epoch;
    bit<8>  quorum;        // not 0: a duplicate closes an open slot
    bit<32> wait_us;       // whose first arrival is so long ago
    bit<16> server;        // the chunk's server

    // The member.
    bit<8>  steered;
    bit<16> port;
    bit<32> ip;
    bit<64> bit_;
    bit<32> base;
    bit<32> mask;

    // A server's way back.
    bit<48> service_mac;
    bit<32> service_ip;

    // What a slot's update found.
    bit<8>  verdict;
}

// Verdicts of a slot's update.
const bit<8> OPEN = 0;         // summed, more are to come
const bit<8> CLOSED = 1;       // summed, the last one
const bit<8> AGAIN_OPEN = 2;   // duplicate of a chunk that is still open
const bit<8> AGAIN_CLOSED = 3; // duplicate of a chunk that is closed
const bit<8> FLUSHED = 4;      // duplicate that closed the chunk
const bit<8> GONE_ON = 5;      // the slot is a newer chunk's, or closed without this contribution
const bit<8> OTHER_SHAPE = 6;

parser Parse(packet_in packet, out headers_t hdr, inout metadata_t meta, inout standard_metadata_t standard_metadata) {
    state start {
        transition select(standard_metadata.ingress_port) {
            CPU_PORT: from_controller;
            default: ethernet;
        }
    }
    state from_controller {
        packet.extract(hdr.packet_out);
        transition ethernet;
    }
    state ethernet {
        packet.extract(hdr.ethernet);
        transition select(hdr.ethernet.type) {
            ETHERTYPE_IPV4: ipv4;
            ETHERTYPE_ARP: arp;
            default: accept;
        }
    }
    state arp {
        packet.extract(hdr.arp);
        transition accept;
    }
    state ipv4 {
        packet.extract(hdr.ipv4);
        // No options, not a fragment: the mask spares "don't fragment" and the reserved bit.
        transition select(hdr.ipv4.version, hdr.ipv4.ihl, hdr.ipv4.flags, hdr.ipv4.offset, hdr.ipv4.protocol) {
            (4, 5, 0 &&& 1, 0, PROTO_UDP): udp;
            default: accept;
        }
    }
    state udp {
        packet.extract(hdr.udp);
        transition select(hdr.udp.src, hdr.udp.dst) {
            (_, XAGG_PORT): xagg;
            (XAGG_PORT, _): xagg;
            default: accept;
        }
    }
    state xagg {
        packet.extract(hdr.x);
        transition select(hdr.x.version, hdr.x.blocks) {
            (VERSION, 1): blocks1;
            (VERSION, 2): blocks2;
            (VERSION, 3): blocks3;
            (VERSION, 4): blocks4;
            default: accept;
        }
    }
    state blocks4 {
        packet.extract(hdr.b0);
        packet.extract(hdr.b1);
        packet.extract(hdr.b2);
        packet.extract(hdr.b3);
        transition accept;
    }
    state blocks3 {
        packet.extract(hdr.b0);
        packet.extract(hdr.b1);
        packet.extract(hdr.b2);
        transition accept;
    }
    state blocks2 {
        packet.extract(hdr.b0);
        packet.extract(hdr.b1);
        transition accept;
    }
    state blocks1 {
        packet.extract(hdr.b0);
        transition accept;
    }
}

// The fields that a UDP checksum covers. bmv2 leaves out those of invalid headers, so this serves any number of blocks.
#define UDP_COVERS                                                                                             \
    hdr.ipv4.src, hdr.ipv4.dst, 8w0, hdr.ipv4.protocol, hdr.udp.len,                                           \
    hdr.udp.src, hdr.udp.dst, hdr.udp.len,                                                                     \
    hdr.x.version, hdr.x.type, hdr.x.flags, hdr.x.job, hdr.x.epoch, hdr.x.rank, hdr.x.blocks, hdr.x.seq,       \
    hdr.x.round, hdr.x.chunk, hdr.x.elems, hdr.x.exponent, hdr.x.amax, hdr.x.contributors, hdr.x.tag0,         \
    hdr.x.tag1, hdr.x.spread_us, hdr.x.blocked_us, hdr.x.next_epoch, hdr.x.reason, hdr.x.reserved,             \
    hdr.b0.lanes, hdr.b1.lanes, hdr.b2.lanes, hdr.b3.lanes

#define IPV4_COVERS                                                                                            \
    hdr.ipv4.version, hdr.ipv4.ihl, hdr.ipv4.tos, hdr.ipv4.len, hdr.ipv4.id, hdr.ipv4.flags, hdr.ipv4.offset,  \
    hdr.ipv4.ttl, hdr.ipv4.protocol, hdr.ipv4.src, hdr.ipv4.dst

// A sum that includes the checksum itself comes to zero, however the sender wrote a zero (0x0000 or 0xffff, RFC 768).
control Verify(inout headers_t hdr, inout metadata_t meta) {
    apply {
        verify_checksum(hdr.ipv4.isValid() && hdr.ipv4.ihl == 5,
            { IPV4_COVERS, hdr.ipv4.checksum }, meta.zero, HashAlgorithm.csum16);
        verify_checksum(hdr.x.isValid() && hdr.udp.checksum != 0,
            { UDP_COVERS, hdr.udp.checksum }, meta.zero, HashAlgorithm.csum16);
    }
}

control XaggIngress(inout headers_t hdr, inout metadata_t meta, inout standard_metadata_t standard_metadata) {
    counter(64, CounterType.packets_and_bytes) reasons;
    counter(16, CounterType.packets_and_bytes) sent;
    direct_counter(CounterType.packets_and_bytes) member_traffic;

    // A slot.
    register<bit<64>>(SLOTS) slot_owner; // job, epoch, seq
    register<bit<64>>(SLOTS) slot_place; // round, chunk
    register<bit<40>>(SLOTS) slot_form;  // elems, blocks, exponent, shape flags
    register<bit<64>>(SLOTS) slot_mask;  // contributors
    register<bit<64>>(SLOTS) slot_tag;   // tag0, tag1
    register<bit<48>>(SLOTS) slot_marks; // closed (0 or 1), amax, sticky flags, last rank, next_epoch
    register<bit<48>>(SLOTS) slot_first; // arrival of the first contribution, microseconds
    register<bit<48>>(SLOTS) slot_last;  // and of the last
    register<bit<32>>(SLOTS) slot_block; // last but one to last
    register<bit<2048>>(SLOTS) lanes0;
    register<bit<2048>>(SLOTS) lanes1;
    register<bit<2048>>(SLOTS) lanes2;
    register<bit<2048>>(SLOTS) lanes3;

    action known() {}

    action set_plan(bit<64> expected, bit<8> final, bit<16> servers, bit<16> group, bit<16> next_epoch, bit<8> quorum,
        bit<32> wait_us) {
        meta.expected = expected;
        meta.final = final;
        meta.servers = servers;
        meta.group = group;
        meta.next_epoch = next_epoch;
        meta.quorum = quorum;
        meta.wait_us = wait_us;
    }

    action summed(bit<16> port, bit<32> ip, bit<64> bit_, bit<32> base, bit<32> mask) {
        meta.port = port;
        meta.ip = ip;
        meta.bit_ = bit_;
        meta.base = base;
        meta.mask = mask;
    }

    action steered(bit<16> port, bit<32> ip, bit<64> bit_) {
        meta.port = port;
        meta.ip = ip;
        meta.bit_ = bit_;
        meta.steered = 1;
    }

    action from_server(bit<48> mac, bit<32> ip, bit<16> all_, bit<16> cohort) {
        meta.service_mac = mac;
        meta.service_ip = ip;
        meta.group = all_;
        meta.cohort_group = cohort;
    }

    action to_server(bit<9> port, bit<48> mac, bit<32> ip) {
        // RFC 1624, equation 3, for the words that change. A PARTIAL is summed anew behind the egress.
        bit<16> word = hdr.x.version ++ hdr.x.type ++ hdr.x.flags;
        bit<32> sum = (bit<32>)(~hdr.udp.checksum) + (bit<32>)(~meta.old_word) + (bit<32>)word
            + (bit<32>)(~hdr.ipv4.dst[31:16]) + (bit<32>)(~hdr.ipv4.dst[15:0])
            + (bit<32>)ip[31:16] + (bit<32>)ip[15:0];
        sum = (sum & 0xffff) + (sum >> 16);
        sum = (sum & 0xffff) + (sum >> 16);
        if (hdr.udp.checksum != 0) {
            hdr.udp.checksum = ~sum[15:0];
            if (hdr.udp.checksum == 0) {
                hdr.udp.checksum = 0xffff;
            }
        }
        standard_metadata.egress_spec = port;
        hdr.ethernet.dst = mac;
        hdr.ipv4.dst = ip;
    }

    action forward(bit<9> port, bit<48> mac) {
        // RFC 1624 again: the word of time to live and protocol.
        bit<32> sum = (bit<32>)(~hdr.ipv4.checksum) + (bit<32>)(~(hdr.ipv4.ttl ++ hdr.ipv4.protocol));
        hdr.ipv4.ttl = hdr.ipv4.ttl - 1;
        sum = sum + (bit<32>)(hdr.ipv4.ttl ++ hdr.ipv4.protocol);
        sum = (sum & 0xffff) + (sum >> 16);
        sum = (sum & 0xffff) + (sum >> 16);
        hdr.ipv4.checksum = ~sum[15:0];
        standard_metadata.egress_spec = port;
        hdr.ethernet.dst = mac;
    }

    action arp_reply(bit<48> mac) {
        meta.dest = TO_PORT;
        if (hdr.arp.op != ARP_REQUEST) { // nobody asked
            meta.reason = NO_ROUTE;
            meta.dest = NOWHERE;
        }
        bit<32> asked = hdr.arp.tpa;
        hdr.arp.op = ARP_REPLY;
        hdr.arp.tha = hdr.arp.sha;
        hdr.arp.tpa = hdr.arp.spa;
        hdr.arp.sha = mac;
        hdr.arp.spa = asked;
        hdr.ethernet.dst = hdr.ethernet.src;
        hdr.ethernet.src = mac;
        standard_metadata.egress_spec = standard_metadata.ingress_port;
    }

    action flood(bit<16> group) {
        standard_metadata.mcast_grp = group;
        meta.dest = TO_EVERYONE;
    }

    // update is the whole of a slot's life: claim, add, close, flush, recognise duplicates. It leaves its verdict in the
    // metadata, and in the header what an answer needs: where the chunk is closed and the answer is its sum, the slot's
    // contents.
    action update() {
        bit<32> i = meta.base + (hdr.x.seq & meta.mask);
        bit<48> now = standard_metadata.ingress_global_timestamp;
        bit<64> self = hdr.x.job ++ hdr.x.epoch ++ hdr.x.seq;
        bit<64> place = hdr.x.round ++ hdr.x.chunk;
        bit<40> form = hdr.x.elems ++ hdr.x.blocks ++ hdr.x.exponent ++ (hdr.x.flags & SHAPE_FLAGS);
        bit<64> owner;
        bit<64> slot_is_at;
        bit<40> slot_looks;
        bit<64> mask;
        bit<48> marks;
        slot_owner.read(owner, i);
        slot_place.read(slot_is_at, i);
        slot_form.read(slot_looks, i);
        slot_mask.read(mask, i);
        slot_marks.read(marks, i);
        bit<8> closed = marks[47:40];
        bit<32> behind = owner[31:0] - hdr.x.seq; // negative: the owner is older
        if (owner[63:32] != self[63:32] || behind[31:31] == 1) {
            // The lease is this job's and the half this epoch's, so whoever else owned the slot is dead; and the
            // sender of this seq holds the answer to the seq that the slot had before.
            meta.verdict = OPEN;
            closed = 0;
            bit<16> announced = 0;
            if (meta.bit_ == meta.expected) {
                meta.verdict = CLOSED;
                closed = 1;
                if (hdr.x.chunk == 0 && meta.final == 1) { // else a server announces
                    announced = meta.next_epoch;
                }
            }
            slot_owner.write(i, self);
            slot_place.write(i, place);
            slot_form.write(i, form);
            slot_mask.write(i, meta.bit_);
            slot_tag.write(i, hdr.x.tag0 ++ hdr.x.tag1);
            slot_marks.write(i, closed ++ hdr.x.amax ++ (hdr.x.flags & SATURATED) ++ hdr.x.rank ++ announced);
            slot_first.write(i, now);
            slot_last.write(i, now);
            slot_block.write(i, 0);
            if (hdr.b0.isValid()) { lanes0.write(i, hdr.b0.lanes); }
            if (hdr.b1.isValid()) { lanes1.write(i, hdr.b1.lanes); }
            if (hdr.b2.isValid()) { lanes2.write(i, hdr.b2.lanes); }
            if (hdr.b3.isValid()) { lanes3.write(i, hdr.b3.lanes); }
            hdr.x.flags = hdr.x.flags & (SHAPE_FLAGS | SATURATED);
            hdr.x.spread_us = 0;
            hdr.x.blocked_us = 0;
            hdr.x.next_epoch = announced;
        } else if (behind != 0) {
            meta.verdict = GONE_ON;
        } else if (slot_is_at != place || slot_looks != form) {
            meta.verdict = OTHER_SHAPE;
        } else if (closed == 1 && mask & meta.bit_ == 0) {
            meta.verdict = GONE_ON; // a flush did not wait for it
        } else {
            bit<64> tag;
            bit<48> first;
            bit<48> last;
            bit<32> blocked;
            slot_tag.read(tag, i);
            slot_first.read(first, i);
            slot_last.read(last, i);
            slot_block.read(blocked, i);
            if (mask & meta.bit_ == 0) {
                meta.verdict = OPEN;
                mask = mask | meta.bit_;
                tag = (tag[63:32] + hdr.x.tag0) ++ (tag[31:0] + hdr.x.tag1);
                bit<8> amax = marks[39:32];
                if (amax < hdr.x.amax) {
                    amax = hdr.x.amax;
                }
                bit<16> announced = 0;
                if (mask == meta.expected) {
                    meta.verdict = CLOSED;
                    closed = 1;
                    if (hdr.x.chunk == 0 && meta.final == 1) { // else a server announces
                        announced = meta.next_epoch;
                    }
                }
                marks = closed ++ amax ++ (marks[31:24] | (hdr.x.flags & SATURATED)) ++ hdr.x.rank ++ announced;
                blocked = (bit<32>)(now - last);
                last = now;
                slot_mask.write(i, mask);
                slot_tag.write(i, tag);
                slot_marks.write(i, marks);
                slot_last.write(i, last);
                slot_block.write(i, blocked);
                bit<2048> sum;
                if (hdr.b0.isValid()) {
                    lanes0.read(sum, i);
                    hdr.b0.lanes = ((sum & RESTS) + (hdr.b0.lanes & RESTS)) ^ ((sum ^ hdr.b0.lanes) & TOPS);
                    lanes0.write(i, hdr.b0.lanes);
                }
                if (hdr.b1.isValid()) {
                    lanes1.read(sum, i);
                    hdr.b1.lanes = ((sum & RESTS) + (hdr.b1.lanes & RESTS)) ^ ((sum ^ hdr.b1.lanes) & TOPS);
                    lanes1.write(i, hdr.b1.lanes);
                }
                if (hdr.b2.isValid()) {
                    lanes2.read(sum, i);
                    hdr.b2.lanes = ((sum & RESTS) + (hdr.b2.lanes & RESTS)) ^ ((sum ^ hdr.b2.lanes) & TOPS);
                    lanes2.write(i, hdr.b2.lanes);
                }
                if (hdr.b3.isValid()) {
                    lanes3.read(sum, i);
                    hdr.b3.lanes = ((sum & RESTS) + (hdr.b3.lanes & RESTS)) ^ ((sum ^ hdr.b3.lanes) & TOPS);
                    lanes3.write(i, hdr.b3.lanes);
                }
            } else {
                meta.verdict = AGAIN_CLOSED;
                if (closed == 0) {
                    meta.verdict = AGAIN_OPEN;
                    // Only a server can finish what a flush leaves out.
                    if (meta.quorum != 0 && meta.final == 0 && now - first >= (bit<48>)meta.wait_us) {
                        meta.verdict = FLUSHED;
                        marks = 8w1 ++ marks[39:0];
                        slot_marks.write(i, marks);
                    }
                }
                if (meta.verdict == AGAIN_OPEN) {
                    last = now; // a WAIT tells the time since the first arrival
                    blocked = 0;
                    tag = 0;
                    marks = marks[47:32] ++ 8w0 ++ hdr.x.rank ++ 16w0;
                } else {
                    if (hdr.b0.isValid()) { lanes0.read(hdr.b0.lanes, i); }
                    if (hdr.b1.isValid()) { lanes1.read(hdr.b1.lanes, i); }
                    if (hdr.b2.isValid()) { lanes2.read(hdr.b2.lanes, i); }
                    if (hdr.b3.isValid()) { lanes3.read(hdr.b3.lanes, i); }
                }
            }
            hdr.x.flags = (hdr.x.flags & SHAPE_FLAGS) | marks[31:24];
            hdr.x.rank = marks[23:16];
            hdr.x.amax = marks[39:32];
            hdr.x.next_epoch = marks[15:0];
            hdr.x.contributors = mask;
            hdr.x.tag0 = tag[63:32];
            hdr.x.tag1 = tag[31:0];
            hdr.x.spread_us = (bit<32>)(last - first);
            hdr.x.blocked_us = blocked;
        }
    }

    // read_slot fills a CTRL packet with the slot that its seq names.
    action read_slot() {
        bit<32> i = hdr.x.seq;
        bit<64> owner;
        bit<64> place;
        bit<40> form;
        bit<64> tag;
        bit<48> marks;
        bit<48> first;
        bit<48> last;
        slot_owner.read(owner, i);
        slot_place.read(place, i);
        slot_form.read(form, i);
        slot_mask.read(hdr.x.contributors, i);
        slot_tag.read(tag, i);
        slot_marks.read(marks, i);
        slot_first.read(first, i);
        slot_last.read(last, i);
        slot_block.read(hdr.x.blocked_us, i);
        hdr.x.job = owner[63:48];
        hdr.x.epoch = owner[47:32];
        hdr.x.seq = owner[31:0];
        hdr.x.round = place[63:32];
        hdr.x.chunk = place[31:0];
        hdr.x.elems = form[39:24];
        hdr.x.exponent = form[15:8];
        hdr.x.flags = form[7:0] | marks[31:24];
        hdr.x.tag0 = tag[63:32];
        hdr.x.tag1 = tag[31:0];
        hdr.x.amax = marks[39:32];
        hdr.x.rank = marks[23:16];
        hdr.x.next_epoch = marks[15:0];
        hdr.x.reason = marks[47:40];
        if (hdr.x.reason == 0) {
            last = standard_metadata.ingress_global_timestamp; // it is open: the time since the first arrival
        }
        hdr.x.spread_us = (bit<32>)(last - first);
        hdr.udp.checksum = 0;
        if (hdr.b0.isValid()) { lanes0.read(hdr.b0.lanes, i); }
        if (hdr.b1.isValid()) { lanes1.read(hdr.b1.lanes, i); }
        if (hdr.b2.isValid()) { lanes2.read(hdr.b2.lanes, i); }
        if (hdr.b3.isValid()) { lanes3.read(hdr.b3.lanes, i); }
    }

    // turn makes an answer of a question: source and destination change places.
    action turn() {
        bit<48> mac = hdr.ethernet.src;
        hdr.ethernet.src = hdr.ethernet.dst;
        hdr.ethernet.dst = mac;
        bit<32> ip = hdr.ipv4.src;
        hdr.ipv4.src = hdr.ipv4.dst;
        hdr.ipv4.dst = ip;
        bit<16> port = hdr.udp.src;
        hdr.udp.src = hdr.udp.dst;
        hdr.udp.dst = port;
        hdr.udp.checksum = 0;
    }

    // as_service makes the service address the source, so that the answer is multicast.
    action as_service() {
        hdr.ethernet.src = hdr.ethernet.dst;
        hdr.ipv4.src = hdr.ipv4.dst;
        hdr.udp.src = XAGG_PORT;
        hdr.udp.dst = XAGG_PORT;
    }

    // shorten leaves the lanes away.
    action shorten() {
        hdr.x.blocks = 0;
        hdr.ipv4.len = IPV4_LEN + UDP_LEN + XAGG_LEN;
        hdr.udp.len = UDP_LEN + XAGG_LEN;
        hdr.b0.setInvalid();
        hdr.b1.setInvalid();
        hdr.b2.setInvalid();
        hdr.b3.setInvalid();
    }

    // refuse tells a worker why its contribution is not summed.
    action refuse(bit<8> reason) {
        meta.reason = reason;
        meta.dest = TO_SENDER;
        hdr.x.type = NACK;
        hdr.x.reason = reason;
        hdr.x.flags = hdr.x.flags & SHAPE_FLAGS;
        hdr.x.spread_us = 0;
        hdr.x.blocked_us = 0;
        hdr.x.next_epoch = 0;
    }

    table job {
        key = { hdr.x.job: exact; }
        actions = { known; @defaultonly NoAction; }
        const default_action = NoAction();
        size = 1024;
    }

    table plan {
        key = { hdr.x.job: exact; hdr.x.epoch: exact; }
        actions = { set_plan; @defaultonly NoAction; }
        const default_action = NoAction();
        size = 2048;
    }

    table member {
        key = { hdr.x.job: exact; hdr.x.epoch: exact; hdr.x.rank: exact; }
        actions = { summed; steered; @defaultonly NoAction; }
        const default_action = NoAction();
        counters = member_traffic;
        size = 8192;
    }

    table server {
        key = { hdr.x.job: exact; hdr.x.epoch: exact; meta.server: exact; }
        actions = { to_server; @defaultonly NoAction; }
        const default_action = NoAction();
        size = 4096;
    }

    table returning {
        key = { standard_metadata.ingress_port: exact; hdr.x.job: exact; hdr.x.epoch: exact; }
        actions = { from_server; @defaultonly NoAction; }
        const default_action = NoAction();
        size = 4096;
    }

    table ipv4 {
        key = { hdr.ipv4.dst: lpm; }
        actions = { forward; @defaultonly NoAction; }
        const default_action = NoAction();
        size = 1024;
    }

    table arp {
        key = { hdr.arp.tpa: exact; }
        actions = { arp_reply; flood; }
        default_action = flood(1);
        size = 64;
    }

    apply {
        meta.reason = UNCOUNTED;
        meta.dest = NOWHERE;
        // The port of a packet that nobody has decided on is 0, a real one.
        mark_to_drop(standard_metadata);
        bit<17> need = ((bit<17>)hdr.x.elems + 63) >> 6; // blocks

        if (standard_metadata.parser_error != error.NoError) {
            meta.reason = SHORT;
        } else if (hdr.packet_out.isValid()) {
            if (hdr.x.isValid() && hdr.x.version == VERSION && hdr.x.type == CTRL) {
                if (hdr.x.seq < SLOTS) {
                    read_slot();
                    meta.dest = TO_CPU;
                } else {
                    meta.reason = RANGE;
                }
            } else {
                meta.dest = TO_PORT;
                standard_metadata.egress_spec = (bit<9>)hdr.packet_out.egress_port;
            }
        } else if (hdr.x.isValid()) {
            meta.old_word = hdr.x.version ++ hdr.x.type ++ hdr.x.flags;
            if (standard_metadata.packet_length != (bit<32>)ETHERNET_LEN + (bit<32>)hdr.ipv4.len
                || hdr.ipv4.len != IPV4_LEN + hdr.udp.len) {
                meta.reason = LENGTH;
            } else if (hdr.x.version != VERSION) {
                meta.reason = BAD_VERSION;
            } else if (hdr.x.type == 0 || hdr.x.type > CTRL) {
                meta.reason = BAD_TYPE;
            } else if (hdr.x.blocks > 4 || hdr.udp.len != UDP_LEN + XAGG_LEN + ((bit<16>)hdr.x.blocks << 8)
                || hdr.x.reserved != 0
                || (hdr.x.type <= RESULT && need != (bit<17>)hdr.x.blocks)) { // so at most 256
                meta.reason = LENGTH;
            } else if (standard_metadata.checksum_error == 1) {
                meta.reason = CHECKSUM;
            } else if (hdr.x.type == PARTIAL || hdr.x.type == CTRL) {
                meta.reason = BAD_TYPE; // nobody sends these to a switch
            } else if (job.apply().miss) {
                meta.reason = UNKNOWN_JOB;
                if (hdr.x.type == GRAD) { refuse(UNKNOWN_JOB); }
            } else if (plan.apply().miss) {
                meta.reason = BAD_EPOCH;
                if (hdr.x.type == GRAD) { refuse(BAD_EPOCH); }
            } else if (hdr.x.type == GRAD) {
                if (meta.servers != 0) {
                    // chunk mod servers
                    hash(meta.server, HashAlgorithm.identity, 16w0, { hdr.x.chunk }, (bit<32>)meta.servers);
                }
                if (member.apply().miss) {
                    refuse(BAD_RANK);
                } else if (meta.port != (bit<16>)standard_metadata.ingress_port) {
                    meta.reason = BAD_PORT;
                } else if (meta.ip != hdr.ipv4.src) {
                    meta.reason = BAD_SOURCE;
                } else if (hdr.x.contributors != meta.bit_) {
                    refuse(BAD_MASK);
                } else if (hdr.x.tag0 >= TAG_MODULUS || hdr.x.tag1 >= TAG_MODULUS) {
                    refuse(BAD_TAG);
                } else if (meta.steered == 1) {
                    meta.reason = STEERED;
                    meta.dest = TO_SERVER;
                    hdr.x.flags = hdr.x.flags | FORWARDED;
                } else if (hdr.x.flags & ASYNC != 0) {
                    refuse(BAD_SHAPE); // the running sums are the servers'
                } else {
                    update();
                    if (meta.verdict == OTHER_SHAPE) {
                        refuse(BAD_SHAPE);
                    } else if (meta.verdict == GONE_ON) {
                        if (meta.servers == 0) {
                            refuse(STALE);
                        } else {
                            meta.reason = PASSED_ON;
                            meta.dest = TO_SERVER;
                            hdr.x.flags = hdr.x.flags | FORWARDED;
                        }
                    } else {
                        meta.reason = SUMMED;
                        if (meta.verdict == AGAIN_OPEN || meta.verdict == AGAIN_CLOSED || meta.verdict == FLUSHED) {
                            meta.reason = DUPLICATE;
                        }
                        hdr.x.reason = 0;
                        if (meta.verdict == AGAIN_OPEN) {
                            hdr.x.type = WAIT;
                            meta.dest = TO_SENDER;
                        } else if (meta.verdict != OPEN && meta.final == 1) {
                            hdr.x.type = RESULT;
                            meta.dest = TO_ALL;
                            if (meta.verdict == AGAIN_CLOSED) { meta.dest = TO_SENDER; }
                        } else if (meta.verdict != OPEN) {
                            hdr.x.type = PARTIAL;
                            meta.dest = TO_SERVER_AS_SERVICE;
                            if (meta.verdict == AGAIN_CLOSED) { meta.dest = TO_SERVER; }
                        }
                    }
                }
            } else if (returning.apply().miss) {
                meta.reason = BAD_PORT;
            } else {
                meta.reason = RETURNED;
                if (hdr.ipv4.dst != meta.service_ip) {
                    meta.dest = TO_ADDRESS;
                } else if (hdr.x.type == RESULT) {
                    meta.dest = TO_ALL;
                } else {
                    meta.dest = TO_COHORT;
                }
                hdr.ethernet.src = meta.service_mac;
                hdr.ipv4.src = meta.service_ip;
                hdr.udp.checksum = 0;
            }
        } else if (hdr.arp.isValid()) {
            arp.apply();
        } else if (hdr.ipv4.isValid() && hdr.ipv4.version == 4 && hdr.ipv4.ihl >= 5) {
            if (standard_metadata.checksum_error == 1) {
                meta.reason = CHECKSUM;
            } else {
                meta.dest = TO_ADDRESS;
            }
        } else {
            meta.reason = NO_ROUTE;
        }

        if (meta.dest == TO_SENDER) {
            if (hdr.x.type != RESULT) { shorten(); }
            turn();
            standard_metadata.egress_spec = standard_metadata.ingress_port;
        } else if (meta.dest == TO_ALL) {
            if (meta.reason != RETURNED) { turn(); }
            standard_metadata.mcast_grp = meta.group;
        } else if (meta.dest == TO_COHORT) {
            standard_metadata.mcast_grp = meta.cohort_group;
        } else if (meta.dest == TO_SERVER || meta.dest == TO_SERVER_AS_SERVICE) {
            if (meta.dest == TO_SERVER_AS_SERVICE) { as_service(); }
            if (server.apply().miss) {
                meta.reason = NO_ROUTE;
                meta.dest = NOWHERE;
            }
        } else if (meta.dest == TO_ADDRESS) {
            if (hdr.ipv4.ttl <= 1) {
                meta.reason = TTL_EXCEEDED;
                meta.dest = NOWHERE;
            } else if (ipv4.apply().miss) {
                meta.reason = NO_ROUTE;
                meta.dest = NOWHERE;
            }
        } else if (meta.dest == TO_CPU) {
            hdr.packet_in.setValid();
            hdr.packet_in.ingress_port = (bit<16>)standard_metadata.ingress_port;
            standard_metadata.egress_spec = CPU_PORT;
        }
        hdr.packet_out.setInvalid();

        if (meta.reason != UNCOUNTED) {
            reasons.count((bit<32>)meta.reason);
            if (meta.reason != RETURNED && meta.dest != NOWHERE) {
                sent.count((bit<32>)hdr.x.type);
            }
        }
        if (meta.dest == NOWHERE) { mark_to_drop(standard_metadata); }
    }
}

control XaggEgress(inout headers_t hdr, inout metadata_t meta, inout standard_metadata_t standard_metadata) {
    action to_rank(bit<48> mac, bit<32> ip, bit<16> port) {
        hdr.ethernet.dst = mac;
        hdr.ipv4.dst = ip;
        hdr.udp.dst = port;
    }

    table replica {
        key = { standard_metadata.egress_rid: exact; }
        actions = { to_rank; @defaultonly NoAction; }
        const default_action = NoAction();
        size = 8192;
    }

    apply {
        if (meta.dest == TO_ALL || meta.dest == TO_COHORT) {
            replica.apply();
        } else if (meta.dest == TO_EVERYONE) {
            if (standard_metadata.egress_port == standard_metadata.ingress_port) {
                mark_to_drop(standard_metadata);
            }
        }
    }
}

control Compute(inout headers_t hdr, inout metadata_t meta) {
    apply {
        // What the controller sends out leaves as it is.
        update_checksum(hdr.x.isValid() && meta.dest != TO_PORT,
            { IPV4_COVERS }, hdr.ipv4.checksum, HashAlgorithm.csum16);
        update_checksum(hdr.x.isValid() && meta.dest != TO_PORT && hdr.x.type == PARTIAL,
            { UDP_COVERS }, hdr.udp.checksum, HashAlgorithm.csum16);
        // Zero would mean "no checksum": RFC 768 writes it as its complement, which is the checksum of a zero.
        update_checksum(hdr.x.isValid() && meta.dest != TO_PORT && hdr.x.type == PARTIAL && hdr.udp.checksum == 0,
            { 16w0 }, hdr.udp.checksum, HashAlgorithm.csum16);
    }
}

control Deparse(packet_out packet, in headers_t hdr) {
    apply {
        packet.emit(hdr.packet_in);
        packet.emit(hdr.ethernet);
        packet.emit(hdr.arp);
        packet.emit(hdr.ipv4);
        packet.emit(hdr.udp);
        packet.emit(hdr.x);
        packet.emit(hdr.b0);
        packet.emit(hdr.b1);
        packet.emit(hdr.b2);
        packet.emit(hdr.b3);
    }
}

V1Switch(Parse(), Verify(), XaggIngress(), XaggEgress(), Compute(), Deparse()) main;
