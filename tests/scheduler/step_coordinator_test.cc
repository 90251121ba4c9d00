#include "scheduler/step_coordinator.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/scheduler/step_group.h"

namespace dmuond::scheduler {
namespace {

using testing::AdamW;
using testing::BucketsGone;
using testing::DecisionIn;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::kFirstAttempt;
using testing::Later;
using testing::Muon;
using testing::Scalars;
using testing::StepGroup;
using testing::World;

World TwoNodes() {
  return World(2, 2, 1).Replicate(Muon("w", {64, 32})).Replicate(AdamW("b", {32}));
}

TEST(StepCoordinatorTest, CommitsWhenAllRanksSubmittedAndAllNodesVoted) {
  StepGroup group(TwoNodes());
  EXPECT_THAT(group.Submit(group.Step(1)), IsEmpty());
  EXPECT_THAT(group.Vote(1), IsEmpty());
  EXPECT_THAT(group.Submit(group.Step(0)), IsEmpty());
  const Decision decision = DecisionIn(group.Vote(0));
  EXPECT_EQ(decision.verdict, Verdict::kCommit);
  EXPECT_EQ(decision.attempt, kFirstAttempt);
  EXPECT_EQ(decision.step, StepId(1));
  EXPECT_EQ(decision.scalars.groups[1].learning_rate, 0.01);
  EXPECT_EQ(decision.outcome.kind, OutcomeKind::kCommitted);
  EXPECT_EQ(decision.outcome.next_attempt, Later(1));
  EXPECT_EQ(decision.outcome.matrices, 1);
  EXPECT_DOUBLE_EQ(decision.outcome.gradient_norm, std::sqrt(group.plan.units.size()));
  EXPECT_EQ(group.coordinator->last_committed(), StepId(1));
  EXPECT_EQ(group.coordinator->Current().step, StepId(2));
}

TEST(StepCoordinatorTest, ANodeWithoutTrainersHearsOfEachAttemptsFirstSubmissionAlone) {
  StepGroup group(World(2, 3, 1).Replicate(Muon("w", {64, 32})).Replicate(AdamW("b", {32})));
  for (int attempt = 0; attempt < 2; ++attempt) {
    const Submission first = group.Step(1);
    const auto actions = group.Submit(first);
    ASSERT_EQ(actions.size(), 1);
    const auto& begun = std::get<Begun>(actions[0]);
    EXPECT_EQ(begun.node, NodeRank(2));
    EXPECT_EQ(begun.submission.attempt, first.attempt);
    EXPECT_EQ(begun.submission.scalars.groups[1].learning_rate, 0.01);
    EXPECT_THAT(group.Submit(group.Step(0)), IsEmpty());
    EXPECT_EQ(DecisionIn(group.VoteAll()).verdict, Verdict::kCommit);
  }
}

TEST(StepCoordinatorTest, CommitsWhenTheLastSubmissionComesAfterAllVotes) {
  StepGroup group(TwoNodes());
  EXPECT_THAT(group.VoteAll(), IsEmpty());
  EXPECT_EQ(DecisionIn(group.SubmitAll()).verdict, Verdict::kCommit);
}

TEST(StepCoordinatorTest, ScalarsThatDifferAreRefusedNamingFieldRanksAndValues) {
  StepGroup group(TwoNodes());
  StepScalars other = Scalars();
  other.groups[1].learning_rate = 0.02;
  EXPECT_THAT(group.Submit(group.Step(1)), IsEmpty());
  const Decision decision = DecisionIn(group.Submit(group.Step(0, other)));
  EXPECT_EQ(decision.verdict, Verdict::kRefuse);
  EXPECT_EQ(decision.refuse_reason, "SCALARS_DIFFER");
  EXPECT_THAT(decision.refuse_message, HasSubstr("step 1: groups[1].learning_rate differs: rank 0 "
                                                 "has 0.02"));
  EXPECT_THAT(decision.refuse_message, HasSubstr("rank 1 has 0.01"));
  EXPECT_EQ(group.coordinator->Current().attempt, Later(1));
  EXPECT_EQ(group.coordinator->Current().step, StepId(1));
}

TEST(StepCoordinatorTest, ScalarsAreComparedBitByBit) {
  StepGroup group(TwoNodes());
  StepScalars zero = Scalars();
  zero.groups[0].weight_decay = 0.0;
  StepScalars minus_zero = zero;
  minus_zero.groups[0].weight_decay = -0.0;
  (void)group.Submit(group.Step(0, zero));
  EXPECT_EQ(DecisionIn(group.Submit(group.Step(1, minus_zero))).verdict, Verdict::kRefuse);

  StepScalars nan = Scalars();
  nan.max_grad_norm = std::numeric_limits<double>::quiet_NaN();
  (void)group.Submit(group.Step(0, nan));
  EXPECT_THAT(group.Submit(group.Step(1, nan)), IsEmpty());
}

TEST(StepCoordinatorTest, EveryScalarThatDiffersIsNamed) {
  const auto field = [](auto&& change) {
    StepScalars other = Scalars();
    change(other);
    const auto mismatch = Compare(Scalars(), other);
    return mismatch ? mismatch->field : std::string("none");
  };
  EXPECT_EQ(field([](StepScalars&) {}), "none");
  EXPECT_EQ(field([](StepScalars& s) { s.groups[0].weight_decay = 1; }), "groups[0].weight_decay");
  EXPECT_EQ(field([](StepScalars& s) { s.groups[1].momentum = 1; }), "groups[1].momentum");
  EXPECT_EQ(field([](StepScalars& s) { s.groups[1].beta1 = 1; }), "groups[1].beta1");
  EXPECT_EQ(field([](StepScalars& s) { s.groups[1].beta2 = 1; }), "groups[1].beta2");
  EXPECT_EQ(field([](StepScalars& s) { s.groups[1].eps = 1; }), "groups[1].eps");
  EXPECT_EQ(field([](StepScalars& s) { s.groups.resize(3); }), "groups.size");
  EXPECT_EQ(field([](StepScalars& s) { s.loss_scale = 2; }), "loss_scale");
  EXPECT_EQ(field([](StepScalars& s) { s.max_grad_norm = 2; }), "max_grad_norm");
  EXPECT_EQ(field([](StepScalars& s) { s.clip_muon = false; }), "clip_muon");
}

TEST(StepCoordinatorTest, APushBesideAStepIsRefused) {
  StepGroup group(TwoNodes(), StepId(4));
  (void)group.Submit(group.Step(1));
  const Decision decision = DecisionIn(group.Submit(group.Push(0)));
  EXPECT_EQ(decision.verdict, Verdict::kRefuse);
  EXPECT_EQ(decision.refuse_reason, "KIND_DIFFERS");
  EXPECT_THAT(decision.refuse_message,
              HasSubstr("rank 0 pushes parameters, rank 1 submits a step"));
}

TEST(StepCoordinatorTest, ACommittedPushConsumesNoStepNumber) {
  StepGroup group(TwoNodes(), StepId(4));
  EXPECT_FALSE(group.coordinator->pushing());
  (void)group.Submit(group.Push(0));
  EXPECT_TRUE(group.coordinator->pushing());
  (void)group.Submit(group.Push(1));
  const Decision decision = DecisionIn(group.VoteAll());
  EXPECT_FALSE(group.coordinator->pushing());
  EXPECT_EQ(decision.verdict, Verdict::kCommit);
  EXPECT_EQ(decision.kind, AttemptKind::kPush);
  EXPECT_EQ(decision.outcome.step, StepId(4));
  EXPECT_EQ(decision.outcome.matrices, 0);
  EXPECT_THAT(decision.pushed, IsEmpty());
  EXPECT_EQ(group.coordinator->last_committed(), StepId(4));
  EXPECT_EQ(group.coordinator->Current().step, StepId(5));
  EXPECT_EQ(group.coordinator->Current().attempt, Later(1));
}

TEST(StepCoordinatorTest, HoldersThatPushDifferentParametersAreRefusedNamingTheParameter) {
  StepGroup group(TwoNodes());
  (void)group.Submit(group.Push(0, {0}));
  const Decision decision = DecisionIn(group.Submit(group.Push(1)));
  EXPECT_EQ(decision.refuse_reason, "PUSH_DIFFERS");
  EXPECT_EQ(decision.refuse_message, "parameter \"b\": rank 0 does not push it, rank 1 pushes it");
  const Decision foreign = DecisionIn(group.Submit(group.Push(0, {7})));
  EXPECT_EQ(foreign.refuse_reason, "PUSH_DIFFERS");
  EXPECT_THAT(foreign.refuse_message, HasSubstr("rank 0 pushes parameter 7"));
}

TEST(StepCoordinatorTest, APushNamesTheUnionOfWhatItsRanksHold) {
  World world(2, 1, 1);
  world.Replicate(Muon("both", {8, 8})).Replicate(Muon("kept", {8, 8}));
  world.Hold(0, Muon("mine", {8, 8}), WholeBox({8, 8}));
  world.Hold(1, Muon("yours", {8, 8}), WholeBox({8, 8}));
  StepGroup group(world);
  (void)group.Submit(group.Push(0, {0, 2}));
  (void)group.Submit(group.Push(1, {0, 3}));
  EXPECT_THAT(DecisionIn(group.VoteAll()).pushed, ElementsAre(0, 2, 3));
}

TEST(StepCoordinatorTest, AWithdrawalAbortsAtOnceAndTheNextAttemptOpens) {
  StepGroup group(TwoNodes());
  (void)group.Submit(group.Step(1));
  Submission withdrawal = group.Step(0, StepScalars{});
  withdrawal.withdraw = true;
  const Decision decision = DecisionIn(group.Submit(withdrawal));
  EXPECT_EQ(decision.verdict, Verdict::kAbort);
  EXPECT_TRUE(decision.outcome.retry);
  EXPECT_EQ(decision.outcome.reason, OutcomeReason::kWithdrawn);
  EXPECT_THAT(decision.outcome.detail, HasSubstr("rank 0"));
  (void)group.SubmitAll();
  EXPECT_EQ(DecisionIn(group.VoteAll()).step, StepId(1));
}

TEST(StepCoordinatorTest, MessagesOfOtherAttemptsAndDuplicatesAreIgnored) {
  StepGroup group(TwoNodes());
  const Submission old = group.Step(0);
  (void)group.SubmitAll();
  (void)group.VoteAll();
  EXPECT_THAT(group.Submit(old), IsEmpty());
  EXPECT_THAT(group.coordinator->OnVote(group.now, kFirstAttempt, NodeRank(0), 0, {}, "late"),
              IsEmpty());
  EXPECT_THAT(group.Submit(group.Step(0)), IsEmpty());
  EXPECT_THAT(group.Submit(group.Step(0)), IsEmpty());
  EXPECT_THAT(group.Vote(0), IsEmpty());
  EXPECT_THAT(group.Vote(0), IsEmpty());
  EXPECT_THAT(group.Vote(1), IsEmpty());
  EXPECT_EQ(DecisionIn(group.Submit(group.Step(1))).step, StepId(2));
}

TEST(StepCoordinatorTest, AVoteWithAnotherPlanAbortsNamingTheNode) {
  StepGroup group(TwoNodes());
  (void)group.SubmitAll();
  const Decision decision = DecisionIn(group.coordinator->OnVote(
      group.now, kFirstAttempt, NodeRank(1), group.plan.digest + 1, {}, ""));
  EXPECT_EQ(decision.verdict, Verdict::kAbort);
  EXPECT_FALSE(decision.outcome.retry);
  EXPECT_EQ(decision.outcome.reason, OutcomeReason::kLayoutChanged);
  EXPECT_THAT(decision.outcome.detail, HasSubstr("node 1"));
}

TEST(StepCoordinatorTest, ANodeThatCannotCommitAbortsWithItsWords) {
  StepGroup group(TwoNodes());
  (void)group.SubmitAll();
  const Decision decision = DecisionIn(group.coordinator->OnVote(
      group.now, kFirstAttempt, NodeRank(1), group.plan.digest, {}, "out of slots"));
  EXPECT_EQ(decision.verdict, Verdict::kAbort);
  EXPECT_EQ(decision.outcome.detail, "node 1: out of slots");
}

TEST(StepCoordinatorTest, AVoteWithoutTheNormOfAUnitDoesNotCommit) {
  StepGroup group(TwoNodes());
  (void)group.SubmitAll();
  Decision decision;
  for (int32_t node = 0; node < 2; ++node) {
    const auto actions = group.coordinator->OnVote(group.now, kFirstAttempt, NodeRank(node),
                                                   group.plan.digest, {}, "");
    if (node == 1) decision = DecisionIn(actions);
  }
  EXPECT_EQ(decision.verdict, Verdict::kAbort);
  EXPECT_THAT(decision.outcome.detail, HasSubstr("parameter \"w\""));
}

TEST(StepCoordinatorTest, NonFiniteGradientsSkipTheStepAndNameTheParameter) {
  StepGroup group(TwoNodes());
  (void)group.SubmitAll();
  const Decision decision = DecisionIn(group.VoteAll(std::numeric_limits<double>::infinity()));
  EXPECT_EQ(decision.verdict, Verdict::kSkip);
  EXPECT_EQ(decision.outcome.kind, OutcomeKind::kSkipped);
  EXPECT_EQ(decision.outcome.reason, OutcomeReason::kNonFinite);
  EXPECT_THAT(decision.outcome.detail, HasSubstr("parameter \"w\""));
  EXPECT_EQ(group.coordinator->last_committed(), StepId(1));
}

TEST(StepCoordinatorTest, AGradientThatNoLaneReadsSkipsTheStepWhereItsRankSaysSo) {
  StepGroup group(TwoNodes());
  const auto skipped = [&](int32_t parameter) {
    Submission said = group.Step(1);
    said.not_finite = parameter;
    (void)group.Submit(said);
    (void)group.Submit(group.Step(0));
    return DecisionIn(group.VoteAll());
  };
  const Decision decision = skipped(1);
  EXPECT_EQ(decision.verdict, Verdict::kSkip);
  EXPECT_EQ(decision.outcome.reason, OutcomeReason::kNonFinite);
  EXPECT_EQ(decision.outcome.detail, "the gradient of parameter \"b\" is not finite on rank 1");
  EXPECT_TRUE(std::isnan(decision.outcome.gradient_norm));
  EXPECT_EQ(group.coordinator->last_committed(), StepId(1));
  EXPECT_EQ(skipped(7).verdict, Verdict::kSkip);  // a message has any number
  (void)group.SubmitAll();
  EXPECT_EQ(DecisionIn(group.VoteAll()).verdict, Verdict::kCommit);
}

TEST(StepCoordinatorTest, AfterTooManySkipsInARowStepsAreAborted) {
  StepGroup group(TwoNodes(), StepId(0), {.skips_max = 2});
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const auto next = [&](double sum) {
    (void)group.SubmitAll();
    return DecisionIn(group.VoteAll(sum)).verdict;
  };
  EXPECT_EQ(next(nan), Verdict::kSkip);
  EXPECT_EQ(next(1), Verdict::kCommit);
  EXPECT_EQ(next(nan), Verdict::kSkip);
  EXPECT_EQ(next(nan), Verdict::kSkip);
  (void)group.SubmitAll();
  const Decision decision = DecisionIn(group.VoteAll(nan));
  EXPECT_EQ(decision.verdict, Verdict::kAbort);
  EXPECT_FALSE(decision.outcome.retry);
  EXPECT_EQ(decision.outcome.reason, OutcomeReason::kNonFinite);
  EXPECT_THAT(decision.outcome.detail, HasSubstr("2 skipped steps in a row"));
  EXPECT_EQ(group.coordinator->last_committed(), StepId(4));
  EXPECT_EQ(next(1), Verdict::kCommit);  // a corrected model goes on
}

TEST(StepCoordinatorTest, ClipsByTheJointNormAsTorchDoes) {
  StepGroup group(World(1, 1, 1).Replicate(Muon("w", {8, 8})).Replicate(AdamW("b", {8})));
  StepScalars scalars = Scalars();
  scalars.max_grad_norm = 1;
  (void)group.Submit(group.Step(0, scalars));
  const Decision decision = DecisionIn(group.Vote(0, 8.0));  // two units: norm 4
  EXPECT_DOUBLE_EQ(decision.outcome.gradient_norm, 4);
  EXPECT_DOUBLE_EQ(decision.clip_coefficient, 1 / (4 + 1e-6));
  EXPECT_EQ(decision.outcome.clip_coefficient, decision.clip_coefficient);
}

TEST(StepCoordinatorTest, AMatrixThatNobodyHasAGradientForIsNotCounted) {
  StepGroup group(World(2, 1, 1).Replicate(Muon("v", {8, 8})).Replicate(Muon("w", {8, 8})));
  for (int32_t rank = 0; rank < 2; ++rank) {
    Submission submission = group.Step(rank);
    submission.absent = rank == 0 ? std::vector<int32_t>{0, 1} : std::vector<int32_t>{1};
    (void)group.Submit(submission);
  }
  const Decision decision = DecisionIn(group.Vote(0));
  EXPECT_EQ(decision.outcome.matrices, 1);
  EXPECT_THAT(decision.absent,
              ElementsAre(AbsentFragment{TrainerRank(0), 0}, AbsentFragment{TrainerRank(0), 1},
                          AbsentFragment{TrainerRank(1), 1}));
}

TEST(StepCoordinatorTest, ARankThatDoesNotSubmitInTimeIsNamed) {
  StepGroup group(World(3, 1, 1).Replicate(Muon("w", {8, 8})), StepId(0),
                  {.step_timeout = std::chrono::milliseconds(100)});
  group.now += std::chrono::hours(1);
  EXPECT_THAT(group.coordinator->OnTick(group.now), IsEmpty());  // nobody waits
  (void)group.Submit(group.Step(1));
  EXPECT_THAT(group.coordinator->OnTick(group.now + std::chrono::milliseconds(99)), IsEmpty());
  const Decision decision =
      DecisionIn(group.coordinator->OnTick(group.now + std::chrono::milliseconds(100)));
  EXPECT_EQ(decision.verdict, Verdict::kAbort);
  EXPECT_EQ(decision.outcome.reason, OutcomeReason::kTrainerMissing);
  EXPECT_TRUE(decision.outcome.retry);
  EXPECT_THAT(decision.outcome.detail, HasSubstr("ranks 0, 2"));
}

TEST(StepCoordinatorTest, ARankThatDiesIsWaitedForAndThenLost) {
  StepGroup group(TwoNodes(), StepId(0), {.session_linger = std::chrono::milliseconds(500)});
  const TrainerRank rank(1);
  (void)group.Submit(group.Step(0));
  const Decision aborted = DecisionIn(group.coordinator->OnRankGone(group.now, rank, 1, "killed"));
  EXPECT_TRUE(aborted.outcome.retry);
  EXPECT_EQ(aborted.outcome.reason, OutcomeReason::kTrainerMissing);
  EXPECT_THAT(group.coordinator->OnRankGone(group.now, rank, 1, "killed"), IsEmpty());
  (void)group.Submit(group.Step(0));
  group.now += std::chrono::milliseconds(499);
  EXPECT_THAT(group.coordinator->OnTick(group.now), IsEmpty());
  group.coordinator->OnRankBack(group.now, rank, 2);
  // An echo of the first death is not the death of the replacement.
  EXPECT_THAT(group.coordinator->OnRankGone(group.now, rank, 1, "killed"), IsEmpty());
  group.now += std::chrono::seconds(2);
  EXPECT_THAT(group.coordinator->OnTick(group.now), IsEmpty());
  (void)group.coordinator->OnRankGone(group.now, rank, 2, "killed again");
  group.now += std::chrono::milliseconds(500);
  const Decision lost = DecisionIn(group.coordinator->OnTick(group.now));
  EXPECT_FALSE(lost.outcome.retry);
  EXPECT_THAT(lost.outcome.detail, HasSubstr("no replacement came"));
  EXPECT_TRUE(group.coordinator->lost());
}

TEST(StepCoordinatorTest, ANodeThatDoesNotVoteInTimeIsNamed) {
  StepGroup group(TwoNodes(), StepId(0), {.step_timeout = std::chrono::milliseconds(100)});
  (void)group.SubmitAll();
  (void)group.Vote(0);
  const auto after = [&](int ms) {
    return group.coordinator->OnTick(group.now + std::chrono::milliseconds(ms));
  };
  EXPECT_THAT(after(99), IsEmpty());
  // First the node is to end whoever hangs there.
  const auto overdue = after(100);
  ASSERT_EQ(overdue.size(), 1);
  EXPECT_EQ(std::get<GatherOverdue>(overdue[0]).node, NodeRank(1));
  EXPECT_EQ(std::get<GatherOverdue>(overdue[0]).attempt, group.coordinator->Current().attempt);
  EXPECT_THAT(std::get<GatherOverdue>(overdue[0]).detail, HasSubstr("node 1"));
  EXPECT_THAT(after(199), IsEmpty());
  const Decision decision = DecisionIn(after(200));
  EXPECT_EQ(decision.outcome.reason, OutcomeReason::kLaneLost);
  EXPECT_FALSE(decision.outcome.retry);
  EXPECT_THAT(decision.outcome.detail, HasSubstr("node 1"));
}

TEST(StepCoordinatorTest, GatheringMayTakeAsLongAsALaneMayBeSilent) {
  StepGroup group(TwoNodes(), StepId(0),
                  {.step_timeout = std::chrono::milliseconds(100),
                   .lane_timeout = std::chrono::milliseconds(300)});
  (void)group.SubmitAll();
  EXPECT_THAT(group.coordinator->OnTick(group.now + std::chrono::milliseconds(299)), IsEmpty());
  EXPECT_EQ(group.coordinator->OnTick(group.now + std::chrono::milliseconds(300)).size(), 2);
}

TEST(StepCoordinatorTest, ALossEndsTheOpenAttemptAndAnswersEverySubmissionAfterIt) {
  StepGroup group(TwoNodes());
  const auto lost =
      group.coordinator->OnLost(group.now, OutcomeReason::kPeerLost, "node 1 is gone");
  EXPECT_EQ(DecisionIn(lost).outcome.reason, OutcomeReason::kPeerLost);
  EXPECT_THAT(group.coordinator->OnLost(group.now, OutcomeReason::kLaneLost, "lane 3"), IsEmpty());
  for (int32_t attempt = 1; attempt < 4; ++attempt) {
    const Decision decision = DecisionIn(group.Submit(group.Step(0)));
    EXPECT_EQ(decision.attempt, Later(attempt));
    EXPECT_EQ(decision.verdict, Verdict::kAbort);
    EXPECT_FALSE(decision.outcome.retry);
    EXPECT_EQ(decision.outcome.detail, "node 1 is gone");
  }
}

// ---- rails ----

// Two nodes with one lane each; three matrices in a bucket each.
class RailsTest : public ::testing::Test {
 protected:
  RailsTest()
      : group_(World(2, 2, 1)
                   .Replicate(Muon("u", {8, 8}))
                   .Replicate(Muon("v", {8, 8}))
                   .Replicate(Muon("w", {8, 8})),
               StepId(0), {}, /*bucket_bytes=*/1) {
    EXPECT_EQ(group_.plan.buckets, 3);
  }
  std::vector<int32_t> Ready(int32_t node, int32_t bucket,
                             RailOperation operation = RailOperation::kCollect,
                             Attempt attempt = kFirstAttempt) {
    return BucketsGone(group_.Ready(node, 0, operation, bucket, attempt));
  }
  StepGroup group_;
};

TEST_F(RailsTest, ABucketGoesWhenBothLanesAreReadyAndInTheOrderOfBuckets) {
  EXPECT_THAT(Ready(0, 1), IsEmpty());
  EXPECT_THAT(Ready(1, 1), IsEmpty());  // bucket 0 comes first
  EXPECT_THAT(Ready(1, 0), IsEmpty());
  EXPECT_THAT(Ready(0, 0), ElementsAre(0, 1));
  EXPECT_THAT(Ready(0, 0), IsEmpty());  // once
  EXPECT_THAT(Ready(0, 2), IsEmpty());
  EXPECT_THAT(Ready(0, 2), IsEmpty());  // the same lane again is not the other lane
  EXPECT_THAT(Ready(1, 2), ElementsAre(2));
}

TEST_F(RailsTest, ReportsOfUnknownRailsAndBucketsAreIgnored) {
  EXPECT_THAT(group_.Ready(0, 5, RailOperation::kCollect, 0, kFirstAttempt), IsEmpty());
  EXPECT_THAT(group_.Ready(0, -1, RailOperation::kCollect, 0, kFirstAttempt), IsEmpty());
  EXPECT_THAT(Ready(0, 77), IsEmpty());
  EXPECT_THAT(Ready(1, 77), IsEmpty());
}

TEST_F(RailsTest, GoNamesTheAbsentFragmentsOfItsBucket) {
  Submission submission = group_.Step(1);
  submission.absent = {0, 1};
  (void)group_.Submit(submission);
  (void)Ready(0, 0);
  const auto actions = group_.Ready(1, 0, RailOperation::kCollect, 0, kFirstAttempt);
  ASSERT_EQ(actions.size(), 1);
  const int32_t parameter = static_cast<int32_t>(
      std::find(group_.plan.parameter_bucket.begin(), group_.plan.parameter_bucket.end(), 0) -
      group_.plan.parameter_bucket.begin());
  EXPECT_EQ(std::get<Go>(actions[0]).absent.size(), parameter < 2 ? 1 : 0);
  for (const AbsentFragment& absent : std::get<Go>(actions[0]).absent) {
    EXPECT_EQ(absent, (AbsentFragment{TrainerRank(1), parameter}));
  }
}

TEST_F(RailsTest, PublishingGoesOnlyAfterACommitAndOutlivesTheNextAttemptsAbort) {
  EXPECT_THAT(Ready(0, 0, RailOperation::kPublish), IsEmpty());
  EXPECT_THAT(Ready(1, 0, RailOperation::kPublish), IsEmpty());
  (void)group_.SubmitAll();
  (void)group_.VoteAll();
  EXPECT_THAT(Ready(0, 0, RailOperation::kPublish), IsEmpty());
  EXPECT_THAT(Ready(1, 0, RailOperation::kPublish), ElementsAre(0));
  EXPECT_THAT(Ready(0, 1, RailOperation::kPublish), IsEmpty());
  Submission withdrawal = group_.Step(0);
  withdrawal.withdraw = true;
  EXPECT_EQ(DecisionIn(group_.Submit(withdrawal)).verdict, Verdict::kAbort);
  EXPECT_THAT(Ready(1, 1, RailOperation::kPublish), ElementsAre(1));
}

TEST_F(RailsTest, AnAbortForgetsWhatWasReportedForItsAttempt) {
  (void)Ready(0, 0);
  Submission withdrawal = group_.Step(0);
  withdrawal.withdraw = true;
  (void)group_.Submit(withdrawal);
  EXPECT_THAT(Ready(1, 0), IsEmpty());  // of the old attempt
  EXPECT_THAT(Ready(1, 0, RailOperation::kCollect, Later(1)), IsEmpty());
  EXPECT_THAT(Ready(0, 0, RailOperation::kCollect, Later(1)), ElementsAre(0));
}

TEST_F(RailsTest, APushCollectsWhenAllRanksHavePushed) {
  group_.ready_kind = AttemptKind::kPush;
  std::set<int32_t> buckets;  // in which an owner is not with rank 0, whose weights are taken
  for (const Unit& unit : group_.plan.units) {
    if (unit.owner == LaneId(1)) buckets.insert(unit.bucket.value());
  }
  ASSERT_FALSE(buckets.empty());
  (void)group_.Submit(group_.Push(0));
  for (int32_t bucket = 0; bucket < 3; ++bucket) {
    EXPECT_THAT(Ready(0, bucket), IsEmpty());
  }
  EXPECT_THAT(BucketsGone(group_.Submit(group_.Push(1))), IsEmpty());
  std::vector<int32_t> gone;
  for (int32_t bucket = 0; bucket < 3; ++bucket) {
    for (int32_t go : Ready(1, bucket)) gone.push_back(go);
  }
  EXPECT_THAT(gone, ::testing::ElementsAreArray(buckets));
}

TEST_F(RailsTest, APushAfterGradientsWereSignalledIsTriedAgain) {
  for (int32_t bucket = 0; bucket < 3; ++bucket) (void)Ready(1, bucket);
  (void)group_.Submit(group_.Push(0));
  const Decision decision = DecisionIn(group_.Submit(group_.Push(1)));
  EXPECT_EQ(decision.verdict, Verdict::kAbort);
  EXPECT_TRUE(decision.outcome.retry);
  EXPECT_THAT(decision.outcome.detail, HasSubstr("rank 1"));
}

// The group loses its lanes in the middle of step 2.
class ReformationTest : public ::testing::Test {
 protected:
  ReformationTest() {
    (void)group_.SubmitAll();
    committed_ = DecisionIn(group_.VoteAll());
    (void)group_.Submit(group_.Step(0));
    open_ = group_.coordinator->Current();
  }
  static constexpr Attempt kNewEpoch = MakeAttempt(GroupEpoch(2), 1);
  StepGroup group_{TwoNodes(), StepId(0), {.session_linger = std::chrono::hours(24)}};
  Decision committed_;
  OpenAttempt open_;
};

TEST_F(ReformationTest, DecidesNothingUntilTheGroupHasFormedAnew) {
  group_.coordinator->Suspend();
  EXPECT_THAT(group_.Submit(group_.Step(1)), IsEmpty());
  EXPECT_THAT(group_.VoteAll(), IsEmpty());
  EXPECT_THAT(group_.Ready(0, 0, RailOperation::kPublish, 0, committed_.attempt), IsEmpty());
  EXPECT_THAT(group_.coordinator->OnRankGone(group_.now, TrainerRank(1), 1, "rank 1 died"),
              IsEmpty());
  EXPECT_THAT(group_.coordinator->OnTick(group_.now + std::chrono::hours(1)), IsEmpty());
}

TEST_F(ReformationTest, TellsTheLastCommitAgainEndsTheOpenAttemptAndPublishes) {
  group_.coordinator->Suspend();
  const auto actions =
      group_.coordinator->OnReformed(kNewEpoch, OutcomeReason::kLaneLost, "lane 1 died");
  ASSERT_EQ(actions.size(), 4);
  const auto& told = std::get<Decision>(actions[0]);
  EXPECT_EQ(told.attempt, committed_.attempt);
  EXPECT_EQ(told.verdict, Verdict::kCommit);
  const auto& aborted = std::get<Decision>(actions[1]);
  EXPECT_EQ(aborted.attempt, open_.attempt);
  EXPECT_EQ(aborted.verdict, Verdict::kAbort);
  EXPECT_TRUE(aborted.outcome.retry);
  EXPECT_EQ(aborted.outcome.reason, OutcomeReason::kLaneLost);
  EXPECT_EQ(aborted.outcome.next_attempt, Attempt(kNewEpoch.value() + 1));
  const auto& republish = std::get<Republish>(actions[2]);
  EXPECT_EQ(republish.attempt, kNewEpoch);
  EXPECT_EQ(republish.step, StepId(1));
  const auto& open = std::get<OpenAttempt>(actions[3]);
  EXPECT_EQ(open.attempt, Attempt(kNewEpoch.value() + 1));
  EXPECT_EQ(open.step, open_.step);
  // The step is tried again, from the first submission on.
  (void)group_.SubmitAll();
  EXPECT_EQ(DecisionIn(group_.VoteAll()).step, open_.step);
}

TEST_F(ReformationTest, WithoutStateTheFirstPushIsTriedAgain) {
  StepGroup fresh(TwoNodes());
  (void)fresh.Submit(fresh.Push(0));
  fresh.coordinator->Suspend();
  const auto actions =
      fresh.coordinator->OnReformed(kNewEpoch, OutcomeReason::kPeerLost, "a link broke");
  ASSERT_EQ(actions.size(), 2);
  EXPECT_EQ(std::get<Decision>(actions[0]).outcome.next_attempt, kNewEpoch);
  EXPECT_EQ(std::get<OpenAttempt>(actions[1]).attempt, kNewEpoch);
}

TEST_F(ReformationTest, ARankThatDiedMeanwhileIsWaitedFor) {
  group_.coordinator->Suspend();
  (void)group_.coordinator->OnRankGone(group_.now, TrainerRank(1), 1, "rank 1 died");
  (void)group_.coordinator->OnReformed(kNewEpoch, OutcomeReason::kLaneLost, "lane 1 died");
  (void)group_.Submit(group_.Step(0));
  EXPECT_THAT(group_.coordinator->OnRankGone(group_.now, TrainerRank(1), 1, "told again"),
              IsEmpty());
  group_.coordinator->OnRankBack(group_.now, TrainerRank(1), 2);
  (void)group_.Submit(group_.Step(1));
  EXPECT_EQ(DecisionIn(group_.VoteAll()).verdict, Verdict::kCommit);
}

TEST_F(ReformationTest, AHaltedJobDecidesNothingMoreAndStillPublishes) {
  EXPECT_TRUE(group_.coordinator->in_flight());
  (void)group_.Submit(group_.Step(1));
  const Decision second = DecisionIn(group_.VoteAll());
  EXPECT_FALSE(group_.coordinator->in_flight());
  group_.coordinator->Halt();
  EXPECT_THAT(group_.SubmitAll(), IsEmpty());
  EXPECT_THAT(group_.VoteAll(), IsEmpty());
  EXPECT_THAT(group_.coordinator->OnRankGone(group_.now, TrainerRank(1), 1, "rank 1 died"),
              IsEmpty());
  EXPECT_THAT(group_.coordinator->OnTick(group_.now + std::chrono::hours(1)), IsEmpty());
  EXPECT_EQ(group_.coordinator->last_committed(), StepId(2));
  std::vector<int32_t> gone;
  for (int32_t bucket = 0; bucket < group_.plan.buckets; ++bucket) {
    for (int32_t node = 0; node < 2; ++node) {
      const auto went =
          BucketsGone(group_.Ready(node, 0, RailOperation::kPublish, bucket, second.attempt));
      gone.insert(gone.end(), went.begin(), went.end());
    }
  }
  EXPECT_FALSE(gone.empty()) << "what is committed is published";
  const auto reformed =
      group_.coordinator->OnReformed(kNewEpoch, OutcomeReason::kPeerLost, "the group formed anew");
  EXPECT_FALSE(reformed.empty());
  (void)group_.coordinator->OnRankBack(group_.now, TrainerRank(1), 2);
  (void)group_.SubmitAll();
  EXPECT_EQ(DecisionIn(group_.VoteAll()).verdict, Verdict::kCommit) << "it goes on";
}

TEST(StepCoordinatorTest, ARestoredJobPublishesBeforeItsFirstStep) {
  StepGroup group(TwoNodes(), StepId(7));
  const auto actions = group.coordinator->Restart();
  ASSERT_EQ(actions.size(), 2);
  EXPECT_EQ(std::get<Republish>(actions[0]).attempt, kFirstAttempt);
  EXPECT_EQ(std::get<Republish>(actions[0]).step, StepId(7));
  EXPECT_EQ(std::get<OpenAttempt>(actions[1]).attempt, Later(1));
  EXPECT_EQ(std::get<OpenAttempt>(actions[1]).step, StepId(8));
  EXPECT_TRUE(group.coordinator->has_state());
}

}  // namespace
}  // namespace dmuond::scheduler
