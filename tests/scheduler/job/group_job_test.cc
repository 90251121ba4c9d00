
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>

#include "scheduler/convert/registrations.h"
#include "tests/scheduler/job/group_job_fixture.h"
#include "tests/scheduler/job/registrations.h"

namespace dmuond::scheduler {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;

// A coordinator, the ranks of one job (all on node 0, one lane), and one matrix.
class GroupJobTest : public ::testing::Test {
 protected:
  GroupJobTest() : coordinator_(Options()) {
    EXPECT_TRUE(coordinator_.OnFormed(now_, 5).empty());
    v1::MemberMessage message;
    message.mutable_member_state()->set_epoch(5);
    EXPECT_TRUE(coordinator_.OnMessage(now_, 0, message).empty());
  }

  static GroupJobOptions Options() {
    GroupJobOptions options;
    options.register_timeout = milliseconds(1000);
    options.job_uids.admins = {7};
    return options;
  }

  AddressedMessages Open(int32_t rank, const std::string& job = "job", uint64_t incarnation = 0) {
    v1::MemberMessage message;
    message.mutable_rank_session()->set_rank(rank);
    message.mutable_rank_session()->set_job(job);
    message.mutable_rank_session()->set_world_size(2);
    message.mutable_rank_session()->set_incarnation(incarnation);
    return coordinator_.OnMessage(now_, 0, message);
  }
  AddressedMessages Register(int32_t rank, int64_t rows = 4, const std::string& preset = "dmuon") {
    v1::MemberMessage message;
    v1::Registration& registration = *message.mutable_registration();
    registration.set_rank(rank);
    registration.set_job("job");
    registration.set_world_size(2);
    registration.add_groups()->set_preset(preset);
    v1::Parameter& parameter = *registration.add_parameters();
    parameter.set_name("w");
    parameter.add_shape(rows);
    parameter.add_shape(4);
    parameter.set_weight_type(v1::ELEMENT_TYPE_FLOAT32);
    parameter.set_gradient_type(v1::ELEMENT_TYPE_FLOAT32);
    parameter.set_route(v1::ROUTE_MUON);
    parameter.set_reduce_factor(0.5);
    v1::Fragment& fragment = *registration.add_fragments();
    fragment.set_contribution(v1::CONTRIBUTION_SUM);
    for (const int64_t extent : {rows, int64_t{4}}) {
      fragment.mutable_box()->add_begin(0);
      fragment.mutable_box()->add_end(extent);
    }
    for (v1::Slice* slice : {fragment.mutable_gradient(), fragment.mutable_weight()}) {
      slice->add_strides(4);
      slice->add_strides(1);
    }
    fragment.mutable_weight()->set_arena(1);
    return coordinator_.OnMessage(now_, 0, message);
  }
  AddressedMessages Gone(int32_t rank, uint64_t incarnation = 0, int32_t node = 0) {
    v1::MemberMessage message;
    message.mutable_rank_gone()->set_rank(rank);
    message.mutable_rank_gone()->set_detail("rank died");
    message.mutable_rank_gone()->set_incarnation(incarnation);
    return coordinator_.OnMessage(now_, node, message);
  }
  AddressedMessages PlanReady(uint64_t digest) {
    return coordinator_.OnMessage(now_, 0, LanesReady(digest, /*epoch=*/5));
  }

