#!/usr/bin/env bash
# Builds the GPU checks and benchmarks and collects them in one relocatable folder, with the
# libraries that the target may lack.
#   ./dev bundle [OUT]      default: .bundle
# The target machine needs a driver; for the comparison columns libcublasLt.so.13, and a python3 with torch.
set -euo pipefail
cd "$(dirname "$0")/../.."
build=build/cuda
out=${1:-.bundle}
programs=(driver_contracts cuda_device_test gemm_check muon_check small_check preset_steps symmetric_gemm_bench
  muon_update_bench muon_lane_bench muon_tune pass_bench)
[ -f "$build/CMakeCache.txt" ] || cmake --preset cuda
cmake --build "$build" --target "${programs[@]}"
rm -rf "$out"
mkdir -p "$out/lib"
for program in "${programs[@]}"; do
  strip -o "$out/$program" "$build/bin/$program"
  # Not the C and C++ runtime: the target has its own.
  ldd "$build/bin/$program" | awk '$2 == "=>" && $3 !~ /\/(libc|libm|libdl|librt|libpthread|libgcc_s|libstdc\+\+)\.so/ {print $3}' |
    xargs -r cp -Lu -t "$out/lib"
done
strip "$out"/lib/* 2> /dev/null || true
# The largest one takes a quarter of its room; `run` unpacks it.
gzip -9 "$out"/lib/libopenblas.so.*
cp tools/gpu/run tests/kernels/cuda/preset_steps.py tests/python/originals.py "$out/"
du -sh "$out"
