#include <algorithm>
#include <cstddef>
#include <utility>

#include "kernels/cuda/element_passes.h"
#include "kernels/cuda/pass_access.cuh"

namespace dmuond::kernels::cuda {
namespace {

constexpr int64_t kSquaresBlock = 65536;  // kernels::kNormBlock
constexpr int kPassesPerLaunch = 32;

template <typename Pass>
struct PassList {
  Pass passes[kPassesPerLaunch];
};

// Calls f with launch-sized parts of `passes`, and the largest extent(pass) of each part.
template <typename Pass, typename Extent, typename F>
cudaError_t ForParts(std::span<const Pass> passes, Extent extent, F f) {
  for (size_t first = 0; first < passes.size(); first += kPassesPerLaunch) {
    const size_t count = std::min<size_t>(kPassesPerLaunch, passes.size() - first);
    PassList<Pass> list{};
    int64_t blocks = 0;
    for (size_t i = 0; i < count; ++i) {
      list.passes[i] = passes[first + i];
      blocks = std::max(blocks, extent(list.passes[i]));
    }
    if (blocks == 0) continue;
    f(list, dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(count)));
    if (const cudaError_t result = cudaGetLastError(); result != cudaSuccess) return result;
  }
  return cudaSuccess;
}

int64_t Stretches(int64_t elements) { return (elements + kStretch - 1) / kStretch; }

// What a thread works on at a time. Sums of squares are added in the order of their chunks, by one
// thread of kSquaresThreads in each stretch of kSquaresBlock.
constexpr int kChunk = 8;
constexpr int kSquaresThreads = 512;

// One element or a chunk of a source as it lies in memory: they are widened only when those of all
// sources are on their way.
template <int kElements>
struct Raw {
  uint32_t bits[kElements];
};
template <int kElements>
__device__ __forceinline__ Raw<kElements> LoadRaw(const void* from, WeightType type, int64_t at) {
  Raw<kElements> raw;
  const bool wide = type == WeightType::kF32;
  const auto* const data = static_cast<const std::byte*>(from) + at * (wide ? 4 : 2);
  if constexpr (kElements == 1) {
    raw.bits[0] =
        wide ? *reinterpret_cast<const uint32_t*>(data) : *reinterpret_cast<const uint16_t*>(data);
  } else {
    static_assert(kElements == 8);
    const auto* const halves = reinterpret_cast<const uint4*>(data);
    *reinterpret_cast<uint4*>(raw.bits) = __ldcs(halves);
    if (wide) *reinterpret_cast<uint4*>(raw.bits + 4) = __ldcs(halves + 1);
  }
  return raw;
}
template <int kElements>
__device__ __forceinline__ void Widen(const Raw<kElements>& raw, WeightType type,
                                      float (&values)[kElements]) {
  if (type == WeightType::kF32) {
#pragma unroll
    for (int i = 0; i < kElements; ++i) values[i] = __uint_as_float(raw.bits[i]);
    return;
  }
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    const uint32_t bits = raw.bits[i / 2] >> (16 * (i % 2)) & 0xFFFF;
    values[i] = type == WeightType::kBF16
                    ? __uint_as_float(bits << 16)
                    : __half2float(__ushort_as_half(static_cast<uint16_t>(bits)));
  }
}

// Node kRight goes into node kLeft where that is `left`. Each pair is code of its own, which the
// assembler's comment keeps apart: with computed places `v` would lie in local memory.
template <int kLeft, int kRight, int kCount, int kElements>
__device__ __forceinline__ void AddPair(float (&v)[kCount][kElements], int left) {
  if (left != kLeft) return;
  asm volatile("// %0 %1" ::"n"(kLeft), "n"(kRight));
#pragma unroll
  for (int i = 0; i < kElements; ++i) v[kLeft][i] += v[kRight][i];
}
template <int kRight, int kCount, int kElements, int... kLefts>
__device__ __forceinline__ void AddRight(float (&v)[kCount][kElements], SumPass::Addition addition,
                                         std::integer_sequence<int, kLefts...> /*below kRight*/) {
  if (addition.right != kRight) return;
  (AddPair<kLefts, kRight>(v, addition.left), ...);
}
template <int kCount, int kElements, int... kRights>
__device__ __forceinline__ void AddNodes(float (&v)[kCount][kElements], SumPass::Addition addition,
                                         std::integer_sequence<int, kRights...> /*below kCount*/) {
  (AddRight<kRights>(v, addition, std::make_integer_sequence<int, kRights>()), ...);
}

