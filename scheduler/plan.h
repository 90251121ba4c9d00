// The plan: who owns what, in which batches, by which transfers. A pure function of PlanInputs:
// every daemon computes it for itself, and their digests are compared. A lane gets its own part of
// it (lane_program.h).
//
//   absl::StatusOr<Plan> plan = MakePlan(inputs);
#ifndef DMUOND_SCHEDULER_PLAN_H_
#define DMUOND_SCHEDULER_PLAN_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "scheduler/cost_model.h"
#include "scheduler/layout.h"
#include "scheduler/limits.h"
#include "scheduler/transfers.h"
#include "scheduler/types.h"
#include "scheduler/unit.h"

namespace dmuond::scheduler {

struct PlanInputs {
  Layout layout;
  int32_t nodes = 1;
  int32_t lanes_per_node = 1;
  int64_t lane_memory_bytes = 0;             // per lane, state + staging + workspace; 0: no limit
  int64_t memory_granule_bytes = 1;          // devices give memory in multiples of it
  int64_t bucket_bytes = int64_t{32} << 20;  // gradient bytes per bucket, about
  // Per lane: room that copy engines bring other devices' gradients to before they are added
  // (LaneProgram::landing_bytes) is at most so much; 0: none, they are read where they lie.
  int64_t landing_bytes_max = 0;
  CostTable costs;  // empty: the analytic default
  // Per hyperparameter group, what runs on its matrices; others: the default preset's.
  std::vector<Iteration> iterations;
};

// How good the assignment is. Times in microseconds by the cost model.
struct PlanQuality {
  double makespan_us = 0;     // the slowest lane's update
  double lower_bound_us = 0;  // proven: no assignment with batches of at most kBatchMax is faster
  double gap = 0;             // makespan / lower_bound - 1
  double imbalance = 1;       // slowest lane / mean over lanes
  bool optimal = false;       // proven
};

struct Plan {
  std::vector<Unit> units;               // by parameter, then box
  std::vector<std::vector<Cell>> cells;  // per unit: what comes together to its gradient
  std::vector<Indices> holders;          // per unit: all fragments that receive its weights
  int32_t buckets = 0;
  std::vector<int32_t> parameter_bucket;   // per parameter; -1 for route kTrainer
  std::vector<double> lane_load_us;        // per LaneId
  std::vector<int64_t> lane_memory_bytes;  // per LaneId: state + staging, estimated
  PlanQuality quality;
  uint64_t digest = 0;  // of inputs and plan
};

// INVALID_ARGUMENT for a trainer on a node or lane that is not there, RESOURCE_EXHAUSTED (naming
// both values) when the lanes' memory does not suffice or a limit of limits.h is passed. REQUIRES:
// inputs.layout was made by MergeRegistrations().
[[nodiscard]] absl::StatusOr<Plan> MakePlan(const PlanInputs& inputs);

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_PLAN_H_
