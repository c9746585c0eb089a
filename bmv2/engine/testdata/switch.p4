// SPDX-License-Identifier: Apache-2.0
//
// Everything of v1model but arithmetic: the parser's ways and errors, checksums, every kind of table, multicast,
// header insertion and removal, hashes, counters, drops.

#include <core.p4>
#include <v1model.p4>

error { BadKind }

@controller_header("packet_out")
header packet_out_h {
    bit<7> pad;
    bit<9> egress_port;
}

@controller_header("packet_in")
header packet_in_h {
    bit<9> ingress_port;
    bit<7> why;
}

header ethernet_h {
    bit<48> dst;
    bit<48> src;
    bit<16> type;
}

// What the packet asks for.
header ask_h {
    bit<4>  kind;
    bit<12> key;
    bit<16> group;
    bit<32> addr;
    bit<3>  small;
    bit<5>  count;
    bit<16> port;
}

header tlv_h {
    bit<8>  tag;
    bit<24> value;
}

header extra_h {
    bit<13> a;
    bit<51> b;
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

// What happened.
header told_h {
    bit<32> parser_error;
    bit<8>  checksum_error;
    bit<32> packet_length;
    bit<32> instance_type;
    bit<16> rid;
    bit<16> egress_port;
    bit<16> exact;
    bit<16> lpm;
    bit<16> ternary;
    bit<16> range;
    bit<32> hash;
    bit<32> crc;
    bit<8>  hit;
    bit<16> fixed;
}

struct headers_t {
    packet_out_h packet_out;
    packet_in_h  packet_in;
    ethernet_h   ethernet;
    told_h       told;
    ask_h        ask;
    tlv_h        tlv;
    extra_h      extra;
    ipv4_h       ipv4;
    udp_h        udp;
}

struct metadata_t {
    bit<16> exact;
    bit<16> lpm;
    bit<16> ternary;
    bit<16> range;
    bit<16> fixed;
    bit<8>  hit;
    bit<8>  ahead;
}

parser P(packet_in packet, out headers_t hdr, inout metadata_t meta, inout standard_metadata_t sm) {
    state start {
        transition select(sm.ingress_port) {
            510: from_cpu;
            default: ethernet;
        }
    }
    state from_cpu {
        packet.extract(hdr.packet_out);
        transition ethernet;
    }
    state ethernet {
        packet.extract(hdr.ethernet);
        transition select(hdr.ethernet.type) {
            0x0800: ipv4;
            0x1234: ask;
            0x8000 &&& 0xf000: skip;
            default: accept;
        }
    }
    state skip {
        packet.advance(32);
        transition ask;
    }
    state ask {
        packet.extract(hdr.ask);
        verify(hdr.ask.kind != 15, error.BadKind);
        meta.ahead = packet.lookahead<bit<8>>();
        transition select(hdr.ask.kind, hdr.ask.small) {
            (1, _): tlv;
            (2, 5): extra;
            (4 &&& 4, 1 &&& 3): extra;
            default: accept;
        }
    }
    state tlv {
        packet.extract(hdr.tlv);
        transition select(packet.lookahead<bit<16>>()) {
            0xbeef: extra;
            default: accept;
        }
    }
    state extra {
        packet.extract(hdr.extra);
        transition accept;
    }
    state ipv4 {
        packet.extract(hdr.ipv4);
        transition select(hdr.ipv4.protocol) {
            17: udp;
            default: accept;
        }
    }
    state udp {
        packet.extract(hdr.udp);
        transition accept;
    }
}

control V(inout headers_t hdr, inout metadata_t meta) {
    apply {
        verify_checksum(hdr.ipv4.isValid(),
            { hdr.ipv4.version, hdr.ipv4.ihl, hdr.ipv4.tos, hdr.ipv4.len, hdr.ipv4.id, hdr.ipv4.flags, hdr.ipv4.offset,
              hdr.ipv4.ttl, hdr.ipv4.protocol, hdr.ipv4.src, hdr.ipv4.dst },
            hdr.ipv4.checksum, HashAlgorithm.csum16);
        verify_checksum_with_payload(hdr.udp.isValid() && hdr.udp.checksum != 0,
            { hdr.ipv4.src, hdr.ipv4.dst, 8w0, hdr.ipv4.protocol, hdr.udp.len,
              hdr.udp.src, hdr.udp.dst, hdr.udp.len },
            hdr.udp.checksum, HashAlgorithm.csum16);
    }
}

control I(inout headers_t hdr, inout metadata_t meta, inout standard_metadata_t sm) {
    counter(16, CounterType.packets_and_bytes) kinds;
    direct_counter(CounterType.packets_and_bytes) exact_traffic;
    direct_counter(CounterType.packets) ternary_traffic;

    action exact_hit(bit<16> v) {
        meta.exact = v;
        exact_traffic.count();
    }
    action lpm_hit(bit<16> v) {
        meta.lpm = v;
    }
    action ternary_hit(bit<16> v) {
        meta.ternary = v;
        ternary_traffic.count();
    }
    action ternary_drop() {
        mark_to_drop(sm);
        ternary_traffic.count();
    }
    action range_hit(bit<16> v) {
        meta.range = v;
    }
    action fixed_hit(bit<16> v) {
        meta.fixed = v;
    }

    table exact_t {
        key = {
            hdr.ask.kind: exact;
            hdr.ask.key: exact;
            hdr.tlv.isValid(): exact;
        }
        actions = { exact_hit; NoAction; }
        default_action = NoAction;
        counters = exact_traffic;
        size = 8;
    }
    table lpm_t {
        key = { hdr.ask.kind: exact; hdr.ask.addr: lpm; }
        actions = { lpm_hit; NoAction; }
        default_action = lpm_hit(0xffff);
    }
    table ternary_t {
        key = { hdr.ask.addr: ternary; hdr.ask.key: ternary; sm.ingress_port: exact; hdr.ask.port: optional; }
        actions = { ternary_hit; ternary_drop; @defaultonly NoAction; }
        default_action = NoAction;
        counters = ternary_traffic;
    }
    table range_t {
        key = { hdr.ask.port: range; hdr.ask.small: ternary; }
        actions = { range_hit; @tableonly NoAction; }
        const default_action = range_hit(0);
    }
    table fixed_t {
        key = { hdr.ask.small: exact; hdr.ask.count: ternary; }
        actions = { fixed_hit; NoAction; }
        const entries = {
            (1, 0x10 &&& 0x10): fixed_hit(1);
            (1, _): fixed_hit(2);
            (2, 3): fixed_hit(3);
        }
    }

    action tell() {
        hdr.told.setValid();
        hdr.told.parser_error = (bit<32>)0;
        hdr.told.checksum_error = (bit<8>)sm.checksum_error;
        hdr.told.exact = meta.exact;
        hdr.told.lpm = meta.lpm;
        hdr.told.ternary = meta.ternary;
        hdr.told.range = meta.range;
        hdr.told.fixed = meta.fixed;
        hdr.told.hit = meta.hit | meta.ahead;
    }

    apply {
        if (hdr.packet_out.isValid()) {
            sm.egress_spec = hdr.packet_out.egress_port;
            hdr.packet_out.setInvalid();
            exit;
        }
        if (hdr.ipv4.isValid()) {
            sm.egress_spec = 2;
            if (sm.checksum_error == 1) {
                sm.egress_spec = 3;
            }
            tell();
        } else if (hdr.ask.isValid()) {
            kinds.count((bit<32>)hdr.ask.kind);
            sm.egress_spec = hdr.ask.port[8:0];
            if (exact_t.apply().hit) {
                meta.hit = 1;
            }
            lpm_t.apply();
            switch (ternary_t.apply().action_run) {
                ternary_hit: { meta.hit = meta.hit | 2; }
                ternary_drop: { meta.hit = meta.hit | 4; }
            }
            range_t.apply();
            fixed_t.apply();
            tell();
            if (sm.parser_error != error.NoError) {
                hdr.told.parser_error = 1;
            }
            if (sm.parser_error == error.BadKind) {
                hdr.told.parser_error = 2;
            }
            if (sm.parser_error == error.PacketTooShort) {
                hdr.told.parser_error = 3;
            }
            hash(hdr.told.hash, HashAlgorithm.crc16, (bit<32>)100, { hdr.ask.addr, hdr.ask.key, hdr.ask.small }, (bit<32>)1000);
            hash(hdr.told.crc, HashAlgorithm.crc32, 32w0, { hdr.ask.addr, hdr.ethernet.dst, 3w5, hdr.ask.count }, (bit<64>)0x100000000);
            if (hdr.ask.kind == 3) {
                sm.mcast_grp = hdr.ask.group;
            } else if (hdr.ask.kind == 8) {
                mark_to_drop(sm);
            } else if (hdr.ask.kind == 9) {
                hdr.extra.setValid();
                hdr.extra.b = 7;
            } else if (hdr.ask.kind == 10) {
                hdr.ask.setInvalid();
            } else if (hdr.ask.kind == 11) {
                hdr.packet_in.setValid();
                hdr.packet_in.ingress_port = sm.ingress_port;
                hdr.packet_in.why = 5;
                sm.egress_spec = 510;
            } else if (hdr.ask.kind == 12) {
                sm.mcast_grp = hdr.ask.group;
                mark_to_drop(sm);
            }
            if (hdr.ask.kind == 13) {
                exit;
            }
        }
    }
}

control E(inout headers_t hdr, inout metadata_t meta, inout standard_metadata_t sm) {
    action rewrite(bit<48> mac) {
        hdr.ethernet.dst = mac;
    }
    table replica {
        key = { sm.egress_rid: exact; sm.egress_port: exact; }
        actions = { rewrite; NoAction; }
        default_action = NoAction;
    }
    apply {
        replica.apply();
        if (hdr.told.isValid()) {
            hdr.told.packet_length = sm.packet_length;
            hdr.told.instance_type = sm.instance_type;
            hdr.told.rid = sm.egress_rid;
            hdr.told.egress_port = (bit<16>)sm.egress_port;
        }
        if (hdr.ask.isValid() && hdr.ask.small == 7 && sm.egress_port == 2) {
            mark_to_drop(sm);
        }
    }
}

control C(inout headers_t hdr, inout metadata_t meta) {
    apply {
        update_checksum(hdr.ipv4.isValid(),
            { hdr.ipv4.version, hdr.ipv4.ihl, hdr.ipv4.tos, hdr.ipv4.len, hdr.ipv4.id, hdr.ipv4.flags, hdr.ipv4.offset,
              hdr.ipv4.ttl, hdr.ipv4.protocol, hdr.ipv4.src, hdr.ipv4.dst },
            hdr.ipv4.checksum, HashAlgorithm.csum16);
        update_checksum_with_payload(hdr.udp.isValid() && hdr.udp.dst == 53,
            { hdr.ipv4.src, hdr.ipv4.dst, 8w0, hdr.ipv4.protocol, hdr.udp.len,
              hdr.udp.src, hdr.udp.dst, hdr.udp.len, hdr.tlv.tag, 8w1 },
            hdr.udp.checksum, HashAlgorithm.csum16);
    }
}

control D(packet_out packet, in headers_t hdr) {
    apply {
        packet.emit(hdr.packet_in);
        packet.emit(hdr.ethernet);
        packet.emit(hdr.told);
        packet.emit(hdr.ask);
        packet.emit(hdr.tlv);
        packet.emit(hdr.extra);
        packet.emit(hdr.ipv4);
        packet.emit(hdr.udp);
    }
}

V1Switch(P(), V(), I(), E(), C(), D()) main;
