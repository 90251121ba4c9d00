// What a lane's memory holds, in bytes: the sums that plans are checked by. lane_program.cc places
// the same things one by one.
#ifndef DMUOND_SCHEDULER_LANE_MEMORY_H_
#define DMUOND_SCHEDULER_LANE_MEMORY_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "scheduler/plan.h"

namespace dmuond::scheduler {

// The reduced gradient in fp32 and the new weight of an owned unit.
[[nodiscard]] int64_t StagingBytes(int64_t elements, ElementType weight_type);

// Scratch of one Newton-Schulz batch, an estimate for planning: X twice and four p x p matrices in
// fp32. The engine asks its device for the true figure (kernels::Ops::MuonWorkspaceBytes).
[[nodiscard]] int64_t WorkspaceBytes(int64_t rows, int64_t cols, int32_t batch);

// Per lane: state, staging and workspace of a plan whose units have owners and batches.
[[nodiscard]] absl::StatusOr<std::vector<int64_t>> LaneMemory(const PlanInputs& inputs,
                                                              const Plan& plan);

// Unit ids per lane, ascending.
[[nodiscard]] std::vector<std::vector<UnitId>> UnitsByLane(const std::vector<Unit>& units,
                                                           int32_t lanes);

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_LANE_MEMORY_H_
