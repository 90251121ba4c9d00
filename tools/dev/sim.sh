# shellcheck shell=bash
# Sourced by ./dev: the simulations of the state machines, far beyond what every test run does.

# sim [--runs N] [--seed S]: N schedules of each machine from seed S on, on all cores. A schedule
# that fails prints the seed that replays it.
cmd_sim() {
  local runs=10000000 seed=1
  while [ $# -gt 0 ]; do
    case $1 in
      --runs) runs=$2; shift ;;
      --seed) seed=$2; shift ;;
      *) die "sim: unknown option $1 (see ./dev help)" ;;
    esac
    shift
  done
  setup_system programs tests
  build_preset cpu step_simulation_test membership_simulation_test
  local machine core cores failed=0 share pids=()
  cores=$(nproc)
  share=$(((runs + cores - 1) / cores))
  for machine in step membership; do
    say "$machine machine: $runs schedules"
    pids=()
    for ((core = 0; core < cores; ++core)); do
      DMUOND_SCHEDULES=$share DMUOND_FIRST_SEED=$((seed + core * share)) \
        "build/cpu/bin/${machine}_simulation_test" --gtest_brief=1 &
      pids+=($!)
    done
    for core in "${pids[@]}"; do wait "$core" || failed=1; done
  done
  [ "$failed" = 0 ] || die "a schedule fails; DMUOND_SEED=… replays it"
}
