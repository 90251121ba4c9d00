#include <algorithm>

#include "kernels/cuda/pass_access.cuh"
#include "kernels/cuda/schatten_norm.h"

namespace dmuond::kernels::cuda {
namespace {

constexpr int kWarps = kPassThreads / 32;
constexpr int kRowsPerBlock = 2 * kWarps;
constexpr int64_t kScaleBlocks = 132 * 8;  // of a batch
constexpr int64_t kBatchMax = 65535;       // of a grid

template <typename T>
struct alignas(16) Vector {
  static constexpr int kElements = 16 / sizeof(T);
  T v[kElements];
};

struct NormParams {
  MatrixView gram;
  double scale;
  const float* inverse_norm;
  SchattenNorms norms;
};

// Rows are dealt out one by one, so that each block has long and short ones. A row is read up to
// the diagonal.
template <typename T>
__device__ __forceinline__ double SquaresOfBlock(const T* gram, int64_t p, int64_t ld) {
  using V = Vector<T>;
  double below = 0;
  double diagonal = 0;
  for (int64_t row = blockIdx.x + threadIdx.x / 32 * static_cast<int64_t>(gridDim.x); row < p;
       row += static_cast<int64_t>(gridDim.x) * kWarps) {
    const T* const from = gram + row * ld;
#pragma unroll 4
    for (int64_t col = threadIdx.x % 32 * V::kElements; col <= row; col += 32 * V::kElements) {
      const V chunk = *reinterpret_cast<const V*>(from + col);
      float squares = 0;
#pragma unroll
      for (int i = 0; i < V::kElements; ++i) {
        const auto x = static_cast<float>(chunk.v[i]);
        if (col + i < row) squares += x * x;
        if (col + i == row) diagonal += static_cast<double>(x) * static_cast<double>(x);
      }
      below += static_cast<double>(squares);
    }
  }
  return 2 * below + diagonal;
}

// The block of a matrix that is the last to arrive adds what all have found.
template <typename T>
__global__ void __launch_bounds__(kPassThreads) NormKernel(const NormParams p) {
  const int64_t z = blockIdx.y;
  const SchattenNorms& norms = p.norms;
  double* const partials = norms.partials + z * gridDim.x;
  const double part = BlockSum(SquaresOfBlock(
      static_cast<const T*>(p.gram.data) + z * p.gram.batch_stride, p.gram.rows, p.gram.ld));
  __shared__ bool last;
  if (threadIdx.x == 0) {
    partials[blockIdx.x] = part;
    __threadfence();
    // Back to 0 with the last one.
    last = atomicInc(&norms.arrived[z], gridDim.x - 1) == gridDim.x - 1;
  }
  __syncthreads();
  if (!last) return;
  __threadfence();
  double sum = 0;
  for (unsigned i = threadIdx.x; i < gridDim.x; i += kPassThreads) sum += __ldcg(partials + i);
  const double fourth = BlockSum(sum) * p.scale * p.scale;
  if (threadIdx.x != 0) return;
  const double input = p.inverse_norm == nullptr ? 1.0 : static_cast<double>(p.inverse_norm[z]);
  const bool directed = input != 0 && fourth > 0 && isfinite(fourth);
  const double squared = directed ? sqrt(fourth) : 0;
  norms.inverse[z] = directed ? static_cast<float>(input / sqrt(squared)) : 0.0F;
  norms.inverse_squared[z] = directed ? static_cast<float>(1 / squared) : 0.0F;
  norms.inverse_fourth[z] = directed ? static_cast<float>(1 / fourth) : 0.0F;
}

template <typename T>
__global__ void __launch_bounds__(kPassThreads)
    ScaleKernel(T* data, int64_t elements, int64_t stride, const float* factors) {
  using V = Vector<T>;
  const float factor = factors[blockIdx.y];
  T* const matrix = data + blockIdx.y * stride;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kPassThreads * V::kElements;
  for (int64_t at = (blockIdx.x * static_cast<int64_t>(kPassThreads) + threadIdx.x) * V::kElements;
       at < elements; at += step) {
    V chunk = *reinterpret_cast<const V*>(matrix + at);
#pragma unroll
    for (int i = 0; i < V::kElements; ++i) {
      chunk.v[i] = static_cast<T>(factor * static_cast<float>(chunk.v[i]));
    }
    *reinterpret_cast<V*>(matrix + at) = chunk;
  }
}

template <typename T>
cudaError_t LaunchNorm(cudaStream_t stream, const NormParams& params, const dim3& grid) {
  NormKernel<T><<<grid, kPassThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

template <typename T>
cudaError_t LaunchScale(cudaStream_t stream, const MatrixView& matrices, int64_t batch,
                        const float* factors) {
  // Rows are ld apart, a multiple of what a thread takes: the gaps are scaled as well.
  const int64_t elements = matrices.rows * matrices.ld;
  const int64_t all = (elements - 1) / (kPassThreads * Vector<T>::kElements) + 1;
  const dim3 grid(static_cast<unsigned>(std::clamp<int64_t>(kScaleBlocks / batch, 1, all)),
                  static_cast<unsigned>(batch));
  ScaleKernel<T><<<grid, kPassThreads, 0, stream>>>(static_cast<T*>(matrices.data), elements,
                                                    matrices.batch_stride, factors);
  return cudaGetLastError();
}

}  // namespace

int64_t SchattenPartials(int64_t p) { return (p + kRowsPerBlock - 1) / kRowsPerBlock; }

cudaError_t LaunchSchattenNorm(cudaStream_t stream, WeightType type, const MatrixView& gram,
                               int64_t batch, double scale, const float* inverse_norm,
                               const SchattenNorms& norms) {
  if (batch < 1 || batch > kBatchMax) return cudaErrorInvalidValue;
  const NormParams params{gram, scale, inverse_norm, norms};
  const dim3 grid(static_cast<unsigned>(SchattenPartials(gram.rows)), static_cast<unsigned>(batch));
  switch (type) {
    case WeightType::kF16:
      return LaunchNorm<__half>(stream, params, grid);
    case WeightType::kBF16:
      return LaunchNorm<__nv_bfloat16>(stream, params, grid);
    case WeightType::kF32:
      return LaunchNorm<float>(stream, params, grid);
  }
  return cudaErrorInvalidValue;
}

cudaError_t LaunchScaleInPlace(cudaStream_t stream, WeightType type, const MatrixView& matrices,
                               int64_t batch, const float* factors) {
  if (batch < 1 || batch > kBatchMax || type == WeightType::kF32) return cudaErrorInvalidValue;
  return type == WeightType::kF16 ? LaunchScale<__half>(stream, matrices, batch, factors)
                                  : LaunchScale<__nv_bfloat16>(stream, matrices, batch, factors);
}

}  // namespace dmuond::kernels::cuda
