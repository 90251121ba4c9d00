// The consumers of a product's kernel: a tile is multiplied while its stages come, then the addends
// are read from the ring and D is put in their place, or applied.
#ifndef DMUOND_KERNELS_CUDA_GEMM_CONSUMER_CUH_
#define DMUOND_KERNELS_CUDA_GEMM_CONSUMER_CUH_

#include "kernels/cuda/gemm_cta.cuh"

namespace dmuond::kernels::cuda {

// A warpgroup. kUpdate: D is not stored but applied to masters and weights (gemm_update.cuh).
template <typename T, int kTileN, GemmLayout kLayout, bool kUpdate>
struct GemmConsumer : GemmCta<kTileN> {
  using Cta = GemmCta<kTileN>;
  using Cta::ChunkBox;
  using Cta::Columns;
  using Cta::empty;
  using Cta::full;
  using Cta::Job;
  using Cta::kUnit;
  using Cta::MirrorBox;
  using Cta::params;
  using Cta::scalars;
  using Cta::stages;
  using Cta::UpdateAt;
  using typename Cta::Position;
  using typename Cta::Traits;
  static constexpr bool kAIsMMajor = kLayout == GemmLayout::kTN;
  static constexpr bool kBIsNMajor = kLayout == GemmLayout::kNN || kLayout == GemmLayout::kTN;
  static constexpr int kAccumulators = kTileN / 2;  // per thread: 64 x kTileN over 128 threads
  static constexpr bool kReadsLower = kLayout == GemmLayout::kSS;

  struct Place : GroupThread {
    int consumer;  // 0 or 1: rows 0..63 or 64..127 of the tile
  };

  __device__ __forceinline__ void Release(const Place& place, uint32_t stage) const {
    // One thread for each CTA of the pair.
    if (place.thread == 0) ptx::BarrierArriveRemote(empty + stage * 8, 0);
    if (place.thread == 32) ptx::BarrierArriveRemote(empty + stage * 8, 1);
  }

  // `second`: how far behind a stage's first step along k the second lies, where there are two.
  // kAMajor, kBMajor: of what the stage holds, as kAIsMMajor and kBIsNMajor.
  template <int kN, int kSteps, bool kAMajor, bool kBMajor>
  __device__ __forceinline__ void MultiplyStage(float (&acc)[kAccumulators], uint32_t a_offset,
                                                uint32_t second, uint32_t stage,
                                                int accumulate) const {
    const uint32_t at = stages + stage * Traits::kStageBytes;
    const uint64_t desc_a = ptx::MatrixDescriptor(at + a_offset, kBoxBytes);
    const uint64_t desc_b = ptx::MatrixDescriptor(at + kTileABytes, kBoxBytes);
    ptx::WgmmaFence();
    MultiplyStep<kN, kAMajor, kBMajor>(acc, desc_a, desc_b, accumulate);
    if constexpr (kSteps == 2) {
      MultiplyStep<kN, kAMajor, kBMajor>(acc, desc_a + (second >> 4), desc_b + (second >> 4), 1);
    }
    ptx::WgmmaCommit();
  }

  template <int kN, bool kAMajor, bool kBMajor>
  __device__ __forceinline__ static void MultiplyStep(float (&acc)[kAccumulators], uint64_t desc_a,
                                                      uint64_t desc_b, int accumulate) {
    // 16 along k: 32 bytes within a row of 128, or 16 rows of 128 bytes.
    constexpr uint64_t kAdvanceA = (kAMajor ? 2048 : 32) >> 4;
    constexpr uint64_t kAdvanceB = (kBMajor ? 2048 : 32) >> 4;
#pragma unroll
    for (int i = 0; i < kTileK / 16; ++i) {
      ptx::Wgmma<T, kN, kAMajor ? 1 : 0, kBMajor ? 1 : 0>(
          acc, desc_a + i * kAdvanceA, desc_b + i * kAdvanceB, i > 0 ? 1 : accumulate);
    }
  }

