#include "kernels/cpu/box_walk.h"

#include <cstdlib>

namespace dmuond::kernels::cpu {

void BoxWalk::SetShape(const StridedBox& box) {
  dims_ = box.dims;
  shape_ = box.shape;
  for (int d = 0; d < dims_; ++d) elements_ *= shape_[d];
}

bool BoxWalk::contiguous_runs() const {
  if (shape_[dims_ - 1] == 1) return true;
  return std::all_of(boxes_.begin(), boxes_.end(),
                     [this](const Dims& strides) { return strides[dims_ - 1] == 1; });
}

void BoxWalk::Simplify() {
  SortDims();
  MergeDims();
}

// Stable insertion sort, largest stride of the first box outermost.
void BoxWalk::SortDims() {
  for (int i = 1; i < dims_; ++i) {
    for (int d = i; d > 0 && std::abs(boxes_[0][d - 1]) < std::abs(boxes_[0][d]); --d) {
      std::swap(shape_[d - 1], shape_[d]);
      for (Dims& strides : boxes_) std::swap(strides[d - 1], strides[d]);
    }
  }
}

void BoxWalk::MergeDims() {
  int kept = 0;
  for (int d = 0; d < dims_; ++d) {
    if (shape_[d] == 1) continue;
    const bool follows = kept > 0 && std::all_of(boxes_.begin(), boxes_.end(), [&](const Dims& s) {
                           return s[kept - 1] == s[d] * shape_[d];
                         });
    if (follows) {
      shape_[kept - 1] *= shape_[d];
      for (Dims& strides : boxes_) strides[kept - 1] = strides[d];
      continue;
    }
    shape_[kept] = shape_[d];
    for (Dims& strides : boxes_) strides[kept] = strides[d];
    ++kept;
  }
  if (kept == 0) {  // a single element
    shape_[0] = 1;
    for (Dims& strides : boxes_) strides[0] = 1;
    kept = 1;
  }
  dims_ = kept;
}

}  // namespace dmuond::kernels::cpu
