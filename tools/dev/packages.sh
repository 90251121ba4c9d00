#!/usr/bin/env bash
# Prints what a list of packages has for some of its parts, one a line. A part begins with "[NAME]".
#
#   tools/dev/packages.sh LIST PART...
set -euo pipefail

list=$1
shift
for part; do
  grep -qxF "[$part]" "$list" || { echo "packages: $list has no part $part" >&2; exit 1; }
  awk -v part="[$part]" '/^\[/ {inside = $1 == part; next} sub(/ *(#.*)?$/, "") && inside && $0' "$list"
done | sort -u
