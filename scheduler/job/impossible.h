// An event comes to a state machine whose state cannot have it. That is a mistake in the program. A
// program under test ends, so that the mistake is found; the product refuses the event and says so
// in its log.
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

// Is called with each refused event. Null: such an event ends the program. A program that is to go
// on sets this before anything else.
inline std::atomic<void (*)(const std::string& what)> on_impossible{nullptr};

// Always false: a machine that returns whether it took the event can return this.
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
