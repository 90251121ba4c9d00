#include <algorithm>
#include <cmath>
#include <type_traits>

#include "kernels/cuda/muon_passes.h"
#include "kernels/cuda/pass_access.cuh"

namespace dmuond::kernels::cuda {
namespace {

// Matrices whose pointers fit into one launch's parameters.
constexpr int kMatricesPerLaunch = 56;

struct MatrixList {
  PassMatrix matrices[kMatricesPerLaunch];
  int first;  // index of matrices[0] in the batch
};

struct PassParams {
  int64_t elements;
  int64_t cols;
  int64_t x_ld;
  int64_t x_stride;  // between matrices of X
  PassBuffers buffers;
  double scale;  // Apply: update scale / result scale
};

// Finite gradients near the end of fp32 must not make an infinite momentum. NaN stays NaN.
__device__ __forceinline__ float Saturate(float x) {
  constexpr float kMax = 3.402823466e+38F;
  x = x > kMax ? kMax : x;
  return x < -kMax ? -kMax : x;
}

struct MomentumStep {
  float momentum;
  float one_minus_momentum;
  float factor;
  bool ema;
  bool nesterov;

  __device__ float Next(float buffer, float gradient) const {
    const float g = gradient * factor;
    return Saturate(ema ? Lerp(buffer, g, one_minus_momentum) : momentum * buffer + g);
  }
  // u from the new buffer.
  __device__ float Direction(float next, float gradient) const {
    if (!nesterov) return next;
    const float g = gradient * factor;
    return Saturate(ema ? Lerp(g, next, momentum) : g + momentum * next);
  }
};
__device__ __forceinline__ MomentumStep MakeStep(const PassScalars& s, bool ema, bool nesterov) {
  return {static_cast<float>(s.momentum), static_cast<float>(1.0 - s.momentum),
          static_cast<float>(s.gradient_factor), ema, nesterov};
}

template <bool kEma, bool kNesterov, bool kRoundToBF16>
__global__ void __launch_bounds__(kPassThreads)
    MomentumKernel(const __grid_constant__ MatrixList list, const PassParams p) {
  const PassMatrix& m = list.matrices[blockIdx.y];
  const bool active = m.scalars.active != 0;
  const MomentumStep step = MakeStep(m.scalars, kEma, kNesterov);
  const int64_t begin = blockIdx.x * static_cast<int64_t>(kStretch) + threadIdx.x * 4;
  double squares = 0;
  Four g[4];
  Four b[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int64_t at = begin + i * kPassThreads * 4;
    b[i] = Load4(m.momentum_in, at, p.elements);
    g[i] = active ? Load4(m.gradient, at, p.elements) : Four{};
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (active) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float next = step.Next(b[i].v[j], g[i].v[j]);
        float u = step.Direction(next, g[i].v[j]);
        if constexpr (kRoundToBF16) u = static_cast<float>(static_cast<__nv_bfloat16>(u));
        squares += static_cast<double>(u) * static_cast<double>(u);
        b[i].v[j] = next;
      }
    }
    Store4(m.momentum_out, begin + i * kPassThreads * 4, p.elements, b[i]);
  }
  const double sum = BlockSum(squares);
  if (threadIdx.x == 0) {
    p.buffers.partials[(list.first + blockIdx.y) * static_cast<int64_t>(gridDim.x) + blockIdx.x] =
        sum;
  }
}

// One block per matrix. scale = 2^k with scale * u of root mean square about 1.
__global__ void __launch_bounds__(kPassThreads)
    FinishNormsKernel(PassBuffers buffers, int64_t partials, double root_elements, PassNorm rule,
                      double eps, bool bf16_norm) {
  const double* from = buffers.partials + blockIdx.x * partials;
  double sum = 0;
  for (int64_t i = threadIdx.x; i < partials; i += kPassThreads) sum += from[i];
  const double squared = BlockSum(sum);
  if (threadIdx.x != 0) return;
  const double norm = sqrt(squared);
  double divisor = norm;
  if (bf16_norm) {
    const auto rounded = static_cast<float>(static_cast<__nv_bfloat16>(static_cast<float>(norm)));
    const auto eps32 = static_cast<float>(eps);
    const float sum = rule == PassNorm::kPlusEps ? rounded + eps32 : fmaxf(rounded, eps32);
    divisor = static_cast<double>(static_cast<float>(static_cast<__nv_bfloat16>(sum)));
  } else if (rule == PassNorm::kPlusEps) {
    divisor = norm + eps;
  } else if (rule == PassNorm::kClampedEps) {
    divisor = fmax(norm, eps);
  }
  double scale = 1;
  double inverse = 0;
  if (norm > 0 && isfinite(norm)) {
    scale = exp2(fmin(fmax(rint(log2(root_elements / norm)), -120.0), 120.0));
    inverse = 1.0 / (divisor * scale);
  }
  buffers.scale[blockIdx.x] = static_cast<float>(scale);
  buffers.inverse_norm[blockIdx.x] = static_cast<float>(inverse);
  buffers.inverse_norm_squared[blockIdx.x] = static_cast<float>(inverse * inverse);
}

