#include "server/daemon/state_transfer.h"

#include <algorithm>
#include <cstddef>
#include <utility>

namespace dmuond::server {
namespace {

using scheduler::Box;
using scheduler::Extents;

Extents RowMajorStrides(const Box& box) {
  Extents strides(box.begin.size(), 1);
  for (size_t d = strides.size(); d-- > 1;) {
    strides[d - 1] = strides[d] * (box.end[d] - box.begin[d]);
  }
  return strides;
}

}  // namespace

void CopyIntersection(const Box& from_box, const StateTensor& from, const Box& to_box,
                      StateTensor& to) {
  const Box both = scheduler::Intersect(from_box, to_box);
  if (scheduler::Empty(both)) return;
  if (both.begin.empty()) {  // a scalar
    to[0] = from[0];
    return;
  }
  const Extents from_strides = RowMajorStrides(from_box);
  const Extents to_strides = RowMajorStrides(to_box);
  const size_t last = both.begin.size() - 1;
  const int64_t run = both.end[last] - both.begin[last];
  Extents at = both.begin;
  for (;;) {
    int64_t source = 0;
    int64_t target = 0;
    for (size_t d = 0; d <= last; ++d) {
      source += (at[d] - from_box.begin[d]) * from_strides[d];
      target += (at[d] - to_box.begin[d]) * to_strides[d];
    }
    std::copy_n(from.begin() + source, run, to.begin() + target);
    size_t d = last;
    while (d > 0 && ++at[d - 1] == both.end[d - 1]) {
      at[d - 1] = both.begin[d - 1];
      --d;
    }
    if (d == 0) return;
  }
}

std::vector<Box> SplitBox(const Box& box, int64_t elements_max) {
  if (scheduler::Empty(box)) return {};
  size_t dim = 0;
  while (dim < box.begin.size() && box.end[dim] - box.begin[dim] == 1) ++dim;
  if (scheduler::Elements(box) <= elements_max || dim == box.begin.size()) return {box};
  Box first = box;
  Box second = box;
  first.end[dim] = second.begin[dim] = box.begin[dim] + ((box.end[dim] - box.begin[dim]) / 2);
  std::vector<Box> parts = SplitBox(first, elements_max);
  for (Box& part : SplitBox(second, elements_max)) parts.push_back(std::move(part));
  return parts;
}

bool HasState(scheduler::UnitKind unit, v1::StateKind kind) {
  switch (kind) {
    case v1::STATE_KIND_MASTER:
    case v1::STATE_KIND_STEP:
      return true;
    case v1::STATE_KIND_MOMENTUM:
      return unit == scheduler::UnitKind::kMatrix;
    case v1::STATE_KIND_EXP_AVG:
    case v1::STATE_KIND_EXP_AVG_SQ:
      return unit == scheduler::UnitKind::kPiece;
    default:
      return false;
  }
}

void PendingState::Add(const scheduler::Unit& unit, v1::StateKind kind, const Box& box,
                       const StateTensor& data) {
  Entry& entry = entries_[{unit.id, kind}];
  entry.data.resize(static_cast<size_t>(scheduler::Elements(unit.box)));
  CopyIntersection(box, data, unit.box, entry.data);
  entry.elements_given += scheduler::Elements(box);
}

}  // namespace dmuond::server
