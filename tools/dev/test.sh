# shellcheck shell=bash
# Sourced by ./dev: building and running tests.

CTEST_UNDER=() # a command that ctest runs under

cmd_test() {
  local sanitizers=() cpp=1 python=1 more=() failed=()
  while [ $# -gt 0 ]; do
    case $1 in
      --asan | --tsan) sanitizers+=("${1#--}") ;;
      --all) sanitizers=(asan tsan) ;;
      --cpp) python= ;;
      --python) cpp= ;;
      --soak) export DMUOND_SOAK=1 ;;
      --faults=*) export DMUOND_FAULTS=${1#*=} ;;
      --) shift; more=("$@"); break ;;
      *) die "test: unknown option $1 (see ./dev help)" ;;
    esac
    shift
  done
  setup_all
  rm -rf build/test-logs
  mkdir -p build/test-logs

  say "building"
  build_preset cpu
  build_python
  use_programs cpu
  if [ -n "$cpp" ]; then
    say "C++ tests"
    run_ctest cpu 2>&1 | tee build/test-logs/cpu.log || failed+=(ctest)
  fi
  if [ -n "$python" ]; then
    say "Python tests"
    "$PYTHON" -m pytest --junitxml=build/test-logs/pytest.xml "${more[@]}" 2>&1 | tee build/test-logs/pytest.log || failed+=(pytest)
  fi
  local sanitizer
  for sanitizer in "${sanitizers[@]}"; do
    say "C++ tests under $sanitizer"
    "test_$sanitizer" 2>&1 | tee "build/test-logs/$sanitizer.log" || failed+=("$sanitizer")
  done
  show_summary | tee build/test-logs/summary.txt
  [ ${#failed[@]} = 0 ] || die "failed: ${failed[*]}"
}

# The closing lines of every test run, together, and what was skipped: the end of the output tells the whole.
show_summary() {
  local run
  for run in cpu pytest asan tsan; do
    [ -f "build/test-logs/$run.log" ] || continue
    echo
    echo "$run:"
    case $run in
      pytest) tail -n 1 "build/test-logs/$run.log" ;;
      *) sed -n '/tests passed,.*tests failed/,$p; /^No tests were found/p' "build/test-logs/$run.log" ;;
    esac
  done
  ! grep -q '^DMUOND_CUDA_INCLUDE:.*-NOTFOUND' build/cpu/CMakeCache.txt ||
    printf '\nleft out: tests on a fake CUDA driver, which need the headers of a CUDA toolkit (CUDA_HOME, /usr/local/cuda)\n'
  "$PYTHON" tools/dev/skipped.py build/test-logs build
}

run_ctest() { # PRESET [OPTION...]
  local preset=$1
  shift
  "${CTEST_UNDER[@]}" ctest --test-dir "build/$preset" --output-on-failure --no-label-summary \
    --no-tests=error -j "$(count_jobs)" "$@"
}

# errexit does not hold inside the two functions below, whose result is asked for: hence each `|| return`.
test_asan() {
  build_preset asan || return
  run_under_asan -LE fuzz
}

run_under_asan() { # OPTION...
  ASAN_OPTIONS=detect_leaks=1:strict_string_checks=1 UBSAN_OPTIONS=print_stacktrace=1 \
    run_ctest asan "$@"
}

cmd_fuzz() {
  local which=.
  [ $# = 0 ] || [ "$*" = --half ] || die "fuzz takes no argument but --half (see ./dev help)"
  setup_all
  build_preset asan
  # By turns, those with odd or even places in the list.
  [ $# = 0 ] || which=$(ctest --test-dir build/asan -N -L fuzz | sed -n 's/^ *Test *#[0-9]*: //p' |
    awk -v odd=$((${DMUOND_FIRST_SEED:-1} % 2)) 'NR % 2 == odd' | paste -sd'|')
  run_under_asan -L fuzz -R "$which"
}

# That a program with the label tsan locks with instrumented code alone. abseil's own libraries may
# use their locks among themselves; what counts is what our code asks for.
check_tsan_program() { # PROGRAM
  local locks
  if ldd "$1" | grep -q libgrpc; then
    say "$1 links gRPC but carries the label tsan"
    return 1
  fi
  locks=$(nm --undefined-only --demangle "$1" |
    grep -E 'absl::([a-z0-9_]+::)?(Mutex|CondVar|Condition|Notification|Barrier|BlockingCounter|ReaderMutexLock|synchronization_internal)\b') || true
  if [ -n "$locks" ]; then
    say "$1 carries the label tsan and locks with abseil's, which are not instrumented:"
    echo "$locks" >&2
    return 1
  fi
}

test_tsan() {
  local program
  build_preset tsan tsan_tests || return
  # Only instrumented code may synchronise: Debian's gRPC is not, and would hide or invent races.
  for program in build/tsan/bin/*_test; do
    check_tsan_program "$program" || return
  done
  # Some kernels place memory at random where this sanitizer's runtime cannot follow.
  ! setarch -R true 2>/dev/null || CTEST_UNDER=(setarch -R)
  TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1:suppressions=$PWD/tools/dev/tsan-suppressions.txt \
    run_ctest tsan -L tsan
}
