// What surviving costs a step to which nothing happens.
#ifndef DMUOND_BENCH_RECOVERY_CALM_H_
#define DMUOND_BENCH_RECOVERY_CALM_H_

#include "absl/status/statusor.h"

namespace dmuond::bench {

struct Calm {
  int rounds = 0;
  double bare_us = 0;      // median step: no snapshots, no linger, no trainer_state
  double survives_us = 0;  // the same with the defaults, a --snapshot_dir and 1 KiB of state
  // The points of the state machines at which a process may be stopped by a test (fault_point.h).
  double points = 0;    // that all processes together pass in a step
  double point_ns = 0;  // that one costs outside tests
};

// Runs of `steps` steps of two trainers on a job with nothing to compute, bare and surviving in
// turn, `rounds` times. Points are counted by a driver in a run of their own.
absl::StatusOr<Calm> CompareCalm(int rounds, int steps);

}  // namespace dmuond::bench

#endif  // DMUOND_BENCH_RECOVERY_CALM_H_
