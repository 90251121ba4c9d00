#include "scheduler/job/planned_job.h"

#include <utility>

#include "absl/status/status.h"
#include "scheduler/convert/convert.h"
#include "scheduler/convert/registrations.h"
#include "scheduler/reason.h"

namespace dmuond::scheduler {
namespace {

// An error that has a reason keeps it.
absl::Status LayoutInvalid(const absl::Status& why) {
  return ReasonOf(why).empty() ? WithReason(why, "LAYOUT_INVALID") : why;
}

}  // namespace

absl::StatusOr<PlannedJob> MakePlannedJob(const v1::PlanInputs& wire) {
  absl::StatusOr<PlanInputs> inputs = FromProto(wire);
  if (!inputs.ok()) return LayoutInvalid(inputs.status());
  auto shared = std::make_shared<const PlanInputs>(*std::move(inputs));
  absl::StatusOr<Plan> plan = MakePlan(*shared);
  if (!plan.ok()) return LayoutInvalid(plan.status());
  if (plan->units.empty()) {
    return Error(
        absl::StatusCode::kInvalidArgument, "LAYOUT_INVALID",
        Say("job '", Named("job", wire.job()), "': of ", Named("world_size", WorldSizeOf(wire)),
            " trainers none has registered a parameter on route muon or adamw: there is "
            "nothing to update"));
  }
  return PlannedJob{std::move(shared), std::make_shared<const Plan>(*std::move(plan))};
}

}  // namespace dmuond::scheduler
