#include <algorithm>
#include <cmath>
#include <type_traits>

#include "kernels/cuda/muon_passes.h"
#include "kernels/cuda/pass_access.cuh"

namespace dmuond::kernels::cuda {
namespace {

// One block per matrix where there is little to do.
constexpr int kThreadsOfOne = 1024;
// The estimate reads the first 512 elements of so many stretches (of 4,096) of a matrix.
constexpr int kSamples = 64;
// Powers of two by which an estimated scale may be smaller or larger than the exact one. X then has
// a root mean square of 2^-4.5 … 2^2.5, far from fp16's subnormals, and no entry above
// kRootMax * 2^2.5.
constexpr double kScaleBelow = 4;
constexpr double kScaleAbove = 2;
constexpr double kRootMax = 8192;

struct PassParams {
  PassBuffers buffers;
  int64_t elements;
  int64_t cols;
  int64_t x_ld;
  int64_t x_stride;   // between matrices of X
  int64_t stretches;  // of a matrix
  double update;      // of `result`: update scale / result scale
  double root;        // root mean square of scale * u is about root / sqrt(elements)
  double eps;
  double normalise;
  PassNorm norm;
  bool round;  // u to bf16 before everything else
};

// Finite gradients near the end of fp32 must not make an infinite momentum. NaN stays NaN.
__device__ __forceinline__ float Saturate(float x) {
  constexpr float kMax = 3.402823466e+38F;
  x = x > kMax ? kMax : x;
  return x < -kMax ? -kMax : x;
}

template <bool kEma, bool kNesterov>
class MomentumStep {
 public:
  __device__ MomentumStep(const PassScalars& s, bool round)
      : momentum_(static_cast<float>(s.momentum)),
        one_minus_momentum_(static_cast<float>(1.0 - s.momentum)),
        factor_(static_cast<float>(s.gradient_factor)),
        round_(round) {}

  __device__ float Next(float buffer, float gradient) const {
    const float g = gradient * factor_;
    return Saturate(kEma ? Lerp(buffer, g, one_minus_momentum_) : momentum_ * buffer + g);
  }
  // u from the new buffer.
  __device__ float Direction(float next, float gradient) const {
    float u = next;
    if constexpr (kNesterov) {
      const float g = gradient * factor_;
      u = Saturate(kEma ? Lerp(g, next, momentum_) : g + momentum_ * next);
    }
    return round_ ? static_cast<float>(static_cast<__nv_bfloat16>(u)) : u;
  }

 private:
  float momentum_;
  float one_minus_momentum_;
  float factor_;
  bool round_;
};

__device__ __forceinline__ double ScaleFor(double norm, const PassParams& p) {
  if (!(norm > 0) || !isfinite(norm)) return 1;
  return exp2(fmin(fmax(rint(log2(p.root / norm)), -120.0), 120.0));
}

// One block per matrix.
template <bool kEma, bool kNesterov>
__global__ void __launch_bounds__(kThreadsOfOne) EstimateKernel(const PassParams p) {
  const PassMatrix& m = p.buffers.matrices[blockIdx.x];
  const MomentumStep<kEma, kNesterov> step(m.scalars, p.round);
  double squares = 0;
  int64_t seen = 0;
  if (m.scalars.active != 0) {
    const int64_t samples = min(p.stretches, static_cast<int64_t>(kSamples));
    for (int64_t i = threadIdx.x / 32; i < samples; i += kThreadsOfOne / 32) {
      const int64_t begin = i * p.stretches / samples * kStretch;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int64_t at = begin + (j * 32 + threadIdx.x % 32) * 4;
        const Four b = Load4(m.momentum_in, at, p.elements);
        const Four g = Load4(m.gradient, at, p.elements);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const float u = step.Direction(step.Next(b.v[k], g.v[k]), g.v[k]);
          squares += static_cast<double>(u) * static_cast<double>(u);
        }
        seen += max(min(p.elements - at, int64_t{4}), int64_t{0});
      }
    }
  }
  const double sum = BlockSum<kThreadsOfOne>(squares);
  const double count = BlockSum<kThreadsOfOne>(static_cast<double>(seen));
  if (threadIdx.x != 0) return;
  const double norm = count > 0 ? sqrt(sum * (static_cast<double>(p.elements) / count)) : 0.0;
  p.buffers.scale[blockIdx.x] = static_cast<float>(ScaleFor(norm, p));
}