template <typename T, bool kEma, bool kNesterov, bool kContiguous>
__global__ void __launch_bounds__(kPassThreads)
    CastKernel(const __grid_constant__ MatrixList list, const PassParams p) {
  const PassMatrix& m = list.matrices[blockIdx.y];
  const bool active = m.scalars.active != 0;
  const MomentumStep step = MakeStep(m.scalars, kEma, kNesterov);
  const float scale = p.buffers.scale[list.first + blockIdx.y];
  T* const x = static_cast<T*>(p.buffers.x) + (list.first + blockIdx.y) * p.x_stride;
  const int64_t begin = blockIdx.x * static_cast<int64_t>(kStretch) + threadIdx.x * 4;
  Four g[4];
  Four b[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int64_t at = begin + i * kPassThreads * 4;
    b[i] = active ? Load4(m.momentum_out, at, p.elements) : Four{};
    g[i] = active && kNesterov ? Load4(m.gradient, at, p.elements) : Four{};
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int64_t at = begin + i * kPassThreads * 4;
    Four u;
#pragma unroll
    for (int j = 0; j < 4; ++j) u.v[j] = scale * step.Direction(b[i].v[j], g[i].v[j]);
    if constexpr (kContiguous) {
      Store4As<T>(x, at, p.elements, u);
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (at + j >= p.elements) break;
        x[(at + j) / p.cols * p.x_ld + (at + j) % p.cols] = static_cast<T>(u.v[j]);
      }
    }
  }
}

template <typename T, typename W, bool kContiguous>
__global__ void __launch_bounds__(kPassThreads)
    ApplyKernel(const __grid_constant__ MatrixList list, const PassParams p) {
  const PassMatrix& m = list.matrices[blockIdx.y];
  const PassScalars& s = m.scalars;
  const bool active = s.active != 0;
  const bool directed = p.buffers.inverse_norm[list.first + blockIdx.y] != 0.0F;
  const float keep = active ? static_cast<float>(1.0 - s.learning_rate * s.weight_decay) : 1.0F;
  const float rate = active ? static_cast<float>(s.learning_rate * p.scale) : 0.0F;
  const T* const o =
      static_cast<const T*>(p.buffers.result) + (list.first + blockIdx.y) * p.x_stride;
  const int64_t begin = blockIdx.x * static_cast<int64_t>(kStretch) + threadIdx.x * 4;
  Four w[4];
  Four update[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int64_t at = begin + i * kPassThreads * 4;
    w[i] = Load4(m.master_in, at, p.elements);
    if constexpr (kContiguous) {
      update[i] = Load4As<T>(o, at, p.elements);
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int64_t e = at + j;
        update[i].v[j] =
            e < p.elements ? static_cast<float>(o[e / p.cols * p.x_ld + e % p.cols]) : 0.0F;
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int64_t at = begin + i * kPassThreads * 4;
    if (active) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        w[i].v[j] = w[i].v[j] * keep - (directed ? rate * update[i].v[j] : 0.0F);
      }
    }
    Store4(m.master_out, at, p.elements, w[i]);
    if (m.weight_out != nullptr) {
      Store4As<W>(static_cast<W*>(m.weight_out), at, p.elements, w[i]);
    }
  }
}

unsigned Stretches(const PassShape& shape) {
  return static_cast<unsigned>((shape.rows * shape.cols + kStretch - 1) / kStretch);
}

PassParams MakeParams(const PassShape& shape, const PassBuffers& buffers) {
  PassParams p{};
  p.elements = shape.rows * shape.cols;
  p.cols = shape.cols;
  p.x_ld = shape.x_ld;
  p.x_stride = shape.rows * shape.x_ld;
  p.buffers = buffers;
  p.scale = shape.update_scale / buffers.result_scale;
  return p;
}

