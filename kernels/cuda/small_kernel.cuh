// A Newton-Schulz round of a matrix of at most 256 rows inside one CTA or a cluster of two: the
// Gram matrix of X, every symmetric product after it and the product with X, without going back to
// device memory between them.
//
// Matrices are lower triangles of 64 x 64 boxes in shared memory; what lies above the diagonal is
// read as the transpose of what lies below, through the descriptors of wgmma. Each CTA of a pair
// computes half of a product's boxes and sends them to its partner. Accumulators hold a whole
// product, so a result may take the place of an operand. See docs/kernels.md.
//
// Elements are summed in the same order and rounded in the same places as in gemm_kernel.cuh: the
// bits are the same.
//
//   small_cta.cuh       where boxes lie, barriers
//   small_producer.cuh  loads
//   small_worker.cuh    symmetric products
//   small_apply.cuh     the product with X
#ifndef DMUOND_KERNELS_CUDA_SMALL_KERNEL_CUH_
#define DMUOND_KERNELS_CUDA_SMALL_KERNEL_CUH_

#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/small_apply.cuh"
#include "kernels/cuda/small_cta.cuh"
#include "kernels/cuda/small_producer.cuh"
#include "kernels/cuda/small_worker.cuh"

namespace dmuond::kernels::cuda {

// The warpgroup's own worker.
template <typename T, int kStrips, bool kTall, int kGroup>
__device__ __forceinline__ void ConsumeAs(const SmallCta<kStrips, kTall>& cta, int group) {
  if constexpr (kGroup < SmallGroups(kStrips)) {
    if (group != kGroup) {
      ConsumeAs<T, kStrips, kTall, kGroup + 1>(cta, group);
    } else if (SmallCtas(kStrips) == 1 || cta.rank == 0) {
      SmallWorker<T, kStrips, kTall, 0, kGroup>{cta}.Consume();
    } else {
      SmallWorker<T, kStrips, kTall, SmallCtas(kStrips) - 1, kGroup>{cta}.Consume();
    }
  }
}

template <typename T, int kStrips, bool kTall>
__global__ void __cluster_dims__(SmallCtas(kStrips), 1, 1)
    __launch_bounds__(SmallThreads(kStrips), 1)
        SmallEntry(const __grid_constant__ SmallParams params) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const SmallCta<kStrips, kTall> cta(params, ptx::SharedAddress(shared));
  if (threadIdx.x == 0) cta.InitBarriers();
  ptx::ClusterSync();
  const int group = static_cast<int>(threadIdx.x / 128) - 1;
  if (group < 0) {
    if (ptx::WarpIndex() != 0) return;
    SmallProducer<kStrips, kTall>{cta}.Produce();
  } else {
    ConsumeAs<T, kStrips, kTall, 0>(cta, group);
    if (params.applies) {
      if (SmallCtas(kStrips) == 1 || cta.rank == 0) {
        SmallApplier<T, kStrips, kTall, 0>{cta}.Apply(group);
      } else {
        SmallApplier<T, kStrips, kTall, SmallCtas(kStrips) - 1>{cta}.Apply(group);
      }
    }
  }
  // What this CTA has sent must have left, and what the other sends must find it.
  if (params.applies && SmallCtas(kStrips) == 2) ptx::ClusterSync();
}

}  // namespace dmuond::kernels::cuda

#endif  // DMUOND_KERNELS_CUDA_SMALL_KERNEL_CUH_