template <typename T, bool kContiguous>
__device__ __forceinline__ void StoreX(const PassParams& p, T* x, int64_t at, const Four& u) {
  if constexpr (kContiguous) {
    Store4As<T, true>(x, at, p.elements, u);
  } else {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (at + j >= p.elements) break;
      x[(at + j) / p.cols * p.x_ld + (at + j) % p.cols] = static_cast<T>(u.v[j]);
    }
  }
}

// kCast: X too, with the scale that lies there.
template <typename T, bool kEma, bool kNesterov, bool kContiguous, bool kCast>
__global__ void __launch_bounds__(kPassThreads) MomentumKernel(const PassParams p) {
  const int64_t z = blockIdx.y;
  const PassMatrix& m = p.buffers.matrices[z];
  const bool active = m.scalars.active != 0;
  const MomentumStep<kEma, kNesterov> step(m.scalars, std::is_same_v<T, __nv_bfloat16> && p.round);
  const int64_t begin = blockIdx.x * static_cast<int64_t>(kStretch) + threadIdx.x * 4;
  Four g[4];
  Four b[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int64_t at = begin + i * kPassThreads * 4;
    b[i] = Load4(m.momentum_in, at, p.elements);
    g[i] = active ? Load4(m.gradient, at, p.elements) : Four{};
  }
  const float scale = kCast ? p.buffers.scale[z] : 1.0F;
  T* const x = static_cast<T*>(p.buffers.x) + z * p.x_stride;
  double squares = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int64_t at = begin + i * kPassThreads * 4;
    Four u{};
    if (active) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float next = step.Next(b[i].v[j], g[i].v[j]);
        u.v[j] = step.Direction(next, g[i].v[j]);
        squares += static_cast<double>(u.v[j]) * static_cast<double>(u.v[j]);
        u.v[j] *= scale;
        b[i].v[j] = next;
      }
    }
    Store4(m.momentum_out, at, p.elements, b[i]);
    if constexpr (kCast) StoreX<T, kContiguous>(p, x, at, u);
  }
  const double sum = BlockSum(squares);
  if (threadIdx.x == 0) p.buffers.partials[z * p.stretches + blockIdx.x] = sum;
}

// One block per matrix.
__global__ void __launch_bounds__(kThreadsOfOne) FinishNormsKernel(const PassParams p) {
  const int64_t z = blockIdx.x;
  const double* const from = p.buffers.partials + z * p.stretches;
  double sum = 0;
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < p.stretches; i += kThreadsOfOne) sum += from[i];
  const double squared = BlockSum<kThreadsOfOne>(sum);
  if (threadIdx.x != 0) return;
  const double norm = sqrt(squared);
  double divisor = norm;
  if (p.round) {
    const auto rounded = static_cast<float>(static_cast<__nv_bfloat16>(static_cast<float>(norm)));
    const auto eps32 = static_cast<float>(p.eps);
    const float with_eps = p.norm == PassNorm::kPlusEps ? rounded + eps32 : fmaxf(rounded, eps32);
    divisor = static_cast<double>(static_cast<float>(static_cast<__nv_bfloat16>(with_eps)));
  } else if (p.norm == PassNorm::kPlusEps) {
    divisor = norm + p.eps;
  } else if (p.norm == PassNorm::kClampedEps) {
    divisor = fmax(norm, p.eps);
  }
  // What X was cast with is kept where it is near enough.
  const double exact = ScaleFor(norm, p);
  double scale = exact;
  bool recast = p.normalise != 0;
  if (!recast) {
    const auto estimated = static_cast<double>(p.buffers.scale[z]);
    recast = estimated > exact * exp2(kScaleAbove) || estimated < exact * exp2(-kScaleBelow);
    if (!recast) scale = estimated;
  }
  const double inverse = norm > 0 && isfinite(norm) ? 1.0 / (divisor * scale) : 0.0;
  p.buffers.recast[z] = recast ? 1 : 0;
  if (p.buffers.schatten_arrived != nullptr) p.buffers.schatten_arrived[z] = 0;
  p.buffers.squares[z] = 0;
  p.buffers.scale[z] = static_cast<float>(scale);
  p.buffers.inverse_norm[z] = static_cast<float>(inverse);
  p.buffers.inverse_norm_squared[z] = static_cast<float>(inverse * inverse);
}

// Two accesses of each array a thread: with four, and with loads that depend on `active`, 7 %
// slower.
constexpr int kRecastAccesses = 2;
constexpr int64_t kRecastPiece = int64_t{kPassThreads} * 4 * kRecastAccesses;

int64_t RecastPieces(const PassParams& p) { return (p.elements + kRecastPiece - 1) / kRecastPiece; }

