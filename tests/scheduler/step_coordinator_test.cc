#include "scheduler/step_coordinator.h"

#include <cmath>
#include <limits>

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

}  // namespace
}  // namespace dmuond::scheduler
