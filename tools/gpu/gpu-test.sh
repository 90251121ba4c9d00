#!/usr/bin/env bash
# Checks every kernel and the CUDA device on this machine's GPU, from the folder that ./dev bundle made (here or carried here).
#   ./dev gpu-test [-o RESULTS] [-w SECONDS]
set -euo pipefail
cd "$(dirname "$0")/../.."
[ -x .bundle/run ] || { echo "gpu-test: .bundle/ is missing; ./dev bundle makes it" >&2; exit 1; }
exec .bundle/run "$@" check sanitize
