#include "scheduler/weight_digests.h"

#include <optional>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dmuond::scheduler {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// A rank's registration: "w" of 8 x 4 on route muon, whole or some rows of it.
Registration OfRows(int32_t rank, int64_t begin = 0, int64_t end = 8, Route route = Route::kMuon) {
  Registration registration;
  registration.rank = TrainerRank(rank);
  Parameter& parameter = registration.parameters.emplace_back();
  parameter.name = "w";
  parameter.shape = {8, 4};
  parameter.route = route;
  Fragment& fragment = registration.fragments.emplace_back();
  fragment.rank = registration.rank;
  fragment.box = {.begin = {begin, 0}, .end = {end, 4}};
  return registration;
}

class WeightDigestsTest : public ::testing::Test {
 protected:
  // What is said when the rank comes with a digest; "" where nothing differs.
  std::string Set(const Registration& registration, const std::string& digest,
                  bool broadcast = false) {
    const std::optional<Message> difference = digests_.Set(registration, {digest}, broadcast);
    return difference.has_value() ? difference->text : "";
  }

  WeightDigests digests_;
};

TEST_F(WeightDigestsTest, EqualReplicasAndDisjointShardsAreWhatShallBe) {
  EXPECT_EQ(Set(OfRows(0), "a"), "");
  EXPECT_EQ(Set(OfRows(1), "a"), "");
  digests_.Clear();
  EXPECT_EQ(Set(OfRows(0, 0, 4), "a"), "");
  EXPECT_EQ(Set(OfRows(1, 4, 8), "b"), "");
}

TEST_F(WeightDigestsTest, ADifferenceNamesParameterBoxBothRanksAndTheWaysOut) {
  EXPECT_EQ(Set(OfRows(3), "a"), "");
  const std::optional<Message> difference = digests_.Set(OfRows(1), {"b"}, false);
  ASSERT_TRUE(difference.has_value());
  EXPECT_THAT(
      difference->text,
      AllOf(HasSubstr("parameter 'w', box [0:8, 0:4]"), HasSubstr("of rank 1 and of rank 3"),
            HasSubstr("broadcast=True"), HasSubstr("another name or box")));
  const Metadata metadata{
      {"parameter", "w"}, {"box", "[0:8, 0:4]"}, {"rank", "1"}, {"other_rank", "3"}};
  EXPECT_EQ(difference->metadata, metadata);
}

TEST_F(WeightDigestsTest, TheSameTensorUnderOtherNamesIsNobodysBusiness) {
  Registration other = OfRows(1);
  other.parameters[0].name = "v";
  EXPECT_EQ(Set(OfRows(0), "a"), "");
  EXPECT_EQ(Set(other, "b"), "");
}

TEST_F(WeightDigestsTest, ABroadcastIsWhatBothRanksHaveSaid) {
  EXPECT_EQ(Set(OfRows(0), "a", true), "");
  EXPECT_EQ(Set(OfRows(1), "b", true), "");
  EXPECT_EQ(Set(OfRows(2), "c", true), "");
  EXPECT_THAT(Set(OfRows(3), "b"), HasSubstr("of rank 0 and of rank 3"));
}

TEST_F(WeightDigestsTest, WhoSaysNoBroadcastIsComparedWithWhoComesLater) {
  EXPECT_EQ(Set(OfRows(0), "a"), "");
  EXPECT_THAT(Set(OfRows(1), "b", true), HasSubstr("of rank 0 and of rank 1"));
}

TEST_F(WeightDigestsTest, BoxesThatOverlapWithoutBeingEqualAreRefused) {
  EXPECT_EQ(Set(OfRows(1, 2, 6), "a"), "");
  EXPECT_EQ(Set(OfRows(2, 6, 8), "b"), "");
  const std::string difference = Set(OfRows(0), "a");
  EXPECT_THAT(
      difference,
      AllOf(HasSubstr("parameter 'w': box [0:8, 0:4] of rank 0 and box [2:6, 0:4] of rank 1"),
            HasSubstr("cannot be seen"), HasSubstr("broadcast=True")));
  digests_.Clear();
  EXPECT_EQ(Set(OfRows(1, 2, 6), "a", true), "");
  EXPECT_EQ(Set(OfRows(0), "b", true), "");
}

TEST_F(WeightDigestsTest, WhatHasNoDigestIsNotCompared) {
  EXPECT_EQ(Set(OfRows(0), "a"), "");
  EXPECT_EQ(Set(OfRows(1), ""), "");
  EXPECT_EQ(Set(OfRows(2, 0, 8, Route::kTrainer), "b"), "");
  EXPECT_EQ(Set(OfRows(3, 4, 4), "c"), "") << "an empty box";
  EXPECT_THAT(Set(OfRows(4), "b"), HasSubstr("of rank 0 and of rank 4"));
}

TEST_F(WeightDigestsTest, AReplacementIsComparedInPlaceOfWhoDied) {
  EXPECT_EQ(Set(OfRows(0), "a"), "");
  EXPECT_NE(Set(OfRows(1), "b"), "");
  EXPECT_EQ(Set(OfRows(1), "a"), "");
  digests_.Remove(TrainerRank(0));
  digests_.Remove(TrainerRank(1));
  EXPECT_EQ(Set(OfRows(0), "b"), "");
}

}  // namespace
}  // namespace dmuond::scheduler
