// A symmetric product of at most 256 rows and columns, and as many along k, in a cluster of two
// CTAs: everything that it reads fits into shared memory, so there is no ring. Of the ten boxes of
// 64 x 64 on or below the diagonal a CTA computes a row from the lower half and one from the upper
// half, five together: three by one warpgroup, two by the other. Both CTAs take in all of B, each
// loads half of it for both.
//
// Elements are summed in the same order and rounded in the same places as in gemm_kernel.cuh: the
// bits are the same. See docs/kernels.md.
#ifndef DMUOND_KERNELS_CUDA_WHOLE_KERNEL_CUH_
#define DMUOND_KERNELS_CUDA_WHOLE_KERNEL_CUH_

#include "kernels/cuda/fragments.cuh"
#include "kernels/cuda/gemm.h"
#include "kernels/cuda/ptx.cuh"

namespace dmuond::kernels::cuda {

struct WholeParams {
  CUtensorMap a;  // boxes of 64 x 64
  CUtensorMap b;
  CUtensorMap c;
  CUtensorMap c2;
  CUtensorMap d;
  DeviceScalar alpha;
  DeviceScalar beta;
  DeviceScalar beta2;
  float diagonal;
  bool same;  // A is B
  bool has_c;
  bool has_c2;
};

constexpr int kWholeStrips = 4;
constexpr int kWholeSteps = 4;                   // of 64 along k
constexpr int kWholeResults = kWholeStrips + 1;  // boxes that a CTA computes
constexpr int kWholeGroups = 2;
constexpr int kGroupResults = 3;  // boxes of the first warpgroup
constexpr int kWholeThreads = (kWholeGroups + 1) * 128;
constexpr int kWholeBoxes = 28;
constexpr int kWholeBarriers = kWholeSteps + 2;
constexpr int kWholeSharedBytes = kWholeBoxes * kBoxBytes + kWholeBarriers * 8;

template <typename T>
struct WholeKernel {
  const WholeParams& params;
  uint32_t boxes;  // shared memory addresses
  uint32_t full;
  uint32_t first_read;  // nobody needs the first step's operands any more
  uint32_t addends;
  int rank;
  int matrix;

  __device__ WholeKernel(const WholeParams& kernel_params, uint32_t shared)
      : params(kernel_params), boxes(shared) {
    if (shared % 1024 != 0) __trap();  // what the swizzle asks for
    full = boxes + kWholeBoxes * kBoxBytes;
    first_read = full + kWholeSteps * 8;
    addends = first_read + 8;
    rank = static_cast<int>(ptx::ClusterRank());
    matrix = static_cast<int>(blockIdx.x) / 2;
  }

  __device__ void InitBarriers() const {
    for (int k = 0; k < kWholeSteps; ++k) ptx::BarrierInit(full + k * 8, 1);
    ptx::BarrierInit(first_read, kWholeGroups);
    ptx::BarrierInit(addends, 1);
    ptx::FenceBarrierInit();
  }

  // The CTA's two rows of boxes.
  __device__ __forceinline__ int Lower() const { return kWholeStrips - 1 - rank; }
  __device__ __forceinline__ int Upper() const { return rank; }
  // The boxes that it computes: those of the lower row come first.
  __device__ __forceinline__ int Row(int result) const {
    return result <= Lower() ? Lower() : Upper();
  }
  __device__ __forceinline__ int Col(int result) const {
    return result <= Lower() ? result : result - Lower() - 1;
  }

  // 16 boxes of B, 8 of A where it is another matrix. Two addends' boxes come behind them; where
  // there is A, some in the place of the first step's operands.
  __device__ __forceinline__ uint32_t OperandB(int k, int strip) const {
    return boxes + (k * kWholeStrips + strip) * kBoxBytes;
  }
  __device__ __forceinline__ uint32_t OperandA(int k, int row) const {
    if (params.same) return OperandB(k, row);
    return boxes + (16 + 2 * k + (row == Lower() ? 0 : 1)) * kBoxBytes;
  }
  __device__ __forceinline__ uint32_t Addend(int which, int result) const {
    const int i = which * kWholeResults + result;
    const int box = params.same ? 16 + i : i < 4 ? 24 + i : i < 8 ? i - 4 : 8 + i;
    return boxes + box * kBoxBytes;
  }
  // In the place of the last steps' operands.
  __device__ __forceinline__ uint32_t Mirror(int result) const {
    return boxes + (8 + result) * kBoxBytes;
  }

  __device__ void Produce() const {
    ptx::PrefetchTensorMap(&params.a);
    ptx::PrefetchTensorMap(&params.b);
    ptx::PrefetchTensorMap(&params.d);
    if (params.has_c) ptx::PrefetchTensorMap(&params.c);
    ptx::WaitForPrevious();
    for (int k = 0; k < kWholeSteps; ++k) {
      const uint32_t barrier = full + k * 8;
      ptx::BarrierArriveExpect(barrier, (kWholeStrips + (params.same ? 0 : 2)) * kBoxBytes);
      for (int strip = 2 * rank; strip < 2 * rank + 2; ++strip) {
        ptx::TensorLoadMulticast(OperandB(k, strip), &params.b, barrier, 3, k * 64, strip * 64,
                                 matrix);
      }
      if (params.same) continue;
      ptx::TensorLoad(OperandA(k, Lower()), &params.a, barrier, k * 64, Lower() * 64, matrix);
      ptx::TensorLoad(OperandA(k, Upper()), &params.a, barrier, k * 64, Upper() * 64, matrix);
    }
    const int count = (params.has_c ? 1 : 0) + (params.has_c2 ? 1 : 0);
    if (count > 0) {
      if (!params.same) ptx::BarrierWait(first_read, 0);
      ptx::BarrierArriveExpect(addends, count * kWholeResults * kBoxBytes);
      if (params.has_c) LoadAddend(params.c, 0);
      if (params.has_c2) LoadAddend(params.c2, 1);
    }
    ptx::LaunchDependents();
  }
  __device__ __forceinline__ void LoadAddend(const CUtensorMap& map, int which) const {
    for (int result = 0; result < kWholeResults; ++result) {
      ptx::TensorLoad(Addend(which, result), &map, addends, Col(result) * 64, Row(result) * 64,
                      matrix);
    }
  }

