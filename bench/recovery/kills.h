// How long a job takes to commit again after one of its processes was killed.
#ifndef DMUOND_BENCH_RECOVERY_KILLS_H_
#define DMUOND_BENCH_RECOVERY_KILLS_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace dmuond::bench {

struct Victim {
  enum class Kind { kTrainer, kLane, kDaemon };
  std::string name;
  Kind kind = Kind::kTrainer;
  int nodes = 1;
  int node = 0;         // whose daemon
  double wanted_s = 0;  // at most
};

// Seconds, ascending. Of a trainer: from before its replacement's OpenSession until that one's next
// committed step; of lanes and daemons: from the kill until a step has committed, with its weights,
// that was begun after it. Daemons are started again at once, as a service manager would.
absl::StatusOr<std::vector<double>> Kill(const Victim& victim, int times);

}  // namespace dmuond::bench

#endif  // DMUOND_BENCH_RECOVERY_KILLS_H_
