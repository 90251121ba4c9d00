// One measurement: a model, a daemon of its own, trainers that do nothing but step. Trainers are
// processes, as in a job: this program again, with --trainer_rank and the flags below.
#ifndef DMUOND_BENCH_STEP_SCENARIO_H_
#define DMUOND_BENCH_STEP_SCENARIO_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "bench/common/model.h"
#include "dmuond/client/types.h"

namespace dmuond::bench {

struct Scenario {
  std::string name;
  Model model;
  int trainers = 1;
  int lanes = 1;
  int threads = 1;  // of each lane
  int steps = 1;    // measured
  int warmup = 1;
};

struct Measured {
  std::vector<double> step_us;              // of rank 0, from Step() to the weights, ascending
  std::vector<client::StepTiming> timings;  // as the lanes report them, one for each step but one
  [[nodiscard]] double Percentile(double q) const;
};

[[nodiscard]] absl::StatusOr<Measured> Run(const Scenario& scenario);

// A trainer's whole work.
[[nodiscard]] absl::Status RunTrainer(int32_t rank);

}  // namespace dmuond::bench

#endif  // DMUOND_BENCH_STEP_SCENARIO_H_