  // Accumulators of so many boxes, of one at least.
  template <int kBoxes>
  using Accumulators = float[(kBoxes > 0 ? kBoxes : 1) * 32];

  // kOne boxes side by side from `first` on, and kTwo of the other row after them.
  template <int kOne, int kTwo>
  __device__ __forceinline__ void Multiply(Accumulators<kOne>& one, Accumulators<kTwo>& two,
                                           int first, const GroupThread& thread) const {
#pragma unroll
    for (int k = 0; k < kWholeSteps; ++k) {
      const auto from = [&](uint32_t box) { return ptx::MatrixDescriptor(box, kBoxBytes); };
      const uint64_t a = from(OperandA(k, Row(first)));
      const uint64_t b = from(OperandB(k, Col(first)));
      const uint64_t other_a = from(OperandA(k, Row(first + kOne)));
      const uint64_t other_b = from(OperandB(k, Col(first + kOne)));
      ptx::BarrierWait(full + k * 8, 0);
      ptx::WgmmaFence();
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int accumulate = k > 0 || i > 0 ? 1 : 0;
        constexpr uint64_t kAdvance = 32 >> 4;  // 16 along k
        ptx::Wgmma<T, kOne * 64, 0, 0>(one, a + i * kAdvance, b + i * kAdvance, accumulate);
        if constexpr (kTwo > 0) {
          ptx::Wgmma<T, kTwo * 64, 0, 0>(two, other_a + i * kAdvance, other_b + i * kAdvance,
                                         accumulate);
        }
      }
      ptx::WgmmaCommit();
      if (k == 1) {
        ptx::WgmmaWait<1>();
        if (thread.thread == 0) ptx::BarrierArriveRemote(first_read, rank);
      }
    }
    ptx::WgmmaWait<0>();
  }

  // A box of the result: addends, rounding, and on its way with its mirror image.
  __device__ __forceinline__ void Finish(float* x, float alpha, float beta, float beta2, int result,
                                         int group, const GroupThread& thread) const {
    const int row = Row(result);
    const int col = Col(result);
    const uint32_t box = Addend(0, result);
    float scale = alpha;
    if (params.has_c2) {
      AddBox<T>(x, scale, beta2, Addend(1, result), thread);
      scale = 1;
    }
    if (params.has_c) {
      AddBox<T>(x, scale, beta, box, thread);
    } else {
#pragma unroll
      for (int i = 0; i < 32; ++i) x[i] *= scale;
    }
    uint32_t packed[16];
    RoundBox<T>(x, row == col ? params.diagonal : 0.0F, thread, packed);
    if (row == col) {
      StageDiagonal(packed, thread, Mirror(result));
    } else {
      StageBox(packed, thread, box);
      StageMirror(packed, thread, Mirror(result));
    }
    ptx::FenceProxyAsync();
    ptx::NamedBarrierSync(2 + group, 128);
    if (thread.thread == 0) {
      if (row != col) ptx::TensorStore(&params.d, box, col * 64, row * 64, matrix);
      ptx::TensorStore(&params.d, Mirror(result), row * 64, col * 64, matrix);
      ptx::BulkCommit();
    }
  }

  template <int kOne, int kTwo>
  __device__ __forceinline__ void ConsumeBoxes(int group) const {
    const GroupThread thread = ThisGroupThread();
    ptx::WaitForPrevious();
    const float alpha = Load(params.alpha, matrix);
    const float beta = Load(params.beta, matrix);
    const float beta2 = Load(params.beta2, matrix);
    const int first = group * kGroupResults;
    Accumulators<kOne> one;
    Accumulators<kTwo> two;
    Multiply<kOne, kTwo>(one, two, first, thread);
    ptx::NamedBarrierSync(1, kWholeGroups * 128);  // every operand has been read
    if (params.has_c || params.has_c2) ptx::BarrierWait(addends, 0);
#pragma unroll
    for (int i = 0; i < kOne + kTwo; ++i) {
      float* const x = i < kOne ? one + i * 32 : two + (i - kOne) * 32;
      Finish(x, alpha, beta, beta2, first + i, group, thread);
    }
    if (thread.thread == 0) ptx::BulkWaitRead<0>();
  }

  __device__ void Consume(int group) const {
    if (group == 0) {
      ConsumeBoxes<3, 0>(group);
    } else if (rank == 0) {
      ConsumeBoxes<1, 1>(group);
    } else {
      ConsumeBoxes<2, 0>(group);
    }
  }
};

template <typename T>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kWholeThreads, 1)
    WholeEntry(const __grid_constant__ WholeParams params) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const WholeKernel<T> kernel(params, ptx::SharedAddress(shared));
  if (threadIdx.x == 0) kernel.InitBarriers();
  ptx::ClusterSync();
  if (threadIdx.x < 128) {
    if (threadIdx.x == 0) kernel.Produce();
    __syncwarp();
  } else {
    kernel.Consume(static_cast<int>(threadIdx.x / 128) - 1);
  }
  ptx::ClusterSync();  // a CTA's shared memory is its partner's to write until both are done
}

}  // namespace dmuond::kernels::cuda

#endif  // DMUOND_KERNELS_CUDA_WHOLE_KERNEL_CUH_
