// MakeLaneProgram(): what one lane does, and where in its memory everything lies.
#include "scheduler/lane_program.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
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
    program_.nodes = inputs.nodes;
    program_.lanes_per_node = inputs.lanes_per_node;
    program_.world_size = static_cast<int32_t>(inputs.layout.trainers.size());
    program_.plan_digest = plan.digest;
    program_.plan_units = static_cast<int32_t>(plan.units.size());
    program_.publishers.resize(plan.buckets);
    program_.partials.resize(plan.buckets);
    program_.weights.resize(plan.buckets);
    program_.adopts.resize(plan.buckets);
    for (const Trainer& trainer : inputs.layout.trainers) {
      if (trainer.node != program_.node) continue;
      program_.trainers.push_back(trainer.rank);
      if (trainer.home == program_.rail) program_.at_home.push_back(trainer.rank);
    }
  }

  absl::StatusOr<LaneProgram> Build() {
    std::vector<UnitId> owned;
    for (const Unit& unit : plan_.units) {
      FindPublisher(unit);
      if (unit.owner.value() % inputs_.lanes_per_node != program_.rail.value()) continue;
      if (unit.owner == program_.lane) owned.push_back(unit.id);
      AddUnit(unit);
    }
    program_.batches = CollectBatches(inputs_.layout, owned, plan_.units);
    program_.slot_classes = MakeSlotClasses(plan_.units, program_.batches, program_.state_bytes);
    for (UnitId id : owned) Stage(plan_.units[id.value()]);
    if (absl::Status status = AddTransfers(); !status.ok()) return status;
    if (inputs_.landing_bytes_max > 0) {
      program_.landing_bytes = std::min(BytesThatLand(), inputs_.landing_bytes_max);
      program_.staging_bytes += program_.landing_bytes;
    }
    return std::move(program_);
  }

 private:
  [[nodiscard]] NodeRank NodeOf(int32_t fragment) const {
    return inputs_.layout.trainers[inputs_.layout.fragments[fragment].rank.value()].node;
  }
  [[nodiscard]] bool Here(int32_t fragment) const { return NodeOf(fragment) == program_.node; }

  // Which lanes of this node publish a part of which bucket.
  void FindPublisher(const Unit& unit) {
    Indices& lanes = program_.publishers[unit.bucket.value()];
    const int32_t lane = unit.owner.value() % inputs_.lanes_per_node;
    if (std::find(lanes.begin(), lanes.end(), lane) != lanes.end()) return;
    const Indices& holders = plan_.holders[unit.id.value()];
    if (std::any_of(holders.begin(), holders.end(), [&](int32_t f) { return Here(f); })) {
      lanes.push_back(lane);
    }
  }

  // The program's number of a fragment of this node.
  int32_t Local(int32_t fragment) {
    const auto [found, added] =
        local_.try_emplace(fragment, static_cast<int32_t>(program_.fragments.size()));
    if (added) program_.fragments.push_back(inputs_.layout.FragmentAt(fragment));
    return found->second;
  }

  CellLeaf LeafOf(int32_t fragment, size_t place) {
    return {static_cast<int32_t>(place), inputs_.layout.fragments[fragment].rank, NodeOf(fragment),
            Here(fragment) ? Local(fragment) : -1};
  }

  void AddUnit(const Unit& unit) {
    LaneUnit of{.unit = unit};
    const bool owned = unit.owner == program_.lane;
    if (!owned) of.unit.batch = -1;
    const std::vector<Cell>& cells = plan_.cells[unit.id.value()];
    for (size_t c = 0; c < cells.size(); ++c) {
      const Cell& cell = cells[c];
      LaneCell part{.number = static_cast<int32_t>(c)};
      for (size_t i = 0; i < cell.fragments.size(); ++i) {
        if (owned || Here(cell.fragments[i])) part.leaves.push_back(LeafOf(cell.fragments[i], i));
      }
      if (part.leaves.empty() && !Here(cell.lowest)) continue;
      part.box = cell.box;
      part.lowest = LeafOf(cell.lowest, 0);
      of.cells.push_back(std::move(part));
    }
    for (int32_t f : plan_.holders[unit.id.value()]) {
      if (Here(f)) of.holders.push_back(Local(f));
    }
    if (of.cells.empty() && of.holders.empty()) return;
    AddParameter(unit.parameter);
    program_.units.push_back(std::move(of));
  }

  void AddParameter(int32_t index) {
    // Units are sorted by parameter.
    if (!program_.parameters.empty() && program_.parameters.back().index == index) return;
    const Parameter& parameter = inputs_.layout.parameters[index];
    program_.parameters.push_back({index, parameter.name, parameter.weight_type,
                                   parameter.gradient_type, parameter.group,
                                   parameter.reduce_factor});
  }

  // Gradients of the node's trainers on other devices that the lane reads.
  [[nodiscard]] int64_t BytesThatLand() const {
    int64_t bytes = 0;
    for (const LaneUnit& of : program_.units) {
      const int64_t size = SizeOf(program_.FindParameter(of.unit.parameter)->gradient_type);
      for (const LaneCell& cell : of.cells) {
        bytes += std::count_if(cell.leaves.begin(), cell.leaves.end(),
                               [&](const CellLeaf& leaf) { return program_.IsFarAway(leaf); }) *
                 AlignUp(Elements(cell.box) * size);
      }
    }
    return bytes;
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
    // Who takes no part in a unit sends and receives nothing of it.
    for (const LaneUnit& of : program_.units) {
      const Unit& unit = of.unit;
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
        t.offset_bytes = t.in_place ? OffsetInPlace(program_, of, t) : Take(step_end, t.bytes);
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

  const PlanInputs& inputs_;
  const Plan& plan_;
  LaneProgram program_;
  absl::flat_hash_map<int32_t, int32_t> local_;  // Layout::fragments to program_.fragments
};

}  // namespace

