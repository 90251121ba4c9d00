// What crosses nodes: partial sums of gradients to their owner, new weights back, and once per job
// the first weights. All of it along a rail, between the owner and the lane of the same index on
// another node.
#ifndef DMUOND_SCHEDULER_TRANSFERS_H_
#define DMUOND_SCHEDULER_TRANSFERS_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "scheduler/layout.h"
#include "scheduler/summation_tree.h"
#include "scheduler/unit.h"

namespace dmuond::scheduler {

enum class TransferKind : uint8_t { kPartial = 1, kWeight = 2, kAdopt = 3 };

// One message. The sender's and the receiver's programs list it at the same place among their
// messages with each other.
struct Transfer {
  TransferKind kind = TransferKind::kPartial;
  UnitId unit;
  LaneId from;
  LaneId to;
  // What it carries, row-major and contiguous at both ends: a gradient cell (kPartial), what
  // holders on the receiver's node need (kWeight), a weight cell (kAdopt).
  Box box;
  int32_t cell = 0;  // kPartial, kAdopt: index into Plan::cells[unit]
  Subtree subtree;   // kPartial: which leaves of the cell's summation tree are in it
  // A lone gradient fragment travels in its own dtype, sums in fp32, weights in the weight dtype.
  ElementType type = ElementType::kF32;
  int64_t bytes = 0;
  // In the staging memory of the lane whose program this is. kWeight at the owner where the box is
  // consecutive in the unit: inside StagedUnit's weight memory, nothing to pack (`in_place`).
  // Adopts share memory with partials and weights: they are through before the first step is.
  int64_t offset_bytes = 0;
  bool in_place = false;
};

struct Plan;
struct PlanInputs;

// All messages of a unit without offsets, in their fixed order: partials by (cell, first leaf),
// weights by (node, box), adopts by cell.
struct UnitTransfers {
  std::vector<Transfer> partials;
  std::vector<Transfer> weights;
  std::vector<Transfer> adopts;
};
[[nodiscard]] absl::StatusOr<UnitTransfers> TransfersOf(const PlanInputs& inputs, const Plan& plan,
                                                        UnitId unit);

// The leaves' nodes of a cell, in the order of its fragments: input of MaximalSubtrees().
[[nodiscard]] std::vector<NodeRank> LeafNodes(const Layout& layout, const Cell& cell);

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_TRANSFERS_H_
