// The norm of a step's whole gradient and what follows from it. Pure values.
#ifndef DMUOND_SCHEDULER_CLIP_H_
#define DMUOND_SCHEDULER_CLIP_H_

#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "scheduler/plan.h"
#include "scheduler/step.h"

namespace dmuond::scheduler {

struct GradientNorm {
  double norm = 0;                       // of all muon and adamw parameters jointly
  std::optional<UnitId> first_infinite;  // lowest unit whose own sum of squares is not finite
};

// Adds the sums of squares up in an order that depends on the parameters alone: parameter by
// parameter; matrices by unit; pieces of a tensor by block of the tensor, where units that share a
// block add their parts in the order of first_element before it counts; other pieces by unit. So
// the norm has the same bits for every assignment whose pieces are cut at multiples of the block.
// FAILED_PRECONDITION names a unit without a sum although `active` says that it has a gradient.
// INVALID_ARGUMENT: a unit that the plan does not have, a block that is there twice. REQUIRES:
// active.size() == plan.units.size().
[[nodiscard]] absl::StatusOr<GradientNorm> TotalNorm(const Layout& layout, const Plan& plan,
                                                     const std::vector<bool>& active,
                                                     const std::vector<UnitNorm>& norms);

// What torch.nn.utils.clip_grad_norm_ multiplies gradients with: min(1, max / (norm + 1e-6)); 1
// where max_grad_norm is not positive.
[[nodiscard]] double ClipCoefficient(double norm, double max_grad_norm);

// Per unit: does any of the fragments that its gradient comes from have one? `absent` sorted.
[[nodiscard]] std::vector<bool> ActiveUnits(const Layout& layout, const Plan& plan,
                                            const std::vector<AbsentFragment>& absent);

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_CLIP_H_
