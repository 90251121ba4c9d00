// The membership machine under seeded schedules: schedules.h says which.
#include <iostream>
#include <string>

#include "gtest/gtest.h"
#include "tests/scheduler/membership_simulator.h"
#include "tests/scheduler/schedules.h"

namespace dmuond::scheduler {
namespace {

using testing::MembershipCounts;
using testing::MembershipSimulator;

TEST(MembershipSimulationTest, EveryGroupThatIsLeftInPeaceFormsAndNoOlderEpochReturns) {
  const testing::Schedules schedules = testing::SchedulesFromEnvironment(/*by_default=*/100'000);
  MembershipCounts all;
  for (uint64_t seed = schedules.first; seed < schedules.first + schedules.count; ++seed) {
    MembershipSimulator simulator(seed);
    ASSERT_EQ(simulator.Run(), "") << "replay with DMUOND_SEED=" << seed;
    const MembershipCounts& counts = simulator.counts();
    all.formed += counts.formed;
    all.broken += counts.broken;
    all.deaths += counts.deaths;
    all.coordinator_deaths += counts.coordinator_deaths;
    all.stops += counts.stops;
    all.cut_links += counts.cut_links;
    all.refused += counts.refused;
    all.silences += counts.silences;
  }
  std::cout << schedules.count << " schedules: " << all.formed << " groups formed, " << all.broken
            << " broken, " << all.silences << " of them by silence, " << all.deaths
            << " members and " << all.coordinator_deaths << " coordinators killed, " << all.stops
            << " processes stopped, " << all.cut_links << " links cut, " << all.refused
            << " joins refused\n";
  if (schedules.count < 1'000) return;
  for (int64_t count : {all.formed, all.broken, all.silences, all.deaths, all.coordinator_deaths,
                        all.stops, all.cut_links, all.refused}) {
    EXPECT_GT(count, static_cast<int64_t>(schedules.count / 50));
  }
}

}  // namespace
}  // namespace dmuond::scheduler
