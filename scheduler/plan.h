// The plan: who owns what, in which batches, by which transfers. A pure function of PlanInputs:
// every daemon and every lane computes it for itself and compares digests.
//
//   absl::StatusOr<Plan> plan = MakePlan(inputs);
//   LaneProgram program = MakeLaneProgram(inputs, *plan, LaneId(3));
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
  int64_t bucket_bytes = int64_t{32} << 20;  // gradient bytes per bucket, about
  CostTable costs;                           // empty: the analytic default
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

// ---- what one lane does ----

// Matrices of one shape, or pieces, that are updated together: they need as many free slots at once
// as they are units.
struct Batch {
  UnitKind kind = UnitKind::kMatrix;
  int64_t rows = 0;  // matrices only; pieces of a batch may differ in size
  int64_t cols = 0;
  int32_t group = 0;  // kMatrix: all of a batch share muon configuration, i.e. group
  ElementType weight_type = ElementType::kF32;
  std::vector<UnitId> units;
};

// Slots of one size class of a lane's state memory: `slots` places of `slot_bytes` from
// `offset_bytes` (a multiple of kAlignment, as is slot_bytes). A matrix slot holds momentum then
// master, a piece slot m, v, master: fp32 tensors of the unit's rows*cols elements, contiguous, one
// every tensor_bytes. There are as many spare slots (slots - units) as the largest number of the
// class's units in one batch. Small pieces may live in a class of somewhat larger ones.
struct SlotClass {
  int64_t elements = 0;      // room of one tensor in the slot: the largest unit's rows*cols
  int32_t tensors = 2;       // matrix 2, piece 3
  int64_t tensor_bytes = 0;  // distance between the tensors of a slot: elements * 4, aligned
  int64_t slot_bytes = 0;    // tensors * tensor_bytes
  int64_t offset_bytes = 0;
  int32_t slots = 0;
  std::vector<UnitId> units;  // units whose state lives in this class
};

// Placement of an owned unit in the lane's staging memory; both in the order of ViewInUnit().
struct StagedUnit {
  UnitId unit;
  int64_t gradient_offset_bytes = 0;  // fp32: the reduced gradient, kept until the update is done
  int64_t weight_offset_bytes = 0;    // weight type: what is published
};

// Everything the lane process needs, in the order in which it does it. Units of the lane's rail:
// those it owns, and those that other nodes' lanes on the same rail own and whose fragments live on
// this node. Lists of transfers are subsequences of one order that all lanes of the rail share
// (bucket, unit, cell, place in the tree), so grouped sends and receives of a bucket pair up.
struct LaneProgram {
  LaneId lane;
  NodeRank node;
  LaneIndex rail;
  std::vector<std::vector<UnitId>>
      collect;  // per bucket: rail units with local contributors or owned here
  std::vector<std::vector<UnitId>> publish;     // per bucket: rail units with local holders
  std::vector<std::vector<Transfer>> partials;  // per bucket: gradients to owners on other nodes
  std::vector<std::vector<Transfer>> weights;   // per bucket: new weights from owners
  std::vector<std::vector<Transfer>> adopts;    // per bucket: first weights to owners; once per job
  std::vector<Batch> batches;                   // owned, in update order
  std::vector<SlotClass> slot_classes;
  std::vector<StagedUnit> staged;  // owned units, sorted by unit
  int64_t state_bytes = 0;
  int64_t staging_bytes = 0;  // staged units and the transfers' memory
};

[[nodiscard]] absl::StatusOr<LaneProgram> MakeLaneProgram(const PlanInputs& inputs,
                                                          const Plan& plan, LaneId lane);

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_PLAN_H_
