#include "server/daemon/memory/state_transfer.h"

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

void ForRuns(const Box& a, const Box& b, absl::FunctionRef<void(int64_t, int64_t, int64_t)> visit) {
  const Box both = scheduler::Intersect(a, b);
  if (scheduler::Empty(both)) return;
  if (both.begin.empty()) return visit(0, 0, 1);  // a scalar
  const Extents a_strides = RowMajorStrides(a);
  const Extents b_strides = RowMajorStrides(b);
  const size_t last = both.begin.size() - 1;
  const int64_t run = both.end[last] - both.begin[last];
  Extents at = both.begin;
  for (;;) {
    int64_t in_a = 0;
    int64_t in_b = 0;
    for (size_t d = 0; d <= last; ++d) {
      in_a += (at[d] - a.begin[d]) * a_strides[d];
      in_b += (at[d] - b.begin[d]) * b_strides[d];
    }
    visit(in_a, in_b, run);
    size_t d = last;
    while (d > 0 && ++at[d - 1] == both.end[d - 1]) {
      at[d - 1] = both.begin[d - 1];
      --d;
    }
    if (d == 0) return;
  }
}

void CopyIntersection(const Box& from_box, const StateTensor& from, const Box& to_box,
                      StateTensor& to) {
  ForRuns(from_box, to_box, [&](int64_t source, int64_t target, int64_t run) {
    std::copy_n(from.begin() + source, run, to.begin() + target);
  });
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

}  // namespace dmuond::server
