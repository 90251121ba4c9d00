// A product's epilogue that is the end of a Muon update: D, rounded as if it were stored, goes into
// masters and weights instead of memory. Bits are those of LaunchApply() after the product.
#ifndef DMUOND_KERNELS_CUDA_GEMM_UPDATE_CUH_
#define DMUOND_KERNELS_CUDA_GEMM_UPDATE_CUH_

#include <cstddef>

#include "kernels/cuda/gemm.h"
#include "kernels/cuda/muon_passes.h"
#include "kernels/cuda/pass_access.cuh"
#include "kernels/cuda/ptx.cuh"

namespace dmuond::kernels::cuda {

struct GemmUpdateParams {
  const PassMatrix* matrices;
  const float* inverse_norm;
  double scale;
  int64_t cols;  // of D: masters and weights are contiguous
  int rows;
  WeightType weight;
  double* squares;
};

// What the threads of a consumer need of a matrix; goes through shared memory, since its way from
// device memory is long.
struct alignas(16) MatrixUpdate {
  const float* master_in;
  float* master_out;
  void* weight_out;
  float keep;
  float rate;
  uint32_t directed;
  uint32_t padding[3];
};
static_assert(sizeof(MatrixUpdate) == 48);

__device__ __forceinline__ MatrixUpdate ReadMatrixUpdate(const GemmUpdateParams& params,
                                                         int batch) {
  const PassMatrix& m = params.matrices[batch];
  const bool active = m.scalars.active != 0;
  const double learning_rate = m.scalars.learning_rate;
  MatrixUpdate update{};
  update.master_in = m.master_in;
  update.master_out = m.master_out;
  update.weight_out = m.weight_out;
  update.keep = active ? static_cast<float>(1.0 - learning_rate * m.scalars.weight_decay) : 1.0F;
  update.rate = active ? static_cast<float>(learning_rate * params.scale) : 0.0F;
  update.directed = active && params.inverse_norm[batch] != 0.0F ? 1 : 0;
  return update;
}
__device__ __forceinline__ void StoreMatrixUpdate(uint32_t shared, const MatrixUpdate& update) {
  const auto* words = reinterpret_cast<const float4*>(&update);
#pragma unroll
  for (int i = 0; i < 3; ++i) ptx::StoreShared4(shared + i * 16, words[i]);
}
__device__ __forceinline__ MatrixUpdate LoadMatrixUpdate(uint32_t shared) {
  MatrixUpdate update;
  auto* words = reinterpret_cast<float4*>(&update);
#pragma unroll
  for (int i = 0; i < 3; ++i) words[i] = ptx::LoadShared4(shared + i * 16);
  return update;
}

// A thread's part of a consumer's 64 rows, chunk by chunk of 64 columns. Of a wgmma fragment a
// thread has two columns side by side; pairs of threads exchange theirs, so that each access is 16
// bytes of a row, and a warp's 64 bytes of each of eight rows.
template <typename T>
class UpdateEpilogue {
 public:
  // Of half a chunk: more would not fit into registers.
  static constexpr int kHalf = 4;
  struct Masters {
    float4 v[kHalf];
  };

  // row, col: of the consumer's first element in D.
  __device__ UpdateEpilogue(const GemmUpdateParams& params, const MatrixUpdate& update, int row,
                            int col, int warp, int lane)
      : keep_(update.keep),
        rate_(update.rate),
        directed_(update.directed != 0),
        odd_(lane % 2 != 0),
        weight_(update.weight_out == nullptr ? WeightType{} : params.weight) {
    row += warp * 16 + lane / 4;
    col += lane % 2 * 8 + lane % 4 / 2 * 4;
    rows_ = params.rows - row;
    cols_ = static_cast<int>(params.cols) - col;
    const int64_t at = static_cast<int64_t>(row) * params.cols + col;
    const int64_t bytes = weight_ == WeightType::kF32 ? 4 : 2;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int64_t from = at + h * 8 * params.cols;
      in_[h] = update.master_in + from;
      out_[h] = update.master_out + from;
      weights_[h] = static_cast<std::byte*>(update.weight_out) + from * bytes;
    }
  }

