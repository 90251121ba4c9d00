// The step machines under seeded schedules: schedules.h says which.
#include <iostream>
#include <string>

#include "gtest/gtest.h"
#include "tests/scheduler/schedules.h"
#include "tests/scheduler/step_simulator.h"

namespace dmuond::scheduler {
namespace {

using testing::SimulatedWorlds;
using testing::SimulationCounts;
using testing::StepSimulator;

TEST(StepSimulationTest, EveryScheduleEndsWithTheSameDecisionsEverywhereAndNobodyWaiting) {
  const auto worlds = SimulatedWorlds();
  const auto [first, schedules] = testing::SchedulesFromEnvironment(/*by_default=*/100'000);
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
    all.reformations += counts.reformations;
    all.redone += counts.redone;
    all.begun += counts.begun;
  }
  std::cout << schedules << " schedules: " << all.commits << " steps, " << all.pushes << " pushes, "
            << all.skips << " skips, " << all.aborts << " aborts, " << all.refusals << " refusals, "
            << all.goes << " rail operations, " << all.repeated_answers
            << " answers to repeated submissions, " << all.replacements << " trainers replaced, "
            << all.begun << " attempts told to nodes without trainers, " << all.reformations
            << " new epochs, in which lanes had to apply " << all.redone << " commits again\n";
  if (schedules < 1'000) return;
  for (int64_t count : {all.commits, all.pushes, all.skips, all.aborts, all.refusals, all.goes,
                        all.repeated_answers, all.replacements, all.reformations, all.begun}) {
    EXPECT_GT(count, static_cast<int64_t>(schedules / 50));
  }
}

}  // namespace
}  // namespace dmuond::scheduler
