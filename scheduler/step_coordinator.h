// Decides every attempt of a job: opens it, lets rails go, and ends it as commit, skip, abort or
// refuse. Lives in the daemon of node 0. Pure: time is passed in, what it wants done is returned.
// Every action goes to every member, in the order returned. Messages of other attempts than the
// current one are ignored, so duplicates and stragglers do no harm.
#ifndef DMUOND_SCHEDULER_STEP_COORDINATOR_H_
#define DMUOND_SCHEDULER_STEP_COORDINATOR_H_

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "scheduler/plan.h"
#include "scheduler/step.h"

namespace dmuond::scheduler {

struct CoordinatorOptions {
  std::chrono::milliseconds step_timeout{600'000};  // a rank without submit, after the first one
  int32_t skips_max = 50;                           // in a row; then steps are aborted, no retry
};

class StepCoordinator {
 public:
  // `inputs` and `plan` must outlive the machine. Opens `first_attempt` for last_committed + 1.
  StepCoordinator(const PlanInputs& inputs, const Plan& plan, Attempt first_attempt,
                  StepId last_committed, CoordinatorOptions options);

  // The attempt now open; told to members when they are ready.
  [[nodiscard]] OpenAttempt Current() const;
  [[nodiscard]] StepId last_committed() const;

  [[nodiscard]] std::vector<CoordinatorAction> OnSubmission(TimePoint now,
                                                            const Submission& submission);
  // One lane's part of a bucket's operation on its rail lies ready to cross. All lanes that have
  // transfers of it must report; then it goes, in the order of buckets within (rail, operation).
  [[nodiscard]] std::vector<CoordinatorAction> OnRailReady(TimePoint now, Attempt attempt,
                                                           NodeRank node, LaneIndex rail,
                                                           RailOperation operation,
                                                           BucketId bucket);
  // A node holds every gradient that its owners need. Non-empty `error`: it cannot commit.
  [[nodiscard]] std::vector<CoordinatorAction> OnVote(TimePoint now, Attempt attempt, NodeRank node,
                                                      uint64_t plan_digest,
                                                      const std::vector<UnitNorm>& norms,
                                                      const std::string& error);
  // Whoever is gone makes the open attempt impossible: it aborts, naming them. retry: false until
  // somebody can take the place.
  [[nodiscard]] std::vector<CoordinatorAction> OnLost(TimePoint now, OutcomeReason reason,
                                                      const std::string& detail);
  // Timeouts. Call at least every 100 ms while an attempt has submissions.
  [[nodiscard]] std::vector<CoordinatorAction> OnTick(TimePoint now);

  // ...private state...
};

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_STEP_COORDINATOR_H_
