// What the passes over memory share: 16-byte accesses of consecutive elements, sums over a block.
#ifndef DMUOND_KERNELS_CUDA_PASS_ACCESS_CUH_
#define DMUOND_KERNELS_CUDA_PASS_ACCESS_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace dmuond::kernels::cuda {

constexpr int kPassThreads = 256;
// Elements that a block works on at a time: four 16-byte accesses a thread. A partial sum of
// squares of Muon's momentum pass covers one such stretch.
constexpr int kStretch = kPassThreads * 4 * 4;

struct Four {
  float v[4];
};

__device__ __forceinline__ Four Load4(const float* from, int64_t at, int64_t end) {
  Four four;
  if (at + 4 <= end) {
    const float4 f = __ldcs(reinterpret_cast<const float4*>(from + at));
    four = {{f.x, f.y, f.z, f.w}};
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) four.v[i] = at + i < end ? from[at + i] : 0.0F;
  }
  return four;
}
__device__ __forceinline__ void Store4(float* to, int64_t at, int64_t end, const Four& four) {
  if (at + 4 <= end) {
    __stcs(reinterpret_cast<float4*>(to + at),
           make_float4(four.v[0], four.v[1], four.v[2], four.v[3]));
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (at + i < end) to[at + i] = four.v[i];
    }
  }
}
template <typename T>
__device__ __forceinline__ uint32_t Pair(float low, float high) {
  T pair[2] = {static_cast<T>(low), static_cast<T>(high)};
  return *reinterpret_cast<const uint32_t*>(pair);
}
// Four elements, rounded to the type. `stays`: what the next kernel reads; the rest goes past L2,
// where it would only be in the way.
template <typename T, bool stays = false>
__device__ __forceinline__ void Store4As(T* to, int64_t at, int64_t end, const Four& four) {
  if constexpr (std::is_same_v<T, float>) {
    Store4(to, at, end, four);
  } else {
    if (at + 4 <= end) {
      const uint2 bits = {Pair<T>(four.v[0], four.v[1]), Pair<T>(four.v[2], four.v[3])};
      if constexpr (stays) {
        *reinterpret_cast<uint2*>(to + at) = bits;
      } else {
        __stcs(reinterpret_cast<uint2*>(to + at), bits);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (at + i < end) to[at + i] = static_cast<T>(four.v[i]);
      }
    }
  }
}

// Four elements of any type, widened.
template <typename T>
__device__ __forceinline__ Four Load4As(const T* from, int64_t at, int64_t end) {
  if constexpr (std::is_same_v<T, float>) {
    return Load4(from, at, end);
  } else {
    Four four;
    if (at + 4 <= end) {
      const uint2 bits = __ldcs(reinterpret_cast<const uint2*>(from + at));
      const T* const values = reinterpret_cast<const T*>(&bits);
#pragma unroll
      for (int i = 0; i < 4; ++i) four.v[i] = static_cast<float>(values[i]);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        four.v[i] = at + i < end ? static_cast<float>(from[at + i]) : 0.0F;
      }
    }
    return four;
  }
}

// torch.lerp, operation by operation.
__device__ __forceinline__ float Lerp(float start, float end, float weight) {
  return weight < 0.5F ? start + weight * (end - start) : end - (end - start) * (1.0F - weight);
}

// Sum over a block of `threads`, in one fixed order; valid in thread 0.
template <int threads = kPassThreads>
__device__ __forceinline__ double BlockSum(double x) {
  __shared__ double warps[threads / 32];
#pragma unroll
  for (int d = 16; d > 0; d /= 2) x += __shfl_down_sync(0xFFFFFFFF, x, d);
  __syncthreads();
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
  __syncthreads();
  double sum = 0;
  for (const double w : warps) sum += w;
  return sum;
}

}  // namespace dmuond::kernels::cuda

#endif  // DMUOND_KERNELS_CUDA_PASS_ACCESS_CUH_
