// The pipeline of every product: one producer warp feeds a ring of stages in shared memory through
// the copy engine, two consumer warpgroups multiply (64 rows each) and put the tile back into the
// ring, two sender warps store it from there. CTAs run in pairs; a pair on the same columns shares
// the loads of B by multicast, one of the narrowest tiles on the same rows those of A. See
// docs/kernels.md.
//   gemm_cta.cuh       the ring, its barriers, jobs
//   gemm_producer.cuh  loads
//   gemm_consumer.cuh  products, epilogues
//   gemm_sender.cuh    stores
#ifndef DMUOND_KERNELS_CUDA_GEMM_KERNEL_CUH_
#define DMUOND_KERNELS_CUDA_GEMM_KERNEL_CUH_

#include "kernels/cuda/gemm_consumer.cuh"
#include "kernels/cuda/gemm_cta.cuh"
#include "kernels/cuda/gemm_producer.cuh"
#include "kernels/cuda/gemm_sender.cuh"
#include "kernels/cuda/ptx.cuh"

namespace dmuond::kernels::cuda {

template <typename T, int kTileN, GemmLayout kLayout, bool kUpdate>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, GemmTraits<kTileN>::kCtas)
    GemmEntry(const __grid_constant__ GemmParams params) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const GemmCta<kTileN> cta(params, ptx::SharedAddress(shared));
  if (threadIdx.x == 0) cta.InitBarriers();
  ptx::ClusterSync();
  const int warp = ptx::WarpIndex();
  if (warp < 4) {
    ptx::RegistersDecrease<GemmTraits<kTileN>::kProducerRegisters>();
    if (warp == 0 && ptx::Elect()) GemmProducer<kTileN, kLayout>{cta}.Produce();
    if (warp == 1 || warp == 2) GemmSender<kTileN, kUpdate>{cta}.Send(warp - 1);
  } else {
    ptx::RegistersIncrease<GemmTraits<kTileN>::kConsumerRegisters>();
    GemmConsumer<T, kTileN, kLayout, kUpdate>{cta}.Consume();
  }
  ptx::ClusterSync();  // a CTA's shared memory is its partner's to write until both are done
}

// One file of instantiations per element type (nvcc's time).
using GemmFunction = void (*)(GemmParams);
struct GemmVariant {
  GemmFunction function;
  int shared_bytes;
};
template <typename T>
GemmVariant FindGemm(GemmTile tile, GemmLayout layout);
template <typename T>
GemmVariant FindUpdateGemm(GemmTile tile, GemmLayout layout);

}  // namespace dmuond::kernels::cuda

#endif  // DMUOND_KERNELS_CUDA_GEMM_KERNEL_CUH_
