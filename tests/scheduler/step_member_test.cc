#include "scheduler/step_member.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "scheduler/reason.h"
#include "tests/scheduler/step_group.h"

namespace dmuond::scheduler {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::kFirstAttempt;
using testing::Later;
using testing::Scalars;

Submission Step(int32_t rank, int64_t step, Attempt attempt) {
  Submission submission;
  submission.rank = TrainerRank(rank);
  submission.attempt = attempt;
  submission.step = StepId(step);
  submission.scalars = Scalars();
  return submission;
}
Submission Push(int32_t rank, int64_t step, Attempt attempt) {
  Submission submission = Step(rank, step, attempt);
  submission.kind = AttemptKind::kPush;
  return submission;
}

Decision Decide(Verdict verdict, int64_t step, Attempt attempt) {
  Decision decision;
  decision.verdict = verdict;
  decision.step = StepId(step);
  decision.attempt = attempt;
  decision.outcome.kind = verdict == Verdict::kCommit ? OutcomeKind::kCommitted
                          : verdict == Verdict::kSkip ? OutcomeKind::kSkipped
                                                      : OutcomeKind::kAborted;
  decision.outcome.step = decision.step;
  decision.outcome.attempt = attempt;
  decision.outcome.next_attempt = Attempt(attempt.value() + 1);
  if (verdict == Verdict::kRefuse) {
    decision.refuse_reason = "SCALARS_DIFFER";
    decision.refuse_message = "groups[0].eps differs";
  }
  return decision;
}

// Ranks 2 and 3 with two lanes, at step 5.
class StepMemberTest : public ::testing::Test {
 protected:
  StepMemberTest() { member_.OnOpen({kFirstAttempt, StepId(5)}); }

  void ExpectForwarded(const Submission& submission) {
    const auto accepted = member_.OnSubmission(submission);
    ASSERT_TRUE(accepted.ok()) << accepted.status();
    EXPECT_TRUE(accepted->forward);
    EXPECT_TRUE(accepted->answer.pending());
  }
  void ExpectOutcome(const Submission& submission, OutcomeKind kind) {
    const auto accepted = member_.OnSubmission(submission);
    ASSERT_TRUE(accepted.ok()) << accepted.status();
    EXPECT_FALSE(accepted->forward);
    ASSERT_TRUE(accepted->answer.outcome.has_value());
    EXPECT_EQ(accepted->answer.outcome->kind, kind);
    EXPECT_EQ(accepted->answer.outcome->attempt, submission.attempt);
    const auto waited = member_.OnWait(submission.rank, submission.step, submission.attempt);
    ASSERT_TRUE(waited.ok()) << waited.status();
    EXPECT_EQ(waited->outcome->kind, kind);
  }
  static void ExpectError(const absl::Status& status, absl::StatusCode code,
                          const std::string& reason,
                          const ::testing::Matcher<const std::string&>& message) {
    EXPECT_EQ(status.code(), code);
    EXPECT_EQ(ReasonOf(status), reason);
    EXPECT_THAT(std::string(status.message()), message);
  }