// Launches `kernel(list, params)` for all matrices, some at a time.
template <typename Kernel>
cudaError_t ForMatrices(cudaStream_t stream, const PassShape& shape,
                        std::span<const PassMatrix> matrices, const PassBuffers& buffers,
                        Kernel kernel) {
  const PassParams params = MakeParams(shape, buffers);
  for (size_t first = 0; first < matrices.size(); first += kMatricesPerLaunch) {
    const size_t count = std::min<size_t>(kMatricesPerLaunch, matrices.size() - first);
    MatrixList list{};
    std::copy_n(matrices.begin() + static_cast<std::ptrdiff_t>(first), count, list.matrices);
    list.first = static_cast<int>(first);
    kernel<<<dim3(Stretches(shape), static_cast<unsigned>(count)), kPassThreads, 0, stream>>>(
        list, params);
    if (const cudaError_t result = cudaGetLastError(); result != cudaSuccess) return result;
  }
  return cudaSuccess;
}

template <typename F>
cudaError_t WithBool(bool value, F&& f) {
  return value ? f(std::true_type()) : f(std::false_type());
}
template <typename F>
cudaError_t WithType(WeightType type, F&& f) {
  switch (type) {
    case WeightType::kF16:
      return f(__half());
    case WeightType::kBF16:
      return f(__nv_bfloat16());
    default:
      return f(float());
  }
}

}  // namespace

int64_t NormPartials(const PassShape& shape) { return Stretches(shape); }

cudaError_t LaunchMomentum(cudaStream_t stream, const PassShape& shape,
                           std::span<const PassMatrix> matrices, const PassBuffers& buffers) {
  return WithBool(shape.ema, [&](auto ema) {
    return WithBool(shape.nesterov, [&](auto nesterov) {
      return WithBool(CastsFirst(shape), [&](auto rounded) {
        return ForMatrices(stream, shape, matrices, buffers,
                           MomentumKernel<decltype(ema)::value, decltype(nesterov)::value,
                                          decltype(rounded)::value>);
      });
    });
  });
}

cudaError_t LaunchFinishNorms(cudaStream_t stream, const PassShape& shape, int64_t matrices,
                              const PassBuffers& buffers) {
  // Root mean square one, while no entry can be infinite in fp16.
  const double elements = static_cast<double>(shape.rows) * static_cast<double>(shape.cols);
  const double root = std::min(std::sqrt(elements), 32768.0);
  FinishNormsKernel<<<static_cast<unsigned>(matrices), kPassThreads, 0, stream>>>(
      buffers, NormPartials(shape), root, shape.norm, shape.eps, CastsFirst(shape));
  return cudaGetLastError();
}

cudaError_t LaunchCastInput(cudaStream_t stream, const PassShape& shape,
                            std::span<const PassMatrix> matrices, const PassBuffers& buffers) {
  return WithType(shape.type, [&](auto type) {
    return WithBool(shape.ema, [&](auto ema) {
      return WithBool(shape.nesterov, [&](auto nesterov) {
        return WithBool(shape.x_ld == shape.cols, [&](auto contiguous) {
          return ForMatrices(stream, shape, matrices, buffers,
                             CastKernel<decltype(type), decltype(ema)::value,
                                        decltype(nesterov)::value, decltype(contiguous)::value>);
        });
      });
    });
  });
}

cudaError_t LaunchApply(cudaStream_t stream, const PassShape& shape,
                        std::span<const PassMatrix> matrices, const PassBuffers& buffers) {
  return WithType(shape.type, [&](auto type) {
    return WithBool(shape.x_ld == shape.cols, [&](auto contiguous) {
      using T = decltype(type);
      constexpr bool kContiguous = decltype(contiguous)::value;
      switch (shape.weight) {
        case WeightType::kBF16:
          return ForMatrices(stream, shape, matrices, buffers,
                             ApplyKernel<T, __nv_bfloat16, kContiguous>);
        case WeightType::kF16:
          return ForMatrices(stream, shape, matrices, buffers, ApplyKernel<T, __half, kContiguous>);
        default:
          return ForMatrices(stream, shape, matrices, buffers, ApplyKernel<T, float, kContiguous>);
      }
    });
  });
}

}  // namespace dmuond::kernels::cuda
