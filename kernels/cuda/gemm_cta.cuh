// What the parts of a product's kernel share: its parameters, the ring of stages in shared memory
// and the barriers around it. gemm_kernel.cuh is the kernel.
#ifndef DMUOND_KERNELS_CUDA_GEMM_CTA_CUH_
#define DMUOND_KERNELS_CUDA_GEMM_CTA_CUH_

#include "kernels/cuda/fragments.cuh"
#include "kernels/cuda/gemm.h"
#include "kernels/cuda/gemm_schedule.h"
#include "kernels/cuda/gemm_update.cuh"
#include "kernels/cuda/ptx.cuh"

namespace dmuond::kernels::cuda {

// What the device needs to know of a problem. Tensor maps have the 128-byte swizzle and boxes of
// 64 columns; c, c2 and d of 64 rows, a and b of GemmTraits' BoxA and BoxB.
struct DeviceProblem {
  CUtensorMap a;
  CUtensorMap a_block;  // boxes of 64 rows, of GemmLayout::kSS
  CUtensorMap b;
  CUtensorMap b_wide;  // boxes of GemmParams::wide_b
  CUtensorMap c;
  CUtensorMap c2;
  CUtensorMap d;
  DeviceScalar alpha;
  DeviceScalar beta;
  DeviceScalar beta2;
  float diagonal;
};

struct GemmParams {
  DeviceProblem inline_problem;   // the one problem, where there is only one
  const DeviceProblem* problems;  // several: in device memory
  const GemmJob* jobs;
  int wide_b;               // columns of b_wide's boxes: half of the widest tile's
  GemmUpdateParams update;  // of kernels that update
};

constexpr int kTileABytes = kTileM * kTileK * 2;
constexpr int kConsumers = 2;
constexpr int kThreads = 128 * (kConsumers + 1);

// Rows of a load's box of A; what lies M-major comes 64 wide, the width of the swizzle. Boxes of B
// are a unit wide, or half a tile where the layout allows it and that is more.
constexpr int BoxA(GemmLayout layout, PairSharing sharing) {
  return layout == GemmLayout::kTN || sharing == PairSharing::kRows ? 64 : kTileM;
}
constexpr int WideBoxB(GemmLayout layout, int tile_n) {
  const bool rows_of_b = layout == GemmLayout::kNT || layout == GemmLayout::kSS;
  return rows_of_b && tile_n > 2 * kTileUnit ? tile_n / 2 : kTileUnit;
}

// kTileN: the widest tile, 256, 128 or 64 columns.
template <int kTileN>
struct GemmTraits {
  static constexpr PairSharing kSharing = SharingOf(kTileN);
  // Of the narrowest two fit on a multiprocessor: while one ends, the next product's begins.
  static constexpr int kCtas = kTileN == 64 ? 2 : 1;
  static constexpr int kProducerRegisters = 56;
  static constexpr int kConsumerRegisters = kTileN == 64 ? 88 : 224;
  static constexpr int kStageBytes = kTileABytes + kTileN * kTileK * 2;
  static constexpr int kStages = kTileN == 128 ? 6 : 4;
  // Per consumer, of the mirror image.
  static constexpr int kMirrorBoxes = kTileN == 64 ? 1 : 2;
  static constexpr int kStagingBytes = kConsumers * kMirrorBoxes * kBoxBytes;
  static constexpr int kBarrierBytes = kStages * 2 * 8;
  // Per consumer a tile's scalars, and what an update needs of a matrix.
  static constexpr int kScalarBytes = sizeof(float4) + sizeof(MatrixUpdate);
  static constexpr int kSharedBytes =
      kStages * kStageBytes + kStagingBytes + kBarrierBytes + kConsumers * kScalarBytes;
};

// Position in the ring of stages.
template <int kStages>
struct RingPosition {
  uint32_t stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void Advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
  __device__ __forceinline__ void Skip(int stages) {
    stage = (stage + static_cast<uint32_t>(stages)) % kStages;  // the parity is not kept
  }
};

// Named barriers of a CTA: bar.sync ids. Consumers and senders meet at "free" (the boxes of mirror
// images may be written) and at "ready", one for each chunk of a tile.
constexpr uint32_t kBarrierAddend = 1;
constexpr uint32_t kBarrierFree = 3;
constexpr uint32_t kBarrierReady = 5;
constexpr uint32_t kBarrierThreads = 128 + 32;
__device__ __forceinline__ uint32_t ReadyBarrier(int consumer, int chunk) {
  return kBarrierReady + consumer * 4 + chunk;
}

// Shared memory and jobs of a CTA, as its parts see them.
template <int kTileN>
struct GemmCta {
  using Traits = GemmTraits<kTileN>;
  using Position = RingPosition<Traits::kStages>;
  static constexpr int kUnit = kTileUnit;

  const GemmParams& params;
  uint32_t stages;  // shared memory addresses
  uint32_t staging;
  uint32_t full;
  uint32_t empty;
  uint32_t scalars;
  uint32_t rank;