  // Where this consumer's 64 rows of A lie in a stage.
  __device__ __forceinline__ static uint32_t OffsetOfA(const GemmJob& job, const Place& place) {
    const int first = job.a_in_b ? job.row * (kTileM / kUnit) - job.col : 0;
    return (job.a_in_b ? kTileABytes : 0) + (first + place.consumer) * kBoxBytes;
  }

  // What the epilogue needs of a problem and a job, in registers.
  struct Tile {
    float alpha;
    float beta;
    float beta2;
    float diagonal;
    int row;  // of the consumer's 64 rows
    int col;
    bool symmetric;
    bool store_lower;
    bool has_c;
    bool has_c2;
    bool store;
    int width;  // of the job, in chunks: this consumer may need fewer
  };

  // The scalars come from the sender: their way from device memory is long.
  __device__ __forceinline__ Tile MakeTile(const GemmJob& job, const Place& place) const {
    Tile tile;
    tile.row = job.row * kTileM + place.consumer * 64;
    tile.col = job.col * kUnit;
    tile.symmetric = job.symmetric;
    tile.store_lower = job.store_lower;
    tile.has_c = job.has_c;
    tile.has_c2 = job.has_c2;
    tile.store = job.store;
    tile.width = job.width;
    const float4 values = ptx::LoadShared4(scalars + place.consumer * sizeof(float4));
    tile.alpha = values.x;
    tile.beta = values.y;
    tile.beta2 = values.z;
    tile.diagonal = values.w;
    return tile;
  }

