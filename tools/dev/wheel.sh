# shellcheck shell=bash
# Sourced by ./dev: the two wheels, the client's and the programs'.

setup_wheel() { # PART...: of Debian's packages, besides those of wheels
  local missing
  setup_system programs wheels "$@"
  need_python
  missing=$(missing_python wheels)
  [ -n "$missing" ] || return 0
  say "installing Python packages into $("$PYTHON" -c 'import sys; print(sys.prefix)'):" $missing
  "$PYTHON" -m pip install -q $missing
}

# ./dev wheel [--cpu] [DIR]: DIR/dmuond-*.whl and DIR/dmuond_engine-*.whl, for GPUs where there is nvcc.
cmd_wheel() {
  local preset=cuda out
  if [ "${1:-}" = --cpu ]; then
    preset=cpu
    shift
  elif ! find_nvcc > /dev/null; then
    say "there is no nvcc: the engine is built for CPUs alone, and its version ends with +cpu"
    preset=cpu
  fi
  case ${1:-} in -*) die "wheel: unknown option $1 (see ./dev help)" ;; esac
  [ $# -le 1 ] || die "wheel takes one folder"
  out=${1:-dist}
  if [ "$preset" = cpu ]; then
    setup_wheel
    build_programs
  else
    setup_wheel tests  # muon_tune is built beside the benchmarks, which need theirs
    build_preset cuda programs
  fi
  mkdir -p "$out"
  rm -f "$out"/dmuond-*.whl "$out"/dmuond_engine-*.whl
  # Files in wheels have the commit's time, so that the same commit gives the same wheels.
  SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2> /dev/null || date +%s)}
  export SOURCE_DATE_EPOCH
  "$PYTHON" -m pip wheel -q --no-deps --no-build-isolation -w "$out" client/python
  "$PYTHON" tools/wheel/engine.py "build/$preset" "$out"
}