// Of at most kCount sources. Adds the squares of what it stores to `squares`.
template <int kCount, int kElements, bool kSquares>
__device__ __forceinline__ void SumElements(const SumPass& pass, int64_t at, double& squares) {
  Raw<kElements> raw[kCount];
#pragma unroll
  for (int s = 0; s < kCount; ++s) {
    // Where there are fewer sources, the first comes out of L1 again; where there is none, any
    // address that can be read will do.
    const int from = s < pass.count ? s : 0;
    const void* const data = pass.count > 0 ? pass.sources[from] : pass.destination;
    raw[s] = LoadRaw<kElements>(data, pass.types[from], at);
  }
  float v[kCount][kElements];
#pragma unroll
  for (int s = 0; s < kCount; ++s) Widen(raw[s], pass.types[s], v[s]);
  for (int i = 0; i + 1 < pass.count; ++i) {
    AddNodes(v, pass.additions[i], std::make_integer_sequence<int, kCount>());
  }
#pragma unroll
  for (int j = 0; j < kElements; ++j) {
    const float sum = pass.count > 0 ? v[0][j] : 0.0F;
    v[0][j] = pass.factor == 1.0F ? sum : sum * pass.factor;
    if constexpr (kSquares) squares += static_cast<double>(v[0][j]) * static_cast<double>(v[0][j]);
  }
  if constexpr (kElements == 1) {
    pass.destination[at] = v[0][0];
  } else {
#pragma unroll
    for (int j = 0; j < kElements; j += 4) {
      __stcs(reinterpret_cast<float4*>(pass.destination + at + j),
             make_float4(v[0][j], v[0][j + 1], v[0][j + 2], v[0][j + 3]));
    }
  }
}

// With squares a block of threads takes a block of 65,536 elements, else a chunk for each thread.
template <int kCount, bool kSquares>
__global__ void __launch_bounds__(kSquares ? kSquaresThreads : kPassThreads,
                                  kSquares&& kCount <= 4 ? 2 : 1)
    SumKernel(const __grid_constant__ PassList<SumPass> list) {
  constexpr int kThreads = kSquares ? kSquaresThreads : kPassThreads;
  constexpr int64_t kStep = int64_t{kThreads} * kChunk;
  constexpr int64_t kBlock = kSquares ? kSquaresBlock : kStep;
  const SumPass& pass = list.passes[blockIdx.y];
  if (blockIdx.x * kBlock >= pass.elements) return;
  double squares = 0;
  for (int64_t step = 0; step < kBlock; step += kStep) {
    const int64_t at = blockIdx.x * kBlock + step + threadIdx.x * kChunk;
    if (at + kChunk <= pass.elements) {
      SumElements<kCount, kChunk, kSquares>(pass, at, squares);
    } else {
      for (int64_t e = at; e < pass.elements; ++e) {
        SumElements<kCount, 1, kSquares>(pass, e, squares);
      }
    }
  }
  if constexpr (kSquares) {
    const double total = BlockSum<kThreads>(squares);
    if (threadIdx.x == 0) pass.squares[blockIdx.x] = total;
  }
}

// A block of threads for each block of 65,536 elements, in the order of SumKernel.
__global__ void __launch_bounds__(kSquaresThreads)
    SquaresKernel(const __grid_constant__ PassList<SquaresPass> list) {
  constexpr int kStep = kSquaresThreads * kChunk;
  const SquaresPass& pass = list.passes[blockIdx.y];
  const int64_t block = pass.first_element / kSquaresBlock + blockIdx.x;
  const int64_t from = max(block * kSquaresBlock - pass.first_element, int64_t{0});
  const int64_t to = min((block + 1) * kSquaresBlock - pass.first_element, pass.elements);
  if (from >= to) return;
  // Each thread's share depends on the place in the block alone, not on where `data` begins.
  const int64_t shift = block * kSquaresBlock - pass.first_element + threadIdx.x * kChunk;
  double sum = 0;
  const auto add = [&](float v) { sum += static_cast<double>(v) * static_cast<double>(v); };
  const bool aligned = reinterpret_cast<uintptr_t>(pass.data + shift) % 16 == 0;
  if (to - from == kSquaresBlock && aligned) {
#pragma unroll 4
    for (int i = 0; i < kSquaresBlock; i += kStep) {
      const auto* const data = reinterpret_cast<const float4*>(pass.data + shift + i);
      const float4 low = __ldcs(data);
      const float4 high = __ldcs(data + 1);
      for (const float v : {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}) add(v);
    }
  } else {
    for (int i = 0; i < kSquaresBlock; i += kStep) {
#pragma unroll
      for (int j = 0; j < kChunk; ++j) {
        const int64_t at = shift + i + j;
        add(at >= from && at < to ? pass.data[at] : 0.0F);
      }
    }
  }
  const double total = BlockSum<kSquaresThreads>(sum);
  if (threadIdx.x == 0) pass.sums[blockIdx.x] = total;
}