  __device__ GemmCta(const GemmParams& kernel_params, uint32_t shared) : params(kernel_params) {
    if (shared % 1024 != 0) __trap();  // what the swizzle asks for
    stages = shared;
    staging = stages + Traits::kStages * Traits::kStageBytes;
    full = staging + Traits::kStagingBytes;
    empty = full + Traits::kStages * 8;
    scalars = empty + Traits::kStages * 8;
    rank = ptx::ClusterRank();
  }

  __device__ __forceinline__ uint32_t UpdateAt(int consumer) const {
    return scalars + kConsumers * sizeof(float4) + consumer * sizeof(MatrixUpdate);
  }

  __device__ void InitBarriers() const {
    for (int s = 0; s < Traits::kStages; ++s) {
      ptx::BarrierInit(full + s * 8, 1);
      ptx::BarrierInit(empty + s * 8, kConsumers * 2);  // both CTAs' consumers
    }
    ptx::FenceBarrierInit();
  }

  __device__ const DeviceProblem& Problem(int index) const {
    return params.problems == nullptr ? params.inline_problem : params.problems[index];
  }
  __device__ GemmJob Job(int turn) const {
    const uint32_t at = (turn * ptx::ClusterCount() + ptx::ClusterId()) * 2 + rank;
    const int4 words = __ldg(reinterpret_cast<const int4*>(params.jobs + at));
    return *reinterpret_cast<const GemmJob*>(&words);
  }

  // Where chunk `chunk` of a consumer's rows lies in a stage of the ring, and its mirror image. A
  // stage of 48 KB has room for one mirror image a consumer behind the four boxes of D.
  __device__ __forceinline__ uint32_t ChunkBox(uint32_t stage, int consumer, int chunk) const {
    return stages + stage * Traits::kStageBytes + (chunk % 2 * 2 + consumer) * kBoxBytes;
  }
  __device__ __forceinline__ uint32_t MirrorBox(uint32_t stage, int consumer, int chunk) const {
    const uint32_t own = staging + consumer * Traits::kMirrorBoxes * kBoxBytes;
    if (kTileN <= 128) return own + chunk * kBoxBytes;
    if (chunk % 2 == 1) return own + chunk / 2 * kBoxBytes;
    return stages + stage * Traits::kStageBytes + (4 + consumer) * kBoxBytes;
  }
  // Whether a chunk's mirror image lies in the ring, beside D; the others do not hold up a stage.
  __device__ __forceinline__ static constexpr bool MirrorInRing(int chunk) {
    return kTileN == 256 && chunk % 2 == 0;
  }

  // First row and column of a chunk of a consumer's rows.
  struct Corner {
    int row;
    int col;
  };
  __device__ __forceinline__ static Corner GuestAt(const GemmJob& job) {
    const int block = (job.guest - 1) % 3;
    const int first = (job.guest - 1) / 3 * kTileM;
    return {first + (block > 0 ? 64 : 0), first + (block > 1 ? 64 : 0)};
  }
  __device__ __forceinline__ static Corner ChunkAt(const GemmJob& job, int consumer, int chunk) {
    if (HasGuest(job) && consumer == 0 && chunk == 1) return GuestAt(job);
    return {job.row * kTileM + consumer * 64, job.col * kUnit + chunk * 64};
  }
  __device__ __forceinline__ static bool HasGuest(const GemmJob& job) {
    return kTileN == 2 * kUnit && job.guest != 0;
  }

  // An operand in the lower form turns at a step along k: from there on, what a tile needs of it
  // lies right of the diagonal, and is read from the other side. A turns later than B, or with it
  // where A's rows come from B's boxes.
  struct Turns {
    int a;
    int b;
  };
  __device__ __forceinline__ static Turns TurnsOf(const GemmJob& job) {
    const int steps = job.doubled ? 2 : 1;
    const int end = job.stages * steps;
    const int b = min(end, (job.col + kBandBlocks) / steps * steps);
    return {job.a_in_b ? b : min(end, job.row * (kTileM / kUnit) + kBandBlocks + 1), b};
  }
  // Whether the mirror image of a block of 64 x 64 of a symmetric D is stored.
  __device__ __forceinline__ static bool StoresMirror(bool store_lower, int row, int col) {
    return !store_lower || row - col <= kBandBlocks * 64;
  }

  // Columns that a consumer's 64 rows need: none right of the diagonal.
  __device__ __forceinline__ static int Columns(const GemmJob& job, int consumer) {
    const int columns = job.width * kUnit;
    if (!job.symmetric || HasGuest(job)) return columns;
    return min(columns, job.row * kTileM + consumer * 64 + 64 - job.col * kUnit);
  }
};

}  // namespace dmuond::kernels::cuda

#endif  // DMUOND_KERNELS_CUDA_GEMM_CTA_CUH_
