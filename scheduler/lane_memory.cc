#include "scheduler/lane_memory.h"

#include <algorithm>

#include "scheduler/batches.h"
#include "scheduler/state_slots.h"

namespace dmuond::scheduler {
namespace {

// What an allocation of so many bytes takes. A lane without any has one of a byte.
int64_t InGranules(const PlanInputs& inputs, int64_t bytes) {
  const int64_t granule = inputs.memory_granule_bytes;
  if (granule == 1) return bytes;
  return (std::max<int64_t>(bytes, 1) + granule - 1) / granule * granule;
}

}  // namespace

int64_t StagingBytes(int64_t elements, ElementType weight_type) {
  return AlignUp(elements * 4) + AlignUp(elements * SizeOf(weight_type));
}

int64_t WorkspaceBytes(int64_t rows, int64_t cols, int32_t batch) {
  const int64_t p = std::min(rows, cols);
  return int64_t{4} * batch * (2 * rows * cols + 4 * p * p);
}

std::vector<std::vector<UnitId>> UnitsByLane(const std::vector<Unit>& units, int32_t lanes) {
  std::vector<std::vector<UnitId>> by_lane(lanes);
  for (const Unit& unit : units) by_lane[unit.owner.value()].push_back(unit.id);
  return by_lane;
}

namespace {

// What lands is read by the lanes of the owner's rail, on the node of each trainer.
void AddLanding(const PlanInputs& inputs, const Plan& plan, std::vector<int64_t>& bytes) {
  for (const Unit& unit : plan.units) {
    const int64_t size = SizeOf(inputs.layout.parameters[unit.parameter].gradient_type);
    const LaneIndex rail(unit.owner.value() % inputs.lanes_per_node);
    for (const Cell& cell : plan.cells[unit.id.value()]) {
      for (const int32_t fragment : cell.fragments) {
        const Trainer& trainer =
            inputs.layout.trainers[inputs.layout.fragments[fragment].rank.value()];
        if (trainer.home == rail) continue;
        bytes[(trainer.node.value() * inputs.lanes_per_node) + rail.value()] +=
            AlignUp(Elements(cell.box) * size);
      }
    }
  }
}

}  // namespace

absl::StatusOr<std::vector<int64_t>> LaneMemory(const PlanInputs& inputs, const Plan& plan) {
  const int32_t lanes = inputs.nodes * inputs.lanes_per_node;
  const std::vector<std::vector<UnitId>> by_lane = UnitsByLane(plan.units, lanes);
  std::vector<int64_t> bytes(lanes, 0);
  for (int32_t lane = 0; lane < lanes; ++lane) {
    const std::vector<Batch> batches = CollectBatches(inputs.layout, by_lane[lane], plan.units);
    (void)MakeSlotClasses(plan.units, batches, bytes[lane]);
    bytes[lane] = InGranules(inputs, bytes[lane]);
    int64_t workspace = 0;
    for (const Batch& batch : batches) {
      if (batch.kind != UnitKind::kMatrix) continue;
      workspace = std::max(workspace, WorkspaceBytes(batch.rows, batch.cols,
                                                     static_cast<int32_t>(batch.units.size())));
    }
    bytes[lane] += workspace;
  }
  std::vector<int64_t> staging(lanes, 0);
  std::vector<int64_t> step_bytes(lanes, 0);
  std::vector<int64_t> adopt_bytes(lanes, 0);
  for (const Unit& unit : plan.units) {
    staging[unit.owner.value()] +=
        StagingBytes(unit.rows * unit.cols, inputs.layout.parameters[unit.parameter].weight_type);
    auto transfers = TransfersOf(inputs, plan, unit.id);
    if (!transfers.ok()) return transfers.status();
    for (const Transfer& t : transfers->partials) {
      step_bytes[t.from.value()] += AlignUp(t.bytes);
      step_bytes[t.to.value()] += AlignUp(t.bytes);
    }
    for (const Transfer& t : transfers->weights) {
      if (!t.in_place) step_bytes[t.from.value()] += AlignUp(t.bytes);
      step_bytes[t.to.value()] += AlignUp(t.bytes);
    }
    for (const Transfer& t : transfers->adopts) {
      adopt_bytes[t.from.value()] += AlignUp(t.bytes);
      adopt_bytes[t.to.value()] += AlignUp(t.bytes);
    }
  }
  std::vector<int64_t> landing(lanes, 0);
  if (inputs.landing_bytes_max > 0) AddLanding(inputs, plan, landing);
  for (int32_t lane = 0; lane < lanes; ++lane) {
    bytes[lane] +=
        InGranules(inputs, staging[lane] + std::max(step_bytes[lane], adopt_bytes[lane]) +
                               std::min(landing[lane], inputs.landing_bytes_max));
  }
  return bytes;
}

}  // namespace dmuond::scheduler
