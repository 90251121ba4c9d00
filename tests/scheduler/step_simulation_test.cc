// The step machines under seeded schedules. DMUOND_SEED=… replays one; DMUOND_SCHEDULES=… sets how
// many are run.
#include <chrono>
#include <cstdlib>
#include <iostream>
#include <string>

#include "gtest/gtest.h"
#include "tests/scheduler/step_simulator.h"

namespace dmuond::scheduler {
namespace {

using testing::SimulatedWorlds;
using testing::SimulationCounts;
using testing::StepSimulator;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr uint64_t kSchedules = 10'000;
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer) || __has_feature(address_sanitizer)
constexpr uint64_t kSchedules = 10'000;
#else
constexpr uint64_t kSchedules = 100'000;
#endif
#else
constexpr uint64_t kSchedules = 100'000;
#endif

uint64_t FromEnvironment(const char* name, uint64_t otherwise) {
  const char* value = std::getenv(name);
  return value == nullptr ? otherwise : std::strtoull(value, nullptr, 10);
}

TEST(StepSimulationTest, EveryScheduleEndsWithTheSameDecisionsEverywhereAndNobodyWaiting) {
  const auto worlds = SimulatedWorlds();
  const bool replay = std::getenv("DMUOND_SEED") != nullptr;
  const uint64_t first = FromEnvironment("DMUOND_SEED", 1);
  const uint64_t schedules = replay ? 1 : FromEnvironment("DMUOND_SCHEDULES", kSchedules);
  SimulationCounts all;
  for (uint64_t seed = first; seed < first + schedules; ++seed) {
    StepSimulator simulator(worlds[seed % worlds.size()], seed);
    const std::string failure = simulator.Run();
    ASSERT_EQ(failure, "") << "replay with DMUOND_SEED=" << seed;
    const SimulationCounts& counts = simulator.counts();
    all.commits += counts.commits;
    all.pushes += counts.pushes;
    all.skips += counts.skips;
    all.aborts += counts.aborts;
    all.refusals += counts.refusals;
    all.goes += counts.goes;
    all.repeated_answers += counts.repeated_answers;
    all.replacements += counts.replacements;
  }
  std::cout << schedules << " schedules: " << all.commits << " steps, " << all.pushes << " pushes, "
            << all.skips << " skips, " << all.aborts << " aborts, " << all.refusals << " refusals, "
            << all.goes << " rail operations, " << all.repeated_answers
            << " answers to repeated submissions, " << all.replacements << " trainers replaced\n";
  if (schedules < 1'000) return;
  for (int64_t count : {all.commits, all.pushes, all.skips, all.aborts, all.refusals, all.goes,
                        all.repeated_answers, all.replacements}) {
    EXPECT_GT(count, static_cast<int64_t>(schedules / 50));
  }
}

}  // namespace
}  // namespace dmuond::scheduler
