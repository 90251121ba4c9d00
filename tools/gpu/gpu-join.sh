#!/usr/bin/env bash
# Runs whole jobs on this machine's GPUs, from the folder that ./dev bundle --engine made (here or carried here).
#   ./dev gpu-join [PART...] [--help]
set -euo pipefail
cd "$(dirname "$0")/../.."
[ -d .bundle-engine/join ] || { echo "gpu-join: .bundle-engine/ is missing; ./dev bundle --engine makes it" >&2; exit 1; }
exec python3 .bundle-engine/join "$@"
