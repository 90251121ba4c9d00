#!/usr/bin/env bash
# Names the Debian packages whose shared libraries these programs load, one a line: what a machine
# that only runs them has to install.
#
#   tools/dev/runtime-packages.sh PROGRAM...
set -euo pipefail

libraries=$(ldd "$@" | awk '$2 == "=>" && $3 ~ /^\// {print $3}' | sort -u)
for library in $libraries; do
  real=$(realpath "$library")
  # On merged systems a package may list /lib/... for a file that is found as /usr/lib/..., or the reverse.
  owner=$(dpkg -S "$real" 2>/dev/null || dpkg -S "${real#/usr}" 2>/dev/null || dpkg -S "/usr$real" 2>/dev/null) ||
    { echo "runtime-packages: no package owns $real" >&2; exit 1; }
  echo "${owner%%:*}"
done | sort -u
