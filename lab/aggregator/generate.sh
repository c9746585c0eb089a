#!/usr/bin/env bash
# Compiles the BPF object and writes its Go, into the directory given or this one, as xdp/generate.sh does.
set -euo pipefail
cd "$(dirname "$0")"
out=${1:-.}
export BPF2GO_CC=${BPF2GO_CC:-clang-16} BPF2GO_STRIP=${BPF2GO_STRIP:-llvm-strip-16} GOPACKAGE=aggregator LC_ALL=C
export BPF2GO_CFLAGS="-I../../xdp -mcpu=v3 -Wall -Wextra -Werror -fno-strict-aliasing"

go tool bpf2go -target bpfel -output-dir "$out" -type sender -type question -type answer load load.bpf.c

{
	echo "# Written by generate.sh: the compiler that made the object, and the sums (SHA-256) of what it was made from."
	echo "# $($BPF2GO_CC --version | head -n 1)"
	sha256sum -- *.bpf.c ../../xdp/kernel.h ../../xdp/wire.h
	(cd "$out" && sha256sum -- *_bpfel.o)
} >"$out/objects.sum"
