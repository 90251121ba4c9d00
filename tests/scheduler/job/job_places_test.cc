#include "scheduler/job/job_places.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <vector>

namespace dmuond::scheduler {
namespace {

using std::chrono::seconds;
using ::testing::ElementsAre;
using ::testing::Optional;

constexpr seconds kKept{10};

class JobPlacesTest : public ::testing::Test {
 protected:
  std::optional<int32_t> Find(const std::string& job) { return places_.Find(now_, job, running_); }

  TimePoint now_;
  std::vector<JobPlaces::Running> running_{{}, {}, {}};
  JobPlaces places_{3, kKept};
};

TEST_F(JobPlacesTest, EveryNodeIsToldTheSamePlace) {
  EXPECT_THAT(Find("a"), Optional(0));
  EXPECT_THAT(Find("b"), Optional(1));
  EXPECT_THAT(Find("a"), Optional(0)) << "before its first session";
  running_[0].job = "a";
  EXPECT_THAT(Find("a"), Optional(0));
}

TEST_F(JobPlacesTest, AJobThatRunsIsFoundByACoordinatorThatHasJustBegun) {
  running_[2].job = "a";
  EXPECT_THAT(Find("b"), Optional(0));
  EXPECT_THAT(Find("a"), Optional(2));
}

TEST_F(JobPlacesTest, AJobComesBackToWhereItWas) {
  EXPECT_THAT(Find("a"), Optional(0));
  EXPECT_THAT(Find("b"), Optional(1));
  running_ = {{"a"}, {"b"}, {}};
  places_.Look(running_);
  running_ = {{}, {}, {}};
  places_.Look(running_);
  EXPECT_THAT(Find("c"), Optional(2)) << "a place that nobody had comes first";
  EXPECT_THAT(Find("b"), Optional(1));
  EXPECT_THAT(Find("a"), Optional(0));
}

TEST_F(JobPlacesTest, APlaceIsKeptForAWhileForWhoHasAsked) {
  for (const char* job : {"a", "b", "c"}) EXPECT_TRUE(Find(job).has_value());
  EXPECT_EQ(Find("d"), std::nullopt);
  EXPECT_THAT(places_.holders(), ElementsAre("a", "b", "c"));
  now_ += kKept / 2;
  running_[0].job = "a";
  EXPECT_THAT(Find("c"), Optional(2)) << "asked again: it is kept anew";
  now_ += kKept / 2;
  EXPECT_THAT(Find("d"), Optional(1)) << "nobody has come for b";
  EXPECT_EQ(Find("b"), std::nullopt);
}

TEST_F(JobPlacesTest, APlaceIsFreeAsSoonAsItsJobHasEnded) {
  for (const char* job : {"a", "b", "c"}) EXPECT_TRUE(Find(job).has_value());
  running_ = {{"a"}, {"b"}, {"c"}};
  EXPECT_EQ(Find("d"), std::nullopt);
  running_[1].job = "";
  EXPECT_THAT(Find("d"), Optional(1));
  running_[1].job = "d";
  running_[2].job = "";
  places_.Look(running_);
  EXPECT_THAT(Find("b"), Optional(2));
}

TEST_F(JobPlacesTest, APlaceIsFreeAfterAJobThatBeganAndEndedBetweenTwoLooks) {
  for (const char* job : {"a", "b", "c"}) EXPECT_TRUE(Find(job).has_value());
  running_[1].begun = 1;
  EXPECT_THAT(Find("d"), Optional(1));
  EXPECT_EQ(Find("e"), std::nullopt) << "d is still to come";
  running_[1].begun = 2;
  EXPECT_THAT(Find("e"), Optional(1));
}

TEST_F(JobPlacesTest, AJobWhosePlaceWasTakenGetsAnother) {
  EXPECT_THAT(Find("a"), Optional(0));
  running_[0].job = "another";  // by who had asked long before
  EXPECT_THAT(Find("a"), Optional(1));
}

}  // namespace
}  // namespace dmuond::scheduler
