#!/usr/bin/env bash
# Compiles the BPF objects and writes their Go, into the directory given or this one. Needs clang and llvm-strip
# (Debian: clang-16, llvm-16). BPF2GO_CC and BPF2GO_STRIP name others; objects.sum says which made the committed ones.
set -euo pipefail
cd "$(dirname "$0")"
out=${1:-.}
export BPF2GO_CC=${BPF2GO_CC:-clang-16} BPF2GO_STRIP=${BPF2GO_STRIP:-llvm-strip-16} GOPACKAGE=xdp LC_ALL=C
export BPF2GO_CFLAGS="-mcpu=v3 -Wall -Wextra -Werror -fno-strict-aliasing"

go tool bpf2go -target bpfel -output-dir "$out" xagg xagg.bpf.c
go tool bpf2go -target bpfel -output-dir "$out" -output-suffix _test bench bench.bpf.c

{
	echo "# Written by generate.sh: the compiler that made the objects, and the sums (SHA-256) of what they were made from."
	echo "# $($BPF2GO_CC --version | head -n 1)"
	sha256sum -- *.bpf.c *.h
	(cd "$out" && sha256sum -- *_bpfel*.o)
} >"$out/objects.sum"
