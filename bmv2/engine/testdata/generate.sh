#!/usr/bin/env bash
# Compiles the test programs. Needs p4c-bm2-ss; without it nothing is changed, and go test says whether the committed
# files still belong to the sources.
set -euo pipefail
cd "$(dirname "$0")"
if ! command -v p4c-bm2-ss >/dev/null; then
	echo "bmv2/engine/testdata: p4c-bm2-ss is not installed: the compiled programs stay as they are" >&2
	exit 0
fi
for program in expr small switch; do
	p4c-bm2-ss --std p4-16 -o $program.json --p4runtime-files $program.p4info.txtpb $program.p4
done
{
	echo "compiler p4c-bm2-ss $(p4c-bm2-ss --version 2>&1 | sed -n 's/^Version //p')"
	sha256sum {expr,small,switch}.{p4,json,p4info.txtpb}
} >compiled.lock
