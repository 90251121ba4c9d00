// CheckLaneProgram(): whether a program that came from elsewhere can be followed.
#include <algorithm>
#include <cmath>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "scheduler/lane_program.h"
#include "scheduler/limits.h"
#include "scheduler/state_slots.h"

namespace dmuond::scheduler {
namespace {

template <typename... Words>
absl::Status Refuse(const Words&... words) {
  return absl::InvalidArgumentError(absl::StrCat("a lane's program: ", words...));
}

bool Within(int64_t value, int64_t end) { return value >= 0 && value < end; }

bool Known(ElementType type) {
  return type == ElementType::kF32 || type == ElementType::kBF16 || type == ElementType::kF16;
}

// Whether the box has elements, and not more than a tensor can have: what can be computed of it
// does not overflow then.
bool IsSound(const Box& box) {
  if (box.begin.size() != box.end.size() || box.begin.size() > kDimsMax) return false;
  int64_t elements = 1;
  for (size_t d = 0; d < box.begin.size(); ++d) {
    if (box.begin[d] < 0 || box.end[d] <= box.begin[d] || box.end[d] > kElementsMax) return false;
    const int64_t extent = box.end[d] - box.begin[d];
    if (elements > kElementsMax / extent) return false;
    elements *= extent;
  }
  return true;
}

// Whether `bytes` from `offset` on lie in a memory of `size` bytes. REQUIRES: bytes >= 0.
bool Fits(int64_t offset, int64_t bytes, int64_t size) {
  return offset >= 0 && bytes <= size && offset <= size - bytes;
}

class Checker {
 public:
  explicit Checker(const LaneProgram& program) : p_(program) {}

  absl::Status Run() const {
    for (auto part : {&Checker::CheckWorld, &Checker::CheckParameters, &Checker::CheckFragments,
                      &Checker::CheckUnits, &Checker::CheckStaged, &Checker::CheckTransfers,
                      &Checker::CheckBatches, &Checker::CheckSlots}) {
      if (absl::Status status = (this->*part)(); !status.ok()) return status;
    }
    return absl::OkStatus();
  }

 private:
  [[nodiscard]] int32_t lanes() const { return p_.nodes * p_.lanes_per_node; }

  absl::Status CheckWorld() const {
    if (p_.nodes < 1 || p_.lanes_per_node < 1 ||
        int64_t{p_.nodes} * p_.lanes_per_node > kLanesMax) {
      return Refuse(p_.nodes, " nodes of ", p_.lanes_per_node, " lanes");
    }
    if (!Within(p_.lane.value(), lanes()) ||
        p_.node.value() != p_.lane.value() / p_.lanes_per_node ||
        p_.rail.value() != p_.lane.value() % p_.lanes_per_node) {
      return Refuse("lane ", p_.lane.value(), " of ", lanes(), " is on node ", p_.node.value(),
                    ", rail ", p_.rail.value());
    }
    if (p_.world_size < 0 || p_.world_size > kWorldMax) {
      return Refuse(p_.world_size, " trainers");
    }
    for (size_t i = 0; i < p_.trainers.size(); ++i) {
      if (Within(p_.trainers[i].value(), p_.world_size) &&
          (i == 0 || p_.trainers[i - 1] < p_.trainers[i])) {
        continue;
      }
      return Refuse("trainer ", p_.trainers[i].value(), " of ", p_.world_size);
    }
    if (p_.plan_units < 0 || p_.plan_units > kUnitsMax || p_.buckets() > kBucketsMax) {
      return Refuse("a plan of ", p_.plan_units, " units in ", p_.buckets(), " buckets");
    }
    for (const auto* list : {&p_.partials, &p_.weights, &p_.adopts}) {
      if (std::ssize(*list) == p_.buckets()) continue;
      return Refuse("transfers for ", list->size(), " of ", p_.buckets(), " buckets");
    }
    for (const Indices& lanes : p_.publishers) {
      for (const int32_t lane : lanes) {
        if (!Within(lane, p_.lanes_per_node)) return Refuse("publisher ", lane);
      }
    }
    for (const TrainerRank rank : p_.at_home) {
      if (std::binary_search(p_.trainers.begin(), p_.trainers.end(), rank)) continue;
      return Refuse("trainer ", rank.value(), " is at home on another node");
    }
    if (!std::is_sorted(p_.at_home.begin(), p_.at_home.end())) {
      return Refuse("the trainers that are at home are in no order");
    }
    if (p_.state_bytes < 0 || p_.staging_bytes < 0 || p_.landing_bytes < 0 ||
        p_.landing_bytes > p_.staging_bytes) {
      return Refuse(p_.state_bytes, " bytes of state, ", p_.staging_bytes, " of staging, ",
                    p_.landing_bytes, " of landing");
    }
    return absl::OkStatus();
  }

