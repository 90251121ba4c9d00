// What the record of a NodeJob says, and how little of it changes with each event. That a job goes
// on from it in every phase: node_job_test.cc, and the simulator.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "scheduler/convert/convert.h"
#include "scheduler/reason.h"
#include "tests/scheduler/job/node_job_fixture.h"

namespace dmuond::scheduler {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using Kind = RecordPart::Kind;

class NodeJobRecordTest : public NodeJobFixture {
 protected:
  NodeJobRecordTest() : NodeJobFixture(/*hands_over=*/false) {}

  [[nodiscard]] static Attempt AttemptOf(uint32_t counter) {
    return MakeAttempt(GroupEpoch(kEpoch), counter);
  }
  void Submit(uint64_t id, uint32_t counter, int64_t step, const std::string& state) {
    node::Actions actions;
    const auto answer = job_.Submit(
        id, {.rank = TrainerRank(0), .attempt = AttemptOf(counter), .step = StepId(step)}, state,
        actions);
    ASSERT_TRUE(answer.ok()) << answer.status();
    Perform(std::move(actions));
  }
  void Gathered(int32_t lane, uint32_t counter) {
    v1::LaneReport report;
    report.mutable_gathered()->set_attempt(AttemptOf(counter).value());
    *report.mutable_gathered()->mutable_norms() =
        ToProto(std::vector<UnitNorm>{{.unit = UnitId(lane), .sums = {4.5}}});
    Perform(job_.OnLaneReport(now_, LaneIndex(lane), report));
  }
  void Decide(uint32_t counter, int64_t step, Verdict verdict) {
    Decision decision;
    decision.attempt = AttemptOf(counter);
    decision.step = StepId(step);
    decision.verdict = verdict;
    decision.outcome.kind =
        verdict == Verdict::kCommit ? OutcomeKind::kCommitted : OutcomeKind::kAborted;
    decision.outcome.step = StepId(step);
    decision.outcome.attempt = decision.attempt;
    decision.outcome.retry = true;
    decision.outcome.next_attempt = AttemptOf(counter + 1);
    v1::CoordinatorMessage message;
    *message.mutable_decision() = ToProto(decision);
    Hear(message);
  }
  // Kinds of the parts that are not in `before`.
  [[nodiscard]] std::vector<Kind> NewSince(const std::vector<RecordPart>& before) const {
    std::vector<RecordPart> parts;
    const std::vector<RecordPart> now = job_.RecordParts();
    std::set_difference(now.begin(), now.end(), before.begin(), before.end(),
                        std::back_inserter(parts));
    std::vector<Kind> kinds;
    for (const RecordPart& part : parts) kinds.push_back(part.kind);
    return kinds;
  }
};

TEST_F(NodeJobRecordTest, AnEventChangesThePartsThatItIsAbout) {
  const uint64_t id = Run();
  std::vector<RecordPart> before = job_.RecordParts();
  Submit(id, 1, 1, "state");
  EXPECT_THAT(NewSince(before), ElementsAre(Kind::kSubmission, Kind::kTrainerState));

  before = job_.RecordParts();
  Gathered(0, 1);
  EXPECT_THAT(NewSince(before), ElementsAre(Kind::kProgress, Kind::kNorms));
  before = job_.RecordParts();
  Gathered(1, 1);
  EXPECT_THAT(NewSince(before), ElementsAre(Kind::kProgress));

  // The state that counts from now on lies there already.
  before = job_.RecordParts();
  Decide(1, 1, Verdict::kCommit);
  EXPECT_THAT(NewSince(before), ElementsAre(Kind::kProgress));
  EXPECT_EQ(Record().trainer_states_size(), 1);
  EXPECT_EQ(Record().submissions_size(), 0);
  EXPECT_EQ(Record().norms_size(), 0);
}

TEST_F(NodeJobRecordTest, WhatIsOfTheMomentChangesNothing) {
  Run();
  const std::vector<RecordPart> before = job_.RecordParts();
  const uint64_t version = job_.record_version();
  v1::LaneReport ready;
  ready.mutable_rail_ready()->set_attempt(AttemptOf(1).value());
  Perform(job_.OnLaneReport(now_, LaneIndex(0), ready));
  v1::LaneReport pong;
  pong.mutable_pong()->set_number(1);
  Perform(job_.OnLaneReport(now_, LaneIndex(0), pong));
  v1::CoordinatorMessage goes;
  goes.mutable_goes()->add_goes()->set_attempt(AttemptOf(1).value());
  Hear(goes);
  Perform(job_.OnTick(now_, {}));
  Perform(job_.OnPlacesFree());
  EXPECT_EQ(job_.record_version(), version);
  EXPECT_THAT(NewSince(before), IsEmpty());
}

TEST_F(NodeJobRecordTest, TheVoteOfWhoGoesOnHasTheNormsOfLanesThatGatheredBefore) {
  const uint64_t id = Run();
  Submit(id, 1, 1, "");
  Gathered(0, 1);
  HandOver();
  Gathered(1, 1);
  const v1::MemberMessage vote = LastTold(&v1::MemberMessage::has_vote);
  ASSERT_EQ(vote.vote().norms().unit_size(), 2);
  EXPECT_EQ(vote.vote().norms().sums(0), 4.5);
  // It has voted: nobody who goes on from here votes again.
  HandOver();
  done_.clear();
  Gathered(1, 1);
  EXPECT_THAT(Taken<node::TellCoordinator>(), IsEmpty());
}

TEST_F(NodeJobRecordTest, AStateCountsForWhoGoesOnOnceItsStepHasCommitted) {
  const uint64_t id = Run();
  Submit(id, 1, 1, "after step 1");
  HandOver();
  EXPECT_EQ(job_.TrainerStateOf(0), "");
  Decide(1, 1, Verdict::kCommit);
  EXPECT_EQ(job_.TrainerStateOf(0), "after step 1");
  Submit(id, 2, 2, "after step 2");
  EXPECT_EQ(Record().trainer_states_size(), 2);
  HandOver();
  EXPECT_EQ(job_.TrainerStateOf(0), "after step 1");
  Decide(2, 2, Verdict::kAbort);
  EXPECT_EQ(Record().trainer_states_size(), 1);
  HandOver();
  EXPECT_EQ(job_.TrainerStateOf(0), "after step 1");
  Submit(id, 3, 2, "after step 2");
  Decide(3, 2, Verdict::kCommit);
  HandOver();
  EXPECT_EQ(job_.TrainerStateOf(0), "after step 2");
}

TEST_F(NodeJobRecordTest, WhoSubmitsAgainIsAnsweredFromTheRecord) {
  const uint64_t id = Run();
  Submit(id, 1, 1, "");
  HandOver();
  done_.clear();
  Submit(id, 1, 1, "");  // known: nobody else is told
  EXPECT_THAT(Taken<node::TellCoordinator>(), IsEmpty());
  Decide(1, 1, Verdict::kCommit);
  HandOver();
  const auto answer = job_.AnswerOf(id, StepId(1), AttemptOf(1));
  ASSERT_TRUE(answer.ok());
  EXPECT_EQ(answer->outcome->kind, OutcomeKind::kCommitted);
  EXPECT_EQ(answer->next_attempt, AttemptOf(2));
}

TEST_F(NodeJobRecordTest, ErrorsKeepTheirReasonAndWhatTheyName) {
  Register(Open());
  v1::CoordinatorMessage message;
  v1::RegistrationRefused& refused = *message.mutable_refused();
  refused.set_job("job");
  refused.set_code(static_cast<int32_t>(absl::StatusCode::kInvalidArgument));
  refused.set_reason("LAYOUT_INVALID");
  refused.set_message("parameter 'w'");
  (*refused.mutable_metadata())["parameter"] = "w";
  Hear(message);
  const absl::Status before = job_.ranks().OfRank(0)->refused;
  HandOver();
  const absl::Status& after = job_.ranks().OfRank(0)->refused;
  EXPECT_EQ(after.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(after.message(), before.message());
  EXPECT_EQ(ReasonOf(after), "LAYOUT_INVALID");
  EXPECT_THAT(MetadataOf(after),
              ElementsAre(std::pair<std::string, std::string>("parameter", "w")));
}

TEST_F(NodeJobRecordTest, ABrokenGroupIsWaitedForAnew) {
  Run();
  Perform(job_.OnBroken(now_, "a daemon is gone"));
  now_ += std::chrono::minutes(9);
  HandOver();
  now_ += std::chrono::minutes(9);
  Perform(job_.OnTick(now_, {}));
  EXPECT_EQ(job_.phase(), NodeJob::Phase::kRunning);
  now_ += std::chrono::minutes(1);
  Perform(job_.OnTick(now_, {}));
  EXPECT_EQ(job_.phase(), NodeJob::Phase::kFailed);
}

TEST_F(NodeJobRecordTest, WhatNoNodeJobHasWrittenIsRefused) {
  EXPECT_TRUE(absl::IsDataLoss(ParseJobRecord("no record").status()));
  EXPECT_TRUE(absl::IsDataLoss(ParseJobRecord("").status()));
  Run();
  JobRecord record = Record();
  record.set_format(kJobRecordFormat + 1);
  EXPECT_TRUE(absl::IsFailedPrecondition(ParseJobRecord(record.SerializeAsString()).status()));

  const auto refused = [&](const JobRecord& wrong) {
    return absl::IsInvalidArgument(
        NodeJob::FromRecord(kOptions, wrong, *MakePlannedJob(Inputs(0)), now_).status());
  };
  record = Record();
  EXPECT_FALSE(refused(record));
  EXPECT_TRUE(
      absl::IsInvalidArgument(NodeJob::FromRecord(kOptions, record, PlannedJob{}, now_).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(
      NodeJob::FromRecord({.lanes = 3}, record, *MakePlannedJob(Inputs(0)), now_).status()));
  record.clear_registrations();
  EXPECT_TRUE(refused(record));
  record = Record();
  record.mutable_sessions(0)->clear_state();
  EXPECT_TRUE(refused(record));
  record = Record();
  *record.add_sessions() = record.sessions(0);
  EXPECT_TRUE(refused(record));
  record = Record();
  record.mutable_progress()->set_prepared(false);
  EXPECT_TRUE(refused(record));
  record = Record();
  record.add_norms()->set_lane(1);
  EXPECT_TRUE(refused(record));
}

}  // namespace
}  // namespace dmuond::scheduler
