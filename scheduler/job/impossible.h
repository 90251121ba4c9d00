// What a state machine does with an event that its state cannot have: somebody's mistake, not bad
// luck. In tests the program ends, so that the mistake is found; the product refuses the event, and
// says so in its log.
//
//   if (state_ != State::kStarting) return Impossible("LaneSet", Name(state_), "ready");
#ifndef DMUOND_SCHEDULER_JOB_IMPOSSIBLE_H_
#define DMUOND_SCHEDULER_JOB_IMPOSSIBLE_H_

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace dmuond::scheduler {

// Hears of refused events. Null: they end the program. A program that is to go on sets it first
// thing.
inline std::atomic<void (*)(const std::string& what)> on_impossible{nullptr};

// Always false, for who refuses the event by it.
inline bool Impossible(absl::string_view machine, absl::string_view state,
                       absl::string_view event) {
  const std::string what = absl::StrCat(machine, " in state ", state, " cannot have: ", event);
  auto* const say = on_impossible.load();
  if (say == nullptr) {
    std::fprintf(stderr, "%s\n", what.c_str());
    std::abort();
  }
  say(what);
  return false;
}

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_JOB_IMPOSSIBLE_H_
