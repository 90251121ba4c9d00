#!/usr/bin/env bash
# Builds what a machine with GPUs and without a network is to run, and collects it in one folder that needs nothing
# but what Debian 12 and Ubuntu 24.04 have from the start, a driver, and python3 for the scripts.
#   ./dev bundle [OUT]            checks and benchmarks of the kernels: OUT/run. Default: .bundle
#   ./dev bundle --engine [OUT]   the two wheels, and whole jobs that try them: OUT/join. Default: .bundle-engine
# For the kernels' comparison columns the target needs libcublasLt.so.13, and a python3 with torch.
set -euo pipefail
cd "$(dirname "$0")/../.."
build=build/cuda
engine_bytes_max=60000000

# Builds programs and copies them, with the libraries that they need.
collect() { # FOLDER LIBRARIES [--without WHEEL] -- PROGRAM...
  local into=$1 libraries=$2 without=()
  shift 2
  if [ "$1" = --without ]; then without=("$1" "$2"); shift 2; fi
  shift
  [ -f "$build/CMakeCache.txt" ] || cmake --preset cuda
  cmake --build "$build" --target "$@"
  python3 tools/wheel/libraries.py --into "$into" --libraries "$libraries" "${without[@]}" "${@/#/$build/bin/}"
}

if [ "${1:-}" = --engine ]; then
  out=${2:-.bundle-engine}
  rm -rf "$out"
  ./dev wheel "$out/wheels"
  # Laid over what the wheels are unpacked to.
  checks=$out/checks
  collect "$checks/dmuond_engine/bin" "$checks/dmuond_engine/lib" --without "$out"/wheels/dmuond_engine-*.whl -- \
    driver_contracts fault_trainer_cuda
  cmake --build "$build" --target lane_fault
  strip --strip-unneeded -o "$checks/dmuond_engine/bin/lane_fault.so" "$build/bin/lane_fault.so"
  cp tests/python/*.py tests/faults/fault_trainer{,_cuda,_torch}.py "$checks/"
  cp -r tests/gpu_join "$out/join"
  find "$out" -name __pycache__ -prune -exec rm -r {} +
  bytes=$(du -s --apparent-size --block-size=1 "$out" | cut -f 1)
  printf '%s: %d.%d MB\n' "$out" $((bytes / 1000000)) $((bytes / 100000 % 10))
  [ "$bytes" -le $engine_bytes_max ] || { echo "bundle: that is more than $engine_bytes_max bytes" >&2; exit 1; }
else
  out=${1:-.bundle}
  rm -rf "$out"
  collect "$out" "$out/lib" -- driver_contracts cuda_device_test gemm_check muon_check preset_steps \
    symmetric_gemm_bench muon_update_bench muon_lane_bench muon_tune pass_bench
  gzip -9 "$out"/lib/libopenblas.so.*  # takes a quarter of its room; `run` unpacks it
  cp tools/gpu/run tests/kernels/cuda/preset_steps.py tests/python/originals.py "$out/"
  du -sh "$out"
fi
