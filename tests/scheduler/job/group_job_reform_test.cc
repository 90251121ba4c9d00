// What the coordinator says, and in which order, when lanes are new while other things go on.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "scheduler/convert/convert.h"
#include "scheduler/plan.h"
#include "tests/scheduler/job/group_job_fixture.h"
#include "tests/scheduler/job/registrations.h"

namespace dmuond::scheduler {
namespace {

using ::testing::ElementsAre;

// A job of one rank on one node that goes on from the snapshot of step 3.
class GroupJobReformTest : public OneNodeJobTest {
 protected:
  GroupJobReformTest() : OneNodeJobTest(/*ranks=*/1, Options()) { Plan(/*restore_step=*/3); }

  static GroupJobOptions Options() {
    GroupJobOptions options;
    options.snapshots = true;
    options.step.session_linger = std::chrono::milliseconds(1000);
    return options;
  }
  AddressedMessages Attach() { return OneNodeJobTest::Attach(0); }
  // Somebody wants the snapshot of step 3, which was found in that epoch.
  AddressedMessages Load(uint32_t found_in) {
    v1::MemberMessage message;
    *message.mutable_load_snapshot()->mutable_to() = SnapshotOf(3);
    message.mutable_load_snapshot()->set_epoch(found_in);
    return Tell(message);
  }
  // The rank pushes its weights again, which commits.
  AddressedMessages Push(uint64_t attempt) {
    v1::MemberMessage submission;
    v1::RankSubmitted& submitted = *submission.mutable_reports()->add_submitted();
    submitted.set_attempt(attempt);
    submitted.set_step(3);
    submitted.set_kind(v1::ATTEMPT_KIND_PUSH);
    EXPECT_TRUE(Tell(submission).empty());
    v1::MemberMessage vote;
    vote.mutable_vote()->set_attempt(attempt);
    vote.mutable_vote()->set_plan_digest(plan_.digest);
    return Tell(vote);
  }
  static std::vector<std::string> Words(const AddressedMessages& messages) {
    std::vector<std::string> words;
    for (const Addressed& addressed : messages) {
      const v1::CoordinatorMessage& message = addressed.message;
      words.emplace_back(message.has_open()        ? "open"
                         : message.has_decision()  ? "decision"
                         : message.has_republish() ? "republish"
                         : message.has_reform()    ? "reform"
                         : message.has_roll_back() ? "roll back"
                         : message.has_save()      ? "save"
                         : message.has_halted()    ? "halted"
                         : message.has_new_epoch() ? "new epoch"
                         : message.has_job_ended() ? "job ended"
                                                   : "other");
    }
    return words;
  }
};

TEST_F(GroupJobReformTest, AJobRestartsWhenItHasLanesAgainNotWhenItsLastRankAttaches) {
  EXPECT_THAT(Words(LanesReady()), ElementsAre("open"));
  EXPECT_THAT(Words(LoseALane()), ElementsAre("reform"));
  EXPECT_THAT(Words(Attach()), ElementsAre()) << "there are no lanes that could publish";
  EXPECT_THAT(Words(LanesReady()), ElementsAre("decision", "open", "republish", "open"));
  EXPECT_THAT(Words(Attach()), ElementsAre()) << "as its node says once more";
}

TEST_F(GroupJobReformTest, ASaveThatIsSaidAgainFollowsTheCommitThatLanesMayHaveToFinish) {
  EXPECT_THAT(Words(LanesReady()), ElementsAre("open"));
  const AddressedMessages restarted = Attach();
  ASSERT_THAT(Words(restarted), ElementsAre("republish", "open"));
  const AddressedMessages pushed = Push(restarted[1].message.open().attempt());
  ASSERT_THAT(Words(pushed), ElementsAre("decision", "open"));
  v1::MemberMessage request;
  request.mutable_snapshot_request();
  ASSERT_THAT(Words(Tell(request)), ElementsAre("save"));
  EXPECT_THAT(Words(LoseALane()), ElementsAre("reform"));
  const AddressedMessages again = LanesReady();
  ASSERT_THAT(Words(again), ElementsAre("decision", "save", "decision", "republish", "open"));
  EXPECT_EQ(again[0].message.decision().attempt(), pushed[0].message.decision().attempt());
}

TEST_F(GroupJobReformTest, ASaveThatIsAskedForMeanwhileWaitsForThatCommitToo) {
  EXPECT_THAT(Words(LanesReady()), ElementsAre("open"));
  ASSERT_THAT(Words(Push(Attach()[1].message.open().attempt())), ElementsAre("decision", "open"));
  EXPECT_THAT(Words(LoseALane()), ElementsAre("reform"));
  v1::MemberMessage request;
  request.mutable_snapshot_request();
  EXPECT_THAT(Words(Tell(request)), ElementsAre()) << "lanes may be new and not done with it";
  EXPECT_THAT(Words(LanesReady()),
              ElementsAre("decision", "save", "decision", "republish", "open"));
}

// Two nodes are asked at once. What the second has found may have been set aside for the first.
TEST_F(GroupJobReformTest, ASnapshotThatWasFoundBeforeTheJobWentBackIsNotGoneBackTo) {
  EXPECT_THAT(Words(LanesReady()), ElementsAre("open"));
  EXPECT_THAT(Words(Load(kEpoch)), ElementsAre("roll back"));
  EXPECT_THAT(Words(Load(kEpoch)), ElementsAre()) << "who asked hears of the first one's way back";
  EXPECT_THAT(Words(Load(kEpoch + 1)), ElementsAre("roll back"));
}

TEST_F(GroupJobReformTest, ASnapshotThatWasFoundBeforeLanesWereNewIsThereStill) {
  EXPECT_THAT(Words(LanesReady()), ElementsAre("open"));
  EXPECT_THAT(Words(LoseALane()), ElementsAre("reform"));
  EXPECT_THAT(Words(Load(kEpoch)), ElementsAre("roll back"));
}

// Every node has given it up while the group was broken.
TEST_F(GroupJobReformTest, AJobThatNobodyHasAnyMoreMakesRoomForTheNext) {
  EXPECT_THAT(Words(LanesReady()), ElementsAre("open"));
  EXPECT_TRUE(coordinator_.OnMemberGone(now_, 0, "for longer than anybody waits").empty());
  EXPECT_TRUE(coordinator_.OnFormed(now_, kEpoch + 1).empty());
  v1::MemberMessage state;
  state.mutable_member_state()->set_epoch(kEpoch + 1);
  EXPECT_TRUE(Tell(state).empty());
  v1::MemberMessage session;
  session.mutable_rank_session()->set_job("another");
  session.mutable_rank_session()->set_world_size(1);
  EXPECT_TRUE(Tell(session).empty()) << "it is not refused";
}

// A launch's name can be guessed.
TEST_F(GroupJobReformTest, AStrangerWhoSaysADiscardsLaunchBeginsAJobOfHisOwn) {
  EXPECT_THAT(Words(LanesReady()), ElementsAre("open"));
  ASSERT_THAT(Words(Attach()), ElementsAre("republish", "open"));
  Gone(0, "rank died");
  v1::MemberMessage end;
  end.mutable_end_job()->set_job("job");
  v1::RankSession& discard = *end.mutable_end_job()->mutable_discard();
  discard.set_job("job");
  discard.set_launch("1");
  ASSERT_THAT(Words(Tell(end)), ElementsAre("job ended"));
  v1::MemberMessage message;
  v1::RankSession& session = *message.mutable_rank_session();
  session = discard;
  session.set_world_size(1);
  session.set_discard(true);
  session.set_uid(1001);
  Tell(message);
  session.set_uid(1002);
  const AddressedMessages told = Tell(message);
  ASSERT_EQ(told.size(), 1U);
  EXPECT_THAT(told[0].message.refused().message(), ::testing::HasSubstr("that of uid 1001"));
}

// A job goes back in an epoch of its own, of which members hear with its plan. They must not stay
// behind when the job ends before: what they say of the next one would be dropped as old.
TEST_F(GroupJobReformTest, AnEpochThatWasRaisedIsToldWhateverBecomesOfWhatRaisedIt) {
  EXPECT_THAT(Words(LanesReady()), ElementsAre("open"));
  coordinator_.HoldPlans();
  EXPECT_THAT(Words(Load(kEpoch)), ElementsAre()) << "it is being planned";
  v1::MemberMessage end;
  end.mutable_end_job()->set_job("job");
  const AddressedMessages ended = Tell(end);
  ASSERT_THAT(Words(ended), ElementsAre("new epoch", "job ended"));
  EXPECT_EQ(ended[0].message.new_epoch().epoch(), kEpoch + 1);
  EXPECT_EQ(coordinator_.epoch(), kEpoch + 1);
  EXPECT_THAT(Words(coordinator_.Plan(now_, *coordinator_.held())), ElementsAre());
}

TEST_F(GroupJobReformTest, WhatIsOfAnotherEpochOrAttemptChangesNothingAndIsNamed) {
  EXPECT_THAT(Words(LanesReady()), ElementsAre("open"));
  const uint64_t open = Attach()[1].message.open().attempt();
  const auto dropped = [&](const v1::MemberMessage& message) {
    EXPECT_THAT(Words(Tell(message)), ElementsAre());
    std::vector<std::string> words;
    for (const Dropped& one : coordinator_.TakeDropped()) {
      words.push_back(absl::StrCat(one.message, " ", kDropReasons[static_cast<size_t>(one.reason)],
                                   " ", one.said, " ", one.wanted));
    }
    return words;
  };
  EXPECT_THAT(dropped(scheduler::LanesReady(plan_.digest, kEpoch - 1)),
              ElementsAre("plan_ready older_epoch 4 5"));
  EXPECT_THAT(dropped(LaneLost(kEpoch + 1)), ElementsAre("lane_lost newer_epoch 6 5"));
  EXPECT_THAT(dropped(Attached(0, kEpoch - 2)), ElementsAre("rank_attached older_epoch 3 5"));
  v1::MemberMessage vote;
  vote.mutable_vote()->set_attempt(open - 1);
  EXPECT_THAT(dropped(vote), ElementsAre(absl::StrCat("vote older_attempt ", open - 1, " ", open)));
  v1::MemberMessage reports;
  reports.mutable_reports()->add_submitted()->set_attempt(open + 1);
  reports.mutable_reports()->mutable_submitted(0)->set_kind(v1::ATTEMPT_KIND_PUSH);
  reports.mutable_reports()->add_ready()->set_attempt(open - (uint64_t{1} << 32));
  reports.mutable_reports()->mutable_ready(0)->set_operation(v1::RAIL_OPERATION_COLLECT);
  reports.mutable_reports()->mutable_ready(0)->set_kind(v1::ATTEMPT_KIND_STEP);
  EXPECT_THAT(dropped(reports),
              ElementsAre(absl::StrCat("submitted newer_attempt ", open + 1, " ", open),
                          "ready older_epoch 4 5"));
  EXPECT_THAT(Words(LoseALane()), ElementsAre("reform"));
  EXPECT_TRUE(coordinator_.TakeDropped().empty());
}

TEST_F(GroupJobReformTest, AnEpochThatAPlanTellsIsToldOnce) {
  EXPECT_THAT(Words(LanesReady()), ElementsAre("open"));
  EXPECT_THAT(Words(Load(kEpoch)), ElementsAre("roll back"));
  v1::MemberMessage end;
  end.mutable_end_job()->set_job("job");
  EXPECT_THAT(Words(Tell(end)), ElementsAre("job ended"));
}

class GroupJobLeavingTest : public GroupJobReformTest {
 protected:
  // In step 4, which the rank has not submitted.
  GroupJobLeavingTest() {
    (void)LanesReady();
    restarted_ = Attach()[1].message.open().attempt();
    open_ = Push(restarted_)[1].message.open().attempt();
  }
  AddressedMessages Leave() {
    v1::MemberMessage message;
    message.mutable_leaving()->set_patience_ms(1000);
    return Tell(message);
  }
  AddressedMessages Submit() {
    v1::MemberMessage message;
    v1::RankSubmitted& submitted = *message.mutable_reports()->add_submitted();
    submitted.set_attempt(open_);
    submitted.set_step(4);
    submitted.set_kind(v1::ATTEMPT_KIND_STEP);
    submitted.mutable_scalars()->add_groups();
    return Tell(message);
  }
  AddressedMessages Vote() {
    v1::MemberMessage message;
    message.mutable_vote()->set_attempt(open_);
    message.mutable_vote()->set_plan_digest(plan_.digest);
    std::vector<UnitNorm> norms;
    for (const Unit& unit : plan_.units) norms.push_back({.unit = unit.id, .sums = {1}});
    *message.mutable_vote()->mutable_norms() = ToProto(norms);
    return Tell(message);
  }
  uint64_t restarted_ = 0;
  uint64_t open_ = 0;
};

TEST_F(GroupJobLeavingTest, AnIdleJobIsHaltedAtOnce) {
  const AddressedMessages halted = Leave();
  ASSERT_THAT(Words(halted), ElementsAre("halted"));
  EXPECT_EQ(halted[0].message.halted().step(), 3);
  EXPECT_THAT(Words(Submit()), ElementsAre());
  EXPECT_THAT(Words(Vote()), ElementsAre());
}

TEST_F(GroupJobLeavingTest, TheStepInFlightIsFinishedAndNothingComesAfterIt) {
  EXPECT_THAT(Words(Submit()), ElementsAre());
  EXPECT_THAT(Words(Leave()), ElementsAre());
  const AddressedMessages decided = Vote();
  ASSERT_THAT(Words(decided), ElementsAre("decision", "open", "halted"));
  EXPECT_EQ(decided[2].message.halted().step(), 4);
  open_ = decided[1].message.open().attempt();
  EXPECT_THAT(Words(Submit()), ElementsAre());
  EXPECT_THAT(Words(Vote()), ElementsAre());
}

TEST_F(GroupJobLeavingTest, AStepThatNobodyFinishesIsWaitedForSoLongAndNotLonger) {
  EXPECT_THAT(Words(Submit()), ElementsAre());
  EXPECT_THAT(Words(Leave()), ElementsAre());
  EXPECT_THAT(Words(coordinator_.OnTick(now_ + std::chrono::milliseconds(999))), ElementsAre());
  EXPECT_THAT(Words(coordinator_.OnTick(now_ + std::chrono::milliseconds(1000))),
              ElementsAre("halted"));
  EXPECT_THAT(Words(Vote()), ElementsAre());
}

TEST_F(GroupJobLeavingTest, ItStaysHaltedWhenLanesAreReplaced) {
  EXPECT_THAT(Words(Leave()), ElementsAre("halted"));
  EXPECT_THAT(Words(LoseALane()), ElementsAre("reform"));
  const AddressedMessages again = LanesReady();
  ASSERT_THAT(Words(again), ElementsAre("decision", "decision", "republish", "open"));
  open_ = again[3].message.open().attempt();
  EXPECT_THAT(Words(Submit()), ElementsAre());
  EXPECT_THAT(Words(Vote()), ElementsAre());
}

// A lane that was connected with the leaver's dies before the leaver's stream ends.
TEST_F(GroupJobLeavingTest, ANodeThatHasLeftAlreadyIsAMemberThatIsGoneAndNoLoss) {
  EXPECT_THAT(Words(Leave()), ElementsAre("halted"));
  EXPECT_THAT(Words(LoseALane()), ElementsAre("reform"));
  v1::MemberMessage left;
  left.mutable_plan_ready()->set_epoch(coordinator_.epoch());
  left.mutable_plan_ready()->set_error("this node does not have the job any more");
  left.mutable_plan_ready()->set_reason("DRAINING");
  EXPECT_THAT(Words(Tell(left)), ElementsAre()) << "nobody is told of a loss";
  EXPECT_THAT(Words(coordinator_.OnMemberGone(now_, 0, "the stream ended")), ElementsAre());
  EXPECT_THAT(Words(coordinator_.OnTick(now_ + std::chrono::seconds(900))), ElementsAre());
}

// Two nodes, and a job that begins on them.
class GroupJobBitsTest : public ::testing::Test {
 protected:
  GroupJobBitsTest() {
    EXPECT_TRUE(coordinator_.OnFormed(now_, 5).empty());
    for (const int32_t node : {0, 1}) {
      v1::MemberMessage state;
      state.mutable_member_state()->set_epoch(5);
      EXPECT_TRUE(coordinator_.OnMessage(now_, node, state).empty());
    }
    v1::MemberMessage session;
    session.mutable_rank_session()->set_job("job");
    session.mutable_rank_session()->set_world_size(1);
    EXPECT_TRUE(coordinator_.OnMessage(now_, 0, session).empty());
    v1::MemberMessage registration;
    *registration.mutable_registration() = OfOneMatrix(0, 1);
    const AddressedMessages planned = coordinator_.OnMessage(now_, 0, registration);
    digest_ = MakePlannedJob(planned[0].message.plan())->plan->digest;
  }
  AddressedMessages Ready(int32_t node, const std::string& openblas, const std::string& program) {
    v1::MemberMessage message = LanesReady(digest_, 5);
    v1::PlanReady& ready = *message.mutable_plan_ready();
    ready.set_node(node);
    ready.mutable_bits()->set_code("the sources");
    v1::LaneBits::Module& module = *ready.mutable_bits()->add_modules();
    module.set_name("dmuond-lane");
    module.set_id(program);
    module.set_program(true);
    v1::LaneBits::Module& library = *ready.mutable_bits()->add_modules();
    library.set_name("libopenblas.so.0");
    library.set_path("/lib/libopenblas.so.0");
    library.set_id(openblas);
    return coordinator_.OnMessage(now_, node, message);
  }
  TimePoint now_;
  PlannedGroupJob coordinator_{{.nodes = 2}};
  uint64_t digest_ = 0;
};

// A library was replaced on one node before the job began: its own lanes agree with each other.
TEST_F(GroupJobBitsTest, AJobDoesNotBeginWhereNodesHaveOtherBuildsOfALibrary) {
  EXPECT_TRUE(Ready(0, "build-id a", "build-id 1").empty());
  const AddressedMessages told = Ready(1, "build-id b", "build-id 1");
  ASSERT_EQ(told.size(), 1U);
  EXPECT_EQ(told[0].message.refused().reason(), "LANE_DIFFERS");
  EXPECT_EQ(told[0].message.refused().message(),
            "lanes of node 1 and node 0 would compute other bits: libopenblas.so.0 "
            "(/lib/libopenblas.so.0) is build-id b on node 1, and build-id a on node 0. Install "
            "the same build on all nodes, and start the ranks again");
}

TEST_F(GroupJobBitsTest, SeveralBuildsOfTheLanesProgramAreAgreedByTheirSources) {
  EXPECT_TRUE(Ready(0, "build-id a", "build-id 1").empty());
  const AddressedMessages told = Ready(1, "build-id a", "build-id 2");
  ASSERT_EQ(told.size(), 1U);
  EXPECT_TRUE(told[0].message.has_open());
}

// Two nodes with a directory, and a job whose memory one of them may have lost.
class GroupJobFormingTest : public ::testing::Test {
 protected:
  GroupJobFormingTest() : coordinator_(Options()) {
    EXPECT_TRUE(coordinator_.OnFormed(now_, kEpoch).empty());
    EXPECT_TRUE(TellState(0, {}).empty());
    EXPECT_TRUE(TellState(1, {}).empty());
    EXPECT_TRUE(TellSession(0).empty());
    v1::MemberMessage registration;
    *registration.mutable_registration() = OfOneMatrix(0, 1);
    const AddressedMessages planned = Tell(0, registration);
    EXPECT_EQ(planned.size(), 1U);
    state_.set_job("job");
    state_.set_job_incarnation(1);
    state_.set_has_memory(true);
    state_.set_has_state(true);
    *state_.mutable_plan() = planned[0].message.plan();
    (void)coordinator_.OnMemberGone(now_, 1, "it died");
    EXPECT_TRUE(coordinator_.OnFormed(now_, kEpoch + 1).empty());
  }

