// Decides which lane reads which part of a snapshot, where the plan of the job is another one than
// when it was saved. So a job is restored onto other nodes, lanes or trainers without a conversion
// of files. Pure.
//
//   absl::StatusOr<RestorePlan> reads = PlanRestore(layout, plan, saved);
//   for (const RestorePart& part : reads->lanes[lane.value()]) …
#ifndef DMUOND_SCHEDULER_RESTORE_PLAN_H_
#define DMUOND_SCHEDULER_RESTORE_PLAN_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "scheduler/layout.h"
#include "scheduler/plan.h"
#include "scheduler/types.h"
#include "scheduler/unit.h"

namespace dmuond::scheduler {

// State of one unit of the plan that was saved under.
struct SavedUnit {
  int32_t parameter = 0;  // index into the layout that is restored to
  UnitKind kind = UnitKind::kMatrix;
  Box box;
  uint64_t updates = 0;  // applied to it
};

// `part` of every state tensor of `saved` (row-major in its box) goes to the same elements of
// `unit` (row-major in the unit's box).
struct RestorePart {
  int32_t saved = 0;  // index into the saved units
  UnitId unit;
  Box part;
  bool operator==(const RestorePart&) const = default;
};

struct RestorePlan {
  std::vector<uint64_t> updates;                // per unit of the plan
  std::vector<std::vector<RestorePart>> lanes;  // per LaneId, by saved, then unit
};

// Every element of every unit is read exactly once. Errors name the parameter and the boxes:
// INVALID_ARGUMENT where saved boxes overlap or leave the shape; FAILED_PRECONDITION where they
// leave a hole, are of the other kind, or where a unit would join boxes with different numbers of
// updates, for which AdamW has no answer.
[[nodiscard]] absl::StatusOr<RestorePlan> PlanRestore(const Layout& layout, const Plan& plan,
                                                      const std::vector<SavedUnit>& saved);

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_RESTORE_PLAN_H_
