// Reports of a node on their way to the coordinator: which wait for others, and which do not.
#include "scheduler/job/outgoing_reports.h"

#include <chrono>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "scheduler/plan.h"
#include "tests/scheduler/layouts.h"

namespace dmuond::scheduler {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using testing::Muon;
using testing::World;

constexpr Attempt kGathered = MakeAttempt(GroupEpoch(1), 7);

// Node 1 of two, with two lanes and two ranks; its lanes have three buckets each at least.
class OutgoingReportsTest : public ::testing::Test {
 protected:
  OutgoingReportsTest() {
    World world(4, 2, 2);
    for (const char* name : {"a", "b", "c", "d", "e", "f", "g", "h"}) {
      world.Replicate(Muon(name, {8, 8}));
    }
    auto inputs = *world.Inputs();
    inputs.bucket_bytes = 1;
    const Plan plan = *MakePlan(inputs);
    for (const int32_t lane : {2, 3}) {
      programs_.push_back(*MakeLaneProgram(inputs, plan, LaneId(lane)));
    }
    reports_.OnPlan(programs_, /*ranks=*/2);
    reports_.OnOpen(now_, {kGathered, StepId(1), milliseconds(5)});
  }
  static v1::RankSubmitted Submitted(int32_t rank, Attempt attempt = kGathered) {
    v1::RankSubmitted submitted;
    submitted.set_rank(rank);
    submitted.set_attempt(attempt.value());
    return submitted;
  }
  static RailReady Ready(int32_t rail, int32_t bucket,
                         RailOperation operation = RailOperation::kCollect) {
    return {.attempt = kGathered,
            .rail = LaneIndex(rail),
            .operation = operation,
            .buckets = {{BucketId(bucket), 1}}};
  }
  // All that the lanes have to send of an operation.
  [[nodiscard]] std::vector<RailReady> AllReady(RailOperation operation) const {
    std::vector<RailReady> all;
    for (int32_t rail = 0; rail < 2; ++rail) {
      const auto& transfers =
          operation == RailOperation::kCollect ? programs_[rail].partials : programs_[rail].weights;
      for (size_t b = 0; b < transfers.size(); ++b) {
        if (!transfers[b].empty()) all.push_back(Ready(rail, static_cast<int32_t>(b), operation));
      }
    }
    return all;
  }

