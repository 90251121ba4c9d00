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
#include "scheduler/summation_tree.h"
#include "scheduler/types.h"

namespace dmuond::scheduler {

inline constexpr int64_t kPieceCut = 65536;  // replicated AdamW tensors are cut at multiples
inline constexpr int64_t kPieceElementsMax = int64_t{1} << 24;

struct PlanInputs {
  Layout layout;
  int32_t nodes = 1;
  int32_t lanes_per_node = 1;
  int64_t lane_memory_bytes = 0;             // 0: no limit
  int64_t bucket_bytes = int64_t{32} << 20;  // gradient bytes per bucket, about
  CostTable costs;                           // empty: the analytic default
};

enum class UnitKind : uint8_t { kMatrix = 1, kPiece = 2 };

// The smallest thing with one owner: a matrix, or a piece of an AdamW tensor.
struct Unit {
  UnitId id;
  UnitKind kind = UnitKind::kMatrix;
  int32_t parameter = 0;
  Box box;           // in the parameter; a matrix has extent 1 in all but its last two dimensions
  int64_t rows = 0;  // matrix: m, n. Piece: 1, elements
  int64_t cols = 0;
  int64_t first_element =
      0;  // piece: where norm blocks are counted from, if its box is one flat range
  BucketId bucket;
  LaneId owner;
  int32_t batch = -1;  // index into the owner's LaneProgram::batches
};

// How one cell of a unit comes together: the box and the ranks whose fragments contribute to it, in
// rank order. SAME: one rank. The order of summation is the fixed tree over this list
// (summation_tree.h).
struct Cell {
  Box box;
  std::vector<int32_t>
      fragments;  // indices into Layout::fragments, by rank; SAME: the lowest rank's only
};

// How good the assignment is. Times in microseconds by the cost model.
struct PlanQuality {
  double makespan_us = 0;     // the slowest lane's update
  double lower_bound_us = 0;  // proven: no assignment is faster
  double gap = 0;             // makespan / lower_bound - 1
  double imbalance = 1;       // slowest lane / mean over lanes
  bool optimal = false;       // proven
};

struct Plan {
  std::vector<Unit> units;  // by parameter, then box
  std::vector<std::vector<Cell>>
      gradient_cells;  // per unit: what is summed or gathered for its gradient
  std::vector<std::vector<Cell>>
      weight_cells;                           // per unit: boxes read from the lowest holder (adopt)
  std::vector<std::vector<int32_t>> holders;  // per unit: all fragments that receive its weights
  int32_t buckets = 0;
  std::vector<int32_t> parameter_bucket;   // per parameter; -1 for route kTrainer
  std::vector<double> lane_load_us;        // per LaneId
  std::vector<int64_t> lane_memory_bytes;  // per LaneId: state + staging, estimated
  PlanQuality quality;
  uint64_t digest = 0;  // of inputs and plan
};

[[nodiscard]] absl::StatusOr<Plan> MakePlan(const PlanInputs& inputs);

// ---- what one lane does ----

// Matrices of one shape, or pieces, that are updated together.
struct Batch {
  UnitKind kind = UnitKind::kMatrix;
  int64_t rows = 0;
  int64_t cols = 0;
  int32_t group = 0;  // kMatrix: all of a batch share muon configuration, i.e. group
  ElementType weight_type = ElementType::kF32;
  std::vector<UnitId> units;
};

// Slots of one size class of a lane's state memory: `slots` places of `slot_bytes` from
// `offset_bytes`; units + spare. A matrix slot holds momentum then master (fp32 rows*cols each); a
// piece slot m, v, master.
struct SlotClass {
  int64_t elements = 0;  // fp32 elements of one tensor in the slot (rows*cols; the largest piece)
  int32_t tensors = 2;   // matrix 2, piece 3
  int64_t slot_bytes = 0;
  int64_t offset_bytes = 0;
  int32_t slots = 0;
  std::vector<UnitId> units;  // units whose state lives in this class
};

// Placement of one owned or relayed unit in the lane's staging memory.
struct StagedUnit {
  UnitId unit;
  int64_t gradient_offset_bytes =
      0;  // fp32, contiguous, the unit's box: reduced (owner) or partial sums
  int64_t weight_offset_bytes = 0;  // weight type, contiguous, the unit's box: what is published
};

// Everything the lane process needs, in the order in which it does it. Units of the lane's rail:
// those it owns, and those that other nodes' lanes on the same rail own and whose fragments live on
// this node.
struct LaneProgram {
  LaneId lane;
  NodeRank node;
  LaneIndex rail;
  std::vector<std::vector<UnitId>>
      collect;  // per bucket: rail units with local contributors or owned here
  std::vector<std::vector<UnitId>> publish;  // per bucket: rail units with local holders
  std::vector<Batch> batches;                // owned, in update order
  std::vector<SlotClass> slot_classes;
  std::vector<StagedUnit> staged;             // sorted by unit
  std::vector<int64_t> partial_offset_bytes;  // scratch for partials that arrive; see transfers.h
  int64_t state_bytes = 0;
  int64_t staging_bytes = 0;
};

[[nodiscard]] absl::StatusOr<LaneProgram> MakeLaneProgram(const PlanInputs& inputs,
                                                          const Plan& plan, LaneId lane);

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_PLAN_H_
