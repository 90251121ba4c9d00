// The product with X at the end of a small round.
#ifndef DMUOND_KERNELS_CUDA_SMALL_APPLY_CUH_
#define DMUOND_KERNELS_CUDA_SMALL_APPLY_CUH_

#include "kernels/cuda/small_cta.cuh"

namespace dmuond::kernels::cuda {

// A warpgroup of a CTA. Q lies in the first place of both CTAs.
template <typename T, int kStrips, bool kTall, int kRank>
struct SmallApplier : SmallCta<kStrips, kTall> {
  using Cta = SmallCta<kStrips, kTall>;
  using Cta::boxes;
  using Cta::kGroups;
  using Cta::kTileStages;
  using Cta::matrix;
  using Cta::params;
  using Cta::Tile;
  using Cta::tile_empty;
  using Cta::tile_full;
  using Cta::TileAt;
  using Cta::Tiles;
  using Cta::X;
  using Cta::Y;

  // Strip kStrip of a tile's product: row kStrip of boxes of Q * X, or column kStrip of X * Q.
  template <int kStrip>
  __device__ __forceinline__ void MultiplyStrip(float (&acc)[32], uint32_t tile) const {
    const uint64_t from_q = ptx::MatrixDescriptor(boxes, kBoxBytes);
    const uint64_t from_x = ptx::MatrixDescriptor(tile, kBoxBytes);
    ptx::WgmmaFence();
#pragma unroll
    for (int kb = 0; kb < kStrips; ++kb) {
      constexpr int kAdvance = 2048;  // of 16 along k where k goes down the rows
      const bool transposed = kb > kStrip;
      const int box = transposed ? SmallBoxIndex(kStrips, kRank, kb, kStrip)
                                 : SmallBoxIndex(kStrips, kRank, kStrip, kb);
      const uint64_t q = from_q + (box * kBoxBytes >> 4);
      const uint64_t x = from_x + (kb * kBoxBytes >> 4);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int accumulate = kb > 0 || k > 0 ? 1 : 0;
        const uint64_t q_at = q + (k * (transposed ? kAdvance : 32) >> 4);
        const uint64_t x_at = x + (k * (kTall ? 32 : kAdvance) >> 4);
        if constexpr (kTall) {
          if (transposed) ptx::Wgmma<T, 64, 0, 1>(acc, x_at, q_at, accumulate);
          if (!transposed) ptx::Wgmma<T, 64, 0, 0>(acc, x_at, q_at, accumulate);
        } else {
          if (transposed) ptx::Wgmma<T, 64, 1, 1>(acc, q_at, x_at, accumulate);
          if (!transposed) ptx::Wgmma<T, 64, 0, 1>(acc, q_at, x_at, accumulate);
        }
      }
    }
    ptx::WgmmaCommit();
    ptx::WgmmaWait<0>();
  }

  // Strips of tiles go round among the warpgroups: while one rounds and stores, others multiply.
  __device__ __forceinline__ void Apply(int group) const {
    const GroupThread thread = ThisGroupThread();
    ptx::NamedBarrierArrive(kBarrierTiles, kGroups * 128 + 32);
    const float alpha = Load(params.alpha, matrix);
    const float beta = Load(params.beta, matrix);
    const uint32_t out = boxes + (kPlaceBoxes + kTileStages * kStrips + group) * kBoxBytes;
    // Every group takes part in every tile, so that no barrier is two phases ahead of one.
    for (int index = 0; index < Tiles(); ++index) {
      const int stage = index % kTileStages;
      const int strip = ((group - index * kStrips) % kGroups + kGroups) % kGroups;
      ptx::BarrierWait(tile_full + stage * 8, index / kTileStages & 1);
      if (strip >= kStrips) {
        if (thread.thread == 0) ptx::BarrierArriveRemote(tile_empty + stage * 8, kRank);
        continue;
      }
      float acc[32];
      if (kStrips > 3 && strip == 3) {
        MultiplyStrip<3 % kStrips>(acc, Tile(stage));
      } else if (kStrips > 2 && strip == 2) {
        MultiplyStrip<2 % kStrips>(acc, Tile(stage));
      } else if (kStrips > 1 && strip == 1) {
        MultiplyStrip<1 % kStrips>(acc, Tile(stage));
      } else {
        MultiplyStrip<0>(acc, Tile(stage));
      }
      if (params.adds_x) {
        AddBox<T>(acc, alpha, beta, Tile(stage) + strip * kBoxBytes, thread);
      } else {
#pragma unroll
        for (int i = 0; i < 32; ++i) acc[i] *= alpha;
      }
      uint32_t packed[16];
      RoundBox<T>(acc, 0, thread, packed);
      if (thread.thread == 0) ptx::BulkWaitRead<0>();  // the last one has left
      ptx::NamedBarrierSync(2 + group, 128);
      if (thread.thread == 0) ptx::BarrierArriveRemote(tile_empty + stage * 8, kRank);
      StageBox(packed, thread, out);
      ptx::FenceProxyAsync();
      ptx::NamedBarrierSync(2 + group, 128);
      if (thread.thread == 0) {
        const int tile = TileAt(index);
        ptx::TensorStore(&params.result, out, X(tile, strip), Y(tile, strip), matrix);
        ptx::BulkCommit();
      }
    }
    if (thread.thread == 0) ptx::BulkWaitRead<0>();
  }
};

}  // namespace dmuond::kernels::cuda

#endif  // DMUOND_KERNELS_CUDA_SMALL_APPLY_CUH_
