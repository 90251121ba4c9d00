// Weights that the coordinator lets nobody go on with: ranks that begin with different ones, and
// such as an update has made infinite or NaN.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "scheduler/plan.h"
#include "tests/scheduler/job/group_job_fixture.h"

namespace dmuond::scheduler {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

const std::string kOne(16, 'a');
const std::string kOther(16, 'b');

// A job of three ranks that hold one matrix, whose node is ready; fresh, or from a snapshot.
class GroupJobWeightsTest : public OneNodeJobTest {
 protected:
  GroupJobWeightsTest() : OneNodeJobTest(/*ranks=*/3, {}) {}

  void Begin(int64_t restore_step = 0, uint64_t incarnation = 0) {
    Plan(restore_step, incarnation);
    EXPECT_THAT(LanesReady(), Not(IsEmpty()));
  }
  AddressedMessages Attach(int32_t rank, const std::string& digest = "", bool broadcast = false) {
    v1::MemberMessage message = Attached(rank, coordinator_.epoch());
    if (!digest.empty()) message.mutable_rank_attached()->add_weight_digests(digest);
    message.mutable_rank_attached()->set_broadcast(broadcast);
    return Tell(message);
  }
  static void ExpectEnded(const AddressedMessages& told, const std::string& reason) {
    ASSERT_THAT(told, SizeIs(1));
    EXPECT_FALSE(told[0].node.has_value()) << "only one node is told";
    EXPECT_EQ(told[0].message.job_ended().reason(), reason);
  }
};

TEST_F(GroupJobWeightsTest, AFreshJobWhoseRanksBeginUnequalEndsOnAllNodes) {
  Begin();
  EXPECT_THAT(Attach(2, kOne), IsEmpty());
  const AddressedMessages told = Attach(1, kOther);
  ExpectEnded(told, "WEIGHTS_DIFFER");
  const v1::JobEnded& ended = told[0].message.job_ended();
  EXPECT_THAT(ended.why(), AllOf(HasSubstr("'w', box [0:4, 0:4]"), HasSubstr("rank 1"),
                                 HasSubstr("rank 2"), HasSubstr("broadcast=True")));
  EXPECT_EQ(ended.metadata().at("other_rank"), "2");
}

// A session that a job which was lost has left on its node, in the epoch in which it is begun
// again.
TEST_F(GroupJobWeightsTest, ARankOfTheJobsEarlierLifeDoesNotStartIt) {
  Begin(/*restore_step=*/3, /*incarnation=*/8);
  EXPECT_THAT(Tell(Attached(0, kEpoch, /*incarnation=*/8)), IsEmpty());
  EXPECT_THAT(Tell(Attached(1, kEpoch, /*incarnation=*/8)), IsEmpty());
  EXPECT_THAT(Tell(Attached(2, kEpoch, /*incarnation=*/7)), IsEmpty())
      << "it is of another session";
  const AddressedMessages told = Tell(Attached(2, kEpoch, /*incarnation=*/8));
  ASSERT_THAT(told, SizeIs(2));
  EXPECT_TRUE(told[0].message.has_republish());
}

TEST_F(GroupJobWeightsTest, EqualOnesAndUnknownOnesAreLetThrough) {
  Begin();
  EXPECT_THAT(Attach(0, kOne), IsEmpty());
  EXPECT_THAT(Attach(1), IsEmpty());
  EXPECT_THAT(Attach(2, kOne), IsEmpty());
  EXPECT_THAT(Attach(2, kOne), IsEmpty()) << "as its node says once more";
}

TEST_F(GroupJobWeightsTest, WhatIsBroadcastMayDiffer) {
  Begin();
  for (int32_t rank = 0; rank < ranks_; ++rank) {
    EXPECT_THAT(Attach(rank, std::string(16, static_cast<char>('a' + rank)), true), IsEmpty());
  }
}

TEST_F(GroupJobWeightsTest, AJobFromASnapshotHasWeightsOfItsOwn) {
  Begin(/*restore_step=*/3);
  EXPECT_THAT(Attach(0, kOne), IsEmpty());
  EXPECT_THAT(Attach(1, kOther), IsEmpty());
  const AddressedMessages restarted = Attach(2, kOther);
  ASSERT_THAT(restarted, SizeIs(2));
  EXPECT_TRUE(restarted[0].message.has_republish());
}

TEST_F(GroupJobWeightsTest, AVoteOfANodeWhoseWeightsAreNotFiniteEndsTheJobByName) {
  Begin(/*restore_step=*/3);
  AddressedMessages told;
  for (int32_t rank = 0; rank < ranks_; ++rank) told = Attach(rank);
  ASSERT_THAT(told, SizeIs(2));
  const uint64_t open = told[1].message.open().attempt();
  v1::MemberMessage message;
  v1::Vote& vote = *message.mutable_vote();
  vote.set_plan_digest(plan_.digest);
  vote.add_non_finite(0);
  vote.set_attempt(open - 1);
  EXPECT_THAT(Tell(message), IsEmpty()) << "of another attempt";
  vote.set_attempt(open);
  told = Tell(message);
  ExpectEnded(told, "WEIGHTS_NOT_FINITE");
  EXPECT_THAT(told[0].message.job_ended().why(),
              AllOf(HasSubstr("parameter 'w'"), HasSubstr("after step 3"), HasSubstr("lane 0"),
                    HasSubstr("float32")));
}

}  // namespace
}  // namespace dmuond::scheduler
