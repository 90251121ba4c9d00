// Nobody is waited for without end: nodes that do not become ready, and ranks that do not come back
// to a job that goes back.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <optional>
#include <string>

#include "scheduler/plan.h"
#include "tests/scheduler/job/group_job_fixture.h"

namespace dmuond::scheduler {
namespace {

using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr int32_t kRanks = 3;
constexpr milliseconds kRegister{1000};
constexpr milliseconds kStep{4000};
constexpr milliseconds kLinger{2000};
constexpr milliseconds kMoment{100};  // from one tick to the next

// A job of three ranks on one node, which has been told to prepare it: anew, or from the snapshot
// of a step.
class GroupJobWatchTest : public OneNodeJobTest {
 protected:
  GroupJobWatchTest() : OneNodeJobTest(kRanks, Options()) {}

  static GroupJobOptions Options() {
    GroupJobOptions options;
    options.register_timeout = kRegister;
    options.step.step_timeout = kStep;
    options.step.session_linger = kLinger;
    options.snapshots = true;
    return options;
  }

  AddressedMessages Progress(uint64_t done, const std::string& awaited) {
    v1::MemberMessage message;
    message.mutable_node_progress()->set_epoch(coordinator_.epoch());
    message.mutable_node_progress()->set_done(done);
    message.mutable_node_progress()->set_awaited(awaited);
    return Tell(message);
  }
  // Somebody loads the snapshot of this step, and the node is told to go back to it.
  void Load(int64_t step) {
    v1::MemberMessage load;
    *load.mutable_load_snapshot()->mutable_to() = SnapshotOf(step);
    load.mutable_load_snapshot()->set_epoch(coordinator_.epoch());
    const AddressedMessages back = Tell(load);
    ASSERT_EQ(back.size(), 1U);
    ASSERT_TRUE(back[0].message.has_roll_back());
    plan_ = *MakePlannedJob(back[0].message.roll_back().plan())->plan;
  }
  // The first thing that is told within this time, and nothing before.
  AddressedMessages After(milliseconds wait) {
    const TimePoint end = now_ + wait;
    for (; now_ < end; now_ += kMoment) {
      AddressedMessages told = coordinator_.OnTick(now_);
      if (!told.empty()) return told;
    }
    return {};
  }
};

// ---- nodes that do not become ready ----

TEST_F(GroupJobWatchTest, ANodeThatIsNotHeardOfIsNamedAndItsJobRefused) {
  Plan(/*restore_step=*/0);
  EXPECT_THAT(After(kRegister), IsEmpty());
  const AddressedMessages told = After(kMoment);
  ASSERT_EQ(told.size(), 1U);
  EXPECT_EQ(told[0].message.refused().reason(), "NODE_NOT_READY");
  EXPECT_THAT(told[0].message.refused().message(), HasSubstr("node 0 (nothing heard of it)"));
  EXPECT_THAT(After(10 * kRegister), IsEmpty()) << "told twice";
}

TEST_F(GroupJobWatchTest, ANodeThatGetsSomethingDoneIsWaitedFor) {
  Plan(/*restore_step=*/0);
  uint64_t done = 0;
  for (; done < 10; ++done) {
    EXPECT_THAT(Progress(done, "lane 0 (pid 7)"), IsEmpty());
    EXPECT_THAT(After(kRegister), IsEmpty());
  }
  // Saying the same again is not getting something done.
  EXPECT_THAT(Progress(done - 1, "lane 0 (pid 7)"), IsEmpty());
  const AddressedMessages told = After(kRegister);
  ASSERT_EQ(told.size(), 1U);
  EXPECT_THAT(told[0].message.refused().message(), HasSubstr("node 0 (lane 0 (pid 7))"));
}

TEST_F(GroupJobWatchTest, ASnapshotIsReadForAsLongAsBytesComeAndNotLonger) {
  Plan(/*restore_step=*/3);
  constexpr uint64_t kHours = 3'600;  // of a register timeout each
  for (uint64_t bytes = 1; bytes <= kHours; ++bytes) {
    EXPECT_THAT(Progress(bytes, "the snapshot of step 3"), IsEmpty());
    ASSERT_THAT(After(kRegister), IsEmpty()) << bytes;
  }
  const AddressedMessages told = After(2 * kMoment);
  ASSERT_EQ(told.size(), 1U);
  EXPECT_EQ(told[0].message.refused().reason(), "NODE_NOT_READY");
  EXPECT_THAT(told[0].message.refused().message(), HasSubstr("the snapshot of step 3"));
}

TEST_F(GroupJobWatchTest, AJobThatGoesBackEndsWhenItsSnapshotIsNeverRead) {
  Plan(/*restore_step=*/3);
  EXPECT_EQ(LanesReady().size(), 1U);
  Load(3);
  EXPECT_THAT(Progress(1, "the snapshot of step 3"), IsEmpty());
  EXPECT_THAT(After(kRegister), IsEmpty());
  const AddressedMessages told = After(kMoment);
  ASSERT_EQ(told.size(), 1U);
  EXPECT_EQ(told[0].message.job_ended().reason(), "NODE_NOT_READY");
  EXPECT_THAT(told[0].message.job_ended().why(), HasSubstr("the snapshot of step 3"));
}

TEST_F(GroupJobWatchTest, ASecondWayBackHasAsLongAsTheFirst) {
  Plan(/*restore_step=*/3);
  EXPECT_EQ(LanesReady().size(), 1U);
  Load(3);
  EXPECT_THAT(After(kRegister), IsEmpty());
  Load(3);
  EXPECT_THAT(After(kRegister), IsEmpty()) << "nodes have begun anew";
  const AddressedMessages told = After(2 * kMoment);
  ASSERT_EQ(told.size(), 1U);
  EXPECT_EQ(told[0].message.job_ended().reason(), "NODE_NOT_READY");
}

TEST_F(GroupJobWatchTest, NewLanesHaveSoLongToBecomeReadyAndThenTheJobIsLostByName) {
  Plan(/*restore_step=*/0);
  EXPECT_EQ(LanesReady().size(), 1U);
  for (int32_t rank = 0; rank < kRanks; ++rank) EXPECT_THAT(Attach(rank), IsEmpty());
  const AddressedMessages reform = LoseALane();
  ASSERT_EQ(reform.size(), 1U);
  ASSERT_TRUE(reform[0].message.has_reform());
  EXPECT_THAT(After(kRegister), IsEmpty());
  const AddressedMessages told = After(kMoment);
  ASSERT_FALSE(told.empty());
  const v1::Outcome& outcome = told[0].message.decision().outcome();
  EXPECT_FALSE(outcome.retry());
  EXPECT_EQ(outcome.reason(), v1::Outcome::REASON_LANE_LOST);
  EXPECT_THAT(outcome.detail(), AllOf(HasSubstr("node 0"), HasSubstr("killed")));
  EXPECT_THAT(LanesReady(), IsEmpty()) << "it comes too late";
}

// What was decided before the other rank left is still being published.
TEST_F(GroupJobWatchTest, LanesOfALostJobAreReplacedOrItEnds) {
  Plan(/*restore_step=*/0);
  EXPECT_EQ(LanesReady().size(), 1U);
  for (int32_t rank = 0; rank < kRanks; ++rank) EXPECT_THAT(Attach(rank), IsEmpty());
  v1::MemberMessage closed;
  closed.mutable_rank_gone()->set_rank(1);
  closed.mutable_rank_gone()->set_closed(true);
  EXPECT_FALSE(Tell(closed).empty());
  AddressedMessages told = LoseALane();
  ASSERT_EQ(told.size(), 1U);
  EXPECT_TRUE(told[0].message.has_reform());
  told = LanesReady();
  ASSERT_FALSE(told.empty());
  EXPECT_FALSE(told[0].message.decision().outcome().retry());
  EXPECT_EQ(LoseALane().size(), 1U);
  EXPECT_THAT(After(kRegister), IsEmpty());
  told = After(kMoment);
  ASSERT_EQ(told.size(), 1U);
  EXPECT_EQ(told[0].message.job_ended().reason(), "LANE_LOST");
}

TEST_F(GroupJobWatchTest, NewLanesThatAreReadyInTimeGoOn) {
  Plan(/*restore_step=*/0);
  EXPECT_EQ(LanesReady().size(), 1U);
  for (int32_t rank = 0; rank < kRanks; ++rank) EXPECT_THAT(Attach(rank), IsEmpty());
  EXPECT_EQ(LoseALane().size(), 1U);
  EXPECT_THAT(After(kRegister), IsEmpty());
  const AddressedMessages told = LanesReady();
  ASSERT_FALSE(told.empty());
  EXPECT_TRUE(told.back().message.has_open());
  EXPECT_THAT(After(10 * kRegister), IsEmpty());
}

// ---- ranks that do not come back to a job that goes back ----

class GroupJobGoingBackTest : public GroupJobWatchTest {
 protected:
  GroupJobGoingBackTest() {
    Plan(/*restore_step=*/3);
    EXPECT_FALSE(LanesReady().empty());
  }
  // Of the rank that is expelled within this time.
  std::optional<v1::ExpelRank> ExpelledAfter(milliseconds wait) {
    const AddressedMessages told = After(wait);
    if (told.size() != 1 || !told[0].message.has_expel()) return std::nullopt;
    return told[0].message.expel();
  }
};

TEST_F(GroupJobGoingBackTest, ARankThatDoesNotAcknowledgeIsExpelledAfterTheLastOneThatDid) {
  EXPECT_THAT(Attach(0), IsEmpty());
  EXPECT_THAT(After(kStep - kMoment), IsEmpty());
  EXPECT_THAT(Attach(1), IsEmpty());
  EXPECT_THAT(After(kStep), IsEmpty()) << "it has come in time, and others may be as slow";
  const auto expelled = ExpelledAfter(2 * kMoment);
  ASSERT_TRUE(expelled.has_value());
  EXPECT_EQ(expelled->rank(), 2);
  EXPECT_THAT(expelled->detail(), AllOf(HasSubstr("step 3"), HasSubstr("others: 2")));
}

TEST_F(GroupJobGoingBackTest, WhoWasExpelledAndIsNotReplacedEndsTheWaitByName) {
  EXPECT_THAT(Attach(0), IsEmpty());
  EXPECT_THAT(Attach(1), IsEmpty());
  const auto expelled = ExpelledAfter(kStep + 2 * kMoment);
  ASSERT_TRUE(expelled.has_value());
  const AddressedMessages aborted = Gone(2, expelled->detail());
  ASSERT_FALSE(aborted.empty());
  EXPECT_TRUE(aborted[0].message.decision().outcome().retry()) << "its place waits";
  EXPECT_THAT(After(kLinger), IsEmpty());
  const AddressedMessages lost = After(2 * kMoment);
  ASSERT_FALSE(lost.empty());
  const v1::Outcome& outcome = lost[0].message.decision().outcome();
  EXPECT_FALSE(outcome.retry());
  EXPECT_THAT(outcome.detail(), HasSubstr("others: 2"));
}

TEST_F(GroupJobGoingBackTest, AReplacementOfWhoWasExpelledIsTheLastToComeAndTheJobRestarts) {
  EXPECT_THAT(Attach(0), IsEmpty());
  EXPECT_THAT(Attach(1), IsEmpty());
  ASSERT_TRUE(ExpelledAfter(kStep + 2 * kMoment).has_value());
  EXPECT_FALSE(Gone(2, "expelled").empty());
  v1::MemberMessage session;
  session.mutable_rank_session()->set_rank(2);
  session.mutable_rank_session()->set_job("job");
  session.mutable_rank_session()->set_world_size(kRanks);
  session.mutable_rank_session()->set_incarnation(2);
  EXPECT_THAT(Tell(session), IsEmpty());
  const AddressedMessages restarted = Tell(Attached(2, coordinator_.epoch(), /*incarnation=*/2));
  ASSERT_EQ(restarted.size(), 2U);
  EXPECT_EQ(restarted[0].message.republish().step(), 3);
  EXPECT_TRUE(restarted[1].message.has_open());
}

TEST_F(GroupJobGoingBackTest, NobodyIsExpelledBeforeAnybodyHasCome) {
  EXPECT_THAT(After(10 * kStep), IsEmpty());
}

TEST_F(GroupJobGoingBackTest, SnapshotsThatFailedBeforeAWayBackStayCounted) {
  for (const int failed : {1, 2}) {
    for (int32_t rank = 0; rank < kRanks; ++rank) {
      EXPECT_THAT(Open(rank, /*restore_step=*/3), IsEmpty()) << "as its node says again";
      Attach(rank);
    }
    v1::MemberMessage request;
    request.mutable_snapshot_request();
    const AddressedMessages asked = Tell(request);
    ASSERT_EQ(asked.size(), 1U);
    v1::MemberMessage written;
    written.mutable_snapshot_written()->set_attempt(asked[0].message.save().attempt());
    written.mutable_snapshot_written()->set_error("the disk is full");
    EXPECT_EQ(Tell(written).size(), 1U);
    v1::MemberMessage manifest;
    manifest.mutable_manifest_written()->set_attempt(asked[0].message.save().attempt());
    const AddressedMessages done = Tell(manifest);
    ASSERT_EQ(done.size(), 1U);
    EXPECT_EQ(done[0].message.snapshot_done().failed(), failed);
    Load(3);
    EXPECT_FALSE(LanesReady().empty());
  }
}

}  // namespace
}  // namespace dmuond::scheduler
