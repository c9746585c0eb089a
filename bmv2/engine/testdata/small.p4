// SPDX-License-Identifier: Apache-2.0
//
// A small program with a bit of everything, for the fuzzer of the loader.

#include <core.p4>
#include <v1model.p4>

header h_t {
    bit<8>  a;
    bit<72> b;
}

struct headers_t {
    h_t h;
}

struct metadata_t {}

parser P(packet_in packet, out headers_t hdr, inout metadata_t meta, inout standard_metadata_t sm) {
    state start {
        packet.extract(hdr.h);
        transition select(hdr.h.a) {
            1 &&& 3: start;
            default: accept;
        }
    }
}

control V(inout headers_t hdr, inout metadata_t meta) {
    apply {}
}

control I(inout headers_t hdr, inout metadata_t meta, inout standard_metadata_t sm) {
    register<bit<72>>(4) r;

    action f(bit<9> port) {
        sm.egress_spec = port;
        if (hdr.h.a > 7) {
            hdr.h.b = hdr.h.b + 1;
        }
        r.write((bit<32>)hdr.h.a, hdr.h.b);
    }

    table t {
        key = { hdr.h.b: ternary; }
        actions = { f; NoAction; }
        const entries = { 5 &&& 7: f(1); }
    }

    apply {
        if (hdr.h.isValid()) {
            t.apply();
        }
    }
}

control E(inout headers_t hdr, inout metadata_t meta, inout standard_metadata_t sm) {
    apply {}
}

control C(inout headers_t hdr, inout metadata_t meta) {
    apply {
        update_checksum(true, { hdr.h.b }, hdr.h.a, HashAlgorithm.csum16);
    }
}

control D(packet_out packet, in headers_t hdr) {
    apply {
        packet.emit(hdr);
    }
}

V1Switch(P(), V(), I(), E(), C(), D()) main;