  static constexpr uint32_t kEpoch = 5;
  static GroupJobOptions Options() {
    GroupJobOptions options{.nodes = 2, .snapshots = true};
    options.step.session_linger = std::chrono::milliseconds(1000);
    return options;
  }
  AddressedMessages Tell(int32_t node, const v1::MemberMessage& message) {
    return coordinator_.OnMessage(now_, node, message);
  }
  AddressedMessages TellState(int32_t node, const v1::MemberState& state) {
    v1::MemberMessage message;
    *message.mutable_member_state() = state;
    message.mutable_member_state()->set_epoch(coordinator_.epoch());
    return Tell(node, message);
  }
  AddressedMessages TellSession(int32_t node) {
    v1::MemberMessage message;
    message.mutable_rank_session()->set_job("job");
    message.mutable_rank_session()->set_world_size(1);
    return Tell(node, message);
  }
  AddressedMessages TellNewest(int64_t step, const std::string& error = "", uint32_t ago = 0) {
    v1::MemberMessage message;
    message.mutable_newest_snapshot()->set_epoch(coordinator_.epoch() - ago);
    if (step > 0) *message.mutable_newest_snapshot()->mutable_newest() = SnapshotOf(step);
    message.mutable_newest_snapshot()->set_error(error);
    return Tell(0, message);
  }
  // The node that died has a successor without anything.
  void LoseMemory() {
    EXPECT_TRUE(TellState(0, state_).empty());
    const AddressedMessages asked = TellState(1, {});
    ASSERT_EQ(asked.size(), 1U);
    EXPECT_EQ(asked[0].node, 0) << "others see the same directory";
    EXPECT_EQ(asked[0].message.find_snapshot().job(), "job");
    EXPECT_EQ(asked[0].message.find_snapshot().epoch(), coordinator_.epoch());
  }

