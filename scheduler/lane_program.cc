// MakeLaneProgram(): what one lane does, and where in its memory everything lies.
#include <algorithm>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "scheduler/batches.h"
#include "scheduler/lane_memory.h"
#include "scheduler/plan.h"
#include "scheduler/state_slots.h"

namespace dmuond::scheduler {
namespace {

class ProgramBuilder {
 public:
  ProgramBuilder(const PlanInputs& inputs, const Plan& plan, LaneId lane)
      : inputs_(inputs), plan_(plan) {
    program_.lane = lane;
    program_.node = NodeRank(lane.value() / inputs.lanes_per_node);
    program_.rail = LaneIndex(lane.value() % inputs.lanes_per_node);
    program_.collect.resize(plan.buckets);
    program_.publish.resize(plan.buckets);
    program_.partials.resize(plan.buckets);
    program_.weights.resize(plan.buckets);
    program_.adopts.resize(plan.buckets);
  }

  absl::StatusOr<LaneProgram> Build() {
    std::vector<UnitId> owned;
    for (const Unit& unit : plan_.units) {
      if (unit.owner.value() % inputs_.lanes_per_node != program_.rail.value()) continue;
      if (unit.owner == program_.lane) owned.push_back(unit.id);
      AddToLists(unit);
    }
    program_.batches = CollectBatches(inputs_.layout, owned, plan_.units);
    program_.slot_classes = MakeSlotClasses(plan_.units, program_.batches, program_.state_bytes);
    for (UnitId id : owned) Stage(plan_.units[id.value()]);
    if (absl::Status status = AddTransfers(); !status.ok()) return status;
    return std::move(program_);
  }

 private:
  [[nodiscard]] NodeRank NodeOf(int32_t fragment) const {
    return inputs_.layout.trainers[inputs_.layout.fragments[fragment].rank.value()].node;
  }

  void AddToLists(const Unit& unit) {
    const bool owned = unit.owner == program_.lane;
    const auto here = [&](int32_t fragment) { return NodeOf(fragment) == program_.node; };
    const std::vector<Cell>& cells = plan_.cells[unit.id.value()];
    if (owned || std::any_of(cells.begin(), cells.end(), [&](const Cell& cell) {
          return std::any_of(cell.fragments.begin(), cell.fragments.end(), here);
        })) {
      program_.collect[unit.bucket.value()].push_back(unit.id);
    }
    const Indices& holders = plan_.holders[unit.id.value()];
    if (std::any_of(holders.begin(), holders.end(), here)) {
      program_.publish[unit.bucket.value()].push_back(unit.id);
    }
  }

  [[nodiscard]] static int64_t Take(int64_t& end_bytes, int64_t bytes) {
    return std::exchange(end_bytes, end_bytes + AlignUp(bytes));
  }

  void Stage(const Unit& unit) {
    const int64_t elements = unit.rows * unit.cols;
    const ElementType type = inputs_.layout.parameters[unit.parameter].weight_type;
    StagedUnit staged{unit.id, 0, 0};
    staged.gradient_offset_bytes = Take(program_.staging_bytes, elements * 4);
    staged.weight_offset_bytes = Take(program_.staging_bytes, elements * SizeOf(type));
    program_.staged.push_back(staged);
  }

  [[nodiscard]] bool Mine(const Transfer& t) const {
    return t.from == program_.lane || t.to == program_.lane;
  }

  absl::Status AddTransfers() {
    int64_t step_end = program_.staging_bytes;
    int64_t adopt_end = program_.staging_bytes;
    for (const Unit& unit : plan_.units) {
      if (unit.owner.value() % inputs_.lanes_per_node != program_.rail.value()) continue;
      auto transfers = TransfersOf(inputs_, plan_, unit.id);
      if (!transfers.ok()) return transfers.status();
      const int32_t bucket = unit.bucket.value();
      for (Transfer& t : transfers->partials) {
        if (!Mine(t)) continue;
        t.offset_bytes = Take(step_end, t.bytes);
        program_.partials[bucket].push_back(std::move(t));
      }
      for (Transfer& t : transfers->weights) {
        if (!Mine(t)) continue;
        t.in_place = t.in_place && t.from == program_.lane;
        t.offset_bytes = t.in_place ? InPlace(unit, t) : Take(step_end, t.bytes);
        program_.weights[bucket].push_back(std::move(t));
      }
      for (Transfer& t : transfers->adopts) {
        if (!Mine(t)) continue;
        t.offset_bytes = Take(adopt_end, t.bytes);
        program_.adopts[bucket].push_back(std::move(t));
      }
    }
    program_.staging_bytes = std::max(step_end, adopt_end);
    return absl::OkStatus();
  }

  // Where an owner's message lies in the unit's own weight memory.
  [[nodiscard]] int64_t InPlace(const Unit& unit, const Transfer& t) const {
    const auto staged =
        std::lower_bound(program_.staged.begin(), program_.staged.end(), unit.id,
                         [](const StagedUnit& s, UnitId id) { return s.unit < id; });
    return staged->weight_offset_bytes + ViewInUnit(unit, t.box).offset_elements * SizeOf(t.type);
  }

  const PlanInputs& inputs_;
  const Plan& plan_;
  LaneProgram program_;
};

}  // namespace

absl::StatusOr<LaneProgram> MakeLaneProgram(const PlanInputs& inputs, const Plan& plan,
                                            LaneId lane) {
  if (lane.value() < 0 || lane.value() >= inputs.nodes * inputs.lanes_per_node) {
    return absl::InvalidArgumentError(
        absl::StrCat("lane ", lane.value(), " of ", inputs.nodes * inputs.lanes_per_node));
  }
  return ProgramBuilder(inputs, plan, lane).Build();
}

}  // namespace dmuond::scheduler
