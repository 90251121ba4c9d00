#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "kernels/cuda/strided_passes.h"

namespace dmuond::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kBlocksMax = 132 * 16;
constexpr int kOpenNodesMax = 18;  // trees have at most 2^16 leaves

static_assert(sizeof(StridedSum) < 32'000);

struct Index {
  int64_t at[kStridedDimsMax];
};

template <typename Box>
__device__ __forceinline__ Index IndexOf(const Box& box, int64_t element) {
  Index index;
  for (int d = box.dims - 1; d > 0; --d) {
    index.at[d] = element % box.shape[d];
    element /= box.shape[d];
  }
  index.at[0] = element;
  return index;
}
__device__ __forceinline__ int64_t Offset(const int64_t* strides, int dims, const Index& index) {
  int64_t offset = 0;
  for (int d = 0; d < dims; ++d) offset += index.at[d] * strides[d];
  return offset;
}

__device__ __forceinline__ float Widened(const void* data, WeightType type, int64_t at) {
  switch (type) {
    case WeightType::kBF16:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[at]);
    case WeightType::kF16:
      return __half2float(static_cast<const __half*>(data)[at]);
    default:
      return static_cast<const float*>(data)[at];
  }
}

// The tree, walked like a binary counter: a complete subtree waits until its sibling is complete.
// What is left at the end is merged from the small end, which carries odd last nodes up.
class Tree {
 public:
  __device__ __forceinline__ void Push(bool present, float value, int level) {
    values_[depth_] = value;
    present_[depth_] = present;
    levels_[depth_] = level;
    ++depth_;
    while (depth_ >= 2 && levels_[depth_ - 1] == levels_[depth_ - 2]) Merge();
  }
  // 0 where every source was absent.
  __device__ __forceinline__ float Finish() {
    while (depth_ >= 2) Merge();
    return depth_ == 1 && present_[0] ? values_[0] : 0.0F;
  }

 private:
  __device__ __forceinline__ void Merge() {
    const int right = --depth_;
    const int left = right - 1;
    if (present_[left] && present_[right]) {
      values_[left] += values_[right];
    } else if (present_[right]) {
      values_[left] = values_[right];
      present_[left] = true;
    }
    ++levels_[left];
  }

  float values_[kOpenNodesMax];
  bool present_[kOpenNodesMax];
  int levels_[kOpenNodesMax];
  int depth_ = 0;
};

enum class Sources : uint8_t {
  kOne,   // which needs no tree
  kSome,  // in the parameters
  kMany,  // at `many`
};

template <Sources kSources>
__global__ void __launch_bounds__(kThreads)
    SumKernel(const __grid_constant__ StridedSum sum, const StridedOperand* many) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t e = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x; e < sum.elements;
       e += step) {
    const Index index = IndexOf(sum, e);
    const auto load = [&](const StridedOperand& source) {
      return Widened(source.data, source.type, Offset(source.strides, sum.dims, index));
    };
    float value = 0;
    if constexpr (kSources == Sources::kOne) {
      value = load(sum.sources[0]);
    } else {
      Tree tree;
      for (int s = 0; s < sum.count; ++s) {
        const StridedOperand& source = kSources == Sources::kMany ? many[s] : sum.sources[s];
        const bool present = source.data != nullptr;
        tree.Push(present, present ? load(source) : 0.0F, source.level);
      }
      value = tree.Finish();
    }
    sum.destination[Offset(sum.strides, sum.dims, index)] =
        sum.factor == 1.0F ? value : value * sum.factor;
  }
}

__device__ __forceinline__ void StoreAs(void* data, WeightType type, int64_t at, float value) {
  switch (type) {
    case WeightType::kBF16:
      static_cast<__nv_bfloat16*>(data)[at] = __float2bfloat16_rn(value);
      break;
    case WeightType::kF16:
      static_cast<__half*>(data)[at] = __float2half_rn(value);
      break;
    default:
      static_cast<float*>(data)[at] = value;
  }
}

__global__ void __launch_bounds__(kThreads) CopyKernel(const __grid_constant__ StridedCopy copy) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t e = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x; e < copy.elements;
       e += step) {
    const Index index = IndexOf(copy, e);
    const int64_t to = Offset(copy.strides, copy.dims, index);
    if (copy.source.data == nullptr) {
      StoreAs(copy.destination, copy.type, to, copy.value);
      continue;
    }
    const int64_t from = Offset(copy.source.strides, copy.dims, index);
    if (copy.source.type != copy.type) {
      StoreAs(copy.destination, copy.type, to, Widened(copy.source.data, copy.source.type, from));
    } else if (copy.type == WeightType::kF32) {
      static_cast<uint32_t*>(copy.destination)[to] =
          static_cast<const uint32_t*>(copy.source.data)[from];
    } else {
      static_cast<uint16_t*>(copy.destination)[to] =
          static_cast<const uint16_t*>(copy.source.data)[from];
    }
  }
}

unsigned Blocks(int64_t elements) {
  return static_cast<unsigned>(std::min(kBlocksMax, (elements + kThreads - 1) / kThreads));
}

}  // namespace

cudaError_t LaunchStridedSum(cudaStream_t stream, const StridedSum& sum) {
  if (sum.count > kStridedSourcesMax) return cudaErrorInvalidValue;
  if (sum.elements == 0) return cudaSuccess;
  if (sum.count == 1 && sum.sources[0].data != nullptr) {
    SumKernel<Sources::kOne><<<Blocks(sum.elements), kThreads, 0, stream>>>(sum, nullptr);
  } else {
    SumKernel<Sources::kSome><<<Blocks(sum.elements), kThreads, 0, stream>>>(sum, nullptr);
  }
  return cudaGetLastError();
}

cudaError_t LaunchStridedSumOfMany(cudaStream_t stream, StridedSum sum,
                                   std::span<const StridedOperand> sources) {
  if (sum.elements == 0) return cudaSuccess;
  sum.count = static_cast<int>(sources.size());
  StridedOperand* many = nullptr;
  cudaError_t result =
      cudaMallocAsync(reinterpret_cast<void**>(&many), sources.size_bytes(), stream);
  if (result != cudaSuccess) return result;
  // From pageable memory: it is read before this returns.
  result =
      cudaMemcpyAsync(many, sources.data(), sources.size_bytes(), cudaMemcpyHostToDevice, stream);
  if (result == cudaSuccess) {
    SumKernel<Sources::kMany><<<Blocks(sum.elements), kThreads, 0, stream>>>(sum, many);
    result = cudaGetLastError();
  }
  const cudaError_t freed = cudaFreeAsync(many, stream);
  return result == cudaSuccess ? freed : result;
}

cudaError_t LaunchStridedCopy(cudaStream_t stream, const StridedCopy& copy) {
  if (copy.elements == 0) return cudaSuccess;
  CopyKernel<<<Blocks(copy.elements), kThreads, 0, stream>>>(copy);
  return cudaGetLastError();
}

}  // namespace dmuond::kernels::cuda
