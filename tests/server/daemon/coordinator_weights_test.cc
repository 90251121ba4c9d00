// Weights that the coordinator lets nobody go on with: ranks that begin with different ones, and
// such as an update has made infinite or NaN.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "scheduler/plan.h"
#include "server/convert.h"
#include "server/daemon/coordinator.h"
#include "tests/server/daemon/registrations.h"

namespace dmuond::server {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

const std::string kOne(16, 'a');
const std::string kOther(16, 'b');

// A job of three ranks that hold one matrix, whose node is ready; fresh, or from a snapshot.
class CoordinatorWeightsTest : public ::testing::Test {
 protected:
  static constexpr uint32_t kEpoch = 5;
  static constexpr int32_t kRanks = 3;

  void Begin(int64_t restore_step = 0) {
    EXPECT_THAT(coordinator_.OnFormed(now_, kEpoch), IsEmpty());
    v1::MemberMessage state;
    state.mutable_member_state()->set_epoch(kEpoch);
    EXPECT_THAT(Tell(state), IsEmpty());
    for (int32_t rank = 0; rank < kRanks; ++rank) {
      v1::MemberMessage session;
      session.mutable_rank_session()->set_rank(rank);
      session.mutable_rank_session()->set_job("job");
      session.mutable_rank_session()->set_world_size(kRanks);
      session.mutable_rank_session()->set_restore_step(restore_step);
      EXPECT_THAT(Tell(session), IsEmpty());
    }
    AddressedMessages told;
    for (int32_t rank = 0; rank < kRanks; ++rank) {
      v1::MemberMessage message;
      *message.mutable_registration() = OfOneMatrix(rank, kRanks);
      told = Tell(message);
    }
    ASSERT_THAT(told, SizeIs(1));
    plan_ = *scheduler::MakePlan(*FromProto(told[0].message.plan()));
    EXPECT_THAT(Tell(LanesReady(plan_.digest, kEpoch)), Not(IsEmpty()));
  }
  AddressedMessages Tell(const v1::MemberMessage& message) {
    return coordinator_.OnMessage(now_, 0, message);
  }
  AddressedMessages Attach(int32_t rank, const std::string& digest = "", bool broadcast = false) {
    v1::MemberMessage message;
    message.mutable_rank_attached()->set_rank(rank);
    if (!digest.empty()) message.mutable_rank_attached()->add_weight_digests(digest);
    message.mutable_rank_attached()->set_broadcast(broadcast);
    return Tell(message);
  }
  static void ExpectEnded(const AddressedMessages& told, const std::string& reason) {
    ASSERT_THAT(told, SizeIs(1));
    EXPECT_FALSE(told[0].node.has_value()) << "only one node is told";
    EXPECT_EQ(told[0].message.job_ended().reason(), reason);
  }

  scheduler::TimePoint now_;
  Coordinator coordinator_{CoordinatorOptions()};
  scheduler::Plan plan_;
};

TEST_F(CoordinatorWeightsTest, AFreshJobWhoseRanksBeginUnequalEndsOnAllNodes) {
  Begin();
  EXPECT_THAT(Attach(2, kOne), IsEmpty());
  const AddressedMessages told = Attach(1, kOther);
  ExpectEnded(told, "WEIGHTS_DIFFER");
  const v1::JobEnded& ended = told[0].message.job_ended();
  EXPECT_THAT(ended.why(), AllOf(HasSubstr("'w', box [0:4, 0:4]"), HasSubstr("rank 1"),
                                 HasSubstr("rank 2"), HasSubstr("broadcast=True")));
  EXPECT_EQ(ended.metadata().at("other_rank"), "2");
}

TEST_F(CoordinatorWeightsTest, EqualOnesAndUnknownOnesAreLetThrough) {
  Begin();
  EXPECT_THAT(Attach(0, kOne), IsEmpty());
  EXPECT_THAT(Attach(1), IsEmpty());
  EXPECT_THAT(Attach(2, kOne), IsEmpty());
  EXPECT_THAT(Attach(2, kOne), IsEmpty()) << "as its node says once more";
}

TEST_F(CoordinatorWeightsTest, WhatIsBroadcastMayDiffer) {
  Begin();
  for (int32_t rank = 0; rank < kRanks; ++rank) {
    EXPECT_THAT(Attach(rank, std::string(16, static_cast<char>('a' + rank)), true), IsEmpty());
  }
}

TEST_F(CoordinatorWeightsTest, AJobFromASnapshotHasWeightsOfItsOwn) {
  Begin(/*restore_step=*/3);
  EXPECT_THAT(Attach(0, kOne), IsEmpty());
  EXPECT_THAT(Attach(1, kOther), IsEmpty());
  const AddressedMessages restarted = Attach(2, kOther);
  ASSERT_THAT(restarted, SizeIs(2));
  EXPECT_TRUE(restarted[0].message.has_republish());
}

TEST_F(CoordinatorWeightsTest, AVoteOfANodeWhoseWeightsAreNotFiniteEndsTheJobByName) {
  Begin(/*restore_step=*/3);
  AddressedMessages told;
  for (int32_t rank = 0; rank < kRanks; ++rank) told = Attach(rank);
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
}  // namespace dmuond::server
