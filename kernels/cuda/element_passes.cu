#include <algorithm>

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

// 16 bytes of a source, widened: 4 or 8 elements.
template <typename T>
struct Chunk {
  static constexpr int kElements = 16 / sizeof(T);
  float v[kElements];
};
template <typename T, bool kWhole>
__device__ __forceinline__ Chunk<T> LoadChunk(const T* from, int64_t at, int64_t end) {
  constexpr int kElements = Chunk<T>::kElements;
  Chunk<T> chunk;
  if (kWhole || at + kElements <= end) {
    const uint4 bits = __ldcs(reinterpret_cast<const uint4*>(from + at));
    const T* const values = reinterpret_cast<const T*>(&bits);
#pragma unroll
    for (int i = 0; i < kElements; ++i) chunk.v[i] = static_cast<float>(values[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      chunk.v[i] = at + i < end ? static_cast<float>(from[at + i]) : 0.0F;
    }
  }
  return chunk;
}

// One 16-byte access of each source a thread.
template <typename T>
constexpr int kSumStretch = kPassThreads* Chunk<T>::kElements;

// kWhole: no access of the block reaches beyond the end.
template <typename T, int kCount, bool kWhole>
__device__ __forceinline__ void SumBlock(const SumPass& pass, int64_t at) {
  constexpr int kElements = Chunk<T>::kElements;
  Chunk<T> v[kCount];
  bool present[kCount];
  const void* readable = nullptr;
#pragma unroll
  for (int s = 0; s < kCount; ++s) {
    present[s] = s < pass.count && pass.sources[s] != nullptr;
    if (present[s]) readable = pass.sources[s];
  }
  // An absent leaf's value is never used: any address that can be read will do.
  if (readable == nullptr) readable = pass.destination;
#pragma unroll
  for (int s = 0; s < kCount; ++s) {
    const void* const from = present[s] ? pass.sources[s] : readable;
    v[s] = LoadChunk<T, kWhole>(static_cast<const T*>(from), at, pass.elements);
  }
#pragma unroll
  for (int width = 1; width < kCount; width *= 2) {
#pragma unroll
    for (int s = 0; s + width < kCount; s += 2 * width) {
      const bool left = present[s];
      const bool right = present[s + width];
#pragma unroll
      for (int j = 0; j < kElements; ++j) {
        const float sum = v[s].v[j] + v[s + width].v[j];
        v[s].v[j] = left && right ? sum : right ? v[s + width].v[j] : v[s].v[j];
      }
      present[s] = left || right;
    }
  }
#pragma unroll
  for (int j = 0; j < kElements; j += 4) {
    Four out;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float sum = present[0] ? v[0].v[j + i] : 0.0F;
      out.v[i] = pass.factor == 1.0F ? sum : sum * pass.factor;
    }
    Store4(pass.destination, at + j, pass.elements, out);
  }
}

template <typename T, int kCount>
__global__ void __launch_bounds__(kPassThreads)
    SumKernel(const __grid_constant__ PassList<SumPass> list) {
  const SumPass& pass = list.passes[blockIdx.y];
  const int64_t first = blockIdx.x * static_cast<int64_t>(kSumStretch<T>);
  const int64_t at = first + threadIdx.x * Chunk<T>::kElements;
  if (first + kSumStretch<T> <= pass.elements) {
    SumBlock<T, kCount, true>(pass, at);
  } else if (at < pass.elements) {
    SumBlock<T, kCount, false>(pass, at);
  }
}

// A block of threads for each block of 65,536 elements, in a fixed order.
__global__ void __launch_bounds__(kPassThreads)
    SquaresKernel(const __grid_constant__ PassList<SquaresPass> list) {
  const SquaresPass& pass = list.passes[blockIdx.y];
  const int64_t block = pass.first_element / kSquaresBlock + blockIdx.x;
  const int64_t from = max(block * kSquaresBlock - pass.first_element, int64_t{0});
  const int64_t to = min((block + 1) * kSquaresBlock - pass.first_element, pass.elements);
  if (from >= to) return;
  // Each thread's share depends on the place in the block alone, not on where `data` begins.
  const int64_t shift = block * kSquaresBlock - pass.first_element;
  double sum = 0;
  const auto add = [&](const Four& v) {
#pragma unroll
    for (int j = 0; j < 4; ++j) sum += static_cast<double>(v.v[j]) * static_cast<double>(v.v[j]);
  };
  const bool aligned = reinterpret_cast<uintptr_t>(pass.data + shift) % 16 == 0;
  if (to - from == kSquaresBlock && aligned) {
    const float4* const data = reinterpret_cast<const float4*>(pass.data + shift) + threadIdx.x;
#pragma unroll 8
    for (int i = 0; i < kSquaresBlock / 4 / kPassThreads; ++i) {
      const float4 f = __ldcs(data + i * kPassThreads);
      add({{f.x, f.y, f.z, f.w}});
    }
  } else {
    for (int64_t i = threadIdx.x * 4; i < kSquaresBlock; i += kPassThreads * 4) {
      Four v;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int64_t at = shift + i + j;
        v.v[j] = at >= from && at < to ? pass.data[at] : 0.0F;
      }
      add(v);
    }
  }
  const double total = BlockSum(sum);
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

template <typename T>
cudaError_t LaunchSumOf(cudaStream_t stream, std::span<const SumPass> passes) {
  int count = 1;
  for (const SumPass& pass : passes) count = std::max(count, pass.count);
  if (count > kSumSourcesMax) return cudaErrorInvalidValue;
  return ForParts(
      passes, [](const SumPass& p) { return (p.elements + kSumStretch<T> - 1) / kSumStretch<T>; },
      [&](const PassList<SumPass>& list, dim3 grid) {
        if (count <= 1) {
          SumKernel<T, 1><<<grid, kPassThreads, 0, stream>>>(list);
        } else if (count <= 2) {
          SumKernel<T, 2><<<grid, kPassThreads, 0, stream>>>(list);
        } else if (count <= 4) {
          SumKernel<T, 4><<<grid, kPassThreads, 0, stream>>>(list);
        } else {
          SumKernel<T, 8><<<grid, kPassThreads, 0, stream>>>(list);
        }
      });
}

}  // namespace

cudaError_t LaunchSum(cudaStream_t stream, WeightType type, std::span<const SumPass> passes) {
  switch (type) {
    case WeightType::kBF16:
      return LaunchSumOf<__nv_bfloat16>(stream, passes);
    case WeightType::kF16:
      return LaunchSumOf<__half>(stream, passes);
    default:
      return LaunchSumOf<float>(stream, passes);
  }
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
        SquaresKernel<<<grid, kPassThreads, 0, stream>>>(list);
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
