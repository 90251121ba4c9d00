# shellcheck shell=bash
# Sourced by ./dev: configuring and building a preset.

# One build of a preset at a time: who comes second waits, and finds the work done.
build_preset() { # PRESET [TARGET...]
  mkdir -p build || return
  (
    flock 9
    build_alone "$@" 9>&-
  ) 9> "build/$1.lock"
}

build_alone() { # PRESET [TARGET...]
  local preset=$1 nvcc
  shift
  if [ "$preset" = cuda ]; then
    nvcc=$(find_nvcc) || die "the cuda preset needs nvcc, which is neither on PATH nor in /usr/local/cuda/bin"
    export CUDACXX=${CUDACXX:-$nvcc}
  fi
  [ -f "build/$preset/build.ninja" ] || cmake --preset "$preset" "-DDMUOND_UNITY=${DMUOND_UNITY:-OFF}" || return
  [ "$preset" != cpu ] || ln -sfn build/cpu/compile_commands.json compile_commands.json  # for editors
  cmake --build --preset "$preset" -j "$(count_jobs)" ${@:+--target "$@"}
}

build_python() {
  [ ! -d client/python ] ||
    "$PYTHON" tools/dev/python_protos.py proto client/python/src/dmuond/_proto
}

# What tests, demo and benchmarks run: this preset's programs, before any that are installed.
use_programs() { # PRESET
  export DMUOND_BIN_DIR=$PWD/build/$1/bin
  export PATH=$DMUOND_BIN_DIR:$PATH
}
