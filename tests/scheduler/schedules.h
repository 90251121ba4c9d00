// Which seeded schedules a simulation runs: DMUOND_SEED=… replays one, DMUOND_SCHEDULES=… sets how
// many are run, DMUOND_FIRST_SEED=… where they begin. DMUOND_HAND_OVERS=0: no machine is handed
// over to another one, from its record; all else in a schedule stays as it is.
#ifndef DMUOND_TESTS_SCHEDULER_SCHEDULES_H_
#define DMUOND_TESTS_SCHEDULER_SCHEDULES_H_

#include <cstdint>
#include <cstdlib>

#include "tests/sanitized.h"

namespace dmuond::scheduler::testing {

struct Schedules {
  uint64_t first = 1;
  uint64_t count = 1;
};

inline Schedules SchedulesFromEnvironment(uint64_t by_default) {
  const auto number = [](const char* name, uint64_t otherwise) {
    const char* value = std::getenv(name);
    return value == nullptr ? otherwise : std::strtoull(value, nullptr, 10);
  };
  if (std::getenv("DMUOND_SEED") != nullptr) return {number("DMUOND_SEED", 1), 1};
  return {number("DMUOND_FIRST_SEED", 1),
          number("DMUOND_SCHEDULES", by_default / dmuond::testing::kSlowdown)};
}

inline bool HandOversFromEnvironment() {
  const char* value = std::getenv("DMUOND_HAND_OVERS");
  return value == nullptr || std::strtoull(value, nullptr, 10) != 0;
}

}  // namespace dmuond::scheduler::testing

#endif  // DMUOND_TESTS_SCHEDULER_SCHEDULES_H_