  absl::Status CheckParameters() const {
    int32_t before = -1;
    for (const LaneParameter& parameter : p_.parameters) {
      if (parameter.index <= before || parameter.index >= kParametersMax ||
          !Within(parameter.group, kGroupsMax) || !Known(parameter.weight_type) ||
          !Known(parameter.gradient_type) || !std::isfinite(parameter.reduce_factor)) {
        return Refuse("parameter ", parameter.index, " '", parameter.name, "' of group ",
                      parameter.group);
      }
      before = parameter.index;
    }
    return absl::OkStatus();
  }

  absl::Status CheckFragments() const {
    for (size_t f = 0; f < p_.fragments.size(); ++f) {
      const Fragment& fragment = p_.fragments[f];
      const LaneParameter* parameter = p_.FindParameter(fragment.parameter);
      if (parameter == nullptr || !IsSound(fragment.box) ||
          !std::binary_search(p_.trainers.begin(), p_.trainers.end(), fragment.rank)) {
        return Refuse("fragment ", f, " of trainer ", fragment.rank.value(), ", parameter ",
                      fragment.parameter, ", ", ToString(fragment.box));
      }
      int64_t end_bytes = 0;
      absl::Status status =
          SliceEnd(fragment.gradient, fragment.box, parameter->gradient_type, end_bytes);
      status.Update(SliceEnd(fragment.weight, fragment.box, parameter->weight_type, end_bytes));
      if (!status.ok()) return status;
      if (fragment.gradient.offset_bytes % SizeOf(parameter->gradient_type) != 0 ||
          fragment.weight.offset_bytes % SizeOf(parameter->weight_type) != 0) {
        return Refuse("fragment ", f, " lies at bytes ", fragment.gradient.offset_bytes, " and ",
                      fragment.weight.offset_bytes, " of its arenas, which is between elements");
      }
    }
    return absl::OkStatus();
  }

  absl::Status CheckUnits() const {
    int32_t before = -1;
    for (const LaneUnit& of : p_.units) {
      const Unit& unit = of.unit;
      if (unit.id.value() <= before || unit.id.value() >= p_.plan_units) {
        return Refuse("unit ", unit.id.value(), " after ", before, " of ", p_.plan_units);
      }
      before = unit.id.value();
      if (absl::Status status = CheckUnit(unit); !status.ok()) return status;
      if (p_.Owns(of) && of.cells.empty()) return Refuse("own unit ", before, " has no cells");
      int32_t number = -1;
      for (const LaneCell& cell : of.cells) {
        if (cell.number <= number) return Refuse("cell ", cell.number, " of unit ", before);
        number = cell.number;
        if (absl::Status status = CheckCell(of, cell); !status.ok()) return status;
      }
      for (const int32_t f : of.holders) {
        if (!IsOf(f, unit) || !Intersects(p_.fragments[f].box, unit.box)) {
          return Refuse("fragment ", f, " does not hold unit ", before);
        }
      }
    }
    return absl::OkStatus();
  }

  // Whether there is such a fragment, of the unit's parameter.
  [[nodiscard]] bool IsOf(int32_t fragment, const Unit& unit) const {
    return Within(fragment, std::ssize(p_.fragments)) &&
           p_.fragments[fragment].parameter == unit.parameter &&
           p_.fragments[fragment].box.begin.size() == unit.box.begin.size();
  }

  absl::Status CheckUnit(const Unit& unit) const {
    const bool known = p_.FindParameter(unit.parameter) != nullptr && IsSound(unit.box);
    const size_t dims = unit.box.begin.size();
    bool shaped = false;
    if (known && unit.kind == UnitKind::kMatrix && dims >= 2) {
      shaped = unit.rows == unit.box.end[dims - 2] - unit.box.begin[dims - 2] &&
               unit.cols == unit.box.end[dims - 1] - unit.box.begin[dims - 1] &&
               unit.rows * unit.cols == Elements(unit.box);
    } else if (known && unit.kind == UnitKind::kPiece) {
      shaped = unit.rows == 1 && unit.cols == Elements(unit.box);
    }
    if (!shaped || !Within(unit.first_element, kElementsMax)) {
      return Refuse("unit ", unit.id.value(), " of parameter ", unit.parameter, ", ",
                    ToString(unit.box), ", as ", unit.rows, "x", unit.cols, " from element ",
                    unit.first_element);
    }
    if (!Within(unit.bucket.value(), p_.buckets()) || !OnRail(unit.owner)) {
      return Refuse("unit ", unit.id.value(), " in bucket ", unit.bucket.value(), " of lane ",
                    unit.owner.value());
    }
    return absl::OkStatus();
  }

  [[nodiscard]] bool OnRail(LaneId lane) const {
    return Within(lane.value(), lanes()) && lane.value() % p_.lanes_per_node == p_.rail.value();
  }