  // Two chunks of 64 columns, or one: adds C from its boxes in the ring, puts D in their place and
  // the mirror images into boxes of their own.
  template <int kCount, bool kLast>
  __device__ __forceinline__ void StageChunks(float* x, float scale, const Tile& tile,
                                              const Place& place, int first, uint32_t stage) const {
    if (tile.has_c) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        AddBox<T>(x + i * 32, scale, tile.beta, ChunkBox(stage, place.consumer, first + i), place);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kCount * 32; ++i) x[i] *= scale;
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int chunk = first + i;
      const uint32_t mirror = MirrorBox(stage, place.consumer, chunk);
      // Nothing lies right of the diagonal: only the last chunk can be on it.
      const bool on_diagonal =
          kLast && i + 1 == kCount && tile.symmetric && tile.col + chunk * 64 == tile.row;
      uint32_t packed[16];
      RoundBox<T>(x + i * 32, on_diagonal ? tile.diagonal : 0.0F, place, packed);
      if (on_diagonal) {
        StageDiagonal(packed, place, mirror);
      } else {
        StageBox(packed, place, ChunkBox(stage, place.consumer, chunk));
        if (tile.symmetric &&
            Cta::StoresMirror(tile.store_lower, tile.row, tile.col + chunk * 64)) {
          StageMirror(packed, place, mirror);
        }
      }
      ptx::FenceProxyAsync();
      ptx::NamedBarrierArrive(ReadyBarrier(place.consumer, chunk), kBarrierThreads);
    }
  }

  // A stage of the ring with addends of columns that this consumer does not need.
  __device__ __forceinline__ void SkipChunks(const Tile& tile, const Place& place, Position& at,
                                             int first) const {
    if (tile.has_c2) {
      ptx::BarrierWait(full + at.stage * 8, at.parity);
      Release(place, at.stage);
      at.Advance();
    }
    ptx::BarrierWait(full + at.stage * 8, at.parity);
    ptx::NamedBarrierArrive(ReadyBarrier(place.consumer, first), kBarrierThreads);
    at.Advance();
  }

  template <int kN>
  __device__ __forceinline__ void StageTile(float (&acc)[kAccumulators], const GemmJob& job,
                                            const Place& place, Position& at) const {
    constexpr int kChunks = kN / 64;
    // The last tile's mirror images have been sent, this one's scalars are there.
    ptx::NamedBarrierSync(kBarrierFree + place.consumer, kBarrierThreads);
    const Tile tile = MakeTile(job, place);
#pragma unroll
    for (int first = 0; first < kChunks; first += 2) {
      constexpr bool kBoth = kChunks > 1;
      const bool both = first + 1 < kChunks;
      float scale = tile.alpha;
      if (tile.has_c2) {
        const uint32_t from = stages + at.stage * Traits::kStageBytes + place.consumer * kBoxBytes;
        ptx::BarrierWait(full + at.stage * 8, at.parity);
        AddBox<T>(acc + first * 32, scale, tile.beta2, from, place);
        if constexpr (kBoth) {
          if (both)
            AddBox<T>(acc + first * 32 + 32, scale, tile.beta2, from + 2 * kBoxBytes, place);
        }
        scale = 1;
        ptx::NamedBarrierSync(kBarrierAddend + place.consumer, 128);
        Release(place, at.stage);
        at.Advance();
      }
      ptx::BarrierWait(full + at.stage * 8, at.parity);
      float* const x = acc + first * 32;
      if (!tile.store) {
        ptx::NamedBarrierArrive(ReadyBarrier(place.consumer, first), kBarrierThreads);
      } else if (first + 2 < kChunks) {
        StageChunks<2, false>(x, scale, tile, place, first, at.stage);
      } else if (both) {
        StageChunks<2, true>(x, scale, tile, place, first, at.stage);
      } else {
        StageChunks<1, true>(x, scale, tile, place, first, at.stage);
      }
      at.Advance();
    }
    if ((kChunks + 1) / 2 < (tile.width + 1) / 2)
      SkipChunks(tile, place, at, (kChunks + 1) / 2 * 2);
  }

  // As StageTile(), of a product that updates. A stage of the ring is given back as soon as C has
  // been read from it; a chunk's masters are asked for while the one before it is worked on.
  template <int kN>
  __device__ __forceinline__ void UpdateTile(float (&acc)[kAccumulators], const GemmJob& job,
                                             const Place& place, Position& at) const {
    constexpr int kChunks = kN / 64;
    ptx::NamedBarrierSync(kBarrierFree + place.consumer, kBarrierThreads);
    const Tile tile = MakeTile(job, place);
    UpdateEpilogue<T> epilogue(params.update, LoadMatrixUpdate(UpdateAt(place.consumer)), tile.row,
                               tile.col, place.warp, place.lane);
    // Of three halves of chunks: two are on their way while one is worked on.
    typename UpdateEpilogue<T>::Masters masters[3];
    const auto load = [&](int half) {
      if (half < 2 * kChunks) epilogue.LoadMasters(half / 2, half % 2, masters[half % 3]);
    };
    if (tile.store) {
      load(0);
      load(1);
    }
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      float* const x = acc + chunk * 32;
      if (chunk % 2 == 0) ptx::BarrierWait(full + at.stage * 8, at.parity);
      if (tile.has_c) {
        AddBox<T>(x, tile.alpha, tile.beta, ChunkBox(at.stage, place.consumer, chunk), place);
      } else {
#pragma unroll
        for (int i = 0; i < 32; ++i) x[i] *= tile.alpha;
      }
      uint32_t packed[16];
      RoundBox<T>(x, 0, place, packed);
      if (tile.store || chunk % 2 == 0) {
        ptx::NamedBarrierArrive(ReadyBarrier(place.consumer, chunk), kBarrierThreads);
      }
      if (chunk % 2 == 1 || chunk + 1 == kChunks) at.Advance();
      if (!tile.store) continue;
#pragma unroll
      for (int half = 2 * chunk; half < 2 * chunk + 2; ++half) {
        load(half + 2);
        epilogue.Apply(chunk, half % 2, packed, masters[half % 3]);
      }
    }
    if (tile.store && params.update.squares != nullptr) {
      epilogue.AddSquares(params.update.squares + job.batch, place.lane);
    }
  }

  // Stages `i` to `end` of a tile. The one before is released when this one's products are under
  // way.
  template <int kN, int kSteps, bool kAMajor, bool kBMajor>
  __device__ __forceinline__ void MultiplyStages(float (&acc)[kAccumulators], const GemmJob& job,
                                                 const Place& place, Position& at, int& i, int end,
                                                 uint32_t& last_stage) const {
    const uint32_t a_offset = OffsetOfA(job, place);
    const uint32_t second = job.width * kBoxBytes;
    for (; i < end; ++i) {
      ptx::BarrierWait(full + at.stage * 8, at.parity);
      if constexpr (kN > 0) {
        MultiplyStage<kN, kSteps, kAMajor, kBMajor>(acc, a_offset, second, at.stage, i > 0 ? 1 : 0);
      }
      if (i > 0) {
        if constexpr (kN > 0) ptx::WgmmaWait<1>();
        Release(place, last_stage);
      }
      last_stage = at.stage;
      at.Advance();
    }
  }

  template <int kN, int kSteps>
  __device__ __forceinline__ void MultiplyTile(float (&acc)[kAccumulators], const GemmJob& job,
                                               const Place& place, Position& at) const {
    uint32_t last_stage = 0;
    int i = 0;
    if constexpr (kReadsLower) {
      const auto turns = Cta::TurnsOf(job);
      MultiplyStages<kN, kSteps, false, false>(acc, job, place, at, i, turns.b / kSteps,
                                               last_stage);
      MultiplyStages<kN, kSteps, false, true>(acc, job, place, at, i, turns.a / kSteps, last_stage);
      MultiplyStages<kN, kSteps, true, true>(acc, job, place, at, i, job.stages, last_stage);
    } else {
      MultiplyStages<kN, kSteps, kAIsMMajor, kBIsNMajor>(acc, job, place, at, i, job.stages,
                                                         last_stage);
    }
    if constexpr (kN > 0) ptx::WgmmaWait<0>();
    Release(place, last_stage);
  }

  // The upper half of a tile of the diagonal with a guest: two products of 64 columns.
  __device__ __forceinline__ void ConsumeWithGuest(const GemmJob& job, const Place& place,
                                                   Position& at) const {
    float own[kAccumulators / 2];
    float guest[kAccumulators / 2];
    const auto [row, col] = Cta::GuestAt(job);
    const uint32_t other = row == col ? 0 : kBoxBytes;
    uint32_t last_stage = 0;
    for (int i = 0; i < job.stages; ++i) {
      ptx::BarrierWait(full + at.stage * 8, at.parity);
      const uint32_t stage = stages + at.stage * Traits::kStageBytes;
      const uint64_t desc_a = ptx::MatrixDescriptor(stage, kBoxBytes);
      const uint64_t desc_b = ptx::MatrixDescriptor(stage + other, kBoxBytes);
      const uint64_t desc_own = ptx::MatrixDescriptor(stage + kTileABytes, kBoxBytes);
      ptx::WgmmaFence();
      MultiplyHalves(own, guest, desc_own, desc_a, desc_b, i > 0 ? 1 : 0);
      ptx::WgmmaCommit();
      if (i > 0) {
        ptx::WgmmaWait<1>();
        Release(place, last_stage);
      }
      last_stage = at.stage;
      at.Advance();
    }
    ptx::WgmmaWait<0>();
    Release(place, last_stage);

    ptx::NamedBarrierSync(kBarrierFree + place.consumer, kBarrierThreads);
    const Tile tile = MakeTile(job, place);
    float scale = tile.alpha;
    if (tile.has_c2) {
      const uint32_t from = stages + at.stage * Traits::kStageBytes + place.consumer * kBoxBytes;
      ptx::BarrierWait(full + at.stage * 8, at.parity);
      AddBox<T>(own, scale, tile.beta2, from, place);
      AddBox<T>(guest, scale, tile.beta2, from + 2 * kBoxBytes, place);
      scale = 1;
      ptx::NamedBarrierSync(kBarrierAddend + place.consumer, 128);
      Release(place, at.stage);
      at.Advance();
    }
    ptx::BarrierWait(full + at.stage * 8, at.parity);
    if (!tile.store) {
      ptx::NamedBarrierArrive(ReadyBarrier(place.consumer, 0), kBarrierThreads);
      at.Advance();
      return;
    }
    StageChunks<1, true>(own, scale, tile, place, 0, at.stage);
    Tile visiting = tile;
    visiting.row = row;
    visiting.col = col - 64;  // its chunk is the second
    StageChunks<1, true>(guest, scale, visiting, place, 1, at.stage);
    at.Advance();
  }

  __device__ __forceinline__ static void MultiplyHalves(float (&own)[kAccumulators / 2],
                                                        float (&guest)[kAccumulators / 2],
                                                        uint64_t desc_own, uint64_t desc_a,
                                                        uint64_t desc_b, int accumulate) {
    // As MultiplyStep().
    constexpr uint64_t kAdvance = (kBIsNMajor ? 2048 : 32) >> 4;
#pragma unroll
    for (int i = 0; i < kTileK / 16; ++i) {
      ptx::Wgmma<T, 64, kAIsMMajor ? 1 : 0, kBIsNMajor ? 1 : 0>(
          own, desc_own + i * kAdvance, desc_own + i * kAdvance, i > 0 ? 1 : accumulate);
      ptx::Wgmma<T, 64, kAIsMMajor ? 1 : 0, kBIsNMajor ? 1 : 0>(
          guest, desc_a + i * kAdvance, desc_b + i * kAdvance, i > 0 ? 1 : accumulate);
    }
  }

  // kSteps: along k, in each stage.
  template <int kN, int kSteps = 1>
  __device__ __forceinline__ void ConsumeTile(const GemmJob& job, const Place& place,
                                              Position& at) const {
    float acc[kAccumulators];
    MultiplyTile<kN, kSteps>(acc, job, place, at);
    if constexpr (kUpdate) {
      UpdateTile<kN>(acc, job, place, at);
    } else {
      StageTile<kN>(acc, job, place, at);
    }
  }

  __device__ __forceinline__ void Consume() const {
    Place place{ThisGroupThread(), static_cast<int>(threadIdx.x / 128) - 1};
    Position at;
    GemmJob job = Job(0);
    ptx::WaitForPrevious();
    for (int turn = 1; job.width != 0; ++turn) {
      const GemmJob next = Job(turn);
      const int columns = Columns(job, place.consumer);
      if (!kUpdate && Cta::HasGuest(job) && place.consumer == 0) {
        if constexpr (kTileN == 128 && !kUpdate && kLayout != GemmLayout::kNN) {
          ConsumeWithGuest(job, place, at);
        }
      } else if (columns == kTileN) {
        ConsumeTile<kTileN>(job, place, at);
      } else if (kTileN > 64 && columns == 64) {
        if (!kUpdate && kTileN == 256 && job.doubled) {
          ConsumeTile<64, 2>(job, place, at);
        } else {
          ConsumeTile<64>(job, place, at);
        }
      } else if (!kUpdate && columns == 0) {
        ConsumeTile<0>(job, place, at);
      } else if constexpr (kTileN == 256) {
        if (columns == 192) {
          ConsumeTile<192>(job, place, at);
        } else if (!kUpdate && job.doubled) {
          ConsumeTile<128, 2>(job, place, at);
        } else {
          ConsumeTile<128>(job, place, at);
        }
      }
      job = next;
    }
  }
};

}  // namespace dmuond::kernels::cuda

#endif  // DMUOND_KERNELS_CUDA_GEMM_CONSUMER_CUH_
