#include "scheduler/job/node_job.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "scheduler/convert/convert.h"
#include "scheduler/job/impossible.h"
#include "scheduler/reason.h"
#include "tests/scheduler/job/registrations.h"

namespace dmuond::scheduler {
namespace {

using ::testing::HasSubstr;
using Phase = NodeJob::Phase;

// One rank's job on a node with two lanes, which is alone; performers do at once what they are
// told, or not at all.
class NodeJobTest : public ::testing::Test {
 protected:
  static constexpr uint32_t kEpoch = 3;

  NodeJobTest() { Perform(job_.OnFormed(now_, kEpoch)); }

  // Keeps everything, and starts lanes.
  void Perform(node::Actions actions) {
    for (node::Action& action : actions) {
      const bool starts = std::holds_alternative<node::StartLanes>(action);
      done_.push_back(std::move(action));
      if (starts) Perform(job_.OnLanesStarted(now_, absl::OkStatus()));
    }
  }
  template <typename Order>
  std::vector<Order> Taken() const {
    std::vector<Order> of_kind;
    for (const node::Action& action : done_) {
      if (const auto* one = std::get_if<Order>(&action)) of_kind.push_back(*one);
    }
    return of_kind;
  }
  // The last that the coordinator was told of a kind.
  v1::MemberMessage LastTold(bool (v1::MemberMessage::*of_kind)() const) const {
    v1::MemberMessage last;
    for (const auto& told : Taken<node::TellCoordinator>()) {
      if ((told.message.*of_kind)()) last = told.message;
    }
    return last;
  }

  uint64_t Open() {
    NodeJob::Opening opening;
    opening.id = ++sessions_;
    opening.world_size = 1;
    opening.job = "job";
    opening.resume = v1::OpenSessionRequest::RESUME_IF_PRESENT;
    node::Actions actions;
    const auto answer = job_.Open(now_, opening, {std::optional<ResumePoint>()}, actions);
    EXPECT_TRUE(std::holds_alternative<NodeJob::Opened>(answer));
    Perform(std::move(actions));
    return opening.id;
  }
  void Register(uint64_t id) {
    const v1::Registration registration = OfOneMatrix(0, 1);
    Perform(job_.Register(id, registration,
                          std::make_shared<const Registration>(*FromProto(registration))));
  }
  v1::PlanInputs Inputs(int64_t restore_step) {
    v1::PlanInputs inputs;
    inputs.set_job("job");
    inputs.set_job_incarnation(7);
    inputs.set_nodes(1);
    inputs.set_lanes_per_node(2);
    inputs.set_restore_step(restore_step);
    *inputs.add_registrations() = OfOneMatrix(0, 1);
    return inputs;
  }
  void Hear(v1::CoordinatorMessage message) { Perform(job_.OnMessage(now_, message)); }
  void Plan(int64_t restore_step = 0) {
    v1::CoordinatorMessage message;
    *message.mutable_plan() = Inputs(restore_step);
    Hear(message);
  }
  void Prepared() {
    Perform(job_.OnPrepared(now_, NodeJob::Prepared{*MakePlannedJob(Inputs(0)), true}));
  }
  void LanesReady() {
    for (int32_t i = 0; i < 2; ++i) {
      v1::LaneReport report;
      report.mutable_ready()->set_device("a cpu");
      Perform(job_.OnLaneReport(now_, LaneIndex(i), report));
    }
  }
  void OpenAttempt(uint32_t counter, int64_t step) {
    v1::CoordinatorMessage message;
    message.mutable_open()->set_attempt(MakeAttempt(GroupEpoch(job_.epoch()), counter).value());
    message.mutable_open()->set_step(step);
    Hear(message);
  }
  void Reform(uint32_t epoch) {
    v1::CoordinatorMessage message;
    message.mutable_reform()->set_epoch(epoch);
    message.mutable_reform()->set_why("a lane died");
    Hear(message);
  }
  // With a session whose trainer can submit.
  uint64_t Run() {
    const uint64_t id = Open();
    Register(id);
    Plan();
    Prepared();
    LanesReady();
    OpenAttempt(1, 1);
    Attach(id);
    return id;
  }
  void Attach(uint64_t id) {
    v1::LaneCommand command;
    command.mutable_attach()->set_rank(0);
    command.mutable_attach()->set_incarnation(job_.ranks().Find(id)->incarnation);
    Perform(job_.BeginMapping(id, command));
    MapEverywhere(id);
    Perform(job_.Attach(id, {}, false));
    job_.TellAttached(id);
  }
  void MapEverywhere(uint64_t id) {
    for (int32_t i = 0; i < 2; ++i) {
      v1::LaneReport report;
      report.mutable_attached()->set_rank(0);
      report.mutable_attached()->set_incarnation(job_.ranks().Find(id)->incarnation);
      Perform(job_.OnLaneReport(now_, LaneIndex(i), report));
    }
  }

