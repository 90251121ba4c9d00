#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/cuda/tuner_data.h"

namespace dmuond::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocks = 1056;

__device__ __forceinline__ uint64_t Mix(uint64_t x) {
  x += 0x9E3779B97F4A7C15ULL;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  return x ^ (x >> 31);
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    RandomKernel(T* values, int64_t count, uint64_t seed, float scale) {
  for (int64_t i = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * kThreads) {
    const uint64_t bits = Mix(Mix(seed) + static_cast<uint64_t>(i));
    // The sum of four uniform values has variance 4/12.
    float sum = -2;
    for (int k = 0; k < 4; ++k) {
      sum += static_cast<float>((bits >> (16 * k)) & 0xFFFF) * (1.0F / 65536);
    }
    values[i] = static_cast<T>(scale * 1.7320508F * sum);
  }
}

__global__ void __launch_bounds__(kThreads)
    CompareKernel(const float* a, const float* b, int64_t count, Difference* to) {
  double squares = 0;
  double reference = 0;
  unsigned long long not_finite = 0;
  unsigned long long different = 0;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * kThreads) {
    const double d = static_cast<double>(a[i]) - static_cast<double>(b[i]);
    squares += d * d;
    reference += static_cast<double>(b[i]) * static_cast<double>(b[i]);
    not_finite += isfinite(a[i]) ? 0 : 1;
    different += __float_as_uint(a[i]) != __float_as_uint(b[i]) ? 1 : 0;
  }
  for (int s = 16; s > 0; s /= 2) {
    squares += __shfl_down_sync(0xFFFFFFFF, squares, s);
    reference += __shfl_down_sync(0xFFFFFFFF, reference, s);
    not_finite += __shfl_down_sync(0xFFFFFFFF, not_finite, s);
    different += __shfl_down_sync(0xFFFFFFFF, different, s);
  }
  if (threadIdx.x % 32 != 0) return;
  atomicAdd(&to->squares, squares);
  atomicAdd(&to->reference, reference);
  static_assert(sizeof(to->different) == sizeof(different));
  atomicAdd(reinterpret_cast<unsigned long long*>(&to->not_finite), not_finite);
  atomicAdd(reinterpret_cast<unsigned long long*>(&to->different), different);
}

}  // namespace

cudaError_t LaunchRandom(cudaStream_t stream, WeightType type, void* values, int64_t count,
                         uint64_t seed, float scale) {
  const auto launch = [&](auto* typed) {
    RandomKernel<<<kBlocks, kThreads, 0, stream>>>(typed, count, seed, scale);
    return cudaGetLastError();
  };
  switch (type) {
    case WeightType::kF16:
      return launch(static_cast<__half*>(values));
    case WeightType::kBF16:
      return launch(static_cast<__nv_bfloat16*>(values));
    default:
      return launch(static_cast<float*>(values));
  }
}

cudaError_t LaunchCompare(cudaStream_t stream, const float* a, const float* b, int64_t count,
                          Difference* to) {
  CompareKernel<<<kBlocks, kThreads, 0, stream>>>(a, b, count, to);
  return cudaGetLastError();
}

}  // namespace dmuond::kernels::cuda
