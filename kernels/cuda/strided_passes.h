// Sums, copies and fills of boxes of any strides: what element_passes.h cannot take 16 bytes at a
// time. All enqueue into a stream and return.
#ifndef DMUOND_KERNELS_CUDA_STRIDED_PASSES_H_
#define DMUOND_KERNELS_CUDA_STRIDED_PASSES_H_

#include <cuda_runtime.h>

#include <cstdint>
#include <span>

#include "kernels/cuda/muon_passes.h"

namespace dmuond::kernels::cuda {

// So many sources of a sum travel with its launch, whose parameters have at most 32 KiB; more lie
// in device memory.
inline constexpr int kStridedSourcesMax = 256;
inline constexpr int kStridedDimsMax = 8;

struct StridedOperand {
  const void* data = nullptr;  // nullptr: absent
  int64_t strides[kStridedDimsMax] = {};
  WeightType type = WeightType::kF32;
  uint8_t level = 0;  // stands for 2^level leaves
};

// destination = factor * (ordered sum of the sources); kernels/ops.h, SumTask.
struct StridedSum {
  float* destination = nullptr;
  int64_t elements = 0;
  int dims = 0;
  int64_t shape[kStridedDimsMax] = {};
  int64_t strides[kStridedDimsMax] = {};
  int count = 0;
  float factor = 1;
  StridedOperand sources[kStridedSourcesMax];
};
cudaError_t LaunchStridedSum(cudaStream_t stream, const StridedSum& sum);
// The same of any number of sources (those in `sum` are not looked at), which may be gone when this
// returns. Takes device memory for them until the sum is done.
cudaError_t LaunchStridedSumOfMany(cudaStream_t stream, StridedSum sum,
                                   std::span<const StridedOperand> sources);

// Elements are converted where the types differ, and moved as bits where they do not.
struct StridedCopy {
  void* destination = nullptr;
  WeightType type = WeightType::kF32;
  int64_t elements = 0;
  int dims = 0;
  int64_t shape[kStridedDimsMax] = {};
  int64_t strides[kStridedDimsMax] = {};
  StridedOperand source;  // nullptr: every element becomes `value`
  float value = 0;
};
cudaError_t LaunchStridedCopy(cudaStream_t stream, const StridedCopy& copy);

}  // namespace dmuond::kernels::cuda

#endif  // DMUOND_KERNELS_CUDA_STRIDED_PASSES_H_
