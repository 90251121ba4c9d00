// One measurement: a model, a daemon of its own, trainers that do nothing but step. Trainers are
// processes, as in a job: this program again, with --trainer_rank and the flags below.
#ifndef DMUOND_BENCH_STEP_SCENARIO_H_
#define DMUOND_BENCH_STEP_SCENARIO_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "dmuond/client/types.h"

namespace dmuond::bench {

struct Scenario {
  std::string name;
  int64_t rows = 0;  // of each matrix
  int64_t cols = 0;
  int matrices = 0;  // on Muon; 0: one AdamW parameter of rows * cols elements
  int trainers = 1;
  int lanes = 1;
  int threads = 1;  // of each lane
  int steps = 1;    // measured
  int warmup = 1;

  [[nodiscard]] int64_t parameters() const { return rows * cols * (matrices == 0 ? 1 : matrices); }
};

struct Measured {
  std::vector<double> step_us;              // of rank 0, from Step() to the weights, ascending
  std::vector<client::StepTiming> timings;  // as the lanes report them, one for each step but one
  [[nodiscard]] double Percentile(double q) const;
};

[[nodiscard]] absl::StatusOr<Measured> Run(const Scenario& scenario);

// Whether this process was started as a trainer, and its whole work.
[[nodiscard]] bool IsTrainer();
[[nodiscard]] absl::Status RunTrainer();

}  // namespace dmuond::bench

#endif  // DMUOND_BENCH_STEP_SCENARIO_H_
