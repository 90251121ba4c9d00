#!/usr/bin/env bash
# Measures every kernel on this machine's GPU, from the folder that ./dev bundle made (here or carried here).
#   ./dev gpu-bench [-o RESULTS] [-w SECONDS]
set -euo pipefail
cd "$(dirname "$0")/../.."
[ -x .bundle/run ] || { echo "gpu-bench: .bundle/ is missing; ./dev bundle makes it" >&2; exit 1; }
exec .bundle/run "$@" bench
