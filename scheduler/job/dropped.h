// A message between daemons that changes nothing, because it is about another epoch or attempt than
// the present one. A few are on their way whenever an attempt or an epoch ends. Many, or some for
// ever, are a sign that a member and the coordinator are not of one epoch.
//
//   if (auto other = OfAnotherEpoch(ready.epoch(), epoch_)) return Drop(*std::move(other));
//
// Threads: any; there is no state.
#ifndef DMUOND_SCHEDULER_JOB_DROPPED_H_
#define DMUOND_SCHEDULER_JOB_DROPPED_H_

#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "scheduler/types.h"

namespace dmuond::scheduler {

enum class DropReason : uint8_t { kOlderEpoch, kNewerEpoch, kOlderAttempt, kNewerAttempt };
// By DropReason.
inline constexpr std::array<const char*, 4> kDropReasons = {"older_epoch", "newer_epoch",
                                                            "older_attempt", "newer_attempt"};

struct Dropped {
  DropReason reason = DropReason::kOlderEpoch;
  uint64_t said = 0;    // the epoch or attempt that the message is about
  uint64_t wanted = 0;  // the one that it would have to be about
  std::string message;  // its field of MemberMessage or CoordinatorMessage
  int32_t from = 0;     // the node that has said it
};

// nullopt: they are the same.
[[nodiscard]] inline std::optional<Dropped> OfAnotherEpoch(uint32_t said, uint32_t wanted) {
  if (said == wanted) return std::nullopt;
  return Dropped{.reason = said < wanted ? DropReason::kOlderEpoch : DropReason::kNewerEpoch,
                 .said = said,
                 .wanted = wanted};
}

// nullopt: it is the same, or a newer one.
[[nodiscard]] inline std::optional<Dropped> OfAnOlderEpoch(uint32_t said, uint32_t wanted) {
  return said < wanted ? OfAnotherEpoch(said, wanted) : std::nullopt;
}

// nullopt: they are the same.
[[nodiscard]] inline std::optional<Dropped> OfAnotherAttempt(Attempt said, Attempt wanted) {
  if (said == wanted) return std::nullopt;
  if (EpochOf(said) != EpochOf(wanted)) {
    return OfAnotherEpoch(EpochOf(said).value(), EpochOf(wanted).value());
  }
  return Dropped{.reason = said < wanted ? DropReason::kOlderAttempt : DropReason::kNewerAttempt,
                 .said = said.value(),
                 .wanted = wanted.value()};
}

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_JOB_DROPPED_H_