  absl::Status CheckCell(const LaneUnit& of, const LaneCell& cell) const {
    const bool owned = p_.Owns(of);
    if (!IsSound(cell.box) || !Contains(of.unit.box, cell.box) || (owned && cell.leaves.empty())) {
      return Refuse("cell ", ToString(cell.box), " of unit ", of.unit.id.value(), ", ",
                    ToString(of.unit.box));
    }
    for (size_t i = 0; i < cell.leaves.size(); ++i) {
      const CellLeaf& leaf = cell.leaves[i];
      const bool placed =
          owned ? leaf.place == static_cast<int32_t>(i)
                : leaf.place >= 0 && (i == 0 || cell.leaves[i - 1].place < leaf.place);
      if (!placed || leaf.place >= kWorldMax || !SoundLeaf(of, cell, leaf) ||
          (!owned && leaf.node != p_.node)) {
        return RefuseLeaf(of, leaf);
      }
    }
    return SoundLeaf(of, cell, cell.lowest) ? absl::OkStatus() : RefuseLeaf(of, cell.lowest);
  }

  [[nodiscard]] bool SoundLeaf(const LaneUnit& of, const LaneCell& cell,
                               const CellLeaf& leaf) const {
    if (!Within(leaf.rank.value(), p_.world_size) || !Within(leaf.node.value(), p_.nodes)) {
      return false;
    }
    if (leaf.node != p_.node) return leaf.fragment == -1;
    return IsOf(leaf.fragment, of.unit) && p_.fragments[leaf.fragment].rank == leaf.rank &&
           Contains(p_.fragments[leaf.fragment].box, cell.box);
  }

  static absl::Status RefuseLeaf(const LaneUnit& of, const CellLeaf& leaf) {
    return Refuse("unit ", of.unit.id.value(), ": trainer ", leaf.rank.value(), " of node ",
                  leaf.node.value(), " at place ", leaf.place, " with fragment ", leaf.fragment);
  }

  absl::Status CheckStaged() const {
    size_t owned = 0;
    for (const LaneUnit& of : p_.units) {
      if (!p_.Owns(of)) continue;
      const int64_t elements = of.unit.rows * of.unit.cols;
      const ElementType type = p_.FindParameter(of.unit.parameter)->weight_type;
      if (owned == p_.staged.size() || p_.staged[owned].unit != of.unit.id ||
          !IsPlace(p_.staged[owned].gradient_offset_bytes, elements * 4) ||
          !IsPlace(p_.staged[owned].weight_offset_bytes, elements * SizeOf(type))) {
        return Refuse("no place in staging memory of ", p_.staging_bytes, " bytes for unit ",
                      of.unit.id.value());
      }
      ++owned;
    }
    if (owned == p_.staged.size()) return absl::OkStatus();
    return Refuse("places in staging memory for ", p_.staged.size(), " units; ", owned,
                  " are owned");
  }

  [[nodiscard]] bool IsPlace(int64_t offset, int64_t bytes) const {
    return Fits(offset, bytes, p_.staging_bytes) && offset % kAlignment == 0;
  }

  absl::Status CheckTransfers() const {
    for (const auto& [kind, list] : {std::pair(TransferKind::kPartial, &p_.partials),
                                     std::pair(TransferKind::kWeight, &p_.weights),
                                     std::pair(TransferKind::kAdopt, &p_.adopts)}) {
      for (int32_t b = 0; b < p_.buckets(); ++b) {
        UnitId before(-1);
        for (const Transfer& t : (*list)[b]) {
          if (t.kind == kind && t.unit >= before && Sound(b, t)) {
            before = t.unit;
            continue;
          }
          return Refuse("transfer of ", t.bytes, " bytes of unit ", t.unit.value(), ", cell ",
                        t.cell, ", from lane ", t.from.value(), " to lane ", t.to.value(),
                        " at byte ", t.offset_bytes, " in bucket ", b);
        }
      }
    }
    return absl::OkStatus();
  }

  [[nodiscard]] bool Sound(int32_t bucket, const Transfer& t) const {
    const LaneUnit* of = p_.Find(t.unit);
    if (of == nullptr || of->unit.bucket.value() != bucket) return false;
    const bool sent = t.from == p_.lane;
    if (sent == (t.to == p_.lane) || !OnRail(t.from) || !OnRail(t.to)) return false;
    if ((t.kind == TransferKind::kWeight ? t.from : t.to) != of->unit.owner) return false;
    if (!IsSound(t.box) || !Contains(of->unit.box, t.box)) return false;
    const LaneParameter& parameter = *p_.FindParameter(of->unit.parameter);
    ElementType type = parameter.weight_type;
    if (t.kind == TransferKind::kPartial) {
      type = t.subtree.leaves == 1 ? parameter.gradient_type : ElementType::kF32;
    }
    if (t.type != type || t.bytes != Elements(t.box) * SizeOf(type)) return false;
    if (t.in_place) {
      return t.kind == TransferKind::kWeight && sent && IsContiguous(ViewInUnit(of->unit, t.box)) &&
             t.offset_bytes == OffsetInPlace(p_, *of, t);
    }
    return IsPlace(t.offset_bytes, t.bytes) &&
           (t.kind == TransferKind::kWeight || SoundCell(*of, t, sent));
  }

