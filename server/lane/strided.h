// Views of the scheduler as boxes of the kernels.
#ifndef DMUOND_SERVER_LANE_STRIDED_H_
#define DMUOND_SERVER_LANE_STRIDED_H_

#include <cstddef>

#include "kernels/ops.h"
#include "scheduler/unit.h"

namespace dmuond::server::lane {

// `base` is the first element of the memory that the view looks into; null gives a template without
// an address, whose offset is OffsetBytes().
[[nodiscard]] inline kernels::StridedBox At(std::byte* base, kernels::DType dtype,
                                            const scheduler::StridedView& view) {
  kernels::StridedBox box;
  box.dtype = dtype;
  if (base != nullptr) {
    box.data = base + view.offset_elements * static_cast<int64_t>(kernels::SizeOf(dtype));
  }
  box.dims = static_cast<int>(view.shape.size());
  for (int d = 0; d < box.dims; ++d) {
    box.shape[d] = view.shape[d];
    box.strides[d] = view.strides[d];
  }
  if (box.dims == 0) {  // a scalar
    box.dims = 1;
    box.shape[0] = 1;
    box.strides[0] = 1;
  }
  return box;
}

[[nodiscard]] inline kernels::StridedBox Flat(void* data, kernels::DType dtype, int64_t elements) {
  kernels::StridedBox box;
  box.data = static_cast<std::byte*>(data);
  box.dtype = dtype;
  box.dims = 1;
  box.shape[0] = elements;
  box.strides[0] = 1;
  return box;
}

[[nodiscard]] inline int64_t OffsetBytes(const scheduler::Slice& slice,
                                         const scheduler::StridedView& view, kernels::DType dtype) {
  return slice.offset_bytes + view.offset_elements * static_cast<int64_t>(kernels::SizeOf(dtype));
}

}  // namespace dmuond::server::lane

#endif  // DMUOND_SERVER_LANE_STRIDED_H_
