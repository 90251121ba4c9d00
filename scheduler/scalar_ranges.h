// The ranges of the numbers that a step is submitted with. Whatever a device computes from numbers
// in their ranges (1 - lr * weight_decay, lr / (1 - beta1^t), 1 / loss_scale, …) is a finite fp32
// number. docs/maths.md, "What the scalars may be", has the table and its reasons.
//
// Pure; threads: any.
#ifndef DMUOND_SCHEDULER_SCALAR_RANGES_H_
#define DMUOND_SCHEDULER_SCALAR_RANGES_H_

#include <optional>
#include <string>
#include <vector>

#include "scheduler/layout.h"
#include "scheduler/step.h"

namespace dmuond::scheduler {

struct ScalarOutOfRange {
  std::string field;  // "groups[1].beta1"
  std::string value;  // as few digits as tell it from its neighbours
  std::string range;  // "at least 0 and less than 1"
};

// Returns the first number that is not in its range, or nullopt. `parameters` are the job's: the
// eps of a group must be above 0 only where a parameter of the group is on AdamW.
[[nodiscard]] std::optional<ScalarOutOfRange> FindOutOfRange(
    const StepScalars& scalars, const std::vector<Parameter>& parameters);

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_SCALAR_RANGES_H_
