// The producer of a small round's kernel, a warp of which one thread loads: X for the Gram matrix
// by slices, and once more by tiles for the product with Q.
#ifndef DMUOND_KERNELS_CUDA_SMALL_PRODUCER_CUH_
#define DMUOND_KERNELS_CUDA_SMALL_PRODUCER_CUH_

#include "kernels/cuda/small_cta.cuh"

namespace dmuond::kernels::cuda {

template <int kStrips, bool kTall>
struct SmallProducer : SmallCta<kStrips, kTall> {
  using Cta = SmallCta<kStrips, kTall>;
  using Cta::boxes;
  using Cta::empty;
  using Cta::full;
  using Cta::kCtas;
  using Cta::kGroups;
  using Cta::kTileBytes;
  using Cta::kTileStages;
  using Cta::matrix;
  using Cta::params;
  using Cta::rank;
  using Cta::Tile;
  using Cta::tile_empty;
  using Cta::tile_full;
  using Cta::TileAt;
  using Cta::Tiles;
  using Cta::X;
  using Cta::Y;

  __device__ void Produce() const {
    const bool elected = ptx::Elect();
    if (elected) {
      ptx::PrefetchTensorMap(&params.x);
      ptx::PrefetchTensorMap(&params.result);
    }
    ptx::WaitForPrevious();
    if (elected) ProduceSlices();
    __syncwarp();
    // The consumers' barriers, one in each product: every warp of the cluster takes part.
    for (int k = 0; k <= params.ops; ++k) ptx::ClusterSync();
    if (params.applies) {
      // Nobody reads what the tiles replace any more.
      ptx::NamedBarrierSync(kBarrierTiles, kGroups * 128 + 32);
      if (elected) ProduceTiles();
    }
    ptx::LaunchDependents();
  }

  // X by slices of 64 along its longer side; each CTA of a pair loads half of one for both.
  __device__ __forceinline__ void ProduceSlices() const {
    for (int i = 0; i < params.steps; ++i) {
      const int stage = i % kSmallStages;
      const uint32_t barrier = full + stage * 8;
      ptx::BarrierWait(empty + stage * 8, (i / kSmallStages + 1) & 1);
      ptx::BarrierArriveExpect(barrier, kStrips * kBoxBytes);
#pragma unroll
      for (int first = 0; first < kStrips; first += kCtas) {
        if (first + kCtas > kStrips && rank > 0) break;  // the odd panel of three
        const int panel = first + static_cast<int>(rank);
        const uint32_t to = boxes + stage * kSmallStageBytes + panel * kBoxBytes;
        if constexpr (kCtas == 2) {
          ptx::TensorLoadMulticast(to, &params.x, barrier, 3, X(i, panel), Y(i, panel), matrix);
        } else {
          ptx::TensorLoad(to, &params.x, barrier, X(i, panel), Y(i, panel), matrix);
        }
      }
    }
  }

  __device__ __forceinline__ void ProduceTiles() const {
    for (int index = 0; index < Tiles(); ++index) {
      const int tile = TileAt(index);
      const int stage = index % kTileStages;
      const uint32_t barrier = tile_full + stage * 8;
      ptx::BarrierWait(tile_empty + stage * 8, (index / kTileStages + 1) & 1);
      ptx::BarrierArriveExpect(barrier, kTileBytes);
      for (int panel = 0; panel < kStrips; ++panel) {
        ptx::TensorLoad(Tile(stage) + panel * kBoxBytes, &params.x, barrier, X(tile, panel),
                        Y(tile, panel), matrix);
      }
    }
  }
};

}  // namespace dmuond::kernels::cuda

#endif  // DMUOND_KERNELS_CUDA_SMALL_PRODUCER_CUH_