  [[nodiscard]] bool SoundCell(const LaneUnit& of, const Transfer& t, bool sent) const {
    const LaneCell* cell = FindCell(of, t.cell);
    if (cell == nullptr || cell->box != t.box) return false;
    if (t.kind == TransferKind::kAdopt) return sent == (cell->lowest.node == p_.node);
    const Subtree& subtree = t.subtree;
    if (subtree.first < 0 || subtree.leaves < 1) return false;
    const std::span<const CellLeaf> leaves = LeavesOf(*cell, subtree);
    return std::ssize(leaves) == subtree.leaves &&
           std::all_of(leaves.begin(), leaves.end(),
                       [&](const CellLeaf& leaf) { return sent == (leaf.node == p_.node); });
  }

  // Counts each owned unit's places in lists that name every one once.
  class Once {
   public:
    explicit Once(const LaneProgram& program)
        : program_(program), seen_(program.staged.size(), false) {}
    // Null where the unit is not owned, or was taken before.
    const LaneUnit* Take(UnitId id) {
      const StagedUnit* staged = program_.FindStaged(id);
      if (staged == nullptr) return nullptr;
      const size_t place = staged - program_.staged.data();
      if (seen_[place]) return nullptr;
      seen_[place] = true;
      return program_.Find(id);
    }
    [[nodiscard]] bool All() const {
      return std::all_of(seen_.begin(), seen_.end(), [](bool seen) { return seen; });
    }

   private:
    const LaneProgram& program_;
    std::vector<bool> seen_;  // per staged unit
  };

  absl::Status CheckBatches() const {
    Once once(p_);
    for (size_t b = 0; b < p_.batches.size(); ++b) {
      const Batch& batch = p_.batches[b];
      if (batch.units.empty()) return Refuse("batch ", b, " is empty");
      for (const UnitId id : batch.units) {
        const LaneUnit* of = once.Take(id);
        if (of == nullptr || !SoundIn(batch, of->unit)) {
          return Refuse("unit ", id.value(), " in batch ", b, " of ", batch.rows, "x", batch.cols);
        }
      }
    }
    return once.All() ? absl::OkStatus() : Refuse("an own unit is in no batch");
  }

  [[nodiscard]] bool SoundIn(const Batch& batch, const Unit& unit) const {
    if (unit.kind != batch.kind) return false;
    if (batch.kind == UnitKind::kPiece) return true;
    const LaneParameter& parameter = *p_.FindParameter(unit.parameter);
    return unit.rows == batch.rows && unit.cols == batch.cols && parameter.group == batch.group &&
           parameter.weight_type == batch.weight_type;
  }

  absl::Status CheckSlots() const {
    Once once(p_);
    for (const SlotClass& c : p_.slot_classes) {
      const bool sound =
          c.elements > 0 && c.elements <= kElementsMax && (c.tensors == 2 || c.tensors == 3) &&
          c.tensor_bytes == TensorBytes(c.elements) && c.slot_bytes == c.tensors * c.tensor_bytes &&
          c.slots >= std::ssize(c.units) && c.slots <= 2 * kUnitsMax;
      int64_t bytes = 0;
      if (!sound || __builtin_mul_overflow(c.slot_bytes, int64_t{c.slots}, &bytes) ||
          !Fits(c.offset_bytes, bytes, p_.state_bytes) || c.offset_bytes % kAlignment != 0) {
        return Refuse(c.slots, " slots of ", c.slot_bytes, " bytes from byte ", c.offset_bytes,
                      " of ", p_.state_bytes);
      }
      for (const UnitId id : c.units) {
        const LaneUnit* of = once.Take(id);
        if (of == nullptr || of->unit.rows * of->unit.cols > c.elements ||
            c.tensors != (of->unit.kind == UnitKind::kMatrix ? 2 : 3)) {
          return Refuse("unit ", id.value(), " in slots of ", c.tensors, " times ", c.elements,
                        " elements");
        }
      }
    }
    return once.All() ? absl::OkStatus() : Refuse("an own unit has no slot");
  }

  const LaneProgram& p_;
};

}  // namespace

absl::Status CheckLaneProgram(const LaneProgram& program) { return Checker(program).Run(); }

}  // namespace dmuond::scheduler
