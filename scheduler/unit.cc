#include "scheduler/unit.h"

namespace dmuond::scheduler {

StridedView ViewInSlice(const Box& whole, const Extents& strides, const Box& part) {
  StridedView view{0, ShapeOf(part), strides};
  for (size_t d = 0; d < strides.size(); ++d) {
    view.offset_elements += (part.begin[d] - whole.begin[d]) * strides[d];
  }
  return view;
}

StridedView ViewInBox(const Box& whole, const Box& part) {
  return ViewInSlice(whole, RowMajorStrides(ShapeOf(whole)), part);
}

StridedView ViewInUnit(const Unit& unit, const Box& part) { return ViewInBox(unit.box, part); }

bool IsContiguous(const StridedView& view) {
  int64_t expected = 1;
  for (size_t d = view.shape.size(); d > 0; --d) {
    if (view.shape[d - 1] == 1) continue;
    if (view.strides[d - 1] != expected) return false;
    expected *= view.shape[d - 1];
  }
  return true;
}

}  // namespace dmuond::scheduler
