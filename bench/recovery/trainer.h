// A trainer process that does nothing but step, and writes down when. It is this program again,
// with --trainer_rank.
#ifndef DMUOND_BENCH_RECOVERY_TRAINER_H_
#define DMUOND_BENCH_RECOVERY_TRAINER_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "bench/common/model.h"
#include "tests/client/daemon_process.h"

namespace dmuond::bench {

// Nanoseconds of CLOCK_MONOTONIC, the same in all processes.
[[nodiscard]] int64_t Now();

// A step: from the call until its weights lie there. The first record of a trainer is its session,
// from before OpenSession until its buffers are attached.
struct Record {
  enum class Kind : int64_t { kSession = 0, kCommitted = 1, kOther = 2 };
  int64_t begin = 0;
  int64_t end = 0;
  int64_t step = 0;
  Kind kind = Kind::kOther;
};

struct TrainerOptions {
  std::string address;
  int32_t rank = 0;
  int32_t trainers = 1;
  Model model{.matrices = {{.count = 4}}};
  bool resume = false;
  int64_t steps = 0;  // committed, then it leaves; 0: it never does
  int64_t trainer_state_bytes = 0;
};

class Trainer {
 public:
  // `log`: a file that does not exist yet.
  static absl::StatusOr<Trainer> Start(const TrainerOptions& options, const std::string& log);

  // What it has written so far, from the `first` record on.
  [[nodiscard]] std::vector<Record> Records(size_t first = 0) const;
  // The first committed step that it began after `time`; an error when there is none in a minute.
  absl::StatusOr<Record> WaitForStepAfter(int64_t time) const;
  absl::StatusOr<Record> WaitForSession() const;
  [[nodiscard]] testing::ChildProcess& process() const { return *process_; }

 private:
  Trainer(std::unique_ptr<testing::ChildProcess> process, std::string log)
      : process_(std::move(process)), log_(std::move(log)) {}
  [[nodiscard]] absl::Status Missing(const std::string& what) const;

  std::unique_ptr<testing::ChildProcess> process_;
  std::string log_;
};

// A trainer's whole work.
[[nodiscard]] absl::Status RunTrainer(int32_t rank);

}  // namespace dmuond::bench

#endif  // DMUOND_BENCH_RECOVERY_TRAINER_H_
