// The combinations of tile and layout that exist, instantiated once per element type.
#ifndef DMUOND_KERNELS_CUDA_GEMM_VARIANTS_CUH_
#define DMUOND_KERNELS_CUDA_GEMM_VARIANTS_CUH_

#include "kernels/cuda/gemm_kernel.cuh"

namespace dmuond::kernels::cuda {

template <typename T, int kTileN, bool kTwin>
GemmVariant FindGemmOfTile(GemmLayout layout) {
  constexpr int kBytes = GemmTraits<kTileN, kTwin>::kSharedBytes;
  constexpr int kThreads = GemmTraits<kTileN, kTwin>::kThreads;
  switch (layout) {
    case GemmLayout::kNT:
      return {GemmEntry<T, kTileN, kTwin, GemmLayout::kNT>, kBytes, kThreads};
    case GemmLayout::kNN:
      return {GemmEntry<T, kTileN, kTwin, GemmLayout::kNN>, kBytes, kThreads};
    case GemmLayout::kTN:
      return {GemmEntry<T, kTileN, kTwin, GemmLayout::kTN>, kBytes, kThreads};
  }
  return {nullptr, 0, 0};
}

template <typename T>
GemmVariant FindGemm(GemmTile tile, GemmLayout layout) {
  if (IsTwin(tile)) return FindGemmOfTile<T, 128, true>(layout);
  return Columns(tile) > 128 ? FindGemmOfTile<T, 256, false>(layout)
                             : FindGemmOfTile<T, 128, false>(layout);
}

}  // namespace dmuond::kernels::cuda

#endif  // DMUOND_KERNELS_CUDA_GEMM_VARIANTS_CUH_
