#include "scheduler/job/node_job.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <map>
#include <string>
#include <utility>
#include <variant>

#include "scheduler/convert/convert.h"
#include "scheduler/job/impossible.h"
#include "scheduler/reason.h"
#include "tests/scheduler/job/node_job_fixture.h"

namespace dmuond::scheduler {
namespace {

using ::testing::HasSubstr;
using Phase = NodeJob::Phase;

// Each test also with a job that after each event goes on as another one, made from its record: in
// every phase, it has all that the rest of the test needs.
class NodeJobTest : public NodeJobFixture, public ::testing::WithParamInterface<bool> {
 protected:
  NodeJobTest() : NodeJobFixture(GetParam()) {}
};
INSTANTIATE_TEST_SUITE_P(AsItIs, NodeJobTest, ::testing::Values(false));
INSTANTIATE_TEST_SUITE_P(FromItsRecord, NodeJobTest, ::testing::Values(true));

TEST_P(NodeJobTest, AJobGoesFromItsFirstSessionToItsFirstAttempt) {
  EXPECT_EQ(job_.phase(), Phase::kNone);
  const uint64_t id = Open();
  EXPECT_EQ(job_.phase(), Phase::kRegistering);
  Register(id);
  Plan();
  EXPECT_EQ(job_.phase(), Phase::kPreparing);
  ASSERT_EQ(Taken<node::Prepare>().size(), 1U);
  Prepared();
  EXPECT_EQ(job_.phase(), Phase::kStarting);
  ASSERT_EQ(Taken<node::StartLanes>().size(), 1U);
  EXPECT_EQ(Taken<node::StartLanes>()[0].epoch, kEpoch);
  LanesReady();
  EXPECT_EQ(job_.phase(), Phase::kAwaiting);
  EXPECT_EQ(LastTold(&v1::MemberMessage::has_plan_ready).plan_ready().digest(),
            job_.plan()->digest);
  EXPECT_TRUE(job_.WhyNotYetMapped(id).has_value());
  OpenAttempt(1, 1);
  EXPECT_EQ(job_.phase(), Phase::kRunning);
  EXPECT_FALSE(job_.WhyNotYetMapped(id).has_value());
  Attach(id);
  EXPECT_EQ(job_.ranks().StateOf(0), RankTable::State::kAttached);
}

TEST_P(NodeJobTest, NewLanesStartWhenTheirPredecessorsHaveEnded) {
  const uint64_t id = Run();
  Perform(job_.OnLaneGone(now_, LaneIndex(1), "a bug"));
  EXPECT_EQ(LastTold(&v1::MemberMessage::has_lane_lost).lane_lost().detail(), "a bug");
  EXPECT_EQ(job_.phase(), Phase::kRunning);  // the coordinator says what comes of it
  Reform(kEpoch + 1);
  EXPECT_EQ(job_.phase(), Phase::kStarting);
  EXPECT_TRUE(Taken<node::EndLanes>().back().others_follow);
  EXPECT_EQ(Taken<node::StartLanes>().size(), 1U);
  Perform(job_.OnPlacesFree());
  ASSERT_EQ(Taken<node::StartLanes>().size(), 2U);
  EXPECT_EQ(Taken<node::StartLanes>()[1].epoch, kEpoch + 1);
  LanesReady();
  EXPECT_EQ(job_.phase(), Phase::kMapping);
  MapEverywhere(id);
  EXPECT_EQ(job_.phase(), Phase::kAwaiting);
  EXPECT_EQ(LastTold(&v1::MemberMessage::has_plan_ready).plan_ready().epoch(), kEpoch + 1);
}

TEST_P(NodeJobTest, AJobThatRegistersEndsHereWithItsLastSession) {
  const uint64_t id = Open();
  Register(id);
  Perform(job_.OnTrainerGone(id, "it died"));
  EXPECT_EQ(job_.phase(), Phase::kNone);
  EXPECT_EQ(LastTold(&v1::MemberMessage::has_rank_gone).rank_gone().detail(), "it died");
}

TEST_P(NodeJobTest, AParkedJobHasNoLanesUntilItIsToHaveOthers) {
  const uint64_t id = Run();
  v1::CoordinatorMessage parked;
  parked.set_job("job");
  parked.mutable_parked()->set_why("the rail is cut");
  Hear(parked);
  EXPECT_EQ(job_.phase(), Phase::kParked);
  EXPECT_TRUE(Taken<node::EndLanes>().back().others_follow);
  Perform(job_.OnPlacesFree());
  EXPECT_EQ(Taken<node::StartLanes>().size(), 1U);
  EXPECT_TRUE(job_.ranks().Find(id)->must_acknowledge == std::nullopt);
  EXPECT_FALSE(job_.AllMapped(id));
  Reform(kEpoch + 1);
  EXPECT_EQ(job_.phase(), Phase::kStarting);
  Perform(job_.OnPlacesFree());
  EXPECT_EQ(Taken<node::StartLanes>().size(), 2U);
  LanesReady();
  MapEverywhere(id);
  EXPECT_EQ(job_.phase(), Phase::kAwaiting);
}

// Its memory takes its time, and lanes may be replaced meanwhile.
TEST_P(NodeJobTest, NewLanesAreToldOnceOfATrainerThatComesWhileTheyBegin) {
  const uint64_t id = Open();
  Register(id);
  Plan();
  Prepared();
  LanesReady();
  OpenAttempt(1, 1);
  ASSERT_FALSE(job_.WhyNotYetMapped(id).has_value());
  Perform(job_.OnLaneGone(now_, LaneIndex(1), "a bug"));
  Reform(kEpoch + 1);
  Perform(job_.OnPlacesFree());
  const auto told = [this] {
    size_t lanes = 0;
    for (const node::CommandLanes& order : Taken<node::CommandLanes>()) {
      if (order.command.has_attach()) lanes += order.lanes.size();
    }
    return lanes;
  };
  const size_t before = told();
  v1::LaneCommand command;
  command.mutable_attach()->set_rank(0);
  command.mutable_attach()->set_incarnation(job_.ranks().Find(id)->incarnation);
  Perform(job_.BeginMapping(id, command));
  EXPECT_EQ(told(), before);
  LanesReady();
  EXPECT_EQ(told(), before + 2);
  MapEverywhere(id);
  EXPECT_EQ(job_.phase(), Phase::kAwaiting);
}

// As it does where the snapshot is of another group, which has come further.
TEST_P(NodeJobTest, AJobBeginsInTheEpochThatTheCoordinatorNames) {
  Register(Open());
  v1::CoordinatorMessage message;
  message.set_job("job");
  message.mutable_new_epoch()->set_epoch(kEpoch + 4);
  Perform(job_.OnMessage(now_, message));
  EXPECT_EQ(job_.epoch(), kEpoch + 4);
  Plan(/*restore_step=*/5);
  Prepared();
  ASSERT_EQ(Taken<node::StartLanes>().size(), 1U);
  EXPECT_EQ(Taken<node::StartLanes>()[0].epoch, kEpoch + 4);
}

TEST_P(NodeJobTest, ALaneThatDiesWhileASnapshotIsRestoredIsReplacedAndItsSuccessorRestores) {
  Register(Open());
  Plan(/*restore_step=*/5);
  Prepared();
  LanesReady();
  EXPECT_EQ(job_.phase(), Phase::kRestoring);
  ASSERT_EQ(Taken<node::Restore>().size(), 1U);
  EXPECT_EQ(ToProto(Taken<node::Restore>()[0].from).SerializeAsString(),
            SnapshotOf(5).SerializeAsString());
  Perform(job_.OnLaneGone(now_, LaneIndex(0), "a fault"));
  Reform(kEpoch + 1);
  EXPECT_EQ(job_.phase(), Phase::kStarting);
  EXPECT_FALSE(Taken<node::StopRestoring>().empty());
  Perform(job_.OnPlacesFree());
  LanesReady();
  EXPECT_EQ(job_.phase(), Phase::kRestoring);
  ASSERT_EQ(Taken<node::Restore>().size(), 2U);
  RestoreFrom(5);
  EXPECT_EQ(job_.phase(), Phase::kAwaiting);
  EXPECT_EQ(job_.LastCommitted(), 5);
}

// A rank of a GPU may die before its last word: lanes that waited for it would publish nothing.
TEST_P(NodeJobTest, LanesHearThatATrainerHasDiedAndKeepItsMemory) {
  const uint64_t id = Run();
  const uint64_t incarnation = job_.ranks().Find(id)->incarnation;
  Perform(job_.OnTrainerGone(id, "it was killed"));
  const node::CommandLanes last = Taken<node::CommandLanes>().back();
  ASSERT_TRUE(last.command.has_trainer_gone());
  EXPECT_EQ(last.command.trainer_gone().rank(), 0);
  EXPECT_EQ(last.command.trainer_gone().incarnation(), incarnation);
  EXPECT_EQ(last.lanes.size(), 2U);
}

// Memory of its own process goes with it, and the next one may have other memory at the same place.
TEST_P(NodeJobTest, ARankComesAgainWhenItsOwnMemoryIsUnmappedByEveryLane) {
  ExpectToComeAgainWhenUnmapped(Run(/*own_memory=*/true));
}

// It may write into its arenas on, though another process has its rank.
TEST_P(NodeJobTest, ARankWhoseProcessNobodySeesComesAgainWhenItsArenasAreUnmappedByEveryLane) {
  ExpectToComeAgainWhenUnmapped(Run(/*own_memory=*/false, /*end_is_seen=*/false));
}

TEST_P(NodeJobTest, ALaneThatHasEndedHasUnmappedEverything) {
  const uint64_t id = Run(/*own_memory=*/true);
  Perform(job_.OnTrainerGone(id, "it died"));
  Detached(0, 1);
  EXPECT_TRUE(job_.Unmaps(0));
  Perform(job_.OnLaneGone(now_, LaneIndex(1), "killed"));
  EXPECT_FALSE(job_.Unmaps(0));
}

TEST_P(NodeJobTest, WhatIsRestoredForAJobThatWasLostMeanwhileIsNotWanted) {
  Register(Open());
  Plan(/*restore_step=*/5);
  Prepared();
  LanesReady();
  v1::CoordinatorMessage ended;
  ended.mutable_job_ended()->set_job("job");
  ended.mutable_job_ended()->set_reason("SNAPSHOT_BROKEN");
  Hear(ended);
  EXPECT_FALSE(Taken<node::StopRestoring>().empty());
  EXPECT_FALSE(Taken<node::KeepSnapshots>().empty());
  Perform(job_.OnRestored(now_, NodeJob::Restored{}));
  EXPECT_EQ(job_.phase(), Phase::kFailed);
}

TEST_P(NodeJobTest, LanesForWhichThereIsNoMemoryAreTriedAgain) {
  if (GetParam()) GTEST_SKIP() << "whoever goes on from a record counts the time anew";
  Run();
  Reform(kEpoch + 1);
  done_.clear();
  // A program that is missing, or no process for now, are tried again as well.
  for (const absl::Status& lacks :
       {absl::ResourceExhaustedError("no descriptors"), absl::UnavailableError("no process"),
        absl::NotFoundError("no program")}) {
    Perform(job_.OnTick(now_, {}));
    node::Actions actions = job_.OnPlacesFree();
    ASSERT_EQ(actions.size(), 1U);
    ASSERT_TRUE(std::holds_alternative<node::StartLanes>(actions[0]));
    Perform(job_.OnLanesStarted(now_, lacks));
    EXPECT_EQ(job_.phase(), Phase::kStarting);
    EXPECT_TRUE(job_.OnPlacesFree().empty()) << "not before a pause";
    now_ += std::chrono::seconds(1);
  }
  EXPECT_FALSE(LastTold(&v1::MemberMessage::has_plan_ready).has_plan_ready());
  Perform(job_.OnTick(now_, {}));
  EXPECT_THAT(LastTold(&v1::MemberMessage::has_node_progress).node_progress().awaited(),
              HasSubstr("no program"));
  now_ += std::chrono::minutes(1);  // half a register_timeout
  Perform(job_.OnTick(now_, {}));
  (void)job_.OnPlacesFree();
  Perform(job_.OnLanesStarted(now_, absl::ResourceExhaustedError("no descriptors")));
  EXPECT_THAT(LastTold(&v1::MemberMessage::has_plan_ready).plan_ready().error(),
              HasSubstr("no descriptors"));
}

class NodeJobBitsTest : public NodeJobTest {
 protected:
  void SayBits(int32_t lane, const std::string& openblas, const std::string& functions = "f") {
    v1::LaneReport report;
    report.mutable_bits()->set_code("the code");
    report.mutable_bits()->set_functions(functions);
    v1::LaneBits::Module& module = *report.mutable_bits()->add_modules();
    module.set_name("libopenblas.so.0");
    module.set_path("/lib/libopenblas.so.0");
    module.set_id(openblas);
    Perform(job_.OnLaneReport(now_, LaneIndex(lane), report));
  }
  // A job whose lanes have "build-id a", and are to be replaced.
  uint64_t RunAndReplaceLanes() {
    const uint64_t id = Open();
    Register(id);
    Plan();
    Prepared();
    SayBits(0, "build-id a");
    SayBits(1, "build-id a");
    LanesReady();
    OpenAttempt(1, 1);
    Attach(id);
    Reform(kEpoch + 1);
    Perform(job_.OnPlacesFree());
    return id;
  }
  void TryAgain() {
    now_ += std::chrono::seconds(1);
    Perform(job_.OnTick(now_, {}));
    Perform(job_.OnPlacesFree());
  }
};
INSTANTIATE_TEST_SUITE_P(AsItIsAndFromItsRecord, NodeJobBitsTest, ::testing::Bool());

// An upgrade has replaced a library: the next lane that starts has loaded another one.
TEST_P(NodeJobBitsTest, ALaneThatWouldGoOnWithOtherBitsIsRefusedUntilItIsTheSameAgain) {
  const uint64_t id = RunAndReplaceLanes();
  const size_t started = Taken<node::StartLanes>().size();
  SayBits(1, "build-id b");
  EXPECT_EQ(job_.phase(), Phase::kStarting);
  EXPECT_FALSE(Taken<node::EndLanes>().back().others_follow) << "none of these is used again";
  const auto notes = Taken<node::Note>();
  ASSERT_FALSE(notes.empty());
  EXPECT_THAT(notes.back().fields.back().value,
              HasSubstr("lane 1 would go on with other bits: its libopenblas.so.0 "
                        "(/lib/libopenblas.so.0) is build-id b, and the job began with build-id "
                        "a. "));
  EXPECT_TRUE(Taken<node::DropMemory>().empty());
  TryAgain();
  ASSERT_EQ(Taken<node::StartLanes>().size(), started + 1);
  SayBits(0, "build-id a");
  SayBits(1, "build-id a");
  LanesReady();
  MapEverywhere(id);
  EXPECT_EQ(job_.phase(), Phase::kAwaiting);
}

TEST_P(NodeJobBitsTest, AnOperatorMayAcceptWhatWasRefusedAndNothingElse) {
  const uint64_t id = RunAndReplaceLanes();
  node::Actions actions;
  EXPECT_EQ(ReasonOf(job_.AcceptLanes(now_, actions).status()), "LANES_NOT_REFUSED");
  SayBits(1, "build-id b", "other results");
  const auto accepted = job_.AcceptLanes(now_, actions);
  ASSERT_TRUE(accepted.ok()) << accepted.status();
  Perform(std::move(actions));
  EXPECT_EQ(*accepted,
            "libopenblas.so.0 (/lib/libopenblas.so.0) is build-id b instead of build-id a, digest "
            "of the C library's functions is other results instead of f");
  EXPECT_EQ(LastTold(&v1::MemberMessage::has_lanes_accepted).lanes_accepted().what(), *accepted);
  EXPECT_EQ(job_.lanes().accepted(), "after step 0: " + *accepted);
  EXPECT_EQ(ReasonOf(job_.AcceptLanes(now_, actions).status()), "LANES_NOT_REFUSED");
  Perform(job_.OnTick(now_, {}));  // without a pause
  Perform(job_.OnPlacesFree());
  SayBits(0, "build-id b", "other results");
  SayBits(1, "build-id a");
  EXPECT_EQ(job_.lanes()[LaneIndex(1)].state, LaneSet::State::kAbsent) << "that is refused now";
  TryAgain();
  SayBits(0, "build-id b", "other results");
  EXPECT_EQ(ReasonOf(job_.AcceptLanes(now_, actions).status()), "LANES_NOT_REFUSED")
      << "the build that the job goes on with is here again";
  SayBits(1, "build-id b", "other results");
  LanesReady();
  MapEverywhere(id);
  EXPECT_EQ(job_.phase(), Phase::kAwaiting);
  EXPECT_EQ(ReasonOf(job_.AcceptLanes(now_, actions).status()), "LANES_NOT_REFUSED");
}

// Also where the lanes of a job that begins differ from each other: an upgrade was under way.
TEST_P(NodeJobTest, AJobDoesNotBeginOnLanesThatDiffer) {
  Register(Open());
  Plan();
  Prepared();
  for (int32_t lane = 0; lane < 2; ++lane) {
    v1::LaneReport report;
    report.mutable_bits()->set_code(lane == 0 ? "old" : "new");
    Perform(job_.OnLaneReport(now_, LaneIndex(lane), report));
  }
  const v1::PlanReady failed = LastTold(&v1::MemberMessage::has_plan_ready).plan_ready();
  EXPECT_EQ(failed.reason(), "LANE_DIFFERS");
  EXPECT_THAT(failed.error(), HasSubstr("hash of lane and kernels is new"));
}

TEST_P(NodeJobTest, AGroupThatBreaksBeforeTheFirstAttemptLosesTheJob) {
  const uint64_t id = Open();
  Register(id);
  Plan();
  Perform(job_.OnBroken(now_, "a daemon is gone"));
  EXPECT_EQ(job_.phase(), Phase::kFailed);
  EXPECT_EQ(ReasonOf(job_.failure()), "PEER_LOST");
  Perform(job_.Close(id));  // it ends with its last session
  EXPECT_EQ(job_.phase(), Phase::kNone);
}

TEST_P(NodeJobTest, ARunningJobWaitsForTheGroupToFormAnew) {
  Run();
  Perform(job_.OnBroken(now_, "a daemon is gone"));
  EXPECT_EQ(job_.phase(), Phase::kRunning);
  Perform(job_.OnFormed(now_, kEpoch + 1));
  EXPECT_TRUE(LastTold(&v1::MemberMessage::has_member_state).member_state().has_memory());
  Perform(job_.OnBroken(now_, "a daemon is gone"));
  now_ += std::chrono::minutes(10);  // session_linger
  Perform(job_.OnTick(now_, {}));
  EXPECT_EQ(job_.phase(), Phase::kFailed);
}

// It was refused after a --register_timeout, though the job waited on.
TEST_P(NodeJobTest, AReplacementWaitsForABrokenGroupAsLongAsItsJobDoes) {
  Perform(job_.OnTrainerGone(Run(), "killed"));
  Perform(job_.OnBroken(now_, "node 0 is gone"));
  NodeJob::Opening opening;
  opening.world_size = 1;
  opening.job = "job";
  opening.resume = v1::OpenSessionRequest::RESUME_IF_PRESENT;
  const auto waits = [&] {
    const auto answer = job_.WhyNotOpen(opening, {});
    return answer.has_value() && std::holds_alternative<NodeJob::Later>(*answer)
               ? std::get<NodeJob::Later>(*answer)
               : NodeJob::Later();
  };
  EXPECT_TRUE(waits().long_wait);
  EXPECT_THAT(std::string(waits().why.message()), HasSubstr("--session_linger"));
  now_ += kOptions.session_linger;
  Perform(job_.OnTick(now_, {}));
  EXPECT_FALSE(waits().long_wait);
}

// Seen in a cell of the fault matrix: it was let in, and waited for lanes that nobody started.
TEST_P(NodeJobTest, WhoComesToAJobThatIsGivenUpWaitsForItsEnd) {
  Perform(job_.OnTrainerGone(Run(), "killed"));
  v1::CoordinatorMessage message;
  v1::Decision& decision = *message.mutable_decision();
  decision.set_kind(v1::ATTEMPT_KIND_STEP);
  decision.set_verdict(v1::Decision::VERDICT_ABORT);
  decision.set_step(1);
  decision.mutable_outcome()->set_kind(v1::Outcome::KIND_ABORTED);
  decision.mutable_outcome()->set_reason(v1::Outcome::REASON_LANE_LOST);
  decision.mutable_outcome()->set_detail("lanes have died 3 times");
  const auto abort = [&](uint32_t counter) {
    const GroupEpoch epoch(job_.epoch());
    decision.set_attempt(MakeAttempt(epoch, counter).value());
    decision.mutable_outcome()->set_next_attempt(MakeAttempt(epoch, counter + 1).value());
    Hear(message);
  };
  abort(1);
  EXPECT_TRUE(MayOpen());
  EXPECT_TRUE(job_.WhyNoLanesCome().ok());
  decision.set_lost(true);
  abort(2);
  EXPECT_FALSE(MayOpen());
  EXPECT_EQ(ReasonOf(job_.WhyNoLanesCome()), "LANE_LOST");
  EXPECT_THAT(std::string(job_.WhyNoLanesCome().message()), HasSubstr("died 3 times"));
  EXPECT_EQ(Taken<node::Poison>().size(), 1U) << "streams may wait for weights of the last step";
}

// Seen in a simulated schedule: the group broke between a vote and its decision, and a daemon that
// was told to leave went with the snapshot of the step before.
TEST_P(NodeJobTest, NothingIsSavedWhileAVoteHasNoAnswer) {
  Run();
  const SnapshotId step1 = Commit(1, 1);
  v1::CoordinatorMessage saved;
  saved.mutable_snapshot_done()->set_attempt(step1.attempt.value());
  saved.mutable_snapshot_done()->set_step(1);
  saved.mutable_snapshot_done()->set_durable_step(1);
  Hear(saved);
  OpenAttempt(2, 2);
  EXPECT_TRUE(job_.Saved());
  Gather(2);
  EXPECT_FALSE(job_.Saved()) << "step 2 may have been committed";
  Perform(job_.OnBroken(now_, "a link is gone"));
  EXPECT_FALSE(job_.Saved());
  // Once the job is halted, for whichever node, nothing that is open is decided.
  Perform(job_.OnFormed(now_, kEpoch));
  Halt(/*leaver=*/1);
  EXPECT_FALSE(job_.halted()) << "it is not this node that leaves";
  EXPECT_TRUE(job_.Saved());
  Perform(job_.OnBroken(now_, "others leave too"));
  EXPECT_TRUE(job_.Saved());
}

TEST_F(NodeJobTest, WhatIsSaidOfAnotherJobChangesNothing) {
  Run();
  const Attempt open = job_.steps()->open().attempt;
  for (const char* job : {"another", "job"}) {
    v1::CoordinatorMessage message;
    message.set_job(job);
    message.mutable_open()->set_attempt(open.value() + 5);
    message.mutable_open()->set_step(1);
    Hear(message);
    EXPECT_EQ(job_.steps()->open().attempt.value(),
              open.value() + (message.job() == "job" ? 5 : 0));
  }
  // One that is to have new lanes is not here.
  v1::CoordinatorMessage reform;
  reform.set_job("another");
  reform.mutable_reform()->set_epoch(kEpoch + 1);
  Hear(reform);
  EXPECT_EQ(job_.phase(), Phase::kRunning);
  const v1::MemberMessage answer = LastTold(&v1::MemberMessage::has_plan_ready);
  EXPECT_EQ(answer.job(), "another");
  EXPECT_EQ(answer.plan_ready().reason(), "JOB_ENDED");
}

TEST_P(NodeJobTest, WhatWasSaidOfAnotherJobNamesNoLaterMessage) {
  for (auto message : {v1::CoordinatorMessage::kGoes, v1::CoordinatorMessage::kWaiting}) {
    v1::CoordinatorMessage late;
    late.set_job("another");
    if (message == v1::CoordinatorMessage::kGoes) late.mutable_goes();
    if (message == v1::CoordinatorMessage::kWaiting) late.mutable_waiting();
    Hear(late);
  }
  Register(Open());
  EXPECT_EQ(LastTold(&v1::MemberMessage::has_rank_session).job(), "job");
  EXPECT_EQ(LastTold(&v1::MemberMessage::has_registration).job(), "job");
}

// Seen in a simulated schedule: the session of a lost job was to register again, and its trainer,
// which submitted, heard that it must attach first instead of why its job was lost.
TEST_P(NodeJobTest, ALostJobIsNotRefusedTheLayoutOfTheNextOneOfItsName) {
  const uint64_t id = Run();
  v1::CoordinatorMessage ended;
  ended.mutable_job_ended()->set_job("job");
  ended.mutable_job_ended()->set_reason("STATE_LOST");
  ended.mutable_job_ended()->set_why("a daemon began anew");
  Hear(ended);
  ASSERT_EQ(job_.phase(), Phase::kFailed);
  v1::CoordinatorMessage refused;
  refused.mutable_refused()->set_job("job");
  refused.mutable_refused()->set_code(static_cast<int32_t>(absl::StatusCode::kUnavailable));
  refused.mutable_refused()->set_message("the daemon of node 2 is gone");
  Hear(refused);
  EXPECT_EQ(job_.phase(), Phase::kFailed);
  EXPECT_EQ(job_.ranks().StateOf(0), RankTable::State::kAttached);
  EXPECT_EQ(ReasonOf(job_.AnswerOf(id, StepId(1), MakeAttempt(GroupEpoch(kEpoch), 9)).status()),
            "STATE_LOST");
}

TEST_P(NodeJobTest, TheEndOfAJobCountsUnderWhatItWasLostFor) {
  if (GetParam()) GTEST_SKIP() << "what is counted is counted since the process began";
  const auto end = [&](const std::string& reason, bool closed) {
    const uint64_t id = Run();
    Perform(closed ? job_.Close(id) : job_.OnTrainerGone(id, "it died"));
    v1::CoordinatorMessage ended;
    ended.mutable_job_ended()->set_job("job");
    ended.mutable_job_ended()->set_reason(reason);
    Hear(ended);
    EXPECT_EQ(job_.phase(), Phase::kNone);
  };
  end("", /*closed=*/true);
  end("", /*closed=*/false);
  end("STATE_LOST", /*closed=*/false);  // it was lost before its rank could come back
  end("JOB_ENDED", /*closed=*/false);
  end("LAYOUT_DIFFERS", /*closed=*/true);
  std::map<absl::string_view, int64_t> counts;
  for (size_t i = 0; i < JobEnds::kReasons.size(); ++i) {
    if (job_.ends().counts[i] > 0) counts[JobEnds::kReasons[i]] = job_.ends().counts[i];
  }
  const std::map<absl::string_view, int64_t> expected = {
      {"LEFT", 1}, {"TRAINER_LOST", 1}, {"STATE_LOST", 1}, {"JOB_ENDED", 1}, {"OTHER", 1}};
  EXPECT_EQ(counts, expected);
}

TEST_P(NodeJobTest, AJobThatIsGivenUpWhileItsLanesComeTellsItsTrainersInAnAttempt) {
  Run();
  Reform(kEpoch + 1);
  OpenAttempt(2, 1);
  EXPECT_EQ(job_.phase(), Phase::kStarting);
  EXPECT_EQ(job_.steps()->open().attempt, MakeAttempt(GroupEpoch(kEpoch + 1), 2));
}

TEST_P(NodeJobTest, WhoIsThereIsToldAgainWhenAJobGoesBackWhileItIsPrepared) {
  Register(Open());
  Plan();
  v1::CoordinatorMessage message;
  v1::RollBack& back = *message.mutable_roll_back();
  back.set_epoch(kEpoch + 1);
  *back.mutable_plan() = Inputs(/*restore_step=*/4);
  Hear(message);
  Prepared();
  LanesReady();
  done_.clear();
  RestoreFrom(4);
  EXPECT_TRUE(LastTold(&v1::MemberMessage::has_plan_ready).has_plan_ready());
  EXPECT_TRUE(LastTold(&v1::MemberMessage::has_rank_session).has_rank_session());
}

TEST_P(NodeJobTest, ARollbackIsHeardByWhoIsAttachedAndByNobodyElse) {
  const uint64_t id = Run();
  const Attempt open = job_.steps()->open().attempt;
  v1::CoordinatorMessage message;
  v1::RollBack& back = *message.mutable_roll_back();
  back.set_epoch(kEpoch + 1);
  *back.mutable_plan() = Inputs(/*restore_step=*/4);
  Hear(message);
  EXPECT_EQ(job_.ranks().StateOf(0), RankTable::State::kMustAcknowledge);
  EXPECT_EQ(Taken<node::SetSnapshotsAside>().size(), 1U);
  const auto marks = Taken<node::MarkRollback>();
  ASSERT_EQ(marks.size(), 1U);
  EXPECT_EQ(marks[0].epoch, kEpoch + 1);
  EXPECT_EQ(marks[0].awaited, open.value() - 1) << "the weights of no later attempt are awaited";
  node::Actions actions;
  const auto answer = job_.Submit(id, {.rank = TrainerRank(0), .step = StepId(9)}, "", actions);
  ASSERT_TRUE(answer.ok());
  EXPECT_EQ(answer->outcome->kind, OutcomeKind::kRolledBack);
  EXPECT_EQ(answer->outcome->to_step, StepId(4));
  Perform(job_.Acknowledge(id));
  EXPECT_EQ(job_.ranks().StateOf(0), RankTable::State::kAttached);
}

TEST_P(NodeJobTest, WhoComesBackIsNotToldThatThereIsNoStateWhenMemoryForTheSnapshotLacks) {
  v1::CoordinatorMessage message;
  v1::RollBack& back = *message.mutable_roll_back();
  back.set_epoch(kEpoch);
  *back.mutable_plan() = Inputs(/*restore_step=*/4);
  Hear(message);
  Perform(job_.OnPrepared(now_, absl::ResourceExhaustedError("Cannot allocate memory")));
  EXPECT_EQ(LastTold(&v1::MemberMessage::has_plan_ready).plan_ready().error(),
            "Cannot allocate memory");
  NodeJob::Opening opening;
  opening.id = 1;
  opening.world_size = 1;
  opening.job = "job";
  opening.resume = v1::OpenSessionRequest::RESUME_REQUIRE;
  node::Actions actions;
  const auto before = job_.Open(now_, opening, std::nullopt, actions);
  ASSERT_TRUE(std::holds_alternative<NodeJob::Later>(before));
  EXPECT_EQ(ReasonOf(std::get<NodeJob::Later>(before).why), "GROUP_NOT_READY");
  v1::CoordinatorMessage ended;
  ended.mutable_job_ended()->set_job("job");
  ended.mutable_job_ended()->set_reason("NODE_NOT_READY");
  Hear(ended);
  EXPECT_EQ(job_.phase(), Phase::kNone);
  const auto after = job_.Open(now_, opening, std::nullopt, actions);
  EXPECT_TRUE(std::holds_alternative<NodeJob::NeedsResume>(after));
}

class NodeJobDeathTest : public NodeJobTest {};
INSTANTIATE_TEST_SUITE_P(AsItIs, NodeJobDeathTest, ::testing::Values(false));

TEST_P(NodeJobDeathTest, WhatAPhaseCannotHaveIsRefused) {
  Open();
  EXPECT_DEATH((void)job_.OnLanesStarted(now_, absl::OkStatus()),
               "NodeJob in state Registering cannot have: lanes started");
  EXPECT_DEATH((void)job_.OnRestored(now_, NodeJob::Restored{}),
               "NodeJob in state Registering cannot have: restored");
  std::string heard;
  static std::string* what = nullptr;
  what = &heard;
  on_impossible = [](const std::string& text) { *what = text; };
  Perform(job_.OnLanesStarted(now_, absl::OkStatus()));
  on_impossible = nullptr;
  EXPECT_EQ(heard, "NodeJob in state Registering cannot have: lanes started");
  EXPECT_EQ(job_.phase(), Phase::kRegistering);
}

}  // namespace
}  // namespace dmuond::scheduler
