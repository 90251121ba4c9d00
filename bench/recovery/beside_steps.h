// How much a snapshot lengthens the steps beside which it is made.
#ifndef DMUOND_BENCH_RECOVERY_BESIDE_STEPS_H_
#define DMUOND_BENCH_RECOVERY_BESIDE_STEPS_H_

#include <vector>

#include "absl/status/statusor.h"
#include "bench/recovery/trainer.h"

namespace dmuond::bench {

struct BesideSteps {
  int snapshots = 0;
  double snapshot_s = 0;       // median, from the request until it exists
  int calm_steps = 0;          // of the same run, with no snapshot meanwhile
  double calm_step_s = 0;      // their median
  std::vector<double> step_s;  // each that any snapshot was made beside, in part or whole
  double sum_s = 0;            // of those
  [[nodiscard]] double ratio() const {
    return sum_s / (static_cast<double>(step_s.size()) * calm_step_s);
  }
};

// One trainer, one lane with `threads` threads, and `snapshots` that are asked for while it steps,
// with as many calm steps before each as it takes to have three.
absl::StatusOr<BesideSteps> SnapshotsBesideSteps(const Model& model, int threads, int snapshots);

}  // namespace dmuond::bench

#endif  // DMUOND_BENCH_RECOVERY_BESIDE_STEPS_H_