template <typename W>
__global__ void __launch_bounds__(kPassThreads)
    AdamWKernel(const __grid_constant__ PassList<AdamWPass> list) {
  const AdamWPass& p = list.passes[blockIdx.y];
  const int64_t begin = blockIdx.x * static_cast<int64_t>(kStretch) + threadIdx.x * 4;
  if (begin >= p.elements) return;
  const PassScalars& s = p.scalars;
  const bool active = s.active != 0;
  // In the precision in which torch.optim.AdamW multiplies tensors by them.
  const float factor = static_cast<float>(s.gradient_factor);
  const float decay = static_cast<float>(1.0 - s.learning_rate * s.weight_decay);
  const float weight1 = static_cast<float>(1.0 - s.beta1);
  const float beta2 = static_cast<float>(s.beta2);
  const float weight2 = static_cast<float>(1.0 - s.beta2);
  const float root2 = static_cast<float>(sqrt(s.bias_correction2));
  const float eps = static_cast<float>(s.eps);
  const float step = static_cast<float>(s.learning_rate / s.bias_correction1);
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    Four g[2];
    Four m[2];
    Four v[2];
    Four w[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int64_t at = begin + (i + h) * kPassThreads * 4;
      g[h] = active ? Load4(p.gradient, at, p.elements) : Four{};
      m[h] = Load4(p.m_in, at, p.elements);
      v[h] = Load4(p.v_in, at, p.elements);
      w[h] = Load4(p.master_in, at, p.elements);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int64_t at = begin + (i + h) * kPassThreads * 4;
      if (active) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float gradient = g[h].v[j] * factor;
          m[h].v[j] = Lerp(m[h].v[j], gradient, weight1);
          v[h].v[j] = v[h].v[j] * beta2 + weight2 * gradient * gradient;
          const float denominator = sqrtf(v[h].v[j]) / root2 + eps;
          w[h].v[j] = w[h].v[j] * decay - step * (m[h].v[j] / denominator);
        }
      }
      Store4(p.m_out, at, p.elements, m[h]);
      Store4(p.v_out, at, p.elements, v[h]);
      Store4(p.master_out, at, p.elements, w[h]);
      if (p.weight_out != nullptr) {
        Store4As<W>(static_cast<W*>(p.weight_out), at, p.elements, w[h]);
      }
    }
  }
}

template <bool kSquares>
cudaError_t LaunchSumOf(cudaStream_t stream, std::span<const SumPass> passes) {
  constexpr int64_t kBlock = kSquares ? kSquaresBlock : int64_t{kPassThreads} * kChunk;
  int count = 0;
  for (const SumPass& pass : passes) count = std::max(count, pass.count);
  return ForParts(
      passes, [](const SumPass& p) { return (p.elements + kBlock - 1) / kBlock; },
      [&](const PassList<SumPass>& list, dim3 grid) {
        constexpr int kThreads = kSquares ? kSquaresThreads : kPassThreads;
        if (count <= 1) {
          SumKernel<1, kSquares><<<grid, kThreads, 0, stream>>>(list);
        } else if (count <= 2) {
          SumKernel<2, kSquares><<<grid, kThreads, 0, stream>>>(list);
        } else if (count <= 4) {
          SumKernel<4, kSquares><<<grid, kThreads, 0, stream>>>(list);
        } else {
          SumKernel<kSumSourcesMax, kSquares><<<grid, kThreads, 0, stream>>>(list);
        }
      });
}

}  // namespace

cudaError_t LaunchSum(cudaStream_t stream, std::span<const SumPass> passes) {
  if (passes.empty()) return cudaSuccess;
  return passes[0].squares == nullptr ? LaunchSumOf<false>(stream, passes)
                                      : LaunchSumOf<true>(stream, passes);
}

cudaError_t LaunchSquares(cudaStream_t stream, std::span<const SquaresPass> passes) {
  return ForParts(
      passes,
      [](const SquaresPass& p) {
        return p.elements == 0 ? 0
                               : (p.first_element + p.elements - 1) / kSquaresBlock -
                                     p.first_element / kSquaresBlock + 1;
      },
      [&](const PassList<SquaresPass>& list, dim3 grid) {
        SquaresKernel<<<grid, kSquaresThreads, 0, stream>>>(list);
      });
}

cudaError_t LaunchAdamW(cudaStream_t stream, WeightType weight, std::span<const AdamWPass> passes) {
  return ForParts(
      passes, [](const AdamWPass& p) { return Stretches(p.elements); },
      [&](const PassList<AdamWPass>& list, dim3 grid) {
        switch (weight) {
          case WeightType::kBF16:
            AdamWKernel<__nv_bfloat16><<<grid, kPassThreads, 0, stream>>>(list);
            break;
          case WeightType::kF16:
            AdamWKernel<__half><<<grid, kPassThreads, 0, stream>>>(list);
            break;
          default:
            AdamWKernel<float><<<grid, kPassThreads, 0, stream>>>(list);
        }
      });
}

}  // namespace dmuond::kernels::cuda
