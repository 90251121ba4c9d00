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
  // The first thing that is told within this time, and nothing before, but who is awaited.
  AddressedMessages After(milliseconds wait) {
    const TimePoint end = now_ + wait;
    for (; now_ < end; now_ += kMoment) {
      AddressedMessages told = coordinator_.OnTick(now_);
      std::erase_if(told, [](const Addressed& one) { return one.message.has_waiting(); });
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

// ---- a job that has state, and whose lanes cannot work ----

class GroupJobParkedTest : public GroupJobWatchTest {
 protected:
  // It has begun from the snapshot of step 3, and its ranks have pushed since: no snapshot has
  // that.
  GroupJobParkedTest() {
    Plan(/*restore_step=*/3);
    EXPECT_EQ(LanesReady().size(), 1U);
    AddressedMessages told;
    for (int32_t rank = 0; rank < kRanks; ++rank) told = Attach(rank);
    EXPECT_EQ(told.size(), 2U);
    open_ = told.back().message.open().attempt();
  }
  void Push() {
    for (int32_t rank = 0; rank < kRanks; ++rank) {
      v1::MemberMessage message;
      v1::RankSubmitted& submitted = *message.mutable_reports()->add_submitted();
      submitted.set_rank(rank);
      submitted.set_attempt(open_);
      submitted.set_step(3);
      submitted.set_kind(v1::ATTEMPT_KIND_PUSH);
      EXPECT_THAT(Tell(message), IsEmpty());
    }
    v1::MemberMessage vote;
    vote.mutable_vote()->set_attempt(open_);
    vote.mutable_vote()->set_plan_digest(plan_.digest);
    const AddressedMessages told = Tell(vote);
    ASSERT_EQ(told.size(), 2U);
    ASSERT_EQ(told[0].message.decision().verdict(), v1::Decision::VERDICT_COMMIT);
  }
  // Three lanes die before the step comes to its end.
  AddressedMessages LoseThreeLanes() {
    EXPECT_TRUE(LoseALane()[0].message.has_reform());
    EXPECT_TRUE(LoseALane()[0].message.has_reform());
    return LoseALane();
  }
  uint64_t open_ = 0;
};

TEST_F(GroupJobParkedTest, ItIsTriedAgainAfterTwiceAsLongEachTime) {
  Push();
  AddressedMessages told = LoseThreeLanes();
  ASSERT_EQ(told.size(), 1U);
  EXPECT_THAT(told[0].message.parked().why(), HasSubstr("3 times before step 4"));
  EXPECT_THAT(LoseALane(), IsEmpty()) << "it has none";
  EXPECT_THAT(LanesReady(), IsEmpty()) << "they have been given up";
  for (milliseconds pause = kParkedFirst; pause <= 8 * kParkedFirst; pause *= 2) {
    const uint32_t before = coordinator_.epoch();
    EXPECT_THAT(After(pause - kMoment), IsEmpty());
    told = After(2 * kMoment);
    ASSERT_EQ(told.size(), 1U);
    EXPECT_EQ(told[0].message.reform().epoch(), before + 1);
    told = LoseALane();
    ASSERT_EQ(told.size(), 1U);
    EXPECT_TRUE(told[0].message.has_parked());
  }
}

TEST_F(GroupJobParkedTest, ItGoesOnWithLanesThatWorkAndIsSavedFirst) {
  Push();
  ASSERT_TRUE(LoseThreeLanes()[0].message.has_parked());
  EXPECT_TRUE(After(kParkedFirst + kMoment)[0].message.has_reform());
  const AddressedMessages told = LanesReady();
  ASSERT_GE(told.size(), 4U);
  EXPECT_EQ(told[0].message.decision().verdict(), v1::Decision::VERDICT_COMMIT);
  EXPECT_EQ(told[1].message.save().step(), 3);
  EXPECT_TRUE(told[2].message.decision().outcome().retry());
  EXPECT_TRUE(told.back().message.has_open());
  EXPECT_THAT(After(10 * kRegister), IsEmpty());
}

TEST_F(GroupJobParkedTest, NodesThatDoNotGetReadyParkIt) {
  Push();
  EXPECT_TRUE(LoseALane()[0].message.has_reform());
  EXPECT_THAT(After(kRegister), IsEmpty());
  const AddressedMessages told = After(kMoment);
  ASSERT_EQ(told.size(), 1U);
  EXPECT_THAT(told[0].message.parked().why(), AllOf(HasSubstr("node 0"), HasSubstr("killed")));
}

TEST_F(GroupJobParkedTest, ANodeThatLacksSomethingForItsLanesParksItOneThatHasLostItEndsIt) {
  Push();
  for (const bool keeps : {true, false}) {
    EXPECT_TRUE(LoseALane()[0].message.has_reform());
    v1::MemberMessage lacks = scheduler::LanesReady(0, coordinator_.epoch());
    lacks.mutable_plan_ready()->set_error("no memory");
    lacks.mutable_plan_ready()->set_keeps(keeps);
    const AddressedMessages told = Tell(lacks);
    ASSERT_FALSE(told.empty());
    if (!keeps) {
      EXPECT_FALSE(told[0].message.decision().outcome().retry());
      continue;
    }
    EXPECT_THAT(told[0].message.parked().why(), HasSubstr("no memory"));
    EXPECT_TRUE(After(kParkedFirst + kMoment)[0].message.has_reform());
    EXPECT_FALSE(LanesReady().empty());
  }
}

TEST_F(GroupJobParkedTest, WhatIsInMemoryAloneIsKeptForAsLongAsNobodySaysOtherwise) {
  Push();
  ASSERT_TRUE(LoseThreeLanes()[0].message.has_parked());
  for (int i = 0; i < 20; ++i) {
    const AddressedMessages told = After(kParkedMax + kMoment);
    ASSERT_EQ(told.size(), 1U);
    ASSERT_TRUE(told[0].message.has_reform());
    EXPECT_TRUE(LoseALane()[0].message.has_parked());
  }
  v1::MemberMessage end;
  end.mutable_end_job()->set_job("job");
  EXPECT_EQ(Tell(end)[0].message.job_ended().job(), "job");
}

TEST_F(GroupJobParkedTest, WhatASnapshotHasIsGivenUpAfterASessionLinger) {
  ASSERT_TRUE(LoseThreeLanes()[0].message.has_parked());
  ASSERT_TRUE(After(kParkedFirst + kMoment)[0].message.has_reform());
  ASSERT_TRUE(LoseALane()[0].message.has_parked());
  EXPECT_THAT(After(kLinger - kParkedFirst - kMoment), IsEmpty());
  const AddressedMessages told = After(2 * kMoment);
  ASSERT_FALSE(told.empty());
  const v1::Outcome& outcome = told[0].message.decision().outcome();
  EXPECT_FALSE(outcome.retry());
  EXPECT_EQ(outcome.reason(), v1::Outcome::REASON_LANE_LOST);
  EXPECT_THAT(outcome.detail(), HasSubstr("a snapshot has all of its state"));
}

// The step waits for a rank, say, while lanes work.
TEST_F(GroupJobParkedTest, WhatLanesHaveDiedBeforeTheyWorkedForLongCountsNoMore) {
  Push();
  ASSERT_TRUE(LoseThreeLanes()[0].message.has_parked());
  EXPECT_TRUE(After(kParkedFirst + kMoment)[0].message.has_reform());
  EXPECT_FALSE(LanesReady().empty());
  (void)After(kLanesWork - kMoment);
  ASSERT_TRUE(LoseALane()[0].message.has_parked()) << "not long enough";
  EXPECT_TRUE(After(2 * kParkedFirst + kMoment)[0].message.has_reform());
  EXPECT_FALSE(LanesReady().empty());
  (void)After(kLanesWork + kMoment);
  ASSERT_TRUE(LoseThreeLanes()[0].message.has_parked());
  const AddressedMessages told = After(kParkedFirst + kMoment);
  ASSERT_EQ(told.size(), 1U);
  EXPECT_TRUE(told[0].message.has_reform()) << "not after twice as long";
}

// Long after it was parked for the first time, with all of its state in a snapshot.
TEST_F(GroupJobParkedTest, ASavedJobIsNotGivenUpForWhatIsLongOver) {
  ASSERT_TRUE(LoseThreeLanes()[0].message.has_parked());
  EXPECT_TRUE(After(kParkedFirst + kMoment)[0].message.has_reform());
  EXPECT_FALSE(LanesReady().empty());
  (void)After(kLanesWork + kLinger);
  ASSERT_TRUE(LoseThreeLanes()[0].message.has_parked());
  const AddressedMessages told = After(kParkedFirst + kMoment);
  ASSERT_EQ(told.size(), 1U);
  EXPECT_TRUE(told[0].message.has_reform());
}

TEST_F(GroupJobParkedTest, WhoAcceptsOrLoadsHasLookedAtWhyLanesDied) {
  Push();
  v1::MemberMessage accepted;
  accepted.mutable_lanes_accepted();
  EXPECT_THAT(Tell(accepted), IsEmpty());
  ASSERT_TRUE(LoseThreeLanes()[0].message.has_parked());
  const AddressedMessages told = Tell(accepted);
  ASSERT_EQ(told.size(), 1U);
  EXPECT_TRUE(told[0].message.has_reform()) << "at once";
  ASSERT_TRUE(LoseThreeLanes()[0].message.has_parked());
  v1::MemberMessage load;
  *load.mutable_load_snapshot()->mutable_to() = SnapshotOf(3);
  load.mutable_load_snapshot()->set_epoch(coordinator_.epoch());
  EXPECT_TRUE(Tell(load)[0].message.has_roll_back());
  for (int lost = 1; lost < kLaneDeathsMax; ++lost) {
    EXPECT_TRUE(LoseALane()[0].message.has_roll_back());
  }
}

TEST_F(GroupJobParkedTest, ADeadRanksPlaceWaitsMeanwhile) {
  Push();
  ASSERT_TRUE(LoseThreeLanes()[0].message.has_parked());
  EXPECT_THAT(Gone(1, "it died"), IsEmpty());
  for (milliseconds pause = kParkedFirst; pause <= 4 * kParkedFirst; pause *= 2) {
    EXPECT_TRUE(After(pause + kMoment)[0].message.has_reform());
    EXPECT_TRUE(LoseALane()[0].message.has_parked()) << "it would be lost otherwise";
  }
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