  TimePoint now_;
  PlannedGroupJob coordinator_;
};

TEST_F(GroupJobTest, PlanIsToldWhenTheLastRankHasRegistered) {
  EXPECT_TRUE(Open(0).empty());
  EXPECT_TRUE(Open(1).empty());
  EXPECT_TRUE(Register(0).empty());
  const AddressedMessages told = Register(1);
  ASSERT_EQ(told.size(), 1U);
  EXPECT_FALSE(told[0].node.has_value());
  EXPECT_EQ(WorldSizeOf(told[0].message.plan()), 2);
}

TEST_F(GroupJobTest, MissingRankIsNamedAtTheDeadline) {
  EXPECT_TRUE(Open(0).empty());
  EXPECT_TRUE(Register(0).empty());
  EXPECT_TRUE(coordinator_.OnTick(now_ + milliseconds(999)).empty());
  const AddressedMessages told = coordinator_.OnTick(now_ + milliseconds(1000));
  ASSERT_EQ(told.size(), 1U);
  EXPECT_EQ(told[0].message.refused().reason(), "RANKS_MISSING");
  EXPECT_THAT(told[0].message.refused().message(), HasSubstr("in time: 1"));
  EXPECT_TRUE(coordinator_.OnTick(now_ + milliseconds(5000)).empty()) << "told twice";
}

TEST_F(GroupJobTest, OtherShapesAreRefusedByNameAndACorrectedLayoutIsTaken) {
  EXPECT_TRUE(Open(0).empty());
  EXPECT_TRUE(Open(1).empty());
  EXPECT_TRUE(Register(0, 4).empty());
  const AddressedMessages told = Register(1, 8);
  ASSERT_EQ(told.size(), 1U);
  EXPECT_THAT(told[0].message.refused().message(), HasSubstr("w"));
  EXPECT_TRUE(Register(0, 4).empty());
  EXPECT_TRUE(Register(1, 4)[0].message.has_plan());
}

TEST_F(GroupJobTest, OtherPresetIsRefused) {
  EXPECT_TRUE(Open(0).empty());
  EXPECT_TRUE(Open(1).empty());
  EXPECT_TRUE(Register(0, 4, "dmuon").empty());
  const AddressedMessages told = Register(1, 4, "keller");
  ASSERT_EQ(told.size(), 1U);
  EXPECT_TRUE(told[0].message.has_refused());
}

TEST_F(GroupJobTest, AnotherJobIsRefusedWithTheHoldersName) {
  EXPECT_TRUE(Open(0).empty());
  const AddressedMessages told = Open(1, "other");
  ASSERT_EQ(told.size(), 1U);
  EXPECT_EQ(told[0].message.refused().reason(), "OTHER_JOB");
  EXPECT_THAT(told[0].message.refused().message(), HasSubstr("'job'"));
}

TEST_F(GroupJobTest, ARankThatDiesBeforeThePlanMayBeReplaced) {
  EXPECT_TRUE(Open(0).empty());
  EXPECT_TRUE(Open(1).empty());
  EXPECT_TRUE(Register(1).empty());
  EXPECT_TRUE(Gone(1).empty());
  EXPECT_TRUE(Open(1).empty());
  EXPECT_TRUE(Register(0).empty());
  EXPECT_TRUE(Register(1)[0].message.has_plan());
}

TEST_F(GroupJobTest, ANodeWithAnotherPlanStopsTheJob) {
  EXPECT_TRUE(Open(0).empty());
  EXPECT_TRUE(Open(1).empty());
  EXPECT_TRUE(Register(0).empty());
  ASSERT_TRUE(Register(1)[0].message.has_plan());
  const AddressedMessages told = PlanReady(/*digest=*/1);
  ASSERT_EQ(told.size(), 1U);
  EXPECT_EQ(told[0].message.refused().reason(), "PLAN_DIFFERS");
}

TEST_F(GroupJobTest, JobEndsWhenEveryRankHasLeft) {
  EXPECT_TRUE(Open(0).empty());
  EXPECT_TRUE(Open(1).empty());
  EXPECT_TRUE(Gone(0).empty());
  const AddressedMessages told = Gone(1);
  ASSERT_EQ(told.size(), 1U);
  EXPECT_EQ(told[0].message.job_ended().job(), "job");
  EXPECT_TRUE(Open(0, "next").empty()) << "the group is free for another job";
}

// Seen in a simulated schedule: a node whose lanes were new told of its sessions again while the
// job was given up elsewhere. That began a job of which nobody knew, and the next start was
// refused.
TEST_F(GroupJobTest, LateNewsOfAJobThatHasEndedBeginsNoOther) {
  v1::MemberMessage late;
  v1::RankSession& session = *late.mutable_rank_session();
  session.set_job("job");
  session.set_world_size(2);
  session.set_job_incarnation(7);
  EXPECT_TRUE(coordinator_.OnMessage(now_, 0, late).empty());
  session.set_job("another");
  session.set_job_incarnation(0);
  EXPECT_TRUE(coordinator_.OnMessage(now_, 0, late).empty()) << "there was no job";
  session.set_job("job");
  session.set_job_incarnation(7);
  EXPECT_TRUE(coordinator_.OnMessage(now_, 0, late).empty())
      << "the job that there is hears nothing of it";
}

TEST_F(GroupJobTest, TheEndOfASessionIsThatOfItsRanksOlderOnesButOfNoNewerOne) {
  EXPECT_TRUE(Open(0, "job", /*incarnation=*/2).empty());
  EXPECT_TRUE(Gone(0, /*incarnation=*/1).empty()) << "the second one stays";
  EXPECT_TRUE(Gone(0, /*incarnation=*/3, /*node=*/1).empty()) << "other nodes count their own";
  const AddressedMessages told = Gone(0, /*incarnation=*/3);
  ASSERT_EQ(told.size(), 1U) << "the end of the second one was not heard";
  EXPECT_EQ(told[0].message.job_ended().job(), "job");
}

// What a node knows of the first session alone would differ from node to node.
TEST_F(GroupJobTest, AJobBelongsToTheUserOfItsFirstSessionOnAllNodes) {
  const auto open = [&](int32_t rank, uint32_t uid, int32_t node) {
    v1::MemberMessage message;
    v1::RankSession& session = *message.mutable_rank_session();
    session.set_rank(rank);
    session.set_job("job");
    session.set_world_size(2);
    session.set_uid(uid);
    return coordinator_.OnMessage(now_, node, message);
  };
  EXPECT_TRUE(open(0, 1000, 0).empty());
  const AddressedMessages told = open(1, 1001, 1);
  ASSERT_EQ(told.size(), 1U);
  EXPECT_EQ(told[0].node, 1);
  const v1::RegistrationRefused& refused = told[0].message.refused();
  EXPECT_EQ(refused.reason(), "JOB_OF_ANOTHER_USER");
  EXPECT_EQ(refused.code(), static_cast<int>(absl::StatusCode::kPermissionDenied));
  EXPECT_THAT(refused.message(), HasSubstr("that of uid 1000, and the trainer of rank 1 is of uid "
                                           "1001: give its job a name of its own"));
  EXPECT_TRUE(open(1, 7, 0).empty()) << "an admin";
  EXPECT_TRUE(Register(0).empty());
  const AddressedMessages planned = Register(1);
  ASSERT_EQ(planned.size(), 1U);
  EXPECT_EQ(planned[0].message.plan().owner_uid(), 1000U);
  v1::MemberMessage discard;
  discard.mutable_end_job()->set_job("job");
  discard.mutable_end_job()->mutable_discard()->set_job("job");
  discard.mutable_end_job()->mutable_discard()->set_launch("theirs");
  discard.mutable_end_job()->mutable_discard()->set_uid(1001);
  const AddressedMessages kept = coordinator_.OnMessage(now_, 1, discard);
  ASSERT_EQ(kept.size(), 1U);
  EXPECT_EQ(kept[0].message.refused().reason(), "JOB_OF_ANOTHER_USER");
}

TEST_F(GroupJobTest, ASnapshotsUserIsAskedForTheFirstSessionToo) {
  v1::MemberMessage message;
  v1::RankSession& session = *message.mutable_rank_session();
  session.set_job("job");
  session.set_world_size(2);
  session.set_uid(1001);
  session.mutable_restore()->set_step(3);
  session.set_owner_uid(1000);
  const AddressedMessages told = coordinator_.OnMessage(now_, 1, message);
  ASSERT_EQ(told.size(), 1U) << "its node has let it in";
  EXPECT_EQ(told[0].message.refused().reason(), "JOB_OF_ANOTHER_USER");
}

TEST_F(GroupJobTest, AJobThatGoesOnFromASnapshotIsItsUsersWhoeverBeginsIt) {
  for (const bool names_owner : {true, false}) {
    v1::MemberMessage message;
    v1::RankSession& session = *message.mutable_rank_session();
    session.set_job("job");
    session.set_world_size(2);
    session.set_uid(7);
    session.mutable_restore()->set_step(3);
    if (names_owner) session.set_owner_uid(1000);
    EXPECT_TRUE(coordinator_.OnMessage(now_, 0, message).empty());
    session.set_rank(1);
    session.set_uid(1000);
    const AddressedMessages told = coordinator_.OnMessage(now_, 0, message);
    EXPECT_EQ(told.empty(), names_owner) << "one of before that names nobody is the beginner's";
    EXPECT_TRUE(Gone(1).size() + Gone(0).size() > 0) << "the job ends";
  }
}

TEST(JobUidsTest, UsersWhoShareComeToEachOthersJobsAndToNobodyElses) {
  const JobUids sharing{.sharing = {1000, 1001}, .admins = {0}};
  EXPECT_TRUE(sharing.MayTakePart(1000, 1001));
  EXPECT_TRUE(sharing.MayTakePart(1002, 1002));
  EXPECT_TRUE(sharing.MayTakePart(1002, 0));
  EXPECT_FALSE(sharing.MayTakePart(1002, 1001));
  EXPECT_FALSE(sharing.MayTakePart(1001, 1002));
  EXPECT_FALSE(sharing.MayTakePart(0, 1001)) << "an admin's job is his own";
  EXPECT_TRUE(JobUids{.any = true}.MayTakePart(1002, 1001));
}

}  // namespace
}  // namespace dmuond::scheduler
