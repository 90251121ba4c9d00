#include "scheduler/transfers.h"

#include <algorithm>
#include <map>
#include <utility>

#include "scheduler/fragment_algebra.h"
#include "scheduler/plan.h"

namespace dmuond::scheduler {
namespace {

// What the holders on one node need of a unit.
absl::StatusOr<std::vector<Box>> NeededBoxes(const Unit& unit, const std::vector<Box>& held) {
  for (const Box& box : held) {
    if (Contains(box, unit.box)) return std::vector<Box>{unit.box};
  }
  return Union(unit.box, held);
}

}  // namespace

std::vector<NodeRank> LeafNodes(const Layout& layout, const Cell& cell) {
  std::vector<NodeRank> nodes;
  nodes.reserve(cell.fragments.size());
  for (int32_t f : cell.fragments) {
    nodes.push_back(layout.trainers[layout.fragments[f].rank.value()].node);
  }
  return nodes;
}

absl::StatusOr<UnitTransfers> TransfersOf(const PlanInputs& inputs, const Plan& plan, UnitId id) {
  UnitTransfers transfers;
  if (inputs.nodes == 1) return transfers;
  const Layout& layout = inputs.layout;
  const Unit& unit = plan.units[id.value()];
  const Parameter& parameter = layout.parameters[unit.parameter];
  const NodeRank home(unit.owner.value() / inputs.lanes_per_node);
  const int32_t rail = unit.owner.value() % inputs.lanes_per_node;
  const auto lane_on = [&](NodeRank node) {
    return LaneId(node.value() * inputs.lanes_per_node + rail);
  };

  const auto node_of = [&](int32_t fragment) {
    return layout.trainers[layout.fragments[fragment].rank.value()].node;
  };

  const std::vector<Cell>& cells = plan.cells[id.value()];
  for (size_t c = 0; c < cells.size(); ++c) {
    const bool all_here = std::all_of(cells[c].fragments.begin(), cells[c].fragments.end(),
                                      [&](int32_t f) { return node_of(f) == home; });
    if (all_here) continue;
    for (const Subtree& subtree : MaximalSubtrees(LeafNodes(layout, cells[c]))) {
      if (subtree.node == home) continue;
      Transfer t{.kind = TransferKind::kPartial,
                 .unit = id,
                 .from = lane_on(subtree.node),
                 .to = unit.owner,
                 .box = cells[c].box,
                 .cell = static_cast<int32_t>(c),
                 .subtree = subtree};
      t.type = subtree.leaves == 1 ? parameter.gradient_type : ElementType::kF32;
      t.bytes = Elements(t.box) * SizeOf(t.type);
      transfers.partials.push_back(std::move(t));
    }
  }

  std::map<NodeRank, std::vector<Box>> held_on;
  for (int32_t f : plan.holders[id.value()]) {
    const NodeRank node = node_of(f);
    if (node != home) held_on[node].push_back(layout.fragments[f].box);
  }
  for (const auto& [node, held] : held_on) {
    auto boxes = NeededBoxes(unit, held);
    if (!boxes.ok()) return boxes.status();
    for (Box& box : *boxes) {
      Transfer t{.kind = TransferKind::kWeight,
                 .unit = id,
                 .from = unit.owner,
                 .to = lane_on(node),
                 .box = std::move(box),
                 .type = parameter.weight_type};
      t.bytes = Elements(t.box) * SizeOf(t.type);
      t.in_place = IsContiguous(ViewInUnit(unit, t.box));  // at the sender
      transfers.weights.push_back(std::move(t));
    }
  }

  for (size_t c = 0; c < cells.size(); ++c) {
    const NodeRank node = node_of(cells[c].lowest);
    if (node == home) continue;
    Transfer t{.kind = TransferKind::kAdopt,
               .unit = id,
               .from = lane_on(node),
               .to = unit.owner,
               .box = cells[c].box,
               .cell = static_cast<int32_t>(c),
               .type = parameter.weight_type};
    t.bytes = Elements(t.box) * SizeOf(t.type);
    transfers.adopts.push_back(std::move(t));
  }
  return transfers;
}

}  // namespace dmuond::scheduler
