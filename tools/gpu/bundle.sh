#!/usr/bin/env bash
# Builds what a machine with a GPU is to run and collects it in one relocatable folder, with the
# libraries that the target may lack: checks and benchmarks of the kernels, or whole jobs.
#   ./dev bundle [OUT] [kernels|jobs]      default: .bundle kernels
# The target machine needs a driver; for the comparison columns libcublasLt.so.13, and a python3 with torch.
set -euo pipefail
cd "$(dirname "$0")/../.."
build=build/cuda
out=${1:-.bundle}
case ${2:-kernels} in
  kernels)
    programs=(driver_contracts cuda_device_test gemm_check muon_check small_check preset_steps symmetric_gemm_bench
      muon_update_bench muon_lane_bench muon_tune pass_bench)
    scripts=(tests/kernels/cuda/preset_steps.py tests/python/originals.py)
    ;;
  jobs)
    programs=(driver_contracts dmuond dmuond-lane fault_trainer_cuda)
    scripts=(tests/faults/gpu_jobs.py)
    ;;
  *)
    echo "bundle: $2 is neither kernels nor jobs" >&2
    exit 2
    ;;
esac
[ -f "$build/CMakeCache.txt" ] || cmake --preset cuda
cmake --build "$build" --target "${programs[@]}"
rm -rf "$out"
mkdir -p "$out/lib"
for program in "${programs[@]}"; do
  strip -o "$out/$program" "$build/bin/$program"
  # Not the C and C++ runtime, nor the driver, which is the tests' fake here: the target has its own.
  ldd "$build/bin/$program" |
    awk '$2 == "=>" && $3 !~ /\/(libc|libm|libdl|librt|libpthread|libgcc_s|libstdc\+\+|libcuda)\.so/ {print $3}' |
    xargs -r cp -Lu -t "$out/lib"
done
strip "$out"/lib/* 2> /dev/null || true
# The largest one takes a quarter of its room; `run` unpacks it.
gzip -9 "$out"/lib/libopenblas.so.*
cp tools/gpu/run "${scripts[@]}" "$out/"
du -sh "$out"
