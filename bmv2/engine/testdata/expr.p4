// SPDX-License-Identifier: Apache-2.0
//
// Every operator at many widths: the packet carries operands, the answer carries results.

#include <core.p4>
#include <v1model.p4>

header operands_h {
    bit<8>    op;
    bit<1>    a1;
    bit<7>    a7;
    bit<9>    a9;
    bit<23>   a23;
    bit<32>   a32;
    bit<32>   b32;
    bit<48>   a48;
    bit<64>   a64;
    bit<64>   b64;
    bit<65>   a65;
    bit<63>   pad;
    bit<128>  a128;
    bit<128>  b128;
    bit<2048> a2048;
    bit<2048> b2048;
    int<8>    i8;
    int<8>    j8;
    int<32>   i32;
    int<32>   j32;
    int<64>   i64;
    int<64>   j64;
}

header results_h {
    bit<8>    flags;
    bit<8>    r8;
    bit<16>   r16;
    bit<32>   r32;
    bit<64>   r64;
    bit<128>  r128;
    bit<2048> r2048;
    int<8>    s8;
    int<32>   s32;
    int<64>   s64;
}

struct headers_t {
    operands_h o;
    results_h  r;
}

struct metadata_t {
    bit<2048> wide;
    bit<64>   narrow;
}

parser P(packet_in packet, out headers_t hdr, inout metadata_t meta, inout standard_metadata_t sm) {
    state start {
        packet.extract(hdr.o);
        packet.extract(hdr.r);
        transition accept;
    }
}

control V(inout headers_t hdr, inout metadata_t meta) {
    apply {}
}

