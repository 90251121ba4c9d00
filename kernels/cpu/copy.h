// Copy, conversion and filling of strided boxes, and widening of any run to contiguous fp32.
// Threads: all functions from any.
#ifndef DMUOND_KERNELS_CPU_COPY_H_
#define DMUOND_KERNELS_CPU_COPY_H_

#include <cstdint>

#include "kernels/cpu/box_walk.h"
#include "kernels/ops.h"

namespace dmuond::kernels::cpu {

// Copies the elements [begin, end) of `walk`, whose boxes are dst and src in this order.
void CopyElements(const BoxWalk& walk, const StridedBox& dst, const StridedBox& src, int64_t begin,
                  int64_t end);
// Fills the elements [begin, end) of `walk`, whose only box is dst.
void FillElements(const BoxWalk& walk, const StridedBox& dst, float value, int64_t begin,
                  int64_t end);

// dst[i] = element offset + i*stride of `data`, widened, for i in [0, length).
void LoadRun(DType dtype, const std::byte* data, int64_t offset, int64_t stride, float* dst,
             int64_t length);
// Element offset + i*stride of `data` = src[i], rounded, for i in [0, length).
void StoreRun(DType dtype, std::byte* data, int64_t offset, int64_t stride, const float* src,
              int64_t length);

}  // namespace dmuond::kernels::cpu

#endif  // DMUOND_KERNELS_CPU_COPY_H_