  TimePoint now_;
  PlannedGroupJob coordinator_;
  v1::MemberState state_;  // of a node that has the job
};

TEST_F(GroupJobFormingTest, AJobThatHasEndedStaysSoForANodeThatDidNotHearOfIt) {
  EXPECT_TRUE(TellState(1, state_).empty());
  ASSERT_EQ(TellState(0, {}).size(), 1U);
  const AddressedMessages ended = TellNewest(0);
  ASSERT_EQ(ended.size(), 1U);
  EXPECT_EQ(ended[0].node, 1);
  EXPECT_EQ(ended[0].message.job_ended().reason(), "STATE_LOST");
  (void)coordinator_.OnMemberGone(now_, 1, "the link broke before it heard that");
  EXPECT_TRUE(coordinator_.OnFormed(now_, kEpoch + 2).empty());
  EXPECT_TRUE(TellState(0, {}).empty());
  const AddressedMessages again = TellState(1, state_);
  ASSERT_EQ(again.size(), 1U) << "nobody looks for a snapshot of it";
  EXPECT_EQ(again[0].node, 1);
  EXPECT_EQ(again[0].message.job_ended().why(), ended[0].message.job_ended().why());
}

// Of a coordinator that is gone, whose job its successor ends.
TEST_F(GroupJobFormingTest, TheNextJobIsNotTakenForOneThatHasEnded) {
  state_.set_job_incarnation(7);
  LoseMemory();
  EXPECT_EQ(TellNewest(0).size(), 1U);
  EXPECT_TRUE(TellSession(0).empty());
  v1::MemberMessage registration;
  *registration.mutable_registration() = OfOneMatrix(0, 1);
  const AddressedMessages planned = Tell(0, registration);
  ASSERT_EQ(planned.size(), 1U);
  EXPECT_GT(planned[0].message.plan().job_incarnation(), 7U);
}

TEST_F(GroupJobFormingTest, AJobThatLostMemoryGoesBackToTheNewestSnapshotWhenItIsKnown) {
  LoseMemory();
  EXPECT_TRUE(TellSession(0).empty()) << "the rank is of a job that is not there yet";
  EXPECT_TRUE(TellNewest(3, "", /*ago=*/1).empty()) << "an answer of an older epoch";
  const AddressedMessages told = TellNewest(3);
  ASSERT_EQ(told.size(), 1U);
  EXPECT_EQ(told[0].message.roll_back().plan().restore().SerializeAsString(),
            SnapshotOf(3).SerializeAsString());
  EXPECT_EQ(told[0].message.roll_back().epoch(), kEpoch + 2) << "its own";
  EXPECT_TRUE(TellNewest(6).empty()) << "it is answered";
}

TEST_F(GroupJobFormingTest, OnlyTheNodeThatWasAskedSaysWhichSnapshotIsTheNewest) {
  LoseMemory();
  v1::MemberMessage message;
  message.mutable_newest_snapshot()->set_epoch(coordinator_.epoch());
  *message.mutable_newest_snapshot()->mutable_newest() = SnapshotOf(6);
  EXPECT_TRUE(Tell(1, message).empty()) << "node 0 was asked";
  const AddressedMessages told = TellNewest(3);
  ASSERT_EQ(told.size(), 1U);
  EXPECT_EQ(told[0].message.roll_back().plan().restore().step(), 3);
}

// It was kept until it was known which job goes on, and its rank has acknowledged nothing.
TEST_F(GroupJobFormingTest, WhoWasAttachedBeforeItWasKnownThatTheJobGoesBackHasNotComeBack) {
  EXPECT_TRUE(TellState(0, state_).empty());
  EXPECT_TRUE(TellSession(0).empty());
  v1::MemberMessage attached;
  attached.mutable_rank_attached()->set_epoch(coordinator_.epoch());
  EXPECT_TRUE(Tell(0, attached).empty());
  EXPECT_EQ(TellState(1, {}).size(), 1U);
  const AddressedMessages told = TellNewest(3);
  ASSERT_EQ(told.size(), 1U);
  const uint64_t digest = MakePlannedJob(told[0].message.roll_back().plan())->plan->digest;
  EXPECT_TRUE(TellSession(0).empty());
  AddressedMessages ready;
  for (int32_t node = 0; node < 2; ++node) {
    v1::MemberMessage message = LanesReady(digest, coordinator_.epoch());
    message.mutable_plan_ready()->set_node(node);
    ready = Tell(node, message);
  }
  ASSERT_EQ(ready.size(), 1U);
  EXPECT_TRUE(ready[0].message.has_open());
  attached.mutable_rank_attached()->set_epoch(coordinator_.epoch());
  const AddressedMessages restarted = Tell(0, attached);
  ASSERT_EQ(restarted.size(), 2U);
  EXPECT_TRUE(restarted[0].message.has_republish());
}

TEST_F(GroupJobFormingTest, AJobIsLostWhenThereIsNoSnapshotAndNotWhenThatIsUnknown) {
  LoseMemory();
  AddressedMessages told = TellNewest(0);
  ASSERT_EQ(told.size(), 1U);
  EXPECT_EQ(told[0].node, 0);
  EXPECT_EQ(told[0].message.job_ended().reason(), "STATE_LOST");
  EXPECT_TRUE(coordinator_.OnFormed(now_, kEpoch + 2).empty());
  state_.set_job_incarnation(2);  // of the next one
  LoseMemory();
  told = TellNewest(0, "it hangs");
  ASSERT_EQ(told.size(), 1U);
  EXPECT_EQ(told[0].message.job_ended().reason(), "PEER_LOST");
}

TEST_F(GroupJobFormingTest, AGroupThatBreaksWhileItLooksForASnapshotAsksAnew) {
  LoseMemory();
  EXPECT_TRUE(coordinator_.OnMemberGone(now_, 1, "it died again").empty());
  EXPECT_TRUE(coordinator_.OnFormed(now_, kEpoch + 2).empty());
  EXPECT_TRUE(TellNewest(3, "", /*ago=*/1).empty());
  LoseMemory();
  EXPECT_TRUE(TellNewest(3)[0].message.has_roll_back());
}

TEST_F(GroupJobFormingTest, NobodyLooksForASnapshotOfAJobThatHadNoState) {
  state_.set_has_state(false);
  EXPECT_TRUE(TellState(0, state_).empty());
  const AddressedMessages told = TellState(1, {});
  ASSERT_EQ(told.size(), 1U);
  EXPECT_EQ(told[0].message.job_ended().reason(), "PEER_LOST");
}

}  // namespace
}  // namespace dmuond::scheduler