bool LaneProgram::IsFarAway(const CellLeaf& leaf) const {
  return leaf.node == node && !std::binary_search(at_home.begin(), at_home.end(), leaf.rank);
}

const LaneUnit* LaneProgram::Find(UnitId id) const {
  const auto found =
      std::lower_bound(units.begin(), units.end(), id,
                       [](const LaneUnit& of, UnitId wanted) { return of.unit.id < wanted; });
  return found != units.end() && found->unit.id == id ? &*found : nullptr;
}

const LaneParameter* LaneProgram::FindParameter(int32_t index) const {
  const auto found = std::lower_bound(
      parameters.begin(), parameters.end(), index,
      [](const LaneParameter& parameter, int32_t wanted) { return parameter.index < wanted; });
  return found != parameters.end() && found->index == index ? &*found : nullptr;
}

const StagedUnit* LaneProgram::FindStaged(UnitId id) const {
  const auto found =
      std::lower_bound(staged.begin(), staged.end(), id,
                       [](const StagedUnit& of, UnitId wanted) { return of.unit < wanted; });
  return found != staged.end() && found->unit == id ? &*found : nullptr;
}

const LaneCell* FindCell(const LaneUnit& of, int32_t number) {
  const auto found =
      std::lower_bound(of.cells.begin(), of.cells.end(), number,
                       [](const LaneCell& cell, int32_t wanted) { return cell.number < wanted; });
  return found != of.cells.end() && found->number == number ? &*found : nullptr;
}

std::span<const CellLeaf> LeavesOf(const LaneCell& cell, const Subtree& subtree) {
  const auto before = [](const CellLeaf& leaf, int64_t place) { return leaf.place < place; };
  const auto begin =
      std::lower_bound(cell.leaves.begin(), cell.leaves.end(), int64_t{subtree.first}, before);
  const auto end =
      std::lower_bound(begin, cell.leaves.end(), int64_t{subtree.first} + subtree.leaves, before);
  return {begin, end};
}

std::span<const Transfer> TransfersOfUnit(const std::vector<Transfer>& transfers, UnitId unit) {
  const auto begin =
      std::lower_bound(transfers.begin(), transfers.end(), unit,
                       [](const Transfer& t, UnitId wanted) { return t.unit < wanted; });
  const auto end =
      std::upper_bound(begin, transfers.end(), unit,
                       [](UnitId wanted, const Transfer& t) { return wanted < t.unit; });
  return {begin, end};
}

int64_t OffsetInPlace(const LaneProgram& program, const LaneUnit& of, const Transfer& t) {
  return program.FindStaged(of.unit.id)->weight_offset_bytes +
         ViewInUnit(of.unit, t.box).offset_elements * SizeOf(t.type);
}

absl::StatusOr<LaneProgram> MakeLaneProgram(const PlanInputs& inputs, const Plan& plan,
                                            LaneId lane) {
  if (lane.value() < 0 || lane.value() >= inputs.nodes * inputs.lanes_per_node) {
    return absl::InvalidArgumentError(
        absl::StrCat("lane ", lane.value(), " of ", inputs.nodes * inputs.lanes_per_node));
  }
  return ProgramBuilder(inputs, plan, lane).Build();
}

}  // namespace dmuond::scheduler
