#include "scheduler/state_slots.h"

#include <algorithm>
#include <functional>
#include <map>
#include <utility>

namespace dmuond::scheduler {
namespace {

int32_t TensorsOf(UnitKind kind) { return kind == UnitKind::kMatrix ? 2 : 3; }

// For every size of piece on the lane: the size whose slots it uses.
std::map<int64_t, int64_t> PieceClasses(const std::vector<int64_t>& elements) {
  std::map<int64_t, int32_t, std::greater<>> counts;
  for (int64_t e : elements) ++counts[e];
  std::vector<PieceSize> sizes;
  sizes.reserve(counts.size());
  for (const auto& [e, count] : counts) sizes.push_back({e, count});
  const std::vector<int32_t> joined = JoinSizes(sizes);
  std::map<int64_t, int64_t> classes;
  for (size_t i = 0; i < sizes.size(); ++i) {
    classes[sizes[i].elements] = sizes[joined[i]].elements;
  }
  return classes;
}

}  // namespace

int64_t TensorBytes(int64_t elements) { return AlignUp(elements * 4); }

int64_t SlotBytes(UnitKind kind, int64_t elements) {
  return TensorsOf(kind) * TensorBytes(elements);
}

std::vector<int32_t> JoinSizes(const std::vector<PieceSize>& sizes) {
  std::vector<int32_t> joined(sizes.size());
  for (size_t i = 0; i < sizes.size(); ++i) {
    joined[i] = static_cast<int32_t>(i);
    if (i == 0) continue;
    const PieceSize& larger = sizes[joined[i - 1]];
    const bool small = sizes[i].elements <= kSmallPieceMax;
    if (small != (larger.elements <= kSmallPieceMax)) continue;
    // Small ones have a spare slot each, which joining does not save; what it saves there is a
    // batch, worth about 1 KiB of memory traffic per piece.
    const int64_t saved = small ? sizes[i].count * int64_t{256} : sizes[i].elements;
    if ((larger.elements - sizes[i].elements) * sizes[i].count <= saved) joined[i] = joined[i - 1];
  }
  return joined;
}

std::vector<Batch> BatchPieces(const std::vector<Unit>& units, const std::vector<UnitId>& pieces) {
  std::vector<Batch> batches;
  Batch small{.kind = UnitKind::kPiece};
  BucketId bucket(-1);
  const auto flush = [&] {
    if (!small.units.empty()) batches.push_back(std::exchange(small, {.kind = UnitKind::kPiece}));
  };
  for (UnitId id : pieces) {
    const Unit& unit = units[id.value()];
    if (unit.cols > kSmallPieceMax) {
      batches.push_back({.kind = UnitKind::kPiece, .units = {id}});
      continue;
    }
    if (unit.bucket != bucket) flush();
    bucket = unit.bucket;
    small.units.push_back(id);
  }
  flush();
  return batches;
}

std::vector<SlotClass> MakeSlotClasses(const std::vector<Unit>& units,
                                       const std::vector<Batch>& batches, int64_t& state_bytes) {
  std::vector<int64_t> pieces;
  for (const Batch& batch : batches) {
    if (batch.kind != UnitKind::kPiece) continue;
    for (UnitId id : batch.units) pieces.push_back(units[id.value()].cols);
  }
  const std::map<int64_t, int64_t> piece_class = PieceClasses(pieces);

  struct Members {
    std::vector<UnitId> units;
    int32_t spare = 0;
  };
  std::map<std::pair<UnitKind, int64_t>, Members> classes;  // by kind and room
  for (const Batch& batch : batches) {
    std::map<std::pair<UnitKind, int64_t>, int32_t> in_batch;
    for (UnitId id : batch.units) {
      const Unit& unit = units[id.value()];
      const int64_t elements = unit.rows * unit.cols;
      const int64_t room = unit.kind == UnitKind::kMatrix ? elements : piece_class.at(elements);
      const auto key = std::pair(unit.kind, room);
      classes[key].units.push_back(id);
      classes[key].spare = std::max(classes[key].spare, ++in_batch[key]);
    }
  }
  std::vector<SlotClass> slot_classes;
  state_bytes = 0;
  for (auto& [key, members] : classes) {
    SlotClass slot_class;
    slot_class.elements = key.second;
    slot_class.tensors = TensorsOf(key.first);
    slot_class.tensor_bytes = TensorBytes(key.second);
    slot_class.slot_bytes = SlotBytes(key.first, key.second);
    slot_class.offset_bytes = state_bytes;
    slot_class.slots = static_cast<int32_t>(members.units.size()) + members.spare;
    slot_class.units = std::move(members.units);
    std::sort(slot_class.units.begin(), slot_class.units.end());
    state_bytes += slot_class.slot_bytes * slot_class.slots;
    slot_classes.push_back(std::move(slot_class));
  }
  return slot_classes;
}

}  // namespace dmuond::scheduler