control I(inout headers_t hdr, inout metadata_t meta, inout standard_metadata_t sm) {
    register<bit<2048>>(16) wide;
    register<bit<33>>(16) odd;
    register<bit<64>>(16) word;

    action arith() {
        hdr.r.r8 = (bit<8>)(hdr.o.a7 + 3) - (bit<8>)hdr.o.a9;
        hdr.r.r16 = (bit<16>)hdr.o.a9 * (bit<16>)hdr.o.a23;
        hdr.r.r32 = hdr.o.a32 + hdr.o.b32 - (bit<32>)hdr.o.a23;
        hdr.r.r64 = hdr.o.a64 * hdr.o.b64 + (bit<64>)hdr.o.a48;
        hdr.r.r128 = hdr.o.a128 + hdr.o.b128;
        hdr.r.r2048 = hdr.o.a2048 + hdr.o.b2048;
        hdr.r.s8 = hdr.o.i8 + hdr.o.j8;
        hdr.r.s32 = hdr.o.i32 - hdr.o.j32;
        hdr.r.s64 = hdr.o.i64 * hdr.o.j64;
    }

    action more_arith() {
        hdr.r.r8 = -hdr.o.op;
        hdr.r.r16 = (bit<16>)(hdr.o.a32 - hdr.o.b32);
        hdr.r.r32 = hdr.o.a32 * hdr.o.b32;
        hdr.r.r64 = hdr.o.a64 - hdr.o.b64;
        hdr.r.r128 = hdr.o.a128 * hdr.o.b128;
        hdr.r.r2048 = hdr.o.a2048 - hdr.o.b2048;
        hdr.r.s8 = -hdr.o.i8;
        hdr.r.s32 = hdr.o.i32 * hdr.o.j32;
        hdr.r.s64 = hdr.o.i64 - hdr.o.j64;
    }

    action saturate() {
        hdr.r.r8 = hdr.o.op |+| (bit<8>)hdr.o.a7;
        hdr.r.r16 = (bit<16>)hdr.o.a9 |-| (bit<16>)hdr.o.a23;
        hdr.r.r32 = hdr.o.a32 |+| hdr.o.b32;
        hdr.r.r64 = hdr.o.a64 |-| hdr.o.b64;
        hdr.r.r128 = hdr.o.a128 |+| hdr.o.b128;
        hdr.r.r2048 = hdr.o.a2048 |-| hdr.o.b2048;
        hdr.r.s8 = hdr.o.i8 |+| hdr.o.j8;
        hdr.r.s32 = hdr.o.i32 |-| hdr.o.j32;
        hdr.r.s64 = hdr.o.i64 |+| hdr.o.j64;
    }

    action bitwise() {
        hdr.r.r8 = ~hdr.o.op ^ (bit<8>)hdr.o.a1;
        hdr.r.r16 = (bit<16>)(~hdr.o.a9) | 0x4000;
        hdr.r.r32 = (hdr.o.a32 & hdr.o.b32) ^ ~(hdr.o.a32 | (bit<32>)hdr.o.a23);
        hdr.r.r64 = ~hdr.o.a64 & hdr.o.b64;
        hdr.r.r128 = (hdr.o.a128 ^ hdr.o.b128) | (bit<128>)hdr.o.a65;
        hdr.r.r2048 = (hdr.o.a2048 & ~hdr.o.b2048) ^ (hdr.o.a2048 | hdr.o.b2048);
        hdr.r.s8 = hdr.o.i8 & hdr.o.j8;
        hdr.r.s32 = ~(hdr.o.i32 ^ hdr.o.j32);
        hdr.r.s64 = hdr.o.i64 | hdr.o.j64;
    }

    action shifts() {
        hdr.r.r8 = hdr.o.op << hdr.o.a7[2:0];
        hdr.r.r16 = (bit<16>)(hdr.o.a32 >> hdr.o.a7);
        hdr.r.r32 = hdr.o.a32 << hdr.o.a7;
        hdr.r.r64 = (hdr.o.a64 >> 13) ^ (hdr.o.b64 << 29);
        hdr.r.r128 = (hdr.o.a128 << 65) | (hdr.o.b128 >> hdr.o.a9[6:0]);
        hdr.r.r2048 = (hdr.o.a2048 << 251) ^ (hdr.o.b2048 >> hdr.o.op);
        hdr.r.s8 = hdr.o.i8 >> hdr.o.a7[2:0];
        hdr.r.s32 = hdr.o.i32 >> 5;
        hdr.r.s64 = hdr.o.i64 << hdr.o.a7[5:0];
    }

    action slices() {
        hdr.r.r8 = hdr.o.a2048[1030:1023];
        hdr.r.r16 = hdr.o.a7 ++ hdr.o.a9;
        hdr.r.r32 = hdr.o.a2048[2047:2016];
        hdr.r.r64 = hdr.o.a65[64:1];
        hdr.r.r128 = hdr.o.a64 ++ hdr.o.b64;
        hdr.r.r2048 = hdr.o.b2048;
        hdr.r.r2048[130:67] = hdr.o.a64;
        hdr.r.r2048[199:199] = hdr.o.a1;
        hdr.r.s8 = (int<8>)hdr.o.a32[10:3];
        hdr.r.s32 = (int<32>)hdr.o.i8;
        hdr.r.s64 = (int<64>)(bit<64>)hdr.o.a48;
    }

    action compares() {
        hdr.r.flags[0:0] = (bit<1>)(hdr.o.a32 < hdr.o.b32);
        hdr.r.flags[1:1] = (bit<1>)(hdr.o.i32 <= hdr.o.j32);
        hdr.r.flags[2:2] = (bit<1>)(hdr.o.a2048 > hdr.o.b2048);
        hdr.r.flags[3:3] = (bit<1>)(hdr.o.i64 >= hdr.o.j64);
        hdr.r.flags[4:4] = (bit<1>)(hdr.o.a64 == hdr.o.b64);
        hdr.r.flags[5:5] = (bit<1>)(hdr.o.a128 != hdr.o.b128);
        hdr.r.flags[6:6] = (bit<1>)(hdr.o.a65 > (bit<65>)hdr.o.b64);
        hdr.r.flags[7:7] = (bit<1>)(hdr.o.i8 > hdr.o.j8);
        hdr.r.r32 = hdr.o.a32 < hdr.o.b32 && hdr.o.a1 == 1 ? hdr.o.a32 : hdr.o.b32;
        hdr.r.r2048 = hdr.o.a2048 == hdr.o.b2048 || hdr.o.a9 > 100 ? hdr.o.a2048 : ~hdr.o.b2048;
    }

    action registers() {
        bit<32> i = (bit<32>)hdr.o.a7;
        bit<2048> w;
        bit<33> o;
        bit<64> n;
        wide.read(w, i);
        odd.read(o, i);
        word.read(n, i);
        w = w + hdr.o.a2048;
        o = o + (bit<33>)hdr.o.a32;
        n = n ^ hdr.o.a64;
        wide.write(i, w);
        odd.write(i, o);
        word.write(i, n);
        hdr.r.r2048 = w;
        hdr.r.r64 = (bit<64>)o;
        hdr.r.r128 = (bit<128>)n << 3;
    }

    action branches() {
        meta.wide = hdr.o.a2048;
        if (hdr.o.a32 > hdr.o.b32) {
            meta.wide = meta.wide + 1;
            if (hdr.o.i8 < 0) {
                meta.narrow = 7;
                hdr.r.r8 = 1;
            } else {
                meta.narrow = hdr.o.a64;
                hdr.r.r8 = 2;
            }
        } else if (hdr.o.a1 == 1) {
            meta.wide = meta.wide ^ hdr.o.b2048;
            meta.narrow = 99;
        } else {
            hdr.r.r8 = 3;
        }
        hdr.r.r2048 = meta.wide;
        hdr.r.r64 = meta.narrow;
    }

    apply {
        sm.egress_spec = 1;
        if (hdr.o.op == 0) {
            arith();
        } else if (hdr.o.op == 1) {
            more_arith();
        } else if (hdr.o.op == 2) {
            saturate();
        } else if (hdr.o.op == 3) {
            bitwise();
        } else if (hdr.o.op == 4) {
            shifts();
        } else if (hdr.o.op == 5) {
            slices();
        } else if (hdr.o.op == 6) {
            compares();
        } else if (hdr.o.op == 7) {
            if (hdr.o.a7 < 16) { // beyond the register bmv2's behaviour depends on how it was built
                registers();
            }
        } else {
            branches();
        }
    }
}

control E(inout headers_t hdr, inout metadata_t meta, inout standard_metadata_t sm) {
    apply {}
}

control C(inout headers_t hdr, inout metadata_t meta) {
    apply {}
}

control D(packet_out packet, in headers_t hdr) {
    apply {
        packet.emit(hdr.o);
        packet.emit(hdr.r);
    }
}

V1Switch(P(), V(), I(), E(), C(), D()) main;
