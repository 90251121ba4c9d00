// What the parts of a small round's kernel share: its parameters, where boxes lie in shared memory,
// and the barriers. small_kernel.cuh is the kernel.
#ifndef DMUOND_KERNELS_CUDA_SMALL_CTA_CUH_
#define DMUOND_KERNELS_CUDA_SMALL_CTA_CUH_

#include "kernels/cuda/fragments.cuh"
#include "kernels/cuda/gemm.h"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/small_plan.h"

namespace dmuond::kernels::cuda {

struct SmallParams {
  CUtensorMap x;  // boxes of 64 x 64
  // Where the round's result goes: alpha * Q * X + beta * X if `applies`, else Q.
  CUtensorMap result;
  DeviceScalar gram_alpha;
  DeviceScalar alpha;
  DeviceScalar beta;
  bool applies;
  bool adds_x;  // beta is not 0
  int steps;    // of 64 along the longer side of X
  int ops;
  SmallOp op[kSmallOpsMax + 1];  // op[0]: the Gram matrix
};

constexpr int kSmallBoxes = 2 * kPlaceBoxes + kPartialBoxes;
constexpr int kSmallStages = 7;  // of the ring that X comes through, in the same memory
constexpr int kSmallStageBytes = 4 * kBoxBytes;
// X comes a second time, by tiles of 64 along its longer side, behind Q in the first place; results
// leave from a box of each warpgroup after them.
__host__ __device__ constexpr int ApplyStages(int strips) { return strips == 1 ? 8 : 12 / strips; }
constexpr int kApplyStagesMax = 8;
constexpr int kSmallBarriers = 2 * kSmallStages + 2 * kApplyStagesMax + 2;
constexpr int kSmallSharedBytes = kSmallBoxes * kBoxBytes + kSmallBarriers * 8;
static_assert(kSmallStages * kSmallStageBytes <= kSmallBoxes * kBoxBytes);

// CTAs that share a matrix.
__host__ __device__ constexpr int SmallCtas(int strips) { return strips > 2 ? 2 : 1; }
// Warpgroups of a CTA that compute a box of each product: every box of the lower triangle has one.
__host__ __device__ constexpr int SmallGroups(int strips) {
  return strips * (strips + 1) / 2 / SmallCtas(strips);
}
__host__ __device__ constexpr int SmallThreads(int strips) {
  return (SmallGroups(strips) + 1) * 128;
}
static_assert(kPlaceBoxes + 4 * ApplyStages(4) + SmallGroups(4) <= kSmallBoxes);
static_assert(kPlaceBoxes + 3 * ApplyStages(3) + SmallGroups(3) <= kSmallBoxes);
static_assert(kPlaceBoxes + 2 * ApplyStages(2) + SmallGroups(2) <= kSmallBoxes);
struct SmallBox {
  int row;
  int col;
};
__host__ __device__ constexpr SmallBox SmallBoxOf(int strips, int rank, int group) {
  if (strips == 4) {
    constexpr SmallBox kBoxes[2][5] = {{{3, 0}, {3, 1}, {3, 2}, {3, 3}, {0, 0}},
                                       {{2, 0}, {2, 1}, {2, 2}, {1, 0}, {1, 1}}};
    return kBoxes[rank][group];
  }
  if (strips == 3 && rank == 0) return {2, group};
  // Two rows of boxes.
  return group == 0 ? SmallBox{0, 0} : SmallBox{1, group - 1};
}

// Where box (row, col) of the lower triangle lies in a place. Boxes that a CTA does not need of a
// left operand come last: the partial place has no room for them.
constexpr int kNeededBoxes = 7;
__host__ __device__ constexpr int SmallBoxIndex(int strips, int rank, int row, int col) {
  constexpr int kFour[2][10] = {{0, 1, 7, 2, 8, 9, 3, 4, 5, 6}, {7, 0, 1, 2, 3, 4, 8, 5, 6, 9}};
  const int at = row * (row + 1) / 2 + col;
  return strips == 4 ? kFour[rank][at] : at;
}

// Named barriers: 1 is of all warpgroups, 2 … of each; at this one the producer learns that tiles
// of X may take the place of the last product's operands.
constexpr uint32_t kBarrierTiles = 8;

// Shared memory of a CTA, as its parts see it.
template <int kStrips, bool kTall>
struct SmallCta {
  static constexpr int kCtas = SmallCtas(kStrips);
  static constexpr int kGroups = SmallGroups(kStrips);
  static constexpr int kTileStages = ApplyStages(kStrips);
  static constexpr int kTileBytes = kStrips * kBoxBytes;

  const SmallParams& params;
  uint32_t boxes;  // shared memory addresses
  uint32_t full;
  uint32_t empty;
  uint32_t tile_full;
  uint32_t tile_empty;
  uint32_t exchanged;
  uint32_t moved;
  uint32_t rank;
  int matrix;

  __device__ SmallCta(const SmallParams& kernel_params, uint32_t shared)
      : params(kernel_params), boxes(shared) {
    if (shared % 1024 != 0) __trap();  // what the swizzle asks for
    full = boxes + kSmallBoxes * kBoxBytes;
    empty = full + kSmallStages * 8;
    tile_full = empty + kSmallStages * 8;
    tile_empty = tile_full + kApplyStagesMax * 8;
    exchanged = tile_empty + kApplyStagesMax * 8;
    moved = exchanged + 8;
    rank = kCtas == 2 ? ptx::ClusterRank() : 0;
    matrix = static_cast<int>(blockIdx.x) / kCtas;
  }

  __device__ void InitBarriers() const {
    for (int s = 0; s < kSmallStages; ++s) {
      ptx::BarrierInit(full + s * 8, 1);
      ptx::BarrierInit(empty + s * 8, kGroups * kCtas);
    }
    for (int s = 0; s < kTileStages; ++s) {
      ptx::BarrierInit(tile_full + s * 8, 1);
      ptx::BarrierInit(tile_empty + s * 8, kGroups);
    }
    ptx::BarrierInit(exchanged, 1);
    ptx::BarrierInit(moved, 1);
    ptx::FenceBarrierInit();
  }

  // Box `panel` of the slice of X at `i` along its longer side.
  __device__ __forceinline__ static int X(int i, int panel) { return (kTall ? panel : i) * 64; }
  __device__ __forceinline__ static int Y(int i, int panel) { return (kTall ? i : panel) * 64; }

  // The CTA's tiles for the product with X: every one, or every other one. The last come first:
  // they are in L2 since the Gram matrix, and the next round begins with what is written last.
  __device__ __forceinline__ int TileAt(int index) const {
    return params.steps - 1 - (index * kCtas + static_cast<int>(rank));
  }
  __device__ __forceinline__ int Tiles() const {
    return (params.steps - static_cast<int>(rank) + kCtas - 1) / kCtas;
  }
  __device__ __forceinline__ uint32_t Tile(int stage) const {
    return boxes + kPlaceBoxes * kBoxBytes + stage * kTileBytes;
  }
};

}  // namespace dmuond::kernels::cuda

#endif  // DMUOND_KERNELS_CUDA_SMALL_CTA_CUH_
