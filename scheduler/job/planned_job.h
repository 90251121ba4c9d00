// A plan with the inputs that it was made of. Making a plan is slow, so no state machine does it:
// the machine orders the plan, and is told the result.
#ifndef DMUOND_SCHEDULER_JOB_PLANNED_JOB_H_
#define DMUOND_SCHEDULER_JOB_PLANNED_JOB_H_

#include <memory>

#include "absl/status/statusor.h"
#include "dmuond/v1/peer.pb.h"
#include "scheduler/plan.h"

namespace dmuond::scheduler {

// Immutable, and shared by all that use it. Neither pointer is null.
struct PlannedJob {
  std::shared_ptr<const PlanInputs> inputs;
  std::shared_ptr<const Plan> plan;
};

// Pure; seconds for a large model. INVALID_ARGUMENT or FAILED_PRECONDITION, by default with reason
// LAYOUT_INVALID, say what is wrong with the inputs, or that no trainer has anything to update.
[[nodiscard]] absl::StatusOr<PlannedJob> MakePlannedJob(const v1::PlanInputs& wire);

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_JOB_PLANNED_JOB_H_
