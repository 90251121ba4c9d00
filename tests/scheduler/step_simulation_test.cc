// The step machines under seeded schedules: schedules.h says which.
#include <cstdlib>
#include <iostream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_split.h"
#include "gtest/gtest.h"
#include "tests/scheduler/schedules.h"
#include "tests/scheduler/step_simulator.h"

namespace dmuond::scheduler {
namespace {

using testing::SimulatedWorld;
using testing::SimulatedWorlds;
using testing::SimulationCounts;
using testing::StepSimulator;
using testing::WorldBeside;

TEST(StepSimulationTest, EveryScheduleEndsWithTheSameDecisionsEverywhereAndNobodyWaiting) {
  const auto worlds = SimulatedWorlds("job");
  const auto others = SimulatedWorlds("another");
  const auto [first, schedules] = testing::SchedulesFromEnvironment(/*by_default=*/100'000);
  SimulationCounts all;
  for (uint64_t seed = first; seed < first + schedules; ++seed) {
    const size_t world = seed % worlds.size();
    std::vector<const SimulatedWorld*> jobs = {&worlds[world]};
    const bool two = seed / worlds.size() % 4 == 0;
    if (two) jobs.push_back(&others[WorldBeside(world)]);
    StepSimulator simulator(jobs, seed, /*traced=*/schedules == 1);
    const std::string failure = simulator.Run();
    ASSERT_EQ(failure, "") << "replay with DMUOND_SEED=" << seed;
    all.Add(simulator.counts());
  }
  std::cout << schedules << " schedules: " << all.commits << " steps, " << all.pushes << " pushes, "
            << all.skips << " skips, " << all.aborts << " aborts, " << all.refusals << " refusals, "
            << all.goes << " rail operations, " << all.repeated_answers
            << " answers to repeated submissions, " << all.replacements << " trainers replaced, "
            << all.lane_deaths << " lanes (" << all.lane_hangs << " of them hung), "
            << all.other_bits << " lanes with other bits, " << all.daemon_deaths << " daemons and "
            << all.coordinator_deaths << " coordinators killed, " << all.broken_links
            << " links cut, " << all.departures << " planned departures, " << all.snapshots_seen
            << " snapshots found by who left a broken group, " << all.reformations
            << " new epochs with their memory, in which lanes "
            << "had to apply " << all.redone << " commits again, " << all.rollbacks
            << " rollbacks, heard of by " << all.acknowledged << " trainers, "
            << all.weights_awaited << " looks at weights that had not come, " << all.snapshots
            << " snapshots, " << all.snapshots_of_others << " of other groups, "
            << all.failed_snapshots << " failed, " << all.hung_snapshots
            << " given up because a disk hung, " << all.lacking_memory
            << " nodes without memory to go on from one, " << all.begun
            << " attempts told to nodes without trainers, " << all.hand_overs
            << " machines made anew from their records, " << all.ended_jobs
            << " jobs ended or discarded and begun once more, " << all.parked
            << " times that a job was parked, " << all.lost_jobs
            << " trainers whose job was lost\n";
  if (schedules < 1'000) return;
  for (int64_t count : {all.commits,
                        all.pushes,
                        all.skips,
                        all.aborts,
                        all.refusals,
                        all.goes,
                        all.repeated_answers,
                        all.replacements,
                        all.lane_deaths,
                        all.lane_hangs,
                        all.other_bits,
                        all.daemon_deaths,
                        all.coordinator_deaths,
                        all.broken_links,
                        all.departures,
                        all.reformations,
                        all.redone,
                        all.rollbacks,
                        all.acknowledged,
                        all.weights_awaited,
                        all.snapshots,
                        all.snapshots_of_others,
                        all.failed_snapshots,
                        all.hung_snapshots,
                        all.lacking_memory,
                        all.parked,
                        all.ended_jobs,
                        all.lost_jobs,
                        all.hand_overs + (testing::HandOversFromEnvironment() ? 0 : 1'000'000'000),
                        all.begun}) {
    EXPECT_GT(count, static_cast<int64_t>(schedules / 200));
  }
  // Rare: in few schedules there may be none.
  if (schedules >= 100'000) {
    EXPECT_GT(all.snapshots_seen, static_cast<int64_t>(schedules / 2000));
  }
}

using Order = StepSimulator::Order;

std::string OrderedRun(const SimulatedWorld& world, uint64_t seed, Order order, int64_t after,
                       bool traced = false) {
  StepSimulator simulator({&world}, seed, traced);
  simulator.Plan(order, after);
  return simulator.Run();
}

// Whatever the machines are at: a new job can begin afterwards, and comes to its end.
TEST(StepSimulationTest, PeopleMayEndDiscardDrainAndLoadBetweenAnyTwoEvents) {
  const auto worlds = SimulatedWorlds("job");
  const auto world_of = [&](uint64_t seed) { return &worlds[seed % worlds.size()]; };
  const auto [first, runs] = testing::SchedulesFromEnvironment(/*by_default=*/6'000);
  if (const char* replayed = std::getenv("DMUOND_ORDER"); replayed != nullptr) {
    const std::pair<std::string, std::string> parts = absl::StrSplit(replayed, ':');
    EXPECT_EQ(OrderedRun(*world_of(first), first, static_cast<Order>(std::stoi(parts.first)),
                         std::stoll(parts.second), /*traced=*/true),
              "");
    return;
  }
  for (uint64_t seed = first, left = runs; left > 0; ++seed) {
    StepSimulator without({world_of(seed)}, seed);
    without.Plan(Order::kNone, 0);
    ASSERT_EQ(without.Run(), "") << "replay with DMUOND_SEED=" << seed << " DMUOND_ORDER=0:0";
    // A daemon dies, and its job has a snapshot to go back to.
    if (without.counts().daemon_deaths == 0 || without.counts().rollbacks == 0) continue;
    for (int64_t after = 0; after < without.events() && left > 0; ++after) {
      for (const Order order : {Order::kEndJob, Order::kDiscard, Order::kDrain, Order::kLoad}) {
        ASSERT_EQ(OrderedRun(*world_of(seed), seed, order, after), "")
            << "replay with DMUOND_SEED=" << seed << " DMUOND_ORDER=" << static_cast<int>(order)
            << ":" << after;
        if (left > 0) --left;
      }
    }
  }
}

}  // namespace
}  // namespace dmuond::scheduler