  StepMember member_{{TrainerRank(2), TrainerRank(3)}, 2, StepId(4)};
};

TEST_F(StepMemberTest, ASubmissionIsForwardedOnceAndItsDuplicateWaits) {
  ExpectForwarded(Step(2, 5, kFirstAttempt));
  const auto again = member_.OnSubmission(Step(2, 5, kFirstAttempt));
  ASSERT_TRUE(again.ok());
  EXPECT_FALSE(again->forward);
  EXPECT_TRUE(again->answer.pending());
  EXPECT_TRUE(member_.submitted(TrainerRank(2)));
  EXPECT_FALSE(member_.submitted(TrainerRank(3)));
  EXPECT_TRUE(member_.OnWait(TrainerRank(2), StepId(5), kFirstAttempt)->pending());
}

TEST_F(StepMemberTest, ADuplicateThatDiffersIsAnErrorNamingTheField) {
  ExpectForwarded(Step(2, 5, kFirstAttempt));
  Submission other = Step(2, 5, kFirstAttempt);
  other.scalars.groups[1].beta2 = 0.5;
  ExpectError(member_.OnSubmission(other).status(), absl::StatusCode::kInvalidArgument,
              "SUBMISSION_DIFFERS", HasSubstr("groups[1].beta2"));
  other = Step(2, 5, kFirstAttempt);
  other.absent = {1};
  ExpectError(member_.OnSubmission(other).status(), absl::StatusCode::kInvalidArgument,
              "SUBMISSION_DIFFERS", HasSubstr("absent"));
  other = Step(2, 5, kFirstAttempt);
  other.not_finite = 0;
  ExpectError(member_.OnSubmission(other).status(), absl::StatusCode::kInvalidArgument,
              "SUBMISSION_DIFFERS", HasSubstr("not_finite"));
}

TEST_F(StepMemberTest, SubmittingADecidedStepAgainReturnsItsOutcome) {
  ExpectForwarded(Step(2, 5, kFirstAttempt));
  member_.OnDecision(Decide(Verdict::kCommit, 5, kFirstAttempt));
  ExpectOutcome(Step(2, 5, kFirstAttempt), OutcomeKind::kCommitted);
  EXPECT_EQ(member_.last_committed(), StepId(5));
  ExpectForwarded(Step(2, 6, Later(1)));
}

TEST_F(StepMemberTest, OtherStepsAndAttemptsFailNamingBothNumbers) {
  ExpectError(member_.OnSubmission(Step(2, 7, kFirstAttempt)).status(),
              absl::StatusCode::kFailedPrecondition, "STEP_OUT_OF_ORDER",
              AllOf(HasSubstr("rank 2 is at step 7"), HasSubstr("the job at 5")));
  ExpectError(member_.OnSubmission(Step(2, 4, kFirstAttempt)).status(),
              absl::StatusCode::kFailedPrecondition, "STEP_OUT_OF_ORDER", HasSubstr("step 4"));
  ExpectError(member_.OnSubmission(Step(2, 5, Later(3))).status(),
              absl::StatusCode::kFailedPrecondition, "ATTEMPT_OUT_OF_ORDER",
              AllOf(HasSubstr(std::to_string(Later(3).value())),
                    HasSubstr(std::to_string(kFirstAttempt.value()))));
  ExpectError(member_.OnWait(TrainerRank(2), StepId(5), kFirstAttempt).status(),
              absl::StatusCode::kFailedPrecondition, "STEP_OUT_OF_ORDER",
              HasSubstr("without having submitted"));
  ExpectError(member_.OnSubmission(Step(0, 5, kFirstAttempt)).status(),
              absl::StatusCode::kInvalidArgument, "RANK_OUT_OF_RANGE", HasSubstr("rank 0"));
  EXPECT_FALSE(member_.submitted(TrainerRank(2)));
}

TEST_F(StepMemberTest, APushBuildsOnTheLastCommittedStep) {
  ExpectError(member_.OnSubmission(Push(2, 5, kFirstAttempt)).status(),
              absl::StatusCode::kFailedPrecondition, "STEP_OUT_OF_ORDER", HasSubstr("at 4"));
  ExpectForwarded(Push(2, 4, kFirstAttempt));
  Decision decision = Decide(Verdict::kCommit, 4, kFirstAttempt);
  decision.kind = AttemptKind::kPush;
  member_.OnDecision(decision);
  ExpectOutcome(Push(2, 4, kFirstAttempt), OutcomeKind::kCommitted);
  EXPECT_EQ(member_.last_committed(), StepId(4));
  EXPECT_EQ(member_.open().step, StepId(5));
}

TEST_F(StepMemberTest, APushIsNotAnsweredByTheStepOfTheSameNumber) {
  member_.OnDecision(Decide(Verdict::kCommit, 5, kFirstAttempt));
  ExpectError(member_.OnSubmission(Push(2, 5, kFirstAttempt)).status(),
              absl::StatusCode::kFailedPrecondition, "ATTEMPT_OUT_OF_ORDER", HasSubstr("rank 2"));
}

TEST_F(StepMemberTest, TrainersThatDisagreeAreRefusedWithTheNextAttempt) {
  ExpectForwarded(Step(2, 5, kFirstAttempt));
  member_.OnDecision(Decide(Verdict::kRefuse, 5, kFirstAttempt));
  const auto answer = member_.OnWait(TrainerRank(2), StepId(5), kFirstAttempt);
  ASSERT_TRUE(answer.ok());
  EXPECT_FALSE(answer->pending());
  EXPECT_FALSE(answer->outcome.has_value());
  ExpectError(answer->refused, absl::StatusCode::kInvalidArgument, "SCALARS_DIFFER",
              HasSubstr("groups[0].eps"));
  EXPECT_EQ(answer->next_attempt, Later(1));
  ExpectForwarded(Step(2, 5, Later(1)));
}

TEST_F(StepMemberTest, ALateTrainerHearsOfAnAttemptThatEndedWithoutIt) {
  member_.OnDecision(Decide(Verdict::kAbort, 5, kFirstAttempt));
  ExpectOutcome(Step(3, 5, kFirstAttempt), OutcomeKind::kAborted);
  ExpectOutcome(Push(3, 4, kFirstAttempt), OutcomeKind::kAborted);
}

TEST_F(StepMemberTest, ACommitIsRememberedWhateverIsAbortedAfterIt) {
  member_.OnDecision(Decide(Verdict::kCommit, 5, kFirstAttempt));
  for (int32_t i = 1; i <= 500; ++i) member_.OnDecision(Decide(Verdict::kAbort, 6, Later(i)));
  ExpectOutcome(Step(2, 5, kFirstAttempt), OutcomeKind::kCommitted);
  ExpectOutcome(Step(2, 6, Later(499)), OutcomeKind::kAborted);
  ExpectError(member_.OnSubmission(Step(2, 6, Later(1))).status(),
              absl::StatusCode::kFailedPrecondition, "ATTEMPT_OUT_OF_ORDER", HasSubstr("rank 2"));
}

TEST_F(StepMemberTest, TheNextAttemptIsOpenFromTheDecisionOn) {
  member_.OnDecision(Decide(Verdict::kSkip, 5, kFirstAttempt));
  ExpectForwarded(Step(3, 6, Later(1)));
  member_.OnOpen({Later(1), StepId(6)});  // forgets nothing
  EXPECT_TRUE(member_.submitted(TrainerRank(3)));
}

TEST_F(StepMemberTest, OldDecisionsAndOpeningsAreIgnored) {
  member_.OnDecision(Decide(Verdict::kCommit, 5, kFirstAttempt));
  ExpectForwarded(Step(2, 6, Later(1)));
  member_.OnDecision(Decide(Verdict::kAbort, 5, kFirstAttempt));
  member_.OnOpen({kFirstAttempt, StepId(5)});
  EXPECT_EQ(member_.open().attempt, Later(1));
  EXPECT_TRUE(member_.submitted(TrainerRank(2)));
  ExpectOutcome(Step(2, 5, kFirstAttempt), OutcomeKind::kCommitted);
}

TEST_F(StepMemberTest, VotesOnceWhenAllLanesHaveGathered) {
  const std::vector<UnitNorm> first = {{UnitId(3), 0, {3.0}, 0}};
  const std::vector<UnitNorm> second = {{UnitId(2), 0, {2.0}, 0}, {UnitId(9), 0, {9.0}, 0}};
  EXPECT_FALSE(member_.OnGathered(kFirstAttempt, LaneIndex(0), first).has_value());
  EXPECT_FALSE(member_.OnGathered(kFirstAttempt, LaneIndex(0), first).has_value());
  EXPECT_FALSE(member_.OnGathered(Later(1), LaneIndex(1), second).has_value());
  EXPECT_FALSE(member_.OnGathered(kFirstAttempt, LaneIndex(2), second).has_value());
  const auto vote = member_.OnGathered(kFirstAttempt, LaneIndex(1), second);
  ASSERT_TRUE(vote.has_value());
  ASSERT_EQ(vote->size(), 3);
  EXPECT_EQ((*vote)[0].unit, UnitId(3));
  EXPECT_EQ((*vote)[1].unit, UnitId(2));
  EXPECT_EQ((*vote)[2].unit, UnitId(9));
  EXPECT_FALSE(member_.OnGathered(kFirstAttempt, LaneIndex(1), second).has_value());
}

TEST_F(StepMemberTest, WhoWaitsForAnAttemptThatEndedUnheardIsToldTheSame) {
  const Submission submission = Step(2, 5, kFirstAttempt);
  ExpectForwarded(submission);
  Decision aborted = Decide(Verdict::kAbort, 5, Later(3));
  aborted.outcome.next_attempt = MakeAttempt(GroupEpoch(2), 2);
  member_.OnDecision(aborted);
  ExpectOutcome(submission, OutcomeKind::kAborted);
  EXPECT_EQ(member_.OnWait(TrainerRank(2), StepId(5), kFirstAttempt)->outcome->next_attempt,
            MakeAttempt(GroupEpoch(2), 2));
  ExpectForwarded(Step(2, 5, MakeAttempt(GroupEpoch(2), 2)));
}

}  // namespace
}  // namespace dmuond::scheduler
