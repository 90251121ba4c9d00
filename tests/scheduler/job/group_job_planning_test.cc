// Plans are made by somebody else, and take their time: what becomes of a job meanwhile.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <string>

#include "absl/status/status.h"
#include "scheduler/convert/registrations.h"
#include "scheduler/limits.h"
#include "tests/scheduler/job/group_job_fixture.h"
#include "tests/scheduler/job/registrations.h"

namespace dmuond::scheduler {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

// Two ranks on one node, whose plan is made when a test says so.
class GroupJobPlanningTest : public OneNodeJobTest {
 protected:
  GroupJobPlanningTest() : OneNodeJobTest(/*ranks=*/2, Options()) { coordinator_.HoldPlans(); }

  static GroupJobOptions Options() {
    GroupJobOptions options;
    options.snapshots = true;
    options.register_timeout = milliseconds(1000);
    options.step.session_linger = milliseconds(1000);
    return options;
  }
  void OrderPlan(int64_t restore_step = 0) {
    for (int32_t rank = 0; rank < ranks_; ++rank) EXPECT_THAT(Open(rank, restore_step), IsEmpty());
    for (int32_t rank = 0; rank < ranks_; ++rank) EXPECT_THAT(Register(rank), IsEmpty());
    ASSERT_TRUE(coordinator_.held().has_value());
  }
  PlanOrder Order() const { return *coordinator_.held(); }
  // The job runs and has gone back to the snapshot of step 3, which is not planned yet.
  void OrderWayBack() {
    OrderPlan(/*restore_step=*/3);
    TakePlan(coordinator_.Plan(now_, Order()));
    (void)LanesReady();
    v1::MemberMessage load;
    *load.mutable_load_snapshot()->mutable_to() = SnapshotOf(3);
    load.mutable_load_snapshot()->set_epoch(kEpoch);
    const auto before = Order().inputs;
    EXPECT_THAT(Tell(load), IsEmpty());
    ASSERT_NE(Order().inputs, before);
  }
};

TEST_F(GroupJobPlanningTest, NodesHearOfAPlanWhenItIsMadeAndOnce) {
  OrderPlan();
  const auto inputs = Order().inputs;
  EXPECT_THAT(Register(1), IsEmpty()) << "said again";
  EXPECT_EQ(Order().inputs, inputs) << "it is ordered once";
  EXPECT_THAT(coordinator_.OnTick(now_ + milliseconds(5000)), IsEmpty()) << "nobody is missing";
  const AddressedMessages told = coordinator_.Plan(now_, Order());
  ASSERT_THAT(told, SizeIs(1));
  EXPECT_EQ(WorldSizeOf(told[0].message.plan()), 2);
  EXPECT_THAT(coordinator_.Plan(now_, Order()), IsEmpty());
}

TEST_F(GroupJobPlanningTest, InputsThatNoPlanCanBeMadeOfAreRefusedAndMayBeCorrected) {
  OrderPlan();
  const AddressedMessages told = coordinator_.Answer(
      now_, Order(), WithReason(absl::InvalidArgumentError("no"), "LAYOUT_INVALID"));
  ASSERT_THAT(told, SizeIs(1));
  EXPECT_EQ(told[0].message.refused().reason(), "LAYOUT_INVALID");
  EXPECT_THAT(Register(0), IsEmpty());
  EXPECT_THAT(Register(1), IsEmpty());
  EXPECT_THAT(coordinator_.Plan(now_, Order()), SizeIs(1));
}

TEST_F(GroupJobPlanningTest, AJobPassesTheAttemptsOfAnotherGroupsSnapshot) {
  v1::SnapshotId restore = SnapshotOf(3);
  restore.set_attempt((uint64_t{kEpoch + 4} << 32) + 7);
  for (int32_t rank = 0; rank < ranks_; ++rank) EXPECT_THAT(OpenFrom(rank, restore), IsEmpty());
  for (int32_t rank = 0; rank < ranks_; ++rank) EXPECT_THAT(Register(rank), IsEmpty());
  AddressedMessages told = coordinator_.Plan(now_, Order());
  ASSERT_THAT(told, SizeIs(2));
  EXPECT_EQ(told[0].message.new_epoch().epoch(), kEpoch + 5);
  EXPECT_EQ(coordinator_.epoch(), kEpoch + 5);
  told.erase(told.begin());
  TakePlan(told);
  EXPECT_THAT(Tell(scheduler::LanesReady(plan_.digest, kEpoch)), IsEmpty()) << "of an old epoch";
  told = LanesReady();
  ASSERT_THAT(told, SizeIs(1));
  EXPECT_GT(told[0].message.open().attempt(), restore.attempt());
}

TEST_F(GroupJobPlanningTest, ASnapshotThatNoAttemptCanPassIsRefused) {
  v1::SnapshotId restore = SnapshotOf(3);
  restore.set_attempt(uint64_t{kEpochMax} << 32);
  AddressedMessages told;
  for (int32_t rank = 0; rank < ranks_; ++rank) EXPECT_THAT(OpenFrom(rank, restore), IsEmpty());
  for (int32_t rank = 0; rank < ranks_; ++rank) told = Register(rank);
  ASSERT_THAT(told, SizeIs(1));
  EXPECT_EQ(told[0].message.refused().reason(), "EPOCH_EXHAUSTED");
}

TEST_F(GroupJobPlanningTest, ARankThatDiesMeanwhileIsAwaitedAndThePlanIsMadeAnew) {
  OrderPlan();
  const PlanOrder old = Order();
  EXPECT_THAT(Gone(1, "it died"), IsEmpty());
  EXPECT_THAT(coordinator_.Plan(now_, old), IsEmpty()) << "a plan with a rank that is gone";
  const AddressedMessages missing = coordinator_.OnTick(now_ + milliseconds(1000));
  ASSERT_THAT(missing, SizeIs(1));
  EXPECT_EQ(missing[0].message.refused().reason(), "RANKS_MISSING");
  EXPECT_THAT(Open(1), IsEmpty());
  EXPECT_THAT(Register(0), IsEmpty());
  EXPECT_THAT(Register(1), IsEmpty());
  EXPECT_THAT(coordinator_.Plan(now_, old), IsEmpty()) << "the answer to an older order";
  EXPECT_THAT(coordinator_.Plan(now_, Order()), SizeIs(1));
}

TEST_F(GroupJobPlanningTest, ASuccessorThatRegistersSomethingElseIsPlannedWith) {
  OrderPlan();
  const PlanOrder old = Order();
  EXPECT_THAT(Open(1, 0, /*incarnation=*/2), IsEmpty());
  v1::MemberMessage message;
  *message.mutable_registration() = OfOneMatrix(1, ranks_);
  message.mutable_registration()->mutable_parameters(0)->set_reduce_factor(0.5);
  EXPECT_THAT(Tell(message), IsEmpty());
  EXPECT_THAT(coordinator_.Plan(now_, old), IsEmpty());
  ASSERT_NE(Order().inputs, old.inputs);
  EXPECT_EQ(Order().inputs->registrations(1).parameters(0).reduce_factor(), 0.5);
}

TEST_F(GroupJobPlanningTest, APlanOfAJobThatHasEndedIsNotTheNextOnes) {
  OrderPlan();
  const PlanOrder old = Order();
  v1::MemberMessage end;
  end.mutable_end_job()->set_job("job");
  ASSERT_THAT(Tell(end), SizeIs(1));
  EXPECT_THAT(coordinator_.Plan(now_, old), IsEmpty());
  OrderPlan();
  EXPECT_THAT(coordinator_.Plan(now_, old), IsEmpty());
  EXPECT_THAT(coordinator_.Plan(now_, Order()), SizeIs(1));
}

TEST_F(GroupJobPlanningTest, AGroupThatBreaksMeanwhileRefusesWhatWasRegistered) {
  OrderPlan();
  const AddressedMessages told = coordinator_.OnMemberGone(now_, 0, "it died");
  ASSERT_THAT(told, SizeIs(1));
  EXPECT_EQ(told[0].message.refused().reason(), "NODE_NOT_READY");
  EXPECT_THAT(coordinator_.Plan(now_, Order()), IsEmpty());
}

TEST_F(GroupJobPlanningTest, AWayBackIsToldWhenItIsPlannedAndNotInABrokenGroup) {
  OrderWayBack();
  const PlanOrder order = Order();
  (void)coordinator_.OnMemberGone(now_, 0, "it died");
  EXPECT_THAT(coordinator_.Plan(now_, order), IsEmpty());
}

TEST_F(GroupJobPlanningTest, SessionsOfTheStateBeforeAreNotRefusedWhileAWayBackIsPlanned) {
  OrderWayBack();
  EXPECT_THAT(Open(0, /*restore_step=*/0, /*incarnation=*/2), IsEmpty());
  EXPECT_THAT(LoseALane(), IsEmpty()) << "it has none yet";
  const AddressedMessages told = coordinator_.Plan(now_, Order());
  ASSERT_THAT(told, SizeIs(1));
  EXPECT_EQ(told[0].message.roll_back().epoch(), kEpoch + 1);
  EXPECT_TRUE(told[0].message.roll_back().asked());
}

TEST_F(GroupJobPlanningTest, AWayBackThatCannotBePlannedEndsTheJob) {
  OrderWayBack();
  const AddressedMessages told = coordinator_.Answer(now_, Order(), absl::InternalError("no plan"));
  ASSERT_THAT(told, SizeIs(2));
  EXPECT_EQ(told[0].message.new_epoch().epoch(), kEpoch + 1) << "which the plan would have told";
  EXPECT_EQ(told[1].message.job_ended().reason(), "STATE_LOST");
  EXPECT_THAT(told[1].message.job_ended().why(), HasSubstr("no plan"));
}

// Its rank has not acknowledged yet that the job goes back, and its memory is its own until then.
TEST_F(GroupJobPlanningTest, WhoWasAttachedBeforeTheWayBackIsNotTakenForWhoCameBack) {
  OrderWayBack();
  for (int32_t rank = 0; rank < ranks_; ++rank) Tell(Attached(rank, kEpoch));
  EXPECT_THAT(coordinator_.Plan(now_, Order()), SizeIs(1));
  for (int32_t rank = 0; rank < ranks_; ++rank) EXPECT_THAT(Open(rank), IsEmpty());
  const AddressedMessages ready = LanesReady();
  ASSERT_THAT(ready, SizeIs(1));
  EXPECT_TRUE(ready[0].message.has_open()) << "nobody has acknowledged";
  EXPECT_THAT(Attach(0), IsEmpty());
  const AddressedMessages restarted = Attach(1);
  ASSERT_THAT(restarted, SizeIs(2));
  EXPECT_TRUE(restarted[0].message.has_republish());
}

}  // namespace
}  // namespace dmuond::scheduler