  std::vector<LaneProgram> programs_;
  TimePoint now_{std::chrono::hours(1)};
  OutgoingReports reports_{/*gathers=*/true};
};

TEST_F(OutgoingReportsTest, AReportWaitsForTheEndOfItsRound) {
  EXPECT_EQ(reports_.due(), std::nullopt);
  EXPECT_THAT(reports_.OnReady(now_ + milliseconds(1), Ready(0, 0)), IsEmpty());
  EXPECT_THAT(reports_.OnReady(now_ + milliseconds(2), Ready(0, 1)), IsEmpty());
  EXPECT_THAT(reports_.OnReady(now_ + milliseconds(2), Ready(1, 1)), IsEmpty());
  // 17/20 of the gathering time after the attempt was opened, not after the first report.
  EXPECT_EQ(reports_.due(), now_ + microseconds(4250));
  EXPECT_THAT(reports_.OnDue(now_ + microseconds(4249)), IsEmpty());
  const auto sent = reports_.OnDue(now_ + microseconds(4250));
  ASSERT_EQ(sent.size(), 1);
  ASSERT_EQ(sent[0].reports().ready_size(), 2);
  EXPECT_THAT(sent[0].reports().ready(0).buckets(), ElementsAre(0, 2));
  EXPECT_THAT(sent[0].reports().ready(1).buckets(), ElementsAre(1, 1));
  EXPECT_EQ(reports_.due(), std::nullopt);
  EXPECT_THAT(reports_.OnDue(now_ + milliseconds(20)), IsEmpty());
  EXPECT_THAT(reports_.OnReady(now_ + milliseconds(20), Ready(0, 2)), IsEmpty());
  EXPECT_EQ(reports_.due(), now_ + 5 * microseconds(4250));
}

TEST_F(OutgoingReportsTest, RoundsAreNeverShorterThanAMillisecond) {
  reports_.OnOpen(now_, {kGathered, StepId(1), kGatherMin});
  EXPECT_THAT(reports_.OnReady(now_, Ready(0, 0)), IsEmpty());
  EXPECT_EQ(reports_.due(), now_ + milliseconds(1));
}

TEST_F(OutgoingReportsTest, WhatCompletesAnOperationIsSentAtOnceWithAllThatWaited) {
  for (const RailOperation operation : {RailOperation::kCollect, RailOperation::kPublish}) {
    const std::vector<RailReady> all = AllReady(operation);
    ASSERT_GT(all.size(), 6);
    for (size_t i = 0; i + 1 < all.size(); ++i) {
      EXPECT_THAT(reports_.OnReady(now_, all[i]), IsEmpty());
      EXPECT_THAT(reports_.OnReady(now_, all[i]), IsEmpty());  // said twice it is not the last one
    }
    const auto sent = reports_.OnReady(now_, all.back());
    ASSERT_EQ(sent.size(), 1);
    EXPECT_EQ(sent[0].reports().ready_size(), 2);
    EXPECT_EQ(reports_.due(), std::nullopt);
  }
}

TEST_F(OutgoingReportsTest, TheLastSubmissionIsSentAtOnce) {
  EXPECT_THAT(reports_.OnSubmitted(now_, Submitted(2)), IsEmpty());
  const auto sent = reports_.OnSubmitted(now_, Submitted(3));
  ASSERT_EQ(sent.size(), 1);
  ASSERT_EQ(sent[0].reports().submitted_size(), 2);
  EXPECT_EQ(sent[0].reports().submitted(0).rank(), 2);
  EXPECT_EQ(sent[0].reports().submitted(1).rank(), 3);
  // Of the next attempt again.
  EXPECT_THAT(reports_.OnSubmitted(now_, Submitted(3, Attempt(kGathered.value() + 1))), IsEmpty());
  EXPECT_EQ(reports_.OnSubmitted(now_, Submitted(2, Attempt(kGathered.value() + 1))).size(), 1);
}

TEST_F(OutgoingReportsTest, AWithdrawalIsSentAtOnce) {
  v1::RankSubmitted withdrawal = Submitted(2);
  withdrawal.set_withdraw(true);
  EXPECT_EQ(reports_.OnSubmitted(now_, withdrawal).size(), 1);
}

TEST_F(OutgoingReportsTest, EveryOtherMessageIsSentAtOnceAfterWhatWaited) {
  EXPECT_THAT(reports_.OnSubmitted(now_, Submitted(2)), IsEmpty());
  EXPECT_THAT(reports_.OnReady(now_, Ready(0, 0)), IsEmpty());
  v1::MemberMessage gone;
  gone.mutable_rank_gone()->set_rank(2);
  const auto sent = reports_.Tell(gone);
  ASSERT_EQ(sent.size(), 2);
  EXPECT_EQ(sent[0].reports().submitted_size(), 1);
  EXPECT_EQ(sent[0].reports().ready_size(), 1);
  EXPECT_TRUE(sent[1].has_rank_gone());
  EXPECT_EQ(reports_.Tell(gone).size(), 1);
}

TEST_F(OutgoingReportsTest, AloneNothingWaits) {
  OutgoingReports alone(/*gathers=*/false);
  alone.OnPlan(programs_, 2);
  alone.OnOpen(now_, {kGathered, StepId(1), milliseconds(5)});
  EXPECT_EQ(alone.OnSubmitted(now_, Submitted(2)).size(), 1);
  EXPECT_EQ(alone.OnReady(now_, Ready(0, 0)).size(), 1);
}

TEST_F(OutgoingReportsTest, WhatWaitsForACoordinatorThatIsGoneIsForgotten) {
  EXPECT_THAT(reports_.OnSubmitted(now_, Submitted(2)), IsEmpty());
  reports_.Forget();
  EXPECT_EQ(reports_.due(), std::nullopt);
  EXPECT_EQ(reports_.Tell(v1::MemberMessage()).size(), 1);
}

}  // namespace
}  // namespace dmuond::scheduler
