// Why the jobs of one node have ended since its daemon began, counted. Values alone: a picture of
// the node has a copy.
//
//   ends.Add("TRAINER_LOST");
#ifndef DMUOND_SCHEDULER_JOB_JOB_ENDS_H_
#define DMUOND_SCHEDULER_JOB_JOB_ENDS_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "absl/strings/string_view.h"

namespace dmuond::scheduler {

struct JobEnds {
  // LEFT: all its ranks have closed their sessions. OTHER: whatever is not named here. The rest are
  // reasons of docs/errors.md. A fixed list, so that a monitor knows each of them from the start.
  static constexpr absl::string_view kLeft = "LEFT";
  static constexpr absl::string_view kOther = "OTHER";
  static constexpr std::array<absl::string_view, 15> kReasons = {
      kLeft,       "JOB_ENDED",      "DRAINING",       "TRAINER_LOST",       "LANE_LOST",
      "PEER_LOST", "NODE_NOT_READY", "STATE_LOST",     "SNAPSHOT_BROKEN",    "MEMORY_EXHAUSTED",
      "OTHER_JOB", "WORLD_DIFFERS",  "WEIGHTS_DIFFER", "WEIGHTS_NOT_FINITE", kOther};

  void Add(absl::string_view reason) {
    const auto found = std::find(kReasons.begin(), kReasons.end(), reason);
    const auto index = static_cast<size_t>(found - kReasons.begin());
    ++counts[std::min(index, kReasons.size() - 1)];
  }

  std::array<int64_t, kReasons.size()> counts{};
};

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_JOB_JOB_ENDS_H_
