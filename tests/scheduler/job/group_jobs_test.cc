#include "scheduler/job/group_jobs.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/scheduler/job/registrations.h"

namespace dmuond::scheduler {
namespace {

using ::testing::IsEmpty;
using ::testing::SizeIs;

// A group of one node with two places.
class GroupJobsTest : public ::testing::Test {
 protected:
  GroupJobsTest() { Form(5, {"", ""}); }

  void Form(uint32_t epoch, const std::vector<std::string>& jobs) {
    EXPECT_THAT(jobs_.OnFormed(now_, epoch).messages, IsEmpty());
    for (const std::string& job : jobs) {
      v1::MemberMessage message;
      message.set_job(job);
      message.mutable_member_state()->set_epoch(epoch);
      message.mutable_member_state()->set_job(job);
      told_ = jobs_.OnMessage(now_, 0, message);
    }
  }
  GroupActions Open(const std::string& job) {
    v1::MemberMessage message;
    message.set_job(job);
    message.mutable_rank_session()->set_job(job);
    message.mutable_rank_session()->set_world_size(1);
    return jobs_.OnMessage(now_, 0, message);
  }
  GroupActions Register(const std::string& job) {
    v1::MemberMessage message;
    message.set_job(job);
    *message.mutable_registration() = OfOneMatrix(0, 1);
    message.mutable_registration()->set_job(job);
    return jobs_.OnMessage(now_, 0, message);
  }
  GroupActions Leave(const std::string& job) {
    v1::MemberMessage message;
    message.set_job(job);
    message.mutable_rank_gone()->set_closed(true);
    return jobs_.OnMessage(now_, 0, message);
  }
  // Plans what a job has registered; returns its incarnation.
  uint64_t Plan(const std::string& job) {
    const GroupActions ordered = Register(job);
    EXPECT_THAT(ordered.plans, SizeIs(1));
    const PlanOrder& order = ordered.plans.front();
    EXPECT_EQ(order.inputs->job(), job);
    const GroupActions told = jobs_.OnPlanMade(now_, order, MakePlannedJob(*order.inputs));
    EXPECT_THAT(told.messages, SizeIs(1));
    EXPECT_EQ(told.messages.front().message.job(), job);
    EXPECT_EQ(told.messages.front().message.plan().job(), job);
    return order.inputs->job_incarnation();
  }

  TimePoint now_{};
  GroupJobs jobs_{GroupJobOptions{}, 2};
  GroupActions told_;
};

TEST_F(GroupJobsTest, TwoJobsRunSideBySideAndTheEndOfOneIsNotTheOthers) {
  EXPECT_THAT(Open("a").messages, IsEmpty());
  EXPECT_THAT(Open("b").messages, IsEmpty());
  EXPECT_NE(Plan("a"), Plan("b"));
  const GroupActions ended = Leave("a");
  ASSERT_THAT(ended.messages, SizeIs(1));
  EXPECT_EQ(ended.messages.front().message.job_ended().job(), "a");
  EXPECT_FALSE(jobs_.Find("a")->phase().has_value());
  EXPECT_EQ(jobs_.Find("b")->phase(), GroupJob::Phase::kPreparing);
}

TEST_F(GroupJobsTest, OneJobMoreIsRefusedUntilAPlaceIsFree) {
  (void)Open("a");
  (void)Open("b");
  const GroupActions refused = Open("c");
  ASSERT_THAT(refused.messages, SizeIs(1));
  EXPECT_EQ(refused.messages.front().message.job(), "c");
  EXPECT_EQ(refused.messages.front().message.refused().session().job(), "c");
  (void)Leave("a");
  EXPECT_THAT(Open("c").messages, IsEmpty());
  const uint64_t incarnation = Plan("c");
  // In whatever place it is, and whoever was there before.
  (void)Leave("b");
  (void)Open("b");
  EXPECT_GT(Plan("b"), incarnation);
}

TEST_F(GroupJobsTest, AMessageOfAnotherJobChangesNothing) {
  (void)Open("a");
  (void)Open("b");
  EXPECT_THAT(Leave("c").messages, IsEmpty());
  EXPECT_TRUE(jobs_.Find("a")->phase().has_value());
  EXPECT_TRUE(jobs_.Find("b")->phase().has_value());
}

TEST_F(GroupJobsTest, WhatNodesHaveIsOfUseWhenAllPlacesAreTold) {
  EXPECT_TRUE(jobs_.Formed());
  Form(6, {"a"});
  EXPECT_FALSE(jobs_.Formed());
  Form(7, {"", "a"});
  EXPECT_TRUE(jobs_.Formed());
  // It began with a predecessor, which nobody else knows: the node holds it in vain.
  ASSERT_THAT(told_.messages, SizeIs(1));
  EXPECT_EQ(told_.messages.front().message.job_ended().job(), "a");
}

TEST_F(GroupJobsTest, ANodeThatLeavesHaltsAllJobs) {
  (void)Open("a");
  (void)Open("b");
  v1::MemberMessage leaving;
  leaving.mutable_leaving()->set_patience_ms(1000);
  const GroupActions halted = jobs_.OnMessage(now_, 0, leaving);
  ASSERT_THAT(halted.messages, SizeIs(2));
  EXPECT_EQ(halted.messages[0].message.job(), "a");
  EXPECT_EQ(halted.messages[1].message.job(), "b");
}

}  // namespace
}  // namespace dmuond::scheduler
