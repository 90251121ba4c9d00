// Strong types for numbers that must not be swapped, and the words that all of dmuond shares.
// docs/architecture.md has the vocabulary.
#ifndef DMUOND_SCHEDULER_TYPES_H_
#define DMUOND_SCHEDULER_TYPES_H_

#include <compare>
#include <cstdint>
#include <utility>

#include "absl/container/inlined_vector.h"

namespace dmuond::scheduler {

// An integer of its own type. Explicit both ways; ordered; hashable.
template <typename Tag, typename Rep>
class Strong {
 public:
  constexpr Strong() = default;
  constexpr explicit Strong(Rep value) : value_(value) {}
  [[nodiscard]] constexpr Rep value() const { return value_; }
  // clang-tidy 14 takes the comparison with 0 in what is generated here for a pointer's.
  constexpr auto operator<=>(const Strong&) const = default;  // NOLINT(modernize-use-nullptr)
  template <typename H>
  friend H AbslHashValue(H state, const Strong& strong) {
    return H::combine(std::move(state), strong.value_);
  }

 private:
  Rep value_{};
};

using StepId = Strong<struct StepIdTag, int64_t>;  // optimizer steps of a job, from 1; 0: none yet
using GroupEpoch = Strong<struct GroupEpochTag, uint32_t>;  // from 1, only grows
using Attempt = Strong<struct AttemptTag, uint64_t>;     // group_epoch << 32 | counter, only grows
using NodeRank = Strong<struct NodeRankTag, int32_t>;    // a daemon, 0 … nodes-1
using LaneIndex = Strong<struct LaneIndexTag, int32_t>;  // a lane within its node = its rail
using LaneId = Strong<struct LaneIdTag, int32_t>;        // node * lanes_per_node + lane index
using TrainerRank = Strong<struct TrainerRankTag, int32_t>;  // 0 … world-1
using UnitId = Strong<struct UnitIdTag, int32_t>;            // index into Plan::units
using BucketId = Strong<struct BucketIdTag, int32_t>;

// Names the state after an attempt, and its snapshot. Ordered by attempt: the larger one is the
// newer. Several may be of one step, with pushes between them.
struct SnapshotId {
  Attempt attempt;
  StepId step;
  auto operator<=>(const SnapshotId&) const = default;
};

// Indices of fragments or boxes. Of sharded tensors most lists have one entry, which needs no
// memory of its own.
using Indices = absl::InlinedVector<int32_t, 4>;

constexpr Attempt MakeAttempt(GroupEpoch epoch, uint32_t counter) {
  return Attempt((uint64_t{epoch.value()} << 32) | counter);
}
constexpr GroupEpoch EpochOf(Attempt attempt) {
  return GroupEpoch(static_cast<uint32_t>(attempt.value() >> 32));
}

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_TYPES_H_