  TimePoint now_{};
  NodeJob job_{{.lanes = 2, .snapshots = true}};
  std::vector<node::Action> done_;
  uint64_t sessions_ = 0;
};

TEST_F(NodeJobTest, AJobGoesFromItsFirstSessionToItsFirstAttempt) {
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

TEST_F(NodeJobTest, NewLanesStartWhenTheirPredecessorsHaveEnded) {
  const uint64_t id = Run();
  Perform(job_.OnLaneGone(now_, LaneIndex(1), "a bug"));
  EXPECT_EQ(LastTold(&v1::MemberMessage::has_lane_lost).lane_lost().detail(), "a bug");
  EXPECT_EQ(job_.phase(), Phase::kRunning);  // the coordinator says what comes of it
  Reform(kEpoch + 1);
  EXPECT_EQ(job_.phase(), Phase::kStarting);
  EXPECT_TRUE(Taken<node::EndLanes>().back().kill);
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

TEST_F(NodeJobTest, ALaneThatDiesWhileASnapshotIsRestoredIsReplacedAndItsSuccessorRestores) {
  Register(Open());
  Plan(/*restore_step=*/5);
  Prepared();
  LanesReady();
  EXPECT_EQ(job_.phase(), Phase::kRestoring);
  ASSERT_EQ(Taken<node::Restore>().size(), 1U);
  Perform(job_.OnLaneGone(now_, LaneIndex(0), "a fault"));
  Reform(kEpoch + 1);
  EXPECT_EQ(job_.phase(), Phase::kStarting);
  EXPECT_FALSE(Taken<node::StopRestoring>().empty());
  Perform(job_.OnPlacesFree());
  LanesReady();
  EXPECT_EQ(job_.phase(), Phase::kRestoring);
  ASSERT_EQ(Taken<node::Restore>().size(), 2U);
  NodeJob::Restored restored;
  restored.from.manifest.set_step(5);
  restored.updates.resize(2);
  Perform(job_.OnRestored(now_, restored));
  for (int32_t i = 0; i < 2; ++i) {
    v1::LaneReport loaded;
    loaded.mutable_state_loaded();
    Perform(job_.OnLaneReport(now_, LaneIndex(i), loaded));
  }
  EXPECT_EQ(job_.phase(), Phase::kAwaiting);
  EXPECT_EQ(job_.LastCommitted(), 5);
}

TEST_F(NodeJobTest, WhatIsRestoredForAJobThatWasLostMeanwhileIsNotWanted) {
  Register(Open());
  Plan(/*restore_step=*/5);
  Prepared();
  LanesReady();
  v1::CoordinatorMessage ended;
  ended.mutable_job_ended()->set_job("job");
  ended.mutable_job_ended()->set_reason("SNAPSHOT_BROKEN");
  Hear(ended);
  EXPECT_FALSE(Taken<node::StopRestoring>().empty());
  Perform(job_.OnRestored(now_, NodeJob::Restored{}));
  EXPECT_EQ(job_.phase(), Phase::kFailed);
}

TEST_F(NodeJobTest, LanesForWhichThereIsNoMemoryAreTriedAgain) {
  Run();
  Reform(kEpoch + 1);
  done_.clear();
  for (int i = 0; i < 2; ++i) {
    node::Actions actions = job_.OnPlacesFree();
    ASSERT_EQ(actions.size(), 1U);
    ASSERT_TRUE(std::holds_alternative<node::StartLanes>(actions[0]));
    Perform(job_.OnLanesStarted(now_, absl::ResourceExhaustedError("no descriptors")));
    EXPECT_EQ(job_.phase(), Phase::kStarting);
  }
  EXPECT_FALSE(LastTold(&v1::MemberMessage::has_plan_ready).has_plan_ready());
  now_ += std::chrono::minutes(1);  // half a register_timeout
  (void)job_.OnPlacesFree();
  Perform(job_.OnLanesStarted(now_, absl::ResourceExhaustedError("no descriptors")));
  EXPECT_THAT(LastTold(&v1::MemberMessage::has_plan_ready).plan_ready().error(),
              HasSubstr("no descriptors"));
}

TEST_F(NodeJobTest, AGroupThatBreaksBeforeTheFirstAttemptLosesTheJob) {
  const uint64_t id = Open();
  Register(id);
  Plan();
  Perform(job_.OnBroken(now_, "a daemon is gone"));
  EXPECT_EQ(job_.phase(), Phase::kFailed);
  EXPECT_EQ(ReasonOf(job_.failure()), "PEER_LOST");
  Perform(job_.Close(id));  // it ends with its last session
  EXPECT_EQ(job_.phase(), Phase::kNone);
}

TEST_F(NodeJobTest, ARunningJobWaitsForTheGroupToFormAnew) {
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

// Seen in a simulated schedule: the group broke between a vote and its decision, and a daemon that
// was told to leave went with the snapshot of the step before.
TEST_F(NodeJobTest, NothingIsSavedWhileAVoteHasNoAnswer) {
  Run();
  const auto gathered = [&](uint32_t counter) {
    for (int32_t i = 0; i < 2; ++i) {
      v1::LaneReport report;
      report.mutable_gathered()->set_attempt(MakeAttempt(GroupEpoch(kEpoch), counter).value());
      Perform(job_.OnLaneReport(now_, LaneIndex(i), report));
    }
  };
  gathered(1);
  Decision commit;
  commit.attempt = MakeAttempt(GroupEpoch(kEpoch), 1);
  commit.step = StepId(1);
  commit.verdict = Verdict::kCommit;
  v1::CoordinatorMessage decided;
  *decided.mutable_decision() = ToProto(commit);
  Hear(decided);
  v1::CoordinatorMessage saved;
  saved.mutable_snapshot_done()->set_attempt(decided.decision().attempt());
  saved.mutable_snapshot_done()->set_step(1);
  saved.mutable_snapshot_done()->set_durable_step(1);
  Hear(saved);
  OpenAttempt(2, 2);
  EXPECT_TRUE(job_.Saved());
  gathered(2);
  EXPECT_FALSE(job_.Saved()) << "step 2 may have been committed";
  Perform(job_.OnBroken(now_, "a link is gone"));
  EXPECT_FALSE(job_.Saved());
  // Once the job is halted, nothing that is open is decided.
  Perform(job_.OnFormed(now_, kEpoch));
  v1::CoordinatorMessage halted;
  halted.mutable_halted();
  Hear(halted);
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

// Seen in a simulated schedule: the session of a lost job was to register again, and its trainer,
// which submitted, heard that it must attach first instead of why its job was lost.
TEST_F(NodeJobTest, ALostJobIsNotRefusedTheLayoutOfTheNextOneOfItsName) {
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

TEST_F(NodeJobTest, AJobThatIsGivenUpWhileItsLanesComeTellsItsTrainersInAnAttempt) {
  Run();
  Reform(kEpoch + 1);
  OpenAttempt(2, 1);
  EXPECT_EQ(job_.phase(), Phase::kStarting);
  EXPECT_EQ(job_.steps()->open().attempt, MakeAttempt(GroupEpoch(kEpoch + 1), 2));
}

TEST_F(NodeJobTest, ARollbackIsHeardByWhoIsAttachedAndByNobodyElse) {
  const uint64_t id = Run();
  v1::CoordinatorMessage message;
  v1::RollBack& back = *message.mutable_roll_back();
  back.set_epoch(kEpoch + 1);
  *back.mutable_plan() = Inputs(/*restore_step=*/4);
  Hear(message);
  EXPECT_EQ(job_.ranks().StateOf(0), RankTable::State::kMustAcknowledge);
  EXPECT_EQ(Taken<node::SetSnapshotsAside>().size(), 1U);
  node::Actions actions;
  const auto answer = job_.Submit(id, {.rank = TrainerRank(0), .step = StepId(9)}, "", actions);
  ASSERT_TRUE(answer.ok());
  EXPECT_EQ(answer->outcome->kind, OutcomeKind::kRolledBack);
  EXPECT_EQ(answer->outcome->to_step, StepId(4));
  Perform(job_.Acknowledge(id));
  EXPECT_EQ(job_.ranks().StateOf(0), RankTable::State::kAttached);
}

using NodeJobDeathTest = NodeJobTest;

TEST_F(NodeJobDeathTest, WhatAPhaseCannotHaveIsRefused) {
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
