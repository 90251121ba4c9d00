#include "scheduler/batches.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "scheduler/state_slots.h"

namespace dmuond::scheduler {
namespace {

// Matrices may share a batch when these are equal.
using BatchKey = std::tuple<int64_t, int64_t, int32_t, ElementType>;
BatchKey KeyOf(const Layout& layout, const Unit& unit) {
  const Parameter& parameter = layout.parameters[unit.parameter];
  return {unit.rows, unit.cols, parameter.group, parameter.weight_type};
}

bool BucketOrder(const std::vector<Unit>& units, UnitId a, UnitId b) {
  const BucketId bucket_a = units[a.value()].bucket;
  const BucketId bucket_b = units[b.value()].bucket;
  return bucket_a != bucket_b ? bucket_a < bucket_b : a < b;
}

}  // namespace

void AssignBatches(const Layout& layout, BatchOrder order,
                   const std::function<std::vector<int32_t>(const Unit&, int32_t)>& split,
                   const std::vector<UnitId>& lane_units, std::vector<Unit>& units) {
  std::vector<UnitId> ordered = lane_units;
  std::sort(ordered.begin(), ordered.end(),
            [&](UnitId a, UnitId b) { return BucketOrder(units, a, b); });
  std::map<BatchKey, std::vector<UnitId>> matrices;
  std::vector<UnitId> pieces;
  for (UnitId id : ordered) {
    const Unit& unit = units[id.value()];
    if (unit.kind == UnitKind::kPiece) {
      pieces.push_back(id);
    } else {
      matrices[KeyOf(layout, unit)].push_back(id);
    }
  }
  std::vector<std::vector<UnitId>> batches;
  for (const auto& [key, ids] : matrices) {
    size_t next = 0;
    for (int32_t size : split(units[ids[0].value()], static_cast<int32_t>(ids.size()))) {
      batches.emplace_back(ids.begin() + next, ids.begin() + next + size);
      next += size;
    }
  }
  for (Batch& batch : BatchPieces(units, pieces)) batches.push_back(std::move(batch.units));
  // A batch of matrices has one shape.
  const auto elements = [&](const std::vector<UnitId>& batch) {
    const Unit& unit = units[batch.front().value()];
    return unit.rows * unit.cols * static_cast<int64_t>(batch.size());
  };
  std::sort(batches.begin(), batches.end(),
            [&](const std::vector<UnitId>& a, const std::vector<UnitId>& b) {
              const bool matrices_a = units[a.front().value()].kind == UnitKind::kMatrix;
              const bool matrices_b = units[b.front().value()].kind == UnitKind::kMatrix;
              if (matrices_a != matrices_b) return matrices_b;
              if (matrices_a && order == BatchOrder::kWeights && elements(a) != elements(b)) {
                return elements(a) > elements(b);
              }
              const BucketId last_a = units[a.back().value()].bucket;
              const BucketId last_b = units[b.back().value()].bucket;
              return last_a != last_b ? last_a < last_b : a.front() < b.front();
            });
  for (size_t i = 0; i < batches.size(); ++i) {
    for (UnitId id : batches[i]) units[id.value()].batch = static_cast<int32_t>(i);
  }
}

std::vector<Batch> CollectBatches(const Layout& layout, const std::vector<UnitId>& lane_units,
                                  const std::vector<Unit>& units) {
  std::vector<Batch> batches;
  for (UnitId id : lane_units) {
    const Unit& unit = units[id.value()];
    if (unit.batch >= static_cast<int32_t>(batches.size())) batches.resize(unit.batch + 1);
    Batch& batch = batches[unit.batch];
    if (batch.units.empty()) {
      const Parameter& parameter = layout.parameters[unit.parameter];
      batch.kind = unit.kind;
      batch.group = parameter.group;
      batch.weight_type = parameter.weight_type;
      if (unit.kind == UnitKind::kMatrix) {
        batch.rows = unit.rows;
        batch.cols = unit.cols;
      }
    }
    batch.units.push_back(id);
  }
  for (Batch& batch : batches) {
    std::sort(batch.units.begin(), batch.units.end(),
              [&](UnitId a, UnitId b) { return BucketOrder(units, a, b); });
  }
  return batches;
}

}  // namespace dmuond::scheduler