template <typename T, bool kEma, bool kNesterov, bool kContiguous>
__global__ void __launch_bounds__(kPassThreads) RecastKernel(const PassParams p) {
  const int64_t z = blockIdx.y;
  if (p.buffers.recast[z] == 0) return;
  const PassMatrix& m = p.buffers.matrices[z];
  const MomentumStep<kEma, kNesterov> step(m.scalars, std::is_same_v<T, __nv_bfloat16> && p.round);
  const float scale = p.buffers.scale[z];
  const float factor =
      p.normalise == 0
          ? 1.0F
          : static_cast<float>(static_cast<double>(p.buffers.inverse_norm[z]) * p.normalise);
  T* const x = static_cast<T*>(p.buffers.x) + z * p.x_stride;
  // As a rule there is nothing to do: few blocks look.
  const int64_t first = blockIdx.x * kRecastPiece + threadIdx.x * 4;
  const int64_t stride = gridDim.x * kRecastPiece;
  if (m.scalars.active == 0) {  // nor is there a gradient
    for (int64_t begin = first; begin < p.elements; begin += stride) {
#pragma unroll
      for (int i = 0; i < kRecastAccesses; ++i) {
        StoreX<T, kContiguous>(p, x, begin + i * kPassThreads * 4, Four{});
      }
    }
    return;
  }
  for (int64_t begin = first; begin < p.elements; begin += stride) {
    Four g[kRecastAccesses];
    Four b[kRecastAccesses];
#pragma unroll
    for (int i = 0; i < kRecastAccesses; ++i) {
      const int64_t at = begin + i * kPassThreads * 4;
      b[i] = Load4(m.momentum_out, at, p.elements);
      g[i] = kNesterov ? Load4(m.gradient, at, p.elements) : Four{};
    }
#pragma unroll
    for (int i = 0; i < kRecastAccesses; ++i) {
      Four u;
#pragma unroll
      for (int j = 0; j < 4; ++j) u.v[j] = scale * step.Direction(b[i].v[j], g[i].v[j]) * factor;
      StoreX<T, kContiguous>(p, x, begin + i * kPassThreads * 4, u);
    }
  }
}

template <typename T, typename W, bool kContiguous>
__global__ void __launch_bounds__(kPassThreads) ApplyKernel(const PassParams p) {
  const int64_t z = blockIdx.y;
  const PassMatrix& m = p.buffers.matrices[z];
  const bool active = m.scalars.active != 0;
  const bool directed = p.buffers.inverse_norm[z] != 0.0F;
  const double learning_rate = m.scalars.learning_rate;
  const float keep =
      active ? static_cast<float>(1.0 - learning_rate * m.scalars.weight_decay) : 1.0F;
  const float rate = active ? static_cast<float>(learning_rate * p.update) : 0.0F;
  const T* const o = static_cast<const T*>(p.buffers.result) + z * p.x_stride;
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
  float squares = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int64_t at = begin + i * kPassThreads * 4;
    if (active) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        w[i].v[j] = w[i].v[j] * keep - (directed ? rate * update[i].v[j] : 0.0F);
        squares += update[i].v[j] * update[i].v[j];
      }
    }
    Store4(m.master_out, at, p.elements, w[i]);
    if (m.weight_out != nullptr) {
      Store4As<W>(static_cast<W*>(m.weight_out), at, p.elements, w[i]);
    }
  }
  if (!active || !directed || m.update_squares == nullptr) return;
  const double sum = BlockSum(static_cast<double>(squares));
  if (threadIdx.x == 0) atomicAdd(&p.buffers.squares[z], sum);
}

// One thread per matrix.
__global__ void TellSquaresKernel(const PassParams p) {
  const int64_t z = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (z >= p.buffers.count) return;
  double* const to = p.buffers.matrices[z].update_squares;
  if (to != nullptr) *to = p.buffers.squares[z] * p.update * p.update;
}

int64_t Stretches(const PassShape& shape) {
  return (shape.rows * shape.cols + kStretch - 1) / kStretch;
}

PassParams MakeParams(const PassShape& shape, const PassBuffers& buffers) {
  PassParams p{};
  p.buffers = buffers;
  p.elements = shape.rows * shape.cols;
  p.cols = shape.cols;
  p.x_ld = shape.x_ld;
  p.x_stride = shape.rows * shape.x_ld;
  p.stretches = Stretches(shape);
  p.update = shape.update_scale / buffers.result_scale;
  p.root = std::min(std::sqrt(static_cast<double>(p.elements)), kRootMax);
  p.eps = shape.eps;
  p.normalise = shape.normalise;
  p.norm = shape.norm;
  p.round = CastsFirst(shape);
  return p;
}

