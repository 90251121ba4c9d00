#!/usr/bin/env bash
# Builds what a machine with GPUs and without a network is to run, and collects it in one folder that needs nothing
# but what Debian 12 and Ubuntu 24.04 have from the start, a driver, and python3 (3.11) for the scripts.
#   ./dev bundle [OUT]            checks and benchmarks of the kernels: OUT/run. Default: .bundle
#   ./dev bundle --engine [OUT]   daemon, lane, dmuonctl, the Python client, and whole jobs that try them: OUT/join.
#                                 Default: .bundle-engine
# For the kernels' comparison columns the target needs libcublasLt.so.13, and a python3 with torch.
set -euo pipefail
cd "$(dirname "$0")/../.."
build=build/cuda
engine_bytes_max=60000000
# Of Debian 12, the older one of the two.
newest=(GLIBC_2.36 GLIBCXX_3.4.30 CXXABI_1.3.13 GCC_12.0.0)
# The C and C++ runtime, and the driver, for which the build has the tests' fake: the target has its own.
of_the_target='^(ld-linux-x86-64|lib(c|m|dl|rt|pthread|gcc_s|stdc\+\+|cuda))\.so'

# Builds programs and copies them, with the libraries that they need.
collect() { # FOLDER PROGRAM...
  local folder=$1 program
  shift
  [ -f "$build/CMakeCache.txt" ] || cmake --preset cuda
  cmake --build "$build" --target "$@"
  rm -rf "$out"
  mkdir -p "$folder" "$out/lib"
  for program in "$@"; do
    strip -o "$folder/$program" "$build/bin/$program"
    ldd "$build/bin/$program" | awk -v not="$of_the_target" '$2 == "=>" && $1 !~ not {print $3}' |
      xargs -r cp -Lu -t "$out/lib"
  done
  strip "$out"/lib/* 2> /dev/null || true
  check_needs "$folder" "$out/lib"
}

# Names what the target would lack.
check_needs() { # FOLDER...
  local file library version needed lacking=0
  while read -r file; do
    for library in $(readelf -d "$file" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p'); do
      if [ -e "$out/lib/$library" ] || [[ $library =~ $of_the_target ]]; then continue; fi
      echo "bundle: $file needs $library, which is not in it" >&2
      lacking=1
    done
    for version in "${newest[@]}"; do
      needed=$(readelf -V "$file" | grep -o "Name: ${version%%_*}_[0-9.]*" | sort -uV | tail -n 1 | cut -c 7- || true)
      [ "$(printf '%s\n' "$needed" "$version" | sort -V | tail -n 1)" != "$version" ] || continue
      echo "bundle: $file needs $needed, which is newer than $version: build it on Debian 12" >&2
      lacking=1
    done
  done < <(find "$@" -type f)
  return $lacking
}

if [ "${1:-}" = --engine ]; then
  out=${2:-.bundle-engine}
  collect "$out/bin" dmuond dmuond-lane dmuonctl driver_contracts fault_trainer_cuda
  strip --strip-unneeded -o "$out/bin/lane_fault.so" "$build/bin/lane_fault.so"
  mkdir "$out/python"
  cp -r client/python/src/dmuond tests/python/*.py tests/faults/fault_trainer{,_cuda,_torch}.py "$out/python/"
  cp -r tests/gpu_join "$out/join"
  tar -C "$out" --remove-files -c lib | gzip -9 > "$out/lib.tar.gz"
  find "$out" -name __pycache__ -prune -exec rm -r {} +
  bytes=$(du -s --apparent-size --block-size=1 "$out" | cut -f 1)
  printf '%s: %d.%d MB\n' "$out" $((bytes / 1000000)) $((bytes / 100000 % 10))
  [ "$bytes" -le $engine_bytes_max ] || { echo "bundle: that is more than $engine_bytes_max bytes" >&2; exit 1; }
else
  out=${1:-.bundle}
  collect "$out" driver_contracts cuda_device_test gemm_check muon_check preset_steps \
    symmetric_gemm_bench muon_update_bench muon_lane_bench muon_tune pass_bench
  gzip -9 "$out"/lib/libopenblas.so.*  # takes a quarter of its room; `run` unpacks it
  cp tools/gpu/run tests/kernels/cuda/preset_steps.py tests/python/originals.py "$out/"
  du -sh "$out"
fi
