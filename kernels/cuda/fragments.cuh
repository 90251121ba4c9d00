// Boxes of 64 x 64 16-bit elements in shared memory, as the copy engine writes them (128-byte
// swizzle), and what a warpgroup's threads hold of them: the accumulators of a wgmma of 64 rows. A
// box's `x` is a thread's 32 fp32 values, `packed` its 16 pairs of rounded ones.
#ifndef DMUOND_KERNELS_CUDA_FRAGMENTS_CUH_
#define DMUOND_KERNELS_CUDA_FRAGMENTS_CUH_

#include "kernels/cuda/gemm.h"
#include "kernels/cuda/ptx.cuh"

namespace dmuond::kernels::cuda {

constexpr int kBoxBytes = 64 * 64 * 2;

__device__ __forceinline__ float Load(const DeviceScalar& scalar, int batch) {
  return scalar.values == nullptr ? scalar.factor : scalar.factor * __ldg(scalar.values + batch);
}

// A thread of a warpgroup.
struct GroupThread {
  int thread;
  int warp;
  int lane;
};
__device__ __forceinline__ GroupThread ThisGroupThread() {
  const int thread = static_cast<int>(threadIdx.x % 128);
  return {thread, thread / 32, thread % 32};
}

template <typename T>
__device__ __forceinline__ uint32_t Pack(float low, float high) {
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
}
template <typename T>
__device__ __forceinline__ float2 Unpack(uint32_t pair) {
  if constexpr (std::is_same_v<T, __half>) {
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
  } else {
    return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&pair));
  }
}

// Address of the row that this lane gives to ldmatrix and stmatrix for the 8 x 8 blocks
// (2 warp, j), (2 warp + 1, j), (2 warp, j + 1), (2 warp + 1, j + 1) of a box.
__device__ __forceinline__ uint32_t FragmentRow(const GroupThread& place, uint32_t box, int j) {
  const int r = place.lane % 8;
  const int m = place.lane / 8;
  return box + (place.warp * 16 + (m & 1) * 8 + r) * 128 + (((j + (m >> 1)) ^ r) * 16);
}
// The same of the box's transpose, for transposing ldmatrix and stmatrix.
__device__ __forceinline__ uint32_t TransposedRow(const GroupThread& place, uint32_t box, int j) {
  const int r = place.lane % 8;
  const int m = place.lane / 8;
  const int row = (j + (m >> 1)) * 8 + r;
  const int col = place.warp * 2 + (m & 1);
  return box + row * 128 + ((col ^ r) * 16);
}

// x = scale * x + factor * (the box's elements). The same roundings wherever it is compiled.
template <typename T>
__device__ __forceinline__ void AddBox(float* x, float scale, float factor, uint32_t box,
                                       const GroupThread& place) {
#pragma unroll
  for (int j = 0; j < 8; j += 2) {
    uint32_t v[4];
    ptx::LoadMatrix4(FragmentRow(place, box, j), v);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 c = Unpack<T>(v[i]);
      float* const to = x + (j * 2 + i) * 2;
      to[0] = __fmaf_rn(factor, c.x, scale * to[0]);
      to[1] = __fmaf_rn(factor, c.y, scale * to[1]);
    }
  }
}

// Rounds a box. `diagonal` is added to its diagonal.
template <typename T>
__device__ __forceinline__ void RoundBox(float* x, float diagonal, const GroupThread& place,
                                         uint32_t (&packed)[16]) {
  if (diagonal != 0) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int r = place.warp * 16 + place.lane / 4 + i % 2 * 8;
      const int c = place.lane % 4 * 2 + i / 2 * 8;
      x[i * 2] += r == c ? diagonal : 0.0F;
      x[i * 2 + 1] += r == c + 1 ? diagonal : 0.0F;
    }
  }
#pragma unroll
  for (int i = 0; i < 16; ++i) packed[i] = Pack<T>(x[i * 2], x[i * 2 + 1]);
}

// A box on the diagonal: what lies on and below it, and its mirror image above.
__device__ __forceinline__ void StageDiagonal(const uint32_t (&packed)[16],
                                              const GroupThread& place, uint32_t box) {
  const int row = place.lane / 4;
  const int col = place.lane % 4 * 2;
  const uint32_t low = row >= col ? 0xFFFF : 0;
  const uint32_t high = row >= col + 1 ? 0xFFFF0000 : 0;
  const auto mirrored = [&](uint32_t value, uint32_t transposed) {
    return (value & (low | high)) | (transposed & ~(low | high));
  };
#pragma unroll
  for (int j = 0; j < 4; ++j) {  // 16 columns at a time
    if (j > place.warp) break;
    // 8 x 8 blocks (0, 0), (1, 0), (0, 1), (1, 1) of these 16 columns.
    uint32_t v[4] = {packed[j * 4], packed[j * 4 + 1], packed[j * 4 + 2], packed[j * 4 + 3]};
    if (j == place.warp) {
      v[0] = mirrored(v[0], ptx::TransposeMatrix(v[0]));
      v[2] = ptx::TransposeMatrix(v[1]);
      v[3] = mirrored(v[3], ptx::TransposeMatrix(v[3]));
    } else {
      ptx::StoreMatrix4Transposed(TransposedRow(place, box, j * 2), v[0], v[1], v[2], v[3]);
    }
    ptx::StoreMatrix4(FragmentRow(place, box, j * 2), v[0], v[1], v[2], v[3]);
  }
}

__device__ __forceinline__ void StageBox(const uint32_t (&packed)[16], const GroupThread& place,
                                         uint32_t box) {
#pragma unroll
  for (int j = 0; j < 8; j += 2) {
    const uint32_t* v = packed + j * 2;
    ptx::StoreMatrix4(FragmentRow(place, box, j), v[0], v[1], v[2], v[3]);
  }
}

__device__ __forceinline__ void StageMirror(const uint32_t (&packed)[16], const GroupThread& place,
                                            uint32_t box) {
#pragma unroll
  for (int j = 0; j < 8; j += 2) {
    const uint32_t* v = packed + j * 2;
    ptx::StoreMatrix4Transposed(TransposedRow(place, box, j), v[0], v[1], v[2], v[3]);
  }
}

}  // namespace dmuond::kernels::cuda

#endif  // DMUOND_KERNELS_CUDA_FRAGMENTS_CUH_
