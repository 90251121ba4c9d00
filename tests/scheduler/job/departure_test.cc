#include "scheduler/job/departure.h"

#include <gtest/gtest.h>

#include <chrono>
#include <utility>
#include <variant>
#include <vector>

#include "scheduler/reason.h"

namespace dmuond::scheduler {
namespace {

using std::chrono::seconds;

TEST(DepartureTest, ANodeWithoutAJobGoesAtOnce) {
  NodeJob job({});
  (void)job.OnFormed(TimePoint(), 1);
  Departure departure;
  EXPECT_FALSE(departure.begun());
  EXPECT_TRUE(departure.Begin(job, TimePoint() + seconds(5), seconds(2), true).empty());
  EXPECT_TRUE(job.leaves());
  (void)departure.Advance(TimePoint(), job);
  EXPECT_EQ(departure.state(), Departure::State::kPrepared);
  EXPECT_TRUE(departure.saved().ok());
}

TEST(DepartureTest, NoSessionOpensOnANodeThatLeaves) {
  NodeJob job({});
  (void)job.OnFormed(TimePoint(), 1);
  Departure departure;
  (void)departure.Begin(job, TimePoint() + seconds(5), seconds(2), true);
  node::Actions actions;
  const auto answer = job.Open(TimePoint(), {.id = 1, .world_size = 1, .job = "job"}, {}, actions);
  ASSERT_TRUE(std::holds_alternative<absl::Status>(answer));
  EXPECT_EQ(ReasonOf(std::get<absl::Status>(answer)), "DRAINING");
}

}  // namespace
}  // namespace dmuond::scheduler
