// A job and its coordinator in a line each: what tests of the step machines are made of.
#ifndef DMUOND_TESTS_SCHEDULER_STEP_GROUP_H_
#define DMUOND_TESTS_SCHEDULER_STEP_GROUP_H_

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "scheduler/step_coordinator.h"
#include "tests/scheduler/layouts.h"

namespace dmuond::scheduler::testing {

inline constexpr Attempt kFirstAttempt = MakeAttempt(GroupEpoch(1), 1);
inline Attempt Later(int32_t attempts) { return Attempt(kFirstAttempt.value() + attempts); }

// Norms that a node votes: every unit that it owns has `sum` in each block.
inline std::vector<UnitNorm> NormsOf(const PlanInputs& inputs, const Plan& plan, NodeRank node,
                                     double sum = 1) {
  std::vector<UnitNorm> norms;
  for (const Unit& unit : plan.units) {
    if (unit.owner.value() / inputs.lanes_per_node != node.value()) continue;
    norms.push_back({unit.id, unit.first_element / kPieceCut, {sum}, unit.first_element});
  }
  return norms;
}

inline StepScalars Scalars(double learning_rate = 0.01) {
  StepScalars scalars;
  scalars.groups.resize(2);
  for (GroupScalars& group : scalars.groups) group.learning_rate = learning_rate;
  return scalars;
}

// A coordinator with its plan, and the messages of an attempt that goes well.
class StepGroup {
 public:
  explicit StepGroup(const World& world, StepId last_committed = StepId(0),
                     CoordinatorOptions options = {}, int64_t bucket_bytes = 32 << 20) {
    auto made = world.Inputs();
    EXPECT_TRUE(made.ok()) << made.status();
    inputs = *std::move(made);
    inputs.bucket_bytes = bucket_bytes;
    auto planned = MakePlan(inputs);
    EXPECT_TRUE(planned.ok()) << planned.status();
    plan = *std::move(planned);
    coordinator =
        std::make_unique<StepCoordinator>(inputs, plan, kFirstAttempt, last_committed, options);
  }

  StepGroup(const StepGroup&) = delete;  // the coordinator refers to inputs and plan
  StepGroup& operator=(const StepGroup&) = delete;

  [[nodiscard]] Submission Step(int32_t rank, StepScalars scalars = Scalars()) const {
    Submission submission;
    submission.rank = TrainerRank(rank);
    submission.attempt = coordinator->Current().attempt;
    submission.step = coordinator->Current().step;
    submission.scalars = std::move(scalars);
    return submission;
  }
  [[nodiscard]] Submission Push(int32_t rank, std::vector<int32_t> pushed = {}) const {
    Submission submission = Step(rank);
    submission.step = coordinator->last_committed();
    submission.kind = AttemptKind::kPush;
    submission.pushed = std::move(pushed);
    return submission;
  }
  std::vector<CoordinatorAction> Submit(const Submission& submission) {
    return coordinator->OnSubmission(now, submission);
  }
  std::vector<CoordinatorAction> Vote(int32_t node, double sum = 1) {
    return coordinator->OnVote(now, coordinator->Current().attempt, NodeRank(node), plan.digest,
                               NormsOf(inputs, plan, NodeRank(node), sum), "");
  }
  std::vector<CoordinatorAction> VoteAll(double sum = 1) {
    std::vector<CoordinatorAction> actions;
    for (int32_t node = 0; node < inputs.nodes; ++node) actions = Vote(node, sum);
    return actions;
  }
  std::vector<CoordinatorAction> SubmitAll() {
    std::vector<CoordinatorAction> actions;
    const int32_t ranks = static_cast<int32_t>(inputs.layout.trainers.size());
    std::vector<Submission> submissions;
    for (int32_t rank = 0; rank < ranks; ++rank) submissions.push_back(Step(rank));
    for (const Submission& submission : submissions) actions = Submit(submission);
    return actions;
  }
  std::vector<CoordinatorAction> Ready(int32_t node, int32_t rail, RailOperation operation,
                                       int32_t bucket, Attempt attempt) {
    return coordinator->OnRailReady(now, NodeRank(node),
                                    {.attempt = attempt,
                                     .rail = LaneIndex(rail),
                                     .operation = operation,
                                     .kind = ready_kind,
                                     .buckets = {{BucketId(bucket), 1}}});
  }

  AttemptKind ready_kind = AttemptKind::kStep;  // what lanes report to be ready
  PlanInputs inputs;
  Plan plan;
  std::unique_ptr<StepCoordinator> coordinator;
  TimePoint now;
};

// The decision among the actions, followed by the opening of the next attempt.
inline Decision DecisionIn(const std::vector<CoordinatorAction>& actions) {
  for (size_t i = 0; i < actions.size(); ++i) {
    const auto* decision = std::get_if<Decision>(&actions[i]);
    if (decision == nullptr) continue;
    EXPECT_EQ(actions.size(), i + 2);
    const auto* open = i + 1 < actions.size() ? std::get_if<OpenAttempt>(&actions[i + 1]) : nullptr;
    EXPECT_NE(open, nullptr);
    EXPECT_TRUE(open == nullptr || open->attempt == decision->outcome.next_attempt);
    return *decision;
  }
  ADD_FAILURE() << "nothing decided";
  return {};
}

inline std::vector<int32_t> BucketsGone(const std::vector<CoordinatorAction>& actions) {
  std::vector<int32_t> buckets;
  for (const CoordinatorAction& action : actions) {
    const auto* go = std::get_if<Go>(&action);
    if (go == nullptr) continue;
    for (const BucketRun& run : go->buckets) {
      for (int32_t b = run.first.value(); b < run.end().value(); ++b) buckets.push_back(b);
    }
  }
  return buckets;
}

}  // namespace dmuond::scheduler::testing

#endif  // DMUOND_TESTS_SCHEDULER_STEP_GROUP_H_