using PassKernel = void (*)(PassParams);

// `blocks` for each matrix; a grid has room for 65,535 of them.
cudaError_t Launch(cudaStream_t stream, PassKernel kernel, const PassParams& params,
                   int64_t blocks) {
  if (params.buffers.count == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(params.buffers.count));
  kernel<<<grid, kPassThreads, 0, stream>>>(params);
  return cudaGetLastError();
}
constexpr int64_t kRecastBlocks = 264;  // of a batch

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
template <typename F>
cudaError_t WithBool(bool value, F&& f) {
  return value ? f(std::true_type()) : f(std::false_type());
}
// f(T(), whether X is contiguous)
template <typename F>
cudaError_t ForX(const PassShape& shape, F&& f) {
  return WithType(shape.type, [&](auto type) {
    return WithBool(shape.x_ld == shape.cols, [&](auto contiguous) { return f(type, contiguous); });
  });
}
// f(whether EMA, whether Nesterov)
template <typename F>
cudaError_t ForMomentum(const PassShape& shape, F&& f) {
  return WithBool(shape.ema, [&](auto ema) {
    return WithBool(shape.nesterov, [&](auto nesterov) { return f(ema, nesterov); });
  });
}

}  // namespace

int64_t NormPartials(const PassShape& shape) { return Stretches(shape); }

cudaError_t LaunchEstimate(cudaStream_t stream, const PassShape& shape,
                           const PassBuffers& buffers) {
  if (buffers.count == 0 || shape.normalise != 0) return cudaSuccess;
  return ForMomentum(shape, [&](auto ema, auto nesterov) {
    EstimateKernel<decltype(ema)::value, decltype(nesterov)::value>
        <<<static_cast<unsigned>(buffers.count), kThreadsOfOne, 0, stream>>>(
            MakeParams(shape, buffers));
    return cudaGetLastError();
  });
}

cudaError_t LaunchMomentum(cudaStream_t stream, const PassShape& shape,
                           const PassBuffers& buffers) {
  const PassParams params = MakeParams(shape, buffers);
  return ForMomentum(shape, [&](auto ema, auto nesterov) {
    return ForX(shape, [&](auto type, auto contiguous) {
      return WithBool(shape.normalise == 0, [&](auto cast) {
        return Launch(
            stream,
            MomentumKernel<decltype(type), decltype(ema)::value, decltype(nesterov)::value,
                           decltype(contiguous)::value, decltype(cast)::value>,
            params, params.stretches);
      });
    });
  });
}

cudaError_t LaunchFinishNorms(cudaStream_t stream, const PassShape& shape,
                              const PassBuffers& buffers) {
  if (buffers.count == 0) return cudaSuccess;
  FinishNormsKernel<<<static_cast<unsigned>(buffers.count), kThreadsOfOne, 0, stream>>>(
      MakeParams(shape, buffers));
  return cudaGetLastError();
}

cudaError_t LaunchRecast(cudaStream_t stream, const PassShape& shape, const PassBuffers& buffers) {
  const PassParams params = MakeParams(shape, buffers);
  const int64_t pieces = RecastPieces(params);
  const int64_t few = std::max<int64_t>(1, kRecastBlocks / std::max<int64_t>(1, buffers.count));
  return ForMomentum(shape, [&](auto ema, auto nesterov) {
    return ForX(shape, [&](auto type, auto contiguous) {
      return Launch(stream,
                    RecastKernel<decltype(type), decltype(ema)::value, decltype(nesterov)::value,
                                 decltype(contiguous)::value>,
                    params, shape.normalise == 0 ? std::min(few, pieces) : pieces);
    });
  });
}

cudaError_t LaunchApply(cudaStream_t stream, const PassShape& shape, const PassBuffers& buffers) {
  const PassParams params = MakeParams(shape, buffers);
  return ForX(shape, [&](auto type, auto contiguous) {
    return WithType(shape.weight, [&](auto weight) {
      return Launch(stream,
                    ApplyKernel<decltype(type), decltype(weight), decltype(contiguous)::value>,
                    params, params.stretches);
    });
  });
}

cudaError_t LaunchTellSquares(cudaStream_t stream, const PassShape& shape,
                              const PassBuffers& buffers) {
  if (buffers.count == 0) return cudaSuccess;
  const auto blocks = static_cast<unsigned>((buffers.count + kPassThreads - 1) / kPassThreads);
  TellSquaresKernel<<<blocks, kPassThreads, 0, stream>>>(MakeParams(shape, buffers));
  return cudaGetLastError();
}

}  // namespace dmuond::kernels::cuda
