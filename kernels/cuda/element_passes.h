// Passes over consecutive elements: the ordered sum of replicas, sums of squares, AdamW. Several
// tensors of any sizes a launch. All enqueue into a stream and return; addresses are multiples of
// 16 bytes.
#ifndef DMUOND_KERNELS_CUDA_ELEMENT_PASSES_H_
#define DMUOND_KERNELS_CUDA_ELEMENT_PASSES_H_

#include <cuda_runtime.h>

#include <cstdint>
#include <span>

#include "kernels/cuda/muon_passes.h"

namespace dmuond::kernels::cuda {

inline constexpr int kSumSourcesMax = 8;

// destination = factor * (sum of `count` leaves of one type), by the fixed tree of kernels/ops.h:
// adjacent pairs, then pairs of pairs. nullptr: absent. All absent: zero. One fp32 leaf with factor
// 1 is a copy of bits.
struct SumPass {
  float* destination = nullptr;
  int64_t elements = 0;
  const void* sources[kSumSourcesMax] = {};
  int count = 0;
  float factor = 1;
};
cudaError_t LaunchSum(cudaStream_t stream, WeightType type, std::span<const SumPass> passes);

// sums[i] = sum of squares over the intersection of data with block first_element / 65536 + i.
struct SquaresPass {
  const float* data = nullptr;
  int64_t elements = 0;
  int64_t first_element = 0;
  double* sums = nullptr;  // memory that the device can write
};
cudaError_t LaunchSquares(cudaStream_t stream, std::span<const SquaresPass> passes);

// Equal to torch.optim.AdamW in fp32. weight_out may be nullptr.
struct AdamWPass {
  int64_t elements = 0;
  const float* gradient = nullptr;
  const float* m_in = nullptr;
  float* m_out = nullptr;
  const float* v_in = nullptr;
  float* v_out = nullptr;
  const float* master_in = nullptr;
  float* master_out = nullptr;
  void* weight_out = nullptr;
  PassScalars scalars{};
};
cudaError_t LaunchAdamW(cudaStream_t stream, WeightType weight, std::span<const AdamWPass> passes);

}  // namespace dmuond::kernels::cuda

#endif  // DMUOND_KERNELS_CUDA_ELEMENT_PASSES_H_
