# shellcheck shell=bash
# Sourced by ./dev: configuring and building a preset.

# Of a folder that is made: whether it compiles several sources at a time, and whether tests are part of it.
UNITY=ON TESTS=ON

# One build of a preset at a time: who comes second waits, and finds the work done.
build_preset() { # PRESET [TARGET...]
  mkdir -p build || return
  (
    flock 9
    build_alone "$@" 9>&-
  ) 9> "build/$1.lock"
}

# As build_preset, without building.
configure_preset() { # PRESET
  mkdir -p build || return
  (
    flock 9
    configure "$1" 9>&-
  ) 9> "build/$1.lock"
}

build_alone() { # PRESET [TARGET...]
  local preset=$1 nvcc
  shift
  case $preset in
    cuda)
      nvcc=$(find_nvcc) || die "the cuda preset needs nvcc, which is neither on PATH nor in /usr/local/cuda/bin"
      export CUDACXX=${CUDACXX:-$nvcc}
      ;;
    asan | tsan) setup_system sanitizers || return ;;
  esac
  configure "$preset" || return
  [ "$preset" != cpu ] || ln -sfn build/cpu/compile_commands.json compile_commands.json  # for editors
  cmake --build --preset "$preset" -j "$(count_jobs)" ${@:+--target "$@"}
}

# Of the folder that programs alone are built in tests are no part, nor what they need, until a command builds them.
build_programs() { TESTS=OFF build_preset cpu programs; }

# Makes the preset's folder, or adds tests to it, which compiles nothing anew. A folder that is there keeps its UNITY,
# which is said where it would have been made otherwise.
configure() { # PRESET
  local folder=build/$1 options=() unity=${DMUOND_UNITY:-$UNITY} has
  case $unity in ON | OFF) ;; *) die "DMUOND_UNITY is ON or OFF, not $unity" ;; esac
  if [ ! -f "$folder/build.ninja" ]; then
    # Also where it is ON by default: a configuration that has failed may have left OFF.
    options=("-DDMUOND_TESTS=$TESTS")
    case $1 in cpu | cuda) options+=("-DDMUOND_BENCH=$TESTS") ;; esac
    cmake --preset "$1" "-DDMUOND_UNITY=$unity" "${options[@]}"
    return
  fi
  if [ "$TESTS" = ON ] && [ "$(cached "$folder" DMUOND_TESTS)" = OFF ]; then
    options=(-DDMUOND_TESTS=ON -DDMUOND_BENCH=ON)
  fi
  has=$(cached "$folder" DMUOND_UNITY)
  case $1 in asan | tsan) has=$unity ;; esac  # always a unity build
  if [ "$has" != "$unity" ]; then
    if [ -n "${DMUOND_UNITY:-}" ]; then
      say "DMUOND_UNITY was $has in $folder and is $unity now: all of it is compiled anew"
      options+=("-DDMUOND_UNITY=$unity")
    elif [ "$unity" = OFF ]; then
      say "$folder compiles several sources at a time, as it was made; DMUOND_UNITY=OFF makes it one at a time, once from nothing"
    fi
  fi
  [ ${#options[@]} = 0 ] || cmake "${options[@]}" "$folder"
}

cached() { sed -n "s/^$2:[A-Z]*=//p" "$1/CMakeCache.txt"; } # FOLDER NAME

build_python() {
  [ ! -d client/python ] ||
    "$PYTHON" tools/dev/python_protos.py proto client/python/src/dmuond/_proto
}

# What tests, demo and benchmarks run: this preset's programs, before any that are installed.
use_programs() { # PRESET
  export DMUOND_BIN_DIR=$PWD/build/$1/bin
  export PATH=$DMUOND_BIN_DIR:$PATH
}
