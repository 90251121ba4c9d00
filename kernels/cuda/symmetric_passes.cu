#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "kernels/cuda/symmetric_passes.h"

namespace dmuond::kernels::cuda {
namespace {

constexpr int kSide = 64;
constexpr int kThreads = 256;
constexpr int64_t kBatchPerLaunch = 65535;

template <typename T>
__global__ void __launch_bounds__(kThreads)
    WidenKernel(const T* c, int64_t c_ld, int64_t c_stride, float beta, const T* c2, int64_t c2_ld,
                int64_t c2_stride, float beta2, float diagonal, int64_t n, int64_t batch,
                float* wide) {
  const int64_t total = n * n * batch;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x; i < total;
       i += step) {
    const int64_t z = i / (n * n);
    const int64_t row = (i - z * n * n) / n;
    const int64_t col = i - z * n * n - row * n;
    float sum = row == col ? diagonal : 0.0F;
    if (c != nullptr) sum += beta * static_cast<float>(c[z * c_stride + row * c_ld + col]);
    if (c2 != nullptr) sum += beta2 * static_cast<float>(c2[z * c2_stride + row * c2_ld + col]);
    wide[i] = sum;
  }
}

// One block per square of the lower triangle; on the diagonal, the square's own lower triangle.
template <typename From, typename T>
__global__ void __launch_bounds__(kThreads)
    MirrorKernel(const From* from, int64_t from_ld, int64_t from_stride, T* d, int64_t ld,
                 int64_t stride, int64_t n) {
  const int64_t row0 = blockIdx.y * static_cast<int64_t>(kSide);
  const int64_t col0 = blockIdx.x * static_cast<int64_t>(kSide);
  if (col0 > row0) return;
  const From* const source = from + blockIdx.z * from_stride;
  T* const target = d + blockIdx.z * stride;
  __shared__ float square[kSide][kSide + 1];
  for (int i = threadIdx.x; i < kSide * kSide; i += kThreads) {
    const int64_t row = row0 + i / kSide;
    const int64_t col = col0 + i % kSide;
    if (row < n && col <= row) {
      square[i / kSide][i % kSide] = static_cast<float>(source[row * from_ld + col]);
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kSide * kSide; i += kThreads) {
    const int64_t row = row0 + i / kSide;
    const int64_t col = col0 + i % kSide;
    if (row < n && col <= row) {
      target[row * ld + col] = static_cast<T>(square[i / kSide][i % kSide]);
    }
    // (row of the upper triangle, column)
    const int64_t up = col0 + i / kSide;
    const int64_t right = row0 + i % kSide;
    if (right < n && up < right) {
      target[up * ld + right] = static_cast<T>(square[i % kSide][i / kSide]);
    }
  }
}

template <typename From, typename T>
cudaError_t Mirror(cudaStream_t stream, const From* from, int64_t from_ld, int64_t from_stride,
                   const MatrixView& d, int64_t batch) {
  const auto squares = static_cast<unsigned>((d.rows + kSide - 1) / kSide);
  for (int64_t first = 0; first < batch; first += kBatchPerLaunch) {
    const auto count = static_cast<unsigned>(std::min(kBatchPerLaunch, batch - first));
    MirrorKernel<From, T><<<dim3(squares, squares, count), kThreads, 0, stream>>>(
        from + first * from_stride, from_ld, from_stride,
        static_cast<T*>(d.data) + first * d.batch_stride, d.ld, d.batch_stride, d.rows);
    if (const cudaError_t result = cudaGetLastError(); result != cudaSuccess) return result;
  }
  return cudaSuccess;
}

template <typename F>
cudaError_t WithType(GemmType type, F&& f) {
  return type == GemmType::kF16 ? f(__half()) : f(__nv_bfloat16());
}

}  // namespace

cudaError_t LaunchWidenAddends(cudaStream_t stream, GemmType type, const MatrixView& c, float beta,
                               const MatrixView& c2, float beta2, float diagonal, int64_t n,
                               int64_t batch, float* wide) {
  const auto blocks =
      static_cast<unsigned>(std::min<int64_t>(132 * 16, (n * n * batch + kThreads - 1) / kThreads));
  return WithType(type, [&](auto value) {
    using T = decltype(value);
    WidenKernel<T><<<blocks, kThreads, 0, stream>>>(
        static_cast<const T*>(c.data), c.ld, c.batch_stride, beta, static_cast<const T*>(c2.data),
        c2.ld, c2.batch_stride, beta2, diagonal, n, batch, wide);
    return cudaGetLastError();
  });
}

cudaError_t LaunchNarrowMirrored(cudaStream_t stream, GemmType type, const float* wide,
                                 const MatrixView& d, int64_t batch) {
  return WithType(type, [&](auto value) {
    return Mirror<float, decltype(value)>(stream, wide, d.rows, d.rows * d.rows, d, batch);
  });
}

cudaError_t LaunchMirror(cudaStream_t stream, GemmType type, const MatrixView& d, int64_t batch) {
  return WithType(type, [&](auto value) {
    using T = decltype(value);
    return Mirror<T, T>(stream, static_cast<const T*>(d.data), d.ld, d.batch_stride, d, batch);
  });
}

}  // namespace dmuond::kernels::cuda