  __device__ __forceinline__ void LoadMasters(int chunk, int half, Masters& masters) const {
#pragma unroll
    for (int k = 0; k < kHalf; ++k) {
      const int i = half * kHalf + k;
      if (Exists(chunk, i)) {
        masters.v[k] = __ldcs(reinterpret_cast<const float4*>(in_[i % 2] + Offset(chunk, i)));
      }
    }
  }

  // packed: as GemmKernel::Round() leaves a chunk.
  __device__ __forceinline__ void Apply(int chunk, int half, const uint32_t (&packed)[16],
                                        const Masters& masters) {
#pragma unroll
    for (int k = 0; k < kHalf; ++k) {
      const int i = half * kHalf + k;
      const int first = i / 2 * 4 + i % 2;  // 8 x 8 block (i % 2, 2 (i / 2)), and that beside it
      const uint32_t mine = odd_ ? packed[first + 2] : packed[first];
      const uint32_t other =
          __shfl_xor_sync(0xFFFFFFFF, odd_ ? packed[first] : packed[first + 2], 1);
      if (!Exists(chunk, i)) continue;
      const float4 w = masters.v[k];
      const float2 low = Widen(odd_ ? other : mine);
      const float2 high = Widen(odd_ ? mine : other);
      squares_ += low.x * low.x + low.y * low.y + high.x * high.x + high.y * high.y;
      const Four next = {
          {Next(w.x, low.x), Next(w.y, low.y), Next(w.z, high.x), Next(w.w, high.y)}};
      const int at = Offset(chunk, i);
      Store4(out_[i % 2], at, at + 4, next);
      std::byte* const weights = weights_[i % 2];
      if (weight_ == WeightType::kBF16) {
        Store4As(reinterpret_cast<__nv_bfloat16*>(weights), at, at + 4, next);
      } else if (weight_ == WeightType::kF16) {
        Store4As(reinterpret_cast<__half*>(weights), at, at + 4, next);
      } else if (weight_ == WeightType::kF32) {
        Store4As(reinterpret_cast<float*>(weights), at, at + 4, next);
      }
    }
    __syncwarp();
  }

  // After the last chunk: adds the squares of what the warp has applied to those of the matrix, in
  // device memory. Nobody waits for it.
  __device__ __forceinline__ void AddSquares(double* squares, int lane) const {
    if (!directed_) return;
    float sum = squares_;
#pragma unroll
    for (int d = 16; d > 0; d /= 2) sum += __shfl_down_sync(0xFFFFFFFF, sum, d);
    if (lane == 0) atomicAdd(squares, static_cast<double>(sum));
  }

 private:
  // Access i of a chunk: rows 8 (i % 2) further down, columns 16 (i / 2) to the right.
  __device__ __forceinline__ bool Exists(int chunk, int i) const {
    return i % 2 * 8 < rows_ && chunk * 64 + i / 2 * 16 < cols_;
  }
  __device__ __forceinline__ static constexpr int Offset(int chunk, int i) {
    return chunk * 64 + i / 2 * 16;
  }
  __device__ __forceinline__ static float2 Widen(uint32_t pair) {
    if constexpr (std::is_same_v<T, __half>) {
      return __half22float2(*reinterpret_cast<const __half2*>(&pair));
    } else {
      return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&pair));
    }
  }
  // No contraction: the bits of the pass, and of the CPU.
  __device__ __forceinline__ float Next(float master, float direction) const {
    return __fsub_rn(__fmul_rn(master, keep_), directed_ ? __fmul_rn(rate_, direction) : 0.0F);
  }

  const float* in_[2];  // of two rows, 8 apart
  float* out_[2];
  std::byte* weights_[2];
  int rows_;  // that are left, from the first one on
  int cols_;
  float squares_ = 0;
  float keep_;
  float rate_;
  bool directed_;
  bool odd_;
  WeightType weight_;  // none of them: no weights
};

}  // namespace dmuond::kernels::cuda

#endif  // DMUOND_KERNELS_CUDA_GEMM_UPDATE_CUH_
