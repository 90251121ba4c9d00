#include <cstdint>

#include "kernels/cuda/product_f32.h"

namespace dmuond::kernels::cuda {
namespace {

constexpr int kTile = 64;
constexpr int kDepth = 16;
constexpr int kThreads = 256;  // 4 x 4 elements each
constexpr int kBatchesPerLaunch = 32768;

// Element (x, k) of an operand lies at x * stride_x + k * stride_k.
struct Operand {
  const float* data;
  int64_t extent;
  int64_t stride_x;
  int64_t stride_k;
};

__device__ __forceinline__ void LoadTile(float (&to)[kDepth][kTile + 1], const Operand& from,
                                         int64_t x0, int64_t k0, int64_t depth) {
  for (int i = threadIdx.x; i < kDepth * kTile; i += kThreads) {
    // Consecutive threads read consecutive addresses, whichever way the operand lies.
    const int k = from.stride_k == 1 ? i % kDepth : i / kTile;
    const int x = from.stride_k == 1 ? i / kDepth : i % kTile;
    to[k][x] = x0 + x < from.extent && k0 + k < depth
                   ? from.data[(x0 + x) * from.stride_x + (k0 + k) * from.stride_k]
                   : 0.0F;
  }
}

__device__ __forceinline__ float Value(const DeviceScalar& scalar, int64_t batch) {
  return scalar.values == nullptr ? scalar.factor : scalar.factor * scalar.values[batch];
}
__device__ __forceinline__ float Addend(const MatrixView& c, int64_t batch, int64_t row,
                                        int64_t col) {
  return static_cast<const float*>(c.data)[batch * c.batch_stride + row * c.ld + col];
}

__global__ void __launch_bounds__(kThreads)
    ProductKernel(const __grid_constant__ GemmProblem p, Operand a, Operand b, int64_t depth,
                  int64_t first_batch) {
  const int64_t row0 = blockIdx.y * static_cast<int64_t>(kTile);
  const int64_t col0 = blockIdx.x * static_cast<int64_t>(kTile);
  if (p.symmetric && col0 > row0) return;
  const int64_t batch = first_batch + blockIdx.z;
  a.data += batch * p.a.batch_stride;
  b.data += batch * p.b.batch_stride;
  __shared__ float tile_a[kDepth][kTile + 1];
  __shared__ float tile_b[kDepth][kTile + 1];
  const int tx = threadIdx.x % 16;
  const int ty = threadIdx.x / 16;
  float sum[4][4] = {};
  for (int64_t k0 = 0; k0 < depth; k0 += kDepth) {
    LoadTile(tile_a, a, row0, k0, depth);
    LoadTile(tile_b, b, col0, k0, depth);
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kDepth; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          sum[i][j] = fmaf(tile_a[k][ty + i * 16], tile_b[k][tx + j * 16], sum[i][j]);
        }
      }
    }
    __syncthreads();
  }
  const float alpha = Value(p.alpha, batch);
  const float beta = Value(p.beta, batch);
  const float beta2 = Value(p.beta2, batch);
  float* const d = static_cast<float*>(p.d.data) + batch * p.d.batch_stride;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int64_t row = row0 + ty + i * 16;
      const int64_t col = col0 + tx + j * 16;
      if (row >= p.d.rows || col >= p.d.cols || (p.symmetric && col > row)) continue;
      float value = alpha * sum[i][j];
      if (p.c.data != nullptr) value += beta * Addend(p.c, batch, row, col);
      if (p.c2.data != nullptr) value += beta2 * Addend(p.c2, batch, row, col);
      if (row == col) value += p.diagonal;
      d[row * p.d.ld + col] = value;
      if (p.symmetric) d[col * p.d.ld + row] = value;
    }
  }
}

}  // namespace

cudaError_t LaunchProductF32(cudaStream_t stream, const GemmProblem& p, GemmLayout layout) {
  const bool a_transposed = layout == GemmLayout::kTN;
  const bool b_transposed = layout == GemmLayout::kNT;
  const Operand a = {static_cast<const float*>(p.a.data), p.d.rows, a_transposed ? 1 : p.a.ld,
                     a_transposed ? p.a.ld : 1};
  const Operand b = {static_cast<const float*>(p.b.data), p.d.cols, b_transposed ? p.b.ld : 1,
                     b_transposed ? 1 : p.b.ld};
  const int64_t depth = a_transposed ? p.a.rows : p.a.cols;
  for (int64_t first = 0; first < p.batch; first += kBatchesPerLaunch) {
    const int64_t count = p.batch - first < kBatchesPerLaunch ? p.batch - first : kBatchesPerLaunch;
    const dim3 grid(static_cast<unsigned>((p.d.cols + kTile - 1) / kTile),
                    static_cast<unsigned>((p.d.rows + kTile - 1) / kTile),
                    static_cast<unsigned>(count));
    ProductKernel<<<grid, kThreads, 0, stream>>>(p, a, b, depth, first);
    if (const cudaError_t result = cudaGetLastError(); result != cudaSuccess) return result;
  }
  return cudaSuccess;
}

}  // namespace dmuond::kernels::cuda
