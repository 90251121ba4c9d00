// The combinations of tile and layout that exist, instantiated once per element type.
#ifndef DMUOND_KERNELS_CUDA_GEMM_VARIANTS_CUH_
#define DMUOND_KERNELS_CUDA_GEMM_VARIANTS_CUH_

#include "kernels/cuda/gemm_kernel.cuh"

namespace dmuond::kernels::cuda {

template <typename T, int kTileN, bool kUpdate>
GemmVariant FindGemmOfTile(GemmLayout layout) {
  constexpr int kBytes = GemmTraits<kTileN>::kSharedBytes;
  switch (layout) {
    case GemmLayout::kNT:
      return {GemmEntry<T, kTileN, GemmLayout::kNT, kUpdate>, kBytes};
    case GemmLayout::kNN:
      return {GemmEntry<T, kTileN, GemmLayout::kNN, kUpdate>, kBytes};
    case GemmLayout::kTN:
      if constexpr (!kUpdate) return {GemmEntry<T, kTileN, GemmLayout::kTN, false>, kBytes};
      break;
    case GemmLayout::kSS:
      if constexpr (kTileN == 256 && !kUpdate) {
        return {GemmEntry<T, kTileN, GemmLayout::kSS, false>, kBytes};
      }
      break;
  }
  return {nullptr, 0};
}

template <typename T>
GemmVariant FindGemm(GemmTile tile, GemmLayout layout) {
  if (Columns(tile) == 64) return FindGemmOfTile<T, 64, false>(layout);
  return Columns(tile) > 128 ? FindGemmOfTile<T, 256, false>(layout)
                             : FindGemmOfTile<T, 128, false>(layout);
}
// An update's registers leave no room for the narrowest kernel.
template <typename T>
GemmVariant FindUpdateGemm(GemmTile tile, GemmLayout layout) {
  return Columns(tile) > 128 ? FindGemmOfTile<T, 256, true>(layout)
                             : FindGemmOfTile<T, 128, true>(layout);
}

}  // namespace dmuond::kernels::cuda

#endif  // DMUOND_KERNELS_CUDA_GEMM_VARIANTS_CUH_
