# shellcheck shell=bash
# Sourced by ./dev: building and running tests.

CTEST_UNDER=() # a command that ctest runs under

cmd_test() {
  local all= sanitizers=() parts=() how=() more=() failed=()
  while [ $# -gt 0 ]; do
    case $1 in
      --asan | --tsan) sanitizers+=("${1#--}") ;;
      --all) all=--all sanitizers=(asan tsan) ;;
      --cpp | --python) parts+=("${1#--}") ;;
      --cpp=?* | --python=?* | --changed)
        [ ${#how[@]} = 0 ] || die "test: one of --cpp=NAME, --python=NAME and --changed at a time"
        how=("${1%%=*}")
        [ "$1" = --changed ] || how+=("${1#*=}")
        ;;
      --soak) export DMUOND_SOAK=1 ;;
      --faults=all) export DMUOND_FAULTS=all ;;
      --) shift; more=("$@"); break ;;
      *) die "test: unknown option $1 (see ./dev help)" ;;
    esac
    shift
  done
  [ ${#parts[@]} -gt 0 ] || [ ${#how[@]} -gt 0 ] || parts=(cpp python)
  [ ${#how[@]} = 0 ] || [ -z "$all${sanitizers[*]}${parts[*]}" ] ||
    die "test: beside ${how[0]}, which says what is run, --all, --asan, --tsan, --cpp and --python have no effect"
  [ ${#more[@]} = 0 ] || [[ "${how[*]} ${parts[*]}" = *python* ]] ||
    die "test: no Python tests are run, which would get: ${more[*]}"
  setup_for programs client tests
  rm -rf build/test-logs
  mkdir -p build/test-logs
  # Simulations and mutations: a tenth of the seeds.
  [ -n "$all" ] || export DMUOND_SCHEDULES=${DMUOND_SCHEDULES:-10000}
  if [ ${#how[@]} = 0 ]; then test_all_of_tier; else test_named; fi
  show_summary | tee build/test-logs/summary.txt
  [ ${#failed[@]} = 0 ] || die "failed: ${failed[*]}"
}

test_all_of_tier() {
  local part sanitizer
  say "building"
  build_preset cpu programs client/all tests/all
  build_python
  use_programs cpu
  for part in "${parts[@]}"; do
    case $part in
      cpp) say "C++ tests"; run_ctest cpu 2>&1 | tee build/test-logs/cpu.log || failed+=(ctest) ;;
      # Who passes something to pytest says how many processes it has.
      python)
        say "Python tests"
        [ ${#more[@]} -gt 0 ] || more=(-n "$(count_waiting_jobs)" --dist=loadfile --no-loadscope-reorder)
        run_pytest $all "${more[@]}"
        ;;
    esac
  done
  for sanitizer in "${sanitizers[@]}"; do
    say "C++ tests under $sanitizer"
    "test_$sanitizer" 2>&1 | tee "build/test-logs/$sanitizer.log" || failed+=("$sanitizer")
  done
}

# The lines of tools/dev/which_tests.py: `cpp FILE [TEST]`, `python ARGUMENT...`.
test_named() {
  local lines kind what filter program files=() python=()
  lines=$("$PYTHON" tools/dev/which_tests.py "${how[0]#--}" "${how[@]:1}") || {
    [ $? = 3 ] || die "tools/dev/which_tests.py failed"
    [ "${how[0]}" = --changed ] && return
    die "test: no test is called '${how[1]}'"
  }
  say "tests:" $'\n'"$lines"
  while read -r kind what filter; do
    case $kind in
      cpp) files+=("$what") ;;
      python) python+=("$what" $filter) ;;
    esac
  done <<< "$lines"
  [ ${#files[@]} = 0 ] || files=($(targets_of "${files[@]}"))
  [ ${#files[@]} = 0 ] || build_preset cpu "${files[@]}"
  [ ${#python[@]} = 0 ] || build_preset cpu programs python_tests
  build_python
  use_programs cpu
  filter=$(sed -n 's/^cpp [^ ]* //p' <<< "$lines" | head -n 1)
  if [ -n "$filter" ]; then  # one test, or those of its name
    for what in "${files[@]}"; do
      program=$(ctest --test-dir build/cpu -N -V -R "^$what\$" | sed -n 's/^.*Test command: \([^ ]*\).*/\1/p')
      DMUOND_CHECKED=1 "$program" "--gtest_filter=$filter" || failed+=("$what")
    done
  elif [ ${#files[@]} -gt 0 ]; then
    run_ctest cpu -R "^($(IFS='|'; echo "${files[*]}"))\$" 2>&1 | tee build/test-logs/cpu.log || failed+=(ctest)
  fi
  [ ${#python[@]} = 0 ] || run_pytest "${python[@]}" "${more[@]}"
}

# Those of them that this build has: without a CUDA toolkit's headers some are no part of it.
targets_of() { # TARGET...
  local target
  configure_preset cpu >&2 || return
  for target; do
    if ninja -C build/cpu -t query "$target" > /dev/null 2>&1; then
      echo "$target"
    else
      say "left out, since this build does not have it: $target"
    fi
  done
}

run_pytest() { # ARGUMENT...
  "$PYTHON" -m pytest --junitxml=build/test-logs/pytest.xml "$@" 2>&1 |
    tee build/test-logs/pytest.log || failed+=(pytest)
}

# Tests wait more than they compute.
count_waiting_jobs() { echo $((2 * $(count_jobs))); }

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
    --no-tests=error -j "$(count_waiting_jobs)" "$@"
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
  setup_for programs client tests
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
