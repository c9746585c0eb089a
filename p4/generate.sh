#!/usr/bin/env bash
# Compiles xagg.p4. Needs p4c-bm2-ss; without it nothing is changed, and go test says whether the committed files still
# belong to the source.
set -euo pipefail
cd "$(dirname "$0")"
if ! command -v p4c-bm2-ss >/dev/null; then
	echo "p4: p4c-bm2-ss is not installed: xagg.json and xagg.p4info.txtpb stay as they are" >&2
	exit 0
fi
p4c-bm2-ss --std p4-16 -o xagg.json --p4runtime-files xagg.p4info.txtpb xagg.p4
{
	echo "compiler p4c-bm2-ss $(p4c-bm2-ss --version 2>&1 | sed -n 's/^Version //p')"
	sha256sum xagg.p4 xagg.json xagg.p4info.txtpb
} >xagg.lock
