#!/usr/bin/env bash
# Makes ../src/dmuond/same_bytes.ptx of same_bytes.cu, or the file that is named. Needs nvcc; NVCC says which, else the
# one on PATH or in /usr/local/cuda/bin.
#
#   client/python/kernels/make_ptx.sh [FILE]
#
# Every driver of CUDA 12 and later compiles the text for its device. nvcc names its own release's version of PTX,
# which older drivers refuse; the text says 7.0 instead, and ptxas refuses it if an instruction is newer than that.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
to=${1:-$here/../src/dmuond/same_bytes.ptx}
nvcc=${NVCC:-$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)}
release=$("$nvcc" --version | sed -n 's/.*release \([0-9.]*\),.*/\1/p')

made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT
"$nvcc" -ptx -std=c++17 -O3 -arch=compute_75 -o "$made/ptx" "$here/same_bytes.cu"
{
  echo "// Made of client/python/kernels/same_bytes.cu by make_ptx.sh beside it, with nvcc $release."
  sed -e '/^\/\//d' -e 's/^\.version .*/.version 7.0/' "$made/ptx" | cat -s
} > "$made/same_bytes.ptx"
"$(dirname "$nvcc")/ptxas" -arch=sm_90 -o "$made/cubin" "$made/same_bytes.ptx"
cp "$made/same_bytes.ptx" "$to"
